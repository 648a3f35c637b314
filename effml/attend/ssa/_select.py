r"""Which key blocks each query token reads.

With blocks of b keys, $\bar k_n$ the mean of block n's rotated keys, $n_t = t \,\mathrm{div}\, b$ the block that holds
token t, and block n complete at t when $n < (t + 1) \,\mathrm{div}\, b$,

$$p_t(n) = \frac{e^{c\,q_t \cdot \bar k_n}}{\sum_{m\ \mathrm{complete}} e^{c\,q_t \cdot \bar k_m}}, \qquad
  I_t(n) = \sum_{\text{query heads of the group}} p_t(n) \quad (n < n_t), \qquad I_t(n_t) = \infty$$

and the `num_blocks` blocks of largest importance I are read: by all query heads of a key-value head, the own block
always, of equal ones the lower number. A block that is not complete has no mean that a query could use without looking
ahead; it can only be someone's own block, which needs none.

Packed sequences: a segment is a run of equal ids, blocks are counted from its first token, and none reaches into
another segment.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from effml._validate import count

__all__ = [
    "BlockSelection",
    "Layout",
    "check_heads",
    "choose",
    "in_parts",
    "lay_out",
    "layout_of",
    "select_blocks",
    "wide_type",
]

# Scores of queries against all pooled keys that exist at once: on CPU what its caches hold, else what fills a device.
_CPU_BYTES, _DEVICE_BYTES = 2**22, 2**28


class BlockSelection(NamedTuple):
    """Blocks that each query token and key-value head reads, the most important first and the own one in front.

    Attributes:
        indices: int32[batch, length, kv_heads, num_blocks], numbers of blocks, counted within the query's segment where
            there are segments; -1 where there is none.
        mask: bool of the same shape, `indices >= 0`.
    """

    indices: Int[Array, "batch length kv_heads num_blocks"]
    mask: Bool[Array, "batch length kv_heads num_blocks"]


class Layout(NamedTuple):
    """Where tokens stand when every segment begins a block of its own; arrays are int32[batch, length].

    Attributes:
        segment: number of the token's segment.
        offset: place of the token in its segment.
        first: number of the segment's first block, over all segments.
        slot: place of the token among the keys as they are laid out.
        blocks: of all segments together; those that are not needed are empty.
        segmented: False where the keys lie as they came.
    """

    segment: Array
    offset: Array
    first: Array
    slot: Array
    blocks: int
    segmented: bool


def select_blocks(
    query: Float[Array, "batch length heads head"],
    key: Float[Array, "batch length kv_heads head"],
    *,
    block_size: int,
    num_blocks: int,
    scale: float | None = None,
    segment_ids: Int[Array | np.ndarray, "*shape"] | None = None,
    max_segments: int | None = None,
) -> BlockSelection:
    r"""The `num_blocks` blocks of largest importance for every query token and key-value head.

    $$I_t(n) = \sum_g \mathrm{softmax}_{m\ \mathrm{complete}}(c\,q_{tg} \cdot \bar k_m)_n, \quad I_t(n_t) = \infty$$

    Pooling and importance are float32 (float64 for float64). There is no gradient.

    Args:
        query: rotated queries; head j belongs to key head `j // (heads // kv_heads)`.
        key: rotated keys.
        block_size: keys of a block.
        num_blocks: blocks to choose, the own one among them. Where fewer are causal all of them are chosen.
        scale: c; `head ** -0.5` if None.
        segment_ids: int[batch, length]; tokens read their own run of equal ids only.
        max_segments: most runs in one sequence. None counts them, or assumes one for each token under `jax.jit`, whose
            memory is that of `length` blocks. Tokens whose block finds no place since there are more runs than this
            get NaN from `ssa_attention`, and no choice to rely on.

    Returns:
        A `BlockSelection`.

    Raises:
        ValueError: for heads that don't divide, a size below 1, or ids of another shape.
        TypeError: for a size that is no integer.

    Source: Shen et al., SSA, arXiv 2511.20102, section 3; that the own block is infinitely important and the order of
        equal ones are ours.

    Example:
        >>> rows = jax.random.normal(jax.random.key(0), (1, 8, 2, 4))
        >>> select_blocks(rows, rows, block_size=2, num_blocks=2).indices[0, :3, 0].tolist()
        [[0, -1], [0, -1], [1, 0]]
    """
    check_heads(query, key)
    count("block_size", block_size)
    count("num_blocks", num_blocks)
    layout = layout_of(query.shape[0], query.shape[1], block_size, segment_ids, max_segments)
    keys = lay_out(jax.lax.stop_gradient(key).astype(wide_type(key)), layout, block_size)
    keys = keys.reshape(keys.shape[0], layout.blocks, block_size, *keys.shape[2:])
    indices = choose(
        query,
        (keys.sum(2) / block_size).swapaxes(1, 2),
        first=layout.first,
        position=layout.offset,
        block_size=block_size,
        num_blocks=num_blocks,
        scale=scale,
    )
    return BlockSelection(indices, indices >= 0)


def check_heads(query: Array, key: Array) -> None:
    """Raises `ValueError` unless every token has a key, and the query heads are a multiple of the key heads."""
    for name, array in (("query", query), ("key", key)):
        if array.ndim != 4:
            raise ValueError(f"{name} must be [batch, length, heads, head], but its shape is {array.shape}")
        if 0 in array.shape:
            raise ValueError(f"{name} of shape {array.shape} is empty: no axis may be 0")
    if (*query.shape[:2], query.shape[3]) != (*key.shape[:2], key.shape[3]):
        raise ValueError(
            f"key of shape {key.shape} must have the batch, length and head size of query, {query.shape}"
        )
    if key.shape[2] < 1 or query.shape[2] % key.shape[2]:
        raise ValueError(
            f"query has {query.shape[2]} heads, which must be a multiple of the {key.shape[2]} heads of key"
        )


def wide_type(array: Array) -> Any:
    """float32, or float64 for float64."""
    return jnp.promote_types(array.dtype, jnp.float32)


def layout_of(
    batch: int, length: int, block_size: int, segment_ids: Any, max_segments: int | None = None
) -> Layout:
    """The layout of `batch` sequences of `length` tokens; without ids each is one segment."""
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if segment_ids is None:
        nothing = jnp.zeros_like(place)
        return Layout(nothing, place, nothing, place, -(-length // block_size), False)
    ids = jnp.asarray(segment_ids)
    if ids.shape != (batch, length) or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids must be integers of shape {(batch, length)}, got {ids.dtype}{list(ids.shape)}"
        )
    begins = jnp.concatenate([jnp.ones((batch, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    segment = jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1
    offset = place - jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
    block = jnp.cumsum(offset % block_size == 0, axis=1, dtype=jnp.int32) - 1
    most = length
    if not isinstance(ids, Tracer):
        most = int(segment.max()) + 1
        if max_segments is not None and most > max_segments:
            raise ValueError(f"max_segments={max_segments!r}, but a sequence has {most} segments")
    if max_segments is not None:
        count("max_segments", max_segments)
        most = min(max_segments, length)
    return Layout(
        segment=segment,
        offset=offset,
        first=block - offset // block_size,
        slot=block * block_size + offset % block_size,
        blocks=min(length, (length + most * (block_size - 1)) // block_size),
        segmented=True,
    )


def lay_out(rows: Array, layout: Layout, block_size: int, fill: float | int = 0) -> Array:
    """[batch, length, ...] -> [batch, blocks * block_size, ...] with every token in its slot, `fill` elsewhere."""
    size = layout.blocks * block_size
    if not layout.segmented:
        padding = [(0, 0), (0, size - rows.shape[1])] + [(0, 0)] * (rows.ndim - 2)
        return jnp.pad(rows, padding, constant_values=fill)
    empty = jnp.full((rows.shape[0], size, *rows.shape[2:]), fill, rows.dtype)
    return jax.vmap(lambda e, slot, r: e.at[slot].set(r, mode="drop", unique_indices=True))(
        empty, layout.slot, rows
    )


@functools.partial(jax.jit, static_argnames=("block_size", "num_blocks", "scale"))
def choose(
    query: Array,
    pooled: Array,
    *,
    first: Array,
    position: Array,
    block_size: int,
    num_blocks: int,
    scale: float | None = None,
) -> Array:
    """int32[batch, new, kv_heads, num_blocks], numbers of blocks counted from `first`; -1 where there is none.

    Args:
        query: [batch, new, heads, head].
        pooled: [batch, kv_heads, blocks, head], mean keys; those of blocks that are not complete may hold anything.
        first: int32[batch, new], number of the first block that belongs to the query's segment.
        position: int32[batch, new], of the query in its segment.
        block_size: keys of a block.
        num_blocks: blocks to choose.
        scale: on the scores; `head ** -0.5` if None.
    """
    batch, _, heads, head = query.shape
    kv_heads, blocks = pooled.shape[1:3]
    slots = min(num_blocks, blocks)
    query, pooled = jax.lax.stop_gradient((query, pooled))
    factor = head**-0.5 if scale is None else scale
    wide = jnp.promote_types(wide_type(query), pooled.dtype)
    number = jnp.arange(blocks, dtype=jnp.int32)
    broken = ~jnp.isfinite(pooled).all(-1)[:, :, None]

    def part(query: Array, first: Array, position: Array) -> Array:
        grouped = query.reshape(batch, -1, kv_heads, heads // kv_heads, head).astype(wide)
        scores = jnp.einsum(
            "btkgd,bknd->bktgn", grouped, pooled.astype(wide), precision=jax.lax.Precision.HIGHEST
        )
        local = number - first[..., None]  # [batch, new, blocks]
        complete = (local >= 0) & (local < ((position + 1) // block_size)[..., None])
        scores = jnp.where(complete[:, None, :, None], scores * factor, -jnp.inf)
        peak = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - jnp.where(peak == -jnp.inf, 0, peak))
        total = weights.sum(-1, keepdims=True)
        importance = (weights / jnp.where(total == 0, 1, total)).sum(3)  # [batch, kv_heads, new, blocks]
        # A key that is no number makes every share NaN. Its block is read, so that the output says so as well; the own
        # one still comes first.
        of_nan = jnp.where(broken, jnp.finfo(wide).max, 0)
        importance = jnp.where(jnp.isnan(importance), of_nan, importance)
        own = (position // block_size)[..., None]
        importance = jnp.where((complete & (local < own))[:, None], importance, -jnp.inf)
        importance = jnp.where((local == own)[:, None], jnp.inf, importance)
        # Of equal values top_k gives the one of lower index first.
        value, chosen = jax.lax.top_k(importance, slots)
        found = jnp.where(value > -jnp.inf, chosen - first[:, None, :, None], -1)
        return found.swapaxes(1, 2).astype(jnp.int32)

    row_bytes = batch * heads * blocks * jnp.dtype(wide).itemsize
    at_once = _CPU_BYTES if jax.default_backend() == "cpu" else _DEVICE_BYTES
    indices = in_parts(part, max(1, at_once // row_bytes), query, first, position)
    return jnp.pad(indices, [(0, 0)] * 3 + [(0, num_blocks - slots)], constant_values=-1)


def in_parts(function: Any, size: int, *arrays: Array) -> Array:
    """`function` over pieces of at most `size` along axis 1 of the arrays, one after the other."""
    length = arrays[0].shape[1]
    if length <= size:
        return function(*arrays)
    pieces = -(-length // size)
    size = -(-length // pieces)

    def cut(a: Array) -> Array:
        a = jnp.pad(a, [(0, 0), (0, pieces * size - length)] + [(0, 0)] * (a.ndim - 2), mode="edge")
        return jnp.moveaxis(a.reshape(a.shape[0], pieces, size, *a.shape[2:]), 1, 0)

    out = jax.lax.map(lambda piece: function(*piece), tuple(map(cut, arrays)))
    return jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :length]
