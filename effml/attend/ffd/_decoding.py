"""FFD as the arguments that generation and the transformer take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from effml._validate import count
from effml.attend.ffd._attention import ffd_attention
from effml.attend.ffd._cache import QuantizedKV, append, check_layout, init_cache
from effml.nn.attention import AttentionInputs, dense_attention
from effml.nn.transformer import TransformerConfig, dense_linear
from pallas_kernels.ffd_decode import FFDStats

__all__ = ["FFDAttention", "FFDCaches", "FFDConfig", "decoding_options"]

THRESHOLDS = ("pseudo_fp", "pseudo", "exact", "certified")


@dataclass(frozen=True)
class FFDConfig:
    """How a model decodes with FFD; hashable, and equal ones share their compiled programs.

    Args:
        delta: δ in nats, see `ffd_attention`.
        block: rows of a block; for a model that was trained with block-sparse attention, its block size.
        bits: of a key's code, 2 or 4.
        sink: rows at the start that are never quantised.
        threshold: how the largest score is probed, see `ffd_attention`.
        residual_dtype: of the keys' residuals.
        dense_layers: layers that read everything.
        most_queries: up to this many new rows each read their own blocks; more are a prompt, which is read densely.
        implementation: form of the kernel; None takes the best one of the platform.

    Raises:
        ValueError: for a negative or missing δ, or a size that is not allowed.

    Example:
        >>> FFDConfig(delta=-1)
        Traceback (most recent call last):
        ...
        ValueError: delta=-1 must be at least 0 (nats)
    """

    delta: float | int = 5.0
    block: int = 128
    bits: int = 2
    sink: int = 0
    threshold: str = "pseudo_fp"
    residual_dtype: str = "float8_e4m3fn"
    dense_layers: tuple[int, ...] = ()
    most_queries: int = 64
    implementation: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.delta, bool) or not isinstance(self.delta, (int, float)):
            raise TypeError(f"delta={self.delta!r} must be a number (nats)")
        if not self.delta >= 0:
            raise ValueError(f"delta={self.delta!r} must be at least 0 (nats)")
        count("most_queries", self.most_queries)
        if self.threshold not in THRESHOLDS:
            raise ValueError(f"threshold={self.threshold!r} must be one of {', '.join(THRESHOLDS)}")
        layers = self.dense_layers
        whole = isinstance(layers, tuple) and all(type(layer) is int and layer >= 0 for layer in layers)
        if not whole:
            raise ValueError(f"dense_layers={layers!r} must be a tuple of layer numbers, counted from 0")
        check_layout(self.block, self.bits, self.sink, self.residual_dtype)

    def empty_cache(self, batch: int, max_len: int, kv_heads: int, head_dim: int, dtype: Any) -> QuantizedKV:
        """An empty cache of one layer; see `init_cache`."""
        return init_cache(
            batch,
            max_len,
            kv_heads,
            head_dim,
            block=self.block,
            bits=self.bits,
            sink=self.sink,
            resid_dtype=self.residual_dtype,
            dtype=dtype,
        )


@dataclass(frozen=True)
class FFDCaches:
    """`cache_init` of generation: empty caches for every layer.

    Args:
        config: how to decode.
        stacked: one cache with a leading layer axis on every leaf (scanned layers) instead of a list.

    Example:
        >>> model = TransformerConfig(vocab_size=256, width=64, num_layers=2, num_heads=4, mlp_width=128)
        >>> [cache.v.shape for cache in FFDCaches(FFDConfig(block=16))(model, 3, 64)]
        [(3, 4, 64, 16), (3, 4, 64, 16)]
    """

    config: FFDConfig
    stacked: bool = False

    def __call__(self, model: TransformerConfig, batch: int, max_length: int) -> Any:
        """The caches."""
        make = lambda: self.config.empty_cache(
            batch, max_length, model.kv_heads, model.head_dim, model.compute_dtype
        )
        if not self.stacked:
            return [make() for _ in range(model.num_layers)]
        return jax.tree.map(lambda leaf: jnp.stack([leaf] * model.num_layers), make())


@dataclass(frozen=True)
class FFDAttention:
    """The attention function of a model whose caches are `QuantizedKV`.

    One new row, or up to `most_queries` of them, each read their own blocks. A longer prompt is read densely, as is
    everything while a cache is empty. Without a cache it is dense attention. Outputs are gated where the layer's
    parameters hold a `"gate"`, as those of `effml.attend.ssa` do. It reports `FFDStats` for one new row, else None.

    Args:
        config: how to decode.

    Example:
        >>> from effml.nn.transformer import forward, init_params
        >>> model = TransformerConfig(vocab_size=256, width=64, num_layers=2, num_heads=4, mlp_width=128)
        >>> params = init_params(jax.random.key(0), model)
        >>> arguments = decoding_options(block=16)
        >>> caches = arguments["cache_init"](model, 1, 64)
        >>> out = forward(params, jnp.array([[7]]), model, cache=caches, attention=arguments["attention"])
        >>> out.logits.shape, out.info[0].kept.shape
        ((1, 1, 256), (1, 4, 4))
    """

    config: FFDConfig

    def __call__(self, inputs: AttentionInputs) -> tuple[Array, FFDStats | None]:
        """Attention output, and what was read."""
        output, stats = self._attend(inputs)
        if "gate" in inputs.params:  # one factor for each head, as models trained with SSA have
            gate = jax.nn.sigmoid(dense_linear(inputs.hidden, inputs.params["gate"], "attention.gate"))
            output = output * gate[..., None].astype(output.dtype)
        return output, stats

    def _attend(self, inputs: AttentionInputs) -> tuple[Array, FFDStats | None]:
        cache = inputs.cache
        if cache is None:
            return dense_attention(inputs)
        if not isinstance(cache, QuantizedKV):
            raise ValueError(
                "FFD reads the caches of effml.attend.ffd.init_cache (cache_init of decoding_options), not "
                f"{type(cache).__name__}"
            )
        if inputs.query.shape[1] == 1:
            return self._read(inputs, "each")
        alone = inputs._replace(cache=None)
        choose = inputs.query.shape[1] <= self.config.most_queries
        output = jax.lax.cond(
            jnp.any(cache.length > 0),
            lambda: self._read(inputs, "each" if choose else None)[0],
            lambda: dense_attention(alone)[0],
        )
        return output, None

    def _read(self, inputs: AttentionInputs, queries: str | None) -> tuple[Array, FFDStats]:
        config = self.config
        delta: Any = math.inf if queries is None else config.delta
        if config.dense_layers and queries is not None:
            dense = jnp.any(jnp.asarray(inputs.layer) == jnp.array(config.dense_layers))
            delta = jnp.where(dense, jnp.inf, delta)
        return ffd_attention(
            inputs.query,
            inputs.cache,
            inputs.key,
            inputs.value,
            inputs.mask,
            delta=delta,
            scale=inputs.scale,
            threshold=config.threshold if queries else "pseudo",
            queries=queries or "together",
            implementation=config.implementation,
            return_stats=True,
        )


def decoding_options(config: FFDConfig | None = None, **changes: Any) -> dict[str, Callable[..., Any]]:
    """What `effml.decode.generate`, `stream` and `stream_text` need to decode with FFD.

    Args:
        config: how to decode; None is the default.
        **changes: fields of it to change, such as `delta=7`; also `stacked=True` for scanned layers.

    Returns:
        `cache_init`, `append` and `attention`.

    Raises:
        ValueError: as `FFDConfig` does.
        TypeError: for a field that does not exist.

    Example:
        >>> sorted(decoding_options(delta=7))
        ['append', 'attention', 'cache_init']
        >>> decoding_options(delta=7) == decoding_options(delta=7)
        True
    """
    stacked = changes.pop("stacked", False)
    config = dataclasses.replace(FFDConfig() if config is None else config, **changes)
    return {"cache_init": FFDCaches(config, stacked), "append": append, "attention": FFDAttention(config)}
