"""One step of an optimizer on a transformer's parameters: update and addition, both compiled together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from effml.nn import transformer


def gradients(config: transformer.TransformerConfig, seed: int = 0) -> Any:
    """Random gradients of a model's parameters, about as large as real ones."""
    generator = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: transformer.init_params(jax.random.key(0), config))
    return jax.tree.map(lambda s: jnp.asarray(1e-2 * generator.normal(size=s.shape), jnp.float32), shapes)


def stepper(
    optimizer: optax.GradientTransformation, config: transformer.TransformerConfig
) -> Callable[[], None]:
    """A call that takes one step and waits for it; parameters and state are given to the step and replaced."""
    gradient = gradients(config)
    params = gradients(config, 1)
    carry = [params, jax.jit(optimizer.init)(params)]

    def step(params: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1))

    def run() -> None:
        carry[:] = compiled(*carry, gradient)
        jax.block_until_ready(carry)

    return run
