"""The scan and the kept blocks in one kernel on an NVIDIA GPU, through Pallas's Triton lowering (JAX 0.10.2 to 0.12).

Grid (split, KV head, batch). Each program walks its blocks: codes and scales are loaded for all of them, residuals and
values inside a conditional. Arrays stay in memory as whole heads; a block is a pointer and a mask, so no size needs
padding but those of the queries.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._parameters import gpu_parameters
from pallas_kernels._varying import typed_like
from pallas_kernels.ffd_decode.body import Spec, default_splits, merge_partials
from pallas_kernels.ffd_decode.xla import to_planes

__all__ = ["attend_blocks", "power_of_two", "refuses"]

_ROWS = 128  # queries of one KV head that one program holds
_WARPS, _STAGES = 4, 2


def refuses(spec: Spec, q: Any, k_code: Any, k_resid: Any, v: Any, residual_dtype: Any) -> str | None:
    """Why the kernel can't take arrays of these shapes; None if it can."""
    if q[2] > _ROWS:
        return f"{q[2]} queries of one KV head are more than {_ROWS}"
    if max(power_of_two(q[3]), power_of_two(v[3]), power_of_two(spec.block)) > 256:
        return f"block={spec.block}, D={q[3]} and Dv={v[3]} must be at most 256"
    if max(k_resid[2] * k_resid[3], v[2] * v[3]) >= 2**31:
        return "a head's keys or values have 2^31 entries or more"
    if jnp.dtype(residual_dtype) not in [
        jnp.dtype(t) for t in (jnp.float8_e4m3fn, jnp.bfloat16, jnp.float16, jnp.float32)
    ]:
        return (
            f"k_resid of {jnp.dtype(residual_dtype).name} (takes float8_e4m3fn, bfloat16, float16, float32)"
        )
    return None


def power_of_two(size: int) -> int:
    """The next power of two, at least 16: what Triton's product takes."""
    return max(16, 1 << (size - 1).bit_length())


def attend_blocks(spec: Spec, q, k_code, k_scale, k_resid, v, num_blocks, threshold):
    """The partial (m, total, acc) of [B, H, R] queries over the kept blocks, and which those were, bool [B, H, NB]."""
    b, h, r, d = q.shape
    blocks, width = k_scale.shape[2], v.shape[-1]
    rows, channels, columns = power_of_two(r), power_of_two(d), power_of_two(width)
    splits = spec.num_splits or default_splits(b, h, blocks)
    splits = min(splits, blocks)
    per_split = -(-blocks // splits)
    planes = to_planes(q.astype(jnp.float32) * np.float32(spec.scale), spec.per_byte)
    bytes_ = power_of_two(planes.shape[-1])
    planes = jnp.pad(planes, ((0, 0), (0, 0), (0, 0), (0, rows - r), (0, bytes_ - planes.shape[-1])))
    q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - r), (0, channels - d)))
    # A row that only pads never keeps a block.
    threshold = jnp.pad(threshold, ((0, 0), (0, 0), (0, rows - r)), constant_values=jnp.inf)

    def head(*shape):
        return pl.BlockSpec((None, None, *shape), lambda s, h, b: (b, h, *(0 for _ in shape)))

    def part(*shape):
        return pl.BlockSpec((None, None, None, *shape), lambda s, h, b: (s, b, h, *(0 for _ in shape)))

    operands = num_blocks, threshold, q, planes, k_code, k_scale, k_resid, v
    typed = typed_like
    m, total, acc, kept = pl.pallas_call(
        functools.partial(_kernel, spec=spec, per_split=per_split, sizes=(rows, channels, columns, bytes_)),
        grid=(splits, h, b),
        in_specs=[
            pl.BlockSpec((None,), lambda s, h, b: (b,)),
            head(rows),
            head(rows, channels),
            head(spec.per_byte, rows, bytes_),
            *(head(*a.shape[2:]) for a in (k_code, k_scale, k_resid, v)),
        ],
        out_specs=[part(rows), part(rows), part(rows, columns), head(blocks)],
        out_shape=[
            typed((splits, b, h, rows), jnp.float32, *operands),
            typed((splits, b, h, rows), jnp.float32, *operands),
            typed((splits, b, h, rows, columns), jnp.float32, *operands),
            typed((b, h, blocks), jnp.int32, *operands),
        ],
        compiler_params=gpu_parameters(_WARPS, _STAGES),
        interpret=spec.interpret,
        name="ffd_decode_gpu",
    )(*operands)
    m, total, acc = merge_partials(m, total, acc)
    kept = (kept > 0) & (jnp.arange(blocks) < num_blocks[:, None, None])
    return m[..., :r], total[..., :r], acc[..., :r, :width], kept


def _kernel(
    count_ref, threshold_ref, q_ref, planes_ref, code_ref, scale_ref, resid_ref, v_ref,
    m_ref, l_ref, acc_ref, kept_ref, *, spec: Spec, per_split: int, sizes: tuple[int, int, int, int],
):  # fmt: skip
    rows, channels, columns, bytes_ = sizes
    block, tokens = spec.block, power_of_two(spec.block)
    product = jnp.float32 if spec.exact_products else jnp.bfloat16
    precision = lax.Precision.HIGHEST if spec.exact_products else None
    first = pl.program_id(0) * per_split
    last = jnp.minimum(first + per_split, count_ref[...])
    threshold = threshold_ref[...]

    def load(ref, n, size, other):
        """[tokens, size] of block n, zeros outside of the array."""
        # A start that is no constant: JAX 0.12 refuses constant bounds behind the end, which the mask is for.
        at = ref.at[pl.ds(n * block, tokens), pl.ds(n * 0, size)]
        if tokens == block and size == ref.shape[1]:
            return plgpu.load(at)
        token = lax.broadcasted_iota(jnp.int32, (tokens, size), 0)
        channel = lax.broadcasted_iota(jnp.int32, (tokens, size), 1)
        return plgpu.load(at, mask=(token < block) & (channel < ref.shape[1]), other=other)

    def dot(x, y, contract):
        return lax.dot_general(
            x, y, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    def step(n, partial):
        code = load(code_ref, n, bytes_, np.uint8(0)).astype(jnp.int32)
        byte = lax.iota(jnp.int32, bytes_)
        a = jnp.zeros((rows, tokens), jnp.float32)
        zero = jnp.zeros(rows, jnp.float32)
        error = jnp.zeros(rows, jnp.float32)
        for i in range(spec.per_byte):
            # Channels behind the end repeat the last scale; q is 0 there.
            scale = scale_ref[n, jnp.minimum(byte * spec.per_byte + i, scale_ref.shape[1] - 1)]
            x = planes_ref[i]
            qs = (x * scale[None, :]).astype(product)
            level = ((code >> (spec.bits * i)) & (2**spec.bits - 1)).astype(jnp.float32).astype(product)
            a += dot(qs, level, ((1,), (1,)))
            zero += jnp.sum(qs.astype(jnp.float32), axis=1)
            if spec.certified:
                error += jnp.sum(jnp.abs(x) * (spec.bound[0] * scale + spec.bound[1])[None, :], axis=1)
        a -= (spec.z * zero)[:, None]
        if tokens > block:
            a = jnp.where(lax.broadcasted_iota(jnp.int32, a.shape, 1) < block, a, -jnp.inf)
        top = jnp.max(a, axis=1) + error
        keep = jnp.max(jnp.where(top < threshold, 0, 1).astype(jnp.int32)) > 0
        kept_ref[n] = keep.astype(jnp.int32)

        def take(partial):
            m, total, acc = partial
            resid = load(resid_ref, n, channels, jnp.zeros((), resid_ref.dtype)).astype(jnp.float32)
            s = a + dot(q_ref[...].astype(product), resid.astype(product), ((1,), (1,))) * np.float32(
                spec.scale
            )
            new = jnp.maximum(m, jnp.max(s, axis=1))
            p = jnp.exp(s - new[:, None])
            old = jnp.exp(m - new)
            v = load(v_ref, n, columns, jnp.zeros((), v_ref.dtype)).astype(product)
            return (
                new,
                total * old + jnp.sum(p, axis=1),
                acc * old[:, None] + dot(p.astype(product), v, ((1,), (0,))),
            )

        return lax.cond(keep, take, lambda partial: partial, partial)

    start = (
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((rows, columns), jnp.float32),
    )
    m_ref[...], l_ref[...], acc_ref[...] = lax.fori_loop(first, last, step, start)
