"""Tiny byte models for the ESP experiment, and what is measured on one of them."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from effml import data, decode
from effml.decode import SamplingConfig, _loop, esp
from effml.nn import transformer
from effml.train import schedule

VOCAB = 96
INITS = ("mean", "zero", "last_k", "sample", "vocab_mean", "mu_sigma")
TITLES = {
    "mean, moving": "mean of the prompt, moving",
    "mean": "mean of the prompt, fixed",
    "zero": "zero",
    "last_k": "last token of the prompt",
    "sample": "sample of N(mu, sigma^2)",
    "vocab_mean": "mean of the vocabulary",
    "mu_sigma": "mu + 5 sigma",
    "unigram": "unigram counts",
    "skip-bigram": "skip-bigram counts",
}


@dataclass(frozen=True)
class ModelConfig:
    """One of the three models: A, B (as A, with input tokens exchanged at random while training) or C (larger)."""

    name: str = "A"
    width: int = 64
    layers: int = 3
    steps: int = 450
    noise: float = 0.0
    batch: int = 16
    length: int = 64

    def transformer(self) -> transformer.TransformerConfig:
        """Four heads, a tied head."""
        return transformer.TransformerConfig(VOCAB, self.width, self.layers, 4, 8 * self.width // 3 // 8 * 8)


MODELS = (
    ModelConfig("A"),
    ModelConfig("B", noise=0.1),
    ModelConfig("C", width=96, layers=4, steps=1400),
)


class Text(NamedTuple):
    """Characters of the standard library's source as ids below 96: train and held_out, int32."""

    train: np.ndarray
    held_out: np.ndarray


@functools.lru_cache(maxsize=2)
def load_text(max_bytes: int = 3_000_000) -> Text:
    """Printable characters are themselves, a line's end is 95, all else is a space."""
    corpus = data.load_corpus("stdlib", max_bytes=max_bytes)
    sides = []
    for side in ("train", "held_out"):
        ids = np.asarray(data.encode_corpus(corpus, side, data.ByteTokenizer())).astype(np.int32)
        sides.append(
            np.where(ids == 10, 95, np.where((ids >= 32) & (ids < 127), ids - 32, 0)).astype(np.int32)
        )
    return Text(*sides)


def windows(ids: np.ndarray, count: int, length: int, seed: int) -> np.ndarray:
    """int32[count, length] at random places."""
    starts = np.random.default_rng(seed).integers(0, len(ids) - length, count)
    return ids[starts[:, None] + np.arange(length)]


def train(config: ModelConfig, text: Text, seed: int) -> tuple[Any, float]:
    """Parameters, and nats per byte of the last twenty batches."""
    tokens = windows(text.train, config.steps * config.batch, config.length + 1, seed)
    tokens = tokens.reshape(config.steps, config.batch, -1)
    inputs = tokens[..., :-1].copy()
    rng = np.random.default_rng(1000 + seed)
    exchanged = rng.random(inputs.shape) < config.noise
    inputs[exchanged] = rng.integers(0, VOCAB, int(exchanged.sum()))
    params, losses = _trainer(config)(jax.random.key(seed), inputs, tokens[..., 1:])
    return params, float(np.mean(losses[-20:]))


@functools.lru_cache(maxsize=4)
def _trainer(config: ModelConfig) -> Any:
    model = config.transformer()
    rate = schedule("cosine", 3e-3, config.steps, warmup_fraction=0.1, final_fraction=0.1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b1=0.9, b2=0.95))

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        logits = transformer.forward(params, inputs, model).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    @jax.jit
    def run(key: jax.Array, inputs: jax.Array, targets: jax.Array) -> Any:
        params = transformer.init_params(key, model, scanned=True)

        def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
            params, state = carry
            value, gradient = jax.value_and_grad(loss)(params, *batch)
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), value

        (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), (inputs, targets))
        return params, losses

    return run


def as_model(config: ModelConfig, params: Any) -> Any:
    """What `decode` takes."""
    model = config.transformer()
    run = functools.partial(transformer.forward, config=model)
    return types.SimpleNamespace(config=model, params=params, forward=run)


def probe(
    model: Any, text: Text, *, positions: int, prefix: int, seed: int, at: tuple[int, ...] = (1, 4, 14)
) -> dict[str, list[float]]:
    """hit@k of every drafter, against the model's own second token behind held-out prefixes.

    Half of a prefix is the prompt, half was written. Counts rank by the training text.
    """
    prefixes = windows(text.held_out, positions, prefix, 50_000 + seed)
    frozen = _loop.freeze(model.forward, model.config, None, None, None)
    parts = [
        _probed(model.params, one, jax.random.fold_in(jax.random.key(seed), index), model=frozen)
        for index, one in enumerate(np.array_split(prefixes, max(positions // 500, 1)))
    ]
    logits, targets = (np.concatenate(column) for column in zip(*parts))
    rows = {name: logits[:, index] for index, name in enumerate(["mean, moving", *INITS])}
    counts = np.bincount(text.train, minlength=VOCAB).astype(np.float32)
    pairs = text.train[:-2].astype(np.int64) * VOCAB + text.train[2:]
    skips = np.bincount(pairs, minlength=VOCAB**2).reshape(VOCAB, VOCAB).astype(np.float32)
    rows["unigram"] = np.tile(counts, (positions, 1))
    rows["skip-bigram"] = skips[prefixes[:, -1]]
    found = jnp.asarray(targets)
    return {name: esp.hit_rates(jnp.asarray(of), found, at) for name, of in rows.items()}


@functools.partial(jax.jit, static_argnames="model")
def _probed(params: Any, prefixes: jax.Array, key: jax.Array, *, model: _loop.Model) -> Any:
    prompt = prefixes.shape[1] // 2
    masks = [
        esp.probe_masks(params, prefixes, model.config, config, prompt=prompt, key=key)
        for config in (
            esp.ESPConfig(mask_init="mean", ema=0.1),
            *(esp.ESPConfig(mask_init=kind, ema=0.0) for kind in INITS),
        )
    ]
    last, logits = esp.probe_logits(model, params, prefixes, jnp.concatenate(masks, axis=1))
    longer = jnp.concatenate([prefixes, last.argmax(-1)[:, None].astype(prefixes.dtype)], axis=1)
    own = model.forward(params, longer, logits_for="last").logits[:, 0]
    return logits, own.argmax(-1)


def drafters(
    model: Any, prompts: np.ndarray, text: Text, widths: tuple[int, ...], seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and options of `esp.generate` for every drafter with a tree of one depth of `widths[0]` candidates.

    Masks that do not move are given as arrays, so that all of them share one compiled program.
    """
    key = jax.random.key(seed)
    yield "mean, moving", {"config": esp.ESPConfig(widths=widths, mask_init="mean")}
    fixed = esp.ESPConfig(widths=widths, ema=0.0)
    for kind in INITS:
        about = esp.ESPConfig(mask_init=kind, ema=0.0)
        masks = esp.probe_masks(
            model.params, jnp.asarray(prompts), model.config, about, prompt=prompts.shape[1], key=key
        )
        yield kind, {"config": fixed, "given": masks}
    yield "prompt lookup", {"drafter": esp.PromptLookup(widths[0])}
    for name, anchor in (("unigram", "none"), ("skip-bigram", "before"), ("bigram", "root")):
        table = esp.count_candidates(text.train, VOCAB, widths, anchor)
        yield name, {"drafter": esp.CountDrafter(widths, anchor), "given": table}
    yield "n-gram cache", {"drafter": esp.NgramCache(widths)}
    yield "lookahead", {"drafter": esp.Lookahead(columns=5, ngram=3, branches=max(widths[0] // 2, 1))}


TREES: dict[str, dict[str, Any]] = {
    "static 3+3": {"widths": (3, 3)},
    "static 4+2": {"widths": (4, 2)},
    "static 5+1": {"widths": (5, 1)},
    "dynamic 6": {"widths": None, "block_complexity": 21},
}


class Prompts(NamedTuple):
    """Held-out prompts of equal length, and how many tokens to write behind each."""

    tokens: np.ndarray
    new: int


def end_to_end(model: Any, prompts: Prompts, options: dict[str, Any], plain: np.ndarray) -> dict[str, Any]:
    """Tokens per pass, acceptance by depth, and sequences that differ from plain decoding."""
    written = esp.generate(model, prompts.tokens, max_new_tokens=prompts.new, **options)
    return {
        "tau": written.stats.tau,
        "accepted": written.stats.accepted_by_depth,
        "near_ties": written.stats.near_ties,
        **difference(model, prompts.tokens, plain, written.tokens, SamplingConfig(), jax.random.key(0)),
    }


def difference(
    model: Any, prompts: np.ndarray, plain: np.ndarray, other: np.ndarray, sampling: SamplingConfig, key: Any
) -> dict[str, float]:
    """How many sequences differ, and the widest margin by which plain decoding chose its first other token."""
    rows = np.flatnonzero((plain != other).any(1))
    widest = 0.0
    for row in rows:
        step = int(np.argmax(plain[row] != other[row]))
        ids = np.concatenate([prompts[row], plain[row, :step]])[None]
        logits = model.forward(model.params, jnp.asarray(ids), logits_for="last").logits[:, 0]
        keys = jax.random.fold_in(jax.random.fold_in(key, int(row)), step)[None]
        margin = esp.choose(logits, None if sampling.greedy else keys, sampling).margin
        widest = max(widest, float(margin[0]))
    return {"different": len(rows), "widest_gap": widest}


def lossless_grid(
    models: dict[str, Any], prompts: list[list[int]], new: int, quick: bool
) -> Iterator[dict[str, Any]]:
    """Plain decoding against every combination of sampling, masks, tree and pruning; one row each and model."""
    tokens, lengths = decode.pad_prompts(prompts)
    samplings = {
        "greedy": SamplingConfig(),
        "T = 1": SamplingConfig(temperature=1.0),
        "top-p 0.9": SamplingConfig(temperature=1.0, top_p=0.9),
    }
    shapes: list[dict[str, Any]] = [{"num_masks": 0}]
    for masks, widths in ((1, (6,)), (2, (4, 2)), (3, (3, 2, 1))):
        for tree in (widths, None):
            for prune in (True, False):
                shapes.append(
                    {
                        "num_masks": masks,
                        "widths": tree,
                        "block_complexity": (masks + 1) * (sum(widths) + 1),
                        "prune_repeats": prune,
                    }
                )
    key = jax.random.key(11)
    for name, sampling in list(samplings.items())[: 1 if quick else None]:
        plain = {
            which: decode.generate(
                model, tokens, lengths=lengths, max_new_tokens=new, sampling=sampling, key=key
            ).tokens
            for which, model in models.items()
        }
        for shape in shapes[: 2 if quick else None]:
            for which, model in models.items():
                written = esp.generate(
                    model,
                    tokens,
                    lengths=lengths,
                    max_new_tokens=new,
                    sampling=sampling,
                    key=key,
                    config=esp.ESPConfig(**shape),
                )
                rows = np.flatnonzero((plain[which] != written.tokens).any(1))
                gaps = [
                    difference(
                        model,
                        np.array([prompts[row]]),
                        plain[which][row : row + 1],
                        written.tokens[row : row + 1],
                        sampling,
                        key,
                    )["widest_gap"]
                    for row in rows
                ]
                yield {
                    "model": which,
                    "sampling": name,
                    **shape,
                    "different": len(rows),
                    "widest_gap": max(gaps, default=0.0),
                    "tau": written.stats.tau,
                }
