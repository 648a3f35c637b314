"""Sizes that decide speed and memory, not the result (but for the order of sums)."""

from __future__ import annotations

import dataclasses

from pallas_kernels._arguments import power_of_two, whole_number

__all__ = ["BlockSizes"]


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How the forms cut their work; the defaults are the heuristic, and each can be given.

    The bytes that a form holds at once beyond its arguments and results follow from these.
    """

    gathered_bytes: int = 4 * 2**20
    """XLA: keys and values, or queries, that one step gathers. Smaller than a core's cache pays on CPU."""

    pairs: int = 64
    """Backward: queries of one key block that are worked on together (XLA) or by one program (GPU: four times this)."""

    keys: int = 64
    """GPU: keys loaded at once; larger blocks are walked in pieces of this size. A power of two from 16."""

    num_warps: int = 4
    """GPU: warps of a program."""

    num_stages: int = 2
    """GPU: loads in flight."""

    slots: int = 4
    """TPU: blocks fetched at once."""

    prefetched: int = 32 * 1024
    """TPU: block numbers held in scalar memory at once."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            whole_number(f"blocks.{field.name}", getattr(self, field.name), 1)
        if self.keys < 16 or not power_of_two(self.keys):
            raise ValueError(f"blocks.keys={self.keys} must be a power of two from 16")
        if not power_of_two(self.num_warps):
            raise ValueError(f"blocks.num_warps={self.num_warps} must be a power of two")
