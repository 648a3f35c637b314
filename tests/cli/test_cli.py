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


def test_train_says_what_it_does_before_it_compiles(text, tmp_path, capsys):
    assert main(["train", "--data", text, "--out", str(tmp_path / "run"), *SMALL]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("scale: ")
    assert "parameters" in first
    assert first.endswith(f"tokens of {text}, 4 steps of 4 x 16; compiling")


def test_evaluate_says_which_text_it_read(model, text, tmp_path, capsys):
    words = ["--data", text, "--split", "train", "--length", "16", "--max-tokens", "40"]
    assert main(["evaluate", model, *words, "--out", str(tmp_path)]) == 0
    heading = " ".join(capsys.readouterr().out.splitlines()[:3])
    assert f"on the train text of {text}, windows of up to 16 tokens: " in heading.replace("  ", " ")
    assert "seed" not in heading


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


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A model whose texts begin with a token of its own, as those of Llama 3 and Mistral do."""
    import jax
    from tokenizers import processors

    from effml import data, models
    from effml.nn.transformer import TransformerConfig, init_params

    backend = data.BpeTokenizer.train(["hello to everyone"] * 9, 265).tokenizer
    backend.add_special_tokens(["<s>"])
    begin = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[begin])
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = data.BpeTokenizer.from_tokenizer(backend, 0, template)
    config = TransformerConfig(tokenizer.vocab_size, 16, 1, 2, 24, initializer_std=0.5)
    folder = tmp_path_factory.mktemp("begun") / "model"
    models.save(folder, init_params(jax.random.key(0), config), config, tokenizer)
    return str(folder)


def test_prompts_get_the_models_first_token_and_chats_only_from_their_template(begun, tmp_path, capsys):
    from effml import decode, models

    loaded = models.load(begun)
    (begin,) = loaded.tokenizer.prefix_ids
    plain = loaded.tokenizer.encode("hello").tolist()

    def written(ids):
        new = decode.generate(loaded, [ids], max_new_tokens=8, stop_ids=loaded.tokenizer.stop_ids)
        return loaded.tokenizer.decode(new.tokens[0][: new.lengths[0]])

    assert written([begin, *plain]) != written(plain)
    options = ["--max-new-tokens", "8"]
    assert main(["generate", begun, "--prompt", "hello", *options]) == 0
    assert capsys.readouterr().out == "hello" + written([begin, *plain]) + "\n"
    (tmp_path / "prompts.txt").write_text("hello\n")
    assert main(["generate", begun, "--prompts", str(tmp_path / "prompts.txt"), *options]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == written([begin, *plain])
    assert main(["generate", begun, "--chat", "--prompt", "hello", *options]) == 0
    assert capsys.readouterr().out == written([begin, *plain, 0]) + "\n"
    # A template that writes no first token is taken at its word.
    bare = tmp_path / "bare"
    shutil.copytree(begun, bare)
    meta = json.loads((bare / "effml.json").read_text())
    meta["chat_template"] = meta["chat_template"].replace("{{ bos_token }}", "")
    (bare / "effml.json").write_text(json.dumps(meta))
    assert main(["generate", str(bare), "--chat", "--prompt", "hello", *options]) == 0
    assert capsys.readouterr().out == written([*plain, 0]) + "\n"


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


def test_a_prompts_file_is_read_as_lines_of_utf8(model, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufefffile\r\na\u2028b\x0cc\n".encode())
    assert main(["generate", model, "--prompts", str(path), "--max-new-tokens", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]
    assert [row["prompt"] for row in rows] == ["file", "a\u2028b\x0cc"]
    path.write_bytes(b"caf\xe9\n")
    assert "prompts.txt' is not UTF-8" in fails(["generate", model, "--prompts", str(path)], capsys)


def test_numbers_too_large_for_the_machine_are_one_line(model, text, capsys, monkeypatch):
    from effml import models

    assert "32 bits" in fails(["generate", model, "--prompt", "a", "--seed", str(2**70)], capsys)

    def load(name):
        raise MemoryError("8 TiB")

    monkeypatch.setattr(models, "load", load)
    assert "not enough memory" in fails(["evaluate", model, "--data", text], capsys)


def test_evaluate_takes_no_more_windows_at_a_time_than_the_text_has(model, text, tmp_path):
    words = ["evaluate", model, "--data", text, "--out", str(tmp_path), "--batch-size"]
    assert main([*words, "1"]) == 0
    alone = report.Result.load(tmp_path / "result.json").rows[0]["nats_per_token"]
    assert main([*words, str(10**13)]) == 0
    together = report.Result.load(tmp_path / "result.json").rows[0]["nats_per_token"]
    assert together == pytest.approx(alone, rel=1e-5)


def test_an_error_of_the_device_is_one_line(model, capsys, monkeypatch):
    import jax

    from effml import models

    def load(name):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes")

    monkeypatch.setattr(models, "load", load)
    assert "Out of memory" in fails(["generate", model, "--prompt", "a"], capsys)


def test_a_damaged_checkpoint_is_one_line_and_no_traceback(text, tmp_path):
    """In a process of its own: Orbax's threads print tracebacks of theirs when a read fails."""
    words = [sys.executable, "-m", "effml", "train", "--data", text, "--out", str(tmp_path / "run"), *SMALL]
    subprocess.run(words, check=True, capture_output=True)
    for path in (tmp_path / "run" / "checkpoints" / "4" / "state" / "d").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    done = subprocess.run([*words, "--resume"], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "is damaged" in done.stderr.strip().splitlines()[-1]


def test_training_in_bfloat16_runs(text, tmp_path):
    words = ["train", "--data", text, "--compute-dtype", "bfloat16", "--out", str(tmp_path / "run"), *SMALL]
    assert main(words) == 0


def test_evaluate_repeats_what_train_said(text, tmp_path, capsys):
    assert main(["train", "--data", text, "--out", str(tmp_path / "run"), *SMALL]) == 0
    said = capsys.readouterr().out
    assert (
        main(
            [
                "evaluate",
                str(tmp_path / "run"),
                "--data",
                text,
                "--max-tokens",
                "128",
                "--out",
                str(tmp_path / "e"),
            ]
        )
        == 0
    )
    (row,) = report.Result.load(tmp_path / "e/result.json").rows
    assert f"held-out loss {row['nats_per_token']:.4f}" in said


def test_a_run_that_has_not_ended_is_called_so(text, tmp_path, capsys):
    assert main(["train", "--data", text, "--out", str(tmp_path / "run"), *SMALL]) == 0
    shutil.rmtree(tmp_path / "run/model")
    capsys.readouterr()
    assert "not ended" in fails(["evaluate", str(tmp_path / "run"), "--data", text], capsys)
