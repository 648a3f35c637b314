"""A multilayer perceptron as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from effml._validate import one_of, positive
from effml.nn._block import dense_linear

__all__ = ["ACTIVATIONS", "init_mlp", "mlp_forward"]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "square": jnp.square,
    "identity": lambda x: x,
}


def init_mlp(
    key: PRNGKeyArray,
    widths: Sequence[int],
    *,
    bias: bool = True,
    gain: float = 2.0,
    dtype: Any = jnp.float32,
) -> dict[str, Any]:
    r"""Fresh parameters: kernels normal with variance `gain / fan_in`, biases 0.

    Args:
        key: random key.
        widths: sizes of input, hidden layers and output.
        bias: whether layers have biases.
        gain: 2 keeps the variance under relu (He et al., arXiv 1502.01852), 1 under a linear map.
        dtype: of the parameters.

    Returns:
        `{"layers": [{"kernel": [in, out], "bias": [out]}, …]}`.

    Raises:
        ValueError: for fewer than two widths, or one that is not above 0.

    Example:
        >>> params = init_mlp(jax.random.key(0), [3, 8, 2])
        >>> [layer["kernel"].shape for layer in params["layers"]]
        [(3, 8), (8, 2)]
    """
    if len(widths) < 2:
        raise ValueError(f"widths={list(widths)} must hold at least the sizes of input and output")
    for width in widths:
        positive("widths", width)
    layers = []
    for k, inputs, outputs in zip(jax.random.split(key, len(widths) - 1), widths[:-1], widths[1:]):
        kernel = (gain / inputs) ** 0.5 * jax.random.normal(k, (inputs, outputs), jnp.float32)
        layer = {"kernel": kernel.astype(dtype)}
        layers.append({**layer, "bias": jnp.zeros(outputs, dtype)} if bias else layer)
    return {"layers": layers}


def mlp_forward(
    params: Mapping[str, Any],
    x: Float[Array, "*batch inputs"],
    *,
    activation: str = "relu",
    linear: Callable[[Array, Any, str], Array] = dense_linear,
) -> Float[Array, "*batch outputs"]:
    r"""$x \leftarrow \sigma(x W_i + b_i)$ for every layer but the last, which has no activation.

    Args:
        params: from `init_mlp`.
        x: inputs.
        activation: one of `ACTIVATIONS`.
        linear: `(x, params, name) -> y` for every product; names are `"layers.0"`, `"layers.1"`, …

    Returns:
        Outputs in the dtype of `x`.

    Raises:
        ValueError: for an unknown activation, or inputs of the wrong size.

    Example:
        >>> params = init_mlp(jax.random.key(0), [3, 8, 2])
        >>> mlp_forward(params, jnp.ones((5, 3)), activation="gelu").shape
        (5, 2)
    """
    function = ACTIVATIONS[one_of("activation", activation, ACTIVATIONS)]
    layers = params["layers"]
    kernel = layers[0].get("kernel")
    if kernel is not None and kernel.shape[0] != x.shape[-1]:
        raise ValueError(f"x has {x.shape[-1]} features, the first layer takes {kernel.shape[0]}")
    for index, layer in enumerate(layers):
        x = linear(x, layer, f"layers.{index}")
        if index + 1 < len(layers):
            x = function(x)
    return x
