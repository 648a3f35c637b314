"""Rotary positions by their defining properties, and dense attention's seam."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.nn.attention import (
    AttentionInputs,
    apply_rope,
    causal_attention,
    dense_attention,
    rope_frequencies,
    rope_tables,
)
from effml.nn.cache import attend
from effml.nn.transformer import RopeScaling, TransformerConfig

CONFIG = TransformerConfig(vocab_size=31, width=32, num_layers=1, num_heads=4, mlp_width=24)


def scaled(scaling, **fields):
    return TransformerConfig(**{**CONFIG.to_dict(), "rope_scaling": scaling, **fields})


def rotate(x, position, layout="split"):
    tables = rope_tables(jnp.full((1, 1), position, jnp.int32), CONFIG)
    return apply_rope(x[None, None, None], *tables, layout=layout)[0, 0, 0]


@pytest.mark.parametrize("layout", ["split", "interleaved"])
def test_rotated_products_depend_on_the_distance_only(layout):
    query, key = jax.random.normal(jax.random.key(0), (2, 8))
    products = [rotate(query, 5 + shift, layout) @ rotate(key, 2 + shift, layout) for shift in (0, 1, 40)]
    np.testing.assert_allclose(products, products[0], atol=1e-5)
    assert abs(float(rotate(query, 6, layout) @ rotate(key, 2, layout) - products[0])) > 0.01
    np.testing.assert_array_equal(rotate(query, 0, layout), query)
    assert float(jnp.linalg.norm(rotate(query, 9, layout))) == pytest.approx(
        float(jnp.linalg.norm(query)), 1e-6
    )


def test_interleaved_layout_is_the_split_layout_of_permuted_features():
    x = jax.random.normal(jax.random.key(1), (8,))
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    np.testing.assert_allclose(rotate(x, 3, "interleaved")[order], rotate(x[order], 3, "split"), atol=1e-6)
    assert float(jnp.abs(rotate(x, 3, "interleaved") - rotate(x, 3, "split")).max()) > 0.1


def test_linear_scaling_interpolates_positions():
    stretched = rope_tables(jnp.array([[8]]), scaled(RopeScaling("linear", 4.0)))
    np.testing.assert_allclose(stretched, rope_tables(jnp.array([[2]]), CONFIG), atol=1e-6)


def test_llama3_scaling_keeps_short_waves_and_divides_long_ones():
    config = scaled(RopeScaling("llama3", 8.0, 1.0, 4.0, 8192), head_size=128, rope_base=500000.0)
    plain = rope_frequencies(scaled(None, head_size=128, rope_base=500000.0))
    ratio = plain / rope_frequencies(config)
    wavelength = 2 * np.pi / plain
    assert (ratio[wavelength < 2048] == 1).all()
    np.testing.assert_allclose(ratio[wavelength > 8192], 8.0)
    between = ratio[(wavelength > 2048) & (wavelength < 8192)]
    assert len(between) > 3
    assert (np.diff(between) > 0).all()
    assert between.min() > 1
    assert between.max() < 8


def test_angles_stay_accurate_at_long_positions():
    config = scaled(None, rope_base=500000.0)
    positions = np.array([[0, 1000, 131071]])
    cosine, sine = rope_tables(jnp.asarray(positions), config)
    angles = positions[..., None] * 500000.0 ** -(np.arange(0, 8, 2) / 8)
    # float32 angles of 131071 are rounded by up to 2^-8 of a radian
    np.testing.assert_allclose(cosine, np.cos(angles), atol=8e-3)
    np.testing.assert_allclose(sine, np.sin(angles), atol=8e-3)
    np.testing.assert_allclose(cosine[:, :2], np.cos(angles[:, :2]), atol=1e-4)


def test_bfloat16_features_are_rotated_in_float32():
    x = jax.random.normal(jax.random.key(2), (1, 3, 2, 8)).astype(jnp.bfloat16)
    tables = rope_tables(jnp.arange(3)[None], CONFIG)
    rotated = apply_rope(x, *tables)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotated, apply_rope(x.astype(jnp.float32), *tables).astype(jnp.bfloat16))


def test_dense_attention_passes_mask_scale_and_cache_on():
    query = jax.random.normal(jax.random.key(3), (1, 3, 4, 8))
    key, value = jax.random.normal(jax.random.key(4), (2, 1, 3, 2, 8))
    mask = jnp.eye(3, dtype=bool)[None]
    positions = jnp.arange(3)[None]
    inputs = AttentionInputs(query, key, value, None, {}, positions, mask, None, 0.3, 0)
    output, info = dense_attention(inputs)
    assert info is None
    np.testing.assert_allclose(output, jnp.repeat(value, 2, axis=2), atol=1e-6)  # every row sees itself
    causal, _ = dense_attention(inputs._replace(mask=None))
    np.testing.assert_allclose(causal, attend(query, None, key, value, scale=0.3), atol=1e-6)
    sharper, _ = dense_attention(inputs._replace(mask=None, scale=3.0))
    assert float(jnp.abs(sharper - causal).max()) > 0.01


@pytest.mark.parametrize(("length", "heads"), [(1, 2), (63, 4), (64, 2), (130, 4), (600, 2)])
def test_blocked_causal_attention_and_its_gradient_are_those_of_the_whole_softmax(length, heads):
    keys = jax.random.split(jax.random.key(length), 4)
    query, cotangent = (2 * jax.random.normal(k, (2, length, heads, 8)) for k in keys[:2])
    key, value = (jax.random.normal(k, (2, length, 2, 8)) for k in keys[2:])

    def both(function):
        def pull(query, key, value, cotangent):
            output, back = jax.vjp(function, query, key, value)
            return output, back(cotangent)

        return jax.jit(pull)(query, key, value, cotangent)

    expected = both(lambda q, k, v: attend(q, None, k, v, scale=0.6))
    got = both(lambda q, k, v: causal_attention(q, k, v, scale=0.6))
    chex.assert_trees_all_close(got, expected, atol=2e-5, rtol=1e-4)
    half = both(
        lambda q, k, v: causal_attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)), scale=0.6).astype(
            jnp.float32
        )
    )
    for narrow, wide in zip(jax.tree.leaves(half), jax.tree.leaves(expected)):
        assert float(jnp.abs(narrow - wide).max()) <= 0.03 * float(jnp.abs(wide).max())


def test_causal_attention_can_be_batched_and_differentiated_twice():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 70, 2, 4))

    def curvature(function):
        inner = jax.grad(lambda q, k, v: jnp.square(function(q[None], k[None], v[None])).sum())
        return jax.jit(jax.vmap(jax.grad(lambda *x: jnp.square(inner(*x)).sum(), argnums=(0, 1, 2))))

    got = curvature(lambda *x: causal_attention(*x, scale=0.6))(query, key, value)
    expected = curvature(lambda *x: attend(x[0], None, *x[1:], scale=0.6))(query, key, value)
    chex.assert_trees_all_close(got, expected, atol=1e-4, rtol=1e-3)


def test_causal_attention_of_huge_scores_is_finite():
    rows = 1e3 * jax.random.normal(jax.random.key(0), (1, 70, 2, 4))
    out, back = jax.vjp(lambda x: causal_attention(x, x, x, scale=1.0), rows)
    chex.assert_tree_all_finite((out, back(out)))
