"""The factorised linear: signs and their gradients, its modes, packing, and the module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effml.quantize.nanoquant import _linear
from effml.quantize.nanoquant._linear import DENSE, FROZEN, LATENT, BinaryTensor

INPUTS, RANK, OUTPUTS = 37, 9, 21


def parts(seed=0):
    noise = np.random.default_rng(seed)
    v, u = noise.normal(size=(INPUTS, RANK)), noise.normal(size=(RANK, OUTPUTS))
    v[0, 0] = u[1, 1] = 0.0  # a sign of its own
    return {
        "kernel": noise.normal(size=(INPUTS, OUTPUTS)),
        "v": v,
        "u": u,
        "scale_in": noise.uniform(0.5, 1.5, INPUTS),
        "scale_out": noise.uniform(0.5, 1.5, OUTPUTS),
        "bias": noise.normal(size=OUTPUTS),
    }


def x_and_dy(seed=1):
    noise = np.random.default_rng(seed)
    return noise.normal(size=(2, 5, INPUTS)), noise.normal(size=(2, 5, OUTPUTS))


def by_hand(state, x, dy):
    """Output and gradients in float64, as those of a dense layer at the signs of the latents."""
    v, u = (np.where(state[name] >= 0, 1.0, -1.0) for name in ("v", "u"))
    x, dy = x.reshape(-1, INPUTS), dy.reshape(-1, OUTPUTS)
    h = (x * state["scale_in"]) @ v
    dz = dy * state["scale_out"]
    dx = (dz @ u.T) @ v.T
    return h @ u * state["scale_out"] + state["bias"], {
        "x": dx * state["scale_in"],
        "v": (x * state["scale_in"]).T @ (dz @ u.T),
        "u": h.T @ dz,
        "scale_in": (dx * x).sum(0),
        "scale_out": (dy * (h @ u)).sum(0),
        "bias": dy.sum(0),
    }


def given(state, x, dy, mode, trained):
    """Output and gradients of the linear with modes."""
    state = {name: jnp.asarray(value, jnp.float32) for name, value in state.items()}

    def run(x, state):
        return _linear.moded_linear(x, {**state, "mode": jnp.int32(mode)}, trained=trained)

    y, pull = jax.vjp(run, jnp.asarray(x, jnp.float32), state)
    dx, gradients = pull(jnp.asarray(dy, jnp.float32))
    return np.asarray(y), {
        "x": np.asarray(dx),
        **{name: np.asarray(value) for name, value in gradients.items()},
    }


def close(found, wanted):
    np.testing.assert_allclose(found, wanted.reshape(found.shape), rtol=2e-4, atol=2e-4)


def test_latent_factors_have_the_gradients_of_the_dense_layer_at_their_signs():
    state, (x, dy) = parts(), x_and_dy()
    y, wanted = by_hand(state, x, dy)
    found, gradients = given(state, x, dy, LATENT, "factors")
    close(found, y)
    for name, value in wanted.items():
        close(gradients[name], value)
    assert not gradients["kernel"].any()
    args = [jnp.asarray(state[name], jnp.float32) for name in ("v", "u", "scale_in", "scale_out", "bias")]
    plain, pull = jax.vjp(lambda *a: _linear.factor_linear(jnp.asarray(x, jnp.float32), *a), *args)
    close(np.asarray(plain), y)
    for name, value in zip(("v", "u", "scale_in", "scale_out", "bias"), pull(jnp.asarray(dy, jnp.float32))):
        close(np.asarray(value), wanted[name])


def test_what_rests_lets_gradients_through_and_has_none():
    state, (x, dy) = parts(), x_and_dy()
    y, wanted = by_hand(state, x, dy)
    for trained in ("factors", "kernels"):
        found, gradients = given(state, x, dy, FROZEN, trained)
        close(found, y)
        close(gradients["x"], wanted["x"])
        assert not any(gradients[name].any() for name in ("kernel", "v", "u", "scale_in", "scale_out"))


def test_a_dense_linear_is_its_kernel():
    state, (x, dy) = parts(), x_and_dy()
    rows, back = x.reshape(-1, INPUTS), dy.reshape(-1, OUTPUTS)
    for trained in ("kernels", "factors"):
        found, gradients = given(state, x, dy, DENSE, trained)
        close(found, rows @ state["kernel"] + state["bias"])
        close(gradients["x"], back @ state["kernel"].T)
        if trained == "kernels":
            close(gradients["kernel"], rows.T @ back)
        else:
            assert not gradients["kernel"].any()
        assert not any(gradients[name].any() for name in ("v", "u", "scale_in", "scale_out"))


def test_packed_opened_and_dense_are_one_kernel():
    state, (x, _) = parts(), x_and_dy()
    tensor = BinaryTensor.pack(
        *(state[name] for name in ("v", "u", "scale_in", "scale_out")), dtype="float32"
    )
    v, u = (np.where(state[name] >= 0, 1.0, -1.0) for name in ("v", "u"))
    kernel = state["scale_in"][:, None] * (v @ u) * state["scale_out"]
    np.testing.assert_allclose(tensor.dense(), kernel, rtol=1e-6, atol=1e-6)
    wanted = x @ kernel + state["bias"]
    bias = jnp.asarray(state["bias"], jnp.float32)
    x = jnp.asarray(x, jnp.float32)
    close(np.asarray(tensor(x, bias)), wanted)
    opened = _linear.open_signs({"binary": tensor, "bias": bias}, jnp.int8)
    assert opened["v"].dtype == jnp.int8
    close(np.asarray(_linear.open_linear(x, opened, "any")), wanted)


@pytest.mark.parametrize("shape", [(64, 32, 96), (32, 8, 40)])
def test_bits_are_those_of_the_formula(shape):
    from effml.quantize.nanoquant import bits_per_weight

    inputs, rank, outputs = shape
    noise = np.random.default_rng(0)
    tensor = BinaryTensor.pack(
        noise.normal(size=(inputs, rank)),
        noise.normal(size=(rank, outputs)),
        np.ones(inputs),
        np.ones(outputs),
    )
    assert tensor.bits_per_weight == pytest.approx(bits_per_weight(inputs, outputs, rank), rel=1e-12)


def test_the_module_is_the_function_and_refuses_what_does_not_fit():
    layer = _linear.NanoQuantLinear(INPUTS, OUTPUTS, RANK, rngs=nnx.Rngs(0), use_bias=True)
    x = jnp.asarray(x_and_dy()[0], jnp.float32)
    parts = (layer.v[...], layer.u[...], layer.scale_in[...], layer.scale_out[...], layer.bias[...])
    np.testing.assert_array_equal(layer(x), _linear.factor_linear(x, *parts))
    graph, state = nnx.split(layer)
    gradient = jax.jit(jax.grad(lambda state: nnx.merge(graph, state)(x).sum()))(state)
    assert all(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(gradient))
    still = _linear.NanoQuantLinear(INPUTS, OUTPUTS, RANK, rngs=nnx.Rngs(1), train_latents=False)
    still.load(layer.packed())
    np.testing.assert_allclose(still(x), layer(x), atol=0.1, rtol=1e-2)
    with pytest.raises(ValueError, match="does not fit"):
        _linear.NanoQuantLinear(INPUTS, OUTPUTS, 3, rngs=nnx.Rngs(1), train_latents=False).load(
            layer.packed()
        )
    with pytest.raises(ValueError, match="no latents"):
        layer.load(layer.packed())
    with pytest.raises(ValueError, match="rank=0 must be above 0"):
        _linear.NanoQuantLinear(INPUTS, OUTPUTS, 0, rngs=nnx.Rngs(1))


def test_packing_refuses_what_is_no_factor():
    good = [np.ones((4, 2)), np.ones((2, 3)), np.ones(4), np.ones(3)]
    with pytest.raises(ValueError, match="do not fit together"):
        BinaryTensor.pack(*good[:3], np.ones(4))
    with pytest.raises(ValueError, match="not finite"):
        BinaryTensor.pack(*good[:3], np.full(3, np.nan))
    # int8 would have kept scales of 0.3 as 0.
    with pytest.raises(ValueError, match="dtype='int8' must be a floating-point dtype"):
        BinaryTensor.pack(*good, dtype="int8")
    with pytest.raises(ValueError, match="larger than bfloat16 holds"):
        BinaryTensor.pack(*good[:3], np.full(3, 3.4e38))
