"""One self-contained HTML page: styles and pictures are inside the file; it asks nothing of the network."""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from effml.report._columns import Best, Columns, format_number, format_value, read_columns
from effml.report._files import write_atomic
from effml.report._page_style import CSS
from effml.report.result import CheckOutcome, Result
from effml.report.tables import format_bound, provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Metric", "Page"]

_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Metric:
    """One measured number shown large.

    Attributes:
        value: the number, or text with its unit.
        label: what it is.
        note: a second line: against what it is to be read.
        tone: "good" or "bad" colours the value; "plain" does not.

    Example:
        >>> Metric("1.92 nats", "held-out loss", "AdamW: 1.93").label
        'held-out loss'
    """

    value: str | float | int
    label: str
    note: str = ""
    tone: Literal["plain", "good", "bad"] = "plain"


class Page:
    """A report that starts with what was claimed and what was measured, then shows sections in order.

    Everything given as text is escaped; `backticks` in texts become code. Each `add_…` returns the page.

    Args:
        title: heading and title of the document.
        summary: one or two sentences below the title.
        claim: what was claimed: a sentence, or several.

    Example:
        >>> page = Page("SCALE", "An optimizer with little memory.", claim="It is as good as AdamW.")
        >>> page = page.add_metrics([Metric("1.92 nats", "held-out loss")]).add_heading("Loss")
        >>> page.html().startswith("<!DOCTYPE html>")
        True
    """

    def __init__(self, title: str, summary: str = "", *, claim: str | Sequence[str] = ()) -> None:
        self.title = title
        self.summary = summary
        self.claims = (claim,) if isinstance(claim, str) else tuple(claim)
        self._blocks: list[str] = []
        self._headings: list[tuple[str, str]] = []
        self._provenance: list[tuple[str, str]] = []

    def add_metrics(self, metrics: Sequence[Metric], heading: str = "What was measured") -> Page:
        """Adds cards with large numbers; with an empty `heading` they follow without one."""
        cards = []
        for metric in metrics:
            value = metric.value if isinstance(metric.value, str) else format_number(metric.value)
            note = f'<p class="note">{_inline(metric.note)}</p>' if metric.note else ""
            cards.append(
                f'<div class="metric {metric.tone}"><p class="label">{_inline(metric.label)}</p>'
                f'<p class="value">{_inline(value)}</p>{note}</div>'
            )
        if heading:
            self.add_heading(heading)
        return self._add(f'<div class="metrics">{"".join(cards)}</div>')

    def add_heading(self, text: str) -> Page:
        """Starts a section."""
        anchor = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "section"
        taken = {name for name, _ in self._headings}
        unique, count = anchor, 2
        while unique in taken:
            unique, count = f"{anchor}-{count}", count + 1
        self._headings.append((unique, text))
        return self._add(f'<h2 id="{unique}">{_inline(text)}</h2>')

    def add_text(self, text: str) -> Page:
        """Adds paragraphs; an empty line separates two."""
        for paragraph in re.split(r"\n\s*\n", text.strip()):
            self._add(f"<p>{_inline(paragraph)}</p>")
        return self

    def add_table(
        self,
        rows: Sequence[Mapping[str, Any]],
        columns: Columns | None = None,
        *,
        caption: str = "",
        best: Best | None = None,
    ) -> Page:
        """Adds a table with the cells of `effml.report.table`; a wide one scrolls sideways within itself.

        Args:
            rows: one mapping per row.
            columns: keys to show, in order, or a mapping from key to header.
            caption: says what the table shows.
            best: key to "min" or "max"; those values are bold.

        Raises:
            ValueError: if a wanted column is in no row.
        """
        shown = read_columns(rows, columns, best)
        head = "".join(
            f'<th scope="col"{_numeric(column.numeric)}>{_inline(column.header)}</th>' for column in shown
        )
        body = []
        for index in range(len(rows)):
            cells = []
            for position, column in enumerate(shown):
                cell = _inline(column.cells[index])
                if index in column.best:
                    cell = f"<strong>{cell}</strong>"
                name = 'th scope="row"' if position == 0 and not column.numeric else "td"
                cells.append(f"<{name}{_numeric(column.numeric)}>{cell}</{name[:2]}>")
            body.append(f"<tr>{''.join(cells)}</tr>")
        # The caption stands outside of what scrolls, so that it wraps on a phone instead of being cut.
        note = f"<figcaption>{_inline(caption)}</figcaption>" if caption else ""
        return self._add(
            f'<figure class="table">{note}<div class="scroll" role="region" tabindex="0" '
            f'aria-label="{_printable(caption or "table")}"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(body)}</tbody></table></div></figure>"
        )

    def add_checks(self, checks: Sequence[CheckOutcome]) -> Page:
        """Adds the claims that were checked, each with its number, its bound and whether it holds."""
        items = []
        for check in checks:
            tone, verdict = ("good", "✓ holds") if check.holds else ("bad", "✗ does not hold")
            bound = f"measured {format_number(check.value)}, wanted {format_bound(check)}"
            source = f" ({_inline(check.source)})" if check.source else ""
            items.append(
                f'<li><span class="verdict {tone}">{verdict}</span><span class="what">{_inline(check.name)}'
                f'<span class="detail">{html.escape(bound)}{source}</span></span></li>'
            )
        return self._add(f'<ul class="checks">{"".join(items)}</ul>') if items else self

    def add_figure(self, figure: Figure | bytes, *, alt: str, caption: str = "") -> Page:
        """Adds a picture, inlined.

        Args:
            figure: a matplotlib figure, or the bytes of a PNG.
            alt: what the picture shows, for readers who do not see it.
            caption: printed below.

        Raises:
            ValueError: if the bytes are no PNG or `alt` is empty.
        """
        from effml.report.figures import figure_png

        data = figure if isinstance(figure, bytes) else figure_png(figure)
        if not data.startswith(_PNG):
            raise ValueError(
                f"figure must be a matplotlib figure or PNG bytes, not bytes starting {data[:8]!r}"
            )
        if not alt.strip():
            raise ValueError("alt must say what the picture shows")
        width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
        note = f"<figcaption>{_inline(caption)}</figcaption>" if caption else ""
        source = "data:image/png;base64," + base64.b64encode(data).decode("ascii")
        size = f'width="{width}" height="{height}"'
        return self._add(f'<figure><img src="{source}" {size} alt="{_printable(alt)}">{note}</figure>')

    def add_code(self, text: str, *, caption: str = "") -> Page:
        """Adds text exactly as it is, wrapped, in a fixed-width face: code, a command, a model's sample."""
        label = f"<figcaption>{_inline(caption)}</figcaption>" if caption else ""
        # HTML drops a newline right after <pre>; an extra one keeps a text that starts with one whole.
        return self._add(f'<figure class="code">{label}<pre>\n{_printable(text)}</pre></figure>')

    def set_provenance(self, source: Result | Mapping[str, Any]) -> Page:
        """Fills the footer: command, seeds, machine, versions and date of a result, or the given pairs."""
        if isinstance(source, Result):
            self._provenance = provenance(source)
        else:
            self._provenance = [(name, format_value(value)) for name, value in source.items()]
        return self

    def html(self) -> str:
        """The whole document."""
        claims = "".join(f"<p>{_inline(claim)}</p>" for claim in self.claims if claim)
        claimed = f'<section class="claim"><h2>What was claimed</h2>{claims}</section>' if claims else ""
        summary = f'<p class="summary">{_inline(self.summary)}</p>' if self.summary else ""
        links = "".join(f'<li><a href="#{name}">{_inline(text)}</a></li>' for name, text in self._headings)
        contents = f'<nav aria-label="On this page"><ul>{links}</ul></nav>' if len(self._headings) > 3 else ""
        pairs = "".join(
            f"<dt>{html.escape(name)}</dt><dd>{_inline(text)}</dd>" for name, text in self._provenance
        )
        footer = f"<footer><h2>How this was measured</h2><dl>{pairs}</dl></footer>" if pairs else ""
        return "\n".join(
            part
            for part in (
                "<!DOCTYPE html>",
                '<html lang="en">',
                "<head>",
                '<meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                '<meta name="color-scheme" content="light dark">',
                '<meta http-equiv="Content-Security-Policy" '
                "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
                '<link rel="icon" href="data:,">',
                f"<title>{_printable(self.title)}</title>",
                f"<style>{CSS}</style>",
                "</head>",
                "<body>",
                f"<header><h1>{_inline(self.title)}</h1>{summary}{contents}</header>",
                "<main>",
                claimed,
                *self._blocks,
                "</main>",
                footer,
                "</body>",
                "</html>",
            )
            if part
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page to `path` at once (temporary name, then rename); returns the path.

        Example:
            >>> import tempfile
            >>> Page("SCALE").save(Path(tempfile.mkdtemp()) / "report.html").name
            'report.html'
        """
        return write_atomic(path, self.html() + "\n")

    def _add(self, block: str) -> Page:
        self._blocks.append(block)
        return self


def _numeric(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


def _inline(text: str) -> str:
    """Escaped text in which `backticks` are code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _printable(text))


# Control characters and lone surrogates are not allowed in HTML; a model may well produce them.
_FORBIDDEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def _printable(text: str) -> str:
    return html.escape(_FORBIDDEN.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n")), quote=True)
