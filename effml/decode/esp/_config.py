"""The options of embedding-space probing, checked."""

from __future__ import annotations

import dataclasses
import math
import operator
from dataclasses import dataclass

from effml._validate import one_of, real

__all__ = ["MASK_INITS", "VERIFICATIONS", "ESPConfig"]

MASK_INITS = ("mean", "last_k", "sample", "vocab_mean", "zero", "mu_sigma")
VERIFICATIONS = ("exact", "rejection")


@dataclass(frozen=True)
class ESPConfig:
    r"""How many masks, what they are, and which tree is drafted from them; hashable.

    A pass of the model reads $(k + 1)(1 + n)$ rows: the root, n drafted nodes, and k masks behind each of them.

    Args:
        num_masks: k, masks behind every node; 0 is plain decoding.
        widths: candidates at each depth; only the best node of a depth has children. None chooses the widths anew at
            every pass, by the probabilities that the masks give (`dynamic_tree`).
        block_complexity: with `widths=None`: rows of a pass at most.
        mask_init: `"mean"` of the prompt's embeddings (the paper's), `"last_k"` of them, `"sample"` from a normal
            distribution with the vocabulary's mean and deviation, `"vocab_mean"`, `"zero"`, or `"mu_sigma"`, the
            vocabulary's mean and `sigmas` deviations. The default is what SmolLM2-135M accepts most of
            (`experiments/_esp_smollm2.py`).
        ema: how far each mask moves towards the embedding of every token that is written, from 0 to 1; None is 0.1
            for masks made of the prompt (the paper's) and 0 for those made of the vocabulary.
        sigmas: of `"mu_sigma"`.
        prune_repeats: whether a candidate that repeats its parent's token makes way for the next one.
        verify: `"exact"` writes the very tokens that plain decoding would; `"rejection"` draws candidates and accepts
            them by rejection sampling, whose tokens have the same distribution but are others.
        strict: whether a choice whose two best scores lie closer than `tie_tolerance` is made by a pass over one row
            (the first: over the prompt alone), as plain decoding makes it: in low precision the shape of a product
            decides such ties. What the cache holds still comes from passes over many rows, so a choice may differ
            whose gap is larger than the tolerance.
        tie_tolerance: in the scores that are compared (nats, divided by the temperature).
        num_tokens: ids from here on pad the vocabulary and are never drafted; None is the model's whole vocabulary.

    Raises:
        ValueError: for values out of range, or more widths than masks.
        TypeError: for a count that is no integer, a rate that is no number, a switch that is no boolean, or a
            `mask_init` that is no name (vectors of your own are the `given` of `generate`).

    Source: Goel et al. 2026, arXiv:2603.17942, sections 3 and 4.

    Example:
        >>> ESPConfig(num_masks=2, widths=(15, 4)).rows
        60
        >>> ESPConfig(num_masks=1, block_complexity=30).num_nodes
        14
    """

    num_masks: int = 1
    widths: tuple[int, ...] | None = (14,)
    block_complexity: int = 30
    mask_init: str = "vocab_mean"
    ema: float | int | None = None
    sigmas: float | int = 5.0
    prune_repeats: bool = True
    verify: str = "exact"
    strict: bool = False
    tie_tolerance: float | int = 1e-2
    num_tokens: int | None = None

    def __post_init__(self) -> None:
        _whole("num_masks", self.num_masks, 0)
        if not isinstance(self.mask_init, str):
            raise TypeError(
                f"mask_init={self.mask_init!r} must be a name; give masks of your own to `generate` as `given`"
            )
        one_of("mask_init", self.mask_init, MASK_INITS)
        one_of("verify", self.verify, VERIFICATIONS)
        for name in ("prune_repeats", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.ema is not None and not 0 <= real("ema", self.ema) <= 1:
            raise ValueError(f"ema={self.ema!r} must be between 0 and 1")
        if not math.isfinite(real("sigmas", self.sigmas)):
            raise ValueError(f"sigmas={self.sigmas!r} must be finite")
        if not (math.isfinite(real("tie_tolerance", self.tie_tolerance)) and self.tie_tolerance >= 0):
            raise ValueError(f"tie_tolerance={self.tie_tolerance!r} must be 0 or above, and finite")
        if self.num_tokens is not None:
            _whole("num_tokens", self.num_tokens, 1)
        if self.widths is not None:
            if not isinstance(self.widths, tuple):
                raise TypeError(f"widths={self.widths!r} must be a tuple, so that the options can be hashed")
            for width in self.widths:
                _whole("widths", width, 1)
            if self.num_masks and len(self.widths) > self.num_masks:
                raise ValueError(
                    f"widths={self.widths!r} are {len(self.widths)} depths, but num_masks={self.num_masks} masks "
                    "propose one depth each"
                )
        else:
            _whole("block_complexity", self.block_complexity, 1)
            if self.num_masks and self.num_nodes < 1:
                raise ValueError(
                    f"block_complexity={self.block_complexity} leaves no row for a candidate: with num_masks="
                    f"{self.num_masks} it must be at least {2 * (self.num_masks + 1)}"
                )
            if self.verify == "rejection":
                raise ValueError(
                    "verify='rejection' needs a tree that does not depend on what is drawn: give widths"
                )

    def for_vocabulary(self, vocab_size: int) -> ESPConfig:
        """The same options with no more candidates than a vocabulary has tokens to propose.

        Args:
            vocab_size: of the model.

        Raises:
            ValueError: if `num_tokens` is more than that.

        Example:
            >>> ESPConfig(num_masks=1, widths=(14,)).for_vocabulary(11).widths
            (10,)
        """
        if self.num_tokens is not None and self.num_tokens > vocab_size:
            raise ValueError(
                f"num_tokens={self.num_tokens} is more than the model's vocabulary of {vocab_size}"
            )
        most = min(vocab_size, self.num_tokens or vocab_size) - self.prune_repeats
        if most < 1:
            return dataclasses.replace(self, num_masks=0)
        if self.widths is None or max(self.widths, default=0) <= most:
            return self
        return dataclasses.replace(self, widths=tuple(min(width, most) for width in self.widths))

    @property
    def rate(self) -> float:
        """How far masks move, `ema` or its default.

        Example:
            >>> ESPConfig(mask_init="mean").rate, ESPConfig(mask_init="zero").rate
            (0.1, 0.0)
        """
        if self.ema is None:
            return 0.1 if self.mask_init in ("mean", "last_k") else 0.0
        return float(self.ema)

    @property
    def num_nodes(self) -> int:
        """Candidates of a pass, the root not counted.

        Example:
            >>> ESPConfig(num_masks=3, widths=(7, 5, 3)).num_nodes
            15
        """
        if not self.num_masks:
            return 0
        if self.widths is not None:
            return sum(self.widths)
        return self.block_complexity // (self.num_masks + 1) - 1

    @property
    def rows(self) -> int:
        """Rows that a pass of the model reads.

        Example:
            >>> ESPConfig(num_masks=0).rows
            1
        """
        return (self.num_masks + 1) * (self.num_nodes + 1)


def _whole(name: str, value: object, smallest: int) -> None:
    try:
        if isinstance(value, bool):
            raise TypeError
        whole = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}={value!r} must be an integer") from None
    if whole < smallest:
        raise ValueError(f"{name}={value!r} must be {smallest} or above")
