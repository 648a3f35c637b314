"""Ways to choose the blocks of a cache that a query reads, at the same granularity and for the same scores.

All of them see the same queries and keys, and are judged by the softmax mass that the blocks they choose hold. The rows
behind the last full block are always read. A block is chosen for a key head, that is for all query heads that share it.

| name | a block is chosen if |
|---|---|
| `ffd` | its best scan score (2 or 4 bits) comes within δ of the largest probed score |
| `pseudo` | the same, probed by the codes alone, as in the paper |
| `exact` | its best true score comes within δ of the largest one |
| `topk` | it is among the k with the best true scores |
| `quest` | it is among the k with the largest bounds, Σ_d max(q_d min k_d, q_d max k_d) |
| `mean` | it is among the k with the largest q · mean k |

`SelectorAttention` runs a transformer whose last rows choose so. It computes all scores and masks them, for measuring
quality; only `effml.attend.ffd` saves anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from effml.nn.attention import AttentionInputs
from pallas_kernels.ffd_decode import dequantize, quantize_blocks

BY_DELTA, BY_COUNT = ("ffd", "pseudo", "exact"), ("topk", "quest", "mean")
MARGINS = np.concatenate([np.arange(0, 30, 0.1), [30.0]])  # edges of the histogram of margins, nats


class Report(NamedTuple):
    """What the rows of one layer read; [batch, kv_heads] unless said otherwise.

    Attributes:
        kept: mean share of the full blocks that were chosen.
        mass: [batch, heads], mean share of the softmax that what was read holds.
        least: [batch, heads], the smallest such share of any row.
        margins: [len(MARGINS)], how many blocks lie so far below the largest score (exact), over all rows and heads.
        heavy: [batch, heads], share of the softmax on rows that have more than e^-7 of the largest probability.
    """

    kept: jax.Array
    mass: jax.Array
    least: jax.Array
    margins: jax.Array
    heavy: jax.Array


@dataclass(frozen=True)
class SelectorAttention:
    """The attention of `kind` for a transformer whose dense caches hold whole blocks: only new rows choose.

    Args:
        kind: `"dense"`, `"stored"` (everything, keys as FFD stores them), or a name of the module's table.
        block: rows of a block.
        bits: of the codes.
        rows: queries at a time.
    """

    kind: str
    block: int
    bits: int = 2
    rows: int = 64

    def __call__(self, inputs: AttentionInputs, parameter: Any = 0.0) -> tuple[jax.Array, Report]:
        """`parameter` is δ, or the share of the blocks that the k best ones are."""
        cache = inputs.cache
        keys = jnp.concatenate([cache.keys.transpose(0, 1, 3, 2), inputs.key.transpose(0, 2, 1, 3)], axis=2)
        values = jnp.concatenate([cache.values, inputs.value.transpose(0, 2, 1, 3)], axis=2)
        batch, kv_heads, total, head = keys.shape
        new = inputs.query.shape[1]
        blocks = total // self.block
        whole = keys[:, :, : blocks * self.block]
        code, scale, rest = quantize_blocks(whole, self.block, self.bits)
        by_block = code.reshape(batch, kv_heads, blocks, self.block, -1)
        scan_keys = dequantize(by_block, scale, self.bits).reshape(whole.shape)
        stored = scan_keys + rest.astype(jnp.float32)
        split = whole.reshape(batch, kv_heads, blocks, self.block, head)
        summary = split.min(3), split.max(3), split.mean(3)
        group = inputs.query.shape[2] // kv_heads
        queries = inputs.query.reshape(batch, new, kv_heads, group, head) * inputs.scale

        def some(start: jax.Array) -> Any:
            q = jax.lax.dynamic_slice_in_dim(queries, start, rows, 1)
            at = total - new + start + jnp.arange(rows)
            return self._read(q, at, keys, scan_keys, stored, values, summary, parameter)

        rows = min(self.rows, new)
        assert new % rows == 0
        output, kept, mass, least, margins, heavy = jax.lax.map(some, jnp.arange(0, new, rows))
        output = jnp.moveaxis(output, 0, 1).reshape(inputs.query.shape)
        return output.astype(inputs.query.dtype), Report(
            kept.mean(0), mass.mean(0), least.min(0), margins.sum(0), heavy.mean(0)
        )

    def _read(
        self,
        q: Any,
        at: Any,
        keys: Any,
        scan_keys: Any,
        stored: Any,
        values: Any,
        summary: Any,
        parameter: Any,
    ):
        batch, rows, kv_heads, group, _ = q.shape
        total, blocks = keys.shape[2], scan_keys.shape[2] // self.block
        score = lambda k: jnp.einsum("bqhgd,bhtd->bhgqt", q, k)
        place = jnp.arange(total)
        filled = (at // self.block)[:, None]  # full blocks before each row
        visible = place <= at[:, None]
        in_block = (place // self.block) < filled
        true = jnp.where(visible, score(keys), -jnp.inf)
        best = lambda s: s[..., : blocks * self.block].reshape(*s.shape[:-1], blocks, self.block).max(-1)
        usable = jnp.arange(blocks) < filled
        of_stored = jnp.where(in_block[:, : stored.shape[2]], score(stored), -jnp.inf)
        behind = jnp.where(visible & ~in_block, true, -jnp.inf).max(-1)
        largest = true.max(-1)

        def group_best(x: jax.Array) -> jax.Array:  # [b, h, q, blocks]
            return jnp.where(usable, x, -jnp.inf).max(2)

        if self.kind in ("dense", "stored"):
            chosen = jnp.broadcast_to(usable, (batch, kv_heads, rows, blocks))
        elif self.kind in BY_DELTA:
            compared = best(true) if self.kind == "exact" else best(score(scan_keys))
            if self.kind == "exact":
                top = largest
            else:
                probed = best(of_stored) if self.kind == "ffd" else compared
                last = jnp.broadcast_to(jnp.maximum(filled - 1, 0), (*probed.shape[:-1], 1))
                top = jnp.maximum(probed[..., 0], jnp.take_along_axis(probed, last, -1)[..., 0])
                top = jnp.where(filled[:, 0] > 0, top, -jnp.inf)
                top = jnp.maximum(top, behind) if self.kind == "ffd" else top
            chosen = (jnp.where(usable, compared, -jnp.inf) >= (top - parameter)[..., None]).any(2) & usable
        else:
            low, high, mean = summary
            ranked = {
                "topk": lambda: best(true),
                "mean": lambda: jnp.einsum("bqhgd,bhnd->bhgqn", q, mean),
                # Σ_d of the larger of two products, without an array of [.., blocks, head] for every query
                "quest": lambda: (
                    jnp.einsum("bqhgd,bhnd->bhgqn", jnp.maximum(q, 0), high)
                    + jnp.einsum("bqhgd,bhnd->bhgqn", jnp.minimum(q, 0), low)
                ),
            }[self.kind]()
            ranked = group_best(ranked)
            # A share that is no whole number of blocks is met on average over the rows.
            wanted = jnp.floor(parameter * filled[:, 0] + (at * 0.6180339887) % 1.0)
            wanted = jnp.clip(wanted, jnp.minimum(filled[:, 0], 1), filled[:, 0])
            order = jnp.argsort(jnp.argsort(-ranked, axis=-1), axis=-1)
            chosen = (order < wanted[:, None]) & usable
        read = jnp.repeat(chosen, self.block, axis=-1)
        read = jnp.pad(read, [(0, 0)] * 3 + [(0, total - read.shape[-1])])[:, :, None] | (visible & ~in_block)
        weights = jnp.exp(true - largest[..., None])
        everything = weights.sum(-1)
        mass = jnp.where(read, weights, 0).sum(-1) / everything
        used = true
        if self.kind in ("ffd", "pseudo", "stored"):
            wide = jnp.pad(of_stored, [(0, 0)] * 4 + [(0, total - of_stored.shape[-1])])
            used = jnp.where(in_block, wide, true)
        used = jnp.where(read, used, -jnp.inf)
        p = jnp.exp(used - used.max(-1, keepdims=True))
        output = jnp.einsum("bhgqt,bhtd->bqhgd", p / p.sum(-1, keepdims=True), values)
        per_head = lambda x: x.reshape(batch, kv_heads * group)
        margin = (largest[..., None] - jnp.where(usable, best(true), -jnp.inf)).min(2)
        bins = jnp.searchsorted(jnp.asarray(MARGINS), jnp.where(usable, margin, jnp.inf), side="left")
        histogram = jnp.zeros(len(MARGINS) + 1).at[bins].add(jnp.where(usable, 1.0, 0.0))[:-1]
        kept = (chosen.sum((2, 3)) / jnp.maximum(filled.sum(), 1)).astype(jnp.float32)
        heavy = jnp.where(weights >= np.exp(-7.0), weights, 0).sum(-1) / everything
        return (
            output.reshape(batch, rows, -1, values.shape[-1]),
            kept,
            per_head(mass.mean(-1)),
            per_head(mass.min(-1)),
            histogram,
            per_head(heavy.mean(-1)),
        )


def matched_delta(margins: np.ndarray, blocks: float, share: float) -> float:
    """The δ at which exact top-δ keeps `share` of `blocks` blocks, from a histogram of margins (0.1 nats fine)."""
    below = np.cumsum(np.asarray(margins, np.float64)) / blocks
    return float(np.interp(share, below, MARGINS))
