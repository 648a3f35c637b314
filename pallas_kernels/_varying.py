"""Inside `jax.shard_map`: over which mesh axes an array varies, and types that say so.

`shard_map` checks that a loop's carry, a kernel's output and a `custom_vjp`'s gradients vary as declared; outside of it
everything here does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

__all__ = ["call_as_varying", "gradient_like", "typed_like", "varying_axes"]


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The mesh axes over which one of `arrays` varies.

    Example:
        >>> varying_axes(1.0)
        frozenset()
    """
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))


def typed_like(shape: tuple[int, ...], dtype: Any, *arrays: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a kernel's output that varies as `arrays` do.

    Example:
        >>> typed_like((2,), "float32")
        ShapeDtypeStruct(shape=(2,), dtype=float32)
    """
    varying = varying_axes(*arrays)
    if not varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    kind = type(jax.typeof(arrays[0]).manual_axis_type)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind(varying=varying))


def call_as_varying(call: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """`call(*arrays)` for a call into native code, whose arguments must all vary alike and whose result has no axes.

    Example:
        >>> float(call_as_varying(lambda a, b: a + b, 1.0, 2.0))
        3.0
    """
    axes = varying_axes(*arrays)
    if not axes:
        return call(*arrays)
    alike = [lax.pcast(a, tuple(sorted(axes - varying_axes(a))), to="varying") for a in arrays]
    return lax.pcast(call(*alike), tuple(sorted(axes)), to="varying")


def gradient_like(gradient: jax.Array, primal: jax.Array) -> jax.Array:
    """The gradient in the primal's dtype, summed over the mesh axes that it varies over and the primal does not.

    Example:
        >>> import jax.numpy as jnp
        >>> gradient_like(jnp.ones(2), jnp.ones(2, jnp.bfloat16)).dtype
        dtype(bfloat16)
    """
    axes = tuple(sorted(varying_axes(gradient) - varying_axes(primal)))
    return (lax.psum(gradient, axes) if axes else gradient).astype(primal.dtype)
