"""The perceptron against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.nn.mlp import ACTIVATIONS, init_mlp, mlp_forward

ORACLES = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "square": lambda x: x * x,
    "identity": lambda x: x,
}


def test_every_activation_has_an_oracle():
    assert set(ORACLES) == set(ACTIVATIONS)


@pytest.mark.parametrize("activation", ORACLES)
def test_outputs_are_those_of_numpy(activation):
    params = init_mlp(jax.random.key(0), [5, 7, 6, 3])
    params["layers"][0]["bias"] = jnp.arange(7.0) / 10
    params["layers"][2]["bias"] = jnp.arange(3.0)
    x = np.random.default_rng(0).normal(size=(2, 4, 5))
    expected = x
    for index, layer in enumerate(params["layers"]):
        expected = expected @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"], np.float64)
        if index < 2:
            expected = ORACLES[activation](expected)
    got = mlp_forward(params, jnp.asarray(x, jnp.float32), activation=activation)
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


def test_variance_is_kept_under_relu():
    widths = [400, 400, 400, 400]
    params = init_mlp(jax.random.key(1), widths, bias=False)
    assert all(set(layer) == {"kernel"} for layer in params["layers"])
    x = jax.random.normal(jax.random.key(2), (200, 400))
    out = mlp_forward(params, x)
    # gain 2 makes E[relu(z)^2] * 2 = E[z^2]: the mean square doubles once, in the first, unrectified layer
    assert 1.5 < float(jnp.square(out).mean()) < 2.5


def test_linear_seam_sees_every_product_by_name():
    params, seen = init_mlp(jax.random.key(0), [3, 4, 2]), []

    def linear(x, layer, name):
        seen.append(name)
        return x @ layer["kernel"] + layer["bias"] + 1

    mlp_forward(params, jnp.ones((1, 3)), linear=linear)
    assert seen == ["layers.0", "layers.1"]


def test_bfloat16_is_near_float32():
    params = init_mlp(jax.random.key(0), [32, 64, 8])
    x = jax.random.normal(jax.random.key(1), (16, 32))
    wide = mlp_forward(params, x)
    narrow = mlp_forward(params, x.astype(jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    assert float(jnp.abs(narrow - wide).max() / jnp.abs(wide).max()) < 0.02


@pytest.mark.parametrize("widths", [[3], [3, 0, 2], [3, -1]])
def test_bad_widths_are_named(widths):
    with pytest.raises(ValueError, match="widths"):
        init_mlp(jax.random.key(0), widths)


def test_unknown_activation_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'relu'"):
        mlp_forward(init_mlp(jax.random.key(0), [3, 2]), jnp.ones((1, 3)), activation="rellu")


def test_inputs_of_the_wrong_size_are_named():
    with pytest.raises(ValueError, match="4 features"):
        mlp_forward(init_mlp(jax.random.key(0), [3, 2]), jnp.ones((1, 4)))
