from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effml import trees
from effml.nn import transformer
from effml.optimize import OPTIMIZERS, make_optimizer, normalize_columns, scale
from effml.trees import MuonDimensionNumbers as Numbers
from tests.conformance.optimizer_cases import OptimizerCase

CASES = [
    OptimizerCase("scale", scale, options={"weight_decay": 0.0}, parabola_rate=0.1, rosenbrock_rate=0.05),
    OptimizerCase(
        "scale l2 with decay",
        scale,
        options={"norm": "l2", "weight_decay": 1e-3, "momentum": 0.5},
        parabola_rate=0.2,
        rosenbrock_rate=0.1,
    ),
]


def random_tree(shapes, seed=0, dtype=jnp.float32):
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(generator.normal(size=shape), dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


SHAPES = {
    "embedding": {"table": (9, 4)},
    "layers": [{"mlp": {"up": {"kernel": (4, 6), "bias": (6,)}}, "norm": {"scale": (4,)}}],
    "head": {"kernel": (4, 9)},
}


def reference(params, gradients, *, lr, adam_lr, beta=0.9, decay=0.0, norm="rms", b1=0.9, b2=0.999):
    """Ten lines of the paper in NumPy float64: `gradients` is a list of trees as flat dicts of arrays."""
    params = {k: np.float64(v) for k, v in params.items()}
    momentum = {k: np.zeros_like(v) for k, v in params.items()}
    second = {k: np.zeros_like(v) for k, v in params.items()}
    for t, gradient in enumerate(gradients, start=1):
        for name, weight in params.items():
            g = np.float64(gradient[name])
            if weight.ndim == 1:
                momentum[name] = b1 * momentum[name] + (1 - b1) * g
                second[name] = b2 * second[name] + (1 - b2) * g * g
                u = momentum[name] / (1 - b1**t) / (np.sqrt(second[name] / (1 - b2**t)) + 1e-8)
                rate = adam_lr
            else:
                if "head" in name:
                    momentum[name] = beta * momentum[name] + (1 - beta) * g
                    g = momentum[name]
                size = np.array([np.linalg.norm(g[:, j]) for j in range(g.shape[1])])
                u = g / np.maximum(size / (np.sqrt(g.shape[0]) if norm == "rms" else 1.0), 1e-8)
                rate = lr
            weight = weight - rate * decay * weight
            params[name] = weight - rate * u
    return params


def flat(tree):
    return dict(zip(trees.leaf_names(tree), jax.tree.leaves(tree)))


@pytest.mark.parametrize("norm", ["rms", "l2"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_ten_steps_follow_a_numpy_transcription_in_all_three_classes(norm, decay):
    params = random_tree(SHAPES)
    gradients = [random_tree(SHAPES, seed) for seed in range(1, 11)]
    optimizer = scale(1e-2, adam_learning_rate=3e-3, norm=norm, weight_decay=decay)
    state, current = optimizer.init(params), params
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, current)
        current = optax.apply_updates(current, updates)
    expected = reference(
        flat(params), [flat(g) for g in gradients], lr=1e-2, adam_lr=3e-3, norm=norm, decay=decay
    )
    for name, value in flat(current).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-6, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("path", "shape", "axes"),
    [
        ("dense.kernel", (16, 5), (0,)),
        ("embedding.table", (16, 5), (0,)),
        ("head.kernel", (5, 16), (0,)),
        ("conv.kernel", (3, 3, 4, 5), (0, 1, 2)),
        ("attention.query.kernel", (16, 2, 3), (0,)),
        ("attention.out.kernel", (2, 3, 16), (0, 1)),
        ("layers.up.kernel", (3, 16, 5), (1,)),
        ("layers.query.kernel", (3, 16, 2, 5), (1,)),
        ("layers.out.kernel", (3, 2, 5, 16), (1, 2)),
    ],
)
def test_each_output_units_update_has_the_learning_rate_as_its_rms(path, shape, axes):
    gradient = random_tree(functools.reduce(lambda tree, key: {key: tree}, reversed(path.split(".")), shape))
    optimizer = scale(1e-2, allow_no_head=True)
    updates, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    rms = np.sqrt(np.mean(np.square(np.float64(jax.tree.leaves(updates)[0])), axis=axes))
    np.testing.assert_allclose(rms, 1e-2, rtol=1e-6)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 6), columns=st.integers(1, 6), seed=st.integers(0, 99), factor=st.floats(1e-3, 1e3)
)
def test_rescaling_one_output_units_gradient_changes_nothing(rows, columns, seed, factor):
    generator = np.random.default_rng(seed)
    gradient = generator.normal(size=(rows, columns)).astype(np.float32)
    scaled = gradient.copy()
    scaled[:, generator.integers(columns)] *= factor
    transform = normalize_columns(0)
    before = transform.update({"kernel": jnp.asarray(gradient)}, transform.init({}))[0]["kernel"]
    after = transform.update({"kernel": jnp.asarray(scaled)}, transform.init({}))[0]["kernel"]
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rate", "share"), [(1e-4, 0.32), (3e-4, 0.12), (1e-3, 0.04)])
def test_bfloat16_weights_lose_the_share_of_their_steps_that_the_docstring_says(rate, share):
    generator = np.random.default_rng(0)
    draw = lambda size: {
        "mix": {"kernel": jnp.asarray(size * generator.normal(size=(256, 256)), jnp.bfloat16)}
    }
    params, gradient = draw(0.02), draw(1.0)
    optimizer = scale(rate, allow_no_head=True)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    moved = optax.apply_updates(params, updates)["mix"]["kernel"]
    still = np.mean(np.asarray(moved == params["mix"]["kernel"]))
    np.testing.assert_allclose(still, share, atol=0.01)


def test_rescaling_an_input_row_does_change_the_update():
    gradient = random_tree({"kernel": (4, 6)})["kernel"]
    transform = normalize_columns(0)
    normalized = lambda g: transform.update({"kernel": g}, optax.EmptyState())[0]["kernel"]
    assert np.abs(normalized(gradient.at[0].multiply(5.0)) - normalized(gradient)).max() > 0.1


def test_torch_layout_on_the_transposed_tree_gives_the_transposed_update():
    flax_shapes = {
        "embed_tokens": {"weight": (9, 4)},
        "fc": {"weight": (4, 6)},
        "lm_head": {"weight": (4, 9)},
    }
    gradients = [random_tree(flax_shapes, seed) for seed in range(3)]
    transpose = lambda tree: {
        k: {"weight": v["weight"] if "embed" in k else v["weight"].T} for k, v in tree.items()
    }
    ours = scale(1e-2)
    torch_layout = functools.partial(trees.dimension_numbers, layout="torch")
    torch = scale(1e-2, weight_dimension_numbers=torch_layout)
    our_state, torch_state = ours.init(gradients[0]), torch.init(transpose(gradients[0]))
    for gradient in gradients:
        update, our_state = ours.update(gradient, our_state)
        torch_update, torch_state = torch.update(transpose(gradient), torch_state)
        jax.tree.map(np.testing.assert_array_equal, transpose(update), torch_update)
    rms = np.sqrt(np.mean(np.square(torch_update["lm_head"]["weight"]), axis=1))
    np.testing.assert_allclose(rms, 1e-2, rtol=1e-6)


def test_without_momentum_the_head_is_an_ordinary_matrix():
    shapes = {"head": {"kernel": (4, 9)}, "mix": {"kernel": (4, 9)}}
    optimizer = scale(1e-2, momentum=0.0)
    state = optimizer.init(random_tree(shapes))
    for seed in range(3):
        kernel = random_tree({"kernel": (4, 9)}, seed)
        updates, state = optimizer.update({"head": kernel, "mix": kernel}, state)
        np.testing.assert_array_equal(updates["head"]["kernel"], updates["mix"]["kernel"])


def test_only_the_head_remembers_the_gradient_before():
    optimizer = scale(1e-2)
    first, second = random_tree(SHAPES, 1), random_tree(SHAPES, 2)
    fresh, _ = optimizer.update(second, optimizer.init(first))
    _, state = optimizer.update(first, optimizer.init(first))
    later, _ = optimizer.update(second, state)
    same = {name: np.array_equal(a, b) for (name, a), b in zip(flat(fresh).items(), jax.tree.leaves(later))}
    assert same == {
        "embedding.table": True,
        "head.kernel": False,
        "layers.0.mlp.up.bias": False,
        "layers.0.mlp.up.kernel": True,
        "layers.0.norm.scale": False,
    }


def test_the_heads_momentum_is_optax_ema_without_bias_correction():
    ema = optax.chain(optax.ema(0.9, debias=False), normalize_columns(0), optax.scale(-1e-2))
    optimizer = scale(1e-2)
    kernel = random_tree({"head": {"kernel": (4, 9)}})
    state, peer_state = optimizer.init(kernel), ema.init(kernel)
    for seed in range(4):
        gradient = random_tree({"head": {"kernel": (4, 9)}}, seed)
        update, state = optimizer.update(gradient, state)
        expected, peer_state = ema.update(gradient, peer_state)
        np.testing.assert_allclose(update["head"]["kernel"], expected["head"]["kernel"], rtol=1e-6)


def test_the_heads_state_is_the_running_mean_also_when_beta_changes():
    make = optax.inject_hyperparams(
        scale, static_args=("labels", "weight_dimension_numbers", "momentum_dtype")
    )
    optimizer = make(learning_rate=1e-2, momentum=0.9)
    first, second = random_tree({"head": {"kernel": (4, 9)}}, 1), random_tree({"head": {"kernel": (4, 9)}}, 2)
    state = optimizer.init(first)
    _, state = optimizer.update(first, state, first)
    state.hyperparams["momentum"] = jnp.float32(0.5)
    updates, state = optimizer.update(second, state, first)
    mean = 0.5 * (0.1 * np.float64(first["head"]["kernel"])) + 0.5 * np.float64(second["head"]["kernel"])
    (kept,) = [leaf for leaf in jax.tree.leaves(state.inner_state) if leaf.ndim == 2]
    np.testing.assert_allclose(kept, mean, rtol=1e-5, atol=1e-7)
    expected = -1e-2 * mean / np.sqrt(np.mean(mean**2, axis=0))
    np.testing.assert_allclose(updates["head"]["kernel"], expected, rtol=1e-5, atol=1e-7)


def test_bfloat16_momentum_is_blended_in_float32_and_rounded_once():
    shapes = {"head": {"kernel": (64, 16)}}
    first, second = random_tree(shapes, 1, jnp.bfloat16), random_tree(shapes, 2, jnp.bfloat16)
    optimizer = scale(1e-2)
    _, state = optimizer.update(first, optimizer.init(first))
    (before,) = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 2]
    _, state = optimizer.update(second, state)
    (after,) = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 2]
    wide = 0.9 * np.float64(before) + 0.1 * np.float64(second["head"]["kernel"])
    # Only ties may differ; blending in bfloat16 rounds three times and changes a third of the entries.
    assert np.mean(np.asarray(after != jnp.asarray(wide, jnp.bfloat16))) < 1e-2


def test_norms_below_eps_are_replaced_by_it_and_those_above_are_untouched():
    gradient = {"kernel": jnp.array([[1e-9, 1e-7], [-1e-9, 1e-7]])}
    update = normalize_columns(0).update(gradient, optax.EmptyState())[0]["kernel"]
    np.testing.assert_allclose(update, [[0.1, 1.0], [-0.1, 1.0]], rtol=1e-5)


@pytest.mark.parametrize("norm", ["rms", "l2"])
def test_a_zero_column_gets_an_exactly_zero_update(norm):
    gradient = random_tree(SHAPES)
    gradient["head"]["kernel"] = gradient["head"]["kernel"].at[:, 3].set(0.0)
    gradient["embedding"]["table"] = gradient["embedding"]["table"].at[:, 1].set(0.0)
    optimizer = scale(1e-2, norm=norm)
    updates, _ = optimizer.update(gradient, optimizer.init(gradient))
    assert not np.any(updates["head"]["kernel"][:, 3])
    assert not np.any(updates["embedding"]["table"][:, 1])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))


def test_l2_updates_are_rms_updates_over_the_root_of_the_inputs():
    gradient = random_tree({"a": {"kernel": (16, 5)}, "conv": {"kernel": (3, 3, 4, 5)}})
    rms = normalize_columns().update(gradient, optax.EmptyState())[0]
    l2 = normalize_columns(norm="l2").update(gradient, optax.EmptyState())[0]
    np.testing.assert_allclose(l2["a"]["kernel"], rms["a"]["kernel"] / 4.0, rtol=1e-6)
    np.testing.assert_allclose(l2["conv"]["kernel"], rms["conv"]["kernel"] / 6.0, rtol=1e-6)


@pytest.mark.parametrize("rate", [1e-2, optax.constant_schedule(1e-2)], ids=["number", "schedule"])
def test_there_is_no_state_for_any_matrix_but_the_head(rate):
    shapes = {**SHAPES, "layers": SHAPES["layers"] * 5}
    state = scale(rate).init(random_tree(shapes))
    leaves = {
        trees.path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    }
    assert not [name for name in leaves if "up.kernel" in name or "embedding.table" in name]
    assert len([name for name in leaves if name.endswith("head.kernel")]) == 1
    # What remains is two moments for each of ten vectors, and step counters: one per rule, not per matrix.
    assert sum(shape == () for shape in leaves.values()) == (1 if rate == 1e-2 else 5)
    assert len([shape for shape in leaves.values() if shape]) == 1 + 2 * 10


def test_bfloat16_gradients_are_normalised_by_float32_norms():
    gradient = random_tree({"kernel": (512, 16)}, dtype=jnp.bfloat16)
    update = normalize_columns(0).update(gradient, optax.EmptyState())[0]["kernel"]
    wide = np.float64(gradient["kernel"])
    expected = jnp.asarray(wide / np.sqrt(np.mean(np.square(wide), axis=0)), jnp.bfloat16)
    assert update.dtype == jnp.bfloat16
    # Only ties in the last rounding may differ; a norm rounded to bfloat16 changes a good part of every column.
    assert np.mean(np.asarray(update != expected)) < 1e-3


def test_bfloat16_stays_near_float32_over_ten_steps():
    def run(dtype):
        params = random_tree(SHAPES, dtype=dtype)
        optimizer = scale(1e-2)
        state = optimizer.init(params)
        total = jax.tree.map(lambda p: np.zeros(p.shape, np.float32), params)
        for seed in range(1, 11):
            updates, state = optimizer.update(random_tree(SHAPES, seed, dtype), state, params)
            total = jax.tree.map(lambda t, u: t + np.float32(u), total, updates)
        return total

    # Ten updates, each entry off by a few roundings of 2^-9 of at most 3 rates.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=10 * 3e-2 * 4 * 2**-9),
        run(jnp.bfloat16),
        run(jnp.float32),
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_momentum_dtype_is_stored_and_kept(dtype):
    params = random_tree({"head": {"kernel": (4, 9)}})
    optimizer = scale(1e-2, momentum_dtype=dtype)
    state = optimizer.init(params)
    updates, later = jax.jit(optimizer.update)(params, state, params)
    assert [leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim == 2] == [dtype]
    assert [leaf.dtype for leaf in jax.tree.leaves(later) if leaf.ndim == 2] == [dtype]
    assert updates["head"]["kernel"].dtype == jnp.float32


def test_integer_leaves_keep_their_value_and_dtype():
    params = {**random_tree(SHAPES), "codes": jnp.arange(3, dtype=jnp.int8)}
    loss = lambda p: sum(
        jnp.sum(jnp.square(x)) for x in jax.tree.leaves(p) if jnp.issubdtype(x.dtype, jnp.floating)
    )
    gradient = jax.grad(loss, allow_int=True)(params)
    optimizer = scale(1e-2, weight_decay=0.1)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    moved = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(moved["codes"], params["codes"])
    assert moved["codes"].dtype == jnp.int8
    as_floats = {**gradient, "codes": jnp.zeros(3)}
    updates, _ = optimizer.update(as_floats, optimizer.init(params), params)
    np.testing.assert_array_equal(optax.apply_updates(params, updates)["codes"], params["codes"])
    without_params = scale(1e-2)
    updates, _ = without_params.update(gradient, without_params.init(params))
    np.testing.assert_array_equal(optax.apply_updates(params, updates)["codes"], params["codes"])


def test_vectors_follow_their_own_rate_on_a_schedule_of_the_same_shape():
    ramp = lambda peak: optax.linear_schedule(0.0, peak, 4)
    optimizer = scale(ramp(1e-2), adam_learning_rate=ramp(1e-1))
    params = random_tree(SHAPES)
    state = optimizer.init(params)
    for step in range(4):
        updates, state = optimizer.update(params, state, params)
        np.testing.assert_allclose(np.abs(updates["layers"][0]["norm"]["scale"]), 0.1 * step / 4, rtol=1e-4)
        rms = np.sqrt(np.mean(np.square(updates["embedding"]["table"]), axis=0))
        np.testing.assert_allclose(rms, 0.01 * step / 4, rtol=1e-5)


def test_a_tied_embedding_gets_momentum_and_one_norm_per_token():
    tied = {key: value for key, value in SHAPES.items() if key != "head"}
    first, second = random_tree(tied, 1), random_tree(tied, 2)
    with pytest.warns(UserWarning, match="taken to be tied"):
        state = scale(1e-2).init(first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explicit = scale(1e-2, tied_head=True)
        explicit_state = explicit.init(first)
        _, explicit_state = explicit.update(first, explicit_state)
        _, state = scale(1e-2).update(first, state)
        update, _ = scale(1e-2).update(second, state)
        expected, _ = explicit.update(second, explicit_state)
    jax.tree.map(np.testing.assert_array_equal, update, expected)
    table = update["embedding"]["table"]
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(table), axis=1)), 1e-2, rtol=1e-6)
    blend = 0.9 * first["embedding"]["table"] + second["embedding"]["table"]
    np.testing.assert_allclose(
        table, -1e-2 * blend / np.sqrt(np.mean(np.square(blend), axis=1, keepdims=True)), rtol=1e-4
    )


def test_labels_and_axes_can_be_given_as_trees_or_functions():
    params = random_tree({"first": {"w": (4, 6)}, "last": {"w": (6, 9)}})
    labels = {"first": {"w": "matrix"}, "last": {"w": "head"}}
    axes = {"first": {"w": Numbers((1,), (0,))}, "last": {"w": Numbers((0,), (1,))}}
    by_tree = scale(1e-2, labels=labels, weight_dimension_numbers=axes)
    by_function = scale(1e-2, labels=lambda tree: labels, weight_dimension_numbers=lambda tree: axes)
    first, _ = by_tree.update(params, by_tree.init(params))
    second, _ = by_function.update(params, by_function.init(params))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(first["first"]["w"]), axis=1)), 1e-2, rtol=1e-6)
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(first["last"]["w"]), axis=0)), 1e-2, rtol=1e-6)


def test_clipping_before_it_changes_the_head_but_no_other_matrix():
    params, gradients = random_tree(SHAPES), [random_tree(SHAPES, seed) for seed in (1, 2)]
    gradients[0] = jax.tree.map(lambda g: 100 * g, gradients[0])
    clipped = optax.chain(optax.clip_by_global_norm(0.5), scale(1e-2))
    results = []
    for optimizer in (clipped, scale(1e-2)):
        state = optimizer.init(params)
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state)
        results.append(updates)
    np.testing.assert_allclose(results[0]["embedding"]["table"], results[1]["embedding"]["table"], rtol=1e-5)
    assert np.abs(results[0]["head"]["kernel"] - results[1]["head"]["kernel"]).max() > 1e-3


def test_all_numbers_can_be_injected_and_changed_without_compiling_again():
    make = optax.inject_hyperparams(
        scale, static_args=("labels", "weight_dimension_numbers", "momentum_dtype")
    )
    optimizer = make(learning_rate=1e-2, adam_learning_rate=3e-3, weight_decay=0.1, momentum=0.9)
    plain = scale(learning_rate=1e-2, adam_learning_rate=3e-3, weight_decay=0.1, momentum=0.9)
    params = random_tree(SHAPES)
    step = jax.jit(optimizer.update)
    state = optimizer.init(params)
    updates, state = step(params, state, params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        updates,
        plain.update(params, plain.init(params), params)[0],
    )
    for name in ("learning_rate", "adam_learning_rate", "weight_decay", "momentum", "eps"):
        state.hyperparams[name] = state.hyperparams[name] * 0.5
    step(params, state, params)
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, r"momentum=1.0 must be in \[0, 1\)"),
        ({"momentum": -0.1}, r"momentum=-0.1 must be in \[0, 1\)"),
        ({"adam_b2": 1.5}, r"adam_b2=1.5 must be in \[0, 1\)"),
        ({"norm": "l1"}, "norm='l1' is not known.*l2, rms"),
        ({"eps": 0.0}, "eps=0.0 must be above 0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 must not be negative"),
        (
            {"learning_rate": optax.constant_schedule(1.0), "adam_learning_rate": 0.1},
            "constant while learning_rate is",
        ),
    ],
)
def test_bad_numbers_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        scale(**{"learning_rate": 0.1, **options})


def test_a_model_without_a_head_is_refused_by_name_unless_allowed():
    params = random_tree({"mix": {"kernel": (4, 4)}})
    with pytest.raises(
        ValueError, match=r"no parameter has the role 'head' \(searched .*lm_head, head.*mix.kernel"
    ):
        scale(0.1).init(params)
    scale(0.1, allow_no_head=True).init(params)
    tied = random_tree({"embedding": {"table": (9, 4)}})
    with pytest.raises(ValueError, match="no parameter has the role 'head'"):
        scale(0.1, tied_head=False).init(tied)
    with pytest.raises(ValueError, match="labels='heads' is not known; did you mean 'head'"):
        scale(0.1, labels={"mix": {"kernel": "heads"}}).init(params)


def test_several_heads_are_allowed_with_a_warning():
    params = random_tree({"head": {"a": {"kernel": (4, 9)}, "b": {"kernel": (4, 3)}}})
    with pytest.warns(UserWarning, match="2 parameters have the role 'head'"):
        state = scale(0.1).init(params)
    assert len([leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 2]) == 2


def test_normalize_columns_refuses_vectors_missing_axes_and_axes_that_do_not_exist():
    with pytest.raises(ValueError, match=r"bias of shape \(3,\) needs an input and an output axis"):
        normalize_columns().init({"bias": jnp.zeros(3)})
    with pytest.raises(ValueError, match="no axes are given for b of shape"):
        normalize_columns({"a": Numbers(), "b": None}).init({"a": jnp.zeros((2, 2)), "b": jnp.zeros((2, 2))})
    with pytest.raises(ValueError, match=r"axes \(2,\) are given for a of shape \(2, 2\)"):
        normalize_columns(2).init({"a": jnp.zeros((2, 2))})


def test_one_element_and_empty_matrices_survive():
    params = {"head": {"kernel": jnp.full((1, 1), 3.0)}, "mix": {"kernel": jnp.zeros((4, 0))}}
    optimizer = scale(1e-2)
    updates, _ = optimizer.update(params, optimizer.init(params))
    np.testing.assert_allclose(updates["head"]["kernel"], -1e-2, rtol=1e-6)
    assert updates["mix"]["kernel"].shape == (4, 0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_named_optimizer_trains_with_its_own_vector_rate_and_decay(name):
    params = random_tree(SHAPES)
    still = make_optimizer(name, learning_rate=1e-2, vector_learning_rate=0.0, params_for_roles=params)
    second = {"gradient_at": lambda _: params}  # for those that take two gradients
    updates, _ = still.update(params, still.init(params), params, **second)
    assert not np.any(updates["layers"][0]["norm"]["scale"])
    assert np.any(updates["layers"][0]["mlp"]["up"]["kernel"])
    decayed = make_optimizer(name, learning_rate=1e-2, weight_decay=0.5)
    plain = make_optimizer(name, learning_rate=1e-2)
    difference = jax.tree.map(
        lambda a, b: a - b,
        decayed.update(params, decayed.init(params), params, **second)[0],
        plain.update(params, plain.init(params), params, **second)[0],
    )
    for role in ("embedding", "head"):
        leaf = jax.tree.leaves(difference[role])[0]
        np.testing.assert_allclose(leaf, -1e-2 * 0.5 * jax.tree.leaves(params[role])[0], rtol=1e-4, atol=1e-7)


def test_named_muon_orthogonalises_hidden_matrices_and_leaves_tables_to_adam():
    params = random_tree(SHAPES)
    optimizer = make_optimizer("muon", learning_rate=1.0)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    singular = np.linalg.svd(np.asarray(updates["layers"][0]["mlp"]["up"]["kernel"]), compute_uv=False)
    assert singular.max() / singular.min() < 2
    np.testing.assert_allclose(np.abs(updates["embedding"]["table"]), 1.0, rtol=1e-4)
    np.testing.assert_allclose(np.abs(updates["head"]["kernel"]), 1.0, rtol=1e-4)


def test_an_unknown_optimizer_and_a_constant_vector_rate_beside_a_schedule_are_refused():
    with pytest.raises(ValueError, match="optimizer='scales' is not known; did you mean 'scale'"):
        make_optimizer("scales", learning_rate=0.1)
    with pytest.raises(
        ValueError, match=r"vector_learning_rate=0\.1 is constant while learning_rate is a schedule"
    ):
        make_optimizer("adamw", learning_rate=optax.constant_schedule(0.1), vector_learning_rate=0.1)
    with pytest.raises(ValueError, match="no parameter has the role 'head'"):
        make_optimizer("scale", learning_rate=0.1, params_for_roles={"mix": {"kernel": jnp.ones((2, 2))}})


SHARDED = """
import json, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from effml.optimize import scale
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
key = jax.random.key(0)
params = {
    "a": {"kernel": jax.random.normal(key, (64, 24))},
    "b": {"kernel": jax.random.normal(key, (64, 40))},
    "head": {"kernel": jax.random.normal(key, (64, 56))},
}
out = {}
for name, spec in (("inputs", P("fsdp", None)), ("outputs", P(None, "fsdp"))):
    sharded = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec)), params)
    optimizer = scale(1e-2)
    state = jax.jit(optimizer.init)(sharded)
    step = jax.jit(optimizer.update).lower(sharded, state, sharded).compile()
    updates, _ = step(sharded, state, sharded)
    alone, _ = optimizer.update(params, optimizer.init(params), params)
    out[name] = {
        "collectives": re.findall(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\\(", step.as_text()),
        "difference": max(float(jnp.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(alone))),
    }
print(json.dumps(out))
"""


def test_sharded_inputs_cost_one_all_reduce_of_a_vector_per_matrix_and_sharded_outputs_none():
    import json

    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["outputs"]["collectives"] == []
    shapes = []
    for shape, kind in found["inputs"]["collectives"]:
        assert kind == "all-reduce"
        # One all-reduce may carry several vectors at once, as a tuple.
        shapes += re.findall(r"f32\[([\d,]*)\]", shape)
    sizes = sorted(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)
    assert sizes == [24, 40, 56]
    assert max(found["inputs"]["difference"], found["outputs"]["difference"]) < 1e-7


@pytest.mark.parametrize("name", ["scale", "muon"])
def test_a_scanned_transformer_gets_the_updates_of_the_unrolled_one(name):
    config = transformer.TransformerConfig(
        vocab_size=32, width=8, num_layers=2, num_heads=2, mlp_width=12, qkv_bias=True, tied_head=False
    )
    gradients = [transformer.init_params(jax.random.key(seed), config) for seed in range(2)]
    results = []
    for stack in (transformer.stack_layers, lambda tree: tree):
        optimizer = make_optimizer(name, learning_rate=1e-2)
        update = jax.jit(optimizer.update)
        state = jax.jit(optimizer.init)(stack(gradients[0]))
        for gradient in gradients:
            updates, state = update(stack(gradient), state, stack(gradient))
        results.append(updates)
    scanned, unrolled = results
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
        scanned,
        transformer.stack_layers(unrolled),
    )


@pytest.mark.parametrize("name", ["limuon", "normuon"])
def test_options_of_a_recipes_adam_reach_the_vectors_too(name):
    params = {"up": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}, "head": {"kernel": jnp.ones((4, 5))}}

    def move(**options):
        optimizer = make_optimizer(name, learning_rate=1e-3, **options)
        return optimizer.update(params, optimizer.init(params), params, gradient_at=lambda _: params)[0]

    moved = move(adam_learning_rate=1e-1)
    for leaf in (moved["up"]["bias"], moved["head"]["kernel"]):
        np.testing.assert_allclose(leaf, -1e-1, rtol=1e-3)
    with pytest.raises(ValueError, match="labels is not taken by make_optimizer"):
        move(labels=lambda params: params)
