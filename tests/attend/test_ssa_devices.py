"""SSA spread over eight devices, by rows and by heads, is SSA on one."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def measured():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8",
    }
    command = [sys.executable, "-m", "tests.attend.ssa_devices"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_step_on_spread_rows_has_the_same_draw_loss_and_gradient(measured):
    rows = measured["model"]
    assert {row["sparse"] for row in rows} == {0.0, 1.0}
    assert all(row["difference"] < 3e-6 < 0.05 < row["gradient"] for row in rows), rows


@pytest.mark.parametrize("mode", ["full", "sparse"])
def test_spread_heads_give_the_same_output_alignment_blocks_and_gradient(measured, mode):
    found = measured[mode]
    assert found["partitioned"] < 3e-5
    assert found["mapped"] < 3e-5
    assert found["served"] < 3e-6
    assert found["collectives"] == []  # a key head, its queries and its blocks stay on their device
