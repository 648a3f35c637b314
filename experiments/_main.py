"""Runs one experiment from the command line: `python -m experiments.NAME` and `effml run NAME` both end
here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from effml import report
from effml._validate import one_of

__all__ = ["main", "run_experiment"]


def run_experiment(
    module: ModuleType,
    *,
    preset: str = "cpu",
    seed: int | None = None,
    out: str | os.PathLike[str] | None = None,
    commit: bool = False,
) -> int:
    """Runs an experiment, prints its table and checks, and writes its result, page and figure.

    Args:
        module: an experiment: `METHOD`, `PRESETS` (preset name to `Config`), `run`, `plot`; perhaps `COLUMNS`
            and `BEST` for the table, and `notes(result)`, remarks on what is reported without a bound.
        preset: a name in `PRESETS`.
        seed: first seed, the preset's own when None.
        out: folder for `result.json`, `result.md`, `figure.png`; `runs/NAME/PRESET` by default.
        commit: write `PRESET.json`, `PRESET.md`, `PRESET.png` to `experiments/results/NAME` instead.

    Returns:
        0 if every check holds, else 1; always 0 for `smoke`, which is too small to judge a claim.

    Raises:
        ValueError: unknown preset.
    """
    import dataclasses
    import sys

    card = module.METHOD
    config = module.PRESETS[one_of("preset", preset, module.PRESETS)]
    if seed is not None:
        config = dataclasses.replace(config, seed=seed)
    result = module.run(config)
    flags = f" --seed {seed}" if seed is not None else ""
    result.command = f"python -m experiments.{card.name} --preset {preset}{flags}"

    columns, best = getattr(module, "COLUMNS", None), getattr(module, "BEST", None)
    report.print_result(result, title=card.title, columns=columns, best=best)
    for line in notes_of(module, result):
        print(f"* {line}")
    if commit:
        folder, names = report.experiments_folder() / "results" / card.name, [preset] * 3
    else:
        folder = Path(out) if out is not None else Path("runs") / card.name / preset
        names = ["result", "result", "figure"]
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"{names[2]}.png"
    report.save_figure(module.plot(result), picture)
    page = markdown_page(module, result, picture.name)
    temporary = folder / f".{names[1]}.md.{os.getpid()}"
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(folder / f"{names[1]}.md")
    result.save(folder / f"{names[0]}.json")
    print(f"wrote {folder}", file=sys.stderr)
    if preset == "smoke":
        print("smoke only tries the code; its checks mean nothing", file=sys.stderr)
        return 0
    return 0 if result.holds else 1


def notes_of(module: ModuleType, result: report.Result) -> list[str]:
    """The experiment's own remarks on a result, if it makes any."""
    return list(module.notes(result)) if hasattr(module, "notes") else []


def markdown_page(module: ModuleType, result: report.Result, picture: str) -> str:
    """The committed page: claim, table, checks, remarks, picture, how it was measured."""
    page = report.markdown_report(
        result,
        module.METHOD.title,
        claim=module.METHOD.claim,
        columns=getattr(module, "COLUMNS", None),
        best=getattr(module, "BEST", None),
        picture=picture,
    )
    remarks = "".join(f"* {line}\n" for line in notes_of(module, result))
    image = f"![{module.METHOD.title}]({picture})"
    return page.replace(image, f"{remarks}\n{image}", 1) if remarks else page


def main(module: ModuleType, arguments: Sequence[str] | None = None) -> int:
    """Parses `--preset`, `--seed`, `--results-dir` and `--commit`, and runs the experiment."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{module.METHOD.name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", default="cpu", choices=list(module.PRESETS))
    parser.add_argument("--seed", type=int, default=None, help="first seed")
    parser.add_argument("--results-dir", default=None, help="folder to write to (default: runs/NAME/PRESET)")
    parser.add_argument("--commit", action="store_true", help="write to experiments/results/NAME")
    options = parser.parse_args(arguments)
    return run_experiment(
        module, preset=options.preset, seed=options.seed, out=options.results_dir, commit=options.commit
    )
