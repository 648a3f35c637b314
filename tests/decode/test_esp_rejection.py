"""The distribution of what is written, against exact probabilities of a vocabulary of eleven."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from effml.decode import SamplingConfig, esp, filter_logits
from effml.nn.transformer import TransformerConfig
from tests.decode.esp_models import make_model

TOY = TransformerConfig(11, 16, 1, 2, 16, initializer_std=0.35)
DRAWS, ROWS = 20_000, 4_000
PROMPT = [3, 1, 4]


@functools.lru_cache
def exact(sampling):
    """float64[11, 11, 11]: probability of every first three tokens."""
    model = make_model(TOY)

    @jax.jit
    def following(tokens):
        logits = model.forward(model.params, tokens).logits[:, -1]
        return jax.nn.softmax(filter_logits(logits, sampling), axis=-1)

    pairs = np.stack(np.meshgrid(range(11), range(11), indexing="ij"), -1).reshape(-1, 2)
    behind = lambda ids: np.concatenate([np.tile(PROMPT, (len(ids), 1)), ids], axis=1)
    first = np.asarray(following(np.array([PROMPT])), np.float64)[0]
    second = np.asarray(following(behind(pairs[::11, :1])), np.float64)
    third = np.asarray(following(behind(pairs)), np.float64).reshape(11, 11, 11)
    return first[:, None, None] * second[:, :, None] * third


def chi_square(counts, probabilities):
    """p-value, cells of fewer than five expected draws joined."""
    expected = probabilities.ravel() * counts.sum()
    large = expected >= 5
    seen = np.append(counts.ravel()[large], counts.ravel()[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    if wanted[-1] < 1e-9:
        if seen[-1]:
            return 0.0
        seen, wanted = seen[:-1], wanted[:-1]
    return stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue


@pytest.mark.parametrize(
    ("verify", "sampling"),
    [
        ("exact", SamplingConfig(temperature=1.0)),
        ("rejection", SamplingConfig(temperature=1.3)),
        ("rejection", SamplingConfig(temperature=1.0, top_p=0.8)),
    ],
)
def test_first_tokens_have_the_models_own_distribution(verify, sampling):
    model = make_model(TOY)
    config = esp.ESPConfig(num_masks=2, widths=(3, 2), verify=verify)
    found = []
    for call in range(DRAWS // ROWS):
        written = esp.generate(
            model,
            np.tile(PROMPT, (ROWS, 1)),
            max_new_tokens=3,
            config=config,
            sampling=sampling,
            key=jax.random.key(call),
        )
        found.append(written.tokens)
    counts = np.zeros((11, 11, 11))
    np.add.at(counts, tuple(np.concatenate(found).T), 1)
    probabilities = exact(sampling)
    assert 0.05 < written.stats.accepted_by_depth[0] < 0.95
    # Accepted and refused candidates both decide the second and the third token.
    for axis in (2, 0):
        assert chi_square(counts.sum(axis), probabilities.sum(axis)) > 1e-3
    # The test is sharp enough to see a hundredth of the draws go astray.
    moved = counts.sum(2)
    moved[:, 0] += 0.02 * moved.sum(1)
    assert chi_square(moved, probabilities.sum(2)) < 1e-3


def test_rejection_accepts_more_than_matching_a_draw():
    """On one node: the acceptance of Gumbel-drawn candidates with q near p is above that of an independent match."""
    logits = jnp.tile(jnp.array([[2.0, 1.0, 0.5, 0.0, -1.0]]), (4000, 1))
    sampling, keys = SamplingConfig(temperature=1.0), jax.random.split(jax.random.key(0), 4000)
    noise = jax.random.gumbel(jax.random.key(1), logits.shape)
    candidates = jax.lax.top_k(logits + noise, 2)[1]
    always = jnp.ones(4000, bool)
    taken = esp.choose_by_rejection(logits, keys, sampling, candidates, logits, always).token
    assert (taken == candidates[:, 0]).all()  # q = p: the first candidate is always taken
    matched = esp.choose(logits, keys, sampling).token
    assert 0.5 < (matched[:, None] == candidates).any(1).mean() < 0.95
    none = esp.choose_by_rejection(logits, keys, sampling, candidates, logits, ~always).token
    share = np.bincount(none, minlength=5) / 4000
    np.testing.assert_allclose(share, jax.nn.softmax(logits[0]), atol=0.03)
