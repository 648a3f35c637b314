"""Tables of results for the terminal (rich) and for Markdown files."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from effml.report._columns import Best, Column, Columns, format_number, read_columns
from effml.report.result import CheckOutcome, Result

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_SIGNS = {"<=": "≤", ">=": "≥", "==": "="}

__all__ = ["check_table", "markdown_report", "markdown_table", "print_result", "table"]


def table(
    rows: Sequence[Mapping[str, Any]],
    columns: Columns | None = None,
    title: str | None = None,
    *,
    best: Best | None = None,
) -> Table:
    """A rich table: numbers right-aligned on one number of decimals, spreads as ±, the best values starred.

    Args:
        rows: one mapping per row; `loss` and `loss_spread` print as one column.
        columns: keys to show, in order, or a mapping from key to header (units belong in the header).
        title: printed above.
        best: key to "min" or "max"; those values are bold and carry a star.

    Returns:
        The table, for `rich.print`.

    Raises:
        ValueError: if a wanted column is in no row.

    Example:
        >>> from rich.console import Console
        >>> rows = [{"optimizer": "adamw", "loss": 2.0}, {"optimizer": "scale", "loss": 1.95}]
        >>> Console(width=40).print(table(rows, best={"loss": "min"}))
        <BLANKLINE>
        optimizer     loss
        ──────────────────
        adamw        2.00
        scale        1.95 *
        <BLANKLINE>
        * best
    """
    return _table(read_columns(rows, columns, best), title)


def _table(shown: Sequence[Column], title: str | None = None) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result = Table(
        title=Text(title, style="bold") if title else None,
        title_justify="left",
        caption=Text("* best", style="dim") if any(column.best for column in shown) else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in shown:
        result.add_column(
            _starred(column, None), justify="right" if column.numeric else "left", overflow="fold"
        )
    for index in range(max((len(column.cells) for column in shown), default=0)):
        result.add_row(*(_starred(column, index) for column in shown))
    return result


def _starred(column: Column, index: int | None) -> Text:
    """A cell, or the header for None; beside a star the others get blanks, so that digits align."""
    from rich.text import Text

    if index is None:
        return Text("\n".join(line + "  " * bool(column.best) for line in _header_lines(column)))
    best = index in column.best
    text = Text(column.cells[index], style="bold green" if best else "")
    if column.best:
        text.append(" *" if best else "  ")
    return text


def _header_lines(column: Column) -> list[str]:
    """The header broken to about the width of its numbers; rich would rather cut the numbers."""
    if not column.numeric:
        return [column.header]
    return textwrap.wrap(column.header, max(12, *map(len, column.cells)), break_long_words=False) or [""]


def _least_width(column: Column) -> int:
    """Characters below which a number, or a word of text, would be cut."""
    if column.numeric:
        texts = [*_header_lines(column), *column.cells]
    else:
        texts = [word for cell in (column.header, *column.cells) for word in cell.split()]
        texts = [text[:24] for text in texts]  # longer words, such as paths, are folded
    return max(map(len, texts), default=1) + (2 if column.best else 0)


def _fitting(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Columns in groups that fit `width` characters, each led by the first column, which names the rows."""
    if not columns:
        return []
    first, *rest = columns
    lead = max(map(len, (first.header, *first.cells))) + 2  # and the frame's blank edges
    groups, used = [[first]], lead
    for column in rest:
        need = _least_width(column) + 3
        if used + need > width and len(groups[-1]) > 1:
            groups.append([first])
            used = lead
        groups[-1].append(column)
        used += need
    return groups


def check_table(checks: Sequence[CheckOutcome], *, sources: bool = True) -> Table:
    """A rich table of claims: measured value, bound, and whether it holds, in words as well as in colour.

    Args:
        checks: the outcomes.
        sources: show where the bounds come from, if any says so.

    Example:
        >>> from rich.console import Console
        >>> outcome = CheckOutcome("final loss", 1.9, "<=", 2.0, True, "spec")
        >>> Console(width=70).print(check_table([outcome]))
        <BLANKLINE>
        check        measured   bound             source
        ────────────────────────────────────────────────
        final loss      1.900     ≤ 2   ✓ holds   spec
        <BLANKLINE>
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    result.add_column("check", overflow="fold")
    result.add_column("measured", justify="right", no_wrap=True)
    result.add_column("bound", justify="right", no_wrap=True)
    result.add_column("", no_wrap=True)
    with_source = sources and any(check.source for check in checks)
    if with_source:
        result.add_column("source", overflow="fold", style="dim")
    for check in checks:
        verdict = Text(_verdict(check), style="green" if check.holds else "bold red")
        cells = [Text(check.name), format_number(check.value), format_bound(check), verdict]
        result.add_row(*cells, *([Text(check.source)] if with_source else []))
    return result


def markdown_table(
    rows: Sequence[Mapping[str, Any]], columns: Columns | None = None, *, best: Best | None = None
) -> str:
    """A GitHub table with the cells of `table`, padded so that the source reads as a table too.

    Args:
        rows: one mapping per row.
        columns: keys to show, in order, or a mapping from key to header.
        best: key to "min" or "max"; those values are bold.

    Returns:
        The lines, without a newline at the end; "" without columns.

    Raises:
        ValueError: if a wanted column is in no row.

    Example:
        >>> print(markdown_table([{"name": "a|b", "loss": 1.5, "loss_spread": 0.25}]))
        | name |        loss |
        | :--- | ----------: |
        | a\\|b | 1.50 ± 0.25 |
    """
    lines: list[list[str]] = [[] for _ in range(len(rows) + 2)]
    for column in read_columns(rows, columns, best):
        body = [
            f"**{_markdown(cell)}**" if index in column.best else _markdown(cell)
            for index, cell in enumerate(column.cells)
        ]
        header = _markdown(column.header)
        width = max(map(len, [header, "---", *body]))
        rule = "-" * (width - 1) + ":" if column.numeric else ":" + "-" * (width - 1)
        align = str.rjust if column.numeric else str.ljust
        for line, cell in zip(lines, [align(header, width), rule, *(align(cell, width) for cell in body)]):
            line.append(cell)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if lines[0] else ""


def markdown_report(
    result: Result,
    title: str,
    *,
    claim: str = "",
    columns: Columns | None = None,
    best: Best | None = None,
    picture: str = "",
) -> str:
    """The Markdown file that is committed beside a result: claim, table, checks, how it was measured.

    Args:
        result: what was measured.
        title: heading of the page.
        claim: the sentence under test.
        columns: as for `markdown_table`.
        best: as for `markdown_table`.
        picture: relative path of a figure to show.

    Returns:
        The file's text.

    Example:
        >>> result = Result(method="scale", preset="cpu", seeds=(0,), rows=[{"loss": 2.0}])
        >>> markdown_report(result, "SCALE").splitlines()[0]
        '# SCALE'
    """
    parts = [f"# {title}"]
    if claim:
        parts.append(f"**Claim.** {claim}")
    if result.rows:
        parts.append(markdown_table(result.rows, columns, best=best))
    if result.checks:
        parts.append(markdown_table(check_rows(result.checks)))
    if picture:
        parts.append(f"![{title}]({picture})")
    parts.append("Measured with: " + "; ".join(f"{name} {text}" for name, text in provenance(result)) + ".")
    return "\n\n".join(parts) + "\n"


def check_rows(checks: Sequence[CheckOutcome]) -> list[dict[str, str]]:
    """Checks as rows of text, for `markdown_table` and the HTML page."""
    return [
        {
            "check": check.name,
            "measured": format_number(check.value),
            "bound": format_bound(check),
            "outcome": _verdict(check),
            "source": check.source,
        }
        for check in checks
    ]


def format_bound(check: CheckOutcome) -> str:
    """What a check wants, as people write it.

    Example:
        >>> format_bound(CheckOutcome("loss", 1.9, "<=", 2.5, True, ""))
        '≤ 2.5'
    """
    return f"{_SIGNS.get(check.op, check.op)} {check.bound:g}"


def provenance(result: Result) -> list[tuple[str, str]]:
    """What a result was measured with, as (name, text) pairs; empty ones are left out."""
    computer = [str(result.machine["cpu"])] if result.machine.get("cpu") else []
    if result.machine.get("cores"):
        computer.append(f"{result.machine['cores']} cores")
    if result.machine.get("memory_gib"):
        computer.append(f"{result.machine['memory_gib']} GiB memory")
    kinds = [str(kind) for kind in result.machine.get("devices", []) if str(kind) != "cpu"]
    computer += [f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds)]
    pairs = [
        ("command", result.command),
        ("preset", result.preset),
        ("seed" if len(result.seeds) == 1 else "seeds", ", ".join(map(str, result.seeds))),
        ("time", _duration(result.seconds)),
        ("machine", ", ".join(computer)),
        ("versions", ", ".join(f"{name} {version}" for name, version in result.versions.items())),
        ("date", result.date.replace("T", " ").replace("+00:00", " UTC")),
    ]
    return [(name, text) for name, text in pairs if text]


def print_result(
    result: Result,
    *,
    title: str | None = None,
    columns: Columns | None = None,
    best: Best | None = None,
    console: Console | None = None,
) -> None:
    """Prints a result's table and checks to the terminal; a table too wide for it is split, never cut.

    Args:
        result: what was measured; its `curves` are not printed.
        title: printed above the table; method and preset by default.
        columns: as for `table`.
        best: as for `table`.
        console: where to print, standard output by default.

    Example:
        >>> print_result(Result(method="scale", preset="smoke", seeds=(0, 1), seconds=65.0))
        scale, preset smoke: 2 seeds, 1 min 05 s
    """
    from rich.console import Console
    from rich.text import Text

    out = console if console is not None else Console(highlight=False)
    seeds = f"{len(result.seeds)} seed" + ("" if len(result.seeds) == 1 else "s")
    heading = title or f"{result.method}, preset {result.preset}"
    took = ", ".join([seeds] * bool(result.seeds) + [_duration(result.seconds)])
    out.print(Text(f"{heading}: {took}", style="bold"))
    for group in _fitting(read_columns(result.rows, columns, best), out.width):
        out.print(_table(group))
    if result.checks:
        out.print(check_table(result.checks, sources=out.width >= 72))
        failed = sum(not check.holds for check in result.checks)
        verdict = f"{failed} of {len(result.checks)} checks do not hold" if failed else "all checks hold"
        out.print(Text(verdict, style="bold red" if failed else "bold green"))


def _verdict(check: CheckOutcome) -> str:
    return "✓ holds" if check.holds else "✗ does not hold"


def _duration(seconds: float | int) -> str:
    """Wall time for people: 8.3 s, 1 min 05 s, 2 h 03 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _markdown(text: str) -> str:
    """Text that stays inside its table cell and is not read as HTML or emphasis."""
    for symbol in "\\`*|<>":
        text = text.replace(symbol, "\\" + symbol)
    return " ".join(text.split())
