"""LiMuon's refusals, and the recipe: LiMuon for matrices, Adam for the rest."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effml import linalg, trees
from effml.optimize import LIMUON_RULES, beta_warmup, limuon, scale_by_limuon


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


# Refusals


def test_without_the_second_gradient_it_refuses_and_never_averages():
    gradient = {"k": normal(3, 4)}
    for transform in (scale_by_limuon(), limuon(0.1), limuon(0.1, rank=2)):
        state = transform.init(gradient)
        with pytest.raises(
            ValueError, match="needs the gradient of the same batch at the previous parameters"
        ):
            transform.update(gradient, state, gradient)
        with pytest.raises(ValueError, match=r"shape \(4, 3\) for k"):
            transform.update(gradient, state, gradient, prev_params_grad={"k": normal(4, 3)})
        with pytest.raises(ValueError, match="other is in prev_params_grad only"):
            transform.update(gradient, state, gradient, prev_params_grad={**gradient, "other": normal(3, 4)})


def test_a_partition_that_does_not_mask_the_second_gradient_is_told_how():
    params = {"a": normal(3, 4), "b": normal(3, 4)}
    labels = {"a": "ours", "b": "other"}
    groups = {"ours": scale_by_limuon(), "other": optax.sgd(0.1)}
    careless = optax.partition(groups, labels)
    with pytest.raises(ValueError, match="mask_compatible_extra_args=True"):
        careless.update(params, careless.init(params), params, prev_params_grad=params)
    careful = optax.partition(groups, labels, mask_compatible_extra_args=True)
    careful.update(params, careful.init(params), params, prev_params_grad=params)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 1.5}, "beta=1.5"),
        ({"beta": -0.1}, "beta"),
        ({"rank": 0}, "rank=0"),
        ({"rank": 4, "oversampling": 1}, "oversampling=1"),
        ({"power_iters": -1}, "power_iters"),
        ({"ns_steps": 0}, "ns_steps"),
        ({"polar": "qr"}, "polar"),
        ({"direction": "factor", "rank": 2}, "did you mean 'factors'"),
        ({"direction": "factors"}, "give a rank"),
        ({"shape_scale": "rmss"}, "shape_scale"),
        ({"ns_coeffs": "muon"}, "ns_coeffs"),
        ({"qr": "cholesky"}, "qr"),
    ],
)
def test_bad_options_are_refused_at_once(options, words):
    with pytest.raises(ValueError, match=words):
        scale_by_limuon(**options)
    with pytest.raises(ValueError, match=words):
        limuon(0.1, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": 0.1, "weight_decay": -1.0}, "weight_decay"),
        ({"learning_rate": 0.1, "adam_b1": 1.0}, "adam_b1"),
        (
            {"learning_rate": optax.constant_schedule(0.1), "adam_learning_rate": 0.1},
            "constant while learning_rate is a schedule",
        ),
    ],
)
def test_bad_numbers_of_the_recipe_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        limuon(**options)


def test_vectors_unknown_labels_and_counts_under_inject_hyperparams_are_refused():
    with pytest.raises(ValueError, match=r"bias of shape \(3,\)"):
        scale_by_limuon().init({"bias": jnp.zeros(3)})
    with pytest.raises(ValueError, match="labels"):
        limuon(0.1, labels={"k": "matrices"}).init({"k": jnp.zeros((2, 2))})
    with pytest.raises(TypeError, match="list 'rank' in static_args"):
        jax.jit(optax.inject_hyperparams(limuon)(0.1, rank=2).init)({"k": jnp.zeros((2, 2))})
    for bad in ({"beta": 0.0}, {"beta": 0.1, "steps": 0}):
        with pytest.raises(ValueError, match=r"beta|steps"):
            beta_warmup(**bad)


# The recipe


PARAMS = {
    "embedding": {"table": normal(9, 4)},
    "up": {"kernel": normal(4, 6), "bias": normal(6)},
    "head": {"kernel": normal(6, 9)},
    "codes": jnp.arange(3),
}


def test_the_recipe_is_limuon_for_matrices_and_adam_for_the_rest():
    trained = {name: PARAMS[name] for name in ("embedding", "up", "head")}
    second = jax.tree.map(lambda leaf: leaf + 1, trained)
    optimizer = limuon(0.1, beta=0.3, weight_decay=0.01, adam_learning_rate=0.02, adam_weight_decay=0.5)
    updates, state = optimizer.update(trained, optimizer.init(trained), trained, prev_params_grad=trained)
    updates, state = optimizer.update(second, state, trained, prev_params_grad=trained)

    adam = optax.adamw(0.02, 0.9, 0.95, weight_decay=0.5)
    plain = optax.adam(0.02, 0.9, 0.95)
    for path, peer in ((("embedding", "table"), adam), (("head", "kernel"), adam), (("up", "bias"), plain)):
        leaf, moved = trained[path[0]][path[1]], updates[path[0]][path[1]]
        _, peer_state = peer.update(leaf, peer.init(leaf), leaf)
        np.testing.assert_allclose(moved, peer.update(leaf + 1, peer_state, leaf)[0], rtol=1e-5, atol=1e-7)
    g = np.float64(trained["up"]["kernel"])
    estimate = (g + 1) + 0.7 * (g - g)
    expected = -0.1 * (0.2 * np.sqrt(6) * np.asarray(linalg.newton_schulz(jnp.float32(estimate))) + 0.01 * g)
    np.testing.assert_allclose(updates["up"]["kernel"], expected, atol=1e-5)


def test_the_table_of_rules_has_a_word_for_every_leaf_and_integers_stay():
    rows = trees.rule_table(PARAMS, rules=LIMUON_RULES)
    assert {row["path"]: row["rule"] for row in rows} == {
        "embedding.table": "AdamW",
        "up.kernel": "variance-reduced estimate, orthogonalised",
        "up.bias": "Adam",
        "head.kernel": "AdamW",
        "codes": "not moved",
    }
    optimizer = limuon(0.1)
    gradients = jax.grad(lambda p: sum(jnp.sum(leaf * 1.0) for leaf in jax.tree.leaves(p)), allow_int=True)(
        PARAMS
    )
    updates, _ = optimizer.update(gradients, optimizer.init(PARAMS), PARAMS, prev_params_grad=gradients)
    np.testing.assert_array_equal(optax.apply_updates(PARAMS, updates)["codes"], PARAMS["codes"])


def test_beta_rate_and_decay_change_without_compiling_again():
    params = {"up": {"kernel": normal(4, 6)}}
    older = {"up": {"kernel": normal(4, 6, seed=3)}}
    injected = optax.inject_hyperparams(limuon)(0.1, beta=0.5, weight_decay=0.1)
    state = injected.init(params)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def update(state):
        return injected.update(params, state, params, prev_params_grad=older)

    _, state = update(state)
    for beta, decay in ((0.5, 0.1), (0.25, 0.0), (1.0, 0.3)):
        changed = state._replace(
            hyperparams={**state.hyperparams, "beta": jnp.float32(beta), "weight_decay": jnp.float32(decay)}
        )
        moved, _ = update(changed)
        plain = limuon(0.1, beta=beta, weight_decay=decay)
        _, plain_state = plain.update(params, plain.init(params), params, prev_params_grad=older)
        expected, _ = plain.update(params, plain_state, params, prev_params_grad=older)
        np.testing.assert_allclose(moved["up"]["kernel"], expected["up"]["kernel"], atol=1e-6)


def test_by_factors_the_previous_parameters_follow_from_the_new_ones():
    params = {
        "up": {"kernel": normal(6, 8)},
        "layers": {"mix": {"kernel": normal(2, 5, 4)}},
        "head": {"kernel": normal(8, 3)},
    }
    optimizer = limuon(optax.linear_schedule(0.1, 0.02, 5), rank=2, direction="factors", weight_decay=0.3)
    state = optimizer.init(params)
    kept = optimizer.keep(params)
    assert len(jax.tree.leaves(kept)) == 1  # the head's
    chex.assert_trees_all_close(optimizer.previous(params, state, kept), params)
    update = jax.jit(lambda g, state, p: optimizer.update(g, state, p, prev_params_grad=g))
    for step in range(4):
        before = params
        gradients = jax.tree.map(lambda leaf, step=step: jnp.roll(leaf, step), params)
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_close(
            optimizer.previous(params, state, optimizer.keep(before)), before, atol=1e-6
        )
