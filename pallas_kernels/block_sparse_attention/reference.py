"""The definition: dense attention under the mask that the block indices describe."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

__all__ = ["block_sparse_attention"]


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
) -> tuple[Array, Array, Array]:
    """Output, largest logit and sum of exponentials; arguments as those of the public function.

    Needs memory for every pair of a query and a key. `max` carries no gradient, and `sum` its own at fixed `max`.

    Example:
        >>> q = jnp.ones((1, 2, 1, 4))
        >>> out, largest, total = block_sparse_attention(q, q, q, jnp.zeros((1, 2, 1, 1), int), block_size=8)
        >>> largest[0, :, 0].tolist(), total[0, :, 0].tolist()
        ([2.0, 2.0], [1.0, 2.0])
    """
    batch, tokens, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    factor = dim**-0.5 if scale is None else scale
    wide = jnp.promote_types(q.dtype, jnp.float32)
    blocks = -(-keys // block_size)
    inside = (indices >= 0) & (indices < blocks)
    chosen = jnp.zeros((batch, tokens, kv_heads, blocks + 1), bool)
    chosen = jnp.put_along_axis(
        chosen, jnp.where(inside, indices, blocks), jnp.ones((), bool), axis=-1, inplace=False
    )
    mask = jnp.repeat(chosen[..., :blocks], block_size, axis=-1)[..., :keys]  # [B, T, Hkv, keys]
    at = jnp.arange(keys)
    if causal:
        positions = jnp.arange(tokens)[None] if positions is None else positions
        mask &= (at <= positions[..., None])[:, :, None]
    if segment_ids is not None:
        key_segment_ids = segment_ids if key_segment_ids is None else key_segment_ids
        mask &= (segment_ids[:, :, None] == key_segment_ids[:, None])[:, :, None]
    mask = mask[:, :, :, None]  # [B, T, Hkv, 1, keys]
    grouped = q.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    logits = jnp.einsum("bthgd,bjhd->bthgj", grouped, k, precision="highest", preferred_element_type=wide)
    logits = jnp.where(mask, logits * factor, -jnp.inf)
    largest = lax.stop_gradient(jnp.max(logits, axis=-1, initial=-jnp.inf))
    weights = jnp.exp(logits - jnp.where(largest == -jnp.inf, 0, largest)[..., None])
    total = jnp.sum(weights, axis=-1)
    weights = weights / jnp.where(total == 0, 1, total)[..., None]
    out = jnp.einsum(
        "bthgj,bjhd->bthgd", weights.astype(v.dtype), v, precision="highest", preferred_element_type=wide
    )
    shape = (batch, tokens, heads)
    return out.reshape(*shape, v.shape[-1]).astype(q.dtype), largest.reshape(shape), total.reshape(shape)
