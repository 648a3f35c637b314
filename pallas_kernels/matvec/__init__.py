r"""Products of a few rows with a large matrix, as decoding needs them: $y = x W$, with float32 accumulation.

Such a product is as fast as the matrix can be read. The native CPU form (`"cpu"`: C++, compiled on first use, see
`pallas_kernels._native`) reads it in one stream per core.

    >>> import jax.numpy as jnp
    >>> from pallas_kernels.matvec import matvec
    >>> matvec(jnp.ones((1, 2)), jnp.ones((2, 3))).tolist()
    [[2.0, 2.0, 2.0]]
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import _dispatch
from pallas_kernels.matvec import cpu, reference
from pallas_kernels.matvec.packed import packed_matvec

__all__ = ["FEW_ROWS", "FORMS", "availability", "matvec", "packed_matvec"]

FEW_ROWS = cpu.FEW_ROWS

FORMS = {"xla": None, "cpu": cpu.why_not}


def availability() -> list[str]:
    """What runs here and why not, for `effml doctor`.

    Example:
        >>> availability()[0]
        'xla      yes'
    """
    return _dispatch.describe("matvec")


def matvec(x: Array, kernel: Array, *, transposed: bool = False, implementation: str | None = None) -> Array:
    """`x @ kernel` for few rows.

    It can be jitted, mapped and differentiated (reverse mode); derivatives are XLA's.

    Args:
        x: [..., in], floating.
        kernel: [in, out], or [out, in] if `transposed`, floating.
        transposed: how the kernel lies; a tied head is an embedding table that lies transposed.
        implementation: `"xla"`, `"cpu"`, or None. None never fails: on a CPU it takes native code where that can be
            built, for bfloat16 and transposed kernels and at most 8 rows, or float32 ones that lie [in, out] and at
            most 2 rows (with more XLA is the faster one), and XLA otherwise.

    Returns:
        [..., out] in float32 (float64 if an argument is). Bits differ between implementations by the order of sums.

    Raises:
        ValueError: for shapes that don't fit, or an unknown implementation.
        TypeError: for an array that is not floating.
        NotImplementedError: if the named implementation can't run here or on these arrays, with the reason.

    Example:
        >>> x, kernel = jnp.ones((2, 1, 4)), jnp.ones((3, 4), jnp.bfloat16)
        >>> matvec(x, kernel, transposed=True).shape
        (2, 1, 3)
    """
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    for name, array in (("x", x), ("kernel", kernel)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} holds {array.dtype}, must hold floating point numbers")
    if kernel.ndim != 2:
        raise ValueError(f"kernel of shape {kernel.shape} must have 2 axes")
    inputs, outputs = kernel.shape[::-1] if transposed else kernel.shape
    if x.ndim < 1 or x.shape[-1] != inputs:
        raise ValueError(f"x of shape {x.shape} must end with the {inputs} inputs of kernel {kernel.shape}")
    rows = x.reshape(math.prod(x.shape[:-1]), inputs)
    y = jnp.asarray(_product(rows, kernel, transposed, implementation))
    return y.reshape(*x.shape[:-1], outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: Array, kernel: Array, transposed: bool, implementation: str | None) -> Array:
    forms = {
        "xla": functools.partial(reference.matvec, transposed=transposed),
        "cpu": functools.partial(cpu.matvec, transposed=transposed),
    }
    return _dispatch.choose(implementation, forms, _reasons(x, kernel, transposed, implementation))(x, kernel)


def _reasons(x: Array, kernel: Array, transposed: bool, implementation: str | None) -> dict[str, str]:
    if implementation == "xla":
        return {}
    reason = None
    for name, array in (("x", x), ("kernel", kernel)):
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            reason = f"{name} is {array.dtype}, not float32 or bfloat16"
        elif not array.size:
            reason = f"{name} of shape {array.shape} is empty"
    plain = kernel.dtype == jnp.float32 and not transposed
    if implementation is None and len(x) > (2 if plain else FEW_ROWS):
        reason = f"{len(x)} rows"
    reason = reason or cpu.why_not()
    return {"cpu": reason} if reason else {}


def _forward(x: Array, kernel: Array, transposed: bool, implementation: str | None) -> tuple[Array, tuple]:
    return _product(x, kernel, transposed, implementation), (x, kernel)


def _backward(transposed: bool, implementation: str | None, saved: tuple, dy: Array) -> tuple[Array, Array]:
    del implementation
    x, kernel = saved
    _, pullback = jax.vjp(functools.partial(reference.matvec, transposed=transposed), x, kernel)
    return pullback(dy)


_product.defvjp(_forward, _backward)
