"""Polar factors, orthonormal bases and leading singular triples of matrices, batched over leading axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from effml._validate import floating_dtype

__all__ = [
    "NEWTON_SCHULZ_COEFFICIENTS",
    "cholesky_qr2",
    "newton_schulz",
    "newton_schulz_coefficients",
    "polar",
    "rsvd",
]

NEWTON_SCHULZ_COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "muon5": ((3.4445, -4.7750, 2.0315),) * 5,
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097838082687081, 0.42323551169305323),
    ),
}

# Polar Express is made for singular values up to 1 and diverges above it; rounding needs this much room.
_POLAR_EXPRESS_MARGIN = 1.02


def newton_schulz_coefficients(coefficients: str | Array | Sequence[Any] | Any) -> Float[Array, "steps 3"]:
    """The triples (a, b, c) of each Newton-Schulz step, one row per step, in float32.

    Args:
        coefficients: a name in `NEWTON_SCHULZ_COEFFICIENTS` (`muon5`, `dion`, `polar_express`); three
            numbers, used for 5 steps; or one triple per step, of shape [steps, 3].

    Returns:
        An array [steps, 3].

    Raises:
        ValueError: an unknown name or another shape.

    Example:
        >>> newton_schulz_coefficients("muon5").shape
        (5, 3)
        >>> newton_schulz_coefficients([(1.5, -0.5, 0.0)] * 20).shape
        (20, 3)
    """
    if isinstance(coefficients, str):
        if coefficients not in NEWTON_SCHULZ_COEFFICIENTS:
            raise ValueError(
                f"coefficients={coefficients!r} is not known (allowed: "
                f"{', '.join(NEWTON_SCHULZ_COEFFICIENTS)}, or an array of shape (3,) or (steps, 3))"
            )
        coefficients = NEWTON_SCHULZ_COEFFICIENTS[coefficients]
    table = jnp.asarray(coefficients, jnp.float32)
    if table.shape == (3,):
        return jnp.tile(table, (5, 1))
    if table.ndim != 2 or table.shape[1] != 3 or table.shape[0] < 1:
        raise ValueError(f"coefficients of shape {table.shape} must have shape (3,) or (steps, 3)")
    return table


def newton_schulz(
    matrix: Float[Array, "*batch m n"] | Any,
    coefficients: str | Array | Sequence[Any] | Any = "muon5",
    *,
    steps: int | None = None,
    dtype: Any = None,
    epsilon: float | int = 1e-7,
) -> Float[Array, "*batch m n"]:
    """The approximate polar factor U V^T of U S V^T, by matrix products alone.

        X_0 = M / (||M||_F + epsilon),    A = X X^T,    X <- a X + (b A + c A^2) X      for each (a, b, c)

    Singular vectors stay, each singular value s goes to a s + b s^3 + c s^5 per step. `muon5` ends with
    singular values between about 0.68 and 1.13 for Gaussian matrices twice as long as wide (not at 1: its slope at
    zero is as steep as can be; square ones keep small values); `polar_express` is closer to 1. Works on the shorter
    side, so newton_schulz(M^T) is newton_schulz(M)^T.

    Args:
        matrix: [..., m, n]; leading axes are separate matrices.
        coefficients: as in `newton_schulz_coefficients`. The named `polar_express` starts from
            M / (1.02 ||M||_F + epsilon), as its code does.
        steps: how many; None = as many as there are triples. Fewer use the first ones, more repeat the last.
        dtype: of the matrix products; None = bfloat16 on GPU and TPU, at least float32 on CPU. Products are
            summed in float32, and the Frobenius norm is taken in float32 always.
        epsilon: added to the norm. The zero matrix stays zero, and its derivative is taken to be zero.

    Returns:
        [..., m, n] in the dtype of `matrix`.

    Raises:
        ValueError: fewer than two axes, bad coefficients, steps < 1, or a dtype that is not floating-point.
        TypeError: an integer, boolean or complex matrix.

    Source: Jordan et al., "Muon" (2024) for `muon5`; the `dion` code for `dion`; Amsel et al., arXiv
    2505.16932, for `polar_express`.

    Example:
        >>> import jax.numpy as jnp
        >>> newton_schulz(jnp.diag(jnp.array([3.0, -1.0]))).round(1).tolist()
        [[0.8..., 0.0], [0.0, -1.1...]]
    """
    matrix = _checked("newton_schulz", matrix)
    dtype = floating_dtype("dtype", dtype)
    table = newton_schulz_coefficients(coefficients)
    if steps is not None:
        if steps < 1:
            raise ValueError(f"newton_schulz: steps={steps!r} must be at least 1")
        table = table[jnp.minimum(jnp.arange(steps), len(table) - 1)]
    wide = jnp.promote_types(matrix.dtype, jnp.float32)
    if dtype is None:
        dtype = wide if jax.default_backend() == "cpu" else jnp.bfloat16
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if tall else matrix).astype(wide)
    # Entries beyond 1e19 have squares beyond float32.
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0.0)
    largest = jnp.where(largest > 0, largest, 1.0)
    x = x / largest
    squares = jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)
    # The root has no slope at zero. NaN is not zero and stays NaN.
    present = squares != 0
    size = jnp.sqrt(jnp.where(present, squares, 1.0))
    if isinstance(coefficients, str) and coefficients == "polar_express":
        size = _POLAR_EXPRESS_MARGIN * size
    x = jnp.where(present, x / (size + epsilon / largest), 0.0).astype(dtype)
    accumulate = jnp.promote_types(dtype, jnp.float32)

    def step(x: Array, triple: Array) -> tuple[Array, None]:
        a, b, c = triple.astype(accumulate)
        gram = _product(x, x.mT)
        narrow = gram.astype(dtype)
        polynomial = b * gram + c * _product(narrow, narrow)
        return (a * x.astype(accumulate) + _product(polynomial.astype(dtype), x)).astype(dtype), None

    x = jax.lax.scan(step, x, table)[0].astype(matrix.dtype)
    return x.mT if tall else x


def _product(a: Array, b: Array) -> Array:
    """a @ b, summed in at least float32 and without the short float32 that some devices use by default."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    precision = jax.lax.Precision.HIGHEST if a.dtype == wide else jax.lax.Precision.DEFAULT
    return jnp.matmul(a, b, precision=precision, preferred_element_type=wide)


def _checked(function: str, matrix: Any) -> Array:
    """`matrix` as an array; raises where it is not floating-point or has no two axes."""
    matrix = jnp.asarray(matrix)
    if not jnp.issubdtype(matrix.dtype, jnp.floating):
        raise TypeError(f"{function}: a matrix must be real and floating-point, this one is {matrix.dtype}")
    if matrix.ndim < 2:
        raise ValueError(f"{function}: a matrix needs two axes, the shape {matrix.shape} has {matrix.ndim}")
    return matrix


def polar(matrix: Float[Array, "*batch m n"] | Any) -> Float[Array, "*batch m n"]:
    """The exact polar factor U V^T of U S V^T; singular values that are zero up to rounding stay zero.

    Its derivative goes through the singular value decomposition and needs distinct singular values: where two
    are equal, two zeros among them, it is not finite.

    Args:
        matrix: [..., m, n]. Lower precisions are computed in float32.

    Returns:
        [..., m, n] in the dtype of `matrix`. Its singular values are 1, as many as the rank, and 0.

    Raises:
        ValueError: fewer than two axes.
        TypeError: an integer, boolean or complex matrix.

    Example:
        >>> import jax.numpy as jnp
        >>> polar(jnp.diag(jnp.array([3.0, -2.0, 0.0]))).round(5).tolist()
        [[1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    matrix = _checked("polar", matrix)
    wide = matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))
    u, s, vt = jnp.linalg.svd(wide, full_matrices=False)
    floor = max(matrix.shape[-2:]) * jnp.finfo(wide.dtype).eps * s[..., :1]
    return _product(u * (s > floor)[..., None, :].astype(u.dtype), vt).astype(matrix.dtype)


def cholesky_qr2(
    matrix: Float[Array, "*batch m k"] | Any,
) -> tuple[Float[Array, "*batch m k"], Float[Array, "*batch k k"]]:
    """Q R = M for a tall matrix, from Cholesky factors of its Gram matrix: matrix products only.

        L L^T = X^T X + shift I,    X <- X L^-T,    R <- L^T R        twice

    Over devices that hold rows of M, one pass sums a [k, k] matrix and moves no row; Householder reflections
    would gather M. Where the result is not orthonormal after two passes (condition beyond about 1e3 in
    float32, or a rank below k), three more run; the shift of a few roundings of the trace keeps every factor
    defined. Directions that M lacks then come out as an arbitrary completion or, where M has exactly nothing
    (zero columns, the zero matrix), as zero columns of Q. Q R equals M in every case.

    Args:
        matrix: [..., m, k] with m >= k; lower precisions are computed in float32.

    Returns:
        Q [..., m, k] and the upper triangular R [..., k, k], in float32 or float64.

    Raises:
        ValueError: fewer than two axes, or more columns than rows.
        TypeError: an integer, boolean or complex matrix.

    Source: Yamamoto et al. (2015), Cholesky-QR2; Fukaya et al. (2020) for the shift.

    Example:
        >>> import jax.numpy as jnp
        >>> q, r = cholesky_qr2(jnp.array([[3.0, 1.0], [4.0, 1.0], [0.0, 2.0]]))
        >>> bool(jnp.allclose(q.T @ q, jnp.eye(2), atol=1e-6)), bool(jnp.allclose(r[1, 0], 0.0))
        (True, True)
    """
    matrix = _checked("cholesky_qr2", matrix)
    rows, columns = matrix.shape[-2:]
    if columns > rows:
        raise ValueError(f"cholesky_qr2: the shape {matrix.shape} has more columns than rows")
    x = matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))
    rounding = jnp.finfo(x.dtype).eps
    identity = jnp.eye(columns, dtype=x.dtype)
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0.0)
    largest = jnp.where(largest > 0, largest, 1.0)

    def one_pass(q: Array, r: Array) -> tuple[Array, Array]:
        gram = _product(q.mT, q)
        trace = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
        shift = jnp.where(trace > 0, 2 * rounding * trace, 1.0)
        lower = jnp.linalg.cholesky(gram + shift * identity)
        # The inverse of the small factor, not a solve with the tall one: rows may lie on many devices.
        inverse = jax.scipy.linalg.solve_triangular(
            lower, jnp.broadcast_to(identity, lower.shape), lower=True
        )
        return _product(q, inverse.mT), _product(lower.mT, r)

    def repair(q: Array, r: Array) -> tuple[Array, Array]:
        for _ in range(3):
            q, r = one_pass(q, r)
        return q, r

    q, r = x / largest, jnp.broadcast_to(identity, (*x.shape[:-2], columns, columns))
    for _ in range(2):
        q, r = one_pass(q, r)
    error = jnp.max(jnp.abs(_product(q.mT, q) - identity), initial=0.0)
    q, r = jax.lax.cond(error > 32 * columns * rounding, repair, lambda q, r: (q, r), q, r)
    return q, r * largest


def rsvd(
    key: Array,
    matrix: Float[Array, "*batch m n"] | Any,
    rank: int,
    oversampling: int = 5,
    power_iters: int = 0,
    *,
    qr: str = "householder",
) -> tuple[Float[Array, "*batch m r"], Float[Array, "*batch r"], Float[Array, "*batch n r"]]:
    """Leading singular triples of M from a random sketch: M is close to (u * s) @ v.T.

        Omega ~ N(0, 1) [n, k],  k = rank + oversampling;    Q = orth(M Omega);    svd(Q^T M), leading triples

    Exact where the rank of M is at most `rank`. Else the sketch's mean error is at most
    sqrt(1 + rank / (oversampling - 1)) times that of the best approximation of the rank, and power iterations
    bring it closer. Omega is `jax.random.normal(key, [..., n, k])`. Only thin matrices are factored: the
    singular values come from a [k, k] matrix.

    Args:
        key: of the sketch; the same key gives the same factors on every device.
        matrix: [..., m, n]; each matrix gets its own Omega. Lower precisions are computed in float32.
        rank: triples to keep, r = min(rank, m, n).
        oversampling: columns of the sketch beyond the rank; k is at most min(m, n).
        power_iters: passes over M and M^T before the basis is taken, for spectra that fall slowly.
        qr: `householder` (`jnp.linalg.qr`) or `cholesky2` (`cholesky_qr2`).

    Returns:
        u [..., m, r], s [..., r] from large to small, v [..., n, r]; float32, or float64 for a float64 input.

    Raises:
        ValueError: fewer than two axes, rank < 1, oversampling < 0, power_iters < 0, unknown qr.
        TypeError: an integer, boolean or complex matrix.

    Source: Halko, Martinsson, Tropp, "Finding structure with randomness", SIAM Review 2011, algorithms 4.4
    and 5.1, theorem 10.5.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> u, s, v = rsvd(jax.random.key(0), jnp.outer(jnp.arange(1.0, 5.0), jnp.ones(3)), rank=1)
        >>> ((u * s) @ v.T).round(4)[:, 0].tolist()
        [1.0, 2.0, 3.0, 4.0]
    """
    matrix = _checked("rsvd", matrix)
    for name, value, least in (
        ("rank", rank, 1),
        ("oversampling", oversampling, 0),
        ("power_iters", power_iters, 0),
    ):
        if value < least:
            raise ValueError(f"rsvd: {name}={value!r} must be at least {least}")
    if qr not in ("householder", "cholesky2"):
        raise ValueError(f"qr={qr!r} is not known (allowed: householder, cholesky2)")
    factor = jnp.linalg.qr if qr == "householder" else cholesky_qr2
    m, n = matrix.shape[-2:]
    columns = min(rank + oversampling, m, n)
    matrix = matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))
    omega = jax.random.normal(key, (*matrix.shape[:-2], n, columns), matrix.dtype)
    sketch = _product(matrix, omega)
    for _ in range(power_iters):
        sketch = _product(matrix, factor(_product(matrix.mT, factor(sketch)[0]))[0])
    basis = factor(sketch)[0]
    # svd(Q^T M) by way of its own QR: the matrix of the inner SVD is [k, k].
    right, triangle = factor(_product(matrix.mT, basis))
    inner_u, s, inner_vt = jnp.linalg.svd(triangle.mT, full_matrices=False)
    kept = min(rank, m, n)
    return (
        _product(basis, inner_u[..., :kept]),
        s[..., :kept],
        _product(right, inner_vt[..., :kept, :].mT),
    )
