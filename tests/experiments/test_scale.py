from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effml.report import Result
from experiments import _main, scale

TINY = dataclasses.replace(scale.PRESETS["smoke"], steps=4, seeds=2)


@pytest.fixture(scope="module")
def tokens():
    return scale.load_tokens(TINY, TINY.vocabulary)


@pytest.fixture(scope="module")
def result():
    return scale.run(scale.PRESETS["smoke"])


def test_smoke_runs_everything_and_its_files_can_be_read_back(result, tmp_path, monkeypatch):
    assert [row["optimizer"] for row in result.rows] == ["scale", "adam"]
    assert len(result.checks) == len(scale.CHECKS)
    assert all(np.isfinite(value) for value in result.summary.values())
    monkeypatch.setattr(scale, "run", lambda config: result)
    assert _main.run_experiment(scale, preset="smoke", out=tmp_path) == 0
    assert Result.load(tmp_path / "result.json").summary == result.summary
    assert "| scale" in (tmp_path / "result.md").read_text()
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="preset='smok' is not known; did you mean 'smoke'"):
        _main.run_experiment(scale, preset="smok")


def test_a_check_that_fails_is_reported_by_the_exit_code(result, tmp_path, monkeypatch):
    failing = dataclasses.replace(result, checks=[])
    for name in ("scale", "adam", "column_norm_only", "sgd"):
        failing.summary.setdefault(f"{name}_loss", 2.0)
    failing.summary |= {"scale_loss": 9.0, "scale_bytes": 0.9}
    monkeypatch.setattr(scale, "run", lambda config: failing.judged(scale.CHECKS))
    assert _main.run_experiment(scale, preset="cpu", out=tmp_path) == 1
    assert "does not hold" in (tmp_path / "result.md").read_text()


def test_vmapped_runs_equal_runs_one_after_another(tokens):
    apart = scale.Trainer(TINY, tokens, scale.RECIPES, vmapped=False).grid("scale")
    together = scale.Trainer(TINY, tokens, scale.RECIPES, vmapped=True).grid("scale")
    np.testing.assert_allclose(together["loss"], apart["loss"], rtol=1e-5)
    np.testing.assert_allclose(together["curve"], apart["curve"], rtol=1e-5)
    assert apart["loss"].shape == (TINY.rates, TINY.seeds)
    assert len(np.unique(apart["loss"])) == apart["loss"].size


def test_row_normalisation_is_one_norm_per_input_unit():
    gradient = {"head": {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(4, 9)), jnp.float32)}}
    updates = scale.normalize_columns(scale.row_axes).update(gradient, optax.EmptyState())[0]
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(updates["head"]["kernel"]), axis=1)), 1.0, rtol=1e-6)


def test_every_recipe_has_a_grid_of_three_rates_and_trains_vectors_at_their_own_rate():
    params = {
        "embedding": {"table": jnp.ones((9, 8))},
        "mix": {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)},
        "head": {"kernel": jnp.ones((8, 9))},
    }
    for name, recipe in scale.RECIPES.items():
        assert len(recipe.grid) == 3, name
        optimizer = recipe.make(lambda step: 0.0, lambda step: 0.1)
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        np.testing.assert_allclose(updates["mix"]["bias"], -0.1, rtol=1e-3, err_msg=name)
        assert not np.any(updates["mix"]["kernel"]), name


def test_the_noise_probe_measures_what_numpy_does(tokens):
    trainer = scale.Trainer(TINY, tokens, scale.RECIPES)
    probe = scale.NoiseProbe(trainer, 1)
    params = trainer.initial(0)
    wide = dataclasses.replace(TINY, batch=TINY.large_batch)
    starts = scale.batch_starts(wide, tokens, TINY.seed + 1000, 1)[0]
    rows = scale.windows(trainer.train, starts, TINY).reshape(4, 2, -1)
    gradients = np.stack(
        [np.asarray(jax.grad(trainer.loss)(params, row)["head"]["kernel"], np.float64) for row in rows]
    )
    mean = gradients.mean(0)
    variance = np.mean((gradients - mean) ** 2)
    probe(params)
    (head,) = [row for row in probe.rows() if row["role"] == "head"]
    np.testing.assert_allclose(head["variance"], [variance], rtol=1e-4)
    np.testing.assert_allclose(head["relative"], [variance / np.mean(mean**2)], rtol=1e-4)
    assert (
        scale.head_is_noisiest(
            [{**head, "relative": [2.0]}, {"role": "matrix", "relative": [1.0]}], "relative"
        )
        == 1
    )
    assert (
        scale.head_is_noisiest(
            [{**head, "relative": [2.0]}, {"role": "matrix", "relative": [3.0]}], "relative"
        )
        == 0
    )
