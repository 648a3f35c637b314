"""What every kernel of a model reads on typical text, one layer at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from effml.nn import transformer
from effml.nn.transformer import TransformerConfig
from effml.quantize._fake import FULL
from effml.quantize._host import on_host
from effml.quantize._model import PackedConfig, quantized_input, seams

__all__ = ["INPUT_OF", "InputStatistics", "LayerStream", "calibrate", "check_tokens"]

INPUT_OF = {
    "attention.query": "attention.input",
    "attention.key": "attention.input",
    "attention.value": "attention.input",
    "attention.output": "attention.output.input",
    "mlp.gate": "mlp.input",
    "mlp.up": "mlp.input",
    "mlp.down": "mlp.down.input",
}
"""Which tap of `effml.nn.transformer.block` shows what a kernel reads."""

_READERS = {tap: name for name, tap in reversed(INPUT_OF.items())}
_MOST_TOKENS = 4096  # at a time


class InputStatistics(NamedTuple):
    """What one kernel reads, over all calibration tokens.

    Attributes:
        second_moment: float32[in], mean square of every input.
        hessian: float32[in, in], mean of x^T x; None where it was not asked for.
        tokens: how many were read.
    """

    second_moment: np.ndarray
    hessian: np.ndarray | None
    tokens: int


def check_tokens(tokens: Any, config: TransformerConfig) -> np.ndarray:
    """Calibration tokens as int32[windows, length + 1]; raises where they can't be read.

    Raises:
        ValueError: for another shape, ids outside the vocabulary, or windows longer than learned positions.
        TypeError: for anything but integers, or under `jit`.

    Example:
        >>> check_tokens(np.zeros((2, 9), int), TransformerConfig(256, 32, 2, 4, 64)).dtype
        dtype('int32')
    """
    on_host("reading calibration tokens", tokens)
    try:
        tokens = np.asarray(tokens)
    except ValueError:
        raise ValueError("calibration windows of different lengths: cut them to one") from None
    if tokens.ndim != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise ValueError(
            f"calibration tokens of shape {tokens.shape} must be [windows, length + 1], "
            "at least one window of two tokens"
        )
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"calibration tokens must be integers, they are {tokens.dtype}")
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ValueError(f"calibration tokens hold ids outside 0 ... {config.vocab_size - 1}")
    if config.positions == "learned" and tokens.shape[1] - 1 > config.max_length:
        raise ValueError(
            f"calibration windows of {tokens.shape[1] - 1} tokens are longer than the "
            f"{config.max_length} learned positions"
        )
    return tokens.astype(np.int32)


class LayerStream:
    """The residual stream of all calibration windows, on the host, in front of one layer after the other.

    Memory is that of one layer's statistics and of the stream: windows x length x width x 4 bytes.

    Args:
        params: of the model; only embedding and positions are read.
        tokens: int[windows, length + 1], the last of each window is not read.
        config: of the model that runs; its activations and cached rows are rounded as it says.

    Example:
        >>> model = TransformerConfig(256, 32, 2, 4, 64)
        >>> params = transformer.init_params(jax.random.key(0), model)
        >>> stream = LayerStream(params, np.ones((2, 9), int), PackedConfig(model))
        >>> statistics = stream.statistics(params["layers"][0])
        >>> statistics["mlp.down.input"].hessian.shape, statistics["mlp.input"].tokens
        ((64, 64), 16)
    """

    def __init__(self, params: Mapping[str, Any], tokens: Any, config: PackedConfig):
        self._config = config
        tokens = check_tokens(tokens, config.model)[:, :-1]
        windows, length = tokens.shape
        parts = -(-windows // max(1, _MOST_TOKENS // length))
        self._batch = -(-windows // parts)
        self._layer = 0
        first = {name: part for name, part in params.items() if name in ("embedding", "positions")}
        self._hidden = self._map(lambda x: _embed(first, x, config.model), tokens)

    def _split(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        """Batches of one size, and how many windows of each are real: the last is filled up with zeros."""
        for start in range(0, len(rows), self._batch):
            part = rows[start : start + self._batch]
            room = self._batch - len(part)
            yield np.pad(part, [(0, room)] + [(0, 0)] * (part.ndim - 1)), len(part)

    def _map(self, function: Any, rows: np.ndarray) -> np.ndarray:
        return np.concatenate([np.asarray(function(part))[:real] for part, real in self._split(rows)])

    def statistics(self, layer_params: Any, *, full: bool = True) -> dict[str, InputStatistics]:
        """What the kernels of the layer in front of the stream read.

        Args:
            layer_params: of that layer.
            full: whether to form the Hessians.

        Returns:
            By the names of `INPUT_OF`'s taps.

        Raises:
            ValueError: if an input is not finite, naming layer and kernels.
        """
        sums: Any = None
        layer_params = jax.tree.map(jnp.asarray, layer_params)
        for x, real in self._split(self._hidden):
            part = _observe(layer_params, x, real, config=self._config, full=full)
            sums = part if sums is None else jax.tree.map(jnp.add, sums, part)
        tokens = self._hidden.shape[0] * self._hidden.shape[1]
        found = {}
        for name, (squares, hessian) in sums.items():
            mean = np.asarray(squares) / tokens
            if not np.isfinite(mean).all():
                readers = [one for one, tap in INPUT_OF.items() if tap == name]
                raise ValueError(
                    f"layers.{self._layer}: what {' and '.join(readers)} would read of the calibration text is not "
                    "finite, or its squares are not"
                )
            found[name] = InputStatistics(
                mean, None if hessian is None else np.asarray(hessian) / tokens, tokens
            )
        return found

    def advance(self, layer_params: Any) -> None:
        """Runs the layer in front of the stream on it."""
        layer_params = jax.tree.map(jnp.asarray, layer_params)
        self._hidden = self._map(lambda x: _advance(layer_params, x, config=self._config), self._hidden)
        self._layer += 1


def calibrate(
    params: Mapping[str, Any],
    config: TransformerConfig | PackedConfig,
    tokens: Any,
    *,
    full: bool = True,
) -> Iterator[dict[str, InputStatistics]]:
    """Statistics of what every kernel reads, layer by layer, so that memory does not grow with depth.

    Args:
        params: of the model, layers scanned or not.
        config: of the model; a `PackedConfig` rounds activations on the way.
        tokens: int[windows, length + 1].
        full: whether to form the Hessians, mean x^T x, and not their diagonals alone.

    Yields:
        For each layer, `InputStatistics` by tap name.

    Raises:
        ValueError: for tokens that can't be read, or activations that are not finite.

    Example:
        >>> model = TransformerConfig(256, 32, 2, 4, 64)
        >>> params = transformer.init_params(jax.random.key(0), model)
        >>> [sorted(layer) for layer in calibrate(params, model, np.ones((1, 9), int), full=False)][0]
        ['attention.input', 'attention.output.input', 'mlp.down.input', 'mlp.input']
    """
    if not isinstance(config, PackedConfig):
        config = PackedConfig(config, weight_bits=FULL)
    stream = LayerStream(params, tokens, config)
    for layer_params in transformer.unstack_layers(params)["layers"]:
        yield stream.statistics(layer_params, full=full)
        stream.advance(layer_params)


@functools.partial(jax.jit, static_argnames=("config",))
def _embed(params: Any, tokens: Array, config: TransformerConfig) -> Array:
    x = transformer.embed(params, tokens, config)
    if config.positions == "learned":
        x = x + params["positions"]["table"][: tokens.shape[1]].astype(x.dtype)
    return x


def _run(layer_params: Any, x: Array, config: PackedConfig, tap: Any = None) -> Any:
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
    return transformer.block(
        layer_params, x, config=config.model, positions=positions, tap=tap, **seams(config)
    )


@functools.partial(jax.jit, static_argnames=("config",))
def _advance(layer_params: Any, x: Array, *, config: PackedConfig) -> Array:
    return _run(layer_params, x, config)[0]


@functools.partial(jax.jit, static_argnames=("config", "full"))
def _observe(layer_params: Any, x: Array, real: Any, *, config: PackedConfig, full: bool) -> Any:
    counts = (jnp.arange(x.shape[0]) < real)[:, None, None]

    def tap(name: str, layer: Any, value: Array) -> Any:
        if name not in _READERS:
            return None
        read = jnp.where(counts, quantized_input(value, _READERS[name], config), 0)
        read = read.reshape(-1, read.shape[-1]).astype(jnp.float32)
        hessian = jnp.matmul(read.T, read, precision=jax.lax.Precision.HIGHEST) if full else None
        return jnp.square(read).sum(0), hessian

    return _run(layer_params, x, config, tap)[1].taps
