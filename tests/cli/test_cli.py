"""The command line: what each command prints and writes, its exit codes, and one line for bad input."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest

from effml import report
from effml.cli import commands, main

SMALL = [
    "--steps",
    "4",
    "--batch-size",
    "4",
    "--length",
    "16",
    "--width",
    "16",
    "--num-layers",
    "1",
    "--num-heads",
    "2",
    "--evaluation-tokens",
    "128",
    "--checkpoint-every",
    "2",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(5):
        (folder / f"part-{number}.txt").write_text(
            f"file {number} says hello to everyone who reads it.\n" * 20
        )
    return str(folder)


@pytest.fixture(scope="module")
def model(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "run"
    assert main(["train", "--data", text, "--optimizer", "scale", "--out", str(folder), *SMALL]) == 0
    return str(folder / "model")


def fails(words, capsys):
    """Runs a command that must fail with exit code 2 and one line; returns the line."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


@pytest.mark.parametrize("name", list(commands()))
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    assert done.value.code == 0
    assert commands()[name] in " ".join(capsys.readouterr().out.split())


def test_an_unknown_command_suggests_the_nearest(capsys):
    assert "did you mean 'train'" in fails(["trian"], capsys)


def test_unknown_names_suggest_the_nearest(capsys, text, tmp_path):
    assert "did you mean 'scale'" in fails(
        ["train", "--data", text, "--optimizer", "sclae", "--out", str(tmp_path / "x")], capsys
    )
    assert "did you mean 'smoke'" in fails(["pipeline", "--preset", "smok"], capsys)
    assert "did you mean 'scale'" in fails(["run", "scal"], capsys)
    assert "did you mean 'smollm2'" in fails(["evaluate", "smollm"], capsys)
    assert "did you mean 'smoke'" in fails(["run", "scale", "--preset", "smokey"], capsys)


def test_evaluate_prints_and_writes_the_measurements(model, text, tmp_path, capsys):
    assert main(["evaluate", model, "--data", text, "--length", "16", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "result.json") in out
    (row,) = report.Result.load(tmp_path / "result.json").rows
    assert row["nats_per_token"] > 0
    assert row["bytes_on_disk"] > row["bytes_in_memory"] > 0
    assert row["tokens_per_second"] > 0


def test_generate_is_deterministic_and_starts_with_the_prompt(model, capsys):
    words = ["generate", model, "--prompt", "file 1", "--max-new-tokens", "12"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert main(words) == 0
    assert capsys.readouterr().out == first
    assert first.startswith("file 1")
    assert main([*words, "--decoder", "sample", "--seed", "1"]) == 0
    assert capsys.readouterr().out != first


def test_generate_reads_many_prompts(model, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("file 1\n\nhello to\n")
    assert main(["generate", model, "--prompts", str(prompts), "--max-new-tokens", "5"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["file 1", "hello to"]
    assert all(row["text"] for row in rows)


def test_stop_text_ends_the_answer(model, capsys):
    words = ["generate", model, "--prompt", "file 1", "--max-new-tokens", "20"]
    assert main(words) == 0
    answer = capsys.readouterr().out[len("file 1") :].rstrip("\n")
    stop = answer[3:5]
    assert main([*words, "--stop", stop]) == 0
    stopped = capsys.readouterr().out[len("file 1") :].rstrip("\n")
    assert stopped == answer[: answer.index(stop)]


def test_chat_needs_a_template(model, capsys):
    assert "chat template" in fails(["generate", model, "--chat", "--prompt", "hello"], capsys)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--prompt"),
        (["--prompt", "a", "--prompts", "b.txt"], "--prompt"),
        (["--prompt", ""], "prompt"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens"),
        (["--prompt", "a", "--decoder", "sample", "--temperature", "-1"], "temperature"),
        (["--prompt", "a", "--decoder", "sample", "--top-p", "2"], "top_p"),
        (["--prompt", "a", "--decoder", "sample", "--top-k", "0"], "top_k"),
        (["--prompt", "a", "--decoder", "gredy"], "did you mean 'greedy'"),
        (["--prompt", "a", "--max-new-tokens", "100000"], "max_length"),
        (["--prompts", "no-such-file.txt"], "no-such-file.txt"),
    ],
)
def test_generate_refuses_what_makes_no_sense(model, words, expected, capsys):
    assert expected in fails(["generate", model, *words], capsys)


def test_damaged_models_are_one_clear_sentence(model, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors" in fails(["evaluate", str(broken)], capsys)
    (broken / "effml.json").write_text("{")
    assert "effml.json" in fails(["evaluate", str(broken)], capsys)
    (tmp_path / "x.gguf").write_bytes(b"GGUF but not really")
    assert "x.gguf" in fails(["evaluate", str(tmp_path / "x.gguf")], capsys)
    assert fails(["evaluate", str(tmp_path)], capsys)


def test_unusable_text_is_named(tmp_path, capsys):
    out = str(tmp_path / "out")
    assert "no-such-folder" in fails(["train", "--data", "no-such-folder", "--out", out], capsys)
    (tmp_path / "empty").mkdir()
    assert "empty" in fails(["train", "--data", str(tmp_path / "empty"), "--out", out], capsys)
    (tmp_path / "binary.bin").write_bytes(bytes(range(256)) * 100)
    assert "binary.bin" in fails(["train", "--data", str(tmp_path / "binary.bin"), "--out", out], capsys)


def test_a_mesh_that_does_not_fit_is_refused(text, tmp_path, capsys):
    assert "device" in fails(
        ["train", "--data", text, "--mesh", "data=64", "--out", str(tmp_path / "x"), *SMALL], capsys
    )


def test_a_diverging_run_says_at_which_step(text, tmp_path, capsys):
    words = [
        "train",
        "--data",
        text,
        "--optimizer",
        "adamw",
        "--learning-rate",
        "1e30",
        "--schedule",
        "constant",
        "--out",
        str(tmp_path / "x"),
    ]
    line = main([*words, *SMALL, "--steps", "30"])
    assert line == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "not finite at step" in last


def test_list_shows_every_method(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(card.name in out for card in report.find_cards())


def test_doctor_reports_and_checks_the_arithmetic(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "cpu" in out
    assert "relative error" in out


def test_interrupt_finishes_the_step_and_resumes(text, tmp_path):
    command = [sys.executable, "-m", "effml", "train", "--data", text, "--out", str(tmp_path / "run"), *SMALL]
    command[command.index("--steps") + 1] = "20000"
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    metrics = tmp_path / "run/metrics.jsonl"
    while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "--resume" in out
    assert any((tmp_path / "run/checkpoints").iterdir())
