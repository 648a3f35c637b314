"""Colours, settings and tick labels that all figures share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MUTED", "PALETTE", "ink", "style", "tidy_ticks"]

MUTED = "#5C636E"
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#E69F00", "#56B4E9", "#4D4D4D")
_INKS = ("#0072B2", "#C25500", "#00805D", "#AA4499", "#A87300", "#2F80B3", "#4D4D4D")


def ink(index: int) -> str:
    """The colour of series `index`, dark enough for text on white."""
    return _INKS[index % len(_INKS)]


def style() -> dict[Any, Any]:
    """The matplotlib settings of every chart, for `matplotlib.rc_context`.

    Example:
        >>> style()["savefig.dpi"]
        200
    """
    return {
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "savefig.dpi": 200,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib, so pictures agree between machines
        "font.size": 10.5,
        "text.color": "#1C1F23",
        "text.usetex": False,
        "axes.facecolor": "white",
        "axes.edgecolor": "#9AA1AB",
        "axes.labelcolor": "#1C1F23",
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.titlesize": 11.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 10,
        "axes.formatter.useoffset": False,
        "figure.constrained_layout.w_pad": 0.09,
        "figure.constrained_layout.h_pad": 0.09,
        "grid.color": "#E6E8EB",
        "grid.linewidth": 0.8,
        "lines.linewidth": 1.9,
        "lines.solid_capstyle": "round",
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.major.size": 3,
        "ytick.major.size": 3,
        "xtick.minor.visible": False,
        "legend.frameon": False,
        "legend.fontsize": 10,
        "legend.handlelength": 2.6,
    }


def tidy_ticks(axes: Axes, which: Sequence[str] = ("x", "y")) -> None:
    """Thousands separated on linear axes; plain numbers on logarithmic ones, at 1, 2, 5 over few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for name in which:
        axis = axes.xaxis if name == "x" else axes.yaxis
        low, high = axes.get_xlim() if name == "x" else axes.get_ylim()
        if axis.get_scale() != "log":
            if max(abs(low), abs(high)) >= 5000:
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            continue
        if low >= 1e-4 and high <= 1e6:
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        if math.log10(high / low) < 2.0:
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_formatter(NullFormatter())
