"""Which candidates of a tree the model itself would have written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from effml.decode._loop import token_keys
from effml.decode.esp._tree import Tree
from effml.decode.sampling import SamplingConfig, filter_logits, sample

__all__ = ["Choice", "Path", "choose", "choose_by_rejection", "verify"]


class Choice(NamedTuple):
    """The next token behind one node of each sequence.

    Attributes:
        token: int32[batch].
        margin: float32[batch], how far the second-best score is behind.
        failed: bool[batch], whether the logits hold NaN.
    """

    token: Array
    margin: Array
    failed: Array


class Path(NamedTuple):
    """The way from the root that the model itself would have taken.

    Attributes:
        rows: int32[batch, depths + 1], rows of the tree, the root first.
        tokens: int32[batch, depths + 1], what follows each of them.
        margins: float32[batch, depths + 1], of the choice of each of those tokens.
        failed: bool[batch], whether the root's logits hold NaN.
        count: int32[batch]; so many of `rows` and of `tokens` count. The last token is new, the others were drafted.
    """

    rows: Array
    tokens: Array
    margins: Array
    failed: Array
    count: Array


def verify(tree: Tree, depths: int, choice: Callable[[int, Int[Array, " batch"]], Choice]) -> Path:
    """Walks down the tree for as long as the token chosen behind a node is one of its children.

    Args:
        tree: the candidates.
        depths: its greatest depth.
        choice: `(depth, rows of the nodes) -> Choice`.

    Returns:
        A `Path`.

    Source: arXiv:2603.17942, section 3.3; the matching of trees: SpecInfer, arXiv:2305.09781.

    Example:
        >>> from effml.decode.esp._tree import tree_structure
        >>> tree = tree_structure((2,), 1).tree(jnp.array([[7, 3, 5]]))
        >>> wanted = jnp.array([[5, 0, 9]])
        >>> def choice(depth, rows):
        ...     token = jnp.take_along_axis(wanted, rows[:, None], axis=1)[:, 0]
        ...     return Choice(token, jnp.ones(1), jnp.zeros(1, bool))
        >>> path = verify(tree, 1, choice)
        >>> path.count.tolist(), path.rows.tolist(), path.tokens.tolist()
        ([2], [[0, 2]], [[5, 9]])
    """
    batch, nodes = tree.tokens.shape
    node, alive = jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool)
    count, failed = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
    steps = []
    for depth in range(depths + 1):
        chosen = choice(depth, node)
        if depth == 0:
            failed = chosen.failed
        alive = alive & ~chosen.failed
        count = count + alive
        steps.append((node, chosen.token, chosen.margin))
        child = (jnp.arange(nodes) > 0) & (tree.parent == node[:, None]) & tree.valid
        child = child & (tree.tokens == chosen.token[:, None])
        alive = alive & child.any(1)
        node = jnp.where(alive, child.argmax(1).astype(jnp.int32), node)
    rows, tokens, margins = (jnp.stack(column, axis=1) for column in zip(*steps))
    return Path(rows, tokens, margins, failed, count)


def choose(
    logits: Float[Array, "batch vocab"], keys: Key[Array, " batch"] | None, sampling: SamplingConfig
) -> Choice:
    """What plain decoding chooses from these logits, and by how much.

    Args:
        logits: of one node of each sequence.
        keys: one for each, or None when greedy.
        sampling: how tokens are chosen.

    Returns:
        A `Choice`. When drawing, the margin is that of the perturbed scores, whose largest is what is drawn; the edge
        of a nucleus or of the k likeliest, another place where roundings decide, is not looked at.

    Example:
        >>> choose(jnp.array([[1.0, 3.0, 2.5]]), None, SamplingConfig())[:2]
        (Array([1], dtype=int32), Array([0.5], dtype=float32))
    """
    token = sample(keys, logits, sampling)
    scores = logits
    if keys is not None and not sampling.greedy:
        noise = jax.vmap(lambda key, row: jax.random.gumbel(key, row.shape, row.dtype))
        scores = filter_logits(logits, sampling)
        scores = scores + noise(keys, scores)
    others = jnp.where(jnp.arange(scores.shape[-1]) == token[:, None], -jnp.inf, scores)
    return Choice(token, scores.max(-1) - others.max(-1), jnp.isnan(logits).any(-1))


def choose_by_rejection(
    logits: Float[Array, "batch vocab"],
    keys: Key[Array, " batch"],
    sampling: SamplingConfig,
    candidates: Int[Array, "batch width"],
    scores: Float[Array, "batch vocab"],
    has_candidates: Bool[Array, " batch"],
) -> Choice:
    r"""A token with the distribution of `sample`, that is one of the candidates as often as can be.

    The candidates were drawn one after the other without replacement from $q = \mathrm{softmax}(\mathrm{scores})$.
    Each is taken with probability $\min(1, p(x) / q(x))$; else p becomes the normalised positive part of p - q, and q
    is normalised without x. What is left of p at the end is drawn from.

    Args:
        logits: of one node of each sequence.
        keys: one for each.
        sampling: gives p; not greedy.
        candidates: in the order in which they were drawn.
        scores: the logits they were drawn from.
        has_candidates: where False, the token is drawn from p as it is.

    Returns:
        A `Choice`, of infinite margin.

    Source: Miao et al., SpecInfer, arXiv:2305.09781, algorithm 3, for draws without replacement.

    Example:
        >>> same = jnp.log(jnp.array([[0.9, 0.1]]))
        >>> key, config = jax.random.key(0)[None], SamplingConfig(temperature=1.0)
        >>> choose_by_rejection(same, key, config, jnp.array([[1]]), same, jnp.array([True])).token.tolist()
        [1]
    """
    target = jax.nn.softmax(filter_logits(logits, sampling), axis=-1)
    draft = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)
    keys_of = jax.vmap(jax.random.fold_in, (0, None))
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (candidates.shape[1],)))(keys_of(keys, 1))
    vocab = jnp.arange(logits.shape[-1])

    def one(carry: Any, column: Any) -> tuple[Any, None]:
        p, q, token, taken = carry
        x, u = column
        at = lambda of: jnp.take_along_axis(of, x[:, None], axis=1)[:, 0]
        drawn = has_candidates & ~taken & (at(q) > 0)
        accept = drawn & (u * at(q) < at(p))
        rest = jnp.maximum(p - q, 0.0)
        total = rest.sum(-1, keepdims=True)
        # Where p and q are equal nothing is left, and nothing is rejected but by rounding.
        rest = jnp.where(total > 0, rest / jnp.where(total > 0, total, 1.0), p)
        less = jnp.where(vocab == x[:, None], 0.0, q)
        sum_ = less.sum(-1, keepdims=True)
        less = less / jnp.where(sum_ > 0, sum_, 1.0)
        go_on = (drawn & ~accept)[:, None]
        p, q = jnp.where(go_on, rest, p), jnp.where(go_on, less, q)
        return (p, q, jnp.where(accept, x, token), taken | accept), None

    start = (target, draft, jnp.zeros(len(target), jnp.int32), jnp.zeros(len(target), bool))
    (left, _, token, taken), _ = jax.lax.scan(one, start, (candidates.T, uniform.T))
    drawn = jax.vmap(jax.random.categorical)(keys_of(keys, 2), jnp.log(left)).astype(jnp.int32)
    token = jnp.where(taken, token, drawn)
    return Choice(token, jnp.full(len(token), jnp.inf), jnp.isnan(logits).any(-1))


def index_keys(key: PRNGKeyArray | None, indices: Int[Array, " batch"]) -> Key[Array, " batch"] | None:
    """`token_keys`, or None without a key."""
    return None if key is None else token_keys(key, indices)
