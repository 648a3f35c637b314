"""Decoding with a cache against the forward pass over the whole text, token by token, in both modes."""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.attend import ffd, ssa
from effml.decode import generate, stream
from effml.nn import init_cache
from effml.nn.transformer import TransformerConfig, forward_cached, stack_layers

MODEL = TransformerConfig(
    vocab_size=61, width=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=48, initializer_std=0.3
)
CONFIG = ssa.SSATransformerConfig(MODEL, ssa.SSAConfig(block_size=8, num_blocks=2))
LENGTH = 43


@functools.cache
def params():
    return ssa.init_params(jax.random.key(0), CONFIG)


def tokens(batch=2, length=LENGTH, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 61, (batch, length)), jnp.int32)


@functools.partial(jax.jit, static_argnames=("mode",))
def whole(params, tokens, mode):
    return ssa.forward(params, tokens, CONFIG, mode=mode).logits


@functools.partial(jax.jit, static_argnames=("mode",))
def step(params, new, cache, counts, mode):
    seam = functools.partial(ssa.attention, config=CONFIG.attention, mode=mode)
    out, cache = forward_cached(params, new, cache, MODEL, counts=counts, attention=seam, append=ssa.append)
    return out.logits, cache


def near(a, b, tolerance=2e-5):
    np.testing.assert_allclose(a, b, atol=tolerance, rtol=0)


@pytest.mark.parametrize("mode", ["full", "sparse"])
def test_every_step_equals_the_forward_pass_over_the_text(mode):
    """From an empty cache on, so that own blocks begin, fill up and complete under the steps."""
    ids = tokens()
    wanted = whole(params(), ids, mode)
    cache = ssa.init_cache(CONFIG, 2, LENGTH)
    ones = jnp.ones(2, jnp.int32)
    got = []
    for t in range(LENGTH):
        logits, cache = step(params(), np.asarray(ids)[:, t : t + 1], cache, ones, mode)
        got.append(np.asarray(logits)[:, 0])
    near(np.stack(got, 1), wanted)
    other = whole(params(), ids, "full" if mode == "sparse" else "sparse")
    assert np.abs(other - wanted)[:, -1].max() > 0.05  # the two modes are not one


@pytest.mark.parametrize(
    ("mode", "first", "pieces"), [("sparse", 7, (1, 8)), ("sparse", 21, (20, 1)), ("full", 21, (20, 1))]
)
def test_pieces_of_any_length_equal_it_as_well(mode, first, pieces):
    """A ragged prompt (padding on the right), then several rows at once: by gathering, and by the kernel."""
    ids = np.asarray(tokens())
    wanted = np.asarray(whole(params(), ids, mode))
    cache = ssa.init_cache(CONFIG, 2, LENGTH + 5)
    counts = np.array([first, first - 4])
    prompt = ids[:, : first + 2]  # what stands behind a sequence's count is padding
    logits, cache = step(params(), prompt, cache, counts, mode)
    for b in range(2):
        near(logits[b, : counts[b]], wanted[b, : counts[b]])
    for new in pieces:
        rows = np.stack([ids[b, counts[b] : counts[b] + new] for b in range(2)])
        logits, cache = step(params(), rows, cache, np.full(2, new), mode)
        for b in range(2):
            near(logits[b], wanted[b, counts[b] : counts[b] + new])
        counts = counts + new


def test_sums_are_those_of_the_committed_rows_whatever_was_chosen():
    rng = np.random.default_rng(0)
    cache = ssa.init_cache(CONFIG, 2, 24)[0]
    kept = [[], []]
    commit = jax.jit(ssa.append)
    for count in ([3, 1], [4, 0], [2, 4], [4, 4]):
        k = rng.normal(size=(2, 5, 2, 8)).astype(np.float32)
        rows = np.array([[4, 0, 2, 1], [1, 2, 3, 0]])
        cache = commit(cache, k, k, jnp.asarray(rows), jnp.asarray(count))
        for b in range(2):
            kept[b] += [k[b, row] for row in rows[b, : count[b]]]
    assert cache.length.tolist() == [13, 9]
    for b in range(2):
        for n in range(3):
            rows = kept[b][8 * n : 8 * n + 8]
            near(cache.sums[b, :, n], np.sum(rows, 0) if rows else np.zeros((2, 8)), 1e-5)


def test_scanned_layers_decode_the_same():
    ids = tokens(1)
    scanned = stack_layers(params())
    cache = ssa.init_cache(MODEL, 1, LENGTH, block_size=8, stacked=True)
    logits, cache = step(scanned, ids[:, :20], cache, None, "sparse")
    last, cache = step(scanned, ids[:, 20:21], cache, None, "sparse")
    wanted = whole(params(), ids, "sparse")
    near(logits, wanted[:, :20])
    near(last[:, 0], wanted[:, 20])


def model_of(mode="full"):
    return types.SimpleNamespace(
        config=CONFIG, params=params(), forward=functools.partial(ssa.forward, config=CONFIG, mode=mode)
    )


@pytest.mark.parametrize("mode", ["full", "sparse"])
def test_generation_writes_what_the_uncached_model_would(mode):
    prompt = np.asarray(tokens(1, 13))
    written = generate(model_of(), prompt, max_new_tokens=12, **ssa.decoding_options(CONFIG, mode=mode))
    ids = np.zeros((1, LENGTH), np.int32)
    ids[:, :13] = prompt
    for t in range(13, 25):
        ids[0, t] = whole(params(), ids, mode)[0, t - 1].argmax()
    assert written.tokens[0].tolist() == ids[0, 13:25].tolist()
    if mode == "full":  # by default it reads everything, from a dense cache
        assert generate(model_of(), prompt, max_new_tokens=12).tokens.tolist() == written.tokens.tolist()
    else:
        options = ssa.decoding_options(CONFIG, mode=mode)
        assert list(stream(model_of(), prompt[0], max_new_tokens=12, chunk=5, **options)) == list(
            written.tokens[0]
        )


def test_one_program_serves_every_step():
    traced = jax.jit(chex.assert_max_traces(lambda *a: step(*a, mode="sparse"), n=1), donate_argnums=2)
    cache = ssa.init_cache(CONFIG, 1, LENGTH)
    for t in range(4):
        _, cache = traced(params(), tokens(1)[:, t : t + 1], cache, None)
    assert ssa.decoding_options(CONFIG)["cache_init"] is ssa.decoding_options(CONFIG)["cache_init"]
    chex.clear_trace_counter()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: step(params(), tokens(1), init_cache(MODEL, 1, 64), None, "sparse"),
            "effml.attend.ssa.init_cache",
        ),
        (
            lambda: step(params(), tokens(1), ssa.init_cache(CONFIG, 1, 64, block_size=16), None, "sparse"),
            "block_size=8 differs from that of the cache, 16",
        ),
        (
            lambda: ssa.forward(
                params(), tokens(1), CONFIG, cache=ffd.decoding_options()["cache_init"](MODEL, 1, 64)
            ),
            "needs an SSACache or a DenseCache, not QuantizedKV",
        ),
        (
            lambda: ssa.append(ssa.init_cache(CONFIG, 1, 64)[0], *2 * [jnp.ones((1, 3, 1, 8))]),
            r"k must have shape \(1, 3, 2, 8\)",
        ),
        (
            lambda: ssa.append(
                ssa.init_cache(CONFIG, 1, 64)[0], *2 * [jnp.ones((1, 3, 2, 8))], counts=jnp.array([4])
            ),
            r"counts must be in 0\.\.3",
        ),
        (lambda: ssa.init_cache(MODEL, 1, 64), "block_size must be given"),
        (lambda: ssa.init_cache(CONFIG, 1, 0), "max_length=0"),
        (lambda: ssa.decoding_options(CONFIG, mode="spare"), "did you mean 'sparse'"),
        (lambda: ssa.decoding_options(CONFIG, num_blocks=0), "num_blocks=0"),
        (
            lambda: ssa.forward(
                params(),
                tokens(1),
                CONFIG,
                mode="sparse",
                cache=ssa.init_cache(CONFIG, 1, 64),
                mask=jnp.ones((1, 43, 43), bool),
            ),
            "mask must be None with sparse attention",
        ),
        (
            lambda: ssa.forward(params(), tokens(1), CONFIG, cache=ssa.init_cache(CONFIG, 1, 64), train=True),
            "do not go with a cache",
        ),
        (
            lambda: ssa.forward(params(), tokens(1), CONFIG, mask=jnp.ones((1, 43, 43), bool)),
            "mask must be None",
        ),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
