"""Whole models of binary factors: what they compute, what they weigh, and work that was interrupted."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml import models, trees
from effml.nn import transformer
from effml.nn.hub import _files
from effml.quantize import nanoquant
from effml.quantize.nanoquant import _quantize
from tests.quantize import small

SETTINGS = nanoquant.NanoQuantConfig(
    bits=3,
    multiple=8,
    init="dual_svid",
    dense_epochs=1,
    factor_epochs=1,
    scale_epochs=2,
    dense_rate=1e-3,
    factor_rate=1e-3,
    scale_rate=1e-2,
)
TOKENS = small.tokens()


def run(settings=SETTINGS, **options):
    return nanoquant.quantize_lm(
        small.params(), small.CONFIG, TOKENS, settings, **{"key": jax.random.key(0), **options}
    )


@pytest.fixture(scope="module")
def whole():
    return run()


@pytest.fixture(scope="module")
def untuned():
    """All but the last step."""
    return run(dataclasses.replace(SETTINGS, scale_epochs=0))


def as_dense(params):
    """With the kernels that the factors stand for."""

    def walk(tree):
        if not isinstance(tree, dict):
            return tree
        if "binary" in tree:
            return {"kernel": tree["binary"].dense(), **{k: v for k, v in tree.items() if k != "binary"}}
        return {name: walk(part) for name, part in tree.items()}

    return {**params, "layers": [walk(layer) for layer in params["layers"]]}


def binaries(params):
    is_binary = lambda leaf: isinstance(leaf, nanoquant.BinaryTensor)
    return [leaf for leaf in jax.tree.leaves(params, is_leaf=is_binary) if is_binary(leaf)]


def test_the_packed_model_computes_what_its_kernels_would(whole):
    dense = as_dense(whole.params)
    run_dense = jax.jit(transformer.forward, static_argnames="config")
    run_packed = jax.jit(nanoquant.forward, static_argnames="config")
    for tokens in (TOKENS, TOKENS[:1, :3]):  # many rows open the signs, few read the words
        wanted = run_dense(dense, tokens, config=small.CONFIG).logits
        found = run_packed(whole.params, tokens, config=whole.config).logits
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_plan_promises_the_bytes_and_bits_that_come(whole):
    plan = nanoquant.plan(small.CONFIG, SETTINGS)
    tensors = nanoquant.stored_tensors(whole.params, whole.config)
    assert sum(one.nbytes for one in tensors.values()) == plan.packed_bytes + plan.kept_bytes
    assert [row["bytes"] for row in whole.rows] == [row.bytes for row in plan.rows]
    assert [(row["layer"], row["name"]) for row in whole.rows] == [(row.layer, row.name) for row in plan.rows]
    for row, promised in zip(whole.rows, plan.rows):
        assert row["bits_per_weight"] == pytest.approx(promised.bits_per_weight)
        assert row["bits_per_weight"] <= 3 * 1.02
    assert plan.realised_bits == pytest.approx(whole.config.bits_per_weight)
    assert not whole.config.partial
    assert json.loads(json.dumps(plan.to_dict()))["settings"]["bits"] == 3
    assert nanoquant.NanoQuantPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_scale_tuning_moves_scales_alone_and_towards_the_teacher(whole, untuned):
    before, after = binaries(untuned.params), binaries(whole.params)
    assert len(before) == len(after) == 14
    for one, other in zip(before, after):
        np.testing.assert_array_equal(one.v_words, other.v_words)
        np.testing.assert_array_equal(one.u_words, other.u_words)
        assert other.scale_in.dtype == other.scale_out.dtype == jnp.bfloat16
        assert (np.asarray(one.scale_in) != np.asarray(other.scale_in)).any()
    rest = [jax.tree.map(np.asarray, as_dense(made.params)) for made in (untuned, whole)]
    for name, first in jax.tree_util.tree_flatten_with_path(rest[0])[0]:
        if "kernel" not in trees.path_name(name) and "binary" not in trees.path_name(name):
            second = dict(jax.tree_util.tree_flatten_with_path(rest[1])[0])[name]
            np.testing.assert_array_equal(first, second)

    assert divergence(whole) < 0.98 * divergence(untuned)
    assert len(whole.scale_losses) == 2
    assert whole.scale_losses[0] == pytest.approx(divergence(untuned), rel=0.2)


def divergence(made):
    """Of the student from the teacher, in float64: what the teacher finds likely counts."""
    run = jax.jit(transformer.forward, static_argnames="config")
    both = [
        run(params, TOKENS[:, :-1], config=small.CONFIG) for params in (small.params(), as_dense(made.params))
    ]
    logits = [np.asarray(one.logits, np.float64) for one in both]
    teacher, student = (one - np.log(np.exp(one).sum(-1, keepdims=True)) for one in logits)
    return float((np.exp(teacher) * (teacher - student)).sum(-1).mean())


def test_the_divergence_is_that_from_the_teacher_and_not_the_other_way_round(untuned):
    found = nanoquant.tune_scales_kl(
        untuned.params,
        untuned.config,
        small.params(),
        TOKENS,
        key=jax.random.key(0),
        epochs=1,
        batch=len(TOKENS),
        rate=1e-12,
    )
    assert found.losses[0] == pytest.approx(divergence(untuned), rel=1e-4)


def test_a_block_reads_what_rounded_blocks_give_and_aims_at_what_whole_ones_give(monkeypatch):
    seen = []
    reconstruct = _quantize.reconstruct_block

    def watched(apply, layer, x, target, *rest, **options):
        made, rows = reconstruct(apply, layer, x, target, *rest, **options)
        seen.append((np.asarray(x), np.asarray(target), made))
        return made, rows

    monkeypatch.setattr(_quantize, "reconstruct_block", watched)
    run(dataclasses.replace(SETTINGS, dense_epochs=0, factor_epochs=0, scale_epochs=0))
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1] - 1), TOKENS[:, :-1].shape)
    block = jax.jit(lambda layer, x: transformer.block(layer, x, config=small.CONFIG, positions=positions)[0])
    hidden = small.params()["embedding"]["table"][TOKENS[:, :-1]]
    rounded = as_dense({"layers": [made for *_, made in seen]})["layers"]
    first, second = small.params()["layers"]
    whole = block(first, hidden)
    for (x, target, _), wanted_x, wanted_target in zip(
        seen, (hidden, block(rounded[0], hidden)), (whole, block(second, whole)), strict=True
    ):
        np.testing.assert_allclose(x, wanted_x, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(target, wanted_target, rtol=1e-4, atol=1e-4)


def test_a_model_stopped_in_between_is_valid_and_says_so(untuned, tmp_path):
    half = run(blocks=1)
    assert half.config.partial
    assert "1 of 2 blocks: the others are in full precision" in half.config.label
    jax.tree.map(np.testing.assert_array_equal, half.params["layers"][0], untuned.params["layers"][0])
    jax.tree.map(np.testing.assert_array_equal, half.params["layers"][1], small.params()["layers"][1])
    models.save(tmp_path / "half", half.params, half.config, kind="binary")
    loaded = models.load(tmp_path / "half")
    assert loaded.config == half.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, half.params)


def test_what_is_saved_comes_back_and_is_as_small_as_promised(whole, tmp_path):
    models.save(tmp_path / "m", whole.params, whole.config, kind="binary")
    loaded = models.load(tmp_path / "m")
    assert loaded.kind == "binary"
    assert loaded.config == whole.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, whole.params)
    stored = _files.SafeTensors([tmp_path / "m" / "model.safetensors"], types=None)
    signs = stored.read("layers.0.mlp.up.binary.u_signs")
    rank = dict(whole.config.ranks)["mlp.up"]
    assert signs.shape == (rank // 8, 48)
    bits = np.unpackbits(signs, axis=0, bitorder="little")
    _, u = whole.params["layers"][0]["mlp"]["up"]["binary"].signs()
    np.testing.assert_array_equal(1 - 2 * bits.astype(int), np.asarray(u))
    assert loaded.for_decoding() is loaded
    narrow = models.load(tmp_path / "m", dtype="bfloat16")
    assert narrow.params["embedding"]["table"].dtype == "bfloat16"
    assert np.isfinite(jax.jit(narrow.forward)(narrow.params, TOKENS[:1]).logits).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("layers.1.mlp.up.binary.scale_in"),
            "missing tensors: layers.1.mlp.up.binary.scale_in",
        ),
        (
            lambda t: t.update({"layers.0.mlp.up.binary.v_signs": np.zeros((4, 3), np.uint8)}),
            r"wrong shapes: layers.0.mlp.up.binary.v_signs is \(4, 3\)",
        ),
        (
            lambda t: t.update(
                {"layers.0.mlp.up.binary.v_signs": t["layers.0.mlp.up.binary.v_signs"].astype(np.int8)}
            ),
            "v_signs holds int8, should hold uint8",
        ),
        (
            lambda t: t.update({"layers.0.mlp.up.binary.scale_in": np.full(32, np.nan, np.float32)}),
            "layers.0.mlp.up.binary has scales that are not finite",
        ),
    ],
)
def test_damaged_weights_are_named(whole, tmp_path, change, message):
    models.save(tmp_path / "m", whole.params, whole.config, kind="binary")
    path = tmp_path / "m" / "model.safetensors"
    stored = _files.SafeTensors([path], types=None)
    tensors = {name: stored.read(name) for name in stored.shapes}
    change(tensors)
    _files.write_safetensors(path, tensors)
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path / "m")


def test_damaged_configurations_are_named(whole, tmp_path):
    models.save(tmp_path / "m", whole.params, whole.config, kind="binary")
    path = tmp_path / "m" / "effml.json"
    meta = json.loads(path.read_text())
    for change, message in (
        ({"blocks_done": 3}, "blocks_done=3 must be 0 to 2"),
        ({"ranks": {"mlp.up": 99}}, "rank of mlp.up=99 must be at most 32"),
        ({"ranks": {}}, "must name linears"),
        ({"bits": -1}, "bits=-1 must be finite and above 0"),
        ({"bits": "one"}, "config field bits='one'"),
        ({"rank": 1}, "config field='rank' is not known"),
    ):
        path.write_text(json.dumps({**meta, "config": {**meta["config"], **change}}))
        with pytest.raises(ValueError, match=message):
            models.load(tmp_path / "m")
    with pytest.raises(TypeError, match="needs a BinaryConfig"):
        models.save(tmp_path / "n", whole.params, small.CONFIG, kind="binary")


KILLED = """
import os, signal, sys
from tests.quantize import small, test_nanoquant_model as test

def progress(stage, done, total, detail):
    if (stage, done) == ("linears", 10):  # in the middle of the second block
        os.kill(os.getpid(), signal.SIGKILL)

with small.quickly_compiled():  # as this file is, so that weights are the same to the last bit
    test.run(work=sys.argv[1], progress=progress)
"""


def test_work_that_was_killed_goes_on_and_ends_the_same(whole, tmp_path):
    work = tmp_path / "work"
    root = Path(__file__).parents[2]
    died = subprocess.run(
        [sys.executable, "-c", KILLED, str(work)], cwd=root, env={**os.environ}, check=False
    )
    assert died.returncode == -signal.SIGKILL
    names = {path.name for path in work.iterdir()}
    assert {"layer-0000.safetensors", "statistics.safetensors"} <= names
    assert "layer-0001.safetensors" not in names
    seen = []

    def stop_in_the_scales(stage, done, total, detail):
        seen.append((stage, done))
        if (stage, done) == ("scales", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(work=work, progress=stop_in_the_scales)
    assert ("linears", 7) not in seen, "the first block is not done again"
    assert ("linears", 8) in seen, "the second one is"
    seen.clear()
    again = run(work=work, progress=lambda stage, done, *_: seen.append((stage, done)))
    assert [one for one in seen if one[0] in ("scales", "linears")] == [("scales", 2)]
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
    assert again.scale_losses == whole.scale_losses
    timeless = lambda rows: [
        {name: value for name, value in row.items() if name != "seconds"} for row in rows
    ]
    assert timeless(again.rows) == timeless(whole.rows)
    with pytest.raises(ValueError, match="another plan"):
        run(nanoquant.NanoQuantConfig(bits=4, multiple=8), work=work)


def test_damaged_and_other_second_moments_are_not_believed(whole, tmp_path):
    """What is damaged is measured again; what the caller gave is part of what the run is."""
    work, moments = tmp_path / "work", tmp_path / "work" / "statistics.safetensors"
    run(work=work, blocks=1)
    whole_file = moments.read_bytes()

    def tensors():
        stored = _files.SafeTensors([moments])
        return {name: stored.read(name) for name in stored.shapes}

    right = tensors()
    for damaged in (b"", whole_file[:-40], whole_file[:-1] + bytes([whole_file[-1] ^ 4])):
        moments.write_bytes(damaged)
        run(work=work, blocks=1)
        jax.tree.map(np.testing.assert_array_equal, tensors(), right)
    given = nanoquant.collect_diag_stats(small.CONFIG, small.params(), [one[None] for one in TOKENS])
    again = run(work=tmp_path / "given", stats=given, blocks=1)
    jax.tree.map(np.testing.assert_array_equal, again.params["layers"][0], run(blocks=1).params["layers"][0])
    other = {path: (2 * pair[0], pair[1]) for path, pair in given.items()}
    with pytest.raises(ValueError, match="another second moments"):
        run(work=tmp_path / "given", stats=other, blocks=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "bits=0 must be finite and above 0"),
        ({"init": "svd"}, "init='svd' is not known"),
        ({"gamma": 1.5}, "gamma=1.5 must be from 0 to 1"),
        ({"dense_epochs": -1}, "dense_epochs=-1 must be above 0"),
        ({"dense_rate": float("inf")}, "dense_rate=inf must be finite"),
        ({"keep_dtype": "int8"}, "keep_dtype='int8'"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        nanoquant.NanoQuantConfig(**options)


@pytest.mark.parametrize("options", [{"bits": "1"}, {"bits": True}, {"gamma": None}, {"dense_rate": "x"}])
def test_settings_that_are_no_numbers_are_named(options):
    with pytest.raises(TypeError, match=f"{next(iter(options))}=.* must be a number"):
        nanoquant.NanoQuantConfig(**options)


def test_no_rate_is_exceeded_in_silence():
    with pytest.raises(ValueError, match=r"attention\.query: bpw=1 can't be reached"):
        nanoquant.plan(small.CONFIG, nanoquant.NanoQuantConfig(bits=1))
    over = nanoquant.plan(small.CONFIG, nanoquant.NanoQuantConfig(bits=1, allow_over=True))
    assert over.realised_bits > 1.02


def test_it_refuses_before_any_work(tmp_path):
    def go(params=None, tokens=TOKENS, **options):
        nanoquant.quantize_lm(
            small.params() if params is None else params,
            small.CONFIG,
            tokens,
            SETTINGS,
            **{"key": jax.random.key(0), "work": tmp_path / "work", **options},
        )

    with pytest.raises(ValueError, match=r"calibration tokens of shape \(0, 13\)"):
        go(tokens=TOKENS[:0])
    with pytest.raises(ValueError, match="blocks=3 must be at most 2"):
        go(blocks=3)
    broken = jax.tree.map(lambda leaf: leaf.at[..., 0].set(jnp.nan), small.params())
    with pytest.raises(ValueError, match="not finite; nothing was quantised"):
        go(broken)
    with pytest.raises(ValueError, match="projections apart"):
        go(transformer.join_projections(small.params()))
    incomplete = {name: part for name, part in small.params().items() if name != "final_norm"}
    with pytest.raises(ValueError, match="missing tensors: final_norm"):
        go(incomplete)
    for wrong in ("x", {}):
        with pytest.raises(TypeError, match=r"params must be the parameters of a transformer"):
            go(wrong)
    with pytest.raises(TypeError, match=r"must be one jax.random.key"):
        go(key=0)
    for wrong, message in (({}, "stats lack 'layers.0"), ({"all": 1}, "stats lack 'layers.0")):
        with pytest.raises(ValueError, match=message):
            go(stats=wrong)
    with pytest.raises(TypeError, match="settings must be a NanoQuantConfig"):
        run({"bits": 1})
    assert not (tmp_path / "work").exists()


def test_plans_that_were_edited_are_refused():
    plan = nanoquant.plan(small.CONFIG, SETTINGS)
    for index in (0, -1):
        rows = list(plan.rows)
        rows[index] = dataclasses.replace(rows[index], rank=4)
        with pytest.raises(ValueError, match=r"rank=4.* where this model has .*make plans with"):
            run(dataclasses.replace(plan, rows=tuple(rows)))
    for change in ({"rows": plan.rows[:-1]}, {"kept_bytes": 1}, {"method": "other"}):
        with pytest.raises(ValueError, match="another model, or it was edited"):
            run(dataclasses.replace(plan, **change))
    content = plan.to_dict()
    with pytest.raises(TypeError, match="plan rows must be a list"):
        nanoquant.NanoQuantPlan.from_dict({**content, "rows": 5})
    with pytest.raises(ValueError, match="plan settings field='bit' is not known"):
        nanoquant.NanoQuantPlan.from_dict({**content, "settings": {**content["settings"], "bit": 1}})


def test_scale_tuning_names_what_is_no_teacher_rate_or_optimizer(whole):
    def tune(teacher=None, **options):
        teacher = small.params() if teacher is None else teacher
        options = {"key": jax.random.key(0), "epochs": 1, **options}
        return nanoquant.tune_scales_kl(whole.params, whole.config, teacher, TOKENS, **options)

    with pytest.raises(TypeError, match="teacher_params must be the parameters of a transformer"):
        tune({})
    with pytest.raises(ValueError, match="teacher_params: missing tensors: final_norm"):
        tune({name: part for name, part in small.params().items() if name != "final_norm"})
    with pytest.raises(ValueError, match=r"rate=-1\.0 must be above 0"):
        tune(rate=-1)
    with pytest.raises(TypeError, match="optimizer='adam' must be a GradientTransformation"):
        tune(optimizer="adam")


def test_it_works_where_floats_have_64_bits():
    with jax.enable_x64(True):
        made = run()
    assert np.isfinite(made.scale_losses).all()
    assert all(one.scale_in.dtype == jnp.bfloat16 for one in binaries(made.params))


def test_a_file_means_what_the_documented_format_says(whole):
    """The reader of docs/packed_format.md, which needs nothing but NumPy."""
    import re

    page = (Path(__file__).parents[2] / "docs/packed_format.md").read_text()
    reader: dict = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, reader)
    tensors = nanoquant.stored_tensors(whole.params, whole.config)
    for name in ("layers.0.mlp.down", "layers.1.attention.key"):
        parts = [tensors[f"{name}.binary.{part}"] for part in ("v_signs", "u_signs", "scale_in", "scale_out")]
        found = reader["binary_kernel"](*parts[:2], *(one.astype(np.float32) for one in parts[2:]))
        block, part = name.split(".")[2:]
        layer = whole.params["layers"][int(name.split(".")[1])]
        np.testing.assert_allclose(found, layer[block][part]["binary"].dense(), rtol=1e-5, atol=1e-6)
