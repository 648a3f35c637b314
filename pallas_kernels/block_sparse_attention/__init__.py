r"""Attention of each query token to the key blocks that it chose.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels.block_sparse_attention import block_sparse_attention
    >>> q = k = v = jnp.ones((1, 32, 2, 4))
    >>> own_block = (jnp.arange(32) // 8).reshape(1, 32, 1, 1).repeat(2, axis=2)
    >>> block_sparse_attention(q, k, v, own_block, block_size=8).shape
    (1, 32, 2, 4)

Which forms there are, by platform: `"xla"` everywhere, forward and backward; `"pallas"` on NVIDIA GPU, forward and
backward, and on TPU the forward alone (its backward is XLA's).

On a CPU with 1 key in 16 seen the XLA path was faster than dense attention, forward and with gradients, at all lengths
tried from 256 to 8192 (`bench.py`, presets `crossover` and `cpu`); at 64 dense attention is the faster one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from pallas_kernels import _dispatch
from pallas_kernels._arguments import as_array, finite_number, whole_number
from pallas_kernels._varying import gradient_like
from pallas_kernels.block_sparse_attention import pallas_gpu, pallas_tpu, xla
from pallas_kernels.block_sparse_attention.blocks import BlockSizes
from pallas_kernels.block_sparse_attention.geometry import Geometry, no_duplicates

__all__ = ["FORMS", "BlockSizes", "Statistics", "availability", "block_sparse_attention"]

FORMS = {"xla": None, "pallas_gpu": None, "pallas_tpu": None}
_FLOATS = ("float32", "bfloat16", "float16", "float64")


class Statistics(NamedTuple):
    """Of the softmax of every query and head, as merging with other keys' attention needs them.

    `max` carries no gradient, and `sum` the one at fixed `max`: right for all that depends on `max + log(sum)`.
    """

    max: Array  # float32[B, T, Hq], the largest scaled logit; -inf where nothing is seen
    sum: Array  # float32[B, T, Hq], of exp(logit - max); 0 where nothing is seen


def availability() -> list[str]:
    """What runs here and why not, for `effml doctor`.

    Example:
        >>> availability()[0]
        'xla      yes'
    """
    return _dispatch.describe("block_sparse_attention")


def block_sparse_attention(
    q: Array,
    k: Array,
    v: Array,
    indices: Array,
    *,
    block_size: int,
    scale: float | None = None,
    causal: bool = True,
    positions: Array | None = None,
    segment_ids: Array | None = None,
    key_segment_ids: Array | None = None,
    return_statistics: bool = False,
    blocks: BlockSizes | None = None,
    implementation: str | None = None,
) -> Array | tuple[Array, Statistics]:
    r"""Softmax attention of query t over $K_t = \bigcup_s \{j : j \,\mathrm{div}\, b = i_{ts}\}$, its chosen blocks.

    $$o_t = \sum_{j \in K_t} \frac{e^{c\,q_t \cdot k_j}}{\sum_{i \in K_t} e^{c\,q_t \cdot k_i}}\, v_j$$

    where $K_t$ leaves out the future (`causal`) and other segments. Query head h reads KV head h // (Hq / Hkv); the
    query heads of a KV head share its indices. A query that sees nothing gets zeros. Sums are float32 (float64 for
    float64). Keys that nobody sees may hold anything.

    Differentiable in q, k and v (reverse mode); the choice has no gradient. The backward pass computes weights again,
    so memory beyond arguments and results is that of the indices and of one step (`BlockSizes`). Works under jit, vmap,
    grad, remat, eval_shape and inside `jax.shard_map` (shard batch or heads); a choice made under remat should be
    saved, since one computed again in bfloat16 may differ.

    Args:
        q: [B, T, Hq, D].
        k: [B, J, Hkv, D]; Hkv divides Hq.
        v: [B, J, Hkv, Dv]. All three of one floating type.
        indices: integers [B, T, Hkv, S], numbers of blocks, -1 for none. Order and repetition don't matter. Concrete
            ones must be from -1 to ceil(J / block_size) - 1; traced ones outside count as none.
        block_size: keys of a block, from 8; the last block may be incomplete.
        scale: c; 1 / sqrt(D) if None.
        causal: whether a query sees only keys up to its own position.
        positions: integers [B, T], of the queries among the keys 0..J-1; 0..T-1 if None (which needs T <= J if causal).
        segment_ids: integers [B, T]; queries see keys of the same segment.
        key_segment_ids: integers [B, J]; `segment_ids` if None (which needs J = T).
        return_statistics: whether the softmax's statistics are returned too.
        blocks: sizes of the work's pieces.
        implementation: `"xla"`, `"pallas"` or None.

    Returns:
        [B, T, Hq, Dv] in the type of q; with `return_statistics` a pair of it and `Statistics`.

    Raises:
        ValueError: for shapes that don't fit, an index out of range, or an unknown implementation.
        TypeError: for arrays of a wrong type.
        NotImplementedError: if the named implementation can't run here or on these arrays, with every reason.

    Source:
        Shen et al., "SSA: Sparse Sparse Attention", arXiv 2511.20102; the layout of indices is that of Native Sparse
        Attention.

    Example:
        >>> q = jnp.ones((1, 16, 2, 4))
        >>> k = v = jnp.ones((1, 16, 1, 4))
        >>> first = jnp.zeros((1, 16, 1, 1), int)
        >>> out, statistics = block_sparse_attention(q, k, v, first, block_size=8, return_statistics=True)
        >>> statistics.sum[0, :, 0].tolist()[:10]
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 8.0, 8.0]
    """
    q, k, v = (jnp.asarray(as_array(name, array)) for name, array in (("q", q), ("k", k), ("v", v)))
    indices = _integers("indices", indices)
    block_size = whole_number("block_size", block_size, 8)
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"causal={causal!r} must be True or False")
    if blocks is not None and not isinstance(blocks, BlockSizes):
        raise TypeError(f"blocks must be BlockSizes or None, not {type(blocks).__name__}")
    _check(q, k, v, indices, block_size)
    batch, tokens, heads, dim = q.shape
    keys, kv_heads, value_dim = v.shape[1:]
    group = heads // kv_heads
    scale = float(dim**-0.5) if scale is None else finite_number("scale", scale)
    if positions is None:
        if causal and tokens > keys:
            raise ValueError(
                f"positions must be given where there are more queries ({tokens}) than keys ({keys})"
            )
        positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
    positions = _integers("positions", positions, (batch, tokens))
    if segment_ids is not None:
        if key_segment_ids is None:
            if tokens != keys:
                raise ValueError(f"key_segment_ids must be given where J ({keys}) is not T ({tokens})")
            key_segment_ids = segment_ids
        segment_ids = _integers("segment_ids", segment_ids, (batch, tokens))
        key_segment_ids = _integers("key_segment_ids", key_segment_ids, (batch, keys))
    elif key_segment_ids is not None:
        raise ValueError("key_segment_ids without segment_ids")
    blocks = blocks or BlockSizes()

    geometry = Geometry(
        block_size=block_size,
        blocks=-(-keys // block_size),
        heads=kv_heads,
        keys=keys,
        scale=scale,
        causal=bool(causal),
        segmented=segment_ids is not None,
    )
    shape = (batch, tokens, heads)
    options = _Options(geometry, blocks, implementation)
    reasons = _reasons(q, v, options)
    _dispatch.form_of(implementation, FORMS, reasons)  # raises here, whatever the shapes
    if 0 in (*shape, keys, indices.shape[-1]):
        out = jnp.zeros((*shape, value_dim), q.dtype)
        wide = jnp.promote_types(q.dtype, jnp.float32)
        statistics = Statistics(jnp.full(shape, -jnp.inf, wide), jnp.zeros(shape, wide))
        return (out, statistics) if return_statistics else out

    ids = no_duplicates(indices, positions, geometry).reshape(-1, indices.shape[-1])
    rows = functools.partial(_of_rows, heads=kv_heads)
    padding = geometry.blocks * block_size - keys
    found: Any = _attend(
        options,
        q.reshape(-1, group, dim),
        _table(k, padding, block_size),
        _table(v, padding, block_size),
        ids,
        rows(positions),
        None if segment_ids is None else rows(segment_ids),
        None
        if key_segment_ids is None
        else jnp.pad(key_segment_ids, ((0, 0), (0, padding))).reshape(-1, block_size),
    )
    out, largest, total = found
    out = out.reshape(*shape, value_dim)
    if not return_statistics:
        return out
    return out, Statistics(largest.reshape(shape), total.reshape(shape))


def _of_rows(per_query: Array, heads: int) -> Array:
    return jnp.broadcast_to(per_query[:, :, None], (*per_query.shape, heads)).reshape(-1)


def _table(keys: Array, padding: int, block_size: int) -> Array:
    """[B, J, Hkv, D] -> [B * Hkv * blocks, block_size, D]"""
    keys = jnp.pad(keys, ((0, 0), (0, padding), (0, 0), (0, 0)))
    return jnp.swapaxes(keys, 1, 2).reshape(-1, block_size, keys.shape[-1])


def _integers(name: str, array: Any, shape: tuple[int, ...] | None = None) -> Array:
    array = jnp.asarray(as_array(name, array))
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} holds {array.dtype}, must hold integers")
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name} of shape {array.shape} must have shape {shape}")
    return array if name == "indices" else array.astype(jnp.int32)


def _check(q: Array, k: Array, v: Array, indices: Array, block_size: int) -> None:
    for name, array in (("q", q), ("k", k), ("v", v), ("indices", indices)):
        if array.ndim != 4:
            raise ValueError(f"{name} of shape {array.shape} must have 4 axes")
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype.name not in _FLOATS:
            raise TypeError(f"{name} holds {array.dtype}, must hold one of {', '.join(_FLOATS)}")
        if array.dtype != q.dtype:
            raise TypeError(f"{name} holds {array.dtype}, must hold {q.dtype} as q does")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k of shape {k.shape} and v of shape {v.shape} must agree but for the last axis")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q of shape {q.shape} and k of shape {k.shape} must agree in the first and last axes"
        )
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(f"the {q.shape[2]} heads of q must be a multiple of the {k.shape[2]} heads of k")
    if not q.shape[3] or not v.shape[3]:
        raise ValueError(
            f"q of shape {q.shape} and v of shape {v.shape} must have a last axis that is not empty"
        )
    if indices.shape[:3] != (*q.shape[:2], k.shape[2]):
        raise ValueError(f"indices of shape {indices.shape} must begin with {(*q.shape[:2], k.shape[2])}")
    if not isinstance(indices, Tracer) and indices.size:
        last = -(-k.shape[1] // block_size) - 1
        found = np.asarray(indices)
        if found.min() < -1 or found.max() > last:
            raise ValueError(f"indices from {found.min()} to {found.max()} must be from -1 to {last}")


@dataclasses.dataclass(frozen=True)
class _Options:
    geometry: Geometry
    blocks: BlockSizes
    implementation: str | None


def _reasons(q: Array, v: Array, options: _Options) -> dict[str, str]:
    dims = (q.shape[-1], v.shape[-1])
    reasons = {
        "pallas_gpu": pallas_gpu.why_not(q.dtype, *dims),
        "pallas_tpu": pallas_tpu.why_not(q.dtype, *dims, options.geometry.block_size),
    }
    return {form: reason for form, reason in reasons.items() if reason}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, *arrays: Any) -> tuple[Array, Array, Array]:
    return _forward(options, *arrays)[0]


def _forward(options: _Options, *arrays: Any) -> tuple[tuple[Array, Array, Array], Any]:
    given = {"geometry": options.geometry, "blocks": options.blocks}
    forms = {
        "xla": functools.partial(xla.forward, **given),
        "pallas_gpu": functools.partial(pallas_gpu.forward, **given),
        "pallas_tpu": functools.partial(pallas_tpu.forward, **given),
    }
    q, _, v = arrays[:3]
    found = _dispatch.choose(options.implementation, forms, _reasons(q, v, options))(*arrays)
    return found, (arrays, *found)


def _backward(options: _Options, saved: Any, cotangents: tuple[Array, Array, Array]) -> tuple:
    arrays, out, largest, total = saved
    cotangent, _, of_total = cotangents
    wide = total.dtype
    seen = total > 0
    logarithm = jnp.where(seen, largest + jnp.log(jnp.where(seen, total, 1)), jnp.inf)
    offset = jnp.sum(cotangent.astype(wide) * out.astype(wide), axis=-1) - of_total * total
    given = {"geometry": options.geometry, "blocks": options.blocks}
    forms = {
        "xla": functools.partial(xla.backward, **given),
        "pallas_gpu": functools.partial(pallas_gpu.backward, **given),
        "pallas_tpu": functools.partial(xla.backward, **given),
    }
    q, k, v = arrays[:3]
    run = _dispatch.choose(options.implementation, forms, _reasons(q, v, options))
    gradients = map(gradient_like, run(*arrays, logarithm, offset, cotangent), (q, k, v))
    return (*gradients, None, None, None, None)


_attend.defvjp(_forward, _backward)
