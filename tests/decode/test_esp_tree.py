"""The shapes of trees, what fills them and what is accepted, against enumerations written out in Python."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.decode import esp
from effml.decode.sampling import SamplingConfig


def ancestors(parent, row):
    seen = [row]
    while row:
        row = parent[row]
        seen.append(row)
    return seen


@pytest.mark.parametrize(("widths", "masks"), [((15, 4), 2), ((29,), 1), ((7, 5, 3), 3), ((2,), 3), ((), 2)])
def test_a_static_tree_has_the_rows_positions_and_sight_of_the_paper(widths, masks):
    spec = esp.tree_structure(widths, masks)
    assert spec is esp.tree_structure(widths, masks)
    assert hash(spec) == hash(esp.TreeSpec(widths, masks))
    parent, row = [0], 1
    best = 0
    for width in widths:
        parent += [best] * width
        best, row = row, row + width
    assert spec.parent.tolist() == parent
    nodes = len(parent)
    rows = [(node, 0) for node in range(nodes)] + [(b, j) for b in range(nodes) for j in range(1, masks + 1)]
    assert len(rows) == (masks + 1) * (1 + sum(widths)) == len(spec.attend)
    for one, (owner, mask) in enumerate(rows):
        line = ancestors(parent, owner)
        assert spec.owner[one] == owner
        assert spec.rel_pos[one] == len(line) - 1 + mask
        wanted = [
            (other == 0 and node in line) or (node == owner and 0 < other <= mask) for node, other in rows
        ]
        assert spec.attend[one].tolist() == wanted


def brute_tree(logits, root, budget, prune):
    """All (depth, rank) with their probabilities in float64, sorted in plain Python."""
    pool, parent, best = [], root, 0.0
    for depth, of in enumerate(logits, 1):
        of = np.asarray(of, np.float64)
        logp = of - np.log(np.exp(of - of.max()).sum()) - of.max()
        order = [t for t in np.argsort(-logp, kind="stable") if not (prune and t == parent)]
        pool += [(-(best + logp[t]), depth, rank, int(t)) for rank, t in enumerate(order[:budget])]
        parent, best = order[0], best + logp[order[0]]
    chosen = sorted(pool)[:budget]
    return sorted((depth, rank, token) for _, depth, rank, token in chosen)


@pytest.mark.parametrize("prune", [True, False])
def test_a_dynamic_tree_holds_the_likeliest_trajectories(prune):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(40, 3, 9)) * rng.choice([0.3, 2.0, 6.0], (40, 1, 1)), jnp.float32)
    logits = logits.at[0].set(0.0)  # all tie
    logits = logits.at[1, 0].set(0.0)  # ties at the first depth alone
    root = jnp.asarray(rng.integers(0, 9, 40), jnp.int32).at[2].set(int(logits[2, 0].argmax()))
    build = jax.jit(esp.dynamic_tree, static_argnames=("budget", "prune"))
    tree = jax.tree.map(np.asarray, build(logits, root, budget=7, prune=prune))
    deepest = set()
    for b in range(40):
        wanted = brute_tree(np.asarray(logits[b]), int(root[b]), 7, prune)
        assert [(int(d), int(t)) for d, t in zip(tree.depth[b, 1:], tree.tokens[b, 1:])] == [
            (depth, token) for depth, _, token in wanted
        ]
        assert tree.valid[b].all()
        deepest.add(max(depth for depth, *_ in wanted))
        firsts = {0: 0} | {depth: 1 + i for i, (depth, rank, _) in enumerate(wanted) if rank == 0}
        for row, (depth, _, _) in enumerate(wanted, 1):
            assert tree.parent[b, row] == firsts[depth - 1]
            assert np.flatnonzero(tree.sees[b, row]).tolist() == sorted(ancestors(tree.parent[b], row))
            assert len(ancestors(tree.parent[b], row)) == depth + 1
    assert deepest >= {1, 3}


def test_no_parent_is_ever_less_likely_than_its_child_and_children_differ():
    logits = jax.random.normal(jax.random.key(1), (30, 2, 12)) * 3
    tree = jax.tree.map(np.asarray, esp.dynamic_tree(logits, jnp.zeros(30, jnp.int32), 8))
    for b in range(30):
        for row in range(1, 9):
            assert tree.parent[b, row] < row
        pairs = list(zip(tree.parent[b, 1:], tree.tokens[b, 1:]))
        assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("num_tokens", [None, 6])
def test_candidates_are_ranked_without_repeats_and_padding(num_tokens):
    logits = jax.random.normal(jax.random.key(2), (25, 2, 10)).at[:, :, 8].add(9.0)
    root = jnp.full(25, 8, jnp.int32)
    tokens, values = esp.ranked(logits, root, 5, num_tokens=num_tokens)
    scores = np.asarray(jax.nn.log_softmax(logits))
    for b in range(25):
        parent = 8
        for depth in range(2):
            order = [t for t in np.argsort(-scores[b, depth]) if t != parent and t < (num_tokens or 10)]
            wanted = order[:5]
            found = [t for t, v in zip(tokens[b, depth].tolist(), values[b, depth]) if v > -np.inf]
            assert found == wanted[: len(found)]
            assert len(found) == min(5, len(order))
            parent = found[0]
            np.testing.assert_allclose(values[b, depth, : len(found)], scores[b, depth, found], rtol=1e-6)


def test_verify_follows_the_choices_down_every_tree():
    """All choices over a vocabulary of three, against a walk in Python."""
    spec = esp.tree_structure((2, 2), 2)
    trees = np.array([[0, 1, 2, 1, 0], [2, 2, 0, 2, 1]], np.int32)
    options = np.array(list(itertools.product(range(3), repeat=5)), np.int32)
    tokens = jnp.asarray(np.repeat(trees, len(options), axis=0))
    wanted = jnp.asarray(np.tile(options, (2, 1)))

    def choice(depth, rows):
        token = jnp.take_along_axis(wanted, rows[:, None], axis=1)[:, 0]
        return esp.Choice(token, jnp.ones(len(rows)), jnp.zeros(len(rows), bool))

    path = jax.tree.map(np.asarray, esp.verify(spec.tree(tokens), 2, choice))
    for b in range(len(tokens)):
        node, rows, out = 0, [], []
        while True:
            y = int(wanted[b, node])
            rows.append(node)
            out.append(y)
            children = [c for c in range(1, 5) if spec.parent[c] == node and tokens[b, c] == y]
            if not children:
                break
            node = children[0]
        assert path.count[b] == len(out)
        assert path.rows[b, : len(out)].tolist() == rows
        assert path.tokens[b, : len(out)].tolist() == out
    assert set(path.count) == {1, 2, 3}


def test_a_candidate_that_is_not_valid_is_never_accepted():
    tree = esp.tree_structure((2,), 1).tree(jnp.array([[0, 1, 2]]))
    always = lambda depth, rows: esp.Choice(jnp.array([1]), jnp.ones(1), jnp.array([False]))
    assert esp.verify(tree, 1, always).count.tolist() == [2]
    hidden = tree._replace(valid=jnp.array([[True, False, True]]))
    assert esp.verify(hidden, 1, always).count.tolist() == [1]


def test_the_margin_is_the_gap_that_decided():
    logits = jax.random.normal(jax.random.key(3), (6, 8)) * 2
    chosen = esp.choose(logits, None, SamplingConfig())
    ranks = np.sort(logits, axis=1)
    np.testing.assert_allclose(chosen.margin, ranks[:, -1] - ranks[:, -2], rtol=1e-6)
    keys, sampling = jax.random.split(jax.random.key(4), 6), SamplingConfig(temperature=0.7, top_k=5)
    drawn = esp.choose(logits, keys, sampling)
    for b in range(6):
        noisy = np.asarray(logits[b] / 0.7 + jax.random.gumbel(keys[b], (8,)))
        allowed = np.argsort(-logits[b])[:5]
        order = sorted(allowed, key=lambda token: -noisy[token])
        assert drawn.token[b] == order[0]
        np.testing.assert_allclose(drawn.margin[b], noisy[order[0]] - noisy[order[1]], rtol=1e-4)
    assert (
        esp.choose(logits.at[2, 3].set(jnp.nan), None, SamplingConfig()).failed.tolist()
        == [False] * 2 + [True] + [False] * 3
    )


def test_masks_begin_as_the_paper_says():
    rng = np.random.default_rng(5)
    embeddings, lengths = rng.normal(size=(3, 6, 4)).astype(np.float32), np.array([1, 4, 6], np.int32)
    table = rng.normal(size=(9, 4)).astype(np.float32)
    statistics = esp.vocabulary_statistics({"embedding": {"table": jnp.asarray(table)}}, 2.0, 7)
    mean, deviation = 2 * table[:7].mean(0), 2 * table[:7].std(0)
    keys = jax.random.split(jax.random.key(0), 3)

    def start(kind, masks=2):
        config = esp.ESPConfig(num_masks=masks, widths=(2,), mask_init=kind, sigmas=5.0)
        return np.asarray(
            esp.init_masks(
                jnp.asarray(embeddings), jnp.asarray(lengths), config, statistics=statistics, keys=keys
            )
        )

    for b, t in enumerate(lengths):
        np.testing.assert_allclose(start("mean")[b], np.tile(embeddings[b, :t].mean(0), (2, 1)), rtol=1e-5)
        last = [embeddings[b, max(t - 2 + i, 0)] for i in range(2)]
        np.testing.assert_array_equal(start("last_k")[b], last)
        np.testing.assert_allclose(start("vocab_mean")[b], np.tile(mean, (2, 1)), rtol=1e-5)
        np.testing.assert_allclose(start("mu_sigma")[b], np.tile(mean + 5 * deviation, (2, 1)), rtol=1e-5)
        assert not start("zero")[b].any()
    drawn = start("sample", masks=4000)
    assert len(np.unique(drawn[0, :, 0])) > 3900
    np.testing.assert_allclose(drawn.mean(1), np.tile(mean, (3, 1)), atol=5 * deviation.max() / 4000**0.5)
    np.testing.assert_allclose(drawn.std(1), np.tile(deviation, (3, 1)), rtol=0.06)


def test_masks_move_by_every_token_that_counts():
    rng = np.random.default_rng(6)
    masks, new = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3, 4))
    valid = np.array([[1, 1, 0], [0, 0, 0]], bool)
    moved = esp.update_masks(jnp.asarray(masks), jnp.asarray(new), 0.1, jnp.asarray(valid))
    wanted = masks.copy()
    for b in range(2):
        for step in range(3):
            if valid[b, step]:
                wanted[b] += 0.1 * (new[b, step] - wanted[b])
    np.testing.assert_allclose(moved, wanted, rtol=1e-5)
    np.testing.assert_array_equal(
        esp.update_masks(jnp.asarray(masks), jnp.asarray(new), 0), jnp.asarray(masks)
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_masks": -1}, "num_masks=-1"),
        ({"num_masks": 1, "widths": (4, 2)}, "2 depths, but num_masks=1"),
        ({"widths": (0,)}, "widths=0"),
        ({"num_masks": 2, "widths": None, "block_complexity": 5}, "at least 6"),
        ({"mask_init": "means"}, "did you mean 'mean'"),
        ({"verify": "maybe"}, "verify='maybe'"),
        ({"ema": 1.5}, "ema=1.5"),
        ({"ema": float("nan")}, "ema=nan"),
        ({"sigmas": float("inf")}, "sigmas=inf"),
        ({"tie_tolerance": -1.0}, "tie_tolerance=-1.0"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"verify": "rejection", "widths": None}, "give widths"),
    ],
)
def test_options_that_make_no_sense_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        esp.ESPConfig(**options)


@pytest.mark.parametrize("options", [{"num_masks": 1.5}, {"widths": [4]}, {"widths": (2.5,)}])
def test_options_of_another_type_are_named(options):
    with pytest.raises(TypeError, match=next(iter(options))):
        esp.ESPConfig(**options)


def test_trees_that_make_no_sense_are_named():
    with pytest.raises(ValueError, match="2 depths, but 1 masks"):
        esp.tree_structure((2, 2), 1)
    with pytest.raises(ValueError, match="1 or above"):
        esp.tree_structure((0,), 1)
    with pytest.raises(ValueError, match="num_tokens=12"):
        esp.ESPConfig(num_tokens=12).for_vocabulary(11)
    with pytest.raises(ValueError, match="give its statistics"):
        esp.init_masks(jnp.zeros((1, 1, 2)), jnp.array([1]), esp.ESPConfig(mask_init="vocab_mean"))
    assert esp.ESPConfig(widths=(14,)).for_vocabulary(1).num_masks == 0
