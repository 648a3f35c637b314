"""The product of planes and signs on an NVIDIA GPU, through Pallas's Triton lowering (JAX 0.10.2 to 0.12).

Few rows: a bit flips the sign of a number by an exclusive or, and float32 sums stay in registers; no tensor core. More
rows: each bit becomes ±1.0 in bfloat16 and meets the tensor cores. In both, words are read once per block of rows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._parameters import gpu_parameters
from pallas_kernels._varying import typed_like
from pallas_kernels.binary_matmul.blocks import BlockSizes
from pallas_kernels.binary_matmul.body import BITS, flipped, over_bits, sign

__all__ = ["sign_product"]


def sign_product(
    planes: jax.Array, words: jax.Array, blocks: BlockSizes, *, interpret: bool = False
) -> jax.Array:
    """`x @ S` from planes `[32, rows, words]` and words `uint32[words, columns]`: float32 `[rows, columns]`.

    float32 planes take the form for few rows, bfloat16 planes the tensor cores.
    """
    _, rows, depth = planes.shape
    columns = words.shape[1]
    few = planes.dtype == jnp.float32
    block_rows = rows if few else blocks.rows
    per_split = -(-depth // (blocks.words * blocks.splits))  # loads of each program
    # x is padded by zeros, so words behind the end add nothing; they are masked because they are not there to read.
    padding = per_split * blocks.words * blocks.splits - depth
    planes = jnp.pad(planes, ((0, 0), (0, -rows % block_rows), (0, padding)))
    padded_rows = planes.shape[1]
    padded_columns = -(-columns // blocks.columns) * blocks.columns
    row_blocks = padded_rows // block_rows
    out = pl.pallas_call(
        functools.partial(
            _few_rows if few else _many_rows,
            blocks=blocks,
            steps=per_split,
            masked=padding > 0 or padded_columns > columns,
        ),
        # Two axes, so that a vmap has the third that Triton allows.
        grid=(padded_columns // blocks.columns, row_blocks * blocks.splits),
        in_specs=[
            pl.BlockSpec((BITS, block_rows, planes.shape[2]), lambda j, i: (0, i // blocks.splits, 0)),
            pl.BlockSpec(words.shape, lambda j, i: (0, 0)),
        ],
        out_specs=pl.BlockSpec(
            (None, block_rows, blocks.columns), lambda j, i: (i % blocks.splits, i // blocks.splits, j)
        ),
        out_shape=typed_like((blocks.splits, padded_rows, padded_columns), jnp.float32, planes, words),
        compiler_params=gpu_parameters(blocks.num_warps, blocks.num_stages),
        interpret=interpret,
        name="binary_matvec_gpu" if few else "binary_matmul_gpu",
    )(planes, words)
    return jnp.sum(out, axis=0)[:rows, :columns]


def _load_words(w_ref, start, column, blocks: BlockSizes, masked: bool):
    at = w_ref.at[pl.ds(start, blocks.words), pl.ds(column, blocks.columns)]
    if not masked:
        return plgpu.load(at)
    shape = (blocks.words, blocks.columns)
    row = start + lax.broadcasted_iota(jnp.int32, shape, 0)
    column = column + lax.broadcasted_iota(jnp.int32, shape, 1)
    return plgpu.load(at, mask=(row < w_ref.shape[0]) & (column < w_ref.shape[1]), other=0)


def _few_rows(x_ref, w_ref, o_ref, *, blocks: BlockSizes, steps: int, masked: bool):
    rows = o_ref.shape[0]
    column = pl.program_id(0) * blocks.columns
    first = (pl.program_id(1) % blocks.splits) * (steps * blocks.words)

    def step(i, totals):
        start = first + i * blocks.words
        words = _load_words(w_ref, start, column, blocks, masked)

        def add(totals, words, bit, plane):
            x = (x_ref[plane, row, pl.ds(start, blocks.words)] for row in range(rows))
            x = (lax.broadcast_in_dim(numbers, words.shape, (0,)) for numbers in x)
            return tuple(total + flipped(words, bit, numbers) for total, numbers in zip(totals, x))

        return over_bits(words, totals, add)

    zero = jnp.zeros((blocks.words, blocks.columns), jnp.float32)
    totals = lax.fori_loop(np.int32(0), np.int32(steps), step, (zero,) * rows)
    for row in range(rows):
        o_ref[row, :] = jnp.sum(totals[row], axis=0)


def _many_rows(x_ref, w_ref, o_ref, *, blocks: BlockSizes, steps: int, masked: bool):
    column = pl.program_id(0) * blocks.columns
    first = (pl.program_id(1) % blocks.splits) * (steps * blocks.words)

    def step(i, total):
        start = first + i * blocks.words
        words = _load_words(w_ref, start, column, blocks, masked)

        def add(total, words, bit, plane):
            x = x_ref[plane, :, pl.ds(start, blocks.words)]
            signs = sign(words, bit).astype(jnp.bfloat16)
            return total + lax.dot_general(
                x, signs, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )

        return over_bits(words, total, add)

    o_ref[...] = lax.fori_loop(np.int32(0), np.int32(steps), step, jnp.zeros(o_ref.shape, jnp.float32))
