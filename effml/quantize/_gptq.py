r"""Rounding one input after the other, with the rest of the kernel making up for each error (GPTQ).

For a layer that reads x, what counts is $\mathrm{tr}\,(\hat K - K)^T H (\hat K - K)$ with
$H = \mathbb{E}[x^T x]$. With the upper triangular U of $H^{-1} = U^T U$, inputs are rounded in order, and each error
is spread over those still to come:

$$e_i = (K_i - \hat K_i) / U_{ii}, \qquad K_j \leftarrow K_j - U_{ij}\, e_i \quad (j > i)$$
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from effml._validate import count
from effml.quantize._fake import check_weight, codes_of, scale_of
from effml.quantize._host import on_host
from effml.quantize.respinquant._forward import check_number

__all__ = ["RoundedKernel", "gptq", "rtn"]

_LARGEST = 1e18
_LARGEST_DAMPING = 0.1  # of the mean diagonal, before a Hessian counts as broken


class RoundedKernel(NamedTuple):
    """A kernel whose entries are integers times scales.

    Attributes:
        kernel: float32[in, out], what the codes stand for.
        scale: float32[out, groups].
        codes: int8[in, out].
    """

    kernel: Array
    scale: Array
    codes: Array


# Half the number of codes is traced, so that all numbers of bits share one program.
_scale = jax.jit(scale_of, static_argnames=("clip", "group_size"))


def rtn(kernel: Any, bits: int, *, clip: str | None = "mse", group_size: int | None = None) -> RoundedKernel:
    """Every entry to its nearest code: round to nearest.

    Args:
        kernel: [in, out], floating.
        bits: 2 to 8.
        clip: as in `weight_scale`.
        group_size: likewise.

    Returns:
        A `RoundedKernel`.

    Raises:
        TypeError: for a complex kernel, or under `jit`.
        ValueError: for a kernel that is not a finite matrix, other bits or clips, or groups that do not fit.

    Example:
        >>> rtn(np.array([[0.4], [-1.0], [0.6]]), 2, clip=None).kernel.ravel().tolist()
        [0.0, -1.0, 1.0]
    """
    check_weight(bits, clip)
    kernel, top = _checked("rtn", kernel), 2 ** (bits - 1)
    scale = _scale(kernel, top, clip=clip, group_size=group_size)
    return RoundedKernel(*_nearest(kernel, scale, top))


def _checked(function: str, kernel: Any) -> Array:
    on_host(function, kernel)
    if np.iscomplexobj(kernel):
        raise TypeError("kernel is complex; only real numbers are rounded")
    kernel = jnp.asarray(kernel, jnp.float32)
    if kernel.ndim != 2 or 0 in kernel.shape:
        raise ValueError(f"kernel of shape {kernel.shape} must be [in, out], neither of them 0")
    if not bool(jnp.isfinite(kernel).all()):
        raise ValueError("kernel holds values that are not finite")
    if float(jnp.abs(kernel).max()) > _LARGEST:
        raise ValueError(
            f"kernel holds values beyond {_LARGEST:g}, whose sums and squares float32 does not have"
        )
    return kernel


@jax.jit
def _nearest(kernel: Array, scale: Array, top: Any) -> tuple[Array, Array, Array]:
    codes = codes_of(kernel, scale, top)
    return _times(codes, scale), scale, codes


def _times(codes: Array, scale: Array) -> Array:
    return codes * jnp.repeat(scale.T, -(-len(codes) // scale.shape[1]), axis=0)[: len(codes)]


def gptq(
    kernel: Any,
    hessian: Any,
    bits: int,
    *,
    block: int = 128,
    percdamp: float | int | Any = 0.01,
    clip: str | None = "mse",
    group_size: int | None = None,
) -> RoundedKernel:
    """Rounds a kernel so that its products with typical inputs change least.

    Scales are chosen first, as round to nearest chooses them. Inputs that were never seen (a zero on the Hessian's
    diagonal) are rounded to nearest. The factorisation runs on the host in float64, the sweep is one compiled program
    for each shape.

    Args:
        kernel: [in, out], floating.
        hessian: [in, in], sum or mean of x^T x over what the product reads.
        bits: 2 to 8.
        block: inputs between two updates of the rest of the kernel; it changes speed alone.
        percdamp: added to the diagonal, as a share of its mean; raised tenfold where that is not enough.
        clip: as in `weight_scale`.
        group_size: likewise.

    Returns:
        A `RoundedKernel`.

    Raises:
        TypeError: for a complex kernel, or under `jit`.
        ValueError: for shapes that don't fit, values that are not finite, a Hessian that is not positive semidefinite,
            other bits or clips, or groups that do not fit.

    Source: Frantar et al., "GPTQ", arXiv 2210.17323, algorithm 1, with fixed scales.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(64, 8)) @ np.random.default_rng(1).normal(size=(8, 8))
        >>> kernel = np.random.default_rng(2).normal(size=(8, 4))
        >>> error = [float(np.linalg.norm(x @ (np.asarray(one.kernel) - kernel)))
        ...          for one in (gptq(kernel, x.T @ x, 3), rtn(kernel, 3))]
        >>> error[0] < error[1]
        True
    """
    on_host("gptq", hessian)
    check_weight(bits, clip)
    kernel, block, top = _checked("gptq", kernel), count("block", block), 2 ** (bits - 1)
    check_number("percdamp", percdamp)
    if not 0 < percdamp < np.inf:
        raise ValueError(f"percdamp={percdamp!r} must be finite and above 0")
    factor = _inverse_factor(np.asarray(hessian, np.float64), kernel.shape[0], float(percdamp))
    scale = _scale(kernel, top, clip=clip, group_size=group_size)
    return RoundedKernel(*_sweep(kernel, jnp.asarray(factor, jnp.float32), scale, top, block=block))


def _inverse_factor(hessian: np.ndarray, inputs: int, percdamp: float) -> np.ndarray:
    """The upper triangular U with inv(H + damping) = U^T U, each row divided by its diagonal entry."""
    import scipy.linalg

    if hessian.shape != (inputs, inputs):
        raise ValueError(f"hessian of shape {hessian.shape} must be [{inputs}, {inputs}]")
    if not np.isfinite(hessian).all():
        raise ValueError("hessian holds values that are not finite")
    largest = np.abs(hessian).max(initial=0.0)
    if np.abs(hessian - hessian.T).max(initial=0.0) > 1e-4 * largest:
        raise ValueError("hessian is not symmetric, so it is no sum of squares")
    diagonal = np.diag(hessian).copy()
    if diagonal.min() < 0:
        raise ValueError("hessian has a negative diagonal, so it is no sum of squares")
    # Inputs never seen have nothing to lose: alone on the diagonal they leave the others alone.
    unseen = diagonal == 0
    mean = diagonal.mean() or 1.0
    damping = percdamp
    while damping <= max(percdamp, _LARGEST_DAMPING):
        damped = hessian + np.diag(np.where(unseen, mean, damping * mean))
        try:
            # In reverse order, H = V V^T with V upper triangular; then U is the inverse of V.
            lower = scipy.linalg.cholesky(damped[::-1, ::-1], lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            damping *= 10
            continue
        upper = scipy.linalg.solve_triangular(
            lower[::-1, ::-1], np.eye(inputs), lower=False, check_finite=False
        )
        return upper / np.diag(upper)[:, None]
    raise ValueError(
        "hessian is not positive semidefinite: an eigenvalue lies further below 0 than rounding explains"
    )


@functools.partial(jax.jit, static_argnames=("block",))
def _sweep(kernel: Array, factor: Array, scale: Array, top: Any, *, block: int) -> tuple[Array, Array, Array]:
    inputs, outputs = kernel.shape
    block = min(block, inputs)
    blocks = -(-inputs // block)
    room = blocks * block - inputs
    rows = jnp.repeat(scale.T, -(-inputs // scale.shape[1]), axis=0)[:inputs]
    rows = jnp.pad(rows, ((0, room), (0, 0)), constant_values=1.0)
    factor = jnp.pad(factor, ((0, room), (0, room)))

    def round_block(rest: Array, start: Array) -> tuple[Array, Array]:
        own = jax.lax.dynamic_slice(rest, (start, 0), (block, outputs))
        steps = jax.lax.dynamic_slice(rows, (start, 0), (block, outputs))
        strip = jax.lax.dynamic_slice(factor, (start, 0), (block, blocks * block))
        inner = jax.lax.dynamic_slice(strip, (0, start), (block, block))

        def round_row(carry: tuple[Array, Array, Array], i: Array) -> tuple[tuple[Array, Array, Array], None]:
            own, codes, errors = carry
            code = jnp.clip(jnp.round(own[i] / steps[i]), -top, top - 1)
            error = own[i] - code * steps[i]
            later = jnp.where(jnp.arange(block) > i, inner[i], 0.0)
            return (own - later[:, None] * error, codes.at[i].set(code), errors.at[i].set(error)), None

        zeros = jnp.zeros_like(own)
        (_, codes, errors), _ = jax.lax.scan(round_row, (own, zeros, zeros), jnp.arange(block))
        strip = jnp.where(jnp.arange(blocks * block) >= start + block, strip, 0.0)
        return rest - jnp.matmul(strip.T, errors, precision=jax.lax.Precision.HIGHEST), codes

    padded = jnp.pad(kernel, ((0, room), (0, 0)))
    _, codes = jax.lax.scan(round_block, padded, jnp.arange(blocks) * block)
    codes = codes.reshape(blocks * block, outputs)[:inputs].astype(jnp.int8)
    return _times(codes, scale), scale, codes
