"""Bytes of a whole model at a rate, from its shapes alone: nothing is allocated."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from effml.nn.transformer import TransformerConfig, init_params
from effml.quantize.nanoquant._rank import nanoquant_rank
from effml.trees import path_name
from pallas_kernels.binary_matmul import pack_signs

__all__ = ["model_bytes"]


def model_bytes(config: TransformerConfig, bpw: float | int | None, *, multiple: int = 32) -> dict[str, Any]:
    """Bytes of a model whose kernels are factorised at a rate: packed words and bfloat16 scales.

    Every kernel of the layers is factorised; biases, norms, embedding and head stay, in bfloat16. Arrays are counted
    as they are stored, words of 32 signs with their padding.

    Args:
        config: of the model.
        bpw: bits per weight asked for; None factorises nothing.
        multiple: of the rank, and the least one.

    Returns:
        `bytes`, `bytes_bfloat16` of the model as it is, their `ratio`, and the realised `bits_per_weight` of the
        factorised kernels.

    Raises:
        ValueError: for a rate that a kernel can't reach.

    Example:
        >>> found = model_bytes(TransformerConfig(256, 1024, 2, 8, 4096), 1.0)
        >>> round(found["ratio"], 2), found["bits_per_weight"] <= 1.0
        (14.44, True)
    """
    # Layers are alike: one is enough.
    one = dataclasses.replace(config, num_layers=1)
    made = jax.eval_shape(lambda: init_params(jax.random.key(0), one))
    dense = kept = packed = weights = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(made)[0]:
        name = path_name(path)
        layers = config.num_layers if name.startswith("layers.") else 1
        size = 2 * layers * math.prod(leaf.shape)
        dense += size
        if bpw is None or not (name.startswith("layers.") and name.endswith(".kernel")):
            kept += size
            continue
        d_in, d_out = leaf.shape
        rank = nanoquant_rank(d_in, d_out, bpw, multiple=multiple, min_rank=multiple)
        arrays = jax.eval_shape(lambda: _packed(d_in, d_out, rank))  # noqa: B023  (called at once)
        packed += layers * sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
        weights += layers * d_in * d_out
    return {
        "bytes": kept + packed,
        "bytes_bfloat16": dense,
        "ratio": dense / (kept + packed),
        "bits_per_weight": 8 * packed / weights if weights else 16.0,
    }


def _packed(d_in: int, d_out: int, rank: int) -> tuple[Any, ...]:
    """What one kernel is stored as, from zeros."""
    signs = pack_signs(jnp.zeros((d_in, rank))), pack_signs(jnp.zeros((rank, d_out)))
    return (*signs, jnp.zeros(d_in, jnp.bfloat16), jnp.zeros(d_out, jnp.bfloat16))
