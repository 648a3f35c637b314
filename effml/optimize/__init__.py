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

from effml.linalg import newton_schulz as orthogonalize
from effml.optimize._cayley import CayleyState, scale_by_cayley
from effml.optimize._cocd import COCD_RULES, CoCDState, cocd, cocd_step, query_count, scale_by_cocd
from effml.optimize._distribution import Distribution
from effml.optimize._finite_difference import fill_masked, finite_difference_coordinates
from effml.optimize._limuon import LIMUON_RULES, beta_warmup, limuon
from effml.optimize._limuon_estimator import LiMuonState, LowRank, rank_energy, scale_by_limuon
from effml.optimize._memory import memory_report, memory_view
from effml.optimize._named import OPTIMIZERS, TWO_POINT, make_optimizer
from effml.optimize._normuon import NORMUON_RULES, NorMuonState, normuon, scale_by_normuon
from effml.optimize._scale import SCALE_RULES, normalize_columns, scale
from effml.optimize._two_point import (
    PreviousParamsState,
    RecomputingTransformation,
    TwoPointState,
    second_gradient,
    two_point_grad,
    two_point_init,
    two_point_step,
    with_previous_params,
)
from effml.optimize._two_point_memory import two_point_memory

__all__ = [
    "COCD_RULES",
    "LIMUON_RULES",
    "NORMUON_RULES",
    "OPTIMIZERS",
    "SCALE_RULES",
    "TWO_POINT",
    "CayleyState",
    "CoCDState",
    "Distribution",
    "LiMuonState",
    "LowRank",
    "NorMuonState",
    "PreviousParamsState",
    "RecomputingTransformation",
    "TwoPointState",
    "beta_warmup",
    "cocd",
    "cocd_step",
    "fill_masked",
    "finite_difference_coordinates",
    "limuon",
    "make_optimizer",
    "memory_report",
    "memory_view",
    "normalize_columns",
    "normuon",
    "orthogonalize",
    "query_count",
    "rank_energy",
    "scale",
    "scale_by_cayley",
    "scale_by_cocd",
    "scale_by_limuon",
    "scale_by_normuon",
    "second_gradient",
    "two_point_grad",
    "two_point_init",
    "two_point_memory",
    "two_point_step",
    "with_previous_params",
]
