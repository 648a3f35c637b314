from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special

from effml import linalg
from effml.nn import transformer
from effml.optimize import scale_by_cayley
from effml.quantize import fake_quant_act, fake_quant_weight, respinquant
from effml.quantize.respinquant import RotationSet, RotationTraining, _training
from tests.quantize import numpy_model, small

CONFIG = numpy_model.config(2)
SPEC = respinquant.transformer_spec(CONFIG)
TOKENS = np.random.default_rng(0).integers(0, 31, (3, 2, 9))


def outlier_params(seed=0):
    """Two channels of the stream are far larger than the others, as in large models."""
    params = numpy_model.random_params(CONFIG, seed)
    params["embedding"]["table"][:, [3, 7]] += 6.0
    params["head"]["kernel"] *= 6.0
    return jax.tree.map(np.float32, params)


PARAMS = outlier_params()
START = respinquant.init_rotations(jax.random.key(0), SPEC)


def fused(rotations):
    """The fusion table, written out for gradients by the rotations."""
    folded = jax.tree.map(jnp.asarray, respinquant.fold_norms(PARAMS, SPEC))
    a, m, v = rotations
    h = linalg.hadamard(CONFIG.mlp_width)
    layers = []
    for i, layer in enumerate(folded["layers"]):
        attention, mlp = layer["attention"], layer["mlp"]
        values, heads = jnp.kron(jnp.eye(2), v[i]), jnp.kron(jnp.eye(4), v[i])

        def turned(part, before, after=None):
            after = jnp.eye(part["kernel"].shape[1]) if after is None else after
            return {"kernel": before.T @ part["kernel"] @ after, "bias": part["bias"] @ after}

        layers.append(
            {
                **layer,
                "attention": {
                    "query": turned(attention["query"], a[i]),
                    "key": turned(attention["key"], a[i]),
                    "value": turned(attention["value"], a[i], values),
                    "output": turned(attention["output"], heads, m[i]),
                },
                "mlp": {
                    "gate": turned(mlp["gate"], m[i]),
                    "up": turned(mlp["up"], m[i]),
                    "down": turned(mlp["down"], h, a[i + 1]),
                },
                "residual": {"attention": a[i].T @ m[i], "mlp": m[i].T @ a[i + 1]},
            }
        )
    table = folded["embedding"]["table"] @ a[0]
    head = {**folded["head"], "kernel": a[-1].T @ folded["head"]["kernel"]}
    return {**folded, "embedding": {"table": table}, "layers": layers, "head": head}


def fused_loss(rotations, settings):
    """The loss as the method is written: kernels fused and rounded, and the stream turned at every skip."""

    def linear(x, params, name):
        if name == "head":
            return transformer.plain_linear(x, params, name)
        if name == "mlp.down":
            x = linalg.fht(x, order=linalg.hadamard_order(CONFIG.mlp_width))
        kernel = fake_quant_weight(params["kernel"], settings.weight_bits, clip=None)
        return transformer.plain_linear(
            fake_quant_act(x, settings.activation_bits), {**params, "kernel": kernel}, name
        )

    def attention(inputs):
        bits = settings.key_value_bits
        query, key = linalg.fht(inputs.query), fake_quant_act(linalg.fht(inputs.key), bits)
        value = fake_quant_act(inputs.value, bits)
        return transformer.dense_attention(inputs._replace(query=query, key=key, value=value))

    return transformer.next_token_loss(
        fused(rotations),
        {"tokens": TOKENS[0]},
        CONFIG,
        linear=linear,
        attention=attention,
        residual=lambda x, update, name, layer: x @ layer["residual"][name] + update,
    )[0]


def quickly(function):
    """Compiled for one call."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=options)


def along_rotations(rotations, gradient):
    """What is left of a gradient on the orthogonal group: the skew part of R^T G."""
    skew = jax.tree.map(lambda r, g: np.float64(r).swapaxes(-1, -2) @ np.float64(g), rotations, gradient)
    return jax.tree.map(lambda s: s - np.swapaxes(s, -1, -2), skew)


@pytest.mark.parametrize(
    "settings",
    [
        RotationTraining(activation_bits=4),
        RotationTraining(activation_bits=4, weight_bits=4, key_value_bits=4, rematerialize=True),
    ],
    ids=["W16A4", "W4A4KV4"],
)
def test_the_fast_form_has_the_loss_and_the_gradient_of_the_fused_model(settings):
    rotations = RotationSet(
        *(
            jnp.asarray(leaf, jnp.float32)
            for leaf in numpy_model.near_rotations(SPEC, start=np.float64(START.a[0]))
        )
    )
    folded = transformer.join_projections(
        transformer.stack_layers(jax.tree.map(jnp.asarray, respinquant.fold_norms(PARAMS, SPEC)))
    )

    def fast_loss(rotations):
        return respinquant.quantized_loss(rotations, folded, jnp.asarray(TOKENS[0]), CONFIG, settings)

    loss, gradient = quickly(jax.value_and_grad(fast_loss))(rotations)
    expected, expected_gradient = quickly(jax.value_and_grad(lambda r: fused_loss(r, settings)))(rotations)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    logits = numpy_model.logits(PARAMS, TOKENS[0][:, :-1], CONFIG)
    unrounded = -np.take_along_axis(scipy.special.log_softmax(logits, -1), TOKENS[0][:, 1:, None], -1).mean()
    assert abs(loss - unrounded) > 1e-2
    for name, actual, wanted in zip(
        "amv", along_rotations(rotations, gradient), along_rotations(rotations, expected_gradient)
    ):
        assert np.abs(wanted).max() > 1e-3, name
        np.testing.assert_allclose(actual, wanted, atol=2e-4 * np.abs(wanted).max(), err_msg=name)


def test_without_rounding_there_is_nothing_to_learn():
    folded, config = _training._prepared(PARAMS, CONFIG)
    settings = RotationTraining(activation_bits=16)
    gradient = jax.grad(respinquant.quantized_loss)(START, folded, jnp.asarray(TOKENS[0]), config, settings)
    assert all(np.abs(leaf).max() == 0 for leaf in gradient)


SETTINGS = RotationTraining(steps=6, max_step=0.3, evaluate_every=2, activation_bits=3)


def train(**kwargs):
    arguments = {"settings": SETTINGS, "keep": TOKENS[:1], **kwargs}
    settings = arguments.pop("settings")
    return respinquant.train_rotations(PARAMS, START, TOKENS[:1], CONFIG, settings, **arguments)


@pytest.fixture(scope="module")
def trained():
    return train()


def test_training_lowers_the_loss_on_the_set_that_decides(trained):
    steps, losses = zip(*trained.evaluations)
    assert steps == (0, 2, 4, 6)
    assert min(losses) < losses[0] - 0.01
    assert losses[steps.index(trained.best_step)] == min(losses)
    found = respinquant.evaluate_rotations(PARAMS, trained.rotations, TOKENS[:1], CONFIG, SETTINGS)
    np.testing.assert_allclose(found, min(losses), rtol=1e-5)
    assert trained.orthogonality < 1e-5
    assert len(trained.losses) == len(trained.taken) == 6
    assert 0 < max(trained.taken) <= 0.3
    # Bases left the start, but not by far; the one before the head, which is not rounded, has no reason to.
    distance = np.linalg.norm(respinquant.transitions(trained.rotations)[0][0] - np.eye(16))
    assert 1e-3 < distance < 4
    np.testing.assert_allclose(trained.rotations.a[-1], START.a[-1], atol=1e-5)


@pytest.mark.parametrize(
    ("losses", "best"), [([1.0, 1.2, float("nan"), 1.1], 0), ([1.0, 0.9, float("nan"), 0.95], 2)]
)
def test_it_returns_the_best_that_it_measured_and_never_worse_than_the_start(monkeypatch, losses, best):
    measured = []

    def measure(leaves, *_):
        measured.append(jax.tree.map(np.array, leaves))
        return losses[len(measured) - 1]

    monkeypatch.setattr(_training, "_mean_loss", measure)
    result = train()
    assert result.best_step == best
    assert [loss for _, loss in result.evaluations] == pytest.approx(losses, nan_ok=True)
    for name, kept in zip("amv", result.rotations):
        np.testing.assert_array_equal(kept, measured[best // 2][name])


def test_the_optimizer_sees_rotations_alone_and_weights_stay():
    seen = []

    def update(gradient, state, params):
        seen.append(jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), params))
        return jax.tree.map(jnp.zeros_like, gradient), state

    before = jax.tree.map(np.copy, PARAMS)
    train(
        settings=dataclasses.replace(SETTINGS, steps=1, evaluate_every=1),
        optimizer=optax.GradientTransformation(lambda params: (), update),
    )
    assert seen == [
        {"a": ((3, 16, 16), "float32"), "m": ((2, 16, 16), "float32"), "v": ((2, 4, 4), "float32")}
    ]
    jax.tree.map(np.testing.assert_array_equal, PARAMS, before)


def test_an_optax_transformation_takes_the_place_of_the_default(trained):
    cosine = optax.cosine_decay_schedule(SETTINGS.max_step, SETTINGS.steps)
    result = train(optimizer=scale_by_cayley(cosine))
    np.testing.assert_allclose(result.losses, trained.losses, rtol=1e-3)
    assert result.taken == []


def test_a_global_basis_stays_one_and_orthogonal_by_products_alone(trained):
    result = train(kind="global", settings=dataclasses.replace(SETTINGS, exact=False, iters=1, max_step=1.5))
    assert max(result.taken) > 0.1
    assert result.best_step > 0
    assert result.orthogonality < 1e-5
    for change in respinquant.transitions(result.rotations):
        np.testing.assert_allclose(change, np.broadcast_to(np.eye(16), change.shape), atol=1e-5)
    assert result.evaluations[0] == pytest.approx(trained.evaluations[0], rel=1e-5)
    assert np.abs(result.rotations.a[0] - START.a[0]).max() > 1e-4


@pytest.mark.parametrize("size", [8, 40])
def test_what_few_iterations_leave_is_made_orthogonal(size):
    """A start and a gradient along the axes: the skew matrix is as large as a step lets it be."""
    gradient = np.roll(np.eye(size, dtype=np.float32), size // 2, axis=0)
    gradient[: size // 2] *= -1
    moved = linalg.cayley_step(jnp.eye(size), jnp.asarray(gradient), 1.5, exact=False, iters=5).matrix
    assert respinquant._rotations.orthogonality(moved) > 5e-3
    found = _training._back_to_rotations({"basis": moved})["basis"]
    assert respinquant._rotations.orthogonality(found) < 1e-5
    np.testing.assert_allclose(found, scipy.linalg.polar(np.float64(moved))[0], atol=1e-5)


def test_what_an_optimizer_of_the_callers_leaves_is_made_orthogonal():
    drift = optax.stateless(lambda gradient, params: jax.tree.map(lambda leaf: 0.02 * leaf, params))
    result = train(settings=dataclasses.replace(SETTINGS, steps=1, evaluate_every=1), optimizer=drift)
    assert result.orthogonality < 1e-5
    np.testing.assert_allclose(result.evaluations[1][1], result.evaluations[0][1], rtol=1e-4)


def test_a_start_without_a_loss_is_an_error(monkeypatch):
    monkeypatch.setattr(_training, "_mean_loss", lambda *_: float("nan"))
    with pytest.raises(ValueError, match=r"loss at the start is nan on the calibration set: .* of 3 bits"):
        train()


def test_an_interrupted_run_goes_on_where_it_was(trained, tmp_path):
    path = tmp_path / "rotations.npz"

    def stop(step, steps, loss):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(checkpoint=path, progress=stop)
    steps = []
    resumed = train(checkpoint=path, progress=lambda step, steps_, loss: steps.append(step))
    assert steps == [5, 6]
    for one, other in zip(jax.tree.leaves(resumed[:5]), jax.tree.leaves(trained[:5])):
        np.testing.assert_array_equal(one, other)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rotations.npz"]
    with pytest.raises(ValueError, match=r"rotations.npz' is of another run"):
        train(checkpoint=path, settings=dataclasses.replace(SETTINGS, max_step=0.2))
    for optimizer in (scale_by_cayley(0.1), optax.sgd(0.1)):
        with pytest.raises(ValueError, match=r"rotations.npz' is of another run .*optimizer"):
            train(checkpoint=path, optimizer=optimizer)
    whole = path.read_bytes()
    for place in (0.1, 0.5, 0.9):
        small.flipped(path, place)
        with pytest.raises(
            ValueError, match=r"rotations.npz' is (damaged|of another run).*; remove it|, remove it"
        ):
            train(checkpoint=path)
        path.write_bytes(whole)
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"rotations.npz' is damaged"):
        train(checkpoint=path)


def test_a_second_run_compiles_nothing(trained):
    before = _training._cayley_training_step._cache_size(), _training._loss_alone._cache_size()
    train(settings=dataclasses.replace(SETTINGS))
    assert (_training._cayley_training_step._cache_size(), _training._loss_alone._cache_size()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_bits": 9}, "activation_bits=9"),
        ({"weight_bits": 1}, "weight_bits=1"),
        ({"key_value_bits": 0}, "key_value_bits=0 must be 2 to 8, or 16 for none"),
        ({"steps": -1}, "steps=-1 must be 0 or more"),
        ({"max_step": 0.0}, "max_step=0.0 must be above 0 and finite"),
        ({"max_step": float("inf")}, "max_step=inf must be above 0 and finite"),
    ],
)
def test_settings_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RotationTraining(**options)


@pytest.mark.parametrize(("most", "expected"), [(0, True), (10**12, False)])
def test_activations_are_computed_twice_where_they_are_many(monkeypatch, most, expected):
    seen = []
    monkeypatch.setattr(_training, "_MOST_KEPT", most)
    monkeypatch.setattr(_training, "_mean_loss", lambda *args: seen.append(args[-1].rematerialize) or 1.0)
    train(settings=dataclasses.replace(SETTINGS, steps=0))
    assert seen == [expected]


def test_tokens_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"batches of shape \(2, 9\) must be tokens"):
        respinquant.train_rotations(PARAMS, START, TOKENS[0], CONFIG)
    with pytest.raises(ValueError, match=r"keep holds ids outside 0 ... 30"):
        respinquant.train_rotations(PARAMS, START, TOKENS, CONFIG, keep=TOKENS + 20)
    with pytest.raises(ValueError, match="kind='globl' is not known; did you mean 'global'"):
        respinquant.train_rotations(PARAMS, START, TOKENS, CONFIG, kind="globl")
