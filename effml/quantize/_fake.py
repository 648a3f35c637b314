r"""Rounding that stays in floating point: what a quantised product would see, with gradients that pass through.

Rounding has no useful slope; the straight-through estimator gives it that of the identity, and every scale is a
constant to the gradient:

$$\hat x = x + \mathrm{stop}(s\,(q - z) - x)$$
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from effml._validate import count

__all__ = [
    "CLIPS",
    "FULL",
    "check_bits",
    "check_weight",
    "codes_of",
    "fake_quant_act",
    "fake_quant_weight",
    "group_count",
    "round_weight",
    "scale_of",
    "weight_scale",
]

FULL = 16
"""Bits that stand for no rounding at all."""

CLIPS = (None, "mse")
# SpinQuant's search: ratios 1, 0.99, ... above 0.2, and the error to this power.
_GRID, _SMALLEST, _POWER = 100, 0.2, 2.4
_TINY = 1e-30  # so that the logarithm of no error is a number
_LARGE = 1e37


def check_bits(argument: str, bits: Any) -> int:
    """Returns `bits` if numbers can be rounded to so many, or not at all (16).

    Raises:
        TypeError: if it is no integer.
        ValueError: naming `argument`, if it is not 2 ... 8 or 16.

    Example:
        >>> check_bits("weight_bits", 9)
        Traceback (most recent call last):
        ...
        ValueError: weight_bits=9 must be 2 to 8, or 16 for none
    """
    if isinstance(bits, bool) or not hasattr(bits, "__index__"):
        raise TypeError(f"{argument}={bits!r} must be an integer: 2 to 8, or 16 for none")
    whole = operator.index(bits)
    if not (2 <= whole <= 8 or whole == FULL):
        raise ValueError(f"{argument}={bits!r} must be 2 to 8, or 16 for none")
    return whole


def group_count(inputs: int, group_size: int | None) -> int:
    """How many scales an output has.

    Args:
        inputs: of the product.
        group_size: inputs that share a scale, a divisor of `inputs`; None is all of them.

    Raises:
        ValueError: if the groups do not fill the inputs evenly, with the nearest sizes that do.

    Example:
        >>> group_count(576, 64), group_count(576, None)
        (9, 1)
    """
    if group_size is None:
        return 1
    size = count("group_size", group_size)
    if inputs % size:
        divisors = [d for d in range(1, inputs + 1) if inputs % d == 0]
        near = sorted(sorted(divisors, key=lambda d: abs(d - size))[:4])
        raise ValueError(
            f"group_size={size} does not divide {inputs} inputs (nearest: {', '.join(map(str, near))})"
        )
    return inputs // size


def _through(x: Array, rounded: Array) -> Array:
    # The outermost code may stand for half a step more than the largest value, which near the end of the range is none.
    largest = float(jnp.finfo(x.dtype).max)
    rounded = jnp.clip(rounded, -largest, largest).astype(x.dtype)
    return x + jax.lax.stop_gradient(rounded - x)


def fake_quant_act(
    x: Float[Array, "*shape"] | Any,
    bits: int,
    *,
    sym: bool = False,
    axis: int = -1,
    group_size: int | None = None,
) -> Float[Array, "*shape"]:
    r"""Activations rounded with one dynamic scale per row (token), or per group of a row.

    Asymmetric: $s = (\max(x, 0) - \min(x, 0)) / (2^b - 1)$, $z = \mathrm{round}(-\min(x, 0)/s)$,
    $q = \mathrm{clip}(\mathrm{round}(x/s) + z, 0, 2^b - 1)$, $\hat x = s\,(q - z)$. Symmetric:
    $s = \max|x| / (2^{b-1} - 1)$, $q$ in $-2^{b-1} \ldots 2^{b-1} - 1$, $z = 0$. A row of zeros stays zero; one with
    a value that is not finite becomes NaN.

    Args:
        x: any shape.
        bits: 2 to 8; 16 returns `x`.
        sym: whether the grid is symmetric about zero.
        axis: along which the values share a scale.
        group_size: values that share a scale, a divisor of that axis; None is all of it.

    Returns:
        The shape and dtype of `x`; its gradient is the identity.

    Raises:
        ValueError: for other bits, or groups that do not fit.
        TypeError: for bits that are no integer, or an `x` that is not floating-point.

    Source: SpinQuant's quantiser with clip ratio 1 (Liu et al., arXiv 2405.16406), as ReSpinQuant uses it.

    Example:
        >>> fake_quant_act(jnp.array([[0.0, 0.4, 1.0, 3.0]]), 2).tolist()
        [[0.0, 0.0, 1.0, 3.0]]
    """
    if check_bits("bits", bits) == FULL or _nothing("x", x):
        return x
    grouped, restore = _grouped(jax.lax.stop_gradient(x), axis, group_size)
    if sym:
        top = 2 ** (bits - 1)
        scale = _guarded(jnp.abs(grouped).max(-1, keepdims=True) / (top - 1))
        rounded = scale * jnp.clip(jnp.round(_over(grouped, scale)), -top, top - 1)
    else:
        high = jnp.maximum(grouped.max(-1, keepdims=True), 0)
        low = jnp.minimum(grouped.min(-1, keepdims=True), 0)
        steps = 2**bits - 1
        span = high - low
        # Halves that are finite can have a difference that is not.
        scale = _guarded(jnp.where(jnp.isinf(span), high / steps - low / steps, span / steps))
        zero = jnp.round(_over(-low, scale))
        rounded = scale * (jnp.clip(jnp.round(_over(grouped, scale)) + zero, 0, steps) - zero)
    return _through(x, restore(rounded))


def _nothing(name: str, x: Any) -> bool:
    """Whether there is nothing to round; raises where there is nothing that can be."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} is {x.dtype}; only real floating-point numbers are rounded")
    return x.size == 0


def _grouped(x: Array, axis: int, group_size: int | None) -> tuple[Array, Any]:
    """[..., groups, group] in float32 at least, and the way back."""
    moved = jnp.moveaxis(x, axis, -1)
    groups = group_count(moved.shape[-1], group_size)
    wide = moved.astype(jnp.promote_types(x.dtype, jnp.float32))
    split = wide.reshape(*moved.shape[:-1], groups, moved.shape[-1] // groups)
    return split, lambda y: jnp.moveaxis(y.reshape(moved.shape), -1, axis)


def _guarded(scale: Array) -> Array:
    """1 for zero, so that zeros are divided by something; NaN is not zero and stays."""
    return jnp.where(scale == 0, 1.0, scale)


def _over(x: Array, scale: Array) -> Array:
    """x / scale; compiled, that may be a product with 1 / scale, which is 0 for the largest scales."""
    smaller = jnp.where(scale > _LARGE, 2.0**-8, 1.0)
    return (x * smaller) / (scale * smaller)


def weight_scale(
    kernel: Float[Array, "inputs outputs"],
    bits: int,
    *,
    clip: str | None = "mse",
    group_size: int | None = None,
) -> Float[Array, "outputs groups"]:
    r"""The symmetric scale of every output channel, or of every group of its inputs.

    $s = c \max|w| / (2^{b-1} - 1)$. With `clip="mse"` the ratio c of each channel is that of 1, 0.99, ... 0.21 with
    the smallest $\sum |\hat w - w|^{2.4}$; with None it is 1.

    Args:
        kernel: [in, out].
        bits: 2 to 8.
        clip: "mse" or None.
        group_size: inputs that share a scale; None is all of them.

    Returns:
        float32; 1 for a channel of zeros.

    Raises:
        ValueError: for other bits or clips, or groups that do not fit.

    Source: SpinQuant's weight quantiser; the grid is that of GPTQ's code.

    Example:
        >>> weight_scale(jnp.array([[0.5], [-1.0]]), 2, clip=None).tolist()
        [[1.0]]
    """
    check_weight(bits, clip)
    return scale_of(kernel, 2 ** (bits - 1), clip, group_size)


def scale_of(kernel: Array, top: Any, clip: str | None, group_size: int | None) -> Array:
    """`weight_scale` of 2 `top` codes, which may be traced: one program then serves all numbers of bits."""
    grouped, _ = _grouped(jax.lax.stop_gradient(kernel), 0, group_size)
    return _scale_of(grouped, top, clip).astype(jnp.float32)


def check_weight(bits: int, clip: str | None) -> None:
    """Raises where weights can't be rounded so."""
    if check_bits("bits", bits) == FULL:
        raise ValueError("bits=16 leaves weights as they are: there is no scale")
    if clip not in CLIPS:
        raise ValueError(f"clip={clip!r} is not known (allowed: 'mse', None)")


def _scale_of(grouped: Array, top: Any, clip: str | None) -> Array:
    full = jnp.abs(grouped).max(-1) / (top - 1)
    if clip is None:
        return _guarded(full)
    smaller = jnp.where(full > _LARGE, 2.0**-8, 1.0)
    grouped, full = grouped * smaller[..., None], full * smaller
    steps = round((1 - _SMALLEST) * _GRID)

    def improve(step: Any, best: tuple[Array, Array]) -> tuple[Array, Array]:
        scale = _guarded(full * (1 - step / _GRID))
        wrong = scale[..., None] * jnp.clip(jnp.round(grouped / scale[..., None]), -top, top - 1) - grouped
        # Several times as fast as a power, on a CPU.
        error = jnp.exp2(_POWER * jnp.log2(jnp.abs(wrong) + _TINY)).sum(-1)
        better = error < best[1]
        return jnp.where(better, scale, best[0]), jnp.where(better, error, best[1])

    start = (_guarded(full), jnp.full(full.shape, jnp.inf, full.dtype))
    return jax.lax.fori_loop(0, steps, improve, start)[0] / smaller


def round_weight(
    kernel: Float[Array, "inputs outputs"], scale: Float[Array, "outputs groups"], bits: int
) -> Int[Array, "inputs outputs"]:
    """The nearest codes, int8 in -2^(bits-1) ... 2^(bits-1) - 1: what `PackedTensor.pack` takes.

    Args:
        kernel: [in, out].
        scale: from `weight_scale`.
        bits: 2 to 8.

    Example:
        >>> round_weight(jnp.array([[0.6], [-1.0], [0.2]]), jnp.array([[0.5]]), 3).ravel().tolist()
        [1, -2, 0]
    """
    return codes_of(kernel, scale, 2 ** (bits - 1))


def codes_of(kernel: Array, scale: Array, top: Any) -> Array:
    """`round_weight` to 2 `top` codes, which may be traced."""
    inputs = kernel.shape[0]
    rows = jnp.repeat(scale.T, -(-inputs // scale.shape[1]), axis=0)[:inputs]
    return jnp.clip(jnp.round(_over(kernel.astype(jnp.float32), rows)), -top, top - 1).astype(jnp.int8)


def fake_quant_weight(
    kernel: Float[Array, "*shape"] | Any,
    bits: int,
    *,
    clip: str | None = "mse",
    axis: int = 0,
    group_size: int | None = None,
) -> Float[Array, "*shape"]:
    r"""Weights rounded symmetrically, with one scale for each output channel (or group of its inputs).

    $\hat w = s\,\mathrm{clip}(\mathrm{round}(w/s), -2^{b-1}, 2^{b-1} - 1)$ with the scale of `weight_scale`.

    Args:
        kernel: [in, out], or any shape with the inputs on `axis`.
        bits: 2 to 8; 16 returns `kernel`.
        clip: "mse" searches a clip ratio for each scale, None clips nothing.
        axis: of the inputs.
        group_size: inputs that share a scale; None is all of them.

    Returns:
        The shape and dtype of `kernel`; its gradient is the identity.

    Raises:
        ValueError: for other bits or clips, or groups that do not fit.

    Example:
        >>> fake_quant_weight(jnp.array([[0.4], [-1.0], [0.6]]), 2, clip=None).ravel().tolist()
        [0.0, -1.0, 1.0]
    """
    if check_bits("bits", bits) == FULL or _nothing("kernel", kernel):
        return kernel
    check_weight(bits, clip)
    grouped, restore = _grouped(jax.lax.stop_gradient(kernel), axis, group_size)
    top = 2 ** (bits - 1)
    scale = _scale_of(grouped, top, clip)[..., None]
    return _through(kernel, restore(scale * jnp.clip(jnp.round(_over(grouped, scale)), -top, top - 1)))
