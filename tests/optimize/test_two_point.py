from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effml import train
from effml.optimize import (
    PreviousParamsState,
    limuon,
    make_optimizer,
    rank_energy,
    second_gradient,
    two_point_grad,
    two_point_init,
    two_point_memory,
    two_point_step,
    with_previous_params,
)
from tests.optimize.limuon_devices import COLUMNS, OVERSAMPLING, RANK, ROWS

SHAPES = {"up": (6, 10), "down": (10, 6), "head": (6, 3)}


def start():
    generator = np.random.default_rng(0)
    return {
        name: {"kernel": jnp.asarray(generator.normal(size=shape) / 3, jnp.float32)}
        for name, shape in SHAPES.items()
    }


def loss(params, batch, rng=None):
    hidden = jnp.tanh(batch @ params["up"]["kernel"])
    if rng is not None:
        hidden = hidden * jax.random.bernoulli(rng, 0.5, hidden.shape)
    return jnp.mean(jnp.square(hidden @ params["down"]["kernel"] @ params["head"]["kernel"] - 1))


BATCHES = np.random.default_rng(1).normal(size=(5, 8, 6)).astype(np.float32)


def assert_close(one, other, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), one, other)


def by_hand(optimizer, batches=BATCHES, second_batches=None):
    """The loop a user would write; returns the parameters of every step."""
    params = previous = start()
    state, path = optimizer.init(params), []
    update = jax.jit(lambda g, h, state, p: optimizer.update(g, state, p, prev_params_grad=h))
    for batch, other in zip(batches, batches if second_batches is None else second_batches):
        g, h = jax.grad(loss)(params, batch), jax.grad(loss)(previous, other)
        updates, state = update(g, h, state, params)
        previous, params = params, optax.apply_updates(params, updates)
        path.append(params)
    return path


@pytest.fixture(scope="module")
def optimizer():
    return limuon(0.05, beta=0.3, rank=2)


@pytest.fixture(scope="module")
def path(optimizer):
    return by_hand(optimizer)


def test_both_gradients_see_one_batch_and_one_key():
    params, other, key = start(), jax.tree.map(lambda leaf: leaf + 0.1, start()), jax.random.key(3)
    value, new, old = jax.jit(two_point_grad(loss))(params, other, BATCHES[0], key)
    expected, gradient = jax.value_and_grad(loss)(params, BATCHES[0], key)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_close(new, gradient)
    assert_close(old, jax.grad(loss)(other, BATCHES[0], key))
    _, same, again = two_point_grad(loss)(params, params, BATCHES[0], key)
    assert_close(same, again, atol=0)


def test_parts_of_a_batch_average_to_the_whole_in_both_gradients():
    with_aux = lambda params, batch, rng: (loss(params, batch), {"mean": batch.mean()})
    params, other = start(), jax.tree.map(lambda leaf: leaf + 0.1, start())
    whole = two_point_grad(with_aux, has_aux=True)(params, other, BATCHES[0], None)
    parts = jax.jit(two_point_grad(with_aux, has_aux=True, accum=4, sequential=False))(
        params, other, BATCHES[0], None
    )
    assert_close(parts, whole)
    with pytest.raises(ValueError, match="does not split into accum=3"):
        two_point_grad(loss, accum=3)(params, other, BATCHES[0], None)
    with pytest.raises(ValueError, match="accum"):
        two_point_grad(loss, accum=0)


def test_another_batch_for_the_old_gradient_gives_another_result(optimizer, path):
    other = by_hand(optimizer, second_batches=BATCHES[::-1])
    assert np.abs(other[-1]["up"]["kernel"] - path[-1]["up"]["kernel"]).max() > 1e-3


def test_the_compiled_step_equals_the_loop_by_hand_and_swaps_buffers(optimizer, path):
    state, step = two_point_init(start(), optimizer), two_point_step(loss, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a donated buffer that can't be used is warned about
        before = start()
        for index, batch in enumerate(BATCHES):
            address = state.params["up"]["kernel"].unsafe_buffer_pointer()
            state, metrics = step(state, batch)
            assert (
                state.prev_params["up"]["kernel"].unsafe_buffer_pointer() == address
            )  # passed on, not copied
            assert_close(state.params, path[index], atol=1e-5)
            assert_close(state.prev_params, before, atol=1e-5)
            before = path[index]
    assert step.jitted._cache_size() == 1
    assert int(state.step) == len(BATCHES)
    assert 0 < float(metrics["rank_energy"]) <= 1 + 1e-6
    assert len(rank_energy(state.opt_state)) == 2


def test_inside_the_training_step_it_takes_the_same_steps(optimizer, path):
    plain = lambda params, batch: loss(params, batch)
    wrapped = with_previous_params(optimizer)
    for accumulate in (1, 2):
        step = train.make_step(plain, wrapped, extra_args=second_gradient, accumulate=accumulate)
        state = train.init_state(jax.random.key(0), start(), wrapped)
        for index, batch in enumerate(BATCHES):
            state, _ = step(state, batch)
            assert_close(state.params, path[index], atol=2e-5)
        assert step.compilations() == 1
        assert_close(state.optimizer_state.previous, path[-2], atol=2e-5)


def test_by_factors_no_copy_of_a_matrix_is_kept_and_the_steps_stay():
    factors = limuon(0.05, beta=0.3, rank=2, direction="factors", weight_decay=0.1)
    expected = by_hand(factors)
    state, step = two_point_init(start(), factors), two_point_step(loss, factors)
    for batch in BATCHES:
        state, _ = step(state, batch)
    assert_close(state.params, expected[-1], atol=2e-5)
    kernels = {SHAPES["up"], SHAPES["down"]}
    kept = [leaf.shape for leaf in jax.tree.leaves((state.prev_params, state.opt_state))]
    assert not kernels & set(kept)
    wrapped = with_previous_params(factors)
    assert not kernels & {leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(wrapped.init, start()))}


def test_clipping_and_missing_arguments_are_refused_in_words(optimizer):
    wrapped, params = with_previous_params(optimizer), start()
    step = train.make_step(lambda p, b: loss(p, b), wrapped, extra_args=second_gradient, clip_norm=1.0)
    with pytest.raises(ValueError, match=r"clip_norm=1\.0 would clip one of the two gradients"):
        step(train.init_state(jax.random.key(0), params, wrapped), BATCHES[0])
    with pytest.raises(ValueError, match="update needs gradient_at"):
        wrapped.update(params, wrapped.init(params), params)
    with pytest.raises(ValueError, match="update needs params"):
        wrapped.update(params, wrapped.init(params), gradient_at=lambda p: p)


def test_an_infinite_second_gradient_stops_the_run_at_the_last_good_state():
    wrapped = with_previous_params(limuon(0.1))
    plain = lambda params, batch: jnp.sum(batch[0] * jnp.sqrt(params["up"]["kernel"]))
    step = train.make_step(plain, wrapped, extra_args=second_gradient)
    params = {"up": {"kernel": jnp.full((2, 2), 0.5)}}
    state = train.init_state(jax.random.key(0), params, wrapped)
    state, _ = step(state, jnp.ones(1))  # the first step looks at the first gradient only
    params = jax.tree.map(jnp.copy, state.params)
    infinite = jax.tree.map(jnp.zeros_like, state.params)  # where the root has no finite slope
    state = state._replace(optimizer_state=PreviousParamsState(state.optimizer_state.inner, infinite))
    state, metrics = step(state, jnp.ones(1))
    assert int(metrics["first_bad_step"]) == 2
    assert_close(state.params, params, atol=0)


def test_a_rejected_step_keeps_the_previous_parameters_too():
    guarded = optax.apply_if_finite(with_previous_params(limuon(0.1)), 3)
    params = {"up": {"kernel": jnp.eye(3)}}
    update = jax.jit(
        lambda g, state, p: guarded.update(g, state, p, gradient_at=lambda at: jax.tree.map(jnp.sin, at))
    )
    updates, state = update(params, guarded.init(params), params)
    moved = optax.apply_updates(params, updates)
    _, state = update(jax.tree.map(lambda leaf: leaf * jnp.nan, params), state, moved)
    assert_close(state.inner_state.previous, params, atol=0)


def test_the_memory_report_counts_estimator_previous_parameters_and_peak():
    params = {"up": {"kernel": jnp.zeros((64, 32))}, "down": {"kernel": jnp.zeros((32, 64))}}
    whole, low = 2 * 64 * 32 * 4, 2 * (64 + 32 + 1) * 4 * 4
    quadratic = lambda p, batch, rng: sum(jnp.sum(jnp.square(leaf - batch)) for leaf in jax.tree.leaves(p))
    report = two_point_memory(limuon(0.1, rank=4), params, loss_fn=quadratic, batch=jnp.zeros(()))
    assert report["param_bytes"] == report["previous_bytes"] == whole
    assert report["estimator_bytes"] == low
    small = 4 + 8 + 2 * 4 + 4 + 3 * 4  # counts, key, energies, the step, Adam's and the schedules' counts
    assert 2 * whole + low < report["persistent_bytes"] <= 2 * whole + low + small + 16
    assert report["peak_bytes"] >= report["persistent_bytes"]
    assert [line.split(":")[0] for line in report["lines"]] == [
        "estimator",
        "persistent, with parameters and previous parameters",
        "peak of a step",
    ]
    assert two_point_memory(limuon(0.1), params)["estimator_bytes"] == whole
    factors = two_point_memory(limuon(0.1, rank=4, direction="factors"), params)
    assert factors["previous_bytes"] == 0
    assert report["persistent_bytes"] - factors["persistent_bytes"] >= 0.9 * whole


def test_the_named_optimizer_keeps_its_previous_parameters_itself():
    params = start()
    named = make_optimizer("limuon", learning_rate=0.1, params_for_roles=params, rank=2)
    state = named.init(params)
    updates, state = named.update(params, state, params, gradient_at=lambda at: at)
    assert_close(state.previous, params, atol=0)
    assert np.abs(updates["up"]["kernel"]).max() > 0


@pytest.fixture(scope="module")
def on_eight_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.optimize.limuon_devices"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_on_eight_devices_it_takes_the_same_steps_with_split_factors(on_eight_devices):
    found = on_eight_devices
    assert found["difference"] <= 1e-5
    assert found["compilations"] == 1
    assert found["previous"] == found["vt"] == ["None", "fsdp"]
    assert found["u"] == ["None", "None"]
    assert found["s"] == ["None"]


def test_only_thin_matrices_are_summed_and_whole_ones_only_exchanged(on_eight_devices):
    # Two shapes, a kernel of each being split: two exchanges for each; all else is sketches and Gram matrices.
    assert on_eight_devices["all_to_all"] <= 4
    assert on_eight_devices["largest_other"] <= max(ROWS, COLUMNS) * (RANK + OVERSAMPLING)


def test_apply_if_finite_around_it_works_in_the_train_step():
    loss = lambda params, batch: jnp.mean((batch @ params["up"]["kernel"] - 1) ** 2)
    optimizer = optax.apply_if_finite(with_previous_params(limuon(0.1)), 3)
    step = train.make_step(loss, optimizer, extra_args=second_gradient, accumulate=2)
    state = train.init_state(jax.random.key(0), {"up": {"kernel": jnp.zeros((3, 2))}}, optimizer)
    losses = []
    for _ in range(3):
        state, metrics = step(state, jnp.concatenate([jnp.eye(3), jnp.ones((1, 3))]))
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[1] < losses[0]
