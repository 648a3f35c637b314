"""`effml train` on two processes over loopback: one run, one model, the numbers of one process."""

import json
import os
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from effml import models
from effml.pipeline import TrainConfig, train_model

OPTIONS = {"steps": 4, "batch_size": 8, "length": 16, "width": 16, "num_layers": 1, "num_heads": 2}
OPTIONS |= {"evaluation_tokens": 300, "evaluate_every": 2, "checkpoint_every": 2, "optimizer": "normuon"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(5):
        (folder / f"part-{number}.txt").write_text(f"file {number} says hello to everyone.\n" * 30)
    return str(folder)


@pytest.mark.slow
def test_two_processes_make_one_run_with_the_numbers_of_one_process(text, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "effml", "train", "--data", text, "--out", str(tmp_path / "two"), *words]
    programs = [
        subprocess.Popen(
            [*command, "--mesh", "data=2,fsdp=2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
                "EFFML_COORDINATOR": f"127.0.0.1:{port}",
                "EFFML_NUM_PROCESSES": "2",
                "EFFML_PROCESS_ID": str(index),
            },
        )
        for index in range(2)
    ]
    outputs = [program.communicate(timeout=300) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], outputs
    assert "held-out loss" in outputs[0][0]
    # Gloo prints to standard output when processes meet, from several threads: its lines can be torn.
    gloo = re.compile(r"\[Gloo\]|connected to \d+ peer ranks|number of connected peer ranks|^\s*$")
    assert not [line for line in outputs[1][0].splitlines() if not gloo.search(line)]

    alone = train_model(TrainConfig(data=text, **OPTIONS), tmp_path / "one")
    loaded = models.load(tmp_path / "two" / "model")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), loaded.params, alone.params)
    rows = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row, expected in zip(rows, alone.history):
        assert row.keys() == expected.keys()
        for name in ("loss", "evaluation_nats_per_token"):
            assert row.get(name) == pytest.approx(expected.get(name), abs=1e-5)
        assert row.get("evaluation_tokens") == expected.get("evaluation_tokens")


def test_several_processes_without_a_mesh_are_refused(text, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"mesh is empty, but the job has 2 processes; .* data="):
        train_model(TrainConfig(data=text, **OPTIONS), tmp_path / "run")
    assert not (tmp_path / "run").exists()
