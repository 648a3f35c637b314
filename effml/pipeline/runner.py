"""Runs the stages of the main job one after the other and writes the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from effml._validate import one_of, positive
from effml.pipeline.training import TrainConfig

if TYPE_CHECKING:
    from effml.report import Check, Metric, Page, Result

__all__ = ["PRESETS", "PipelineConfig", "PipelineRun", "Stage", "StageResult", "run_pipeline"]

# What a preset trains: "cpu" fits two cores and five minutes for four optimizers, "smoke" a test.
PRESETS = {
    "cpu": TrainConfig(steps=240, evaluate_every=60, evaluation_tokens=32_768),
    "smoke": TrainConfig(
        steps=6,
        batch_size=4,
        length=32,
        width=32,
        num_layers=1,
        num_heads=2,
        max_bytes=300_000,
        evaluate_every=3,
        evaluation_tokens=2_048,
        checkpoint_every=3,
    ),
}
DEFAULT_OUT = Path("runs/pipeline")


@dataclass(frozen=True)
class PipelineConfig:
    """What the main job reads, trains and writes.

    Raises:
        ValueError: for an unknown preset or optimizer, an optimizer named twice, or sizes that are not positive.

    Example:
        >>> PipelineConfig(preset="smoke").training("scale").steps
        6
    """

    data: str = "stdlib"
    """Text to learn from: a folder, a file, or stdlib (this Python's own library sources)."""
    out: Path = DEFAULT_OUT
    """Folder for the report, the models and the metrics."""
    preset: str = "cpu"
    """cpu (a few minutes on two cores) or smoke (seconds; shows that everything works)."""
    optimizers: tuple[str, ...] = ("adamw", "muon", "normuon", "scale")
    """Optimizers to train with, side by side."""
    steps: int | None = None
    """Training steps for each optimizer, instead of the preset's."""
    tokenizer: str = "byte"
    """byte, or bpe trained on the training files."""
    prompt: str = "def "
    """Text that the best model goes on from."""
    sample_tokens: int = 400
    """Tokens of the sample."""
    seed: int = 0

    def __post_init__(self) -> None:
        from effml.optimize import OPTIMIZERS

        one_of("preset", self.preset, PRESETS)
        positive("sample_tokens", self.sample_tokens)
        if not self.optimizers:
            raise ValueError(f"optimizers is empty; give one or more of {', '.join(OPTIMIZERS)}")
        if len(set(self.optimizers)) != len(self.optimizers):
            raise ValueError(f"optimizers={self.optimizers!r} names one twice")
        if not self.prompt:
            raise ValueError("prompt is empty; give at least one character to go on from")
        for name in self.optimizers:
            self.training(name)

    def training(self, optimizer: str) -> TrainConfig:
        """The training configuration for one optimizer."""
        config = PRESETS[self.preset]
        return replace(
            config,
            data=self.data,
            optimizer=optimizer,
            steps=config.steps if self.steps is None else self.steps,
            tokenizer=self.tokenizer,
            seed=self.seed,
        )


class StageResult(Protocol):
    """What every stage returns: its own data, and how to show them."""

    def metrics(self) -> list[Metric]:
        """The numbers that the report starts with."""
        ...

    def add_to(self, page: Page) -> None:
        """Adds this stage's section to the report."""
        ...

    def summary(self) -> dict[str, float | int]:
        """The few numbers that go to the top of result.json, by name."""
        ...


ResultT = TypeVar("ResultT")


@dataclass
class PipelineRun:
    """A run in progress: its configuration, the results of the stages that are done, by type, and their seconds."""

    config: PipelineConfig
    results: dict[type, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def result(self, kind: type[ResultT]) -> ResultT:
        """The result of an earlier stage.

        Raises:
            KeyError: if no stage has returned a `kind` yet: a fault in the order of `STAGES`.
        """
        if kind not in self.results:
            raise KeyError(f"no stage before this one returned a {kind.__name__}")
        return self.results[kind]


Stage = Callable[[PipelineRun], StageResult]


def run_pipeline(config: PipelineConfig, stages: Sequence[Stage] | None = None) -> Result:
    """Runs the main job.

    Args:
        config: what to do.
        stages: what to run instead of `effml.pipeline.STAGES`.

    Returns:
        The result that was written to `result.json`. Beside it lie `report.html`, `figure.png`, `metrics.jsonl` (every
        optimizer's steps) and one folder per trained model. A finished run of the same folder is replaced.

    Raises:
        ValueError: for text that can't be used, or a folder that holds something else.

    Example:
        >>> import tempfile
        >>> config = PipelineConfig(preset="smoke", optimizers=("scale",), out=Path(tempfile.mkdtemp()) / "run")
        >>> from effml.pipeline import STAGES
        >>> result = run_pipeline(config, STAGES[:3])  # doctest: +ELLIPSIS
        [1/3] ...
        >>> (config.out / "report.html").exists()
        True
    """
    from effml import report
    from effml.pipeline.stages import CHECKS, STAGES, TrainingResult

    stages = STAGES if stages is None else stages
    _clear(config.out)
    started = time.perf_counter()
    run = PipelineRun(config)
    for number, stage in enumerate(stages, 1):
        summary = (stage.__doc__ or stage.__name__).splitlines()[0].rstrip(".")
        print(f"[{number}/{len(stages)}] {summary}", flush=True)
        begun = time.perf_counter()
        outcome = stage(run)
        run.seconds[stage.__name__] = time.perf_counter() - begun
        run.results[type(outcome)] = outcome
        print(f"      {run.seconds[stage.__name__]:.1f} s", flush=True)
    numbers: dict[str, float | int] = {}
    for outcome in run.results.values():
        numbers |= outcome.summary()
    numbers |= {f"{name}_stage_seconds": seconds for name, seconds in run.seconds.items()}
    training = run.results.get(TrainingResult)
    result = report.Result(
        method="pipeline",
        preset=config.preset,
        seeds=(config.seed,),
        rows=training.rows() if training else [],
        curves=training.curves() if training else {},
        summary=numbers,
        seconds=time.perf_counter() - started,
        command=_command(config),
    ).judged(_applicable(CHECKS, numbers))
    result.save(config.out / "result.json")
    if training:
        report.save_figure(training.figure(), config.out / "figure.png")
    _page(run, result).save(config.out / "report.html")
    return result


def _applicable(
    checks: Sequence[tuple[tuple[str, ...], Check]], numbers: dict[str, float | int]
) -> list[Check]:
    """Checks whose numbers this run has measured (the user may have left an optimizer out)."""
    return [check for needed, check in checks if all(name in numbers for name in needed)]


def _page(run: PipelineRun, result: Result) -> Page:
    from effml import report

    page = report.Page(
        "effml pipeline",
        "One small language model, trained on one text with several optimizers, saved, measured on files that it "
        "has not seen, packed into four bits, and put to work.",
        claim="SCALE (every column of the gradient normalised, momentum on the output head only) trains as good a "
        "model as AdamW with a fraction of its memory; NorMuon (orthogonal updates, normalised per neuron) trains a "
        "better one with half of AdamW's state for the matrices.",
    )
    page.add_metrics([metric for outcome in run.results.values() for metric in outcome.metrics()])
    page.add_checks(result.checks)
    for outcome in run.results.values():
        outcome.add_to(page)
    page.add_heading("Where the time went")
    page.add_text("Wall time of each stage, with compilation.")
    page.add_table([{"stage": name, "time (s)": round(seconds, 1)} for name, seconds in run.seconds.items()])
    return page.set_provenance(result)


def _clear(folder: Path) -> None:
    """Removes an earlier run of the pipeline; refuses a folder that holds anything else."""
    import shutil

    marker = folder / ".effml-pipeline"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out={str(folder)!r} is a file; give a folder")
    if folder.exists() and any(folder.iterdir()) and not marker.exists():
        raise ValueError(
            f"out={str(folder)!r} holds files that are not from effml pipeline; give another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    marker.touch()


def _command(config: PipelineConfig) -> str:
    words = ["effml pipeline"]
    defaults = PipelineConfig()
    for name in ("data", "preset", "steps", "tokenizer", "seed"):
        if getattr(config, name) != getattr(defaults, name):
            words.append(f"--{name} {getattr(config, name)}")
    if config.optimizers != defaults.optimizers:
        words.append("--optimizers " + " ".join(config.optimizers))
    return " ".join(words)
