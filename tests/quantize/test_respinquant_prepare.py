from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml import linalg
from effml.nn import transformer
from effml.quantize import respinquant
from tests.quantize import numpy_model

CONFIG = numpy_model.config(2, tied=True)
SPEC = respinquant.transformer_spec(CONFIG)
PARAMS = jax.tree.map(np.float32, numpy_model.random_params(CONFIG))
TOKENS = np.random.default_rng(0).integers(0, 31, (4, 9))
EXPECTED = numpy_model.logits(PARAMS, TOKENS, CONFIG)


def run(ready):
    """Logits of a prepared model, its skips turned as its parameters say."""
    return compiled(ready.params, ready.config, ready.hadamard)


@functools.partial(jax.jit, static_argnames=("config", "hadamard"))
def compiled(params, config, hadamard):
    def linear(x, params, name):
        if name == "mlp.down" and hadamard:
            x = linalg.fht(x, order=linalg.hadamard_order(CONFIG.mlp_width))
        return transformer.plain_linear(x, params, name)

    def residual(x, update, name, layer_params):
        change = layer_params.get("residual", {}).get(name)
        if change is None:
            return x + update
        if "t" in change:
            return x @ change["t"] + update
        return respinquant.residual_rotate(x, change["q"], change["m"]) + update

    return transformer.forward(params, jnp.asarray(TOKENS), config, linear=linear, residual=residual).logits


@pytest.mark.parametrize("kind", ["none", "hadamard"])
def test_fixed_kinds_need_no_tokens_and_keep_the_function(kind):
    ready = respinquant.prepare(PARAMS, CONFIG, key=jax.random.key(0), kind=kind)
    np.testing.assert_allclose(run(ready), EXPECTED, rtol=1e-4, atol=1e-3)
    assert ready.training is None
    assert all("residual" not in layer for layer in ready.params["layers"])
    assert (ready.rotations is None) == (kind == "none")
    assert ready.hadamard == (kind == "hadamard")
    if kind == "hadamard":
        assert max(row["distance"] for row in ready.rows) < 1e-5


def test_layerwise_trains_reports_every_transition_and_keeps_the_function():
    # The step that the tests of training compiled already.
    settings = respinquant.RotationTraining(steps=2, activation_bits=3)
    ready = respinquant.prepare(
        PARAMS, CONFIG, TOKENS, key=jax.random.key(0), kind="layerwise", rank=None, settings=settings, batch=2
    )
    np.testing.assert_allclose(run(ready), EXPECTED, rtol=1e-4, atol=1e-3)
    assert len(ready.training.losses) == 2
    assert [(row["layer"], row["half"]) for row in ready.rows] == [
        (0, "attention"), (0, "mlp"), (1, "attention"), (1, "mlp")
    ]  # fmt: skip
    assert all(row["orthogonality"] < 1e-5 and row["residual_error"] == 0 for row in ready.rows)


def test_a_small_rank_is_nearly_exact_where_bases_are_near_and_none_at_all_is_a_disaster():
    start = respinquant.init_rotations(jax.random.key(0), SPEC)
    near = numpy_model.near_rotations(SPEC, 0.3, start=np.float64(start.a[0]), decay=0.7)
    errors = {}
    for rank in (0, 8, 16):
        ready = respinquant.rotate(PARAMS, CONFIG, near, rank=rank)
        errors[rank] = np.abs(run(ready) - EXPECTED).max()
        changes = respinquant.transitions(near)
        for row in ready.rows:
            change = changes[("attention", "mlp").index(row["half"])][row["layer"]]
            np.testing.assert_allclose(row["distance"], np.linalg.norm(change - np.eye(16)), rtol=1e-6)
            found = respinquant.residual_subspace(change, rank)
            np.testing.assert_allclose(row["residual_error"], found.error, atol=1e-6)
    assert errors[16] < 2e-3 < errors[8] < errors[0] / 3


def test_requests_that_make_no_sense_are_refused_before_any_work():
    for options, message in (
        ({"kind": "layerwise", "rank": 3}, "rank=3 must be even"),
        ({"kind": "layerwise"}, "needs calibration tokens"),
        ({"kind": "spin"}, "kind='spin' is not known"),
        ({"kind": "global", "calibration": TOKENS[0]}, r"calibration of shape \(9,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            respinquant.prepare(PARAMS, CONFIG, **{"key": jax.random.key(0), "rank": 4, **options})
