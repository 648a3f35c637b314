"""What every form is given: queries as rows, keys and values as tables of blocks, and which pairs see each other.

| array | shape | holds |
|---|---|---|
| `q` | [rows, group, dim] | a row is one query token and one KV head; batch, token, head in this order |
| `k`, `v` | [blocks, block_size, dim] | all key blocks of all KV heads; batch, head, block in this order |
| `ids` | [rows, slots] | places in the tables, -1 for none; no place twice in a row |
| `positions`, `segments` | [rows] | of the row's query |
| `key_segments` | [batch * blocks of a head, block_size] | shared by the heads |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["Geometry", "Tiles", "group_by_block", "no_duplicates", "slopes"]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What is static in a call."""

    block_size: int
    blocks: int  # of one KV head
    heads: int  # KV heads
    keys: int  # real ones; the last block may be padded
    scale: float
    causal: bool
    segmented: bool

    def local(self, ids: Any) -> Any:
        """A place in the tables as the number of the block in its head."""
        return jax.lax.rem(ids, jnp.asarray(self.blocks, ids.dtype))

    def segment_block(self, ids: Any) -> Any:
        """A place in the tables as the row of `key_segments`."""
        batch = jax.lax.div(ids, jnp.asarray(self.heads * self.blocks, ids.dtype))
        return batch * self.blocks + self.local(ids)

    def sees(
        self,
        ids: Any,
        offset: Any,
        position: Any,
        segment: Callable[[], Any],
        key_segment: Callable[[Any], Any],
    ) -> Any:
        """Whether a query sees the key at `offset` of the block at `ids`: the mask of every form, forward and backward.

        Args:
            ids: places in the tables, -1 for none.
            offset: of a key in its block.
            position: of the query.
            segment: gives the query's segment; called only if there are segments.
            key_segment: from a row of `key_segments` the segments of its keys; likewise.

        Returns:
            bool, of the shape that all of them broadcast to.
        """
        place = jnp.maximum(ids, 0)
        at = self.local(place) * self.block_size + offset
        keep = (ids >= 0) & (offset < self.block_size) & (at < self.keys)
        if self.causal:
            keep &= at <= position
        if self.segmented:
            keep &= segment() == key_segment(self.segment_block(place))
        return keep


def slopes(
    logits: Array, keep: Array, logarithm: Array, products: Array, offset: Array
) -> tuple[Array, Array]:
    """Weights of the softmax and the gradients of its logits: what every backward pass computes of a pair.

    w = e^(logit - logarithm),    slope = w (products - offset)

    Args:
        logits: [..., keys], scaled.
        keep: as `logits` or broadcast to it; where False both results are 0, whatever the rest holds.
        logarithm: [...], of the sum of exponentials.
        products: as `logits`, of the output's gradient and the values.
        offset: [...].
    """
    weights = jnp.where(keep, jnp.exp(logits - logarithm[..., None]), 0)
    return weights, jnp.where(keep, weights * (products - offset[..., None]), 0)


def no_duplicates(indices: Array, positions: Array, geometry: Geometry) -> Array:
    """Places in the tables from block numbers `[batch, tokens, heads, slots]`: sorted, -1 where there is none.

    None: a number outside the head's blocks, one that stands before in the row, a block that begins behind the query.
    """
    indices = indices.astype(jnp.int32)
    allowed = (indices >= 0) & (indices < geometry.blocks)
    if geometry.causal:
        allowed &= indices * geometry.block_size <= positions[:, :, None, None]
    indices = jnp.sort(jnp.where(allowed, indices, geometry.blocks), axis=-1)
    before = jnp.concatenate([jnp.full_like(indices[..., :1], -1), indices[..., :-1]], axis=-1)
    batch = jnp.arange(indices.shape[0], dtype=jnp.int32)[:, None, None, None]
    head = jnp.arange(indices.shape[2], dtype=jnp.int32)[:, None]
    places = (batch * geometry.heads + head) * geometry.blocks + indices
    return jnp.where((indices < geometry.blocks) & (indices != before), places, -1)


class Tiles(NamedTuple):
    """Pairs of a row and a block, sorted by block and cut into tiles of one block each.

    Tile i holds pairs `start[i]:stop[i]` of `rows`, all of block `block[i]`; blocks ascend. Tiles that are not needed
    are empty and of the block behind the last. Block b owns tiles `first[b]:first[b + 1]`.
    """

    rows: Array  # [pairs]
    block: Array  # [tiles]
    start: Array  # [tiles]
    stop: Array  # [tiles]
    first: Array  # [blocks + 1]


def group_by_block(ids: Array, blocks: int, size: int) -> Tiles:
    """Sorts `ids` [rows, slots] by block; at most `pairs / size + blocks` tiles of `size` pairs."""
    rows, slots = ids.shape
    keys = jnp.where(ids >= 0, ids, blocks).reshape(-1)
    numbers = jnp.arange(rows * slots, dtype=jnp.int32)
    keys, order = jax.lax.sort((keys, numbers), num_keys=1)
    begins = jnp.searchsorted(keys, jnp.arange(blocks + 1, dtype=jnp.int32)).astype(jnp.int32)
    counts = begins[1:] - begins[:-1]
    zero = jnp.zeros_like(begins[:1])
    first = jnp.concatenate([zero, jnp.cumsum(-(-counts // size), dtype=jnp.int32)])
    tiles = jnp.arange(rows * slots // size + blocks, dtype=jnp.int32)
    block = jnp.searchsorted(first[1:], tiles, side="right").astype(jnp.int32)
    inside = jnp.minimum(block, blocks - 1)
    start = jnp.where(block < blocks, begins[inside] + (tiles - first[inside]) * size, 0)
    stop = jnp.where(block < blocks, jnp.minimum(start + size, begins[inside + 1]), 0)
    return Tiles(order // slots, block, start, stop, first)
