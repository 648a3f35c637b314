"""The LiMuon experiment's own measurements."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml import report, trees
from experiments import _limuon_problems as problems
from experiments import limuon as experiment
from experiments._limuon_estimator import common_trajectory, frozen_variance


def test_with_beta_one_every_estimate_is_the_raw_gradient():
    found = common_trajectory(jax.jit, 0.01, (1.0,), (), range(2), 6)
    assert found["raw"].shape == (2, 1, 2, 2)
    for name in ("ema", "storm"):
        np.testing.assert_allclose(found[name], found["raw"], rtol=1e-4)
    assert (np.abs(found["raw"][:, :, 1]) <= 1).all()


def test_with_the_weights_still_the_variance_is_that_of_a_sum_of_independent_batches():
    (shares,) = frozen_variance(jax.jit, (0.2,), 400, seed=1).values()
    assert shares["ema"] == pytest.approx(1, abs=0.1)
    assert shares["storm"] == pytest.approx(shares["ema"], rel=1e-4)


def test_the_mamba_stack_is_causal_and_its_scan_equals_a_loop():
    params = problems.mamba(jax.random.key(0), vocabulary=11, width=8, layers=1)
    layer = params["layers"][0]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 7, 16)), jnp.float32)
    low, b, c = np.split(
        np.float64(x @ layer["select"]["kernel"]), [problems.RANK, problems.RANK + problems.STATES], -1
    )
    step = np.log1p(np.exp(low @ np.float64(layer["step"]["kernel"]) + np.float64(layer["step"]["bias"])))
    hidden, decay = np.zeros((16, problems.STATES)), np.exp(np.float64(layer["decay"]["gain"]))
    for t in range(7):
        hidden = (
            np.exp(-step[0, t][:, None] * decay) * hidden
            + step[0, t][:, None] * b[0, t] * np.float64(x[0, t])[:, None]
        )
        expected = hidden @ c[0, t] + np.float64(x[0, t])
        np.testing.assert_allclose(problems._selective_scan(x, layer)[0, t], expected, rtol=1e-4, atol=1e-5)
    roles = dict(zip(trees.leaf_names(params), jax.tree.leaves(trees.parameter_roles(params))))
    assert [name for name, role in roles.items() if role == "matrix"] == [
        f"layers.0.{name}.kernel" for name in ("in_proj", "out_proj", "select", "step")
    ]


def test_patches_are_squares_of_neighbouring_pixels():
    params = problems.vision_transformer(jax.random.key(0), width=4, layers=0)
    params["patch"]["kernel"] = jnp.ones((4, 4))
    params["position"]["table"] = jnp.zeros((16, 4))
    params["head"]["kernel"] = jnp.eye(4, 10)
    image = jnp.zeros((8, 8)).at[2:4, 4:6].set(1.0)  # one whole patch of sixteen
    np.testing.assert_allclose(problems.vision_logits(params, image.reshape(1, 64))[0, :4], 1 / 16, rtol=1e-3)


def test_remarks_say_who_wins_at_equal_cost():
    result = report.committed_result("limuon")
    (equal,) = [line for line in experiment.notes(result) if "equal gradient evaluations, reported" in line]
    better = "plain Muon" if result.summary["equal"] > 0 else "LiMuon"
    assert f"{better} is better by {abs(result.summary['equal']):.3f}" in equal
    assert len([line for line in experiment.notes(result) if line.startswith("Held-out loss")]) == 2
