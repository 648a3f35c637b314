"""The two streams against float64 walks, masks and closed forms: values, gradients, causality and edges."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.attend import ssa
from pallas_kernels.block_sparse_attention import reference
from tests.attend import ssa_oracles

CONFIG = ssa.SSAConfig(block_size=8, num_blocks=2)


def rows(length, heads=4, kv_heads=2, head=8, batch=1, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = [(batch, length, n, head) for n in (heads, kv_heads, kv_heads)]
    gate = rng.uniform(0.2, 1, size=(batch, length, heads))
    return tuple(jnp.asarray(a, dtype) for a in (*(rng.normal(size=shape) for shape in shapes), gate))


@functools.partial(jax.jit, static_argnames=("config", "mode", "train"))
def run(q, k, v, gate, config=CONFIG, mode="sparse", train=False, segment_ids=None):
    return ssa.ssa_attention(q, k, v, gate, config, mode=mode, train=train, segment_ids=segment_ids)


def near(a, b, tolerance=2e-6):
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), atol=tolerance, rtol=0)


@pytest.mark.parametrize("length", [1, 7, 43])
def test_both_streams_are_the_literal_walks(length):
    q, k, v, gate = rows(length)
    output, align, streams = run(q, k, v, gate, train=True)
    blocks = ssa_oracles.select(q[0], k[0], 8, 2)
    assert ssa_oracles.as_sets(streams.indices[0]) == blocks
    sparse = ssa_oracles.attend(q[0], k[0], v[0], blocks, 8) * np.asarray(gate[0])[..., None]
    full = ssa_oracles.attend(q[0], k[0], v[0], None, 8) * np.asarray(gate[0])[..., None]
    near(streams.sparse[0], sparse)
    near(streams.full[0], full)
    near(output[0], sparse)
    far = np.abs(full - sparse)
    near(align, 2 * np.where(far < 1, far**2 / 2, far - 0.5).mean())
    for mode, wanted in (("sparse", sparse), ("full", full)):
        near(run(q, k, v, gate, mode=mode)[0][0], wanted)


@pytest.mark.parametrize("length", [1, 7, 43])
def test_a_budget_of_every_block_is_full_attention_and_needs_no_alignment(length):
    arrays = rows(length)
    _, align, streams = run(*arrays, config=ssa.SSAConfig(block_size=8, num_blocks=6), train=True)
    near(streams.sparse, streams.full, 1e-6)
    assert align < 1e-12
    if length < 8:  # one block is every block, whatever the budget
        near(run(*arrays, config=ssa.SSAConfig(8, 1))[0], streams.full, 1e-6)


def test_the_gap_is_the_dropped_mass_times_the_distance_of_what_is_kept_and_dropped():
    with jax.enable_x64(True):
        q, k, v, _ = rows(43, dtype=np.float64)
        indices = ssa.select_blocks(q, k, block_size=8, num_blocks=2).indices
        lost = np.asarray(ssa.dropped_mass(q, k, indices, block_size=8))[0]
        full = np.asarray(ssa.full_attention(q, k, v))[0]
        sparse = np.asarray(ssa.sparse_attention(q, k, v, indices, block_size=8))[0]
    chosen = ssa_oracles.as_sets(indices[0])
    dropped = [[set(range(6)) - chosen[t][h] for h in range(2)] for t in range(43)]
    for t, h in np.ndindex(43, 4):
        if not any(n <= t // 8 for n in dropped[t][h // 2]):
            assert lost[t, h] == 0
            continue
        seen = [s for s in range(t + 1) if s // 8 in dropped[t][h // 2]]
        scores = np.asarray(k)[0, :, h // 2] @ np.asarray(q)[0, t, h] / np.sqrt(8)
        weights = np.exp(scores[: t + 1])
        far = weights[seen] @ np.asarray(v)[0, seen, h // 2] / weights[seen].sum()
        near(lost[t, h], weights[seen].sum() / weights.sum(), 1e-12)
        near(full[t, h] - sparse[t, h], lost[t, h] * (far - sparse[t, h]), 1e-10)
    gap = np.linalg.norm(full - sparse, axis=-1)
    largest = np.linalg.norm(np.asarray(v)[0], axis=-1).max(0).repeat(2)
    assert (gap <= 2 * lost * largest + 1e-12).all()
    assert (gap > 0.2 * lost * largest).any()  # a bound that is not empty


def test_entropy_is_that_of_the_softmax():
    q, k, _, _ = rows(20)
    found = np.asarray(jax.jit(ssa.attention_entropy)(q, k))[0]
    for t, h in ((0, 1), (19, 3), (8, 0)):
        scores = np.float64(k[0, : t + 1, h // 2]) @ np.float64(q[0, t, h]) / np.sqrt(8)
        p = np.exp(scores) / np.exp(scores).sum()
        near(found[t, h], -(p * np.log(p)).sum(), 1e-5)


def _loss(arrays, config, mode, weights, choice):
    output, align, _ = ssa.ssa_attention(*arrays, config, mode=mode, train=True)
    return (output * weights).sum() * choice + config.align_weight * align


@functools.partial(jax.jit, static_argnames=("config", "mode"))
def slopes(arrays, weights, config, mode="sparse", choice=1.0):
    return jax.grad(_loss)(arrays, config, mode, weights, choice)


def never_chosen(q, k, length, block_size=8, budget=1):
    blocks = ssa_oracles.select(q[0], k[0], block_size, budget)
    return np.array(
        [
            [all(s // block_size not in blocks[t][h] for t in range(s, length)) for h in range(2)]
            for s in range(length)
        ]
    )


def test_keys_that_nobody_chose_learn_from_the_alignment_alone():
    """The capability gap: without it their gradient is exactly 0."""
    length = 43
    arrays = rows(length)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(1, length, 4, 8)), jnp.float32)
    # Read only the last block's tokens: rows of earlier blocks are chosen by nobody who counts.
    weights = weights.at[:, :40].set(0)
    for align_weight in (0.0, 10.0):
        config = ssa.SSAConfig(8, 1, align_weight=align_weight)
        _, d_key, d_value, _ = slopes(arrays, weights, config)
        for slope in (d_key, d_value):
            unread = np.abs(np.asarray(slope)[0, :40]).max(-1)
            assert (unread == 0).all() if align_weight == 0 else (unread > 1e-9).mean() > 0.95
            assert (np.abs(np.asarray(slope)[0, 40:]).max(-1) > 0).all()


def test_the_alignments_gradient_is_the_sum_of_its_two_sides():
    arrays = rows(43)
    weights = jnp.zeros((1, 43, 4, 8))
    of = {name: slopes(arrays, weights, ssa.SSAConfig(8, 2, 1.0, alignment=name)) for name in ssa.ALIGNMENTS}
    one, other = of["full_only"], of["sparse_only"]
    for i in range(4):
        near(of["two_sided"][i], one[i] + other[i], 1e-8)
        # Without stop-gradients each term moves both streams: exactly twice as much.
        near(of["joint"][i], 2 * of["two_sided"][i], 1e-8)
        assert np.abs(one[i]).max() > 1e-7 < np.abs(other[i]).max()

    # Each side by hand: the other stream is a constant.
    _, _, streams = run(*arrays, train=True)

    @jax.jit
    def by_hand(arrays):
        def side(stream):
            def loss(arrays):
                q, k, v, gate = arrays
                if stream == "full":
                    return ssa.smooth_l1(ssa.full_attention(q, k, v) * gate[..., None], streams.sparse)
                sparse = ssa.sparse_attention(q, k, v, streams.indices, block_size=8)
                return ssa.smooth_l1(streams.full, sparse * gate[..., None])

            return jax.grad(loss)(arrays)

        return side("full"), side("sparse")

    for mine, wanted in zip((one, other), by_hand(arrays)):
        for a, b in zip(mine, wanted):
            near(a, b, 1e-8)


@pytest.mark.parametrize("mode", ["full", "sparse"])
def test_the_gradient_is_the_slope_with_the_chosen_set_held(mode):
    with jax.enable_x64(True):
        arrays = rows(20, dtype=np.float64, seed=3)
        weights = jnp.asarray(np.random.default_rng(1).normal(size=(1, 20, 4, 8)))
        config = ssa.SSAConfig(8, 1, align_weight=3.0)
        loss = jax.jit(lambda arrays: _loss(arrays, config, mode, weights, 1.0))
        still = run(*arrays, config=config, train=True)[2].indices
        slope = slopes(arrays, weights, config, mode)
        # One-sided terms see a constant, so the whole loss has another slope than its gradient: take 2 H for it.
        h = 1e-5
        for which, at in itertools.product(range(4), (3, 17)):
            place = (0, at, 1) if which == 3 else (0, at, 1, 2)
            moved = [arrays[which].at[place].add(sign * h) for sign in (1, -1)]
            values = []
            for array in moved:
                changed = tuple(array if i == which else a for i, a in enumerate(arrays))
                np.testing.assert_array_equal(run(*changed, config=config, train=True)[2].indices, still)
                output, align, _ = run(*changed, config=config, train=True, mode=mode)
                # The gradient of the two terms is that of one of them without stop-gradient: half of their sum.
                values.append(float((output * weights).sum() + 3.0 * align / 2))
            near(slope[which][place], (values[0] - values[1]) / (2 * h), 2e-8)
        assert np.isfinite(loss(arrays))


def test_the_sparse_stream_is_a_mask_over_dense_scores_forward_and_backward():
    q, k, v, _ = rows(43)
    indices = jax.jit(lambda: ssa.select_blocks(q, k, block_size=8, num_blocks=2).indices)()
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(1, 43, 4, 8)), jnp.float32)
    ours = lambda *a: ssa.sparse_attention(*a, indices, block_size=8)
    dense = lambda *a: reference.block_sparse_attention(*a, indices, block_size=8)[0]
    (a, da), (b, db) = (
        jax.jit(jax.value_and_grad(lambda x, f=f: (f(*x) * weights).sum()))((q, k, v)) for f in (ours, dense)
    )
    near(a, b, 1e-4)
    for x, y in zip(da, db):
        near(x, y, 1e-5)


@pytest.mark.parametrize("mode", ["full", "sparse"])
def test_later_tokens_change_nothing_before_them(mode):
    arrays = rows(27)
    other = rows(27, seed=9)
    before = run(*arrays, mode=mode, train=False)[0]
    later = np.tri(26, 27, 0, bool) == 0  # row t: what comes behind token t
    q, k, v, gate = (
        jnp.asarray(np.where(later.reshape(26, 27, *[1] * (a.ndim - 2)), 10 * np.asarray(b), np.asarray(a)))
        for a, b in zip(arrays, other)
    )
    after = run(q, k, v, gate, mode=mode)[0]
    for t in range(26):
        near(after[t, : t + 1], before[0, : t + 1], 1e-6)
        assert np.abs(after[t, t + 1] - before[0, t + 1]).max() > 1e-3


def test_segments_are_attended_alone():
    sizes = [3, 20, 8, 12]
    arrays = rows(43)
    ids = jnp.asarray(np.repeat([2, 0, 1, 0], sizes))[None]
    for mode in ("full", "sparse"):
        whole = run(*arrays, mode=mode, segment_ids=ids)[0]
        for start, stop in itertools.pairwise(np.cumsum([0, *sizes])):
            near(whole[:, start:stop], run(*(a[:, start:stop] for a in arrays), mode=mode)[0])
    fewer = jax.jit(
        lambda ids: ssa.ssa_attention(*arrays, CONFIG, mode="sparse", segment_ids=ids, max_segments=1)[0]
    )(ids)
    assert np.isnan(fewer[0, -1]).all()  # its block does not fit: no number rather than a wrong one


def test_bfloat16_is_near_float32_on_the_same_blocks():
    arrays = rows(130)
    narrow = tuple(a.astype(jnp.bfloat16) for a in arrays)
    wide = tuple(a.astype(jnp.float32) for a in narrow)
    config = ssa.SSAConfig(8, 4)
    a, b = run(*narrow, config=config, train=True), run(*wide, config=config, train=True)
    np.testing.assert_array_equal(a[2].indices, b[2].indices)
    assert a[0].dtype == jnp.bfloat16
    assert a[1].dtype == jnp.float32
    near(a[2].sparse, b[2].sparse, 2e-2)
    near(a[2].full, b[2].full, 2e-2)


def test_a_traced_mode_takes_one_of_the_two():
    arrays = rows(43)
    for train in (True, False):
        f = jax.jit(lambda mode, train=train: ssa.ssa_attention(*arrays, CONFIG, mode=mode, train=train)[0])
        near(f(jnp.array(True)), run(*arrays, mode="sparse")[0], 1e-6)
        near(f(jnp.array(False)), run(*arrays, mode="full")[0], 1e-6)
    near(run(*arrays, mode=True)[0], run(*arrays, mode="sparse")[0], 0)


def test_the_alignment_can_be_relative_to_the_outputs_size():
    arrays = rows(43)
    plain, relative = (ssa.SSAConfig(8, 2, normalize_align=on, huber_delta=100.0) for on in (False, True))
    q, k, v, gate = arrays
    _, align, streams = run(q, k, 5 * v, gate, config=plain, train=True)
    near(run(*arrays, config=relative, train=True)[1], align / np.square(streams.full).mean(), 1e-7)
    near(run(q, k, 5 * v, gate, config=relative, train=True)[1], align / np.square(streams.full).mean(), 1e-7)
    assert align > 1e-3


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda a: ssa.ssa_attention(*a, CONFIG, mode="sparce"), ValueError, "did you mean 'sparse'"),
        (
            lambda a: ssa.ssa_attention(*a[:3], a[3][:, :, :2], CONFIG, mode="full"),
            ValueError,
            "gate of shape",
        ),
        (
            lambda a: ssa.ssa_attention(*a, CONFIG, mode="full", segment_ids=jnp.zeros((1, 2), int)),
            ValueError,
            "segment_ids must be",
        ),
        (lambda a: ssa.full_attention(a[0][:, :, :3], *a[1:3]), ValueError, "multiple of the 2 heads of key"),
        (
            lambda a: inspect.unwrap(ssa.full_attention)(a[0], a[1][:, 1:], a[2]),
            ValueError,
            r"key of shape \(1, 19, 2, 8\)",
        ),
        (
            lambda a: inspect.unwrap(ssa.ssa_attention)(*a[:2], a[2][:, 1:], a[3], CONFIG, mode="sparse"),
            ValueError,
            r"value of shape \(1, 19, 2, 8\)",
        ),
        (
            lambda a: ssa.ssa_attention(*(x[:, :0] for x in a), CONFIG, mode="sparse"),
            ValueError,
            "query of shape .* is empty",
        ),
        (lambda a: ssa.SSAConfig(block_size=4), ValueError, "block_size=4 must be at least 8"),
        (lambda a: ssa.SSAConfig(num_blocks=0), ValueError, "num_blocks=0"),
        (lambda a: ssa.SSAConfig(sparse_prob=1.5), ValueError, "sparse_prob=1.5 must be between 0 and 1"),
        (lambda a: ssa.SSAConfig(align_weight=-1), ValueError, "align_weight=-1"),
        (lambda a: ssa.SSAConfig(huber_delta=0), ValueError, "huber_delta=0"),
        (lambda a: ssa.SSAConfig(alignment="both"), ValueError, "alignment='both' is not known"),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call(rows(20))
