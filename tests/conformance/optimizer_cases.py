"""What an optimizer brings to the conformance table, and the problems all of them are tried on.

A test module `tests/optimize/test_NAME.py` takes part by defining `CASE` or `CASES`. Problems are
matrix-shaped, so that methods which need columns, singular values, two gradients or only values of the loss
can take the same trials.

`python -m tests.conformance.optimizer_cases` prints, as JSON, how far a sharded run of each case is from an
unsharded one.
"""

from __future__ import annotations

import functools
import importlib
import json
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Loss = Callable[[Any], jax.Array]


def decay_to_zero(peak: float, steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(peak, steps)


def no_extra_args(loss: Loss, params: Any, previous: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class OptimizerCase:
    """One row of the table.

    name: what the trial is called.
    factory: makes the transformation from keyword arguments, `learning_rate` among them.
    options: the other keyword arguments.
    static_args: names of `options` that `optax.inject_hyperparams` must leave alone.
    parabola_rate, rosenbrock_rate: peak learning rates.
    schedule: schedule(peak, steps); a method with steps of constant size needs one that ends at 0.
    extra_args: extra_args(loss, params, previous_params), what `update` needs beside gradient and parameters.
    multi_steps: whether accumulating gradients by `optax.MultiSteps` is legal.
    shards: whether the sharded trial applies.
    sharded_tolerance: largest difference between sharded and unsharded parameters.
    """

    name: str
    factory: Callable[..., optax.GradientTransformation]
    options: Mapping[str, Any] = field(default_factory=dict)
    static_args: tuple[str, ...] = ()
    parabola_rate: float = 0.1
    rosenbrock_rate: float = 0.1
    steps: int = 300
    schedule: Callable[[float, int], optax.Schedule] = decay_to_zero
    extra_args: Callable[[Loss, Any, Any], dict[str, Any]] = no_extra_args
    multi_steps: bool = True
    shards: bool = True
    sharded_tolerance: float = 1e-5

    def make(self, learning_rate: Any, **overrides: Any) -> optax.GradientTransformationExtraArgs:
        options = {**self.options, **overrides}
        return optax.with_extra_args_support(self.factory(learning_rate=learning_rate, **options))


def collect() -> list[OptimizerCase]:
    """Every `CASE` and `CASES` of the test modules beside `tests/conformance`."""
    cases = []
    folder = pathlib.Path(__file__).parents[1] / "optimize"
    for path in sorted(folder.glob("test_*.py")):
        module = importlib.import_module(f"tests.optimize.{path.stem}")
        cases += [module.CASE] if hasattr(module, "CASE") else []
        cases += list(getattr(module, "CASES", ()))
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"two cases share a name: {sorted(names)}")
    return cases


SHAPES = {
    "embedding": {"table": (8, 4)},
    "hidden": {"kernel": (4, 8), "bias": (8,)},
    "head": {"kernel": (8, 8)},
}


def initial_params(dtype: Any = jnp.float32, seed: int = 0) -> dict[str, Any]:
    """A small model's parameters: embedding, hidden kernel and bias, head."""
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(generator.normal(size=shape) * 0.5, dtype),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def parabola(params: Any) -> jax.Array:
    """Half the squared distance to 1, with curvatures between 1 and 3 along the first axis of every leaf."""

    def one(leaf: jax.Array) -> jax.Array:
        curvature = jnp.linspace(1.0, 3.0, leaf.shape[0]).reshape((-1,) + (1,) * (leaf.ndim - 1))
        return 0.5 * jnp.sum(curvature * jnp.square(leaf.astype(jnp.float32) - 1.0))

    return sum(jax.tree.leaves(jax.tree.map(one, params)))


def rosenbrock(params: Any) -> jax.Array:
    """(1 - x)^2 + 100 (y - x^2)^2 with x the even and y the odd rows of every leaf; zero at all ones."""

    def one(leaf: jax.Array) -> jax.Array:
        x, y = leaf[0::2].astype(jnp.float32), leaf[1::2].astype(jnp.float32)
        return jnp.sum(jnp.square(1 - x) + 100 * jnp.square(y - jnp.square(x)))

    return sum(jax.tree.leaves(jax.tree.map(one, params)))


def make_step(case: OptimizerCase, optimizer: Any, loss: Loss) -> Callable[..., Any]:
    """step(params, previous_params, state) -> (params, previous_params, state, updates)."""

    def step(params: Any, previous: Any, state: Any) -> tuple[Any, Any, Any, Any]:
        gradient = jax.grad(loss)(params)
        extra = case.extra_args(loss, params, previous)
        updates, state = optimizer.update(gradient, state, params, **extra)
        return optax.apply_updates(params, updates), params, state, updates

    return step


def minimize(case: OptimizerCase, loss: Loss, rate: float, params: Any) -> Any:
    """`case.steps` steps in one compiled scan; returns the last parameters."""
    optimizer = case.make(case.schedule(rate, case.steps))
    step = make_step(case, optimizer, loss)

    def body(carry: Any, _: None) -> tuple[Any, None]:
        return step(*carry)[:3], None

    @jax.jit
    def run(params: Any) -> Any:
        return jax.lax.scan(body, (params, params, optimizer.init(params)), length=case.steps)[0][0]

    return run(params)


def sharded_difference(case: OptimizerCase) -> float:
    """Largest difference after 5 steps between parameters on 8 devices and the same on one."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(8), ("fsdp",))
    params = initial_params()
    optimizer = case.make(0.05)
    step = jax.jit(make_step(case, optimizer, rosenbrock))

    def place(leaf: jax.Array) -> jax.Array:
        axis = next((axis for axis, size in enumerate(leaf.shape) if size % 8 == 0), None)
        spec = [None] * leaf.ndim
        if axis is not None:
            spec[axis] = "fsdp"
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

    def train(start: Any) -> Any:
        carry = (start, start, jax.jit(optimizer.init)(start))
        for _ in range(5):
            carry = step(*carry)[:3]
        return carry[0]

    apart, together = train(jax.tree.map(place, params)), train(params)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(apart))
    differences = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), apart, together
    )
    return functools.reduce(max, jax.tree.leaves(differences))


if __name__ == "__main__":
    assert len(jax.devices()) == 8, jax.devices()
    print(json.dumps({case.name: sharded_difference(case) for case in collect() if case.shards}))
