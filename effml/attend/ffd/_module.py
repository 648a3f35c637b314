"""Self-attention with an FFD cache as a Flax NNX module: a thin shell over the functions."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from effml.attend.ffd._cache import QuantizedKV, append
from effml.attend.ffd._decoding import FFDAttention, FFDConfig
from effml.nn.attention import AttentionInputs, apply_rope, rope_tables
from effml.nn.transformer import TransformerConfig

__all__ = ["FFDSelfAttention"]


class FFDSelfAttention(nnx.Module):
    """Projections, rotary positions, and attention that reads and fills a cache; the cache is no state of the module.

    Args:
        model: sizes of the attention (`width`, `num_heads`, `kv_heads`, `head_dim`) and its rotary positions.
        config: how to decode.
        rngs: the `params` stream gives the keys of the initial weights.

    Example:
        >>> sizes = TransformerConfig(vocab_size=256, width=32, num_layers=1, num_heads=4, mlp_width=64)
        >>> layer = FFDSelfAttention(sizes, FFDConfig(block=16), rngs=nnx.Rngs(0))
        >>> y, cache = layer(jnp.ones((2, 20, 32)), layer.init_cache(batch=2, max_len=64))
        >>> y, cache = layer(jnp.ones((2, 1, 32)), cache)
        >>> y.shape, cache.length.tolist()
        ((2, 1, 32), [21, 21])
    """

    def __init__(self, model: TransformerConfig, config: FFDConfig, *, rngs: nnx.Rngs) -> None:
        self.model, self.config = model, config
        size = lambda heads: heads * model.head_dim
        linear = lambda outputs, inputs=model.width: nnx.Linear(
            inputs, outputs, use_bias=False, dtype=jnp.dtype(model.compute_dtype), rngs=rngs
        )
        self.query, self.key, self.value = (
            linear(size(heads)) for heads in (model.num_heads, model.kv_heads, model.kv_heads)
        )
        self.output = linear(model.width, size(model.num_heads))

    def init_cache(self, batch: int, max_len: int) -> QuantizedKV:
        """An empty cache; see `effml.attend.ffd.init_cache`."""
        model = self.model
        return self.config.empty_cache(batch, max_len, model.kv_heads, model.head_dim, model.compute_dtype)

    def __call__(
        self,
        x: Float[Array, "batch new width"],
        cache: QuantizedKV,
        counts: Int[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch new width"], QuantizedKV]:
        """Attends to the cache and the new rows, then commits the new rows.

        Args:
            x: inputs of the next rows of each sequence.
            cache: what the last call returned, or an empty one.
            counts: how many of each sequence's rows are valid; None means all.

        Returns:
            The outputs and the cache with the rows in it.
        """
        model = self.model
        batch, new, _ = x.shape
        heads = lambda y: y.reshape(batch, new, -1, model.head_dim)
        query, key, value = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        positions = cache.length[:, None] + jnp.arange(new)
        tables = rope_tables(positions, model)
        query, key = (apply_rope(y, *tables, layout=model.rope_layout) for y in (query, key))
        empty: Any = {}
        inputs = AttentionInputs(query, key, value, x, empty, positions, None, cache, model.score_scale, 0)
        mixed, _ = FFDAttention(self.config)(inputs)
        return self.output(mixed.reshape(batch, new, -1)), append(cache, key, value, None, counts)
