"""What CoCD remembers: partial derivatives in a ring of M places, and whose turn it is.

Coordinates are visited in a fixed order, again and again. The q-th visit of all is written to place q mod M, so the
ring holds the last M visited; with M = n a place belongs to one coordinate for good.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from effml import trees

__all__ = ["CoCDState", "initial_buffer", "query_count", "scattered", "visiting_order"]

Order = Any  # int[n] or a function from the parameters to it


class CoCDState(NamedTuple):
    """The memory and where the turn is; `query_count` reads the counter of evaluations.

    buffer: [M] partial derivatives.
    cursor: int32, whose turn it is: a position in the order of coordinates.
    slot: int32, where in the buffer the next one is written.
    filled: int32, how many places of the buffer were ever written.
    queries: uint32[2], high and low part of the number of evaluations.
    last_value: f(x) of the last step (one-sided), or the mean of its values (central).
    nonfinite: int32, how many differences were infinite or NaN and became 0.
    count: int32, steps taken, for schedules.
    """

    buffer: jax.Array
    cursor: jax.Array
    slot: jax.Array
    filled: jax.Array
    queries: jax.Array
    last_value: jax.Array
    nonfinite: jax.Array
    count: jax.Array


def query_count(state: Any) -> int:
    """How many times the loss was evaluated, from any optimizer state that holds a `CoCDState`.

    Raises:
        ValueError: there is none.

    Example:
        >>> import jax.numpy as jnp
        >>> from effml.optimize import cocd
        >>> query_count(cocd(0.1).init(jnp.zeros(3)))
        0
    """
    is_ours = lambda node: isinstance(node, CoCDState)
    found = [node for node in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(node)]
    if not found:
        raise ValueError("state holds no CoCDState")
    return sum((int(own.queries[0]) << 32) + int(own.queries[1]) for own in found)


def visiting_order(order: Order, params: PyTree, size: int) -> Any:
    """int32[n], or None for tree order."""
    order = order(params) if callable(order) else order
    if order is None:
        return None
    if not isinstance(order, jax.Array):
        order = np.asarray(order)
    if order.shape != (size,) or not jnp.issubdtype(order.dtype, jnp.integer):
        raise ValueError(
            f"coordinate_order has shape {order.shape} and dtype {order.dtype}, not int[{size}] "
            "for as many coordinates"
        )
    if not isinstance(order, Tracer) and not np.array_equal(np.sort(order), np.arange(size)):
        raise ValueError(f"coordinate_order is no permutation of 0 ... {size - 1}")
    return jnp.asarray(order, jnp.int32)


def initial_buffer(init_grad: Any, params: PyTree, slots: int, order: Any, dtype: Any) -> jax.Array:
    """Zeros, or what the user gave for the first M coordinates in the order of visiting."""
    if init_grad is None:
        return jnp.zeros(slots, dtype)
    like = jax.tree.structure(params)
    is_leaf = like == jax.tree.structure(0)
    if jax.tree.structure(init_grad) == like and not (is_leaf and jnp.shape(init_grad) != params.shape):
        pairs = zip(jax.tree_util.tree_flatten_with_path(init_grad)[0], jax.tree.leaves(params))
        for (path, leaf), param in pairs:
            if jnp.shape(leaf) != param.shape:
                raise ValueError(
                    f"init_grad: {trees.path_name(path)} has shape {jnp.shape(leaf)}, the parameter has "
                    f"{tuple(param.shape)}"
                )
        vector = jnp.concatenate([jnp.ravel(jnp.asarray(leaf)) for leaf in jax.tree.leaves(init_grad)])
        vector = vector if order is None else vector[order]
        return jnp.array(vector[:slots], dtype)
    if jnp.shape(init_grad) == (slots,):
        return jnp.array(init_grad, dtype)
    raise ValueError(
        f"init_grad is neither a tree like params nor an array of shape ({slots},), one number per place of the "
        f"memory; it has the structure {jax.tree.structure(init_grad)} and shape "
        f"{getattr(init_grad, 'shape', None)}"
    )


def scattered(
    buffer: jax.Array, state: CoCDState, order: Any, size: int, vector: jax.Array, weight_decay: Any
) -> jax.Array:
    """The estimate as a vector of all coordinates: what is remembered, and 0 elsewhere."""
    slots = buffer.shape[0]
    estimate = buffer.astype(jnp.promote_types(vector.dtype, buffer.dtype))
    whole = slots == size
    if whole and order is None:
        places = None
    else:
        slot = jnp.arange(slots, dtype=jnp.int32)
        if not whole:
            # How long ago each place was written gives its coordinate; one never written waits for its own.
            age = (state.slot - 1 - slot) % slots
            slot = jnp.where(slot < state.filled, (state.cursor - 1 - age) % size, slot)
        places = slot if order is None else order[slot]
    if weight_decay is not None:
        estimate = estimate + weight_decay * (vector if places is None else vector[places])
    if places is None:
        return estimate
    return jnp.zeros(size, estimate.dtype).at[places].set(estimate, unique_indices=True)
