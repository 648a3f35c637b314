r"""A kernel as two binary factors and two scale vectors.

$$K \approx \mathrm{diag}(s_\mathrm{in})\, V U\, \mathrm{diag}(s_\mathrm{out}), \qquad
  V \in \{-1, +1\}^{\mathrm{in} \times r},\; U \in \{-1, +1\}^{r \times \mathrm{out}}$$

All initialisers minimise the weighted squared error, with second moments of inputs and of output gradients,

$$\lVert D_\mathrm{in} (\hat K - K) D_\mathrm{out} \rVert_F^2, \qquad
  D_\mathrm{in} = \mathrm{diag}\sqrt{\text{in\_sq}},\; D_\mathrm{out} = \mathrm{diag}\sqrt{\text{out\_sq}}$$

and give the same `BinaryFactors`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from effml._validate import count, one_of, real
from effml.quantize.nanoquant import _admm
from effml.quantize.nanoquant._rank import random_key
from effml.quantize.nanoquant._svid import (
    checked_kernel,
    matmul,
    onebit_svid,
    sign_row_scale,
    signs,
    svid,
)

__all__ = [
    "SCHEDULES",
    "BinaryFactors",
    "dbf_admm",
    "dual_svid",
    "lb_admm",
    "onebit_svid",
    "reconstruct",
    "sign_row_scale",
    "svid",
    "weighted_error",
]

SCHEDULES = tuple(_admm.SCHEDULES)
_LEAST = 1e-12  # of the square root of a second moment


class BinaryFactors(NamedTuple):
    """Two real factors whose signs are the binary ones, and the scales.

    Attributes:
        v_lat: [in, r]; the sign of each entry is installed (+1 for 0), its magnitude says how sure that sign is.
        u_lat: [r, out]; likewise.
        s_in: [in].
        s_out: [out].
        err_installed: weighted squared error of diag(s_in) sign(v_lat) sign(u_lat) diag(s_out), relative to the
            weighted kernel's.
        err_history: [iters], that of the projections after each iteration, which have one more scale for each rank.
    """

    v_lat: Array
    u_lat: Array
    s_in: Array
    s_out: Array
    err_installed: Array
    err_history: Array


def reconstruct(factors: BinaryFactors) -> Float[Array, "d_in d_out"]:
    """The kernel that factors stand for: diag(s_in) sign(v_lat) sign(u_lat) diag(s_out).

    Example:
        >>> one = BinaryFactors(jnp.array([[0.3], [-2.0]]), jnp.array([[0.1, 0.0]]), jnp.array([1.0, 2.0]),
        ...                     jnp.array([3.0, 1.0]), jnp.array(0.0), jnp.array([]))
        >>> reconstruct(one).tolist()
        [[3.0, 1.0], [-6.0, -2.0]]
    """
    return factors.s_in[:, None] * matmul(signs(factors.v_lat), signs(factors.u_lat)) * factors.s_out


def weighted_error(kernel: Any, approximation: Any, in_sq: Any, out_sq: Any) -> Float[Array, ""]:
    """||D_in (K^ - K) D_out||^2 / ||D_in K D_out||^2, with D the square roots of the second moments.

    Args:
        kernel: [in, out].
        approximation: [in, out].
        in_sq: [in].
        out_sq: [out].

    Returns:
        A scalar; 0 for a kernel of zeros that is met.

    Raises:
        ValueError: for shapes that do not fit together.

    Example:
        >>> float(weighted_error(jnp.eye(2), jnp.zeros((2, 2)), jnp.ones(2), jnp.ones(2)))
        1.0
    """
    kernel, approximation, in_sq, out_sq = map(jnp.asarray, (kernel, approximation, in_sq, out_sq))
    shapes = (kernel.shape, approximation.shape, (*in_sq.shape, *out_sq.shape))
    if kernel.ndim != 2 or len(set(shapes)) > 1 or in_sq.ndim != 1:
        raise ValueError(
            f"kernel {kernel.shape}, approximation {approximation.shape}, in_sq {in_sq.shape} and out_sq "
            f"{out_sq.shape} must be [in, out], [in, out], [in] and [out]"
        )
    weights = jnp.outer(in_sq, out_sq)
    lost = (weights * jnp.square(approximation - kernel)).sum()
    all_of_it = (weights * jnp.square(kernel)).sum()
    return lost / jnp.where(all_of_it > 0, all_of_it, 1)


def lb_admm(
    key: Any,
    kernel: Any,
    in_sq: Any,
    out_sq: Any,
    rank: int,
    *,
    iters: int = 400,
    power_iters: int = 5,
    ridge: float | int | Any = 3e-2,
    schedule: str = "linear",
) -> BinaryFactors:
    r"""Latent-binary ADMM: alternating ridge regressions, each pulled towards signs times a rank-one magnitude.

    Args:
        key: of the random start.
        kernel: [in, out], finite.
        in_sq: [in], second moments of the inputs, above zero.
        out_sq: [out], second moments of the gradients of the outputs, above zero.
        rank: r, at most the smaller side.
        iters: K.
        power_iters: of each `svid`.
        ridge: added to the unit diagonal of each Gram matrix.
        schedule: of rho, one of `SCHEDULES`.

    Returns:
        `BinaryFactors`, in float32 (float64 for a float64 kernel).

    Raises:
        ValueError: for a kernel that is not a finite matrix, moments of another length or not finite and above zero,
            a rank out of range, settings out of range, or sizes whose squares the type can't hold.
        TypeError: for a kernel that is not floating, counts that are no integers, or what is no key.

    Source: NanoQuant, arXiv 2602.06694, section 3, with the details of its code.

    Example:
        >>> kernel = jax.random.normal(jax.random.key(0), (16, 24))
        >>> found = lb_admm(jax.random.key(1), kernel, jnp.ones(16), jnp.ones(24), 8, iters=50)
        >>> found.v_lat.shape, found.u_lat.shape, bool(found.err_installed < 0.6)
        ((16, 8), (8, 24), True)
    """
    kernel, in_sq, out_sq, rank = _checked(kernel, in_sq, out_sq, rank)
    one_of("schedule", schedule, SCHEDULES)
    _not_negative("ridge", ridge)
    penalties = _admm.SCHEDULES[schedule](np.arange(count("iters", iters)) / iters)
    return _lb_admm(
        random_key(key),
        kernel,
        in_sq,
        out_sq,
        jnp.asarray(ridge, kernel.dtype),
        jnp.asarray(penalties, kernel.dtype),
        rank=rank,
        power_iters=count("power_iters", power_iters),
    )


def dbf_admm(
    key: Any,
    kernel: Any,
    in_sq: Any,
    out_sq: Any,
    rank: int,
    *,
    iters: int = 260,
    power_iters: int = 5,
    ridge: float | int | Any = 3e-2,
) -> BinaryFactors:
    """Double binary factorisation: three inner steps of ADMM a factor, at a penalty that soon is 1.

    Its own layer has a third scale, on the rank axis; here it is left out, so that methods can be compared. The last
    entry of `err_history` has it.

    Args:
        key: of the random start.
        kernel: as for `lb_admm`.
        in_sq: likewise.
        out_sq: likewise.
        rank: likewise.
        iters: outer ones.
        power_iters: of each `svid`.
        ridge: share of each Gram matrix's mean diagonal that is added to it.

    Returns:
        `BinaryFactors`.

    Raises:
        ValueError: as `lb_admm` does.
        TypeError: likewise.

    Source: Boza and Macko, "Double Binary Factorization", arXiv 2505.11076, as NanoQuant's code has it.

    Example:
        >>> kernel = jax.random.normal(jax.random.key(0), (16, 24))
        >>> found = dbf_admm(jax.random.key(1), kernel, jnp.ones(16), jnp.ones(24), 8, iters=20)
        >>> found.v_lat.shape, found.u_lat.shape, bool(found.err_installed < 0.7)
        ((16, 8), (8, 24), True)
    """
    kernel, in_sq, out_sq, rank = _checked(kernel, in_sq, out_sq, rank)
    _not_negative("ridge", ridge)
    return _dbf_admm(
        random_key(key),
        kernel,
        in_sq,
        out_sq,
        jnp.asarray(ridge, kernel.dtype),
        rank=rank,
        iters=count("iters", iters),
        power_iters=count("power_iters", power_iters),
    )


def dual_svid(
    key: Any, kernel: Any, in_sq: Any, out_sq: Any, rank: int, *, power_iters: int = 5
) -> BinaryFactors:
    """The best real factors of the weighted kernel, each replaced by signs times a rank-one magnitude.

        D_in K D_out ~ (V_r S_r^1/2) (S_r^1/2 U_r^T)

    Args:
        key: not used; initialisers share a signature.
        kernel: as for `lb_admm`.
        in_sq: likewise.
        out_sq: likewise.
        rank: likewise.
        power_iters: of each `svid`.

    Returns:
        `BinaryFactors`; `err_history` has one entry, the error with a third scale on the rank axis.

    Raises:
        ValueError: as `lb_admm` does.
        TypeError: likewise.

    Source: LittleBit, arXiv 2506.13771, section 3.

    Example:
        >>> kernel = jax.random.normal(jax.random.key(0), (16, 24))
        >>> found = dual_svid(jax.random.key(1), kernel, jnp.ones(16), jnp.ones(24), 8)
        >>> found.v_lat.shape, found.u_lat.shape, bool(found.err_installed < 1)
        ((16, 8), (8, 24), True)
    """
    del key
    kernel, in_sq, out_sq, rank = _checked(kernel, in_sq, out_sq, rank)
    return _dual_svid(kernel, in_sq, out_sq, rank=rank, power_iters=count("power_iters", power_iters))


def _checked(kernel: Any, in_sq: Any, out_sq: Any, rank: int) -> tuple[Array, Array, Array, int]:
    kernel = checked_kernel(kernel)
    rank = count("rank", rank)
    if rank > min(kernel.shape):
        raise ValueError(
            f"rank={rank} must be at most {min(kernel.shape)}, the smaller side of {kernel.shape}"
        )
    moments = []
    for name, given, size in (("in_sq", in_sq, kernel.shape[0]), ("out_sq", out_sq, kernel.shape[1])):
        value = jnp.asarray(given, kernel.dtype)
        if value.shape != (size,):
            raise ValueError(
                f"{name} of shape {value.shape} must be [{size}] for a kernel of shape {kernel.shape}"
            )
        if not isinstance(value, Tracer):
            if not bool((jnp.isfinite(value) & (value >= 0)).all()):
                raise ValueError(f"{name} must be finite second moments, none below 0")
            if zeros := int((value == 0).sum()):
                raise ValueError(
                    f"{name} has {zeros} channels of 0, whose scales would be without bound: `shrink` the statistics "
                    "with gamma above 0"
                )
        moments.append(value)
    _check_size(kernel, *moments)
    return kernel, moments[0], moments[1], rank


def _check_size(kernel: Array, in_sq: Array, out_sq: Array) -> None:
    """Squares of the weighted kernel are summed, so that they must be neither 0 nor infinite."""
    if any(isinstance(one, Tracer) for one in (kernel, in_sq, out_sq)):
        return
    # Largest entries, in NumPy's float64, which holds what would overflow.
    largest = [float(np.abs(np.asarray(one)).max()) for one in (kernel, in_sq, out_sq)]
    square = largest[0] ** 2 * largest[1] * largest[2]
    info = jnp.finfo(kernel.dtype)
    if largest[0] and not 1e10 * float(info.tiny) < square < 1e-10 * float(info.max):
        raise ValueError(
            f"kernel (up to {largest[0]:.2g}), in_sq (up to {largest[1]:.2g}) and out_sq (up to {largest[2]:.2g}) are "
            f"too large or too small together for {kernel.dtype}: scale them"
        )


def _not_negative(name: str, value: Any) -> None:
    if not 0 <= real(name, value) < math.inf:
        raise ValueError(f"{name}={value!r} must be finite and not below 0")


@functools.partial(jax.jit, static_argnames=("rank", "power_iters"))
def _lb_admm(
    key: Any,
    kernel: Array,
    in_sq: Array,
    out_sq: Array,
    ridge: Array,
    penalties: Array,
    *,
    rank: int,
    power_iters: int,
) -> BinaryFactors:
    solve = lambda target: _admm.lb_solve(key, target, rank, penalties, ridge, power_iters)
    return _weighted(solve, kernel, in_sq, out_sq)


@functools.partial(jax.jit, static_argnames=("rank", "iters", "power_iters"))
def _dbf_admm(
    key: Any,
    kernel: Array,
    in_sq: Array,
    out_sq: Array,
    ridge: Array,
    *,
    rank: int,
    iters: int,
    power_iters: int,
) -> BinaryFactors:
    solve = lambda target: _admm.dbf_solve(key, target, rank, iters, ridge, power_iters)
    return _weighted(solve, kernel, in_sq, out_sq)


@functools.partial(jax.jit, static_argnames=("rank", "power_iters"))
def _dual_svid(kernel: Array, in_sq: Array, out_sq: Array, *, rank: int, power_iters: int) -> BinaryFactors:
    solve = lambda target: _admm.truncated_svd(target, rank, power_iters)
    return _weighted(solve, kernel, in_sq, out_sq)


def _weighted(solve: Any, kernel: Array, in_sq: Array, out_sq: Array) -> BinaryFactors:
    """Weights the kernel, solves with the longer side first, and takes the weights out again."""
    d_in = jnp.maximum(jnp.sqrt(in_sq), _LEAST)
    d_out = jnp.maximum(jnp.sqrt(out_sq), _LEAST)
    outputs_first = kernel.shape[1] >= kernel.shape[0]
    target = d_in[:, None] * kernel * d_out
    d_long, d_short = (d_out, d_in) if outputs_first else (d_in, d_out)
    solved = solve(target.T if outputs_first else target)

    long, short = solved.long.full() / d_long[:, None], solved.short.full() / d_short[:, None]
    size_long, size_short = jnp.linalg.norm(long), jnp.linalg.norm(short)
    balance = jnp.sqrt(jnp.where(size_long > 0, size_short / size_long, 1))
    balance = jnp.where(balance > 0, balance, 1)
    long_latent = solved.long_latent / d_long[:, None] * balance
    short_latent = solved.short_latent / d_short[:, None] / balance
    # The scales alone see the column norms of A divided out: latents keep them, as a measure of confidence.
    s_long = jnp.abs(solved.long.unit()).mean(1) / d_long * balance
    s_short = jnp.abs(short).mean(1) / balance

    if outputs_first:
        v_lat, u_lat, s_in, s_out = short_latent, long_latent.T, s_short, s_long
    else:
        v_lat, u_lat, s_in, s_out = long_latent, short_latent.T, s_long, s_short
    factors = BinaryFactors(v_lat, u_lat, s_in, s_out, jnp.zeros(()), solved.history)
    return factors._replace(err_installed=weighted_error(kernel, reconstruct(factors), in_sq, out_sq))
