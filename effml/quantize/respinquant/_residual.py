"""The residual basis change: an orthogonal T that differs from I in a small subspace alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

__all__ = ["ResidualSubspace", "check_rank", "residual_macs", "residual_rotate", "residual_subspace"]


class ResidualSubspace(NamedTuple):
    """An approximation I + Q M Q^T of a basis change.

    Attributes:
        q: float64[D, r], orthonormal columns.
        m: float64[r, r], an orthogonal matrix minus I.
        error: ||T - (I + Q M Q^T)||_F.
    """

    q: np.ndarray
    m: np.ndarray
    error: float


def check_rank(rank: float | int, width: int) -> int:
    """Returns `rank` if a basis change of this width can have it.

    Raises:
        ValueError: an odd rank cuts a plane of rotation in half; one outside 0 ... width.
        TypeError: no integer.

    Example:
        >>> check_rank(32, 576)
        32
    """
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        raise TypeError(f"rank={rank!r} must be an integer")
    if not 0 <= rank <= width:
        raise ValueError(f"rank={rank!r} must be between 0 and the width {width}")
    if rank % 2 and rank != width:
        raise ValueError(
            f"rank={rank!r} must be even: rotations act in planes, and an odd rank cuts one (try {rank + 1})"
        )
    return int(rank)


def residual_subspace(transition: Float[Array | np.ndarray, "D D"] | Any, rank: int) -> ResidualSubspace:
    r"""The best I + Q M Q^T of a rank for an orthogonal T, in float64.

    $$Q = r \text{ lowest eigenvectors of } (T + T^T)/2, \qquad P S Z^T = Q^T T Q, \qquad M = P Z^T - I$$

    T is normal, so that the singular values of T - I come in pairs 2 sin(theta / 2), one pair for each plane that T
    turns, and the eigenvectors of the symmetric part with the lowest cosines span the planes that turn most. With an
    even rank and det T = 1 the subspace is invariant, Q^T T Q is orthogonal as it is, and the error is Eckart's and
    Young's: no matrix of the rank is closer. The result is orthogonal for every T. Planes that turn by the same angle
    are told apart by a Schur form.

    Args:
        transition: [D, D], orthogonal.
        rank: r, even, 0 ... D. D gives T itself.

    Returns:
        A `ResidualSubspace`.

    Raises:
        ValueError: an odd rank or one out of range; a T that is not square or not orthogonal to 1e-3.

    Source: Kim et al., arXiv 2604.11080, there by an SVD of T - I; the eigenvectors give the same subspace.

    Example:
        >>> turn = np.eye(4)
        >>> turn[:2, :2] = [[0.6, -0.8], [0.8, 0.6]]
        >>> found = residual_subspace(turn, 2)
        >>> bool(abs(np.eye(4) + found.q @ found.m @ found.q.T - turn).max() < 1e-12)
        True
    """
    wide = np.asarray(transition, np.float64)
    if wide.ndim != 2 or wide.shape[0] != wide.shape[1]:
        raise ValueError(f"transition of shape {wide.shape} must be a square matrix")
    check_rank(rank, len(wide))
    off = np.abs(wide.T @ wide - np.eye(len(wide))).max(initial=0.0)
    if not off < 1e-3:
        raise ValueError(f"transition is not orthogonal: an entry of |T^T T - I| is {off:.3g}")
    return _subspace(wide, rank)


def _subspace(wide: np.ndarray, rank: int) -> ResidualSubspace:
    q = np.linalg.eigh((wide + wide.T) / 2)[1][:, :rank]
    left, singular, right = np.linalg.svd(q.T @ wide @ q)
    if singular.min(initial=1.0) < 1 - 1e-4:
        q = _turning_planes(wide)[:, :rank]
        left, _, right = np.linalg.svd(q.T @ wide @ q)
    m = left @ right - np.eye(rank)
    error = np.linalg.norm(wide - np.eye(len(wide)) - q @ m @ q.T)
    return ResidualSubspace(q, m, float(error))


def _turning_planes(wide: np.ndarray) -> np.ndarray:
    """Columns that span the planes T turns, the largest angle first.

    Planes that turn by one angle share an eigenspace of the symmetric part, and an eigenvector of that need not lie in
    any of them; the Schur form keeps planes apart, at ten times the cost.
    """
    import scipy.linalg

    form, vectors = scipy.linalg.schur(wide, output="real")[:2]
    cosines = np.diag(form).copy()
    for row in np.flatnonzero(np.abs(np.diag(form, -1)) > 1e-9):
        cosines[row : row + 2] = cosines[row : row + 2].mean()
    return vectors[:, np.argsort(cosines, kind="stable")]


def residual_rotate(
    x: Float[Array, "*rows D"], q: Float[Array, "D r"], m: Float[Array, "r r"]
) -> Float[Array, "*rows D"]:
    """x (I + Q M Q^T) by three thin products: 2 D r + r^2 multiplications a row instead of D^2.

    Args:
        x: the residual stream.
        q: from `residual_subspace`.
        m: likewise.

    Returns:
        The shape and dtype of `x`; products are summed in float32.

    Example:
        >>> residual_rotate(jnp.ones((3, 4)), jnp.zeros((4, 2)), jnp.zeros((2, 2))).shape
        (3, 4)
    """
    wide, highest = jnp.promote_types(x.dtype, jnp.float32), jax.lax.Precision.HIGHEST
    y = jnp.matmul(x, q.astype(x.dtype), preferred_element_type=wide, precision=highest).astype(x.dtype)
    z = jnp.matmul(y, m.astype(x.dtype), preferred_element_type=wide, precision=highest).astype(x.dtype)
    return (x + jnp.matmul(z, q.T.astype(x.dtype), preferred_element_type=wide, precision=highest)).astype(
        x.dtype
    )


def residual_macs(width: int, rank: int) -> int:
    """Multiplications of `residual_rotate` for one token and one skip.

    Example:
        >>> residual_macs(4096, 32)
        263168
    """
    return 2 * width * rank + rank * rank
