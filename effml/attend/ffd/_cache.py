"""The cache of FFD: full blocks of keys as low-bit codes with residuals, the newest rows as they are."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from effml._validate import count, floating_dtype
from effml.nn.cache import committed_counts
from pallas_kernels.ffd_decode import code_bytes, dequantize, quantize_blocks

__all__ = ["QuantizedKV", "append", "check_layout", "init_cache", "prefill", "room_in_block", "stored_rows"]


@functools.partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class QuantizedKV:
    r"""Keys and values of one layer, head-major.

    The first `sink` rows of a sequence stay as they are, then come `num_blocks` full blocks, whose keys are
    $k \approx (c - z)\,s + r$ (see `pallas_kernels.ffd_decode.quantize_block`), then `tail_len < block` rows as they
    are. A block is quantised when it fills. All of it follows from `length`, sequence by sequence.

    Attributes:
        k_code: uint8[batch, kv_heads, blocks * block, ceil(head * bits / 8)], packed codes c.
        k_scale: float32[batch, kv_heads, blocks, head], s.
        k_resid: [batch, kv_heads, blocks * block, head], r in a small floating type.
        v: [batch, kv_heads, blocks * block, value_head], not quantised.
        k_tail: [batch, kv_heads, block, head], rows behind the last full block.
        v_tail: [batch, kv_heads, block, value_head].
        k_sink: [batch, kv_heads, sink, head], the first rows.
        v_sink: [batch, kv_heads, sink, value_head].
        length: int32[batch], committed rows of each sequence.
        bits: of a code; static.
    """

    k_code: Array
    k_scale: Array
    k_resid: Array
    v: Array
    k_tail: Array
    v_tail: Array
    k_sink: Array
    v_sink: Array
    length: Array
    bits: int = field(metadata={"static": True})

    @property
    def block(self) -> int:
        """Rows of a block."""
        return self.k_tail.shape[-2]

    @property
    def sink(self) -> int:
        """Rows at the start that are never quantised."""
        return self.k_sink.shape[-2]

    @property
    def capacity(self) -> int:
        """Rows that each sequence has room for."""
        return self.sink + self.v.shape[-2] + self.block - 1

    @property
    def num_blocks(self) -> Array:
        """int32[batch], full blocks of each sequence."""
        return jnp.maximum(self.length - self.sink, 0) // self.block

    @property
    def tail_len(self) -> Array:
        """int32[batch], rows of each sequence behind its last full block."""
        return jnp.maximum(self.length - self.sink, 0) % self.block


def init_cache(
    batch: int,
    max_len: int,
    kv_heads: int,
    head_dim: int,
    v_dim: int | None = None,
    *,
    block: int = 128,
    bits: int = 2,
    sink: int = 0,
    resid_dtype: Any = jnp.float8_e4m3fn,
    dtype: Any = jnp.bfloat16,
) -> QuantizedKV:
    """An empty cache of one layer.

    Args:
        batch: number of sequences.
        max_len: rows that each sequence must have room for; the cache has room for at least as many.
        kv_heads: key heads.
        head_dim: size of a key.
        v_dim: size of a value; None is `head_dim`.
        block: rows that are quantised together, a multiple of 8; 256 suits an H100 or its like.
        bits: of a key's code, 2 or 4.
        sink: rows at the start that are kept as they are and always read. One outlier among them would spoil the
            scales of its whole block. With a multiple of `block`, blocks begin where they do without.
        resid_dtype: of the residuals; float8_e4m3fn, or bfloat16 for twice the bytes and keys that are nearly exact.
        dtype: of values, tail and sinks, float32 or bfloat16.

    Returns:
        A `QuantizedKV` with `length` 0.

    Raises:
        ValueError: for a size that is not above 0, bits other than 2 and 4, or a block that is no multiple of 8.

    Example:
        >>> cache = init_cache(batch=2, max_len=100, kv_heads=1, head_dim=8, block=16)
        >>> cache.k_code.shape, cache.k_scale.shape, cache.length.tolist()
        ((2, 1, 96, 2), (2, 1, 6, 8), [0, 0])
    """
    sizes = {"batch": batch, "max_len": max_len, "kv_heads": kv_heads, "head_dim": head_dim}
    for name, size in {**sizes, "v_dim": head_dim if v_dim is None else v_dim}.items():
        count(name, size)
    check_layout(block, bits, sink, resid_dtype)
    value = head_dim if v_dim is None else v_dim
    dtype = floating_dtype("dtype", jnp.bfloat16 if dtype is None else dtype)
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dtype={dtype.name!r} must be float32 or bfloat16")
    blocks = max(max_len - sink, 0) // block
    rows = blocks * block
    zeros = lambda *shape, kind=dtype: jnp.zeros((batch, kv_heads, *shape), kind)
    return QuantizedKV(
        k_code=zeros(rows, code_bytes(head_dim, bits), kind=jnp.uint8),
        k_scale=zeros(blocks, head_dim, kind=jnp.float32),
        k_resid=zeros(rows, head_dim, kind=jnp.dtype(resid_dtype)),
        v=zeros(rows, value),
        k_tail=zeros(block, head_dim),
        v_tail=zeros(block, value),
        k_sink=zeros(sink, head_dim),
        v_sink=zeros(sink, value),
        length=jnp.zeros(batch, jnp.int32),
        bits=bits,
    )


def check_layout(block: int, bits: int, sink: int, resid_dtype: Any) -> None:
    """Raises for a layout that is not possible."""
    if count("block", block) % 8:
        raise ValueError(f"block={block} must be a multiple of 8")
    code_bytes(1, bits)
    if isinstance(sink, bool) or not isinstance(sink, int) or sink < 0:
        raise ValueError(f"sink={sink!r} must be an integer of at least 0")
    if resid_dtype is None:
        raise ValueError("resid_dtype=None must be a floating-point dtype")
    floating_dtype("resid_dtype", resid_dtype)


def append(
    cache: QuantizedKV,
    k: Float[Array, "batch new kv_heads head"],
    v: Float[Array, "batch new kv_heads value"],
    rows: Int[Array, "batch chosen"] | None = None,
    counts: Int[Array | np.ndarray, " batch"] | None = None,
) -> QuantizedKV:
    """Commits new rows behind those of each sequence; blocks that fill are quantised, all inside `jax.jit`.

    Rows come one at a time, many at once, or different numbers for each sequence: the cache ends up the same.

    Args:
        cache: one layer's cache. Donate it under `jax.jit`: the rows are then written in place.
        k: keys of the new rows, rotated.
        v: values of the new rows.
        rows: which of the new rows to commit, in this order; None commits them all.
        counts: how many of each sequence's rows are valid (the rest is padding); None means all.

    Returns:
        The cache with `length` advanced by `counts`. Under `jax.jit` rows that do not fit are dropped and `length`
        stops at the capacity: size the cache for the longest sequence.

    Raises:
        ValueError: for shapes that do not fit the cache, if more rows are given than it can ever hold, or, outside
            `jax.jit`, if a sequence has no room left for its rows.

    Example:
        >>> cache = init_cache(batch=1, max_len=64, kv_heads=1, head_dim=8, block=16)
        >>> k = v = jnp.ones((1, 20, 1, 8))
        >>> cache = append(cache, k, v)
        >>> cache.num_blocks.tolist(), cache.tail_len.tolist(), cache.length.tolist()
        ([1], [4], [20])
    """
    batch, new = k.shape[:2]
    for name, given, buffer in (("k", k, cache.k_tail), ("v", v, cache.v_tail)):
        wanted = (buffer.shape[0], new, buffer.shape[1], buffer.shape[3])
        if given.shape != wanted:
            raise ValueError(f"{name} must have shape {wanted} to fit the cache, not {given.shape}")
    chosen = new if rows is None else rows.shape[1]
    if chosen > cache.capacity:
        raise ValueError(f"{chosen} new rows do not fit into a cache of {cache.capacity} rows")
    if not chosen:
        return cache
    added = committed_counts(counts, batch, chosen)
    length = cache.length + added
    if not isinstance(length, Tracer) and batch and int(length.max()) > cache.capacity:
        raise ValueError(
            f"cache of {cache.capacity} rows is full: sequence {int(length.argmax())} needs {int(length.max())}"
        )
    return _commit(cache, k, v, rows, added)


def prefill(
    cache: QuantizedKV,
    k: Float[Array, "batch length kv_heads head"],
    v: Float[Array, "batch length kv_heads value"],
    lengths: Int[Array | np.ndarray, " batch"] | None = None,
) -> QuantizedKV:
    """Commits whole prompts, padded on the right, to an empty cache: `append` under its usual name.

    Args:
        cache: one layer's empty cache.
        k: keys, rotated.
        v: values.
        lengths: rows of each prompt; None means all.

    Returns:
        The cache.

    Raises:
        ValueError: as `append` does.

    Example:
        >>> cache = init_cache(batch=2, max_len=64, kv_heads=1, head_dim=8, block=16)
        >>> k = v = jnp.ones((2, 40, 1, 8))
        >>> prefill(cache, k, v, jnp.array([40, 7])).num_blocks.tolist()
        [2, 0]
    """
    return append(cache, k, v, None, lengths)


def room_in_block(cache: QuantizedKV) -> Int[Array, "*layers batch"]:
    """Rows that each sequence may commit up to the end of its block.

    A decoder that commits several rows at a time, and is to read what one row at a time reads, commits no more than
    these at once: rows of a later block would have seen this one in full precision.

    Example:
        >>> cache = init_cache(batch=1, max_len=64, kv_heads=1, head_dim=8, block=16)
        >>> k = v = jnp.ones((1, 20, 1, 8))
        >>> room_in_block(cache).tolist(), room_in_block(append(cache, k, v)).tolist()
        ([16], [12])
    """
    return jnp.maximum(cache.sink - cache.length, 0) + cache.block - cache.tail_len


def stored_rows(
    cache: QuantizedKV,
) -> tuple[
    Float[Array, "batch kv_heads rows head"],
    Float[Array, "batch kv_heads rows value"],
    Bool[Array, "batch rows"],
]:
    """All rows as they are stored, sinks first, then blocks, then the tail: for audits, not for decoding.

    Args:
        cache: one layer's cache.

    Returns:
        float32 keys (codes and residuals joined), float32 values, and which rows are committed.

    Example:
        >>> cache = init_cache(batch=1, max_len=64, kv_heads=1, head_dim=8, block=16)
        >>> keys, values, committed = stored_rows(append(cache, *2 * [jnp.ones((1, 20, 1, 8))]))
        >>> keys.shape, int(committed.sum()), float(keys[0, 0, 0, 0])
        ((1, 1, 80, 8), 20, 1.0)
    """
    code = cache.k_code.reshape(*cache.k_scale.shape[:3], cache.block, -1)
    keys = dequantize(code, cache.k_scale, cache.bits).reshape(cache.k_resid.shape)
    keys += cache.k_resid.astype(jnp.float32)
    wide = lambda *parts: jnp.concatenate([part.astype(jnp.float32) for part in parts], axis=2)
    filled = cache.num_blocks * cache.block
    sizes = (cache.sink, cache.length), (cache.v.shape[2], filled), (cache.block, cache.tail_len)
    committed = [jnp.arange(size) < many[:, None] for size, many in sizes]
    return (
        wide(cache.k_sink, keys, cache.k_tail),
        wide(cache.v_sink, cache.v, cache.v_tail),
        jnp.concatenate(committed, axis=1),
    )


@jax.jit
def _commit(cache: QuantizedKV, k: Array, v: Array, rows: Array | None, added: Array) -> QuantizedKV:
    if rows is not None:
        k, v = (jnp.take_along_axis(x, rows[:, :, None, None], axis=1) for x in (k, v))
    batch, new = k.shape[:2]
    added = jnp.clip(added, 0, cache.capacity - cache.length)
    k, v = (x.transpose(0, 2, 1, 3).astype(cache.v_tail.dtype) for x in (k, v))
    each = functools.partial(_each_sequence, batch)

    first = jnp.clip(cache.sink - cache.length, 0, added)  # rows that go to the sinks
    added_behind = added - first
    tail_len, num_blocks = cache.tail_len, cache.num_blocks
    full = (tail_len + added_behind) // cache.block

    k_sink, v_sink = cache.k_sink, cache.v_sink
    if cache.sink:
        source = jnp.arange(cache.sink) - cache.length[:, None]
        fresh = (source >= 0) & (source < added[:, None])
        k_sink, v_sink = (each(_replaced, old, x, source, fresh) for old, x in ((k_sink, k), (v_sink, v)))

    # Slot 0 is the first row of the block that is being filled; slots below tail_len are in the tail already.
    blocks = cache.k_scale.shape[-2]
    most = min((cache.block - 1 + new) // cache.block, blocks)  # blocks that this call may complete
    k_code, k_scale, k_resid, values = cache.k_code, cache.k_scale, cache.k_resid, cache.v
    if most:
        # A window of `most` blocks that ends within the cache, of which only the completed ones are replaced.
        start = jnp.clip(num_blocks, 0, blocks - most)
        which = start[:, None] + jnp.arange(most) - num_blocks[:, None]
        done = (which >= 0) & (which < full[:, None])
        slots = (which[:, :, None] * cache.block + jnp.arange(cache.block)).reshape(batch, -1)

        def completed(k_tail: Array, v_tail: Array, k: Array, v: Array) -> tuple[Array, ...]:
            k, v = (each(_rows_at, tail, x, slots, tail_len, first) for tail, x in ((k_tail, k), (v_tail, v)))
            return *quantize_blocks(k, cache.block, cache.bits, residual_dtype=cache.k_resid.dtype), v

        given = cache.k_tail, cache.v_tail, k, v
        if new == 1:  # most steps complete nothing
            shapes = jax.eval_shape(completed, *given)
            nothing = lambda *arrays: tuple(jnp.zeros(x.shape, x.dtype) for x in shapes)
            fresh = jax.lax.cond(jnp.any(done), completed, nothing, *given)
        else:
            fresh = completed(*given)
        by_row = jnp.repeat(done, cache.block, axis=1)
        k_code, k_resid, values = (
            each(_written, old, x, start * cache.block, by_row)
            for old, x in zip((k_code, k_resid, values), (fresh[0], fresh[2], fresh[3]))
        )
        k_scale = each(_written, k_scale, fresh[1], start, done)

    slots = full[:, None] * cache.block + jnp.arange(cache.block)
    k_tail, v_tail = (
        each(_rows_at, tail, x, slots, tail_len, first) for tail, x in ((cache.k_tail, k), (cache.v_tail, v))
    )
    return QuantizedKV(
        k_code, k_scale, k_resid, values, k_tail, v_tail, k_sink, v_sink, cache.length + added, cache.bits
    )


def _each_sequence(batch: int, function: Any, *arrays: Array) -> Array:
    """`function` of every sequence; without `vmap` for one, so that its slice update runs in place."""
    if batch == 1:
        return function(*(array[0] for array in arrays))[None]
    return jax.vmap(function)(*arrays)


def _rows_at(tail: Array, new: Array, slots: Array, tail_len: Array, first: Array) -> Array:
    """[heads, slots, size]: rows of the tail, and behind it the new rows from `first` on."""
    behind = first + slots - tail_len
    fresh = _taken(new, behind)
    return jnp.where((slots < tail_len)[:, None], _taken(tail, slots), fresh)


def _replaced(old: Array, new: Array, source: Array, fresh: Array) -> Array:
    """[heads, slots, size]: slot i is row `source[i]` of `new` where that is `fresh`."""
    return jnp.where(fresh[:, None], _taken(new, source), old)


def _taken(rows: Array, index: Array) -> Array:
    return jnp.take(rows, jnp.clip(index, 0, rows.shape[1] - 1), axis=1)


def _written(old: Array, update: Array, start: Array, replace: Array) -> Array:
    """`old` [heads, slots, size] with the window at `start` replaced where `replace` says so."""
    window = jax.lax.dynamic_slice_in_dim(old, start, update.shape[1], axis=1)
    merged = jnp.where(replace[:, None], update, window)
    return jax.lax.dynamic_update_slice_in_dim(old, merged, start, axis=1)
