"""Run a method's experiment: table, plot and checks of its claim."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Command:
    """Options of `effml run`."""

    name: Annotated[str, tyro.conf.Positional]
    """The method, as `effml list` names it."""
    preset: str = "cpu"
    """How large: smoke (seconds, plumbing only), cpu (minutes, the committed numbers) or gpu."""
    seed: int | None = None
    """First seed; the experiment's own when left out."""
    out: Path | None = None
    """Folder for result.json, result.md and figure.png (default: runs/NAME/PRESET)."""

    def run(self) -> int:
        """Runs the experiment; returns 1 if a check does not hold."""
        from effml import report
        from effml._validate import one_of

        names = [card.name for card in report.find_cards()]
        name = one_of("name", self.name, names)
        main = importlib.import_module("experiments._main")
        return main.run_experiment(
            importlib.import_module(f"experiments.{name}"), preset=self.preset, seed=self.seed, out=self.out
        )
