"""LiMuon: Muon on a variance-reduced gradient estimate, which may be carried in low rank.

Muon orthogonalises a running mean of gradients; the mean lags behind a moving gradient. LiMuon corrects the
estimate for the move instead: it evaluates the new batch twice, at the new and at the old parameters, and
adds the difference (STORM). For a matrix W and a batch drawn anew at every step:

    g = grad f(W_t; batch_t),    h = grad f(W_{t-1}; batch_t)           one batch, two points
    M_t = g + (1 - beta) (M_{t-1} - h)                                  M_0 = g
    W_{t+1} = W_t - lr * shape * polar(M_t)

With `rank=r` what is carried to the next step is a randomised SVD of M_t, (m + n + 1) r numbers instead of
m n; the direction is still the polar factor of the whole M_t. Beta is 1 - momentum: 0.05 for Muon's 0.95.
Without sampling noise M is the exact gradient for every beta, which no running mean achieves; with W held
still it is the running mean.

The heart is the same-batch difference g - (1 - beta) h, the low rank of what is carried, and the full rank of
the direction.

Source: Huang, Luo, Chen, "LiMuon: Light and Fast Muon Optimizer for Large Models", arXiv 2509.14562,
algorithms 1 to 3, from transcriptions of its algorithm boxes. Reconstructed, because the paper's text does
not state it: beta 0.05, oversampling 5, five Newton-Schulz steps, the shape factor, AdamW for the rest.

Things to know:

* Two gradients per step. Compare at equal gradient evaluations too: there plain Muon, with twice the steps,
  has the lower loss in every comparison of `effml run limuon`.
* The estimator is small with `rank`, the training state is not: the old parameters are needed at every step,
  a full copy of the weights. Only `direction="factors"` avoids that; `two_point_memory` counts all of it.
* Truncation is biased and nothing feeds the lost part back. `rank_energy` tells how much of M is kept; where
  the spectrum is flat, use a larger beta (0.2) or a larger rank.
* A small beta accumulates errors for 1 / beta steps. Start from 1: `beta_warmup`.
* Nothing that changes gradients may come before it in a chain (clipping, decay added to the gradient): it
  would see one of the two only. `optax.MultiSteps` accumulates the first gradient but not the second, and is
  wrong here; accumulate in `two_point_grad` or in `effml.train.make_step`.
* Inside `optax.masked` or `optax.partition` the second gradient is only masked with
  `mask_compatible_extra_args=True`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from effml import trees
from effml._validate import one_of
from effml.optimize._distribution import Distribution
from effml.optimize._layout import Specs, from_matrices, layouts
from effml.optimize._limuon_estimator import (
    LowRank,
    check_second_gradient,
    factor_direction,
    scale_by_limuon,
    shape_factor,
)
from effml.optimize._neuron_norm import NUMBERS, check_recipe
from effml.optimize._scale import _hold
from effml.optimize._two_point import RecomputingTransformation

__all__ = ["LIMUON_RULES", "beta_warmup", "limuon"]

LIMUON_RULES = {
    "matrix": "variance-reduced estimate, orthogonalised",
    "embedding": "AdamW",
    "head": "AdamW",
    "vector": "Adam",
    "frozen": "not moved",
}


def beta_warmup(beta: float | int = 0.05, steps: int = 100) -> optax.Schedule:
    """A schedule for beta that begins at 1, where the estimate is the gradient itself.

        beta_t = beta ** min(1, t / steps)

    The memory of the estimate, 1 / beta steps, then grows by a constant factor per step. Muon's steps have
    their full size from the start, so early differences of gradients are large, and a small beta would keep
    their errors.

    Args:
        beta: the last value, in (0, 1].
        steps: when it is reached.

    Returns:
        A function of the step, for `beta` of `scale_by_limuon` and `limuon`.

    Raises:
        ValueError: beta or steps out of range.

    Example:
        >>> schedule = beta_warmup(0.01, steps=100)
        >>> [round(float(schedule(t)), 3) for t in (0, 50, 100, 200)]
        [1.0, 0.1, 0.01, 0.01]
    """
    if not 0 < beta <= 1:
        raise ValueError(f"beta={beta!r} must be in (0, 1]")
    if steps < 1:
        raise ValueError(f"steps={steps!r} must be at least 1")
    return lambda count: jnp.power(beta, jnp.minimum(1.0, count / steps))


class RateState(NamedTuple):
    """Steps taken (int32) and the rate of the last one (float32; 0 before the first)."""

    count: jax.Array
    rate: jax.Array


def _remembered_rate(learning_rate: Any) -> optax.GradientTransformation:
    """`optax.scale_by_learning_rate` that keeps the rate it has used."""

    def init(params: PyTree) -> RateState:
        del params
        return RateState(jnp.zeros([], jnp.int32), jnp.zeros([], jnp.float32))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, RateState]:
        del params
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        rate = jnp.asarray(rate, jnp.float32)
        moved = jax.tree.map(lambda u: (-rate * u).astype(u.dtype), updates)
        return moved, RateState(jnp.asarray(optax.safe_increment(state.count)), rate)

    return optax.GradientTransformation(init, update)


def limuon(
    learning_rate: optax.ScalarOrSchedule | Any,
    beta: Any = 0.05,
    *,
    rank: int | Any = None,
    weight_decay: Any = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | Any = None,
    adam_weight_decay: Any = 0.0,
    adam_b1: Any = 0.9,
    adam_b2: Any = 0.95,
    labels: PyTree | Callable[[PyTree], PyTree] | None = None,
    oversampling: int | Any = None,
    power_iters: int | Any = None,
    polar: str = "ns",
    ns_coeffs: Any = "muon5",
    ns_steps: int | Any = None,
    ns_dtype: Any = None,
    direction: str = "momentum",
    shape_scale: str = "rms",
    weight_dimension_numbers: Specs = None,
    seed: int | Any = 0,
    factor_dtype: Any = None,
    qr: str = "householder",
    distribute: Distribution | None = None,
) -> optax.GradientTransformationExtraArgs:
    """LiMuon for hidden matrices; AdamW for embedding and head, Adam for vectors, both on the new gradient.

        matrices:    W <- W - lr (u + weight_decay W)                   u of `scale_by_limuon`
        the others:  W <- W - adam_lr (Adam's step + adam_weight_decay W)       no decay for vectors

    Every update needs two gradients of one batch:

        value, new, old = two_point_grad(loss)(params, previous, batch, rng)
        updates, state = optimizer.update(new, state, params, prev_params_grad=old)

    `two_point_step` is that loop, compiled; `with_previous_params` is for loops that keep parameters and an
    optimizer state only, such as `effml.train.make_step`.

    Rates, decays and `beta` may be wrapped by `optax.inject_hyperparams(limuon)` and changed without
    compiling again; counts that you give (`rank`, `oversampling`, ...), functions and dtypes go to its
    `static_args`.

    Args:
        learning_rate: step of the matrices, as for Muon with RMS 0.2: updates have about 0.2 times this.
        beta: weight of the new gradient, in [0, 1], or a schedule such as `beta_warmup(0.05)`.
        rank: triples to carry; None = whole matrices. The paper uses 8 and 16.
        weight_decay: decoupled, of the matrices, multiplied by their rate.
        adam_learning_rate: rate of embedding, head and vectors; None = `learning_rate`. Beside a schedule it
            must be a schedule too, normally of the same shape with its own peak.
        adam_weight_decay: decoupled decay of embedding and head.
        adam_b1: Adam's decay of the first moment.
        adam_b2: Adam's decay of the second moment.
        labels: a tree of roles (see `effml.trees.parameter_roles`) or a function that makes one.
        oversampling: as in `scale_by_limuon`, and so are all that follow.
        power_iters: power iterations of the sketch.
        polar: `ns` or `svd`.
        ns_coeffs: coefficients of Newton-Schulz.
        ns_steps: its steps.
        ns_dtype: dtype of its products.
        direction: `momentum` or `factors`. With `factors`, `two_point_step` and `with_previous_params` keep
            no copy of the matrices: W_{t-1} = (W_t + lr u) / (1 - lr weight_decay) is computed from the
            stored factors, in float32 and with one rounding per step that does not add up. Keep parameters
            in float32 then.
        shape_scale: `rms`, `width` or `none`.
        weight_dimension_numbers: input and output axes of the matrices.
        seed: of the sketches.
        factor_dtype: dtype of what is carried.
        qr: `householder` or `cholesky2`.
        distribute: spread Newton-Schulz over a mesh.

    Returns:
        An optax transformation. Its `update` needs `prev_params_grad`, and `params` for a weight decay.

    Raises:
        ValueError: bad numbers and options, at once; an unknown role or bad axes, at init; no
            `prev_params_grad` or one that does not fit, at update.
        TypeError: a rate that is neither a number nor a schedule, counts or a seed that are no integers.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> params = {"up": {"kernel": jnp.eye(4, 8)}, "head": {"kernel": jnp.ones((8, 9))}}
        >>> optimizer = limuon(1e-2, beta_warmup(0.05), rank=2, adam_learning_rate=1e-3)
        >>> updates, state = optimizer.update(params, optimizer.init(params), params, prev_params_grad=params)
    """
    adam_learning_rate = check_recipe(
        learning_rate, adam_learning_rate, weight_decay, adam_weight_decay, adam_b1=adam_b1, adam_b2=adam_b2
    )

    def estimator(specs: Specs) -> optax.GradientTransformationExtraArgs:
        return scale_by_limuon(
            beta,
            rank=rank,
            oversampling=oversampling,
            power_iters=power_iters,
            polar=polar,
            ns_coeffs=ns_coeffs,
            ns_steps=ns_steps,
            ns_dtype=ns_dtype,
            direction=direction,
            shape_scale=shape_scale,
            weight_dimension_numbers=specs,
            seed=seed,
            factor_dtype=factor_dtype,
            qr=qr,
            distribute=distribute,
        )

    estimator(None)  # complains about its options before there are parameters
    last: Any = _remembered_rate if direction == "factors" else optax.scale_by_learning_rate

    def decay(value: Any) -> tuple[optax.GradientTransformation, ...]:
        none = isinstance(value, NUMBERS) and value == 0
        return () if none else (optax.add_decayed_weights(value),)

    def adam(value: Any) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_adam(adam_b1, adam_b2),
            *decay(value),
            optax.scale_by_learning_rate(adam_learning_rate),
        )

    def roles_of(params: PyTree) -> PyTree:
        if labels is None:
            return trees.parameter_roles(params)
        roles = labels(params) if callable(labels) else labels
        for role in set(jax.tree.leaves(roles)):
            one_of("labels", role, trees.ROLES)
        return roles

    def specs_of(params: PyTree, roles: PyTree) -> Specs:
        specs = weight_dimension_numbers
        if specs is None:
            return trees.dimension_numbers(params, roles, include=("matrix",))
        return specs(params) if callable(specs) else specs

    def partition(params: PyTree) -> optax.GradientTransformationExtraArgs:
        roles = roles_of(params)
        tables = adam(adam_weight_decay)
        return optax.partition(
            {
                "matrix": optax.chain(
                    estimator(specs_of(params, roles)), *decay(weight_decay), last(learning_rate)
                ),
                "embedding": tables,
                "head": tables,
                "vector": adam(0.0),
                "frozen": _hold(),
            },
            roles,
            mask_compatible_extra_args=True,
        )

    def init(params: PyTree) -> optax.OptState:
        return partition(params).init(params)

    def update(
        updates: PyTree,
        state: optax.OptState,
        params: PyTree | None = None,
        *,
        prev_params_grad: PyTree = None,
        **extra: Any,
    ) -> tuple[PyTree, optax.OptState]:
        check_second_gradient("limuon", updates, prev_params_grad)
        # From the parameters where there are any: the gradient of an integer leaf has a type of its own.
        known = updates if params is None else params
        return partition(known).update(updates, state, params, prev_params_grad=prev_params_grad, **extra)

    if direction != "factors":
        return optax.GradientTransformationExtraArgs(init, update)

    def kept(params: PyTree) -> PyTree:
        return jax.tree.map(
            lambda role, leaf: optax.MaskedNode() if role == "matrix" else leaf, roles_of(params), params
        )

    def previous(params: PyTree, state: Any, copies: PyTree) -> PyTree:
        roles = roles_of(params)
        masked = jax.tree.map(
            lambda role, leaf: leaf if role == "matrix" else optax.MaskedNode(), roles, params
        )
        found = layouts("limuon", specs_of(params, roles), masked)
        chain = state.inner_states["matrix"].inner_state
        factors, rate = chain[0].factors, chain[-1].rate
        low = {
            tuple(path): LowRank(*parts)
            for (path, _), *parts in zip(
                jax.tree_util.tree_flatten_with_path(masked)[0], *map(jax.tree.leaves, factors)
            )
        }

        def before(path: Any, leaf: jax.Array) -> jax.Array:
            layout = found[tuple(path)]
            triples = LowRank(
                *(part.astype(jnp.promote_types(part.dtype, jnp.float32)) for part in low[path])
            )
            moved = from_matrices(factor_direction(triples), leaf.shape, layout)
            moved = (shape_factor(shape_scale, leaf.shape, layout) * moved).astype(leaf.dtype)
            return ((leaf + rate * moved) / (1 - rate * weight_decay)).astype(leaf.dtype)

        recomputed = iter(
            before(tuple(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(masked)[0]
        )
        copied = iter(jax.tree.leaves(copies))
        leaves, treedef = jax.tree.flatten(params)
        chosen = [
            next(recomputed) if role == "matrix" else next(copied)
            for role, _ in zip(jax.tree.leaves(roles), leaves)
        ]
        return treedef.unflatten(chosen)

    return RecomputingTransformation(init, update, kept, previous)
