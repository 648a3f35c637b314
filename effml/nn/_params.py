"""Parameters of the transformer: making them, counting them, stacking and unstacking layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from effml.nn._config import TransformerConfig

__all__ = [
    "init_params",
    "is_scanned",
    "join_projections",
    "param_count",
    "stack_layers",
    "unstack_layers",
]


def init_params(key: PRNGKeyArray, config: TransformerConfig, *, scanned: bool = False) -> dict[str, Any]:
    r"""Fresh parameters.

    Kernels and tables are normal with standard deviation `initializer_std`; the two kernels that write into
    the residual stream are smaller by $1/\sqrt{2\,\text{num\_layers}}$ (as in GPT-2), scales are 1, biases 0.

    Args:
        key: random key.
        config: sizes and variants.
        scanned: False gives a list of layers, True one dict with a leading layer axis.

    Returns:
        A nested dict of arrays in `param_dtype`; kernels are [in, out].

    Example:
        >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
        >>> params = init_params(jax.random.key(0), config)
        >>> params["layers"][1]["attention"]["query"]["kernel"].shape
        (32, 32)
    """
    return _init(key, config, scanned)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _init(key: Array, config: TransformerConfig, scanned: bool) -> dict[str, Any]:
    dtype = jnp.dtype(config.param_dtype)
    std = config.initializer_std
    width, queries, keys = config.width, config.num_heads * config.head_dim, config.kv_heads * config.head_dim

    def normal(key: Array, shape: tuple[int, ...], std: float) -> Array:
        return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    def linear(key: Array, inputs: int, outputs: int, bias: bool, std: float) -> dict[str, Array]:
        kernel = {"kernel": normal(key, (inputs, outputs), std)}
        return {**kernel, "bias": jnp.zeros(outputs, dtype)} if bias else kernel

    def norm(size: int, kind: str = config.norm) -> dict[str, Array]:
        scale = {"scale": jnp.ones(size, dtype)}
        return {**scale, "bias": jnp.zeros(size, dtype)} if kind == "layer" else scale

    def layer(key: Array) -> dict[str, Any]:
        small = std / math.sqrt(2 * config.num_layers)
        sizes = {
            "query": (width, queries, config.qkv_bias, std),
            "key": (width, keys, config.qkv_bias, std),
            "value": (width, keys, config.qkv_bias, std),
            "output": (queries, width, config.attention_output_bias, small),
            "gate": (width, config.mlp_width, config.mlp_bias, std),
            "up": (width, config.mlp_width, config.mlp_bias, std),
            "down": (config.mlp_width, width, config.mlp_bias, small),
        }
        if config.mlp == "gelu":
            del sizes["gate"]
        made = {
            name: linear(k, *size)
            for (name, size), k in zip(sizes.items(), jax.random.split(key, len(sizes)))
        }
        attention = {name: made.pop(name) for name in ("query", "key", "value", "output")}
        if config.qk_norm:
            attention |= {
                "query_norm": norm(config.head_dim, "rms"),
                "key_norm": norm(config.head_dim, "rms"),
            }
        return {"attention_norm": norm(width), "attention": attention, "mlp_norm": norm(width), "mlp": made}

    table_key, position_key, head_key, layer_key = jax.random.split(key, 4)
    params: dict[str, Any] = {"embedding": {"table": normal(table_key, (config.vocab_size, width), std)}}
    if config.positions == "learned":
        params["positions"] = {"table": normal(position_key, (config.max_length, width), std)}
    layer_keys = jax.random.split(layer_key, config.num_layers)
    params["layers"] = jax.vmap(layer)(layer_keys)  # also when unrolled: one layer's program, not num_layers
    params["final_norm"] = norm(width)
    if not config.tied_head:
        params["head"] = linear(head_key, width, config.vocab_size, config.head_bias, std)
    elif config.head_bias:
        params["head"] = {"bias": jnp.zeros(config.vocab_size, dtype)}
    return params if scanned else unstack_layers(params)


def param_count(config: TransformerConfig) -> int:
    """Number of parameters that `init_params` makes, without making them.

    Example:
        >>> param_count(TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64))
        28832
    """
    shapes = jax.eval_shape(functools.partial(init_params, config=config), jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def stack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters with scanned layers, from unrolled ones (or unchanged).

    Raises:
        ValueError: if the layers differ in structure or shape, as quantised ones may.

    Example:
        >>> layers = [{"w": jnp.zeros(3)}, {"w": jnp.ones(3)}]
        >>> stack_layers({"layers": layers})["layers"]["w"].shape
        (2, 3)
    """
    layers = params["layers"]
    if is_scanned(params):
        return dict(params)
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), layer) for layer in layers]
    for index, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                "layers must be alike to be stacked; in structure, shape or dtype "
                f"layer {index} differs from layer 0"
            )
    return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def unstack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters with unrolled layers, from scanned ones (or unchanged).

    Example:
        >>> len(unstack_layers({"layers": {"w": jnp.zeros((2, 3))}})["layers"])
        2
    """
    layers = params["layers"]
    if not is_scanned(params):
        return dict(params)
    depth = jax.tree.leaves(layers)[0].shape[0]
    return {**params, "layers": [jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(depth)]}


def join_projections(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters with fewer, wider kernels, for decoding: the same products with less waiting between them.

    In every layer query, key and value become one kernel `query_key_value` [width, (heads + 2 kv_heads) head], and
    gate and up one kernel `gate_up` [width, 2 mlp_width]; biases likewise. `forward` takes either form; the `linear`
    argument then sees the names "attention.query_key_value" and "mlp.gate_up".

    Args:
        params: parameters of `effml.nn.transformer`, scanned or not; joined ones come back unchanged.

    Returns:
        New parameters; what is not joined is shared with the old ones.

    Raises:
        ValueError: if a projection is not a plain `{"kernel"[, "bias"]}`, or only some of them have a bias.

    Example:
        >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
        >>> joined = join_projections(init_params(jax.random.key(0), config))
        >>> joined["layers"][0]["attention"]["query_key_value"]["kernel"].shape
        (32, 96)
    """

    def join(block: Mapping[str, Any], names: tuple[str, ...], joined: str) -> dict[str, Any]:
        if joined in block or not all(name in block for name in names):
            return dict(block)
        kinds = {tuple(sorted(block[name])) for name in names}
        if len(kinds) > 1 or not kinds <= {("kernel",), ("bias", "kernel")}:
            raise ValueError(
                f"projections {', '.join(names)} hold {sorted(kinds)}; only plain kernels with or without bias join"
            )
        (kind,) = kinds
        whole = {part: jnp.concatenate([block[name][part] for name in names], axis=-1) for part in kind}
        return {joined: whole, **{name: block[name] for name in block if name not in names}}

    def layer(params: Mapping[str, Any]) -> dict[str, Any]:
        attention = join(params["attention"], ("query", "key", "value"), "query_key_value")
        return {**params, "attention": attention, "mlp": join(params["mlp"], ("gate", "up"), "gate_up")}

    layers = params["layers"]
    return {**params, "layers": layer(layers) if is_scanned(params) else [layer(one) for one in layers]}


def is_scanned(params: Mapping[str, Any]) -> bool:
    """Whether the layers are one dict with a leading layer axis, rather than a list of dicts.

    Example:
        >>> is_scanned({"layers": [{}, {}]})
        False
    """
    return isinstance(params["layers"], Mapping)
