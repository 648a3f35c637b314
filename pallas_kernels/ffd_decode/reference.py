"""The definition of correct: which blocks are kept, then attention to them, in plain jnp over the whole cache.

It holds all keys in float32 and is differentiable, so the op's gradients come from here. It is no path of the op.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ffd_decode.body import Spec, finish, merge_partials, partial_of_scores, tail_scores
from pallas_kernels.ffd_decode.codes import dequantize

__all__ = ["attend", "attend_kept", "kept_blocks"]


def by_block(array: jax.Array, blocks: int) -> jax.Array:
    """[B, H, T, X] -> [B, H, NB, block, X]."""
    return array.reshape(*array.shape[:2], blocks, array.shape[2] // blocks, array.shape[-1])


def kept_blocks(spec: Spec, q, k_code, k_scale, num_blocks, threshold) -> jax.Array:
    """bool [B, H, NB]: the blocks whose best scan score reaches the threshold for any of the queries."""
    base = dequantize(by_block(k_code, k_scale.shape[2]), k_scale, spec.bits)
    q = q.astype(jnp.float32)
    a = jnp.einsum("bhrd,bhntd->bhrnt", q, base, precision="highest") * np.float32(spec.scale)
    top = jnp.max(a, axis=-1)
    if spec.certified:
        per_scale, constant = spec.bound
        error = jnp.einsum("bhrd,bhnd->bhrn", jnp.abs(q), per_scale * k_scale + constant, precision="highest")
        top = top + error * np.float32(spec.scale)
    # Not `>=`: scores that are no numbers keep their block, and show in the output.
    reached = jnp.any(~(top < threshold[..., None]), axis=2)
    return reached & (jnp.arange(k_scale.shape[2]) < num_blocks[:, None, None])


def attend_kept(spec: Spec, q, k_code, k_scale, k_resid, v, k_tail, v_tail, tail_mask, kept):
    """Attention [B, H, R, Dv] and log Σ e^s [B, H, R] over the kept blocks and the tail."""
    blocks = k_scale.shape[2]
    # What is not kept may hold anything, and gets no gradient.
    tokens = kept[..., None, None]
    k = dequantize(by_block(k_code, blocks), jnp.where(tokens[..., 0], k_scale, 0), spec.bits)
    k += jnp.where(tokens, by_block(k_resid, blocks).astype(jnp.float32), 0)
    s = jnp.einsum("bhrd,bhntd->bhrnt", q.astype(jnp.float32), k, precision="highest")
    s = jnp.where(kept[:, :, None, :, None], s * np.float32(spec.scale), -jnp.inf)
    values = jnp.where(tokens, by_block(v, blocks), 0).reshape(v.shape)
    body = partial_of_scores(s.reshape(*q.shape[:3], -1), values)
    tail = tail_partial(spec, q, k_tail, v_tail, tail_mask)
    return finish(*merge_partials(*(jnp.stack(pair) for pair in zip(body, tail))))


def tail_partial_scores(spec: Spec, q, k_tail, tail_mask):
    """Scores of the dense tail; rows that no query may see may hold anything."""
    seen = jnp.any(tail_mask, axis=1)[:, None, :, None]
    return tail_scores(q, jnp.where(seen, k_tail, 0), tail_mask, spec.scale)


def tail_partial(spec: Spec, q, k_tail, v_tail, tail_mask):
    """The partial of the dense tail."""
    seen = jnp.any(tail_mask, axis=1)[:, None, :, None]
    return partial_of_scores(tail_partial_scores(spec, q, k_tail, tail_mask), jnp.where(seen, v_tail, 0))


def attend(spec: Spec, q, k_code, k_scale, k_resid, v, k_tail, v_tail, num_blocks, tail_mask, threshold):
    """(attention, log Σ e^s, kept): the whole op after its threshold.

    Args:
        spec: static settings.
        q: [B, H, R, D], the queries of each KV head (R = queries x group).
        k_code: uint8 [B, H, T, bytes].
        k_scale: float32 [B, H, NB, D], T = NB * block.
        k_resid: [B, H, T, D].
        v: [B, H, T, Dv].
        k_tail: [B, H, tail, D].
        v_tail: [B, H, tail, Dv].
        num_blocks: int32 [B].
        tail_mask: bool [B, R, tail].
        threshold: float32 [B, H, R].

    Returns:
        float32 [B, H, R, Dv], float32 [B, H, R], bool [B, H, NB].
    """
    kept = jax.lax.stop_gradient(kept_blocks(spec, q, k_code, k_scale, num_blocks, threshold))
    out, lse = attend_kept(spec, q, k_code, k_scale, k_resid, v, k_tail, v_tail, tail_mask, kept)
    return out, lse, kept
