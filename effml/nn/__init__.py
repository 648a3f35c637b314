"""Networks as pure functions over plain parameter dicts: a language model, a perceptron, convolutional nets.

Names load on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_SUBMODULES = ("attention", "cache", "convnet", "hub", "mlp", "module", "transformer")
_NAMES = {
    "AttentionInputs": "attention",
    "DenseCache": "cache",
    "RopeScaling": "transformer",
    "Transformer": "module",
    "TransformerConfig": "transformer",
    "forward": "transformer",
    "forward_cached": "transformer",
    "init_cache": "cache",
    "init_params": "transformer",
    "next_token_loss": "transformer",
}
__all__ = [
    "AttentionInputs",
    "DenseCache",
    "RopeScaling",
    "Transformer",
    "TransformerConfig",
    "attention",
    "cache",
    "convnet",
    "forward",
    "forward_cached",
    "hub",
    "init_cache",
    "init_params",
    "mlp",
    "module",
    "next_token_loss",
    "transformer",
]

if TYPE_CHECKING:
    from effml.nn import attention, cache, convnet, hub, mlp, module, transformer
    from effml.nn.attention import AttentionInputs
    from effml.nn.cache import DenseCache, init_cache
    from effml.nn.module import Transformer
    from effml.nn.transformer import (
        RopeScaling,
        TransformerConfig,
        forward,
        forward_cached,
        init_params,
        next_token_loss,
    )


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"effml.nn.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"effml.nn.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'effml.nn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
