"""Launcher of the Triton kernel through jax-triton, which is optional and loaded at the call.

jax-triton can only be tried on a machine with a GPU (its lowering needs the CUDA plugin), and was not yet. The kernel
itself is run by Triton's interpreter and compiled to sm_90 code (`tests/kernels`).
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ffd_decode.body import Spec, default_splits, merge_partials
from pallas_kernels.ffd_decode.pallas_gpu import power_of_two

__all__ = ["absent", "attend_blocks", "constants"]

_WARPS, _STAGES = 4, 2


def absent() -> str | None:
    """Why the launcher can't run on this machine, whatever the call."""
    for name in ("triton", "jax_triton"):
        if importlib.util.find_spec(name) is None:
            return f"{name.replace('_', '-')} is not installed (pip install 'effml[triton]')"
    return None


def constants(
    spec: Spec, rows: int, channels: int, width: int, code_bytes: int, blocks: int, splits: int
) -> dict:
    """The kernel's compile-time arguments, by name."""
    per_scale, constant = spec.bound
    return {
        "R": rows,
        "D": channels,
        "DV": width,
        "BYTES": code_bytes,
        "NB": blocks,
        "BLOCK": spec.block,
        "BITS": spec.bits,
        "PER_SPLIT": -(-blocks // splits),
        "SOFTMAX_SCALE": spec.scale,
        "CERTIFIED": spec.certified,
        "BOUND_PER_SCALE": per_scale,
        "BOUND_CONSTANT": constant,
        "EXACT": spec.exact_products,
        "ROWS": power_of_two(rows),
        "CHANNELS": power_of_two(channels),
        "COLUMNS": power_of_two(width),
        "BYTE_COLUMNS": power_of_two(code_bytes),
        "TOKENS": power_of_two(spec.block),
    }


def attend_blocks(
    spec: Spec,
    q: jax.Array,
    k_code: jax.Array,
    k_scale: jax.Array,
    k_resid: jax.Array,
    v: jax.Array,
    num_blocks: jax.Array,
    threshold: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The partial (m, total, acc) of [B, H, R] queries over the kept blocks, and which those were, bool [B, H, NB]."""
    import jax_triton  # pyright: ignore[reportMissingImports]

    from pallas_kernels.ffd_decode.triton_kernel import ffd_decode_kernel

    b, h, r, d = q.shape
    blocks, width = k_scale.shape[2], v.shape[-1]
    splits = min(spec.num_splits or default_splits(b, h, blocks), blocks)
    out: Any = [
        jax.ShapeDtypeStruct((splits, b, h, r), jnp.float32),
        jax.ShapeDtypeStruct((splits, b, h, r), jnp.float32),
        jax.ShapeDtypeStruct((splits, b, h, r, width), jnp.float32),
        jax.ShapeDtypeStruct((b, h, blocks), jnp.int32),
    ]
    # The name changed in jax-triton 0.4.
    name = "out_type" if "out_type" in inspect.signature(jax_triton.triton_call).parameters else "out_shape"
    m, total, acc, kept = jax_triton.triton_call(
        *(num_blocks, threshold, q, k_code, k_scale, k_resid, v),
        kernel=ffd_decode_kernel,
        grid=(splits, h, b),
        num_warps=_WARPS,
        num_stages=_STAGES,
        **{name: out},
        **constants(spec, r, d, width, k_code.shape[-1], blocks, splits),
    )
    # What the kernel did not walk holds nothing.
    kept = (kept > 0) & (jnp.arange(blocks) < num_blocks[:, None, None])
    return *merge_partials(m, total, acc), kept
