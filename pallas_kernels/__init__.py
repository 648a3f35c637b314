"""Fused decoding, binary matmul and block-sparse attention kernels for GPU and TPU (jax and numpy only).

Every op is a folder with one public function or two, which load on first use:

| op | computes |
|---|---|
| `binary_matmul` | products with weights of one bit, and of two binary factors; on CPU in native code |
| `block_sparse_attention` | attention over the key blocks that each query chose |
| `ffd_decode` | attention of new tokens to a cache of low-bit keys, whose blocks are skipped by a threshold |
| `matvec` | products of few rows with floating or low-bit weights, in native CPU code |

`implementation=None` runs everywhere; a named one runs or raises with the reasons. `effml doctor` lists them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_kernels import binary_matmul, block_sparse_attention, ffd_decode, matvec

__all__ = ["binary_matmul", "block_sparse_attention", "ffd_decode", "matvec"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"pallas_kernels.{name}")
    raise AttributeError(f"module 'pallas_kernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
