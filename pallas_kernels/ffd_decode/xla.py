"""The XLA form: scans the codes tile by tile, then reads residuals and values of kept blocks only.

All code tiles give scan scores [B, H, R, T]; the kept blocks are listed, and a loop of as many turns as there are
kept blocks adds each one to its row's partial, with its scan scores. Where nearly all blocks are kept, that loop costs
more than it saves, and the same sums are taken over tiles of all blocks with the skipped ones masked; which way is
chosen on the device by the number of kept blocks (`DENSE_SHARE`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.ffd_decode.body import Spec, merge_partials, partial_of_scores, varying_like
from pallas_kernels.ffd_decode.reference import by_block

__all__ = ["DENSE_SHARE", "TILE_BYTES", "attend_blocks"]

TILE_BYTES = 1 << 20  # of float32 keys at a time: they should stay in the cache of a core
DENSE_SHARE = 0.75  # of all blocks kept: from here on every tile is read


@functools.partial(jax.jit, static_argnums=0)
def attend_blocks(spec: Spec, q, k_code, k_scale, k_resid, v, num_blocks, threshold):
    """The partial (m, total, acc) of [B, H, R] queries over the kept blocks, and which those were, bool [B, H, NB]."""
    b, h, r, d = q.shape
    blocks = k_scale.shape[2]
    q = q.astype(jnp.float32) * np.float32(spec.scale)
    if blocks == 0 or b * h == 0:
        m, total, acc = _zero(q.reshape(b * h, r, d), v)
        kept = jnp.zeros((b, h, blocks), bool)
        return m.reshape(b, h, r), total.reshape(b, h, r), acc.reshape(b, h, r, v.shape[-1]), kept
    tile = max(1, min(blocks, TILE_BYTES // (4 * b * h * spec.block * d)))
    scores, kept = _scan(spec, tile, q, k_code, k_scale, num_blocks, threshold)
    count = jnp.sum(kept, dtype=jnp.int32)
    few = functools.partial(_kept_only, spec)
    all_of_them = functools.partial(_every_tile, spec, tile)
    m, total, acc = lax.cond(
        count < np.float32(DENSE_SHARE) * kept.size, few, all_of_them, q, k_resid, v, scores, kept, count
    )
    return m, total, acc, kept


def _scan(spec: Spec, tile: int, q, k_code, k_scale, num_blocks, threshold):
    """Scan scores [B, H, NB, R, block] and the kept blocks [B, H, NB]."""
    blocks = k_scale.shape[2]
    code = by_block(k_code, blocks)
    q_planes = to_planes(q, spec.per_byte)  # [B, H, P, R, bytes]

    def step(i, scores):
        start = jnp.minimum(i * tile, blocks - tile)  # the last tile may overlap the one before
        c = lax.dynamic_slice_in_dim(code, start, tile, 2)
        s = lax.dynamic_slice_in_dim(k_scale, start, tile, 2)
        s_planes = to_planes(s, spec.per_byte)
        a = 0.0
        for plane in range(spec.per_byte):
            qs = q_planes[:, :, plane, None] * s_planes[:, :, plane, :, None]
            levels = ((c >> np.uint8(spec.bits * plane)) & np.uint8(2**spec.bits - 1)).astype(jnp.float32)
            a += jnp.einsum("bhnrj,bhntj->bhnrt", qs, levels, precision="highest")
            a -= spec.z * jnp.sum(qs, axis=-1)[..., None]
        return lax.dynamic_update_slice_in_dim(scores, a, start, 2)

    start = jnp.zeros((*k_scale.shape[:3], q.shape[2], spec.block), jnp.float32)
    start = varying_like(start, q, k_code, k_scale)
    scores = lax.fori_loop(0, -(-blocks // tile), step, start)
    top = jnp.max(scores, axis=-1)
    if spec.certified:
        per_scale, constant = spec.bound
        error = per_scale * k_scale + constant
        top += jnp.einsum("bhrd,bhnd->bhnr", jnp.abs(q), error, precision="highest")
    kept = jnp.any(~(top < threshold[:, :, None]), axis=-1)
    return scores, kept & (jnp.arange(blocks) < num_blocks[:, None, None])


def to_planes(x: jax.Array, per_byte: int) -> jax.Array:
    """[..., R, D] -> [..., P, R, bytes]: plane i has the channels whose codes are the i-th of their bytes."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % per_byte)])
    return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, per_byte), -1, -3)


def _kept_only(spec: Spec, q, k_resid, v, scores, kept, count):
    """One turn for each kept block: nothing else is read."""
    (b, h, r, d), blocks = q.shape, kept.shape[2]
    order = jnp.argsort(~kept.reshape(-1), stable=True).astype(jnp.int32)
    q, scores = q.reshape(b * h, r, d), scores.reshape(b * h * blocks, r, spec.block)
    resid, values = k_resid.reshape(b * h * blocks, spec.block, d), v.reshape(b * h * blocks, spec.block, -1)

    def step(i, state):
        at = order[i]
        row = at // blocks
        take = functools.partial(lax.dynamic_index_in_dim, keepdims=False)
        s = take(scores, at) + jnp.einsum("rd,td->rt", take(q, row), take(resid, at).astype(jnp.float32))
        new = partial_of_scores(s, take(values, at))
        both = (jnp.stack((take(old, row), part)) for old, part in zip(state, new))
        merged = merge_partials(*both)
        return tuple(lax.dynamic_update_index_in_dim(old, part, row, 0) for old, part in zip(state, merged))

    m, total, acc = lax.fori_loop(0, count, step, _zero(q, v, scores, resid))
    return m.reshape(b, h, r), total.reshape(b, h, r), acc.reshape(b, h, r, v.shape[-1])


def _every_tile(spec: Spec, tile: int, q, k_resid, v, scores, kept, count):
    """Tiles of all blocks; what is not kept is masked."""
    del count
    (b, h, r, d), blocks = q.shape, kept.shape[2]
    resid, values = by_block(k_resid, blocks), by_block(v, blocks)

    def step(i, state):
        start = jnp.minimum(i * tile, blocks - tile)
        cut = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=tile, axis=2)
        fresh = cut(kept) & (start + jnp.arange(tile) >= i * tile)
        s = cut(scores) + jnp.einsum("bhrd,bhntd->bhnrt", q, cut(resid).astype(jnp.float32))
        s = jnp.where(fresh[..., None, None], s, -jnp.inf)
        live = jnp.where(fresh[..., None, None], cut(values), 0)
        s = jnp.moveaxis(s, 2, 3).reshape(b, h, r, -1)
        new = partial_of_scores(s, live.reshape(b, h, tile * spec.block, -1))
        new = [part.reshape(b * h, *part.shape[2:]) for part in new]
        return merge_partials(*(jnp.stack(pair) for pair in zip(state, new)))

    m, total, acc = lax.fori_loop(
        0, -(-blocks // tile), step, _zero(q.reshape(b * h, r, d), v, scores, resid)
    )
    return m.reshape(b, h, r), total.reshape(b, h, r), acc.reshape(b, h, r, v.shape[-1])


def _zero(q, v, *others):
    """The empty partial of [rows, R] queries."""
    m = varying_like(jnp.full(q.shape[:2], -jnp.inf, jnp.float32), q, v, *others)
    total = varying_like(jnp.zeros(q.shape[:2], jnp.float32), q, v, *others)
    return m, total, varying_like(jnp.zeros((*q.shape[:2], v.shape[-1]), jnp.float32), q, v, *others)
