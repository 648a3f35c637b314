from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from effml.nn.hub import config_to_huggingface
from effml.nn.transformer import TransformerConfig, param_count
from effml.train import plan
from effml.train.plan import topology
from effml.train.plan.plan import memory_limits

PROGRAMS = Path(__file__).with_name("plan_programs.py")


def run(name, devices):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("EFFML_")}
    program = subprocess.run(
        [sys.executable, str(PROGRAMS), name],
        env=plan.environment(plan.parse_topology(devices), inherited),
        capture_output=True,
        text=True,
        cwd=PROGRAMS.parents[2],
        timeout=600,
    )
    assert program.returncode == 0, program.stderr[-3000:]
    return json.loads(program.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def host():
    return run("host", "cpu:8")


@pytest.fixture(scope="module")
def tpu():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu: pip install 'effml[kernel-ci]'")
    return run("tpu", "v5e:2x2")


def table(made):
    return {(row["kind"], row["group"]): (row["calls"], row["bytes"]) for row in made["collectives"]}


KERNELS = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64  # of one layer of the programs' model
TABLES = 2 * 64 * 32


@pytest.mark.slow
def test_bytes_of_a_device_are_those_counted_by_hand(host):
    made = host["plan"]
    vectors = (2 * 3 + 1) * 32
    assert made["parameters"] == 3 * KERNELS + TABLES + vectors
    share = 4 * ((3 * KERNELS + TABLES) // 4 + vectors)  # float32, in 4 slices; vectors are whole
    assert made["parameter_bytes"] == share
    assert made["optimizer_bytes"] == 2 * share + 4
    assert made["batch_bytes"] == 4 * (17 + 16)
    # The compiler's own account has the step, the first bad step and a key of two words besides.
    assert made["argument_bytes"] == 3 * share + 4 + 4 * (17 + 16) + 4 + 4 + 8
    assert made["tokens"] == 8 * 16


@pytest.mark.slow
def test_weights_are_gathered_once_for_each_pass_and_the_products_are_shared_out(host):
    made = host["plan"]
    # Each layer's kernels forward and again for the recomputation, embedding and head once, all in float32.
    calls, size = table(made)["all-gather", 4]
    assert size == 4 * (2 * 3 * KERNELS + TABLES)
    assert calls == 2 * 3 * 7 + 2
    assert [loop["trips"] for loop in made["loops"]] == [3, 3]
    # The CPU compiler finds that backward and recomputation share one product of the attention.
    shared = 3 * 2 * (8 * 16) * 16 * 32
    assert made["device_flops"] * 8 in (made["model_flops"], made["model_flops"] - shared)
    assert made["optimizer_flops"] == 0


@pytest.mark.slow
def test_a_gathered_model_computes_what_one_device_computes(host):
    one, many = host["losses"]
    assert many == pytest.approx(one, rel=1e-6)
    assert host["largest_difference"] < 1e-4


@pytest.mark.slow
def test_lowering_alone_knows_arguments_and_flops(host):
    made, whole = host["lowered"], host["plan"]
    for name in ("parameter_bytes", "optimizer_bytes", "model_flops"):
        assert made[name] == whole[name]
    assert made["collectives"] is made["peak_bytes"] is made["ring_bytes"] is made["repeated_work"] is None


@pytest.mark.slow
def test_what_does_not_match_the_devices_is_refused(host):
    assert "needs 16 host devices, but this process has 8" in host["too_few"]
    assert "6 rows does not divide over 8 devices" in host["rows"]


@pytest.mark.slow
def test_the_tpu_compiler_gathers_in_the_compute_type_and_scatters_gradients(tpu):
    made = tpu["tiny"]
    kernels, tables = 3 * (4 * 256**2 + 3 * 256 * 512), 2 * 256**2
    vectors = (2 * 3 + 1) * 256
    assert made["parameter_bytes"] == 4 * ((kernels + tables) // 2 + vectors)
    assert made["argument_bytes"] == pytest.approx(made["parameter_bytes"], rel=2e-3)  # padded by the layout
    found = table(made)
    assert found["all-gather", 2][1] == 2 * (2 * kernels + tables)  # bfloat16, two passes
    # Without a gradient of its own, a gathered weight would have its whole gradient reduced to every device.
    assert found["reduce-scatter", 2][1] == 4 * (kernels + tables // 2)
    small = 4 * 256**2 * 2
    over_data = 2 * (kernels + tables // 2) // 2  # the slices, over the other axis, in bfloat16
    assert over_data <= found["all-reduce", 2][1] < over_data + small
    assert made["device_flops"] * 4 == made["model_flops"]
    assert [loop["trips"] for loop in made["loops"]] == [3, 3]
    assert made["peak_bytes"] == made["argument_bytes"] + made["activation_bytes"] > made["argument_bytes"]


@pytest.mark.slow
def test_what_does_not_fit_is_said_with_its_size(tpu):
    message, needed, available = tpu["large"]
    assert message == "does not fit: one device needs 24.00 GiB and has 15.75 GiB"
    assert (needed, available) == (24 * 2**30, 15.75 * 2**30)


@pytest.mark.slow
def test_a_torus_that_the_compiler_does_not_know_is_refused(tpu):
    assert tpu["refused"].startswith("topology='v5e:3x7' is refused by the compiler: ")


@pytest.mark.parametrize(
    ("message", "limits"),
    [
        ("Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded", (20.5 * 2**30, 15.75 * 2**30)),
        ("required for HLO temporaries (512.0M) exceeds available HBM (1K).", (512 * 2**20, 1024)),
        ("Ran out of memory", (0, 0)),
    ],
)  # fmt: skip
def test_sizes_are_read_from_the_compilers_message(message, limits):
    assert memory_limits(message) == limits


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5:2x2", "topology kind='v5' is not known; did you mean 'v5[ep]'"),
        ("v5e", "must be a kind and sizes, such as v5e:16x16"),
        ("v5e:", "must be a kind and sizes"),
        ("v5e:2x0", "must be a kind and sizes"),
        ("v5e:2x2x2", "has 3 sizes, but v5e chips form a torus of 2 axes, such as v5e:2x2"),
        ("v4:2x2", "torus of 3 axes, such as v4:2x2x2"),
        ("cpu:2x2", "host devices are only counted"),
        ("cuda:2x2x2", "must be devices or hosts x devices"),
    ],
)
def test_names_of_topologies_that_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        plan.parse_topology(name)


def test_topologies():
    assert plan.parse_topology("v4:2x2x4").device_count == 16
    assert plan.parse_topology("v6e:2x4").platform == "tpu"
    assert plan.parse_topology("cuda:4x8").device_count == 32
    assert plan.parse_topology("cpu:64").only_lower is False


def test_the_environment_of_a_process(monkeypatch):
    cpu = plan.environment(
        plan.parse_topology("cpu:4"), {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "A": "b"}
    )
    assert cpu["XLA_FLAGS"] == "--xla_force_host_platform_device_count=4"
    assert (cpu["A"], cpu["JAX_PLATFORMS"], cpu["JAX_ENABLE_COMPILATION_CACHE"]) == ("b", "cpu", "false")
    tpu = plan.environment(plan.parse_topology("v5e:2x2"), {})
    assert tpu["ALLOW_MULTIPLE_LIBTPU_LOAD"] == tpu["TPU_SKIP_MDS_QUERY"] == "1"
    monkeypatch.setattr(topology, "_cuda_plugin", lambda: False)
    gpu = plan.parse_topology("cuda:2x4")
    assert gpu.only_lower
    assert plan.environment(gpu, {})["XLA_FLAGS"] == "--xla_force_host_platform_device_count=8"
    monkeypatch.setattr(topology, "_cuda_plugin", lambda: True)
    assert not gpu.only_lower
    assert "XLA_FLAGS" not in plan.environment(gpu, {})
    assert plan.environment(gpu, {})["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] == "1"


def test_a_missing_compiler_is_answered_with_its_pip_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"plan for v5e:2x2, install the package 'libtpu': pip install 'effml\[kernel-ci\]'"
    ):
        topology.check_installed(plan.parse_topology("v5e:2x2"))
    topology.check_installed(plan.parse_topology("cpu:2"))


def test_presets_have_the_published_sizes():
    # GaLore and SCALE (58.1M, 1339.1M), Llama 2 (6.74B, 68.98B).
    millions = {name: round(param_count(config) / 1e6, 1) for name, config in plan.MODELS.items()}
    assert millions == {
        "llama-60m": 58.1,
        "llama-130m": 134.1,
        "llama-350m": 368.0,
        "llama-1b": 1339.1,
        "llama-7b": 6738.4,
        "llama-70b": 68976.6,
    }


def test_models_are_names_or_folders(tmp_path):
    config = TransformerConfig(64, 32, 2, 4, 64, tied_head=False)
    (tmp_path / "config.json").write_text(json.dumps(config_to_huggingface(config)))
    for path in (tmp_path, tmp_path / "config.json"):
        read = plan.model_config(str(path))
        assert (read.width, read.num_layers, read.mlp_width) == (32, 2, 64)
    with pytest.raises(ValueError, match="did you mean 'llama-7b'"):
        plan.model_config("lama-7b")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        plan.model_config(str(tmp_path))
