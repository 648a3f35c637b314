r"""A decoder-only language model as pure functions over a plain dict of arrays.

One block, with x the residual stream [batch, length, width]:

$$x \leftarrow x + \mathrm{attention}(n(x))\,W_o, \qquad
  x \leftarrow x + (\mathrm{silu}(n(x)\,W_\mathrm{gate}) \odot n(x)\,W_\mathrm{up})\,W_\mathrm{down}$$

where n is the norm.

`TransformerConfig` names the variants (Llama, Qwen2, Qwen3, GPT-2 and mixtures of them). Four seams change
what a block does without a second model: `linear` computes every product, `attention` replaces the attention,
`residual` every skip connection, and `tap` observes values on their way.

    >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
    >>> params = init_params(jax.random.key(0), config)
    >>> tokens = jnp.array([[1, 2, 3]])
    >>> forward(params, tokens, config).logits.shape
    (1, 3, 256)

Layers come as a list of dicts (unrolled: quicker to run one token at a time, and layers may differ) or as one
dict whose leaves have a leading layer axis (scanned: compile time does not grow with depth).

The default products and the default causal attention have gradients of their own, written for speed, and
therefore no forward mode; `jax.jvp` works with `linear=plain_linear` and an explicit `mask`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from effml._validate import one_of
from effml.nn import cache as cache_module
from effml.nn._block import (
    Attention,
    BlockOutput,
    Linear,
    Residual,
    Tap,
    block,
    decoding_linear,
    dense_linear,
    normalize,
    plain_linear,
    sum_residual,
)
from effml.nn._config import RopeScaling, TransformerConfig
from effml.nn._params import (
    init_params,
    is_scanned,
    join_projections,
    param_count,
    stack_layers,
    unstack_layers,
)
from effml.nn.attention import AttentionInputs, dense_attention, rope_tables

__all__ = [
    "AttentionInputs",
    "BlockOutput",
    "ForwardOutput",
    "RopeScaling",
    "TransformerConfig",
    "block",
    "decoding_linear",
    "dense_attention",
    "dense_linear",
    "embed",
    "forward",
    "forward_cached",
    "init_params",
    "join_projections",
    "next_token_loss",
    "param_count",
    "plain_linear",
    "stack_layers",
    "sum_residual",
    "unembed",
    "unstack_layers",
    "weighted_loss",
]


class ForwardOutput(NamedTuple):
    """Result of a forward pass. "Per layer" is a list (unrolled) or a leading layer axis (scanned).

    Attributes:
        logits: float32[batch, rows, vocab].
        hidden: [batch, length, width], after the final norm.
        keys: per layer, the rows this call would add to the cache; None if no cache was given.
        values: likewise.
        info: per layer, what the attention function reported.
        taps: per layer, what `tap` returned, by name.
    """

    logits: Array
    hidden: Array
    keys: Any
    values: Any
    info: Any
    taps: Any


def embed(
    params: Mapping[str, Any], tokens: Int[Array | np.ndarray, "batch length"], config: TransformerConfig
) -> Float[Array, "batch length width"]:
    """Scaled token embeddings in the compute dtype; learned positions are added by `forward`.

    Args:
        params: the model's parameters.
        tokens: ids; one outside the vocabulary gives NaN.
        config: the model's configuration.

    Returns:
        What `forward` takes as `embeddings`.

    Example:
        >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
        >>> embed(init_params(jax.random.key(0), config), jnp.array([[1, 2]]), config).shape
        (1, 2, 32)
    """
    rows = jnp.take(params["embedding"]["table"], jnp.asarray(tokens), axis=0, mode="fill")
    rows = rows.astype(config.compute_dtype)
    return rows if config.embedding_scale == 1.0 else rows * config.embedding_scale


def unembed(
    params: Mapping[str, Any],
    hidden: Float[Array, "batch length width"],
    config: TransformerConfig,
    *,
    linear: Linear = dense_linear,
) -> Float[Array, "batch length vocab"]:
    """Float32 logits of hidden states that have gone through the final norm.

    Example:
        >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
        >>> unembed(init_params(jax.random.key(0), config), jnp.ones((1, 2, 32)), config).shape
        (1, 2, 256)
    """
    head = dict(params.get("head", {}))
    if config.tied_head:
        head["table"] = params["embedding"]["table"]
        head["kernel"] = head["table"].T
    logits = linear(hidden, head, "head").astype(jnp.float32)
    return logits if config.logit_scale == 1.0 else logits * config.logit_scale


def forward(
    params: Mapping[str, Any],
    tokens: Int[Array | np.ndarray, "batch length"] | None,
    config: TransformerConfig,
    *,
    embeddings: Float[Array, "batch length width"] | None = None,
    positions: Int[Array, "batch length"] | None = None,
    mask: Bool[Array, "#batch length length"] | None = None,
    cache: Any = None,
    linear: Linear = dense_linear,
    attention: Attention = dense_attention,
    residual: Residual = sum_residual,
    tap: Tap | None = None,
    rematerialize: bool | Callable[..., Any] = False,
    logits_for: str | Int[Array, "batch rows"] = "all",
) -> ForwardOutput:
    """Runs the model on tokens or embeddings; a cache is read and never written (see `forward_cached`).

    Args:
        params: from `init_params`, `nn.hub` or a checkpoint; layers scanned or unrolled.
        tokens: ids, or None when `embeddings` are given.
        config: static under `jax.jit` (it is hashable).
        embeddings: instead of tokens, what `embed` would have made of them.
        positions: of the rows; None counts from the committed rows of each sequence (or from 0).
        mask: which new rows (last axis) each new row sees, [batch, length, length]; None is causal. Committed
            rows are seen by all.
        cache: per-layer caches as `init_cache` makes them: a list for unrolled layers, stacked for scanned.
        linear: `(x, params, name) -> y` for every product; names such as `"attention.query"`, `"mlp.down"`,
            `"head"`. Whatever pytree the parameters hold for it is handed through.
        attention: `(AttentionInputs) -> (output, info)`.
        residual: `(x, update, name, layer_params) -> x`.
        tap: `(name, layer, value) -> None | pytree`; what it returns is in `.taps` (names: see `block`).
        rematerialize: recompute each block in the backward pass instead of keeping its activations; a policy of
            `jax.checkpoint_policies` says what is kept all the same.
        logits_for: `"all"`, `"last"`, or row indices per sequence.

    Returns:
        A `ForwardOutput`.

    Raises:
        ValueError: for neither or both of tokens and embeddings, sizes that do not fit the config, a cache of
            the other layout, or more rows than there are learned positions.

    Example:
        >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
        >>> params = init_params(jax.random.key(0), config)
        >>> out = forward(params, jnp.array([[1, 2, 3]]), config, tap=lambda name, layer, x: jnp.abs(x).max())
        >>> sorted(out.taps[0])
        ['attention.input', 'attention.output.input', 'mlp.down.input', 'mlp.input', 'residual']
    """
    scanned = is_scanned(params)
    _check_inputs(params, tokens, embeddings, config, cache, scanned)
    x = embed(params, tokens, config) if tokens is not None else embeddings
    x = jnp.asarray(x, config.compute_dtype)
    batch, length, _ = x.shape

    if positions is not None:
        rows = positions
    else:
        rows = jnp.arange(length, dtype=jnp.int32)[None]
        if cache is not None:
            rows = (cache.length[0] if scanned else cache[0].length)[:, None] + rows
    # Taken before broadcasting: without a cache all sequences share one table of angles.
    rotary = rope_tables(rows, config) if config.positions == "rope" else None
    if config.positions == "learned":
        x += jnp.take(params["positions"]["table"], rows, axis=0, mode="clip").astype(x.dtype)
    rows = jnp.broadcast_to(rows, (batch, length))

    def run(layer_params: Any, x: Array, layer_cache: Any, layer: Any) -> tuple[Array, BlockOutput]:
        return block(
            layer_params,
            x,
            config=config,
            positions=rows,
            mask=mask,
            cache=layer_cache,
            layer=layer,
            linear=linear,
            attention=attention,
            residual=residual,
            tap=tap,
            rotary=rotary,
        )

    if rematerialize:
        policy = rematerialize if callable(rematerialize) else None
        run = jax.checkpoint(run, policy=policy, static_argnums=() if scanned else (3,))
    if scanned:

        def step(x: Array, inputs: Any) -> tuple[Array, Any]:
            layer_params, layer_cache, layer = inputs
            x, output = run(layer_params, x, layer_cache, layer)
            return x, output if cache is not None else output._replace(keys=None, values=None)

        indices = jnp.arange(config.num_layers, dtype=jnp.int32)
        x, (keys, values, info, taps) = jax.lax.scan(step, x, (params["layers"], cache, indices))
    else:
        collected = []
        for layer, layer_params in enumerate(params["layers"]):
            x, output = run(layer_params, x, None if cache is None else cache[layer], layer)
            collected.append(output)
        keys, values, info, taps = (list(field) for field in zip(*collected))
        keys, values = (keys, values) if cache is not None else (None, None)

    hidden = normalize(x, params["final_norm"], config.norm, config.norm_epsilon)
    chosen = hidden
    if not isinstance(logits_for, str):
        chosen = jnp.take_along_axis(hidden, logits_for[:, :, None], axis=1)
    elif one_of("logits_for", logits_for, ("all", "last")) == "last":
        chosen = hidden[:, -1:]
    logits = unembed(params, chosen, config, linear=linear)
    return ForwardOutput(logits, hidden, keys, values, info, taps)


def forward_cached(
    params: Mapping[str, Any],
    tokens: Int[Array | np.ndarray, "batch length"] | None,
    cache: Any,
    config: TransformerConfig,
    *,
    counts: Int[Array, " batch"] | None = None,
    append: Callable[..., Any] = cache_module.append,
    **kwargs: Any,
) -> tuple[ForwardOutput, Any]:
    """`forward`, then every new row is committed to the cache: prefill and decoding with the same call.

    Args:
        params: the model's parameters.
        tokens: the next ids of each sequence.
        cache: from `init_cache`, or what the last call returned. Donate it under `jax.jit`.
        config: static under `jax.jit`.
        counts: valid tokens of each sequence when the rest is padding on the right; None means all.
        append: `(layer_cache, keys, values, None, counts) -> layer_cache`, for caches that are not dense.
        **kwargs: as for `forward`.

    Returns:
        The output and the cache with the rows in it.

    Raises:
        ValueError: as `forward` does, and if the new rows do not fit (with unrolled layers outside `jax.jit`;
            else surplus rows are dropped).

    Example:
        >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
        >>> params = init_params(jax.random.key(0), config)
        >>> cache = cache_module.init_cache(config, batch=1, max_length=8)
        >>> out, cache = forward_cached(params, jnp.array([[1, 2, 3]]), cache, config)
        >>> out, cache = forward_cached(params, jnp.array([[4]]), cache, config)
        >>> out.logits.shape, cache[0].length.tolist()
        ((1, 1, 256), [4])
    """
    output = forward(params, tokens, config, cache=cache, **kwargs)

    def commit(layer_cache: Any, keys: Array, values: Array) -> Any:
        return append(layer_cache, keys, values, None, counts)

    if is_scanned(params):
        return output, jax.vmap(commit)(cache, output.keys, output.values)
    return output, [commit(*layer) for layer in zip(cache, output.keys, output.values)]


def next_token_loss(
    params: Mapping[str, Any], batch: Mapping[str, Any], config: TransformerConfig, **kwargs: Any
) -> tuple[Float[Array, ""], dict[str, Array]]:
    r"""Mean negative log-likelihood of the next token, in nats.

    $$\frac{\sum_{b,t} w_{bt}\,[\log\textstyle\sum_v e^{z_{btv}} - z_{bt,y_{bt}}]}{\sum_{b,t} w_{bt}}$$

    Args:
        params: the model's parameters.
        batch: `"tokens"`: int[batch, length + 1], and `"weights"`: float[batch, length], the weight of each
            prediction (absent means 1).
        config: static under `jax.jit`.
        **kwargs: as for `forward`.

    Returns:
        The loss (0 when every weight is 0) and `{"tokens": total weight, "correct": weight of the predictions
        whose target has the largest logit}`.

    Example:
        >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
        >>> batch = {"tokens": jnp.array([[1, 2, 3, 4]]), "weights": jnp.ones((1, 3))}
        >>> loss, metrics = next_token_loss(init_params(jax.random.key(0), config), batch, config)
        >>> bool(abs(loss - jnp.log(256.0)) < 0.5), float(metrics["tokens"])
        (True, 3.0)
    """
    tokens = jnp.asarray(batch["tokens"])
    logits = forward(params, tokens[:, :-1], config, **kwargs).logits
    return weighted_loss(logits, tokens[:, 1:], batch.get("weights"))


def weighted_loss(
    logits: Float[Array, "batch length vocab"],
    targets: Int[Array, "batch length"],
    weights: Float[Array | np.ndarray, "batch length"] | None = None,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss and metrics of `next_token_loss` from its logits, for models that are run in another way.

    Example:
        >>> loss, metrics = weighted_loss(jnp.zeros((1, 2, 8)), jnp.zeros((1, 2), int))
        >>> bool(abs(loss - jnp.log(8.0)) < 1e-6), float(metrics["tokens"])
        (True, 2.0)
    """
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else jnp.asarray(weights, jnp.float32)
    peak = jax.lax.stop_gradient(logits.max(-1))
    normaliser = jnp.log(jnp.exp(logits - peak[..., None]).sum(-1)) + peak
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    total = weights.sum()
    loss = ((normaliser - chosen) * weights).sum() / jnp.where(total > 0, total, 1.0)
    return loss, {"tokens": total, "correct": (weights * (chosen >= peak)).sum()}


def _check_inputs(
    params: Mapping[str, Any],
    tokens: Any,
    embeddings: Any,
    config: TransformerConfig,
    cache: Any,
    scanned: bool,
) -> None:
    if (tokens is None) == (embeddings is None):
        raise ValueError("give either tokens or embeddings, not both and not neither")
    given = tokens if tokens is not None else embeddings
    if given.ndim != (2 if tokens is not None else 3) or 0 in given.shape:
        wanted = (
            "tokens of shape [batch, length]" if tokens is not None else "embeddings [batch, length, width]"
        )
        raise ValueError(f"{wanted} are needed, none of them 0, got shape {given.shape}")
    if embeddings is not None and given.shape[2] != config.width:
        raise ValueError(f"embeddings of width {given.shape[2]} do not fit a model of width {config.width}")
    layers = params["layers"]
    depth = jax.tree.leaves(layers)[0].shape[0] if scanned else len(layers)
    if depth != config.num_layers:
        raise ValueError(f"params have {depth} layers, the config says num_layers={config.num_layers}")
    if config.positions == "learned" and given.shape[1] > config.max_length:
        raise ValueError(f"{given.shape[1]} tokens are more than the {config.max_length} learned positions")
    # One stacked cache may be a NamedTuple, hence a tuple too; a plain sequence belongs to unrolled layers.
    per_layer = isinstance(cache, (list, tuple)) and not hasattr(cache, "_fields")
    if cache is not None and per_layer == scanned:
        raise ValueError(
            "scanned layers need a stacked cache and unrolled layers a list of caches: "
            f"init_cache(..., stacked={scanned})"
        )
    if cache is not None and not scanned and len(cache) != config.num_layers:
        raise ValueError(f"{len(cache)} caches were given for num_layers={config.num_layers}")
