"""The pipeline's third job: the best model in four bits, saved, read back, measured, and timed as it writes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from effml.pipeline.evaluation import Evaluation, evaluate_model, window_length
from effml.pipeline.runner import PipelineRun
from effml.report import Metric

if TYPE_CHECKING:
    from effml.models import LoadedModel
    from effml.report import Page

__all__ = ["BITS", "METHODS", "CompressionResult", "compress_best", "writing_speed"]

BITS = "W4A4"
METHODS = ("rtn", "respinquant")
_WINDOWS = {"cpu": 32, "smoke": 2}
_STEPS = {"cpu": 12, "smoke": 1}


@dataclass(frozen=True)
class CompressionResult:
    """The best model as it was, and in four bits by each method.

    Attributes:
        model: the optimizer that trained it.
        whole: the float32 model.
        compressed: what each method made of it, in the order of `METHODS`.
        tokens_per_second: writing speed of one sequence, by name; the float32 model is `"float32"`.
        seconds: calibration and packing, by method.
    """

    model: str
    whole: Evaluation
    compressed: dict[str, Evaluation]
    tokens_per_second: dict[str, float]
    seconds: dict[str, float]

    def rows(self) -> list[dict[str, Any]]:
        """One row for the model as it was and one for each method."""
        every = {"float32": self.whole, **{f"{name} {BITS}": e for name, e in self.compressed.items()}}
        return [
            {
                "model": name,
                "loss (nats/token)": one.nats_per_token,
                "lost (nats/token)": one.nats_per_token - self.whole.nats_per_token,
                "on disk (MB)": one.bytes_on_disk / 1e6,
                "share of float32": one.bytes_on_disk / self.whole.bytes_on_disk,
                "writing (tokens/s)": round(self.tokens_per_second[name.split(" ")[0]]),
                "compressing (s)": round(self.seconds.get(name.split(" ")[0], 0.0), 1),
            }
            for name, one in every.items()
        ]

    def add_to(self, page: Page) -> None:
        """Adds the table of compressed models."""
        page.add_heading("The best model in four bits")
        page.add_text(
            f"{self.model}, with weights and activations of 4 bits ({BITS}, one scale per output channel and per "
            "token); embedding, head and norms stay float32. rtn rounds to the nearest of 16 values; respinquant "
            "rotates the residual stream first, with rotations that are learned for every layer and folded into the "
            "weights. Each was saved, read back and scored on the same held-out files."
        )
        page.add_table(self.rows(), best={"on disk (MB)": "min"})

    def metrics(self) -> list[Metric]:
        """Size and loss of the model that the last method made."""
        name, last = list(self.compressed.items())[-1]
        lost = last.nats_per_token - self.whole.nats_per_token
        return [
            Metric(
                f"{last.bytes_on_disk / 1e6:.2f} MB",
                f"on disk in {BITS}, {name}",
                f"{self.whole.bytes_on_disk / 1e6:.2f} MB in float32; {lost:+.3f} nats per token",
            )
        ]

    def summary(self) -> dict[str, float | int]:
        """Loss, bytes and speed, by method."""
        numbers: dict[str, float | int] = {}
        for name, one in self.compressed.items():
            numbers[f"{name}_nats_per_token"] = one.nats_per_token
            numbers[f"{name}_nats_lost"] = one.nats_per_token - self.whole.nats_per_token
            numbers[f"{name}_bytes_on_disk"] = one.bytes_on_disk
            numbers[f"{name}_writing_tokens_per_second"] = self.tokens_per_second[name]
            numbers[f"{name}_seconds"] = self.seconds[name]
        return numbers


def compress_best(run: PipelineRun) -> CompressionResult:
    """Packing the best model into four bits and measuring what is left of it."""
    import jax

    from effml import data, models, quantize
    from effml.pipeline.stages import EvaluationResult, TextResult, TrainingResult

    evaluated = run.result(EvaluationResult)
    corpus = run.result(TextResult).corpus
    scored = run.result(TrainingResult).models[evaluated.best].config.evaluation_tokens
    loaded = models.load(str(evaluated.folders[evaluated.best]))
    length, windows = window_length(loaded), _WINDOWS[run.config.preset]
    tokens = data.encode_corpus(corpus, "train", loaded.tokenizer)
    starts = np.random.default_rng(run.config.seed).integers(0, len(tokens) - length, windows)
    calibration = tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)

    compressed: dict[str, Evaluation] = {}
    speed = {"float32": writing_speed(loaded.for_decoding(), run.config.prompt, run.config.sample_tokens)}
    seconds: dict[str, float] = {}
    for method in METHODS:
        started = time.perf_counter()
        plan = quantize.plan(loaded.config, method=method, bits=BITS, steps=_STEPS[run.config.preset])
        text = calibration if plan.needs_calibration else None
        params, config, _ = quantize.apply(
            plan, loaded.params, loaded.config, text, key=jax.random.key(run.config.seed)
        )
        seconds[method] = time.perf_counter() - started
        folder = run.config.out / f"{evaluated.best}-{BITS.lower()}-{method}"
        models.save(folder, params, config, loaded.tokenizer, kind="packed", extra=loaded.extra)
        packed = models.load(str(folder))
        compressed[method] = evaluate_model(packed, corpus, max_tokens=scored)
        speed[method] = writing_speed(packed.for_decoding(), run.config.prompt, run.config.sample_tokens)
        print(f"      {method} {BITS}: {compressed[method].nats_per_token:.3f} nats per token", flush=True)
    return CompressionResult(evaluated.best, evaluated.models[evaluated.best], compressed, speed, seconds)


def writing_speed(loaded: LoadedModel, prompt: str, new_tokens: int) -> float:
    """Tokens per second of one greedy sequence with a key-value cache, compilation left out."""
    from effml import data, decode

    start = data.encode_prompt(loaded.tokenizer, prompt)[None]
    new_tokens = min(new_tokens, loaded.config.max_length - start.shape[1])
    seconds = float("inf")
    for _ in range(3):  # the first call compiles
        began = time.perf_counter()
        written = decode.generate(loaded, start, max_new_tokens=new_tokens)
        count = int(np.asarray(written.lengths)[0])
        seconds = min(seconds, (time.perf_counter() - began) / max(count, 1))
    return 1 / seconds
