"""Names written beside lines and points so that they do not overlap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from effml.report._style import ink

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["label_ends", "label_points", "spread_apart"]


def label_ends(figure: Figure, axes: Axes, ends: Mapping[str, float]) -> None:
    """Names beside the right end of the lines, pushed apart where they would overlap."""
    figure.draw_without_rendering()  # settles limits and layout, so that data can be placed in pixels
    points = 72.0 / figure.dpi
    bottom, top = axes.get_window_extent().y0 * points, axes.get_window_extent().y1 * points
    low, high = sorted(axes.get_ylim())
    at = {
        name: axes.transData.transform((axes.get_xlim()[1], min(max(y, low), high)))[1]
        for name, y in ends.items()
    }
    names = sorted(ends, key=lambda name: at[name])
    wanted = [at[name] * points for name in names]
    placed = spread_apart(wanted, gap=13.5, low=bottom, high=top)
    colors = {name: ink(index) for index, name in enumerate(ends)}
    moved = any(abs(there - here) > 2 for here, there in zip(wanted, placed))
    for name, here, there in zip(names, wanted, placed):
        axes.annotate(
            name,
            (1.0, min(max(ends[name], low), high)),
            (14 if moved else 6, there - here),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            va="center",
            color=colors[name],
            fontweight="bold",
            fontsize=10,
            arrowprops={
                "arrowstyle": "-",
                "color": colors[name],
                "linewidth": 0.7,
                "shrinkA": 1,
                "shrinkB": 1,
            }
            if moved
            else None,
        )


def spread_apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Sorted places at least `gap` apart, near the wanted ones: neighbours in conflict share their middle."""
    groups: list[list[Any]] = []  # [sum of wanted, count]
    for place in wanted:
        groups.append([place, 1])
        while len(groups) > 1 and _first(groups[-1], gap) < _first(groups[-2], gap) + groups[-2][1] * gap:
            total, count = groups.pop()
            groups[-1] = [groups[-1][0] + total, groups[-1][1] + count]
    placed = [_first(group, gap) + step * gap for group in groups for step in range(int(group[1]))]
    shift = max(0.0, low - placed[0]) - max(0.0, placed[-1] - high)
    return [place + shift for place in placed]


def _first(group: Sequence[Any], gap: float) -> float:
    total, count = group
    return total / count - gap * (count - 1) / 2


_OFFSETS = (
    (9, 0),
    (-9, 0),
    (0, 11),
    (0, -11),
    (8, 9),
    (8, -9),
    (-8, 9),
    (-8, -9),
    (0, 24),
    (0, -24),
    (16, 22),
    (16, -22),
    (-16, 22),
    (-16, -22),
)


def label_points(figure: Figure, axes: Axes, places: Mapping[str, tuple[float, ...]]) -> None:
    """Names beside their points: the first of several offsets that meets no marker, bar, name or edge."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    canvas = figure.canvas
    renderer = canvas.get_renderer() if isinstance(canvas, FigureCanvasAgg) else None
    pixels = figure.dpi / 72.0
    frame = axes.get_window_extent()
    markers: list[Any] = []
    names: list[Any] = []
    for x, y, spread in places.values():
        (left, low), (_, high) = axes.transData.transform([(x, y - spread), (x, y + spread)])
        if math.isnan(low):  # a spread that reaches below zero on a logarithmic axis
            low = axes.transData.transform((x, y))[1]
        markers.append(Bbox([[left - 5 * pixels, low - 5 * pixels], [left + 5 * pixels, high + 5 * pixels]]))
    for index, (name, (x, y, _)) in enumerate(places.items()):
        color = ink(index)
        best: tuple[float, Any] | None = None
        for rank, (right, up) in enumerate(_OFFSETS):
            label = axes.annotate(
                name,
                (x, y),
                (right, up),
                textcoords="offset points",
                ha="left" if right > 0 else "right" if right < 0 else "center",
                va="bottom" if up > 0 else "top" if up < 0 else "center",
                color=color,
                fontweight="bold",
                fontsize=10,
                arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.7} if abs(up) > 20 else None,
            )
            box = Bbox.from_extents(*label.get_window_extent(renderer).extents)
            # A marker between a name and its own point would take the name for itself, so the way counts too.
            way = Bbox.union([box, Bbox([axes.transData.transform((x, y))] * 2)])
            hidden = 10 * sum(
                _overlap(box, other) for other in names
            )  # two names on each other: neither reads
            hidden += sum(_overlap(way, other) for other in markers[:index] + markers[index + 1 :])
            outside = max(0.0, frame.x0 - box.x0) + max(0.0, box.x1 - frame.x1)
            outside += max(0.0, frame.y0 - box.y0) + max(0.0, box.y1 - frame.y1)
            hidden += outside * box.height  # an area too
            cost = hidden + 1e-3 * rank
            if best is None or cost < best[0]:
                if best is not None:
                    best[1].remove()
                best = (cost, label)
            else:
                label.remove()
            if not hidden:
                break
        if best is not None:
            names.append(best[1].get_window_extent(renderer))


def _overlap(one: Any, other: Any) -> float:
    """Shared area of two boxes, in square pixels."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return width * height if width > 0 and height > 0 else 0.0
