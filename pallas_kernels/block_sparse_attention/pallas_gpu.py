"""Kernels for NVIDIA GPU, through Pallas's Triton lowering (JAX 0.10.2 to 0.12).

Forward and dq: one program for a row; it reads a block's number and slices the tables there, so nothing is gathered. dk
and dv: one program for a tile of at most some hundred rows that chose the same block; a block's tiles are then added in
order, so that two runs agree to the bit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._parameters import gpu_parameters
from pallas_kernels._varying import typed_like
from pallas_kernels.block_sparse_attention.blocks import BlockSizes
from pallas_kernels.block_sparse_attention.geometry import Geometry, group_by_block, slopes

__all__ = ["backward", "forward", "why_not"]

_LOW = -1e30  # below every logit, and finite: differences of it are no NaN
_LARGEST_DIM = 256


def why_not(dtype: Any, dim: int, value_dim: int) -> str | None:
    """Why these kernels can't serve a call, None if they can."""
    if jnp.dtype(dtype).name not in ("float32", "bfloat16", "float16"):
        return f"{jnp.dtype(dtype).name} is not float32, bfloat16 or float16"
    if max(dim, value_dim) > _LARGEST_DIM:
        return f"heads of {max(dim, value_dim)} numbers are larger than {_LARGEST_DIM}"
    return None


def _power(n: int, least: int = 1) -> int:
    return max(least, 1 << (n - 1).bit_length())


def _padded(a: Array, *sizes: int | None) -> Array:
    """Zeros behind each axis up to a size."""
    sizes = (*sizes, *[None] * (a.ndim - len(sizes)))
    widths = [(0, 0 if size is None else size - have) for size, have in zip(sizes, a.shape)]
    return jnp.pad(a, widths) if any(w for _, w in widths) else a


def _group(group: int) -> int:
    """Few heads are multiplied without tensor cores, which want 16 rows."""
    return _power(group) if group <= 4 else _power(group, 16)


def _parts(q: Array) -> int:
    """Programs that share the query heads of a row: at most 16 heads of float32 each, or 64 (32 of large ones)."""
    most = 16 if q.dtype == jnp.float32 else 64 if q.shape[2] <= 128 else 32
    return -(-q.shape[1] // most)


def _split(a: Array, parts: int) -> Array:
    """[rows, group, ...] -> [rows * parts, group / parts, ...]; zeros stand for heads that there are not."""
    if parts == 1:
        return a
    each = -(-a.shape[1] // parts)
    return _padded(a, None, parts * each).reshape(-1, each, *a.shape[2:])


def _repeated(a: Any, parts: int) -> Any:
    return a if a is None or parts == 1 else jnp.repeat(a, parts, axis=0)


def _dot(a: Any, b: Any, contract: tuple[int, int]) -> Any:
    """float32 product of two matrices; exact enough for float32, tensor cores where there are 16 rows."""
    if a.shape[1 - contract[0]] < 16 or a.shape[contract[0]] < 16:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        if contract == (1, 1):
            return jnp.sum(a[:, None, :] * b[None, :, :], axis=2)
        return jnp.sum(a[:, :, None] * b[None, :, :], axis=1)
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _tables(k, v, key_segments, geometry: Geometry, blocks: BlockSizes):
    """Blocks of a power of two of keys, heads of a power of two of numbers; and the keys that are loaded at once."""
    rows = _power(geometry.block_size, 16)
    k = _padded(k, None, rows, _power(k.shape[2], 16))
    v = _padded(v, None, rows, _power(v.shape[2], 16))
    key_segments = None if key_segments is None else _padded(key_segments, None, rows)
    # More at once would need more registers and shared memory than there are.
    most = max(16, 32 * 1024 // (max(k.shape[2], v.shape[2]) * k.dtype.itemsize * 2))
    return k, v, key_segments, min(rows, blocks.keys, most)


def _piece(table: Any, place: Any, start: Any, width: int, keep: Any):
    """Some keys of a block; those that nobody sees are zeros and not read."""
    mask = lax.broadcast_in_dim(keep, (width, table.shape[2]), (0,))
    return plgpu.load(table.at[place, pl.ds(start, width), :], mask=mask, other=0)


def _whole(a: Any) -> pl.BlockSpec:
    return pl.BlockSpec(a.shape, lambda i: (0,) * a.ndim)


def _each(a: Any) -> pl.BlockSpec:
    return pl.BlockSpec((None, *a.shape[1:]), lambda i: (i,) + (0,) * (a.ndim - 1))


def _launch(
    kernel: Any, programs: int, each: dict, whole: dict, out: dict, blocks: BlockSizes, name: str, interpret
):
    """Calls `kernel` with one reference per name; arrays that are None are left out."""
    each = {n: a for n, a in each.items() if a is not None}
    whole = {n: a for n, a in whole.items() if a is not None}
    arrays = {**each, **whole}
    names = (*arrays, *out)

    def body(*references):
        kernel(**dict(zip(names, references)))

    return pl.pallas_call(
        body,
        grid=(programs,),
        in_specs=[*map(_each, each.values()), *map(_whole, whole.values())],
        out_specs=[_each(a) for a in out.values()],
        out_shape=[typed_like(a.shape, a.dtype, *arrays.values()) for a in out.values()],
        compiler_params=gpu_parameters(blocks.num_warps, blocks.num_stages),
        interpret=interpret,
        name=name,
    )(*arrays.values())


def _key_loop(ids, positions, segments, key_segments, k, v, geometry: Geometry, width: int, visit, initial):
    """Folds `visit(carry, keep, keys, values)` over the pieces of a row's blocks."""
    pieces = k.shape[1] // width

    def step(i, carry):
        block = ids[lax.div(i, pieces)]
        place = jnp.maximum(block, 0)
        start = lax.rem(i, pieces) * width
        offset = start + lax.iota(jnp.int32, width)
        keep = geometry.sees(
            block,
            offset,
            positions[...],
            lambda: segments[...],
            lambda row: key_segments[row, pl.ds(start, width)],
        )
        keys = _piece(k, place, start, width, keep)
        values = _piece(v, place, start, width, keep)
        return visit(carry, keep, keys, values)

    return lax.fori_loop(0, ids.shape[0] * pieces, step, initial)


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
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """As `xla.forward`."""
    whole, heads = q.shape[0], q.shape[1]
    parts = _parts(q)
    q = _split(q, parts)
    ids, positions, segments = (_repeated(a, parts) for a in (ids, positions, segments))
    rows, group, _ = q.shape
    value_dim = v.shape[2]
    k, v, key_segments, width = _tables(k, v, key_segments, geometry, blocks)
    q = _padded(q, None, _group(group), k.shape[2])
    out = {
        "o": jax.ShapeDtypeStruct((rows, q.shape[1], v.shape[2]), q.dtype),
        "largest": jax.ShapeDtypeStruct((rows, q.shape[1]), jnp.float32),
        "total": jax.ShapeDtypeStruct((rows, q.shape[1]), jnp.float32),
    }

    def kernel(*, q, ids, positions, k, v, o, largest, total, segments=None, key_segments=None):
        queries = q[...]

        def visit(carry, keep, keys, values):
            top, total, out = carry
            logits = _dot(queries, keys, (1, 1)) * geometry.scale
            seen = lax.broadcast_in_dim(keep, logits.shape, (1,))
            logits = jnp.where(seen, logits, _LOW)
            new = jnp.maximum(top, jnp.max(logits, axis=1))
            weights = jnp.where(seen, jnp.exp(logits - new[:, None]), 0)
            shrink = jnp.exp(top - new)
            out = out * shrink[:, None] + _dot(weights.astype(values.dtype), values, (1, 0))
            return new, total * shrink + jnp.sum(weights, axis=1), out

        size = queries.shape[0]
        initial = (
            jnp.full((size,), _LOW, jnp.float32),
            jnp.zeros((size,), jnp.float32),
            jnp.zeros((size, v.shape[2]), jnp.float32),
        )
        top, sums, values = _key_loop(
            ids, positions, segments, key_segments, k, v, geometry, width, visit, initial
        )
        o[...] = (values / jnp.where(sums == 0, 1, sums)[:, None]).astype(o.dtype)
        largest[...] = jnp.where(sums == 0, -jnp.inf, top)
        total[...] = sums

    each = {"q": q, "ids": ids, "positions": positions, "segments": segments}
    tables = {"k": k, "v": v, "key_segments": key_segments}
    o, largest, total = _launch(
        kernel, rows, each, tables, out, blocks, "block_sparse_attention_gpu", interpret
    )
    o, largest, total = o[:, :group, :value_dim], largest[:, :group], total[:, :group]
    return tuple(a.reshape(whole, -1, *a.shape[2:])[:, :heads] for a in (o, largest, total))  # pyright: ignore


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
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """As `xla.backward`."""
    whole, heads = q.shape[0], q.shape[1]
    parts = _parts(q)
    q, logarithm, offset, cotangent = (_split(a, parts) for a in (q, logarithm, offset, cotangent))
    ids, positions, segments = (_repeated(a, parts) for a in (ids, positions, segments))
    rest = (positions, segments, key_segments, logarithm, offset, cotangent)
    given = {"geometry": geometry, "blocks": blocks, "interpret": interpret}
    dq = query_gradient(q, k, v, ids, *rest, **given)
    dk, dv = key_gradients(q, k, v, ids, *rest, **given)
    return dq.reshape(whole, -1, dq.shape[2])[:, :heads], dk, dv


def query_gradient(
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
    *,
    geometry,
    blocks,
    interpret,
) -> Array:
    """The forward's walk once more."""
    rows, group, dim = q.shape
    k, v, key_segments, width = _tables(k, v, key_segments, geometry, blocks)
    size = _group(group)
    q = _padded(q, None, size, k.shape[2])
    cotangent = _padded(cotangent, None, size, v.shape[2])
    logarithm, offset = _padded(logarithm, None, size), _padded(offset, None, size)

    def kernel(
        *, q, ids, positions, cotangent, logarithm, offset, k, v, dq, segments=None, key_segments=None
    ):
        queries, cotangents, log_sum, shift = q[...], cotangent[...], logarithm[...], offset[...]

        def visit(carry, keep, keys, values):
            logits = _dot(queries, keys, (1, 1)) * geometry.scale
            seen = lax.broadcast_in_dim(keep, logits.shape, (1,))
            products = _dot(cotangents, values, (1, 1))
            _, of_logits = slopes(logits, seen, log_sum, products, shift)
            return carry + _dot(of_logits.astype(keys.dtype), keys, (1, 0))

        total = _key_loop(
            ids,
            positions,
            segments,
            key_segments,
            k,
            v,
            geometry,
            width,
            visit,
            jnp.zeros(queries.shape, jnp.float32),
        )
        dq[...] = (total * geometry.scale).astype(dq.dtype)

    each = {
        "q": q,
        "ids": ids,
        "positions": positions,
        "segments": segments,
        "cotangent": cotangent,
        "logarithm": logarithm,
        "offset": offset,
    }
    whole = {"k": k, "v": v, "key_segments": key_segments}
    out = {"dq": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    (dq,) = _launch(kernel, rows, each, whole, out, blocks, "block_sparse_attention_dq_gpu", interpret)
    return dq[:, :group, :dim]


def key_gradients(
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
    *,
    geometry,
    blocks,
    interpret,
) -> tuple[Array, Array]:
    """Tiles of the rows that chose one block, then the sum of every block's tiles."""
    dim, value_dim, block_rows = k.shape[2], v.shape[2], k.shape[1]
    k, v, key_segments, width = _tables(k, v, key_segments, geometry, blocks)
    size = _power(q.shape[1])
    many = max(1, 16 // size)  # rows at once, so that tensor cores have 16
    q = _padded(q, None, size, k.shape[2])
    cotangent = _padded(cotangent, None, size, v.shape[2])
    logarithm, offset = _padded(logarithm, None, size), _padded(offset, None, size)
    tiles = group_by_block(ids, k.shape[0], 4 * blocks.pairs)
    pieces = k.shape[1] // width
    flat = many * size

    def kernel(
        *, block, start, stop, pair_rows, q, k, v, positions, cotangent, logarithm, offset, dk, dv,
        segments: Any = None, key_segments: Any = None,
    ):  # fmt: skip
        here = jnp.minimum(block[...], k.shape[0] - 1)
        begin, end = start[...], stop[...]
        first = lax.rem(pl.program_id(0), jnp.int32(pieces)) * width
        at = first + lax.iota(jnp.int32, width)
        within = pl.ds(first, width)
        keys, values = k[here, within, :], v[here, within, :]
        key_segment: Any = None
        if geometry.segmented:
            key_segment = key_segments[geometry.segment_block(here), within]

        def step(i, carry):
            pairs = begin + i * many + lax.iota(jnp.int32, many)
            valid = pairs < end
            rows = plgpu.load(pair_rows.at[jnp.where(valid, pairs, 0)])
            place = jnp.where(valid, here, -1)
            keep = geometry.sees(
                place[:, None],
                at[None],
                positions[rows][:, None],
                lambda: segments[rows][:, None],
                lambda _: key_segment[None],
            )
            keep = lax.broadcast_in_dim(keep, (many, size, width), (0, 2)).reshape(flat, width)
            queries = q[rows].reshape(flat, -1)
            cotangents = cotangent[rows].reshape(flat, -1)
            logits = _dot(queries, keys, (1, 1)) * geometry.scale
            products = _dot(cotangents, values, (1, 1))
            log_sum, shift = (a[rows].reshape(flat) for a in (logarithm, offset))
            weights, of_logits = slopes(logits, keep, log_sum, products, shift)
            of_keys, of_values = carry
            of_keys += _dot(of_logits.astype(queries.dtype), queries, (0, 0))
            of_values += _dot(weights.astype(cotangents.dtype), cotangents, (0, 0))
            return of_keys, of_values

        zeros = (jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32))
        of_keys, of_values = lax.fori_loop(
            0, lax.div(end - begin + jnp.int32(many - 1), jnp.int32(many)), step, zeros
        )
        dk[...] = of_keys * geometry.scale
        dv[...] = of_values

    # Program i has piece i % pieces of the keys of tile i // pieces.
    each = {"block": tiles.block, "start": tiles.start, "stop": tiles.stop}
    each = {name: jnp.repeat(a, pieces) for name, a in each.items()}
    whole = {
        "pair_rows": tiles.rows,
        "q": q,
        "k": k,
        "v": v,
        "positions": positions,
        "cotangent": cotangent,
        "logarithm": logarithm,
        "offset": offset,
        "segments": segments,
        "key_segments": key_segments,
    }
    programs = tiles.block.shape[0] * pieces
    out = {
        "dk": jax.ShapeDtypeStruct((programs, width, k.shape[2]), jnp.float32),
        "dv": jax.ShapeDtypeStruct((programs, width, v.shape[2]), jnp.float32),
    }
    parts = _launch(kernel, programs, each, whole, out, blocks, "block_sparse_attention_dkv_gpu", interpret)

    def add(*, first, last, dk_parts, dv_parts, dk, dv):
        piece = lax.rem(pl.program_id(0), jnp.int32(pieces))
        for parts, total in ((dk_parts, dk), (dv_parts, dv)):
            step = lambda i, sum, parts=parts: sum + parts[i * pieces + piece]
            zeros = jnp.zeros(total.shape, jnp.float32)
            total[...] = lax.fori_loop(first[...], last[...], step, zeros).astype(total.dtype)

    each = {"first": jnp.repeat(tiles.first[:-1], pieces), "last": jnp.repeat(tiles.first[1:], pieces)}
    whole = {"dk_parts": parts[0], "dv_parts": parts[1]}
    programs = k.shape[0] * pieces
    out = {n: jax.ShapeDtypeStruct((programs, width, a.shape[2]), a.dtype) for n, a in (("dk", k), ("dv", v))}
    sums = _launch(add, programs, each, whole, out, blocks, "block_sparse_attention_sum_gpu", interpret)
    dk, dv = (a.reshape(t.shape)[:, :block_rows] for a, t in zip(sums, (k, v)))
    return dk[..., :dim], dv[..., :value_dim]
