"""Attention of new rows to a quantised cache, and audits of what it left out."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from effml._validate import one_of
from effml.attend.ffd._cache import QuantizedKV, stored_rows
from pallas_kernels.ffd_decode import FFDStats, dequantize, ffd_decode

__all__ = ["bytes_read", "ffd_attention", "kept_mass"]

QUERIES = ("each", "together")


def ffd_attention(
    q: Float[Array, "batch *new heads head"],
    cache: QuantizedKV,
    k_new: Float[Array, "batch new_rows kv_heads head"] | None = None,
    v_new: Float[Array, "batch new_rows kv_heads value"] | None = None,
    mask_new: Bool[Array, "#batch new_rows new_rows"] | None = None,
    *,
    delta: float | int | Array = 5.0,
    scale: float | None = None,
    threshold: str | Array = "pseudo_fp",
    select: str | tuple[str, int] = "delta",
    queries: str = "each",
    implementation: str | None = None,
    num_splits: int | None = None,
    return_stats: bool = False,
) -> Any:
    r"""Attention that reads the codes of every block, and the rest of a block only if its best score is high enough.

    $$\text{read block } n \iff \max_{t \in n} a_{ht} \ge \theta_h \text{ for any } h \text{ of the group}, \qquad
      \theta_h = m_h - \delta$$

    with scan scores a of the codes alone and m the largest score of a few probed rows; what is read is attended to
    exactly (codes and residuals, online softmax), and so are sinks, tail and new rows. δ is in **nats**: if m were the
    largest score of all, every row left out would have less than $e^{-\delta}$ of the largest probability. What the
    rows left out have together still grows with their number: see `kept_mass`.

    Args:
        q: [batch, heads, head] or [batch, new, heads, head], rotated; head j reads key head
            `j // (heads // kv_heads)`. float32 or bfloat16.
        cache: one layer's cache.
        k_new: rotated keys of rows that are not committed, one for each query; read in the precision of the tail.
        v_new: their values.
        mask_new: which new rows (last axis) each query sees; None is causal. Committed rows are seen by all.
        delta: δ in nats, at least 0. 5 is the method's default, 7 the careful one, infinity reads everything.
        scale: factor on the scores; None is $1/\sqrt{\text{head}}$.
        threshold: how m is probed: `"pseudo_fp"` (first and last block with their residuals, sinks, tail and new rows),
            `"pseudo"` (first and last block by their codes: the paper's), `"exact"`, `"certified"` (nothing within δ of
            the largest score is left out), or θ itself, [batch, heads] or [batch, new, heads]; see
            `pallas_kernels.ffd_decode.ffd_decode`.
        select: `"delta"`, or `("topk", n)`: the n blocks with the largest scan score of each key head, however small
            (and those that tie with the n-th), for comparison.
        queries: with several queries, `"each"` runs them one after the other, each with its own blocks, so that a row
            gets what it would get alone; `"together"` reads the cache once, and a block that one query of a key head
            asks for is read for all of them: more mass, never less.
        implementation: form of the kernel; None takes the best one of the platform.
        num_splits: parts of the cache that a GPU works on at once.
        return_stats: whether to return `FFDStats` too.

    Returns:
        Like q with the size of a value at its end; a query that sees nothing gets zeros. With `return_stats`
        (output, `pallas_kernels.ffd_decode.FFDStats`), arrays on the device: `kept` bool[batch, kv_heads, blocks],
        or bool[batch, new, kv_heads, blocks] where each query has its own.

    Raises:
        TypeError: for a dtype that is not allowed.
        ValueError: for shapes or values that do not fit together, and for a negative `delta`.

    Source: "Faster Than Flash", arXiv 2609.00097, and its released code, whose "δ = 5" is 5 ln 2 nats.

    Example:
        >>> from effml.attend.ffd import append, init_cache
        >>> cache = init_cache(batch=1, max_len=64, kv_heads=1, head_dim=8, block=16, dtype="float32")
        >>> rows = jax.random.normal(jax.random.key(0), (1, 64, 1, 8)).at[:, 16:48].add(-4.0)
        >>> output, stats = ffd_attention(jnp.full((1, 2, 8), 3.0), append(cache, rows, rows), return_stats=True)
        >>> output.shape, stats.kept[0, 0].tolist()
        ((1, 2, 8), [True, False, False, True])
    """
    one_of("queries", queries, QUERIES)
    _check(q, cache, k_new, v_new)
    several = q.ndim == 4
    _check_options(q, k_new, mask_new, threshold)
    tail = _tail(cache, q.shape[1] if several else 1, k_new, v_new, mask_new)
    shared = {"scale": scale, "bits": cache.bits, "implementation": implementation, "num_splits": num_splits}
    top = _top_count(select)

    def one(q: Array, mask: Array, theta: Any) -> tuple[Array, FFDStats]:
        if top is not None:
            theta = _top_threshold(q, cache, top, scale)
        return ffd_decode(
            q,
            cache.k_code,
            cache.k_scale,
            cache.k_resid,
            cache.v,
            *tail[:2],
            num_blocks=cache.num_blocks,
            tail_mask=mask,
            delta=delta,
            threshold=theta,
            return_stats=True,
            **shared,
        )

    if several and q.shape[1] > 1 and queries == "each":
        given = isinstance(threshold, str)
        thetas = None if given else jnp.moveaxis(jnp.asarray(threshold), 1, 0)
        per_query = jnp.moveaxis(q, 1, 0), jnp.moveaxis(tail[2], 1, 0), thetas
        run = lambda x: one(x[0], x[1], threshold if given else x[2])
        output, stats = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), jax.lax.map(run, per_query))
        stats = stats._replace(keep_ratio=stats.keep_ratio.mean(1))
    elif several and q.shape[1] == 1:
        theta = threshold if isinstance(threshold, str) else jnp.asarray(threshold)[:, 0]
        output, stats = one(q[:, 0], tail[2][:, 0], theta)
        output = output[:, None]
        stats = stats._replace(threshold=stats.threshold[:, None], lse=stats.lse[:, None])
    else:
        output, stats = one(q, tail[2] if several else tail[2][:, 0], threshold)
    return (output, stats) if return_stats else output


def kept_mass(
    q: Float[Array, "batch *new heads head"],
    cache: QuantizedKV,
    kept: Bool[Array, "batch *new kv_heads blocks"],
    *,
    scale: float | None = None,
) -> Float[Array, "batch *new heads"]:
    r"""Share of the softmax over all committed rows that given blocks, sinks and tail hold.

    $$1 - \epsilon, \qquad \lVert o - o_{\text{kept}} \rVert \le \epsilon\,
      (\max_{\text{left out}} \lVert v \rVert + \max_{\text{kept}} \lVert v \rVert)$$

    Reads everything: for audits.

    Args:
        q: [batch, heads, head] or [batch, new, heads, head].
        cache: one layer's cache.
        kept: blocks that were read, as `FFDStats.kept`; shared by all queries, or one set for each.
        scale: factor on the scores; None is $1/\sqrt{\text{head}}$.

    Returns:
        float32, 1 where there is nothing to read.

    Example:
        >>> from effml.attend.ffd import append, init_cache
        >>> cache = init_cache(batch=1, max_len=64, kv_heads=1, head_dim=8, block=16, dtype="float32")
        >>> cache = append(cache, *2 * [jnp.ones((1, 64, 1, 8))])
        >>> kept_mass(jnp.ones((1, 1, 8)), cache, jnp.array([[[True, False, False, True]]])).tolist()
        [[0.5]]
    """
    _check(q, cache, None, None)
    _check_kept(cache, kept, q.shape[1:-2])
    return _kept_mass(q, cache, kept, scale)


@functools.partial(jax.jit, static_argnames="scale")
def _kept_mass(q: Array, cache: QuantizedKV, kept: Array, scale: float | None) -> Array:
    keys, _, committed = stored_rows(cache)
    batch, kv_heads, _, head = keys.shape
    lead = q.shape[1:-2]
    grouped = q.astype(jnp.float32).reshape(batch, math.prod(lead), kv_heads, -1, head)
    scores = jnp.einsum("bqkgd,bktd->bqkgt", grouped, keys, precision="highest")
    scores = jnp.where(committed[:, None, None, None], scores * np.float32(scale or head**-0.5), -jnp.inf)
    read = jnp.repeat(kept.reshape(batch, -1, kv_heads, kept.shape[-1]), cache.block, axis=-1)
    always = lambda size: jnp.ones((*read.shape[:-1], size), bool)
    read = jnp.concatenate([always(cache.sink), read, always(cache.block)], axis=-1)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    everything = weights.sum(-1)
    share = jnp.where(read[:, :, :, None], weights, 0).sum(-1) / jnp.where(everything == 0, 1, everything)
    return jnp.where(everything == 0, 1.0, share).reshape(batch, *lead, -1)


def bytes_read(
    cache: QuantizedKV, kept: Bool[Array, "batch kv_heads blocks"], *, threshold: str = "pseudo_fp"
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """Bytes of keys and values that one step reads for each sequence, and those that dense attention would.

    Codes and scales of every full block, residuals and values of kept ones, residuals of the probed ones (twice where
    they are kept), and the rows that are always read. Dense attention reads all rows at the width of the values.

    Args:
        cache: one layer's cache.
        kept: blocks that were read, as `FFDStats.kept`.
        threshold: how they were chosen: `"pseudo_fp"` probes residuals of two blocks, `"exact"` of all.

    Returns:
        float32[batch] each.

    Example:
        >>> from effml.attend.ffd import append, init_cache
        >>> cache = init_cache(batch=1, max_len=640, kv_heads=1, head_dim=64, block=128)
        >>> cache = append(cache, *2 * [jnp.ones((1, 640, 1, 64))])
        >>> read, dense = bytes_read(cache, jnp.array([[[True, False, False, False, True]]]))
        >>> float(read[0]), float(dense[0])
        (77056.0, 163840.0)
    """
    one_of("threshold", threshold, ("pseudo_fp", "pseudo", "exact", "certified"))
    _check_kept(cache, kept)
    heads, head, value = cache.k_tail.shape[1], cache.k_tail.shape[3], cache.v.shape[3]
    of_code = cache.k_code.shape[-1] * cache.block + head * cache.k_scale.dtype.itemsize
    of_resid = cache.block * head * cache.k_resid.dtype.itemsize
    wide = cache.v.dtype.itemsize
    blocks = cache.num_blocks.astype(jnp.float32)
    probed = {"pseudo_fp": jnp.minimum(blocks, 2), "exact": blocks}.get(threshold, jnp.zeros_like(blocks))
    always = jnp.minimum(cache.length, cache.sink) + cache.tail_len
    row = (head + value) * wide
    read = heads * (blocks * of_code + probed * of_resid + always * row)
    read += kept.sum((1, 2)) * float(of_resid + cache.block * value * wide)
    return read, cache.length.astype(jnp.float32) * (heads * row)


def _check(q: Array, cache: QuantizedKV, k_new: Array | None, v_new: Array | None) -> None:
    if q.ndim not in (3, 4):
        raise ValueError(
            f"q must be [batch, heads, head] or [batch, new, heads, head], but its shape is {q.shape}"
        )
    batch, kv_heads, _, head = cache.k_tail.shape
    if q.shape[0] != batch or q.shape[-1] != head:
        raise ValueError(
            f"q of shape {q.shape} does not fit a cache of {batch} sequences and heads of {head}"
        )
    if q.shape[-2] % kv_heads:
        raise ValueError(
            f"q has {q.shape[-2]} heads, which is no multiple of the {kv_heads} heads of the cache"
        )
    if (k_new is None) != (v_new is None):
        raise ValueError("k_new and v_new must be given together")
    new = q.shape[1] if q.ndim == 4 else 1
    for name, rows, size in (("k_new", k_new, head), ("v_new", v_new, cache.v.shape[-1])):
        if rows is not None and rows.shape != (batch, new, kv_heads, size):
            raise ValueError(f"{name} must have shape {(batch, new, kv_heads, size)}, not {rows.shape}")


def _check_options(q: Array, k_new: Array | None, mask_new: Array | None, threshold: str | Array) -> None:
    if 0 in q.shape:
        raise ValueError(f"q of shape {q.shape} is empty: no axis may be 0")
    if not isinstance(threshold, str) and np.shape(threshold) != q.shape[:-1]:
        raise ValueError(f"threshold must have shape {q.shape[:-1]}, not {np.shape(threshold)}")
    if mask_new is None:
        return
    if k_new is None:
        raise ValueError("mask_new needs k_new and v_new: it tells which of them each query sees")
    batch, new = k_new.shape[:2]
    if mask_new.shape not in ((batch, new, new), (1, new, new)):
        raise ValueError(f"mask_new must have shape {(batch, new, new)}, not {mask_new.shape}")


def _check_kept(cache: QuantizedKV, kept: Array, new: tuple[int, ...] = ()) -> None:
    batch, kv_heads, blocks, _ = cache.k_scale.shape
    allowed = {(batch, kv_heads, blocks), (batch, *new, kv_heads, blocks)}
    if kept.shape not in allowed:
        raise ValueError(
            f"kept must have shape {' or '.join(map(str, sorted(allowed, key=len)))}, not {kept.shape}"
        )


@functools.partial(jax.jit, static_argnames="new")
def _tail(
    cache: QuantizedKV, new: int, k_new: Array | None, v_new: Array | None, mask_new: Array | None
) -> tuple[Array, Array, Array]:
    """Keys and values of all rows that are always read, head-major, and which of them each query sees."""
    batch = cache.length.shape[0]
    sinks = jnp.arange(cache.sink) < cache.length[:, None]
    rows = jnp.arange(cache.block) < cache.tail_len[:, None]
    seen = [jnp.broadcast_to(x[:, None], (batch, new, x.shape[1])) for x in (sinks, rows)]
    keys, values = [cache.k_sink, cache.k_tail], [cache.v_sink, cache.v_tail]
    if k_new is not None and v_new is not None:
        # Rounded as `append` will round them: a row reads the same before and after it is committed.
        keys.append(k_new.transpose(0, 2, 1, 3).astype(cache.k_tail.dtype))
        values.append(v_new.transpose(0, 2, 1, 3).astype(cache.v_tail.dtype))
        causal = jnp.tril(jnp.ones((1, new, new), bool)) if mask_new is None else mask_new
        seen.append(jnp.broadcast_to(causal, (batch, new, new)))
    return jnp.concatenate(keys, axis=2), jnp.concatenate(values, axis=2), jnp.concatenate(seen, axis=2)


def _top_count(select: str | tuple[str, int]) -> int | None:
    if isinstance(select, str):
        one_of("select", select, ("delta",))
        return None
    kind, many = select if isinstance(select, tuple) and len(select) == 2 else (None, None)
    if kind != "topk" or isinstance(many, bool) or not isinstance(many, int) or many < 1:
        raise ValueError(f"select={select!r} must be 'delta' or ('topk', n) with n of at least 1")
    return many


def _top_threshold(q: Array, cache: QuantizedKV, top: int, scale: float | None) -> Array:
    """θ that the `top` best blocks of each key head reach: half way to the next one, so that rounding can't matter."""
    blocks = cache.k_scale.shape[2]
    if top >= blocks:
        return jnp.full(q.shape[:-1], -jnp.inf, jnp.float32)
    code = jnp.moveaxis(cache.k_code.reshape(*cache.k_scale.shape[:3], cache.block, -1), 2, 0)
    kv_heads = code.shape[2]
    shape = (q.shape[0], math.prod(q.shape[1:-2]), kv_heads, q.shape[-2] // kv_heads, q.shape[-1])
    queries = q.astype(jnp.float32).reshape(shape)
    score = lambda x: _best_score(queries, dequantize(x[0], x[1], cache.bits))
    best = jax.lax.map(score, (code, jnp.moveaxis(cache.k_scale, 2, 0)))
    filled = jnp.arange(blocks)[:, None, None, None] < cache.num_blocks[:, None, None]
    best = jnp.moveaxis(jnp.where(filled, best, -jnp.inf), 0, -1)
    first = jax.lax.top_k(best, top + 1)[0][..., -2:]
    middle = jnp.where(first[..., 1] == -jnp.inf, -jnp.inf, first.mean(-1))
    theta = jnp.broadcast_to(middle[..., None], queries.shape[:-1]).reshape(q.shape[:-1])
    return theta * np.float32(scale or q.shape[-1] ** -0.5)


def _best_score(queries: Array, keys: Array) -> Array:
    """[batch, new, kv_heads]: the best product of any query of the group with any key of one block."""
    return jnp.einsum("bqkgd,bktd->bqkgt", queries, keys, precision="highest").max((-2, -1))
