"""The small problems of the LiMuon experiment: digits for a perceptron and a vision transformer, and a Mamba stack."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Digits(NamedTuple):
    """scikit-learn's 8 x 8 digits, scaled to [0, 1]: images float32[n, 64] and labels int32[n]."""

    images: jax.Array
    labels: jax.Array


@functools.cache
def digits() -> Digits:
    """All 1797 of them, in an order of our own."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        from effml._validate import missing_package

        raise missing_package("scikit-learn", "pip install 'effml[experiments]'", "load digits") from error
    bunch: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    return Digits(
        jnp.asarray(bunch.data[order] / 16, jnp.float32), jnp.asarray(bunch.target[order], jnp.int32)
    )


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over the batch."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1))


def _kernel(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    return {"kernel": jax.random.normal(key, (inputs, outputs)) / np.sqrt(inputs)}


def perceptron(key: jax.Array) -> dict[str, Any]:
    """64-32-10 without biases: two matrices."""
    first, second = jax.random.split(key)
    return {"hidden": _kernel(first, 64, 32), "output": _kernel(second, 32, 10)}


def perceptron_loss(params: dict[str, Any], data: Digits) -> jax.Array:
    """Cross-entropy of the tanh network."""
    hidden = jnp.tanh(data.images @ params["hidden"]["kernel"])
    return cross_entropy(hidden @ params["output"]["kernel"], data.labels)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


PATCH, PATCHES = 4, 16


def vision_transformer(key: jax.Array, width: int = 32, layers: int = 2) -> dict[str, Any]:
    """Two blocks over 16 patches of 2 x 2 pixels; class scores from the mean of the patches."""
    keys = iter(jax.random.split(key, 3 + 6 * layers))
    return {
        "patch": _kernel(next(keys), PATCH, width),
        "position": {"table": 0.02 * jax.random.normal(next(keys), (PATCHES, width))},
        "layers": [
            {
                "attention_norm": {"scale": jnp.ones(width)},
                "attention": {
                    name: _kernel(next(keys), width, width) for name in ("query", "key", "value", "output")
                },
                "mlp_norm": {"scale": jnp.ones(width)},
                "mlp": {
                    "up": _kernel(next(keys), width, 2 * width),
                    "down": _kernel(next(keys), 2 * width, width),
                },
            }
            for _ in range(layers)
        ],
        "final_norm": {"scale": jnp.ones(width)},
        "head": _kernel(next(keys), width, 10),
    }


def vision_logits(params: dict[str, Any], images: jax.Array, heads: int = 4) -> jax.Array:
    """Scores [batch, 10] of images [batch, 64]."""
    batch = images.shape[0]
    patches = images.reshape(batch, 4, 2, 4, 2).swapaxes(2, 3).reshape(batch, PATCHES, PATCH)
    x = patches @ params["patch"]["kernel"] + params["position"]["table"]
    for layer in params["layers"]:
        y = _norm(x, layer["attention_norm"]["scale"])
        split = lambda name, y=y, layer=layer: (y @ layer["attention"][name]["kernel"]).reshape(
            batch, PATCHES, heads, -1
        )
        mixed = jax.nn.dot_product_attention(split("query"), split("key"), split("value"))
        x = x + mixed.reshape(x.shape) @ layer["attention"]["output"]["kernel"]
        y = _norm(x, layer["mlp_norm"]["scale"])
        x = x + jax.nn.gelu(y @ layer["mlp"]["up"]["kernel"]) @ layer["mlp"]["down"]["kernel"]
    return _norm(x, params["final_norm"]["scale"]).mean(1) @ params["head"]["kernel"]


CONVOLUTION, STATES, RANK = 4, 8, 4


def mamba(key: jax.Array, vocabulary: int, width: int = 32, layers: int = 2) -> dict[str, Any]:
    """A stack of selective state-space blocks (Gu and Dao, 2023), inner width twice the width."""
    keys = iter(jax.random.split(key, 2 + 6 * layers))
    inner = 2 * width
    # Per-channel weights are called gain, so that they are taken for the vectors they are.
    return {
        "embedding": {"table": jax.random.normal(next(keys), (vocabulary, width))},
        "layers": [
            {
                "norm": {"scale": jnp.ones(width)},
                "in_proj": _kernel(next(keys), width, 2 * inner),
                "convolution": {"gain": jax.random.normal(next(keys), (CONVOLUTION, inner)) / 2},
                "select": _kernel(next(keys), inner, RANK + 2 * STATES),
                "step": {**_kernel(next(keys), RANK, inner), "bias": jnp.full(inner, -2.0)},
                "decay": {"gain": jnp.log(jnp.tile(jnp.arange(1.0, STATES + 1), (inner, 1)))},
                "skip": {"gain": jnp.ones(inner)},
                "out_proj": _kernel(next(keys), inner, width),
            }
            for _ in range(layers)
        ],
        "final_norm": {"scale": jnp.ones(width)},
        "head": _kernel(next(keys), width, vocabulary),
    }


def _selective_scan(x: jax.Array, layer: dict[str, Any]) -> jax.Array:
    """h_t = exp(step_t A) h_{t-1} + step_t B_t x_t,  y_t = C_t h_t + D x_t; step, B and C depend on x_t."""
    low, b, c = jnp.split(x @ layer["select"]["kernel"], [RANK, RANK + STATES], axis=-1)
    step = jax.nn.softplus(low @ layer["step"]["kernel"] + layer["step"]["bias"])[..., None]
    keep = jnp.exp(-step * jnp.exp(layer["decay"]["gain"]))
    put = step * b[..., None, :] * x[..., None]

    def join(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    _, hidden = jax.lax.associative_scan(join, (keep, put), axis=1)
    return jnp.einsum("blen,bln->ble", hidden, c) + layer["skip"]["gain"] * x


def mamba_loss(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Mean nats per token of int32[batch, length + 1]."""
    x = params["embedding"]["table"][tokens[:, :-1]]
    for layer in params["layers"]:
        inner, gate = jnp.split(_norm(x, layer["norm"]["scale"]) @ layer["in_proj"]["kernel"], 2, axis=-1)
        padded = jnp.pad(inner, ((0, 0), (CONVOLUTION - 1, 0), (0, 0)))
        taps = layer["convolution"]["gain"]
        inner = sum(padded[:, i : i + inner.shape[1]] * taps[i] for i in range(CONVOLUTION))
        y = _selective_scan(jax.nn.silu(inner), layer) * jax.nn.silu(gate)
        x = x + y @ layer["out_proj"]["kernel"]
    logits = _norm(x, params["final_norm"]["scale"]) @ params["head"]["kernel"]
    targets = tokens[:, 1:]
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
