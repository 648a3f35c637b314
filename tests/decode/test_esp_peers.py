"""Other drafters: what they propose, against plain Python; and under the same verifier they change no token."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest

from effml.decode import SamplingConfig, _loop, esp, generate, pad_prompts
from effml.decode.esp._peers import Pool
from tests.decode.esp_models import CONFIG, PROMPTS, trained_model

RNG = np.random.default_rng(0)
LENGTHS = np.array([1, 2, 5, 17, 24])
TEXT = RNG.integers(0, 4, (5, 24)).astype(np.int32)


def text():
    return esp.Text(jnp.asarray(TEXT), jnp.asarray(LENGTHS), jnp.ones(5, jnp.int32), None)


def written(drafter, model, sampling=None, given=None, count=40, **options):
    tokens, lengths = pad_prompts(PROMPTS)
    return esp.generate(
        model,
        tokens,
        lengths=lengths,
        max_new_tokens=count,
        drafter=drafter,
        given=given,
        sampling=sampling,
        **options,
    )


@pytest.mark.parametrize(
    "drafter",
    [
        esp.Drafter(),
        esp.PromptLookup(4),
        esp.NgramCache((3, 1)),
        esp.Lookahead(columns=4, branches=3, size=40),
    ],
    ids=lambda drafter: type(drafter).__name__,
)
def test_drafters_change_no_token(drafter):
    model = trained_model()
    tokens, lengths = pad_prompts(PROMPTS)
    plain = generate(model, tokens, lengths=lengths, max_new_tokens=40)
    found = written(drafter, model)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    # The trained model repeats itself, which every drafter but the empty one finds out.
    assert found.stats.tau > 1.3 if drafter.depths else found.stats.tau == 1


def test_counts_draft_what_the_text_has_most():
    ids = RNG.integers(0, 7, 400) * RNG.integers(0, 2, 400)
    for anchor, gaps in (("root", (1, 2)), ("before", (2, 3))):
        table = esp.count_candidates(ids, 7, (3, 2), anchor)
        for depth, gap in enumerate(gaps):
            for token in range(7):
                behind = collections.Counter(ids[i + gap] for i in range(400 - gap) if ids[i] == token)
                order = sorted(range(7), key=lambda t: (-behind[t], t))
                assert table[depth, token].tolist() == order[:3]
    unigram = esp.count_candidates(ids, 7, (3,), "none")
    common = collections.Counter(ids.tolist())
    assert unigram[0, 0].tolist() == sorted(range(7), key=lambda t: (-common[t], t))[:3]
    drafter = esp.CountDrafter((3, 2), "before")
    table = esp.count_candidates(ids, 7, (3, 2), "before")
    tree = drafter.draft(jnp.asarray(table), text())
    for b, length in enumerate(LENGTHS):
        root, before = TEXT[b, length - 1], TEXT[b, max(length - 2, 0)]
        assert tree.tokens[b].tolist() == [root, *table[0, before], *table[1, before, :2]]


def test_prompt_lookup_copies_from_the_longest_then_latest_match():
    tree = esp.PromptLookup(3, max_ngram=2).draft((), text())
    for b, length in enumerate(LENGTHS):
        ids, best = TEXT[b, :length].tolist(), None
        for size in (2, 1):
            ends = [
                e for e in range(size, length) if ids[e - size : e] == ids[length - size :] and size < length
            ]
            if ends:
                best = max(ends)
                break
        copied = [] if best is None else ids[best : best + 3]
        mine = [int(t) for t, ok in zip(tree.tokens[b, 1:], tree.valid[b, 1:]) if ok]
        assert mine == copied
    assert tree.valid[-1].all()


def test_the_ngram_cache_counts_what_followed():
    widths = (2, 1)
    tree = esp.NgramCache(widths).draft(jnp.zeros(4), text())
    for b, length in enumerate(LENGTHS):
        ids = TEXT[b, :length].tolist()
        older, last, wanted = ids[max(length - 2, 0)], ids[-1], []
        for width in widths:
            scores = collections.defaultdict(float)
            for i in range(1, length):
                if ids[i - 1] == last:
                    scores[ids[i]] += 1 + 4.0 * (i >= 2 and ids[i - 2] == older) + 1e-6 * i
            order = sorted(scores, key=lambda t: -scores[t])[:width]
            wanted.append(order)
            if len(order) < width and not order:
                break
            older, last = last, order[0]
        mine = [
            [int(t) for t, ok, d in zip(tree.tokens[b], tree.valid[b], tree.depth[0]) if ok and d == depth]
            for depth in (1, 2)
        ]
        assert mine[0] == wanted[0]
        if len(wanted) > 1:
            assert mine[1] == wanted[1]


def test_lookahead_verifies_each_common_beginning_once():
    grams = jnp.array([[[1, 2, 3], [0, 9, 9], [1, 2, 4], [1, 5, 6], [1, 2, 3], [-1, -1, -1]]])
    drafter = esp.Lookahead(columns=2, ngram=3, branches=4, size=6)
    memory = Pool(jnp.zeros((1, 2, 2), jnp.int32), grams)
    one = esp.Text(jnp.array([[7, 1]]), jnp.array([2]), jnp.array([1]), None)
    tree = drafter.draft(memory, one)
    paths = set()
    for row in range(1, tree.tokens.shape[1]):
        if tree.valid[0, row]:
            path, at = [], row
            while at:
                path.append(int(tree.tokens[0, at]))
                at = int(tree.parent[0, at])
            assert len(path) == tree.depth[0, row]
            assert tuple(path[::-1]) not in paths
            paths.add(tuple(path[::-1]))
            ancestors = np.flatnonzero(tree.sees[0, row])
            assert len(ancestors) == len(path) + 1
            assert {0, row} <= set(ancestors)
    assert paths == {(2,), (2, 3), (2, 4), (5,), (5, 6)}


def test_the_window_of_lookahead_moves_on():
    drafter = esp.Lookahead(columns=3, ngram=3, branches=2, size=4)
    memory = Pool(jnp.array([[[1, 2, 3], [4, 5, 6]]]), jnp.full((1, 4, 3), -1))
    logits = jnp.eye(10)[jnp.array([[0, 0, 0, 7, 8, 9]])]
    seen = esp.Seen(logits, jnp.array([1]), jnp.zeros((1, 3), jnp.int32), jnp.array([2]), None)
    after = drafter.observe(memory, seen)
    assert after.grams[0, 1:].tolist() == [[1, 4, 7], [2, 5, 8], [3, 6, 9]]
    assert after.window.tolist() == [[[5, 6, 4], [8, 9, 7]]]  # one candidate accepted: one column further
    nothing = drafter.observe(memory, seen._replace(count=jnp.array([0])))
    assert nothing.window.tolist() == memory.window.tolist()


def test_the_alignment_probe_sees_states_come_near():
    """Masks that are the true tokens' embeddings have cosine one in every layer, and hit; zeros do not."""
    model = trained_model()
    starts = np.random.default_rng(1).integers(0, 61, (20, 12))
    prefixes = generate(model, starts, max_new_tokens=12).tokens
    probe = esp.alignment_probe(model, prefixes, esp.ESPConfig(mask_init="zero", ema=0.0), top=4)
    plain = generate(model, prefixes, max_new_tokens=2).tokens
    np.testing.assert_array_equal(probe.tokens, plain)
    assert probe.cosine.shape == (20, 1, CONFIG.num_layers + 1)
    assert (np.abs(probe.cosine) <= 1 + 1e-5).all()
    hit, miss = probe.means()
    assert np.isfinite(np.concatenate([hit, miss])).any()
    # ema = 1 with the true token written last: the mask is that token's own embedding.
    told = np.concatenate([prefixes, plain[:, :1]], axis=1)
    frozen = esp.ESPConfig(mask_init="zero", ema=1.0)
    masks = esp.probe_masks(model.params, jnp.asarray(told), CONFIG, frozen, prompt=12)
    np.testing.assert_allclose(
        masks[:, 0], 1.5 * np.asarray(model.params["embedding"]["table"])[plain[:, 0]], rtol=1e-5
    )
    static = _loop.freeze(model.forward, CONFIG, None, None, None)
    last, found = esp.probe_logits(static, model.params, jnp.asarray(prefixes), masks)
    np.testing.assert_array_equal(last.argmax(-1), plain[:, 0])
    assert esp.hit_rates(found[:, 0], jnp.asarray(plain[:, 1]), (1,)) == [1.0]


@pytest.mark.parametrize(
    ("prefixes", "options", "named"),
    [
        ([[1]], {}, "length >= 2"),
        (np.zeros((0, 4), np.int32), {}, "prefixes >= 1"),
        ([[1, 61]], {}, "outside the vocabulary 0..60"),
        ([[1, -2]], {}, "outside the vocabulary"),
        ([[1, 2]], {"prompt": 0}, "prompt=0"),
        ([[1, 2]], {"prompt": 3}, "prompt=3 is more than the 2"),
        ([[1, 2]], {"top": 0}, "top=0"),
        ([[1, 2]], {"config": esp.ESPConfig(num_masks=0)}, "num_masks=0"),
    ],
)
def test_what_cannot_be_probed_is_named(prefixes, options, named):
    """Means over no token, or over tokens that are not there, would give numbers all the same."""
    with pytest.raises(ValueError, match=named):
        esp.alignment_probe(trained_model(), np.asarray(prefixes), **options)


def test_bad_drafters_are_named():
    with pytest.raises(ValueError, match="ngram=1"):
        esp.Lookahead(ngram=1)
    with pytest.raises(ValueError, match="num_tokens=0"):
        esp.PromptLookup(0)
    with pytest.raises(ValueError, match="anchor='roots'"):
        esp.count_candidates(np.arange(3), 4, (2,), "roots")
    with pytest.raises(ValueError, match="more candidates"):
        esp.count_candidates(np.arange(3), 4, (5,), "root")
    with pytest.raises(ValueError, match="branches=200"):
        esp.Lookahead(branches=200, size=128)
    with pytest.raises(ValueError, match="anchor='rot'"):
        esp.CountDrafter((2,), "rot")
    for widths in ((), (0,)):
        for drafter in (esp.CountDrafter, esp.NgramCache):
            with pytest.raises((TypeError, ValueError), match="widths"):
                drafter(widths)
    with pytest.raises(ValueError, match="longer=nan"):
        esp.NgramCache((2,), float("nan"))
    with pytest.raises(ValueError, match="more candidates than the 61"):
        written(esp.NgramCache((99,)), trained_model())
    for ids, named in ((np.array([1, 9, 1]), "from 1 to 9"), (np.array([-1, 2]), "from -1")):
        for anchor in ("none", "root"):
            with pytest.raises(ValueError, match=named):
                esp.count_candidates(ids, 5, (2,), anchor)
    with pytest.raises(ValueError, match="give a key"):
        written(esp.Drafter(), trained_model(), SamplingConfig(temperature=1.0))
