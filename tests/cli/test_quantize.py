"""`effml quantize`: what it prints and writes, and what it refuses before any work."""

import json
import os
import shlex
import shutil

import jax
import numpy as np
import pytest

from effml import data, models, report
from effml.cli import main
from effml.nn import transformer
from effml.quantize import _apply
from tests.cli.test_cli import fails
from tests.quantize import small

CONFIG = transformer.TransformerConfig(256, 32, 2, 4, 48, max_length=64)
FAST = ["--calibration-tokens", "128", "--calibration-length", "32"]


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Programs that run once or twice are not worth optimising."""
    with small.quickly_compiled():
        yield


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
    assert loaded.extra["calibration"] == text
    assert result.command == "effml " + shlex.join(words)
    mask = os.umask(0)
    os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o666 & ~mask}

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
    captured = capsys.readouterr()
    assert "rotations 2/2" in captured.err
    assert "rotations: of 2 steps, " in captured.out
    assert "basis" in captured.out
    result = report.Result.load(out / "result.json")
    assert all(row["orthogonality"] < 1e-5 and row["distance"] >= 0 for row in result.rows)
    found = result.summary
    assert (found["steps"], found["max_step"]) == (2, 1.5)
    assert 0 < found["mean_step"] <= 1.5
    nats = dict(map(tuple, result.curves["evaluations"]))
    assert found["nats_at_start"] == nats[0]
    assert found["nats_at_best"] == min(nats.values()) == nats[found["best_step"]]
    assert [(row["layer"], row["half"], row["rank"]) for row in result.curves["transitions"]] == [
        (0, "attention", 4), (0, "mlp", 4), (1, "attention", 4), (1, "mlp", 4)
    ]  # fmt: skip
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
    assert main([*words[:4], "--bits", "W3", *words[6:]]) == 2
    captured = capsys.readouterr()
    assert "another plan" in captured.err
    assert captured.out == ""
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
        (["--calibration-tokens", "31"], "calibration_tokens=31 are too few: one window is 32"),
        (
            ["--method", "respinquant", "--batch", "3"],
            "calibration_tokens=128 are too few: rotations need 6 windows, that is 192",
        ),
        (
            ["--calibration-length", "65"],
            "calibration_length=65 must be 2 to 64, what the model reads at once",
        ),
        (["--calibration-length", "1"], "calibration_length=1 must be 2 to 64"),
        (["--seed", "-1"], "seed=-1 must not be negative"),
        (["--data", "no-such-text"], "no-such-text"),
        (
            ["--method", "rtn"],
            "--data has no use here, leave it out: method='rtn' and bits='W4A4' have no text",
        ),
        (["--steps", "3"], "--steps has no use here, leave it out: method='gptq' and"),
        (["--exact"], "--exact has no use here"),
        (
            ["--method", "respinquant", "--rotation", "global", "--rank", "4"],
            "--rank has no use here, leave it out: method='respinquant' with rotation='global' and",
        ),
        (
            ["--method", "respinquant", "--bits", "W16A4", "--no-clip"],
            "--no-clip has no use here, leave it out: method='respinquant' with rotation='layerwise' and bits='W16A4'",
        ),
        (["--method", "respinquant", "--exact", "--rank", "4"], "rank=4 and exact are two answers"),
        (["--method", "respinquant", "--steps", "-1"], "steps=-1 must be 0 or more"),
        (["--method", "respinquant", "--max-step", "inf"], "max_step=inf must be above 0 and finite"),
        (["--bits", "W4A4KV0"], "0 bits for keys and values must be 2 to 8, or 16 for none"),
        (["--bits", "W16A16"], "bits='W16A16' rounds nothing: there is nothing to quantise"),
    ],
)
def test_bad_options_get_one_line_and_leave_nothing(words, message, model, text, tmp_path, capsys):
    out = tmp_path / "x"
    assert main(["quantize", model, "--data", text, "--out", str(out), *FAST, *words]) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert captured.out == "", "no plan is shown of what will not be done"
    assert not any(tmp_path.iterdir())


def test_a_folder_cannot_be_made_in_a_file(model, tmp_path, capsys):
    (tmp_path / "afile").write_text("a letter")
    out = str(tmp_path / "afile" / "deep" / "x")
    message = fails(["quantize", model, "--method", "rtn", "--out", out], capsys)
    assert f"can't be made: {tmp_path / 'afile'} is a file" in message


def test_a_trained_length_that_is_none_is_named(model, text, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    meta = json.loads((broken / "effml.json").read_text())
    (broken / "effml.json").write_text(json.dumps({**meta, "extra": {"trained_length": -5}}))
    message = fails(["quantize", str(broken), "--data", text, "--out", str(tmp_path / "x")], capsys)
    assert "trained_length=-5 must be an integer, 2 or more" in message


def test_weights_of_sixteen_bits_are_said_to_stay(model, tmp_path, capsys):
    assert main(["quantize", model, "--method", "rtn", "--bits", "W16A8", "--out", str(tmp_path / "x")]) == 0
    assert "weights stay as they are" in capsys.readouterr().out
    assert models.load(tmp_path / "x").config.activation_bits == 8


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
    captured = capsys.readouterr()
    assert "layers.1.mlp.up.kernel holds values that are not finite" in captured.err
    assert captured.out == ""
    assert json.loads((tmp_path / "broken" / "effml.json").read_text())["kind"] == "dense"
