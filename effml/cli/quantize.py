"""Pack a model into few bits: W4A4, W3A3, W4A16 and the like.

The work goes on in OUT.partial until it is whole; after an interruption the same command goes on where it was.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    import numpy as np

    from effml.models import LoadedModel
    from effml.quantize import QuantizationPlan


@dataclass(frozen=True)
class Command:
    """Options of `effml quantize`."""

    model: Annotated[str, tyro.conf.Positional]
    """A folder written by effml, a Hugging Face folder, a .gguf file, or a name such as smollm2."""
    method: str = "gptq"
    """rtn (round to nearest), gptq (errors made up for on calibration text), respinquant (learned rotations first)."""
    bits: str = "W4A4"
    """Bits of weights, activations, and keys and values, such as W4A4, W3A3, W4A16 or W4A4KV4."""
    data: str = "stdlib"
    """Text to calibrate on, its training side: a folder, a file, or stdlib."""
    out: Path | None = None
    """New folder for the packed model (default: runs/quantize/MODEL-BITS-METHOD)."""
    dry_run: bool = False
    """Only show what would be done: bytes of every kernel, and about how long it takes."""
    group_size: int | None = None
    """Inputs that share a scale; none is one scale for each output."""
    no_clip: bool = False
    """Scales that reach the largest weight, instead of those with the smallest error."""
    keep_dtype: str = "float32"
    """Of embedding and head, which are not rounded: float32 or bfloat16."""
    calibration_tokens: int = 16_384
    """Tokens of text to calibrate on."""
    calibration_length: int | None = None
    """Tokens in one window; none is the length that effml train used, or 512 for models from elsewhere."""
    rotation: str | None = None
    """respinquant: layerwise (each half layer has its own), global (one for all), hadamard (not learned) or none."""
    rank: int = 32
    """respinquant: of the basis changes between layers, even; 0 is none at all."""
    exact: bool = False
    """respinquant: exact basis changes instead of those of --rank."""
    steps: int = 40
    """respinquant: of training the rotations, one window each."""
    max_step: float = 1.5
    """respinquant: ceiling of such a step."""
    rounding: str | None = None
    """respinquant: gptq or rtn for the rotated weights; none is gptq."""
    seed: int = 0
    """Of the windows of text and the rotations' start."""

    def run(self) -> int:
        """Plans, and unless it is a dry run calibrates, rounds, packs and writes the model."""
        import jax
        from rich.console import Console

        from effml import models, quantize, report
        from effml._validate import count, seed_in_range

        started = time.perf_counter()
        seed_in_range(self.seed)
        count("calibration_tokens", self.calibration_tokens)
        out = self.out or Path("runs/quantize") / f"{Path(self.model).name}-{self.bits}-{self.method}".lower()
        if not self.dry_run:
            _check_new(out)
        loaded = models.load(self.model)
        if loaded.kind != "dense":
            raise ValueError(
                f"model={self.model!r} is of kind {loaded.kind!r}; only dense models are quantised"
            )
        plan = quantize.plan(
            loaded.config,
            method=self.method,
            bits=self.bits,
            group_size=self.group_size,
            clip=None if self.no_clip else "mse",
            rounding=self.rounding,
            rotation=self.rotation,
            rank=None if self.exact else self.rank,
            steps=self.steps,
            max_step=self.max_step,
            keep_dtype=self.keep_dtype,
        )
        self._show(plan, loaded)
        if self.dry_run:
            return 0
        tokens = self._windows(loaded) if plan.needs_calibration else None
        work = out.with_name(out.name + ".partial")
        shown = _Progress(f"work folder: {work}; if it is interrupted, the same command goes on there")
        params, config, rows = quantize.apply(
            plan,
            loaded.params,
            loaded.config,
            tokens,
            key=jax.random.key(self.seed),
            work=work,
            progress=shown,
        )
        models.save(
            out,
            params,
            config,
            loaded.tokenizer,
            loaded.chat_template,
            kind="packed",
            extra={**loaded.extra, "quantized_from": loaded.name, "calibration": self.data},
        )
        result = report.Result(
            method="quantize",
            preset="cpu",
            seeds=(self.seed,),
            rows=rows,
            seconds=time.perf_counter() - started,
            command=f"effml quantize {self.model} --method {self.method} --bits {plan.bits} --data {self.data}",
        )
        result.save(out / "result.json")
        quantize.WorkFolder.discard(work)
        Console().print(report.table(_by_layer(rows)))
        size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        print(
            f"{plan.bits} by {self.method}: {size / 1e6:.1f} MB, was {loaded.bytes_on_disk / 1e6:.1f} MB on disk"
        )
        print(f"model: {out}   rows: {out / 'result.json'}")
        print(f"go on with: effml evaluate {out}   or   effml generate {out} --prompt TEXT")
        return 0

    def _windows(self, loaded: LoadedModel) -> np.ndarray:
        """int32[windows, length + 1] of the text's training side, each behind the tokenizer's prefix."""
        import numpy as np

        from effml import data
        from effml.pipeline.evaluation import window_length

        if loaded.tokenizer is None:
            raise ValueError(f"model {self.model!r} has no tokenizer, so it can't read calibration text")
        prefix = np.asarray(loaded.tokenizer.prefix_ids, np.int32)
        length = window_length(loaded) if self.calibration_length is None else self.calibration_length
        length = min(length, loaded.config.max_length - len(prefix))
        if length < 2:
            raise ValueError(f"calibration_length={length} must be at least 2")
        windows = -(-self.calibration_tokens // length)
        # More text than the windows need, so that they are of many places.
        corpus = data.load_corpus(self.data, max_bytes=max(40 * self.calibration_tokens, 200_000))
        tokens = data.encode_corpus(corpus, "train", loaded.tokenizer)
        if len(tokens) < windows * length + 1:
            raise ValueError(
                f"data={self.data!r} has {len(tokens):,} tokens to calibrate on, {windows} windows of {length} need "
                f"{windows * length + 1:,}: give more text, or fewer --calibration-tokens"
            )
        starts = np.random.default_rng(self.seed).integers(0, len(tokens) - length, windows)
        read = tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)
        return np.concatenate([np.broadcast_to(prefix, (windows, len(prefix))), read], axis=1)

    def _show(self, plan: QuantizationPlan, loaded: LoadedModel) -> None:
        from rich.console import Console

        from effml import report

        rotated = "" if plan.rotation == "none" else f", {plan.rotation} rotations"
        before = _bytes(loaded.params)
        after = plan.packed_bytes + plan.kept_bytes
        Console().print(report.table(plan.summary()))
        print(
            f"{plan.method} {plan.bits}{rotated}: {before / 1e6:.1f} MB of parameters become {after / 1e6:.1f} MB; "
            f"about {_duration(_seconds(plan, self.calibration_tokens))} on this machine"
        )


def _check_new(out: Path) -> None:
    """Before the work, not behind it."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={str(out)!r} is a file; name a folder that may be created")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"out={str(out)!r} holds files; choose a new or empty folder")


def _bytes(tree: Any) -> int:
    from effml import trees

    return trees.byte_count(tree)


def _seconds(plan: QuantizationPlan, tokens: int) -> float:
    """A rough guess from operation counts and one timed product."""
    import jax
    import jax.numpy as jnp

    size = 1024
    product = jax.jit(jnp.matmul)
    x = jnp.ones((size, size))
    product(x, x).block_until_ready()
    started = time.perf_counter()
    product(x, x).block_until_ready()
    rate = 2 * size**3 / (time.perf_counter() - started)  # operations per second
    weights = sum(row.inputs * row.outputs for row in plan.rows)
    seconds = 0.0
    if plan.weight_bits < 16:
        seconds += (80 if plan.clip else 1) * 4e-9 * weights
        if plan.rounding == "gptq":
            inputs = {(row.layer, row.name.split(".")[0], row.inputs): row.inputs for row in plan.rows}
            counted = 2 * 2 * tokens * weights + 2 * tokens * sum(n * n for n in inputs.values())
            counted += sum(2 * row.inputs**2 * (row.inputs + row.outputs) for row in plan.rows)
            seconds += counted / rate
    window = 512
    return 5 + seconds + plan.steps * plan.batch * window * 12 * weights / rate


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _by_layer(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each layer: bytes, the largest errors, seconds."""
    table = []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        own = [row for row in rows if row["layer"] == layer]
        line = {
            "layer": layer,
            "bits": own[0]["bits"],
            "kB": sum(row["bytes"] for row in own) / 1e3,
            "weight error": max(row["weight_error"] for row in own),
        }
        for name, key in (
            ("output error", "output_error"),
            ("orthogonality", "orthogonality"),
            ("basis change error", "residual_error"),
        ):
            found = [row[key] for row in own if row.get(key) is not None]
            if found:
                line[name] = max(found)
        table.append({**line, "seconds": sum(row["seconds"] for row in own)})
    return table


class _Progress:
    """Lines with the rest of the time: one that is written over on a terminal, one every 5 seconds elsewhere."""

    def __init__(self, heading: str) -> None:
        self._heading = heading
        self._stage = ""
        self._began = self._shown = 0.0
        self._first = 0

    def __call__(self, stage: str, done: int, total: int, detail: str) -> None:
        now = time.perf_counter()
        if self._heading:
            print(self._heading, file=sys.stderr, flush=True)
            self._heading = ""
        if stage != self._stage:
            self._stage, self._began, self._first, self._shown = stage, now, done, 0.0
        each = (now - self._began) / max(done - self._first, 1)
        left = f"about {_duration(each * (total - done))} left" if done > self._first else ""
        line = " | ".join(part for part in (f"{stage} {done}/{total}", detail, left) if part)
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif done == total or now - self._shown >= 5:
            self._shown = now
            print(line, file=sys.stderr, flush=True)
