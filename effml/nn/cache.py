"""The key-value cache of dense attention: full-precision rows, one length per sequence.

A cache is a pytree handled by pure functions. `attend` reads the committed rows together with the new rows of
this call; `append` commits chosen new rows afterwards. Rows that are never appended (drafted tokens that were
refused) thus never enter the cache, and nothing has to be taken out again.

Under `jax.jit` give the cache to `donate_argnums`, or carry it through `jax.lax.scan`: `append` then writes
its rows in place.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from effml._validate import positive
from effml.nn._config import TransformerConfig

__all__ = ["DenseCache", "append", "attend", "committed_counts", "init_cache"]

# Finite, so that a row with nothing to attend to gives exp(_MASKED - _FLOOR) = 0 and not NaN.
_MASKED = -1e30
_FLOOR = -1e29


class DenseCache(NamedTuple):
    """Keys and values of one layer; rows `0 … length - 1` of each sequence are committed.

    Each side lies as its product reads it, so that a step of decoding moves no row but the new one.

    Attributes:
        keys: [batch, kv_heads, head, capacity], rotated.
        values: [batch, kv_heads, capacity, head].
        length: int32[batch], committed rows of each sequence.
    """

    keys: Array
    values: Array
    length: Array

    @property
    def capacity(self) -> int:
        """Rows that each sequence has room for."""
        return self.keys.shape[-1]


def init_cache(
    config: TransformerConfig,
    batch: int,
    max_length: int,
    dtype: Any = None,
    *,
    stacked: bool = False,
) -> Any:
    """An empty cache for every layer.

    Args:
        config: the model's configuration.
        batch: number of sequences.
        max_length: rows per sequence.
        dtype: of keys and values; None means the compute dtype.
        stacked: False gives a list with one `DenseCache` per layer (unrolled layers), True one
            `DenseCache` with a leading layer axis on every leaf (scanned layers).

    Returns:
        A list of `DenseCache`, or one stacked `DenseCache`.

    Raises:
        ValueError: if `batch` or `max_length` is not above 0.

    Example:
        >>> config = TransformerConfig(vocab_size=256, width=64, num_layers=2, num_heads=4, mlp_width=128)
        >>> [cache.keys.shape for cache in init_cache(config, batch=3, max_length=10)]
        [(3, 4, 16, 10), (3, 4, 16, 10)]
    """
    positive("batch", batch)
    positive("max_length", max_length)
    dtype = jnp.dtype(config.compute_dtype if dtype is None else dtype)
    lead = (config.num_layers,) if stacked else ()
    rows = (*lead, batch, config.kv_heads)

    def empty() -> DenseCache:
        return DenseCache(
            jnp.zeros((*rows, config.head_dim, max_length), dtype),
            jnp.zeros((*rows, max_length, config.head_dim), dtype),
            jnp.zeros((*lead, batch), jnp.int32),
        )

    return empty() if stacked else [empty() for _ in range(config.num_layers)]


def attend(
    query: Float[Array, "batch new heads head"],
    cache: DenseCache | None,
    k_new: Float[Array, "batch new kv_heads head"],
    v_new: Float[Array, "batch new kv_heads head"],
    mask_new: Bool[Array, "#batch new new"] | None = None,
    positions: Int[Array, "batch new"] | None = None,
    *,
    scale: float,
) -> Float[Array, "batch new heads head"]:
    r"""Softmax attention of new queries over the committed rows and the new rows.

    $$o_t = \sum_{s} \frac{e^{c\, q_t \cdot k_s}}{\sum_{s'} e^{c\, q_t \cdot k_{s'}}} v_s$$

    with s over the rows `< cache.length` and the new rows that `mask_new` allows, and c = `scale`. Scores and
    softmax are float32; several query heads share a key head without a copy of it. A query that may attend
    to nothing gets zeros.

    Args:
        query: rotated queries; head j reads key head `j // (heads // kv_heads)`.
        cache: committed rows, or None.
        k_new: rotated keys of the new rows.
        v_new: values of the new rows.
        mask_new: which new rows (last axis) each new query sees; None is causal.
        positions: of the new rows; dense attention has no use for them, other caches do.
        scale: factor on the scores.

    Returns:
        Attention output in the dtype of `query`.

    Example:
        >>> query = key = value = jnp.ones((1, 3, 2, 4))
        >>> attend(query, None, key, value, scale=0.5).shape
        (1, 3, 2, 4)
    """
    del positions
    batch, new, heads, head = query.shape
    kv_heads = k_new.shape[2]
    grouped = query.reshape(batch, new, kv_heads, heads // kv_heads, head)

    def scores(keys: Array, layout: str, visible: Array) -> Array:
        # The order bktgs is the product's own output order, so the largest array is never transposed.
        raw = jnp.einsum(
            f"btkgh,{layout}->bktgs", grouped, keys.astype(query.dtype), preferred_element_type=jnp.float32
        )
        return jnp.where(visible, raw * scale, _MASKED)

    if mask_new is None:
        visible = jnp.tril(jnp.ones((new, new), bool))[None, None, :, None, :]
    else:
        visible = mask_new[:, None, :, None, :]
    parts = [(scores(k_new, "bskh", visible), v_new, "bskh")]
    if cache is not None:
        committed = (jnp.arange(cache.capacity) < cache.length[:, None])[:, None, None, None, :]
        parts.append((scores(cache.keys, "bkhs", committed), cache.values, "bksh"))

    peak = jnp.full((), _FLOOR, jnp.float32)
    for part, *_ in parts:
        peak = jnp.maximum(peak, jax.lax.stop_gradient(part.max(-1, keepdims=True)))
    total = jnp.zeros((), jnp.float32)
    output = jnp.zeros((), jnp.float32)
    for part, values, layout in parts:
        weights = jnp.exp(part - peak)
        total += weights.sum(-1, keepdims=True)
        output += jnp.einsum(
            f"bktgs,{layout}->bktgh",
            weights.astype(query.dtype),
            values.astype(query.dtype),
            preferred_element_type=jnp.float32,
        )
    output = output / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return output.transpose(0, 2, 1, 3, 4).reshape(batch, new, heads, head).astype(query.dtype)


def append(
    cache: DenseCache,
    k: Float[Array, "batch new kv_heads head"],
    v: Float[Array, "batch new kv_heads head"],
    rows: Int[Array, "batch chosen"] | None = None,
    counts: Int[Array, " batch"] | None = None,
) -> DenseCache:
    """Commits new rows behind the committed ones of each sequence; the work is that of the rows written.

    Args:
        cache: one layer's cache.
        k: keys of the new rows.
        v: values of the new rows.
        rows: which of the new rows to commit, in this order; None commits them all.
        counts: how many of each sequence's rows are valid (the rest is padding); None means all.

    Returns:
        The cache with the rows written and `length` advanced by `counts`. Under `jax.jit` rows that do not
        fit are dropped and `length` stops at the capacity: size the cache for the longest sequence.

    Raises:
        ValueError: if more rows are given than the cache can ever hold, or, outside `jax.jit`, if a sequence
            has no room left for its rows.

    Example:
        >>> cache = DenseCache(jnp.zeros((1, 1, 2, 4)), jnp.zeros((1, 1, 4, 2)), jnp.zeros(1, jnp.int32))
        >>> cache = append(cache, jnp.ones((1, 3, 1, 2)), jnp.ones((1, 3, 1, 2)), counts=jnp.array([2]))
        >>> cache.length.tolist(), cache.keys[0, 0, 0].tolist()
        ([2], [1.0, 1.0, 0.0, 0.0])
    """
    if rows is not None:
        k, v = (jnp.take_along_axis(new, rows[:, :, None, None], axis=1) for new in (k, v))
    new, capacity = k.shape[1], cache.capacity
    if new > capacity:
        raise ValueError(f"{new} new rows do not fit into a cache of {capacity} rows")
    batch, kv_heads = cache.values.shape[:2]
    for name, rows_of, size in (("k", k, cache.keys.shape[2]), ("v", v, cache.values.shape[3])):
        if rows_of.shape != (batch, new, kv_heads, size):
            raise ValueError(
                f"{name} must have shape {(batch, new, kv_heads, size)} to fit the cache, not {rows_of.shape}"
            )
    added = committed_counts(counts, batch, new)
    length = cache.length + added
    if not isinstance(length, Tracer) and int(length.max()) > capacity:
        raise ValueError(
            f"cache of {capacity} rows is full: sequence {int(length.argmax())} needs {int(length.max())}"
        )

    # A window of `new` rows that ends within the cache, of which only the rows to commit are replaced.
    start = jnp.clip(cache.length, 0, capacity - new)
    offset = jnp.arange(new) - (cache.length - start)[:, None]
    replace = (offset >= 0) & (offset < added[:, None])

    def write(old: Array, update: Array, begin: Array, offset: Array, replace: Array, axis: int) -> Array:
        window = jax.lax.dynamic_slice_in_dim(old, begin, new, axis=axis)
        shifted = update if new == 1 else jnp.take(update, jnp.clip(offset, 0, new - 1), axis=axis)
        replace = jnp.expand_dims(replace, [d for d in range(old.ndim) if d != axis])
        merged = jnp.where(replace, shifted.astype(old.dtype), window)
        return jax.lax.dynamic_update_slice_in_dim(old, merged, begin, axis=axis)

    def commit(old: Array, update: Array, axis: int) -> Array:
        one = functools.partial(write, axis=axis)
        if old.shape[0] == 1:  # without vmap this stays a slice update, which runs in place
            return one(old[0], update[0], start[0], offset[0], replace[0])[None]
        return jax.vmap(one)(old, update, start, offset, replace)

    keys = commit(cache.keys, k.transpose(0, 2, 3, 1), axis=2)
    values = commit(cache.values, v.transpose(0, 2, 1, 3), axis=1)
    return DenseCache(keys, values, jnp.minimum(length, capacity))


def committed_counts(counts: Any, batch: int, new: int) -> Int[Array, " batch"]:
    """How many of `new` rows each sequence commits, as int32: all of them without `counts`.

    Raises:
        ValueError: for counts of another shape or, outside `jax.jit`, that are not in 0 … new; under it they are
            brought into that range.
        TypeError: for counts that are no integers.

    Example:
        >>> committed_counts(None, 2, 5).tolist(), committed_counts(np.array([0, 3]), 2, 5).tolist()
        ([5, 5], [0, 3])
    """
    if counts is None:
        return jnp.full(batch, new, jnp.int32)
    if np.shape(counts) != (batch,):
        raise ValueError(f"counts must have shape {(batch,)}, not {np.shape(counts)}")
    if not jnp.issubdtype(jnp.result_type(counts), jnp.integer):
        raise TypeError(f"counts must hold integers, not {jnp.result_type(counts)}")
    if not isinstance(counts, Tracer) and batch:
        given = np.asarray(counts)
        if given.min() < 0 or given.max() > new:
            raise ValueError(
                f"counts must be in 0..{new}, the new rows, but hold {given.min()} and {given.max()}"
            )
    return jnp.clip(jnp.asarray(counts), 0, new).astype(jnp.int32)
