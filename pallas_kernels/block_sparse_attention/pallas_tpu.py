"""The forward kernel for TPU: block numbers are prefetched, and the pipeline fetches the blocks that they name.

A table is handed in several times, each time with another slot's number, so that one step of the grid has several small
blocks to work on. The backward pass on TPU is XLA's.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._parameters import tpu_parameters
from pallas_kernels._varying import typed_like
from pallas_kernels.block_sparse_attention.blocks import BlockSizes
from pallas_kernels.block_sparse_attention.geometry import Geometry

__all__ = ["forward", "why_not"]

# Typed: Mosaic can't turn the 64-bit literals of x64 mode into 32 bits.
_LOW, _ZERO, _ONE = np.float32(-1e30), np.float32(0), np.float32(1)
_FIRST = np.int32(0)
_LANES = 128
_LARGEST_BLOCK = 1024
_VMEM = 8 * 2**20  # for blocks on their way


def why_not(dtype: Any, dim: int, value_dim: int, block_size: int) -> str | None:
    """Why this kernel can't serve a call, None if it can."""
    if jnp.dtype(dtype).name not in ("float32", "bfloat16"):
        return f"{jnp.dtype(dtype).name} is not float32 or bfloat16"
    if block_size > _LARGEST_BLOCK or max(dim, value_dim) > 512:
        return f"blocks of {block_size} keys of {max(dim, value_dim)} numbers are larger than {_LARGEST_BLOCK} of 512"
    return None


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
    interpret: Any = False,
) -> tuple[Array, Array, Array]:
    """As `xla.forward`."""
    rows, group, _ = q.shape
    sublanes = 8 if q.dtype == jnp.float32 else 16
    block_bytes = 2 * k.shape[1] * (max(k.shape[2], _LANES) + max(v.shape[2], _LANES)) * k.dtype.itemsize
    slots = max(1, min(blocks.slots, ids.shape[1], _VMEM // block_bytes))
    pad = lambda a, axis, multiple, fill=0: jnp.pad(
        a, [(0, -n % multiple if i == axis else 0) for i, n in enumerate(a.shape)], constant_values=fill
    )
    q = pad(q, 1, sublanes)
    k, v = pad(k, 1, sublanes), pad(v, 1, sublanes)
    ids = pad(ids, 1, slots, -1)
    if key_segments is not None:
        key_segments = pad(key_segments, 1, sublanes)[:, None]
    if geometry.segmented is False:
        segments = jnp.zeros_like(positions)

    once = max(1, min(rows, blocks.prefetched // ids.shape[1]))
    call = functools.partial(
        _call, k=k, v=v, key_segments=key_segments, geometry=geometry, slots=slots, interpret=interpret
    )
    if once == rows:
        o, largest, total = call((q, ids, positions, segments))
    else:
        pieces = -(-rows // once)
        cut = lambda a: pad(a, 0, once).reshape(pieces, once, *a.shape[1:])
        found = lax.map(call, jax.tree.map(cut, (q, ids, positions, segments)))
        o, largest, total = (a.reshape(-1, *a.shape[2:])[:rows] for a in found)
    total = total[:, :group, 0]
    return o[:, :group], jnp.where(total == 0, -jnp.inf, largest[:, :group, 0]), total


def _call(piece, *, k, v, key_segments, geometry: Geometry, slots: int, interpret: Any):
    q, ids, positions, segments = piece
    rows, group, dim = q.shape
    steps = ids.shape[1] // slots
    segmented = geometry.segmented

    def place(slot: int):
        def at(row, step, ids, *_):
            return (jnp.maximum(ids[(row * steps + step) * slots + slot], _FIRST), _FIRST, _FIRST)

        return at

    def segment_place(slot: int):
        at = place(slot)
        return lambda *a: (geometry.segment_block(at(*a)[0]), _FIRST, _FIRST)

    own = lambda row, step, *_: (row, _FIRST, _FIRST)
    in_specs = [pl.BlockSpec((None, group, dim), own)]
    in_specs += [pl.BlockSpec((None, *k.shape[1:]), place(slot)) for slot in range(slots)]
    in_specs += [pl.BlockSpec((None, *v.shape[1:]), place(slot)) for slot in range(slots)]
    arrays = [q, *[k] * slots, *[v] * slots]
    if segmented:
        in_specs += [pl.BlockSpec((None, 1, k.shape[1]), segment_place(slot)) for slot in range(slots)]
        arrays += [key_segments] * slots
    shapes = [(rows, group, v.shape[2]), (rows, group, _LANES), (rows, group, _LANES)]
    dtypes = [q.dtype, jnp.float32, jnp.float32]
    return pl.pallas_call(
        functools.partial(_kernel, geometry=geometry, slots=slots, steps=steps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(rows, steps),
            in_specs=in_specs,
            out_specs=[pl.BlockSpec((None, *shape[1:]), own) for shape in shapes],
            scratch_shapes=[pltpu.VMEM((group, v.shape[2]), jnp.float32)],
        ),
        out_shape=[typed_like(s, d, q, k, v, ids) for s, d in zip(shapes, dtypes)],
        compiler_params=tpu_parameters("parallel", "arbitrary"),
        interpret=interpret,
        name="block_sparse_attention_tpu",
    )(ids.reshape(-1), positions, segments, *arrays)


def _kernel(ids, positions, segments, q, *references, geometry: Geometry, slots: int, steps: int):
    keys, values = references[:slots], references[slots : 2 * slots]
    key_segments: Any = references[2 * slots : 3 * slots] if geometry.segmented else [None] * slots
    o, largest, total, acc = references[-4:]
    row, step = pl.program_id(0), pl.program_id(1)

    @pl.when(step == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)
        largest[...] = jnp.full_like(largest, _LOW)
        total[...] = jnp.zeros_like(total)

    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    for slot in range(slots):
        block = ids[(row * steps + step) * slots + slot]

        @pl.when(block >= 0)
        def _(slot=slot, block=block):
            k, v, segment = keys[slot], values[slot], key_segments[slot]
            size = k.shape[0]

            offset = lax.broadcasted_iota(jnp.int32, (1, size), 1)
            keep = geometry.sees(block, offset, positions[row], lambda: segments[row], lambda _: segment[...])
            # A key that nobody sees may hold anything. The mask has to stand upright for that.
            square = [lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1)]
            upright = ((square[0] == square[1]) & keep).astype(jnp.float32)
            v = jnp.where(
                jnp.sum(upright, axis=1, keepdims=True) > _ZERO, v[...], jnp.zeros(v.shape, v.dtype)
            )
            logits = dot(q[...], k[...], (((1,), (1,)), ((), ()))) * np.float32(geometry.scale)
            logits = jnp.where(keep, logits, _LOW)
            top = largest[:, :1]
            new = jnp.maximum(top, jnp.max(logits, axis=1, keepdims=True))
            weights = jnp.where(keep, jnp.exp(logits - new), _ZERO)
            shrink = jnp.exp(top - new)
            acc[...] = acc[...] * shrink + dot(weights.astype(v.dtype), v, (((1,), (0,)), ((), ())))
            largest[...] = jnp.broadcast_to(new, largest.shape)
            sums = total[:, :1] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            total[...] = jnp.broadcast_to(sums, total.shape)

    @pl.when(step == steps - 1)
    def _():
        sums = total[:, :1]
        o[...] = (acc[...] / jnp.where(sums == _ZERO, _ONE, sums)).astype(o.dtype)
