"""The Cayley transform, and gradient descent on orthogonal matrices by it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

__all__ = ["CayleyStep", "cayley", "cayley_step", "orthogonality_error"]


_MOST_ITERATIONS = 64


class CayleyStep(NamedTuple):
    """What a step on orthogonal matrices gives.

    Attributes:
        matrix: [..., n, n], the new matrices.
        step: [...], the step that was taken, at most the one asked for.
    """

    matrix: Array
    step: Array


def cayley(
    skew: Float[Array, "*batch n n"] | Any, *, exact: bool = True, iters: int | None = None
) -> Float[Array, "*batch n n"]:
    r"""The orthogonal matrix of a skew one.

    $$Y = (I - W/2)^{-1}(I + W/2) \qquad\text{or}\qquad Y \leftarrow I + W(I + Y)/2 \text{ from } Y = I + W$$

    The fixed-point form is products alone and converges for ||W|| < 2, by a factor ||W||/2 each time: near 2 it ends
    before it is there.

    Args:
        skew: [..., n, n] with W^T = -W; lower precisions are computed in float32.
        exact: solve, or iterate.
        iters: iterations of the fixed-point form. None goes on until nothing changes, 64 times at most, and has no
            derivative in reverse mode; a number has.

    Returns:
        [..., n, n] in the dtype of `skew`; of determinant +1.

    Raises:
        ValueError: matrices that are not square, or iters < 1.
        TypeError: an integer, boolean or complex matrix.

    Source: Li, Li, Todorovic, "Efficient Riemannian optimization on the Stiefel manifold via the Cayley transform",
    arXiv 2002.01113, for the iteration.

    Example:
        >>> cayley(jnp.array([[0.0, -2.0], [2.0, 0.0]])).round(5).tolist()
        [[0.0, -1.0], [1.0, 0.0]]
    """
    skew = _square("cayley", skew)
    wide = skew.astype(jnp.promote_types(skew.dtype, jnp.float32))
    identity = jnp.broadcast_to(jnp.eye(skew.shape[-1], dtype=wide.dtype), wide.shape)
    return _transport(wide, identity, exact, iters).astype(skew.dtype)


def cayley_step(
    matrix: Float[Array, "*batch n n"] | Any,
    gradient: Float[Array, "*batch n n"] | Any,
    max_step: Any = 1.5,
    *,
    exact: bool = True,
    iters: int | None = None,
    renormalize: Any = False,
) -> CayleyStep:
    r"""One step of steepest descent on orthogonal matrices, in float32 or wider.

    $$U = X / \text{row norms}, \quad B = -G^T, \quad \hat W = B U - \tfrac12 U^T (U B U), \quad W = \hat W - \hat W^T$$
    $$a = \min(\text{max step},\; 1 / \|W\|_1), \qquad X \leftarrow \left(\mathrm{cayley}(a W)\, U^T\right)^T$$

    where ||W||_1 is the largest column sum of absolute values: the step is a ceiling that large gradients never
    reach. A zero gradient leaves an orthogonal X where it is.

    Args:
        matrix: [..., n, n], orthogonal.
        gradient: of the loss by the matrix, the ordinary one.
        max_step: the ceiling; an array broadcasts against the leading axes.
        exact: solve, or iterate (see `cayley`).
        iters: iterations of the fixed-point form. None goes on until nothing changes: 4 or so for dense gradients, 22
            in float32 where ||a W|| is 1, its most. 5, as SpinQuant's code has, leave X there 1e-2 from orthogonal.
        renormalize: True, or a traced boolean: U is replaced by the orthogonal factor of its QR factorisation, with
            the signs that keep it near U, so that rounding does not add up over many steps.

    Returns:
        The new matrices in at least float32, and the steps taken.

    Raises:
        ValueError: matrices that are not square, or shapes that differ.
        TypeError: an integer, boolean or complex matrix.

    Source: SpinQuant (Liu et al., arXiv 2405.16406) and its code, which renormalises by chance and not by count.

    Example:
        >>> import jax
        >>> target = jnp.array([[0.0, -1.0], [1.0, 0.0]])
        >>> x = jnp.eye(2)
        >>> for _ in range(20):
        ...     x = cayley_step(x, -target).matrix
        >>> bool(jnp.abs(x - target).max() < 1e-3)
        True
    """
    matrix = _square("cayley_step", matrix)
    gradient = jnp.asarray(gradient)
    if matrix.shape != gradient.shape:
        raise ValueError(
            f"a gradient of shape {gradient.shape} does not fit a matrix of shape {matrix.shape}"
        )
    dtype = jnp.promote_types(matrix.dtype, jnp.float32)
    x, g = matrix.astype(dtype), gradient.astype(dtype)
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    x = jax.lax.cond(renormalize, _retract, lambda u: u, x)
    b = -g.mT
    bu = _product(b, x)
    half = bu - 0.5 * _product(x.mT, _product(x, bu))
    skew = half - half.mT
    column_sums = jnp.abs(skew).sum(-2).max(-1)
    step = jnp.minimum(jnp.asarray(max_step, dtype), 1.0 / (column_sums + 1e-8))
    new = _transport(step[..., None, None] * skew, x.mT, exact, iters).mT
    return CayleyStep(new, step)


def orthogonality_error(matrix: Float[Array, "*batch n n"] | Any) -> Float[Array, "*batch"]:
    """The largest entry of |X^T X - I|: what rounding has done to a rotation.

    Example:
        >>> float(orthogonality_error(jnp.eye(3)))
        0.0
    """
    matrix = _square("orthogonality_error", matrix)
    wide = matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))
    identity = jnp.eye(matrix.shape[-1], dtype=wide.dtype)
    return jnp.abs(_product(wide.mT, wide) - identity).max((-2, -1))


def _transport(skew: Array, start: Array, exact: bool, iters: int | None) -> Array:
    """cayley(skew) @ start."""
    if exact:
        identity = jnp.eye(skew.shape[-1], dtype=skew.dtype)
        return jnp.linalg.solve(identity - 0.5 * skew, start + 0.5 * _product(skew, start))
    if iters is not None and iters < 1:
        raise ValueError(f"iters={iters!r} must be at least 1")
    y = start + _product(skew, start)

    def improve(y: Array) -> Array:
        return start + 0.5 * _product(skew, start + y)

    if iters is not None:
        return jax.lax.fori_loop(0, iters, lambda _, y: improve(y), y)
    rounding = 8 * jnp.finfo(start.dtype).eps

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        return (carry[1] > rounding) & (carry[2] < _MOST_ITERATIONS)

    def again(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        y, _, count = carry
        new = improve(y)
        return new, jnp.abs(new - y).max(initial=0.0), count + 1

    return jax.lax.while_loop(unfinished, again, (y, jnp.asarray(jnp.inf, y.dtype), jnp.asarray(0)))[0]


def _retract(u: Array) -> Array:
    q, r = jnp.linalg.qr(u)
    signs = jnp.where(jnp.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)
    return q * signs[..., None, :].astype(q.dtype)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _square(function: str, matrix: Any) -> Array:
    matrix = jnp.asarray(matrix)
    if not jnp.issubdtype(matrix.dtype, jnp.floating):
        raise TypeError(f"{function}: a matrix must be real and floating-point, this one is {matrix.dtype}")
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ValueError(f"{function}: matrices must be square, the shape is {matrix.shape}")
    return matrix
