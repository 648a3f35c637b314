"""Results, tables, figures and one self-contained HTML page.

    >>> from effml import report
    >>> print(report.markdown_table([{"optimizer": "scale", "loss": 1.9, "loss_spread": 0.02}]))
    | optimizer |          loss |
    | :-------- | ------------: |
    | scale     | 1.900 ± 0.020 |

Importing this package loads neither jax nor matplotlib nor rich.
"""

from __future__ import annotations

from effml.report import figures
from effml.report._columns import mean_and_spread
from effml.report.cards import (
    JOBS,
    MethodCard,
    committed_result,
    experiments_folder,
    find_cards,
    read_card,
)
from effml.report.environment import machine, versions
from effml.report.figures import bar_chart, figure_png, line_chart, save_figure, scatter_chart
from effml.report.page import Metric, Page
from effml.report.result import Check, CheckOutcome, Result
from effml.report.tables import check_table, markdown_report, markdown_table, print_result, table

__all__ = [
    "JOBS",
    "Check",
    "CheckOutcome",
    "MethodCard",
    "Metric",
    "Page",
    "Result",
    "bar_chart",
    "check_table",
    "committed_result",
    "experiments_folder",
    "figure_png",
    "figures",
    "find_cards",
    "line_chart",
    "machine",
    "markdown_report",
    "markdown_table",
    "mean_and_spread",
    "print_result",
    "read_card",
    "save_figure",
    "scatter_chart",
    "table",
    "versions",
]
