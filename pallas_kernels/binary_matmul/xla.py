"""The products through XLA; the largest temporary is 1/32 of the dense matrix.

Many rows: one bit position of all words at a time becomes a matrix of ±1 and meets that plane of x. Few rows on a CPU:
one line of words at a time, whose 32 flips of x XLA fuses into one loop.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _dispatch
from pallas_kernels.binary_matmul.blocks import MATVEC_ROWS
from pallas_kernels.binary_matmul.body import BITS, flipped, sign

__all__ = ["sign_product", "sign_product_transposed"]


def sign_product(planes: jax.Array, words: jax.Array) -> jax.Array:
    """`x @ S` from planes `[32, rows, words]` and words `uint32[words, columns]`: float32 `[rows, columns]`."""
    few = planes.shape[1] <= MATVEC_ROWS and words.shape[0] > 0
    if few and _dispatch.platforms() == ("cpu",):  # on a GPU every turn of the loop would be a launch
        return _few_rows(planes, words)

    def product(bit, plane):
        return _dot(plane, sign(words, bit).astype(plane.dtype), 0)

    # The first bit is the start of the sum, so that the loop's state varies over the mesh axes that the data does.
    start = product(jnp.int32(0), planes[0])
    return lax.fori_loop(1, BITS, lambda bit, total: total + product(bit, planes[bit]), start)


def _few_rows(planes: jax.Array, words: jax.Array) -> jax.Array:
    numbers = jnp.transpose(planes, (2, 0, 1)).astype(jnp.float32)[..., None]  # [words, 32, rows, 1]

    def line(i):
        flips = [flipped(words[i], bit, numbers[i, bit]) for bit in range(BITS)]
        return sum(flips[1:], flips[0])

    return lax.fori_loop(1, words.shape[0], lambda i, total: total + line(i), line(0))


def sign_product_transposed(g: jax.Array, words: jax.Array) -> jax.Array:
    """`g @ S.T` as planes, float32 `[32, rows, words]`, from g `[rows, columns]`."""
    return lax.map(
        lambda bit: _dot(g, sign(words, bit).astype(g.dtype), 1), jnp.arange(BITS, dtype=jnp.int32)
    )


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
