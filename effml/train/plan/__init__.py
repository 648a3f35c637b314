"""What training would cost on devices that are not here: compiled ahead of time, read from the program.

    parse_topology   "v5e:16x16", "cpu:64", "cuda:4x8"
    environment      the variables that a process needs for one before JAX starts
    plan_step        the real `make_step`, compiled: bytes, FLOPs and collectives of each device
    language_model   loss and initialiser of `effml.nn.transformer` on a mesh
    hlo.count        collectives and products of any compiled program, loops multiplied
    flops.count      products of any jaxpr, loops multiplied

Example:
    >>> import optax
    >>> from effml.train import plan
    >>> mesh = plan.planning_mesh({}, plan.parse_topology("cpu:1"))
    >>> config = plan.TransformerConfig(64, 16, 2, 2, 32)
    >>> loss, init = plan.language_model(config, mesh, compute_dtype="float32")
    >>> result = plan.plan_step(loss, init, optax.adam(1e-3), plan.token_batch(2, 8), mesh, platform="cpu")
    >>> result.optimizer_bytes == 2 * result.parameter_bytes + 4, result.loops[0].trips
    (True, 2)
"""

from __future__ import annotations

from effml.nn.transformer import TransformerConfig
from effml.train.plan import flops, hlo
from effml.train.plan.models import MODELS, language_model, model_config
from effml.train.plan.plan import DoesNotFit, Plan, plan_step, planning_mesh, token_batch
from effml.train.plan.topology import Topology, environment, load_devices, parse_topology

__all__ = [
    "MODELS",
    "DoesNotFit",
    "Plan",
    "Topology",
    "TransformerConfig",
    "environment",
    "flops",
    "hlo",
    "language_model",
    "load_devices",
    "model_config",
    "parse_topology",
    "plan_step",
    "planning_mesh",
    "token_batch",
]
