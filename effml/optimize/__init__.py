"""Optimizers that keep less state than Adam, as optax transformations.

>>> import jax.numpy as jnp, optax
>>> from effml import optimize
>>> params = {"hidden": {"kernel": jnp.ones((3, 4))}, "head": {"kernel": jnp.ones((4, 5))}}
>>> optimizer = optimize.scale(1e-3)
>>> state = optimizer.init(params)
>>> updates, state = optimizer.update(params, state, params)
>>> params = optax.apply_updates(params, updates)
"""

from __future__ import annotations

from effml.optimize._memory import memory_report, memory_view
from effml.optimize._named import OPTIMIZERS, make_optimizer
from effml.optimize._scale import SCALE_RULES, normalize_columns, scale

__all__ = [
    "OPTIMIZERS",
    "SCALE_RULES",
    "make_optimizer",
    "memory_report",
    "memory_view",
    "normalize_columns",
    "scale",
]
