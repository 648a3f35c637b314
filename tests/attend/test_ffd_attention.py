"""Attention to a quantised cache against float64 NumPy: which blocks are read, what comes out, and the bounds."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.attend import ffd
from tests.attend import numpy_ffd
from tests.attend.numpy_ffd import Sequence

BATCH, HEADS, GROUP, HEAD, VALUE, BLOCK, ROWS, NEW = 2, 2, 3, 16, 12, 8, 75, 4
LENGTHS = np.array([75, 43])  # the second has five blocks of nine, and a tail of three
SCALE = HEAD**-0.5


@functools.cache
def case(seed=0, bits=2, sink=0, lengths=tuple(LENGTHS)):
    """A ragged cache, some blocks of which no query likes, queries, new rows, and the same as NumPy sequences."""
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(BATCH, ROWS, HEADS, HEAD)).astype("f4")
    direction = rng.normal(size=HEAD)
    liked = np.repeat(rng.choice([-0.8, 0.5], (BATCH, -(-ROWS // BLOCK), HEADS)), BLOCK, axis=1)[:, :ROWS]
    k += (liked[..., None] * direction).astype("f4")
    v = rng.normal(size=(BATCH, ROWS, HEADS, VALUE)).astype("f4")
    q = (rng.normal(size=(BATCH, NEW, HEADS * GROUP, HEAD)) + 1.2 * direction).astype("f4")
    new = [rng.normal(size=(BATCH, NEW, HEADS, size)).astype("f4") for size in (HEAD, VALUE)]
    cache = ffd.init_cache(BATCH, 80, HEADS, HEAD, VALUE, block=BLOCK, bits=bits, sink=sink, dtype="float32")
    cache = ffd.prefill(cache, jnp.asarray(k), jnp.asarray(v), np.array(lengths, np.int32))
    sequences = [
        [Sequence(k[b, :size, h], v[b, :size, h], block=BLOCK, bits=bits, sink=sink) for h in range(HEADS)]
        for b, size in enumerate(lengths)
    ]
    return cache, jnp.asarray(q), [jnp.asarray(x) for x in new], sequences


@functools.partial(jax.jit, static_argnames=("threshold", "select", "queries"))
def run(
    q, cache, k_new=None, v_new=None, mask_new=None, delta=2.0, theta=None, threshold="pseudo_fp", **options
):
    """The function under test, compiled once for each kind of call; always with its statistics."""
    threshold = threshold if theta is None else theta
    return ffd.ffd_attention(
        q, cache, k_new, v_new, mask_new, delta=delta, threshold=threshold, return_stats=True, **options
    )


def oracle(q, sequences, extra, delta, mode):
    """Output [heads, value], kept [kv_heads, blocks] and thresholds of one sequence's query [heads, head]."""
    q = np.asarray(q)
    outputs, kept, thetas = [], [], []
    for h, sequence in enumerate(sequences):
        of_group = q[h * GROUP : (h + 1) * GROUP].astype(np.float64)
        more_keys, more_values = (np.asarray(x[:, h], np.float64) for x in extra)
        theta, keep = numpy_ffd.keeps(of_group, sequence, more_keys, delta, mode, SCALE)
        outputs.append(numpy_ffd.attention(of_group, sequence, keep, more_keys, more_values, SCALE))
        kept.append(keep)
        thetas.append(theta)
    return np.concatenate(outputs), np.array(kept), np.concatenate(thetas)


def nothing_new():
    return np.zeros((0, HEADS, HEAD)), np.zeros((0, HEADS, VALUE))


@pytest.mark.parametrize("mode", ["pseudo_fp", "pseudo", "exact"])
@pytest.mark.parametrize(("bits", "sink"), [(2, 0), (4, 3)])
def test_the_same_blocks_and_output_as_two_passes_in_float64(bits, sink, mode):
    cache, q, _, sequences = case(bits=bits, sink=sink)
    output, stats = run(q[:, 0], cache, threshold=mode)
    shares = []
    for b in range(BATCH):
        want, kept, theta = oracle(q[b, 0], sequences[b], nothing_new(), 2.0, mode)
        count = kept.shape[1]
        np.testing.assert_array_equal(stats.kept[b, :, :count], kept)
        assert not np.asarray(stats.kept[b, :, count:]).any()
        np.testing.assert_allclose(stats.threshold[b], theta, atol=2e-5)
        np.testing.assert_allclose(output[b], want, atol=2e-5)
        shares.append(kept.mean())
        np.testing.assert_allclose(stats.keep_ratio[b], kept.mean(), rtol=1e-6)
    assert 0.1 < np.mean(shares) < 0.9


def test_infinite_delta_is_dense_attention_on_what_is_stored_and_nearly_on_the_rows_themselves():
    for bits, error in ((2, 0.02), (4, 0.004)):
        cache, q, _, sequences = case(bits=bits)
        output, _ = run(q[:, 0], cache, delta=math.inf)
        for b in range(BATCH):
            for h, sequence in enumerate(sequences[b]):
                of_group = np.asarray(q[b, 0, h * GROUP : (h + 1) * GROUP], "f8")
                everything = np.ones(len(sequence.blocks), bool)
                none = [x[:, h] for x in nothing_new()]
                stored = numpy_ffd.attention(of_group, sequence, everything, *none, SCALE)
                got = output[b, h * GROUP : (h + 1) * GROUP]
                np.testing.assert_allclose(got, stored, atol=1e-5)
                true = numpy_ffd.dense_attention(of_group, sequence.keys, sequence.values, SCALE)
                assert np.linalg.norm(got - true) / np.linalg.norm(true) < error


def tree_mask():
    """Row 2 is a sibling of row 1, row 3 its child."""
    return np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)[None]


def test_each_of_several_queries_gets_what_it_would_get_alone():
    cache, q, (k_new, v_new), sequences = case(sink=3)
    mask = tree_mask()
    output, stats = run(q, cache, k_new, v_new, mask)
    assert stats.kept.shape == (BATCH, NEW, HEADS, 9)
    differ = False
    for b in range(BATCH):
        for i in range(NEW):
            extra = [x[b][mask[0, i]] for x in (k_new, v_new)]
            want, kept, _ = oracle(q[b, i], sequences[b], extra, 2.0, "pseudo_fp")
            np.testing.assert_array_equal(stats.kept[b, i, :, : kept.shape[1]], kept)
            np.testing.assert_allclose(output[b, i], want, atol=2e-5)
            differ |= i > 0 and bool((np.asarray(stats.kept[b, i]) != np.asarray(stats.kept[b, 0])).any())
    assert differ
    causal, _ = run(q, cache, k_new, v_new)
    first, of_first = run(q[:, :1], cache, k_new[:, :1], v_new[:, :1])
    np.testing.assert_allclose(causal[:, :1], first, atol=2e-6)
    np.testing.assert_array_equal(of_first.kept, stats.kept[:, 0])


def test_queries_together_read_the_union_of_their_blocks():
    cache, q, (k_new, v_new), sequences = case()
    mask = np.broadcast_to(tree_mask(), (BATCH, NEW, NEW))
    output, stats = run(q, cache, k_new, v_new, mask, queries="together")
    each, of_each = run(q, cache, k_new, v_new, mask)
    np.testing.assert_array_equal(stats.kept, of_each.kept.any(1))
    np.testing.assert_allclose(stats.threshold, of_each.threshold, atol=1e-5)
    assert float(abs(output - each).max()) > 1e-4
    union = np.asarray(stats.kept)
    for b in range(BATCH):
        for i in range(NEW):
            for h, sequence in enumerate(sequences[b]):
                of_group = np.asarray(q[b, i, h * GROUP : (h + 1) * GROUP], "f8")
                extra = [np.asarray(x, "f8")[b, mask[b, i], h] for x in (k_new, v_new)]
                want = numpy_ffd.attention(
                    of_group, sequence, union[b, h, : len(sequence.blocks)], *extra, SCALE
                )
                np.testing.assert_allclose(output[b, i, h * GROUP : (h + 1) * GROUP], want, atol=2e-5)


def test_a_given_threshold_and_the_best_n_blocks():
    cache, q, _, sequences = case()
    theta = np.random.default_rng(5).normal(size=(BATCH, HEADS * GROUP)).astype("f4") + 2
    _, stats = run(q[:, 0], cache, theta=theta)
    _, of_top = run(q[:, 0], cache, select=("topk", 3))
    _, of_all = run(q[:, 0], cache, select=("topk", 10))
    for b in range(BATCH):
        for h, sequence in enumerate(sequences[b]):
            of_group = np.asarray(q[b, 0, h * GROUP : (h + 1) * GROUP], "f8")
            count = len(sequence.blocks)
            top = np.array([(SCALE * (sequence.scan_keys(n) @ of_group.T)).max(0) for n in range(count)])
            want = (top >= theta[b, h * GROUP : (h + 1) * GROUP]).any(1)
            np.testing.assert_array_equal(stats.kept[b, h, :count], want)
            best = np.zeros(10, bool)
            best[np.argsort(-top.max(1))[:3]] = True
            np.testing.assert_array_equal(of_top.kept[b, h], best)
            np.testing.assert_array_equal(of_all.kept[b, h], np.arange(10) < count)


@pytest.mark.parametrize("seed", range(6))
def test_bounds_are_never_violated(seed):
    for bits in (2, 4):
        cache, q, _, sequences = case(seed=seed, bits=bits)
        _output, stats = run(q[:, 0], cache, delta=1.5, threshold="certified")
        looser, kept_stats = run(q[:, 0], cache, delta=1.5)
        full, _ = run(q[:, 0], cache, delta=math.inf)
        mass = np.asarray(ffd.kept_mass(q[:, 0], cache, kept_stats.kept))
        for b in range(BATCH):
            for h, sequence in enumerate(sequences[b]):
                of_group = np.asarray(q[b, 0, h * GROUP : (h + 1) * GROUP], "f8")
                count = len(sequence.blocks)
                true = [SCALE * sequence.keys[span] @ of_group.T for span in sequence.spans]
                scan = [SCALE * sequence.scan_keys(n) @ of_group.T for n in range(count)]
                for n, (_, scale, _) in enumerate(sequence.blocks):  # (a): error of a scan score
                    bound = 0.5 * SCALE * abs(of_group) @ scale
                    assert (abs(scan[n] - true[n]).max(0) <= bound * (1 + 1e-4) + 1e-5).all()
                # (d): a block with a row within δ of the largest score of all is read.
                dense = SCALE * sequence.keys[sequence.dense] @ of_group.T
                largest = np.maximum(np.max([x.max(0) for x in true], axis=0), dense.max(0, initial=-np.inf))
                for n in range(count):
                    if (true[n].max(0) >= largest - 1.5 + 1e-4).any():
                        assert stats.kept[b, h, n]
                # (b): the error is the mass left out times what the values can differ by.
                kept = np.asarray(kept_stats.kept[b, h, :count])
                norms = np.linalg.norm(sequence.values, axis=-1)
                left = [norms[sequence.spans[n]].max() for n in range(count) if not kept[n]]
                rest = [norms[sequence.spans[n]].max() for n in range(count) if kept[n]]
                read = np.max(rest + list(norms[sequence.dense]))
                heads = slice(h * GROUP, (h + 1) * GROUP)
                error = np.linalg.norm(np.asarray(full[b, heads] - looser[b, heads], "f8"), axis=-1)
                assert (error <= (1 - mass[b, heads]) * (max(left, default=0) + read) + 1e-5).all()
                stored = np.concatenate([SCALE * sequence.stored_keys(n) @ of_group.T for n in range(count)])
                weights = np.exp(np.concatenate([stored, dense]) - largest)
                chosen = np.r_[np.repeat(kept, BLOCK), np.ones(len(dense), bool)]
                np.testing.assert_allclose(mass[b, heads], weights[chosen].sum(0) / weights.sum(0), rtol=1e-4)


def test_an_audit_of_other_blocks_is_refused():
    cache, q, _, _ = case()
    each = jnp.ones((BATCH, NEW, HEADS, 10), bool)
    assert ffd.kept_mass(q, cache, each).shape == (BATCH, NEW, HEADS * GROUP)
    mass, read = map(inspect.unwrap, (ffd.kept_mass, ffd.bytes_read))  # without the checks of annotations
    for call in (lambda x: mass(q[:, 0], cache, x), lambda x: read(cache, x)):
        for kept in (each, each[:, 0, :, :9]):
            with pytest.raises(ValueError, match=r"kept must have shape \(2, 2, 10\)"):
                call(kept)


def test_edges_no_block_one_block_no_tail_and_no_row_at_all():
    for lengths in ((0, 5), (8, 13), (16, 72)):
        cache, q, (k_new, v_new), sequences = case(lengths=lengths)
        output, stats = run(q[:, :1], cache, k_new[:, :1], v_new[:, :1])
        alone, _ = run(q[:, 0], cache)
        for b in range(BATCH):
            want, kept, _ = oracle(
                q[b, 0], sequences[b], [x[b, :1] for x in (k_new, v_new)], 2.0, "pseudo_fp"
            )
            np.testing.assert_array_equal(stats.kept[b, :, : kept.shape[1]], kept)
            np.testing.assert_allclose(output[b, 0], want, atol=2e-5)
            want, _, _ = oracle(q[b, 0], sequences[b], nothing_new(), 2.0, "pseudo_fp")
            np.testing.assert_allclose(alone[b], want, atol=2e-5)
        assert lengths[0] or not np.asarray(alone[0]).any()


def test_a_sink_that_is_an_outlier_spoils_its_block_unless_it_is_kept_whole():
    rng = np.random.default_rng(7)
    k = rng.normal(size=(1, 64, 1, HEAD)).astype("f4")
    k[:, 0] *= 60
    v, q = rng.normal(size=(1, 64, 1, HEAD)).astype("f4"), rng.normal(size=(1, 1, HEAD)).astype("f4")
    true = numpy_ffd.dense_attention(q[0].astype("f8"), k[0, :, 0].astype("f8"), v[0, :, 0], SCALE)
    errors = []
    for sink in (0, 4):
        cache = ffd.init_cache(1, 64, 1, HEAD, block=BLOCK, sink=sink, dtype="float32")
        cache = ffd.prefill(cache, jnp.asarray(k), jnp.asarray(v))
        keys, _, committed = ffd.stored_rows(cache)
        np.testing.assert_array_equal(committed.sum(), 64)
        order = np.flatnonzero(committed[0])
        errors.append(abs(np.asarray(keys)[0, 0, order] - k[0, :, 0])[1:].max())
        output = ffd.ffd_attention(jnp.asarray(q), cache, delta=math.inf)
        assert np.isfinite(output).all()
    assert errors[1] < errors[0] / 10
    np.testing.assert_allclose(output[0], true, atol=0.05)


def test_a_bfloat16_cache_rounds_new_rows_as_it_will_store_them():
    rng = np.random.default_rng(8)
    rows = jnp.asarray(rng.normal(size=(1, 20, 1, HEAD)), jnp.float32)
    q = jnp.asarray(rng.normal(size=(1, 1, 2, HEAD)), jnp.float32)
    cache = ffd.prefill(ffd.init_cache(1, 64, 1, HEAD, block=32), rows, rows)
    before = ffd.ffd_attention(q, cache, rows[:, :1], rows[:, :1])
    after = ffd.ffd_attention(q, ffd.append(cache, rows[:, :1], rows[:, :1]))
    np.testing.assert_allclose(before, after, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 1, 1, 6, 16)}, r"q must be \[batch, heads, head\]"),
        ({"q": (2, 5, 16)}, "q has 5 heads, which is no multiple of the 2 heads of the cache"),
        ({"q": (3, 6, 16)}, "does not fit a cache of 2 sequences"),
        ({"delta": -1}, "delta=-1.0 must be at least 0"),
        ({"threshold": "best"}, "threshold='best' must be one of"),
        ({"select": "topk"}, "select='topk' is not known"),
        ({"select": ("topk", 0)}, r"must be 'delta' or \('topk', n\)"),
        ({"threshold": jnp.ones((2, 3))}, r"threshold must have shape \(2, 6\), not \(2, 3\)"),
        ({"q": (2, 3, 6, 16), "threshold": jnp.ones((2, 6))}, r"threshold must have shape \(2, 3, 6\)"),
        ({"q": (2, 0, 6, 16)}, "is empty"),
        ({"mask_new": jnp.ones((1, 1, 1), bool)}, "mask_new needs k_new and v_new"),
        (
            {"k_new": (2, 1, 2, 16), "v_new": (2, 1, 2, 12), "mask_new": jnp.ones((1, 2, 2), bool)},
            r"mask_new must have shape \(2, 1, 1\), not \(1, 2, 2\)",
        ),
        ({"queries": "all"}, "queries='all' is not known"),
        ({"k_new": (2, 1, 2, 16)}, "k_new and v_new must be given together"),
        ({"k_new": (2, 3, 2, 16), "v_new": (2, 3, 2, 12)}, r"k_new must have shape \(2, 1, 2, 16\)"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    cache, q, _, _ = case()
    arguments = {"q": q[:, 0], **change}
    arguments = {
        name: jnp.zeros(x) if name in ("q", "k_new", "v_new") and isinstance(x, tuple) else x
        for name, x in arguments.items()
    }
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(ffd.ffd_attention)(arguments.pop("q"), cache, **arguments)
