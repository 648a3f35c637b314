"""A tiny language model that reads 1,024 bytes and copies what was planted far back: FFD's and no other's testbed.

Text is the Python standard library's own source (bytes below 128). *Needles* are strings of eight distinct bytes of 128
and above, which no text has; each is planted once, and once more later, where its first byte tells which one to copy.
Most steps are taken on short windows, the last ones on windows of the full length.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from effml import data
from effml.nn import transformer
from effml.train import schedule

NEEDLE = 8  # bytes of a needle; all but the first are to be copied
COPY_WEIGHT = 4.0


@dataclass(frozen=True)
class NeedleModelConfig:
    """Sizes of the model and of its training."""

    width: int = 96
    layers: int = 3
    heads: int = 6
    kv_heads: int = 2
    mlp_width: int = 256
    length: int = 1024
    short: int = 256
    batch: int = 16
    steps: int = 700
    long_steps: int = 120
    rate: float = 3e-3
    needles: int = 3
    text_bytes: int = 4_000_000

    def model(self) -> transformer.TransformerConfig:
        """Grouped queries and rotary positions, as in the models FFD is for."""
        return transformer.TransformerConfig(
            vocab_size=256,
            width=self.width,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_size=32,
            mlp_width=self.mlp_width,
            max_length=4 * self.length,
            initializer_std=0.06,
        )


class Text(NamedTuple):
    """Bytes of source text, 0 to 127 only: uint8[n] each."""

    train: np.ndarray
    held_out: np.ndarray


def load_text(config: NeedleModelConfig) -> Text:
    """The two sides of the corpus; bytes of 128 and above are left out."""
    corpus = data.load_corpus("stdlib", max_bytes=config.text_bytes)
    sides = []
    for side in ("train", "held_out"):
        ids = np.asarray(data.encode_corpus(corpus, side, data.ByteTokenizer()))
        sides.append(ids[ids < 128].astype(np.uint8))
    return Text(*sides)


class Planted(NamedTuple):
    """Windows with needles.

    Attributes:
        tokens: int32[windows, length + 1].
        copied: bool[windows, length], predictions that can be copied from a needle.
    """

    tokens: np.ndarray
    copied: np.ndarray


def plant(text: np.ndarray, shape: tuple[int, ...], length: int, needles: int, seed: int) -> Planted:
    """Windows of text at random places, each with so many needles, planted and repeated in random order."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    starts = rng.integers(0, len(text) - length - 1, count)
    tokens = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    copied = np.zeros((count, length), bool)
    slots = (length + 1) // (NEEDLE + 1)
    for row in range(count):
        strings = 128 + rng.permutation(128)[: needles * NEEDLE].reshape(needles, NEEDLE)
        # Any pairing of places will do: the earlier one of a pair is the needle.
        places = (rng.permutation(slots)[: 2 * needles] * (NEEDLE + 1)).reshape(2, needles)
        for string, pair in zip(strings, places.T):
            for place in pair:
                tokens[row, place : place + NEEDLE] = string
            copied[row, pair.max() : pair.max() + NEEDLE - 1] = True
    return Planted(tokens.reshape(*shape, length + 1), copied.reshape(*shape, length))


def plant_at_end(text: np.ndarray, count: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Needle tests: one needle at evenly spread depths, its first byte again near the end, then the rest of it.

    Returns:
        int32[count, length] of which the last `NEEDLE - 1` predictions are the copy, and the depths.
    """
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(text) - length, count)
    tokens = text[starts[:, None] + np.arange(length)].astype(np.int32)
    depths = np.linspace(0, length - 4 * NEEDLE, count).astype(int)
    for row, depth in zip(tokens, depths):
        string = 128 + rng.permutation(128)[:NEEDLE]
        row[depth : depth + NEEDLE] = string
        row[-NEEDLE:] = string
    return tokens, depths


def train(config: NeedleModelConfig, text: Text, seed: int, say: Any = None) -> dict[str, Any]:
    """Adam with warm-up and a cosine, short windows first; layers come back unrolled."""
    params = transformer.stack_layers(transformer.init_params(jax.random.key(seed), config.model()))
    state = None
    long_batch = max(1, config.batch * config.short // config.length)
    phases = ((config.steps, config.short, config.batch, 0), (config.long_steps, config.length, long_batch, config.steps))
    for phase, (steps, length, batch, begun) in enumerate(phases):
        chunk = 20
        for start in range(0, steps, chunk):
            size = min(chunk, steps - start)
            needles = config.needles if length == config.short else 2 * config.needles
            planted = plant(text.train, (size, batch), length, needles, 7919 * seed + 10 * (begun + start) + phase)
            run = _trainer(config)
            params, state, losses = run(params, state, planted.tokens, planted.copied, jnp.int32(begun + start))
            if say is not None and (start // chunk) % 5 == 4:
                say(f"  step {begun + start + size}: text {losses[-1, 0]:.3f}, copies {losses[-1, 1]:.3f} nats")
    return transformer.unstack_layers(params)


@functools.lru_cache(maxsize=4)
def _trainer(config: NeedleModelConfig) -> Any:
    total = config.steps + config.long_steps
    shape = schedule("cosine", config.rate, total, warmup_fraction=0.05, final_fraction=0.05)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.98))
    model = config.model()

    def loss(params: Any, tokens: jax.Array, copied: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = transformer.forward(params, tokens[:, :-1], model).logits
        nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
        # The first byte of a needle can't be known, and counts nothing.
        known = tokens[:, 1:] < 128
        mean = lambda weight: (nats * weight).sum() / jnp.maximum(weight.sum(), 1)
        weights = known + COPY_WEIGHT * copied
        return mean(weights), jnp.stack([mean(known), mean(copied)])

    @jax.jit
    def run(params: Any, state: Any, tokens: jax.Array, copied: jax.Array, begun: jax.Array) -> Any:
        def step(carry: Any, batch: Any) -> Any:
            params, state, count = carry
            gradient, seen = jax.grad(loss, has_aux=True)(params, *batch)
            updates, state = optimizer.update(gradient, state)
            params = jax.tree.map(lambda p, u: p - shape(count) * u, params, updates)
            return (params, state, count + 1), seen

        (params, state, _), losses = jax.lax.scan(step, (params, state, begun), (tokens, copied))
        return params, state, losses

    return lambda params, state, *rest: run(params, optimizer.init(params) if state is None else state, *rest)
