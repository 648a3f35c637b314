"""The native form on a CPU: calls the handler in `cpu.cc`, which looks up sums of ±x instead of unpacking signs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import _native
from pallas_kernels._varying import call_as_varying

__all__ = ["sign_products", "slow", "why_not"]

_TARGET = "effml_sign_products"


def why_not() -> str | None:
    """Why native code can't run here; None if it can. The first call may compile it, which takes seconds.

    Example:
        >>> why_not() is None or isinstance(why_not(), str)
        True
    """
    return _native.why_not(_TARGET)


def slow() -> str | None:
    """Why XLA is the faster one although native code runs; None if native code is, or can't run at all.

    Example:
        >>> slow() is None or "AVX2" in slow()
        True
    """
    if why_not() is None and not _native.number("effml_sign_tables"):
        return "this processor has neither AVX2 nor AVX-512, which look up sums in tables"
    return None


def sign_products(x: jax.Array, *words: jax.Array) -> jax.Array:
    """`x @ S`, or `(x @ V) @ U` in one call, in float32; under `vmap` one call after the other.

    Args:
        x: float32 [rows, in].
        words: uint32 [ceil(in / 32), out], or two of them with the rank between.

    Returns:
        float32 [rows, out].
    """
    out = jax.ShapeDtypeStruct((x.shape[0], words[-1].shape[1]), jnp.float32)
    return call_as_varying(jax.ffi.ffi_call(_TARGET, out, vmap_method="sequential"), x, *words)
