"""A tiny language model whose activations have outliers, as those of large ones do.

A plain tiny model has none, so that rotations show nothing. This one gets them: constant vectors are added to the
residual stream, large in single channels, and stay as they are while the model trains around them.

    embedding                       +40 on two channels
    after every block half          +40 (attention) or -28 (perceptron) on one channel, drawn anew for each;
                                    none after the last half

They are the rows' common part of the embedding table and the biases of the two projections that write to the stream,
so the model is an ordinary `TransformerConfig` with biases, and whatever rotates those rotates the outliers too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from effml import data
from effml.nn import transformer
from effml.train import schedule

LARGE, OTHER = 40.0, -28.0


@dataclass(frozen=True)
class OutlierModelConfig:
    """Sizes of the model and of its training; the defaults are the spec's."""

    width: int = 64
    layers: int = 4
    heads: int = 4
    mlp_width: int = 192
    length: int = 64
    batch: int = 16
    steps: int = 600
    rate: float = 3e-3
    text_bytes: int = 4_700_000
    quick: bool = False

    def model(self) -> transformer.TransformerConfig:
        """Biases hold the outliers; the head is separate, as rotations need it."""
        return transformer.TransformerConfig(
            vocab_size=256,
            width=self.width,
            num_layers=self.layers,
            num_heads=self.heads,
            mlp_width=self.mlp_width,
            max_length=self.length,
            tied_head=False,
            attention_output_bias=True,
            mlp_bias=True,
            initializer_std=0.06,
        )


class Text(NamedTuple):
    """Bytes of the standard library's source: train int32[n], held_out int32[windows, length + 1]."""

    train: np.ndarray
    held_out: np.ndarray


def load_text(config: OutlierModelConfig, windows: int) -> Text:
    """The training side, and `windows` held-out windows spread over the other side."""
    corpus = data.load_corpus("stdlib", max_bytes=config.text_bytes)
    tokenizer = data.ByteTokenizer()
    train = np.asarray(data.encode_corpus(corpus, "train", tokenizer))
    other = np.asarray(data.encode_corpus(corpus, "held_out", tokenizer))
    starts = np.linspace(0, len(other) - config.length - 1, windows).astype(int)
    return Text(train, np.stack([other[start : start + config.length + 1] for start in starts]))


def draw_windows(train: np.ndarray, shape: tuple[int, ...], length: int, seed: int) -> np.ndarray:
    """int32[*shape, length + 1]: windows of the training text at random places."""
    starts = np.random.default_rng(seed).integers(0, len(train) - length, shape)
    return train[starts[..., None] + np.arange(length + 1)].astype(np.int32)


def initial_params(key: jax.Array, config: OutlierModelConfig) -> dict[str, Any]:
    """Fresh parameters with the outliers in them; apart from those, table rows of variance one.

    With the usual small rows the outliers drown the tokens: the model learns little (2.5 nats instead of 2.0), and no
    rotation brings four bits near it.

    Example:
        >>> params = initial_params(jax.random.key(0), OutlierModelConfig())
        >>> biases = [layer["mlp"]["down"]["bias"] for layer in params["layers"]]
        >>> [float(bias.min()) for bias in biases]
        [-28.0, -28.0, -28.0, 0.0]
    """
    weights, rows, first, channels = jax.random.split(key, 4)
    params = transformer.init_params(weights, config.model(), scanned=False)
    two = jax.random.choice(first, config.width, (2,), replace=False)
    table = jax.random.normal(rows, (256, config.width)).at[:, two].add(LARGE)
    one = jax.random.randint(channels, (config.layers, 2), 0, config.width)
    layers = []
    for index, layer in enumerate(params["layers"]):
        attention, mlp = dict(layer["attention"]), dict(layer["mlp"])
        offset = attention["output"]["bias"].at[one[index, 0]].set(LARGE)
        attention["output"] = {**attention["output"], "bias": offset}
        if index < config.layers - 1:
            mlp["down"] = {**mlp["down"], "bias": mlp["down"]["bias"].at[one[index, 1]].set(OTHER)}
        layers.append({**layer, "attention": attention, "mlp": mlp})
    return {**params, "embedding": {"table": table}, "layers": layers}


def is_bias(params: Any) -> Any:
    """True for the leaves that hold still while the model trains: outliers are biases, and all biases are theirs."""
    return jax.tree_util.tree_map_with_path(lambda path, _: getattr(path[-1], "key", "") == "bias", params)


def loss(params: Mapping[str, Any], tokens: jax.Array, model: transformer.TransformerConfig) -> jax.Array:
    """Mean nats per token of int32[batch, length + 1]."""
    return transformer.next_token_loss(params, {"tokens": tokens}, model)[0]


def train_outlier_model(config: OutlierModelConfig, text: Text, seed: int) -> dict[str, Any]:
    """Adam on everything but the outliers; a table row's own part learns, its common offset is never decayed."""
    batches = draw_windows(text.train, (config.steps, config.batch), config.length, seed)
    return _trainer(config)(jax.random.key(seed), batches)


@functools.lru_cache(maxsize=4)
def _trainer(config: OutlierModelConfig) -> Any:
    rate = schedule("cosine", config.rate, config.steps, warmup_fraction=0.1, final_fraction=0.1)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(rate, b1=0.9, b2=0.95),
        optax.masked(optax.set_to_zero(), is_bias),
    )
    model = config.model()
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

    @functools.partial(jax.jit, compiler_options=quick if config.quick else None)
    def run(key: jax.Array, batches: jax.Array) -> Any:
        params = transformer.stack_layers(initial_params(key, config))

        def step(carry: Any, tokens: jax.Array) -> tuple[Any, None]:
            params, state = carry
            gradient = jax.grad(loss)(params, tokens, model)
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), batches)
        return transformer.unstack_layers(params)

    return run
