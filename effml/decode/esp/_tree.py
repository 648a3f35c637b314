"""Trees of candidates: their shape, their rows in a pass of the model, and who sees whom.

Row 0 is the root, the token written last; candidates follow in breadth-first order; only the best candidate of a depth
has children. Shapes of arrays depend on the number of nodes alone, so that a tree whose widths change from pass to
pass is never compiled again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

__all__ = ["Tree", "TreeSpec", "dynamic_tree", "fill_tree", "ranked", "tree_structure", "with_masks"]


class Tree(NamedTuple):
    """Candidates behind each sequence's root. A leading axis of 1 is shared by the batch.

    Attributes:
        tokens: int32[batch, nodes]; column 0 is the root.
        parent: int32[#batch, nodes], row of the parent; the root's is itself.
        depth: int32[#batch, nodes]; the root's is 0.
        sees: bool[#batch, nodes, nodes]: its ancestors and itself.
        valid: bool[#batch, nodes], whether there is such a candidate at all.
        scores: float32[batch, depths, vocab] or None: logits that the candidates of a depth were drawn from.
    """

    tokens: Any
    parent: Any
    depth: Any
    sees: Any
    valid: Any
    scores: Any = None


@dataclass(frozen=True)
class TreeSpec:
    """The shape of a tree with masks behind every node, as host arrays; equal specs hash alike.

    Attributes:
        widths: candidates at each depth.
        masks: k.
    """

    widths: tuple[int, ...]
    masks: int

    @functools.cached_property
    def parent(self) -> np.ndarray:
        """int32[nodes]: row of each node's parent, the root's is 0.

        Example:
            >>> TreeSpec((2, 1), 1).parent.tolist()
            [0, 0, 0, 1]
        """
        firsts = [0, *np.cumsum([1, *self.widths])[:-1]]
        return np.array([0, *np.repeat(firsts[:-1], self.widths)], np.int32)

    @functools.cached_property
    def depth(self) -> np.ndarray:
        """int32[nodes]; the root's is 0.

        Example:
            >>> TreeSpec((2, 1), 1).depth.tolist()
            [0, 1, 1, 2]
        """
        return np.repeat(np.arange(len(self.widths) + 1), [1, *self.widths]).astype(np.int32)

    @functools.cached_property
    def sees(self) -> np.ndarray:
        """bool[nodes, nodes]: ancestors and itself.

        Example:
            >>> TreeSpec((2, 1), 1).sees.astype(int)[3].tolist()
            [1, 1, 0, 1]
        """
        sees = np.eye(len(self.parent), dtype=bool)
        for row, parent in enumerate(self.parent):
            sees[row] |= sees[parent]
        return sees

    @functools.cached_property
    def owner(self) -> np.ndarray:
        """int32[rows]: the node that a row belongs to; nodes own themselves.

        Example:
            >>> TreeSpec((1,), 2).owner.tolist()
            [0, 1, 0, 0, 1, 1]
        """
        nodes = np.arange(len(self.parent))
        return np.concatenate([nodes, np.repeat(nodes, self.masks)]).astype(np.int32)

    @functools.cached_property
    def rel_pos(self) -> np.ndarray:
        """int32[rows]: position of each row behind the root's.

        Example:
            >>> TreeSpec((1,), 2).rel_pos.tolist()
            [0, 1, 1, 2, 2, 3]
        """
        behind = np.tile(np.arange(1, self.masks + 1), len(self.parent))
        return np.concatenate([self.depth, np.repeat(self.depth, self.masks) + behind]).astype(np.int32)

    @functools.cached_property
    def attend(self) -> np.ndarray:
        """bool[rows, rows]: which rows (last axis) each row sees.

        Example:
            >>> TreeSpec((1,), 1).attend.astype(int).tolist()
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
        """
        nodes = np.pad(self.sees, ((0, 0), (0, self.masks * len(self.parent))))
        return np.concatenate([nodes, with_masks(self.sees[None], self.masks)[0]])

    def tree(self, tokens: Int[Array, "batch nodes"], scores: Any = None) -> Tree:
        """The shape with tokens in it.

        Example:
            >>> TreeSpec((2,), 1).tree(jnp.array([[5, 6, 7]])).valid.tolist()
            [[True, True, True]]
        """
        valid = np.ones((1, len(self.parent)), bool)
        return Tree(tokens, self.parent[None], self.depth[None], self.sees[None], valid, scores)


def tree_structure(widths: tuple[int, ...], masks: int) -> TreeSpec:
    """The static tree with these widths, and `masks` masks behind every node.

    Args:
        widths: candidates at depths 1, 2, ...; those of a depth are children of the best one of the depth before.
        masks: k.

    Returns:
        A `TreeSpec`; equal arguments give the same object.

    Raises:
        ValueError: for more depths than masks, or a width below 1.

    Source: arXiv:2603.17942, section 3.2.

    Example:
        >>> spec = tree_structure((15, 4), 2)
        >>> len(spec.attend), spec.parent[16:].tolist()
        (60, [1, 1, 1, 1])
    """
    if len(widths) > masks:
        raise ValueError(
            f"widths={widths!r} are {len(widths)} depths, but {masks} masks propose one depth each"
        )
    if any(width < 1 for width in widths):
        raise ValueError(f"widths={widths!r} must all be 1 or above")
    return _spec(tuple(int(width) for width in widths), masks)


@functools.lru_cache(maxsize=64)
def _spec(widths: tuple[int, ...], masks: int) -> TreeSpec:
    return TreeSpec(widths, masks)


def with_masks(sees: Any, masks: int) -> Any:
    """Who the masks of every node see: bool[#batch, nodes * masks, nodes + nodes * masks].

    Mask j of a node sees what the node sees, the node's masks before it, and itself.

    Args:
        sees: bool[#batch, nodes, nodes]; a NumPy array gives one.
        masks: k.

    Example:
        >>> with_masks(np.ones((1, 1, 1), bool), 2).astype(int)[0].tolist()
        [[1, 1, 0], [1, 1, 1]]
    """
    kind: Any = np if isinstance(sees, np.ndarray) else jnp
    nodes = sees.shape[-1]
    own = np.kron(np.eye(nodes, dtype=bool), np.tri(masks, dtype=bool))
    own = kind.broadcast_to(own, (*sees.shape[:-2], *own.shape))
    return kind.concatenate([kind.repeat(sees, masks, axis=-2), own], axis=-1)


def ranked(
    mask_logits: Float[Array, "batch depths vocab"],
    root: Int[Array, " batch"],
    width: int,
    *,
    prune: bool = True,
    num_tokens: int | None = None,
) -> tuple[Int[Array, "batch depths width"], Float[Array, "batch depths width"]]:
    """The best candidates of each depth, best first, and their log-probabilities at temperature 1.

    Args:
        mask_logits: what each mask proposes.
        root: tokens that the first depth follows.
        width: candidates wanted; at most those that there are.
        prune: whether a candidate that repeats its parent (the root, or the best of the depth before) makes way for
            the next one.
        num_tokens: ids from here on are never proposed; None is none.

    Example:
        >>> logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))
        >>> ranked(logits, jnp.array([0]), 2)[0].tolist()
        [[[1, 2]]]
    """
    vocab = mask_logits.shape[-1]
    scores = jax.nn.log_softmax(mask_logits.astype(jnp.float32), axis=-1)
    if num_tokens is not None and num_tokens < vocab:
        scores = jnp.where(jnp.arange(vocab) < num_tokens, scores, -jnp.inf)
    values, tokens = jax.lax.top_k(scores, min(width + prune, vocab))
    if not prune:
        return tokens, values
    parent, kept = root, []
    for depth in range(mask_logits.shape[1]):
        # All from the parent's token on move up by one.
        skip = jnp.cumsum(tokens[:, depth] == parent[:, None], axis=1)[:, : min(width, vocab - 1)] > 0
        places = jnp.arange(skip.shape[1]) + skip
        kept.append([jnp.take_along_axis(x[:, depth], places, axis=1) for x in (tokens, values)])
        parent = kept[-1][0][:, 0]
    return jnp.stack([pair[0] for pair in kept], 1), jnp.stack([pair[1] for pair in kept], 1)


def fill_tree(
    spec: TreeSpec, root: Int[Array, " batch"], candidates: Int[Array, "batch depths width"]
) -> Tree:
    """The static tree with the first candidates of each depth in it.

    Example:
        >>> fill_tree(tree_structure((2, 1), 2), jnp.array([9]), jnp.array([[[1, 2], [3, 4]]])).tokens.tolist()
        [[9, 1, 2, 3]]
    """
    parts = [candidates[:, depth, :width] for depth, width in enumerate(spec.widths)]
    return spec.tree(jnp.concatenate([root[:, None], *parts], axis=1))


def dynamic_tree(
    mask_logits: Float[Array, "batch depths vocab"],
    root: Int[Array, " batch"],
    budget: int,
    *,
    prune: bool = True,
    num_tokens: int | None = None,
) -> Tree:
    r"""The `budget` candidates that are likeliest together with those they follow.

    $$c(i, \mathrm{token}) = \prod_{l<i} \max_v P_l(v) \cdot P_i(\mathrm{token})$$

    of the best `budget` tokens at each depth i; ties go to the smaller depth, then to the better rank. A candidate is
    never likelier than what it follows, so all its ancestors are in the tree.

    Args:
        mask_logits: what each mask proposes.
        root: the tokens written last.
        budget: candidates, the root not counted.
        prune: as for `ranked`.
        num_tokens: as for `ranked`.

    Returns:
        A `Tree` of 1 + min(budget, all candidates) nodes; its shape does not depend on the logits.

    Source: arXiv:2603.17942, algorithm 1.

    Example:
        >>> logits = jnp.log(jnp.array([[[0.1, 0.6, 0.3], [0.2, 0.1, 0.7]]]))
        >>> tree = dynamic_tree(logits, jnp.array([0]), 3)
        >>> tree.tokens.tolist(), tree.parent.tolist()
        ([[0, 1, 2, 2]], [[0, 0, 0, 1]])
    """
    tokens, values = ranked(mask_logits, root, budget, prune=prune, num_tokens=num_tokens)
    depths, width = tokens.shape[1:]
    before = jnp.cumsum(values[:, :, 0], axis=1) - values[:, :, 0]
    joint = (before[:, :, None] + values).reshape(len(root), -1)
    # top_k gives the lower index of equals, which is the smaller depth, then the better rank.
    chosen = jnp.sort(jax.lax.top_k(joint, min(budget, depths * width))[1], axis=1)
    depth = chosen // width + 1
    counts = (depth[:, :, None] == jnp.arange(1, depths + 1)).sum(1)
    firsts = 1 + jnp.cumsum(counts, axis=1) - counts
    parent = jnp.where(depth == 1, 0, jnp.take_along_axis(firsts, jnp.maximum(depth - 2, 0), axis=1))

    def lead(value: int, of: Array) -> Array:
        return jnp.concatenate([jnp.full_like(of[:, :1], value), of], axis=1).astype(jnp.int32)

    depth, parent = lead(0, depth), lead(0, parent)
    rows = jnp.arange(depth.shape[1])
    best = jnp.concatenate(
        [jnp.zeros_like(firsts[:, :1]), firsts], axis=1
    )  # row of the best node of each depth
    ancestor = rows == jnp.take_along_axis(best, depth, axis=1)
    sees = (ancestor[:, None, :] & (depth[:, None, :] < depth[:, :, None])) | jnp.eye(len(rows), dtype=bool)
    found = jnp.take_along_axis(tokens.reshape(len(root), -1), chosen, axis=1)
    valid = jnp.take_along_axis(joint, chosen, axis=1) > -jnp.inf
    return Tree(
        jnp.concatenate([root[:, None], found], axis=1).astype(jnp.int32),
        parent,
        depth,
        sees,
        jnp.concatenate([jnp.ones_like(valid[:, :1]), valid], axis=1),
    )
