"""Tiny models that the tests of probing share: one with random weights, one that has learned a little text."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax

from effml.nn.transformer import TransformerConfig, forward, init_params, next_token_loss

# Large initial weights, so that the choice varies from token to token and near-ties are rare.
CONFIG = TransformerConfig(
    61, 32, 1, 4, 48, num_kv_heads=2, max_length=1024, initializer_std=0.3, embedding_scale=1.5
)
PROMPTS = [[5, 17, 3], [60], list(range(1, 19)), [9] * 7, [4, 5, 4, 5, 4]]


def make_model(config=CONFIG, *, seed=0, **extra):
    return types.SimpleNamespace(
        config=config,
        params=init_params(jax.random.key(seed), config),
        forward=functools.partial(forward, config=config),
        **extra,
    )


@functools.lru_cache(maxsize=1)
def trained_model(steps=150):
    """The same shape, trained to continue a text of a few words; it shares the compiled programs of the other."""
    words = [
        "the",
        "cat",
        "sat",
        "on",
        "the",
        "mat",
        "and",
        "the",
        "dog",
        "ran",
        "to",
        "the",
        "cat",
        "while",
        "a",
        "bird",
        "sang",
        "in",
        "the",
        "old",
        "tree",
    ]
    chosen = np.random.default_rng(0).integers(0, len(words), 3000)
    ids = np.frombuffer(" ".join(words[i] for i in chosen).encode(), np.uint8) % 61
    starts = np.random.default_rng(1).integers(0, len(ids) - 33, (steps, 16))
    batches = ids[starts[..., None] + np.arange(33)].astype(np.int32)
    optimizer = optax.adam(3e-3)
    loss = lambda params, tokens: next_token_loss(params, {"tokens": tokens}, CONFIG)[0]

    @jax.jit
    def train(params, batches):
        def step(carry, tokens):
            params, state = carry
            value, gradient = jax.value_and_grad(loss)(params, tokens)
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), value

        (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), batches)
        return params, losses

    model = make_model()
    start = jax.tree.map(lambda leaf: leaf * (0.2 if leaf.ndim > 1 else 1.0), model.params)
    model.params, losses = train(start, batches)
    assert losses[-1] < 0.6 * losses[0]
    return model


def plain_logits(model, rows):
    """float[rows, vocab]: logits behind each list of ids, without a cache, one by one in one padded batch."""
    longest = 32 * (max(map(len, rows)) // 32 + 1)
    padded = np.zeros((len(rows), longest), np.int32)
    for row, ids in zip(padded, rows):
        row[: len(ids)] = ids
    last = jnp.array([[len(ids) - 1] for ids in rows])
    run = jax.jit(lambda params, tokens, last: model.forward(params, tokens, logits_for=last).logits)
    return np.asarray(run(model.params, padded, last)[:, 0])
