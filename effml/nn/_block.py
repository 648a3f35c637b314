"""One transformer block and the products, norms and sums it is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from effml.nn._config import TransformerConfig
from effml.nn.attention import AttentionInputs, apply_rope, dense_attention, rope_tables
from pallas_kernels.matvec import FEW_ROWS, matvec

__all__ = [
    "Attention",
    "BlockOutput",
    "Linear",
    "Residual",
    "Tap",
    "block",
    "decoding_linear",
    "dense_linear",
    "normalize",
    "plain_linear",
    "sum_residual",
]

Linear = Callable[[Array, Any, str], Array]
Attention = Callable[[AttentionInputs], tuple[Array, Any]]
Residual = Callable[[Array, Array, str, Any], Array]
Tap = Callable[[str, Any, Array], Any]


class BlockOutput(NamedTuple):
    """What a block produces besides the residual stream.

    Attributes:
        keys: [batch, length, kv_heads, head], rotated: the new rows of the cache.
        values: [batch, length, kv_heads, head].
        info: what the attention function reported.
        taps: what `tap` returned, by name.
    """

    keys: Array
    values: Array
    info: Any
    taps: dict[str, Any]


def plain_linear(x: Array, params: Mapping[str, Any], name: str) -> Array:
    """`x @ kernel + bias`, accumulated in float32, with JAX's own derivatives in both modes.

    Args:
        x: [..., in].
        params: `{"kernel": [in, out]}` and perhaps `"bias": [out]`.
        name: which product this is; `"head"` keeps its float32 result, so that logits are float32.

    Returns:
        [..., out] in the dtype of `x`.

    Example:
        >>> plain_linear(jnp.ones((1, 2)), {"kernel": jnp.ones((2, 3))}, "mlp.up").tolist()
        [[2.0, 2.0, 2.0]]
    """
    y = jnp.matmul(x, params["kernel"].astype(x.dtype), preferred_element_type=jnp.float32)
    return _finish(y, x, params, name)


def dense_linear(x: Array, params: Mapping[str, Any], name: str) -> Array:
    """`plain_linear` with a gradient that XLA's CPU backend runs faster: the default of every `linear`.

    Float32 is reverse mode only; for `jax.jvp` pass `linear=plain_linear`. Narrower types take JAX's own gradient:
    XLA's CPU backend (JAX 0.10) has no bfloat16 product for the layouts of the fast one.

    Args:
        x: [..., in].
        params: `{"kernel": [in, out]}` and perhaps `"bias": [out]`.
        name: which product this is; `"head"` keeps its float32 result, so that logits are float32.

    Returns:
        [..., out] in the dtype of `x`.

    Example:
        >>> dense_linear(jnp.ones((1, 2)), {"kernel": jnp.ones((2, 3))}, "mlp.up").tolist()
        [[2.0, 2.0, 2.0]]
    """
    if x.dtype != jnp.float32:
        return plain_linear(x, params, name)
    return _finish(_product(x, params["kernel"].astype(x.dtype)), x, params, name)


def decoding_linear(x: Array, params: Mapping[str, Any], name: str) -> Array:
    """`dense_linear` that reads the kernel with native code where rows are few: the `linear` of writing tokens.

    Where `pallas_kernels.matvec` has no native form (another platform, no compiler, many rows) it is `dense_linear`.

    Args:
        x: [..., in].
        params: `{"kernel": [in, out]}` and perhaps `"bias": [out]`; a tied head brings its `"table": [out, in]`, which
            is then read as it lies.
        name: which product this is; `"head"` keeps its float32 result, so that logits are float32.

    Returns:
        [..., out] in the dtype of `x`.

    Example:
        >>> decoding_linear(jnp.ones((1, 2)), {"kernel": jnp.ones((2, 3))}, "mlp.up").tolist()
        [[2.0, 2.0, 2.0]]
    """
    transposed = "table" in params
    kernel = params["table" if transposed else "kernel"]
    if math.prod(x.shape[:-1]) > FEW_ROWS or kernel.dtype != x.dtype:
        return dense_linear(x, params, name)
    return _finish(matvec(x, kernel, transposed=transposed), x, params, name)


def _finish(y: Array, x: Array, params: Mapping[str, Any], name: str) -> Array:
    if "bias" in params:
        y = y + params["bias"].astype(jnp.float32)
    return y if name == "head" else y.astype(x.dtype)


@jax.custom_vjp
def _product(x: Array, kernel: Array) -> Array:
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def _product_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, kernel), (x, kernel)


def _product_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = saved
    # Without the barrier XLA's CPU backend fuses the elementwise backward pass before this point into a copy
    # of dy that is transposed for the kernel's gradient, and reads with strides all the way.
    dy = jax.lax.optimization_barrier(dy.astype(x.dtype))
    dx = jnp.matmul(dy, kernel.T, preferred_element_type=jnp.float32)
    rows = tuple(range(x.ndim - 1))
    inputs, outputs = kernel.shape
    # Likewise JAX's own rule always transposes dy; the narrower of the two is the cheaper one.
    first, second = (x, dy) if inputs <= outputs else (dy, x)
    d_kernel = jax.lax.dot_general(
        first, second, ((rows, rows), ((), ())), preferred_element_type=jnp.float32
    )
    d_kernel = d_kernel if inputs <= outputs else d_kernel.T
    return dx.astype(x.dtype), d_kernel.astype(kernel.dtype)


_product.defvjp(_product_forward, _product_backward)


def sum_residual(x: Array, update: Array, name: str, layer_params: Any) -> Array:
    """`x + update`: the default of every `residual` argument.

    Example:
        >>> float(sum_residual(jnp.array(1.0), jnp.array(2.0), "mlp", {}))
        3.0
    """
    del name, layer_params
    return x + update


def block(
    layer_params: Mapping[str, Any],
    x: Float[Array, "batch length width"],
    *,
    config: TransformerConfig,
    positions: Int[Array, "batch length"],
    mask: Bool[Array, "#batch length length"] | None = None,
    cache: Any = None,
    layer: Any = 0,
    linear: Linear = dense_linear,
    attention: Attention = dense_attention,
    residual: Residual = sum_residual,
    tap: Tap | None = None,
    rotary: tuple[Array, Array] | None = None,
) -> tuple[Float[Array, "batch length width"], BlockOutput]:
    """One block, alone.

    Args:
        layer_params: one layer's parameters, joined (`join_projections`) or not.
        x: residual stream.
        config: the model's configuration.
        positions: of the rows.
        mask: which new rows (last axis) each new row sees; None is causal.
        cache: this layer's cache, or None.
        layer: index, handed to `attention` and `tap`.
        linear: computes every product.
        attention: computes the attention.
        residual: joins the stream and an update; the names are `"attention"` and `"mlp"`.
        tap: is shown `"residual"` (x itself), `"attention.input"` (what query, key and value read),
            `"attention.output.input"`, `"mlp.input"` (what gate and up read) and `"mlp.down.input"`.
        rotary: `rope_tables(positions, config)` when the caller has them already.

    Returns:
        The new residual stream and a `BlockOutput`.

    Example:
        >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
        >>> from effml.nn.transformer import init_params
        >>> layer_params = init_params(jax.random.key(0), config)["layers"][0]
        >>> x, out = block(layer_params, jnp.ones((1, 3, 32)), config=config, positions=jnp.arange(3)[None])
        >>> x.shape, out.keys.shape
        ((1, 3, 32), (1, 3, 4, 8))
    """
    taps: dict[str, Any] = {}

    def show(name: str, value: Array) -> None:
        if tap is not None and (seen := tap(name, layer, value)) is not None:
            taps[name] = seen

    batch, length, _ = x.shape
    weights = layer_params["attention"]
    show("residual", x)
    hidden = normalize(x, layer_params["attention_norm"], config.norm, config.norm_epsilon)
    show("attention.input", hidden)
    if "query_key_value" in weights:
        joined = linear(hidden, weights["query_key_value"], "attention.query_key_value")
        queries = config.num_heads * config.head_dim
        query, key, value = jnp.split(joined, [queries, queries + config.kv_heads * config.head_dim], axis=-1)
    else:
        query = linear(hidden, weights["query"], "attention.query")
        key = linear(hidden, weights["key"], "attention.key")
        value = linear(hidden, weights["value"], "attention.value")
    query = query.reshape(batch, length, config.num_heads, config.head_dim)
    key = key.reshape(batch, length, config.kv_heads, config.head_dim)
    value = value.reshape(batch, length, config.kv_heads, config.head_dim)
    if config.qk_norm:
        query = normalize(query, weights["query_norm"], "rms", config.norm_epsilon)
        key = normalize(key, weights["key_norm"], "rms", config.norm_epsilon)
    if config.positions == "rope":
        cosine, sine = rope_tables(positions, config) if rotary is None else rotary
        query = apply_rope(query, cosine, sine, layout=config.rope_layout)
        key = apply_rope(key, cosine, sine, layout=config.rope_layout)
    mixed, info = attention(
        AttentionInputs(query, key, value, hidden, weights, positions, mask, cache, config.score_scale, layer)
    )
    mixed = mixed.reshape(batch, length, -1)
    show("attention.output.input", mixed)
    x = residual(x, linear(mixed, weights["output"], "attention.output"), "attention", layer_params)

    weights = layer_params["mlp"]
    hidden = normalize(x, layer_params["mlp_norm"], config.norm, config.norm_epsilon)
    show("mlp.input", hidden)
    if "gate_up" in weights:
        gate, up = jnp.split(linear(hidden, weights["gate_up"], "mlp.gate_up"), 2, axis=-1)
        up = jax.nn.silu(gate) * up
    else:
        up = linear(hidden, weights["up"], "mlp.up")
        if config.mlp == "swiglu":
            up = jax.nn.silu(linear(hidden, weights["gate"], "mlp.gate")) * up
        else:
            up = jax.nn.gelu(up, approximate=True)
    show("mlp.down.input", up)
    x = residual(x, linear(up, weights["down"], "mlp.down"), "mlp", layer_params)
    return x, BlockOutput(key, value, info, taps)


def normalize(x: Array, params: Mapping[str, Array], kind: str, epsilon: float) -> Array:
    """RMS or layer normalisation over the last axis, computed in float32, in the dtype of `x`.

    Args:
        x: [..., size].
        params: `"scale"` and, for a layer norm, `"bias"`, each [size].
        kind: `"rms"` or `"layer"`.
        epsilon: added to the mean square or the variance.

    Returns:
        [..., size].

    Example:
        >>> normalize(jnp.array([3.0, 3.0]), {"scale": jnp.ones(2)}, "rms", 0.0).tolist()
        [1.0, 1.0]
    """
    wide = x.astype(jnp.float32)
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    wide = wide * params["scale"].astype(jnp.float32)
    if "bias" in params:
        wide = wide + params["bias"].astype(jnp.float32)
    return wide.astype(x.dtype)
