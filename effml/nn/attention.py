"""Attention of one block: what an attention function is given, the dense one, and rotary positions."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from effml.nn._causal import causal_attention
from effml.nn._config import TransformerConfig
from effml.nn.cache import attend

__all__ = [
    "AttentionInputs",
    "apply_rope",
    "causal_attention",
    "dense_attention",
    "rope_frequencies",
    "rope_tables",
]


class AttentionInputs(NamedTuple):
    """What an attention function gets. Any function of it that returns (output, info) can be used.

    Attributes:
        query: [batch, new, heads, head], normalised (with `qk_norm`) and rotated.
        key: [batch, new, kv_heads, head], likewise.
        value: [batch, new, kv_heads, head].
        hidden: [batch, new, width], the normed input of the block, for gates.
        params: the layer's `"attention"` parameters.
        positions: int32[batch, new].
        mask: bool[batch, new, new], which new rows (last axis) each new row sees; None is causal.
        cache: this layer's cache, or None.
        scale: factor on the scores.
        layer: index of the layer; traced when layers are scanned.
    """

    query: Array
    key: Array
    value: Array
    hidden: Array
    params: Any
    positions: Array
    mask: Array | None
    cache: Any
    scale: float
    layer: int | Array


def dense_attention(inputs: AttentionInputs) -> tuple[Float[Array, "batch new heads head"], None]:
    """Softmax attention over the cache's committed rows and the new rows.

    In float32 with neither cache nor mask, as in training, this is `causal_attention`, whose gradient is fast and
    reverse mode only; else it is `effml.nn.cache.attend`.

    Args:
        inputs: queries, keys, values and what else the block knows.

    Returns:
        Output of every query head, and None: dense attention has nothing to report.

    Example:
        >>> rows = jnp.ones((1, 3, 2, 4))
        >>> positions = jnp.arange(3)[None]
        >>> inputs = AttentionInputs(rows, rows, rows, rows, {}, positions, None, None, 0.5, 0)
        >>> output, info = dense_attention(inputs)
        >>> output.shape
        (1, 3, 2, 4)
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    if inputs.cache is None and inputs.mask is None and query.dtype == jnp.float32:
        return causal_attention(query, key, value, scale=inputs.scale), None
    output = attend(query, inputs.cache, key, value, inputs.mask, inputs.positions, scale=inputs.scale)
    return output, None


def rope_frequencies(config: TransformerConfig) -> np.ndarray:
    r"""Angle per position of each rotated pair, $\theta_i = b^{-2i/h}$, after the config's scaling.

    `llama3` scaling follows the formula of the Hugging Face implementation: with wavelength
    $\lambda_i = 2\pi/\theta_i$ and original length L, pairs with $\lambda_i < L/\text{high}$ keep their
    frequency, pairs with $\lambda_i > L/\text{low}$ get $\theta_i/\text{factor}$, and in between
    $((1-s)/\text{factor} + s)\,\theta_i$ with $s = (L/\lambda_i - \text{low})/(\text{high} - \text{low})$.

    Args:
        config: gives the head size, base and scaling.

    Returns:
        float64[head_dim / 2], radians per position.

    Example:
        >>> config = TransformerConfig(256, 8, 1, 2, 16)
        >>> rope_frequencies(config).tolist()
        [1.0, 0.01]
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_base**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_max_length * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * ((1 - kept) / scaling.factor + kept)


def rope_tables(
    positions: Int[Array, "batch length"], config: TransformerConfig
) -> tuple[Float[Array, "batch length pairs"], Float[Array, "batch length pairs"]]:
    """Cosine and sine of every position's angles; computed once and used by all layers.

    Args:
        positions: of the rows to rotate.
        config: gives the frequencies.

    Returns:
        float32 cosines and sines, one per rotated pair of features.

    Example:
        >>> cosine, sine = rope_tables(jnp.arange(3)[None], TransformerConfig(256, 8, 1, 2, 16))
        >>> cosine.shape, float(sine[0, 0, 0])
        ((1, 3, 2), 0.0)
    """
    frequencies = jnp.asarray(rope_frequencies(config), jnp.float32)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "batch length heads head"],
    cosine: Float[Array, "#batch length pairs"],
    sine: Float[Array, "#batch length pairs"],
    *,
    layout: str = "split",
) -> Float[Array, "batch length heads head"]:
    r"""Rotates pairs of features, $(a, b) \mapsto (a\cos - b\sin,\; b\cos + a\sin)$.

    Args:
        x: queries or keys.
        cosine: from `rope_tables`.
        sine: from `rope_tables`.
        layout: `"split"` pairs feature i with i + head/2, `"interleaved"` pairs 2i with 2i+1.

    Returns:
        The rotated features in the dtype of `x`; the rotation itself is float32.

    Source: Su et al., RoFormer, arXiv 2104.09864.

    Example:
        >>> x = jnp.ones((1, 3, 2, 4))
        >>> apply_rope(x, jnp.ones((1, 3, 2)), jnp.zeros((1, 3, 2))).tolist() == x.tolist()
        True
    """
    cosine, sine = cosine[:, :, None, :], sine[:, :, None, :]
    if layout == "split":
        first, second = jnp.split(x, 2, axis=-1)
        rotated = (first * cosine - second * sine, second * cosine + first * sine)
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.stack(rotated, axis=-1).reshape(x.shape).astype(x.dtype)
