"""SSA as a Flax NNX module: a thin shell over the functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from effml.attend.ssa import _cache
from effml.attend.ssa._attention import SSAInfo
from effml.attend.ssa._config import SSAConfig
from effml.attend.ssa._transformer import attention
from effml.nn.attention import AttentionInputs, apply_rope, rope_tables
from effml.nn.transformer import TransformerConfig

__all__ = ["SSAAttention"]


class SSAAttention(nnx.Module):
    """One self-attention layer with SSA: projections, rotation, both streams, gate, output projection.

    Takes the place of an attention layer in a model of one's own: pass `train=True`, draw `mode` once a step with
    `sample_mode`, and add `ssa_loss(cross_entropy, infos, config)` with the `SSAInfo` of every layer. The module is a
    pytree: use `jax.jit` and `jax.grad` over it.

    Args:
        sizes: width, heads, head size and rotary positions of the layer; the rest of it is not used.
        config: blocks, budget and alignment.
        rngs: the `params` stream gives the key of the initial weights.

    Example:
        >>> sizes = TransformerConfig(vocab_size=1, width=32, num_layers=1, num_heads=4, mlp_width=1, num_kv_heads=2)
        >>> layer = SSAAttention(sizes, SSAConfig(block_size=8, num_blocks=2), rngs=nnx.Rngs(0))
        >>> output, info = layer(jnp.ones((1, 24, 32)), mode="sparse", train=True)
        >>> output.shape, info.align.shape
        ((1, 24, 32), ())
    """

    def __init__(self, sizes: TransformerConfig, config: SSAConfig, *, rngs: nnx.Rngs) -> None:
        self.sizes, self.config = sizes, config
        queries, keys = sizes.num_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        shapes = {
            "query": (sizes.width, queries),
            "key": (sizes.width, keys),
            "value": (sizes.width, keys),
            "output": (queries, sizes.width),
        }
        if config.gated:
            shapes["gate"] = (sizes.width, sizes.num_heads)
        for (name, shape), key in zip(shapes.items(), jax.random.split(rngs.params(), len(shapes))):
            kernel = sizes.initializer_std * jax.random.normal(key, shape, jnp.dtype(sizes.param_dtype))
            setattr(self, name, nnx.Param(kernel))

    def __call__(
        self,
        x: Float[Array, "batch length width"],
        positions: Int[Array, "batch length"] | None = None,
        *,
        mode: Any = "full",
        train: bool = False,
        segment_ids: Any = None,
    ) -> tuple[Float[Array, "batch length width"], SSAInfo]:
        """Attends within `x`.

        Args:
            x: normed input of the layer.
            positions: of the rows; None counts from 0.
            mode: "full", "sparse", or a bool scalar, which may be traced.
            train: whether both streams are computed and compared.
            segment_ids: int[batch, length] of packed sequences.

        Returns:
            What is added to the residual stream, and the report.
        """
        inputs = self._inputs(x, positions, None)
        mixed, info = attention(inputs, config=self.config, mode=mode, train=train, segment_ids=segment_ids)
        return self._project(mixed), info

    def decode(
        self, x: Float[Array, "batch new width"], cache: _cache.SSACache, *, mode: str = "sparse"
    ) -> tuple[Float[Array, "batch new width"], _cache.SSACache]:
        """Attends from new rows to the cache and themselves, and commits them.

        Args:
            x: normed input of the layer.
            cache: from `init_cache`.
            mode: "full" or "sparse".

        Returns:
            What is added to the residual stream, and the cache with the new rows in it.

        Example:
            >>> from effml.attend import ssa
            >>> sizes = TransformerConfig(vocab_size=1, width=32, num_layers=1, num_heads=4, mlp_width=1)
            >>> layer = SSAAttention(sizes, SSAConfig(block_size=8, num_blocks=2), rngs=nnx.Rngs(0))
            >>> (cache,) = ssa.init_cache(sizes, 1, 32, block_size=8)
            >>> output, cache = layer.decode(jnp.ones((1, 3, 32)), cache)
            >>> output.shape, cache.length.tolist()
            ((1, 3, 32), [3])
        """
        rows = cache.length[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)
        inputs = self._inputs(x, rows, cache)
        mixed, _ = attention(inputs, config=self.config, mode=mode)
        return self._project(mixed), _cache.append(cache, inputs.key, inputs.value)

    def _inputs(self, x: Array, positions: Array | None, cache: Any) -> AttentionInputs:
        sizes = self.sizes
        batch, length, _ = x.shape
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        heads = {"query": sizes.num_heads, "key": sizes.kv_heads, "value": sizes.kv_heads}
        rows = {
            name: (x @ self._kernel(name, x)).reshape(batch, length, count, sizes.head_dim)
            for name, count in heads.items()
        }
        if sizes.positions == "rope":
            angles = rope_tables(positions, sizes)
            for name in ("query", "key"):
                rows[name] = apply_rope(rows[name], *angles, layout=sizes.rope_layout)
        params = {"gate": {"kernel": self._kernel("gate", x)}} if self.config.gated else {}
        return AttentionInputs(
            **rows,
            hidden=x,
            params=params,
            positions=positions,
            mask=None,
            cache=cache,
            scale=sizes.score_scale,
            layer=0,
        )

    def _project(self, mixed: Array) -> Array:
        return mixed.reshape(*mixed.shape[:2], -1) @ self._kernel("output", mixed)

    def _kernel(self, name: str, x: Array) -> Array:
        return getattr(self, name).get_value().astype(x.dtype)
