"""The configuration checks itself and survives JSON."""

from __future__ import annotations

import json

import pytest

from effml.nn.transformer import (
    RopeScaling,
    TransformerConfig,
)

SMALL = TransformerConfig(vocab_size=31, width=16, num_layers=2, num_heads=4, mlp_width=24, max_length=12)


def changed(**fields):
    return TransformerConfig(**{**SMALL.to_dict(), **fields})


VARIANTS = {
    "gpt2": changed(
        norm="layer",
        positions="learned",
        mlp="gelu",
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
    ),
    "qwen3": changed(qk_norm=True, num_kv_heads=2, head_size=6),
    "untied_head_with_bias": changed(tied_head=False, head_bias=True),
    "tied_head_with_bias": changed(head_bias=True),
    "llama3": changed(rope_scaling=RopeScaling("llama3", 4.0, 1.0, 3.0, 24)),
}


def test_config_goes_through_json_and_is_hashable():
    for config in VARIANTS.values():
        again = TransformerConfig.from_dict(json.loads(json.dumps(config.to_dict())))
        assert again == config
        assert hash(again) == hash(config)
    whole = TransformerConfig.from_dict({**SMALL.to_dict(), "rope_base": 500000})
    assert isinstance(whole.rope_base, float)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"norm": "rmsnorm"}, "norm='rmsnorm'"),
        ({"mlp": "swiglue"}, "did you mean 'swiglu'"),
        ({"positions": "alibi"}, "positions='alibi'"),
        ({"rope_layout": "half"}, "rope_layout"),
        ({"compute_dtype": "float16"}, "compute_dtype"),
        ({"width": 0}, "width=0"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"num_kv_heads": 3}, "must divide num_heads=4"),
        ({"num_heads": 3}, "must divide width=16"),
        ({"head_size": 5}, "even"),
        ({"norm_epsilon": 0.0}, "norm_epsilon"),
        ({"attention_scale": -1.0}, "attention_scale"),
        ({"positions": "learned", "rope_scaling": RopeScaling("linear", 2.0)}, "rope_scaling needs"),
    ],
)
def test_bad_configurations_are_named(fields, words):
    with pytest.raises(ValueError, match=words):
        changed(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "yarn", "factor": 2.0}, "yarn"),
        ({"kind": "linear", "factor": 0.0}, "factor"),
        ({"kind": "llama3", "factor": 2.0, "high_frequency_factor": 1.0}, "high_frequency_factor"),
    ],
)
def test_bad_rope_scaling_is_named(fields, words):
    with pytest.raises(ValueError, match=words):
        RopeScaling(**fields)


def test_config_dict_with_unknown_or_missing_fields_is_refused():
    with pytest.raises(ValueError, match="did you mean 'width'"):
        TransformerConfig.from_dict({**SMALL.to_dict(), "widht": 3})
    with pytest.raises(ValueError, match="lacks vocab_size"):
        TransformerConfig.from_dict({"width": 4})
    with pytest.raises(ValueError, match="rope_scaling lacks factor"):
        TransformerConfig.from_dict({**SMALL.to_dict(), "rope_scaling": {"kind": "linear"}})


@pytest.mark.parametrize(
    "fields", [{"width": "16"}, {"rope_scaling": "x"}, {"num_layers": None}, {"norm_epsilon": [1]}]
)
def test_from_dict_names_the_field_whose_value_has_a_wrong_type(fields):
    plain = TransformerConfig(vocab_size=8, width=16, num_layers=1, num_heads=2, mlp_width=8).to_dict()
    with pytest.raises(ValueError, match=next(iter(fields))):
        TransformerConfig.from_dict({**plain, **fields})
