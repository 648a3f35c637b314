"""Show every method: what it is for, its claim and its last measured numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effml.report import MethodCard


@dataclass(frozen=True)
class Command:
    """Options of `effml list`."""

    markdown: bool = False
    """Print the table as Markdown, as the README holds it."""
    job: str | None = None
    """Only methods of one job: optimize, quantize, attend, decode, ..."""

    def run(self) -> int:
        """Prints the table of methods."""
        from effml import report
        from effml._validate import one_of

        cards = report.find_cards()
        if self.job is not None:
            job = one_of("job", self.job, {card.job for card in cards})
            cards = [card for card in cards if card.job == job]
        rows = [_row(card) for card in cards]
        if self.markdown:
            print(report.markdown_table(rows))
            return 0
        from rich.console import Console

        Console().print(report.table(rows))
        print("effml run NAME --preset smoke|cpu|gpu runs one of them and writes its result, table and plot.")
        return 0


def _row(card: MethodCard) -> dict[str, str]:
    from effml import report

    result = report.committed_result(card.name)
    if result is None:
        measured = "not measured yet"
    else:
        held = sum(check.holds for check in result.checks)
        headline = card.headline_for(result)
        checks = f"{held} of {len(result.checks)} checks hold, {len(result.seeds)} seeds"
        measured = f"{headline} ({checks})" if headline else checks
    return {
        "method": card.name,
        "job": card.job,
        "what it is for": card.purpose,
        "claim": card.claim,
        "measured here": measured,
    }
