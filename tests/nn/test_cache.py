"""The dense cache against a softmax over a plain list of rows, and cached decoding against the full pass."""

from __future__ import annotations

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.nn.cache import DenseCache, append, attend, init_cache
from effml.nn.transformer import (
    TransformerConfig,
    forward,
    forward_cached,
    init_params,
    stack_layers,
)

CONFIG = TransformerConfig(
    vocab_size=31, width=16, num_layers=2, num_heads=4, mlp_width=24, num_kv_heads=2, initializer_std=0.4
)
LEARNED = TransformerConfig(**{**CONFIG.to_dict(), "positions": "learned", "max_length": 16})
full = jax.jit(forward, static_argnums=2)
step = jax.jit(forward_cached, static_argnums=3, donate_argnums=2)
commit = jax.jit(append)


def random_cache(lengths, capacity=6, kv_heads=2, head=4, seed=0):
    """Rows past the length hold garbage, as they do after padded or refused rows."""
    shape = (len(lengths), capacity, kv_heads, head)
    keys, values = np.random.default_rng(seed).normal(0, 2, (2, *shape)).astype(np.float32)
    return DenseCache(
        jnp.asarray(keys.transpose(0, 2, 3, 1)),
        jnp.asarray(values.transpose(0, 2, 1, 3)),
        jnp.array(lengths, jnp.int32),
    )


def rows_of(cache):
    """Keys and values as [batch, capacity, kv_heads, head]."""
    return np.asarray(cache.keys).transpose(0, 3, 1, 2), np.asarray(cache.values).transpose(0, 2, 1, 3)


def random_rows(batch, new, heads=4, kv_heads=2, head=4, seed=1):
    rng = np.random.default_rng(seed)
    shapes = [(batch, new, count, head) for count in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def oracle_attend(query, cache, k_new, v_new, mask, scale):
    query, k_new, v_new = (np.asarray(x, np.float64) for x in (query, k_new, v_new))
    out = np.zeros_like(query)
    keys, values = (side.astype(np.float64) for side in rows_of(cache)) if cache else (None, None)
    batch, new, heads, _ = query.shape
    for b in range(batch):
        for t in range(new):
            for h in range(heads):
                g = h // (heads // k_new.shape[2])
                committed = range(int(cache.length[b]) if cache else 0)
                rows = [(keys[b, s, g], values[b, s, g]) for s in committed]
                rows += [(k_new[b, s, g], v_new[b, s, g]) for s in range(new) if mask[b, t, s]]
                if rows:
                    weights = np.array([np.exp(query[b, t, h] @ k * scale) for k, _ in rows])
                    out[b, t, h] = sum(w * v for w, (_, v) in zip(weights, rows)) / weights.sum()
    return out


CAUSAL = np.broadcast_to(np.tril(np.ones((3, 3), bool)), (3, 3, 3))


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
@pytest.mark.parametrize("lengths", [None, [0, 2, 6]], ids=["uncached", "ragged"])
def test_attend_is_the_softmax_over_committed_and_new_rows(lengths, masked):
    cache = random_cache(lengths) if lengths else None
    query, key, value = random_rows(3, 3)
    mask = np.random.default_rng(5).random((3, 3, 3)) < 0.5 if masked else CAUSAL
    got = attend(query, cache, key, value, jnp.asarray(mask) if masked else None, scale=0.7)
    np.testing.assert_allclose(got, oracle_attend(query, cache, key, value, mask, 0.7), atol=1e-5)
    assert not masked or not mask[0].any(-1).all()  # some row of the empty cache sees nothing and gives zeros


def test_rows_past_the_length_have_no_influence():
    cache = random_cache([0, 2, 5])
    query, key, value = random_rows(3, 3)
    past = (jnp.arange(6) >= cache.length[:, None])[:, None, None]
    poisoned = cache._replace(
        keys=jnp.where(past, 1e4, cache.keys), values=jnp.where(past.mT, 1e4, cache.values)
    )
    expected = attend(query, cache, key, value, scale=0.5)
    np.testing.assert_array_equal(attend(query, poisoned, key, value, scale=0.5), expected)


def test_scores_of_any_size_stay_finite_and_so_do_gradients():
    query, key, value = random_rows(1, 3)
    cache = random_cache([2])

    def total(query, mask):
        return attend(1e4 * query, cache, key, value, mask, scale=1.0).sum()

    for mask in (jnp.tril(jnp.ones((1, 3, 3), bool)), jnp.zeros((1, 3, 3), bool)):
        chex.assert_tree_all_finite(jax.value_and_grad(total)(query, mask))
    empty = cache._replace(length=jnp.zeros(1, jnp.int32))
    out = attend(query, empty, key, value, jnp.zeros((1, 3, 3), bool), scale=1.0)
    np.testing.assert_array_equal(out, jnp.zeros_like(query))


def test_bfloat16_attention_stays_near_float32():
    query, key, value = random_rows(3, 3)
    cache = random_cache([0, 2, 6])
    wide = attend(query, cache, key, value, scale=0.5)
    narrow = attend(*(x.astype(jnp.bfloat16) for x in (query,)), cache, key, value, scale=0.5)
    assert narrow.dtype == jnp.bfloat16
    assert float(jnp.abs(narrow - wide).max()) < 0.02 * float(jnp.abs(cache.values).max())


@pytest.mark.parametrize("batch", [1, 3])
def test_append_behaves_as_a_list_of_rows(batch):
    """Random rows, counts and refusals; rows that do not fit under jit are dropped."""
    rng, capacity = np.random.default_rng(batch), 7
    cache = before = random_cache([0] * batch, capacity)
    model = [[] for _ in range(batch)]
    for turn in range(8):
        _, key, value = random_rows(batch, 3, seed=turn)
        rows = rng.integers(0, 3, (batch, 2))
        counts = rng.integers(0, 3, batch)
        cache = commit(cache, key, value, jnp.asarray(rows), jnp.asarray(counts))
        for b in range(batch):
            for row in rows[b, : counts[b]]:
                if len(model[b]) < capacity:
                    model[b].append((key[b, row], value[b, row]))
            assert int(cache.length[b]) == len(model[b])
            now, then = rows_of(cache), rows_of(before)
            for s, (k, v) in enumerate(model[b]):
                np.testing.assert_array_equal(now[0][b, s], k)
                np.testing.assert_array_equal(now[1][b, s], v)
            free = slice(len(model[b]), None)  # what was not committed was not written
            for side in range(2):
                np.testing.assert_array_equal(now[side][b, free], then[side][b, free])
    assert max(map(len, model)) == capacity


def test_append_of_all_rows_near_the_end_keeps_committed_rows():
    """Padding may reach past the capacity: 2 of 4 rows are valid and exactly 2 are free."""
    cache = random_cache([4])
    _, key, value = random_rows(1, 4)
    new = append(cache, key, value, counts=jnp.array([2]))
    expected = np.concatenate([rows_of(cache)[0][0, :4], key[0, :2]])
    np.testing.assert_array_equal(rows_of(new)[0][0], expected)
    assert new.length.tolist() == [6]


def test_overflow_is_an_error_when_it_can_be_seen():
    _, key, value = random_rows(1, 3)
    with pytest.raises(ValueError, match="full: sequence 0 needs 7"):
        append(random_cache([4]), key, value)
    _, key, value = random_rows(1, 7)
    with pytest.raises(ValueError, match="7 new rows do not fit into a cache of 6"):
        commit(random_cache([0]), key, value)


def test_append_writes_in_place_when_donated():
    for batch in (1, 3):
        cache = init_cache(CONFIG, batch, 4096)[0]
        rows = jnp.ones((batch, 2, 2, 4))
        compiled = jax.jit(append, donate_argnums=0).lower(cache, rows, rows).compile()
        memory = compiled.memory_analysis()
        size = cache.keys.nbytes
        assert memory.alias_size_in_bytes >= 2 * size
        assert memory.temp_size_in_bytes < size / 10


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("config", [CONFIG, LEARNED], ids=["rope", "learned"])
def test_cached_decoding_equals_the_full_pass_for_ragged_sequences(config, scanned):
    params = init_params(jax.random.key(0), config)
    tokens = jax.random.randint(jax.random.key(1), (3, 10), 0, 31)
    expected = full(params, tokens, config).logits
    given = stack_layers(params) if scanned else params
    cache = init_cache(config, 3, 12, stacked=scanned)
    prompts = jnp.array([5, 2, 4])
    out, cache = step(given, tokens[:, :5], cache, config, counts=prompts)
    for b, prompt in enumerate(prompts.tolist()):
        np.testing.assert_allclose(out.logits[b, :prompt], expected[b, :prompt], atol=1e-5)
    done = prompts
    for _ in range(5):
        chunk = jnp.take_along_axis(tokens, done[:, None], axis=1)
        out, cache = step(given, chunk, cache, config)
        wanted = jnp.take_along_axis(expected, done[:, None, None], axis=1)
        np.testing.assert_allclose(out.logits, wanted, atol=1e-5)
        done = done + 1
    lengths = cache.length[1] if scanned else cache[1].length
    assert lengths.tolist() == [10, 7, 9]


def test_chunks_of_any_size_give_the_same_logits():
    params = init_params(jax.random.key(0), CONFIG)
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 31)
    expected = full(params, tokens, CONFIG).logits
    for cuts in ([0, 1, 2, 9], [0, 7, 8, 9]):
        cache = init_cache(CONFIG, 2, 9)
        for start, stop in itertools.pairwise(cuts):
            out, cache = step(params, tokens[:, start:stop], cache, CONFIG)
            np.testing.assert_allclose(out.logits, expected[:, start:stop], atol=1e-5)


def test_only_accepted_drafts_enter_the_cache():
    """Two branches are drafted at once under a tree mask; the second is committed."""
    params = init_params(jax.random.key(0), CONFIG)
    prompt, branches = jnp.array([[3, 1, 4]]), jnp.array([[7, 8, 9, 10]])  # 7-8 against 9-10
    out, cache = step(params, prompt, init_cache(CONFIG, 1, 8), CONFIG)
    mask = jnp.array([[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]], bool)
    positions = jnp.array([[3, 4, 3, 4]])
    out = full(params, branches, CONFIG, cache=cache, mask=mask, positions=positions)
    for branch, rows in ((branches[:, :2], slice(0, 2)), (branches[:, 2:], slice(2, 4))):
        alone = full(params, jnp.concatenate([prompt, branch], axis=1), CONFIG).logits
        np.testing.assert_allclose(out.logits[:, rows], alone[:, 3:], atol=1e-5)
    accepted = jnp.array([[2, 3]])
    cache = [append(c, k, v, accepted) for c, k, v in zip(cache, out.keys, out.values)]
    out, _ = step(params, jnp.array([[5]]), cache, CONFIG)
    alone = full(params, jnp.array([[3, 1, 4, 9, 10, 5]]), CONFIG).logits
    np.testing.assert_allclose(out.logits, alone[:, 5:], atol=1e-5)


def test_decoding_compiles_once():
    params = init_params(jax.random.key(0), CONFIG)

    @functools.partial(jax.jit, donate_argnums=2)
    @chex.assert_max_traces(1)
    def once(params, tokens, cache):
        return forward_cached(params, tokens, cache, CONFIG)

    cache = init_cache(CONFIG, 1, 8)
    for token in range(4):
        _, cache = once(params, jnp.array([[token]]), cache)
    assert cache[0].length.tolist() == [4]


def test_bfloat16_cache_keeps_its_dtype_and_stays_near_float32():
    params = init_params(jax.random.key(0), CONFIG)
    tokens = jnp.array([[1, 2, 3, 4]])
    cache = init_cache(CONFIG, 1, 8, dtype=jnp.bfloat16)
    _, cache = step(params, tokens[:, :3], cache, CONFIG)
    out, cache = step(params, tokens[:, 3:], cache, CONFIG)
    assert cache[1].keys.dtype == jnp.bfloat16
    expected = full(params, tokens, CONFIG).logits[:, 3:]
    error = float(jnp.abs(out.logits - expected).max() / jnp.abs(expected).max())
    assert 1e-6 < error < 0.03


def test_no_rows_are_returned_without_a_cache_and_all_with_one():
    params = init_params(jax.random.key(0), CONFIG)
    tokens = jnp.array([[1, 2, 3]])
    assert full(params, tokens, CONFIG).keys is None
    out = full(params, tokens, CONFIG, cache=init_cache(CONFIG, 1, 8))
    assert [x.shape for x in (*out.keys, *out.values)] == [(1, 3, 2, 4)] * 4
    scanned = full(stack_layers(params), tokens, CONFIG, cache=init_cache(CONFIG, 1, 8, stacked=True))
    assert scanned.keys.shape == (2, 1, 3, 2, 4)
    np.testing.assert_allclose(scanned.values[1], out.values[1], atol=1e-5)


def test_caches_of_the_wrong_kind_are_named():
    params = init_params(jax.random.key(0), CONFIG)
    tokens = jnp.array([[1]])
    with pytest.raises(ValueError, match="stacked=False"):
        forward(params, tokens, CONFIG, cache=init_cache(CONFIG, 1, 8, stacked=True))
    with pytest.raises(ValueError, match="stacked=True"):
        forward(stack_layers(params), tokens, CONFIG, cache=init_cache(CONFIG, 1, 8))
    with pytest.raises(ValueError, match="1 caches"):
        forward(params, tokens, CONFIG, cache=init_cache(CONFIG, 1, 8)[:1])
    with pytest.raises(ValueError, match="batch=0"):
        init_cache(CONFIG, 0, 8)
    with pytest.raises(ValueError, match="max_length=-1"):
        init_cache(CONFIG, 1, -1)
