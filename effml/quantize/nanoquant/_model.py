"""The forward pass of a model whose first blocks are binary factors, its configuration, and its tensors in a file."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from effml._validate import count, one_of, real
from effml.nn import transformer
from effml.nn.hub import _names
from effml.nn.transformer import TransformerConfig, decoding_linear
from effml.quantize._model import KEEP_DTYPES
from effml.quantize.nanoquant._linear import BinaryTensor, open_linear, open_signs
from effml.quantize.nanoquant._rank import bits_per_weight
from effml.trees import path_name
from pallas_kernels.matvec import FEW_ROWS, matvec

__all__ = [
    "ORDER",
    "BinaryConfig",
    "binary_linear",
    "binary_params",
    "check_binary_params",
    "forward",
    "stored_tensors",
]

ORDER = (
    "attention.query",
    "attention.value",
    "attention.output",
    "attention.key",
    "mlp.gate",
    "mlp.up",
    "mlp.down",
)
"""Linears of a block, in the order in which they are factorised."""


@dataclass(frozen=True)
class BinaryConfig:
    """A transformer whose first blocks have binary factors instead of kernels; hashable.

    Attributes:
        model: sizes and variants of the transformer.
        ranks: (name, rank) of every linear of a block.
        blocks_done: blocks that are factorised, the first ones; the others have their own kernels.
        bits: per weight, asked for; `bits_per_weight` is what it came to.
        method: that chose the factors.
        keep_dtype: of embedding, positions, head and the kernels of blocks to come: "float32" or "bfloat16".

    Raises:
        ValueError: for values out of range.
        TypeError: for values of another type.

    Example:
        >>> config = BinaryConfig(TransformerConfig(256, 32, 2, 4, 64), (("mlp.up", 8), ("mlp.down", 8)), 1)
        >>> BinaryConfig.from_dict(config.to_dict()) == config, config.partial, config.max_length
        (True, True, 2048)
    """

    model: TransformerConfig
    ranks: tuple[tuple[str, int], ...]
    blocks_done: int
    bits: float | int = 1.0
    method: str = "nanoquant"
    keep_dtype: str = "float32"

    def __post_init__(self) -> None:
        shapes = kernel_shapes(self.model)
        if not self.ranks or len(dict(self.ranks)) < len(self.ranks):
            raise ValueError(f"ranks={self.ranks!r} must name linears, each of them once")
        if not 0 < real("bits", self.bits) < math.inf:
            raise ValueError(f"bits={self.bits!r} must be finite and above 0")
        for name, rank in self.ranks:
            one_of("ranks", name, shapes)
            if count(f"rank of {name}", rank) > min(shapes[name]):
                raise ValueError(f"rank of {name}={rank} must be at most {min(shapes[name])}")
        if self.blocks_done != 0:
            count("blocks_done", self.blocks_done)
        if self.blocks_done > self.model.num_layers:
            raise ValueError(f"blocks_done={self.blocks_done} must be 0 to {self.model.num_layers}")
        one_of("keep_dtype", self.keep_dtype, KEEP_DTYPES)

    @property
    def partial(self) -> bool:
        """Whether blocks are left in full precision.

        Example:
            >>> BinaryConfig(TransformerConfig(256, 32, 2, 4, 64), (("mlp.up", 8),), 2).partial
            False
        """
        return self.blocks_done < self.model.num_layers

    @property
    def label(self) -> str:
        """In words: realised bits, and how many blocks have them.

        Example:
            >>> BinaryConfig(TransformerConfig(256, 32, 2, 4, 64), (("mlp.up", 8),), 1).label
            'nanoquant, 1.125 bits per weight (1.0 asked for), 1 of 2 blocks: the others are in full precision'
        """
        whole = f"{self.method}, {self.bits_per_weight:.4g} bits per weight ({self.bits} asked for)"
        if not self.partial:
            return whole
        total = self.model.num_layers
        return f"{whole}, {self.blocks_done} of {total} blocks: the others are in full precision"

    @property
    def bits_per_weight(self) -> float:
        """Of the factorised kernels of a block together, scales among them.

        Example:
            >>> BinaryConfig(TransformerConfig(256, 32, 2, 4, 64), (("mlp.up", 8),), 2).bits_per_weight
            1.125
        """
        shapes = kernel_shapes(self.model)
        weights = {name: math.prod(shapes[name]) for name, _ in self.ranks}
        rates = {name: bits_per_weight(shapes[name][0], shapes[name][1], rank) for name, rank in self.ranks}
        total = sum(rates[name] * weights[name] for name in rates)
        return total / sum(weights.values())

    @property
    def max_length(self) -> int:
        """Tokens that the model is meant to read at once.

        Example:
            >>> BinaryConfig(TransformerConfig(256, 32, 2, 4, 64, max_length=99), (("mlp.up", 8),), 2).max_length
            99
        """
        return self.model.max_length

    @property
    def vocab_size(self) -> int:
        """Number of token ids.

        Example:
            >>> BinaryConfig(TransformerConfig(256, 32, 2, 4, 64), (("mlp.up", 8),), 2).vocab_size
            256
        """
        return self.model.vocab_size

    def to_dict(self) -> dict[str, Any]:
        """JSON types only.

        Example:
            >>> BinaryConfig(TransformerConfig(256, 32, 2, 4, 64), (("mlp.up", 8),), 2).to_dict()["ranks"]
            {'mlp.up': 8}
        """
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**own, "model": self.model.to_dict(), "ranks": dict(self.ranks)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> BinaryConfig:
        """What `to_dict` gave.

        Raises:
            ValueError: for fields that are missing, unknown or out of range.
            TypeError: for fields of another type.

        Example:
            >>> BinaryConfig.from_dict({"ranks": {}})
            Traceback (most recent call last):
            ...
            ValueError: config lacks model, blocks_done, bits, method, keep_dtype
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name in content:
            one_of("config field", name, names)
        if missing := [name for name in names if name not in content]:
            raise ValueError(f"config lacks {', '.join(missing)}")
        for name, kinds in (
            ("model", Mapping),
            ("ranks", Mapping),
            ("blocks_done", int),
            ("bits", (int, float)),
            ("method", str),
            ("keep_dtype", str),
        ):
            if not isinstance(content[name], kinds) or isinstance(content[name], bool):
                raise ValueError(
                    f"config field {name}={content[name]!r} is of another type than it should be"
                )
        model = TransformerConfig.from_dict(content["model"])
        return cls(**{**content, "model": model, "ranks": tuple(content["ranks"].items())})


@functools.lru_cache(maxsize=8)
def kernel_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """[in, out] of every linear of a block, in the order of `ORDER`."""
    shapes = {
        name.removeprefix("layers.0.").removesuffix(".kernel"): shape
        for name, shape in _dense_shapes(config).items()
        if name.startswith("layers.0.") and name.endswith(".kernel")
    }
    return {name: shapes[name] for name in ORDER if name in shapes}


@functools.lru_cache(maxsize=8)
def _dense_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    made = jax.eval_shape(functools.partial(transformer.init_params, config=config), jax.random.key(0))
    return {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_flatten_with_path(made)[0]}


def binary_linear(x: Array, params: Mapping[str, Any], name: str) -> Array:
    """The product with packed signs, or with a kernel where there is one: the `linear` seam.

    Few rows, as in writing tokens, read the packed words. On a CPU many rows unpack them first: that is faster there.

    Args:
        x: [..., in].
        params: `{"binary": BinaryTensor}` or `{"kernel": [in, out]}`, and perhaps `"bias": [out]`.
        name: of the product.

    Returns:
        [..., out] in the dtype of `x`; float32 for the head.

    Example:
        >>> tensor = BinaryTensor.pack(np.ones((2, 2)), np.ones((2, 3)), np.ones(2), np.ones(3))
        >>> binary_linear(jnp.ones((1, 2)), {"binary": tensor}, "mlp.up").tolist()
        [[4.0, 4.0, 4.0]]
    """
    tensor, bias = params.get("binary"), params.get("bias")
    few = math.prod(x.shape[:-1]) <= FEW_ROWS
    if tensor is None:
        if name != "head" or not few:
            return decoding_linear(x, params, name)
        transposed = "table" in params  # in whatever type it is kept
        y = matvec(x, params["table" if transposed else "kernel"], transposed=transposed)
        return y if bias is None else y + bias.astype(jnp.float32)
    if few:
        return tensor(x, bias)

    def opened(x: Array) -> Array:
        return open_linear(x, open_signs(params, x.dtype), name)

    return lax.platform_dependent(x, cpu=opened, default=lambda x: tensor(x, bias))


def forward(
    params: Mapping[str, Any], tokens: Any, config: BinaryConfig, **kwargs: Any
) -> transformer.ForwardOutput:
    """Runs a model of binary factors: `effml.nn.transformer.forward` with `binary_linear`.

    Args:
        params: from `quantize_lm` or `effml.models.load`, a list of layers.
        tokens: int[batch, length], or None with `embeddings`.
        config: static under `jax.jit`.
        **kwargs: as for `effml.nn.transformer.forward`.

    Returns:
        A `ForwardOutput`.

    Example:
        >>> config = BinaryConfig(TransformerConfig(256, 32, 2, 4, 64), (("mlp.up", 8),), 0)
        >>> params = transformer.init_params(jax.random.key(0), config.model)
        >>> forward(params, jnp.array([[1, 2, 3]]), config).logits.shape
        (1, 3, 256)
    """
    return transformer.forward(params, tokens, config.model, **{"linear": binary_linear, **kwargs})


def check_binary_params(source: str, params: Any, config: Any) -> None:
    """Raises where parameters are not those of a model of this configuration.

    Args:
        source: of the parameters, for error messages.
        params: of the model.
        config: of the model.

    Raises:
        ValueError: naming the tensor that is missing, too many, or of another shape or type.
        TypeError: for another configuration.

    Example:
        >>> config = BinaryConfig(TransformerConfig(256, 32, 2, 4, 64), (("mlp.up", 8),), 1)
        >>> check_binary_params("params", {"layers": []}, config)
        Traceback (most recent call last):
        ...
        ValueError: params: the configuration says 2 layers, the weights hold 0
    """
    stored_tensors(params, config, source)


def check_dense_params(source: str, params: Any, config: TransformerConfig) -> None:
    """Raises where parameters, a list of layers, are not those of a model in full precision of this configuration.

    Args:
        source: of the parameters, for error messages.
        params: of the model, projections apart.
        config: of the model.

    Raises:
        ValueError: naming the tensor that is missing, too many or of another shape.
        TypeError: for what holds no layers, or another configuration.

    Example:
        >>> check_dense_params("params", {"layers": []}, TransformerConfig(256, 32, 2, 4, 64))
        Traceback (most recent call last):
        ...
        ValueError: params: the configuration says 2 layers, the weights hold 0
    """
    if not isinstance(config, TransformerConfig):
        raise TypeError(f"config must be a TransformerConfig, this is a {type(config).__name__}")
    if not isinstance(params, Mapping) or "layers" not in params:
        raise TypeError(f"{source} must be the parameters of a transformer, a dict with its layers")
    if len(params["layers"]) != config.num_layers:
        raise ValueError(
            f"{source}: the configuration says {config.num_layers} layers, the weights hold {len(params['layers'])}"
        )
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    found = {path_name(path): np.shape(leaf) for path, leaf in leaves}
    if joined := [name for name in found if name.split(".")[-2:-1] in (["qkv"], ["gate_up"])]:
        raise ValueError(f"{source}: {joined[0]} is several projections joined; keep projections apart")
    _names.check_tensors(source, _dense_shapes(config), found)


def stored_tensors(params: Any, config: Any, source: str = "params") -> dict[str, np.ndarray]:
    """What a file holds, by path: whole bytes of signs, eight along the axis that is summed, and no padding beyond.

    Args:
        params: of the model.
        config: of the model.
        source: of the parameters, for error messages.

    Returns:
        For a linear such as `layers.0.mlp.up`: `.binary.v_signs` uint8[ceil(in / 8), rank], `.binary.u_signs`
        uint8[ceil(rank / 8), out], `.binary.scale_in`, `.binary.scale_out`; all else as it is.

    Raises:
        ValueError: as `check_binary_params`.
        TypeError: likewise.

    Example:
        >>> config = BinaryConfig(TransformerConfig(256, 32, 1, 4, 64), (("mlp.up", 8),), 0)
        >>> "layers.0.mlp.up.kernel" in stored_tensors(transformer.init_params(jax.random.key(0), config.model), config)
        True
    """
    if not isinstance(config, BinaryConfig):
        raise TypeError(f"a model of binary factors needs a BinaryConfig, this is a {type(config).__name__}")
    _check_layers(source, params, config)
    leaves: dict[str, np.ndarray] = {}
    is_binary = lambda leaf: isinstance(leaf, BinaryTensor)
    for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_binary)[0]:
        name = path_name(path)
        if not is_binary(leaf):
            leaves[name] = np.asarray(leaf)
            continue
        leaves[f"{name}.v_signs"] = _bytes_of(leaf.v_words, leaf.inputs)
        leaves[f"{name}.u_signs"] = _bytes_of(leaf.u_words, leaf.rank)
        leaves[f"{name}.scale_in"] = np.asarray(leaf.scale_in)
        leaves[f"{name}.scale_out"] = np.asarray(leaf.scale_out)
    _check_tensors(source, leaves, config)
    return leaves


def binary_params(stored: Mapping[str, Any], config: BinaryConfig, source: str) -> dict[str, Any]:
    """The parameters of a model, from the nested dict of arrays that its file holds.

    Args:
        stored: as `effml.models.read_tensors` gives it.
        config: of the model.
        source: the file, for error messages.

    Returns:
        What `forward` takes.

    Raises:
        ValueError: naming the file and the tensor that is missing, too many, or of another shape or type, or the
            scale that is not finite.

    Example:
        >>> config = BinaryConfig(TransformerConfig(256, 32, 2, 4, 64), (("mlp.up", 8),), 1)
        >>> binary_params({"layers": []}, config, "model.safetensors")
        Traceback (most recent call last):
        ...
        ValueError: model.safetensors: the configuration says 2 layers, the weights hold 0
    """
    _check_layers(source, stored, config)
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(dict(stored))[0]}
    _check_tensors(source, leaves, config)
    shapes, layers = kernel_shapes(config.model), []
    for index, layer in enumerate(stored["layers"]):
        layer = {**layer, "attention": dict(layer["attention"]), "mlp": dict(layer["mlp"])}
        for name, rank in config.ranks if index < config.blocks_done else ():
            block, part = name.split(".")
            found = layer[block][part]["binary"]
            scales = [jnp.asarray(found[scale]) for scale in ("scale_in", "scale_out")]
            if not all(bool(jnp.isfinite(one).all()) for one in scales):
                raise ValueError(f"{source}: layers.{index}.{name}.binary has scales that are not finite")
            words = (_words_of(found[signs]) for signs in ("v_signs", "u_signs"))
            tensor = BinaryTensor(*words, *scales, inputs=shapes[name][0], rank=rank)
            layer[block][part] = {**layer[block][part], "binary": tensor}
        layers.append(layer)
    return {**stored, "layers": layers}


def _bytes_of(words: Any, size: int) -> np.ndarray:
    """uint32[words, n] as uint8[ceil(size / 8), n]: sign i lies in bit i % 8 of byte i // 8, whatever the machine."""
    words = np.asarray(words)
    parts = np.stack([(words >> shift).astype(np.uint8) for shift in (0, 8, 16, 24)], axis=1)
    return parts.reshape(-1, words.shape[1])[: -(-size // 8)]


def _words_of(rows: Any) -> Array:
    rows = np.asarray(rows)
    whole = np.zeros((-(-len(rows) // 4) * 4, rows.shape[1]), np.uint32)
    whole[: len(rows)] = rows
    parts = whole.reshape(-1, 4, rows.shape[1])
    return jnp.asarray(sum(parts[:, place] << np.uint32(8 * place) for place in range(4)))


def _check_layers(source: str, params: Any, config: BinaryConfig) -> None:
    layers = params.get("layers") if isinstance(params, Mapping) else None
    if not isinstance(layers, list | tuple):
        raise ValueError(f"{source}: the parameters of a model of binary factors need a list of layers")
    if len(layers) != config.model.num_layers:
        raise ValueError(
            f"{source}: the configuration says {config.model.num_layers} layers, the weights hold {len(layers)}"
        )


def _check_tensors(source: str, leaves: Mapping[str, Any], config: BinaryConfig) -> None:
    ranks, wanted = dict(config.ranks), {}
    for name, shape in _dense_shapes(config.model).items():
        parts = name.split(".")
        linear = ".".join(parts[2:-1])
        binary = parts[0] == "layers" and int(parts[1]) < config.blocks_done and parts[-1] == "kernel"
        if not binary or linear not in ranks:
            wanted[name] = shape
            continue
        (inputs, outputs), rank = shape, ranks[linear]
        prefix = name.removesuffix("kernel") + "binary"
        wanted |= {
            f"{prefix}.v_signs": (-(-inputs // 8), rank),
            f"{prefix}.u_signs": (-(-rank // 8), outputs),
            f"{prefix}.scale_in": (inputs,),
            f"{prefix}.scale_out": (outputs,),
        }
    _names.check_tensors(source, wanted, {name: np.shape(leaf) for name, leaf in leaves.items()})
    for name, leaf in leaves.items():
        dtype, signs = jnp.result_type(leaf), name.endswith("_signs")
        if signs != (dtype == jnp.uint8) or not (signs or jnp.issubdtype(dtype, jnp.floating)):
            needed = "uint8" if signs else "floating point numbers"
            raise ValueError(f"{source}: {name} holds {dtype}, should hold {needed}")
