from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import normuon
from experiments._language_model import Trainer, batch_starts, load_tokens, windows

TINY = dataclasses.replace(normuon.PRESETS["smoke"], probe_from=0, probe_to=0, probes=1)


def test_neuron_variation_and_condition_of_known_matrices():
    columns = np.diag([3.0, 4.0])
    np.testing.assert_allclose(normuon.neuron_variation(columns), 0.5 / 3.5)
    assert normuon.neuron_variation(columns @ np.array([[0.6, 0.8], [0.8, 0.6]]).T) > 0
    np.testing.assert_allclose(normuon.condition(np.diag([6.0, 3.0, 2.0])), 2.0)


@pytest.mark.parametrize(
    ("curve", "target", "saved"),
    [
        ([4.0, 3.0, 2.0, 1.0], 1.0, 0.0),
        ([4.0, 3.0, 2.0, 1.0], 2.5, 1 - 25 / 40),
        ([4.0, 3.0, 2.0, 1.0], 5.0, 1 - 10 / 40),
        ([4.0, 3.0, 2.0, 1.5], 1.0, np.nan),
    ],
)
def test_steps_saved_is_where_the_curve_crosses(curve, target, saved):
    steps = np.array([10, 20, 30, 40])
    np.testing.assert_allclose(normuon.steps_saved(steps, np.array(curve), target), saved)


def test_every_recipe_has_the_common_grid_and_the_muons_leave_tables_and_vectors_to_adam():
    random = np.random.default_rng(0).normal
    params = {
        "embedding": {"table": jnp.ones((9, 8))},
        "mix": {"kernel": jnp.asarray(random(size=(8, 8)), jnp.float32), "bias": jnp.ones(8)},
        "head": {"kernel": jnp.ones((8, 9))},
    }
    for name, recipe in normuon.RECIPES.items():
        assert recipe.grid == (1e-3, 3e-3, 1e-2)
        optimizer = recipe.make(lambda step: 0.5, lambda step: 0.1)
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        np.testing.assert_allclose(updates["mix"]["bias"], -0.1, rtol=1e-3, err_msg=name)
        tables = 0.5 if name == "adam" else 0.1
        np.testing.assert_allclose(updates["head"]["kernel"], -tables, rtol=1e-3, err_msg=name)
        np.testing.assert_allclose(updates["embedding"]["table"], -tables, rtol=1e-3, err_msg=name)
        size = np.sqrt(np.mean(np.square(updates["mix"]["kernel"])))
        assert size == pytest.approx(0.5 if name == "adam" else 0.2 * 0.5, rel=0.15), name


def test_the_geometry_is_that_of_the_updates():
    trainer = Trainer(TINY, load_tokens(TINY, TINY.vocabulary), normuon.RECIPES)
    rows = normuon.geometry(trainer, "adam", 1e-3)
    params = trainer.initial(TINY.seed)
    starts = batch_starts(TINY, trainer.tokens, TINY.seed, TINY.steps)[0]
    gradient = jax.grad(trainer.loss)(params, windows(trainer.train, starts, TINY))
    # Adam's first step is the sign of the gradient.
    kernel = np.sign(np.asarray(gradient["layers"][0]["mlp"]["up"]["kernel"]))
    (row,) = [row for row in rows if row["path"] == "layers.0.mlp.up.kernel"]
    assert (row["inputs"], row["outputs"]) == kernel.shape
    assert row["condition"] == pytest.approx(normuon.condition(kernel), rel=0.05)
    assert row["variation"] == pytest.approx(normuon.neuron_variation(kernel), abs=0.02)
    assert len(rows) == 7 * TINY.layers
