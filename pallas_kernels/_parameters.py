"""Compiler parameters of the Pallas backends; the one place that names them.

They are always passed: without any, JAX 0.10 lowers a GPU kernel through Mosaic GPU and JAX 0.11 through Triton.
Pallas's Triton lowering serves JAX 0.10.2 to 0.12; it is deprecated since 0.11 (a warning when lowered, removal
announced without a date). When it goes, this file and each op's `pallas_gpu.py` change and nothing else.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

__all__ = ["gpu_parameters", "tpu_parameters"]


def gpu_parameters(num_warps: int, num_stages: int) -> Any:
    """Triton lowering with these numbers of warps and pipeline stages.

    Example:
        >>> gpu_parameters(4, 2).num_warps
        4
    """
    return plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages)


def tpu_parameters(*dimension_semantics: str, vmem_limit_bytes: int | None = None) -> Any:
    """Mosaic TPU with one of `"parallel"` and `"arbitrary"` for every grid axis.

    Example:
        >>> tpu_parameters("parallel", "arbitrary").dimension_semantics
        ('parallel', 'arbitrary')
    """
    return pltpu.CompilerParams(
        dimension_semantics=dimension_semantics,  # pyright: ignore[reportArgumentType]
        vmem_limit_bytes=vmem_limit_bytes,
    )
