"""The product of planes and signs on TPU: words are expanded one bit at a time in VMEM and meet the matrix unit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._parameters import tpu_parameters
from pallas_kernels._varying import typed_like
from pallas_kernels.binary_matmul.blocks import BlockSizes
from pallas_kernels.binary_matmul.body import BITS, over_bits, sign

__all__ = ["sign_product"]


def sign_product(
    planes: jax.Array, words: jax.Array, blocks: BlockSizes, *, interpret: Any = False
) -> jax.Array:
    """`x @ S` from bfloat16 planes `[32, rows, words]` and `uint32[words, columns]`: float32 `[rows, columns]`."""
    _, rows, depth = planes.shape
    columns = words.shape[1]
    block_rows, block_columns, block_words = blocks.rows, blocks.columns, min(blocks.words, depth)
    # x is padded by zeros; what stands behind the words' end there is some sign, and adds nothing.
    planes = jnp.pad(planes, ((0, 0), (0, -rows % block_rows), (0, -depth % block_words)))
    padded_rows, padded_depth = planes.shape[1:]
    out = pl.pallas_call(
        _kernel,
        grid=(padded_rows // block_rows, pl.cdiv(columns, block_columns), padded_depth // block_words),
        in_specs=[
            pl.BlockSpec((BITS, block_rows, block_words), lambda i, j, k: (0, i, k)),
            pl.BlockSpec((block_words, block_columns), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((block_rows, block_columns), lambda i, j, k: (i, j)),
        out_shape=typed_like((padded_rows, columns), jnp.float32, planes, words),
        compiler_params=tpu_parameters("parallel", "parallel", "arbitrary"),
        interpret=interpret,
        name="binary_matmul_tpu",
    )(planes, words)
    return out[:rows]


def _kernel(x_ref, w_ref, o_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    def add(total, words, bit, plane):
        signs = sign(words, bit).astype(jnp.bfloat16)
        return total + lax.dot_general(
            x_ref[plane], signs, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )

    o_ref[...] = over_bits(w_ref[...], o_ref[...], add)
