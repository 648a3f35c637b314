"""effml: machine learning with less memory, fewer bits and fewer model calls, in JAX.

Subpackages load on first use, so `import effml` costs milliseconds and does not load jax:

    >>> import effml
    >>> effml.optimize.scale  # doctest: +ELLIPSIS
    <function scale at ...>
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_SUBMODULES = (
    "data",
    "decode",
    "models",
    "nn",
    "optimize",
    "pipeline",
    "quantize",
    "report",
    "train",
    "trees",
)
__all__ = [*_SUBMODULES, "__version__"]

if TYPE_CHECKING:
    from effml import data, decode, models, nn, optimize, pipeline, quantize, report, train, trees


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"effml.{name}")
    raise AttributeError(f"module 'effml' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
