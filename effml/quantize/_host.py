"""What runs on the host, and says so where it is traced."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer

__all__ = ["on_host"]


def on_host(function: str, *trees: Any) -> None:
    """Raises where an array is traced.

    Args:
        function: that was called, for the message.
        *trees: what it was given.

    Raises:
        TypeError: inside `jax.jit`, `jax.grad`, `jax.vmap` and the like.

    Example:
        >>> on_host("pack", [1.0, None]) is None
        True
    """
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees)):
        raise TypeError(f"{function} works on the host: call it outside jax.jit, jax.grad and jax.vmap")
