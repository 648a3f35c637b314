"""Figures with one calm, colour-blind safe style, drawn with matplotlib's object interface (no global state).

Series are told apart by colour, line style or marker *and* a written name; the palette follows Okabe and Ito.
Charts return a `matplotlib.figure.Figure`; `figure_png` and `save_figure` turn it into a picture. Pass `axes`
(from `panels`) to draw several charts into one figure.
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effml.report._files import write_atomic
from effml.report._labels import label_ends, label_points
from effml.report._style import MUTED, PALETTE, style, tidy_ticks

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "PALETTE",
    "bar_chart",
    "figure_png",
    "line_chart",
    "panels",
    "save_figure",
    "scatter_chart",
    "style",
]

_LINES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1, 1.2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_MOST_DIRECT_LABELS = 6
_BACKGROUND = "#B4BAC1"  # bars that are there for comparison


def panels(
    columns: int = 1, rows: int = 1, *, size: tuple[float, float] = (5.4, 3.6)
) -> tuple[Figure, list[Axes]]:
    """An empty figure with `rows` × `columns` panels of `size` inches each.

    Returns:
        The figure and its axes, row by row.

    Raises:
        ValueError: if `rows` or `columns` is not positive.

    Example:
        >>> figure, axes = panels(2)
        >>> len(axes)
        2
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if columns < 1 or rows < 1:
        raise ValueError(f"columns={columns} and rows={rows} must be at least 1")
    with matplotlib.rc_context(style()):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        FigureCanvasAgg(figure)
        axes = [figure.add_subplot(rows, columns, index + 1) for index in range(rows * columns)]
    return figure, axes


def line_chart(
    series: Mapping[str, Sequence[Any]],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    log_x: bool = False,
    log_y: bool = False,
    ylim: tuple[float | int | None, float | int | None] | None = None,
    axes: Axes | None = None,
) -> Figure:
    """Lines with spread bands. Lines that all end at one x are named at their end, otherwise in a legend.

    Args:
        series: name to `(x, y)` or `(x, y, spread)`: `x [points]`; `y [points]`, or `[seeds, points]`, drawn
            as the mean with a band from the smallest to the largest seed; `spread [points]` draws a band of
            ± spread.
        xlabel: axis name with its unit.
        ylabel: axis name with its unit.
        title: written above, in bold.
        log_x: logarithmic x axis.
        log_y: logarithmic y axis.
        ylim: bottom and top of the y axis; None leaves one to the data.
        axes: draw into these, instead of into a new figure.

    Returns:
        The figure.

    Raises:
        ValueError: if there are no series or one has the wrong shape, naming it.

    Example:
        >>> figure = line_chart({"adamw": ([1, 2, 3], [[3.0, 2.0, 1.0], [3.2, 2.1, 1.2]])}, xlabel="step",
        ...                     ylabel="loss (nats per token)")
        >>> figure.axes[0].get_xlabel()
        'step'
    """
    import matplotlib
    import numpy as np

    lines = {name: _read_line(name, values) for name, values in series.items()}
    if not lines:
        raise ValueError("series is empty; a chart needs at least one line")
    with matplotlib.rc_context(style()):
        figure, axes = _canvas(axes)
        if log_x:
            axes.set_xscale("log")
        if log_y:
            axes.set_yscale("log")
        for index, (name, (x, y, low, high)) in enumerate(lines.items()):
            color = PALETTE[index % len(PALETTE)]
            label = name if np.isfinite(y).any() else f"{name} (no finite value)"
            axes.plot(x, y, color=color, linestyle=_LINES[index % len(_LINES)], label=label)
            if low is not None and high is not None:
                axes.fill_between(x, low, high, color=color, alpha=0.16, linewidth=0)
        _label_axes(axes, xlabel, ylabel, title)
        if ylim is not None:
            axes.set_ylim(*ylim)
        tidy_ticks(axes)
        ends = [x[-1] for x, *_ in lines.values()]
        starts = [x[0] for x, *_ in lines.values()]
        together = max(ends) - min(ends) <= 0.01 * abs(max(ends) - min(starts))
        finite = all(np.isfinite(y).any() for _, y, *_ in lines.values())
        if len(lines) > 1 and together and finite and len(lines) <= _MOST_DIRECT_LABELS:
            axes.set_xlim(right=max(ends))
            label_ends(figure, axes, {name: y[np.isfinite(y)][-1] for name, (_, y, *_) in lines.items()})
        elif len(lines) > 1 or not finite:
            axes.legend(loc="best", ncols=1 if len(lines) <= _MOST_DIRECT_LABELS else 2)
    return figure


def scatter_chart(
    points: Mapping[str, Sequence[Any]],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    log_x: bool = False,
    log_y: bool = False,
    axes: Axes | None = None,
) -> Figure:
    """Named points, such as loss against bytes; names are placed so that they do not overlap.

    Args:
        points: name to `(x, y)` or `(x, y, spread of y)`, numbers.
        xlabel: axis name with its unit.
        ylabel: axis name with its unit.
        title: written above, in bold.
        log_x: logarithmic x axis.
        log_y: logarithmic y axis.
        axes: draw into these, instead of into a new figure.

    Returns:
        The figure.

    Raises:
        ValueError: if there are no points, one is not finite, or not positive on a logarithmic axis.

    Example:
        >>> figure = scatter_chart({"adamw": (8e6, 2.0), "scale": (1e6, 2.1, 0.02)}, xlabel="state (bytes)",
        ...                        ylabel="loss (nats per token)", log_x=True)
        >>> sorted(text.get_text() for text in figure.axes[0].texts)
        ['adamw', 'scale']
    """
    import math

    import matplotlib

    if not points:
        raise ValueError("points is empty; a chart needs at least one point")
    places: dict[str, tuple[float, float, float]] = {}
    for name, point in points.items():
        values = [float(value) for value in point]
        if len(values) not in (2, 3) or not all(map(math.isfinite, values)):
            raise ValueError(f"points[{name!r}]={point!r} must be finite (x, y) or (x, y, spread)")
        for is_log, axis, value in ((log_x, "x", values[0]), (log_y, "y", values[1])):
            if is_log and value <= 0:
                raise ValueError(f"points[{name!r}] has {axis}={value}, which a logarithmic axis cannot show")
        places[name] = (values[0], values[1], values[2] if len(values) == 3 else 0.0)
    with matplotlib.rc_context(style()):
        figure, axes = _canvas(axes)
        if log_x:
            axes.set_xscale("log")
        if log_y:
            axes.set_yscale("log")
        axes.margins(0.18, 0.2)
        for index, (x, y, spread) in enumerate(places.values()):
            axes.errorbar(
                x,
                y,
                yerr=spread or None,
                color=PALETTE[index % len(PALETTE)],
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=8,
                elinewidth=1.4,
                capsize=3,
                linestyle="none",
            )
        _label_axes(axes, xlabel, ylabel, title)
        tidy_ticks(axes)
        label_points(figure, axes, places)
    return figure


def bar_chart(
    values: Mapping[str, Any],
    *,
    xlabel: str,
    title: str = "",
    reference: tuple[str, float | int] | None = None,
    highlight: Collection[str] = (),
    axes: Axes | None = None,
) -> Figure:
    """Horizontal bars from zero, each with its number; the first is on top.

    Args:
        values: name to number or `(number, spread)`. A number that is not finite has no bar and says so.
        xlabel: what the length means, with its unit.
        title: written above, in bold.
        reference: name and place of a dashed line to compare with.
        highlight: names of the bars that stand out; the others are then grey. Empty = a colour for each bar.
        axes: draw into these, instead of into a new figure.

    Returns:
        The figure.

    Raises:
        ValueError: if there are no values.

    Example:
        >>> figure = bar_chart({"adamw": 8.0, "scale": (1.0, 0.1)}, xlabel="optimizer state (MB)")
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['8.00', '1.00 ± 0.10']
    """
    import math

    import matplotlib

    from effml.report._columns import read_columns

    if not values:
        raise ValueError("values is empty; a chart needs at least one bar")
    pairs = [
        tuple(map(float, v)) if isinstance(v, tuple | list) else (float(v), 0.0) for v in values.values()
    ]
    rows = [{"v": value, "v_spread": spread} if spread else {"v": value} for value, spread in pairs]
    texts = read_columns(rows)[0].cells
    lengths = [value if math.isfinite(value) else 0.0 for value, _ in pairs]
    with matplotlib.rc_context(style()):
        figure, axes = _canvas(axes, height=1.3 + 0.42 * len(values))
        for index, (name, length, (_, spread)) in enumerate(zip(values, lengths, pairs)):
            color = PALETTE[index % len(PALETTE)]
            if highlight:
                color = PALETTE[0] if name in highlight else _BACKGROUND
            axes.barh(index, length, height=0.62, color=color)
            if spread and math.isfinite(spread):
                axes.errorbar(length, index, xerr=spread, color="#1C1F23", elinewidth=1.2, capsize=3)
            end = max(0.0, length + (spread if math.isfinite(spread) else 0.0))
            axes.annotate(
                texts[index],
                (end, index),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=10,
                bbox={
                    "facecolor": "white",
                    "edgecolor": "none",
                    "pad": 1.5,
                },  # the reference line may pass here
            )
        axes.set_yticks(range(len(values)), list(values), color="#1C1F23")
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        if reference is not None:
            name, place = reference
            axes.axvline(place, color=MUTED, linestyle=(0, (4, 2)), linewidth=1.2)
            axes.annotate(
                name,
                (place, 1),
                (4, 2),
                xycoords=axes.get_xaxis_transform(),
                textcoords="offset points",
                color=MUTED,
                fontsize=9.5,
            )
        low, high = min(0.0, *lengths), max(0.0, *lengths, *([reference[1]] if reference else []))
        axes.set_xlim(low * 1.25, high * 1.28 if high > 0 else None)
        _label_axes(axes, xlabel, "", title)
        tidy_ticks(axes, ("x",))
    return figure


def figure_png(figure: Figure) -> bytes:
    """The figure as PNG; drawing the same data again gives the same bytes on one machine.

    Example:
        >>> figure_png(bar_chart({"a": 1.0}, xlabel="seconds"))[:4]
        b'\\x89PNG'
    """
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(style()):
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes the figure as PNG to `path` at once (temporary name, then rename); returns the path.

    Example:
        >>> import tempfile
        >>> save_figure(bar_chart({"a": 1.0}, xlabel="seconds"), Path(tempfile.mkdtemp()) / "figure.png").name
        'figure.png'
    """
    return write_atomic(path, figure_png(figure))


def _canvas(axes: Axes | None, height: float = 3.6) -> tuple[Figure, Axes]:
    if axes is not None:
        return axes.get_figure(root=True), axes  # pyright: ignore[reportReturnType]
    figure, (only,) = panels(size=(5.4, height))
    return figure, only


def _label_axes(axes: Axes, xlabel: str, ylabel: str, title: str) -> None:
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if title:
        axes.set_title(title)


def _read_line(
    name: str, values: Sequence[Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """x, y and the band's lower and upper edge, all [points]."""
    import numpy as np

    if len(values) not in (2, 3):
        raise ValueError(f"series[{name!r}] must be (x, y) or (x, y, spread), not {len(values)} parts")
    x, y, *rest = (np.asarray(value, dtype=np.float64) for value in values)
    if x.ndim != 1 or y.ndim not in (1, 2) or y.shape[-1:] != x.shape or not y.size:
        raise ValueError(
            f"series[{name!r}] has x {x.shape}, y {y.shape}; wanted x [points], y [points] or [seeds, points]"
        )
    if rest:
        if y.ndim != 1 or rest[0].shape != x.shape:
            raise ValueError(f"series[{name!r}] has spread {rest[0].shape} for x {x.shape} and y {y.shape}")
        return x, y, y - rest[0], y + rest[0]
    if y.ndim == 2:
        return x, y.mean(axis=0), y.min(axis=0), y.max(axis=0)
    return x, y, None, None
