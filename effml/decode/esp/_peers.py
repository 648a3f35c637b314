"""Drafters that need no mask: counts, copies from the text, and Lookahead. All are verified as probing is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from effml._validate import count as check_count
from effml._validate import one_of, real
from effml.decode.esp._drafters import Drafter, Extra, Prompt, Seen, Text
from effml.decode.esp._tree import Tree, TreeSpec

__all__ = ["CountDrafter", "Lookahead", "NgramCache", "PromptLookup", "count_candidates"]

_ANCHORS = ("none", "before", "root")


def count_candidates(
    tokens: Int[np.ndarray, " length"], vocab_size: int, widths: tuple[int, ...], anchor: str
) -> Int[np.ndarray, "depths anchors width"]:
    """What most often stands one, two, ... places behind each token of a text, best first.

    Args:
        tokens: the text that is counted.
        vocab_size: of the model; the table holds vocab_size x max(widths) ids for each depth.
        widths: candidates at each depth.
        anchor: `"none"` (unigram), `"before"` (skip-bigram: given the token before the root, all that a mask in the
            root's place sees), or `"root"` (bigram: given the root).

    Returns:
        int32 ids; ties go to the lower id. With `"none"` there is one anchor.

    Raises:
        ValueError: for an unknown anchor, ids outside the vocabulary, or more candidates than tokens.
        TypeError: for ids or widths that are no integers.

    Example:
        >>> count_candidates(np.array([0, 1, 0, 1, 0, 2]), 3, (2,), "root")[0, 0].tolist()
        [1, 2]
    """
    one_of("anchor", anchor, _ANCHORS)
    _check_widths(widths, vocab_size)
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TypeError(f"tokens must be integer ids of one text, got shape {tokens.shape}, {tokens.dtype}")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(
            f"tokens hold ids from {tokens.min()} to {tokens.max()}, outside the vocabulary 0..{vocab_size - 1}"
        )
    tables = []
    for depth in range(1, len(widths) + 1):
        if anchor == "none":
            counts = np.bincount(tokens, minlength=vocab_size)[None]
        else:
            gap = depth + (anchor == "before")
            pairs = tokens[:-gap].astype(np.int64) * vocab_size + tokens[gap:]
            counts = np.bincount(pairs, minlength=vocab_size**2).reshape(vocab_size, vocab_size)
        tables.append(np.argsort(-counts, axis=1, kind="stable")[:, : max(widths)])
    return np.stack(tables).astype(np.int32)


def _check_widths(widths: Any, vocab_size: int | None = None) -> None:
    if not isinstance(widths, tuple) or not widths:
        raise TypeError(f"widths={widths!r} must be a tuple of one or more integers")
    for width in widths:
        check_count("widths", width)
    if vocab_size is not None and max(widths) > vocab_size:
        raise ValueError(f"widths={widths!r} ask for more candidates than the {vocab_size} tokens there are")


@dataclass(frozen=True)
class CountDrafter(Drafter):
    """The same tree as probing, filled from counts; give `generate` their table as `given`.

    Args:
        widths: candidates at each depth.
        anchor: as for `count_candidates`.

    Example:
        >>> CountDrafter((4, 2), "root").depths
        2
    """

    widths: tuple[int, ...]
    anchor: str = "none"

    def __post_init__(self) -> None:
        _check_widths(self.widths)
        one_of("anchor", self.anchor, _ANCHORS)

    @property
    def depths(self) -> int:
        """Depth of the deepest candidate."""
        return len(self.widths)

    def start(self, prompt: Prompt) -> Any:
        """The table.

        Raises:
            ValueError: if there is none, or it has another shape.
        """
        anchors = 1 if self.anchor == "none" else prompt.config.vocab_size
        wanted = (len(self.widths), anchors, max(self.widths))
        given = () if prompt.given is None else np.shape(prompt.given)
        if given != wanted:
            raise ValueError(
                f"counts of anchor={self.anchor!r} need given=count_candidates(...) of shape {wanted}, got {given}"
            )
        return jnp.asarray(prompt.given)

    def draft(self, memory: Any, text: Text) -> Tree:
        """What is counted most behind the anchor."""
        anchor = {"none": jnp.zeros_like(text.lengths), "before": text.before(1), "root": text.before(0)}
        found = memory[:, anchor[self.anchor]]
        parts = [found[depth, :, :width] for depth, width in enumerate(self.widths)]
        return TreeSpec(self.widths, 0).tree(jnp.concatenate([text.before(0)[:, None], *parts], axis=1))


@dataclass(frozen=True)
class PromptLookup(Drafter):
    """Copies what followed the last tokens where they stood before; the longest match counts, then the latest.

    Args:
        num_tokens: to copy.
        max_ngram: tokens to match at most.

    Source: Saxena 2023, prompt lookup decoding.

    Example:
        >>> text = Text(jnp.array([[7, 8, 9, 7, 8, 0]]), jnp.array([5]), jnp.array([1]), None)
        >>> PromptLookup(2).draft((), text).tokens.tolist()
        [[8, 9, 7]]
    """

    num_tokens: int = 4
    max_ngram: int = 3

    def __post_init__(self) -> None:
        check_count("num_tokens", self.num_tokens)
        check_count("max_ngram", self.max_ngram)

    @property
    def depths(self) -> int:
        """Depth of the deepest candidate."""
        return self.num_tokens

    def draft(self, memory: Any, text: Text) -> Tree:
        """A chain of copies, as far as they go."""
        del memory
        tokens, room = text.tokens, text.tokens.shape[1]
        places = jnp.arange(room)
        matched = jnp.broadcast_to(places < text.lengths[:, None] - 1, tokens.shape)
        longest = jnp.zeros_like(tokens)
        for size in range(self.max_ngram):
            shifted = jnp.roll(tokens, size, axis=1)
            there = (places >= size) & (text.lengths[:, None] > size + 1)
            matched = matched & there & (shifted == text.before(size)[:, None])
            longest = longest + matched
        end = jnp.argmax(longest * room + places, axis=1)
        found = jnp.take_along_axis(longest, end[:, None], axis=1) > 0
        copied = end[:, None] + 1 + jnp.arange(self.num_tokens)
        drafted = jnp.take_along_axis(tokens, jnp.minimum(copied, room - 1), axis=1)
        valid = found & (copied < text.lengths[:, None])
        tree = TreeSpec((1,) * self.num_tokens, 0).tree(
            jnp.concatenate([text.before(0)[:, None], drafted], axis=1)
        )
        return tree._replace(valid=jnp.concatenate([jnp.ones_like(found), valid], axis=1))


@dataclass(frozen=True)
class NgramCache(Drafter):
    """A tree of what most often followed the last one or two tokens in the text so far; longer matches count more.

    Args:
        widths: candidates at each depth.
        longer: how many matches of one token a match of two is worth.

    Example:
        >>> text = Text(jnp.array([[7, 8, 7, 9, 7, 9, 7, 0]]), jnp.array([7]), jnp.array([1]), None)
        >>> NgramCache((2,)).draft(jnp.zeros(10), text).tokens.tolist()
        [[7, 9, 8]]
    """

    widths: tuple[int, ...] = (3, 1)
    longer: float | int = 4.0

    def __post_init__(self) -> None:
        _check_widths(self.widths)
        if not 0 <= real("longer", self.longer) < float("inf"):
            raise ValueError(f"longer={self.longer!r} must be 0 or above, and finite")

    @property
    def depths(self) -> int:
        """Depth of the deepest candidate."""
        return len(self.widths)

    def start(self, prompt: Prompt) -> Any:
        """An empty count for every token.

        Raises:
            ValueError: if a width is more than the vocabulary.
        """
        _check_widths(self.widths, prompt.config.vocab_size)
        return jnp.zeros(prompt.config.vocab_size)

    def draft(self, memory: Any, text: Text) -> Tree:
        """The best counts; what was never seen is no candidate."""
        tokens = text.tokens
        places = jnp.arange(tokens.shape[1])
        follows = (places >= 1) & (places < text.lengths[:, None])
        before, second = jnp.roll(tokens, 1, axis=1), jnp.roll(tokens, 2, axis=1)
        last, older = text.before(0), text.before(1)
        parts, valid = [last[:, None]], [jnp.ones((len(last), 1), bool)]
        for width in self.widths:
            one = follows & (before == last[:, None])
            two = one & (second == older[:, None]) & (places >= 2)
            # The latest of equals first: the place breaks ties.
            weight = one + self.longer * two + 1e-6 * one * places
            scores = jax.vmap(lambda zero, at, by: zero.at[at].add(by), (None, 0, 0))(memory, tokens, weight)
            best, found = jax.lax.top_k(scores, width)
            parts.append(found.astype(jnp.int32))
            valid.append(best > 0)
            older, last = last, parts[-1][:, 0]
        tree = TreeSpec(self.widths, 0).tree(jnp.concatenate(parts, axis=1))
        return tree._replace(valid=jnp.concatenate(valid, axis=1))


class Pool(NamedTuple):
    """What Lookahead remembers.

    Attributes:
        window: int32[batch, ngram - 1, columns], guesses of the tokens ahead, the oldest first.
        grams: int32[batch, size, ngram], found so far, the latest last; -1 is none.
    """

    window: Array
    grams: Array


@dataclass(frozen=True)
class Lookahead(Drafter):
    """Jacobi iteration on a window of guesses, whose trajectories fill a pool of n-grams that are then verified.

    Row (l, c) of the window guesses the token 1 + l + c places behind the root. It sees the root, the first row's
    columns up to its own, and its own column's rows before it; what the last row gives becomes the new last row.

    Args:
        columns: of the window (W).
        ngram: tokens of an n-gram (N).
        branches: n-grams verified at once (G).
        size: n-grams kept.

    Source: Fu et al. 2024, Break the Sequential Dependency of LLM Inference Using Lookahead Decoding,
        arXiv:2402.02057.

    Example:
        >>> Lookahead(columns=5, ngram=3, branches=4).depths
        2
    """

    columns: int = 5
    ngram: int = 3
    branches: int = 4
    size: int = 128

    def __post_init__(self) -> None:
        for name in ("columns", "branches", "size"):
            check_count(name, getattr(self, name))
        if check_count("ngram", self.ngram) < 2:
            raise ValueError(f"ngram={self.ngram} must be 2 or above: the first token is the root")
        if self.branches > self.size:
            raise ValueError(
                f"branches={self.branches} n-grams are more than the size={self.size} that are kept"
            )

    @property
    def depths(self) -> int:
        """Depth of the deepest candidate."""
        return self.ngram - 1

    @property
    def reach(self) -> int:
        """The last guess of the window, or the deepest candidate."""
        return max(self.depths, self.columns + self.ngram - 2)

    @property
    def prompt_rows(self) -> int:
        """The window."""
        return self.columns * (self.ngram - 1)

    def start(self, prompt: Prompt) -> Pool:
        """A window filled from the prompt, and an empty pool."""
        levels = self.ngram - 1
        places = jnp.arange(levels)[:, None] + jnp.arange(self.columns)
        places = places % prompt.lengths[:, None, None]
        window = jax.vmap(lambda row, at: row[at])(prompt.tokens, places)
        grams = jnp.full((len(window), self.size, self.ngram), -1, jnp.int32)
        return Pool(window, grams)

    def draft(self, memory: Pool, text: Text) -> Tree:
        """The latest n-grams that begin with the root, as one tree: common beginnings are drafted once."""
        root, grams = text.before(0), memory.grams
        same = (grams[:, :, None] == grams[:, None]).all(-1)
        stale = (same & jnp.triu(jnp.ones(same.shape[1:], bool), 1)).any(2)
        fresh = (grams[:, :, 0] == root[:, None]) & ~stale
        order, at = jax.lax.top_k(jnp.where(fresh, jnp.arange(self.size), -1), self.branches)
        found = jnp.take_along_axis(grams, at[:, :, None], axis=1)[:, :, 1:]
        alike = jnp.cumprod((found[:, :, None] == found[:, None]).astype(jnp.int32), axis=-1) > 0
        alike = alike & ((order >= 0)[:, :, None, None] & (order >= 0)[:, None, :, None])
        first = jnp.argmax(alike, axis=2)  # the first branch with the same beginning, at each depth
        branch, level = jnp.arange(self.branches)[:, None], jnp.arange(self.depths)
        parent = jnp.where(level == 0, 0, jnp.roll(1 + first * self.depths + level, 1, axis=2))
        valid = (order >= 0)[:, :, None] & (first == branch)
        lead = lambda value, of: jnp.pad(
            of.reshape(len(root), -1), ((0, 0), (1, 0)), constant_values=value
        ).astype(jnp.int32)
        parent, depth = lead(0, parent), lead(0, jnp.broadcast_to(level + 1, parent.shape))
        nodes = 1 + self.branches * self.depths
        up = jax.nn.one_hot(parent, nodes, dtype=bool)
        sees = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), up.shape)
        for _ in range(self.depths):
            sees = sees | jnp.einsum("bij,bjk->bik", up.astype(jnp.float32), sees.astype(jnp.float32)).astype(
                bool
            )
        return Tree(lead(0, found).at[:, 0].set(root), parent, depth, sees, lead(1, valid).astype(bool))

    def extra(self, memory: Pool, tree: Tree, embed: Callable[[Array], Array]) -> Extra:
        """The window."""
        levels, nodes = self.ngram - 1, tree.tokens.shape[1]
        level, column = (part.reshape(-1) for part in np.indices((levels, self.columns)))
        first = (level == 0) & (column <= column[:, None])
        sees = first | ((column == column[:, None]) & (level <= level[:, None]))
        sees = np.pad(sees, ((0, 0), (nodes, 0)))
        sees[:, 0] = True
        tokens = memory.window.reshape(len(memory.window), -1)
        return Extra(embed(tokens), (1 + level + column)[None].astype(np.int32), sees[None])

    def observe(self, memory: Pool, seen: Seen) -> Pool:
        """New n-grams enter the pool, the window moves up by a level and on by what was written."""
        new = seen.logits[:, -self.columns :].argmax(-1).astype(jnp.int32)
        going = (seen.count > 0)[:, None, None]
        rows = jnp.concatenate([memory.window, new[:, None]], axis=1)
        grams = jnp.concatenate([memory.grams, rows.transpose(0, 2, 1)], axis=1)[:, -self.size :]
        ahead = (jnp.arange(self.columns) + jnp.maximum(seen.count - 1, 0)[:, None]) % self.columns
        window = jnp.take_along_axis(rows[:, 1:], ahead[:, None], axis=2)
        return Pool(jnp.where(going, window, memory.window), jnp.where(going, grams, memory.grams))
