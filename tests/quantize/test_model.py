"""Packed models against the dense transformer with NumPy-rounded kernels and activations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml import decode, linalg, models, quantize
from effml.nn import transformer
from effml.quantize import respinquant
from tests.quantize import small

WHOLE = {"activation_bits": 16, "weight_bits": 16}


@functools.cache
def packed(method="rtn", bits="W4A16", **options):
    plan = quantize.plan(small.CONFIG, method=method, bits=bits, **options)
    tokens = small.tokens() if plan.needs_calibration else None
    return quantize.apply(plan, small.params(), small.CONFIG, tokens, key=jax.random.key(0))


dense_forward = jax.jit(transformer.forward, static_argnames=("config", "linear"))
packed_forward = jax.jit(quantize.forward, static_argnames=("config",))


def dense_logits(params, **kwargs):
    return dense_forward(params, small.tokens(2)[:, :-1], config=small.CONFIG, **kwargs).logits


def packed_logits(params, config):
    return packed_forward(params, small.tokens(2)[:, :-1], config=config).logits


def unpacked(params):
    """Plain kernels that NumPy makes from codes and scales."""

    def whole(part):
        if "packed" not in part:
            return part
        one = part["packed"]
        codes, scale = np.asarray(one.unpack(), np.float64), np.asarray(one.scale, np.float64)
        kernel = codes * np.repeat(scale.T, one.group_size, axis=0)
        return {
            **{k: v for k, v in part.items() if k != "packed"},
            "kernel": jnp.asarray(kernel, jnp.float32),
        }

    def layer(one):
        return {
            **one,
            "attention": {name: whole(part) for name, part in one["attention"].items()},
            "mlp": {name: whole(part) for name, part in one["mlp"].items()},
        }

    return {**params, "layers": [layer(one) for one in params["layers"]]}


def test_parameters_that_are_not_packed_as_the_config_says_are_refused():
    params, config, _ = packed()
    with pytest.raises(ValueError, match=r"layers.0.attention.\w+ is not packed, .* weight_bits=4"):
        quantize.forward(small.params(), small.tokens(1), config)
    with pytest.raises(ValueError, match="is packed in 4 bits, the config says weight_bits=3"):
        quantize.forward(params, small.tokens(1), dataclasses.replace(config, weight_bits=3))
    with pytest.raises(ValueError, match="is packed in 4 bits, the config says weight_bits=16"):
        quantize.forward(params, small.tokens(1), dataclasses.replace(config, weight_bits=16))


def test_without_rounding_it_is_the_model():
    config = quantize.PackedConfig(small.CONFIG, **WHOLE)
    np.testing.assert_array_equal(packed_logits(small.params(), config), dense_logits(small.params()))


@pytest.mark.parametrize(("bits", "group_size"), [("W4", None), ("W3", 16)])
def test_packed_weights_are_the_kernels_they_stand_for(bits, group_size):
    params, config, _ = packed(bits=bits, group_size=group_size)
    np.testing.assert_allclose(packed_logits(params, config), dense_logits(unpacked(params)), atol=2e-4)


def rounding_linear(x, params, name):
    """`plain_linear` on activations that are rounded to 4 bits, asymmetrically, per token."""
    if name != "head":
        high, low = jnp.maximum(x.max(-1, keepdims=True), 0), jnp.minimum(x.min(-1, keepdims=True), 0)
        scale = (high - low) / 15
        zero = jnp.round(-low / scale)
        x = scale * (jnp.clip(jnp.round(x / scale) + zero, 0, 15) - zero)
    return transformer.plain_linear(x, params, name)


def test_activations_are_rounded_in_front_of_every_kernel_but_the_head():
    params, config, _ = packed(bits="W4A4")
    wanted = dense_logits(unpacked(params), linear=rounding_linear)
    found = packed_logits(params, config)
    # A value on the edge of two steps may fall on either side.
    assert np.mean(np.abs(np.asarray(found - wanted)) > 1e-3) < 0.02
    assert np.abs(np.asarray(found - dense_logits(unpacked(params)))).max() > 0.05


def test_rotations_without_rounding_leave_the_model_as_it_was():
    rng = np.random.default_rng(0)

    def bases(count, size):
        return np.linalg.qr(rng.normal(size=(count, size, size)))[0]

    rotations = respinquant.RotationSet(bases(3, 32), bases(2, 32), bases(2, 8))
    ready = respinquant.rotate(small.params(), small.CONFIG, rotations, rank=None)
    params = jax.tree.map(jnp.asarray, ready.params)
    assert set(params["layers"][0]["residual"]["mlp"]) == {"t"}
    whole = dense_logits(small.params())
    config = quantize.PackedConfig(ready.config, hadamard=ready.hadamard, residual_rank=None, **WHOLE)
    np.testing.assert_allclose(packed_logits(params, config), whole, atol=2e-3)
    layers = [
        {name: part for name, part in layer.items() if name != "residual"} for layer in params["layers"]
    ]
    without = packed_logits({**params, "layers": layers}, config)
    assert np.abs(np.asarray(without - whole)).max() > 0.1, "the skips need their basis changes"


def test_low_rank_basis_changes_are_residual_rotations():
    rng = np.random.default_rng(0)
    x, update = rng.normal(size=(2, 3, 32)), rng.normal(size=(2, 3, 32))
    q = np.linalg.qr(rng.normal(size=(32, 4)))[0]
    m = np.linalg.qr(rng.normal(size=(4, 4)))[0] - np.eye(4)
    layer = {"residual": {"mlp": {"q": jnp.asarray(q, jnp.float32), "m": jnp.asarray(m, jnp.float32)}}}
    f = functools.partial(
        quantize.quantized_residual, jnp.asarray(x, jnp.float32), jnp.asarray(update, jnp.float32)
    )
    np.testing.assert_allclose(f("mlp", layer), x @ (np.eye(32) + q @ m @ q.T) + update, atol=1e-5)
    np.testing.assert_allclose(f("attention", layer), x + update, atol=1e-6)


def test_the_down_projection_reads_the_transform_of_its_input():
    config = quantize.PackedConfig(small.CONFIG, hadamard=True, **WHOLE)
    x = np.random.default_rng(0).normal(size=(3, 48)).astype(np.float32)
    kernel = {"kernel": jnp.eye(48)}
    wanted = x @ np.asarray(linalg.hadamard(48))
    np.testing.assert_allclose(
        quantize.quantized_linear(jnp.asarray(x), kernel, "mlp.down", config=config), wanted, atol=1e-5
    )
    np.testing.assert_allclose(
        quantize.quantized_linear(jnp.asarray(x), kernel, "mlp.up", config=config), x, atol=1e-6
    )


@pytest.mark.parametrize("hadamard", [False, True])
def test_rounded_keys_and_values_are_the_same_from_a_cache(hadamard):
    config = quantize.PackedConfig(small.CONFIG, key_value_bits=3, hadamard=hadamard, **WHOLE)
    whole = packed_logits(small.params(), config)
    without = packed_logits(small.params(), dataclasses.replace(config, key_value_bits=16))
    assert np.abs(np.asarray(whole - without)).max() > 1e-3
    tokens = small.tokens(2)[:, :-1]
    cache = transformer.cache_module.init_cache(small.CONFIG, 2, 16)
    read = jax.jit(
        functools.partial(transformer.forward_cached, config=small.CONFIG, **quantize.seams(config))
    )
    first, cache = read(small.params(), tokens[:, :9], cache)
    second, _ = read(small.params(), tokens[:, 9:], cache)
    np.testing.assert_allclose(jnp.concatenate([first.logits, second.logits], axis=1), whole, atol=2e-4)


def test_gptq_loses_less_of_every_product_than_round_to_nearest():
    plan = quantize.plan(small.CONFIG, method="rtn", bits="W3")
    _, _, nearest = quantize.apply(
        plan, small.params(), small.CONFIG, small.tokens(32), key=jax.random.key(0)
    )
    plan = quantize.plan(small.CONFIG, method="gptq", bits="W3")
    _, _, found = quantize.apply(plan, small.params(), small.CONFIG, small.tokens(32), key=jax.random.key(0))
    # Of the first layer, whose input is the same for both.
    for one, other in zip(found[:7], nearest[:7]):
        assert one["output_error"] < other["output_error"], one["name"]
        assert one["weight_error"] > other["weight_error"]


def test_scanned_layers_are_quantised_too():
    params, _, rows = packed()
    plan = quantize.plan(small.CONFIG, method="rtn", bits="W4")
    stacked = transformer.stack_layers(small.params())
    other, _, same = quantize.apply(plan, stacked, small.CONFIG, key=jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, other, params)
    assert [row["weight_error"] for row in same] == [row["weight_error"] for row in rows]


def test_it_writes_text_as_its_whole_forward_pass_would(tmp_path):
    params, config, _ = packed(bits="W4A8")
    models.save(tmp_path / "m", params, config, kind="packed")
    one, two = models.load(tmp_path / "m"), models.load(tmp_path / "m")
    prompt = small.tokens(1, 6)[:, :-1]
    written = decode.generate(one, prompt, max_new_tokens=5)
    line = np.zeros((1, 11), np.int32)
    line[:, :6] = prompt
    for at in range(6, 11):
        line[0, at] = int(packed_forward(params, line, config=config).logits[0, at - 1].argmax())
    assert written.tokens[0].tolist() == line[0, 6:].tolist()
    from effml.decode import _loop

    before = _loop.write._cache_size()
    decode.generate(two, prompt, max_new_tokens=5)
    assert _loop.write._cache_size() == before, "two loads of one model share their programs"


def test_bfloat16_models_run():
    config = dataclasses.replace(small.CONFIG, compute_dtype="bfloat16")
    plan = quantize.plan(config, method="gptq", bits="W4A8", keep_dtype="bfloat16")
    params, packed_config, _ = quantize.apply(
        plan, small.params(), config, small.tokens(), key=jax.random.key(0)
    )
    assert params["embedding"]["table"].dtype == jnp.bfloat16
    logits = packed_logits(params, packed_config)
    wanted = dense_logits(small.params())
    assert np.corrcoef(np.ravel(logits), np.ravel(wanted))[0, 1] > 0.9
