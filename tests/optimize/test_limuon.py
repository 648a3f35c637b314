from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effml.optimize import beta_warmup, limuon, memory_report, rank_energy, scale_by_limuon
from effml.trees import MuonDimensionNumbers as Numbers
from tests.conformance.optimizer_cases import OptimizerCase


def second_gradient(loss, params, previous):
    del params
    return {"prev_params_grad": jax.grad(loss)(previous)}


def every_kernel(params):
    """Embedding and head are matrices too, so that the trials on a few leaves have some to move."""
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "vector", params)


_case = functools.partial(
    OptimizerCase, factory=limuon, extra_args=second_gradient, multi_steps=False, rosenbrock_rate=0.05
)
CASES = [
    _case("limuon", options={"weight_decay": 0.0}),
    _case(
        "limuon rank 2",
        options={"beta": 0.2, "rank": 2, "weight_decay": 1e-3, "labels": every_kernel},
        static_args=("rank", "labels"),
        parabola_rate=0.2,
    ),
]


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def polar(matrix):
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return (u * (s > 1e-12 * s[0])) @ vt


def low_rank(matrix, omega, rank):
    q = np.linalg.qr(matrix @ omega)[0]
    u, s, vt = np.linalg.svd(q.T @ matrix, full_matrices=False)
    return (q @ u[:, :rank] * s[:rank]) @ vt[:rank]


def estimates(transform, pairs, params):
    """The carried estimate after each (new, old) pair of gradients; compiled once."""
    update = jax.jit(lambda new, old, state: transform.update(new, state, prev_params_grad=old))
    state = transform.init(params)
    for new, old in pairs:
        moved, state = update(new, old, state)
        yield moved, state


# The estimate


@pytest.mark.parametrize("rank", [None, 3])
def test_twenty_steps_equal_a_numpy_loop_in_float64(rank):
    """Both options, with exact polar factors and the sketch's Omega from its documented key."""
    with jax.enable_x64(True):
        shapes = {"a": (6, 9), "b": (8, 5)}
        beta, rate, seed = 0.2, 0.05, 7
        weights = {
            name: np.random.default_rng(i).normal(size=shape)
            for i, (name, shape) in enumerate(shapes.items())
        }
        batches = np.random.default_rng(5).normal(size=(20, 2, 6, 9))

        def gradient(name, weight, batch):
            # Of a loss that is no quadratic, so that the two gradients differ by more than a shift.
            noise = batch[0] if name == "a" else batch[1].T[:8, :5] if batch[1].T.shape[0] >= 8 else None
            return np.tanh(weight + noise) + 0.1 * weight

        transform = scale_by_limuon(
            beta,
            rank=rank,
            oversampling=2,
            polar="svd",
            shape_scale="none",
            seed=seed,
            weight_dimension_numbers=Numbers(),
        )
        update = jax.jit(lambda new, old, state: transform.update(new, state, prev_params_grad=old))
        state = transform.init(jax.tree.map(jnp.asarray, weights))
        ours, previous = dict(weights), dict(weights)
        theirs, before, carried = dict(weights), dict(weights), {}
        for step, batch in enumerate(batches):
            new, old = ({n: gradient(n, tree[n], batch) for n in shapes} for tree in (ours, previous))
            moved, state = update(new, old, state)
            previous, ours = ours, {n: ours[n] - rate * np.asarray(moved[n]) for n in shapes}

            after = {}
            for index, name in enumerate(shapes):
                g, h = gradient(name, theirs[name], batch), gradient(name, before[name], batch)
                m = g if step == 0 else g + (1 - beta) * (carried[name] - h)
                after[name] = theirs[name] - rate * polar(m)
                carried[name] = m
                if rank is not None:
                    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), index)
                    omega = np.asarray(
                        jax.random.normal(key, (shapes[name][1], min(rank + 2, *shapes[name])), jnp.float64)
                    )
                    carried[name] = low_rank(m, omega, rank)
            before, theirs = theirs, after
            for name in shapes:
                np.testing.assert_allclose(ours[name], theirs[name], atol=1e-8)


def descend(transform, gradient, weight, steps, rate=0.05):
    """(parameters, estimate) of every step with the gradient as its own second one at the point before."""
    update = jax.jit(lambda w, p, state: transform.update(gradient(w), state, prev_params_grad=gradient(p)))
    state, previous = transform.init(weight), weight
    for _ in range(steps):
        moved, state = update(weight, previous, state)
        yield weight, state.factors
        previous, weight = weight, weight - rate * moved


@pytest.mark.parametrize("beta", [0.0, 0.03, 0.5])
def test_without_noise_the_estimate_is_the_exact_gradient_for_every_beta(beta):
    with jax.enable_x64(True):
        target = normal(7, 5, seed=1, dtype=jnp.float64)
        gradient = jax.grad(lambda w: jnp.sum(jnp.cosh(w - target)))
        transform = scale_by_limuon(beta, polar="svd", weight_dimension_numbers=Numbers())
        mean = None
        for weight, estimate in descend(transform, gradient, normal(7, 5, dtype=jnp.float64), 12):
            exact = gradient(weight)
            np.testing.assert_allclose(estimate, exact, atol=1e-10)
            mean = exact if mean is None else beta * exact + (1 - beta) * mean
        assert np.abs(mean - exact).max() > 1e-3  # a running mean fails this


def test_with_parameters_held_still_the_estimate_is_the_running_mean():
    beta, gradients = 0.1, [normal(4, 6, seed=i) for i in range(30)]
    transform = scale_by_limuon(beta, weight_dimension_numbers=Numbers())
    mean = np.float64(gradients[0])
    for g, (_, state) in zip(gradients, estimates(transform, [(g, g) for g in gradients], gradients[0])):
        mean = beta * np.float64(g) + (1 - beta) * mean
        np.testing.assert_allclose(state.factors, mean, atol=1e-6)


def test_beta_one_is_the_new_gradient_exactly():
    pairs = [(normal(4, 6, seed=i), normal(4, 6, seed=50 + i)) for i in range(3)]
    for (g, _), (moved, state) in zip(
        pairs, estimates(scale_by_limuon(1.0, polar="svd", shape_scale="none"), pairs, pairs[0][0])
    ):
        np.testing.assert_array_equal(state.factors, g)
        np.testing.assert_allclose(moved, polar(np.asarray(g)), atol=1e-5)


def test_a_rank_that_covers_the_matrix_is_the_whole_estimate():
    pairs = [({"k": normal(6, 9, seed=i)}, {"k": normal(6, 9, seed=99 - i)}) for i in range(10)]
    whole = list(estimates(scale_by_limuon(0.1), pairs, pairs[0][0]))
    for qr in ("householder", "cholesky2"):
        low = estimates(scale_by_limuon(0.1, rank=6, qr=qr), pairs, pairs[0][0])
        for (a, one), (b, other) in zip(low, whole, strict=True):
            product = (one.factors.u["k"] * one.factors.s["k"]) @ one.factors.vt["k"]
            np.testing.assert_allclose(product, other.factors["k"], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(a["k"], b["k"], rtol=1e-4, atol=1e-3)
            np.testing.assert_allclose(one.rank_energy["k"], 1.0, rtol=1e-5)


def test_the_direction_has_full_rank_while_what_is_carried_has_not():
    gradient = normal(6, 9)
    transform = scale_by_limuon(rank=2, polar="svd", shape_scale="none")
    moved, state = transform.update(gradient, transform.init(gradient), prev_params_grad=gradient)
    np.testing.assert_allclose(moved, polar(np.asarray(gradient)), atol=1e-5)
    assert state.factors.u.shape == (6, 2)
    singular = np.linalg.svd(np.asarray(gradient), compute_uv=False)
    (energy,) = rank_energy((optax.EmptyState(), {"inner": state})).values()
    assert 0.5 < energy / (np.sum(singular[:2] ** 2) / np.sum(singular**2)) <= 1 + 1e-6

    factors = scale_by_limuon(rank=2, direction="factors", shape_scale="none")
    moved, state = factors.update(gradient, factors.init(gradient), prev_params_grad=gradient)
    np.testing.assert_allclose(
        np.linalg.svd(np.asarray(moved), compute_uv=False), [1, 1, 0, 0, 0, 0], atol=1e-5
    )
    np.testing.assert_allclose(moved, np.float64(state.factors.u) @ np.float64(state.factors.vt), atol=1e-5)


def test_each_step_leaf_and_seed_has_a_sketch_of_its_own():
    same = {"a": normal(20, 20), "b": normal(20, 20)}

    def carried(seed):
        return [
            state.factors.u
            for _, state in estimates(scale_by_limuon(1.0, rank=2, seed=seed), [(same, same)] * 2, same)
        ]

    first, second = carried(0)
    again, _ = carried(0)
    other, _ = carried(1)
    np.testing.assert_array_equal(first["a"], again["a"])
    for one, another in [(first["a"], first["b"]), (first["a"], second["a"]), (first["a"], other["a"])]:
        assert np.abs(np.abs(one) - np.abs(another)).max() > 1e-3


def test_beta_may_be_a_schedule_and_its_warm_up_begins_at_one():
    schedule = beta_warmup(0.04, steps=2)
    np.testing.assert_allclose([schedule(t) for t in (0, 1, 2, 9)], [1, 0.2, 0.04, 0.04], rtol=1e-6)
    pairs = [(normal(4, 6, seed=i), normal(4, 6, seed=50 + i)) for i in range(4)]
    expected = np.zeros((4, 6))
    for t, (_, state) in enumerate(estimates(scale_by_limuon(schedule), pairs, pairs[0][0])):
        g, h = map(np.float64, pairs[t])
        expected = g if t == 0 else g + (1 - 0.2 ** min(t, 2)) * (expected - h)
        np.testing.assert_allclose(state.factors, expected, atol=1e-5)


# Shapes, types, sizes


@pytest.mark.parametrize(("shape_scale", "expected"), [("rms", 0.2 * 3.0), ("width", 1.5), ("none", 1.0)])
def test_shape_factors_use_inputs_and_outputs_in_either_layout(shape_scale, expected):
    gradient = normal(4, 9)
    options = {"polar": "svd", "shape_scale": shape_scale}
    for leaf, numbers in ((gradient, Numbers()), (gradient.T, Numbers(1, 0))):
        transform = scale_by_limuon(weight_dimension_numbers=numbers, **options)
        moved, _ = transform.update(leaf, transform.init(leaf), prev_params_grad=leaf)
        np.testing.assert_allclose(np.linalg.svd(np.asarray(moved), compute_uv=False), expected, rtol=1e-5)


def test_the_state_has_the_promised_size_and_no_whole_matrix():
    params = {
        "wide": jnp.zeros((30, 50)),
        "tall": jnp.zeros((40, 20)),
        "layers": {"up": {"kernel": jnp.zeros((3, 16, 24))}},
    }
    state = jax.eval_shape(scale_by_limuon(rank=8).init, params)
    sizes = [sum(part.size for part in parts) for parts in zip(*map(jax.tree.leaves, state.factors))]
    assert sorted(sizes) == sorted([3 * (16 + 24 + 1) * 8, (40 + 20 + 1) * 8, (30 + 50 + 1) * 8])
    whole = {leaf.shape for leaf in jax.tree.leaves(params)}
    assert not whole & {leaf.shape for leaf in jax.tree.leaves(state)}
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == sum(sizes) + 3 + 3  # energies, count and key
    kernels = {"up": {"kernel": jax.ShapeDtypeStruct((4096, 11008), jnp.float32)}}
    report = memory_report(scale_by_limuon(rank=8), kernels)
    assert report["state_bytes"] == 4 * ((4096 + 11008 + 1) * 8 + 4)
    assert {row["role"]: row["state_bytes"] for row in report["roles"]}["matrix"] == 4 * (
        (4096 + 11008 + 1) * 8 + 1
    )


EDGES = {
    "zero": jnp.zeros((5, 4)),
    "one row": normal(1, 6),
    "one element": normal(1, 1),
    "square": normal(5, 5),
    "no column": jnp.zeros((4, 0)),
    "rank one": jnp.outer(jnp.arange(5.0), jnp.arange(4.0)),
}


@pytest.mark.parametrize(
    "options", [{}, {"rank": 8, "qr": "cholesky2"}, {"rank": 2, "direction": "factors"}], ids=str
)
def test_edge_shapes_give_finite_updates_and_zero_gradients_give_none(options):
    edges = EDGES
    steps = estimates(
        scale_by_limuon(0.1, weight_dimension_numbers=Numbers(), **options), [(edges, edges)] * 3, edges
    )
    for moved, _ in steps:
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(moved))
        np.testing.assert_array_equal(moved["zero"], 0)
        for name in ("one row", "square"):
            assert np.abs(moved[name]).max() > 0.01


@pytest.mark.parametrize("rank", [None, 2])
def test_stacked_layers_are_separate_matrices_and_bfloat16_stays(rank):
    options = {
        "rank": rank,
        "oversampling": 20,
        "beta": 0.2,
    }  # a full sketch, which has nothing random in its result
    stack, second = normal(3, 6, 8), normal(3, 6, 8, seed=1)
    together = scale_by_limuon(**options)
    alone = scale_by_limuon(**options)
    pairs = [
        ({"layers": {"kernel": a}}, {"layers": {"kernel": b}}) for a, b in ((stack, stack), (second, stack))
    ]
    *_, (moved, _) = estimates(together, pairs, pairs[0][0])
    singles = [
        ({f"{i}": a[i] for i in range(3)}, {f"{i}": b[i] for i in range(3)})
        for a, b in ((stack, stack), (second, stack))
    ]
    *_, (apart, _) = estimates(alone, singles, singles[0][0])
    for i in range(3):
        np.testing.assert_allclose(moved["layers"]["kernel"][i], apart[f"{i}"], atol=1e-4)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), singles)
    for moved, state in estimates(alone, narrow, narrow[0][0]):
        assert moved["0"].dtype == jnp.bfloat16
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.factors))


def test_attention_projections_and_convolutions_are_matrices_of_all_their_inputs():
    params = {
        "query": {"kernel": normal(6, 2, 3)},
        "out": {"kernel": normal(2, 3, 6)},
        "conv": {"kernel": normal(2, 2, 3, 5)},
    }
    transform = scale_by_limuon(rank=2, polar="svd", shape_scale="none")
    moved, state = transform.update(params, transform.init(params), prev_params_grad=params)
    for name, rows in (("query", 6), ("out", 6), ("conv", 12)):
        matrix = np.asarray(params[name]["kernel"]).reshape(rows, -1)
        np.testing.assert_allclose(
            np.asarray(moved[name]["kernel"]).reshape(matrix.shape), polar(matrix), atol=1e-5
        )
        assert state.factors.u[name]["kernel"].shape == (rows, 2)


@pytest.mark.parametrize(
    "options",
    [
        *({"factor_dtype": "int8"}, {"ns_dtype": bool}, {"factor_dtype": "float33"}, {"seed": -1}),
        *(
            {"seed": 2**32},
            {"ns_coeffs": (1.0, 2.0)},
            {"ns_coeffs": np.ones((0, 3))},
            {"beta": np.float32(2)},
        ),
    ],
)
def test_bad_dtypes_seeds_and_coefficients_are_refused_at_once(options):
    for make in (scale_by_limuon, functools.partial(limuon, 0.1)):
        with pytest.raises(ValueError, match=next(iter(options))):
            make(**options)


@pytest.mark.parametrize("seed", [1.5, "0", None, True])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(TypeError, match=r"seed=.* must be an integer"):
        scale_by_limuon(seed=seed)


def test_a_seed_may_be_an_array():
    gradient = {"kernel": jnp.eye(2)}
    keys = [scale_by_limuon(seed=seed).init(gradient).key for seed in (3, np.int64(3), jnp.asarray(3))]
    for key in keys[1:]:
        np.testing.assert_array_equal(key, keys[0])


@pytest.mark.parametrize("rate", [None, "0.1"])
def test_a_rate_is_a_number_or_a_schedule(rate):
    with pytest.raises(TypeError, match=r"learning_rate=.* must be a number or a schedule"):
        limuon(rate)


@pytest.mark.parametrize(
    "options",
    [{"learning_rate": np.float32("inf")}, {"weight_decay": np.float32(-1)}, {"adam_b1": np.int64(1)}],
)
def test_numpy_scalars_are_checked_as_numbers_are(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        limuon(**({"learning_rate": 0.1} | options))
