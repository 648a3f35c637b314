"""CoCD: coordinate descent without gradients that remembers the partial derivatives it measured before.

Where a loss can only be evaluated (no memory for backpropagation, a simulator, a black box), a full
finite-difference gradient of n parameters costs 2 n evaluations per step. CoCD measures B of the n partial
derivatives per step, in turn, and moves along all that it remembers:

    buffer <- decay * buffer                                        the whole buffer, before the refresh
    buffer[i] <- (f(x + eps e_i) - f(x - eps e_i)) / (2 eps)        for the next B coordinates, all at this x
    x <- x - learning_rate * (buffer + weight_decay * x)

It is deterministic: no random numbers anywhere. A partial derivative measured k steps ago weighs decay^k.
With decay = 0 this is Block Cyclic Coordinate Descent. With `memory_budget` M < n only the M coordinates
measured last are remembered, and only they move.

The heart: measured values overwrite the stale ones (they are not averaged into them), the decay comes before
the refresh, the coordinates take turns, and every step is dense, mostly from stale values. The rest is
plumbing.

Source: Liang, Sun, Wang, Rakita, "Turning Stale Gradients into Stable Gradients: Coherent Coordinate Descent
with Implicit Landscape Smoothing for Lightweight Zeroth-Order Optimization", arXiv 2605.14373, and its code.
Its paper's text was not at hand: the algorithm is the code's. Ours are the shared base value of one-sided
differences, evaluation in vmapped chunks and over devices, schedules, and non-finite differences being
replaced.

Things to know:

* The usable rate falls like B / n. On f = sum_i lam_i x_i^2 / 2, with K = n / B and
  S = 1 + decay + ... + decay^(K-1), each coordinate shrinks by 1 - learning_rate * lam_i * S per cycle: stable
  below learning_rate = 2 / (lam_max S), which is 2 B / (lam_max n) for decay = 1. So compare with decay = 0 at a
  rate S times as large; on such problems the two are then the same.
* `decay` is the main knob of stability: 0.99, 0.95, 0.9, ... until it is stable.
* During the first cycle the coordinates not yet visited do not move (there is no bias correction); `init_grad`
  can fill the memory before.
* The loss must stay the same within a step (one batch, one set of random keys, frozen running statistics) and
  may change between steps.
* Parameters that hardly matter cost as many evaluations as the others; random directions (SPSA) do not pay
  for those.
* In float32 a difference is off by about 1e-7 |f| / eps: keep eps at 1e-3 or more.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from effml._validate import count, floating_dtype
from effml.optimize._coordinate_memory import (
    CoCDState,
    Order,
    initial_buffer,
    query_count,
    scattered,
    visiting_order,
)
from effml.optimize._finite_difference import (
    coordinate_count,
    differences,
    flatten,
    split,
)

__all__ = ["COCD_RULES", "CoCDState", "cocd", "cocd_step", "query_count", "scale_by_cocd"]

COCD_RULES = {
    "matrix": "coordinates, measured in turn",
    "embedding": "coordinates, measured in turn",
    "head": "coordinates, measured in turn",
    "vector": "coordinates, measured in turn",
    "frozen": "refused: leave it out with optax.masked",
}


def scale_by_cocd(
    *,
    compute_budget: Any = 1,
    memory_budget: Any = None,
    eps: Any = 0.1,
    decay: Any = 1.0,
    central: bool = True,
    weight_decay: Any = 0.0,
    init_grad: Any = None,
    eval_chunk: Any = None,
    accumulator_dtype: Any = None,
    coordinate_order: Order = None,
    mesh: jax.sharding.Mesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Replaces the updates by CoCD's estimate of the gradient; what comes in is ignored.

        buffer <- decay * buffer;  buffer[i] <- measured partial derivative, for the next B coordinates

    `cocd` is this and a learning rate. Alone it goes first in a chain:
    `optax.chain(scale_by_cocd(...), optax.clip_by_global_norm(1.0), optax.scale_by_learning_rate(0.1))`.

    Args:
        compute_budget: B, coordinates measured per step, 1 ... n.
        memory_budget: M, coordinates remembered, 1 ... n; None = n. With B > M the first B - M of a step are
            measured in vain.
        eps: distance moved, > 0: a number, or a schedule of the steps taken.
        decay: what remains of the memory per step, in [0, 1]: a number, or a schedule of the steps taken.
        central: 2 B evaluations per step (True), or B + 1 (False).
        weight_decay: added, times the parameters, to the estimate at the M remembered coordinates (the first M
            until the memory is full).
        init_grad: fills the memory: a tree like the parameters (then the first M coordinates are taken) or [M]
            numbers in the order of visiting.
        eval_chunk: evaluations that run at once; None = 16, 1 = one after the other. Each needs a copy of the
            parameters.
        accumulator_dtype: of the memory; None = float32 (float64 if a parameter is).
        coordinate_order: the order of visiting: a permutation of 0 ... n - 1, or a function that makes one
            from the parameters; None = tree order, row-major (see `finite_difference_coordinates`). For the order
            of a torch model: leaves as they are registered and kernels by columns.
        mesh: spreads the evaluations over all devices of a mesh.

    Returns:
        A transformation whose `update(updates, state, params, value_fn=loss)` needs `params` and
        `value_fn(params) -> scalar`; `updates` may be None. The estimate has the dtypes of the parameters.

    Raises:
        ValueError: at once: eps <= 0, decay outside [0, 1], weight_decay < 0, budgets below 1, an
            `accumulator_dtype` that is not floating-point. At init: budgets above n, parameters that are not
            floating-point (by name) or none, a wrong `init_grad` or `coordinate_order`. At update: `params`
            or `value_fn` missing, a value that is no scalar.
        TypeError: budgets or `eval_chunk` that are no integers, a `value_fn` that cannot be called.

    Example:
        >>> import jax.numpy as jnp
        >>> transform = scale_by_cocd(compute_budget=1)
        >>> params = {"w": jnp.array([1.0, 2.0])}
        >>> loss = lambda p: jnp.sum(p["w"] ** 2)
        >>> estimate, state = transform.update(None, transform.init(params), params, value_fn=loss)
        >>> estimate["w"].round(3).tolist()
        [2.0, 0.0]
        >>> estimate, state = transform.update(None, state, params, value_fn=loss)
        >>> estimate["w"].round(3).tolist()
        [2.0, 4.0]
    """
    budget = _static_count("compute_budget", compute_budget)
    memory = None if memory_budget is None else _static_count("memory_budget", memory_budget)
    chunk = None if eval_chunk is None else _static_count("eval_chunk", eval_chunk)
    if isinstance(eps, (int, float)) and not 0 < eps < math.inf:
        raise ValueError(f"eps={eps!r} must be above 0, and finite")
    if isinstance(decay, (int, float)) and not 0 <= decay <= 1:
        raise ValueError(f"decay={decay!r} must be in [0, 1]")
    if isinstance(weight_decay, (int, float)) and not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay={weight_decay!r} must not be negative, and must be finite")
    accumulator_dtype = floating_dtype("accumulator_dtype", accumulator_dtype)
    decays_weights = not isinstance(weight_decay, (int, float)) or weight_decay > 0
    evaluations = 2 * budget if central else budget + 1

    def init(params: PyTree) -> CoCDState:
        size = coordinate_count(params)
        for name, value in (("compute_budget", budget), ("memory_budget", memory)):
            if value is not None and value > size:
                raise ValueError(f"{name}={value} must be in 1 ... {size}, the number of coordinates")
        order = visiting_order(coordinate_order, params, size)
        dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(params)))
        if isinstance(eps, (int, float)) and eps < 1e-3 and dtype == jnp.float32:
            warnings.warn(
                f"eps={eps!r}: float32 differences this small are mostly rounding; use 1e-3 or more",
                stacklevel=2,
            )
        return CoCDState(
            buffer=initial_buffer(
                init_grad,
                params,
                memory or size,
                order,
                dtype if accumulator_dtype is None else accumulator_dtype,
            ),
            cursor=jnp.zeros([], jnp.int32),
            slot=jnp.zeros([], jnp.int32),
            filled=jnp.zeros([], jnp.int32),
            queries=jnp.zeros(2, jnp.uint32),
            last_value=jnp.zeros([], dtype),
            nonfinite=jnp.zeros([], jnp.int32),
            count=jnp.zeros([], jnp.int32),
        )

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        value_fn: Any = None,
        **extra_args: Any,
    ) -> tuple[PyTree, CoCDState]:
        del updates, extra_args
        if params is None:
            raise ValueError(
                "params is missing: CoCD measures at the parameters; update(None, state, params, ...)"
            )
        if value_fn is None:
            raise ValueError(
                "value_fn is missing: CoCD measures the loss itself; "
                "update(None, state, params, value_fn=lambda p: loss(p, batch))"
            )
        if not callable(value_fn):
            raise TypeError(f"value_fn={value_fn!r} must be a function from the parameters to the loss")
        size = coordinate_count(params)
        order = visiting_order(coordinate_order, params, size)
        vector, _ = flatten(params)
        slots = state.buffer.shape[0]

        turn = (state.cursor + jnp.arange(budget, dtype=jnp.int32)) % size
        radius = eps(state.count) if callable(eps) else eps
        fresh, value = differences(
            value_fn, params, turn if order is None else order[turn], radius, central, chunk, mesh
        )
        finite = jnp.isfinite(fresh)
        fresh = jnp.where(finite, fresh, 0).astype(state.buffer.dtype)

        remains = jnp.asarray(decay(state.count) if callable(decay) else decay, state.buffer.dtype)
        # decay = 0 forgets everything, also an infinite value of init_grad.
        kept = jnp.where(remains == 0, 0, remains * state.buffer)
        written = min(budget, slots)
        places = (state.slot + jnp.arange(budget - written, budget, dtype=jnp.int32)) % slots
        buffer = kept.at[places].set(fresh[budget - written :], unique_indices=True)
        low = state.queries[1] + jnp.uint32(evaluations)
        state = CoCDState(
            buffer=buffer,
            cursor=(state.cursor + budget) % size,
            slot=(state.slot + budget) % slots,
            filled=jnp.minimum(state.filled + written, slots),
            queries=jnp.stack([state.queries[0] + (low < state.queries[1]).astype(jnp.uint32), low]),
            last_value=value.astype(state.last_value.dtype),
            nonfinite=state.nonfinite + jnp.sum(~finite, dtype=jnp.int32),
            count=jnp.asarray(optax.safe_increment(state.count)),
        )
        estimate = scattered(buffer, state, order, size, vector, weight_decay if decays_weights else None)
        leaves, treedef = jax.tree.flatten(params)
        return treedef.unflatten(
            [part.astype(leaf.dtype) for part, leaf in zip(split(estimate, leaves), leaves)]
        ), state

    return optax.GradientTransformationExtraArgs(init, update)


def cocd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    compute_budget: Any = 1,
    memory_budget: Any = None,
    eps: Any = 0.1,
    decay: Any = 1.0,
    central: bool = True,
    weight_decay: Any = 0.0,
    init_grad: Any = None,
    eval_chunk: Any = None,
    accumulator_dtype: Any = None,
    coordinate_order: Order = None,
    mesh: jax.sharding.Mesh | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Coherent Coordinate Descent: trains from values of the loss alone, B coordinates measured per step.

        x <- x - learning_rate * (buffer + weight_decay * x)

    State: M numbers (one copy of the parameters by default) and a few counters. Each evaluation that runs at
    the same time as others needs one more copy of the parameters (`eval_chunk`).

    Numbers may be schedules, or be changed under `optax.inject_hyperparams` without compiling again. What sets
    shapes may not, and has to be named there: `optax.inject_hyperparams(cocd, static_args=("compute_budget",
    "memory_budget", "eval_chunk", "coordinate_order"))`.

    Under `optax.masked` wrap the loss in `effml.optimize.fill_masked`. Average batches inside `value_fn` instead
    of using `optax.MultiSteps`, which works but throws away the evaluations of all but every k-th step.

    Args:
        learning_rate: a number or a schedule. Start from the rate of plain SGD for the architecture; see the
            module's text for how the limit depends on B / n.
        compute_budget: B, coordinates measured per step, 1 ... n; as many as time allows.
        memory_budget: M, coordinates remembered and moved, 1 ... n; None = n.
        eps: distance moved, > 0: a number or a schedule.
        decay: what remains of the memory per step, in [0, 1]: a number or a schedule.
        central: 2 B evaluations per step (True), or B + 1 (False).
        weight_decay: decoupled, multiplied by the rate, for the remembered coordinates.
        init_grad: see `scale_by_cocd`, as for the following.
        eval_chunk: evaluations that run at once.
        accumulator_dtype: of the memory.
        coordinate_order: the order of visiting.
        mesh: spreads the evaluations over devices.

    Returns:
        An optax transformation: `update(None, state, params, value_fn=loss)`.

    Raises:
        ValueError, TypeError: as `scale_by_cocd`.

    Source: arXiv 2605.14373; defaults of its code (which clamps a negative weight decay to 0; here it is
    refused).

    Example:
        >>> import jax.numpy as jnp, optax
        >>> params = jnp.array([1.0, -2.0])
        >>> optimizer = cocd(0.1, compute_budget=2)
        >>> updates, state = optimizer.update(
        ...     None, optimizer.init(params), params, value_fn=lambda p: jnp.sum(p**2)
        ... )
        >>> optax.apply_updates(params, updates).round(3).tolist()
        [0.8..., -1.6...]
        >>> query_count(state)
        4
    """
    if isinstance(learning_rate, float) and not math.isfinite(learning_rate):
        raise ValueError(f"learning_rate={learning_rate!r} must be finite")
    return optax.chain(
        scale_by_cocd(
            compute_budget=compute_budget,
            memory_budget=memory_budget,
            eps=eps,
            decay=decay,
            central=central,
            weight_decay=weight_decay,
            init_grad=init_grad,
            eval_chunk=eval_chunk,
            accumulator_dtype=accumulator_dtype,
            coordinate_order=coordinate_order,
            mesh=mesh,
        ),
        optax.scale_by_learning_rate(learning_rate),
    )


def cocd_step(
    value_fn: Callable[..., Any],
    params: PyTree,
    state: optax.OptState,
    tx: optax.GradientTransformationExtraArgs,
    *arguments: Any,
) -> tuple[PyTree, optax.OptState]:
    """One compiled step: measures, updates and applies. `params` and `state` are donated: use the results.

    Compiled once per `value_fn` and `tx`, so pass a named function and give the batch as an argument.

    Args:
        value_fn: loss(params, *arguments) -> scalar.
        params: parameters.
        state: from `tx.init(params)`.
        tx: `cocd(...)`, or a chain that begins with `scale_by_cocd(...)`.
        arguments: the batch and whatever else the loss takes.

    Returns:
        New parameters and state.

    Example:
        >>> import jax.numpy as jnp
        >>> def loss(params, target):
        ...     return jnp.sum((params - target) ** 2)
        >>> tx = cocd(0.1, compute_budget=2)
        >>> params = jnp.zeros(2)
        >>> state = tx.init(params)
        >>> for _ in range(50):
        ...     params, state = cocd_step(loss, params, state, tx, jnp.array([1.0, 2.0]))
        >>> params.round(2).tolist()
        [1.0, 2.0]
    """
    return _step(value_fn, tx, params, state, *arguments)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _step(value_fn: Any, tx: Any, params: Any, state: Any, *arguments: Any) -> tuple[Any, Any]:
    updates, state = tx.update(
        jax.tree.map(jnp.zeros_like, params), state, params, value_fn=lambda p: value_fn(p, *arguments)
    )
    return optax.apply_updates(params, updates), state


def _static_count(name: str, value: Any) -> int:
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} is an array, but it sets shapes. Under optax.inject_hyperparams name it: "
            f"inject_hyperparams(cocd, static_args=({name!r}, ...))"
        )
    return count(name, value)
