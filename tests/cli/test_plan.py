from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import pytest

from effml.cli import _plan, main
from effml.cli.plan import Command
from effml.nn.hub import config_to_huggingface
from effml.nn.transformer import TransformerConfig
from effml.train.plan import topology


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = TransformerConfig(64, 32, 2, 4, 64, tied_head=False)
    (folder / "config.json").write_text(json.dumps(config_to_huggingface(config)))
    return str(folder)


@pytest.mark.slow
def test_a_folder_is_planned_for_two_optimizers(model, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "made" / "plan.json"
    words = [
        "plan",
        "--model",
        model,
        "--optimizer",
        "adamw",
        "normuon",
        "--topology",
        "cpu:4",
        "--mesh",
        "data=2,fsdp=2",
    ]
    assert main([*words, "--length", "16", "--compute-dtype", "float32", "--out", str(out)]) == 0
    adamw, normuon = json.loads(out.read_text())["plans"]
    kernels, tables, vectors = 2 * (4 * 32**2 + 3 * 32 * 64), 2 * 64 * 32, (2 * 2 + 1) * 32
    share = 4 * ((kernels + tables) // 2 + vectors)
    assert adamw["parameter_bytes"] == normuon["parameter_bytes"] == share
    assert 2 * share <= adamw["optimizer_bytes"] <= 2 * share + 16  # two moments and counters
    # One moment and a number per neuron for kernels.
    assert adamw["optimizer_bytes"] - normuon["optimizer_bytes"] > 0.9 * 4 * kernels // 2
    calls = {
        plan["optimizer"]: sum(c["calls"] for c in plan["collectives"] if c["kind"] == "all-to-all")
        for plan in (adamw, normuon)
    }
    assert calls["adamw"] == 0
    assert 0 < calls["normuon"] <= 2 * 3  # two for each of the shapes [32, 32], [32, 64], [64, 32]
    assert adamw["optimizer_flops"] == 0 < normuon["optimizer_flops"]
    assert adamw["versions"]["jax"]
    assert adamw["host_peak_bytes"] > 2**20
    shown = capfd.readouterr()
    assert shown.out.count("all-to-all") == 1
    assert "optimizer state" in shown.out
    assert f"result: {out}" in shown.out.replace("\n", "")
    assert shown.err.splitlines() == [
        f"compiling {model} with {name} for cpu:4 ..." for name in ("adamw", "normuon")
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llama-8b"], "model='llama-8b' is not known; did you mean 'llama-"),
        (["--optimizer", "adam"], "optimizer='adam' is not known; did you mean 'adamw'"),
        (["--optimizer"], "optimizer is empty"),
        (["--optimizer", "limuon:rank"], "'rank' is not of the form option=value"),
        (["--optimizer", "limuon:rank=0"], "rank=0"),
        (["--optimizer", "limuon:ranks=4"], "unexpected keyword argument 'ranks'"),
        (["--optimizer", "normuon:distribute=1"], "distribute can't be given here"),
        (["--optimizer", "scale:labels=head"], "labels can't be given here"),
        (["--optimizer", "limuon:weight_dimension_numbers=[0,1]"], "weight_dimension_numbers can't be given here"),
        (["--optimizer", "normuon:weight_decay=-1.0"], "weight_decay=-1.0 must not be negative"),
        (["--optimizer", "scale:tied_head=true"], "tied_head=True, but the parameters have a head of their own"),
        (["--topology", "cpu:2", "--mesh", "fsdp=4"], "needs 4 devices, but cpu:2 has 2"),
        (["--topology", "v5e:2x2", "--mesh", "fsdp=8"], "needs 8 devices, but v5e:2x2 has 4"),
        (["--topology", "cpu:2", "--out", f"{__file__}/plan.json"], "its folder can't be made (File exists)"),
        (["--topology", "cpu:2", "--out", os.path.dirname(__file__)], "is a folder; give the name of a JSON file"),
        (["--topology", "v5x:2x2"], "topology kind='v5x' is not known; did you mean 'v5"),
        (["--topology", "v5e:2by2"], "topology='v5e:2by2' must be a kind and sizes"),
        (["--topology", "cpu:8", "--mesh", "data=2,fsdp=2"], "needs 4 devices, but cpu:8 has 8; the sizes must multiply to 8"),
        (["--mesh", "rows=4"], "mesh axis='rows' is not known"),
        (["--mesh", "data"], "is not of the form axis=size"),
        (["--sequences", "0"], "sequences=0 must be above 0"),
        (["--sequences", "3", "--accumulate", "2"], "sequences=3 does not split into accumulate=2 parts"),
        (["--compute-dtype", "float8"], "compute_dtype='float8' is not known"),
    ],
)  # fmt: skip
def test_what_can_not_be_planned_is_answered_in_one_line(options, message, capsys, monkeypatch):
    monkeypatch.setattr(_plan, "compile_elsewhere", lambda request: pytest.fail("nothing should be compiled"))
    assert main(["plan", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("effml plan: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("kind", ["v4", "v5p"])
def test_two_devices_of_a_chip_are_left_to_the_process_that_has_them(kind, monkeypatch):
    monkeypatch.setattr(topology, "check_installed", lambda parsed: None)
    (request,) = _plan.requests(Command(topology=f"{kind}:2x2x1", mesh="fsdp=8"))
    assert request["axes"]["fsdp"] == 8


def test_options_win_over_the_defaults_and_may_hold_commas_in_brackets():
    written = (
        'normuon:weight_decay=0.1,learning_rate=0.5,ns_coeffs=[[3.4,-4.7,2.0],[1,2,3]],more={"a":1,"b":2}'
    )
    name, options = _plan.parse_optimizer(written)
    assert name == "normuon"
    assert options == {
        "weight_decay": 0.1,
        "learning_rate": 0.5,
        "ns_coeffs": [[3.4, -4.7, 2.0], [1, 2, 3]],
        "more": {"a": 1, "b": 2},
    }
    assert _plan.requests(Command(optimizer=(written.rpartition(",more")[0],), topology="cpu:2"))


@pytest.mark.parametrize(
    ("written", "distributed"),
    [
        ("normuon:weight_decay=0.2", True),
        ("limuon", True),
        ("limuon:polar=svd", False),
        ("limuon:rank=4,direction=factors", False),
        ("adamw:learning_rate=0.5", False),
    ],
)
def test_newton_schulz_alone_is_distributed(written, distributed, monkeypatch):
    made = {}
    monkeypatch.setattr(_plan, "_make", lambda name, options: made.update(options))
    mesh = jax.sharding.AbstractMesh((2, 2, 1), ("data", "fsdp", "tensor"))
    monkeypatch.setattr("effml.optimize.Distribution", lambda *words, **options: (words, options))
    _plan.optimizer_for(written, mesh)
    assert ("distribute" in made) == distributed
    monkeypatch.undo()
    assert _plan._make(*_plan.parse_optimizer(written)).init


def test_a_missing_compiler_is_answered_with_its_pip_line(capsys, monkeypatch):
    real = topology.importlib.util.find_spec
    monkeypatch.setattr(
        topology.importlib.util, "find_spec", lambda name: None if name == "libtpu" else real(name)
    )
    assert main(["plan", "--topology", "v5e:2x2"]) == 2
    assert "pip install 'effml[kernel-ci]'" in capsys.readouterr().err


ASKED = {"model": "llama-70b", "optimizer": "adamw", "topology": "v5e:4x4", "sequences": 1, "length": 2048}


def test_what_does_not_fit_is_shown_and_is_exit_code_one(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(topology, "check_installed", lambda parsed: None)
    limits = {
        "message": "does not fit: one device needs 78.10 GiB and has 15.75 GiB",
        "needed_bytes": 1,
        "available_bytes": 1,
    }
    answer = {**ASKED, "fits": False, **limits, "versions": {"jax": "0"}, "host_peak_bytes": 2**30}
    monkeypatch.setattr(_plan, "compile_elsewhere", lambda request: answer)
    assert main(["plan", "--model", "llama-70b", "--topology", "v5e:4x4"]) == 1
    assert "adamw does not fit: one device needs 78.10 GiB and has 15.75 GiB" in " ".join(
        capsys.readouterr().out.split()
    )
    assert json.loads((tmp_path / "runs/plan/llama-70b-v5e-4x4.json").read_text())["plans"] == [answer]


def test_errors_of_the_compilers_process_come_back(tmp_path, monkeypatch):
    (request,) = _plan.requests(Command(topology="cpu:2"))

    def program(answer, code=0):
        def run(words, **options):
            if answer is not None:
                with open(words[-1], "w") as file:
                    json.dump(answer, file)
            return subprocess.CompletedProcess(words, code, stderr="one\ntwo\nthree\nF0000 check failed\n")

        monkeypatch.setattr(_plan.subprocess, "run", run)

    program({"error": "too small", "kind": "ValueError"})
    with pytest.raises(ValueError, match="too small"):
        _plan.compile_elsewhere(request)
    program({"error": "INTERNAL: fault", "kind": "RuntimeError"})
    with pytest.raises(ChildProcessError, match="INTERNAL"):
        _plan.compile_elsewhere(request)
    program(None, code=-6)
    with pytest.raises(ChildProcessError, match=r"ended with code -6: .*check failed"):
        _plan.compile_elsewhere(request)


def test_the_command_is_listed_and_importing_it_loads_no_jax():
    code = "import sys, effml.cli.plan; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
