"""One model with outliers, rotated, rounded and measured in every way of the ReSpinQuant experiment."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effml import quantize
from effml.nn import transformer
from effml.quantize import respinquant
from experiments._respinquant_models import Text, draw_windows

Row = tuple[str, str, float, dict[str, Any]]


class Bench:
    """A trained model, the text to calibrate and to measure on, and its loss in full precision.

    Args:
        config: of the experiment.
        params: of the model.
        text: training and held-out text.
        seed: of calibration windows and rotations.
    """

    def __init__(self, config: Any, params: dict[str, Any], text: Text, seed: int):
        self.config, self.params, self.model = config, params, config.model.model()
        self.key = jax.random.key(1000 + seed)
        self.held_out = jnp.asarray(text.held_out)
        self.pool = draw_windows(text.train, (config.calibration,), config.model.length, 100 + seed)
        order = np.random.default_rng(200 + seed)
        self.batches = self.pool[order.integers(0, config.calibration, (config.steps, config.batch))]
        kept = min(16, config.calibration // config.batch)
        self.keep = self.pool[: kept * config.batch].reshape(kept, config.batch, -1)
        self.full_precision = self._measure(params, quantize.PackedConfig(self.model, weight_bits=16))
        self._learned: dict[tuple[str, int], respinquant.TrainedRotations] = {}
        self._runs: dict[tuple[str, int], dict[float, respinquant.TrainedRotations]] = {}
        self.rates: dict[tuple[str, int], float] = {}

    def rows(self, bits: str) -> Iterator[Row]:
        """Name, rounding, excess in nats and details of every way of rounding to these bits."""
        activation_bits = quantize.parse_bits(bits)[1]
        yield from self._both("none", self._unrotated(), bits)
        start = respinquant.init_rotations(self.key, self.model, "walsh")
        yield from self._both("plain", self._rotated(start, 0), bits)
        signs = [
            respinquant.init_rotations(jax.random.fold_in(self.key, index), self.model, "hadamard")
            for index in range(self.config.sign_seeds)
        ]
        found = [self._excess(self._rotated(one, 0), bits) for one in signs]
        yield "signs", "rtn", float(np.mean(found)), {"each": found}
        for kind in ("global", "layerwise"):
            learned = self.learn(kind, activation_bits)
            about = {
                "orthogonality": learned.orthogonality,
                "seconds": learned.seconds,
                "best_step": learned.best_step,
                "evaluations": learned.evaluations,
                "realised_step": float(np.mean(learned.taken)),
            }
            rank = None if kind == "layerwise" else 0
            about["rate"] = self.rates[kind, activation_bits]
            about["excess_by_rate"] = {
                f"{rate:g}": self._excess(self._rotated(one.rotations, rank), bits)
                for rate, one in self._runs[kind, activation_bits].items()
            }
            yield from self._both(kind, self._rotated(learned.rotations, rank), bits, about)
        learned = self.learn("layerwise", activation_bits)
        for rank in self.config.ranks:
            gptq = self.config.gptq and rank == self.config.model.width // 4
            ready = self._rotated(learned.rotations, rank)
            yield from self._both(f"r{rank}", ready, bits, {}, gptq)

    def unquantized(self) -> dict[str, float]:
        """Change of the loss by learned rotations alone, nothing rounded, and how orthogonal the rotations are."""
        bits = quantize.parse_bits(self.config.bits[0])[1]
        learned = self.learn("layerwise", bits)
        config = functools.partial(quantize.PackedConfig, weight_bits=16, hadamard=True)
        changes = {}
        for name, rank in (("exact", None), ("quarter", self.config.model.width // 4)):
            ready = self._rotated(learned.rotations, rank)
            loss = self._measure(ready.params, config(ready.config))
            changes[f"unquantized_{name}"] = loss - self.full_precision
        changes["orthogonality"] = max(one.orthogonality for one in self._learned.values())
        return changes

    def learn(self, kind: str, activation_bits: int) -> respinquant.TrainedRotations:
        """Rotations of a kind, from the plain Walsh-Hadamard matrix; learned once for each number of bits.

        Every kind is learned at each of the same rates; the calibration set that chooses the step chooses the rate.
        """
        if (kind, activation_bits) not in self._learned:
            start = respinquant.init_rotations(self.key, self.model, "walsh")
            found = {}
            for rate in self.config.rates:
                settings = respinquant.RotationTraining(
                    steps=self.config.steps, max_step=rate, activation_bits=activation_bits, evaluate_every=10
                )
                found[rate] = respinquant.train_rotations(
                    self.params, start, self.batches, self.model, settings, kind=kind, keep=self.keep
                )
            best = {rate: min(loss for _, loss in one.evaluations) for rate, one in found.items()}
            self.rates[kind, activation_bits] = min(best, key=best.__getitem__)
            self._learned[kind, activation_bits] = found[self.rates[kind, activation_bits]]
            self._runs[kind, activation_bits] = found
        return self._learned[kind, activation_bits]

    def _unrotated(self) -> respinquant.PreparedModel:
        return respinquant.prepare(self.params, self.model, key=self.key, kind="none")

    def _rotated(self, rotations: Any, rank: int | None) -> respinquant.PreparedModel:
        return respinquant.rotate(self.params, self.model, rotations, rank=rank)

    def _both(
        self, name: str, ready: Any, bits: str, about: dict[str, Any] | None = None, gptq: bool = True
    ) -> Iterator[Row]:
        changes = {
            "distance": float(np.mean([row["distance"] for row in ready.rows])) if ready.rows else None,
            "residual_error": float(np.mean([row["residual_error"] for row in ready.rows]))
            if ready.rows
            else None,
        }
        yield name, "rtn", self._excess(ready, bits), {**changes, **(about or {})}
        if self.config.gptq and gptq:
            yield name, "gptq", self._excess(ready, bits, gptq=True), changes

    def _excess(self, ready: respinquant.PreparedModel, bits: str, gptq: bool = False) -> float:
        weight_bits, activation_bits, _ = quantize.parse_bits(bits)
        config = quantize.PackedConfig(
            ready.config, weight_bits=weight_bits, activation_bits=activation_bits, hadamard=ready.hadamard
        )
        stream = quantize.LayerStream(ready.params, self.pool, config) if gptq else None
        layers = []
        for layer in ready.params["layers"]:
            layers.append(rounded_layer(layer, weight_bits, stream))
            if stream is not None:
                stream.advance(layers[-1])
        return self._measure({**ready.params, "layers": layers}, config) - self.full_precision

    def _measure(self, params: Any, config: quantize.PackedConfig) -> float:
        stacked = jax.tree.map(jnp.asarray, transformer.stack_layers(params))
        return float(_loss(stacked, self.held_out, config, self.config.model.quick))


def rounded_layer(
    layer: dict[str, Any], bits: int, stream: quantize.LayerStream | None = None
) -> dict[str, Any]:
    """A layer with every kernel rounded, by nearest value or by GPTQ, in floating point."""
    seen = {} if stream is None else stream.statistics(layer)

    def kernel(block: str, name: str, value: Any) -> Any:
        if stream is None:
            return quantize.rtn(value, bits).kernel
        tap = {"output": "attention.output.input", "down": "mlp.down.input"}.get(name, f"{block}.input")
        return quantize.gptq(value, seen[tap].hessian, bits).kernel

    blocks = {
        block: {
            name: {**part, "kernel": np.asarray(kernel(block, name, part["kernel"]))}
            for name, part in layer[block].items()
        }
        for block in ("attention", "mlp")
    }
    return {**layer, **blocks}


def _loss(params: Any, tokens: jax.Array, config: quantize.PackedConfig, quick: bool) -> jax.Array:
    return _compiled(quick)(params, tokens, config)


@functools.lru_cache(maxsize=2)
def _compiled(quick: bool) -> Any:
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

    @functools.partial(jax.jit, static_argnames="config", compiler_options=options if quick else None)
    def loss(params: Any, tokens: jax.Array, config: quantize.PackedConfig) -> jax.Array:
        seams = quantize.seams(config)
        return transformer.next_token_loss(params, {"tokens": tokens}, config.model, **seams)[0]

    return loss
