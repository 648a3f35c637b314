from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from effml.optimize import Distribution, scale_by_normuon
from effml.train import make_mesh


@pytest.fixture(scope="module")
def measured():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8",
    }
    command = [sys.executable, "-m", "tests.optimize.normuon_devices"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def counts(case):
    return {kind: len(shapes) for kind, shapes in case["found"].items()}


@pytest.mark.parametrize(
    "name",
    [
        "outputs",
        "inputs",
        "constraint",
        "many shapes",
        "uneven sizes",
        "whole matrices",
        "spread",
        "two mesh axes",
    ],
)
def test_sharded_equals_unsharded_and_newton_schulz_communicates_nothing(measured, name):
    assert measured[name]["difference"] < 1e-5
    # Newton-Schulz is the only loop: what is not in the entry computation would run at each of its steps.
    assert measured[name]["inner"] == 0
    assert measured[name]["warnings"] == []


def test_left_to_the_compiler_newton_schulz_would_communicate_at_every_step(measured):
    assert measured["left to the compiler"]["inner"] >= 1


@pytest.mark.parametrize("name", ["outputs", "constraint", "two mesh axes"])
def test_a_shape_costs_two_all_to_alls_and_a_sum_of_one_number_per_matrix(measured, name):
    assert counts(measured[name]) == {"all-to-all": 2, "all-reduce": 1}
    (shape,) = measured[name]["found"]["all-reduce"]
    padded = {"outputs": "f32[1,16]", "constraint": "f32[12]", "two mesh axes": "f32[1,8]"}
    assert shape.startswith(padded[name])


def test_where_inputs_are_split_the_sum_has_one_number_per_neuron(measured):
    assert counts(measured["inputs"]) == {"all-to-all": 2, "all-reduce": 1}
    assert measured["inputs"]["found"]["all-reduce"][0].startswith("f32[16,24]")


def test_leaves_of_one_shape_share_an_exchange_whatever_they_were(measured):
    # Five leaves, four shapes: the scanned layers and the query kernel are [16, 32] both.
    found = counts(measured["many shapes"])
    assert found["all-to-all"] == 8
    assert set(found) == {"all-to-all", "all-reduce"}


def test_uneven_sizes_are_padded(measured):
    assert counts(measured["uneven sizes"])["all-to-all"] == 4


def test_whole_matrices_are_shared_out_and_split_batches_stay_where_they_are(measured):
    assert counts(measured["whole matrices"]) == {"all-gather": 1}


def test_replicas_can_share_the_work_for_one_gather_more(measured):
    assert counts(measured["spread"]) == {"all-to-all": 2, "all-reduce": 1, "all-gather": 1}


def test_leaves_that_the_exchange_cannot_undo_are_warned_about_by_path(measured):
    (both,), (axis,), (mesh,) = (measured[n]["warnings"] for n in ("both axes", "other axis", "other mesh"))
    assert "a of shape (16, 24) is orthogonalised on its own" in both
    assert "it is split over several of its axes" in both
    assert "it is split over ('data',), not over ('fsdp',)" in axis
    assert "it lies on another mesh" in mesh


def test_matrices_travel_in_the_dtype_of_newton_schulz(measured):
    assert measured["bfloat16"] == ["bf16", "bf16"]


def one_device(*names):
    types = (AxisType.Auto,) * len(names)
    return jax.make_mesh((1,) * len(names), names, axis_types=types, devices=jax.devices()[:1])


@pytest.mark.parametrize("kind", ["own", "train"])
def test_on_one_device_it_changes_nothing(kind):
    mesh = one_device("fsdp") if kind == "own" else make_mesh({"fsdp": 1}, jax.devices()[:1])
    gradient = {"up": {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(6, 9)), jnp.float32)}}
    plain, shared = scale_by_normuon(), scale_by_normuon(distribute=Distribution(mesh))
    expected, _ = plain.update(gradient, plain.init(gradient))
    update, state = jax.jit(shared.update)(gradient, shared.init(gradient))
    np.testing.assert_allclose(update["up"]["kernel"], expected["up"]["kernel"], atol=1e-6)
    assert state.nu["up"]["kernel"].shape == (1, 9)


def test_bad_distributions_are_refused():
    mesh = one_device("fsdp")
    with pytest.raises(ValueError, match=r"axis='data' is no axis of the mesh \(axes: fsdp\)"):
        Distribution(mesh, "data")
    with pytest.raises(ValueError, match="spread='data' is no axis of the mesh"):
        Distribution(mesh, spread=("data",))
    with pytest.raises(ValueError, match="repeats axis"):
        Distribution(mesh, "fsdp", spread=("fsdp",))
    with pytest.raises(ValueError, match="mode='constraints' is not known; did you mean 'constraint'"):
        Distribution(mesh, mode="constraints")
