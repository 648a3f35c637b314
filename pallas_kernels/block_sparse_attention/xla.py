"""The path that runs everywhere: gathered blocks, in steps that bound the memory.

Forward and dq take some rows at a time and gather the blocks that these chose. dk and dv take some key blocks at a time
and gather the rows that chose them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.block_sparse_attention.blocks import BlockSizes
from pallas_kernels.block_sparse_attention.geometry import Geometry, group_by_block, slopes

__all__ = ["backward", "forward"]


def _dot(equation: str, a: Array, b: Array) -> Array:
    wide = jnp.promote_types(a.dtype, jnp.float32)
    precision = None if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=wide)


def _rows_at_once(k: Array, v: Array, slots: int, blocks: BlockSizes) -> int:
    width = jnp.promote_types(k.dtype, jnp.float32).itemsize
    row = slots * k.shape[1] * (k.shape[2] + v.shape[2]) * width
    return max(1, blocks.gathered_bytes // row)


def _in_steps(step: Any, size: int, arrays: Any, fill: int = 0) -> Any:
    """`step` over pieces of `size` of the arrays' first axis; the last piece is filled up."""
    rows = jax.tree.leaves(arrays)[0].shape[0]
    if rows <= size:
        return step(arrays)
    pieces = -(-rows // size)
    size = -(-rows // pieces)

    def cut(a):
        a = jnp.pad(a, [(0, pieces * size - rows)] + [(0, 0)] * (a.ndim - 1), constant_values=fill)
        return a.reshape(pieces, size, *a.shape[1:])

    out = lax.map(step, jax.tree.map(cut, arrays))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:rows], out)


def _gather(table: Array, ids: Array) -> Array:
    """[rows, slots * block_size, dim]"""
    found = jnp.take(table, jnp.maximum(ids, 0), axis=0, mode="clip")
    return found.reshape(ids.shape[0], -1, table.shape[2])


def _kept(ids: Array, position: Array, segment: Any, key_segments: Any, geometry: Geometry) -> Array:
    """Which gathered keys a row sees: bool[rows, slots * block_size]."""
    keep = geometry.sees(
        ids[..., None],
        jnp.arange(geometry.block_size, dtype=jnp.int32),
        position[:, None, None],
        lambda: segment[:, None, None],
        lambda row: jnp.take(key_segments, row[..., 0], axis=0, mode="clip"),
    )
    return keep.reshape(ids.shape[0], -1)


def forward(
    q: Array,
    k: Array,
    v: Array,
    ids: Array,
    positions: Array,
    segments: Any,
    key_segments: Any,
    *,
    geometry: Geometry,
    blocks: BlockSizes,
) -> tuple[Array, Array, Array]:
    """Output in the type of q, largest logit and sum of exponentials."""

    def step(piece):
        q, ids, position, segment = piece
        keep = _kept(ids, position, segment, key_segments, geometry)
        logits = _dot("rgd,rnd->rgn", q, _gather(k, ids)) * geometry.scale
        logits = jnp.where(keep[:, None], logits, -jnp.inf)
        largest = jnp.max(logits, axis=-1)
        weights = jnp.exp(logits - jnp.where(largest == -jnp.inf, 0, largest)[..., None])
        total = jnp.sum(weights, axis=-1)
        # A key that nobody sees may hold anything.
        values = jnp.where(keep[..., None], _gather(v, ids), 0)
        out = _dot("rgn,rnd->rgd", weights.astype(v.dtype), values)
        return (out / jnp.where(total == 0, 1, total)[..., None]).astype(q.dtype), largest, total

    size = _rows_at_once(k, v, ids.shape[1], blocks)
    return _in_steps(step, size, (q, ids, positions, segments), fill=0)


def backward(
    q: Array,
    k: Array,
    v: Array,
    ids: Array,
    positions: Array,
    segments: Any,
    key_segments: Any,
    logarithm: Array,
    offset: Array,
    cotangent: Array,
    *,
    geometry: Geometry,
    blocks: BlockSizes,
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v.

    Args:
        logarithm: [rows, group], of the sum of exponentials; +inf for rows that see nothing.
        offset: [rows, group]; what is subtracted from the gradient of the weights.
        cotangent: [rows, group, dim of v].
    """
    dq = query_gradient(
        q,
        k,
        v,
        ids,
        positions,
        segments,
        key_segments,
        logarithm,
        offset,
        cotangent,
        geometry=geometry,
        blocks=blocks,
    )
    dk, dv = key_gradients(
        q,
        k,
        v,
        ids,
        positions,
        segments,
        key_segments,
        logarithm,
        offset,
        cotangent,
        geometry=geometry,
        blocks=blocks,
    )
    return dq, dk, dv


def query_gradient(
    q, k, v, ids, positions, segments, key_segments, logarithm, offset, cotangent, *, geometry, blocks
) -> Array:
    """Rows at a time."""

    def step(piece):
        q, ids, position, segment, logarithm, offset, cotangent = piece
        keep = _kept(ids, position, segment, key_segments, geometry)
        keys = jnp.where(keep[..., None], _gather(k, ids), 0)
        values = jnp.where(keep[..., None], _gather(v, ids), 0)
        logits = _dot("rgd,rnd->rgn", q, keys) * geometry.scale
        products = _dot("rgd,rnd->rgn", cotangent, values)
        _, of_logits = slopes(logits, keep[:, None], logarithm, products, offset)
        return (_dot("rgn,rnd->rgd", of_logits.astype(k.dtype), keys) * geometry.scale).astype(q.dtype)

    size = _rows_at_once(k, v, ids.shape[1], blocks)
    return _in_steps(step, size, (q, ids, positions, segments, logarithm, offset, cotangent))


def key_gradients(
    q, k, v, ids, positions, segments, key_segments, logarithm, offset, cotangent, *, geometry, blocks
) -> tuple[Array, Array]:
    """Key blocks at a time: the rows that chose a block stand together once `ids` are sorted."""
    size = min(blocks.pairs, max(1, ids.size))
    tiles = group_by_block(ids, k.shape[0], size)

    def step(piece):
        block, start, stop = piece
        pairs = start[:, None] + jnp.arange(size, dtype=jnp.int32)
        rows = jnp.take(tiles.rows, pairs, mode="clip")
        here = jnp.minimum(block, k.shape[0] - 1)
        ids = jnp.where(pairs < stop[:, None], here[:, None], -1)
        at = jnp.arange(geometry.block_size, dtype=jnp.int32)
        keep = geometry.sees(
            ids[..., None],
            at,
            jnp.take(positions, rows)[..., None],
            lambda: jnp.take(segments, rows)[..., None],
            lambda _: jnp.take(key_segments, geometry.segment_block(here), axis=0)[:, None],
        )
        keep = keep[:, :, None]  # [tiles, pairs, 1, block_size]
        take = functools.partial(jnp.take, indices=rows, axis=0, mode="clip")
        queries, cotangents = take(q), take(cotangent)  # [tiles, pairs, group, dim]
        keys, values = jnp.take(k, here, axis=0), jnp.take(v, here, axis=0)
        logits = _dot("xpgd,xnd->xpgn", queries, keys) * geometry.scale
        products = _dot("xpgd,xnd->xpgn", cotangents, values)
        weights, of_logits = slopes(logits, keep, take(logarithm), products, take(offset))
        return (
            _dot("xpgn,xpgd->xnd", of_logits.astype(q.dtype), queries) * geometry.scale,
            _dot("xpgn,xpgd->xnd", weights.astype(v.dtype), cotangents),
        )

    width = jnp.promote_types(q.dtype, jnp.float32).itemsize
    tile_bytes = size * q.shape[1] * (q.shape[2] + cotangent.shape[2]) * width
    dk, dv = _in_steps(
        step, max(1, blocks.gathered_bytes // tile_bytes), (tiles.block, tiles.start, tiles.stop)
    )
    add = functools.partial(
        jax.ops.segment_sum, segment_ids=tiles.block, num_segments=k.shape[0], indices_are_sorted=True
    )
    return add(dk).astype(k.dtype), add(dv).astype(v.dtype)
