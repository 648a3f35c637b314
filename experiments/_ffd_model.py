"""A tiny language model that reads 1,024 bytes and copies what was planted far back.

Text is the Python standard library's own source (bytes below 128). Bytes of 128 and above, which no text has, are
*needles*: one of 7 values for each of 16 keys. A needle is planted somewhere in the text; further on a byte stands that
asks for its key, and then the needle again, which can only be known by looking back at the one row that holds it.
Copying is learned on short windows full of needles, text and distance on longer ones.
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
from effml.optimize import make_optimizer
from effml.train import schedule

KEYS, VALUES = 16, 7  # byte 128 + 7 key + value is a needle, 240 + key asks for it
COPY_WEIGHT = 4.0
VECTOR_RATE = 3e-3
CHUNK = 20  # steps of one compiled call


@dataclass(frozen=True)
class NeedleModelConfig:
    """Sizes of the model and of its training."""

    width: int = 96
    layers: int = 3
    heads: int = 6
    kv_heads: int = 2
    mlp_width: int = 256
    # Steps, windows a step, bytes of a window, needles in it.
    phases: tuple[tuple[int, int, int, int], ...] = ((60, 32, 64, 10), (160, 16, 256, 14), (80, 4, 1024, 16))
    rate: float = 0.02
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
            max_length=4 * self.phases[-1][2],
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
    """Windows of text at random places, each with so many needles of different keys, and later what asks for them."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    starts = rng.integers(0, len(text) - length - 1, count)
    tokens = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    copied = np.zeros((count, length), bool)
    slots = (length + 1) // 2
    for row in range(count):
        keys = rng.permutation(KEYS)[:needles]
        needle = 128 + VALUES * keys + rng.integers(0, VALUES, needles)
        # Any pairing of places will do: the earlier one of a pair is the needle's.
        pairs = 2 * np.sort(rng.permutation(slots)[: 2 * needles].reshape(2, needles), axis=0)
        tokens[row, pairs[0]] = needle
        tokens[row, pairs[1]] = 240 + keys
        tokens[row, pairs[1] + 1] = needle
        copied[row, pairs[1]] = True
    return Planted(tokens.reshape(*shape, length + 1), copied.reshape(*shape, length))


def plant_at_end(text: np.ndarray, count: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Needle tests: needles of all keys, one of them at an evenly spread depth; the last two bytes ask for it.

    Returns:
        int32[count, length], and the depths in bytes.
    """
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(text) - length, count)
    tokens = text[starts[:, None] + np.arange(length)].astype(np.int32)
    depths = np.linspace(0, length - 16, count).astype(int)
    for row, depth in zip(tokens, depths):
        keys = rng.permutation(KEYS)
        needles = 128 + VALUES * keys + rng.integers(0, VALUES, KEYS)
        row[rng.permutation(length - 8)[: KEYS - 1]] = needles[1:]
        row[depth] = needles[0]
        row[-2:] = 240 + keys[0], needles[0]
    return tokens, depths


def train(config: NeedleModelConfig, text: Text, seed: int, say: Any = None) -> dict[str, Any]:
    """Muon with warm-up and a cosine over all phases; layers come back unrolled."""
    optimizer = _optimizer(config)
    params = transformer.stack_layers(transformer.init_params(jax.random.key(seed), config.model()))
    state = optimizer.init(params)
    for phase, (steps, batch, length, needles) in enumerate(config.phases):
        for start in range(0, steps, CHUNK):
            size = min(CHUNK, steps - start)
            draw = 1_000_003 * seed + 1009 * phase + start
            planted = plant(text.train, (size, batch), length, needles, draw)
            params, state, losses = _run(params, state, planted.tokens, planted.copied, config=config)
            if say is not None and start + size in (steps // 2 // CHUNK * CHUNK, steps):
                of_text, of_copies = np.asarray(losses).mean(0)
                say(f"  {length} bytes, step {start + size}: text {of_text:.3f}, copies {of_copies:.3f} nats")
    return transformer.unstack_layers(params)


@functools.lru_cache(maxsize=4)
def _optimizer(config: NeedleModelConfig) -> optax.GradientTransformation:
    shape = schedule(
        "cosine", 1.0, sum(phase[0] for phase in config.phases), warmup_fraction=0.05, final_fraction=0.05
    )
    return make_optimizer(
        "muon",
        learning_rate=lambda step: config.rate * shape(step),
        vector_learning_rate=lambda step: VECTOR_RATE * shape(step),
    )


@functools.partial(jax.jit, static_argnames="config")
def _run(params: Any, state: Any, tokens: jax.Array, copied: jax.Array, *, config: NeedleModelConfig) -> Any:
    model, optimizer = config.model(), _optimizer(config)

    def loss(params: Any, tokens: jax.Array, copied: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = transformer.forward(params, tokens[:, :-1], model).logits
        nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
        known = tokens[:, 1:] < 128  # a needle's first showing can't be known, and counts nothing
        mean = lambda weight: (nats * weight).sum() / jnp.maximum(weight.sum(), 1)
        return mean(known + COPY_WEIGHT * copied), jnp.stack([mean(known), mean(copied)])

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        gradient, seen = jax.grad(loss, has_aux=True)(params, *batch)
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), seen

    (params, state), losses = jax.lax.scan(step, (params, state), (tokens, copied))
    return params, state, losses
