"""Leaves of any shape as stacks of matrices [batch, inputs, outputs], and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree
from optax.contrib import MuonDimensionNumbers

from effml import trees

Specs = MuonDimensionNumbers | Callable[[PyTree], PyTree] | PyTree | None
Path = tuple[Any, ...]


class Layout(NamedTuple):
    """The axes of one leaf: those that count separate matrices, the inputs and the outputs."""

    batch: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def described(path: Sequence[Any], leaf: Any) -> str:
    """How errors call a leaf."""
    return f"{trees.path_name(path) or 'the leaf'} of shape {tuple(leaf.shape)}"


def layouts(caller: str, specs: Specs, tree: PyTree) -> dict[Path, Layout]:
    """The layout of each leaf, by its path, so that a masked tree finds its own among all of them.

    Args:
        caller: the function that the user called, for messages.
        specs: None = by the names and shapes of `effml.trees.dimension_numbers`; one `MuonDimensionNumbers`
            for every leaf; a tree of them; or a function from the tree to such a tree.
        tree: arrays, or anything with a shape.

    Raises:
        ValueError: a leaf with fewer than two axes or without a spec; axes that do not exist, that are both
            input and output, or none at all.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    for path, leaf in leaves:
        if leaf.ndim < 2:
            raise ValueError(
                f"{caller}: {described(path, leaf)} needs an input and an output axis. Send vectors to another "
                f"optimizer (effml.optimize.{caller.removeprefix('scale_by_')} does)"
            )
    if isinstance(specs, MuonDimensionNumbers):
        by_path: dict[Path, Any] = {tuple(path): specs for path, _ in leaves}
    else:
        chosen = trees.dimension_numbers if specs is None else specs
        chosen = chosen(tree) if callable(chosen) else chosen
        is_spec = lambda node: node is None or isinstance(node, MuonDimensionNumbers)
        by_path = {
            tuple(path): spec
            for path, spec in jax.tree_util.tree_flatten_with_path(chosen, is_leaf=is_spec)[0]
        }
    return {tuple(path): _layout(caller, path, leaf, by_path.get(tuple(path))) for path, leaf in leaves}


def _layout(caller: str, path: Any, leaf: Any, spec: MuonDimensionNumbers | None) -> Layout:
    if spec is None:
        raise ValueError(f"{caller}: no axes are given for {described(path, leaf)}")
    groups = []
    for kind, axes in (("input", spec.reduction_axis), ("output", spec.output_axis)):
        axes = (axes,) if isinstance(axes, int) else tuple(axes)
        if not axes or any(not -leaf.ndim <= axis < leaf.ndim for axis in axes):
            raise ValueError(f"{caller}: {kind} axes {axes} are given for {described(path, leaf)}")
        groups.append(tuple(axis % leaf.ndim for axis in axes))
    inputs, outputs = groups
    if len({*inputs, *outputs}) != len(inputs) + len(outputs):
        raise ValueError(
            f"{caller}: input axes {inputs} and output axes {outputs} overlap for {described(path, leaf)}"
        )
    batch = tuple(axis for axis in range(leaf.ndim) if axis not in inputs + outputs)
    return Layout(batch, inputs, outputs)


def _size(shape: Sequence[int], axes: Sequence[int]) -> int:
    return math.prod(shape[axis] for axis in axes)


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def matrix_shape(shape: Sequence[int], layout: Layout) -> tuple[int, int, int]:
    """(batch, inputs, outputs) of a leaf."""
    batch, inputs, outputs = (_size(shape, axes) for axes in layout)
    return batch, inputs, outputs


def to_matrices(leaf: jax.Array, layout: Layout) -> jax.Array:
    """[batch, inputs, outputs] of a leaf."""
    order = layout.batch + layout.inputs + layout.outputs
    return leaf.transpose(order).reshape(matrix_shape(leaf.shape, layout))


def from_matrices(matrices: jax.Array, shape: Sequence[int], layout: Layout) -> jax.Array:
    """The inverse of `to_matrices` for a leaf of that shape."""
    order = layout.batch + layout.inputs + layout.outputs
    return matrices.reshape([shape[axis] for axis in order]).transpose(_inverse(order))


def statistic_shape(shape: Sequence[int], layout: Layout, kept: Sequence[int]) -> tuple[int, ...]:
    """The shape of one number per unit: the leaf's, with 1 for the axes that are neither batch nor `kept`."""
    return tuple(size if axis in layout.batch or axis in kept else 1 for axis, size in enumerate(shape))


def to_rows(statistic: jax.Array, layout: Layout, kept: Sequence[int]) -> jax.Array:
    """[batch, units] of a statistic that has its leaf's axes."""
    rest = tuple(axis for axis in range(statistic.ndim) if axis not in layout.batch and axis not in kept)
    rows = statistic.transpose(layout.batch + tuple(kept) + rest)
    return rows.reshape(_size(statistic.shape, layout.batch), _size(statistic.shape, kept))


def from_rows(rows: jax.Array, shape: Sequence[int], layout: Layout, kept: Sequence[int]) -> jax.Array:
    """The inverse of `to_rows`; `shape` is that of the statistic."""
    rest = tuple(axis for axis in range(len(shape)) if axis not in layout.batch and axis not in kept)
    order = layout.batch + tuple(kept) + rest
    return rows.reshape([shape[axis] for axis in order]).transpose(_inverse(order))
