r"""Decoding with SSA: a dense cache and, beside it, the sum of the rotated keys of every block.

A step's selection then costs one product with `capacity / block_size` sums, and its attention reads the chosen blocks
alone. A block is pooled once its last row is committed or among the new ones, which is what the forward pass over the
whole text does at that token, so that both choose the same blocks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from effml._validate import count
from effml.attend.ssa._config import SSATransformerConfig
from effml.attend.ssa._select import check_heads, choose
from effml.nn import cache as dense
from effml.nn.cache import DenseCache
from effml.nn.transformer import TransformerConfig
from pallas_kernels.block_sparse_attention import block_sparse_attention

__all__ = ["SSACache", "append", "attend", "init_cache"]

_FEW_ROWS = 16  # new rows up to which each gathers its own blocks
_MASKED, _FLOOR = -1e30, -1e29


class SSACache(NamedTuple):
    """The cache of one layer.

    Attributes:
        rows: keys and values, as dense attention keeps them; its capacity is a multiple of the block size.
        sums: float32[batch, kv_heads, blocks, head], of the committed keys of every block.
    """

    rows: DenseCache
    sums: Array

    @property
    def length(self) -> Array:
        """int32[batch], committed rows of each sequence."""
        return self.rows.length

    @property
    def capacity(self) -> int:
        """Rows that each sequence has room for."""
        return self.rows.capacity

    @property
    def block_size(self) -> int:
        """Keys of a block."""
        return self.rows.capacity // self.sums.shape[-2]


def init_cache(
    config: TransformerConfig | SSATransformerConfig,
    batch: int,
    max_length: int,
    dtype: Any = None,
    *,
    block_size: int | None = None,
    stacked: bool = False,
) -> Any:
    """An empty cache for every layer, with room for `max_length` rows rounded up to whole blocks.

    Args:
        config: the model's configuration.
        batch: number of sequences.
        max_length: rows per sequence.
        dtype: of keys and values; None means the compute dtype.
        block_size: keys of a block; None takes that of an `SSATransformerConfig`.
        stacked: one `SSACache` with a leading layer axis (scanned layers) instead of a list.

    Returns:
        A list of `SSACache`, or one stacked `SSACache`.

    Raises:
        ValueError: if a size is not above 0, or no block size is known.

    Example:
        >>> config = TransformerConfig(vocab_size=256, width=64, num_layers=2, num_heads=4, mlp_width=128)
        >>> cache = init_cache(config, batch=3, max_length=20, block_size=8)[0]
        >>> cache.capacity, cache.sums.shape
        (24, (3, 4, 3, 16))
    """
    if isinstance(config, SSATransformerConfig):
        block_size = config.attention.block_size if block_size is None else block_size
        config = config.model
    if block_size is None:
        raise ValueError("block_size must be given where the configuration does not hold one")
    count("block_size", block_size)
    count("max_length", max_length)
    blocks = -(-max_length // block_size)
    rows = dense.init_cache(config, batch, blocks * block_size, dtype, stacked=stacked)
    lead = (config.num_layers,) if stacked else ()
    shape = (*lead, batch, config.kv_heads, blocks, config.head_dim)
    if isinstance(rows, DenseCache):
        return SSACache(rows, jnp.zeros(shape, jnp.float32))
    return [SSACache(layer, jnp.zeros(shape, jnp.float32)) for layer in rows]


def append(
    cache: SSACache,
    k: Float[Array, "batch new kv_heads head"],
    v: Float[Array, "batch new kv_heads head"],
    rows: Int[Array, "batch chosen"] | None = None,
    counts: Int[Array, " batch"] | None = None,
) -> SSACache:
    """Commits new rows behind the committed ones, as `effml.nn.cache.append` does, and adds their keys to the sums.

    Args:
        cache: one layer's cache.
        k: keys of the new rows.
        v: values of the new rows.
        rows: which of the new rows to commit, in this order; None commits them all.
        counts: how many of each sequence's rows are valid; None means all.

    Returns:
        The cache with the rows in it.

    Raises:
        ValueError: as `effml.nn.cache.append` does.

    Example:
        >>> config = TransformerConfig(vocab_size=256, width=8, num_layers=1, num_heads=1, mlp_width=8)
        >>> cache = init_cache(config, batch=1, max_length=8, block_size=4)[0]
        >>> cache = append(cache, jnp.ones((1, 6, 1, 8)), jnp.ones((1, 6, 1, 8)))
        >>> cache.length.tolist(), cache.sums[0, 0, :, 0].tolist()
        ([6], [4.0, 2.0])
    """
    if rows is not None:
        k, v = (jnp.take_along_axis(new, rows[:, :, None, None], axis=1) for new in (k, v))
    place = cache.length[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)
    kept = place < cache.capacity
    if counts is not None:
        counts = dense.committed_counts(counts, *k.shape[:2])
        kept &= jnp.arange(k.shape[1]) < counts[:, None]
    block = jnp.where(kept, place // cache.block_size, cache.sums.shape[-2])  # outside: dropped
    sequence = jnp.arange(k.shape[0])[:, None]
    # As the cache holds them: the sums are those of the rows that will be read.
    keys = k.astype(cache.rows.keys.dtype).astype(jnp.float32)
    sums = cache.sums.at[sequence, :, block].add(keys, mode="drop")
    return SSACache(dense.append(cache.rows, k, v, None, counts), sums)


def attend(
    query: Float[Array, "batch new heads head"],
    cache: SSACache,
    k_new: Float[Array, "batch new kv_heads head"],
    v_new: Float[Array, "batch new kv_heads head"],
    mask_new: Any = None,
    positions: Any = None,
    *,
    num_blocks: int,
    scale: float,
) -> Float[Array, "batch new heads head"]:
    """Block-sparse attention of new rows, which follow the committed ones, over both.

    Equal to row `cache.length + i` of the forward pass over the whole text, and reads no block but the chosen ones
    (with more than a few new rows the cache is rearranged once for all of them).

    Args:
        query: rotated queries.
        cache: committed rows.
        k_new: rotated keys of the new rows.
        v_new: values of the new rows.
        mask_new: must be None: a block has one order of rows, so drafted trees can't be read.
        positions: not used: rows are counted as they are committed.
        num_blocks: blocks that each query reads.
        scale: factor on the scores.

    Returns:
        Attention output in the dtype of `query`.

    Raises:
        ValueError: for a mask, or heads that don't divide.

    Example:
        >>> config = TransformerConfig(vocab_size=256, width=8, num_layers=1, num_heads=1, mlp_width=8)
        >>> cache = init_cache(config, batch=1, max_length=16, block_size=8)[0]
        >>> rows = jnp.ones((1, 3, 1, 8))
        >>> attend(rows, cache, rows, rows, num_blocks=1, scale=1.0).shape
        (1, 3, 1, 8)
    """
    del positions
    check_heads(query, k_new)
    count("num_blocks", num_blocks)
    if mask_new is not None:
        raise ValueError("mask must be None with sparse attention: new rows follow each other in one order")
    few = query.shape[1] <= _FEW_ROWS
    return (_few if few else _many)(query, cache, k_new, v_new, num_blocks, scale)


def _select(query: Array, cache: SSACache, sums: Array, num_blocks: int, scale: float) -> Array:
    place = cache.length[:, None] + jnp.arange(query.shape[1], dtype=jnp.int32)
    return choose(
        query,
        sums / cache.block_size,
        first=jnp.zeros_like(place),
        position=place,
        block_size=cache.block_size,
        num_blocks=min(num_blocks, sums.shape[2]),
        scale=scale,
    )


def _many(query: Array, cache: SSACache, k_new: Array, v_new: Array, num_blocks: int, scale: float) -> Array:
    """By the kernel, over a copy of the cache that holds the new rows as well."""
    size, new = cache.block_size, query.shape[1]
    more = -(-new // size) * size
    pad = lambda x, axis, by: jnp.pad(x, [(0, by if at == axis else 0) for at in range(x.ndim)])
    rows = DenseCache(pad(cache.rows.keys, 3, more), pad(cache.rows.values, 2, more), cache.length)
    whole = append(SSACache(rows, pad(cache.sums, 2, more // size)), k_new, v_new)
    indices = _select(query, cache, whole.sums, num_blocks, scale)
    positions = cache.length[:, None] + jnp.arange(new, dtype=jnp.int32)
    kernel: Any = block_sparse_attention
    return kernel(
        query,
        whole.rows.keys.transpose(0, 3, 1, 2).astype(query.dtype),
        whole.rows.values.transpose(0, 2, 1, 3).astype(query.dtype),
        indices,
        block_size=size,
        scale=scale,
        positions=positions,
    )


def _few(query: Array, cache: SSACache, k_new: Array, v_new: Array, num_blocks: int, scale: float) -> Array:
    """Each new row gathers its blocks from the cache, and the new rows stand beside them."""
    size, blocks = cache.block_size, cache.sums.shape[2]
    batch, new, heads, head = query.shape
    kv_heads = k_new.shape[2]
    block_new = (cache.length[:, None] + jnp.arange(new, dtype=jnp.int32)) // size  # [batch, new]
    more = -(-new // size)
    sums = jnp.pad(cache.sums, [(0, 0), (0, 0), (0, more), (0, 0)])
    added = k_new.astype(cache.rows.keys.dtype).astype(jnp.float32)
    sums = sums.at[jnp.arange(batch)[:, None], :, block_new].add(added, mode="drop")
    indices = _select(query, cache, sums, num_blocks, scale)  # [batch, new, kv_heads, slots]

    stored = jnp.clip(indices, 0, blocks - 1).swapaxes(1, 2)  # [batch, kv_heads, new, slots]
    keys = cache.rows.keys.reshape(batch, kv_heads, head, blocks, size)
    values = cache.rows.values.reshape(batch, kv_heads, blocks, size, head)
    gather = lambda axis: jax.vmap(jax.vmap(functools.partial(jnp.take, axis=axis, mode="clip")))
    keys, values = gather(1)(keys, stored), gather(0)(values, stored)
    row = indices[..., None] * size + jnp.arange(size)  # [batch, new, kv_heads, slots, size]
    committed = (indices[..., None] >= 0) & (row < cache.length[:, None, None, None, None])
    chosen = (indices[..., None] == block_new[:, None, None, None]).any(3)  # [batch, new, kv_heads, new]
    chosen &= jnp.tril(jnp.ones((new, new), bool))[None, :, None]

    grouped = query.reshape(batch, new, kv_heads, heads // kv_heads, head)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    old = product("btkgd,bkdtsj->btkgsj", grouped, keys.astype(query.dtype)) * scale
    fresh = product("btkgd,bukd->btkgu", grouped, k_new) * scale
    old = jnp.where(committed[:, :, :, None], old, _MASKED)
    fresh = jnp.where(chosen[:, :, :, None], fresh, _MASKED)
    peak = jnp.maximum(old.max((-2, -1)), fresh.max(-1))
    peak = jnp.maximum(peak, _FLOOR)
    old, fresh = jnp.exp(old - peak[..., None, None]), jnp.exp(fresh - peak[..., None])
    output = product("btkgsj,bktsjd->btkgd", old.astype(query.dtype), values.astype(query.dtype))
    output += product("btkgu,bukd->btkgd", fresh.astype(query.dtype), v_new)
    total = old.sum((-2, -1)) + fresh.sum(-1)
    output = output / total[..., None]
    return output.reshape(batch, new, heads, head).astype(query.dtype)
