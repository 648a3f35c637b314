"""Meshes, and which device holds which part of what.

Three axes: `data` splits the batch, `fsdp` splits batch and parameters (each device keeps one slice of every
matrix and of its optimizer state), `tensor` splits attention heads and the hidden units of the MLP. All of it
is expressed as `jax.sharding` specs over Auto axes: the compiler inserts the communication, and a sharded
step computes what the one-device step computes.

Works for one process with many devices and for many processes (`initialize_distributed`); every process then
feeds its own rows of the batch (`to_global`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from effml._validate import count, one_of

__all__ = [
    "AXES",
    "batch_sharding",
    "initialize_distributed",
    "make_mesh",
    "param_specs",
    "parse_mesh",
    "shard_tree",
    "state_specs",
    "sync_processes",
    "to_global",
    "to_host",
]

AXES = ("data", "fsdp", "tensor")
_BATCH_AXES = ("data", "fsdp")

# Which axis of a kernel [in, out] the tensor axis splits, counted from the end so that stacked layers fit as
# well.
_TENSOR_RULES: tuple[tuple[str, int], ...] = (
    (r"attention\.(query|key|value)\.kernel$", -1),
    (r"attention\.output\.kernel$", -2),
    (r"mlp\.(gate|up)\.kernel$", -1),
    (r"mlp\.down\.kernel$", -2),
)


def parse_mesh(text: str) -> dict[str, int]:
    """Reads a mesh flag.

    Args:
        text: axis sizes such as `"data=4,fsdp=2"`.

    Returns:
        Axis name to size, in the order given.

    Raises:
        ValueError: for a malformed entry, an unknown or repeated axis, or a size below 1.

    Example:
        >>> parse_mesh("data=4,fsdp=2")
        {'data': 4, 'fsdp': 2}
    """
    axes: dict[str, int] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, size = (piece.strip() for piece in entry.partition("="))
        if not equals or not re.fullmatch(r"[+-]?\d+", size):
            raise ValueError(f"mesh={text!r}: {entry!r} is not of the form axis=size, such as data=4")
        if name in axes:
            raise ValueError(f"mesh={text!r} names the axis {name!r} twice")
        axes[name] = int(size)
    _check_axes(axes)
    return axes


def _check_axes(axes: Mapping[str, int]) -> None:
    if not axes:
        raise ValueError(f"the mesh has no axis; give sizes for some of {', '.join(AXES)}, such as data=4")
    for name, size in axes.items():
        one_of("mesh axis", name, AXES)
        if size < 1:
            raise ValueError(f"mesh axis {name}={size} must be at least 1")
        count(f"mesh axis {name}", size)


def make_mesh(axes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Lays the devices out as a mesh with the axes data, fsdp and tensor.

    Args:
        axes: size of each axis; an axis that is left out has size 1.
        devices: the devices to use; None takes all devices of all processes.

    Returns:
        A mesh that always has all three axes, of type Auto.

    Raises:
        ValueError: if the sizes do not multiply to the number of devices, an axis is unknown, or the tensor
            axis would cross processes.

    Example:
        >>> dict(make_mesh({"data": 1}, devices=jax.devices()[:1]).shape)
        {'data': 1, 'fsdp': 1, 'tensor': 1}
    """
    _check_axes(axes)
    devices = list(jax.devices() if devices is None else devices)
    sizes = tuple(axes.get(name, 1) for name in AXES)
    needed = int(np.prod(sizes))
    if needed != len(devices):
        asked = ",".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(
            f"mesh {asked} needs {needed} devices but there are {len(devices)}; "
            f"the sizes must multiply to {len(devices)}, for example data={len(devices)}"
        )
    mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
    for group in mesh.devices.reshape(-1, sizes[-1]):
        if len({device.process_index for device in group}) > 1:
            raise ValueError(
                f"mesh axis tensor={sizes[-1]} would cross processes, which feed different rows of a batch; "
                f"use a divisor of the {jax.local_device_count()} devices of one process"
            )
    return mesh


def initialize_distributed(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> bool:
    """Joins this process to the others of the job, before any JAX computation.

    What is not given is read from the environment variables EFFML_COORDINATOR, EFFML_NUM_PROCESSES and
    EFFML_PROCESS_ID. With none of them the job has one process and nothing happens.

    Args:
        coordinator: host:port of process 0.
        num_processes: number of processes in the job.
        process_id: index of this process, from 0.

    Returns:
        Whether the job has several processes.

    Raises:
        ValueError: if only some of the three are known, or the index is out of range.

    Example:
        >>> initialize_distributed()
        False
    """
    flags = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    given: dict[str, str] = {}
    for name, flag in flags.items():
        value = flag if flag is not None else os.environ.get(f"EFFML_{name.upper()}")
        if value is not None:
            given[name] = str(value)
    if not given:
        return False
    missing = [f"{name} (or EFFML_{name.upper()})" for name in flags if name not in given]
    if missing:
        raise ValueError(f"a job of several processes also needs {', '.join(missing)}")
    try:
        count, index = int(given["num_processes"]), int(given["process_id"])
    except ValueError:
        raise ValueError(
            f"num_processes={given['num_processes']!r} and process_id={given['process_id']!r} must be integers"
        ) from None
    if not 0 <= index < count:
        raise ValueError(f"process_id={index} must be at least 0 and below num_processes={count}")
    platforms: str | None = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if (platforms or "").split(",")[0] == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(given["coordinator"], count, index)
    return count > 1


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _stacked(name: str) -> bool:
    # Stacked layers have no index after "layers"; their leading axis is the scan's.
    return re.search(r"(^|\.)layers\.(?!\d+(\.|$))", name) is not None


def _spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    first = 1 if _stacked(name) and len(shape) > 1 else 0
    if len(shape) - first < 2:
        return PartitionSpec()
    entries: list[str | None] = [None] * len(shape)
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    if tensor > 1:
        for pattern, axis in _TENSOR_RULES:
            if re.search(pattern, name) and shape[axis] % tensor == 0:
                entries[axis] = "tensor"
    if fsdp > 1:
        free = [
            axis
            for axis in range(first, len(shape))
            if entries[axis] is None and shape[axis] > 0 and shape[axis] % fsdp == 0
        ]
        if free:
            entries[max(free, key=lambda axis: shape[axis])] = "fsdp"
    return PartitionSpec(*entries)


def param_specs(params: PyTree, mesh: Mesh) -> PyTree:
    """Which axis of each parameter is split over which mesh axis.

    `tensor` splits the head axis of attention kernels and the hidden axis of MLP kernels (by name); `fsdp`
    splits the largest axis that is left and that it divides; vectors, and axes that do not divide, are
    replicated. The leading axis of stacked layers is never split.

    Args:
        params: arrays, or anything with a shape, in any pytree.
        mesh: a mesh of `make_mesh`.

    Returns:
        The same tree with a `PartitionSpec` for each leaf.

    Example:
        >>> mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
        >>> specs = param_specs({"mlp": {"up": {"kernel": np.zeros((4, 8))}}}, mesh)
        >>> tuple(specs["mlp"]["up"]["kernel"])
        (None, None)
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _spec(_name(path), leaf.shape, mesh), params)


def state_specs(optimizer_state: PyTree, params: PyTree, mesh: Mesh) -> PyTree:
    """Specs of an optimizer's state: what belongs to a parameter is split as that parameter is.

    A state leaf belongs to the parameter whose path its own path ends with. Axes on which the two differ in
    size (row or column statistics kept with size 1) and leaves of another rank are replicated.

    Args:
        optimizer_state: arrays, or anything with a shape.
        params: the parameters that the state was made for.
        mesh: a mesh of `make_mesh`.

    Returns:
        The structure of `optimizer_state` with a `PartitionSpec` for each leaf.

    Example:
        >>> import optax
        >>> mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
        >>> params = {"kernel": np.zeros((4, 8), np.float32)}
        >>> tuple(state_specs(optax.trace(0.9).init(params), params, mesh).trace["kernel"])
        (None, None)
    """
    table: dict[tuple[Any, ...], tuple[tuple[int, ...], PartitionSpec]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        table[tuple(path)] = (tuple(leaf.shape), _spec(_name(path), tuple(leaf.shape), mesh))

    def spec(path, leaf) -> PartitionSpec:
        for start in range(len(path) + 1):
            if tuple(path[start:]) in table:
                shape, owner = table[tuple(path[start:])]
                if len(shape) != len(leaf.shape):
                    return PartitionSpec()
                entries = tuple(owner) + (None,) * (len(shape) - len(tuple(owner)))
                return PartitionSpec(
                    *(e if own == has else None for e, own, has in zip(entries, shape, leaf.shape))
                )
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, optimizer_state)


def shard_tree(tree: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    """Places arrays on the mesh; inside jit, constrains them to be placed so.

    Args:
        tree: arrays. Outside jit and with several processes, each process holds the whole value.
        specs: the same tree of `PartitionSpec`.
        mesh: a mesh of `make_mesh`.

    Returns:
        The tree as global arrays.

    Example:
        >>> mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
        >>> shard_tree({"w": np.ones(2)}, {"w": PartitionSpec()}, mesh)["w"].sharding.is_fully_replicated
        True
    """

    def place(leaf, spec):
        sharding = NamedSharding(mesh, spec)
        if isinstance(leaf, Tracer):
            return jax.lax.with_sharding_constraint(leaf, sharding)
        return jax.device_put(leaf, sharding)

    return jax.tree.map(place, tree, specs)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: the leading axis over data and fsdp, everything else whole.

    Example:
        >>> tuple(batch_sharding(make_mesh({"data": 1}, devices=jax.devices()[:1])).spec)
        (('data', 'fsdp'),)
    """
    return NamedSharding(mesh, PartitionSpec(_BATCH_AXES))


def to_global(batch: PyTree, mesh: Mesh) -> PyTree:
    """Makes one global batch out of the rows that each process holds.

    Args:
        batch: NumPy arrays [rows of this process, ...]; every process gives equally many rows.
        mesh: a mesh of `make_mesh`.

    Returns:
        The same tree of global arrays [rows of all processes, ...]; arrays that are global already pass
        unchanged.

    Raises:
        ValueError: if the rows do not divide over the data and fsdp axes.

    Example:
        >>> mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
        >>> to_global({"tokens": np.zeros((2, 5), np.int32)}, mesh)["tokens"].shape
        (2, 5)
    """
    sharding = batch_sharding(mesh)
    parts = mesh.shape["data"] * mesh.shape["fsdp"]

    def place(leaf):
        if isinstance(leaf, Tracer):
            return leaf
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == set(mesh.devices.flat):
            return leaf
        leaf = np.asarray(leaf)
        rows = leaf.shape[0] * jax.process_count() if leaf.ndim else 0
        if rows == 0 or rows % parts:
            raise ValueError(
                f"a batch of {rows} rows does not divide over data × fsdp = {parts} devices; "
                f"use a batch size that is a multiple of {parts}"
            )
        return jax.make_array_from_process_local_data(sharding, leaf)

    return jax.tree.map(place, batch)


def to_host(tree: PyTree) -> PyTree:
    """The whole of every array as NumPy, on every process; all processes must call it.

    Args:
        tree: arrays, spread over the devices of one or many processes.

    Returns:
        The same tree of NumPy arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> to_host({"w": jnp.ones(2)})
        {'w': array([1., 1.], dtype=float32)}
    """
    if jax.process_count() == 1:
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


def sync_processes(name: str) -> None:
    """Waits until every process of the job has come here; with one process nothing happens.

    Args:
        name: what is waited for; the same in every process.

    Example:
        >>> sync_processes("the folder is made")
    """
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
