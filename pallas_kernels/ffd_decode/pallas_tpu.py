"""The scan and the kept blocks in one kernel on TPU.

Grid (batch, KV head, split, step). A step's codes and scales come by the pipeline; residuals and values stay in HBM,
and a kept block is copied from there when its scan says so. Codes hold a few channels a byte, so the queries are
reordered to match: a product with a permutation matrix, because lanes can't be read with a stride.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._parameters import tpu_parameters
from pallas_kernels._varying import typed_like
from pallas_kernels.ffd_decode.body import Spec, merge_partials

__all__ = ["attend_blocks", "refuses"]

_STEP = 8  # blocks a grid step: the rows of a tile of scales
_SUBLANES = 32  # rows of a tile of bytes


def refuses(spec: Spec, q: Any, k_code: Any, k_resid: Any, v: Any, residual_dtype: Any) -> str | None:
    """Why the kernel can't take arrays of these shapes; None if it can."""
    if spec.block % _SUBLANES:
        return f"block={spec.block} is no multiple of {_SUBLANES}"
    if q[2] > 512:
        return f"{q[2]} queries of one KV head are more than 512"
    if jnp.dtype(residual_dtype) not in [
        jnp.dtype(t) for t in (jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32)
    ]:
        return f"k_resid of {jnp.dtype(residual_dtype).name} (takes float8_e4m3fn, bfloat16, float32)"
    return None


def attend_blocks(spec: Spec, q, k_code, k_scale, k_resid, v, num_blocks, threshold):
    """The partial (m, total, acc) of [B, H, R] queries over the kept blocks, and which those were, bool [B, H, NB]."""
    b, h, r, d = q.shape
    blocks, width, code_bytes = k_scale.shape[2], v.shape[-1], k_code.shape[-1]
    step_blocks = min(_STEP, blocks)
    steps_in_all = -(-blocks // step_blocks)
    splits = min(
        spec.num_splits or 1, steps_in_all
    )  # one core walks its whole grid: splits gain nothing by themselves
    steps = -(-steps_in_all // splits)
    rows = r + -r % 8
    q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - r), (0, 0)))
    # A row that only pads never keeps a block.
    threshold = jnp.pad(threshold, ((0, 0), (0, 0), (0, rows - r)), constant_values=jnp.inf)[..., None]
    # Column i * bytes + j takes channel j * per_byte + i; those behind the end stay 0.
    order = np.arange(code_bytes * spec.per_byte).reshape(code_bytes, spec.per_byte).T.reshape(-1)
    permutation = jnp.asarray(np.arange(d)[:, None] == order, jnp.float32)

    def step_index(b, h, s, i, count):
        # Steps behind the end load nothing new: the index stays where it is.
        del count
        return b, h, jnp.minimum(s * steps + i, steps_in_all - 1), 0

    def head(*shape):
        return pl.BlockSpec((None, None, *shape), lambda b, h, s, i, count: (b, h, *(0 for _ in shape)))

    def part(*shape):
        return pl.BlockSpec(
            (None, None, None, *shape), lambda b, h, s, i, count: (b, h, s, *(0 for _ in shape))
        )

    operands = num_blocks, threshold, q, permutation, k_code, k_scale, k_resid, v
    kept_lanes = steps * step_blocks
    m, total, acc, kept = pl.pallas_call(
        functools.partial(_kernel, spec=spec, steps=steps, step_blocks=step_blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, h, splits, steps),
            in_specs=[
                head(rows, 1),
                head(rows, d),
                pl.BlockSpec(permutation.shape, lambda b, h, s, i, count: (0, 0)),
                pl.BlockSpec((None, None, step_blocks * spec.block, code_bytes), step_index),
                pl.BlockSpec((None, None, step_blocks, d), step_index),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[part(rows, 1), part(rows, 1), part(rows, width), part(1, kept_lanes)],
            scratch_shapes=[
                pltpu.VMEM((spec.block, d), k_resid.dtype),
                pltpu.VMEM((spec.block, width), v.dtype),
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=[
            typed_like((b, h, splits, rows, 1), jnp.float32, *operands),
            typed_like((b, h, splits, rows, 1), jnp.float32, *operands),
            typed_like((b, h, splits, rows, width), jnp.float32, *operands),
            typed_like((b, h, splits, 1, kept_lanes), jnp.int32, *operands),
        ],
        compiler_params=tpu_parameters("parallel", "parallel", "parallel", "arbitrary"),
        interpret=spec.interpret,
        name="ffd_decode_tpu",
    )(*operands)
    m, total, acc = merge_partials(*(jnp.moveaxis(x, 2, 0) for x in (m[..., 0], total[..., 0], acc)))
    kept = kept.reshape(b, h, splits * kept_lanes)[..., :blocks] > 0
    return m[..., :r], total[..., :r], acc[..., :r, :], kept


def _kernel(
    count_ref, threshold_ref, q_ref, permutation_ref, code_ref, scale_ref, resid_hbm, v_hbm,
    m_ref, l_ref, acc_ref, kept_ref, resid_ref, v_ref, resid_arrived, v_arrived,
    *, spec: Spec, steps: int, step_blocks: int,
):  # fmt: skip
    row, head, split, step = (pl.program_id(axis) for axis in range(4))
    block, code_bytes = spec.block, code_ref.shape[1]
    product = jnp.float32 if spec.exact_products else jnp.bfloat16
    precision = lax.Precision.HIGHEST if spec.exact_products else None

    def dot(x, y, contract):
        return lax.dot_general(
            x, y, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
        )

    @pl.when(step == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf, jnp.float32)
        l_ref[...] = jnp.zeros(l_ref.shape, jnp.float32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)
        kept_ref[...] = jnp.zeros(kept_ref.shape, jnp.int32)

    def scan(j):
        """Scan scores [rows, block] of the step's block j, and whether it is kept."""
        scale = scale_ref[pl.ds(j, 1), :]
        q = q_ref[...].astype(jnp.float32) * np.float32(spec.scale)
        # Rounding comes first, so that the permuted numbers are exact in the product's operands.
        qs = (q * scale).astype(product)
        planes = dot(qs, permutation_ref[...].astype(product), ((1,), (0,)))
        code = code_ref[pl.ds(pl.multiple_of(j * block, block), block), :].astype(jnp.int32)
        a = jnp.zeros((q.shape[0], block), jnp.float32)
        for i in range(spec.per_byte):
            level = ((code >> (spec.bits * i)) & (2**spec.bits - 1)).astype(jnp.float32)
            x = planes[:, i * code_bytes : (i + 1) * code_bytes].astype(product)
            a += dot(x, level.astype(product), ((1,), (1,)))
        a -= np.float32(spec.z) * jnp.sum(qs.astype(jnp.float32), axis=1, keepdims=True)
        top = jnp.max(a, axis=1, keepdims=True)
        if spec.certified:
            error = np.float32(spec.bound[0]) * scale + np.float32(spec.bound[1])
            top += jnp.sum(jnp.abs(q) * error, axis=1, keepdims=True)
        return a, jnp.max(jnp.where(top < threshold_ref[...], np.float32(0), np.float32(1))) > 0

    first = (split * steps + step) * step_blocks

    def one(j, carry):
        n = first + j
        a, keep = scan(j)

        @pl.when(keep)
        def _():
            at = pl.ds(pl.multiple_of(n * block, block), block)
            copies = [
                pltpu.make_async_copy(resid_hbm.at[row, head, at], resid_ref, resid_arrived),
                pltpu.make_async_copy(v_hbm.at[row, head, at], v_ref, v_arrived),
            ]
            for copy in copies:
                copy.start()
            lane = lax.broadcasted_iota(jnp.int32, kept_ref.shape, 1)
            kept_ref[...] = jnp.where(lane == step * step_blocks + j, 1, kept_ref[...])
            copies[0].wait()
            resid = resid_ref[...].astype(jnp.float32).astype(product)
            s = a + dot(q_ref[...].astype(product), resid, ((1,), (1,))) * np.float32(spec.scale)
            m = m_ref[...]
            new = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
            p = jnp.exp(s - new)
            old = jnp.exp(m - new)
            m_ref[...] = new
            l_ref[...] = l_ref[...] * old + jnp.sum(p, axis=1, keepdims=True)
            copies[1].wait()
            v = v_ref[...].astype(product)
            acc_ref[...] = acc_ref[...] * old + dot(p.astype(product), v, ((1,), (0,)))

        return carry

    # A bound that is an int32 array keeps the loop's index one, also under x64.
    here = jnp.clip(count_ref[row] - first, 0, step_blocks).astype(jnp.int32)
    lax.fori_loop(np.int32(0), here, one, np.int32(0))
