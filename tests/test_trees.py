from __future__ import annotations

import flax.linen as linen
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from effml import trees
from effml.trees import MuonDimensionNumbers as Numbers


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


TRANSFORMER = {
    "embedding": {"table": shape(10, 4)},
    "positions": {"table": shape(7, 4)},
    "layers": [
        {
            "attention_norm": {"scale": shape(4)},
            "attention": {
                "query": {"kernel": shape(4, 6), "bias": shape(6)},
                "output": {"kernel": shape(6, 4)},
                "query_norm": {"scale": shape(3)},
            },
            "mlp": {"gate": {"kernel": shape(4, 8)}},
        }
    ],
    "final_norm": {"scale": shape(4)},
    "head": {"kernel": shape(4, 10), "bias": shape(10)},
}


def named(tree, is_leaf=None):
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return {trees.path_name(path): leaf for path, leaf in leaves}


def axes(tree, **options):
    numbers = trees.dimension_numbers(tree, **options)
    return {
        name: None if n is None else (n.reduction_axis, n.output_axis)
        for name, n in named(numbers, lambda x: x is None or isinstance(x, Numbers)).items()
    }


def test_each_leaf_of_the_transformer_gets_its_role_and_the_attention_output_is_no_head():
    assert named(trees.parameter_roles(TRANSFORMER)) == {
        "embedding.table": "embedding",
        "positions.table": "embedding",
        "layers.0.attention_norm.scale": "vector",
        "layers.0.attention.query.kernel": "matrix",
        "layers.0.attention.query.bias": "vector",
        "layers.0.attention.output.kernel": "matrix",
        "layers.0.attention.query_norm.scale": "vector",
        "layers.0.mlp.gate.kernel": "matrix",
        "final_norm.scale": "vector",
        "head.kernel": "head",
        "head.bias": "vector",
    }


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("lm_head.weight", "head"),
        ("model.lm_head.kernel", "head"),
        ("logits.kernel", "head"),
        ("LM_Head.kernel", "head"),
        ("multi_head_attention.kernel", "matrix"),
        ("attention.head_mix.kernel", "matrix"),
        ("attention.output.kernel", "matrix"),
        ("overhead.kernel", "matrix"),
        ("model.embed_tokens.weight", "embedding"),
        ("tok_embeddings.weight", "embedding"),
        ("Embed_0.embedding", "embedding"),
        ("unembed.weight", "matrix"),
        ("patch_embed.kernel", "matrix"),
        ("layers.input_layernorm.weight", "vector"),
        ("layers.ln_1.weight", "vector"),
        ("layers.post_attention_norm.weight", "vector"),
        ("layers.attention.query.bias", "vector"),
        ("abnormal.kernel", "matrix"),
    ],
)
def test_names_decide_the_role_of_a_leaf_with_two_axes(path, role):
    tree = shape(4, 4)
    for key in reversed(path.split(".")):
        tree = {key: tree}
    assert jax.tree.leaves(trees.parameter_roles(tree)) == [role]


def test_patterns_replace_the_names_that_are_searched():
    tree = {"decoder": {"output": {"kernel": shape(4, 9)}}, "mix": {"output": {"kernel": shape(4, 4)}}}
    roles = trees.parameter_roles(tree, head=("decoder.output",))
    assert named(roles) == {"decoder.output.kernel": "head", "mix.output.kernel": "matrix"}
    assert set(named(trees.parameter_roles(tree, head=("out*",))).values()) == {"head"}
    lookup = {"wte": {"table": shape(9, 4)}}
    assert jax.tree.leaves(trees.parameter_roles(lookup, embedding=("wte",))) == ["embedding"]


def test_integer_and_boolean_leaves_are_frozen():
    tree = {
        "codes": shape(4, 4, dtype=jnp.int8),
        "on": shape(4, dtype=jnp.bool_),
        "w": shape(4, 4, dtype=jnp.bfloat16),
    }
    assert named(trees.parameter_roles(tree)) == {"codes": "frozen", "on": "frozen", "w": "matrix"}


def test_a_tied_embedding_becomes_the_head_with_the_axes_of_a_transposed_table():
    tied = {key: value for key, value in TRANSFORMER.items() if key != "head"}
    roles = trees.parameter_roles(tied, tied_head=True)
    assert named(roles)["embedding.table"] == "head"
    assert named(roles)["positions.table"] == "embedding"
    assert axes(tied, roles=roles)["embedding.table"] == ((1,), (0,))
    assert axes(tied)["embedding.table"] == ((0,), (1,))
    with pytest.raises(ValueError, match=r"have a head of their own: head\.kernel"):
        trees.parameter_roles(TRANSFORMER, tied_head=True)
    with pytest.raises(ValueError, match="exactly one token embedding, found 2"):
        trees.parameter_roles({"a": {"embed": shape(4, 4)}, "b": {"embed": shape(4, 4)}}, tied_head=True)


def test_axes_follow_names_and_shapes():
    tree = {
        "dense": {"kernel": shape(4, 8), "bias": shape(8)},
        "layers": {"mlp": {"up": {"kernel": shape(3, 4, 8)}}, "norm": {"scale": shape(3, 4)}},
        "conv": {"kernel": shape(3, 3, 4, 8)},
        "conv1d": {"kernel": shape(3, 4, 8)},
        "attention": {
            "query": {"kernel": shape(4, 2, 3), "bias": shape(2, 3)},
            "out": {"kernel": shape(2, 3, 4)},
        },
        "experts": {"up": {"kernel": shape(5, 4, 8)}},
    }
    assert axes(tree) == {
        "dense.kernel": ((0,), (1,)),
        "dense.bias": None,
        "layers.mlp.up.kernel": ((1,), (2,)),
        "layers.norm.scale": None,
        "conv.kernel": ((0, 1, 2), (3,)),
        "conv1d.kernel": ((0, 1), (2,)),
        "attention.query.kernel": ((0,), (1, 2)),
        "attention.query.bias": None,
        "attention.out.kernel": ((0, 1), (2,)),
        "experts.up.kernel": ((1,), (2,)),
    }


def test_a_scanned_stack_keeps_its_layer_axis_as_a_batch_axis_for_every_kind_of_leaf():
    tree = {
        "layers": {"query": {"kernel": shape(3, 4, 2, 3)}, "out": {"kernel": shape(3, 2, 3, 4)}},
        "blocks": [{"query": {"kernel": shape(4, 2, 3)}}],
    }
    assert axes(tree) == {
        "blocks.0.query.kernel": ((0,), (1, 2)),
        "layers.query.kernel": ((1,), (2, 3)),
        "layers.out.kernel": ((1, 2), (3,)),
    }


def test_torch_layout_swaps_kernels_but_not_the_embedding():
    tree = {
        "embed_tokens": {"weight": shape(9, 4)},
        "fc": {"weight": shape(8, 4)},
        "conv": {"weight": shape(8, 4, 3, 3)},
        "lm_head": {"weight": shape(9, 4)},
    }
    assert axes(tree, layout="torch") == {
        "embed_tokens.weight": ((0,), (1,)),
        "fc.weight": ((1,), (0,)),
        "conv.weight": ((1, 2, 3), (0,)),
        "lm_head.weight": ((1,), (0,)),
    }


def test_overrides_win_and_one_that_matches_nothing_is_an_error():
    tree = {"a": {"kernel": shape(4, 8)}, "b": {"kernel": shape(4, 8)}}
    got = axes(tree, overrides={"a.*": Numbers((1,), (0,))})
    assert got == {"a.kernel": ((1,), (0,)), "b.kernel": ((0,), (1,))}
    with pytest.raises(ValueError, match=r"overrides='c\.\*' matches none of the leaves: a.kernel"):
        trees.dimension_numbers(tree, overrides={"c.*": Numbers()})
    with pytest.raises(ValueError, match="layout='touch' is not known; did you mean 'torch'"):
        trees.dimension_numbers(tree, layout="touch")


def test_linen_dict_nnx_state_and_plain_dict_have_the_same_names_and_roles():
    class Linen(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            hidden = linen.Embed(9, 4, name="embed")(tokens)
            return linen.Dense(9, name="head")(linen.Dense(4, name="mix")(hidden))

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(9, 4, rngs=rngs)
            self.mix = nnx.Linear(4, 4, rngs=rngs)
            self.head = nnx.Linear(4, 9, rngs=rngs)

    variables = Linen().init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    state = nnx.state(Nnx(nnx.Rngs(0)), nnx.Param)
    plain = nnx.to_pure_dict(state)
    expected = {
        "embed.embedding": "embedding",
        "mix.kernel": "matrix",
        "mix.bias": "vector",
        "head.kernel": "head",
        "head.bias": "vector",
    }
    for tree in (variables, state, plain):
        assert named(trees.parameter_roles(tree)) == expected
        assert len(trees.rule_table(tree)) == 5


def test_dimension_numbers_are_accepted_by_optax_muon_and_leave_the_rest_to_adam():
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), TRANSFORMER)
    numbers = trees.dimension_numbers(params, include=("matrix",))
    assert (
        sum(
            n is not None
            for n in jax.tree.leaves(numbers, is_leaf=lambda x: x is None or isinstance(x, Numbers))
        )
        == 3
    )
    transform = optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers)
    state = transform.init(params)
    assert len(jax.tree.leaves(state.inner_states["muon"].inner_state[0].mu)) == 3


def test_rule_table_has_a_row_for_every_leaf_and_prints():
    rows = trees.rule_table(TRANSFORMER, rules={"head": "momentum"})
    assert len(rows) == len(jax.tree.leaves(TRANSFORMER))
    by_path = {row["path"]: row for row in rows}
    assert by_path["head.kernel"] == {
        "path": "head.kernel", "shape": (4, 10), "role": "head", "axes": "in 0, out 1", "rule": "momentum",
    }  # fmt: skip
    assert by_path["head.bias"]["axes"] == ""
    assert trees.rule_table_view(rows).row_count == len(rows)
    assert trees.rule_table_view([]).row_count == 0


def test_byte_count_adds_arrays_shapes_and_keys_and_skips_the_rest():
    tree = {
        "a": jnp.zeros((2, 3)),
        "b": shape(5, dtype=jnp.bfloat16),
        "c": 3,
        "d": None,
        "key": jax.random.key(0),
    }
    assert trees.byte_count(tree) == 24 + 10 + 8


def test_a_leaf_that_is_no_array_is_named():
    with pytest.raises(TypeError, match=r"parameter 'head\.gain' is a float, not an array"):
        trees.parameter_roles({"head": {"gain": 1.0}})
