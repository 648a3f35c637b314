"""The products of a few rows with a matrix, plain or packed, as XLA computes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

__all__ = ["matvec", "packed_matvec", "unpack"]

_TILE = 256


def matvec(x: Array, kernel: Array, *, transposed: bool = False) -> Array:
    """`x @ kernel`, accumulated in float32 (float64 stays); differentiable, and the definition of correct.

    Args:
        x: [rows, in].
        kernel: [in, out], or [out, in] if `transposed`.
        transposed: how the kernel lies.

    Returns:
        [rows, out].

    Example:
        >>> matvec(jnp.ones((1, 2)), jnp.ones((2, 3))).tolist()
        [[2.0, 2.0, 2.0]]
    """
    common = jnp.promote_types(x.dtype, kernel.dtype)
    wide = jnp.promote_types(common, jnp.float32)
    contract = (((1,), (1 if transposed else 0,)), ((), ()))
    # Without it a GPU and a TPU round float32 to fewer bits before they multiply.
    exact = lax.Precision.HIGHEST
    return lax.dot_general(
        x.astype(common), kernel.astype(common), contract, precision=exact, preferred_element_type=wide
    )


def unpack(codes: Array, scale: Array, *, bits: int, inputs: int) -> Array:
    """The weights of some outputs of a packed matrix.

    Args:
        codes: uint8[out, ceil(in / 8) * bits].
        scale: float32[out, groups].
        bits: 2 to 8.
        inputs: in.

    Returns:
        float32[out, in].

    Example:
        >>> codes = jnp.array([[0x98, 0xBA, 0x88, 0x88]], jnp.uint8)  # 4 bits: 8, 9, 10, 11, and four times zero
        >>> unpack(codes, jnp.array([[0.5]]), bits=4, inputs=4).tolist()
        [[0.0, 0.5, 1.0, 1.5]]
    """
    # A code lies in at most two of the bytes of its eight.
    at = jnp.arange(8) * bits
    blocks = codes.reshape(len(codes), -1, bits).astype(jnp.int32)
    blocks = jnp.pad(blocks, ((0, 0), (0, 0), (0, 1)))
    pairs = blocks[..., at // 8] | blocks[..., at // 8 + 1] << 8
    values = (pairs >> at % 8 & (1 << bits) - 1) - (1 << bits - 1)
    values = values.reshape(len(codes), -1)[:, :inputs].astype(jnp.float32)
    size = -(-inputs // scale.shape[1])
    return values * jnp.repeat(scale.astype(jnp.float32), size, axis=1)[:, :inputs]


def packed_matvec(x: Array, codes: Array, scale: Array, *, bits: int) -> Array:
    """`x @ unpack(codes, scale).T`, a few hundred outputs at a time: the whole matrix never exists.

    Args:
        x: [rows, in].
        codes: uint8[out, ceil(in / 8) * bits].
        scale: float32[out, groups].
        bits: 2 to 8.

    Returns:
        float32[rows, out].

    Example:
        >>> codes = jnp.array([[0x98, 0xBA, 0x88, 0x88]], jnp.uint8)
        >>> packed_matvec(jnp.ones((1, 4)), codes, jnp.array([[0.5]]), bits=4).tolist()
        [[3.0]]
    """
    rows, inputs = x.shape
    outputs = len(codes)
    x = x.astype(jnp.float32)

    @jax.checkpoint  # the gradient unpacks again and keeps no tile
    def tile(part: tuple[Array, Array]) -> Array:
        return matvec(x, unpack(*part, bits=bits, inputs=inputs), transposed=True)

    if outputs <= _TILE:
        return tile((codes, scale))
    count = -(-outputs // _TILE)
    more = ((0, count * _TILE - outputs), (0, 0))
    tiles = tuple(jnp.pad(a, more).reshape(count, _TILE, -1) for a in (codes, scale))
    y = lax.map(tile, tiles)
    return y.transpose(1, 0, 2).reshape(rows, -1)[:, :outputs]
