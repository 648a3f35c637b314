"""`effml quantize --method nanoquant`: partial models that go on, what it prints, and what it refuses."""

import os

import jax
import pytest

from effml import data, models, report
from effml.cli import main
from effml.nn import transformer
from effml.nn.hub import _files
from tests.cli.test_cli import fails
from tests.quantize.small import quickly_compiled

CONFIG = transformer.TransformerConfig(256, 16, 2, 2, 16, mlp="gelu", max_length=64)
FAST = [
    "--calibration-tokens",
    "64",
    "--calibration-length",
    "16",
    "--bits",
    "3",
    "--multiple",
    "8",
    "--epochs",
    "1",
    "--iterations",
    "4",
]


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    with quickly_compiled():
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {number} says hello to everyone who reads it.\n" for number in range(200)))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    models.save(folder, transformer.init_params(jax.random.key(0), CONFIG), CONFIG, data.ByteTokenizer())
    return str(folder)


def test_a_partial_model_is_valid_and_goes_on(model, text, tmp_path, capsys, monkeypatch):
    out = tmp_path / "small"
    words = ["quantize", model, "--method", "nanoquant", "--data", text, "--out", str(out), *FAST]
    before = os.umask(0o027)  # files are for those whom it lets read, as any other program's
    try:
        assert main([*words, "--blocks", "1"]) == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o640}
    assert out.stat().st_mode & 0o777 == 0o750
    printed = capsys.readouterr()
    assert "1 of 2 blocks: the others are in full precision" in printed.out
    assert "with more --blocks" in printed.out
    assert "installed" in printed.out
    assert "linears 6/6" in printed.err
    loaded = models.load(out)
    assert (loaded.kind, loaded.config.blocks_done) == ("binary", 1)
    assert loaded.extra["label"] == loaded.config.label
    assert report.Result.load(out / "result.json").summary["blocks_done"] == 1

    write = _files.write_safetensors

    def full_disk(path, *rest):
        if path.name.startswith("layer-0001"):
            path.write_bytes(b"half")
            raise OSError(f"{path} can't be written: no space left on device")
        write(path, *rest)

    assert main([*words, "--seed", "1"]) == 2
    assert "a run with another calibration text, seed" in capsys.readouterr().err.splitlines()[-1]
    with monkeypatch.context() as patch:
        patch.setattr(_files, "write_safetensors", full_disk)
        assert main(words) == 2
    assert "no space left on device" in capsys.readouterr().err.splitlines()[-1]
    assert models.load(out).config == loaded.config, "what there was is still there"

    assert main(words) == 0
    printed = capsys.readouterr()
    assert "linears 6/12" not in printed.err, "the first block is not done again"
    assert "nats per token from the model in full precision" in printed.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"], "the work folder is gone"
    result = report.Result.load(out / "result.json")
    assert [row["layer"] for row in result.rows] == [0] * 6 + [1] * 6
    assert all(row["bits_per_weight"] <= 3 * 1.02 for row in result.rows)
    assert "holds files" in fails(words, capsys)

    assert main(["evaluate", str(out), "--data", text, "--length", "16", "--out", str(tmp_path / "e")]) == 0
    (row,) = report.Result.load(tmp_path / "e" / "result.json").rows
    assert row["nats_per_token"] == pytest.approx(5.545, abs=0.3)
    assert row["bytes_on_disk"] < models.load(model).bytes_on_disk
    capsys.readouterr()
    assert main(["generate", str(out), "--prompt", "line 1", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("line 1")
    assert "is of kind 'binary'" in fails(["quantize", str(out), "--out", str(tmp_path / "again")], capsys)


def test_a_dry_run_shows_ranks_and_writes_nothing(model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["quantize", model, "--method", "nanoquant", "--dry-run", "--bits", "3", "--multiple", "8"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "rank" in printed
    assert "3 bits per weight, 3 asked for" in printed
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", "W4A4"], "bits='W4A4' must be a number for nanoquant"),
        (["--bits", "0"], "bits=0.0 must be finite and above 0"),
        ([], "attention.query: bpw=1.0 can't be reached for 16 x 16"),
        ([], "give more --bits, a smaller --multiple (it is 32), or --allow-over"),
        (["--init", "dual_svid", "--iterations", "9"], "--iterations has no use here, leave it out"),
        (["--epochs", "0", "--tuning-rate", "1e-3"], "--tuning-rate has no use here, leave it out"),
        (["--rotation", "global"], "--rotation has no use here"),
        (["--init", "svd"], "init='svd' is not known"),
        (["--bits", "3", "--multiple", "8", "--blocks", "3"], "blocks=3 must be at most 2"),
        (
            ["--method", "rtn", "--bits", "W4", "--blocks", "1"],
            "--blocks is for --method nanoquant, not 'rtn'",
        ),
    ],
)
def test_it_refuses_before_any_work(model, tmp_path, capsys, options, message):
    words = ["quantize", model, "--method", "nanoquant", "--out", str(tmp_path / "x"), *options]
    assert message in fails(words, capsys)
    assert not (tmp_path / "x.partial").exists()
