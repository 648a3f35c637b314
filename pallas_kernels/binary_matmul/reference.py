"""Packing of signs, and what the products mean: dense, differentiable, in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from pallas_kernels._arguments import as_array, whole_number

__all__ = ["binary_matmul", "pack_signs", "sign_matmul", "unpack_signs"]

BITS = 32  # signs in one word


def pack_signs(signs: Any, axis: int = 0) -> jax.Array:
    """Packs 32 signs along `axis` into each uint32, the first in the lowest bit; bit 1 means -1.

    Args:
        signs: array of +1 and -1, of any dtype that holds them.
        axis: the axis that a product sums over. Its end is padded with +1 to a multiple of 32.

    Returns:
        uint32 array; `axis` has ceil(size / 32) entries.

    Raises:
        ValueError: if a value is neither +1 nor -1 (can't be seen inside `jax.jit`), or `axis` does not exist.
        TypeError: inside `jax.jit` for a dtype that has no -1.

    Example:
        >>> pack_signs(np.array([[1], [-1], [-1]]))
        Array([[6]], dtype=uint32)
    """
    _check_axis(axis, np.ndim(signs))
    if isinstance(signs, Tracer):
        if not jnp.issubdtype(signs.dtype, jnp.signedinteger) and not jnp.issubdtype(
            signs.dtype, jnp.floating
        ):
            raise TypeError(f"signs holds {signs.dtype}, which has no -1")
        bits = _in_words(jnp, jnp.moveaxis(signs < 0, axis, -1)).astype(jnp.uint32)
        words = jnp.sum(bits << jnp.arange(BITS, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
        return jnp.moveaxis(words, -1, axis)
    values = np.asarray(signs)
    wrong = values[(values != 1) & (values != -1)]
    if wrong.size:
        raise ValueError(f"signs must be +1 or -1, but {wrong.size} are not, such as {wrong.flat[0]}")
    bits = _in_words(np, np.moveaxis(values < 0, axis, -1))
    words = np.packbits(np.ascontiguousarray(bits), axis=-1, bitorder="little")
    words = np.ascontiguousarray(words).view("<u4")[..., 0]
    return jnp.asarray(np.moveaxis(words, -1, axis))


def _check_axis(axis: int, ndim: int) -> None:
    if axis not in range(-ndim, ndim):
        raise ValueError(f"axis={axis} is not one of an array of {ndim} axes")


def _in_words(numpy: Any, bits: Any) -> Any:
    """`[..., n] -> [..., ceil(n / 32), 32]`, padded with zeros."""
    words = -(-bits.shape[-1] // BITS)
    bits = numpy.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, words * BITS - bits.shape[-1])])
    return bits.reshape(*bits.shape[:-1], words, BITS)


def unpack_signs(words: Any, size: int, axis: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    """The signs that `pack_signs` packed.

    Args:
        words: uint32 array.
        size: number of signs along `axis`; the padding behind them is dropped.
        axis: axis of `words` that was packed.
        dtype: of the result.

    Returns:
        Array of +1 and -1 with `size` entries along `axis`.

    Raises:
        ValueError: if `axis` of `words` has another number of words than `size` signs take, or does not exist.
        TypeError: for words that are not uint32.

    Example:
        >>> unpack_signs(pack_signs(np.array([1, -1, -1])), 3)
        Array([ 1., -1., -1.], dtype=float32)
    """
    words = as_array("words", words)
    if words.dtype != jnp.uint32:
        raise TypeError(f"words must be uint32 (from pack_signs), not {words.dtype}")
    _check_axis(axis, words.ndim)
    size = whole_number("size", size, 0)
    if words.shape[axis] != -(-size // BITS):
        raise ValueError(
            f"size={size} takes {-(-size // BITS)} words, but axis {axis} has {words.shape[axis]}"
        )
    parts = jnp.moveaxis(jnp.asarray(words), axis, -1)[..., None] >> jnp.arange(BITS, dtype=jnp.uint32)
    bits = (parts & 1).astype(jnp.int32).reshape(*parts.shape[:-2], parts.shape[-2] * BITS)[..., :size]
    return jnp.moveaxis((1 - 2 * bits).astype(dtype), -1, axis)


def sign_matmul(
    x: jax.Array, words: jax.Array, scale_in: Any = None, scale_out: Any = None, bias: Any = None
) -> jax.Array:
    """`((x * scale_in) @ S) * scale_out + bias` with the dense signs S; see the public function."""
    signs = unpack_signs(words, x.shape[-1])
    y = _dot(_times(x.astype(jnp.float32), scale_in), signs)
    return _finish(y, scale_out, bias).astype(x.dtype)


def binary_matmul(
    x: jax.Array,
    v_words: jax.Array,
    u_words: jax.Array,
    scale_in: Any = None,
    scale_out: Any = None,
    bias: Any = None,
) -> jax.Array:
    """`(((x * scale_in) @ V) @ U) * scale_out + bias` with the dense V and U; see the public function."""
    h = _dot(_times(x.astype(jnp.float32), scale_in), unpack_signs(v_words, x.shape[-1]))
    y = _dot(h, unpack_signs(u_words, v_words.shape[1]))
    return _finish(y, scale_out, bias).astype(x.dtype)


def _times(x: jax.Array, scale: Any) -> jax.Array:
    return x if scale is None else x * scale


def _finish(y: jax.Array, scale_out: Any, bias: Any) -> jax.Array:
    y = _times(y, scale_out)
    return y if bias is None else y + bias


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
