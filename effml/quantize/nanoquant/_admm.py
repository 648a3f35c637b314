r"""The two alternating solvers behind `lb_admm` and `dbf_admm`, on a target that is already weighted.

The target P [long, short] is fitted by two factors with one column for each rank, A [long, r] and B [short, r]:
P ~ (Z_A / colnorm(Z_A)) Z_B^T. Between iterations each factor keeps M = solution + dual; its projection is Z = svid(M)
and its new dual M - Z.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from effml.quantize.nanoquant._svid import matmul, rank_one, signs

__all__ = ["SCHEDULES", "Solved", "dbf_solve", "lb_solve", "truncated_svd"]

SCHEDULES: dict[str, Any] = {
    "linear": lambda t: t,
    "cubic": lambda t: t**3,
    "logistic": lambda t: 1 / (1 + np.exp(-5 * (t - 0.5))),
    "exp_decay": lambda t: (1 - np.exp(-5 * t)) / (1 - np.exp(-5)),
    "exp_growth": lambda t: (np.exp(5 * t) - 1) / (np.exp(5) - 1),
}
"""The penalty rho of an iteration, from the share t in [0, 1) of those before it."""


class Projected(NamedTuple):
    """The projection Z = signs(value) * rows * columns."""

    value: Array  # M [rows, r]
    rows: Array  # [rows], of norm 1
    columns: Array  # [r], the column norms of Z

    def unit(self) -> Array:
        """Z with columns of norm 1."""
        return signs(self.value) * self.rows[:, None]

    def full(self) -> Array:
        """Z."""
        return self.unit() * self.columns


class Solved(NamedTuple):
    """What a solver ends with.

    Attributes:
        long: the projection of A.
        long_latent: A's solution plus its last dual.
        short: likewise of B.
        short_latent: likewise.
        history: [iters], relative squared error of P ~ (Z_A / colnorm(Z_A)) Z_B^T after every iteration.
    """

    long: Projected
    long_latent: Array
    short: Projected
    short_latent: Array
    history: Array


def lb_solve(
    key: Array, target: Array, rank: int, penalties: Array, ridge: Array, power_iters: int
) -> Solved:
    """LB-ADMM: each factor is solved for given the old projection of the other, penalties one for each iteration."""
    starts = _random_starts(key, target, rank)
    # The duals start at what the projection of the random start leaves, so that M is that start itself.
    state = (_project_long(starts[0], power_iters), _project_short(starts[1], power_iters))
    energy = jnp.square(target).sum()

    def step(carry: Any, rho: Array) -> tuple[Any, Array]:
        (long, short), _ = carry
        long_gram, short_gram = _gram(long), _gram(short)
        for_long, for_short = matmul(target, short.unit()), matmul(target.T, long.unit())
        error = _error(energy, for_short, long_gram, short, short_gram)
        long_solution, long_value = _ridge_step(long, short_gram, for_long, rho, ridge)
        short_solution, short_value = _ridge_step(short, long_gram, for_short, rho, ridge)
        new = _project_long(long_value, power_iters), _project_short(short_value, power_iters)
        return (new, (long_solution, short_solution)), error

    (state, solutions), errors = jax.lax.scan(step, (state, starts), penalties)
    return _finish(target, state, solutions, errors)


def dbf_solve(key: Array, target: Array, rank: int, iters: int, ridge: Array, power_iters: int) -> Solved:
    """DBF's ADMM: duals start at zero, three inner steps a factor, and B is solved for given the new A."""
    starts = _random_starts(key, target, rank)
    energy = jnp.square(target).sum()
    penalties = jnp.minimum(1.0, jnp.arange(iters) / (iters - 3)) ** 3 if iters > 3 else jnp.ones(iters)

    def inner(z: Array, dual: Array, gram: Array, right: Array, rho: Array) -> Any:
        gram = gram + ridge * jnp.diagonal(gram).mean() * jnp.eye(rank, dtype=gram.dtype)

        def once(carry: Any, penalty: Array) -> tuple[Any, None]:
            z, dual = carry[:2]
            solution = _solve(gram, penalty, right + penalty * (z - dual))
            projected = _project_short(solution + dual, power_iters)
            return (projected.full(), projected.value - projected.full(), solution, projected), None

        carry = (z, dual, z, _project_short(z, power_iters))
        penalties = jnp.stack([rho, *jnp.ones((2,), rho.dtype)])
        z, dual, solution, projected = jax.lax.scan(once, carry, penalties)[0]
        return projected, z, dual, solution

    def normalised(z: Array) -> Array:
        norms = jnp.linalg.norm(z, axis=0)
        return z / jnp.where(norms > 0, norms, 1)

    def step(carry: Any, rho: Array) -> tuple[Any, Array]:
        (long_z, long_dual), (short_z, short_dual), _ = carry
        unit = normalised(short_z)
        long, long_z, long_dual, long_solution = inner(
            long_z, long_dual, matmul(unit.T, unit), matmul(target, unit), rho
        )
        unit, gram = long.unit(), _gram(long)
        right = matmul(target.T, unit)
        short, short_z, short_dual, short_solution = inner(short_z, short_dual, gram, right, rho)
        error = _error(energy, right, gram, short, _gram(short))
        new = (long_z, long_dual), (short_z, short_dual), (long, short, long_solution, short_solution)
        return new, error

    zeros = [jnp.zeros_like(start) for start in starts]
    first = [_project_short(start, power_iters) for start in starts]
    carry = (starts[0], zeros[0]), (starts[1], zeros[1]), (*first, *starts)
    carry, errors = jax.lax.scan(step, carry, penalties.astype(target.dtype))
    (_, long_dual), (_, short_dual), (long, short, long_solution, short_solution) = carry
    return Solved(long, long_solution + long_dual, short, short_solution + short_dual, errors)


def truncated_svd(target: Array, rank: int, power_iters: int) -> Solved:
    """Dual-SVID: the best real factors of rank r, the singular values shared out evenly, and their projections."""
    u, s, vt = jnp.linalg.svd(target, full_matrices=False)
    root = jnp.sqrt(s[:rank])
    values = u[:, :rank] * root, vt[:rank].T * root
    long, short = _project_long(values[0], power_iters), _project_short(values[1], power_iters)
    # The product is Z_A Z_B^T here: the second factor takes over the column norms of the first.
    short = short._replace(columns=short.columns * long.columns)
    error = _error(jnp.square(s).sum(), matmul(target.T, long.unit()), _gram(long), short, _gram(short))
    return Solved(long, values[0], short, values[1], error[None])


def _random_starts(key: Array, target: Array, rank: int) -> tuple[Array, Array]:
    keys = jax.random.split(key)
    long, short = target.shape
    return (
        jax.random.normal(keys[0], (long, rank), target.dtype),
        jax.random.normal(keys[1], (rank, short), target.dtype).T,
    )


def _project_long(value: Array, power_iters: int) -> Projected:
    rows, sigma, columns = rank_one(value, power_iters)
    return Projected(value, rows, sigma * columns)


def _project_short(value: Array, power_iters: int) -> Projected:
    rows, sigma, columns = rank_one(value, power_iters, from_rows=True)
    return Projected(value, rows, sigma * columns)


def _gram(factor: Projected) -> Array:
    unit = factor.unit()
    return matmul(unit.T, unit)


def _ridge_step(own: Projected, gram: Array, right: Array, rho: Array, ridge: Array) -> tuple[Array, Array]:
    z = own.full()
    dual = own.value - z
    shift = rho * jnp.diagonal(gram).mean() + ridge
    solution = _solve(gram, shift, right + rho * (z - dual))
    return solution, solution + dual


def _solve(gram: Array, shift: Array, right: Array) -> Array:
    """right (gram + shift I)^-1: the inverse by Cholesky, or by elimination where that fails, then one product.

    The shift keeps the system well conditioned, and products run several times as fast as triangular solves with many
    right-hand sides.
    """
    identity = jnp.eye(len(gram), dtype=gram.dtype)
    system = gram + shift * identity
    factor = jnp.linalg.cholesky(system, symmetrize_input=False)

    def by_cholesky() -> Array:
        lower = jax.scipy.linalg.solve_triangular(factor, identity, lower=True)
        return matmul(lower.T, lower)

    inverse = jax.lax.cond(jnp.isfinite(factor).all(), by_cholesky, lambda: jnp.linalg.inv(system))
    return matmul(right, inverse)


def _error(energy: Array, on_long: Array, long_gram: Array, short: Projected, short_gram: Array) -> Array:
    """Relative squared error of P ~ unit_A Z_B^T, from what an iteration has computed anyway."""
    cross = (on_long * short.full()).sum()
    square = (long_gram * short_gram * jnp.outer(short.columns, short.columns)).sum()
    return (energy - 2 * cross + square) / jnp.where(energy > 0, energy, 1)


def _finish(target: Array, state: Any, solutions: Any, errors: Array) -> Solved:
    long, short = state
    energy = jnp.square(target).sum()
    last = _error(energy, matmul(target.T, long.unit()), _gram(long), short, _gram(short))
    latents = [solution + own.value - own.full() for own, solution in zip(state, solutions)]
    return Solved(long, latents[0], short, latents[1], jnp.append(errors[1:], last))
