from __future__ import annotations

import io
import math
import statistics

import numpy as np
import pytest
from rich.console import Console

from effml.report import (
    CheckOutcome,
    Result,
    check_table,
    markdown_report,
    markdown_table,
    mean_and_spread,
    print_result,
    table,
)
from effml.report._columns import format_number, read_columns

ROWS = [
    {"optimizer": "adamw", "loss": 2.0, "loss_spread": 0.025, "bytes": 8_000_000},
    {"optimizer": "scale", "loss": 1.9, "loss_spread": 0.1, "bytes": 1_000_000},
]


def show(item, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(item)
    return console.file.getvalue()


def test_numbers_are_aligned_and_spreads_join_their_column():
    lines = [line for line in show(table(ROWS)).splitlines() if "±" in line]
    assert "2.000 ± 0.025" in lines[0]
    assert "1.900 ± 0.100" in lines[1]
    assert "8,000,000" in lines[0]
    assert len({line.index("±") for line in lines}) == 1
    assert "spread" not in show(table(ROWS))


def test_the_best_value_is_marked_in_both_directions():
    lines = show(table(ROWS, best={"loss": "min", "bytes": "max"})).splitlines()
    adamw, scale = (next(line for line in lines if name in line) for name in ("adamw", "scale"))
    assert "1.900 ± 0.100 *" in scale
    assert "8,000,000 *" in adamw
    assert scale.count("*") == adamw.count("*") == 1


def test_nan_is_never_the_best_and_ties_are_all_marked():
    (column,) = read_columns([{"x": math.nan}, {"x": 1.0}, {"x": 1.0}, {"x": 2.0}], best={"x": "min"})
    assert column.best == {1, 2}
    assert column.cells[0] == "NaN"


def test_a_chosen_column_that_no_row_has_is_an_error():
    with pytest.raises(ValueError, match="column='los' is not known; did you mean 'loss'"):
        table(ROWS, ["optimizer", "los"])
    with pytest.raises(ValueError, match="best='bites'"):
        table(ROWS, best={"bites": "min"})
    with pytest.raises(ValueError, match="best='smallest'"):
        table(ROWS, best={"loss": "smallest"})


def test_headers_can_be_given_and_missing_cells_are_dashes():
    (name, loss) = read_columns([{"a": "x"}, {"b": 1.5}], {"a": "name", "b": "loss (nats)"})
    assert (name.header, loss.header) == ("name", "loss (nats)")
    assert name.cells == ("x", "–")
    assert loss.cells == ("–", "1.5")
    assert loss.numeric
    assert not name.numeric


def test_a_column_of_very_different_sizes_keeps_significant_digits():
    (column,) = read_columns([{"x": 0.00012345}, {"x": 123456.0}])
    assert column.cells == ("0.000123", "123,456")


@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [3.0], [5.0, 5.0]])
def test_mean_and_spread_agree_with_the_standard_library(values):
    found = mean_and_spread("loss", np.array(values))
    assert found["loss"] == pytest.approx(statistics.mean(values))
    expected = statistics.stdev(values) if len(values) > 1 else 0.0
    assert found["loss_spread"] == pytest.approx(expected)


def test_mean_of_nothing_is_an_error_and_of_nan_is_nan():
    with pytest.raises(ValueError, match="no values of 'loss'"):
        mean_and_spread("loss", [])
    assert math.isnan(mean_and_spread("loss", [1.0, math.nan])["loss"])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0, "0.000"), (-1234.5, "-1,234"), (1e12, "1e+12"), (math.inf, "∞"), (-math.inf, "−∞")],
)
def test_numbers_read_well(value, text):
    assert format_number(value) == text


def test_markdown_is_a_table_whose_cells_cannot_break_it():
    text = markdown_table([{"name": "a|b\n<i>*x*", "n": 1}], best={"n": "min"})
    header, rule, row = text.splitlines()
    assert header.startswith("| name")
    assert rule.split("|")[2].strip().endswith("-:")
    assert "a\\|b \\<i\\>\\*x\\*" in row
    assert len({len(line) for line in (header, rule, row)}) == 1


def test_markdown_marks_the_best_in_bold():
    assert "**1.900 ± 0.100**" in markdown_table(ROWS, best={"loss": "min"})


def test_empty_tables_are_allowed():
    assert markdown_table([]) == ""
    assert show(table([])) is not None


def test_checks_say_in_words_whether_they_hold():
    text = show(
        check_table(
            [
                CheckOutcome("good", 1.0, "<=", 2.0, True, "spec"),
                CheckOutcome("bad", math.nan, ">=", 2.0, False, ""),
            ]
        )
    )
    good, bad = (next(line for line in text.splitlines() if name in line) for name in ("good", "bad "))
    assert "✓ holds" in good
    assert "≤ 2" in good
    assert "✗ does not hold" in bad
    assert "NaN" in bad


@pytest.mark.parametrize("width", [30, 50, 80, 200])
def test_a_wide_table_is_split_and_no_number_is_cut(width):
    rows = [{"name": f"row {i}", **{f"a long name {j}": 1000 + 7 * j for j in range(9)}} for i in range(2)]
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_result(Result(method="m", preset="cpu", seeds=(0,), rows=rows), console=console)
    lines = console.file.getvalue().splitlines()
    words = " ".join(lines).split()
    assert all(words.count(f"{1000 + 7 * j:,}") == 2 for j in range(9))
    assert max(map(len, lines)) <= width


def test_printing_a_result_counts_the_checks_that_fail():
    result = Result(
        method="m",
        preset="cpu",
        seeds=(0, 1),
        rows=ROWS,
        checks=[CheckOutcome("a", 1.0, "<=", 2.0, True, ""), CheckOutcome("b", 3.0, "<=", 2.0, False, "")],
        curves={"secret": [1.0]},
        seconds=7384,
    )
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_result(result, console=console)
    text = console.file.getvalue()
    assert "m, preset cpu: 2 seeds, 2 h 03 min" in text
    assert "1 of 2 checks do not hold" in text
    assert "secret" not in text


def test_rich_markup_in_data_is_printed_as_it_is():
    rows = [{"name": "[red]x[/red]", "n": 1}]
    assert "[red]x[/red]" in show(table(rows, title="[b]t[/b]"))
    assert "[b]t[/b]" in show(table(rows, title="[b]t[/b]"))


def test_the_markdown_report_holds_claim_table_checks_picture_and_provenance():
    result = Result(
        method="scale",
        preset="cpu",
        seeds=(0, 1),
        rows=ROWS,
        checks=[CheckOutcome("loss", 1.9, "<=", 2.0, True, "spec")],
        machine={"cpu": "Some CPU", "cores": 2, "devices": ["H200", "H200"]},
        command="effml run scale",
    )
    text = markdown_report(result, "SCALE", claim="As good.", best={"loss": "min"}, picture="cpu.png")
    for part in (
        "# SCALE",
        "**Claim.** As good.",
        "**1.900 ± 0.100**",
        "✓ holds",
        "![SCALE](cpu.png)",
        "effml run scale",
        "Some CPU, 2 cores, 2 × H200",
        "seeds 0, 1",
    ):
        assert part in text
