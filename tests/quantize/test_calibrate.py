"""Statistics of what kernels read, against a forward pass with NumPy sums in float64."""

import jax
import numpy as np
import pytest

from effml import quantize
from effml.nn import transformer
from effml.quantize import _calibrate, respinquant
from tests.quantize import numpy_model, small

TAPS = ["attention.input", "attention.output.input", "mlp.down.input", "mlp.input"]


@jax.jit
def all_taps(params, tokens):
    return transformer.forward(params, tokens, small.CONFIG, tap=lambda name, layer, value: value).taps


def by_hand(tokens):
    """What every tap shows, from one whole forward pass."""
    seen = all_taps(small.params(), tokens[:, :-1])
    return [
        {name: np.asarray(layer[name], np.float64).reshape(-1, layer[name].shape[-1]) for name in TAPS}
        for layer in seen
    ]


def test_layer_by_layer_is_what_the_whole_model_sees():
    tokens = small.tokens()
    found = list(quantize.calibrate(small.params(), small.CONFIG, tokens))
    assert len(found) == 2
    for layer, wanted in zip(found, by_hand(tokens)):
        assert sorted(layer) == TAPS
        for name, rows in wanted.items():
            assert layer[name].tokens == len(rows) == 48
            np.testing.assert_allclose(layer[name].hessian, rows.T @ rows / 48, atol=2e-4)
            np.testing.assert_allclose(layer[name].second_moment, (rows**2).mean(0), rtol=2e-4)


def test_every_kernel_reads_one_of_the_taps():
    layer = small.params()["layers"][0]
    names = [f"{block}.{part}" for block in ("attention", "mlp") for part in layer[block]]
    assert sorted(names) == sorted(quantize.INPUT_OF)
    for name, tap in quantize.INPUT_OF.items():
        block, part = name.split(".")
        inputs = layer[block][part]["kernel"].shape[0]
        found = next(quantize.calibrate(small.params(), small.CONFIG, small.tokens(1), full=False))
        assert found[tap].second_moment.shape == (inputs,)
        assert found[tap].hessian is None


def test_batches_of_windows_change_nothing_not_of_a_prime_number_either(monkeypatch):
    tokens = small.tokens(windows=7)
    first = list(quantize.calibrate(small.params(), small.CONFIG, tokens))
    monkeypatch.setattr(_calibrate, "_MOST_TOKENS", 48)
    plain, shapes = _calibrate._observe, []
    monkeypatch.setattr(
        _calibrate, "_observe", lambda layer, x, *r, **k: shapes.append(x.shape) or plain(layer, x, *r, **k)
    )
    second = list(quantize.calibrate(small.params(), small.CONFIG, tokens))
    assert shapes == [(4, 12, 32)] * 4, "two batches of one size for each layer, and not seven"
    for one, other in zip(first, second):
        for name in TAPS:
            assert other[name].tokens == 84
            np.testing.assert_allclose(one[name].hessian, other[name].hessian, atol=1e-4)
            np.testing.assert_allclose(one[name].second_moment, other[name].second_moment, rtol=1e-4)


def test_a_rotated_model_reads_what_the_model_read_in_turned_bases():
    """H becomes A^T H A in every layer, which needs the turn of each skip before it."""
    rotations = numpy_model.random_rotations(respinquant.transformer_spec(small.CONFIG), dtype=np.float32)
    ready = respinquant.rotate(small.params(), small.CONFIG, rotations, rank=None, hadamard=False)
    folded = respinquant.prepare(small.params(), small.CONFIG, key=jax.random.key(0), kind="none")
    before = list(quantize.calibrate(folded.params, folded.config, small.tokens()))
    after = list(quantize.calibrate(ready.params, ready.config, small.tokens()))
    for layer in range(2):
        for name, basis in (("attention.input", rotations.a[layer]), ("mlp.input", rotations.m[layer])):
            wanted = basis.T @ np.float64(before[layer][name].hessian) @ basis
            np.testing.assert_allclose(
                after[layer][name].hessian, wanted, atol=2e-3, err_msg=f"{layer} {name}"
            )
        name = "mlp.down.input"
        np.testing.assert_allclose(
            after[layer][name].hessian, before[layer][name].hessian, rtol=1e-2, atol=1e-3
        )


def test_rounded_activations_are_what_the_product_reads():
    config = quantize.PackedConfig(small.CONFIG, weight_bits=16, activation_bits=3)
    layer = small.params()["layers"][0]
    stream = quantize.LayerStream(small.params(), small.tokens(1), config)
    found = stream.statistics(layer)["attention.input"].hessian
    x = np.asarray(small.params()["embedding"]["table"])[small.tokens(1)[0, :-1]].astype(np.float64)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(layer["attention_norm"]["scale"])
    read = np.asarray(quantize.fake_quant_act(jax.numpy.asarray(x, jax.numpy.float32), 3), np.float64)
    np.testing.assert_allclose(found, read.T @ read / len(read), atol=1e-3)


def test_one_program_serves_all_layers():
    tokens = small.tokens(windows=3, length=7)
    before = _calibrate._observe._cache_size()
    list(quantize.calibrate(small.params(), small.CONFIG, tokens))
    assert _calibrate._observe._cache_size() == before + 1


def test_bad_input_is_named():
    def run(tokens, params=None):
        return list(quantize.calibrate(small.params() if params is None else params, small.CONFIG, tokens))

    with pytest.raises(ValueError, match=r"shape \(5,\) must be \[windows, length \+ 1\]"):
        run(np.zeros(5, int))
    with pytest.raises(ValueError, match="at least one window of two tokens"):
        run(np.zeros((0, 5), int))
    with pytest.raises(ValueError, match=r"ids outside 0 ... 63"):
        run(np.full((1, 5), 64))
    with pytest.raises(TypeError, match="must be integers"):
        run(np.zeros((1, 5)))
    broken = jax.tree.map(lambda leaf: leaf * np.inf, small.params())
    with pytest.raises(ValueError, match=r"layers\.0: what attention\.query and .* would read"):
        run(small.tokens(1), broken)
