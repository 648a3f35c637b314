from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from effml.train import read_json_lines

pytestmark = pytest.mark.slow
PROGRAMS = Path(__file__).with_name("programs.py")


def start(arguments, cache, devices=1, **environment):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("EFFML_", "XLA_FLAGS"))}
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=PROGRAMS.parents[2],
        env=inherited
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        | environment,
    )


def finish(program):
    out, errors = program.communicate(timeout=300)
    assert program.returncode == 0, errors[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return os.environ.get("JAX_COMPILATION_CACHE_DIR") or tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    programs = [
        start(
            ["process", folder],
            cache,
            devices=2,
            EFFML_COORDINATOR=f"127.0.0.1:{port}",
            EFFML_NUM_PROCESSES="2",
            EFFML_PROCESS_ID=str(i),
        )
        for i in range(2)
    ]
    return folder, [finish(program) for program in programs]


@pytest.fixture(scope="module")
def eight_devices(two_processes, tmp_path_factory, cache):
    arguments = ["devices", two_processes[0] / "first", tmp_path_factory.mktemp("moved") / "run"]
    return finish(start(arguments, cache, devices=8))


def test_every_mesh_of_eight_devices_trains_as_one_device_does(eight_devices):
    losses = eight_devices["losses"]
    assert eight_devices["devices"] == 8
    assert losses["one"][-1] < losses["one"][0]
    for name in ("data=8", "data=4,fsdp=2", "data=2,fsdp=2,tensor=2"):
        np.testing.assert_allclose(losses[name], losses["one"], rtol=0, atol=1e-5, err_msg=name)
    assert set(eight_devices["compilations"].values()) == {1}


def test_arrays_lie_where_the_rules_say(eight_devices):
    assert eight_devices["specs"] == {
        "query": "('fsdp', 'tensor')",
        "output": "('tensor', 'fsdp')",
        "up": "('fsdp', 'tensor')",
        "down": "('tensor', 'fsdp')",
        "moment": "('tensor', 'fsdp')",
        "norm": "()",
        "table": "('fsdp',)",
    }
    assert eight_devices["rows_per_device"] == [4] * 8
    assert eight_devices["given_is_placed"]
    on_mesh, on_one = eight_devices["evaluation"]
    assert abs(on_mesh - on_one) < 1e-5


def test_a_checkpoint_moves_to_another_mesh_and_to_one_device(eight_devices):
    for losses in eight_devices["moved"].values():
        np.testing.assert_allclose(losses, eight_devices["losses"]["one"][3:], rtol=0, atol=1e-5)


def test_meshes_and_batches_that_do_not_fit_are_refused(eight_devices):
    errors = eight_devices["errors"]
    assert "data=3 needs 3 devices but there are 8" in errors["size"]
    assert "6 rows does not divide over data × fsdp = 4" in errors["batch"]
    assert "4 rows does not split into accumulate=2 × 4 devices" in errors["accumulate"]


def test_two_processes_train_as_one_and_go_on_from_their_checkpoint(two_processes, eight_devices):
    folder, reports = two_processes
    one = eight_devices["losses"]["one"]
    for report in reports:
        assert report["several"]
        assert report["devices"] == [2, 4]
        assert report["local_rows"] == [4, 4]
        np.testing.assert_allclose(report["losses"], one[3:], rtol=0, atol=1e-5)
        assert "tensor=4 would cross processes" in report["error"]
    rows = read_json_lines(folder / "checkpoints.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    np.testing.assert_allclose([row["loss"] for row in rows], one, rtol=0, atol=1e-5)


def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_step(two_processes):
    _, reports = two_processes
    assert reports[0]["stopped"] == reports[1]["stopped"] == ["interrupted", 15, 2]
    assert reports[0]["again"] == reports[1]["again"]
    assert len(reports[0]["again"]) == 3
    assert reports[0]["again"][1:] == reports[0]["losses"]


def test_one_process_reads_the_model_that_two_wrote_but_not_their_place_in_the_data(eight_devices):
    assert eight_devices["restored"] == [3, None]
    assert "written by 2 processes and this job has 1" in eight_devices["errors"]["processes"]
    np.testing.assert_allclose(
        eight_devices["after_two_processes"], eight_devices["losses"]["one"][3:], rtol=0, atol=1e-5
    )


def test_a_run_killed_again_and_again_ends_in_the_same_bits(tmp_path, cache):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert finish(start(["killed", whole], cache))["first"] == 1
    seed = random.SystemRandom().randrange(10**6)
    draw = random.Random(seed)
    print("seed", seed)
    # Once before any checkpoint, once at any step, once while a checkpoint is being written.
    for mark in ("step 2", f"step {draw.randrange(5, 16)}", f"saving {draw.choice((16, 20))}"):
        program = start(["killed", broken], cache)
        lines = []
        for line in program.stdout:
            lines.append(line.strip())
            if lines[-1] == mark:
                break
        program.kill()
        _, errors = program.communicate()
        assert lines[-1:] == [mark], errors[-3000:]
    report = finish(start(["killed", broken], cache))
    assert report["stopped"] == "finished"
    assert report["first"] > 12
    assert (broken / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert [row["step"] for row in read_json_lines(broken / "metrics.jsonl")] == list(range(1, 25))
    with np.load(broken / "final.npz") as a, np.load(whole / "final.npz") as b:
        assert len(a.files) == len(b.files) > 25
        for name in a.files:
            assert a[name].tobytes() == b[name].tobytes()
