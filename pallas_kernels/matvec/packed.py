"""Products of a few rows with a matrix of 2 to 8 bits per weight."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import _dispatch
from pallas_kernels.matvec import cpu, reference

__all__ = ["packed_matvec"]


def packed_matvec(
    x: Array, codes: Array, scale: Array, *, bits: int, implementation: str | None = None
) -> Array:
    r"""The product with a matrix that stays packed:

    $$y_o = \sum_i x_i\, s_{o,\lfloor i / g \rfloor}\,(c_{oi} - 2^{b-1})$$

    with b = `bits` and g = ceil(in / groups). Eight codes that follow each other along the inputs fill b bytes as a
    little-endian integer, the first in its lowest bits; the last eight are filled up with anything. Fewer bytes are
    read than a float32 matrix has, by 32 / b; whether that is faster depends on what unpacking costs
    (`benchmarks/packed_decode.py`).

    It can be jitted, mapped and differentiated (reverse mode) by x and scale.

    Args:
        x: [..., in], floating.
        codes: uint8[out, ceil(in / 8) * bits].
        scale: float[out, groups]; one group is a scale per output. Groups of 8, 16, ... inputs are the fast ones.
        bits: 2 to 8.
        implementation: `"xla"` (unpacks some outputs at a time), `"cpu"` (native code), or None. None never fails: on
            a CPU it takes native code where that can be built, for at most 8 rows, and XLA otherwise.

    Returns:
        float32[..., out].

    Raises:
        ValueError: for shapes or bits that don't fit, or an unknown implementation.
        TypeError: for codes that are not uint8, or x or a scale that is not floating.
        NotImplementedError: if the named implementation can't run here or on these arrays, with the reason.

    Example:
        >>> codes = jnp.array([[0x98, 0xBA, 0x88, 0x88]], jnp.uint8)  # 4 bits: 8, 9, 10, 11, and four times zero
        >>> packed_matvec(jnp.ones((1, 4)), codes, jnp.array([[0.5]]), bits=4).tolist()
        [[3.0]]
    """
    x, codes, scale = jnp.asarray(x), jnp.asarray(codes), jnp.asarray(scale)
    if bits not in range(2, 9):
        raise ValueError(f"bits={bits!r} must be one of 2 to 8")
    for name, array in (("x", x), ("scale", scale)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} holds {array.dtype}, must hold floating point numbers")
    if codes.dtype != jnp.uint8:
        raise TypeError(f"codes holds {codes.dtype}, must hold uint8")
    if x.ndim < 1 or codes.ndim != 2 or codes.shape[1] != -(-x.shape[-1] // 8) * bits:
        raise ValueError(
            f"codes of shape {codes.shape} must be [out, ceil(in / 8) * {bits}] for x of shape {x.shape}"
        )
    if scale.ndim != 2 or len(scale) != len(codes) or not 1 <= scale.shape[1] <= max(1, x.shape[-1]):
        raise ValueError(f"scale of shape {scale.shape} must be [{len(codes)}, groups], 1 to in groups")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = jnp.asarray(_product(rows, codes, scale, int(bits), implementation))
    return y.reshape(*x.shape[:-1], len(codes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(x: Array, codes: Array, scale: Array, bits: int, implementation: str | None) -> Array:
    forms = {
        "xla": functools.partial(reference.packed_matvec, bits=bits),
        "cpu": functools.partial(cpu.packed_matvec, bits=bits),
    }
    return _dispatch.choose(implementation, forms, _reasons(x, codes, implementation))(x, codes, scale)


def _reasons(x: Array, codes: Array, implementation: str | None) -> dict[str, str]:
    if implementation == "xla":
        return {}
    reason = None
    if not x.size or not codes.size:
        reason = f"x of shape {x.shape} or codes of shape {codes.shape} is empty"
    if implementation is None and len(x) > cpu.FEW_ROWS:
        reason = f"{len(x)} rows"
    reason = reason or cpu.why_not()
    return {"cpu": reason} if reason else {}


def _forward(
    x: Array, codes: Array, scale: Array, bits: int, implementation: str | None
) -> tuple[Array, tuple]:
    return _product(x, codes, scale, bits, implementation), (x, codes, scale)


def _backward(bits: int, implementation: str | None, saved: tuple, dy: Array) -> tuple[Array, Any, Array]:
    del implementation
    x, codes, scale = saved
    _, pullback = jax.vjp(lambda x, scale: reference.packed_matvec(x, codes, scale, bits=bits), x, scale)
    dx, dscale = pullback(dy)
    return dx, np.zeros(codes.shape, jax.dtypes.float0), dscale


_product.defvjp(_forward, _backward)
