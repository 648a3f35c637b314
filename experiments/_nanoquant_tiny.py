"""The small language model of NanoQuant's experiment, quantised in every way; each way is kept when it is done.

Excess is what a model loses: nats per token over the model in full precision, on windows of held-out text.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effml import data, models
from effml.nn import transformer
from effml.nn.hub import _files
from effml.quantize import nanoquant

MULTIPLE = 8
STAGES = ("admm", "dense", "ste", "kl")
STAGE_TITLES = {
    "admm": "LB-ADMM alone",
    "dense": "+ dense tuning",
    "ste": "+ factor tuning (STE)",
    "kl": "+ scales by KL: the full pipeline",
}
INIT_TITLES = {"dual_svid": "full pipeline from Dual-SVID", "dbf_admm": "full pipeline from DBF-ADMM"}


@dataclass(frozen=True)
class TinyConfig:
    """Sizes; the defaults are the spec's.

    Attributes:
        steps: of training the model; 0 is an untrained toy.
        windows: calibration windows of `length` tokens.
        length: tokens in one.
        measured: held-out windows.
        epochs: of each kind of tuning.
        iterations: of LB-ADMM; None is 400.
        ablated: bits at which stages and initialisers are compared.
        bits: of the full pipeline.
        rate: of dense tuning; factors and scales learn at a tenth of it.
        inits: other initialisers than LB-ADMM.
        model_each: one trained model for each seed; else seeds draw the text and the starts alone.
    """

    steps: int = 800
    windows: int = 64
    length: int = 128
    measured: int = 256
    epochs: int = 8
    iterations: int | None = None
    ablated: float = 0.8
    bits: tuple[float, ...] = (1.0, 0.8, 0.55)
    rate: float = 1e-3
    inits: tuple[str, ...] = ("dual_svid", "dbf_admm")
    model_each: bool = False


@dataclass(frozen=True)
class Job:
    """One way of quantising: `kind` is "whole", "sign_row_scale", "onebit_svid", a stage, or an initialiser."""

    kind: str
    bits: float = 1.0

    @property
    def title(self) -> str:
        """In words."""
        titles = {
            "whole": "full precision",
            "sign_row_scale": "sign and row scale",
            "onebit_svid": "OneBit-SVID",
        }
        return (titles | STAGE_TITLES | INIT_TITLES)[self.kind]


def jobs(config: TinyConfig) -> list[Job]:
    """All of them, in the order of the table."""
    ablated = [Job(kind, config.ablated) for kind in ("admm", "dense", "ste", *config.inits)]
    full = [Job("kl", bits) for bits in config.bits]
    return [Job("whole"), Job("sign_row_scale"), Job("onebit_svid"), *ablated, *full]


def cache() -> Path:
    """Where the experiment keeps what is done."""
    return Path(os.environ.get("EFFML_CACHE") or Path.home() / ".cache/effml") / "nanoquant"


def folder(config: TinyConfig, seed: int) -> Path:
    """Where the finished jobs of one seed are kept."""
    text = data.load_corpus("stdlib").fingerprint[:12] if config.steps else "toy"
    key = hashlib.blake2b(json.dumps(dataclasses.asdict(config)).encode(), digest_size=6).hexdigest()
    return cache() / f"{text}-{key}-{seed}"


class TinyBench:
    """A model, text to calibrate and to measure on, and what is known of both.

    Args:
        config: sizes.
        seed: of the model (where each seed has one), of calibration windows and of starts.
        keep: whether finished jobs are kept for the next time.
    """

    def __init__(self, config: TinyConfig, seed: int, keep: bool = True):
        self.config, self.seed, self.keep = config, seed, keep
        self.key = jax.random.key(1000 + seed)
        if config.steps:
            from experiments._tiny_language_model import tiny_language_model

            loaded = tiny_language_model(config.steps, seed if config.model_each else 0)
            self.model, params = loaded.config, loaded.params
            corpus, tokenizer = data.load_corpus("stdlib"), loaded.tokenizer
        else:
            self.model = transformer.TransformerConfig(
                256, 16, 1, 2, 16, mlp="gelu", max_length=config.length
            )
            params = transformer.init_params(self.key, self.model)
            corpus, tokenizer = data.load_corpus("stdlib", max_bytes=60_000), data.ByteTokenizer()
        self.params = transformer.unstack_layers(params)
        train, other = (
            np.asarray(data.encode_corpus(corpus, side, tokenizer)) for side in ("train", "held_out")
        )
        self.calibration = self._windows(train, config.windows)
        starts = np.linspace(0, len(other) - config.length - 1, config.measured).astype(int)
        self.held_out = other[starts[:, None] + np.arange(config.length + 1)].astype(np.int32)

    def _windows(self, tokens: np.ndarray, count: int) -> np.ndarray:
        starts = np.random.default_rng(100 + self.seed).integers(0, len(tokens) - self.config.length, count)
        return tokens[starts[:, None] + np.arange(self.config.length + 1)].astype(np.int32)

    @functools.cached_property
    def statistics(self) -> dict[str, Any]:
        """Second moments, one window a batch."""
        return nanoquant.collect_diag_stats(
            self.model, self.params, [window[None] for window in self.calibration]
        )

    def rows(self, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """Every job's outcome, done now or before."""
        place = folder(self.config, self.seed)
        for job in jobs(self.config):
            path = place / f"{job.kind}-{job.bits:g}.json"
            if self.keep and path.is_file():
                row = json.loads(path.read_text())
            else:
                row = self.run(job)
                if self.keep:
                    place.mkdir(parents=True, exist_ok=True)
                    temporary = path.with_suffix(".partial")
                    temporary.write_text(json.dumps(row, indent=1))
                    temporary.replace(path)
                what = f"  seed {self.seed}: {job.title}, {job.bits:g} bits"
                say(f"{what}: {row['nats']:.4f} nats ({row['seconds']:.0f} s)")
            yield {"seed": self.seed, "kind": job.kind, "title": job.title, "asked": job.bits, **row}

    def run(self, job: Job) -> dict[str, Any]:
        """Nats per token on held-out text, bits per weight, errors and seconds of one way of quantising."""
        began = time.perf_counter()
        if job.kind in ("whole", "sign_row_scale", "onebit_svid"):
            params, about = self._without_factors(job.kind)
        else:
            params, about = self._factorised(job)
        seconds = time.perf_counter() - began
        return {"nats": self._measure(params), "seconds": seconds, **about}

    def _without_factors(self, kind: str) -> tuple[Any, dict[str, Any]]:
        if kind == "whole":
            return self.params, {"bits_per_weight": 32.0}
        approximate = {"sign_row_scale": nanoquant.sign_row_scale, "onebit_svid": nanoquant.onebit_svid}[kind]
        scales = {"sign_row_scale": 1, "onebit_svid": 2}[kind]  # outputs alone, or inputs too
        bits = weights = 0

        def walk(tree: Any) -> Any:
            nonlocal bits, weights
            if not isinstance(tree, dict):
                return tree
            if "kernel" in tree:
                inputs, outputs = tree["kernel"].shape
                weights += inputs * outputs
                bits += inputs * outputs + 16 * (outputs + (inputs if scales == 2 else 0))
                return {**tree, "kernel": approximate(tree["kernel"])}
            return {name: walk(part) for name, part in tree.items()}

        layers = [walk(layer) for layer in self.params["layers"]]
        return {**self.params, "layers": layers}, {"bits_per_weight": bits / weights}

    def settings(self, job: Job) -> nanoquant.NanoQuantConfig:
        """Of one job; the scale step is run apart, so that what it does can be measured."""
        config = self.config
        until = STAGES.index(job.kind) if job.kind in STAGES else len(STAGES) - 1
        init = job.kind if job.kind in INIT_TITLES else "lb_admm"
        return nanoquant.NanoQuantConfig(
            bits=job.bits,
            multiple=MULTIPLE,
            init=init,
            iterations=config.iterations,
            dense_epochs=config.epochs if until >= 1 else 0,
            factor_epochs=config.epochs if until >= 2 else 0,
            scale_epochs=config.epochs if until >= 3 else 0,
            dense_rate=config.rate,
            factor_rate=config.rate / 10,
            scale_rate=config.rate / 10,
        )

    def _factorised(self, job: Job) -> tuple[Any, dict[str, Any]]:
        made = nanoquant.quantize_lm(
            self.params, self.model, self.calibration, self.settings(job), key=self.key, stats=self.statistics
        )
        with tempfile.TemporaryDirectory() as place:
            models.save(f"{place}/model", made.params, made.config, kind="binary")
            stored = _files.SafeTensors([Path(place) / "model/model.safetensors"], types=None)
            signs = [stored.read(name) for name in stored.shapes if ".binary." in name]
        weights = sum(row["weights"] for row in self._sizes(made))
        of = lambda name: [row[name] for row in made.rows if name in row]
        about = {
            "bits_per_weight": made.config.bits_per_weight,
            "stored_share": sum(one.nbytes for one in signs) / (2 * weights),
            "installed_error": float(np.mean(of("installed_error"))),
            "block_errors": list(dict.fromkeys(of("block_error"))),
            "scale_losses": made.scale_losses,
            "ranks": dict(made.config.ranks),
        }
        return dense_params(made.params), about

    def _sizes(self, made: Any) -> list[dict[str, int]]:
        plan = nanoquant.plan(self.model, nanoquant.NanoQuantConfig(bits=made.config.bits, multiple=MULTIPLE))
        return [{"weights": row.inputs * row.outputs} for row in plan.rows]

    def _measure(self, params: Any) -> float:
        stacked = jax.tree.map(jnp.asarray, transformer.stack_layers(params))
        batch = min(32, len(self.held_out))
        parts = self.held_out[: len(self.held_out) // batch * batch].reshape(
            -1, batch, self.held_out.shape[1]
        )
        return float(np.mean([float(_loss(stacked, part, self.model)) for part in parts]))


def dense_params(params: Any) -> Any:
    """With the kernels that binary factors stand for: every way is then measured by the same program."""
    if isinstance(params, dict):
        if "binary" in params:
            rest = {name: part for name, part in params.items() if name != "binary"}
            return {"kernel": params["binary"].dense(), **rest}
        return {name: dense_params(part) for name, part in params.items()}
    return [dense_params(part) for part in params] if isinstance(params, list) else params


@functools.partial(jax.jit, static_argnames="model")
def _loss(params: Any, tokens: jax.Array, model: transformer.TransformerConfig) -> jax.Array:
    return transformer.next_token_loss(params, {"tokens": tokens}, model)[0]
