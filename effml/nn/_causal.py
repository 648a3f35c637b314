r"""Causal self-attention for training: blocks of queries, and a backward pass that recomputes the scores.

A block of queries is multiplied with the keys up to its own end only, so that most of the upper triangle is
never computed. Backward needs queries, keys, values, output and one log-normaliser per row, instead of the
[length, length] weights:

$$P = e^{S - \ell}, \quad dV = P^T dO, \quad dS = P \odot (dO\,V^T - \mathrm{rowsum}(dO \odot O)),
  \quad dQ = dS\,K, \quad dK = dS^T Q$$

Every product contracts the last axis of its left operand with the first of its right one, which XLA's CPU
backend runs about three times as fast as a right operand contracted on its last axis; what is transposed to
get there are the narrow operands, never the scores.

Source: the recomputation is that of Dao et al., FlashAttention, arXiv 2205.14135.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["causal_attention"]

_SMALLEST_BLOCK = 64
_MOST_BLOCKS = 8


def causal_attention(
    query: Float[Array, "batch length heads head"],
    key: Float[Array, "batch length kv_heads head"],
    value: Float[Array, "batch length kv_heads head"],
    *,
    scale: float,
) -> Float[Array, "batch length heads head"]:
    """Softmax attention in which row t sees rows 0 … t. Reverse-mode differentiable only.

    Args:
        query: head j reads key head `j // (heads // kv_heads)`.
        key: keys.
        value: values.
        scale: factor on the scores.

    Returns:
        Attention output in the dtype of `query`; scores, softmax and sums are float32.

    Example:
        >>> rows = jnp.ones((1, 3, 2, 4))
        >>> causal_attention(rows, rows, rows, scale=0.5).shape
        (1, 3, 2, 4)
    """
    batch, length, heads, head = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads

    def rows(x: Array, group: int) -> Array:  # [batch, kv_heads, length * group, head]
        x = x.reshape(batch, length, kv_heads, group, head).transpose(0, 2, 1, 3, 4)
        return x.reshape(batch, kv_heads, length * group, head)

    output = _attend(rows(query * scale, group), rows(key, 1), rows(value, 1))
    output = output.reshape(batch, kv_heads, length, group, head).transpose(0, 2, 1, 3, 4)
    return output.reshape(batch, length, heads, head)


@jax.custom_vjp
def _attend(query: Array, key: Array, value: Array) -> Array:
    return _forward(query, key, value)[0]


def _forward(query: Array, key: Array, value: Array) -> tuple[Array, tuple[Array, ...]]:
    group = query.shape[2] // key.shape[2]
    key_t = _transpose(key)
    outputs, normalisers = [], []
    for start, stop in _blocks(key.shape[2]):
        scores = _scores(query, key_t, start, stop, group)
        peak = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = weights.sum(-1, keepdims=True)
        outputs.append(_product(weights.astype(value.dtype), value[:, :, :stop]) / total)
        normalisers.append(peak + jnp.log(total))
    output = jnp.concatenate(outputs, axis=2).astype(query.dtype)
    return output, (query, key, value, output, jnp.concatenate(normalisers, axis=2))


def _backward(saved: tuple[Array, ...], d_output: Array) -> tuple[Array, Array, Array]:
    query, key, value, output, normaliser = saved
    group = query.shape[2] // key.shape[2]
    key_t, value_t, query_t, d_output_t = map(_transpose, (key, value, query, d_output))
    inner = (d_output.astype(jnp.float32) * output.astype(jnp.float32)).sum(-1, keepdims=True)
    d_query = []
    d_key_t = jnp.zeros(key_t.shape, jnp.float32)
    d_value_t = jnp.zeros(key_t.shape, jnp.float32)
    for start, stop in _blocks(key.shape[2]):
        rows = slice(start * group, stop * group)
        weights = jnp.exp(_scores(query, key_t, start, stop, group) - normaliser[:, :, rows])
        d_scores = weights * (_product(d_output[:, :, rows], value_t[..., :stop]) - inner[:, :, rows])
        d_scores, weights = d_scores.astype(query.dtype), weights.astype(query.dtype)
        d_query.append(_product(d_scores, key[:, :, :stop]))
        d_key_t = d_key_t.at[..., :stop].add(_product(query_t[..., rows], d_scores))
        d_value_t = d_value_t.at[..., :stop].add(_product(d_output_t[..., rows], weights))
    return (
        jnp.concatenate(d_query, axis=2).astype(query.dtype),
        _transpose(d_key_t).astype(key.dtype),
        _transpose(d_value_t).astype(value.dtype),
    )


_attend.defvjp(_forward, _backward)


def _blocks(length: int) -> list[tuple[int, int]]:
    size = max(_SMALLEST_BLOCK, math.ceil(length / _MOST_BLOCKS))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _scores(query: Array, key_t: Array, start: int, stop: int, group: int) -> Array:
    scores = _product(query[:, :, start * group : stop * group], key_t[..., :stop])
    positions = start + jnp.arange((stop - start) * group) // group
    return jnp.where(positions[:, None] >= jnp.arange(stop), scores, -1e30)


def _transpose(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def _product(left: Array, right: Array) -> Array:
    return jax.lax.dot_general(
        left, right, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
    )
