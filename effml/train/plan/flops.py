"""Multiplications and additions of a traced function: loops multiplied, before anything is split over devices.

Counted from the jaxpr, hence from what was written, recomputation included; XLA's own count sees each loop body
once. `effml.train.plan.hlo` counts the compiled program of one device instead: the difference between the two (times
the devices) is work that the partitioner repeats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax

__all__ = ["count"]


def count(jaxpr: Any) -> int:
    """FLOPs of all matrix products and convolutions.

    A `scan` counts its length times, a `shard_map` once for each device it runs on, of the branches of a `cond` the
    dearest; a `while` counts once, because its trips are data.

    Args:
        jaxpr: a jaxpr, closed or not, such as `jax.make_jaxpr(f)(x)` or `jax.jit(f).trace(x).jaxpr`.

    Returns:
        The number of multiplications and additions, over all devices.

    Example:
        >>> import jax.numpy as jnp
        >>> power = lambda a: jax.lax.fori_loop(0, 5, lambda _, x: x @ a, a)
        >>> count(jax.make_jaxpr(power)(jnp.ones((4, 4)))) == 5 * 2 * 4**3
        True
    """
    total = 0
    for equation in _plain(jaxpr).eqns:
        name = equation.primitive.name
        if name == "dot_general":
            total += _dot(equation)
        elif name == "conv_general_dilated":
            total += _convolution(equation)
        inner = [count(body) for body in _inside(equation)]
        if name == "cond":
            total += max(inner, default=0)
        elif name == "scan":
            total += equation.params["length"] * sum(inner)
        elif name == "shard_map":
            total += _devices(equation.params) * sum(inner)
        else:
            total += sum(inner)
    return total


def _plain(jaxpr: Any) -> Any:
    return jaxpr if hasattr(jaxpr, "eqns") else jaxpr.jaxpr


def _inside(equation: Any) -> Iterator[Any]:
    is_jaxpr = lambda value: hasattr(value, "eqns") or hasattr(value, "jaxpr")
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
        if is_jaxpr(value):
            yield value


def _dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def _convolution(equation: Any) -> int:
    numbers, kernel = equation.params["dimension_numbers"].rhs_spec, equation.invars[1].aval.shape
    window = math.prod(kernel[axis] for axis in numbers[1:])
    return 2 * math.prod(equation.outvars[0].aval.shape) * window


def _devices(params: Any) -> int:
    """Devices that run a `shard_map`'s body: those of its manual axes (the others stay with the partitioner)."""
    mesh = params["mesh"]
    manual = params.get("manual_axes") or mesh.axis_names
    return math.prod(mesh.shape[axis] for axis in manual)
