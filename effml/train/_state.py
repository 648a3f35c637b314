"""What a training step changes, and how it is made and placed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key, PyTree

from effml.train import sharding

__all__ = ["CACHE_SIZE", "Function", "TrainState", "check_optimizer", "constrain", "init_state", "placement"]

CACHE_SIZE = 32  # compiled programs kept for each kind of function


class TrainState(NamedTuple):
    """Everything that a training step changes.

    Fields:
        step: int32 scalar, number of updates done.
        params: pytree of parameters.
        optimizer_state: the optax state.
        key: typed PRNG key of the run; step t uses `fold_in(key, t)`, so the key itself never changes.
        first_bad_step: int32 scalar, number of the first step whose loss or gradient was not finite, −1 while
            none was.
    """

    step: Int[Array, ""]
    params: PyTree
    optimizer_state: PyTree
    key: Key[Array, ""]
    first_bad_step: Int[Array, ""] | np.int32 = np.int32(-1)


class Function:
    """A callable that is equal to another if both call the same function with the same bound arguments."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.identity: Any = function
        if isinstance(function, functools.partial):
            bound = (*enumerate(function.args), *sorted(function.keywords.items()))
            try:
                # With types, because 1 == 1.0 == True and a function may tell them apart.
                self.identity = (function.func, bound, tuple(type(value) for _, value in bound))
                hash(self.identity)
            except TypeError:
                self.identity = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


def check_optimizer(optimizer: Any) -> None:
    """Raises `TypeError` for what is not an optax transformation, such as `optax.adam` itself."""
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise TypeError(
            f"optimizer={type(optimizer).__name__} is not an optax.GradientTransformation; "
            "pass the object itself, such as optax.adamw(1e-3)"
        )


def init_state(
    key: Key[Array, ""],
    init_params: Callable[[Key[Array, ""]], PyTree] | PyTree,
    optimizer: optax.GradientTransformation | optax.GradientTransformationExtraArgs,
    *,
    mesh: Mesh | None = None,
) -> TrainState:
    """Makes the state that training starts from; with a mesh every array is created in its place.

    Args:
        key: typed PRNG key (`jax.random.key`); one half initialises, the other drives the steps.
        init_params: a function from a key to parameters, compiled as a whole; or the parameters themselves,
            which are copied, because a training step consumes its state.
        optimizer: the optax optimizer.
        mesh: a mesh of `make_mesh`, or None for one device.

    Returns:
        The state at step 0.

    Raises:
        TypeError: for an optimizer that is not one, or a key that is not typed.

    Example:
        >>> state = init_state(jax.random.key(0), {"w": jnp.ones(3)}, optax.sgd(0.1))
        >>> int(state.step), state.params["w"].shape
        (0, (3,))
    """
    check_optimizer(optimizer)
    if not jnp.issubdtype(getattr(key, "dtype", np.dtype(int)), jax.dtypes.prng_key):
        raise TypeError("key must be a typed PRNG key, from jax.random.key(seed)")
    if callable(init_params) and mesh is None:
        # Two programs: the parameters' takes long to compile, and does not depend on the optimizer.
        params = _parameters(Function(init_params))(jax.random.split(key)[0])
        return _state_around(optimizer)(key, params)
    if callable(init_params):
        return _initializer(Function(init_params), optimizer, mesh)(key)
    # Onto a mesh they travel by way of the host: they may sit on a device that is not part of it.
    params = jax.tree.map(jnp.asarray if mesh is None else np.asarray, init_params)
    return _place_initializer(optimizer, mesh)(key, params)


@functools.lru_cache(maxsize=CACHE_SIZE)
def _parameters(init: Function) -> Any:
    return jax.jit(lambda key: jax.tree.map(_strong, init.function(key)))


@functools.lru_cache(maxsize=CACHE_SIZE)
def _state_around(optimizer: Any) -> Any:
    def initial_state(key, params):
        return _fresh(params, optimizer, jax.random.split(key)[1], None)

    return jax.jit(initial_state, donate_argnums=1)


@functools.lru_cache(maxsize=CACHE_SIZE)
def _initializer(init: Function, optimizer: Any, mesh: Mesh | None) -> Any:
    def initial_state(key):
        init_key, run_key = jax.random.split(key)
        return _fresh(init.function(init_key), optimizer, run_key, mesh)

    return jax.jit(initial_state)


@functools.lru_cache(maxsize=CACHE_SIZE)
def _place_initializer(optimizer: Any, mesh: Mesh | None) -> Any:
    def initial_state(key, params):
        return _fresh(jax.tree.map(jnp.copy, params), optimizer, jax.random.split(key)[1], mesh)

    return jax.jit(initial_state)


def _strong(leaf: Array) -> Array:
    # A weakly typed leaf would come back strongly typed from the first step, and the second would compile
    # again.
    return leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else leaf.astype(leaf.dtype)


def _fresh(params: PyTree, optimizer: Any, key: Array, mesh: Mesh | None) -> TrainState:
    params = jax.tree.map(_strong, params)
    optimizer_state = jax.tree.map(lambda a: _strong(jnp.asarray(a)), optimizer.init(params))
    return constrain(TrainState(jnp.int32(0), params, optimizer_state, key, jnp.int32(-1)), mesh)


def placement(state: TrainState, mesh: Mesh) -> TrainState:
    """The sharding of every array of a state, in a state's place: parameters and what belongs to them are split."""
    whole = NamedSharding(mesh, PartitionSpec())

    def named(specs: PyTree) -> PyTree:
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            specs,
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )

    return state._replace(
        step=whole,
        params=named(sharding.param_specs(state.params, mesh)),
        optimizer_state=named(sharding.state_specs(state.optimizer_state, state.params, mesh)),
        key=whole,
        first_bad_step=whole,
    )


def constrain(state: TrainState, mesh: Mesh | None) -> TrainState:
    """Inside jit: fixes every array of a state to its place on the mesh."""
    if mesh is None:
        return state
    return jax.tree.map(jax.lax.with_sharding_constraint, state, placement(state, mesh))
