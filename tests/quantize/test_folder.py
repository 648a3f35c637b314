"""Packed model folders, and work that was interrupted."""

import json
import shutil

import jax
import numpy as np
import pytest

from effml import models, quantize
from effml.nn import transformer
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
        ({"method": "gptx"}, "method='gptx' is not known; did you mean 'gptq'"),
        ({"residual_rank": -2}, "residual_rank=-2 must be between 0 and the width 32"),
        ({"residual_rank": 3}, "residual_rank=3 must be even"),
        ({"key_value_bits": 0}, "key_value_bits=0 must be 2 to 8, or 16 for none"),
        # In range, and nothing in the tensors speaks against them.
        ({"hadamard": True}, "config was changed after it was written"),
        ({"method": "rtn"}, "config was changed after it was written"),
        ({"activation_bits": 4}, "config was changed after it was written"),
        ({"digest": None}, "config was changed after it was written"),
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "work"
    rows = run(folder)[2]
    return folder, [row["weight_error"] for row in rows]


@pytest.mark.parametrize("place", [0.05, 0.2, 0.4, 0.6, 0.8, 1.0, None])
def test_a_damaged_layer_is_done_again(place, whole, finished, tmp_path, monkeypatch):
    folder = tmp_path / "work"
    shutil.copytree(finished[0], folder)
    path = folder / "layer-0001.safetensors"
    if place is None:
        path.write_bytes(path.read_bytes()[:100])
    else:
        small.flipped(path, place)
    plain, rounded = _apply._round_layer, []
    monkeypatch.setattr(_apply, "_round_layer", lambda i, *r: rounded.append(i) or plain(i, *r))
    params, _, rows = run(folder)
    assert rounded == [1]
    jax.tree.map(np.testing.assert_array_equal, params, whole[0])
    assert [row["weight_error"] for row in rows] == finished[1]


def test_no_bit_of_a_finished_layer_is_believed_when_it_is_flipped(finished, tmp_path):
    """Those of the word that says who wrote the file aside: nobody reads it."""
    folder = tmp_path / "work"
    shutil.copytree(finished[0], folder)
    work = quantize.WorkFolder(folder, json.loads((folder / "work.json").read_text()))
    path = folder / "layer-0001.safetensors"
    content = path.read_bytes()
    word = content.index(b'"format":"pt"')
    assert work.load(1) is not None
    for place in range(0, len(content), 13):
        if word <= place < word + 13:
            continue
        small.flipped(path, place / (len(content) - 1))
        assert work.load(1) is None, content[place - 20 : place + 20]
        path.write_bytes(content)


def test_layers_are_rounded_for_what_rounded_layers_give(whole):
    """GPTQ anew on statistics of a model whose first layer is packed and whose second is not."""
    params, config, _ = whole
    plain = transformer.unstack_layers(small.params())
    mixed = {**params, "layers": [params["layers"][0], plain["layers"][1]]}
    _, seen = quantize.calibrate(mixed, config, small.tokens())
    _, otherwise = quantize.calibrate({**mixed, "layers": plain["layers"]}, config, small.tokens())
    kernel = plain["layers"][1]["mlp"]["up"]["kernel"]
    codes = {
        name: np.asarray(quantize.gptq(kernel, of["mlp.input"].hessian, 3, group_size=16).codes)
        for name, of in (("rounded", seen), ("plain", otherwise))
    }
    found = np.asarray(params["layers"][1]["mlp"]["up"]["packed"].unpack())
    np.testing.assert_array_equal(found, codes["rounded"])
    assert (found != codes["plain"]).any()


def test_work_that_has_lost_its_name_says_what_to_remove(finished, tmp_path):
    folder = tmp_path / "work"
    shutil.copytree(finished[0], folder)
    about = folder / "work.json"
    about.write_text(about.read_text()[:40])
    with pytest.raises(ValueError, match=rf"work.json is not whole JSON .*; remove {folder} to begin anew"):
        run(folder)
    about.unlink()
    with pytest.raises(ValueError, match=rf"without its work.json, .*; remove {folder} to begin anew"):
        run(folder)
    for path in folder.glob("layer-*"):
        path.unlink()
    run(folder)  # nothing is lost where nothing was done


def test_activations_that_overflow_are_named_and_what_was_done_stays(tmp_path, monkeypatch):
    params = small.params()
    layers = [params["layers"][0], dict(params["layers"][1])]
    layers[1]["mlp_norm"] = {"scale": params["layers"][1]["mlp_norm"]["scale"] * 1e30}
    broken = {**params, "layers": layers}

    def start():
        quantize.apply(PLAN, broken, small.CONFIG, small.tokens(), key=jax.random.key(0), work=tmp_path / "w")

    plain, rounded = _apply._round_layer, []
    monkeypatch.setattr(_apply, "_round_layer", lambda i, *r: rounded.append(i) or plain(i, *r))
    for layers_tried in ([0, 1], [0, 1, 1]):
        with pytest.raises(
            ValueError, match=r"layers\.1: what mlp\.(gate|down).* is not finite, or its squares"
        ):
            start()
        assert rounded == layers_tried


def test_a_kernel_that_cannot_be_rounded_is_named(monkeypatch):
    def refuses(*_, **__):
        raise ValueError("hessian is not positive semidefinite")

    monkeypatch.setattr(_apply, "gptq", refuses)
    with pytest.raises(
        ValueError, match=r"layers\.0\.attention\.query: hessian is not positive semidefinite"
    ):
        run()


def test_work_of_another_run_is_refused(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "work")
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
