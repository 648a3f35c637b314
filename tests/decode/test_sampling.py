import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effml.decode.sampling import SamplingConfig, filter_logits, sample


def oracle_probabilities(logits, config):
    """Float64, by sorting: temperature, then top-k, then top-p of what is left; ties with the last one stay."""
    scores = np.asarray(logits, np.float64) / config.temperature
    if config.top_k is not None:
        kth = np.sort(scores, axis=-1)[..., ::-1][..., : config.top_k][..., -1:]
        scores = np.where(scores >= kth, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    if config.top_p is not None:
        ordered = np.sort(p, axis=-1)[..., ::-1]
        before = np.cumsum(ordered, axis=-1) - ordered
        last = (before < config.top_p).sum(-1, keepdims=True) - 1
        p = np.where(p >= np.take_along_axis(ordered, last, axis=-1), p, 0)
        p /= p.sum(-1, keepdims=True)
    return p


CONFIGS = [
    SamplingConfig(temperature=1.0),
    SamplingConfig(temperature=0.3),
    SamplingConfig(temperature=2.5, top_k=1),
    SamplingConfig(temperature=0.7, top_k=5),
    SamplingConfig(temperature=1.3, top_p=0.5),
    SamplingConfig(temperature=1.0, top_p=0.999),
    SamplingConfig(temperature=0.8, top_k=7, top_p=0.6),
    SamplingConfig(temperature=0.8, top_k=10**6, top_p=1.0),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 33])
def test_probabilities_are_those_of_float64(config, vocab):
    logits = np.random.default_rng(0).normal(size=(4, vocab)).astype(np.float32) * 2
    got = jax.nn.softmax(filter_logits(jnp.asarray(logits), config), axis=-1)
    np.testing.assert_allclose(got, oracle_probabilities(logits, config), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_filtering_is_that_of_transformers(config):
    torch = pytest.importorskip("torch")
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(1).normal(size=(8, 57)).astype(np.float32) * 3
    expected = logits_process.TemperatureLogitsWarper(config.temperature)(None, torch.from_numpy(logits))
    if config.top_k is not None:
        expected = logits_process.TopKLogitsWarper(config.top_k)(None, expected)
    if config.top_p is not None:
        expected = logits_process.TopPLogitsWarper(config.top_p)(None, expected)
    np.testing.assert_allclose(filter_logits(jnp.asarray(logits), config), expected.numpy(), rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=2, max_size=12),
    st.sampled_from([0.1, 0.33, 0.5, 0.77, 0.95]),
    st.randoms(use_true_random=False),
)
def test_the_nucleus_holds_the_probability_and_does_not_depend_on_the_order(values, top_p, random):
    logits = np.array(values, np.float32)
    config = SamplingConfig(temperature=1.0, top_p=top_p)
    allowed = np.isfinite(filter_logits(jnp.asarray(logits), config))
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    assert p[allowed].sum() >= top_p - 1e-5
    assert p[allowed & (p > p[allowed].min() * (1 + 1e-6))].sum() < top_p + 1e-5
    order = list(range(len(values)))
    random.shuffle(order)
    shuffled = np.isfinite(filter_logits(jnp.asarray(logits[order]), config))
    np.testing.assert_array_equal(shuffled, allowed[order])


@pytest.mark.parametrize("config", [CONFIGS[1], CONFIGS[6]], ids=str)
def test_frequencies_are_within_five_standard_errors(config):
    draws = 40_000
    logits = np.random.default_rng(2).normal(size=12).astype(np.float32) * 2
    p = oracle_probabilities(logits, config)
    tokens = sample(jax.random.key(3), jnp.broadcast_to(logits, (draws, 12)), config)
    frequency = np.bincount(np.asarray(tokens), minlength=12) / draws
    assert (frequency[p == 0] == 0).all()
    # Half a draw is allowed on top, for tokens so rare that the normal approximation fails.
    assert (np.abs(frequency - p) <= 5 * np.sqrt(p * (1 - p) / draws) + 0.5 / draws).all()


def test_greedy_takes_the_first_of_the_largest():
    logits = jnp.array([[1.0, 3.0, 3.0], [0.0, -1.0, -jnp.inf]])
    assert sample(None, logits, SamplingConfig()).tolist() == [1, 0]


def test_a_key_per_row_draws_each_row_as_if_alone():
    config = SamplingConfig(temperature=1.0)
    logits = jax.random.normal(jax.random.key(0), (5, 100))
    keys = jax.random.split(jax.random.key(1), 5)
    together = sample(keys, logits, config)
    alone = [int(sample(keys[i : i + 1], logits[i : i + 1], config)[0]) for i in range(5)]
    assert together.tolist() == alone


def test_ruled_out_tokens_stay_ruled_out():
    logits = jnp.array([[-jnp.inf, 0.0, -jnp.inf, 0.0]])
    for config in (SamplingConfig(temperature=1.0, top_k=3), SamplingConfig(temperature=1.0, top_p=0.9)):
        assert np.isfinite(filter_logits(logits, config)).tolist() == [[False, True, False, True]]


def test_bfloat16_logits_are_filtered_in_float32():
    logits = jax.random.normal(jax.random.key(0), (2, 50), jnp.bfloat16)
    config = SamplingConfig(temperature=0.7, top_p=0.8)
    filtered = filter_logits(logits, config)
    assert filtered.dtype == jnp.float32
    np.testing.assert_array_equal(filtered, filter_logits(logits.astype(jnp.float32), config))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
        ({"top_k": 3}, "temperature=0"),
        ({"top_p": 0.3}, "temperature=0"),
    ],
)
def test_settings_out_of_range_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        SamplingConfig(**arguments)


def test_greedy_has_no_distribution_and_drawing_needs_a_key():
    with pytest.raises(ValueError, match="temperature=0"):
        filter_logits(jnp.zeros((1, 3)), SamplingConfig())
    with pytest.raises(ValueError, match="key"):
        sample(None, jnp.zeros((1, 3)), SamplingConfig(temperature=1.0))
