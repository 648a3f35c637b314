"""Measuring a model: every token once, and behind what its tokenizer puts in front."""

import dataclasses

import jax
import numpy as np
import pytest
from tokenizers import processors

from effml import models
from effml.data import BpeTokenizer, encode_corpus, load_corpus
from effml.nn.transformer import TransformerConfig, forward, init_params
from effml.pipeline import evaluate_model
from effml.train.step import _make_eval_step

LENGTH = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"the cat {number} sat on the mat\n" * 4)
    return load_corpus(folder)


@pytest.fixture(scope="module")
def loaded(corpus, tmp_path_factory):
    backend = BpeTokenizer.train((text for _, text in corpus.text("train")), 270).tokenizer
    backend.add_special_tokens(["<s>"])
    begin = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[begin])
    tokenizer = BpeTokenizer.from_tokenizer(backend, 0)
    config = TransformerConfig(tokenizer.vocab_size, 16, 1, 2, 24, max_length=LENGTH + 1, initializer_std=0.5)
    folder = tmp_path_factory.mktemp("model") / "model"
    models.save(folder, init_params(jax.random.key(0), config), config, tokenizer)
    return models.load(folder)


def by_hand(loaded, tokens, length, prefix):
    """One window after the other, without padding, in float64 behind the logits."""
    losses = []
    for start in range(0, len(tokens) - 1, length):
        window = tokens[start : start + length + 1]
        read = np.concatenate([prefix, window[:-1]]).astype(np.int32)[None]
        logits = np.asarray(forward(loaded.params, read, loaded.config).logits[0, len(prefix) :], np.float64)
        top = logits.max(-1)
        norm = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        losses += list(norm - logits[np.arange(len(window) - 1), window[1:]])
    return losses


def test_every_window_is_read_behind_the_prefix_and_every_token_is_scored_once(loaded, corpus):
    prefix = loaded.tokenizer.prefix_ids
    assert len(prefix) == 1
    tokens = encode_corpus(corpus, "held_out", loaded.tokenizer)
    # The prefix needs a place of its own: 99 is cut to what fits the model behind it.
    measured = evaluate_model(loaded, corpus, length=99, batch_size=3, max_tokens=None)
    expected = by_hand(loaded, tokens, LENGTH, prefix)
    assert measured.tokens == len(expected) == len(tokens) - 1
    assert measured.nats_per_token == pytest.approx(np.mean(expected), rel=1e-5)
    without = np.mean(by_hand(loaded, tokens, LENGTH, ()))
    assert abs(without - measured.nats_per_token) > 1e-3
    text = loaded.tokenizer.decode(tokens[1:]).encode()
    assert measured.nats_per_byte == pytest.approx(np.sum(expected) / len(text), rel=1e-5)
    assert measured.perplexity == pytest.approx(np.exp(np.mean(expected)), rel=1e-4)


def test_two_loads_of_one_configuration_share_a_compiled_program(loaded, corpus):
    before = _make_eval_step.cache_info()
    for _ in range(2):
        evaluate_model(models.load(loaded.source), corpus, length=8, batch_size=2)
    after = _make_eval_step.cache_info()
    assert after.misses - before.misses <= 1
    assert after.hits - before.hits >= 1


@pytest.mark.parametrize("length", [0, -5, 1, 2.5, "128", True, None])
def test_a_trained_length_that_is_none_is_named(length, loaded, corpus):
    edited = dataclasses.replace(loaded, extra={"trained_length": length})
    with pytest.raises(ValueError, match=r"model: trained_length=.* must be an integer, 2 or more"):
        evaluate_model(edited, corpus)


def test_a_loss_that_is_not_finite_is_an_error(loaded, corpus):
    broken = dataclasses.replace(loaded, params=jax.tree.map(lambda leaf: leaf * np.nan, loaded.params))
    with pytest.raises(ValueError, match="gives no finite loss"):
        evaluate_model(broken, corpus, length=8, batch_size=2)
