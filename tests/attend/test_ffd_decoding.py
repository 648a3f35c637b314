"""A transformer that decodes with FFD: through generation, row by row, in batches, scanned or not."""

import dataclasses
import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effml import decode, nn
from effml.attend import ffd, ssa
from effml.decode import _loop
from effml.nn import transformer

# Large kernels and scores: those of a fresh model are nearly flat, and every block would matter alike.
CONFIG = nn.TransformerConfig(
    vocab_size=64,
    width=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    mlp_width=48,
    max_length=256,
    initializer_std=0.3,
    attention_scale=1.0,
)


@functools.cache
def params():
    return transformer.init_params(jax.random.key(0), CONFIG)


def model():
    forward = functools.partial(transformer.forward, config=CONFIG)
    return types.SimpleNamespace(config=CONFIG, params=params(), forward=forward)


def tokens(batch=2, length=70):
    return np.random.default_rng(0).integers(0, 64, (batch, length)).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("config", "scanned", "prompt"))
def teacher_forced(params, ids, lengths, config, prompt, scanned=False):
    """Logits [batch, steps, vocab] of the rows behind the prompt, fed one by one, and the kept share of each step."""
    arguments = ffd.decoding_options(config, stacked=scanned)
    attention, append = arguments["attention"], arguments["append"]
    caches = arguments["cache_init"](CONFIG, ids.shape[0], 128)
    call = functools.partial(transformer.forward_cached, config=CONFIG, attention=attention, append=append)
    _, caches = call(params, ids[:, :prompt], caches, counts=lengths)

    def step(caches, row):
        out, caches = call(params, row[:, None], caches)
        info = out.info.keep_ratio if scanned else jnp.stack([one.keep_ratio for one in out.info])
        return caches, (out.logits[:, 0], info)

    caches, (logits, kept) = jax.lax.scan(step, caches, ids[:, prompt:].T)
    return jnp.moveaxis(logits, 0, 1), kept, caches


@functools.cache
def plain():
    """Logits of the whole text by dense attention."""
    return np.asarray(transformer.forward(params(), tokens(), CONFIG).logits)


CHOOSING = ffd.FFDConfig(delta=1.0, block=8, dense_layers=(0,))


@functools.partial(jax.jit, static_argnames="config")
def fed(params, ids, caches, config):
    """All rows of `ids` read and committed in one call."""
    attention = ffd.FFDAttention(config)
    return transformer.forward_cached(params, ids, caches, CONFIG, attention=attention, append=ffd.append)


def test_infinite_delta_decodes_as_the_dense_cache_does():
    config = ffd.FFDConfig(delta=float("inf"), block=8, bits=4, residual_dtype="float32")
    logits, kept, _ = teacher_forced(params(), tokens(), jnp.array([40, 40]), config, 40)
    assert float(kept.min()) == 1
    np.testing.assert_allclose(logits, plain()[:, 40:], atol=2e-4)


def test_a_finite_delta_reads_less_ragged_or_scanned_and_named_layers_read_everything():
    whole, kept, caches = teacher_forced(params(), tokens(), jnp.array([40, 40]), CHOOSING, 40)
    assert float(kept[:, 0].min()) == 1
    assert 0.05 < float(kept[:, 1].mean()) < 0.95
    assert np.abs(whole - plain()[:, 40:]).max() > 0.1
    stacked = transformer.stack_layers(params())
    scanned, _, of_scanned = teacher_forced(
        stacked, tokens(), jnp.array([40, 40]), CHOOSING, 40, scanned=True
    )
    np.testing.assert_allclose(scanned, whole, atol=5e-4)
    for layer, cache in enumerate(caches):
        chex.assert_trees_all_equal(cache.length, of_scanned.length[layer])
    # Row 1 has a prompt of 33 and padding: it gets what it gets in a batch of such prompts.
    mixed = np.stack([tokens()[0], np.concatenate([tokens()[1, :33], tokens()[1, :7], tokens()[1, 33:63]])])
    ragged, _, _ = teacher_forced(params(), mixed, jnp.array([40, 33]), CHOOSING, 40)
    even, _, _ = teacher_forced(params(), mixed[[1, 1]], jnp.array([33, 33]), CHOOSING, 40)
    np.testing.assert_allclose(ragged[0], whole[0], atol=5e-4)
    np.testing.assert_allclose(ragged[1], even[1], atol=5e-4)


def test_generation_takes_it_and_compiles_once():
    prompts, lengths = decode.pad_prompts([tokens()[0, :20], tokens()[1, :9]])
    run = functools.partial(decode.generate, model(), prompts, lengths=lengths, max_new_tokens=24)
    generation = run(**ffd.decoding_options(CHOOSING))
    written = generation.tokens
    # Each token is the likeliest one after those before it, read one by one.
    text = np.concatenate([prompts, written[:, :-1]], axis=1)
    logits, kept = map(np.asarray, teacher_forced(params(), text, jnp.asarray(lengths), CHOOSING, 20)[:2])
    assert generation.kept == pytest.approx(kept.mean(), abs=1e-5)
    assert run().kept is None, "dense attention reads everything and reports nothing"
    best = np.sort(logits, -1)
    clear = best[..., -1] - best[..., -2] > 1e-3
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(logits.argmax(-1)[clear], written[:, 1:][clear])
    before = _loop.write._cache_size()
    np.testing.assert_array_equal(run(**ffd.decoding_options(CHOOSING)).tokens, written)
    assert _loop.write._cache_size() == before


def test_rows_of_a_tree_get_what_each_path_gets_alone_and_paths_end_with_their_block():
    ids = tokens()[:, :37]
    _, caches = fed(params(), ids[:, :30], ffd.FFDCaches(CHOOSING)(CONFIG, 2, 64), CHOOSING)
    assert ffd.room_in_block(caches[0]).tolist() == [2, 2]
    # Row 30, two drafts of row 31 (the text's, and another), one behind the text's.
    tree = np.stack([ids[:, 30], ids[:, 31], (ids[:, 31] + 1) % 64, ids[:, 32]], axis=1)
    mask = jnp.array([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]], bool)
    positions = jnp.broadcast_to(jnp.array([30, 31, 31, 32]), (2, 4))
    draft = jax.jit(
        functools.partial(transformer.forward, config=CONFIG, attention=ffd.FFDAttention(CHOOSING))
    )
    out = draft(params(), tree, cache=caches, mask=mask, positions=positions)
    first, after = fed(params(), ids[:, 30:31], caches, CHOOSING)
    second, full = fed(params(), ids[:, 31:32], after, CHOOSING)
    np.testing.assert_allclose(out.logits[:, 0], first.logits[:, 0], atol=2e-4)
    np.testing.assert_allclose(out.logits[:, 1], second.logits[:, 0], atol=2e-4)
    # Rows 30 and 31 fill the block: committed together they leave the same cache, and row 32 must come after that.
    rows, counts = jnp.broadcast_to(jnp.array([0, 1, 3]), (2, 3)), ffd.room_in_block(caches[0])
    for layer, cache in enumerate(caches):
        committed = ffd.append(cache, out.keys[layer], out.values[layer], rows, counts)
        assert committed.length.tolist() == full[layer].length.tolist() == [32, 32]
        keys, values, _ = ffd.stored_rows(committed)
        want, wanted, _ = ffd.stored_rows(full[layer])
        assert (jnp.abs(keys - want)[:, :, :32] < 1e-4).mean() > 0.99
        np.testing.assert_allclose(values[:, :, :32], wanted[:, :, :32], atol=1e-4)


def test_a_prompt_in_pieces_is_read_densely():
    config = ffd.FFDConfig(delta=0.0, block=8, bits=4, residual_dtype="float32", most_queries=4)
    _, caches = fed(params(), tokens()[:, :30], ffd.FFDCaches(config)(CONFIG, 2, 128), config)
    out, _ = fed(params(), tokens()[:, 30:60], caches, config)
    np.testing.assert_allclose(out.logits, plain()[:, 30:60], atol=2e-4)


def test_the_module_is_the_functions():
    layer = ffd.FFDSelfAttention(
        CONFIG, ffd.FFDConfig(delta=float("inf"), block=8, bits=4, residual_dtype="float32"), rngs=nnx.Rngs(0)
    )
    x = jax.random.normal(jax.random.key(1), (2, 21, 32))
    call = jax.jit(lambda layer, x, cache: layer(x, cache))
    whole, _ = call(layer, x, layer.init_cache(2, 64))
    y, cache = call(layer, x[:, :20], layer.init_cache(2, 64))
    last, cache = call(layer, x[:, 20:], cache)
    assert cache.length.tolist() == [21, 21]
    assert cache.num_blocks.tolist() == [2, 2]
    np.testing.assert_allclose(y, whole[:, :20], atol=1e-5)
    np.testing.assert_allclose(last, whole[:, 20:], atol=1e-5)
    assert not [leaf for leaf in jax.tree.leaves(nnx.state(layer)) if leaf.shape[:1] == (2,)]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"delta": -1.0}, ValueError, "delta=-1.0 must be at least 0"),
        ({"delta": float("nan")}, ValueError, "delta=nan must be at least 0"),
        ({"delta": True}, TypeError, "delta=True must be a number"),
        ({"dense_layers": (-1,)}, ValueError, "dense_layers=.* counted from 0"),
        ({"block": 20}, ValueError, "block=20 must be a multiple of 8"),
        ({"bits": 8}, ValueError, "bits=8 must be one of 2, 4"),
        ({"threshold": "max"}, ValueError, "threshold='max' must be one of"),
        ({"deltas": 1}, TypeError, "deltas"),
    ],
)
def test_settings_that_are_not_possible(changes, error, message):
    with pytest.raises(error, match=message):
        ffd.decoding_options(**changes)


def test_another_cache_is_named():
    caches = nn.init_cache(CONFIG, 2, 128)
    with pytest.raises(ValueError, match="not DenseCache"):
        transformer.forward(
            params(), tokens(), CONFIG, cache=caches, attention=ffd.decoding_options()["attention"]
        )


def test_a_model_without_a_cache_is_dense():
    out = transformer.forward(params(), tokens(), CONFIG, attention=ffd.FFDAttention(ffd.FFDConfig()))
    np.testing.assert_allclose(out.logits, plain(), atol=1e-5)


def test_a_model_trained_with_gates_and_blocks_decodes_with_its_gates():
    one = dataclasses.replace(CONFIG, num_layers=1)
    config = ssa.SSATransformerConfig(one, ssa.SSAConfig(8, 2))
    weights = ssa.init_params(jax.random.key(3), config)
    for layer in weights["layers"]:  # fresh gates are all one half
        layer["attention"]["gate"]["kernel"] = 0.5 * jax.random.normal(jax.random.key(4), (32, 4))
    whole = ssa.forward(weights, tokens()[:, :31], config).logits
    settings = ffd.FFDConfig(delta=float("inf"), block=8, bits=4, residual_dtype="float32")
    options = ffd.decoding_options(settings, block=config.attention.block_size)
    call = jax.jit(functools.partial(ssa.forward, config=config, attention=options["attention"]))
    caches = options["cache_init"](config.model, 2, 64)
    out = call(weights, tokens()[:, :30], cache=caches)
    caches = [options["append"](*rows) for rows in zip(caches, out.keys, out.values)]
    last = call(weights, tokens()[:, 30:31], cache=caches)
    np.testing.assert_allclose(out.logits, whole[:, :30], atol=2e-4)
    np.testing.assert_allclose(last.logits, whole[:, 30:], atol=2e-4)
