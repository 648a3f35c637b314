"""What SSA is set to: the attention alone, and a whole transformer with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from effml._validate import count, one_of, positive
from effml.nn.transformer import TransformerConfig

__all__ = ["ALIGNMENTS", "MODES", "SSAConfig", "SSATransformerConfig", "with_budget"]

MODES = ("full", "sparse")
ALIGNMENTS = ("two_sided", "full_only", "sparse_only", "joint")
SMALLEST_BLOCK = 8  # of pallas_kernels.block_sparse_attention


@dataclass(frozen=True)
class SSAConfig:
    """Blocks, budget and alignment; hashable.

    Attributes:
        block_size: keys of a block, from 8.
        num_blocks: blocks that each query token and key-value head reads, its own among them. Both may be changed
            without training again.
        align_weight: weight of the alignment in the loss; 0 trains on both streams without it.
        sparse_prob: probability that a step's loss is that of the sparse stream; 0 trains the full stream alone, 1 the
            sparse one.
        gated: whether every head's output is multiplied with the sigmoid of a product with the block's input.
        huber_delta: where the alignment turns from square to linear.
        alignment: whom it moves. "two_sided": each stream towards the other as it stands (the method). "full_only",
            "sparse_only": one of the two terms. "joint": both terms without their stop-gradients, which has exactly
            twice the gradient of "two_sided".
        normalize_align: whether the alignment is divided by the mean square of the full stream's output, so that its
            weight does not depend on how large activations are.

    Raises:
        ValueError: for a number out of range or an unknown name.
        TypeError: for a size that is no integer.

    Example:
        >>> SSAConfig(num_blocks=4).num_blocks * SSAConfig().block_size
        64
    """

    block_size: int = 16
    num_blocks: int = 16
    align_weight: float | int = 10.0
    sparse_prob: float | int = 0.5
    gated: bool = True
    huber_delta: float | int = 1.0
    alignment: str = "two_sided"
    normalize_align: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks"):
            count(name, getattr(self, name))
        if self.block_size < SMALLEST_BLOCK:
            raise ValueError(f"block_size={self.block_size!r} must be at least {SMALLEST_BLOCK}")
        if not 0 <= self.align_weight < math.inf:
            raise ValueError(f"align_weight={self.align_weight!r} must be finite and not negative")
        if not 0 <= self.sparse_prob <= 1:
            raise ValueError(f"sparse_prob={self.sparse_prob!r} must be between 0 and 1")
        positive("huber_delta", self.huber_delta)
        one_of("alignment", self.alignment, ALIGNMENTS)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types.

        Example:
            >>> SSAConfig().to_dict()["num_blocks"]
            16
        """
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SSAConfig:
        """What `to_dict` gave.

        Raises:
            ValueError: for a field that is unknown or out of range.
            TypeError: for a field of another type.

        Example:
            >>> SSAConfig.from_dict(SSAConfig(num_blocks=4).to_dict()).num_blocks
            4
        """
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        for name, value in fields.items():
            one_of("attention field", name, defaults)
            kind = type(defaults[name])
            fits = type(value) in (int, float) if kind is float else type(value) is kind
            if not fits:
                raise ValueError(f"attention field {name}={value!r} must be of type {kind.__name__}")
        return cls(**fields)


@dataclass(frozen=True)
class SSATransformerConfig:
    """A transformer whose attention is SSA; hashable, so a jitted function can take it as static.

    Attributes:
        model: sizes and variants of the transformer.
        attention: of every layer.

    Example:
        >>> config = SSATransformerConfig(TransformerConfig(256, 32, 2, 4, 64), SSAConfig(num_blocks=4))
        >>> SSATransformerConfig.from_dict(config.to_dict()) == config, config.max_length
        (True, 2048)
    """

    model: TransformerConfig
    attention: SSAConfig = SSAConfig()

    @property
    def max_length(self) -> int:
        """Tokens that the model is meant to read at once."""
        return self.model.max_length

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.model.vocab_size

    @property
    def width(self) -> int:
        """Size of the residual stream."""
        return self.model.width

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return self.model.num_layers

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types.

        Example:
            >>> sorted(SSATransformerConfig(TransformerConfig(256, 32, 2, 4, 64)).to_dict())
            ['attention', 'model']
        """
        return {"model": self.model.to_dict(), "attention": self.attention.to_dict()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> SSATransformerConfig:
        """What `to_dict` gave.

        Raises:
            ValueError: for fields that are missing, unknown or out of range.
            TypeError: for fields of another type.
        """
        for name in content:
            one_of("config field", name, ("model", "attention"))
        for name in ("model", "attention"):
            if not isinstance(content.get(name), Mapping):
                raise ValueError(f"config field {name} must be an object")
        return cls(TransformerConfig.from_dict(content["model"]), SSAConfig.from_dict(content["attention"]))


def with_budget(
    config: SSAConfig, *, block_size: int | None = None, num_blocks: int | None = None
) -> SSAConfig:
    """The same attention with another block size or budget; None keeps what there is.

    Example:
        >>> with_budget(SSAConfig(), num_blocks=4).num_blocks
        4
    """
    changes: dict[str, Any] = {"block_size": block_size, "num_blocks": num_blocks}
    return dataclasses.replace(
        config, **{name: value for name, value in changes.items() if value is not None}
    )
