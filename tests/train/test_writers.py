from __future__ import annotations

import ast
import io
import json
import sys
import types
from pathlib import Path

import pytest

import effml.train
from effml.train import (
    JsonLinesWriter,
    Progress,
    ProgressUpdate,
    TensorBoardWriter,
    TrackioWriter,
    WandbWriter,
    read_json_lines,
)


def write(path, rows):
    writer = JsonLinesWriter(path)
    for step in rows:
        writer.write(step, {"loss": step / 2})
    writer.close()
    return path.read_bytes()


def test_a_resumed_file_loses_later_rows_and_a_torn_line_and_keeps_the_bytes_of_the_rest(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    whole = write(path, range(1, 6))
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    writer = JsonLinesWriter(path)
    writer.resume(3)
    assert [row["step"] for row in read_json_lines(path)] == [1, 2, 3]
    writer.write(4, {"loss": 2.0})
    writer.write(5, {"loss": 2.5})
    writer.close()
    assert path.read_bytes() == whole
    JsonLinesWriter(path).resume(0)
    assert path.read_bytes() == b""


def test_rows_are_on_disk_after_a_flush_and_odd_numbers_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    writer.write(1, {"loss": float("nan"), "norm": float("inf")})
    writer.flush()
    assert json.loads(path.read_text()) == {"step": 1, "loss": None, "norm": None}


@pytest.mark.parametrize("text", ["hello\n", "[1]\n", '{"loss": 1}\n'])
def test_a_file_that_is_not_ours_is_left_alone(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"notes.txt line 1 is not"):
        JsonLinesWriter(path).resume(0)
    assert path.read_text() == text


def test_tensorboard_events_hold_the_scalars(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    writer = TensorBoardWriter(tmp_path)
    writer.resume(4)
    writer.write(5, {"loss": 0.25, "name": "text"})
    writer.close()
    [file] = tmp_path.iterdir()
    raw, found = file.read_bytes(), {}
    while raw:
        size = int.from_bytes(raw[:8], "little")
        event = Event.FromString(raw[12 : 12 + size])
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
        raw = raw[16 + size :]
    assert found == {"loss": (5, 0.25)}


@pytest.mark.parametrize(("kind", "package"), [(WandbWriter, "wandb"), (TrackioWriter, "trackio")])
def test_hosted_trackers_get_every_row(monkeypatch, kind, package):
    calls = []
    fake = types.SimpleNamespace(
        init=lambda **options: calls.append(("init", options)),
        log=lambda row, step: calls.append((step, row)),
        finish=lambda: calls.append("finish"),
    )
    monkeypatch.setitem(sys.modules, package, fake)
    writer = kind("project", name="run")
    writer.resume(3)
    writer.write(4, {"loss": 1.0})
    writer.flush()
    writer.close()
    assert calls == [("init", {"project": "project", "name": "run"}), (4, {"loss": 1.0}), "finish"]


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda folder: WandbWriter("p"), "wandb"),
        (lambda folder: TrackioWriter("p"), "trackio"),
        (TensorBoardWriter, "tensorboardX"),
    ],
)
def test_an_absent_package_is_answered_with_its_pip_line(monkeypatch, tmp_path, make, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package}.*pip install"):
        make(tmp_path)


class Screen(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


def test_plain_lines_come_at_intervals_and_the_last_step_always(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("effml.train.progress.time", types.SimpleNamespace(monotonic=lambda: now[0]))
    screen = Screen(False)
    progress = Progress(40, label="muon", stream=screen, interval=5.0)
    for step in range(1, 41):
        now[0] += 1.0
        metrics = {"loss": 1.5, "evaluation_nats_per_token": 2.0} if step > 3 else {}
        progress(ProgressUpdate(step, 40, metrics, 2000.0, 3725.0 - step))
    progress.close()
    lines = screen.getvalue().splitlines()
    assert lines[0] == "muon 4/40 | loss 1.5000 | held out 2.0000 | 2,000 tokens/s | 1:02:01 left"
    assert [line.split()[1] for line in lines] == [
        "4/40",
        "9/40",
        "14/40",
        "19/40",
        "24/40",
        "29/40",
        "34/40",
        "39/40",
        "40/40",
    ]


def test_a_terminal_gets_a_bar_with_rate_and_time_left():
    screen = Screen(True)
    progress = Progress(4, label="scale", stream=screen)
    for step in (1, 2, 3, 4):
        progress(ProgressUpdate(step, 4, {"loss": 1.25}, 1500.0, 90.0))
    progress.close()
    for words in ("scale", "4/4", "1.2500", "1,500 tokens/s", "1:30 left"):
        assert words in screen.getvalue()


def test_nothing_optional_is_imported_with_the_package():
    heads = set()
    for path in Path(effml.train.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                heads |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                heads.add((node.module or "").split(".")[0])
    assert "jax" in heads
    assert not heads & {"orbax", "rich", "tensorboardX", "wandb", "trackio", "grain"}
