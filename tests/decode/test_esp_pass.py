"""Each row of a pass has the logits of a plain forward on what it stands behind; masks are invisible to all others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.decode import SamplingConfig, _loop, esp, pad_prompts
from effml.decode.esp import _step
from effml.nn.transformer import embed
from tests.decode.esp_models import CONFIG, PROMPTS, make_model, plain_logits, trained_model

STATIC = esp.ESPConfig(num_masks=2, widths=(4, 2), mask_init="mean")
DYNAMIC = esp.ESPConfig(num_masks=2, widths=None, block_complexity=21)


def one_pass(model, drafter, given=None):
    """State after the prompts, the tree of the first pass, its rows and all their logits."""
    tokens, lengths = pad_prompts(PROMPTS)
    frozen = _loop.freeze(model.forward, model.config, None, None, None)
    options = {"model": frozen, "sampling": SamplingConfig(), "drafter": drafter, "rules": esp.Rules()}
    no_stop = jnp.full(4, -1, jnp.int32)
    state = _step.prefill(
        model.params, tokens, lengths, None, no_stop, given, capacity=128, room=132, **options
    )

    @functools.partial(jax.jit, static_argnames="drafter")
    def run(params, state, drafter):
        tree = drafter.draft(state.memory, esp.Text(state.text, state.length, state.written, None))
        look = functools.partial(embed, params, config=CONFIG)
        extra = drafter.extra(state.memory, tree, look)
        x, positions, mask = _step.rows_of_pass(params, tree, extra, state.length - 1, CONFIG)
        out = model.forward(params, None, embeddings=x, positions=positions, mask=mask, cache=state.cache)
        batch = len(state.length)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape[1:])), tree), out.logits

    tree, logits = run(model.params, state, drafter)
    return jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, tree), np.asarray(logits)


def embedded_logits(model, x, at):
    """Logits of some rows of a plain causal forward on embeddings."""
    run = jax.jit(lambda params, x, at: model.forward(params, None, embeddings=x, logits_for=at).logits)
    return np.asarray(run(model.params, jnp.asarray(x), jnp.asarray(at)))


def lines(state, tree):
    """The true prefix of every node of every sequence: prompt and root, then its ancestors and itself."""
    for b, length in enumerate(state.length):
        for node in range(tree.tokens.shape[1]):
            path, at = [], node
            while at:
                path.append(int(tree.tokens[b, at]))
                at = int(tree.parent[b, at])
            yield b, node, state.text[b, :length].tolist() + path[::-1]


@pytest.mark.parametrize("config", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_every_row_reads_its_own_prefix_and_nothing_else(config):
    """Nodes against token prefixes, masks against the same forward on embeddings in sequence."""
    model = trained_model()
    state, tree, logits = one_pass(model, esp.ESPDrafter(config))
    found = list(lines(state, tree))
    assert len({len(ids) for _, _, ids in found}) > 3
    wanted = plain_logits(model, [ids for *_, ids in found])
    for (b, node, _), row in zip(found, wanted):
        np.testing.assert_allclose(logits[b, node], row, atol=1e-5 * np.abs(row).max())
    # Masks: the prefix, then mask 1, then mask 2, causal, without a cache.
    nodes, longest = tree.tokens.shape[1], 32
    x = np.zeros((len(found), longest, CONFIG.width), np.float32)
    at = np.zeros((len(found), 2), np.int32)
    for row, (b, _, ids) in enumerate(found):
        x[row, : len(ids)] = embed(model.params, np.array([ids]), CONFIG)[0]
        x[row, len(ids) : len(ids) + 2] = state.memory.masks[b]
        at[row] = len(ids), len(ids) + 1
    alone = embedded_logits(model, x, at)
    for (b, node, _), pair in zip(found, alone):
        mine = logits[b, nodes + 2 * node : nodes + 2 * node + 2]
        np.testing.assert_allclose(mine, pair, atol=1e-5 * np.abs(pair).max())


def test_the_first_tree_comes_from_masks_behind_the_prompt():
    """Their logits are those of the prompt's embeddings and the masks in sequence, whatever pads the prompt."""
    model = make_model()
    state, tree, _ = one_pass(model, esp.ESPDrafter(STATIC))
    for b, prompt in enumerate(PROMPTS):
        own = np.asarray(embed(model.params, np.array([prompt]), CONFIG)[0])
        masks = np.tile(own.mean(0), (2, 1))
        first = np.asarray(embed(model.params, state.text[b : b + 1, len(prompt)][None], CONFIG)[0])
        np.testing.assert_allclose(state.memory.masks[b], masks + 0.1 * (first - masks), rtol=1e-4, atol=1e-5)
        row = np.zeros((1, 32, CONFIG.width), np.float32)
        row[0, : len(prompt) + 2] = np.concatenate([own, masks])
        logits = embedded_logits(model, row, np.array([[len(prompt), len(prompt) + 1]]))[0]
        np.testing.assert_allclose(state.memory.logits[b], logits, atol=1e-4)
        best = [t for t in np.argsort(-np.asarray(logits[0])) if t != state.text[b, len(prompt)]]
        assert tree.tokens[b, 1:5].tolist() == best[:4]


@pytest.mark.parametrize("config", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_the_next_tree_comes_from_the_masks_behind_the_last_node_of_the_path(config):
    """Behind the root alone they would speak of tokens that are written already."""
    model = trained_model()
    tokens, lengths = pad_prompts(PROMPTS)
    frozen = _loop.freeze(model.forward, model.config, None, None, None)
    drafter = esp.ESPDrafter(config)
    options = {"model": frozen, "sampling": SamplingConfig(), "drafter": drafter, "rules": esp.Rules()}
    stops = jnp.full(4, -1, jnp.int32)
    state = _step.prefill(model.params, tokens, lengths, None, stops, None, capacity=128, room=132, **options)
    step = jax.jit(functools.partial(esp.esp_step, **options))
    longest = 1
    for _ in range(4):
        after = step(model.params, state, None, stops, jnp.int32(60))
        count = np.asarray(after.length - state.length)
        longest = max(longest, count.max())
        x = np.zeros((len(count), 48, CONFIG.width), np.float32)
        for b, length in enumerate(np.asarray(after.length)):
            x[b, : length - 1] = embed(model.params, after.text[b : b + 1, : length - 1], CONFIG)[0]
            x[b, length - 1 : length + 1] = state.memory.masks[b]
        at = np.asarray(after.length)[:, None] - 1 + np.arange(2)
        wanted = embedded_logits(model, x, at)
        np.testing.assert_allclose(after.memory.logits, wanted, atol=1e-5 * np.abs(wanted).max())
        state = after
    assert longest > 1


def test_masks_are_invisible_to_the_tree():
    """Noise in their place changes what they propose, and not one node's logits."""
    model = make_model()
    drafter = esp.ESPDrafter(STATIC)
    _, tree, logits = one_pass(model, drafter)
    noise = jax.random.normal(jax.random.key(3), (5, 2, CONFIG.width)) * 3

    class Fixed(esp.ESPDrafter):
        """The tree of the first run with noise for masks."""

        def draft(self, memory, text):
            return drafter.spec.tree(jnp.asarray(tree.tokens))

        def extra(self, memory, tree, embed):
            return super().extra(memory._replace(masks=noise), tree, embed)

    _, same, noisy = one_pass(model, Fixed(STATIC))
    np.testing.assert_array_equal(same.tokens, tree.tokens)
    np.testing.assert_allclose(noisy[:, :7], logits[:, :7], atol=1e-6)
    assert np.abs(noisy[:, 7:] - logits[:, 7:]).max() > 0.1


def test_lookahead_rows_do_not_disturb_the_tree():
    model = make_model()
    state, tree, logits = one_pass(model, esp.Lookahead(columns=3, ngram=3, branches=2))
    root = list(lines(state, tree))[:: tree.tokens.shape[1]]
    wanted = plain_logits(model, [ids for *_, ids in root])
    np.testing.assert_allclose(logits[:, 0], wanted, atol=1e-5 * np.abs(wanted).max())
