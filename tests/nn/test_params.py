"""Parameters: their count, their spread, and layers stacked or not."""

from __future__ import annotations

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.nn.transformer import (
    TransformerConfig,
    forward,
    init_params,
    join_projections,
    param_count,
    stack_layers,
    unstack_layers,
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
}


def test_parameter_counts_are_the_closed_form():
    d, v, m = 16, 31, 24
    assert param_count(SMALL) == v * d + 2 * (4 * d * d + 3 * d * m + 2 * d) + d
    gpt2 = VARIANTS["gpt2"]
    layer = 4 * (d * d + d) + 2 * d * m + m + d + 4 * d
    assert param_count(gpt2) == v * d + 12 * d + 2 * layer + 2 * d
    qwen3 = VARIANTS["qwen3"]
    layer = 2 * d * 24 + 2 * d * 12 + 2 * 6 + 3 * d * m + 2 * d
    assert param_count(qwen3) == v * d + 2 * layer + d
    untied = VARIANTS["untied_head_with_bias"]
    assert param_count(untied) == param_count(SMALL) + d * v + v


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "tied_head_with_bias"])
def test_scanned_parameters_are_the_stacked_unrolled_ones(name):
    config = VARIANTS[name]
    unrolled = init_params(jax.random.key(3), config)
    scanned = init_params(jax.random.key(3), config, scanned=True)
    chex.assert_trees_all_close(stack_layers(unrolled), scanned, rtol=1e-6)


def test_initial_parameters_have_the_stated_spread_and_depend_on_the_key():
    config = TransformerConfig(200, 128, 2, 4, 256, initializer_std=0.05, tied_head=False, norm="layer")
    params = init_params(jax.random.key(0), config)
    layer = params["layers"][1]
    for kernel, std in (
        (params["embedding"]["table"], 0.05),
        (params["head"]["kernel"], 0.05),
        (layer["attention"]["query"]["kernel"], 0.05),
        (layer["attention"]["output"]["kernel"], 0.025),
        (layer["mlp"]["down"]["kernel"], 0.025),
    ):
        assert float(kernel.std()) == pytest.approx(std, rel=5 / math.sqrt(2 * kernel.size))
    assert float(layer["mlp_norm"]["scale"].min()) == 1
    assert float(jnp.abs(layer["mlp_norm"]["bias"]).max()) == 0
    other = init_params(jax.random.key(1), config)
    assert float(jnp.abs(other["embedding"]["table"] - params["embedding"]["table"]).max()) > 0.01
    kernels = [np.asarray(x).ravel()[:64] for x in jax.tree.leaves(params) if x.ndim == 2]
    assert len({kernel.tobytes() for kernel in kernels}) == len(kernels)


def test_stacking_and_unstacking_are_inverse_and_refuse_unlike_layers():
    params = init_params(jax.random.key(0), SMALL)
    stacked = stack_layers(params)
    assert stacked["layers"]["mlp"]["up"]["kernel"].shape == (2, 16, 24)
    chex.assert_trees_all_equal(unstack_layers(stacked), params)
    chex.assert_trees_all_equal(stack_layers(stacked), stacked)
    params["layers"][1]["mlp"]["up"]["kernel"] = jnp.zeros((16, 25))
    with pytest.raises(ValueError, match="layer 1 differs"):
        stack_layers(params)


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("name", ["qwen3", "gpt2", "biased"])
def test_joined_projections_compute_the_same(name, scanned):
    config = changed(qkv_bias=True, mlp_bias=True, num_kv_heads=2) if name == "biased" else VARIANTS[name]
    params = init_params(jax.random.key(0), config, scanned=scanned)
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    joined = join_projections(params)
    layer = joined["layers"] if scanned else joined["layers"][1]
    assert "query" not in layer["attention"]
    assert ("up" in layer["mlp"]) == (config.mlp == "gelu")
    chex.assert_trees_all_equal(join_projections(joined), joined)
    tokens = jnp.array([[3, 1, 4, 1, 5, 9]])
    run = jax.jit(forward, static_argnums=2)
    expected = run(params, tokens, config).logits
    np.testing.assert_allclose(run(joined, tokens, config).logits, expected, atol=2e-5)


def test_projections_that_are_not_plain_kernels_are_refused_by_name():
    params = init_params(jax.random.key(0), SMALL)
    params["layers"][1]["mlp"]["gate"] = {"signs": jnp.zeros(3)}
    with pytest.raises(ValueError, match=r"gate, up hold .*signs"):
        join_projections(params)
