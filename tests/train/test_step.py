from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effml import train
from effml.train import init_state, make_eval_step, make_step


def init(key):
    up, down = jax.random.split(key)
    return {
        "up": {"kernel": jax.random.normal(up, (5, 8)) * 0.3, "bias": jnp.zeros(8)},
        "down": {"kernel": jax.random.normal(down, (8, 1)) * 0.3},
    }


def predict(params, x):
    return (jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"]) @ params["down"]["kernel"])[..., 0]


def weighted_loss(params, batch):
    errors = (predict(params, batch["x"]) - batch["y"]) ** 2
    total = jnp.sum(batch["weights"])
    loss = jnp.sum(errors * batch["weights"]) / jnp.maximum(total, 1e-9)
    return loss, {"tokens": total, "correct": jnp.sum(errors < 1), "spread": loss * 2}


def make_batch(seed, rows=12, length=3):
    rng = np.random.default_rng(seed)
    weights = (rng.random((rows, length)) < 0.6).astype(np.float32)
    weights[0] = 1
    return {
        "x": rng.normal(size=(rows, length, 5)).astype(np.float32),
        "y": rng.normal(size=(rows, length)).astype(np.float32),
        "weights": weights,
    }


def numpy_gradient(params, batch):
    """The weighted mean's gradient in float64, by hand."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    x, y, w = (batch[k].astype(np.float64) for k in ("x", "y", "weights"))
    hidden = np.tanh(x @ p["up"]["kernel"] + p["up"]["bias"])
    error = (hidden @ p["down"]["kernel"])[..., 0] - y
    share = 2 * error * w / w.sum()
    inner = share[..., None] * p["down"]["kernel"][:, 0] * (1 - hidden**2)
    return {
        "up": {"kernel": np.einsum("btd,bth->dh", x, inner), "bias": inner.sum((0, 1))},
        "down": {"kernel": np.einsum("bth,bt->h", hidden, share)[:, None]},
    }, float((error**2 * w).sum() / w.sum())


@pytest.mark.parametrize("accumulate", [1, 2, 3, 12])
def test_one_sgd_step_follows_the_gradient_of_the_whole_batch(accumulate):
    optimizer = optax.sgd(1.0)
    state = init_state(jax.random.key(0), init, optimizer)
    before = jax.tree.map(np.asarray, state.params)
    batch = make_batch(1)
    batch["weights"][5::6] = 0  # with 12 parts, some have no weight at all
    gradient, loss = numpy_gradient(before, batch)
    state, metrics = make_step(weighted_loss, optimizer, accumulate=accumulate)(state, batch)
    moved = jax.tree.map(lambda a, b: a - np.asarray(b), before, state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), moved, gradient)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(metrics["spread"], 2 * loss, rtol=1e-6)
    assert float(metrics["tokens"]) == batch["weights"].sum()
    assert int(state.step) == 1


def test_correct_is_a_count_over_all_parts():
    optimizer = optax.sgd(0.0)
    batch = make_batch(1)
    counts = []
    for accumulate in (1, 4):
        state = init_state(jax.random.key(0), init, optimizer)
        counts.append(
            float(make_step(weighted_loss, optimizer, accumulate=accumulate)(state, batch)[1]["correct"])
        )
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("clip_norm", [1e-3, 1e3])
def test_clipping_limits_the_norm_and_keeps_the_direction(clip_norm):
    optimizer = optax.sgd(1.0)
    state = init_state(jax.random.key(0), init, optimizer)
    before = jax.tree.map(np.asarray, state.params)
    batch = make_batch(2)
    gradient, _ = numpy_gradient(before, batch)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
    state, metrics = make_step(weighted_loss, optimizer, clip_norm=clip_norm)(state, batch)
    scale = min(1.0, clip_norm / norm)
    jax.tree.map(
        lambda a, b, g: np.testing.assert_allclose(a - np.asarray(b), g * scale, atol=2e-7),
        before,
        state.params,
        gradient,
    )
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-5)


def test_bfloat16_computes_low_but_keeps_parameters_and_state_in_float32():
    seen = []

    def loss(params, batch):
        seen.append(params["up"]["kernel"].dtype)
        return weighted_loss(params, batch)

    optimizer = optax.adam(1e-2)
    state = init_state(jax.random.key(0), init, optimizer)
    before = jax.tree.map(np.asarray, state.params)
    exact, _ = numpy_gradient(before, make_batch(3))
    state, metrics = make_step(loss, optimizer, accumulate=3, compute_dtype="bfloat16")(state, make_batch(3))
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    assert {a.dtype for a in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    mu = state.optimizer_state[0].mu
    assert {a.dtype for a in jax.tree.leaves(mu)} == {jnp.dtype(jnp.float32)}
    assert metrics["loss"].dtype == jnp.float32
    # adam's first moment is 0.1 g; bfloat16 has 8 bits, so parameters are off by 2^-9 relative
    size = max(np.abs(g).max() for g in jax.tree.leaves(exact))
    jax.tree.map(lambda m, g: np.testing.assert_allclose(m / 0.1, g, atol=0.02 * size), mu, exact)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bad_batch_leaves_the_last_finite_state_and_is_remembered(accumulate):
    optimizer = optax.adam(0.1)
    step = make_step(weighted_loss, optimizer, accumulate=accumulate)
    state = init_state(jax.random.key(0), init, optimizer)
    state, _ = step(state, make_batch(0))
    kept = jax.tree.map(np.asarray, (state.params, state.optimizer_state))
    bad = make_batch(1)
    bad["y"][0, 0] = np.nan
    state, metrics = step(state, bad)
    assert int(metrics["first_bad_step"]) == int(state.first_bad_step) == 2
    state, metrics = step(state, make_batch(2))  # a good batch does not hide it
    assert int(metrics["first_bad_step"]) == 2
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.optimizer_state), kept)


def test_a_finite_loss_with_an_infinite_gradient_is_bad_too():
    optimizer = optax.sgd(0.1)
    step = make_step(lambda params, batch: jnp.sqrt(params) + 0 * batch.sum(), optimizer)
    state, metrics = step(init_state(jax.random.key(0), jnp.float32(0), optimizer), np.ones(2, np.float32))
    assert np.isfinite(metrics["loss"])
    assert int(metrics["first_bad_step"]) == 1
    assert float(state.params) == 0


def test_equal_arguments_give_the_same_function_and_training_twice_compiles_once():
    optimizer = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    first = make_step(functools.partial(_scaled, factor=2.0), optimizer, clip_norm=1.0)
    for seed in (0, 1):
        step = make_step(functools.partial(_scaled, factor=2.0), optimizer, clip_norm=1.0)
        assert step is first
        state = init_state(jax.random.key(seed), init, optimizer)
        for i in range(3):
            state, _ = step(state, make_batch(i))
    assert first.compilations() == 1
    assert make_step(functools.partial(_scaled, factor=3.0), optimizer, clip_norm=1.0) is not first
    assert make_step(functools.partial(_scaled, factor=2.0), optimizer) is not first
    assert make_step(functools.partial(_scaled, factor=2), optimizer, clip_norm=1.0) is not first
    assert make_eval_step(weighted_loss) is make_eval_step(weighted_loss)


def _scaled(params, batch, factor):
    loss, metrics = weighted_loss(params, batch)
    return loss * factor, metrics


def test_weakly_typed_state_does_not_compile_again():
    optimizer = optax.GradientTransformation(
        lambda params: jnp.asarray(1.0), lambda g, s, params=None: (g, s * jnp.float32(0.5))
    )
    step = make_step(weighted_loss, optimizer)
    state = init_state(jax.random.key(0), init, optimizer)
    for i in range(3):
        state, _ = step(state, make_batch(i))
    assert step.compilations() == 1


def test_the_state_passed_in_is_consumed_and_given_parameters_are_not():
    optimizer = optax.sgd(0.1)
    params = init(jax.random.key(5))
    state = init_state(jax.random.key(0), params, optimizer)
    make_step(weighted_loss, optimizer)(state, make_batch(0))
    assert state.params["up"]["kernel"].is_deleted()
    assert not params["up"]["kernel"].is_deleted()


def test_a_loss_with_a_key_gets_another_one_each_step_and_the_same_one_in_a_rerun():
    def noise(params, batch, key):
        return jax.random.normal(key, ()) + 0 * jnp.sum(params) + 0 * jnp.sum(batch)

    optimizer = optax.sgd(0.1)
    step = make_step(noise, optimizer)
    runs = []
    for _ in range(2):
        state = init_state(jax.random.key(0), jnp.ones(2), optimizer)
        losses = []
        for _ in range(3):
            state, metrics = step(state, np.ones(2, np.float32))
            losses.append(float(metrics["loss"]))
        runs.append(losses)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3


def test_extra_arguments_reach_the_optimizer():
    def update(updates, state, params=None, *, value, seen, **_):
        return jax.tree.map(lambda g: -value * seen * jnp.ones_like(g), updates), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    step = make_step(
        lambda params, batch: jnp.sum(params) + 0 * jnp.sum(batch),
        optimizer,
        extra_args=lambda context: {"value": context.loss, "seen": context.batch[0]},
    )
    state, _ = step(init_state(jax.random.key(0), jnp.ones(2), optimizer), np.full(2, 3, np.float32))
    np.testing.assert_array_equal(state.params, [1 - 2 * 3, 1 - 2 * 3])


def test_evaluation_counts_every_token_once():
    params = init(jax.random.key(1))
    whole = make_batch(7, rows=10)
    _, loss = numpy_gradient(params, whole)
    ragged = [{k: v[i : i + 4] for k, v in whole.items()} for i in (0, 4, 8)]
    ragged[-1] = {
        k: np.concatenate([v, np.full_like(v[:2], np.nan if k == "y" else 0)]) for k, v in ragged[-1].items()
    }
    ragged[-1]["y"] = np.nan_to_num(ragged[-1]["y"])
    empty = {k: np.zeros_like(v) for k, v in ragged[0].items()}
    scores = train.evaluate(make_eval_step(weighted_loss), params, [*ragged, empty])
    np.testing.assert_allclose(scores["nats_per_token"], loss, rtol=1e-6)
    np.testing.assert_allclose(scores["perplexity"], np.exp(loss), rtol=1e-6)
    assert scores["tokens"] == whole["weights"].sum()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"accumulate": 0}, ValueError, "accumulate=0"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm=-1.0"),
        ({"compute_dtype": "bfloat"}, ValueError, "did you mean 'bfloat16'"),
        ({"optimizer": optax.adam}, TypeError, "optimizer"),
        ({"loss_fn": 3}, TypeError, "loss_fn"),
    ],
)
def test_bad_options_are_named(options, error, words):
    arguments = {"loss_fn": weighted_loss, "optimizer": optax.sgd(0.1)} | options
    with pytest.raises(error, match=words):
        make_step(arguments.pop("loss_fn"), arguments.pop("optimizer"), **arguments)


def test_a_batch_that_does_not_split_a_vector_loss_and_an_old_key_are_refused():
    optimizer = optax.sgd(0.1)
    state = init_state(jax.random.key(0), init, optimizer)
    with pytest.raises(ValueError, match="12 rows does not split into accumulate=5"):
        make_step(weighted_loss, optimizer, accumulate=5)(state, make_batch(0))
    with pytest.raises(ValueError, match=r"must be a scalar, got shape \(12, 3\)"):
        make_step(lambda params, batch: predict(params, batch["x"]), optimizer)(state, make_batch(0))
    with pytest.raises(TypeError, match="key"):
        init_state(jax.random.PRNGKey(0), init, optimizer)
    with pytest.raises(ValueError, match="nothing to evaluate: 0 batches"):
        train.evaluate(make_eval_step(weighted_loss), None, [])
