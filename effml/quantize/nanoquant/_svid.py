"""Signs times a rank-one magnitude, and the layers that are made of one such matrix."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float

from effml._validate import count

__all__ = ["checked_kernel", "matmul", "onebit_svid", "rank_one", "sign_row_scale", "signs", "svid"]

matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def signs(x: Array) -> Array:
    """+1 where `x` is at least 0, else -1: unlike `jnp.sign`, never 0.

    Example:
        >>> signs(jnp.array([0.0, -2.0])).tolist()
        [1.0, -1.0]
    """
    return jnp.where(x >= 0, 1, -1).astype(x.dtype)


def rank_one(matrix: Array, power_iters: int, *, from_rows: bool = False) -> tuple[Array, Array, Array]:
    """Norm-1 vectors u [m], v [n] and sigma with |matrix| ~ sigma u v^T: the first singular triple, by power iteration.

    The start is constant: |matrix| has no negative entry, so that its first singular vectors have none either and are
    never orthogonal to it. The vector that the iteration starts from is v, or u with `from_rows`.

    Example:
        >>> u, sigma, v = rank_one(jnp.array([[1.0, -2.0], [-2.0, 4.0]]), 5)
        >>> (sigma * jnp.outer(u, v)).round(4).tolist()
        [[1.0, 2.0], [2.0, 4.0]]
    """
    magnitude = jnp.abs(matrix)
    on_columns, on_rows = lambda v: matmul(magnitude, v), lambda u: matmul(u, magnitude)
    if from_rows:
        on_columns, on_rows = on_rows, on_columns
    size = matrix.shape[0 if from_rows else 1]
    kept = jnp.full(size, size**-0.5, matrix.dtype)
    for _ in range(power_iters):
        kept = _unit(on_rows(_unit(on_columns(kept))))
    other = on_columns(kept)
    sigma = jnp.linalg.norm(other)
    return (kept, sigma, _unit(other)) if from_rows else (_unit(other), sigma, kept)


def _unit(v: Array) -> Array:
    norm = jnp.linalg.norm(v)
    return v / jnp.where(norm > 0, norm, 1)


def svid(
    matrix: Float[Array, "m n"] | Any, power_iters: int = 5
) -> tuple[Float[Array, "m n"], Float[Array, " m"], Float[Array, " n"]]:
    r"""The sign-value-independent decomposition: the signs of a matrix, and the best rank-one fit of its magnitude.

    $$M \approx \mathrm{sign}(M) \odot (a\, b^T), \qquad
      a b^T = \sigma_1 u_1 v_1^T \text{ of } |M|, \quad \|b\| = 1$$

    Args:
        matrix: [m, n].
        power_iters: of |M|; its first singular value stands far out, so that few are enough.

    Returns:
        sign(M) * a b^T, with sign(0) = +1; a [m]; and b [n].

    Raises:
        ValueError: if it is no matrix, or no iteration is asked for.

    Source: Xu et al., "OneBit", arXiv 2402.11295.

    Example:
        >>> svid(jnp.array([[1.0, -2.0], [-2.0, 4.0]]))[0].round(4).tolist()
        [[1.0, -2.0], [-2.0, 4.0]]
    """
    matrix = jnp.asarray(matrix)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"matrix of shape {matrix.shape} must be [m, n], neither of them 0")
    if not jnp.issubdtype(matrix.dtype, jnp.floating):
        matrix = matrix.astype(jnp.float32)
    u, sigma, v = rank_one(matrix, count("power_iters", power_iters))
    return signs(matrix) * (sigma * u)[:, None] * v, sigma * u, v


def checked_kernel(kernel: Any) -> Array:
    """A kernel as a floating matrix of at least float32, or an error.

    Raises:
        ValueError: if it is no matrix, or not finite (which can't be seen inside `jax.jit`).
        TypeError: if it holds no real numbers.

    Example:
        >>> checked_kernel(jnp.ones(3))
        Traceback (most recent call last):
        ...
        ValueError: kernel of shape (3,) must be [in, out], neither of them 0
    """
    kernel = jnp.asarray(kernel)
    if kernel.ndim != 2 or 0 in kernel.shape:
        raise ValueError(f"kernel of shape {kernel.shape} must be [in, out], neither of them 0")
    if not jnp.issubdtype(kernel.dtype, jnp.floating):
        raise TypeError(f"kernel must be floating, it is {kernel.dtype}")
    kernel = kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32))
    if not isinstance(kernel, Tracer) and not bool(jnp.isfinite(kernel).all()):
        raise ValueError("kernel holds values that are not finite")
    return kernel


def onebit_svid(kernel: Any, power_iters: int = 20) -> Float[Array, "d_in d_out"]:
    """Signs with one scale for each input and each output, no factorisation: 1 + 16/in + 16/out bits per weight.

        K^ = diag(a) sign(K) diag(b)

    Args:
        kernel: [in, out], finite.
        power_iters: as for `svid`.

    Returns:
        [in, out], what the signs and scales stand for.

    Raises:
        ValueError: for a kernel that is not a finite matrix.
        TypeError: for one that is not floating.

    Source: Xu et al., "OneBit", arXiv 2402.11295, without its training.

    Example:
        >>> onebit_svid(jnp.array([[1.0, -2.0], [-2.0, 4.0]])).round(4).tolist()
        [[1.0, -2.0], [-2.0, 4.0]]
    """
    return _onebit(checked_kernel(kernel), count("power_iters", power_iters))


@functools.partial(jax.jit, static_argnames="power_iters")
def _onebit(kernel: Array, power_iters: int) -> Array:
    return svid(kernel, power_iters)[0]


def sign_row_scale(kernel: Any) -> Float[Array, "d_in d_out"]:
    """Signs with one scale for each output, the mean magnitude of its weights: 1 + 16/in bits per weight.

        K^[:, j] = sign(K[:, j]) mean_i |K[i, j]|

    Args:
        kernel: [in, out], finite.

    Returns:
        [in, out], what the signs and scales stand for.

    Raises:
        ValueError: for a kernel that is not a finite matrix.
        TypeError: for one that is not floating.

    Source: Rastegari et al., "XNOR-Net", arXiv 1603.05279.

    Example:
        >>> sign_row_scale(jnp.array([[1.0, -2.0], [-3.0, 4.0]])).tolist()
        [[2.0, -3.0], [-2.0, 3.0]]
    """
    kernel = checked_kernel(kernel)
    return signs(kernel) * jnp.abs(kernel).mean(0)
