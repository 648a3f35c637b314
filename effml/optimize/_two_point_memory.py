"""What an optimizer with two gradients really keeps, in three numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from effml import trees
from effml.optimize._limuon_estimator import limuon_states
from effml.optimize._two_point import two_point_init, two_point_step

__all__ = ["two_point_memory"]


def two_point_memory(
    tx: optax.GradientTransformation,
    params: PyTree,
    *,
    loss_fn: Callable[..., Any] | None = None,
    batch: PyTree = None,
    rng: Any = None,
) -> dict[str, Any]:
    """Three honest numbers: the estimator alone, everything that persists, and the peak of a step.

        estimator    the carried estimate: (m + n + 1) r numbers per matrix with a rank, m n without
        persistent   parameters + previous parameters + the whole optimizer state
        peak         arguments, results and temporaries of `two_point_step`, as its compiler plans them

    Args:
        tx: the optimizer, such as `limuon(1e-3, rank=8)`.
        params: parameters or their shapes.
        loss_fn: with `batch`, a step is compiled (not run) for the third number.
        batch: a batch or its shapes.
        rng: a key or None, as the step takes it.

    Returns:
        `estimator_bytes`, `previous_bytes`, `persistent_bytes`, `peak_bytes` (None without a loss),
        `param_bytes` and `lines`, the report in words.

    Example:
        >>> import jax.numpy as jnp
        >>> from effml.optimize import limuon
        >>> report = two_point_memory(limuon(1e-3, rank=2), {"up": {"kernel": jnp.zeros((64, 32))}})
        >>> report["estimator_bytes"], report["previous_bytes"]
        (776, 8192)
        >>> print(report["lines"][0])
        estimator: 776 bytes, 0.095 of the parameters
    """
    shapes = jax.eval_shape(lambda tree: tree, params)
    state = jax.eval_shape(lambda tree: two_point_init(tree, tx), shapes)
    param_bytes = trees.byte_count(shapes)
    estimator = sum(trees.byte_count(one.factors) for one in limuon_states(state.opt_state))
    previous = trees.byte_count(state.prev_params)
    persistent = trees.byte_count(state)
    peak = None
    if loss_fn is not None:
        compiled = two_point_step(loss_fn, tx).jitted.lower(  # pyright: ignore[reportFunctionMemberAccess]
            state.params, state.prev_params, state.step, state.opt_state, batch, rng
        )
        plan = compiled.compile().memory_analysis()
        if plan is not None:
            peak = (
                plan.argument_size_in_bytes
                + plan.output_size_in_bytes
                - plan.alias_size_in_bytes
                + plan.temp_size_in_bytes
            )
    share = lambda size: f"{size:,} bytes, {size / max(param_bytes, 1):.3f} of the parameters"
    lines = [
        f"estimator: {share(estimator)}",
        f"persistent, with parameters and previous parameters: {share(persistent)}",
        "peak of a step: " + ("not compiled" if peak is None else share(peak)),
    ]
    return {
        "param_bytes": param_bytes,
        "estimator_bytes": estimator,
        "previous_bytes": previous,
        "persistent_bytes": persistent,
        "peak_bytes": peak,
        "lines": lines,
    }
