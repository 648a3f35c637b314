"""The arithmetic that every form shares: rows split by bit position, and one bit of a word as a sign.

The 32 signs of a word meet the 32 numbers of x in front of them. Taking the numbers of one bit position together, plane
b of x has shape [rows, words], and

    x @ S = Σ_b planes[b] @ (1 - 2 ((words >> b) & 1))

so that no form ever reorders signs or holds more of them than one bit of each word that it has loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["BITS", "bfloat16_parts", "flipped", "from_planes", "over_bits", "sign", "to_planes"]

BITS = 32
_UNROLLED = 8
_TOP = np.uint32(2**31)
_ONE = np.uint32(0x3F800000)  # 1.0 as float32 bits


def to_planes(x: jax.Array, words: int) -> jax.Array:
    """`[rows, inputs] -> [32, rows, words]`; zeros stand for the inputs that the padded words have and x has not."""
    x = jnp.pad(x, ((0, 0), (0, words * BITS - x.shape[1])))
    return jnp.transpose(x.reshape(x.shape[0], words, BITS), (2, 0, 1))


def from_planes(planes: jax.Array, inputs: int) -> jax.Array:
    """`[32, rows, words] -> [rows, inputs]`, the inverse of `to_planes`."""
    return jnp.transpose(planes, (1, 2, 0)).reshape(planes.shape[1], planes.shape[2] * BITS)[:, :inputs]


def sign(words: jax.Array, bit: Any) -> jax.Array:
    """+1.0 or -1.0 in float32 by one bit of uint32 words: the bit becomes the sign bit of 1.0."""
    return lax.bitcast_convert_type(_sign_bit(words, bit) | _ONE, jnp.float32)


def flipped(words: jax.Array, bit: Any, x: jax.Array) -> jax.Array:
    """float32 `x` with the sign of one bit of uint32 words: an exclusive or, no product."""
    return lax.bitcast_convert_type(
        _sign_bit(words, bit) ^ lax.bitcast_convert_type(x, jnp.uint32), jnp.float32
    )


def _sign_bit(words: jax.Array, bit: Any) -> jax.Array:
    return lax.shift_left(words, jnp.full_like(words, 31 - bit)) & _TOP


def over_bits(words: jax.Array, total: Any, add: Callable[[Any, jax.Array, int, Any], Any]) -> Any:
    """Folds `add` over the bit positions, in a loop whose shifts are constants.

    Args:
        words: uint32 words.
        total: where the sum starts; any pytree.
        add: from the total so far, words, a bit of these, and the bit position of x that it belongs to.

    Returns:
        The total. Eight positions are written out; the loop runs four times.
    """

    def group(_, state):
        words, plane, total = state
        for shift in range(_UNROLLED):
            total = add(total, words, 31 - shift, plane - np.int32(shift))
        return lax.shift_left(words, jnp.full_like(words, _UNROLLED)), plane - np.int32(_UNROLLED), total

    # The plane is carried: with 64-bit mode on, the loop's own counter is int64 to JAX and int32 to Mosaic.
    return lax.fori_loop(0, BITS // _UNROLLED, group, (words, np.int32(31), total))[2]


def bfloat16_parts(x: jax.Array) -> list[jax.Array]:
    """bfloat16 arrays that add up to x: one for bfloat16, three for float32.

    Signs are exact in bfloat16, so three products of parts on the fast matrix units, summed in float32, are as good as
    one in float32.
    """
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(3):
        part = x.astype(jnp.bfloat16)
        parts.append(part)
        x = jnp.where(jnp.isfinite(part), x - part.astype(x.dtype), 0)
    return parts
