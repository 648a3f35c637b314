"""Language models by name for planning, and their loss as a training run on a mesh would compute it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from effml._validate import one_of
from effml.nn.hub import config_from_huggingface
from effml.nn.transformer import TransformerConfig, dense_linear, init_params, next_token_loss
from effml.train.gathering import fsdp_loss

__all__ = ["MODELS", "language_model", "model_config"]


def _llama(
    width: int, layers: int, heads: int, mlp_width: int, kv_heads: int | None = None
) -> TransformerConfig:
    return TransformerConfig(
        32000, width, layers, heads, mlp_width, num_kv_heads=kv_heads, max_length=4096, tied_head=False
    )


# The sizes of the optimizer papers (GaLore, SCALE), which at 7b are Llama's own; 70b is Llama 2's.
MODELS: dict[str, TransformerConfig] = {
    "llama-60m": _llama(512, 8, 8, 1376),
    "llama-130m": _llama(768, 12, 12, 2048),
    "llama-350m": _llama(1024, 24, 16, 2736),
    "llama-1b": _llama(2048, 24, 32, 5461),
    "llama-7b": _llama(4096, 32, 32, 11008),
    "llama-70b": _llama(8192, 80, 64, 28672, 8),
}


def model_config(model: str) -> TransformerConfig:
    """The sizes of a model: a preset, or a Hugging Face folder, of which only `config.json` is read.

    Args:
        model: a name out of `MODELS`, or the path of a folder (or of its config.json).

    Returns:
        Its configuration.

    Raises:
        ValueError: for an unknown name (with the nearest known one), or a configuration that is not supported.

    Example:
        >>> model_config("llama-7b").num_layers
        32
    """
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"model={model!r}: {path} is not JSON ({error})") from None
        return config_from_huggingface(fields, source=str(path))
    return MODELS[one_of("model", model, MODELS)]


def language_model(
    config: TransformerConfig,
    mesh: Mesh,
    *,
    compute_dtype: str = "bfloat16",
    param_dtype: str = "float32",
    rematerialize: bool = True,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Loss and initialiser of the model with scanned layers, whose weights are gathered where they are used.

    Args:
        config: the model's sizes.
        mesh: a mesh of `make_mesh` or `planning_mesh`.
        compute_dtype: of activations and of gathered weights.
        param_dtype: of the parameters.
        rematerialize: recompute each block in the backward pass.

    Returns:
        `loss(params, batch)` and `init(key)`, for `plan_step`, or for `make_step` and `init_state`.

    Example:
        >>> import jax
        >>> from effml.train import make_mesh
        >>> mesh = make_mesh({"fsdp": 1}, jax.devices()[:1])
        >>> loss, init = language_model(MODELS["llama-60m"], mesh)
        >>> jax.eval_shape(init, jax.random.key(0))["layers"]["mlp"]["up"]["kernel"].shape
        (8, 512, 1376)
    """
    config = dataclasses.replace(config, compute_dtype=compute_dtype, param_dtype=param_dtype)
    loss = functools.partial(next_token_loss, config=config, rematerialize=rematerialize)
    if mesh.shape["fsdp"] > 1:
        loss = fsdp_loss(loss, mesh, linear=dense_linear, dtype=compute_dtype)
    return loss, functools.partial(init_params, config=config, scanned=True)
