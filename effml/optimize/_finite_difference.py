"""Partial derivatives of a loss that can only be evaluated, a few coordinates at a time.

All parameters are one vector, leaf after leaf in tree order (`jax.tree.leaves`: dictionary keys sorted) and
row-major within a leaf; a coordinate is a position in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from effml import trees
from effml._validate import count, positive

__all__ = ["fill_masked", "finite_difference_coordinates"]

DEFAULT_CHUNK = 16
ValueFn = Callable[[PyTree], Any]


def finite_difference_coordinates(
    value_fn: ValueFn,
    params: PyTree,
    indices: Any,
    eps: Any,
    central: bool = True,
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> jax.Array:
    """The partial derivatives of a loss at some coordinates, from its values alone.

        d_i = (f(x + eps e_i) - f(x - eps e_i)) / (2 eps)        central: 2 B evaluations, error O(eps^2)
        d_i = (f(x + eps e_i) - f(x)) / eps                      one-sided: B + 1 evaluations, error O(eps)

    The central difference is the mean of the true partial over [-eps, eps] along e_i, so a large `eps` also
    smooths the loss. In float32 a difference is off by about 1e-7 |f| / eps.

    Coordinates are moved in float32 at least: `value_fn` gets bfloat16 and float16 leaves as float32, because
    x + eps may be x again in bfloat16 (its spacing at 1 is 0.0078). Wider leaves keep their dtype.

    Args:
        value_fn: loss(params) -> scalar. It must be the same function in all evaluations: the same batch, the
            same random keys.
        params: floating-point parameters, any tree.
        indices: int[B], positions in the vector of all parameters.
        eps: distance moved, > 0.
        central: central or one-sided differences.
        chunk: how many evaluations run at once (`jax.vmap`), each with a copy of the parameters; None = 16,
            1 = one after the other.
        mesh: spreads the evaluations over all devices of a mesh; None = no spreading.

    Returns:
        [B] derivatives, in float32 (float64 if a parameter is). They may be infinite or NaN where the loss is.

    Raises:
        ValueError: `eps` <= 0, `chunk` <= 0, an index out of range, parameters that are not floating-point or
            are none at all, a value that is no scalar, indices that are not integers.
        TypeError: `indices` is neither a list nor an array.

    Source: Liang, Sun, Wang, Rakita, arXiv 2605.14373. Sharing one base value among one-sided differences is
    ours.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = lambda p: jnp.sum(p["w"] ** 2) + 3 * p["b"]
        >>> params = {"b": jnp.array(0.0), "w": jnp.array([1.0, 2.0])}
        >>> finite_difference_coordinates(loss, params, jnp.array([0, 2]), 0.5).tolist()
        [3.0, 4.0]
    """
    if isinstance(eps, (int, float)):
        positive("eps", eps)
    if chunk is not None:
        count("chunk", chunk)
    size = coordinate_count(params)
    if isinstance(indices, (list, tuple)):
        indices = np.asarray(indices) if len(indices) else np.zeros(0, np.int32)
    if not hasattr(indices, "ndim"):
        raise TypeError(f"indices={indices!r} must be a list or an array of integers, int[B]")
    if indices.ndim != 1 or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(f"indices has shape {indices.shape} and dtype {indices.dtype}, not int[B]")
    if not isinstance(indices, Tracer):
        wrong = [int(i) for i in np.asarray(indices) if not 0 <= i < size]
        if wrong:
            raise ValueError(
                f"indices holds {wrong[0]}, but there are {size} coordinates, from 0 to {size - 1}"
            )
    return differences(value_fn, params, jnp.asarray(indices, jnp.int32), eps, central, chunk, mesh)[0]


def differences(
    value_fn: ValueFn,
    params: PyTree,
    indices: jax.Array,
    eps: Any,
    central: bool,
    chunk: int | None,
    mesh: jax.sharding.Mesh | None,
) -> tuple[jax.Array, jax.Array]:
    """The differences at `indices`, and f(x) (one-sided) or the mean of all values (central)."""
    vector, restore = flatten(params)
    check_scalar(value_fn, restore, vector)
    width = indices.shape[0]
    eps = jnp.asarray(eps, vector.dtype)
    if central:
        places = jnp.concatenate([indices, indices])
        moves = jnp.concatenate([jnp.full(width, eps), jnp.full(width, -eps)])
    else:
        places = jnp.concatenate([indices, jnp.zeros(1, jnp.int32)])
        moves = jnp.concatenate([jnp.full(width, eps), jnp.zeros(1, vector.dtype)])
    values = _evaluate(value_fn, restore, vector, places, moves, chunk or DEFAULT_CHUNK, mesh)
    if central:
        return (values[:width] - values[width:]) / (2 * eps), values.mean()
    return (values[:-1] - values[-1]) / eps, values[-1]


def _evaluate(
    value_fn: ValueFn,
    restore: Callable[[jax.Array], PyTree],
    vector: jax.Array,
    places: jax.Array,
    moves: jax.Array,
    chunk: int,
    mesh: jax.sharding.Mesh | None,
) -> jax.Array:
    """f at `vector` with one coordinate moved, for every (place, move)."""

    def several(vector: jax.Array, places: jax.Array, moves: jax.Array) -> jax.Array:
        def one(where: tuple[jax.Array, jax.Array]) -> jax.Array:
            place, move = where
            return jnp.asarray(value_fn(restore(vector.at[place].add(move)))).astype(vector.dtype)

        if 1 < places.shape[0] <= chunk:
            return jax.vmap(one)((places, moves))
        return jax.lax.map(one, (places, moves), batch_size=chunk if chunk > 1 else None)

    if mesh is None:
        return several(vector, places, moves)
    # Every device takes the same number of evaluations; the last ones are repeated to fill up.
    total = places.shape[0]
    filling = (0, -total % mesh.size)
    spread = jax.sharding.PartitionSpec(mesh.axis_names)
    whole = jax.sharding.PartitionSpec()
    shared = jax.shard_map(
        several, mesh=mesh, in_specs=(whole, spread, spread), out_specs=spread, check_vma=False
    )
    put = lambda array, spec: jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))
    vector = put(vector, whole)
    places, moves = (put(jnp.pad(array, filling, "edge"), spread) for array in (places, moves))
    return put(shared(vector, places, moves), whole)[:total]


def coordinate_count(params: PyTree) -> int:
    """How many coordinates there are, after checking that all of them can be moved."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    for path, leaf in leaves:
        name = trees.path_name(path) or "params"
        if not hasattr(leaf, "dtype"):
            raise TypeError(f"parameter {name!r} is a {type(leaf).__name__}, not an array")
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"parameter {name!r} has dtype {leaf.dtype}; coordinates must be floating-point numbers. "
                "Leave it out with optax.masked, and wrap the loss in effml.optimize.fill_masked"
            )
    size = sum(leaf.size for _, leaf in leaves)
    if not size:
        raise ValueError("params holds no numbers: there is no coordinate to move")
    if size >= 2**31:
        raise ValueError(f"params holds {size:,} numbers; coordinates are counted in int32, up to 2^31 - 1")
    return size


def flatten(params: PyTree) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
    """All parameters as one vector of the widest dtype, at least float32, and the way back.

    On the way back each leaf has its own dtype, or float32 if that is narrower.
    """
    leaves, treedef = jax.tree.flatten(params)
    dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in leaves))
    vector = jnp.concatenate([jnp.ravel(leaf).astype(dtype) for leaf in leaves])
    return vector, lambda moved: treedef.unflatten(
        [
            part.astype(jnp.promote_types(leaf.dtype, jnp.float32))
            for part, leaf in zip(split(moved, leaves), leaves)
        ]
    )


def split(vector: jax.Array, leaves: list[Any]) -> list[jax.Array]:
    """The pieces of a vector in the shapes of `leaves`."""
    ends = np.cumsum([leaf.size for leaf in leaves])
    return [vector[end - leaf.size : end].reshape(leaf.shape) for end, leaf in zip(map(int, ends), leaves)]


def check_scalar(value_fn: ValueFn, restore: Callable[[jax.Array], PyTree], vector: jax.Array) -> None:
    """Raises unless `value_fn` returns one real number."""
    value = jax.eval_shape(lambda vector: value_fn(restore(vector)), vector)
    if getattr(value, "shape", None) != () or jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise ValueError(
            "value_fn must return one real number, not "
            f"{getattr(value, 'dtype', type(value).__name__)}{list(getattr(value, 'shape', ()))}"
        )


def fill_masked(value_fn: ValueFn, params: PyTree) -> ValueFn:
    """A loss of the whole parameters as a loss of the few that an optimizer moves, the others held at `params`.

    Under `optax.masked` and `optax.partition` an optimizer sees a tree with holes; a loss needs all leaves.

    Args:
        value_fn: loss(params) of a whole tree.
        params: the whole tree.

    Returns:
        loss(tree with `optax.MaskedNode` holes).

    Example:
        >>> import jax.numpy as jnp, optax
        >>> params = {"body": jnp.array(2.0), "head": jnp.array(3.0)}
        >>> loss = fill_masked(lambda p: p["body"] * p["head"], params)
        >>> float(loss({"body": optax.MaskedNode(), "head": jnp.array(5.0)}))
        10.0
    """
    from optax import MaskedNode

    def is_hole(node: Any) -> bool:
        return isinstance(node, MaskedNode)

    def filled(tree: PyTree) -> Any:
        whole = jax.tree.map(lambda node, own: own if is_hole(node) else node, tree, params, is_leaf=is_hole)
        return value_fn(whole)

    return filled
