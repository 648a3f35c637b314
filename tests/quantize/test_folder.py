"""Packed model folders, and work that was interrupted."""

import json

import jax
import numpy as np
import pytest

from effml import models, quantize
from effml.nn.hub import _files
from effml.quantize import _apply
from tests.quantize import small

PLAN = quantize.plan(small.CONFIG, method="gptq", bits="W3A8", group_size=16)


def run(work=None, plan=PLAN, tokens=None, seed=0):
    tokens = small.tokens() if tokens is None else tokens
    return quantize.apply(plan, small.params(), small.CONFIG, tokens, key=jax.random.key(seed), work=work)


@pytest.fixture(scope="module")
def whole():
    return run()


@pytest.fixture
def folder(whole, tmp_path):
    models.save(tmp_path / "m", whole[0], whole[1], kind="packed")
    return tmp_path / "m"


def test_what_is_saved_comes_back(folder, whole):
    loaded = models.load(folder)
    assert loaded.kind == "packed"
    assert loaded.config == whole[1]
    jax.tree.map(np.testing.assert_array_equal, loaded.params, whole[0])
    assert loaded.for_decoding() is loaded
    names = _files.SafeTensors([folder / "model.safetensors"], types=None).shapes
    assert names["layers.0.attention.query.packed.codes"] == (32, 12)
    assert loaded.bytes_on_disk < 1.3 * (PLAN.packed_bytes + PLAN.kept_bytes)


def test_another_dtype_is_that_of_what_is_not_packed(folder):
    loaded = models.load(folder, dtype="bfloat16")
    assert loaded.params["embedding"]["table"].dtype == "bfloat16"
    assert loaded.params["layers"][0]["mlp"]["up"]["packed"].scale.dtype == "float32"
    assert loaded.config.model.compute_dtype == "bfloat16"
    assert np.isfinite(jax.jit(loaded.forward)(loaded.params, small.tokens(1)).logits).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.mlp.up.packed.scale"), "layers.1.mlp.up.packed must hold codes and scale"),
        (lambda t: t.pop("final_norm.scale"), "missing tensors: final_norm.scale"),
        (
            lambda t: t.update({"layers.0.mlp.up.packed.scale": -t["layers.0.mlp.up.packed.scale"]}),
            "layers.0.mlp.up.packed.scale holds values that are negative or not finite",
        ),
        (lambda t: t.update({"extra": np.ones(3)}), "unexpected tensors: extra"),
        (
            lambda t: t.update({"layers.0.mlp.up.packed.codes": np.zeros((48, 16), np.uint8)}),
            r"wrong shapes: layers.0.mlp.up.packed.codes is \(48, 16\), should be \(48, 12\)",
        ),
        (
            lambda t: t.update({"layers.0.mlp.up.packed.codes": np.zeros((48, 12), np.int8)}),
            "layers.0.mlp.up.packed.codes holds int8, should hold uint8",
        ),
    ],
)
def test_damaged_weights_are_named(folder, change, message):
    path = folder / "model.safetensors"
    stored = _files.SafeTensors([path], types=None)
    tensors = {name: stored.read(name) for name in stored.shapes}
    change(tensors)
    _files.write_safetensors(path, tensors)
    with pytest.raises(ValueError, match=message):
        models.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_bits": 9}, "weight_bits=9 must be 2 to 8"),
        ({"weight_bits": "4"}, "weight_bits='4' must be an integer"),
        ({"hadamard": "no"}, "hadamard='no' must be a bool"),
        ({"what": 1}, "config field='what' is not known"),
        ({"model": None}, "config field model must be an object"),
        ({"keep_dtype": "float16"}, "keep_dtype='float16' is not known"),
    ],
)
def test_damaged_configurations_are_named(folder, change, message):
    path = folder / "effml.json"
    meta = json.loads(path.read_text())
    meta["config"] |= change
    path.write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=message):
        models.load(folder)


def test_saving_checks_what_it_is_given(whole, tmp_path):
    with pytest.raises(TypeError, match="needs a PackedConfig"):
        models.save(tmp_path / "m", whole[0], small.CONFIG, kind="packed")
    with pytest.raises(ValueError, match="missing tensors"):
        models.save(tmp_path / "m", small.params(), whole[1], kind="packed")
    assert not (tmp_path / "m").exists()


def test_interrupted_work_goes_on_and_ends_the_same(whole, tmp_path, monkeypatch):
    plain = _apply._round_layer

    def stops(index, *rest):
        if index == 1:
            raise KeyboardInterrupt
        return plain(index, *rest)

    monkeypatch.setattr(_apply, "_round_layer", stops)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "work")
    assert (tmp_path / "work" / "layer-0000.safetensors").exists()
    rounded = []
    monkeypatch.setattr(_apply, "_round_layer", lambda i, *r: rounded.append(i) or plain(i, *r))
    params, config, rows = run(tmp_path / "work")
    assert rounded == [1]
    assert config == whole[1]
    assert len(rows) == 14
    jax.tree.map(np.testing.assert_array_equal, params, whole[0])


def test_a_damaged_layer_is_done_again(whole, tmp_path):
    run(tmp_path / "work")
    path = tmp_path / "work" / "layer-0001.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    params, _, _ = run(tmp_path / "work")
    jax.tree.map(np.testing.assert_array_equal, params, whole[0])


def test_work_of_another_run_is_refused(tmp_path):
    run(tmp_path / "work")
    other = quantize.plan(small.CONFIG, method="gptq", bits="W4A8", group_size=16)
    for what, options in (
        ("plan", {"plan": other}),
        ("calibration text", {"tokens": small.tokens(seed=1)}),
        ("seed", {"seed": 1}),
    ):
        with pytest.raises(ValueError, match=f"a run with another {what};"):
            run(tmp_path / "work", **options)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="holds other files"):
        run(tmp_path / "mine")
    quantize.WorkFolder.discard(tmp_path / "mine")
    assert (tmp_path / "mine" / "letter.txt").exists()


def test_two_processes_do_not_share_a_work_folder(tmp_path):
    work = quantize.WorkFolder(tmp_path / "work", {"seed": 0})
    again = quantize.WorkFolder(tmp_path / "work", {"seed": 0})
    with work.locked(), pytest.raises(ValueError, match="another process is at work"), again.locked():
        pass
