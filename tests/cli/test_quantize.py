"""`effml quantize`: what it prints and writes, and what it refuses before any work."""

import json

import jax
import numpy as np
import pytest

from effml import data, models, report
from effml.cli import main
from effml.nn import transformer
from effml.quantize import _apply
from tests.cli.test_cli import fails

CONFIG = transformer.TransformerConfig(256, 32, 2, 4, 48, max_length=64)
FAST = ["--calibration-tokens", "128", "--calibration-length", "32"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {number} says hello to everyone who reads it.\n" for number in range(200)))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    params = transformer.init_params(jax.random.key(0), CONFIG)
    models.save(folder, params, CONFIG, data.ByteTokenizer())
    return str(folder)


def test_a_packed_model_can_be_scored_and_writes(model, text, tmp_path, capsys):
    out = tmp_path / "packed"
    words = [
        "quantize",
        model,
        "--method",
        "gptq",
        "--bits",
        "W4A8",
        "--data",
        text,
        "--out",
        str(out),
        *FAST,
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "output error" in printed
    assert "W4A8 by gptq" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed"], "the work folder is gone"
    result = report.Result.load(out / "result.json")
    assert len(result.rows) == 14
    assert result.rows[0]["output_error"] > 0
    loaded = models.load(out)
    assert loaded.kind == "packed"
    assert loaded.extra["quantized_from"] == "tiny"

    assert main(["evaluate", str(out), "--data", text, "--length", "32", "--out", str(tmp_path / "e")]) == 0
    (row,) = report.Result.load(tmp_path / "e" / "result.json").rows
    assert row["nats_per_token"] == pytest.approx(np.log(256), abs=0.3)
    assert row["bytes_on_disk"] < models.load(model).bytes_on_disk
    capsys.readouterr()
    assert main(["generate", str(out), "--prompt", "line 1", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("line 1")
    assert "is of kind 'packed'" in fails(["quantize", str(out), "--out", str(tmp_path / "again")], capsys)
    assert "holds files" in fails(words, capsys)


def test_rotations_are_learned_and_reported(model, text, tmp_path, capsys):
    out = tmp_path / "packed"
    words = [
        "quantize",
        model,
        "--method",
        "respinquant",
        "--rank",
        "4",
        "--steps",
        "2",
        "--data",
        text,
        *FAST,
    ]
    assert main([*words, "--out", str(out)]) == 0
    assert "rotations 2/2" in capsys.readouterr().err
    rows = report.Result.load(out / "result.json").rows
    assert all(row["orthogonality"] < 1e-4 for row in rows)
    config = models.load(out).config
    assert (config.residual_rank, config.hadamard, config.activation_bits) == (4, True, 4)


def test_a_dry_run_shows_bytes_and_writes_nothing(model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["quantize", model, "--method", "rtn", "--bits", "W3", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "mlp.down" in printed
    assert "rtn W3A16" in printed
    assert "on this machine" in printed
    assert not any(tmp_path.iterdir())


def test_killed_work_goes_on(model, text, tmp_path, capsys, monkeypatch):
    out = tmp_path / "packed"
    words = ["quantize", model, "--method", "rtn", "--bits", "W4", "--out", str(out)]
    plain = _apply._round_layer

    def stops(index, *rest):
        if index == 1:
            raise KeyboardInterrupt
        return plain(index, *rest)

    monkeypatch.setattr(_apply, "_round_layer", stops)
    assert main(words) == 130
    assert not out.exists()
    assert (tmp_path / "packed.partial" / "layer-0000.safetensors").exists()
    capsys.readouterr()
    assert "another plan" in fails([*words[:4], "--bits", "W3", *words[6:]], capsys).split("|")[-1]
    rounded = []
    monkeypatch.setattr(_apply, "_round_layer", lambda i, *r: rounded.append(i) or plain(i, *r))
    assert main(words) == 0
    assert rounded == [1]
    assert not (tmp_path / "packed.partial").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "gptx"], "did you mean 'gptq'"),
        (["--bits", "W4B4"], "bits='W4B4' is not known"),
        (["--bits", "W1A4"], "1 bits for weights must be 2 to 8"),
        (["--group-size", "5"], "group_size=5 does not divide 32 inputs"),
        (["--method", "respinquant", "--rank", "3"], "rank=3 must be even"),
        (["--keep-dtype", "float16"], "keep_dtype='float16' is not known"),
        (["--rotation", "global"], "rotation='global' is for method='respinquant'"),
        (["--calibration-tokens", "0"], "calibration_tokens=0 must be above 0"),
        (["--seed", "-1"], "seed=-1 must not be negative"),
        (["--data", "no-such-text"], "no-such-text"),
    ],
)
def test_bad_options_get_one_line_and_leave_nothing(words, message, model, text, tmp_path, capsys):
    out = tmp_path / "x"
    assert main(["quantize", model, "--data", text, "--out", str(out), *FAST, *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert not any(tmp_path.iterdir())


def test_a_text_that_is_too_short_is_named(model, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("a line of text\n" * 10)
    words = ["quantize", model, "--data", str(tmp_path / "short.txt"), "--out", str(tmp_path / "x")]
    assert "fewer --calibration-tokens" in fails(words, capsys)


def test_weights_that_are_not_finite_are_named(text, tmp_path, capsys):
    params = transformer.init_params(jax.random.key(0), CONFIG)
    params["layers"][1]["mlp"]["up"]["kernel"] = (
        params["layers"][1]["mlp"]["up"]["kernel"].at[0, 0].set(np.nan)
    )
    models.save(tmp_path / "broken", params, CONFIG, data.ByteTokenizer())
    assert main(["quantize", str(tmp_path / "broken"), "--method", "rtn", "--out", str(tmp_path / "x")]) == 2
    assert "layers.1.mlp.up.kernel holds values that are not finite" in capsys.readouterr().err
    assert json.loads((tmp_path / "broken" / "effml.json").read_text())["kind"] == "dense"
