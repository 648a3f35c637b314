"""Pack a model into few bits: W4A4, W3A3, W4A16 and the like, or about one bit a weight.

The work goes on in OUT.partial until it is whole; after an interruption the same command goes on where it was.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from effml.cli import _nanoquant, _quantize

if TYPE_CHECKING:
    import numpy as np

    from effml.models import LoadedModel
    from effml.quantize import QuantizationPlan

_TOKENS = 16_384
_TOKENS_OF_A_STEP = 512


@dataclass(frozen=True)
class Command:
    """Options of `effml quantize`."""

    model: Annotated[str, tyro.conf.Positional]
    """A folder written by effml, a Hugging Face folder, a .gguf file, or a name such as smollm2."""
    method: str = "gptq"
    """rtn (round to nearest), gptq (errors made up for on calibration text), respinquant (learned rotations first),
    nanoquant (binary factors, block by block)."""
    bits: str | None = None
    """Bits of weights, activations, and keys and values, such as W4A4 (the default), W3A3, W4A16 or W4A4KV4; for
    nanoquant bits per weight, scales among them, such as 1.0 (the default), 0.8 or 0.55."""
    data: str | None = None
    """Text to calibrate on, its training side: a folder, a file, or stdlib (the default). rtn reads none."""
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
    calibration_tokens: int | None = None
    """Tokens of text to calibrate on, at least one window (default: 16384)."""
    calibration_length: int | None = None
    """Tokens in one window, at most what the model reads at once; none is the length that effml train used, or 512 for
    models from elsewhere."""
    rotation: str | None = None
    """respinquant: layerwise (each half layer has its own), global (one for all), hadamard (not learned) or none."""
    rank: int | None = None
    """respinquant: of the basis changes between layers, even; 0 is none at all (default: 32)."""
    exact: bool = False
    """respinquant: exact basis changes instead of those of --rank."""
    steps: int | None = None
    """respinquant: of training the rotations, 0 or more (default: 40)."""
    max_step: float | None = None
    """respinquant: ceiling of such a step, above 0 (default: 1.5)."""
    batch: int | None = None
    """respinquant: windows of such a step; none is as many as hold 512 tokens, and a quarter of all at most."""
    rounding: str | None = None
    """respinquant: gptq or rtn for the rotated weights; none is gptq."""
    blocks: int | None = None
    """nanoquant: stop after so many blocks. What is written is a valid model, the other blocks in full precision; the
    same command with more goes on from there."""
    epochs: int | None = None
    """nanoquant: passes over the text of each kind of tuning (default: 8); 0 only factorises."""
    iterations: int | None = None
    """nanoquant: of the factorisation (default: 400)."""
    multiple: int | None = None
    """nanoquant: of every rank (default: 32); 8 wastes fewer bits of small kernels."""
    gamma: float | None = None
    """nanoquant: share of the mean in the second moments of what kernels read and give, 0 to 1 (default: 0.4)."""
    init: str | None = None
    """nanoquant: factors to start from: lb_admm (the default), dual_svid or dbf_admm."""
    tuning_rate: float | None = None
    """nanoquant: of dense weights (default: 1e-4; small models want ten times that); factors and scales learn at a
    tenth of it."""
    allow_over: bool = False
    """nanoquant: accept kernels so small that their least rank takes more bits than asked for."""
    seed: int = 0
    """Of the windows of text and the rotations' or factors' start."""

    def run(self) -> int:
        """Plans, and unless it is a dry run calibrates, rounds, packs and writes the model."""
        import jax
        from rich.console import Console

        from effml import models, quantize, report
        from effml._validate import count, seed_in_range

        started = time.perf_counter()
        seed_in_range(self.seed)
        for name in ("calibration_tokens", "calibration_length", "batch"):
            if getattr(self, name) is not None:
                count(name, getattr(self, name))
        if self.exact and self.rank is not None:
            raise ValueError(f"rank={self.rank} and exact are two answers to one question; give one of them")
        one = self.method == "nanoquant"
        bits = self.bits or ("1.0" if one else "W4A4")
        out = self.out or Path("runs/quantize") / f"{Path(self.model).name}-{bits}-{self.method}".lower()
        if not self.dry_run and not (one and _nanoquant.continues(out)):
            _check_new(out)
        if one:
            return _nanoquant.run(self, out)
        for name in _nanoquant.OPTIONS:
            if getattr(self, name) not in (None, False):
                raise ValueError(f"--{name.replace('_', '-')} is for --method nanoquant, not {self.method!r}")
        loaded = models.load(self.model)
        if loaded.kind != "dense":
            raise ValueError(
                f"model={self.model!r} is of kind {loaded.kind!r}; only dense models are quantised"
            )
        plan = self._plan(loaded)
        self._refuse_unused(plan)
        if plan.needs_calibration:
            self.window_shape(loaded, 2 * plan.batch if plan.steps else 1)
        if self.dry_run:
            self._show(plan, loaded)
            return 0
        tokens = self.windows(loaded) if plan.needs_calibration else None
        work = out.with_name(out.name + ".partial")

        def begin() -> None:
            self._show(plan, loaded)
            line = f"work folder: {work}; if it is interrupted, the same command goes on there"
            print(line, file=sys.stderr, flush=True)

        shown = _quantize.Progress(begin)
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
            extra={
                **loaded.extra,
                "quantized_from": loaded.name,
                "calibration": (self.data or "stdlib") if plan.needs_calibration else None,
            },
        )
        result = report.Result(
            method="quantize",
            preset="cpu",
            seeds=(self.seed,),
            rows=list(rows),
            curves=_quantize.curves(rows),
            summary=_quantize.summary(rows),
            seconds=time.perf_counter() - started,
            command=self.words(),
        )
        result.save(out / "result.json")
        quantize.WorkFolder.discard(work)
        if rows:
            Console().print(report.table(_quantize.by_layer(rows)))
        if rows.training is not None:
            print(_quantize.about_training(rows.training))
        size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        print(
            f"{plan.bits} by {self.method}: {size / 1e6:.1f} MB, was {loaded.bytes_on_disk / 1e6:.1f} MB on disk"
        )
        print(f"model: {out}   rows: {out / 'result.json'}")
        print(f"go on with: effml evaluate {out}   or   effml generate {out} --prompt TEXT")
        return 0

    def _plan(self, loaded: LoadedModel) -> QuantizationPlan:
        from effml import quantize

        batch = self.batch
        if batch is None and self.method == "respinquant":
            windows, length = self.window_shape(loaded)
            batch = max(1, min(_TOKENS_OF_A_STEP // length, windows // 4))
        given = {"rank": self.rank, "steps": self.steps, "max_step": self.max_step, "batch": batch}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.exact:
            options["rank"] = None
        return quantize.plan(
            loaded.config,
            method=self.method,
            bits=self.bits or "W4A4",
            group_size=self.group_size,
            clip=None if self.no_clip else "mse",
            rounding=self.rounding,
            rotation=self.rotation,
            keep_dtype=self.keep_dtype,
            **options,
        )

    def _refuse_unused(self, plan: QuantizationPlan) -> None:
        """An option that changes nothing is one that was meant otherwise."""
        learned = plan.rotation in ("global", "layerwise")
        for without, names, why in (
            (
                not plan.needs_calibration,
                ("data", "calibration_tokens", "calibration_length"),
                "no text is read",
            ),
            (plan.rotation != "layerwise", ("rank", "exact"), "no basis changes on its skips"),
            (not learned, ("steps", "max_step", "batch"), "no rotation is learned"),
            (plan.weight_bits == 16, ("group_size", "no_clip", "rounding"), "no weight is rounded"),
        ):
            for name in names:
                if without and getattr(self, name) not in (None, False):
                    rotation = f" with rotation={plan.rotation!r}" if plan.method == "respinquant" else ""
                    raise ValueError(
                        f"--{name.replace('_', '-')} has no use here, leave it out: method={plan.method!r}"
                        f"{rotation} and bits={plan.bits!r} have {why}"
                    )

    def window_shape(self, loaded: LoadedModel, least: int = 1) -> tuple[int, int]:
        """How many windows of text, and the tokens of each."""
        from effml.pipeline.evaluation import window_length

        prefix = 0 if loaded.tokenizer is None else len(loaded.tokenizer.prefix_ids)
        most = loaded.config.max_length - prefix
        length = self.calibration_length
        if length is None:
            length = min(window_length(loaded), most)
        if not 2 <= length <= most:
            behind = f", its prefix of {prefix} left out" if prefix else ""
            raise ValueError(
                f"calibration_length={length} must be 2 to {most}, what the model reads at once{behind}"
            )
        tokens = self.calibration_tokens or _TOKENS
        windows = -(-tokens // length)
        if tokens < length or windows < least:
            wanted = "one window is" if least == 1 else f"rotations need {least} windows, that is"
            raise ValueError(
                f"calibration_tokens={tokens} are too few: {wanted} {least * length}; give more, or a smaller "
                f"--calibration-length{'' if least <= 2 else ' or --batch'}"
            )
        return windows, length

    def windows(self, loaded: LoadedModel) -> np.ndarray:
        """int32[windows, length + 1] of the text's training side, each behind the tokenizer's prefix."""
        import numpy as np

        from effml import data

        if loaded.tokenizer is None:
            raise ValueError(f"model {self.model!r} has no tokenizer, so it can't read calibration text")
        prefix = np.asarray(loaded.tokenizer.prefix_ids, np.int32)
        windows, length = self.window_shape(loaded)
        # More text than the windows need, so that they are of many places.
        source = self.data or "stdlib"
        corpus = data.load_corpus(source, max_bytes=max(40 * windows * length, 200_000))
        tokens = data.encode_corpus(corpus, "train", loaded.tokenizer)
        if len(tokens) < windows * length + 1:
            raise ValueError(
                f"data={source!r} has {len(tokens):,} tokens to calibrate on, {windows} windows of {length} need "
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
        windows, length = self.window_shape(loaded) if plan.needs_calibration else (0, 0)
        print(
            f"{plan.method} {plan.bits}{rotated}: {before / 1e6:.1f} MB of parameters become {after / 1e6:.1f} MB; "
            f"about {_quantize.duration(_quantize.seconds_of(plan, windows, length))} on this machine"
        )
        if plan.weight_bits == 16:
            print("weights stay as they are: what is rounded is rounded while the model runs")
        widest = max(row.inputs for row in plan.rows)
        if plan.rounding == "gptq" and plan.weight_bits != 16 and windows * length < widest:
            print(
                f"{windows * length} calibration tokens are fewer than the {widest} inputs of the widest kernel: "
                "more --calibration-tokens would do better"
            )

    def words(self) -> str:
        """The command line that gives these options."""
        words = ["effml", "quantize", self.model]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name == "bits":
                value = value or ("1.0" if self.method == "nanoquant" else "W4A4")
            if value != field.default or field.name == "method":
                name = "--" + field.name.replace("_", "-")
                words += [name] if value is True else [name, str(value)]
        return shlex.join(words)


def _check_new(out: Path) -> None:
    """Before the work, not behind it."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={str(out)!r} is a file; name a folder that may be created")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"out={str(out)!r} holds files; choose a new or empty folder")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"out={str(out)!r} can't be made: {above} is a file")


def _bytes(tree: Any) -> int:
    from effml import trees

    return trees.byte_count(tree)
