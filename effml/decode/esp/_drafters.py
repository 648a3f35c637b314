"""What proposes candidates: the seam that every drafter fills, and probing with soft masks.

A drafter is a hashable value with pure functions; what it remembers is a pytree, carried through the loop. It may add
rows of its own to the pass that verifies its tree, so that drafting costs no pass of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from effml.decode._loop import token_keys
from effml.decode.esp._config import ESPConfig
from effml.decode.esp._masks import init_masks, update_masks, vocabulary_statistics
from effml.decode.esp._tree import (
    Tree,
    TreeSpec,
    dynamic_tree,
    fill_tree,
    ranked,
    tree_structure,
    with_masks,
)

__all__ = ["Drafter", "ESPDrafter", "Extra", "Prompt", "Seen", "Text"]


class Prompt(NamedTuple):
    """What a drafter is given at the beginning.

    Attributes:
        params: of the model.
        config: of the transformer.
        tokens: int32[batch, length], padded on the right.
        embeddings: [batch, length, width] of them.
        lengths: int32[batch].
        key: random key or None.
        given: what the caller gave for the drafter, a pytree or None.
    """

    params: Any
    config: Any
    tokens: Array
    embeddings: Array
    lengths: Array
    key: PRNGKeyArray | None
    given: Any


class Text(NamedTuple):
    """The text so far.

    Attributes:
        tokens: int32[batch, room]; prompt and what was written, then padding.
        lengths: int32[batch]; the root is at `lengths - 1`.
        written: int32[batch], new tokens.
        key: random key of the tokens, or None.
    """

    tokens: Array
    lengths: Array
    written: Array
    key: PRNGKeyArray | None

    def before(self, steps: int) -> Array:
        """int32[batch]: the token so many places before the root.

        Example:
            >>> Text(jnp.array([[4, 5, 0]]), jnp.array([2]), jnp.array([1]), None).before(1).tolist()
            [4]
        """
        place = jnp.maximum(self.lengths - 1 - steps, 0)
        return jnp.take_along_axis(self.tokens, place[:, None], axis=1)[:, 0]


class Extra(NamedTuple):
    """Rows that a drafter adds behind the tree. They see the prompt and the root.

    Attributes:
        embeddings: [batch, rows, width].
        offsets: int32[#batch, rows], positions behind the root's.
        sees: bool[#batch, rows, nodes + rows].
    """

    embeddings: Array
    offsets: Any
    sees: Any


class Seen(NamedTuple):
    """What a pass has shown.

    Attributes:
        logits: float32[batch, rows, vocab] of the pass; the last rows are the extra ones.
        row: int32[batch], the node that the last token written follows.
        tokens: int32[batch, depths + 1], written by this pass.
        count: int32[batch], how many of them count.
        embed: gives the embeddings of tokens.
        first: the first extra row.
    """

    logits: Array
    row: Array
    tokens: Array
    count: Array
    embed: Callable[[Array], Array]
    first: int = 0


@dataclass(frozen=True)
class Drafter:
    """Plain decoding: no candidate, no row more. The base of all others.

    Example:
        >>> text = Text(jnp.array([[4, 5, 0]]), jnp.array([2]), jnp.array([1]), None)
        >>> Drafter().draft((), text).tokens.tolist()
        [[5]]
    """

    @property
    def depths(self) -> int:
        """Depth of the deepest candidate.

        Example:
            >>> Drafter().depths
            0
        """
        return 0

    @property
    def reach(self) -> int:
        """How far behind the root a row of a pass can stand: candidates, and what is behind them.

        Example:
            >>> Drafter().reach
            0
        """
        return self.depths

    @property
    def prompt_rows(self) -> int:
        """Rows added to the pass that reads the prompt.

        Example:
            >>> Drafter().prompt_rows
            0
        """
        return 0

    def start(self, prompt: Prompt) -> Any:
        """What is remembered at the beginning.

        Example:
            >>> row = jnp.array([1])
            >>> Drafter().start(Prompt({}, None, row[None], jnp.ones((1, 1, 2)), row, None, None))
            ()
        """
        del prompt
        return ()

    def draft(self, memory: Any, text: Text) -> Tree:
        """The candidates behind the root.

        Example:
            >>> text = Text(jnp.array([[4, 5, 0]]), jnp.array([2]), jnp.array([1]), None)
            >>> Drafter().draft((), text).depth.tolist()
            [[0]]
        """
        del memory
        return TreeSpec((), 0).tree(text.before(0)[:, None])

    def extra(self, memory: Any, tree: Tree, embed: Callable[[Array], Array]) -> Extra | None:
        """Rows to add to the pass that verifies this tree; `embed` gives the embeddings of tokens.

        Example:
            >>> Drafter().extra((), TreeSpec((), 0).tree(jnp.array([[5]])), jnp.ones_like) is None
            True
        """
        del memory, tree, embed
        return None

    def observe(self, memory: Any, seen: Seen) -> Any:
        """What is remembered after a pass.

        Example:
            >>> row = jnp.array([1])
            >>> Drafter().observe((), Seen(jnp.ones((1, 0, 4)), row, row[None], row, jnp.ones_like))
            ()
        """
        del seen
        return memory


class Memory(NamedTuple):
    """What probing remembers.

    Attributes:
        masks: float32[batch, k, width].
        logits: float32[batch, k, vocab], what the masks behind the last node proposed.
    """

    masks: Array
    logits: Array


@dataclass(frozen=True)
class ESPDrafter(Drafter):
    """Probing: k soft masks behind every node propose the tokens after the one that the node's own logits give.

    Args:
        config: masks and tree; for a vocabulary that is smaller than a width, see `for_vocabulary`.

    Example:
        >>> ESPDrafter(ESPConfig(num_masks=2, widths=(7, 2))).depths
        2
    """

    config: ESPConfig

    @property
    def depths(self) -> int:
        """Depth of the deepest candidate: one for each mask, or for each width.

        Example:
            >>> ESPDrafter(ESPConfig(num_masks=2, widths=(7,))).depths
            1
        """
        if not self.config.num_masks:
            return 0
        return self.config.num_masks if self.config.widths is None else len(self.config.widths)

    @property
    def reach(self) -> int:
        """The last mask of the deepest candidate.

        Example:
            >>> ESPDrafter(ESPConfig(num_masks=2, widths=(7,))).reach
            3
        """
        return self.depths + self.config.num_masks

    @property
    def prompt_rows(self) -> int:
        """The masks behind the prompt.

        Example:
            >>> ESPDrafter(ESPConfig(num_masks=2, widths=(7,))).prompt_rows
            2
        """
        return self.config.num_masks

    @property
    def spec(self) -> TreeSpec:
        """The static tree.

        Example:
            >>> ESPDrafter(ESPConfig()).spec.widths
            (14,)
        """
        return tree_structure(self.config.widths or (), self.config.num_masks)

    def start(self, prompt: Prompt) -> Memory | tuple[()]:
        """The masks of each prompt; what they propose comes with the pass that reads it.

        Raises:
            ValueError: if masks that were given have another shape, or a key is needed and absent.
        """
        config, (batch, _, width) = self.config, prompt.embeddings.shape
        if not config.num_masks:
            return ()
        shape = (batch, config.num_masks, width)
        if prompt.given is not None:
            masks = jnp.broadcast_to(jnp.asarray(prompt.given, jnp.float32), shape)
        else:
            keys = None
            if config.mask_init == "sample" and prompt.key is not None:
                # An index that no token has.
                keys = token_keys(prompt.key, jnp.full(batch, np.iinfo(np.int32).max, jnp.int32))
            statistics = vocabulary_statistics(
                prompt.params, prompt.config.embedding_scale, config.num_tokens
            )
            masks = init_masks(prompt.embeddings, prompt.lengths, config, statistics=statistics, keys=keys)
        return Memory(masks, jnp.zeros((*shape[:2], prompt.config.vocab_size), jnp.float32))

    def draft(self, memory: Any, text: Text) -> Tree:
        """The tree of what the masks proposed."""
        config = self.config
        if not self.depths:
            return super().draft(memory, text)
        root, logits = text.before(0), memory.logits[:, : self.depths]
        options = {"prune": config.prune_repeats, "num_tokens": config.num_tokens}
        if config.verify == "rejection":
            return self._drawn(logits, text)
        if config.widths is None:
            return dynamic_tree(logits, root, config.num_nodes, **options)
        return fill_tree(self.spec, root, ranked(logits, root, max(config.widths), **options)[0])

    def _drawn(self, logits: Array, text: Text) -> Tree:
        """A static tree of candidates drawn without replacement; the first one drawn has the children."""
        assert self.config.widths is not None
        assert text.key is not None
        ids = jnp.arange(logits.shape[-1])
        parent, parts, scores = text.before(0), [], []
        for depth, width in enumerate(self.config.widths):
            of = logits[:, depth]
            if self.config.prune_repeats:
                of = jnp.where(ids == parent[:, None], -jnp.inf, of)
            if self.config.num_tokens is not None:
                of = jnp.where(ids < self.config.num_tokens, of, -jnp.inf)
            keys = jax.vmap(jax.random.fold_in, (0, None))(token_keys(text.key, text.written + depth), 3)
            noise = jax.vmap(lambda key: jax.random.gumbel(key, ids.shape))(keys)
            parts.append(jax.lax.top_k(of + noise, width)[1])
            scores.append(of)
            parent = parts[-1][:, 0]
        tokens = jnp.concatenate([text.before(0)[:, None], *parts], axis=1)
        return self.spec.tree(tokens, jnp.stack(scores, axis=1))

    def extra(self, memory: Any, tree: Tree, embed: Callable[[Array], Array]) -> Extra | None:
        """k masks behind every node of the tree."""
        del embed
        masks = self.config.num_masks
        if not masks:
            return None
        batch, nodes = tree.tokens.shape
        depth = jnp.asarray(tree.depth)[:, :, None] + jnp.arange(1, masks + 1)
        rows = jnp.broadcast_to(memory.masks[:, None], (batch, nodes, *memory.masks.shape[1:]))
        return Extra(
            rows.reshape(batch, nodes * masks, -1),
            depth.reshape(depth.shape[0], -1),
            with_masks(tree.sees, masks),
        )

    def observe(self, memory: Any, seen: Seen) -> Any:
        """Keeps what the masks behind the last node proposed, and moves the masks."""
        masks = self.config.num_masks
        if not masks:
            return memory
        rows = seen.first + seen.row[:, None] * masks + jnp.arange(masks)
        logits = jnp.take_along_axis(seen.logits, rows[:, :, None], axis=1)
        valid = jnp.arange(seen.tokens.shape[1]) < seen.count[:, None]
        moved = update_masks(memory.masks, seen.embed(seen.tokens), self.config.rate, valid)
        going = (seen.count > 0)[:, None, None]
        return Memory(moved, jnp.where(going, logits, memory.logits))
