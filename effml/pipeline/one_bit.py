"""The best model at about one bit a weight, beside roundings to 2, 3 and 4 bits: bytes, loss, and speed of writing."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from effml.pipeline.compression import BITS, METHODS, CompressionResult, writing_speed
from effml.pipeline.evaluation import Evaluation, evaluate_model, window_length
from effml.pipeline.runner import PipelineRun
from effml.report import Metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from effml import models
    from effml.report import Page

__all__ = ["OneBitResult", "compress_to_one_bit"]

_WINDOWS = {"cpu": 32, "smoke": 2}
_ROUNDED = {"cpu": (2, 3, 4), "smoke": (4,)}
_ROUNDINGS = ("rtn", "gptq")
# Ten times the paper's rates, as in the experiment `nanoquant`: few steps on a small model.
_SETTINGS: dict[str, dict[str, Any]] = {
    "cpu": {"bits": 1.0, "dense_epochs": 3, "factor_epochs": 3, "scale_epochs": 3},
    "smoke": {
        "bits": 3.0,
        "allow_over": True,
        "iterations": 4,
        "dense_epochs": 0,
        "factor_epochs": 1,
        "scale_epochs": 0,
    },
}
_RATES = {"multiple": 8, "dense_rate": 1e-3, "factor_rate": 1e-4, "scale_rate": 1e-4}


@dataclass(frozen=True)
class OneBitResult:
    """The best model in binary factors, and in few bits by rounding its weights alone.

    Attributes:
        model: the optimizer that trained it.
        whole: the float32 model.
        binary: what NanoQuant made of it.
        bits_per_weight: realised, of the factorised kernels.
        rounded: by name, such as "gptq W3".
        four_bits: what the stage of four bits made of it, by name.
        tokens_per_second: writing speed of one sequence, of float32, four bits and binary factors.
        seconds: calibration and packing, by name.
    """

    model: str
    whole: Evaluation
    binary: Evaluation
    bits_per_weight: float
    rounded: dict[str, Evaluation]
    four_bits: dict[str, Evaluation]
    tokens_per_second: dict[str, float]
    seconds: dict[str, float]

    @property
    def name(self) -> str:
        """Of the model of binary factors, with its realised rate."""
        return f"nanoquant {self.bits_per_weight:.2f} bits"

    def every(self) -> dict[str, Evaluation]:
        """All models, by name."""
        return {"float32": self.whole, **self.four_bits, **self.rounded, self.name: self.binary}

    def rows(self) -> list[dict[str, Any]]:
        """One row for each model; speeds of those that were timed."""
        rows = []
        for name, one in self.every().items():
            row: dict[str, Any] = {
                "model": name,
                "loss (nats/token)": one.nats_per_token,
                "lost (nats/token)": one.nats_per_token - self.whole.nats_per_token,
                "on disk (MB)": one.bytes_on_disk / 1e6,
                "share of float32": one.bytes_on_disk / self.whole.bytes_on_disk,
            }
            if name in self.tokens_per_second:
                row["writing (tokens/s)"] = round(self.tokens_per_second[name])
            if name in self.seconds:
                row["compressing (s)"] = round(self.seconds[name], 1)
            rows.append(row)
        return rows

    def figure(self) -> Figure:
        """Loss against bytes of every model but the float32 one."""
        from effml.report import figures

        points = {
            name: (one.bytes_on_disk / 1e6, one.nats_per_token)
            for name, one in self.every().items()
            if name != "float32"
        }
        return figures.scatter_chart(
            points,
            xlabel="on disk (MB)",
            ylabel="held-out loss (nats per token)",
            title=f"Fewer bytes, more loss (float32: {self.whole.bytes_on_disk / 1e6:.1f} MB, "
            f"{self.whole.nats_per_token:.2f})",
        )

    def add_to(self, page: Page) -> None:
        """Adds the table and the plot."""
        page.add_heading("The best model at about one bit a weight")
        page.add_text(
            f"{self.model}: every kernel of its blocks as two matrices of signs and two vectors of scales (NanoQuant), "
            f"{self.bits_per_weight:.2f} bits per weight with the scales, tuned block by block; beside it the same "
            "model with its weights alone rounded (rtn, gptq; W2 is two bits). Embedding, head and norms stay float32, "
            "and are most of what is left of so small a model."
        )
        page.add_table(self.rows(), best={"on disk (MB)": "min"})
        page.add_figure(
            self.figure(),
            alt="scatter plot of held-out loss against bytes on disk",
            caption="Lower left is better.",
        )

    def metrics(self) -> list[Metric]:
        """Size and loss of the model of binary factors."""
        lost = self.binary.nats_per_token - self.whole.nats_per_token
        return [
            Metric(
                f"{self.binary.bytes_on_disk / 1e6:.2f} MB",
                f"on disk at {self.bits_per_weight:.2f} bits per weight",
                f"{lost:+.3f} nats per token",
            )
        ]

    def summary(self) -> dict[str, float | int]:
        """Loss and bytes of each, speed of writing of the binary one."""
        numbers: dict[str, float | int] = {
            "nanoquant_nats_per_token": self.binary.nats_per_token,
            "nanoquant_nats_lost": self.binary.nats_per_token - self.whole.nats_per_token,
            "nanoquant_bits_per_weight": self.bits_per_weight,
            "nanoquant_bytes_on_disk": self.binary.bytes_on_disk,
            "nanoquant_writing_tokens_per_second": self.tokens_per_second[self.name],
            "nanoquant_seconds": self.seconds[self.name],
        }
        for name, one in self.rounded.items():
            key = name.replace(" ", "_").lower()
            numbers[f"{key}_nats_per_token"] = one.nats_per_token
            numbers[f"{key}_nats_lost"] = one.nats_per_token - self.whole.nats_per_token
            numbers[f"{key}_bytes_on_disk"] = one.bytes_on_disk
        return numbers


def compress_to_one_bit(run: PipelineRun) -> OneBitResult:
    """Factorising the best model into signs, and rounding it to few bits beside that."""
    import jax

    from effml import data, models, quantize
    from effml.pipeline.stages import EvaluationResult, TextResult, TrainingResult
    from effml.quantize import nanoquant

    evaluated, four = run.result(EvaluationResult), run.result(CompressionResult)
    corpus, preset, best = run.result(TextResult).corpus, run.config.preset, evaluated.best
    scored = run.result(TrainingResult).models[best].config.evaluation_tokens
    loaded = models.load(str(evaluated.folders[best]))
    length = window_length(loaded)
    tokens = data.encode_corpus(corpus, "train", loaded.tokenizer)
    starts = np.random.default_rng(run.config.seed).integers(0, len(tokens) - length, _WINDOWS[preset])
    calibration = tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    key = jax.random.key(run.config.seed)

    def saved(params: object, config: object, kind: str, suffix: str) -> models.LoadedModel:
        folder = run.config.out / f"{best}-{suffix}"
        models.save(folder, params, config, loaded.tokenizer, kind=kind, extra=loaded.extra)
        return models.load(str(folder))

    seconds: dict[str, float] = {}
    started = time.perf_counter()
    settings = nanoquant.NanoQuantConfig(**_SETTINGS[preset], **_RATES)
    made = nanoquant.quantize_lm(loaded.params, loaded.config, calibration, settings, key=key)
    taken = time.perf_counter() - started
    back = saved(made.params, made.config, "binary", "nanoquant")
    binary = evaluate_model(back, corpus, max_tokens=scored)
    rounded: dict[str, Evaluation] = {}
    for bits in _ROUNDED[preset]:
        for method in _ROUNDINGS:
            started = time.perf_counter()
            plan = quantize.plan(loaded.config, method=method, bits=f"W{bits}")
            text = calibration if plan.needs_calibration else None
            packed = quantize.apply(plan, loaded.params, loaded.config, text, key=key)
            name = f"{method} W{bits}"
            seconds[name] = time.perf_counter() - started
            opened = _opened(saved(packed[0], packed[1], "packed", f"w{bits}-{method}"), loaded)
            rounded[name] = evaluate_model(opened, corpus, max_tokens=scored)
    of_four = {f"{method} {BITS}": four.compressed[method] for method in METHODS}
    result = OneBitResult(
        best,
        evaluated.models[best],
        binary,
        made.config.bits_per_weight,
        rounded,
        of_four,
        {
            "float32": four.tokens_per_second["float32"],
            **{f"{method} {BITS}": four.tokens_per_second[method] for method in METHODS},
        },
        seconds,
    )
    result.seconds[result.name] = taken
    result.tokens_per_second[result.name] = writing_speed(
        back.for_decoding(), run.config.prompt, run.config.sample_tokens
    )
    print(f"      {result.name}: {binary.nats_per_token:.3f} nats per token", flush=True)
    return result


def _opened(packed: models.LoadedModel, dense: models.LoadedModel) -> models.LoadedModel:
    """A model of rounded weights as a dense one, which needs no program of its own to be scored.

    Its activations are not rounded, so the two compute the same.
    """

    def kernels(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        return {
            "kernel" if name == "packed" else name: part.dense() if name == "packed" else kernels(part)
            for name, part in node.items()
        }

    params = {**packed.params, "layers": [kernels(layer) for layer in packed.params["layers"]]}
    return dataclasses.replace(
        packed, kind="dense", config=dense.config, forward=dense.forward, params=params
    )
