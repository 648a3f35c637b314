from __future__ import annotations

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effml import linalg, optimize, trees
from effml.nn import transformer
from effml.optimize import make_optimizer, memory_report, normuon, scale_by_normuon
from effml.trees import MuonDimensionNumbers as Numbers
from tests.conformance.optimizer_cases import OptimizerCase

CASE = OptimizerCase(
    "normuon", normuon, options={"weight_decay": 0.0, "b1": 0.9}, parabola_rate=0.5, rosenbrock_rate=0.1
)


def random_tree(shapes, seed=0, dtype=jnp.float32):
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(generator.normal(size=shape), dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def nested(path, value):
    return functools.reduce(lambda tree, key: {key: tree}, reversed(path.split(".")), value)


def run(transform, gradients):
    """The last update and state after all gradients, which also stand for parameters; compiled once."""
    step = jax.jit(transform.update)
    state = transform.init(gradients[0])
    for gradient in gradients:
        updates, state = step(gradient, state, gradient)
    return updates, state


MUON5 = [(3.4445, -4.7750, 2.0315)] * 5
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097838082687081, 0.42323551169305323),
]


def zeropower(x, triples, margin, eps):
    """Newton-Schulz in NumPy float64, as the codes write it."""
    rows, columns = x.shape
    x = x.T if rows > columns else x
    x = x / (margin * np.linalg.norm(x) + eps)
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if rows > columns else x


# The four codes, line by line, with torch's kernels [outputs, inputs]; state is a dict of arrays.


def paper(g, state, b1=0.95, b2=0.95):
    rows, columns = g.shape
    state["m"] = b1 * state["m"] + (1 - b1) * g
    o = zeropower(state["m"], MUON5, 1.0, 1e-7)
    state["v"] = b2 * state["v"] + (1 - b2) * np.mean(o * o, axis=1, keepdims=True)
    o = o / (np.sqrt(state["v"]) + 1e-8)
    return 0.2 * np.sqrt(rows * columns) / np.linalg.norm(o) * o


def authors_file(g, state, b1=0.95, b2=0.95):
    rows, columns = g.shape
    state["m"] += (1 - b1) * (g - state["m"])
    o = g + b1 * (state["m"] - g)
    o = zeropower(o, MUON5, 1.0, 1e-7)
    before = np.linalg.norm(o)
    state["v"] += (1 - b2) * (np.mean(o * o, axis=-1, keepdims=True) - state["v"])
    o = o * (1 / (np.sqrt(state["v"]) + 1e-10))
    o = o * (before / (np.linalg.norm(o) + 1e-10))
    return o * max(1, rows / columns) ** 0.5


def dion(g, state, b1=0.95, b2=0.95, adjust="spectral_norm"):
    rows, columns = g.shape
    state["m"] = b1 * state["m"] + g
    o = zeropower(state["m"], POLAR_EXPRESS, 1.02, 1e-7)
    before = np.linalg.norm(o)
    state["v"] += (1 - b2) * (np.mean(o * o, axis=-1, keepdims=True) - state["v"])
    o = o / (np.sqrt(state["v"]) + 1e-8)
    o = o * (before / max(np.linalg.norm(o), 1e-8))
    return o * (np.sqrt(rows / columns) if adjust == "spectral_norm" else 0.2 * np.sqrt(max(rows, columns)))


def modded_nanogpt(g, state, b1=0.95, b2=0.9):
    rows, columns = g.shape
    axis = -1 if rows >= columns else -2
    state["m"] += (1 - b1) * (g - state["m"])
    o = g + b1 * (state["m"] - g)
    o = zeropower(o, POLAR_EXPRESS, 1.02, 1e-6)
    mean = np.mean(o * o, axis=axis, keepdims=True)
    size = o.shape[axis]
    before = np.sqrt(mean.sum() * size)
    old = state["v"] if state["v"].shape == mean.shape else np.zeros_like(mean)
    state["v"] = old + (1 - b2) * (mean - old)
    step = 1 / np.sqrt(np.maximum(state["v"], 1e-10))
    after = np.sqrt(np.sum(mean * size * step**2))
    return o * step * (before / max(after, 1e-10)) * max(1, rows / columns) ** 0.5


PRESERVE = {"rescale": "preserve", "shape_scale": "width"}
VARIANTS = {
    "paper": (paper, {}),
    "authors' file": (authors_file, {"nesterov": True, "eps": 1e-10, **PRESERVE}),
    "dion": (dion, {"ns_coeffs": "polar_express", "rescale": "preserve", "shape_scale": "spectral"}),
    "dion rms": (
        functools.partial(dion, adjust="rms_norm"),
        {"ns_coeffs": "polar_express", "rescale": "preserve", "shape_scale": "rms"},
    ),
    "modded-nanogpt": (
        modded_nanogpt,
        {
            "b2": 0.9,
            "nesterov": True,
            "ns_coeffs": "polar_express",
            "eps": 0.0,
            "neuron_axis": "longer",
            **PRESERVE,
        },
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_twenty_steps_follow_a_numpy_transcription_of_each_circulating_variant(name):
    transcription, options = VARIANTS[name]
    generator = np.random.default_rng(0)
    normal = lambda *shape: 10 * generator.normal(size=shape)
    gradients = [{"wide": normal(6, 24), "tall": normal(24, 6)} for _ in range(20)]
    states = {
        key: {"m": np.zeros(g.T.shape), "v": np.zeros((g.shape[1], 1))} for key, g in gradients[0].items()
    }
    transform = scale_by_normuon(weight_dimension_numbers=Numbers(0, 1), **options)
    step = jax.jit(transform.update)
    as_float32 = lambda tree: jax.tree.map(jnp.float32, tree)
    state = transform.init(as_float32(gradients[0]))
    for gradient in gradients:
        updates, state = step(as_float32(gradient), state)
        for key, g in gradient.items():
            expected = transcription(g.T, states[key]).T
            error = np.linalg.norm(updates[key] - expected) / np.linalg.norm(expected)
            assert error < 1e-5, key
    assert state.count == 20


SHAPES = [(8, 8), (4, 64), (64, 4), (3, 3, 8, 16), (2, 8, 8)]


def test_the_update_has_the_target_as_its_root_mean_square_whatever_the_shape():
    gradients = [
        random_tree({f"{len(s)}d{i}": {"kernel": s} for i, s in enumerate(SHAPES)}, seed) for seed in (0, 1)
    ]
    rms = lambda u: np.sqrt(np.mean(np.square(np.float64(u))))
    updates, _ = run(scale_by_normuon(), gradients)
    for leaf in jax.tree.leaves(updates):
        np.testing.assert_allclose(rms(leaf), 0.2, rtol=1e-5)
    for matrix in updates["3d4"]["kernel"]:
        np.testing.assert_allclose(rms(matrix), 0.2, rtol=1e-5)


def spread_of_norms(update, axis):
    norms = np.linalg.norm(np.asarray(update), axis=axis)
    return norms.std() / norms.mean()


def test_a_neuron_is_an_output_in_either_layout():
    scales = np.logspace(0, 3, 24)
    generator = np.random.default_rng(0)
    steady, noise = generator.normal(size=(12, 24)), generator.normal(size=(200, 12, 24))
    stacked = jnp.asarray((steady + 0.1 * noise) * scales, jnp.float32)
    flax = scale_by_normuon(weight_dimension_numbers=Numbers(0, 1))
    torch = scale_by_normuon(weight_dimension_numbers=Numbers(1, 0))

    def train(transform, gradients):
        def body(state, gradient):
            update, state = transform.update({"w": gradient}, state)
            return state, update["w"]

        return jax.lax.scan(body, transform.init({"w": gradients[0]}), gradients)[1][-1]

    ours = jax.jit(lambda g: train(flax, g))(stacked)
    assert spread_of_norms(ours, axis=0) <= 0.05
    theirs = jax.jit(lambda g: train(torch, g))(stacked.mT)
    np.testing.assert_allclose(theirs.T, ours, rtol=0, atol=2e-6)
    # The wrong axis and no normalisation at all are told apart by the same number.
    assert spread_of_norms(jax.jit(lambda g: train(torch, g))(stacked), axis=0) > 0.2


@pytest.mark.parametrize(
    ("path", "shape", "as_matrices", "axes"),
    [
        ("dense.kernel", (6, 10), lambda w: w[None], (0,)),
        ("conv.kernel", (2, 3, 4, 10), lambda w: w.reshape(1, 24, 10), (0, 1, 2)),
        ("attention.query.kernel", (6, 2, 5), lambda w: w.reshape(1, 6, 10), (0,)),
        ("attention.out.kernel", (2, 3, 10), lambda w: w.reshape(1, 6, 10), (0, 1)),
        ("layers.up.kernel", (2, 6, 10), lambda w: w, (1,)),
        ("layers.query.kernel", (2, 6, 2, 5), lambda w: w.reshape(2, 6, 10), (1,)),
        ("layers.out.kernel", (2, 2, 3, 10), lambda w: w.reshape(2, 6, 10), (1, 2)),
        ("experts.kernel", (2, 6, 10), lambda w: w, (1,)),
    ],
)
def test_kernels_of_any_shape_get_the_updates_of_their_matrices(path, shape, as_matrices, axes):
    gradients = [random_tree(nested(path, shape), seed) for seed in range(2)]
    updates, state = run(scale_by_normuon(), gradients)
    update, nu = jax.tree.leaves(updates)[0], jax.tree.leaves(state.nu)[0]
    assert nu.shape == tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    matrices = [as_matrices(np.asarray(jax.tree.leaves(g)[0], np.float64)) for g in gradients]
    for index, ours in enumerate(as_matrices(np.asarray(update))):
        memory = {"m": np.zeros(ours.T.shape), "v": np.zeros((ours.shape[1], 1))}
        for matrix in matrices:
            expected = paper(matrix[index].T, memory)
        np.testing.assert_allclose(ours, expected.T, atol=1e-5)


def test_without_memory_every_neuron_moves_equally_far():
    updates, _ = run(scale_by_normuon(b2=0.0, eps=0.0), [random_tree({"a": {"kernel": (6, 15)}})])
    norms = np.linalg.norm(updates["a"]["kernel"], axis=0)
    np.testing.assert_allclose(norms, norms[0], rtol=1e-6)


def test_the_first_update_needs_no_bias_correction():
    gradient = random_tree({"a": {"kernel": (6, 15)}})
    first, _ = run(scale_by_normuon(b2=0.95, eps=0.0), [gradient])
    second, _ = run(scale_by_normuon(b2=0.5, b1=0.5, eps=0.0), [gradient])
    np.testing.assert_allclose(first["a"]["kernel"], second["a"]["kernel"], atol=1e-6)


def test_unnormalised_it_is_muon_of_optax():
    gradient = random_tree({"wide": (6, 16), "tall": (16, 6)})
    ours = scale_by_normuon(normalize=False, rescale="preserve", shape_scale="rms")
    theirs = optax.contrib.muon(-1.0, consistent_rms=0.2, nesterov=False)
    expected, _ = run(theirs, [gradient] * 3)
    updates, _ = run(ours, [gradient] * 3)
    chex.assert_trees_all_close(updates, expected, atol=1e-5)


def test_normalising_evens_out_neurons_most_where_outputs_outnumber_inputs():
    generator = np.random.default_rng(0)
    gradients = [
        {"w": jnp.asarray(generator.normal(size=(8, 32)) * np.logspace(0, 1, 32), jnp.float32)}
        for _ in range(30)
    ]
    ours, _ = run(scale_by_normuon(b2=0.8), gradients)
    muon, _ = run(scale_by_normuon(normalize=False), gradients)
    assert spread_of_norms(ours["w"], 0) < 0.5 * spread_of_norms(muon["w"], 0)
    singular = np.linalg.svd(np.asarray(ours["w"]), compute_uv=False)
    assert singular.max() / np.median(singular) < 2


def test_the_size_of_the_gradient_does_not_matter():
    gradients = jnp.asarray(np.random.default_rng(0).normal(size=(20, 3, 5)), jnp.float32)
    factors = jnp.logspace(-1, 4, 20)
    transform = scale_by_normuon(eps=0.0)
    first = lambda g: transform.update({"w": g}, transform.init({"w": g}))[0]["w"]
    before, after = jax.jit(lambda g, f: (jax.vmap(first)(g), jax.vmap(first)(f[:, None, None] * g)))(
        gradients, factors
    )
    np.testing.assert_allclose(after, before, atol=1e-4)


def test_zero_gradients_dead_neurons_and_single_rows_stay_finite():
    dead = jnp.ones((4, 6)).at[:, 2].set(0.0) + jnp.eye(4, 6).at[:, 2].set(0.0)
    gradient = {
        "zero": jnp.zeros((4, 6)),
        "dead output": dead,
        "dead input": dead.T,
        "row": jnp.ones((1, 7)),
        "column": jnp.ones((7, 1)),
        "huge": jnp.full((3, 4), 1e30),
        "empty": jnp.zeros((4, 0)),
        "low": random_tree({"w": (4, 6)}, dtype=jnp.bfloat16)["w"],
    }
    for options in ({"v_floor": 0.1}, {"rescale": "preserve", "eps": 0.0, "nesterov": True}):
        transform = scale_by_normuon(weight_dimension_numbers=Numbers(0, 1), **options)
        step = jax.jit(transform.update)
        updates, state = step(gradient, transform.init(gradient))
        updates, state = step(gradient, state)
        chex.assert_tree_all_finite((updates, state.mu, state.nu))
        assert not np.any(updates["zero"])
        assert not np.any(updates["dead output"][:, 2])
        assert updates["empty"].shape == (4, 0)
        assert updates["low"].dtype == jnp.bfloat16
    still, _ = step(jax.tree.map(jnp.zeros_like, gradient), transform.init(gradient))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(still))


def test_a_floor_keeps_the_noise_of_a_dead_neuron_small():
    alive = random_tree({"w": (6, 5)})["w"]
    noisy = {"w": alive.at[:, 2].set(1e-5 * alive[:, 2])}
    size = lambda **options: np.linalg.norm(
        run(scale_by_normuon(weight_dimension_numbers=Numbers(0, 1), **options), [noisy])[0]["w"], axis=0
    )
    free, floored = size(), size(v_floor=0.1)
    assert free[2] > 0.5 * free[0]
    assert floored[2] < 0.05 * floored[0]


def test_bfloat16_updates_are_close_to_float32_ones():
    gradients = [random_tree({"w": (16, 32)}, seed) for seed in range(3)]
    exact, _ = run(scale_by_normuon(), gradients)
    half = [jax.tree.map(lambda g: g.astype(jnp.bfloat16), g) for g in gradients]
    rough, state = run(scale_by_normuon(ns_dtype=jnp.bfloat16), half)
    assert state.mu["w"].dtype == jnp.bfloat16
    assert state.nu["w"].dtype == jnp.float32
    np.testing.assert_allclose(np.float32(rough["w"]), exact["w"], atol=0.03)
    _, state = run(scale_by_normuon(mu_dtype=jnp.bfloat16), gradients)
    assert state.mu["w"].dtype == jnp.bfloat16


MODEL = {
    "embedding": {"table": (9, 8)},
    "layers": [{"mlp": {"up": {"kernel": (8, 12), "bias": (12,)}}, "norm": {"scale": (8,)}}],
    "head": {"kernel": (8, 9)},
}


def test_tables_and_vectors_follow_adamw_with_their_own_rate_and_decay():
    params, gradients = random_tree(MODEL), [random_tree(MODEL, seed) for seed in (1, 2)]
    optimizer = normuon(1e-2, weight_decay=0.3, adam_learning_rate=1e-3, adam_weight_decay=0.5)
    adamw = optax.adamw(1e-3, b1=0.9, b2=0.95, weight_decay=0.5)
    adam = optax.adam(1e-3, b1=0.9, b2=0.95)
    matrix = scale_by_normuon()
    results = []
    for transform in (optimizer, adamw, adam, matrix):
        tree = params if transform is not matrix else {"up": params["layers"][0]["mlp"]["up"]["kernel"]}
        state = transform.init(tree)
        for g in gradients:
            g = g if transform is not matrix else {"up": g["layers"][0]["mlp"]["up"]["kernel"]}
            updates, state = jax.jit(transform.update)(g, state, tree)
        results.append(updates)
    ours, decayed, plain, direction = results
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7)
    close(ours["embedding"]["table"], decayed["embedding"]["table"])
    close(ours["head"]["kernel"], decayed["head"]["kernel"])
    close(ours["layers"][0]["norm"]["scale"], plain["layers"][0]["norm"]["scale"])
    close(ours["layers"][0]["mlp"]["up"]["bias"], plain["layers"][0]["mlp"]["up"]["bias"])
    # Decay is in units of the base rate, not of the shape-adjusted one.
    kernel = params["layers"][0]["mlp"]["up"]["kernel"]
    close(ours["layers"][0]["mlp"]["up"]["kernel"], -1e-2 * (direction["up"] + 0.3 * kernel))


def test_the_rule_of_each_leaf_can_be_printed_and_labels_can_change_it():
    params = random_tree(MODEL)
    rules = {row["path"]: row["rule"] for row in trees.rule_table(params, rules=optimize.NORMUON_RULES)}
    assert rules["layers.0.mlp.up.kernel"] == "momentum, orthogonalised, normalised per output neuron"
    assert rules["head.kernel"] == "AdamW"
    labels = lambda tree: jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", tree)
    optimizer = normuon(1.0, labels=labels)
    updates, _ = optimizer.update(params, optimizer.init(params))
    for leaf in (updates["head"]["kernel"], updates["embedding"]["table"]):
        np.testing.assert_allclose(np.sqrt(np.mean(np.square(leaf))), 0.2, rtol=1e-5)


def test_integer_leaves_keep_their_value_and_dtype():
    params = {**random_tree(MODEL), "codes": jnp.arange(3, dtype=jnp.int8)}
    optimizer = normuon(1e-2, weight_decay=0.1)
    gradient = {**random_tree(MODEL, 1), "codes": np.zeros(3, jax.dtypes.float0)}
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    moved = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(moved["codes"], params["codes"])
    assert moved["codes"].dtype == jnp.int8


def test_state_is_one_copy_of_the_matrices_and_one_number_per_neuron():
    config = transformer.TransformerConfig(
        vocab_size=32, width=16, num_layers=2, num_heads=2, mlp_width=48, tied_head=False
    )
    shapes = jax.eval_shape(lambda: transformer.init_params(jax.random.key(0), config))
    report = memory_report(normuon(1e-3), shapes)
    rows = {row["role"]: row for row in report["roles"]}
    matrices = rows["matrix"]
    leaves = jax.tree.leaves(shapes)
    roles = jax.tree.leaves(trees.parameter_roles(shapes))
    smallest = min(leaf.shape[-2] for leaf, role in zip(leaves, roles) if role == "matrix")
    assert 1.0 < matrices["state_bytes"] / matrices["param_bytes"] <= 1 + 1 / smallest
    for role in ("embedding", "head", "vector"):
        assert rows[role]["state_bytes"] == 2 * rows[role]["param_bytes"], role


def test_a_scanned_transformer_gets_the_updates_of_the_unrolled_one():
    config = transformer.TransformerConfig(
        vocab_size=32, width=8, num_layers=2, num_heads=2, mlp_width=12, qkv_bias=True, tied_head=False
    )
    gradients = [transformer.init_params(jax.random.key(seed), config) for seed in range(2)]
    unrolled, _ = run(normuon(1e-2), gradients)
    scanned, _ = run(normuon(1e-2), [transformer.stack_layers(g) for g in gradients])
    chex.assert_trees_all_close(scanned, transformer.stack_layers(unrolled), rtol=1e-4, atol=1e-7)


def test_all_numbers_can_be_injected_and_changed_without_compiling_again():
    numbers = {
        "learning_rate": 1e-2,
        "adam_learning_rate": 3e-3,
        "weight_decay": 0.1,
        "adam_weight_decay": 0.2,
        "b1": 0.9,
        "b2": 0.9,
        "eps": 1e-8,
        "rms_target": 0.2,
        "v_floor": 0.01,
        "adam_b1": 0.9,
        "adam_b2": 0.95,
    }
    optimizer = optax.inject_hyperparams(normuon)(**numbers)
    params, gradients = random_tree(MODEL), [random_tree(MODEL, seed) for seed in (1, 2)]
    step = jax.jit(chex.assert_max_traces(optimizer.update, n=1))
    plain = normuon(**numbers)
    state, expected_state = optimizer.init(params), plain.init(params)
    for gradient in gradients:
        updates, state = step(gradient, state, params)
        expected, expected_state = plain.update(gradient, expected_state, params)
    chex.assert_trees_all_close(updates, expected, rtol=1e-4, atol=1e-7)
    for name in numbers:
        state.hyperparams[name] = state.hyperparams[name] * 0.5
    changed, _ = step(gradients[1], state, params)
    assert (
        np.abs(
            changed["layers"][0]["mlp"]["up"]["kernel"] - updates["layers"][0]["mlp"]["up"]["kernel"]
        ).max()
        > 1e-4
    )


def test_it_composes_with_clipping_schedules_and_apply_if_finite():
    params = random_tree(MODEL)
    optimizer = optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(1.0), normuon(optax.linear_schedule(0.0, 1e-2, 4))), 3
    )
    state = optimizer.init(params)
    step = jax.jit(optimizer.update)
    for count in range(3):
        updates, state = step(params, state, params)
        size = np.sqrt(np.mean(np.square(updates["layers"][0]["mlp"]["up"]["kernel"])))
        np.testing.assert_allclose(size, 0.2 * 1e-2 * count / 4, rtol=1e-4)
    bad = jax.tree.map(lambda g: g * jnp.nan, params)
    updates, after = step(bad, state, params)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    chex.assert_trees_all_equal(after.inner_state, state.inner_state)


def test_by_name_it_trains_tables_at_the_main_rate_and_vectors_at_theirs():
    params = random_tree(MODEL)
    optimizer = make_optimizer(
        "normuon", learning_rate=1e-2, vector_learning_rate=1e-3, params_for_roles=params
    )
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_allclose(np.abs(updates["head"]["kernel"]), 1e-2, rtol=1e-3)
    np.testing.assert_allclose(np.abs(updates["layers"][0]["norm"]["scale"]), 1e-3, rtol=1e-3)
    up = updates["layers"][0]["mlp"]["up"]["kernel"]
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(up))), 2e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "low", "high", "cosine"),
    [("muon5", 0.6, 1.25, 0.975), ("dion", 0.93, 1.08, 0.99), ("polar_express", 0.8, 1.2, 0.985)],
)
def test_each_table_of_coefficients_comes_as_close_to_the_polar_factor_as_measured(name, low, high, cosine):
    for shape in ((64, 128), (128, 128)):
        matrix = np.random.default_rng(0).normal(size=shape)
        u, _, vt = np.linalg.svd(matrix, full_matrices=False)
        ours = np.asarray(optimize.orthogonalize(jnp.float32(matrix), name))
        assert np.sum(ours * (u @ vt)) / np.linalg.norm(ours) / np.sqrt(min(shape)) >= cosine
        if shape[0] < shape[1]:
            values = np.linalg.svd(ours, compute_uv=False)
            assert low <= values.min() <= values.max() <= high


def test_orthogonalize_is_newton_schulz():
    assert optimize.orthogonalize is linalg.newton_schulz


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"b1": 1.0}, r"b1=1.0 must be in \[0, 1\)"),
        ({"b2": -0.1}, r"b2=-0.1 must be in \[0, 1\)"),
        ({"adam_b2": 1.5}, r"adam_b2=1.5 must be in \[0, 1\)"),
        ({"eps": -1.0}, "eps=-1.0 must not be negative"),
        ({"v_floor": math.inf}, "v_floor=inf must not be negative, and must be finite"),
        ({"rms_target": 0.0}, "rms_target=0.0 must be above 0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 must not be negative"),
        ({"learning_rate": math.nan}, "learning_rate=nan must be finite"),
        ({"ns_coeffs": "muon"}, "ns_coeffs='muon' is not known; did you mean 'muon5'"),
        ({"ns_coeffs": (1.0, 2.0)}, r"ns_coeffs of shape \(2,\) must have shape \(3,\) or \(k, 3\)"),
        ({"rescale": "norm"}, "rescale='norm' is not known.*preserve, rms"),
        ({"shape_scale": "width"}, "shape_scale='width' beside rescale='rms' would count the shape twice"),
        ({"shape_scale": "wide", "rescale": "preserve"}, "shape_scale='wide' is not known"),
        ({"neuron_axis": "input"}, "neuron_axis='input' is not known.*longer, output"),
        (
            {"learning_rate": optax.constant_schedule(1.0), "adam_learning_rate": 0.1},
            "constant while learning_rate is",
        ),
    ],
)
def test_bad_options_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        normuon(**{"learning_rate": 0.1, **options})


def test_bad_leaves_are_refused_by_path():
    with pytest.raises(
        ValueError, match=r"a.bias of shape \(3,\) needs an input and an output axis.*normuon does"
    ):
        scale_by_normuon().init({"a": {"bias": jnp.zeros(3)}})
    with pytest.raises(ValueError, match=r"no axes are given for layers.bias of shape \(2, 3\)"):
        scale_by_normuon().init({"layers": {"bias": jnp.zeros((2, 3))}})
    with pytest.raises(ValueError, match=r"input axes \(0,\) and output axes \(0,\) overlap for a of shape"):
        scale_by_normuon(weight_dimension_numbers=Numbers(0, -2)).init({"a": jnp.zeros((2, 3))})
    with pytest.raises(ValueError, match=r"output axes \(2,\) are given for a of shape \(2, 3\)"):
        scale_by_normuon(weight_dimension_numbers=Numbers(0, 2)).init({"a": jnp.zeros((2, 3))})
    with pytest.raises(ValueError, match=r"input axes \(\) are given for a of shape"):
        scale_by_normuon(weight_dimension_numbers=Numbers((), 1)).init({"a": jnp.zeros((2, 3))})
    with pytest.raises(ValueError, match="labels='heads' is not known; did you mean 'head'"):
        normuon(0.1, labels={"a": "heads"}).init({"a": jnp.zeros((2, 3))})


@pytest.mark.parametrize("options", [{"mu_dtype": "int8"}, {"ns_dtype": jnp.int32}, {"mu_dtype": "float33"}])
def test_dtypes_are_floating_point(options):
    for make in (scale_by_normuon, functools.partial(normuon, 0.1)):
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.*dtype"):
            make(**options)


@pytest.mark.parametrize("rate", [None, "0.1"])
def test_a_rate_is_a_number_or_a_schedule(rate):
    with pytest.raises(TypeError, match=r"learning_rate=.* must be a number or a schedule"):
        normuon(rate)


@pytest.mark.parametrize(
    "options",
    [
        *({"learning_rate": np.float32("nan")}, {"b1": np.float32(1)}, {"weight_decay": np.float32(-1)}),
        *({"adam_b2": np.int64(2)}, {"rms_target": np.float16(0)}, {"v_floor": np.int32(-1)}),
    ],
)
def test_numpy_scalars_are_checked_as_numbers_are(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        normuon(**({"learning_rate": 0.1} | options))


def test_distribution_refuses_what_the_exchange_cannot_use():
    auto, explicit = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((1, 1), ("replica", "fsdp"), axis_types=(auto, auto))
    assert optimize.Distribution(mesh, spread="replica").spread == ("replica",)
    with pytest.raises(TypeError, match="is no mesh"):
        optimize.Distribution("fsdp")
    for axis, message in (((), "names no axis"), (("fsdp", "fsdp"), "names an axis twice")):
        with pytest.raises(ValueError, match=message):
            optimize.Distribution(mesh, axis)
    mixed = jax.make_mesh((1, 1), ("replica", "fsdp"), axis_types=(auto, explicit))
    with pytest.raises(ValueError, match=r"must be Auto: jax.make_mesh\(..., axis_types="):
        optimize.Distribution(mixed)
    assert optimize.Distribution(mixed, "replica").parts == 1
