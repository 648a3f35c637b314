"""One trained needle model, read in every way of the FFD experiment; and the bytes that FFD reads on made-up heads."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effml.attend import ffd
from effml.nn import cache as dense
from effml.nn import transformer
from experiments._ffd_model import NeedleModelConfig, Text, plant, plant_at_end
from experiments._ffd_selectors import BY_DELTA, SelectorAttention, matched_delta

# Name in the table, selector, bits. The ones by δ are run at δ, the others at the share of blocks that `ffd` kept.
OWN = (("FFD, 2 bits", "ffd", 2), ("FFD, 4 bits", "ffd", 4), ("FFD, 2 bits, probed by codes", "pseudo", 2))
MATCHED = (
    ("exact top-δ", "exact", 2),
    ("exact top-k", "topk", 2),
    ("Quest's bound, top-k", "quest", 2),
    ("mean key, top-k", "mean", 2),
)


@functools.partial(jax.jit, static_argnames=("config", "selector"))
def scored(
    params: Any, cache: Any, tokens: jax.Array, parameter: Any, config: Any, selector: SelectorAttention
) -> Any:
    """Nats [batch, rows] of predicting int32[batch, rows + 1] behind a cache, whether each is right, and the report."""
    attention = functools.partial(selector, parameter=parameter)
    out = transformer.forward(params, tokens[:, :-1], config, cache=cache, attention=attention)
    nats, right = losses(out.logits, tokens[:, 1:])
    return nats, right, out.info


def losses(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Nats of the targets, and whether they have the largest logit."""
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return nats, logits.argmax(-1) == targets


def prefilled(params: Any, tokens: jax.Array, config: Any) -> Any:
    """A stacked dense cache with no room left behind the rows of `tokens`."""
    return _filled(params, tokens, dense.init_cache(config, *tokens.shape, stacked=True), config)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="empty")
def _filled(params: Any, tokens: jax.Array, empty: Any, config: Any) -> Any:
    return transformer.forward_cached(params, tokens, empty, config, logits_for="last")[1]


@functools.partial(jax.jit, static_argnames=("config", "settings"))
def decoded(params: Any, cache: Any, tokens: jax.Array, config: Any, settings: ffd.FFDConfig) -> Any:
    """What `scored` gives, by FFD's own cache and kernel, one row after the other; and the kept share of each step."""
    options = ffd.decoding_options(settings, stacked=True)
    length = cache.keys.shape[-1]
    empty = options["cache_init"](config, tokens.shape[0], length + tokens.shape[1])
    rows = cache.keys.transpose(0, 1, 4, 2, 3), cache.values.transpose(0, 1, 3, 2, 4)
    filled = jax.vmap(ffd.append)(empty, *rows)

    def step(caches: Any, token: jax.Array) -> Any:
        out, caches = transformer.forward_cached(
            params, token[:, None], caches, config, attention=options["attention"], append=options["append"]
        )
        return caches, (out.logits[:, 0], out.info.keep_ratio.mean())

    _, (logits, kept) = jax.lax.scan(step, filled, tokens[:, :-1].T)
    return *losses(jnp.moveaxis(logits, 0, 1), tokens[:, 1:]), kept


class Bench:
    """A trained model with its windows prefilled: held-out text with needles in it, and needle tests."""

    def __init__(self, config: Any, params: Any, text: Text, seed: int):
        self.config: Any = config
        model: NeedleModelConfig = config.model
        self.model = model.model()
        self.params = jax.tree.map(jnp.asarray, transformer.stack_layers(params))
        length = model.phases[-1][2]
        behind = length - config.scored
        planted = plant(text.held_out, (config.windows,), length, model.phases[-1][3], 31 + seed)
        self.tokens = jnp.asarray(planted.tokens[:, behind:])
        self.text = planted.tokens[:, behind + 1 :] < 128
        self.cache = prefilled(self.params, jnp.asarray(planted.tokens[:, :behind]), self.model)
        needles, self.depths = plant_at_end(text.held_out, config.needles, length + 1, 57 + seed)
        before = (length - 1) // config.block * config.block
        self.asked = jnp.asarray(needles[:, before:])
        self.needle_cache = prefilled(self.params, jnp.asarray(needles[:, :before]), self.model)
        self.reference, self.found, self.report = self._score("dense", 0.0, 2)
        filled = np.arange(behind, length) // config.block
        self.blocks = float(filled.sum()) * self.model.num_layers * self.model.kv_heads * config.windows

    def _score(self, kind: str, parameter: float, bits: int) -> tuple[float, np.ndarray, Any]:
        """Nats per byte of text, which needles were found, and what was read."""
        selector = SelectorAttention(kind, self.config.block, bits)
        parameter = jnp.float32(parameter)
        nats, _, report = scored(self.params, self.cache, self.tokens, parameter, self.model, selector)
        _, right, _ = scored(self.params, self.needle_cache, self.asked, parameter, self.model, selector)
        return float(np.asarray(nats)[self.text].mean()), np.asarray(right[:, -1]), report

    def row(self, name: str, kind: str, parameter: float, bits: int, delta: float) -> dict[str, Any]:
        """One row of the table."""
        nats, found, report = self._score(kind, parameter, bits)
        mass = np.asarray(report.mass)
        return {
            "selector": name,
            "delta": delta,
            "parameter": parameter,
            "keep": float(report.kept.mean()),
            "mass": float(mass.mean()),
            "least_head": float(mass.mean(1).min()),
            "least_row": float(report.least.min()),
            "lost": nats - self.reference,
            "recall": float(found[self.found].mean()) if self.found.any() else float("nan"),
        }

    def rows(self, delta: float) -> list[dict[str, Any]]:
        """Every selector at δ, or at the share of the blocks that FFD with 2 bits keeps there."""
        table = [self.row(name, kind, delta, bits, delta) for name, kind, bits in OWN]
        share = table[0]["keep"]
        exact = matched_delta(np.asarray(self.report.margins).sum(0), self.blocks, share)
        table.append(self.row("exact top-δ, same δ", "exact", delta, 2, delta))
        for name, kind, bits in MATCHED:
            table.append(self.row(name, kind, exact if kind in BY_DELTA else share, bits, delta))
        return table

    def own_path(self, delta: float) -> dict[str, float]:
        """The same by FFD's cache and kernel: nats lost, share kept, needles found, distance to the row above."""
        settings = ffd.FFDConfig(delta=delta, block=self.config.block)
        nats, _, kept = decoded(self.params, self.cache, self.tokens, self.model, settings)
        _, right, _ = decoded(self.params, self.needle_cache, self.asked, self.model, settings)
        masked, _, _ = self._score("ffd", delta, 2)
        mine = float(np.asarray(nats)[self.text].mean())
        found = np.asarray(right[:, -1])[self.found]
        return {
            "lost": mine - self.reference,
            "kept": float(kept.mean()),
            "recall": float(found.mean()) if len(found) else float("nan"),
            "apart": abs(mine - masked),
        }


def traffic(length: int, head: int, block: int, delta: float, seed: int) -> list[dict[str, Any]]:
    """Bytes that one step reads on three kinds of made-up heads, from the mask that the kernel kept."""
    rng = np.random.default_rng(seed)
    offset = 2 * rng.normal(size=head)
    table = []
    for kind in ("sink", "needle", "flat"):
        keys = rng.normal(size=(1, length, 1, head)) + offset
        query = rng.normal(size=(1, 1, head))
        unit = query[0, 0] / np.linalg.norm(query[0, 0]) ** 2 * head**0.5
        if kind == "sink":
            keys[0, 0, 0] += 16 * unit
        if kind == "needle":
            keys[0, length // 3, 0] += 16 * unit
            keys[0, 0, 0] += 14 * unit
        cache = ffd.init_cache(1, length, 1, head, block=block)
        rows = jnp.asarray(keys, jnp.bfloat16)
        cache = ffd.prefill(cache, rows, jnp.asarray(rng.normal(size=keys.shape), jnp.bfloat16))
        _, stats = ffd.ffd_attention(jnp.asarray(query, jnp.float32), cache, delta=delta, return_stats=True)
        read, whole = ffd.bytes_read(cache, stats.kept)
        mass = ffd.kept_mass(jnp.asarray(query, jnp.float32), cache, stats.kept)
        table.append(
            {
                "head": kind,
                "keep": float(stats.keep_ratio[0]),
                "mass": float(mass.min()),
                "ratio": float(whole[0] / read[0]),
            }
        )
    return table
