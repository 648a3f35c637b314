"""Hadamard matrices (orthogonal, every entry of one size) and the fast product with them."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

__all__ = ["fht", "hadamard", "hadamard_order", "hadamard_sizes"]

# Odd part m of a size: there is a symmetric Hadamard matrix of order 4 m by Paley's second construction over a
# field of q = 2 m - 1 elements, where q is a prime or the square of one and leaves 1 when divided by 4.
_FIELDS = {m: 2 * m - 1 for m in (3, 5, 7, 9, 13, 15, 19, 21, 25, 27, 31, 37)}
# Products with factors up to this size are one small matrix product each.
_LARGEST_FACTOR = 32


def hadamard_sizes() -> str:
    """The sizes for which there is a Hadamard matrix here, in words.

    Example:
        >>> hadamard_sizes()
        '2^k, 12*2^k, 20*2^k, 28*2^k, 36*2^k, 52*2^k, ...148*2^k'
    """
    return ", ".join(["2^k", *(f"{4 * m}*2^k" for m in _FIELDS)])


def _split(n: int) -> tuple[int, int] | None:
    """(order of the base matrix, power of two), or None where n is no supported size."""
    if n < 1:
        return None
    power = n & -n
    odd = n // power
    if odd == 1:
        return 1, n
    return (4 * odd, power // 4) if odd in _FIELDS and power % 4 == 0 else None


def hadamard_order(n: int) -> int:
    """The largest supported order that divides n: that of the blocks of `fht(x, order=...)`.

    11008 = 43 * 256 has no Hadamard matrix here; 43 blocks of 256 do. 192 = 12 * 16 has one, which mixes every
    feature with every other; three blocks of 64 would not.

    Example:
        >>> hadamard_order(14336), hadamard_order(192), hadamard_order(11008)
        (14336, 192, 256)
    """
    if n < 1:
        raise ValueError(f"n={n!r} must be at least 1")
    return max(order for order in range(1, n + 1) if n % order == 0 and _split(order))


def hadamard(
    n: int, *, signs: Float[Array, " n"] | Any = None, order: int | None = None, dtype: Any = jnp.float32
) -> Float[Array, "n n"]:
    r"""An orthogonal matrix whose entries are all $\pm 1/\sqrt n$.

    $$H = \mathrm{diag}(\text{signs})\,(P \otimes S), \qquad H^T H = I$$

    with S Sylvester's (Walsh's) matrix of a power of two and P Paley's of order 12, 20, 28, ... Without signs H is
    symmetric, so that it is its own inverse.

    Args:
        n: the size.
        signs: n numbers of +1 or -1, the randomised Hadamard matrix; None is all +1.
        order: size of the blocks when H is to be block diagonal, a divisor of n; None is one block.
        dtype: of the entries.

    Returns:
        [n, n].

    Raises:
        ValueError: a size with no matrix here, naming those with one.

    Source: Sylvester (1867); Paley, "On orthogonal matrices" (1933), second construction.

    Example:
        >>> (hadamard(4) * 2).tolist()
        [[1.0, 1.0, 1.0, 1.0], [1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0], [1.0, -1.0, -1.0, 1.0]]
    """
    block = _integer_matrix(_checked_order(n, order))
    matrix = np.kron(np.eye(n // len(block)), block) / math.sqrt(len(block))
    if signs is None:
        return jnp.asarray(matrix, dtype)
    if jnp.shape(signs) != (n,):
        raise ValueError(f"signs of shape {jnp.shape(signs)} must have shape ({n},)")
    return jnp.asarray(signs, dtype)[:, None] * jnp.asarray(matrix, dtype)


def fht(
    x: Float[Array, "*shape"] | Any, axis: int = -1, *, order: int | None = None
) -> Float[Array, "*shape"]:
    """x @ hadamard(n) along an axis, in n log n operations and without the matrix.

    The matrix is a Kronecker product of small ones, and each factor is one product over one axis of the reshaped
    array: the operation matrix units are made for. fht(fht(x)) = x.

    Args:
        x: any shape; sums are in at least float32.
        axis: along which; its size is the n of `hadamard`.
        order: as in `hadamard`: blocks of this size, each transformed alone; None is the whole axis.

    Returns:
        The shape and dtype of `x`.

    Raises:
        ValueError: a size with no matrix here, naming those with one.
        TypeError: integers, booleans or complex numbers.

    Example:
        >>> fht(jnp.array([1.0, 0.0, 0.0, 0.0])).tolist()
        [0.5, 0.5, 0.5, 0.5]
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"fht: x must be real and floating-point, it is {x.dtype}")
    if x.ndim < 1 or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis={axis!r} is not an axis of the shape {x.shape}")
    n = x.shape[axis]
    block = _checked_order(n, order)
    factors = _factors(block)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    moved = jnp.moveaxis(x, axis, -1)
    y = moved.astype(wide).reshape(*moved.shape[:-1], n // block, *factors)
    for place, size in enumerate(factors):
        matrix = jnp.asarray(_integer_matrix(size), wide)
        contracted = y.ndim - len(factors) + place
        y = jax.lax.dot_general(
            y, matrix, (((contracted,), (0,)), ((), ())), precision=jax.lax.Precision.HIGHEST
        )
        y = jnp.moveaxis(y, -1, contracted)
    y = (y / math.sqrt(block)).reshape(moved.shape)
    return jnp.moveaxis(y.astype(x.dtype), -1, axis)


def _checked_order(n: int, order: int | None) -> int:
    if order is None:
        if _split(n) is None:
            raise ValueError(f"there is no Hadamard matrix of size {n} here (sizes: {hadamard_sizes()})")
        return n
    if _split(order) is None or n % order:
        raise ValueError(f"order={order!r} must divide {n} and be one of the sizes {hadamard_sizes()}")
    return order


def _factors(order: int) -> tuple[int, ...]:
    """Sizes of the Kronecker factors, the base first, none of the powers of two above 32."""
    base, power = _split(order) or (1, 1)
    factors = [base] if base > 1 else []
    while power > 1:
        factors.append(min(power, _LARGEST_FACTOR))
        power //= factors[-1]
    return tuple(factors) or (1,)


@functools.lru_cache(maxsize=32)
def _integer_matrix(order: int) -> np.ndarray:
    """int8[order, order], entries +1 and -1, symmetric."""
    base, power = _split(order) or (1, 1)
    matrix = _paley(base // 4) if base > 1 else np.ones((1, 1), np.int8)
    walsh = np.array([[1, 1], [1, -1]], np.int8)
    for _ in range(power.bit_length() - 1):
        matrix = np.kron(matrix, walsh)
    return matrix


def _paley(m: int) -> np.ndarray:
    """The symmetric Hadamard matrix of order 4 m, from which differences in a field are squares."""
    q = _FIELDS[m]
    p = math.isqrt(q) if math.isqrt(q) ** 2 == q else q
    degree = 1 if p == q else 2
    # For degree 2, pairs (a, b) mean a + b t with t^2 = r, the least number that is no square modulo p.
    squares = {a * a % p for a in range(1, p)}
    r = next((a for a in range(2, p) if a not in squares), 0)
    elements = list(itertools.product(range(p), repeat=degree))

    def squared(element: tuple[int, ...]) -> tuple[int, ...]:
        if degree == 1:
            return (element[0] ** 2 % p,)
        a, b = element
        return ((a * a + r * b * b) % p, 2 * a * b % p)

    are_squares = {squared(element) for element in elements if any(element)}
    conference = np.ones((q + 1, q + 1), np.int8)
    conference[0, 0] = 0
    for i, x in enumerate(elements):
        for j, y in enumerate(elements):
            difference = tuple((a - b) % p for a, b in zip(x, y))
            conference[i + 1, j + 1] = 0 if i == j else (1 if difference in are_squares else -1)
    off = np.array([[1, 1], [1, -1]], np.int8)
    diagonal = np.array([[1, -1], [-1, -1]], np.int8)
    return (np.kron(conference, off) + np.kron(np.eye(q + 1, dtype=np.int8), diagonal)).astype(np.int8)
