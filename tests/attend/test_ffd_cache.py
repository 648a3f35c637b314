"""The quantised cache: whatever way rows come, it holds what the definition says, and nothing that was not committed."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from effml.attend import ffd
from tests.attend.numpy_ffd import Sequence, packed

BATCH, HEADS, HEAD, VALUE, BLOCK = 2, 2, 10, 6, 8


def rows_of(seed, count):
    rng = np.random.default_rng(seed)
    shape = BATCH, count, HEADS
    return rng.normal(size=(*shape, HEAD)).astype("f4"), rng.normal(size=(*shape, VALUE)).astype("f4")


def empty(max_len=60, **options):
    return ffd.init_cache(
        BATCH, max_len, HEADS, HEAD, VALUE, **{"block": BLOCK, "dtype": "float32", **options}
    )


def check_holds(cache, k, v, lengths, residual=ml_dtypes.float8_e4m3fn):
    """The cache is what NumPy makes of the first `lengths` rows of each sequence."""
    assert cache.length.tolist() == list(lengths)
    for b, length in enumerate(lengths):
        for h in range(HEADS):
            want = Sequence(
                k[b, :length, h],
                v[b, :length, h],
                block=cache.block,
                bits=cache.bits,
                sink=cache.sink,
                residual=residual,
            )
            blocks, tail = len(want.blocks), int(cache.tail_len[b])
            assert int(cache.num_blocks[b]) == blocks
            for n, (code, scale, rest) in enumerate(want.blocks):
                at = slice(n * cache.block, (n + 1) * cache.block)
                np.testing.assert_array_equal(cache.k_code[b, h, at], packed(code, cache.bits))
                np.testing.assert_allclose(cache.k_scale[b, h, n], scale, rtol=3e-7)
                # XLA divides by a constant as it likes: a residual may round to its neighbour.
                got = np.asarray(cache.k_resid[b, h, at], "f8")
                np.testing.assert_allclose(got, rest, rtol=2**-3, atol=2**-9)
                assert (got == rest).mean() > 0.8
                np.testing.assert_array_equal(cache.v[b, h, at], want.values[want.spans[n]].astype("f4"))
            begin = cache.sink + blocks * cache.block
            assert tail == max(length - begin, 0)
            np.testing.assert_array_equal(cache.k_tail[b, h, :tail], k[b, begin:length, h])
            np.testing.assert_array_equal(cache.v_tail[b, h, :tail], v[b, begin:length, h])
            sinks = min(length, cache.sink)
            np.testing.assert_array_equal(cache.k_sink[b, h, :sinks], k[b, :sinks, h])
            np.testing.assert_array_equal(cache.v_sink[b, h, :sinks], v[b, :sinks, h])


@pytest.mark.parametrize(("bits", "sink"), [(2, 0), (4, 5)])
def test_rows_one_by_one_are_the_whole_prompt_bit_for_bit(bits, sink):
    k, v = rows_of(0, 37)
    whole = ffd.prefill(empty(bits=bits, sink=sink), jnp.asarray(k), jnp.asarray(v))
    check_holds(whole, k, v, [37, 37])

    @jax.jit
    def one_by_one(cache, k, v):
        step = lambda cache, row: (ffd.append(cache, row[0][:, None], row[1][:, None]), None)
        return jax.lax.scan(step, cache, (jnp.moveaxis(k, 1, 0), jnp.moveaxis(v, 1, 0)))[0]

    single = one_by_one(empty(bits=bits, sink=sink), k, v)
    chex.assert_trees_all_equal(_valid(single), _valid(whole))
    # In uneven pieces, one of which is longer than two blocks.
    pieces = empty(bits=bits, sink=sink)
    for start, stop in ((0, 3), (3, 4), (4, 24), (24, 37)):
        pieces = ffd.append(pieces, jnp.asarray(k[:, start:stop]), jnp.asarray(v[:, start:stop]))
    chex.assert_trees_all_equal(_valid(pieces), _valid(whole))


def _valid(cache):
    """What is committed; what lies behind it may be anything."""
    keys, values, committed = ffd.stored_rows(cache)
    clear = lambda x: jnp.where(committed[:, None, :, None], x, 0)
    return clear(keys), clear(values), committed, cache.length


@pytest.mark.parametrize("sink", [0, 3])
def test_sequences_fill_at_their_own_pace_and_only_chosen_rows_enter(sink):
    rng = np.random.default_rng(1)
    chex.clear_trace_counter()
    append = jax.jit(chex.assert_max_traces(ffd.append, n=1))
    cache, kept = empty(max_len=64, sink=sink), [[], []]
    for step in range(14):
        k, v = rows_of(10 + step, 7)
        rows = np.stack([rng.permutation(7)[:5] for _ in range(BATCH)])
        counts = rng.integers(0, 6, BATCH)
        cache = append(cache, k, v, rows, counts.astype(np.int32))
        for b in range(BATCH):
            kept[b] += [(k[b, row], v[b, row]) for row in rows[b, : counts[b]]]
    lengths = [len(one) for one in kept]
    assert lengths[0] != lengths[1]
    assert min(lengths) > 2 * BLOCK
    longest = max(lengths)
    pad = lambda side, shape: np.stack(
        [
            np.stack([row[side] for row in one] + [np.zeros(shape, "f4")] * (longest - len(one)))
            for one in kept
        ]
    )
    check_holds(cache, pad(0, (HEADS, HEAD)), pad(1, (HEADS, VALUE)), lengths)


def test_layers_of_a_stacked_cache_and_wide_residuals():
    k, v = rows_of(2, 19)
    cache = empty(resid_dtype="bfloat16", bits=4)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), cache)
    both = jax.jit(jax.vmap(functools.partial(ffd.append)))(stacked, jnp.stack([k, 2 * k]), jnp.stack([v, v]))
    assert ffd.room_in_block(both).tolist() == [[5, 5], [5, 5]]
    for layer, factor in enumerate((1, 2)):
        one = jax.tree.map(lambda leaf, layer=layer: leaf[layer], both)
        check_holds(one, factor * k, v, [19, 19], residual=ml_dtypes.bfloat16)


def test_a_full_cache_says_so_and_keeps_what_it_has_under_jit():
    k, v = (jnp.asarray(x) for x in rows_of(3, 20))
    cache = ffd.append(empty(max_len=17), k, v)
    assert cache.capacity == 23
    with pytest.raises(ValueError, match="cache of 23 rows is full: sequence 1 needs 24"):
        ffd.append(cache, k[:, :4], v[:, :4], counts=jnp.array([2, 4]))
    with pytest.raises(ValueError, match="40 new rows do not fit into a cache of 23 rows"):
        ffd.append(cache, jnp.tile(k, (1, 2, 1, 1)), jnp.tile(v, (1, 2, 1, 1)))
    full = jax.jit(ffd.append)(cache, k[:, :5], v[:, :5])
    assert full.length.tolist() == [23, 23]
    joined = [np.concatenate([x, x[:, :3]], axis=1) for x in (k, v)]
    check_holds(full, *joined, [23, 23])


def test_counts_are_those_of_the_new_rows_and_no_row_is_no_change():
    k, v = (jnp.asarray(x) for x in rows_of(4, 6))
    cache = ffd.append(empty(), k, v)
    for counts, words in (([7, 1], "hold 1 and 7"), ([-1, 2], "hold -1 and 2")):
        with pytest.raises(ValueError, match=rf"counts must be in 0\.\.6, the new rows, but {words}"):
            ffd.append(cache, k, v, counts=np.array(counts))
    append = inspect.unwrap(ffd.append)  # as users call it: without the checks of annotations
    with pytest.raises(ValueError, match=r"counts must have shape \(2,\)"):
        append(cache, k, v, counts=np.array([1, 1, 1]))
    with pytest.raises(TypeError, match="counts must hold integers"):
        append(cache, k, v, counts=np.array([1.5, 2]))
    assert jax.jit(ffd.append)(cache, k, v, counts=jnp.array([9, -1])).length.tolist() == [12, 6]
    chex.assert_trees_all_equal(ffd.append(cache, k[:, :0], v[:, :0]), cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 12}, "block=12 must be a multiple of 8"),
        ({"bits": 3}, "bits=3 must be one of 2, 4"),
        ({"max_len": 0}, "max_len=0 must be above 0"),
        ({"sink": -1}, "sink=-1 must be an integer of at least 0"),
        ({"dtype": "float16"}, "dtype='float16' must be float32 or bfloat16"),
        ({"resid_dtype": None}, "resid_dtype=None must be a floating-point dtype"),
        ({"resid_dtype": "int8"}, "resid_dtype='int8' must be a floating-point dtype"),
    ],
)
def test_layouts_that_are_not_possible(options, message):
    with pytest.raises(ValueError, match=message):
        empty(**options)


def test_rows_of_another_shape():
    k, _v = rows_of(0, 2)
    with pytest.raises(ValueError, match=r"v must have shape \(2, 2, 2, 6\) to fit the cache"):
        ffd.append(empty(), jnp.asarray(k), jnp.asarray(k))
