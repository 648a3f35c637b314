r"""The rank that a rate pays for, and the rate that a rank costs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effml._validate import count, one_of, real

__all__ = ["bits_per_weight", "nanoquant_rank", "random_key"]

_TOLERANCE = 1.02  # of the rate that was asked for


def bits_per_weight(d_in: int, d_out: int, rank: int, *, num_scales: int = 2, scale_bits: int = 16) -> float:
    r"""Bits that signs and scales take, for each weight they stand for.

    $$\frac{r\,(d_\mathrm{in} + d_\mathrm{out}) + b_s\,(d_\mathrm{in} + d_\mathrm{out} + [3\ \text{scales}]\,r)}
           {d_\mathrm{in}\, d_\mathrm{out}}$$

    Args:
        d_in: inputs of the kernel.
        d_out: outputs of the kernel.
        rank: r.
        num_scales: 2 (inputs and outputs), or 3 (the rank axis as well).
        scale_bits: b_s, of one scale.

    Returns:
        The realised rate; padding of packed words is not in it (the rank is a multiple of 32 where it matters).

    Raises:
        ValueError: for sizes that are not above zero, or another number of scales.
        TypeError: for sizes that are no integers.

    Source: the code of NanoQuant, arXiv 2602.06694.

    Example:
        >>> bits_per_weight(256, 256, 96)
        0.875
    """
    d_in, d_out, rank = count("d_in", d_in), count("d_out", d_out), count("rank", rank)
    scales = _scales(d_in, d_out, rank, num_scales)
    return (rank * (d_in + d_out) + count("scale_bits", scale_bits) * scales) / (d_in * d_out)


def nanoquant_rank(
    d_in: int,
    d_out: int,
    bpw: float | int | Any,
    *,
    num_scales: int = 2,
    scale_bits: int = 16,
    multiple: int = 32,
    min_rank: int = 32,
    allow_over: bool = False,
) -> int:
    r"""The largest rank whose signs and scales fit in a rate, scales included.

    $$r = \Big\lfloor \frac{b\, d_\mathrm{in} d_\mathrm{out} - b_s (d_\mathrm{in} + d_\mathrm{out})}
                           {d_\mathrm{in} + d_\mathrm{out} + [3\ \text{scales}]\, b_s} \Big\rfloor_{\text{multiple}}$$

    then at least `min_rank` and at most the smaller side. The floor can leave a good part of the rate unused on small
    kernels: report `bits_per_weight` of the rank, not what was asked for.

    Args:
        d_in: inputs of the kernel.
        d_out: outputs of the kernel.
        bpw: bits per weight asked for.
        num_scales: 2 or 3.
        scale_bits: of one scale.
        multiple: of the rank: 32 fills packed words, 8 wastes less of a small kernel's rate.
        min_rank: the least rank; above the smaller side it has no effect.
        allow_over: accept a rank that `min_rank` lifts above the rate.

    Returns:
        The rank.

    Raises:
        ValueError: for a rate that is not finite and above zero, or one that the least rank exceeds by more than 2%.
        TypeError: for sizes that are no integers, or a rate that is no number.

    Source: the code of NanoQuant, arXiv 2602.06694.

    Example:
        >>> nanoquant_rank(4096, 4096, 1.0), nanoquant_rank(128, 128, 1.0, multiple=8)
        (2016, 48)
        >>> nanoquant_rank(128, 128, 0.55)
        Traceback (most recent call last):
        ...
        ValueError: bpw=0.55 can't be reached for 128 x 128: rank 32, the least, takes 0.75 bits per weight; ...
    """
    d_in, d_out = count("d_in", d_in), count("d_out", d_out)
    scale_bits, multiple = count("scale_bits", scale_bits), count("multiple", multiple)
    min_rank = count("min_rank", min_rank)
    if not 0 < real("bpw", bpw) < math.inf:
        raise ValueError(f"bpw={bpw!r} must be finite and above 0")
    fixed = scale_bits * _scales(d_in, d_out, 0, num_scales)
    each = d_in + d_out + (scale_bits if num_scales == 3 else 0)
    rank = math.floor((bpw * d_in * d_out - fixed) / each) // multiple * multiple
    rank = min(max(rank, min_rank), d_in, d_out)
    realised = bits_per_weight(d_in, d_out, rank, num_scales=num_scales, scale_bits=scale_bits)
    if realised > bpw * _TOLERANCE and not allow_over:
        raise ValueError(
            f"bpw={bpw} can't be reached for {d_in} x {d_out}: rank {rank}, the least, takes {realised:.4g} bits per "
            "weight; ask for that, lower multiple and min_rank, or pass allow_over=True"
        )
    return rank


def random_key(key: Any) -> Any:
    """One key of `jax.random.key` (also for one of `jax.random.PRNGKey`).

    Example:
        >>> random_key(0)
        Traceback (most recent call last):
        ...
        TypeError: key=0 must be one jax.random.key
    """
    typed = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    raw = not typed and getattr(key, "dtype", None) == np.uint32 and np.ndim(key) == 1
    if not raw and (not typed or key.shape):
        given = f" of shape {key.shape}" if typed else f"={key!r}"
        raise TypeError(f"key{given} must be one jax.random.key")
    return jax.random.wrap_key_data(key) if raw else key


def _scales(d_in: int, d_out: int, rank: int, num_scales: int) -> int:
    one_of("num_scales", str(num_scales), ("2", "3"))
    return d_in + d_out + (rank if num_scales == 3 else 0)
