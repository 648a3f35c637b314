"""Fake quantisers against NumPy in float64, written from the equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml import quantize


def asymmetric(x, bits):
    """s = (max(x, 0) - min(x, 0)) / (2^b - 1), z = round(-min / s), row by row."""
    out = np.zeros_like(x)
    for i, row in enumerate(x):
        high, low = max(row.max(), 0.0), min(row.min(), 0.0)
        scale = (high - low) / (2**bits - 1) or 1.0
        zero = np.round(-low / scale)
        out[i] = scale * (np.clip(np.round(row / scale) + zero, 0, 2**bits - 1) - zero)
    return out


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_activations_are_rounded_as_the_equations_say(bits):
    x = np.random.default_rng(bits).normal(size=(6, 24))
    x[0], x[1], x[2] = np.abs(x[0]), -np.abs(x[1]), 0.0
    found = quantize.fake_quant_act(jnp.asarray(x, jnp.float32), bits)
    np.testing.assert_allclose(found, asymmetric(x, bits), atol=3e-6)


def test_groups_and_axes_are_rows_of_their_own():
    x = np.random.default_rng(0).normal(size=(5, 24))
    grouped = quantize.fake_quant_act(jnp.asarray(x, jnp.float32), 3, group_size=8)
    np.testing.assert_allclose(grouped, asymmetric(x.reshape(15, 8), 3).reshape(5, 24), atol=3e-6)
    across = quantize.fake_quant_act(jnp.asarray(x.T, jnp.float32), 3, axis=0)
    np.testing.assert_allclose(across, asymmetric(x, 3).T, atol=3e-6)


def test_symmetric_activations_use_a_grid_about_zero():
    x = jnp.array([[-3.0, -1.4, 0.4, 2.0]])
    assert quantize.fake_quant_act(x, 3, sym=True).tolist() == [[-3.0, -1.0, 0.0, 2.0]]


def test_gradients_pass_through_unchanged():
    x = jax.random.normal(jax.random.key(0), (4, 8))
    weights = jnp.arange(32.0).reshape(4, 8)
    for f in (
        lambda x: quantize.fake_quant_act(x, 2),
        lambda x: quantize.fake_quant_weight(x, 2),
        lambda x: quantize.fake_quant_weight(x, 2, clip=None),
    ):
        gradient = jax.grad(lambda x, f=f: (f(x) * weights).sum())(x)
        np.testing.assert_array_equal(gradient, weights)


def search(column, bits):
    """The clip ratio of 1, 0.99 ... 0.21 with the least sum |error|^2.4, by trying all of them."""
    top = 2 ** (bits - 1)
    full = np.abs(column).max() / (top - 1) or 1.0
    errors = []
    for step in range(80):
        scale = full * (1 - step / 100)
        rounded = scale * np.clip(np.round(column / scale), -top, top - 1)
        errors.append((np.abs(rounded - column) ** 2.4).sum())
    return full * (1 - np.arange(80) / 100), np.array(errors)


@pytest.mark.parametrize("bits", [2, 4])
def test_the_clip_search_finds_the_least_error_of_its_grid(bits):
    kernel = np.random.default_rng(bits).standard_t(3, size=(48, 5))
    scale = np.asarray(quantize.weight_scale(jnp.asarray(kernel, jnp.float32), bits))[:, 0]
    clipped = 0
    for column, found in zip(kernel.T, scale):
        scales, errors = search(column, bits)
        at = np.argmin(np.abs(scales - found))
        assert abs(scales[at] - found) < 1e-5 * found
        assert errors[at] <= errors.min() * (1 + 1e-4)
        clipped += at > 0
    assert clipped >= 3, "heavy tails want clipping"


def test_weights_are_scale_times_code_in_every_group():
    kernel = jax.random.normal(jax.random.key(0), (24, 3))
    scale = quantize.weight_scale(kernel, 3, group_size=8)
    codes = np.asarray(quantize.round_weight(kernel, scale, 3))
    assert scale.shape == (3, 3)
    assert codes.dtype == np.int8
    assert codes.min() >= -4
    assert codes.max() <= 3
    whole = np.stack([codes[:, o] * np.repeat(np.asarray(scale)[o], 8) for o in range(3)], axis=1)
    np.testing.assert_allclose(quantize.fake_quant_weight(kernel, 3, group_size=8), whole, atol=1e-6)


def test_zeros_stay_zero_and_nan_is_not_hidden():
    zero = jnp.zeros((4, 4))
    for found in (
        quantize.fake_quant_act(zero, 4),
        quantize.fake_quant_weight(zero, 4),
        quantize.fake_quant_weight(zero, 4, clip=None),
    ):
        np.testing.assert_array_equal(found, zero)
    bad = zero.at[1, 2].set(jnp.nan)
    assert np.isnan(quantize.fake_quant_act(bad, 4)[1]).all()
    assert not np.isnan(quantize.fake_quant_act(bad, 4)[0]).any()
    assert np.isnan(quantize.fake_quant_weight(bad, 4)[:, 2]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_finite_rows_stay_finite_however_wide(dtype, bits):
    largest = float(jnp.finfo(dtype).max)
    row = np.array([[-largest, -0.4 * largest, 0.0, 0.3 * largest, largest]])
    found = np.float64(quantize.fake_quant_act(jnp.asarray(row, dtype), bits))
    assert np.isfinite(found).all()
    assert np.abs(found - row).max() <= 1.02 * largest / (2**bits - 1)
    symmetric = np.float64(quantize.fake_quant_act(jnp.asarray(row, dtype), bits, sym=True))
    weights = np.float64(quantize.fake_quant_weight(jnp.asarray(row.T, dtype), bits, clip=None)).T
    for one in (symmetric, weights):
        assert np.abs(one - row).max() <= 1.02 * largest / (2**bits - 2)


def test_sixteen_bits_are_no_rounding_and_dtypes_stay():
    x = jax.random.normal(jax.random.key(0), (2, 8))
    assert quantize.fake_quant_act(x, 16) is x
    assert quantize.fake_quant_weight(x, 16) is x
    assert quantize.fake_quant_act(x.astype(jnp.bfloat16), 4).dtype == jnp.bfloat16


def test_bad_input_is_named():
    x = jnp.ones((6, 2))
    with pytest.raises(ValueError, match="bits=9 must be 2 to 8, or 16"):
        quantize.fake_quant_act(x, 9)
    with pytest.raises(ValueError, match="bits=0 must be 2 to 8, or 16 for none"):
        quantize.fake_quant_act(x, 0)
    with pytest.raises(ValueError, match="clip='max' is not known"):
        quantize.fake_quant_weight(x, 4, clip="max")
    with pytest.raises(ValueError, match=r"group_size=4 does not divide 6 inputs .nearest: 1, 2, 3, 6"):
        quantize.weight_scale(x, 4, group_size=4)
    with pytest.raises(ValueError, match="bits=16 leaves weights"):
        quantize.weight_scale(x, 16)


def test_nothing_is_rounded_to_nothing_and_other_numbers_are_named():
    for shape in ((0, 4), (3, 0)):
        assert quantize.fake_quant_act(jnp.zeros(shape), 4).shape == shape
        assert quantize.fake_quant_weight(jnp.zeros(shape), 4).shape == shape
    for other in (jnp.ones((2, 2), int), jnp.ones((2, 2), complex)):
        for rounds in (quantize.fake_quant_act, quantize.fake_quant_weight):
            with pytest.raises(TypeError, match=r"is (int|complex)\d+; only real floating-point numbers"):
                rounds(other, 4)
    for rounds in (quantize.rtn, lambda kernel, bits: quantize.gptq(kernel, np.eye(2), bits)):
        with pytest.raises(TypeError, match="kernel is complex"):
            rounds(np.ones((2, 2)) * 1j, 4)
