"""Training: one compiled step, a loop around it, checkpoints, metrics and many devices.

    make_step       loss + optax optimizer → step(state, batch) → (state, metrics)
    fit             the loop: evaluation, checkpoints, writers, signals, a stop at the first bad loss
    Checkpoints     atomic, verified, resumed bit for bit
    make_mesh       data, fsdp and tensor axes over the devices of one or many processes
    fsdp_loss       a loss whose weights are made whole only where they are used
    plan            (effml.train.plan) what a step costs on devices that are not here

Nothing here knows a model or a method: any loss over any pytree, any optax transformation.

Example:
    >>> import jax, jax.numpy as jnp, numpy as np, optax
    >>> from effml import train
    >>> def loss(params, batch):
    ...     return jnp.mean((batch["x"] * params["slope"] - batch["y"]) ** 2)
    >>> optimizer = optax.adam(train.schedule("cosine", 0.3, 100))
    >>> step = train.make_step(loss, optimizer, clip_norm=1.0)
    >>> state = train.init_state(jax.random.key(0), {"slope": jnp.zeros(())}, optimizer)
    >>> x = np.linspace(-1, 1, 8, dtype=np.float32)
    >>> result = train.fit(step, state, [{"x": x, "y": 3 * x}] * 100, steps=100)
    >>> round(float(result.state.params["slope"]), 1)
    3.0
"""

from __future__ import annotations

from effml.train._state import TrainState, init_state
from effml.train.checkpoint import Checkpoints
from effml.train.gathering import fsdp_loss, gather, gathered_linear
from effml.train.loop import FitResult, NonFiniteLoss, evaluate, fit
from effml.train.progress import Progress, ProgressUpdate
from effml.train.schedules import SCHEDULES, schedule
from effml.train.sharding import (
    batch_sharding,
    initialize_distributed,
    make_mesh,
    param_specs,
    parse_mesh,
    shard_tree,
    state_specs,
    sync_processes,
    to_global,
    to_host,
)
from effml.train.step import Step, UpdateContext, make_eval_step, make_step
from effml.train.writers import (
    JsonLinesWriter,
    TensorBoardWriter,
    TrackioWriter,
    WandbWriter,
    read_json_lines,
)

__all__ = [
    "SCHEDULES",
    "Checkpoints",
    "FitResult",
    "JsonLinesWriter",
    "NonFiniteLoss",
    "Progress",
    "ProgressUpdate",
    "Step",
    "TensorBoardWriter",
    "TrackioWriter",
    "TrainState",
    "UpdateContext",
    "WandbWriter",
    "batch_sharding",
    "evaluate",
    "fit",
    "fsdp_loss",
    "gather",
    "gathered_linear",
    "init_state",
    "initialize_distributed",
    "make_eval_step",
    "make_mesh",
    "make_step",
    "param_specs",
    "parse_mesh",
    "read_json_lines",
    "schedule",
    "shard_tree",
    "state_specs",
    "sync_processes",
    "to_global",
    "to_host",
]
