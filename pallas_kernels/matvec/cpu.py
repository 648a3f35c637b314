"""The native form on a CPU: calls the handlers in `cpu.cc`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_batching import custom_vmap

from pallas_kernels import _native
from pallas_kernels._varying import call_as_varying
from pallas_kernels.matvec import reference

__all__ = ["FEW_ROWS", "matvec", "packed_matvec", "why_not"]

FEW_ROWS = 8
"""With more rows a product is bound by arithmetic, and XLA's is the faster one."""

_TARGETS = ("effml_matvec", "effml_packed_matvec")


def why_not() -> str | None:
    """Why native code can't run here; None if it can. The first call may compile it, which takes seconds.

    Example:
        >>> why_not() is None or isinstance(why_not(), str)
        True
    """
    return _native.why_not(*_TARGETS)


def matvec(x: Array, kernel: Array, *, transposed: bool = False) -> Array:
    """`x @ kernel` for x [rows, in] and a kernel of float32 or bfloat16; see `pallas_kernels.matvec.matvec`.

    Under `vmap` over x alone the mapped axis joins the rows; a mapped kernel goes through XLA.

    Returns:
        float32[rows, out].
    """

    @custom_vmap
    def call(x: Array, kernel: Array) -> Array:
        outputs = kernel.shape[0 if transposed else 1]
        run = jax.ffi.ffi_call("effml_matvec", jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32))
        run = functools.partial(run, transposed=transposed)
        return call_as_varying(run, x.astype(jnp.float32), kernel)

    @call.def_vmap
    def _(size: int, mapped: list[bool], x: Array, kernel: Array) -> tuple[Array, bool]:
        if mapped[1]:
            one = lambda x, kernel: reference.matvec(x, kernel, transposed=transposed)
            return jax.vmap(one, (0 if mapped[0] else None, 0))(x, kernel), True
        rows = x.reshape(-1, x.shape[-1])
        run = matvec if len(rows) <= FEW_ROWS else reference.matvec
        return run(rows, kernel, transposed=transposed).reshape(*x.shape[:-1], -1), True

    return call(x, kernel)


def packed_matvec(x: Array, codes: Array, scale: Array, *, bits: int) -> Array:
    """The product with packed weights for x [rows, in]; see `pallas_kernels.matvec.packed_matvec`.

    Under `vmap` over x alone the mapped axis joins the rows; mapped weights go through XLA.

    Returns:
        float32[rows, out].
    """

    @custom_vmap
    def call(x: Array, codes: Array, scale: Array) -> Array:
        shape = jax.ShapeDtypeStruct((x.shape[0], codes.shape[0]), jnp.float32)
        run = jax.ffi.ffi_call("effml_packed_matvec", shape)
        run = functools.partial(run, bits=np.int32(bits))
        return call_as_varying(run, x.astype(jnp.float32), codes, scale.astype(jnp.float32))

    @call.def_vmap
    def _(size: int, mapped: list[bool], x: Array, codes: Array, scale: Array) -> tuple[Array, bool]:
        plain = functools.partial(reference.packed_matvec, bits=bits)
        if mapped[1] or mapped[2]:
            return jax.vmap(plain, tuple(0 if one else None for one in mapped))(x, codes, scale), True
        rows = x.reshape(-1, x.shape[-1])
        run = functools.partial(packed_matvec, bits=bits) if len(rows) <= FEW_ROWS else plain
        return run(rows, codes, scale).reshape(*x.shape[:-1], -1), True

    return call(x, codes, scale)
