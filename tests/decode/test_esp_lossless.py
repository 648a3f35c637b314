"""What is written with drafts is what plain decoding writes, token for token, whatever is drafted."""

import dataclasses
import functools
import itertools
import types
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.decode import SamplingConfig, _loop, esp, generate, pad_prompts
from effml.decode.esp import _generate, _step
from effml.decode.generation import Run
from effml.nn.transformer import TransformerConfig, forward, stack_layers
from tests.decode.esp_models import CONFIG, PROMPTS, make_model, trained_model

GREEDY, NUCLEUS = SamplingConfig(), SamplingConfig(temperature=1.0, top_p=0.9)
KEY = jax.random.key(7)
SMALL = esp.ESPConfig(num_masks=2, widths=(4, 2), mask_init="vocab_mean")


def plain(model, sampling, count=64, **options):
    tokens, lengths = pad_prompts(PROMPTS)
    return generate(
        model, tokens, lengths=lengths, max_new_tokens=count, sampling=sampling, key=KEY, **options
    )


def drafted(model, sampling=GREEDY, config=SMALL, count=64, **options):
    tokens, lengths = pad_prompts(PROMPTS)
    tokens[tokens == 0] = 7  # what the padding holds must not matter
    return esp.generate(
        model,
        tokens,
        lengths=lengths,
        max_new_tokens=count,
        sampling=sampling,
        key=KEY,
        config=config,
        **options,
    )


@pytest.mark.parametrize(
    ("sampling", "config"),
    [
        (GREEDY, SMALL),
        (NUCLEUS, esp.ESPConfig(num_masks=3, widths=None, block_complexity=28, prune_repeats=False)),
        (
            SamplingConfig(temperature=1.0),
            esp.ESPConfig(num_masks=1, widths=(6,), mask_init="sample", ema=0.1),
        ),
    ],
    ids=["greedy, static", "nucleus, dynamic", "drawn, one mask"],
)
def test_tokens_are_those_of_plain_decoding(sampling, config):
    """The whole grid is in the experiment `esp`."""
    for model in (make_model(), trained_model()):
        written = drafted(model, sampling, config)
        np.testing.assert_array_equal(written.tokens, plain(model, sampling).tokens)
        assert written.lengths.tolist() == [64] * 5
        stats = written.stats
        assert stats.tokens.tolist() == [63] * 5
        assert stats.tokens.sum() == stats.calls.sum() + stats.accepted.sum()
        assert (np.diff(stats.accepted, axis=1) <= 0).all()
        assert stats.tau == pytest.approx(1 / (1 - stats.calls_saved))
    assert stats.tau > 1.2  # on the trained model


def test_without_masks_every_pass_writes_one_token():
    model = make_model()
    written = drafted(model, config=esp.ESPConfig(num_masks=0), count=20)
    np.testing.assert_array_equal(written.tokens, plain(model, GREEDY, 20).tokens)
    assert written.stats.tau == 1.0
    assert written.stats.calls.tolist() == [19] * 5


@dataclass(frozen=True)
class Told(esp.Drafter):
    """Drafts a chain of the tokens it was told, each shifted by some ids."""

    length: int
    shift: int = 0

    @property
    def depths(self):
        return self.length

    def start(self, prompt):
        return jnp.asarray(prompt.given)

    def draft(self, memory, text):
        places = text.written[:, None] + jnp.arange(self.length)
        tokens = jnp.take_along_axis(memory, jnp.minimum(places, memory.shape[1] - 1), axis=1)
        tokens = (tokens + self.shift) % CONFIG.vocab_size
        return esp.TreeSpec((1,) * self.length, 0).tree(jnp.concatenate([text.before(0)[:, None], tokens], 1))


def test_the_drafter_decides_how_many_passes_but_not_what_is_written():
    """One that knows the answer has all accepted, one that is always wrong has none."""
    model = make_model()
    known = plain(model, NUCLEUS, 61).tokens
    right = drafted(model, NUCLEUS, count=61, drafter=Told(3), given=known)
    wrong = drafted(model, NUCLEUS, count=61, drafter=Told(3, shift=1), given=known)
    for written in (right, wrong):
        np.testing.assert_array_equal(written.tokens, known)
    assert right.stats.calls.tolist() == [15] * 5  # 60 tokens behind the first, 4 at a time
    assert right.stats.accepted_by_depth == [1.0] * 3
    assert wrong.stats.calls.tolist() == [60] * 5
    # At each depth random tokens, sometimes right: columns of the answer are exchanged.
    mixed = np.where(np.random.default_rng(0).random(known.shape) < 0.5, known, 3)
    some = drafted(model, NUCLEUS, count=61, drafter=Told(3), given=mixed)
    np.testing.assert_array_equal(some.tokens, known)
    assert 1.2 < some.stats.tau < 3


def test_a_sequence_ends_within_an_accepted_path():
    model = make_model()
    known = plain(model, GREEDY, 30).tokens
    for stop, count in itertools.product((known[0, 6], known[2, 9]), (30, 5)):
        wanted = plain(model, GREEDY, count, stop_ids=[int(stop)])
        written = drafted(model, GREEDY, count=count, drafter=Told(3), given=known, stop_ids=[int(stop)])
        np.testing.assert_array_equal(written.tokens, wanted.tokens)
        np.testing.assert_array_equal(written.lengths, wanted.lengths)
        np.testing.assert_array_equal(written.stopped, wanted.stopped)
        assert written.stats.tokens.max() <= count - 1


def test_the_cache_holds_the_rows_that_plain_decoding_has():
    model = make_model()
    tokens, lengths = pad_prompts(PROMPTS)
    known = plain(model, GREEDY, 30).tokens
    ar = Run(model, tokens, lengths, 30, GREEDY, None, (), None, None, None)
    list(ar.chunks(None))
    run = _generate.ESPRun(model, tokens, lengths, 30, GREEDY, None, (), None, None, None)
    run.drafting(None, Told(3), known, None, None)
    list(run.passes(None))
    for one, other in zip(ar.state.cache, run.spec_state.cache):
        np.testing.assert_array_equal(one.length, lengths + 29)
        np.testing.assert_array_equal(other.length, one.length)
        for b, length in enumerate(np.asarray(one.length)):
            np.testing.assert_allclose(other.keys[b, :, :, :length], one.keys[b, :, :, :length], atol=3e-6)
            np.testing.assert_allclose(other.values[b, :, :length], one.values[b, :, :length], atol=3e-6)


def test_the_cache_grows_in_time_and_paths_end_with_blocks(monkeypatch):
    """A cache that is nearly full grows before a path needs it; with blocks no pass writes across an end."""
    model = make_model()
    known = plain(model, GREEDY, 90).tokens
    wanted = esp.generate(
        model, [PROMPTS[0]], max_new_tokens=90, config=SMALL, drafter=Told(3), given=known[:1]
    )
    monkeypatch.setattr(_loop, "capacities", lambda prompt, total, growing: [17, 34, 93])
    written = esp.generate(
        model, [PROMPTS[0]], max_new_tokens=90, config=SMALL, drafter=Told(3), given=known[:1]
    )
    np.testing.assert_array_equal(written.tokens, known[:1])
    np.testing.assert_array_equal(written.tokens, wanted.tokens)
    assert written.stats.calls == wanted.stats.calls == 23
    ends = []

    @dataclass(frozen=True)
    class Watched(Told):
        def draft(self, memory, text):
            jax.debug.callback(lambda length: ends.append(int(length)), text.lengths[0])
            return super().draft(memory, text)

    blocks = esp.generate(
        model, [PROMPTS[0]], max_new_tokens=90, drafter=Watched(3), given=known[:1], block_size=6
    )
    jax.effects_barrier()
    np.testing.assert_array_equal(blocks.tokens, known[:1])
    rows = sorted(set(ends))
    assert all((a - 1) // 6 == (b - 2) // 6 for a, b in itertools.pairwise(rows))
    assert max(b - a for a, b in itertools.pairwise(rows)) == 4
    assert blocks.stats.calls > wanted.stats.calls


def test_streams_give_the_same_and_nothing_is_compiled_twice():
    """One trace reads the prompt, one writes: over calls that differ in every dynamic way."""
    model = make_model(dataclasses.replace(CONFIG, vocab_size=60))

    def traced(params, tokens, **kwargs):
        return forward(params, tokens, config=model.config, **kwargs)

    model.forward = chex.assert_max_traces(traced, n=2)
    config = esp.ESPConfig(widths=(5,))
    for prompt, count, stops in (([1, 2], 5, ()), ([3] * 15, 40, (59,)), ([7] * 9, 17, (59, 58))):
        for chunk in (1, 7, 64):
            options = {"max_new_tokens": count, "stop_ids": stops, "config": config}
            streamed = esp.stream(model, prompt, chunk=chunk, **options)
            tokens = list(streamed)
            whole = esp.generate(model, [prompt], **options)
            assert tokens == whole.tokens[0, : whole.lengths[0]].tolist()
            assert streamed.stats.tokens == whole.stats.tokens


def test_a_stop_while_the_model_runs_leaves_the_numbers(monkeypatch):
    """The interrupt comes when the passes have taken the state, and nothing has taken its place yet."""
    write, calls = _step.write, itertools.count()

    def stopped(*args, **kwargs):
        state = write(*args, **kwargs)
        if next(calls) == 2:
            raise KeyboardInterrupt
        return state

    monkeypatch.setattr(_step, "write", stopped)
    streamed, tokens = esp.stream(make_model(), PROMPTS[0], max_new_tokens=40, config=SMALL, chunk=4), []
    with pytest.raises(KeyboardInterrupt):
        tokens.extend(iter(streamed))
    assert len(tokens) >= 9
    assert streamed.stats.tokens == len(tokens) - 1


def test_strict_decides_near_ties_as_plain_decoding_does():
    """A forward whose passes over many rows are a little off diverges; strict repairs that and counts it."""
    model = make_model()
    wanted = plain(model, GREEDY)

    def off(params, tokens, *, config, **kwargs):
        out = forward(params, tokens, config=config, **kwargs)
        rows = out.logits.shape[1]
        # A disturbance of 0.2 that depends on the row's own logits, only where several rows are read at once.
        noise = 0.2 * jnp.sin(1e3 * out.logits) if rows > 1 else 0.0
        return out._replace(logits=out.logits + noise)

    model.forward = lambda params, tokens, **kwargs: off(params, tokens, config=CONFIG, **kwargs)
    one = {"num_masks": 1, "widths": (4,)}
    loose = drafted(model, config=esp.ESPConfig(**one, tie_tolerance=0.41))
    strict = drafted(model, config=esp.ESPConfig(**one, strict=True, tie_tolerance=0.41))
    # The pass that reads the prompt is disturbed too: even first tokens differ without strict.
    assert (loose.tokens != wanted.tokens)[:, 0].any()
    np.testing.assert_array_equal(strict.tokens, wanted.tokens)
    assert 0 < strict.stats.divergences <= strict.stats.near_ties
    assert loose.stats.divergences == 0
    assert loose.stats.near_ties > 0
    assert strict.stats.tokens.sum() < strict.stats.calls.sum() + strict.stats.accepted.sum()


def test_scanned_layers_write_the_same():
    model = make_model()
    scanned = types.SimpleNamespace(**{**vars(model), "params": stack_layers(model.params)})
    np.testing.assert_array_equal(
        drafted(scanned, config=esp.ESPConfig(widths=(4,)), count=12).tokens, plain(model, GREEDY, 12).tokens
    )


def test_learned_positions_may_be_used_to_the_last():
    config = TransformerConfig(40, 16, 1, 2, 24, positions="learned", max_length=24, initializer_std=0.4)
    model, options = make_model(config), {"config": esp.ESPConfig(widths=(3,))}
    written = esp.generate(model, [[3] * 17], max_new_tokens=5, **options)
    np.testing.assert_array_equal(written.tokens, generate(model, [[3] * 17], max_new_tokens=5).tokens)
    with pytest.raises(ValueError, match="need 25 positions, but the model has learned 24"):
        esp.generate(model, [[3] * 17], max_new_tokens=6, **options)


@pytest.mark.parametrize("place", ["prompt", "later"])
def test_nan_logits_end_generation_with_the_step(place):
    model = make_model()
    text = [*PROMPTS[0], *generate(model, [PROMPTS[0]], max_new_tokens=12).tokens[0].tolist()]
    read = 0 if place == "prompt" else next(i for i in range(5, len(text)) if text[i] not in text[:i])
    table = model.params["embedding"]["table"].at[text[read], 0].set(jnp.nan)
    broken = make_model(dataclasses.replace(CONFIG, tied_head=False))
    broken.params = {
        **model.params,
        "head": {"kernel": model.params["embedding"]["table"].T},
        "embedding": {"table": table},
    }
    step = 0 if place == "prompt" else read - len(PROMPTS[0]) + 1
    with pytest.raises(ValueError, match=f"NaN at new token {step}"):
        esp.generate(
            broken, [PROMPTS[0]], max_new_tokens=20, config=esp.ESPConfig(widths=(4,), mask_init="zero")
        )


def sparse(inputs, mode):
    raise AssertionError


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"prompt_tokens": np.zeros((1, 0), np.int32)}, "empty"),
        ({"prompt_tokens": [[1, 61]]}, "token id 61"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"sampling": SamplingConfig(temperature=1.0)}, "give a key"),
        ({"config": esp.ESPConfig(mask_init="sample")}, "mask_init='sample' draws at random"),
        ({"config": esp.ESPConfig(verify="rejection")}, "temperature above 0"),
        ({"config": esp.ESPConfig(num_tokens=62)}, "num_tokens=62"),
        ({"given": np.zeros((2, 3))}, r"masks of shape \(2, 3\)"),
        ({"given": np.zeros((1, 32), np.int32)}, "int32"),
        ({"block_size": 0}, "block_size=0"),
        ({"drafter": esp.CountDrafter((4,))}, "count_candidates"),
        (
            {
                "config": esp.ESPConfig(verify="rejection"),
                "sampling": NUCLEUS,
                "key": KEY,
                "drafter": esp.Drafter(),
            },
            "only the masks give",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        esp.generate(make_model(), **{"prompt_tokens": [[1, 2, 3]], "max_new_tokens": 2, **arguments})


def test_models_that_cannot_be_probed_are_refused():
    model = make_model()
    with pytest.raises(ValueError, match="sparse mode"):
        esp.generate(
            model,
            [[1]],
            max_new_tokens=2,
            cache_init=lambda *_: None,
            attention=functools.partial(sparse, mode="sparse"),
        )
    model.config = types.SimpleNamespace(vocab_size=61, max_length=99)
    with pytest.raises(ValueError, match="can't read embeddings"):
        esp.generate(model, [[1]], max_new_tokens=2)
