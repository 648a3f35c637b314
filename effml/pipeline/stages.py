"""The stages of the main job. Each is a function from the run so far to a typed result that can show itself."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effml.pipeline.compression import compress_best
from effml.pipeline.evaluation import Evaluation, evaluate_model
from effml.pipeline.one_bit import compress_to_one_bit
from effml.pipeline.runner import PipelineRun, Stage
from effml.pipeline.serving import serve_ssa, train_ssa
from effml.pipeline.training import TrainedModel, train_model
from effml.report import Check, Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from effml.data import Corpus
    from effml.report import Page

__all__ = [
    "CHECKS",
    "STAGES",
    "EvaluationResult",
    "ServeResult",
    "TextResult",
    "TrainingResult",
    "measure_models",
    "read_text",
    "serve_best",
    "train_optimizers",
]

_HELD_OUT = "evaluation_nats_per_token"

# What this run can refute, with the numbers of the summary that each check needs.
CHECKS: tuple[tuple[tuple[str, ...], Check], ...] = (
    (
        ("scale_held_out", "adamw_held_out"),
        Check(
            "SCALE's held-out loss minus AdamW's (nats per token)",
            lambda result: result.summary["scale_held_out"] - result.summary["adamw_held_out"],
            "<=",
            0.03,
            source="the bound that the experiment `scale` uses; one seed here",
        ),
    ),
    (
        ("scale_bytes", "adamw_bytes"),
        Check(
            "SCALE's parameters and state over AdamW's (bytes)",
            lambda result: result.summary["scale_bytes"] / result.summary["adamw_bytes"],
            "<=",
            0.45,
            source="the bound that the experiment `scale` uses",
        ),
    ),
    (
        ("normuon_held_out", "adamw_held_out"),
        Check(
            "NorMuon's held-out loss minus AdamW's (nats per token)",
            lambda result: result.summary["normuon_held_out"] - result.summary["adamw_held_out"],
            "<=",
            0.0,
            source="the bound that the experiment `normuon` uses; one seed here",
        ),
    ),
    (
        ("respinquant_nats_lost", "rtn_nats_lost"),
        Check(
            "What ReSpinQuant loses at W4A4 minus what round to nearest loses (nats per token)",
            lambda result: result.summary["respinquant_nats_lost"] - result.summary["rtn_nats_lost"],
            "<=",
            0.0,
            source="the method's claim; one seed here",
        ),
    ),
    (
        ("nanoquant_nats_lost", "rtn_w2_nats_lost"),
        Check(
            "What NanoQuant loses at about one bit over what round to nearest loses at two",
            lambda result: result.summary["nanoquant_nats_lost"] / result.summary["rtn_w2_nats_lost"],
            "<=",
            1.0,
            source="ours, not the paper's: fewer bytes that lose no more; one seed here",
        ),
    ),
    (
        ("read_ffd_nats_lost",),
        Check(
            "What reading through FFD's cache loses (nats per token)",
            lambda result: result.summary["read_ffd_nats_lost"],
            "<=",
            0.05,
            source="the bound that the experiment `ffd` uses at this delta",
        ),
    ),
    (
        ("write_esp_same",),
        Check(
            "Share of the tokens written with ESP that are those of plain decoding",
            lambda result: result.summary["write_esp_same"],
            ">=",
            1.0,
            source="the method's claim; near-ties apart",
        ),
    ),
)


@dataclass(frozen=True)
class TextResult:
    """The text that was read and how it was split."""

    corpus: Corpus
    train_files: int
    held_out_files: int

    def add_to(self, page: Page) -> None:
        """Says what was read."""
        page.add_heading("The text")
        page.add_text(
            f"{self.corpus.describe()}. Files are held out whole, so no model is measured on a file that it has "
            "seen a part of."
        )

    def metrics(self) -> list[Metric]:
        """Nothing: the text is not a measurement."""
        return []

    def summary(self) -> dict[str, float | int]:
        """How many files are on each side."""
        return {"train_files": self.train_files, "held_out_files": self.held_out_files}


@dataclass(frozen=True)
class TrainingResult:
    """One trained model for each optimizer, in the order they were asked for."""

    models: dict[str, TrainedModel]

    def rows(self) -> list[dict[str, Any]]:
        """One row for each optimizer."""
        return [
            {
                "optimizer": name,
                "learning rate": trained.config.rate,
                "held-out loss (nats/token)": trained.held_out["nats_per_token"],
                "perplexity": trained.held_out["perplexity"],
                "state (MB)": trained.optimizer_bytes / 1e6,
                "parameters + state (MB)": (trained.optimizer_bytes + trained.parameter_bytes) / 1e6,
                "training (tokens/s)": round(trained.tokens_per_second),
                "training (s)": round(trained.seconds, 1),
            }
            for name, trained in self.models.items()
        ]

    def curves(self) -> dict[str, Any]:
        """Training and held-out loss against steps."""
        return {
            name: {
                "step": [row["step"] for row in trained.history],
                "loss": [row["loss"] for row in trained.history],
                "held_out_step": [row["step"] for row in trained.history if _HELD_OUT in row],
                "held_out": [row[_HELD_OUT] for row in trained.history if _HELD_OUT in row],
            }
            for name, trained in self.models.items()
        }

    def loss_chart(self, axes: Axes | None = None) -> Figure:
        """Held-out loss against steps."""
        from effml import report

        series = {name: (c["held_out_step"], c["held_out"]) for name, c in self.curves().items()}
        return report.line_chart(
            series, xlabel="training step", ylabel="held-out loss (nats/token)", axes=axes
        )

    def memory_chart(self, axes: Axes | None = None) -> Figure:
        """Final held-out loss against the memory of the optimizer's state."""
        from effml import report

        points = {
            name: (trained.optimizer_bytes / 1e6, trained.held_out["nats_per_token"])
            for name, trained in self.models.items()
        }
        return report.scatter_chart(
            points, xlabel="optimizer state (MB)", ylabel="held-out loss (nats/token)", axes=axes
        )

    def figure(self) -> Figure:
        """Both charts side by side."""
        from effml.report import figures

        figure, (left, right) = figures.panels(2)
        self.loss_chart(left)
        self.memory_chart(right)
        return figure

    def add_to(self, page: Page) -> None:
        """Adds the table, loss against steps and against optimizer bytes, and the speeds."""
        from effml import report

        any_model = next(iter(self.models.values()))
        config, model = any_model.config, any_model.model
        page.add_heading("Training")
        page.add_text(
            f"The same Llama-style model ({any_model.parameter_bytes // 4:,} parameters: {model.num_layers} layers, "
            f"width {model.width}, {model.vocab_size} tokens), the same {config.steps:,} batches of "
            f"{config.batch_size} x {config.length} tokens in the same order, the same {config.schedule} schedule. "
            "Each learning rate is the best of the same three (1e-3, 3e-3, 1e-2) after 300 steps, found by "
            "benchmarks/pipeline_rates.py."
        )
        page.add_table(self.rows(), best={"held-out loss (nats/token)": "min", "state (MB)": "min"})
        page.add_figure(
            self.loss_chart(),
            alt="Held-out loss of each optimizer against training steps",
            caption="Loss on held-out files while training.",
        )
        page.add_figure(
            self.memory_chart(),
            alt="Final held-out loss against megabytes of optimizer state, one point for each optimizer",
            caption="What the optimizer keeps in memory against how well its model predicts in the end: down and left "
            "is better.",
        )
        page.add_figure(
            report.bar_chart(
                {name: trained.tokens_per_second for name, trained in self.models.items()},
                xlabel="training speed (tokens/s)",
            ),
            alt="Training speed of each optimizer",
            caption="Training speed on this machine, compilation and evaluations left out.",
        )

    def metrics(self) -> list[Metric]:
        """The held-out loss of each optimizer, with the state that it took."""
        return [
            Metric(
                f"{trained.held_out['nats_per_token']:.3f} nats",
                f"held-out loss per token, {name}",
                f"{trained.optimizer_bytes / 1e6:.2f} MB of optimizer state",
            )
            for name, trained in self.models.items()
        ]

    def summary(self) -> dict[str, float | int]:
        """Held-out loss, bytes and speed, by optimizer."""
        numbers = {}
        for name, trained in self.models.items():
            numbers[f"{name}_held_out"] = trained.held_out["nats_per_token"]
            numbers[f"{name}_bytes"] = trained.parameter_bytes + trained.optimizer_bytes
            numbers[f"{name}_tokens_per_second"] = trained.tokens_per_second
        return numbers


@dataclass(frozen=True)
class EvaluationResult:
    """Each model as it was read back from its folder, measured on the held-out files."""

    models: dict[str, Evaluation]
    folders: dict[str, Path]

    @property
    def best(self) -> str:
        """The model with the lowest held-out loss."""
        return min(self.models, key=lambda name: self.models[name].nats_per_token)

    def add_to(self, page: Page) -> None:
        """Adds the table of saved models."""
        page.add_heading("The saved models")
        page.add_text(
            "Read back from disk by `effml.models.load` and scored on held-out files: what `effml evaluate` prints."
        )
        page.add_table(
            [
                {
                    "model": name,
                    "loss (nats/byte)": model.nats_per_byte,
                    "perplexity": model.perplexity,
                    "on disk (MB)": model.bytes_on_disk / 1e6,
                    "in memory (MB)": model.bytes_in_memory / 1e6,
                    "scoring (tokens/s)": round(model.tokens_per_second),
                }
                for name, model in self.models.items()
            ],
            best={"loss (nats/byte)": "min"},
        )

    def metrics(self) -> list[Metric]:
        """Nothing: the training stage's losses stand for them."""
        return []

    def summary(self) -> dict[str, float | int]:
        """Loss per byte of text, by optimizer."""
        return {f"{name}_saved_nats_per_byte": model.nats_per_byte for name, model in self.models.items()}


@dataclass(frozen=True)
class ServeResult:
    """Text that the best model wrote, greedy and sampled, and how fast."""

    model: str
    prompt: str
    samples: dict[str, str]
    tokens_per_second: float

    def add_to(self, page: Page) -> None:
        """Adds the samples."""
        page.add_heading("The best model writes")
        page.add_text(
            f"{self.model}, from the prompt {self.prompt!r}: {self.tokens_per_second:,.0f} tokens/s, "
            "one sequence, with a key-value cache."
        )
        for how, text in self.samples.items():
            page.add_code(text, caption=how)

    def metrics(self) -> list[Metric]:
        """The decoding speed."""
        return [
            Metric(f"{self.tokens_per_second:,.0f} tokens/s", "writing, one sequence", f"model {self.model}")
        ]

    def summary(self) -> dict[str, float | int]:
        """The decoding speed."""
        return {"serve_tokens_per_second": self.tokens_per_second}


def read_text(run: PipelineRun) -> TextResult:
    """Reading the text and holding out whole files."""
    from effml import data

    config = run.config.training(run.config.optimizers[0])
    corpus = data.load_corpus(config.data, max_bytes=config.max_bytes)
    print(f"      {corpus.describe()}")
    return TextResult(corpus, len(corpus.train), len(corpus.held_out))


def train_optimizers(run: PipelineRun) -> TrainingResult:
    """Training one model with each optimizer."""
    corpus = run.result(TextResult).corpus
    models: dict[str, TrainedModel] = {}
    with (run.config.out / "metrics.jsonl").open("w", encoding="utf-8") as metrics:
        for name in run.config.optimizers:
            trained = train_model(run.config.training(name), run.config.out / name, corpus=corpus)
            if trained.signal_number is not None:
                raise KeyboardInterrupt
            models[name] = trained
            for row in trained.history:
                metrics.write(json.dumps({"optimizer": name, **row}) + "\n")
    return TrainingResult(models)


def measure_models(run: PipelineRun) -> EvaluationResult:
    """Reading each model back from disk and measuring it on held-out files."""
    from effml import models as model_folders

    corpus = run.result(TextResult).corpus
    trained = run.result(TrainingResult).models
    folders = {name: model.folder / "model" for name, model in trained.items()}
    evaluations = {
        name: evaluate_model(
            model_folders.load(str(folder)),
            corpus,
            max_tokens=trained[name].config.evaluation_tokens,
        )
        for name, folder in folders.items()
    }
    return EvaluationResult(evaluations, folders)


def serve_best(run: PipelineRun) -> ServeResult:
    """Letting the best model write."""
    import jax

    from effml import data, decode
    from effml import models as model_folders

    evaluated = run.result(EvaluationResult)
    loaded = model_folders.load(str(evaluated.folders[evaluated.best])).for_decoding()
    assert loaded.tokenizer is not None
    prompt = data.encode_prompt(loaded.tokenizer, run.config.prompt)[None]
    ways = {
        "greedy": decode.SamplingConfig(),
        "sampled at temperature 0.8, top-p 0.95": decode.SamplingConfig(temperature=0.8, top_p=0.95),
    }
    new_tokens = min(run.config.sample_tokens, loaded.config.max_length - prompt.shape[1])
    samples: dict[str, str] = {}
    seconds: list[float] = []
    for how, sampling in ways.items():
        for _ in range(2):  # the first call compiles
            started = time.perf_counter()
            written = decode.generate(
                loaded,
                prompt,
                max_new_tokens=new_tokens,
                sampling=sampling,
                key=jax.random.key(run.config.seed),
            )
            tokens = np.asarray(written.tokens[0][: int(written.lengths[0])])
            took = time.perf_counter() - started
        seconds.append(took / max(len(tokens), 1))
        samples[how] = run.config.prompt + loaded.tokenizer.decode(tokens)
    return ServeResult(evaluated.best, run.config.prompt, samples, 1 / seconds[0])


STAGES: tuple[Stage, ...] = (
    read_text,
    train_optimizers,
    measure_models,
    compress_best,
    compress_to_one_bit,
    serve_best,
    train_ssa,
    serve_ssa,
)
