"""Attention that reads less than every key: methods that plug into the transformer's `attention` and cache seams.

Names load on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_SUBMODULES = ("ffd", "ssa")
__all__ = ["ffd", "ssa"]

if TYPE_CHECKING:
    from effml.attend import ffd, ssa


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"effml.attend.{name}")
    raise AttributeError(f"module 'effml.attend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
