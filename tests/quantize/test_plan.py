"""Plans: what they promise, and what they refuse before any work."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from effml import quantize, trees
from effml.nn import transformer
from effml.quantize import _plan
from tests.quantize import small

TOKENS = small.tokens()


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("W4A4", (4, 4, 16)),
        ("w3a3", (3, 3, 16)),
        ("W4", (4, 16, 16)),
        ("W4A4KV4", (4, 4, 4)),
        ("W16A8", (16, 8, 16)),
    ],
)
def test_bits_are_read_in_the_field_s_short_form(text, bits):
    assert quantize.parse_bits(text) == bits


@pytest.mark.parametrize("text", ["4", "W9A4", "W4A1", "A4", "W4B4", "", "W4A4KV"])
def test_other_bits_are_refused(text):
    with pytest.raises(ValueError, match=f"bits={text!r}"):
        quantize.parse_bits(text)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "rtn", "bits": "W4A4"},
        {"method": "rtn", "bits": "W3", "group_size": 16, "keep_dtype": "bfloat16"},
        {"method": "rtn", "bits": "W16A8"},
        {"method": "respinquant", "rotation": "layerwise", "steps": 0, "rank": 4, "rounding": "rtn"},
        {"method": "respinquant", "rotation": "layerwise", "steps": 0, "rank": None, "rounding": "rtn"},
        {"method": "respinquant", "rotation": "hadamard", "rounding": "rtn"},
    ],
)
def test_the_bytes_it_promises_are_the_bytes_it_makes(options):
    plan = quantize.plan(small.CONFIG, **options)
    tokens = small.tokens() if plan.needs_calibration else None
    params, _, rows = quantize.apply(plan, small.params(), small.CONFIG, tokens, key=jax.random.key(0))
    assert trees.byte_count(params) == plan.packed_bytes + plan.kept_bytes
    if plan.weight_bits < 16:
        assert [row["bytes"] for row in rows] == [row.bytes for row in plan.rows]


def test_norms_of_a_narrow_model_are_float32_as_promised():
    narrow = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), small.params())
    for bits in ("W4", "W16A8"):
        plan = quantize.plan(small.CONFIG, method="rtn", bits=bits, keep_dtype="bfloat16")
        params, _, _ = quantize.apply(plan, narrow, small.CONFIG, key=jax.random.key(0))
        assert params["layers"][0]["mlp_norm"]["scale"].dtype == "float32"
        assert trees.byte_count(params) == plan.packed_bytes + plan.kept_bytes


def test_it_survives_json():
    plan = quantize.plan(small.CONFIG, method="respinquant", bits="W3A3KV4", rank=None, clip=None)
    assert quantize.QuantizationPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    with pytest.raises(ValueError, match="plan field='bits' is not known"):
        quantize.QuantizationPlan.from_dict({"bits": 4})


def test_its_table_adds_up():
    plan = quantize.plan(small.CONFIG, method="rtn")
    *kernels, kept, whole = plan.summary()
    assert len(kernels) == 7
    assert whole["MB"] == pytest.approx(sum(row["MB"] for row in [*kernels, kept]))


def test_only_some_plans_need_text():
    def needs(**options):
        return quantize.plan(small.CONFIG, **options).needs_calibration

    assert not needs(method="rtn")
    assert needs(method="gptq")
    assert needs(method="respinquant", rounding="rtn")
    assert not needs(method="respinquant", rounding="rtn", rotation="hadamard")
    assert not needs(method="gptq", bits="W16A4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gptx"}, "method='gptx' is not known; did you mean 'gptq'"),
        ({"method": "rtn", "group_size": 32}, "mlp.down: group_size=32 does not divide 48 inputs"),
        ({"method": "rtn", "rotation": "global"}, "rotation='global' is for method='respinquant'"),
        ({"method": "gptq", "rounding": "rtn"}, "rounding='rtn' is for method='respinquant'"),
        ({"method": "respinquant", "rank": 3}, "rank=3 must be even"),
        ({"method": "respinquant", "rotation": "spin"}, "rotation='spin' is not known"),
        ({"method": "rtn", "keep_dtype": "float16"}, "keep_dtype='float16' is not known"),
        ({"method": "rtn", "clip": "max"}, "clip='max' is not known"),
        ({"method": "respinquant", "steps": -1}, "steps=-1 must be 0 or more"),
        ({"method": "respinquant", "max_step": float("inf")}, "max_step=inf must be above 0 and finite"),
        ({"method": "gptq", "bits": "W16A16"}, "bits='W16A16' rounds nothing"),
        ({"method": "respinquant", "bits": "w16"}, "bits='w16' rounds nothing"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        quantize.plan(small.CONFIG, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_bits": 77}, "77 bits for weights must be 2 to 8"),
        ({"weight_bits": 3}, "where this model has"),
        ({"method": "nope"}, "method='nope' is not known"),
        ({"method": "respinquant", "rotation": "spin"}, "rotation='spin' is not known"),
        ({"rounding": "gptq"}, "rounding='gptq' should be 'rtn'"),
        ({"rotation": "hadamard"}, "rotation='hadamard' should be 'none'"),
        ({"group_size": 8}, "where this model has"),
        ({"steps": 7}, "steps=7 should be 0"),
        ({"clip": "max"}, "clip='max' is not known"),
        ({"keep_dtype": "bfloat16"}, "kept_bytes=.* should be"),
        ({"rows": lambda rows: rows[:7] * 2}, "where this model has"),
        ({"rows": lambda rows: rows[:6] + rows[7:13]}, "where this model has"),
        ({"rows": lambda rows: rows[:-1]}, "the plan has 13 kernels, the model 14"),
        ({"rows": lambda rows: [{**row, "bits": 2} for row in rows]}, "where this model has"),
        ({"rows": lambda rows: [{**rows[0], "name": "mlp"}]}, "the model has none"),
        ({"rows": lambda rows: [{"a": 1}]}, "plan row field='a' is not known"),
        ({"rows": "abc"}, "plan field rows must be a list"),
    ],
)
def test_an_edited_plan_is_not_believed(change, message):
    content = json.loads(json.dumps(quantize.plan(small.CONFIG, method="rtn", bits="W4").to_dict()))
    for name, new in change.items():
        content[name] = new(content[name]) if callable(new) else new

    def run():
        edited = quantize.QuantizationPlan.from_dict(content)
        quantize.apply(edited, small.params(), small.CONFIG, key=jax.random.key(0))

    with pytest.raises(ValueError, match=message):
        run()


@pytest.mark.parametrize(
    "options", [{"rank": None}, {"rotation": "global"}, {"rotation": "none"}, {"bits": "W16A4"}]
)
def test_a_plan_of_every_kind_is_the_one_that_its_fields_make(options):
    made = quantize.plan(small.CONFIG, method="respinquant", rounding="rtn", **options)
    _plan.check_plan(
        quantize.QuantizationPlan.from_dict(json.loads(json.dumps(made.to_dict()))), small.CONFIG
    )


def test_what_is_no_plan_and_no_model_is_named():
    made, key = quantize.plan(small.CONFIG, method="rtn"), jax.random.key(0)
    with pytest.raises(TypeError, match="plan must be a QuantizationPlan, this is a dict"):
        quantize.apply(made.to_dict(), small.params(), small.CONFIG, key=key)
    with pytest.raises(TypeError, match="plan must be a dict, this is a list"):
        quantize.QuantizationPlan.from_dict([])
    for nothing in (None, {}):
        with pytest.raises(TypeError, match="model_params must be the parameters of a transformer"):
            quantize.apply(made, nothing, small.CONFIG, key=key)
    with pytest.raises(TypeError, match=r"key=0 must be a jax.random.key"):
        quantize.apply(made, small.params(), small.CONFIG, key=0)
    with pytest.raises(ValueError, match="windows of different lengths"):
        quantize.apply(made, small.params(), small.CONFIG, [[1, 2, 3], [4, 5]], key=key)
    for name in ("max_step", "percdamp"):
        with pytest.raises(TypeError, match=f"{name}='1' must be a number"):
            quantize.plan(small.CONFIG, method="respinquant", **{name: "1"})


def test_other_types_are_named():
    with pytest.raises(TypeError, match="bits=4 must be text, such as 'W4A4'"):
        quantize.plan(small.CONFIG, method="rtn", bits=4)
    with pytest.raises(TypeError, match="config must be a TransformerConfig, this is a NoneType"):
        quantize.plan(None, method="rtn")
    plan = quantize.plan(small.CONFIG, method="rtn")
    with pytest.raises(TypeError, match=r"quantize.apply works on the host: call it outside jax\.jit"):
        jax.jit(lambda p: quantize.apply(plan, p, small.CONFIG, key=jax.random.key(0))[0])(small.params())
    with pytest.raises(TypeError, match="rtn works on the host"):
        jax.jit(lambda kernel: quantize.rtn(kernel, 4).kernel)(np.ones((4, 2), np.float32))


def test_nanoquant_is_told_where_its_plans_are():
    from effml.quantize import nanoquant

    with pytest.raises(
        ValueError, match=r"call effml\.quantize\.nanoquant\.plan\(config, NanoQuantConfig\(bits=1.0"
    ):
        quantize.plan(small.CONFIG, method="nanoquant")
    plan = nanoquant.plan(small.CONFIG, nanoquant.NanoQuantConfig(bits=3, multiple=8))
    with pytest.raises(TypeError, match=r"nanoquant\.quantize_lm carries it out"):
        quantize.apply(plan, small.params(), small.CONFIG, key=jax.random.key(0))


def test_models_that_cannot_be_rotated_are_refused():
    config = dataclasses.replace(small.CONFIG, norm="layer")
    with pytest.raises(ValueError, match="norm='layer'"):
        quantize.plan(config, method="respinquant")
    quantize.plan(config, method="gptq")


def test_apply_refuses_before_any_work():
    plan = quantize.plan(small.CONFIG, method="gptq", bits="W4")

    def run(params, config=small.CONFIG, tokens=TOKENS):
        quantize.apply(plan, params, config, tokens, key=jax.random.key(0))

    with pytest.raises(ValueError, match="needs calibration tokens"):
        run(small.params(), tokens=None)
    with pytest.raises(ValueError, match=r"ids outside 0 ... 63"):
        run(small.params(), tokens=small.tokens() + 64)
    learned = quantize.plan(small.CONFIG, method="respinquant", rank=4, batch=3)
    with pytest.raises(ValueError, match="at least two batches of 3"):
        quantize.apply(learned, small.params(), small.CONFIG, TOKENS, key=jax.random.key(0))
    broken = jax.tree.map(lambda leaf: leaf, small.params())
    broken["layers"][1]["mlp"]["up"]["kernel"] = (
        broken["layers"][1]["mlp"]["up"]["kernel"].at[3, 4].set(np.nan)
    )
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up\.kernel holds values that are not finite"):
        run(broken)
    with pytest.raises(ValueError, match=r"the model has none: plan for this model, projections apart"):
        run(transformer.join_projections(small.params()))
    wide = dataclasses.replace(small.CONFIG, mlp_width=64)
    with pytest.raises(ValueError, match=r"kernel of 32 x 48, the model has \(32, 64\)"):
        run(transformer.init_params(jax.random.key(0), wide), wide)
