from __future__ import annotations

import collections
import functools
import json
import os
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from effml import trees
from effml.optimize import (
    COCD_RULES,
    CoCDState,
    cocd,
    cocd_step,
    fill_masked,
    finite_difference_coordinates,
    memory_report,
    query_count,
    scale_by_cocd,
)
from tests.conformance.optimizer_cases import OptimizerCase


def clipped_cocd(learning_rate, compute_budget, eps=0.1, decay=1.0, weight_decay=0.0):
    """With steps of at most the rate, so that the table's rates suit all of its losses."""
    return optax.chain(
        scale_by_cocd(compute_budget=compute_budget, eps=eps, decay=decay, weight_decay=weight_decay),
        optax.clip_by_global_norm(1.0),
        optax.scale_by_learning_rate(learning_rate),
    )


CASE = OptimizerCase(
    "cocd",
    clipped_cocd,
    # Half of the coordinates per step; the masked trial holds 72 of the 136.
    options={"compute_budget": 68},
    static_args=("compute_budget",),
    parabola_rate=0.2,
    rosenbrock_rate=0.1,
    extra_args=lambda loss, params, previous: {"value_fn": loss},
    # Float32 differences of losses near 1,000 are off by 1e-3 before they are normalised.
    sharded_tolerance=1e-4,
)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def loop(
    f, x, steps, *, lr, budget, memory=None, eps=0.1, decay=1.0, central=True, weight_decay=0.0, order=None
):
    """CoCD with a queue in NumPy float64: returns the points and the estimates of all steps."""
    x, n = np.array(x, np.float64), len(x)
    memory = n if memory is None else memory
    order = np.arange(n) if order is None else order
    queue = collections.deque([(order[i], 0.0) for i in range(memory)], maxlen=memory)
    seen, points, estimates = 0, [x.copy()], []
    for _ in range(steps):
        queue = collections.deque([(i, decay * d) for i, d in queue], maxlen=memory)
        for _ in range(budget):
            i = order[seen % n]
            up, down = x.copy(), x.copy()
            up[i] += eps
            down[i] -= eps if central else 0.0
            value = (f(up) - f(down)) / ((2 if central else 1) * eps)
            if seen < memory:  # what has not been seen waits behind, in order
                queue[seen] = (i, value)
            else:
                queue.append((i, value))
            seen += 1
        estimate, where = np.zeros(n), [i for i, _ in queue]
        for i, d in queue:
            estimate[i] = d + weight_decay * x[i]
        assert len(set(where)) == memory
        x = x - lr * estimate
        points.append(x.copy())
        estimates.append(estimate)
    return np.array(points), np.array(estimates)


def trajectory(f, x, steps, optimizer):
    """The points of all steps, compiled."""

    @jax.jit
    def run(x):
        def step(carry, _):
            x, state = carry
            updates, state = optimizer.update(None, state, x, value_fn=f)
            x = optax.apply_updates(x, updates)
            return (x, state), x

        return jax.lax.scan(step, (x, optimizer.init(x)), length=steps)

    (_, state), points = run(x)
    return np.concatenate([np.asarray(x)[None], points]), state


def bumpy(x):
    """A loss in JAX and NumPy alike: curvatures, a coupling of neighbours and a cubic part."""
    n = x.shape[0]
    return (0.5 * (1 + np.arange(n) / n) * x**2 + 0.1 * x**3).sum() + 0.3 * (x[1:] * x[:-1]).sum()


@pytest.mark.parametrize(
    ("n", "budget", "memory", "options"),
    [
        (25, 4, None, {}),
        (25, 4, None, {"decay": 0.9, "weight_decay": 0.1, "central": False}),
        (10, 3, 4, {}),
        (10, 3, 4, {"decay": 0.8, "weight_decay": 0.2}),
        (10, 3, 10, {"decay": 0.5}),
        (7, 7, 7, {"decay": 0.9}),
        (7, 2, 1, {}),
        (7, 2, 1, {"weight_decay": 0.3}),
    ],
)
def test_every_step_equals_a_numpy_loop_with_a_queue(float64, n, budget, memory, options):
    start = np.random.default_rng(n).normal(size=n)
    expected, _ = loop(bumpy, start, 40, lr=0.05, budget=budget, memory=memory, **options)
    optimizer = cocd(0.05, compute_budget=budget, memory_budget=memory, **options)
    points, state = trajectory(bumpy, jnp.asarray(start), 40, optimizer)
    np.testing.assert_allclose(points, expected, rtol=1e-10, atol=1e-11)
    assert query_count(state) == 40 * (2 * budget if options.get("central", True) else budget + 1)


def test_a_coordinate_of_a_separable_quadratic_shrinks_by_the_closed_form_per_cycle(float64):
    n, budget = 24, 4
    cycle = n // budget
    curvature, start = jnp.linspace(0.5, 2.0, n), jnp.asarray(np.random.default_rng(0).uniform(1, 2, n))
    decays, rate = np.array([0.0, 0.5, 0.9, 1.0]), 0.04
    f = lambda x: 0.5 * jnp.sum(curvature * x**2)
    points = jax.vmap(
        lambda decay: _points(f, start, 5 * cycle, cocd(rate, compute_budget=budget, decay=decay))
    )(decays)
    for decay, path in zip(decays, np.asarray(points)):
        total = sum(decay**k for k in range(cycle))
        for i in range(n):
            own = path[i // budget :: cycle, i]
            np.testing.assert_allclose(own[2:] / own[1:-1], 1 - rate * curvature[i] * total, atol=1e-10)


def _points(f, start, steps, optimizer):
    def step(carry, _):
        x, state = carry
        updates, state = optimizer.update(None, state, x, value_fn=f)
        return (optax.apply_updates(x, updates), state), x

    return jax.lax.scan(step, (start, optimizer.init(start)), length=steps)[1]


def test_the_rate_is_limited_as_the_closed_form_says(float64):
    n, budget = 24, 4
    curvature = jnp.linspace(0.5, 2.0, n)
    limit = 2 * budget / (2.0 * n)
    f = lambda x: 0.5 * jnp.sum(curvature * x**2)
    run = jax.jit(jax.vmap(lambda rate: _points(f, jnp.ones(n), 121, cocd(rate, compute_budget=budget))))
    slow, fast = jax.vmap(jax.vmap(f))(run(jnp.array([0.25 * limit, 4 * limit])))
    assert (np.diff(slow[:: n // budget]) < 0).all()
    assert fast[-1] > 1e6 * fast[0]


def test_with_all_coordinates_per_step_the_estimate_is_the_full_gradient(float64):
    start = np.random.default_rng(1).normal(size=12)
    matrix = np.random.default_rng(2).normal(size=(12, 12))
    quadratic = lambda x: 0.5 * jnp.sum(jnp.square(matrix @ x)) + x[3]

    @jax.jit
    def estimates(x, decay):
        transform = scale_by_cocd(compute_budget=12, decay=decay, init_grad=np.full(12, 9.0))
        state = transform.update(None, transform.init(x), x + 1, value_fn=quadratic)[1]
        one = transform.update(None, state, x, value_fn=quadratic)[0]
        return one, jax.grad(quadratic)(x), transform.update(None, state, x, value_fn=bumpy)[0]

    moved = [(start + sign * 0.1 * unit) for sign in (1, -1) for unit in np.eye(12)]
    values = np.array([bumpy(x) for x in moved])
    for decay in (0.0, 0.7, 1.0):
        one, gradient, other = estimates(jnp.asarray(start), decay)
        np.testing.assert_allclose(one, gradient, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(other, (values[:12] - values[12:]) / 0.2, rtol=1e-11, atol=1e-12)


def test_without_memory_it_is_block_cyclic_coordinate_descent_bit_for_bit(float64):
    n, budget, eps, rate = 7, 2, 0.3, 0.05
    host = lambda x: np.float64(bumpy(np.asarray(x)))
    f = lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct((), np.float64), x, vmap_method="sequential")
    x = start = np.random.default_rng(3).normal(size=n)
    optimizer = cocd(rate, compute_budget=budget, eps=eps, decay=0.0)
    ours, state = jnp.asarray(start), optimizer.init(jnp.asarray(start))
    for step in range(9):
        new = x.copy()
        for i in [(budget * step + b) % n for b in range(budget)]:
            up, down = x.copy(), x.copy()
            up[i], down[i] = up[i] + eps, down[i] - eps
            new[i] = x[i] - rate * ((host(up) - host(down)) / (2 * eps))
        x = new
        updates, state = optimizer.update(None, state, ours, value_fn=f)
        ours = optax.apply_updates(ours, updates)
        np.testing.assert_array_equal(ours, x)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [4, 5])
def test_the_estimate_stays_within_the_coherence_bound(float64, seed, budget):
    n, eps, rate = 24, 0.1, 0.004
    generator = np.random.default_rng(seed)
    root = generator.normal(size=(n, n))
    hessian = root @ root.T / n
    f = lambda x: 0.5 * x @ hessian @ x
    points, estimates = loop(f, generator.normal(size=n), 60, lr=rate, budget=budget, eps=eps)
    ours, _ = trajectory(f, jnp.asarray(points[0]), 60, cocd(rate, compute_budget=budget, eps=eps))
    estimates = -np.diff(ours, axis=0) / rate
    cycle, rest = divmod(n, budget)
    steps = np.linalg.norm(np.diff(ours, axis=0), axis=1)
    ratios = []
    for t in range(cycle + 1, 60):
        error = np.abs(estimates[t] - hessian @ ours[t]).sum()  # differences of a quadratic are exact
        longest = steps[t - cycle - 1 : t].max()
        lipschitz = np.linalg.norm(hessian, axis=1).max()
        ratios.append(error / (lipschitz * longest / 2 * (budget * cycle * (cycle - 1) + 2 * rest * cycle)))
    assert 0.02 < max(ratios) <= 1


@pytest.mark.parametrize("central", [True, False])
def test_sequential_chunked_and_side_by_side_evaluation_agree(float64, central):
    tree = {"a": np.random.default_rng(4).normal(size=(3, 4)), "b": np.ones(5)}
    f = lambda p: jnp.sum(jnp.sin(p["a"])) * jnp.sum(p["b"] ** 2) + p["a"][1, 2] * p["b"][3]

    @jax.jit
    def all_ways(tree):
        measure = functools.partial(finite_difference_coordinates, f, tree, np.arange(17))
        exact = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(jax.grad(f)(tree))])
        ways = [measure(0.1, central, chunk=chunk) for chunk in (1, 3, 16, 34, None)]
        return ways, measure(1e-5, central), exact

    (first, *others), small, exact = all_ways(jax.tree.map(jnp.asarray, tree))
    for other in others:
        np.testing.assert_allclose(other, first, rtol=0, atol=1e-12)
    np.testing.assert_allclose(small, exact, atol=1e-8 if central else 1e-3)


@pytest.mark.parametrize(("chunk", "copies"), [(1, 1), (4, 4), (None, 16), (64, 64)])
def test_as_many_copies_of_the_parameters_exist_as_the_chunk_says(chunk, copies):
    measure = lambda x: finite_difference_coordinates(jnp.sum, x, np.arange(32), 0.1, chunk=chunk)
    shapes = re.findall(r"f32\[([\d,]+)\]", str(jax.make_jaxpr(measure)(jnp.zeros(1000))))
    assert max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes) == 1000 * copies


@pytest.mark.parametrize("product", [0.09, 0.9, np.pi, 1.5 * np.pi, 6.3])
def test_a_large_radius_smooths_ripples_by_the_sinc_of_the_radius(float64, product):
    k = 9.0
    eps = product / k
    f = lambda x: x[0] ** 2 / 2 + jnp.cos(k * x[0]) / k**2
    x = jnp.linspace(-2, 2, 4001)
    partial = jax.vmap(lambda x: finite_difference_coordinates(f, x[None], jnp.array([0]), eps)[0])(x)
    slopes = np.abs(np.diff(partial)) / np.diff(x)
    sinc = np.sin(k * eps) / (k * eps)
    np.testing.assert_allclose(slopes.max(), 1 + abs(sinc), atol=1e-4)
    assert slopes.max() <= 2 + 1e-6  # the constant of the loss itself
    if product == np.pi:
        np.testing.assert_allclose(partial, x, atol=1e-10)


@pytest.mark.parametrize("central", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_the_counter_is_the_number_of_calls_that_reach_the_host(central, chunk):
    calls = []

    def f(x):
        jax.debug.callback(lambda value: calls.append(float(value)), x[0])
        return jnp.sum(x**2)

    transform = scale_by_cocd(compute_budget=3, central=central, eval_chunk=chunk)
    x = jnp.arange(5.0)
    state = transform.init(x)
    update = jax.jit(lambda state: transform.update(None, state, x, value_fn=f)[1])
    for step in range(1, 3):
        state = update(state)
        jax.effects_barrier()
        assert len(calls) == query_count(state) == step * (6 if central else 4)


def test_the_counter_goes_on_past_32_bits():
    optimizer = cocd(0.1, compute_budget=2)
    x = jnp.ones(3)
    (ours, rest) = optimizer.init(x)
    state = (ours._replace(queries=jnp.array([6, 2**32 - 3], jnp.uint32)), rest)
    _, state = optimizer.update(None, state, x, value_fn=jnp.sum)
    assert query_count(state) == (6 << 32) + 2**32 - 3 + 4


@pytest.mark.parametrize("central", [True, False])
def test_the_last_value_is_the_loss(central):
    optimizer = cocd(0.1, compute_budget=2, eps=0.01, central=central)
    x = jnp.array([1.0, 2.0, 3.0])
    _, state = optimizer.update(None, optimizer.init(x), x, value_fn=lambda x: jnp.sum(x**2))
    np.testing.assert_allclose(state[0].last_value, 14.0, rtol=1e-4)


def test_a_given_order_walks_like_torch_through_registered_transposed_weights(float64):
    params = {"bias": jnp.arange(2.0), "kernel": jnp.arange(6.0).reshape(3, 2)}  # torch: weight [2, 3], bias
    torch_order = np.concatenate([2 + np.arange(6).reshape(3, 2).T.ravel(), np.arange(2)])
    weights = np.linspace(0.5, 2.0, 8)

    def f(p):
        as_torch = jnp.concatenate([p["kernel"].T.ravel(), p["bias"]])
        return jnp.sum(weights * as_torch**2) + as_torch[0] * as_torch[7]

    in_torch = lambda v: (weights * v**2).sum() + v[0] * v[7]
    start = np.concatenate([np.asarray(params["kernel"]).T.ravel(), np.asarray(params["bias"])])
    for memory in (None, 5):
        points, _ = loop(in_torch, start, 11, lr=0.05, budget=3, memory=memory, weight_decay=0.1)
        settings = {"compute_budget": 3, "memory_budget": memory, "weight_decay": 0.1}
        for order in (torch_order, lambda tree: torch_order):
            optimizer = cocd(0.05, coordinate_order=order, **settings)
            p, state = params, optimizer.init(params)
            update = jax.jit(lambda p, state, o=optimizer: o.update(None, state, p, value_fn=f))
            for _ in range(11):
                updates, state = update(p, state)
                p = optax.apply_updates(p, updates)
            np.testing.assert_allclose(
                np.concatenate([p["kernel"].T.ravel(), p["bias"]]), points[-1], rtol=1e-10
            )


def test_low_precision_parameters_are_moved_in_float32_and_keep_their_dtype():
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.float32), "c": jnp.ones(1, jnp.float16)}
    seen = []

    def f(p):
        seen.append({name: leaf.dtype for name, leaf in p.items()})
        return sum(jnp.sum(leaf.astype(jnp.float32) * 3) for leaf in p.values())

    transform = scale_by_cocd(compute_budget=5, eps=1e-3)
    estimate, state = transform.update(None, transform.init(params), params, value_fn=f)
    assert set(seen[0].values()) == {jnp.dtype("float32")}
    for name, leaf in estimate.items():
        assert leaf.dtype == params[name].dtype
        np.testing.assert_allclose(np.float32(leaf), 3.0, rtol=5e-3)
    assert state.buffer.dtype == jnp.float32
    narrow = scale_by_cocd(accumulator_dtype=jnp.bfloat16)
    state = narrow.init(params)
    assert (
        state.buffer.dtype == narrow.update(None, state, params, value_fn=f)[1].buffer.dtype == jnp.bfloat16
    )


def test_wide_leaves_keep_their_precision_beside_narrow_ones(float64):
    params = {"narrow": jnp.ones(2, jnp.float32), "wide": jnp.ones(2, jnp.float64)}
    seen = []

    def f(p):
        seen.append({name: leaf.dtype for name, leaf in p.items()})
        return jnp.sum(p["wide"] ** 2) + jnp.sum(p["narrow"])

    found = finite_difference_coordinates(f, params, jnp.arange(4), 0.1)
    assert seen[0] == {"narrow": jnp.float32, "wide": jnp.float64}
    np.testing.assert_allclose(found[2:], 2.0, rtol=1e-13)


def test_infinite_and_missing_values_become_zero_and_are_counted():
    f = lambda x: jnp.where(x[1] > 1.0, jnp.nan, jnp.sum(x)) + jnp.where(x[2] > 1.0, jnp.inf, 0.0)
    x = jnp.ones(4)
    transform = scale_by_cocd(compute_budget=4, init_grad=np.full(4, 7.0))
    estimate, state = transform.update(None, transform.init(x), x, value_fn=f)
    np.testing.assert_allclose(estimate, [1.0, 0.0, 0.0, 1.0], rtol=1e-5)
    assert int(state.nonfinite) == 2
    one_sided = scale_by_cocd(compute_budget=4, central=False)
    estimate, state = one_sided.update(None, one_sided.init(2 * x), 2 * x, value_fn=f)
    assert not np.any(estimate)
    assert int(state.nonfinite) == 4


def test_memory_can_be_filled_before_by_a_tree_or_in_the_order_of_visiting():
    params = {"b": jnp.zeros(2), "w": jnp.zeros((2, 2))}
    gradient = {"b": jnp.array([1.0, 2.0]), "w": jnp.array([[3.0, 4.0], [5.0, 6.0]])}
    order = np.array([5, 0, 1, 2, 3, 4])
    flat = lambda p: 10.0 * p["w"][1, 1]
    for given, memory in (
        (gradient, 6),
        ([6.0, 1.0, 2.0, 3.0, 4.0, 5.0], 6),
        (gradient, 3),
        ([6.0, 1.0, 2.0], 3),
    ):
        given = given if isinstance(given, dict) else np.array(given)
        transform = scale_by_cocd(init_grad=given, coordinate_order=order, memory_budget=memory, decay=0.5)
        state = transform.init(params)
        np.testing.assert_array_equal(state.buffer, [6, 1, 2, 3, 4, 5][:memory])
        estimate, state = transform.update(None, state, params, value_fn=flat)
        np.testing.assert_allclose(estimate["b"], [0.5, 1.0])
        kept = [1.5, 2.0, 2.5] if memory == 6 else [0.0, 0.0, 0.0]
        np.testing.assert_allclose(np.ravel(estimate["w"]), [*kept, 10.0], rtol=1e-5)


def test_rate_radius_and_decay_follow_schedules_of_the_steps(float64):
    n, budget, steps = 6, 2, 8
    rates, radii = np.linspace(0.05, 0.01, steps), np.linspace(0.5, 0.1, steps)
    decays = np.linspace(1.0, 0.3, steps)
    start = np.random.default_rng(5).normal(size=n)
    x, buffer, position = start.copy(), np.zeros(n), 0
    for step in range(steps):
        buffer = decays[step] * buffer
        fresh = {}
        for _ in range(budget):
            up, down = x.copy(), x.copy()
            up[position] += radii[step]
            down[position] -= radii[step]
            fresh[position] = (bumpy(up) - bumpy(down)) / (2 * radii[step])
            position = (position + 1) % n
        for i, d in fresh.items():
            buffer[i] = d
        x = x - rates[step] * buffer
    at = lambda values: lambda count: jnp.asarray(values)[count]
    arguments = {"learning_rate": at(rates), "eps": at(radii), "decay": at(decays)}
    plain = cocd(compute_budget=budget, **arguments)
    injected = optax.inject_hyperparams(cocd, static_args=("compute_budget",))(
        compute_budget=budget, **arguments
    )
    for optimizer in (plain, injected):
        points, _ = trajectory(bumpy, jnp.asarray(start), steps, optimizer)
        np.testing.assert_allclose(points[-1], x, rtol=1e-10)


def test_injected_numbers_change_without_compiling_again_and_shapes_are_refused():
    static = ("compute_budget", "memory_budget", "eval_chunk")
    make = optax.inject_hyperparams(cocd, static_args=static)
    optimizer = make(learning_rate=0.1, eps=0.2, decay=0.9, weight_decay=0.1, compute_budget=2, eval_chunk=2)
    x = jnp.arange(1.0, 6.0)
    f = lambda x: jnp.sum(x**2) + jnp.sum(x**3)
    step = jax.jit(chex.assert_max_traces(lambda state: optimizer.update(None, state, x, value_fn=f), n=1))
    state = optimizer.init(x)
    updates, after = step(state)
    np.testing.assert_allclose(
        updates,
        cocd(0.1, eps=0.2, weight_decay=0.1, compute_budget=2).update(None, cocd(0.1).init(x), x, value_fn=f)[
            0
        ],
        rtol=1e-5,
    )
    for name, value in (("learning_rate", 0.2), ("eps", 0.01), ("decay", 0.0), ("weight_decay", 0.0)):
        after.hyperparams[name] = jnp.asarray(value, after.hyperparams[name].dtype)
    changed, _ = step(after)
    np.testing.assert_allclose(changed[:2], 0.0)
    np.testing.assert_allclose(changed[2:4], -0.2 * (2 * x[2:4] + 3 * x[2:4] ** 2 + 1e-4), rtol=1e-2)
    with pytest.raises(
        TypeError, match=r"compute_budget is an array, but it sets shapes.*static_args=\('compute_"
    ):
        optax.inject_hyperparams(cocd)(learning_rate=0.1, compute_budget=2).init(x)


def test_a_run_resumed_in_mid_cycle_is_the_uninterrupted_one(tmp_path):
    optimizer = cocd(optax.cosine_decay_schedule(0.1, 12), compute_budget=3, memory_budget=4, decay=0.9)
    x = jnp.asarray(np.random.default_rng(6).normal(size=10), jnp.float32)

    @jax.jit
    def step(x, state):
        updates, state = optimizer.update(None, state, x, value_fn=bumpy)
        return optax.apply_updates(x, updates), state

    def run(x, state, steps):
        for _ in range(steps):
            x, state = step(x, state)
        return x, state

    whole = run(x, optimizer.init(x), 12)
    half = run(x, optimizer.init(x), 5)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", half)
        checkpointer.wait_until_finished()
        half = checkpointer.restore(tmp_path / "state", jax.tree.map(ocp.utils.to_shape_dtype_struct, half))
    assert int(half[1][0].cursor) == 5
    chex.assert_trees_all_equal(run(*half, 7), whole)


def test_two_runs_are_bit_identical_and_there_is_no_key_in_the_state():
    x = jnp.asarray(np.random.default_rng(7).normal(size=9), jnp.float32)
    runs = [trajectory(bumpy, x, 20, cocd(0.05, compute_budget=2, decay=0.9))[0] for _ in range(2)]
    np.testing.assert_array_equal(*runs)
    assert not any("key" in name for name in CoCDState._fields)


def test_the_compiled_step_donates_compiles_once_and_takes_the_batch_as_an_argument():
    traces = []

    def loss(params, target):
        traces.append(0)
        return jnp.sum(jnp.square(params["w"] - target))

    tx = optax.chain(
        scale_by_cocd(compute_budget=2), optax.clip_by_global_norm(5.0), optax.scale_by_learning_rate(0.2)
    )
    params = {"w": jnp.zeros(4)}
    state = tx.init(params)
    first = params["w"], state[0].buffer
    params, state = cocd_step(loss, params, state, tx, jnp.ones(4))
    seen = len(traces)
    for target in (1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0):
        params, state = cocd_step(loss, params, state, tx, target * jnp.ones(4))
    assert len(traces) == seen
    assert all(leaf.is_deleted() for leaf in first)
    np.testing.assert_allclose(params["w"], 2.0, atol=0.1)


def test_under_masked_only_the_head_is_moved_and_the_loss_sees_the_whole_tree(float64):
    params = {"body": jnp.array([1.0, 2.0]), "codes": jnp.arange(3), "head": jnp.array([0.5, -1.0])}
    f = lambda p: jnp.sum(p["body"] * p["head"] ** 2) + p["codes"][2]
    mask = {"body": False, "codes": False, "head": True}
    rest = {name: not ours for name, ours in mask.items()}
    optimizer = optax.chain(
        optax.masked(cocd(0.1, compute_budget=2), mask), optax.masked(optax.set_to_zero(), rest)
    )
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, state = optimizer.update(zeros, optimizer.init(params), params, value_fn=fill_masked(f, params))
    np.testing.assert_allclose(updates["head"], -0.1 * 2 * params["body"] * params["head"], rtol=1e-10)
    assert not np.any(updates["body"])
    assert query_count(state) == 4


def test_wrappers_pass_the_loss_on_and_multi_steps_keeps_the_turn_until_it_emits():
    x = jnp.array([1.0, 2.0, 3.0])
    f = lambda x: jnp.sum(x**2)
    wrapped = optax.apply_if_finite(cocd(0.1), 2)
    updates, state = wrapped.update(jnp.full(3, jnp.nan), wrapped.init(x), x, value_fn=f)
    assert not np.any(updates)
    assert query_count(state) == 0
    updates, state = wrapped.update(jnp.zeros(3), state, x, value_fn=f)
    np.testing.assert_allclose(updates, [-0.2, 0.0, 0.0], rtol=1e-4)
    several = optax.MultiSteps(cocd(0.1), every_k_schedule=2)
    state = several.init(x)
    for step in range(4):
        updates, state = several.update(jnp.zeros(3), state, x, value_fn=f)
        assert np.any(updates) == bool(step % 2)
    assert int(state.inner_opt_state[0].cursor) == 2
    np.testing.assert_allclose(updates, [-0.2, -0.4, 0.0], rtol=1e-4)


def test_rates_and_seeds_train_side_by_side():
    starts = jnp.asarray(np.random.default_rng(8).normal(size=(2, 9)), jnp.float32)
    rates = jnp.array([0.02, 0.05])
    one = lambda rate, x: _points(bumpy, x, 6, cocd(rate, compute_budget=2))
    together = jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)))(rates, starts)
    for i, rate in enumerate(rates):
        for j, start in enumerate(starts):
            np.testing.assert_allclose(together[i, j], one(rate, start), rtol=1e-5, atol=1e-5)


def test_the_state_is_one_copy_of_the_remembered_coordinates_and_counters():
    params = {"head": {"kernel": jnp.zeros((40, 25))}}
    for memory, numbers in ((None, 1000), (250, 250)):
        found = memory_report(cocd(0.1, memory_budget=memory), params)
        assert 4 * numbers <= found["state_bytes"] <= 4 * numbers + 64
    rows = trees.rule_table(params, rules=COCD_RULES)
    assert [row["rule"] for row in rows] == ["coordinates, measured in turn"]
    assert set(COCD_RULES) == set(trees.ROLES)


def test_a_small_radius_in_float32_gets_a_warning():
    with pytest.warns(UserWarning, match=r"eps=0\.0001: float32 differences this small are mostly rounding"):
        cocd(0.1, eps=1e-4).init(jnp.zeros(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 0.0}, "eps=0.0 must be above 0"),
        ({"eps": -1}, "eps=-1 must be above 0"),
        ({"eps": float("nan")}, "eps=nan must be above 0"),
        ({"decay": 1.1}, r"decay=1.1 must be in \[0, 1\]"),
        ({"decay": -0.1}, r"decay=-0.1 must be in \[0, 1\]"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 must not be negative"),
        ({"compute_budget": 0}, "compute_budget=0 must be above 0"),
        ({"memory_budget": 0}, "memory_budget=0 must be above 0"),
        ({"eval_chunk": 0}, "eval_chunk=0 must be above 0"),
        (
            {"compute_budget": 9, "memory_budget": 5},
            r"compute_budget=9 must be in 1 \.\.\. 5, the number of coord",
        ),
        ({"memory_budget": 6}, r"memory_budget=6 must be in 1 \.\.\. 5"),
        ({"coordinate_order": np.arange(4)}, r"coordinate_order has shape \(4,\).*not int\[5\]"),
        ({"coordinate_order": np.zeros(5, int)}, "coordinate_order is no permutation of 0 ... 4"),
        ({"init_grad": np.zeros(4)}, r"init_grad is neither a tree like params nor an array of shape \(5,\)"),
        ({"init_grad": {"w": np.zeros(4)}}, r"init_grad: w has shape \(4,\), the parameter has \(5,\)"),
    ],
)
def test_bad_settings_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        cocd(0.1, **options).init({"w": jnp.zeros(5)})


def test_bad_parameters_and_losses_are_refused_by_name():
    with pytest.raises(TypeError, match=r"compute_budget=1\.5 must be an integer"):
        cocd(0.1, compute_budget=1.5)
    with pytest.raises(ValueError, match="learning_rate=nan must be finite"):
        cocd(float("nan"))
    optimizer = cocd(0.1)
    for leaf, dtype in (
        (jnp.arange(3), "int32"),
        (jnp.zeros(3, jnp.complex64), "complex64"),
        (jnp.ones(2, bool), "bool"),
    ):
        with pytest.raises(ValueError, match=rf"parameter 'a\.codes' has dtype {dtype}.*optax.masked"):
            optimizer.init({"a": {"codes": leaf}, "w": jnp.ones(2)})
    with pytest.raises(TypeError, match="parameter 'w' is a float, not an array"):
        optimizer.init({"w": 1.0})
    for empty in ({}, {"w": jnp.zeros((0, 3))}):
        with pytest.raises(ValueError, match="params holds no numbers"):
            optimizer.init(empty)
    with pytest.raises(ValueError, match="counted in int32"):
        jax.eval_shape(optimizer.init, {"w": jax.ShapeDtypeStruct((2**16, 2**15), jnp.float32)})
    x = jnp.ones(3)
    state = optimizer.init(x)
    with pytest.raises(ValueError, match="params is missing"):
        optimizer.update(None, state, value_fn=jnp.sum)
    with pytest.raises(ValueError, match="value_fn is missing"):
        optimizer.update(x, state, x)
    with pytest.raises(TypeError, match=r"value_fn=3\.0 must be a function"):
        optimizer.update(None, state, x, value_fn=3.0)
    for wrong, words in (
        (lambda x: x, r"float32\[3\]"),
        (lambda x: jnp.sum(x) * 1j, r"complex64\[\]"),
        (lambda x: {"loss": 1}, "dict"),
    ):
        with pytest.raises(ValueError, match=f"value_fn must return one real number, not {words}"):
            optimizer.update(None, state, x, value_fn=wrong)
    with pytest.raises(ValueError, match="indices holds 3, but there are 3 coordinates, from 0 to 2"):
        finite_difference_coordinates(jnp.sum, x, [0, 3], 0.1)
    with pytest.raises(ValueError, match=r"indices has shape \(1, 1\)"):
        finite_difference_coordinates(jnp.sum, x, jnp.array([[1]]), 0.1)
    with pytest.raises(ValueError, match="chunk=0 must be above 0"):
        finite_difference_coordinates(jnp.sum, x, [0], 0.1, chunk=0)
    with pytest.raises(ValueError, match=r"eps=-0\.1 must be above 0"):
        finite_difference_coordinates(jnp.sum, x, [0], -0.1)
    with pytest.raises(ValueError, match="holds no CoCDState"):
        query_count(optax.sgd(0.1).init(x))


def test_coordinates_are_integers_in_a_list_or_an_array():
    x = jnp.arange(3.0)
    for wrong in ([0.9, 1.0], (True, False), np.array([0.0])):
        with pytest.raises(ValueError, match=r"indices has shape .* and dtype .*, not int\[B\]"):
            finite_difference_coordinates(jnp.sum, x, wrong, 0.1)
    with pytest.raises(TypeError, match=r"indices=1 must be a list or an array of integers, int\[B\]"):
        finite_difference_coordinates(jnp.sum, x, 1, 0.1)
    assert finite_difference_coordinates(jnp.sum, x, [], 0.1).shape == (0,)
    assert finite_difference_coordinates(jnp.sum, x, [2, 0], 0.5).tolist() == [1.0, 1.0]


def spread_differences() -> dict[str, float]:
    """How far runs on 8 devices are from one on one device: evaluations spread, and memory sharded too."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"v": jnp.linspace(0, 1, 64).reshape(8, 8), "w": jnp.ones(8)}
    batch = jnp.linspace(-1, 1, 8)
    loss = lambda p, batch: jnp.sum(jnp.tanh(p["v"] @ batch) * p["w"]) + jnp.sum(p["w"] ** 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    found = {}
    for central in (True, False):
        results = []
        for devices in (None, mesh):
            tx = cocd(0.05, compute_budget=13, decay=0.9, mesh=devices, central=central)
            p = jax.tree.map(jnp.copy, params)
            state = tx.init(p)
            if devices is not None:
                state = (state[0]._replace(buffer=jax.device_put(state[0].buffer, sharding)), *state[1:])
                p["v"] = jax.device_put(p["v"], sharding)
            for _ in range(9):
                p, state = cocd_step(loss, p, state, tx, batch)
            if devices is not None:
                found["buffer stays sharded"] = float(not state[0].buffer.sharding.is_fully_replicated)
                found["queries"] = query_count(state)
            results.append(p)
        one, eight = results
        found[f"central={central}"] = max(
            float(np.abs(np.asarray(one[k]) - np.asarray(eight[k])).max()) for k in one
        )
    return found


def test_evaluations_spread_over_eight_devices_give_the_run_of_one_device():
    code = (
        "import jax, json; from tests.optimize.test_cocd import spread_differences\n"
        "with jax.enable_x64(True): print(json.dumps(spread_differences()))"
    )
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["central=True"] <= 1e-12
    assert found["central=False"] <= 1e-12
    assert found["buffer stays sharded"] == 1
    assert found["queries"] == 9 * 14


@pytest.mark.parametrize("dtype", ["int32", "complex64", "float33"])
def test_the_memory_is_floating_point(dtype):
    for make in (scale_by_cocd, functools.partial(cocd, 0.1)):
        with pytest.raises(ValueError, match="accumulator_dtype="):
            make(accumulator_dtype=dtype)
