from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from effml.report import bar_chart, figure_png, line_chart, save_figure, scatter_chart
from effml.report._labels import spread_apart
from effml.report.figures import panels

X = np.arange(1.0, 21.0)


def picture(figure):
    return imread(io.BytesIO(figure_png(figure)), format="png")


def test_the_line_is_the_mean_and_the_band_spans_the_seeds():
    y = np.stack([X, X + 2.0, X + 4.0])
    figure = line_chart({"a": (X, y)}, xlabel="step", ylabel="loss")
    (axes,) = figure.axes
    np.testing.assert_allclose(axes.lines[0].get_ydata(), X + 2.0)
    band = axes.collections[0].get_paths()[0].vertices
    at_start = band[np.isclose(band[:, 0], 1.0), 1]
    assert (at_start.min(), at_start.max()) == (1.0, 5.0)


def test_a_given_spread_is_a_symmetric_band():
    figure = line_chart({"a": (X, X, np.full_like(X, 0.5))}, xlabel="x", ylabel="y")
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    at_start = band[np.isclose(band[:, 0], 1.0), 1]
    assert (at_start.min(), at_start.max()) == (0.5, 1.5)


def test_lines_that_end_together_are_named_at_their_ends_without_overlap():
    figure = line_chart(
        {name: (X, 1.0 / X + 1e-3 * i) for i, name in enumerate("abcd")}, xlabel="x", ylabel="y"
    )
    picture(figure)
    (axes,) = figure.axes
    assert axes.get_legend() is None
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the leader lines
    assert [text.get_text() for text in axes.texts] == ["a", "b", "c", "d"]
    assert all(low.y1 <= high.y0 + 1.0 for low, high in itertools.pairwise(boxes))
    assert all(box.y0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_lines_that_end_apart_get_a_legend():
    figure = line_chart({"a": (X, X), "b": (X[:9], X[:9])}, xlabel="x", ylabel="y")
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["a", "b"]


def test_a_diverged_series_is_named_as_such_and_gaps_do_not_hurt():
    gap = np.where(X > 10, np.nan, X)
    figure = line_chart({"a": (X, gap), "b": (X, np.full_like(X, np.nan))}, xlabel="x", ylabel="y")
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names == ["a", "b (no finite value)"]
    figure = line_chart({"a": (X, gap), "b": (X, X)}, xlabel="x", ylabel="y")
    assert picture(figure).shape[2] == 4


def test_axes_are_named_and_scaled():
    figure = line_chart(
        {"a": (X, X)},
        xlabel="step",
        ylabel="loss (nats)",
        title="T",
        log_x=True,
        log_y=True,
        ylim=(1.0, None),
    )
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title(loc="left")) == ("step", "loss (nats)", "T")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_ylim()[0] == 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((X,), r"series\['a'\] must be \(x, y\)"),
        ((X, X[:3]), r"series\['a'\] has x \(20,\), y \(3,\)"),
        ((X, X, X[:3]), r"series\['a'\] has spread \(3,\)"),
        (([], []), r"series\['a'\] has x \(0,\)"),
    ],
)
def test_a_series_of_the_wrong_shape_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        line_chart({"a": values}, xlabel="x", ylabel="y")


def test_charts_without_data_are_errors():
    with pytest.raises(ValueError, match="series is empty"):
        line_chart({}, xlabel="x", ylabel="y")
    with pytest.raises(ValueError, match="points is empty"):
        scatter_chart({}, xlabel="x", ylabel="y")
    with pytest.raises(ValueError, match="values is empty"):
        bar_chart({}, xlabel="x")
    with pytest.raises(ValueError, match="rows=1"):
        panels(0)


@pytest.mark.parametrize("seed", range(6))
def test_names_of_points_do_not_overlap_each_other_or_leave_the_frame(seed):
    draws = np.random.default_rng(seed)
    points = {f"method {i}": (float(10 ** draws.uniform(0, 2)), float(draws.normal())) for i in range(8)}
    points["near"] = (points["method 0"][0] * 1.05, points["method 0"][1])
    figure = scatter_chart(points, xlabel="bytes", ylabel="loss", log_x=True)
    picture(figure)
    (axes,) = figure.axes
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the leader lines
    assert len(boxes) == len(points)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ((0.0, 1.0), r"points\['a'\] has x=0.0"),
        ((1.0, float("nan")), r"points\['a'\]=.* must be finite"),
        ((1.0,), "must be finite"),
    ],
)
def test_a_point_that_cannot_be_shown_is_named(point, message):
    with pytest.raises(ValueError, match=message):
        scatter_chart({"a": point}, xlabel="x", ylabel="y", log_x=True)


def test_bars_have_their_length_and_number_and_the_first_is_on_top():
    figure = bar_chart(
        {"a": 2.0, "b": (4.0, 0.5), "c": float("nan")}, xlabel="seconds", reference=("goal", 3.0)
    )
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [2.0, 4.0, 0.0]
    assert axes.yaxis_inverted()
    assert [text.get_text() for text in axes.texts] == ["2.00", "4.00 ± 0.50", "NaN", "goal"]


def test_only_highlighted_bars_are_coloured():
    figure = bar_chart({"body": 2.0, "head": 1.0, "tail": 1.0}, xlabel="noise", highlight=("head",))
    body, head, tail = (bar.get_facecolor() for bar in figure.axes[0].patches)
    assert body == tail != head
    figure = bar_chart({"body": 2.0, "head": 1.0}, xlabel="noise")
    body, head = (bar.get_facecolor() for bar in figure.axes[0].patches)
    assert body != head


def test_a_png_is_a_picture_of_the_right_size_and_repeats_exactly(tmp_path):
    figure = line_chart({"a": (X, X)}, xlabel="x", ylabel="y")
    height, width, _ = picture(figure).shape
    assert (width, height) == (1080, 720)
    again = line_chart({"a": (X, X)}, xlabel="x", ylabel="y")
    assert figure_png(again) == figure_png(figure)
    assert save_figure(figure, tmp_path / "new" / "f.png").read_bytes() == figure_png(figure)


def test_charts_share_one_figure_through_panels():
    figure, (left, right) = panels(2)
    assert line_chart({"a": (X, X)}, xlabel="x", ylabel="y", axes=left) is figure
    scatter_chart({"a": (1, 2)}, xlabel="x", ylabel="y", axes=right)
    assert [len(axes.lines) > 0 for axes in figure.axes] == [True, True]


def test_drawing_changes_no_global_setting():
    import matplotlib

    with matplotlib.rc_context({"font.size": 3.0}):
        before = dict(matplotlib.rcParams)
        picture(bar_chart({"a": 1.0}, xlabel="x"))
        picture(scatter_chart({"a": (1.0, 1.0)}, xlabel="x", ylabel="y"))
        picture(line_chart({"a": (X, X), "b": (X, X)}, xlabel="x", ylabel="y"))
        assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("seed", range(5))
def test_spread_places_keep_order_gap_and_frame(seed):
    wanted = sorted(np.random.default_rng(seed).uniform(0, 100, 6))
    placed = spread_apart(wanted, gap=10.0, low=0.0, high=100.0)
    assert all(b - a >= 10.0 - 1e-9 for a, b in itertools.pairwise(placed))
    assert placed[0] >= -1e-9
    assert placed[-1] <= 100.0 + 1e-9


def test_places_without_conflict_do_not_move():
    assert spread_apart([10.0, 40.0, 80.0], gap=10.0, low=0.0, high=100.0) == [10.0, 40.0, 80.0]


def test_a_name_is_not_put_on_the_far_side_of_another_point():
    points = {"left": (10.0, 1.0), "right": (10.3, 1.0), "far": (100.0, 2.0)}
    figure = scatter_chart(points, xlabel="x", ylabel="y", log_x=True)
    figure.draw_without_rendering()
    places = {text.get_text(): text.get_window_extent() for text in figure.axes[0].texts}
    at = {name: figure.axes[0].transData.transform(point)[0] for name, point in points.items()}
    assert places["left"].x1 < at["left"]
    assert places["right"].x0 > at["right"]
