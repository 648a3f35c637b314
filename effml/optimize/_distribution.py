"""Newton-Schulz over the devices of a mesh: whole matrices are exchanged, not products of their slices.

Where parameters are split over devices, the products of Newton-Schulz would sum a Gram matrix over all of
them at every step and repeat its square everywhere: five all-reduces per matrix. Instead all matrices of one
shape are stacked, one all-to-all gives each device some of them whole, each device orthogonalises its own,
and one all-to-all brings the slices back. What follows needs no matrix: the statistic of a neuron is local
where outputs are split and one sum of [matrices, outputs] where inputs are; the norm of each update is one
sum of a vector with one number per matrix.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from effml._validate import one_of
from effml.optimize._layout import Layout, Path, described

__all__ = ["Distribution"]

INPUTS, OUTPUTS = 1, 2  # axes of a stack of matrices


@dataclass(frozen=True)
class Distribution:
    """How the orthogonalisation of a sharded model is spread over a mesh.

    Attributes:
        mesh: the mesh that the parameters live on, with Auto axes (`effml.train.make_mesh`).
        axis: the mesh axis, or axes, over which matrices are split.
        mode: `shard_map` (two explicit all-to-alls per shape) or `constraint` (shardings are asked for, and
            the compiler chooses how to get there; on large TPU meshes it was seen to gather everything).
        specs: how the parameters are split: a tree of `PartitionSpec` (or `NamedSharding`), or a function
            from the parameters to it. None = what `effml.train` does, on its meshes; on others the largest
            axis that `axis` divides. A wrong spec costs communication, not correctness.
        spread: further mesh axes (or the name of one), over which the parameters are replicated (data
            parallelism): each replica then orthogonalises its share of the matrices, for one more all-gather
            per shape.

    Raises:
        ValueError: no axis, an axis that the mesh has not, that is named twice or is not Auto, or an unknown mode.
        TypeError: a mesh that is none.

    Example:
        >>> mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> Distribution(mesh, "fsdp").parts
        1
    """

    mesh: Mesh | AbstractMesh | Any
    axis: str | tuple[str, ...] = "fsdp"
    mode: str = "shard_map"
    specs: PyTree | Callable[[PyTree], PyTree] | None = None
    spread: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of("mode", self.mode, ("shard_map", "constraint"))
        if not isinstance(self.mesh, (Mesh, AbstractMesh)):
            raise TypeError(f"mesh={self.mesh!r} is no mesh; jax.make_mesh makes one")
        # One name is one axis, as in `axis`; a string would be spelt out.
        spread = (self.spread,) if isinstance(self.spread, str) else tuple(self.spread)
        object.__setattr__(self, "spread", spread)
        if not self.axes:
            raise ValueError(f"axis={self.axis!r} names no axis of the mesh")
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types))
        for argument, axes in (("axis", self.axes), ("spread", self.spread)):
            for axis in axes:
                if axis not in types:
                    raise ValueError(
                        f"{argument}={axis!r} is no axis of the mesh (axes: {', '.join(self.mesh.axis_names)})"
                    )
                if types[axis] != AxisType.Auto:
                    raise ValueError(
                        f"{argument}={axis!r} is an axis of the type {types[axis].name}, and must be Auto: "
                        f"jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * {len(types)})"
                    )
            if len(set(axes)) < len(axes):
                raise ValueError(f"{argument}={axes!r} names an axis twice")
        if set(self.axes) & set(self.spread):
            raise ValueError(f"spread={self.spread!r} repeats axis={self.axis!r}")

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split matrices."""
        return (self.axis,) if isinstance(self.axis, str) else tuple(self.axis)

    @property
    def parts(self) -> int:
        """Over how many devices a matrix is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def platform(self) -> str | None:
        """`cpu`, `gpu`, `tpu`, ...; None where the mesh has no devices."""
        return self.mesh.devices.flat[0].platform if isinstance(self.mesh, Mesh) else None


class Item(NamedTuple):
    """One leaf on its way: its matrices float32[batch, inputs, outputs] and its statistic [batch, units]."""

    matrices: jax.Array
    rows: jax.Array


class Reductions(NamedTuple):
    """What completes sums over a part of a matrix: over the axis that a statistic sums, and over units."""

    within: Callable[[jax.Array], jax.Array] = lambda value: value
    across: Callable[[jax.Array], jax.Array] = lambda value: value


# finish(orthogonal [n, inputs, outputs], rows [n, units], whole shape (inputs, outputs), reductions)
Finish = Callable[..., tuple[jax.Array, jax.Array]]


def split_sides(
    distribution: Distribution, tree: PyTree, layouts: dict[Path, Layout], warn: bool
) -> dict[Path, int | None]:
    """For each leaf that takes part in the exchange, which axis of its matrices is split; None = replicated.

    Leaves whose batch axes are split take no part, as each device holds whole matrices of them already; nor
    do those that are split in a way that the exchange can't undo, which is warned about.
    """
    specs = distribution.specs
    if specs is None:
        specs = _usual_specs(distribution, tree, layouts)
    elif callable(specs):
        specs = specs(tree)
    is_spec = lambda node: isinstance(node, (PartitionSpec, NamedSharding))
    by_path = {
        tuple(path): spec for path, spec in jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]
    }
    sides: dict[Path, int | None] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        placed = _sharding(leaf) if distribution.specs is None else None
        spec = placed or by_path.get(tuple(path), PartitionSpec())
        takes_part, side, reason = _side(distribution, spec, layouts[tuple(path)])
        if takes_part:
            sides[tuple(path)] = side
        elif reason and warn:
            warnings.warn(
                f"{described(path, leaf)} is orthogonalised on its own, which costs communication at every "
                f"step of Newton-Schulz: {reason}",
                stacklevel=2,
            )
    return sides


def _sharding(leaf: Any) -> NamedSharding | None:
    """Where an array lies, if it is an array and lies on a mesh."""
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
        return None
    return leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None


def _usual_specs(distribution: Distribution, tree: PyTree, layouts: dict[Path, Layout]) -> PyTree:
    from effml.train import sharding

    mesh = distribution.mesh
    if isinstance(mesh, Mesh) and set(mesh.axis_names) == set(sharding.AXES):
        return sharding.param_specs(tree, mesh)

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        layout = layouts[tuple(path)]
        firsts = [layout.inputs[0], layout.outputs[0]]
        free = [axis for axis in firsts if leaf.shape[axis] and leaf.shape[axis] % distribution.parts == 0]
        entries: list[Any] = [None] * leaf.ndim
        if free:
            entries[max(free, key=lambda axis: leaf.shape[axis])] = distribution.axes
        return PartitionSpec(*entries)

    return jax.tree_util.tree_map_with_path(spec, tree)


def _side(
    distribution: Distribution, spec: PartitionSpec | NamedSharding, layout: Layout
) -> tuple[bool, int | None, str]:
    """Whether a leaf takes part, which side of its matrices is split, and if it can't take part, why."""
    if isinstance(spec, NamedSharding):
        if spec.mesh.axis_names != distribution.mesh.axis_names or spec.mesh.shape != distribution.mesh.shape:
            return False, None, "it lies on another mesh"
        spec = spec.spec
    sizes = distribution.mesh.shape
    real = lambda names: tuple(name for name in names if sizes[name] > 1)
    split = {axis: real(_names(entry)) for axis, entry in enumerate(spec) if real(_names(entry))}
    matrix_axes = [axis for axis in split if axis not in layout.batch]
    if not matrix_axes:
        return not split, None, ""
    if len(split) > 1:
        return False, None, f"it is split over several of its axes, as {spec}"
    (axis,) = matrix_axes
    if split[axis] != real(distribution.axes):
        return False, None, f"it is split over {split[axis]}, not over {distribution.axes}"
    for side, axes in ((INPUTS, layout.inputs), (OUTPUTS, layout.outputs)):
        if axis == axes[0]:
            return True, side, ""
    return False, None, f"it is split over axis {axis}, which is not the first of its input or output axes"


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def exchange(
    distribution: Distribution,
    items: Sequence[Item],
    sides: Sequence[int | None],
    kept: Sequence[int],
    orthogonalize: Callable[[jax.Array], jax.Array],
    finish: Finish,
    dtype: Any,
) -> list[Item]:
    """Orthogonalises the matrices of all items and finishes them, one exchange per shape.

    Args:
        distribution: mesh and axes.
        items: the leaves.
        sides: for each, which axis of its matrices is split (`INPUTS`, `OUTPUTS`), or None.
        kept: for each, the axis whose units have a statistic.
        orthogonalize: [n, inputs, outputs] to the same, one matrix at a time.
        finish: see `Finish`; it gets what is local and completes its sums by `Reductions`.
        dtype: in which matrices travel and are orthogonalised.

    Returns:
        Items with the finished matrices and the new statistics.
    """
    groups: dict[Any, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault((item.matrices.shape[1:], sides[index], kept[index]), []).append(index)
    results = list(items)
    run = _by_shard_map if distribution.mode == "shard_map" else _by_constraint
    for (shape, side, kept_axis), members in groups.items():
        counts = [items[index].matrices.shape[0] for index in members]
        stack = jnp.concatenate([items[index].matrices for index in members])
        rows = jnp.concatenate([items[index].rows for index in members])
        stack, rows = run(distribution, stack, rows, shape, side, kept_axis, orthogonalize, finish, dtype)
        start = 0
        for index, size in zip(members, counts):
            results[index] = Item(stack[start : start + size], rows[start : start + size])
            start += size
    return results


def _padded(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % multiple)
    return jnp.pad(array, widths)


def _specs(distribution: Distribution, side: int | None, kept: int) -> tuple[PartitionSpec, PartitionSpec]:
    """How a stack of matrices and its statistics are split."""
    entries: list[Any] = [None, None, None]
    if side is not None:
        entries[side] = distribution.axes
    return PartitionSpec(*entries), PartitionSpec(None, distribution.axes if side == kept else None)


def _by_shard_map(
    distribution: Distribution,
    stack: jax.Array,
    rows: jax.Array,
    shape: tuple[int, int],
    side: int | None,
    kept: int,
    orthogonalize: Callable[[jax.Array], jax.Array],
    finish: Finish,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    axes, mesh = distribution.axes, distribution.mesh
    # Replicas, and all devices where nothing is split, take a share of the matrices each.
    sharing = distribution.spread if side is not None else (*distribution.spread, *axes)
    shares = math.prod(mesh.shape[axis] for axis in sharing)
    count = stack.shape[0]
    per_device = shares * (distribution.parts if side is not None else 1)
    whole = shape[side - 1] if side is not None else 0
    pad = lambda array, axis: array if side is None else _padded(array, axis, distribution.parts)
    # A zero matrix, or zero rows of one, stay zero.
    stack = pad(_padded(stack, 0, per_device), side or 0)
    rows = _padded(rows, 0, per_device)
    rows = pad(rows, 1) if side == kept else rows

    def swap(x: jax.Array, split: int, join: int) -> jax.Array:
        return jax.lax.all_to_all(x, axes, split_axis=split, concat_axis=join, tiled=True)

    def total(value: jax.Array) -> jax.Array:
        return jax.lax.psum(value, axes)

    def local(stack: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = stack.astype(dtype)
        if shares > 1:
            size = x.shape[0] // shares
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(sharing) * size, size)
        if side is not None:
            x = swap(x, 0, side)
            padded = x.shape[side]
            x = orthogonalize(jax.lax.slice_in_dim(x, 0, whole, axis=side))
            x = swap(_padded(x, side, padded), side, 0)
        else:
            x = orthogonalize(x)
        if shares > 1:
            x = jax.lax.all_gather(x, sharing, axis=0, tiled=True)
        within = total if side is not None and side != kept else Reductions().within
        across = total if side is not None and side == kept else Reductions().across
        return finish(x.astype(stack.dtype), rows, shape, kept, Reductions(within, across))

    matrix_spec, row_spec = _specs(distribution, side, kept)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(matrix_spec, row_spec), out_specs=(matrix_spec, row_spec), check_vma=False
    )
    stack, rows = mapped(stack, rows)
    return stack[:count, : shape[0], : shape[1]], rows[:count, : shape[kept - 1]]


def _by_constraint(
    distribution: Distribution,
    stack: jax.Array,
    rows: jax.Array,
    shape: tuple[int, int],
    side: int | None,
    kept: int,
    orthogonalize: Callable[[jax.Array], jax.Array],
    finish: Finish,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    count, devices = stack.shape[0], (*distribution.spread, *distribution.axes)
    matrix_spec, _ = _specs(distribution, side, kept)
    place = lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(distribution.mesh, spec))
    per_device = math.prod(distribution.mesh.shape[axis] for axis in devices)
    x = _padded(stack.astype(dtype), 0, per_device)
    # Both sides of Newton-Schulz are pinned, or the compiler carries the last sharding back into its loop.
    x = place(orthogonalize(place(x, PartitionSpec(devices))), PartitionSpec(devices))
    if side is None or shape[side - 1] % distribution.parts == 0:
        x = place(x, matrix_spec)
    x = x[:count].astype(stack.dtype)
    return finish(x, rows, shape, kept, Reductions())
