"""Parameters of a packed model in a file: what has to be there, and what is read back."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effml.nn.hub import _names
from effml.nn.transformer import init_params
from effml.quantize._calibrate import INPUT_OF
from effml.quantize._fake import FULL, group_count
from effml.quantize._model import PackedConfig
from effml.quantize._packed import PackedTensor
from effml.trees import path_name

__all__ = ["check_packed_params", "packed_params"]


def packed_params(stored: Mapping[str, Any], config: PackedConfig, source: str) -> dict[str, Any]:
    """The parameters of a packed model, from the nested dict of arrays that its file holds.

    Args:
        stored: as `effml.models.read_tensors` gives it.
        config: of the model.
        source: the file, for error messages.

    Returns:
        What `forward` takes.

    Raises:
        ValueError: naming the file and the tensor that is missing, too many, or of another shape or type,
            or the scale that is no size.

    Example:
        >>> from effml.nn import TransformerConfig
        >>> packed_params({"layers": []}, PackedConfig(TransformerConfig(256, 32, 2, 4, 64)), "model.safetensors")
        Traceback (most recent call last):
        ...
        ValueError: model.safetensors: the configuration says 2 layers, the weights hold 0
    """
    layers = stored.get("layers", [])
    if isinstance(layers, Mapping) or len(layers) != config.model.num_layers:
        raise ValueError(
            f"{source}: the configuration says {config.model.num_layers} layers, the weights hold {len(layers)}"
        )
    shapes = _kernel_shapes(config)
    made = []
    for index, layer in enumerate(layers):
        layer = {**layer, "attention": dict(layer.get("attention", {})), "mlp": dict(layer.get("mlp", {}))}
        for name in shapes:
            block, part = name.split(".")
            params = layer[block].get(part)
            found = params.get("packed") if isinstance(params, Mapping) else None
            if found is not None:
                where = f"{source}: layers.{index}.{name}.packed"
                if not isinstance(found, Mapping) or set(found) != {"codes", "scale"}:
                    raise ValueError(f"{where} must hold codes and scale")
                scale = np.asarray(found["scale"])
                if not (np.isfinite(scale) & (scale >= 0)).all():
                    raise ValueError(f"{where}.scale holds values that are negative or not finite")
                packed = PackedTensor(found["codes"], found["scale"], config.weight_bits, shapes[name][0])
                layer[block][part] = {**params, "packed": packed}
        made.append(layer)
    params = {**stored, "layers": made}
    check_packed_params(source, params, config)
    return params


def check_packed_params(source: str, params: Any, config: PackedConfig | Any) -> None:
    """Raises where parameters are not those of a packed model of this configuration.

    Args:
        source: of the parameters, for error messages.
        params: of the model.
        config: of the model.

    Raises:
        ValueError: naming the tensor that is missing, too many, or of another shape or type.
        TypeError: for another configuration.

    Example:
        >>> from effml.nn import TransformerConfig
        >>> config = PackedConfig(TransformerConfig(256, 32, 2, 4, 64))
        >>> check_packed_params("params", {"layers": []}, config)
        Traceback (most recent call last):
        ...
        ValueError: params: the configuration says 2 layers, the weights hold 0
    """
    if not isinstance(config, PackedConfig):
        raise TypeError(f"a packed model needs a PackedConfig, this is a {type(config).__name__}")
    layers = params.get("layers") if isinstance(params, Mapping) else None
    if not isinstance(layers, list | tuple):
        raise ValueError(f"{source}: the parameters of a packed model need a list of layers")
    if len(layers) != config.model.num_layers:
        raise ValueError(
            f"{source}: the configuration says {config.model.num_layers} layers, the weights hold {len(layers)}"
        )
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    wanted = _shapes(config)
    _names.check_tensors(source, wanted, {name: np.shape(leaf) for name, leaf in leaves.items()})
    for name, leaf in leaves.items():
        dtype = jnp.result_type(leaf)
        codes = name.endswith(".codes")
        if codes != (dtype == jnp.uint8) or not (codes or jnp.issubdtype(dtype, jnp.floating)):
            needed = "uint8" if codes else "floating point numbers"
            raise ValueError(f"{source}: {name} holds {dtype}, should hold {needed}")
        if name.endswith("packed.scale") and dtype != jnp.float32:
            raise ValueError(f"{source}: {name} holds {dtype}, should hold float32")


def _kernel_shapes(config: PackedConfig) -> dict[str, tuple[int, ...]]:
    """Of one layer."""
    kernels = {}
    for name, shape in _dense_shapes(config).items():
        if name.startswith("layers.0.") and name.endswith(".kernel"):
            kernels[name.removeprefix("layers.0.").removesuffix(".kernel")] = shape
    return {name: kernels[name] for name in INPUT_OF if name in kernels}


def _dense_shapes(config: PackedConfig) -> dict[str, tuple[int, ...]]:
    made = jax.eval_shape(functools.partial(init_params, config=config.model), jax.random.key(0))
    return {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_flatten_with_path(made)[0]}


def _shapes(config: PackedConfig) -> dict[str, tuple[int, ...]]:
    wanted: dict[str, tuple[int, ...]] = {}
    for name, shape in _dense_shapes(config).items():
        if config.weight_bits != FULL and name.startswith("layers.") and name.endswith(".kernel"):
            inputs, outputs = shape
            packed = name.removesuffix("kernel") + "packed"
            wanted[f"{packed}.codes"] = (outputs, -(-inputs // 8) * config.weight_bits)
            wanted[f"{packed}.scale"] = (outputs, group_count(inputs, config.group_size))
        else:
            wanted[name] = shape
    width, rank = config.model.width, config.residual_rank
    if rank != 0:
        exact = rank is None or rank == width
        parts = {"t": (width, width)} if exact else {"q": (width, rank), "m": (rank, rank)}
        for layer in range(config.model.num_layers):
            for half in ("attention", "mlp"):
                for part, shape in parts.items():
                    wanted[f"layers.{layer}.residual.{half}.{part}"] = shape
    return wanted
