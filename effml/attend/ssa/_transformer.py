"""SSA inside the transformer: its attention seam, parameters with gates, forward pass, loss and cache options."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from effml._validate import one_of
from effml.attend.ssa._attention import (
    SSAInfo,
    Streams,
    dropped_mass,
    is_sparse,
    ssa_attention,
)
from effml.attend.ssa._cache import SSACache, append, attend, init_cache
from effml.attend.ssa._config import MODES, SSAConfig, SSATransformerConfig, with_budget
from effml.attend.ssa._select import select_blocks
from effml.nn import cache as dense
from effml.nn import transformer
from effml.nn.transformer import AttentionInputs, dense_linear

__all__ = [
    "attention",
    "decoding_options",
    "forward",
    "init_params",
    "next_token_loss",
    "sample_mode",
    "ssa_loss",
    "training_loss",
]


def attention(
    inputs: AttentionInputs,
    *,
    config: SSAConfig,
    mode: Any = "full",
    train: bool = False,
    audit: bool = False,
    segment_ids: Any = None,
    linear: transformer.Linear = dense_linear,
) -> tuple[Array, SSAInfo]:
    """SSA as the `attention` seam of `effml.nn.transformer.forward`.

    Args:
        inputs: of the attention; with a gated config their params hold `"gate": {"kernel": [width, heads]}`.
        config: blocks, budget and alignment.
        mode: "full", "sparse", or a bool scalar.
        train: whether both streams are computed and compared.
        audit: whether the dropped mass is reported (reads every key; not with a cache).
        segment_ids: int[batch, length] of packed sequences; not with a cache.
        linear: computes the gate's product.

    Returns:
        Output of the mode's stream, and `SSAInfo`.

    Raises:
        ValueError: for a mask in sparse mode or training, a sparse mode over a dense cache, or training with a cache.

    Example:
        >>> rows = jnp.ones((1, 16, 2, 4))
        >>> positions = jnp.arange(16)[None]
        >>> inputs = AttentionInputs(rows, rows, rows, rows, {}, positions, None, None, 0.5, 0)
        >>> config = SSAConfig(block_size=8, num_blocks=1, gated=False)
        >>> attention(inputs, config=config, mode="sparse")[0].shape
        (1, 16, 2, 4)
    """
    query, key, value = inputs.query, inputs.key, inputs.value
    gate = None
    if config.gated:
        gate = jax.nn.sigmoid(linear(inputs.hidden, inputs.params["gate"], "attention.gate"))
    if inputs.cache is not None:
        if train or audit or segment_ids is not None:
            raise ValueError("train, audit and segment_ids do not go with a cache")
        output = _cached(inputs, config, is_sparse(mode))
        info = SSAInfo(jnp.zeros((), jnp.float32), keep_ratio=_kept(inputs, config, mode))
        return (output if gate is None else output * gate[..., None].astype(output.dtype)), info
    if inputs.mask is not None:
        raise ValueError(
            "mask must be None: without a cache SSA is causal; give packed sequences as segment_ids"
        )
    output, align, streams = ssa_attention(
        query,
        key,
        value,
        gate,
        config,
        mode=mode,
        train=train,
        scale=inputs.scale,
        segment_ids=segment_ids,
    )
    lost = _lost(inputs, config, streams, segment_ids) if audit else None
    return output, SSAInfo(align.astype(jnp.float32), lost)


def _kept(inputs: AttentionInputs, config: SSAConfig, mode: Any) -> Array | None:
    cache = inputs.cache
    if not isinstance(cache, SSACache) or inputs.query.shape[1] != 1:
        return None
    blocks = cache.length // cache.block_size + 1  # with the one that the new row lies in
    return jnp.where(is_sparse(mode), jnp.minimum(config.num_blocks, blocks) / blocks, 1.0)


def _lost(inputs: AttentionInputs, config: SSAConfig, streams: Streams, segment_ids: Any) -> Array:
    query, key = jax.lax.stop_gradient((inputs.query, inputs.key))
    options: dict[str, Any] = {
        "block_size": config.block_size,
        "scale": inputs.scale,
        "segment_ids": segment_ids,
    }
    indices = streams.indices
    if indices is None:
        blocks = min(config.num_blocks, query.shape[1])
        indices = select_blocks(query, key, num_blocks=blocks, **options).indices
    return dropped_mass(query, key, indices, **options).mean().astype(jnp.float32)


def _cached(inputs: AttentionInputs, config: SSAConfig, sparse: bool | Array) -> Array:
    if not isinstance(sparse, bool):
        raise ValueError("mode must be static ('full' or 'sparse') with a cache")
    cache = inputs.cache
    new = (inputs.key, inputs.value, inputs.mask, inputs.positions)
    if not sparse:
        rows = cache.rows if isinstance(cache, SSACache) else cache
        if not isinstance(rows, dense.DenseCache):
            raise ValueError(f"mode='full' needs an SSACache or a DenseCache, not {type(cache).__name__}")
        return dense.attend(inputs.query, rows, *new, scale=inputs.scale)
    if not isinstance(cache, SSACache):
        raise ValueError(
            "mode='sparse' needs the caches of effml.attend.ssa.init_cache, which keep pooled keys, not "
            f"{type(cache).__name__}"
        )
    if cache.block_size != config.block_size:
        raise ValueError(
            f"block_size={config.block_size!r} differs from that of the cache, {cache.block_size}; make another cache"
        )
    return attend(inputs.query, cache, *new, num_blocks=config.num_blocks, scale=inputs.scale)


def init_params(key: PRNGKeyArray, config: SSATransformerConfig, *, scanned: bool = False) -> dict[str, Any]:
    """Fresh parameters: those of the transformer with the same key, and in every layer the gate's kernel.

    Args:
        key: random key.
        config: sizes and variants.
        scanned: False gives a list of layers, True one dict with a leading layer axis.

    Returns:
        As `effml.nn.transformer.init_params`; gated layers have `["attention"]["gate"]["kernel"]` [width, heads].

    Example:
        >>> config = SSATransformerConfig(transformer.TransformerConfig(256, 32, 2, 4, 64))
        >>> init_params(jax.random.key(0), config)["layers"][1]["attention"]["gate"]["kernel"].shape
        (32, 4)
    """
    model = config.model
    params = transformer.init_params(key, model, scanned=True)
    if config.attention.gated:
        shape = (model.num_layers, model.width, model.num_heads)
        kernel = model.initializer_std * jax.random.normal(jax.random.fold_in(key, 1), shape, jnp.float32)
        layers = params["layers"]
        gate = {"kernel": kernel.astype(model.param_dtype)}
        params = {**params, "layers": {**layers, "attention": {**layers["attention"], "gate": gate}}}
    return params if scanned else transformer.unstack_layers(params)


def forward(
    params: Mapping[str, Any],
    tokens: Int[Array | np.ndarray, "batch length"] | None,
    config: SSATransformerConfig,
    *,
    mode: Any = "full",
    num_blocks: int | None = None,
    train: bool = False,
    audit: bool = False,
    segment_ids: Any = None,
    **kwargs: Any,
) -> transformer.ForwardOutput:
    """Runs an SSA transformer, full or block-sparse: `effml.nn.transformer.forward` with its attention.

    Args:
        params: from `init_params` or `effml.models.load`.
        tokens: int[batch, length], or None with `embeddings`.
        config: static under `jax.jit`.
        mode: "full", "sparse", or a bool scalar (True is sparse), which may be traced without a cache.
        num_blocks: another budget than the config's.
        train: compute both streams and report how far apart they are.
        audit: report the dropped mass of every layer.
        segment_ids: int[batch, length] of packed sequences; give their `positions` as well.
        **kwargs: as for `effml.nn.transformer.forward`; `rematerialize=keep_indices` where memory is short.

    Returns:
        A `ForwardOutput` whose `info` is an `SSAInfo` per layer.

    Raises:
        ValueError: as `attention` and `effml.nn.transformer.forward` do.

    Example:
        >>> config = SSATransformerConfig(transformer.TransformerConfig(256, 32, 2, 4, 64), SSAConfig(8, 2))
        >>> params = init_params(jax.random.key(0), config)
        >>> forward(params, jnp.zeros((1, 24), int), config, mode="sparse").logits.shape
        (1, 24, 256)
    """
    kwargs.setdefault(
        "attention",
        functools.partial(
            attention,
            config=with_budget(config.attention, num_blocks=num_blocks),
            mode=mode,
            train=train,
            audit=audit,
            segment_ids=segment_ids,
            linear=kwargs.get("linear", dense_linear),
        ),
    )
    return transformer.forward(params, tokens, config.model, **kwargs)


def sample_mode(key: PRNGKeyArray, config: SSAConfig) -> Bool[Array, ""]:
    """Which stream's loss this step takes, True for the sparse one: one draw for all layers, rows and devices.

    Args:
        key: of the step, the same on every device.
        config: its `sparse_prob` is the probability of True.

    Example:
        >>> bool(sample_mode(jax.random.key(0), SSAConfig(sparse_prob=1.0)))
        True
    """
    return jax.random.bernoulli(key, config.sparse_prob)


def ssa_loss(cross_entropy: Float[Array, ""], infos: Any, config: SSAConfig) -> Float[Array, ""]:
    r"""The loss of a step, $\mathrm{CE} + \alpha\,\mathrm{mean}_\ell\,\mathrm{align}_\ell$.

    Args:
        cross_entropy: mean over targets, of the stream that was drawn.
        infos: `SSAInfo` per layer: a list, or one with a leading layer axis.
        config: its `align_weight` is alpha.

    Example:
        >>> infos = [SSAInfo(jnp.array(0.1)), SSAInfo(jnp.array(0.3))]
        >>> round(float(ssa_loss(jnp.array(1.0), infos, SSAConfig())), 6)
        3.0
    """
    return cross_entropy + config.align_weight * _mean_align(infos)


def _mean_align(infos: Any) -> Array:
    if isinstance(infos, SSAInfo):
        return infos.align.mean()
    return jnp.stack([info.align for info in infos]).mean()


def training_loss(
    params: Mapping[str, Any],
    batch: Mapping[str, Any],
    config: SSATransformerConfig,
    *,
    step_key: PRNGKeyArray,
    **kwargs: Any,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss of one training step, for `effml.train.make_step`: cross entropy of one stream and the alignment.

    Args:
        params: the model's parameters.
        batch: `"tokens"`: int[batch, length + 1], and perhaps `"weights"`: float[batch, length].
        config: static under `jax.jit`.
        step_key: of the step, the same for all parts of an accumulated batch.
        **kwargs: as for `forward`.

    Returns:
        The loss, and `tokens`, `correct`, `cross_entropy`, `align` (mean over layers) and `sparse` (which stream).

    Example:
        >>> config = SSATransformerConfig(transformer.TransformerConfig(256, 32, 2, 4, 64), SSAConfig(8, 1))
        >>> params = init_params(jax.random.key(0), config)
        >>> loss, metrics = training_loss(
        ...     params, {"tokens": jnp.ones((1, 25), int)}, config, step_key=jax.random.key(1)
        ... )
        >>> sorted(metrics), loss.shape
        (['align', 'correct', 'cross_entropy', 'sparse', 'tokens'], ())
    """
    mode = sample_mode(step_key, config.attention)
    tokens = jnp.asarray(batch["tokens"])
    output = forward(params, tokens[:, :-1], config, mode=mode, train=True, **kwargs)
    loss, metrics = transformer.weighted_loss(output.logits, tokens[:, 1:], batch.get("weights"))
    metrics |= {"cross_entropy": loss, "align": _mean_align(output.info), "sparse": mode.astype(jnp.float32)}
    return ssa_loss(loss, output.info, config.attention), metrics


def next_token_loss(
    params: Mapping[str, Any], batch: Mapping[str, Any], config: SSATransformerConfig, **kwargs: Any
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """`effml.nn.transformer.next_token_loss` of one stream alone: what a model is measured by.

    Args:
        params: the model's parameters.
        batch: as for `training_loss`.
        config: static under `jax.jit`.
        **kwargs: as for `forward`, such as `mode="sparse"`.

    Returns:
        Mean nats per token, and `tokens` and `correct`.

    Example:
        >>> config = SSATransformerConfig(transformer.TransformerConfig(256, 32, 2, 4, 64), SSAConfig(8, 1))
        >>> params = init_params(jax.random.key(0), config)
        >>> next_token_loss(params, {"tokens": jnp.ones((1, 25), int)}, config, mode="sparse")[0].shape
        ()
    """
    tokens = jnp.asarray(batch["tokens"])
    logits = forward(params, tokens[:, :-1], config, **kwargs).logits
    return transformer.weighted_loss(logits, tokens[:, 1:], batch.get("weights"))


@functools.lru_cache(maxsize=32)
def _options(config: SSATransformerConfig, mode: str) -> dict[str, Any]:
    return {
        "attention": functools.partial(attention, config=config.attention, mode=mode),
        "cache_init": functools.partial(init_cache, block_size=config.attention.block_size),
        "append": append,
    }


def decoding_options(
    config: SSATransformerConfig, *, mode: str = "sparse", num_blocks: int | None = None
) -> dict[str, Any]:
    """The arguments that make `effml.decode.generate` and `stream` decode with SSA caches.

    Equal calls give the same objects, so that they share compiled programs.

    Args:
        config: of the model.
        mode: "sparse" or "full".
        num_blocks: another budget than the config's.

    Returns:
        `attention`, `cache_init` and `append`.

    Raises:
        ValueError: for an unknown mode or a budget below 1.

    Example:
        >>> config = SSATransformerConfig(transformer.TransformerConfig(256, 32, 2, 4, 64), SSAConfig(8, 4))
        >>> options = decoding_options(config, num_blocks=2)
        >>> options["cache_init"](config.model, 1, 20)[0].capacity
        24
    """
    one_of("mode", mode, MODES)
    changed = dataclasses.replace(config, attention=with_budget(config.attention, num_blocks=num_blocks))
    return dict(_options(changed, mode))
