"""The forward pass of a packed model: the transformer's own, with three of its seams exchanged."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from effml import linalg
from effml._validate import count, one_of
from effml.nn import transformer
from effml.nn.transformer import AttentionInputs, TransformerConfig, dense_attention, dense_linear
from effml.quantize._fake import FULL, check_bits, fake_quant_act
from effml.quantize._packed import PackedTensor
from effml.quantize.respinquant._residual import check_rank, residual_rotate
from pallas_kernels.matvec import FEW_ROWS, matvec, packed_matvec

__all__ = [
    "KEEP_DTYPES",
    "METHODS",
    "PackedConfig",
    "forward",
    "quantized_attention",
    "quantized_input",
    "quantized_linear",
    "quantized_residual",
    "seams",
]

KEEP_DTYPES = ("float32", "bfloat16")

METHODS = ("rtn", "gptq", "respinquant")
"""rtn rounds to nearest; gptq makes up for each error with the weights still to come; respinquant rotates first."""


@dataclass(frozen=True)
class PackedConfig:
    """What a packed model is: a transformer, and what is rounded where; hashable.

    Attributes:
        model: sizes and variants of the transformer.
        weight_bits: of the kernels of all layers, 2 to 8; 16 leaves them in floating point.
        group_size: inputs that share a scale; None is one scale for each output.
        activation_bits: of what those kernels read, rounded per token, asymmetrically; 16 is none.
        key_value_bits: of keys and values, rounded per token and head, asymmetrically; 16 is none.
        hadamard: whether the down projections read `effml.linalg.fht` of their input, and, with rounded keys, queries
            and keys go through one as well.
        residual_rank: of the basis changes of the residual stream, even, at most the width; None is exact, 0 none.
        method: that chose the weights, one of `METHODS`.
        keep_dtype: of embedding, positions and head, which are not rounded; "float32" or "bfloat16".

    Raises:
        ValueError: for values out of range.

    Example:
        >>> config = PackedConfig(TransformerConfig(256, 32, 2, 4, 64), activation_bits=4)
        >>> PackedConfig.from_dict(config.to_dict()) == config, config.max_length
        (True, 2048)
    """

    model: TransformerConfig
    weight_bits: int = 4
    group_size: int | None = None
    activation_bits: int = FULL
    key_value_bits: int = FULL
    hadamard: bool = False
    residual_rank: int | None = 0
    method: str = "rtn"
    keep_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("weight_bits", "activation_bits", "key_value_bits"):
            check_bits(name, getattr(self, name))
        if self.group_size is not None:
            count("group_size", self.group_size)
        if self.residual_rank is not None:
            try:
                check_rank(self.residual_rank, self.model.width)
            except (TypeError, ValueError) as error:
                raise type(error)(f"residual_{error}") from None
        one_of("method", self.method, METHODS)
        one_of("keep_dtype", self.keep_dtype, KEEP_DTYPES)

    @property
    def max_length(self) -> int:
        """Tokens that the model is meant to read at once.

        Example:
            >>> PackedConfig(TransformerConfig(256, 32, 2, 4, 64, max_length=99)).max_length
            99
        """
        return self.model.max_length

    @property
    def vocab_size(self) -> int:
        """Number of token ids.

        Example:
            >>> PackedConfig(TransformerConfig(256, 32, 2, 4, 64)).vocab_size
            256
        """
        return self.model.vocab_size

    def to_dict(self) -> dict[str, Any]:
        """JSON types only, and their digest: most fields leave no trace in the tensors that could be checked.

        Example:
            >>> PackedConfig(TransformerConfig(256, 32, 2, 4, 64)).to_dict()["weight_bits"]
            4
        """
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        content = {**own, "model": self.model.to_dict()}
        return {**content, "digest": _digest(content)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PackedConfig:
        """What `to_dict` gave.

        Raises:
            ValueError: for fields that are missing, unknown, out of range, or not those of the digest.
            TypeError: for fields of another type.

        Example:
            >>> PackedConfig.from_dict({"bits": 4})
            Traceback (most recent call last):
            ...
            ValueError: config field='bits' is not known; ...
        """
        names = [*(field.name for field in dataclasses.fields(cls)), "digest"]
        for name in content:
            one_of("config field", name, names)
        if missing := [name for name in names if name not in content]:
            raise ValueError(f"config lacks {', '.join(missing)}")
        if not isinstance(content["model"], Mapping):
            raise ValueError("config field model must be an object")
        for name in ("weight_bits", "group_size", "activation_bits", "key_value_bits", "residual_rank"):
            optional = name in ("group_size", "residual_rank")
            if not (type(content[name]) is int or (optional and content[name] is None)):
                raise ValueError(f"config field {name}={content[name]!r} must be an integer")
        for name, kinds in (("hadamard", bool), ("method", str), ("keep_dtype", str)):
            if not isinstance(content[name], kinds):
                raise ValueError(f"config field {name}={content[name]!r} must be a {kinds.__name__}")
        fields = {name: value for name, value in content.items() if name != "digest"}
        made = cls(**{**fields, "model": TransformerConfig.from_dict(content["model"])})
        if content["digest"] != _digest(fields):
            raise ValueError(
                "config was changed after it was written (its digest is another): the weights would run as another "
                "model; write it with effml.models.save"
            )
        return made


def _digest(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def quantized_input(x: Array, name: str, config: PackedConfig) -> Array:
    """What a kernel of this name reads of `x`: transformed, where the model says so, and rounded.

    Args:
        x: [..., in].
        name: of the product, such as "mlp.down".
        config: of the model.

    Example:
        >>> config = PackedConfig(TransformerConfig(256, 32, 2, 4, 64), activation_bits=2)
        >>> quantized_input(jnp.array([0.0, 0.4, 1.0, 3.0]), "mlp.up", config).tolist()
        [0.0, 0.0, 1.0, 3.0]
    """
    if config.hadamard and name == "mlp.down":
        x = linalg.fht(x, order=linalg.hadamard_order(x.shape[-1]))
    return fake_quant_act(x, config.activation_bits)


def quantized_linear(x: Array, params: Mapping[str, Any], name: str, *, config: PackedConfig) -> Array:
    """The product of rounded activations with packed weights: the `linear` seam. The head is not rounded.

    Args:
        x: [..., in].
        params: `{"packed": PackedTensor}` or `{"kernel": [in, out]}`, and perhaps `"bias": [out]`.
        name: of the product.
        config: of the model.

    Returns:
        [..., out] in the dtype of `x`; float32 for the head.

    Example:
        >>> from effml.quantize import PackedTensor
        >>> packed = PackedTensor.pack(jnp.ones((2, 3), int), jnp.ones((3, 1)), bits=4)
        >>> config = PackedConfig(TransformerConfig(256, 32, 2, 4, 64))
        >>> quantized_linear(jnp.ones((1, 2)), {"packed": packed}, "mlp.up", config=config).tolist()
        [[2.0, 2.0, 2.0]]
    """
    few = math.prod(x.shape[:-1]) <= FEW_ROWS
    if name == "head":
        if not few:
            return dense_linear(x, params, name)
        transposed = "table" in params
        y = matvec(x, params["table" if transposed else "kernel"], transposed=transposed)
        return y + params["bias"].astype(jnp.float32) if "bias" in params else y
    x = quantized_input(x, name, config)
    packed = params.get("packed")
    if packed is None:
        return dense_linear(x, params, name)
    if few:
        y = packed_matvec(x, packed.codes, packed.scale, bits=packed.bits)
        y = y + params["bias"].astype(jnp.float32) if "bias" in params else y
        return y.astype(x.dtype)
    return dense_linear(x, {**params, "kernel": packed.dense(x.dtype)}, name)


def quantized_residual(x: Array, update: Array, name: str, layer_params: Any) -> Array:
    """`x @ T + update` with the low-rank T of this half layer, where it has one: the `residual` seam.

    Args:
        x: the stream, in the basis of the half layer's input.
        update: in the basis of its output.
        name: "attention" or "mlp".
        layer_params: may hold `"residual"`: `{name: {"q": [D, r], "m": [r, r]}}` or `{name: {"t": [D, D]}}`.

    Example:
        >>> change = {"attention": {"t": jnp.array([[0.0, 1.0], [-1.0, 0.0]])}}
        >>> quantized_residual(jnp.array([1.0, 2.0]), jnp.zeros(2), "attention", {"residual": change}).tolist()
        [-2.0, 1.0]
    """
    change = layer_params.get("residual", {}).get(name)
    if change is None:
        return x + update
    if "t" in change:
        turned = jnp.matmul(
            x,
            change["t"].astype(x.dtype),
            preferred_element_type=jnp.float32,
            precision=jax.lax.Precision.HIGHEST,
        )
        return turned.astype(x.dtype) + update
    return residual_rotate(x, change["q"].astype(x.dtype), change["m"].astype(x.dtype)) + update


def quantized_attention(
    inputs: AttentionInputs, *, config: PackedConfig, attention: Callable[..., Any] = dense_attention
) -> tuple[Array, Any]:
    """Attention over rounded keys and values, new and cached: the `attention` seam.

    A cache keeps the rows as they came; they are rounded when they are read, so that decoding sees the same numbers as
    reading at once. This measures what rounding costs, it does not make the cache smaller.

    Args:
        inputs: of the attention.
        config: of the model.
        attention: what attends.

    Returns:
        What `attention` returns.

    Example:
        >>> rows = jnp.ones((1, 3, 2, 4))
        >>> positions = jnp.arange(3)[None]
        >>> inputs = AttentionInputs(rows, rows, rows, rows, {}, positions, None, None, 0.5, 0)
        >>> config = PackedConfig(TransformerConfig(256, 8, 1, 2, 16), key_value_bits=4)
        >>> quantized_attention(inputs, config=config)[0].shape
        (1, 3, 2, 4)
    """
    bits = config.key_value_bits
    if bits == FULL:
        return attention(inputs)
    order = linalg.hadamard_order(inputs.key.shape[-1])

    def turn(x: Array, axis: int = -1) -> Array:
        return linalg.fht(x, axis, order=order) if config.hadamard else x

    cache = inputs.cache
    if cache is not None:
        cache = cache._replace(
            keys=fake_quant_act(turn(cache.keys, -2), bits, axis=-2),
            values=fake_quant_act(cache.values, bits),
        )
    return attention(
        inputs._replace(
            query=turn(inputs.query),
            key=fake_quant_act(turn(inputs.key), bits),
            value=fake_quant_act(inputs.value, bits),
            cache=cache,
        )
    )


def seams(config: PackedConfig) -> dict[str, Any]:
    """The keyword arguments that make `effml.nn.transformer.forward` and `block` run a packed model.

    Example:
        >>> sorted(seams(PackedConfig(TransformerConfig(256, 32, 2, 4, 64))))
        ['attention', 'linear', 'residual']
    """
    return {
        "linear": functools.partial(quantized_linear, config=config),
        "attention": functools.partial(quantized_attention, config=config),
        "residual": quantized_residual,
    }


def forward(
    params: Mapping[str, Any], tokens: Any, config: PackedConfig, **kwargs: Any
) -> transformer.ForwardOutput:
    """Runs a packed model: `effml.nn.transformer.forward` with the seams of `config`.

    Args:
        params: from `apply` or `effml.models.load`, a list of layers.
        tokens: int[batch, length], or None with `embeddings`.
        config: static under `jax.jit`.
        **kwargs: as for `effml.nn.transformer.forward`. `attention` attends to the rounded keys and values.

    Returns:
        A `ForwardOutput`.

    Raises:
        ValueError: for layers whose kernels are not packed as `config` says.

    Example:
        >>> import jax
        >>> config = PackedConfig(TransformerConfig(256, 32, 2, 4, 64), weight_bits=16, activation_bits=8)
        >>> params = transformer.init_params(jax.random.key(0), config.model)
        >>> forward(params, jnp.array([[1, 2, 3]]), config).logits.shape
        (1, 3, 256)
    """
    _check_packed(params, config)
    parts = seams(config)
    if "attention" in kwargs:
        kwargs["attention"] = functools.partial(parts["attention"], attention=kwargs["attention"])
    return transformer.forward(params, tokens, config.model, **{**parts, **kwargs})


def _check_packed(params: Mapping[str, Any], config: PackedConfig) -> None:
    layers = params["layers"]
    for index, layer in enumerate([layers] if isinstance(layers, Mapping) else layers):
        for block in ("attention", "mlp"):
            for name, part in layer[block].items():
                packed = part.get("packed")
                if config.weight_bits == FULL and packed is None:
                    continue
                if not isinstance(packed, PackedTensor):
                    raise ValueError(
                        f"layers.{index}.{block}.{name} is not packed, and the config says weight_bits="
                        f"{config.weight_bits}: give what effml.quantize.apply returned (or weight_bits=16)"
                    )
                if packed.bits != config.weight_bits:
                    raise ValueError(
                        f"layers.{index}.{block}.{name} is packed in {packed.bits} bits, the config says "
                        f"weight_bits={config.weight_bits}"
                    )
