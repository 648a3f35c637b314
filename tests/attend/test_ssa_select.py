"""Block selection against a float64 walk over tokens and blocks, and what must not change it."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.attend import ssa
from tests.attend import ssa_oracles


def rows(length, heads=4, kv_heads=2, head=8, batch=1, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((batch, length, heads, head), (batch, length, kv_heads, head))
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


# Every group size, block size and length of the grid occurs, each length with two block sizes.
CASES = [
    (1, 4, 1, 2),
    (2, 16, 1, 1),
    (3, 4, 7, 2),
    (5, 8, 7, 3),
    (16, 16, 64, 2),
    (2, 8, 64, 3),
    (5, 16, 130, 4),
    (3, 8, 130, 4),
    (1, 4, 130, 40),
]


@pytest.mark.parametrize(("group", "block_size", "length", "num_blocks"), CASES)
def test_the_chosen_sets_are_those_of_the_literal_walk(group, block_size, length, num_blocks):
    q, k = rows(length, 2 * group, 2, seed=length + group)
    found = ssa.select_blocks(q, k, block_size=block_size, num_blocks=num_blocks)
    assert found.indices.shape == (1, length, 2, num_blocks)
    assert ssa_oracles.as_sets(found.indices[0]) == ssa_oracles.select(q[0], k[0], block_size, num_blocks)
    chex.assert_trees_all_equal(found.mask, found.indices >= 0)


def test_the_own_block_is_in_front_and_a_smaller_budget_is_a_prefix():
    q, k = rows(130)
    wide, narrow = (ssa.select_blocks(q, k, block_size=8, num_blocks=n).indices for n in (6, 2))
    np.testing.assert_array_equal(wide[..., :2], narrow)
    np.testing.assert_array_equal(wide[0, :, :, 0], np.repeat(np.arange(130)[:, None] // 8, 2, 1))


def test_of_equal_importance_the_lower_block_wins():
    q, k = rows(40)
    same = jnp.ones_like(k)
    found = ssa.select_blocks(q, same, block_size=8, num_blocks=3).indices
    assert found[0, 39, 0].tolist() == [4, 0, 1]
    # Block 0 is complete alone for tokens 8 to 14, with importance 1 per head, the most there is; the own one stays.
    one = ssa.select_blocks(q, same, block_size=8, num_blocks=1).indices
    np.testing.assert_array_equal(one[0, :, 0, 0], np.arange(40) // 8)


def test_scores_worked_out_in_pieces_choose_the_same(monkeypatch):
    from effml.attend.ssa import _select

    q, k = rows(130)
    whole = ssa.select_blocks(q, k, block_size=8, num_blocks=4).indices
    monkeypatch.setattr(_select, "_CPU_BYTES", 4 * 4 * 17 * 30)  # 30 tokens
    _select.choose.clear_cache()
    text = _select.choose.lower(
        q,
        jnp.zeros((1, 2, 17, 8)),
        first=jnp.zeros((1, 130), int),
        position=jnp.zeros((1, 130), int),
        block_size=8,
        num_blocks=4,
    ).as_text()
    assert "while" in text
    np.testing.assert_array_equal(ssa.select_blocks(q, k, block_size=8, num_blocks=4).indices, whole)
    _select.choose.clear_cache()


def test_a_segment_chooses_as_if_it_were_alone_traced_or_not():
    q, k = rows(61, batch=2)
    lengths = ([1, 23, 30, 7], [23, 38])
    ids = jnp.asarray([np.repeat([5, 3, 5, 0], lengths[0]), np.repeat([1, 2], lengths[1])])
    options = {"block_size": 8, "num_blocks": 3}
    found = ssa.select_blocks(q, k, segment_ids=ids, **options).indices
    for b, sizes in enumerate(lengths):
        starts = np.cumsum([0, *sizes])
        for start, stop in itertools.pairwise(starts):
            alone = ssa.select_blocks(q[b : b + 1, start:stop], k[b : b + 1, start:stop], **options).indices
            np.testing.assert_array_equal(found[b, start:stop], alone[0])
    for most in (None, 4):
        traced = jax.jit(
            lambda ids, most=most: ssa.select_blocks(q, k, segment_ids=ids, max_segments=most, **options)
        )
        np.testing.assert_array_equal(traced(ids).indices, found)


def test_bfloat16_rows_are_pooled_and_scored_in_float32():
    q, k = (x.astype(jnp.bfloat16) for x in rows(130))
    narrow = ssa.select_blocks(q, k, block_size=8, num_blocks=4).indices
    wide = ssa.select_blocks(q.astype("float32"), k.astype("float32"), block_size=8, num_blocks=4).indices
    np.testing.assert_array_equal(narrow, wide)


def test_blocks_with_a_key_that_is_no_number_are_read_and_never_displace_the_own_one():
    q, k = rows(130)
    for value in (jnp.nan, jnp.inf):
        broken = k.at[0, 10, 0, 3].set(value)
        found = ssa.select_blocks(q, broken, block_size=8, num_blocks=2).indices
        np.testing.assert_array_equal(found[0, :, :, 0], np.repeat(np.arange(130)[:, None] // 8, 2, 1))
        chosen = np.asarray(found[0, 16:, 0, 1] == 1)
        # A score of minus infinity is a number: such a block holds nothing for the query.
        assert chosen.all() if np.isnan(value) else 0.3 < chosen.mean() < 1
        sound = ssa.select_blocks(q, k, block_size=8, num_blocks=2).indices
        np.testing.assert_array_equal(found[:, :, 1], sound[:, :, 1])  # the other key head
        output = ssa.sparse_attention(q, broken, k, found, block_size=8)
        assert np.isnan(output[0, 16:, :2][chosen]).any(-1).any(-1).all()
    lost = q.at[0, 60].set(jnp.nan)
    found = ssa.select_blocks(lost, k, block_size=8, num_blocks=2).indices
    output = ssa.sparse_attention(lost, k, k, found, block_size=8)
    assert np.isnan(output[0, 60]).all()
    assert np.isfinite(np.delete(output, 60, axis=1)).all()


def test_there_is_no_gradient_and_no_second_compilation():
    q, k = rows(24)
    choose = jax.jit(
        chex.assert_max_traces(lambda q, k: ssa.select_blocks(q, k, block_size=8, num_blocks=2), n=1)
    )
    choose(q, k)
    choose(k[:, :, [0, 1, 0, 1]], k)
    chex.clear_trace_counter()
    slope = jax.grad(lambda q: (ssa.select_blocks(q, k, block_size=8, num_blocks=2).indices * q.sum()).sum())(
        q
    )
    assert np.ptp(slope) == 0  # of the factor alone


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"block_size": 0}, ValueError, "block_size=0 must be above 0"),
        ({"num_blocks": 0}, ValueError, "num_blocks=0 must be above 0"),
        (
            {"segment_ids": jnp.zeros((1, 9), int)},
            ValueError,
            r"segment_ids must be integers of shape \(1, 24\)",
        ),
        (
            {"segment_ids": jnp.arange(24)[None], "max_segments": 3},
            ValueError,
            "max_segments=3, but .* 24 segments",
        ),
        ({"heads": 3}, ValueError, "query has 3 heads, which must be a multiple of the 2 heads of key"),
    ],
)
def test_bad_input_is_named(changes, error, words):
    options = {"block_size": 8, "num_blocks": 2, **changes}
    q, k = rows(24, heads=options.pop("heads", 4))
    with pytest.raises(error, match=words):
        ssa.select_blocks(q, k, **options)
