"""GPTQ against its textbook form, an exhaustive search, and round to nearest."""

import numpy as np
import pytest

from effml import quantize
from effml.quantize import _gptq


def correlated(tokens, inputs, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(tokens, inputs)) @ (np.eye(inputs) + 0.5 * rng.normal(size=(inputs, inputs)))


def textbook(kernel, hessian, scale, bits, percdamp):
    """Optimal brain quantisation in a fixed order: the inverse is shrunk by one input after each step.

    `scale` is [in, out]: that of each weight.
    """
    work, top = kernel.astype(np.float64).copy(), 2 ** (bits - 1)
    damped = hessian + percdamp * np.diag(hessian).mean() * np.eye(len(hessian))
    codes = np.zeros_like(work)
    for i in range(len(work)):
        inverse = np.linalg.inv(damped[i:, i:])
        codes[i] = np.clip(np.round(work[i] / scale[i]), -top, top - 1)
        error = (work[i] - codes[i] * scale[i]) / inverse[0, 0]
        work[i:] -= np.outer(inverse[:, 0], error)
    return codes


@pytest.mark.parametrize(("block", "group_size"), [(128, None), (4, None), (5, 4), (128, 3)])
def test_it_is_the_textbook_algorithm_whatever_block_and_group(block, group_size):
    x = correlated(64, 12)
    kernel = np.random.default_rng(1).normal(size=(12, 6)).astype(np.float32)
    kernel[:6] *= 4  # so that groups have scales of their own
    found = quantize.gptq(kernel, x.T @ x, 3, block=block, group_size=group_size)
    groups = 1 if group_size is None else 12 // group_size
    assert found.scale.shape == (6, groups)
    scale = np.repeat(np.float64(found.scale).T, 12 // groups, axis=0)
    wanted = textbook(kernel, x.T @ x, scale, 3, 0.01)
    np.testing.assert_array_equal(found.codes, wanted)
    np.testing.assert_allclose(found.kernel, wanted * scale, rtol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_weights_come_out_worse_and_products_better_than_round_to_nearest(bits):
    x = correlated(256, 32)
    kernel = np.random.default_rng(2).normal(size=(32, 16)).astype(np.float32)
    nearest, found = quantize.rtn(kernel, bits), quantize.gptq(kernel, x.T @ x, bits)
    weight = [np.linalg.norm(np.asarray(one.kernel) - kernel) for one in (found, nearest)]
    product = [np.linalg.norm(x @ (np.asarray(one.kernel) - kernel)) for one in (found, nearest)]
    assert weight[0] > weight[1]
    assert product[0] < 0.9 * product[1]


def test_without_correlation_it_is_round_to_nearest():
    kernel = np.random.default_rng(3).normal(size=(12, 6)).astype(np.float32)
    found = quantize.gptq(kernel, np.diag(np.arange(1.0, 13.0)), 3)
    np.testing.assert_array_equal(found.codes, quantize.rtn(kernel, 3).codes)


def test_inputs_never_seen_do_no_harm():
    x = correlated(64, 12)
    x[:, 3] = 0.0
    kernel = np.random.default_rng(4).normal(size=(12, 6)).astype(np.float32)
    found = quantize.gptq(kernel, x.T @ x, 4)
    assert np.isfinite(np.asarray(found.kernel)).all()
    np.testing.assert_array_equal(found.codes[3], quantize.rtn(kernel, 4).codes[3])
    zero = quantize.gptq(kernel, np.zeros((12, 12)), 4)
    np.testing.assert_array_equal(zero.codes, quantize.rtn(kernel, 4).codes)


def test_a_hessian_of_fewer_tokens_than_inputs_is_damped():
    x = correlated(3, 12)
    kernel = np.random.default_rng(5).normal(size=(12, 6)).astype(np.float32)
    assert np.isfinite(np.asarray(quantize.gptq(kernel, x.T @ x, 4).kernel)).all()


def test_groups_have_scales_of_their_own():
    x = correlated(64, 12)
    kernel = np.random.default_rng(6).normal(size=(12, 6)).astype(np.float32)
    kernel[:6] *= 10
    found = quantize.gptq(kernel, x.T @ x, 4, group_size=6)
    assert found.scale.shape == (6, 2)
    rows = np.repeat(np.asarray(found.scale).T, 6, axis=0)
    np.testing.assert_allclose(found.kernel, np.asarray(found.codes) * rows, rtol=1e-6)
    one = quantize.gptq(kernel, x.T @ x, 4)
    lost = [np.linalg.norm(x @ (np.asarray(g.kernel) - kernel)) for g in (found, one)]
    assert lost[0] < lost[1]


def test_kernels_of_one_shape_share_a_program_whatever_their_bits():
    x = correlated(64, 12)
    programs = (_gptq._scale, _gptq._nearest, _gptq._sweep)
    before = [one._cache_size() for one in programs]
    for seed, bits in enumerate((4, 3, 8)):
        kernel = np.random.default_rng(seed).normal(size=(12, 7)).astype(np.float32)
        quantize.gptq(kernel, x.T @ x * (seed + 1), bits)
        quantize.rtn(kernel, bits)
    assert [one._cache_size() for one in programs] == [one + 1 for one in before]


def test_bad_input_is_named():
    kernel, hessian = np.ones((4, 2), np.float32), np.eye(4)
    with pytest.raises(ValueError, match=r"hessian of shape \(3, 3\) must be \[4, 4\]"):
        quantize.gptq(kernel, np.eye(3), 4)
    with pytest.raises(ValueError, match="hessian holds values that are not finite"):
        quantize.gptq(kernel, hessian * np.nan, 4)
    with pytest.raises(ValueError, match="negative diagonal"):
        quantize.gptq(kernel, -hessian, 4)
    with pytest.raises(ValueError, match="kernel holds values that are not finite"):
        quantize.gptq(kernel * np.inf, hessian, 4)
    with pytest.raises(ValueError, match=r"kernel holds values beyond 1e\+18"):
        quantize.rtn(kernel * 3e38, 4)
    for percdamp in (0, np.inf, np.nan):
        with pytest.raises(ValueError, match=f"percdamp={percdamp} must be finite and above 0"):
            quantize.gptq(kernel, hessian, 4, percdamp=percdamp)
    with pytest.raises(ValueError, match="hessian is not symmetric"):
        quantize.gptq(kernel[:2], np.array([[2.0, 5.0], [0.0, 2.0]]), 4)
    with pytest.raises(ValueError, match="hessian is not positive semidefinite"):
        quantize.gptq(kernel[:2], np.array([[1.0, 5.0], [5.0, 1.0]]), 4)
    with pytest.raises(ValueError, match="bits=16"):
        quantize.gptq(kernel, hessian, 16)
    with pytest.raises(ValueError, match="kernel of shape"):
        quantize.rtn(np.ones(4, np.float32), 4)
