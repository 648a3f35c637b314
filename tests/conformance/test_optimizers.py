"""Every optimizer passes the same trials; see `optimizer_cases.OptimizerCase` for how one takes part."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.core import freeze

from tests.conformance.optimizer_cases import (
    OptimizerCase,
    collect,
    initial_params,
    make_step,
    minimize,
    parabola,
    rosenbrock,
)

CASES = collect()
each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def test_the_table_has_optax_controls_beside_our_own_methods():
    assert {"optax adamw", "optax muon", "scale"} <= {case.name for case in CASES}


def assert_equal(actual, desired):
    jax.tree.map(np.testing.assert_array_equal, actual, desired)


def assert_close(actual, desired, **tolerance):
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), **tolerance), actual, desired
    )


def trajectory(case: OptimizerCase, optimizer, params, steps=4, loss=rosenbrock):
    """Parameters and state after some compiled steps."""
    step = jax.jit(make_step(case, optimizer, loss))
    carry = (params, params, optimizer.init(params))
    for _ in range(steps):
        carry = step(*carry)[:3]
    return carry


@each_case
def test_it_converges_on_a_parabola(case):
    params = initial_params()
    final = minimize(case, parabola, case.parabola_rate, params)
    assert parabola(final) < 1e-2 * parabola(params)


@each_case
def test_it_converges_on_rosenbrock(case):
    params = initial_params()
    final = minimize(case, rosenbrock, case.rosenbrock_rate, params)
    assert rosenbrock(final) < 5e-2 * rosenbrock(params)


@each_case
def test_the_second_step_does_not_compile_again(case):
    optimizer = case.make(case.schedule(0.1, 10))
    step = jax.jit(make_step(case, optimizer, parabola))
    params = initial_params()
    carry = (params, params, jax.jit(optimizer.init)(params))
    for _ in range(3):
        carry = step(*carry)[:3]
    assert step._cache_size() == 1


@each_case
def test_compiled_steps_equal_eager_ones(case):
    params = initial_params()
    optimizer = case.make(0.1)
    eager = make_step(case, optimizer, parabola)(params, params, optimizer.init(params))
    compiled = jax.jit(make_step(case, optimizer, parabola))(params, params, optimizer.init(params))
    assert_close(compiled[0], eager[0])


@each_case
def test_inject_hyperparams_equals_plain_and_a_new_value_does_not_compile_again(case):
    params = initial_params()
    injected = optax.inject_hyperparams(case.factory, static_args=case.static_args)(
        learning_rate=0.1, **case.options
    )
    plain, _, _ = trajectory(case, case.make(0.1), params)
    other, _, state = trajectory(case, injected, params)
    assert_close(other, plain, rtol=1e-4, atol=1e-5)

    step = jax.jit(make_step(case, injected, parabola))
    small = step(params, params, injected.init(params))
    state = injected.init(params)
    state.hyperparams["learning_rate"] = jnp.asarray(0.2, state.hyperparams["learning_rate"].dtype)
    large = step(params, params, state)
    assert step._cache_size() == 1
    assert_close(large[3], jax.tree.map(lambda u: 2 * u, small[3]))


@each_case
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_dtypes_of_parameters_updates_and_state_are_kept(case, dtype):
    params = initial_params(dtype)
    optimizer = case.make(0.1)
    state = optimizer.init(params)
    new_params, _, new_state, updates = jax.jit(make_step(case, optimizer, parabola))(params, params, state)
    for leaf in jax.tree.leaves((new_params, updates)):
        assert leaf.dtype == dtype
        assert jnp.isfinite(leaf).all()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new_state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )


@each_case
def test_a_restored_state_continues_bit_for_bit(case, tmp_path):
    optimizer = case.make(case.schedule(0.1, 10))
    params, previous, state = trajectory(case, optimizer, initial_params(), steps=3)
    saved = (params, previous, state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, saved)
        restored = checkpointer.restore(tmp_path / "state", abstract)
    assert_equal(restored, saved)
    step = jax.jit(make_step(case, optimizer, rosenbrock))
    assert_equal(step(*restored), step(*saved))


@each_case
def test_linen_dict_nnx_state_and_plain_dict_give_the_same_steps(case):
    class Leaf(nnx.Module):
        def __init__(self, **arrays):
            for name, array in arrays.items():
                setattr(self, name, nnx.Param(array))

    class Model(nnx.Module):
        def __init__(self, tree):
            for name, arrays in tree.items():
                setattr(self, name, Leaf(**arrays))

    plain = initial_params()
    state = nnx.state(Model(plain), nnx.Param)
    expected = trajectory(case, case.make(0.1), plain)[0]
    linen = trajectory(case, case.make(0.1), freeze({"params": plain}))[0]
    assert_close(linen["params"].unfreeze(), expected)
    assert_close(nnx.to_pure_dict(trajectory(case, case.make(0.1), state)[0]), expected)


# Leaves of two roles are kept, and a leaf of another shape and role lies before each of them.
OURS = {
    "embedding": {"table": False},
    "head": {"kernel": True},
    "hidden": {"bias": True, "kernel": False},
}


def check_masked_and_partitioned(case):
    """The leaves of `OURS` move as if they were alone, under `optax.masked` and `optax.partition`."""
    params = initial_params()
    alone = {"head": params["head"], "hidden": {"bias": params["hidden"]["bias"]}}
    expected = trajectory(case, case.make(0.05), alone)[0]

    def own(tree):
        return {"head": tree["head"], "hidden": {"bias": tree["hidden"]["bias"]}}

    others = jax.tree.map(lambda ours: not ours, OURS)
    masked = optax.masked(case.make(0.05), OURS, mask_compatible_extra_args=True)
    after = trajectory(case, optax.chain(masked, optax.masked(optax.set_to_zero(), others)), params)[0]
    assert_close(own(after), expected)
    assert_equal(after["embedding"], params["embedding"])
    assert_equal(after["hidden"]["kernel"], params["hidden"]["kernel"])

    labels = jax.tree.map(lambda ours: "ours" if ours else "other", OURS)
    both = optax.partition(
        {"ours": case.make(0.05), "other": optax.sgd(1e-3)}, labels, mask_compatible_extra_args=True
    )
    after = trajectory(case, both, params)[0]
    assert_close(own(after), expected)
    assert np.abs(after["embedding"]["table"] - params["embedding"]["table"]).max() > 0


@each_case
def test_masked_and_partitioned_it_moves_its_own_leaves_as_if_they_were_alone(case):
    check_masked_and_partitioned(case)


def by_position(learning_rate):
    """A faulty optimizer: it counts the holes of a masked tree when it decides how to treat a leaf."""
    hole = lambda node: isinstance(node, optax.MaskedNode)

    def update(updates, state, params=None):
        leaves, treedef = jax.tree.flatten(updates, is_leaf=hole)
        moved = [
            leaf if hole(leaf) else -learning_rate * leaf / (1 + index) for index, leaf in enumerate(leaves)
        ]
        return treedef.unflatten(moved), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def blind_to_holes(learning_rate):
    """A faulty optimizer: it takes every node of a masked tree for an array."""
    hole = lambda node: isinstance(node, optax.MaskedNode)
    return optax.stateless(
        lambda updates, _: jax.tree.map(lambda u: -learning_rate * u, updates, is_leaf=hole)
    )


@pytest.mark.parametrize("faulty", [by_position, blind_to_holes], ids=lambda make: make.__name__)
def test_the_masked_trial_finds_an_optimizer_that_mistakes_the_holes(faulty):
    with pytest.raises((AssertionError, TypeError)):
        check_masked_and_partitioned(OptimizerCase("faulty", faulty))


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.multi_steps], ids=[c.name for c in CASES if c.multi_steps]
)
def test_multi_steps_averages_gradients_before_the_optimizer_sees_them(case):
    params = initial_params()
    weights = (0.5, 1.5) * 3  # each pair averages to the gradient itself
    accumulated = optax.MultiSteps(case.make(0.05), every_k_schedule=2)
    plain = case.make(0.05)
    one, many = params, params
    one_state, many_state = plain.init(params), accumulated.init(params)
    for index in range(6):
        gradient = jax.tree.map(lambda g, weight=weights[index]: weight * g, jax.grad(parabola)(many))
        updates, many_state = accumulated.update(
            gradient, many_state, many, **case.extra_args(parabola, many, many)
        )
        many = optax.apply_updates(many, updates)
        if index % 2:
            updates, one_state = plain.update(
                jax.grad(parabola)(one), one_state, one, **case.extra_args(parabola, one, one)
            )
            one = optax.apply_updates(one, updates)
    assert_close(many, one)


@each_case
def test_vmapped_runs_equal_separate_ones(case):
    optimizer = case.make(0.05)
    starts = [initial_params(seed=seed) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    together = jax.vmap(lambda p: make_step(case, optimizer, parabola)(p, p, optimizer.init(p))[0])(stacked)
    for index, start in enumerate(starts):
        alone = make_step(case, optimizer, parabola)(start, start, optimizer.init(start))[0]
        assert_close(
            jax.tree.map(lambda leaf, index=index: leaf[index], together), alone, rtol=1e-4, atol=1e-5
        )


@each_case
def test_a_zero_gradient_gives_finite_updates(case):
    params = initial_params()
    optimizer = case.make(0.1)
    still = lambda tree: 0.0 * parabola(tree)
    updates = make_step(case, optimizer, still)(params, params, optimizer.init(params))[3]
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))


@pytest.fixture(scope="module")
def sharded_differences():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8",
    }
    command = [sys.executable, "-m", "tests.conformance.optimizer_cases"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", [c for c in CASES if c.shards], ids=[c.name for c in CASES if c.shards])
def test_sharded_over_eight_devices_equals_unsharded(case, sharded_differences):
    assert sharded_differences[case.name] <= case.sharded_tolerance
