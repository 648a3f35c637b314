"""Compiling a whole training step for devices that are not here, and reading from it what it costs each of them."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from effml.train import sharding
from effml.train._state import init_state, placement
from effml.train.plan import flops, hlo
from effml.train.plan.topology import Topology, load_devices
from effml.train.step import make_step

__all__ = ["DoesNotFit", "Plan", "plan_step", "planning_mesh", "token_batch"]


class DoesNotFit(RuntimeError):
    """The compiler found no way to place the step in a device's memory.

    Attributes:
        needed: bytes that one device would need.
        available: bytes that it has.
    """

    def __init__(self, message: str, needed: int, available: int):
        super().__init__(message)
        self.needed = needed
        self.available = available


@dataclass(frozen=True)
class Plan:
    """What one training step costs. Bytes are those of one device.

    Attributes:
        platform: `tpu`, `cpu` or `cuda`.
        devices: how many the step is split over.
        mesh: size of each axis.
        parameters: number of parameters of the model.
        tokens: weighted rows that one step sees: sequences × length for a language model.
        parameter_bytes: from the shapes and their shardings.
        optimizer_bytes: likewise.
        batch_bytes: likewise.
        argument_bytes: all arguments by the compiler's own account, padding of its layout included.
        activation_bytes: what is alive beside the arguments at the peak: activations, gradients, gathered weights and
            scratch. None where the compiler does not say (`cpu`) or has not run.
        peak_bytes: likewise, arguments included.
        model_flops: products of loss and gradient, over all devices, recomputation included.
        optimizer_flops: all other products: the update, and a second gradient where the optimizer asks for one.
        device_flops: products that one device carries out, from the compiled program; None if they can't be seen.
        collectives: by kind and group size; None if only lowered.
        loops: the loops of the compiled program and their trips.
        seconds: `lower`, `compile`, and `compile_cpu`: the processor time of all threads, which other work on the
            machine does not stretch.
    """

    platform: str
    devices: int
    mesh: dict[str, int]
    parameters: int
    tokens: int
    parameter_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    argument_bytes: int | None
    activation_bytes: int | None
    peak_bytes: int | None
    model_flops: int
    optimizer_flops: int
    device_flops: int | None
    collectives: tuple[hlo.Collective, ...] | None
    loops: tuple[hlo.Loop, ...]
    seconds: dict[str, float]

    @property
    def repeated_work(self) -> float | None:
        """Products that all devices carry out, over those that were asked for: 1 if no device repeats another's."""
        if self.device_flops is None:
            return None
        return self.device_flops * self.devices / (self.model_flops + self.optimizer_flops)

    @property
    def ring_bytes(self) -> int | None:
        """Bytes that one device sends in one step."""
        return None if self.collectives is None else sum(c.ring_bytes for c in self.collectives)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with `repeated_work` and `ring_bytes`."""
        return dataclasses.asdict(self) | {
            "repeated_work": self.repeated_work,
            "ring_bytes": self.ring_bytes,
        }


def planning_mesh(axes: dict[str, int], topology: Topology) -> Mesh:
    """The mesh of a topology's devices.

    Args:
        axes: size of each axis, as `effml.train.parse_mesh` reads them; empty means `fsdp` over all devices.
        topology: what to compile for.

    Returns:
        A mesh with the axes data, fsdp and tensor.

    Raises:
        ValueError: if the sizes do not multiply to the number of devices; as `load_devices` does.

    Example:
        >>> from effml.train.plan import parse_topology
        >>> planning_mesh({"fsdp": 1}, parse_topology("cpu:1")).shape["fsdp"]
        1
    """
    devices = load_devices(topology)
    return sharding.make_mesh(axes or {"fsdp": len(devices)}, devices)


def token_batch(sequences: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch of `effml.data.batches`.

    Example:
        >>> token_batch(4, 16)["tokens"].shape
        (4, 17)
    """
    return {
        "tokens": jax.ShapeDtypeStruct((sequences, length + 1), jnp.int32),
        "weights": jax.ShapeDtypeStruct((sequences, length), jnp.float32),
    }


def plan_step(
    loss_fn: Callable[..., Any],
    init_params: Callable[..., PyTree],
    optimizer: optax.GradientTransformation | optax.GradientTransformationExtraArgs,
    batch: PyTree,
    mesh: Mesh,
    *,
    platform: str = "tpu",
    only_lower: bool = False,
    **step_options: Any,
) -> Plan:
    """Compiles `make_step(loss_fn, optimizer, mesh=mesh, **step_options)` ahead of time; nothing is allocated.

    Args:
        loss_fn: as for `make_step`.
        init_params: from a key to parameters; only its shapes are computed.
        optimizer: the optax optimizer.
        batch: shapes of one whole batch, of all devices together, rows first.
        mesh: of `planning_mesh`.
        platform: `tpu`, `cpu` or `cuda`.
        only_lower: stop before the compiler (`Topology.only_lower`): argument bytes and FLOPs are known by then.
        step_options: passed to `make_step`: `accumulate`, `clip_norm`, `compute_dtype`, `extra_args`.

    Returns:
        The plan.

    Raises:
        DoesNotFit: if a device's memory does not hold the step.
        ValueError: if the batch does not divide over the mesh; as `make_step` does.

    Example:
        >>> from effml.train.plan import parse_topology
        >>> mesh = planning_mesh({}, parse_topology("cpu:1"))
        >>> loss = lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2)
        >>> batch = {"x": jax.ShapeDtypeStruct((4, 8), jnp.float32)}
        >>> initial = lambda key: {"w": jnp.zeros(8)}
        >>> plan = plan_step(loss, initial, optax.adam(1e-3), batch, mesh, platform="cpu")
        >>> plan.parameter_bytes, plan.optimizer_bytes, plan.model_flops
        (32, 68, 128)
    """
    step = make_step(loss_fn, optimizer, mesh=mesh, **step_options)
    parts = mesh.shape["data"] * mesh.shape["fsdp"] * step.accumulate
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % parts:
        raise ValueError(f"a batch of {rows} rows does not divide over {parts} devices and parts")
    key = jax.random.key(0)
    state = jax.eval_shape(functools.partial(init_state, init_params=init_params, optimizer=optimizer), key)
    state = jax.tree.map(_placed, state, placement(state, mesh))
    batch = jax.tree.map(functools.partial(_placed, place=sharding.batch_sharding(mesh)), batch)

    started = time.perf_counter()
    traced = step.jitted.trace(state, batch)
    lowered = traced.lower(lowering_platforms=(platform,))
    lowering = time.perf_counter() - started
    total, model = flops.count(traced.jaxpr), flops.count(_gradient_jaxpr(loss_fn, state.params, batch))
    plan = Plan(
        platform=platform,
        devices=mesh.size,
        mesh=dict(mesh.shape),
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params)),
        tokens=_tokens(batch),
        parameter_bytes=_device_bytes(state.params),
        optimizer_bytes=_device_bytes(state.optimizer_state),
        batch_bytes=_device_bytes(batch),
        argument_bytes=None,
        activation_bytes=None,
        peak_bytes=None,
        model_flops=model,
        optimizer_flops=total - model,
        device_flops=None,
        collectives=None,
        loops=(),
        seconds={"lower": round(lowering, 2)},
    )
    if only_lower:
        return plan
    started, busy = time.perf_counter(), time.process_time()
    compiled = _compile(lowered)
    plan.seconds["compile"] = round(time.perf_counter() - started, 2)
    plan.seconds["compile_cpu"] = round(time.process_time() - busy, 2)
    memory, counts = compiled.memory_analysis(), hlo.count(compiled.as_text(), mesh.size)
    peak = None if platform == "cpu" else memory.peak_memory_in_bytes
    return dataclasses.replace(
        plan,
        argument_bytes=memory.argument_size_in_bytes,
        activation_bytes=None if peak is None else peak - memory.argument_size_in_bytes,
        peak_bytes=peak,
        device_flops=None if counts.uncounted else counts.matmul_flops,
        collectives=counts.collectives,
        loops=counts.loops,
    )


def _placed(leaf: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _device_bytes(tree: PyTree) -> int:
    """Bytes of one device's part of every array, without padding."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _tokens(batch: PyTree) -> int:
    weights = batch.get("weights") if isinstance(batch, dict) else None
    return math.prod(weights.shape) if weights is not None else jax.tree.leaves(batch)[0].shape[0]


def _gradient_jaxpr(loss_fn: Callable[..., Any], params: PyTree, batch: PyTree) -> Any:
    def scalar(params: PyTree, batch: PyTree) -> Any:
        result = loss_fn(params, batch)
        return result[0] if isinstance(result, tuple) else result

    return jax.make_jaxpr(jax.value_and_grad(scalar))(params, batch)


def _compile(lowered: Any) -> Any:
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        text = " ".join(str(error).split())
        if "RESOURCE_EXHAUSTED" not in text:
            raise
        needed, available = memory_limits(text)
        sizes = f"one device needs {needed / 2**30:.2f} GiB and has {available / 2**30:.2f} GiB"
        raise DoesNotFit(f"does not fit: {sizes if needed else text}", needed, available) from None


def memory_limits(message: str) -> tuple[int, int]:
    """Bytes needed and available, from the compiler's message; 0 for what it does not say.

    Example:
        >>> memory_limits("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm.")
        (22011707392, 16911433728)
    """
    size = r"([\d.]+)([KMGT]?)"
    found = re.search(rf"Used {size} of {size}", message) or re.search(
        rf"\({size}\) exceeds available \w+ \({size}\)", message
    )
    if found is None:
        return 0, 0
    unit = lambda letter: 2 ** (10 * " KMGT".index(letter or " "))
    return int(float(found[1]) * unit(found[2])), int(float(found[3]) * unit(found[4]))
