"""The threshold that a block must reach, fixed before the scan from a few probed keys.

θ = max over the probed keys of their scores - δ, per query. The first block (where attention sinks are) and the last
full one (the local context) are probed, so the splits of the scan need no word from each other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.ffd_decode.body import Spec, varying_like
from pallas_kernels.ffd_decode.codes import dequantize
from pallas_kernels.ffd_decode.reference import by_block

__all__ = ["MODES", "largest_score", "threshold"]

MODES = ("pseudo_fp", "pseudo", "exact", "certified")


def threshold(mode: str, delta, top, tail_scores) -> jax.Array:
    """float32 [B, H, R], see `ffd_decode` for the modes.

    Args:
        mode: one of `MODES`.
        delta: [] or broadcastable, nats.
        top: [B, H, R] of `largest_score`.
        tail_scores: float32 [B, H, R, tail], -inf where masked.
    """
    if mode != "pseudo":
        top = jnp.maximum(top, jnp.max(tail_scores, axis=-1, initial=-jnp.inf))
    return top - delta


def largest_score(spec: Spec, mode: str, q, k_code, k_scale, k_resid, num_blocks) -> jax.Array:
    """float32 [B, H, R], the largest score of the probed blocks, less its bound if `certified`; -inf without blocks.

    Args:
        spec: static settings.
        mode: one of `MODES`.
        q: [B, H, R, D].
        k_code: uint8 [B, H, T, bytes].
        k_scale: float32 [B, H, NB, D].
        k_resid: [B, H, T, D].
        num_blocks: int32 [B].
    """
    blocks = k_scale.shape[2]
    q = q.astype(jnp.float32) * np.float32(spec.scale)

    def best(code, scale, resid):
        """max_t of the score of one block: [B, H, block, ...] -> [B, H, R]."""
        k = dequantize(code, scale, spec.bits)
        if mode in ("pseudo_fp", "exact"):
            k = k + resid.astype(jnp.float32)
        top = jnp.max(jnp.einsum("bhrd,bhtd->bhrt", q, k, precision="highest"), axis=-1)
        if mode == "certified":
            per_scale, constant = spec.bound
            error = jnp.einsum("bhrd,bhd->bhr", jnp.abs(q), per_scale * scale + constant, precision="highest")
            top = top - error
        return top

    parts = by_block(k_code, blocks), k_scale, by_block(k_resid, blocks)
    if mode == "exact":

        def step(i, top):
            at_i = best(*(lax.dynamic_index_in_dim(a, i, 2, keepdims=False) for a in parts))
            return jnp.maximum(top, jnp.where((i < num_blocks)[:, None, None], at_i, -jnp.inf))

        start = varying_like(jnp.full(q.shape[:3], -jnp.inf, jnp.float32), q, *parts, num_blocks)
        top = lax.fori_loop(0, blocks, step, start)
    else:
        last = jnp.maximum(num_blocks - 1, 0)
        pick = jax.vmap(lambda a, i: lax.dynamic_index_in_dim(a, i, 1, keepdims=False))
        top = jnp.maximum(best(*(a[:, :, 0] for a in parts)), best(*(pick(a, last) for a in parts)))
    return jnp.where((num_blocks > 0)[:, None, None], top, -jnp.inf)
