"""Low-bit key codes: quantisation per block and channel, and their byte layout.

A block of keys k[t, d] is stored as k ≈ (c - z) s[d] + r, with codes c in 0..2^bits - 1, z = (2^bits - 1) / 2 (no level
at zero) and a residual r in a small floating type. Channel `j * 8/bits + i` sits in bits `bits * i ...` of byte j.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels._arguments import as_array, whole_number

__all__ = [
    "BITS",
    "code_bytes",
    "dequantize",
    "pack_codes",
    "quantize_block",
    "quantize_blocks",
    "unpack_codes",
]

BITS = (2, 4)
_SMALLEST_SCALE = 1e-8


def code_bytes(channels: int, bits: int) -> int:
    """Bytes that the codes of one key take.

    Example:
        >>> code_bytes(80, 2), code_bytes(33, 4)
        (20, 17)
    """
    return -(-channels * check_bits(bits) // 8)


def check_bits(bits: Any) -> int:
    """`bits` if it is 2 or 4; raises otherwise."""
    if bits not in BITS or isinstance(bits, bool):
        raise ValueError(f"bits={bits!r} must be one of {', '.join(map(str, BITS))}")
    return int(bits)


def middle(bits: int) -> float:
    """z, the code of zero: 1.5 for 2 bits and 7.5 for 4."""
    return (2**bits - 1) / 2


def pack_codes(codes: jax.Array, bits: int) -> jax.Array:
    """Packs codes along the last axis, the first channel in the lowest bits.

    Args:
        codes: [..., D], integers in 0..2^bits - 1.
        bits: 2 or 4.

    Returns:
        uint8 [..., ceil(D * bits / 8)]; channels that pad the last byte get the code next to z.

    Raises:
        TypeError: for codes that are not integers.
        ValueError: for codes out of range (can't be seen inside `jax.jit`), or other bits.

    Example:
        >>> pack_codes(jnp.array([1, 0, 2, 3, 3]), 2)
        Array([225, 171], dtype=uint8)
    """
    check_bits(bits)
    codes = as_array("codes", codes)
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"codes must be integers, not {codes.dtype}")
    if not isinstance(codes, Tracer) and codes.size:
        least, most = int(codes.min()), int(codes.max())
        if least < 0 or most >= 2**bits:
            raise ValueError(f"codes must be in 0..{2**bits - 1}, but hold {least} and {most}")
    return _packed(jnp.asarray(codes), bits)


def _packed(codes: jax.Array, bits: int) -> jax.Array:
    per_byte = 8 // bits
    channels = codes.shape[-1]
    filler = round(middle(bits))
    pad = [(0, 0)] * (codes.ndim - 1) + [(0, -channels % per_byte)]
    codes = jnp.pad(codes.astype(jnp.uint8), pad, constant_values=filler)
    codes = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_byte, per_byte)
    packed = codes[..., 0]
    for i in range(1, per_byte):
        packed = packed | (codes[..., i] << np.uint8(bits * i))
    return packed


def unpack_codes(packed: jax.Array, bits: int, channels: int) -> jax.Array:
    """The inverse of `pack_codes`.

    Args:
        packed: uint8 [..., ceil(channels * bits / 8)].
        bits: 2 or 4.
        channels: D.

    Returns:
        uint8 [..., D].

    Raises:
        TypeError: for packed codes that are not uint8.
        ValueError: if the last axis has another number of bytes than the channels take.

    Example:
        >>> unpack_codes(jnp.array([225, 171], jnp.uint8), 2, 5)
        Array([1, 0, 2, 3, 3], dtype=uint8)
    """
    mask = np.uint8(2 ** check_bits(bits) - 1)
    if packed.dtype != jnp.uint8:
        raise TypeError(f"packed must be uint8, not {packed.dtype}")
    if packed.ndim < 1 or packed.shape[-1] != code_bytes(channels, bits):
        raise ValueError(
            f"packed of shape {packed.shape} must end with {code_bytes(channels, bits)} bytes for {channels} channels"
        )
    planes = [(packed >> np.uint8(bits * i)) & mask for i in range(8 // bits)]
    return jnp.stack(planes, axis=-1).reshape(*packed.shape[:-1], packed.shape[-1] * len(planes))[
        ..., :channels
    ]


def quantize_block(
    k: jax.Array, bits: int = 2, *, residual_dtype: Any = jnp.float8_e4m3fn
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits one block of keys into codes, scales and residuals.

    s[d] = max(max_t |k[t, d]| / z, 1e-8),    c = clip(round(k / s + z), 0, 2^bits - 1),    r = k - (c - z) s

    Args:
        k: [..., block, D], floating; keys after rotary embedding.
        bits: 2 or 4.
        residual_dtype: floating; float8_e4m3fn by default, whose relative precision is 2^-4.

    Returns:
        Packed codes uint8 [..., block, ceil(D * bits / 8)], scales float32 [..., D] and residuals [..., block, D].

    Source: "Faster Than Flash" (arXiv 2609.00097) and its released code.

    Example:
        >>> code, scale, residual = quantize_block(jnp.array([[3.0], [-1.0]]), residual_dtype=jnp.float32)
        >>> code[:, 0] & 3, scale, residual[:, 0]
        (Array([3, 1], dtype=uint8), Array([2.], dtype=float32), Array([0., 0.], dtype=float32))
    """
    if not jnp.issubdtype(k.dtype, jnp.floating):
        raise TypeError(f"k must be floating, not {k.dtype}")
    if not jnp.issubdtype(residual_dtype, jnp.floating):
        raise TypeError(f"residual_dtype must be floating, not {jnp.dtype(residual_dtype)}")
    if k.ndim < 2:
        raise ValueError(f"k must have the axes (block, D) at its end, but its shape is {k.shape}")
    z = middle(check_bits(bits))
    k = k.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(k), axis=-2, initial=0.0) / z, _SMALLEST_SCALE)
    codes = jnp.clip(jnp.round(k / scale[..., None, :] + z), 0, 2 * z)
    residual = k - (codes - z) * scale[..., None, :]
    largest = float(jnp.finfo(residual_dtype).max)
    residual = jnp.clip(residual, -largest, largest).astype(residual_dtype)  # float8 would overflow to NaN
    return _packed(codes, bits), scale, residual


def quantize_blocks(
    k: jax.Array, block: int, bits: int = 2, *, residual_dtype: Any = jnp.float8_e4m3fn
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`quantize_block` of every block of [..., T, D], T a multiple of `block`; scales are [..., T / block, D].

    Example:
        >>> [a.shape for a in quantize_blocks(jnp.ones((2, 3, 32, 8)), 16)]
        [(2, 3, 32, 2), (2, 3, 2, 8), (2, 3, 32, 8)]
    """
    block = whole_number("block", block, 1)
    if k.shape[-2] % block:
        raise ValueError(f"k has {k.shape[-2]} keys, which block={block} does not divide")
    split = k.reshape(*k.shape[:-2], k.shape[-2] // block, block, k.shape[-1])
    code, scale, residual = quantize_block(split, bits, residual_dtype=residual_dtype)
    tokens = k.shape[:-1]
    return code.reshape(*tokens, code.shape[-1]), scale, residual.reshape(k.shape)


def dequantize(code: jax.Array, scale: jax.Array, bits: int = 2) -> jax.Array:
    """Keys without their residuals: (c - z) s.

    Args:
        code: uint8 [..., block, ceil(D * bits / 8)], packed.
        scale: float32 [..., D].
        bits: 2 or 4.

    Returns:
        float32 [..., block, D].

    Example:
        >>> dequantize(jnp.array([[3], [1]], jnp.uint8), jnp.array([2.0]))
        Array([[ 3.],
               [-1.]], dtype=float32)
    """
    codes = unpack_codes(code, bits, scale.shape[-1]).astype(jnp.float32)
    return (codes - middle(bits)) * scale[..., None, :]
