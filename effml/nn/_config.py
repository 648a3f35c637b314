"""What a decoder-only transformer is made of, as one hashable value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from effml._validate import one_of, positive

__all__ = ["RopeScaling", "TransformerConfig"]

_CHOICES = {
    "norm": ("rms", "layer"),
    "positions": ("rope", "learned"),
    "rope_layout": ("split", "interleaved"),
    "mlp": ("swiglu", "gelu"),
    "compute_dtype": ("float32", "bfloat16"),
    "param_dtype": ("float32", "bfloat16"),
}
_SIZES = ("vocab_size", "width", "num_layers", "num_heads", "mlp_width", "kv_heads", "head_dim", "max_length")
_ABOVE_ZERO = (
    *("norm_epsilon", "rope_base", "initializer_std"),
    *("embedding_scale", "logit_scale", "attention_scale"),
)


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are slowed down, so that a model reads beyond its training length.

    `linear` divides every frequency by `factor`. `llama3` leaves the wavelengths shorter than
    `original_max_length / high_frequency_factor` alone, divides those longer than
    `original_max_length / low_frequency_factor` by `factor`, and interpolates in between.

    Args:
        kind: `"linear"` or `"llama3"`.
        factor: how many times longer the context becomes.
        low_frequency_factor: `llama3` only.
        high_frequency_factor: `llama3` only; above `low_frequency_factor`.
        original_max_length: `llama3` only, tokens: the length the model was trained with.

    Raises:
        ValueError: for an unknown kind, or a factor out of range.

    Example:
        >>> RopeScaling("linear", 2.0).factor
        2.0
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_length: int = 8192

    def __post_init__(self) -> None:
        one_of("rope_scaling.kind", self.kind, ("linear", "llama3"))
        for name in ("factor", "low_frequency_factor", "high_frequency_factor", "original_max_length"):
            positive(f"rope_scaling.{name}", getattr(self, name))
        if self.kind == "llama3" and not self.high_frequency_factor > self.low_frequency_factor:
            raise ValueError(
                f"rope_scaling.high_frequency_factor={self.high_frequency_factor} must be above "
                f"low_frequency_factor={self.low_frequency_factor}"
            )


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and variants of a decoder-only transformer; hashable, so a jitted function can take it as static.

    The defaults are Llama's. GPT-2 is `norm="layer", positions="learned", mlp="gelu"` with every bias on,
    Qwen2 is `qkv_bias=True`, Qwen3 is `qk_norm=True` with `head_size=128`.

    Args:
        vocab_size: number of token ids.
        width: size of the residual stream.
        num_layers: number of blocks.
        num_heads: query heads.
        mlp_width: hidden size of each block's multilayer perceptron.
        num_kv_heads: key and value heads, a divisor of `num_heads`; None means `num_heads`.
        head_size: size of one head; None means `width // num_heads`.
        max_length: tokens the model is meant to read at once (a hard limit only with learned positions).
        norm: `"rms"` (scale only) or `"layer"` (scale and bias).
        norm_epsilon: added to the mean square, or to the variance.
        positions: `"rope"` (rotary) or `"learned"` (a table added to the embeddings).
        rope_base: base of the rotary frequencies, `base ** (-2 i / head_dim)`.
        rope_layout: which features of a head form a rotated pair: `"split"` pairs i with i + head_dim/2
            (Hugging Face checkpoints), `"interleaved"` pairs 2i with 2i+1 (GGUF Llama files, RoFormer).
        rope_scaling: None, or how the frequencies are stretched.
        mlp: `"swiglu"`, or `"gelu"` with the tanh approximation that GPT-2 uses.
        tied_head: whether the head is the transposed embedding table.
        qkv_bias: whether query, key and value have biases.
        attention_output_bias: whether the projection after attention has one.
        mlp_bias: whether the perceptron's kernels have biases.
        head_bias: whether the logits have one.
        qk_norm: RMS normalisation of each query and key head, before the rotation.
        attention_scale: factor on the attention scores; None means `head_dim ** -0.5`.
        embedding_scale: factor on the token embeddings.
        logit_scale: factor on the logits.
        compute_dtype: dtype of activations and products; norms, softmax and logits are float32 always.
        param_dtype: dtype in which `init_params` makes the parameters.
        initializer_std: standard deviation of the initial kernels and tables.

    Raises:
        ValueError: naming the field that is out of range, unknown, or in conflict with another.

    Example:
        >>> config = TransformerConfig(vocab_size=256, width=64, num_layers=2, num_heads=4, mlp_width=128)
        >>> config.head_dim, config.kv_heads
        (16, 4)
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    mlp_width: int
    num_kv_heads: int | None = None
    head_size: int | None = None
    max_length: int = 2048
    norm: str = "rms"
    norm_epsilon: float = 1e-5
    positions: str = "rope"
    rope_base: float = 10000.0
    rope_layout: str = "split"
    rope_scaling: RopeScaling | None = None
    mlp: str = "swiglu"
    tied_head: bool = True
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    compute_dtype: str = "float32"
    param_dtype: str = "float32"
    initializer_std: float = 0.02

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            one_of(name, getattr(self, name), allowed)
        for name in ("width", "num_heads"):
            positive(name, getattr(self, name))
        for name in _SIZES:
            positive(_field(name), getattr(self, name))
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"{_field(name)}={getattr(self, name)!r} must be an integer")
        for name in _ABOVE_ZERO:
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads={self.kv_heads} must divide num_heads={self.num_heads}")
        if self.head_size is None and self.width % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must divide width={self.width}, or head_size must be given"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"head_size={self.head_dim} must be even for rotary positions")
        if self.positions != "rope" and self.rope_scaling is not None:
            raise ValueError(f"rope_scaling needs positions='rope', not positions={self.positions!r}")

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.width // self.num_heads if self.head_size is None else self.head_size

    @property
    def score_scale(self) -> float:
        """Factor on the attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON types.

        Example:
            >>> config = TransformerConfig(256, 64, 2, 4, 128)
            >>> TransformerConfig.from_dict(config.to_dict()) == config
            True
        """
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TransformerConfig:
        """The config that `to_dict` wrote.

        Args:
            fields: names and plain values.

        Raises:
            ValueError: naming a field that is unknown or missing.
        """
        values = _checked(cls, "config", fields)
        if isinstance(scaling := values.get("rope_scaling"), Mapping):
            values["rope_scaling"] = RopeScaling(**_checked(RopeScaling, "rope_scaling", scaling))
        elif scaling is not None:
            raise ValueError(f"config field rope_scaling={scaling!r} must be an object or null")
        return cls(**values)


def _checked(cls: Any, what: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, all known and none missing; whole numbers become floats where the class wants floats."""
    known = {field.name: field for field in dataclasses.fields(cls)}
    for name in fields:
        one_of(f"{what} field", name, known)
        wanted = str(known[name].type)
        number = type(fields[name]) in (int, float)
        if wanted in ("int", "float", "int | None", "float | None") and not (
            number or (fields[name] is None and "None" in wanted)
        ):
            raise ValueError(f"{what} field {name}={fields[name]!r} must be a number")
    required = [name for name, field in known.items() if field.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in fields]:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    return {
        name: float(value) if type(value) is int and "float" in str(known[name].type) else value
        for name, value in fields.items()
    }


def _field(name: str) -> str:
    return {"kv_heads": "num_kv_heads", "head_dim": "head_size"}.get(name, name)
