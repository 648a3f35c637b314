"""Two image classifiers as pure functions: a small convolutional net and a ResNet of the CIFAR family.

Images are [batch, height, width, channels], kernels [height, width, in, out]. Both nets take any image size:
their last feature map is averaged over the image. Batch normalisation keeps running statistics, which are
state and not parameters: they go in with `state=` and come back with the logits.

    >>> config = SmallCnnConfig(channels=(8, 16), norm="batch")
    >>> params, state = init_small_cnn(jax.random.key(0), config), init_state(config)
    >>> step = jax.jit(small_cnn_forward, static_argnames=("config", "training"))
    >>> logits, state = step(params, jnp.ones((2, 8, 8, 3)), config, state=state, training=True)
    >>> logits.shape
    (2, 10)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from effml._validate import one_of, positive
from effml.nn._block import dense_linear

__all__ = [
    "ResNetConfig",
    "SmallCnnConfig",
    "convolve",
    "init_resnet",
    "init_small_cnn",
    "init_state",
    "resnet_forward",
    "small_cnn_forward",
]

_NORMS = ("group", "batch", "channel", "none")
Convolution = Callable[[Array, Any, str, int], Array]
Linear = Callable[[Array, Any, str], Array]


@dataclass(frozen=True)
class SmallCnnConfig:
    """For every entry of `channels`: 3x3 convolution, norm, relu, 2x2 max pooling; then average and head.

    Args:
        num_classes: size of the output.
        in_channels: channels of the images.
        channels: of the convolutions.
        norm: `"group"`, `"batch"`, `"channel"` (over the channels of each pixel) or `"none"` (then the
            convolutions have biases).
        groups: of the group norm; must divide every channel count.
        norm_epsilon: added to the variance.
        batch_momentum: weight of the old running statistics in an update.

    Raises:
        ValueError: naming the field.

    Example:
        >>> SmallCnnConfig(channels=(16, 32)).num_classes
        10
    """

    num_classes: int = 10
    in_channels: int = 3
    channels: tuple[int, ...] = (32, 64, 64)
    norm: str = "group"
    groups: int = 8
    norm_epsilon: float = 1e-5
    batch_momentum: float = 0.9

    def __post_init__(self) -> None:
        if not self.channels:
            raise ValueError("channels=() must hold at least one convolution")
        _check(self, self.channels)


@dataclass(frozen=True)
class ResNetConfig:
    """The CIFAR ResNet of depth `6 * blocks + 2` (He et al., arXiv 1512.03385); by default ResNet-20.

    A 3x3 stem, then three stages of `width`, `2 * width`, `4 * width` channels with `blocks` blocks of two
    3x3 convolutions each. Where the size halves, the skip takes every second pixel and pads the new channels
    with zeros (the paper's option A), so skips have no parameters: 269,722 in all for ten classes.

    Args:
        num_classes: size of the output.
        in_channels: channels of the images.
        width: channels of the first stage.
        blocks: blocks per stage.
        norm: as in `SmallCnnConfig`.
        groups: of the group norm; must divide `width`.
        norm_epsilon: added to the variance.
        batch_momentum: weight of the old running statistics in an update.

    Raises:
        ValueError: naming the field.

    Example:
        >>> ResNetConfig().depth
        20
    """

    num_classes: int = 10
    in_channels: int = 3
    width: int = 16
    blocks: int = 3
    norm: str = "batch"
    groups: int = 8
    norm_epsilon: float = 1e-5
    batch_momentum: float = 0.9

    def __post_init__(self) -> None:
        positive("blocks", self.blocks)
        _check(self, (self.width,))

    @property
    def depth(self) -> int:
        """Layers with weights."""
        return 6 * self.blocks + 2

    @property
    def layout(self) -> tuple[tuple[int, int, int], ...]:
        """(channels in, channels out, stride) of every block."""
        widths = [self.width * 2**stage for stage in range(3) for _ in range(self.blocks)]
        before = [self.width, *widths[:-1]]
        return tuple((i, o, 1 if i == o else 2) for i, o in zip(before, widths))


def init_small_cnn(key: PRNGKeyArray, config: SmallCnnConfig) -> dict[str, Any]:
    """Fresh parameters: He-normal kernels, scales 1, biases 0.

    Args:
        key: random key.
        config: sizes and norm.

    Returns:
        `{"layers": [{"convolution": …, "norm": …}, …], "head": {"kernel", "bias"}}`.

    Example:
        >>> params = init_small_cnn(jax.random.key(0), SmallCnnConfig(channels=(8, 16)))
        >>> params["layers"][1]["convolution"]["kernel"].shape
        (3, 3, 8, 16)
    """
    keys = jax.random.split(key, len(config.channels) + 1)
    before = (config.in_channels, *config.channels[:-1])
    layers = [_init_unit(k, i, o, config.norm) for k, i, o in zip(keys, before, config.channels)]
    return {"layers": layers, "head": _init_head(keys[-1], config.channels[-1], config.num_classes)}


def init_resnet(key: PRNGKeyArray, config: ResNetConfig) -> dict[str, Any]:
    """Fresh parameters: He-normal kernels, scales 1, biases 0.

    Args:
        key: random key.
        config: sizes and norm.

    Returns:
        `{"stem": unit, "blocks": [{"first": unit, "second": unit}, …], "head": {"kernel", "bias"}}`, where a
        unit is `{"convolution": …, "norm": …}`.

    Example:
        >>> shapes = jax.eval_shape(lambda: init_resnet(jax.random.key(0), ResNetConfig()))
        >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
        269722
    """
    stem_key, head_key, block_key = jax.random.split(key, 3)
    blocks = []
    for k, (inputs, outputs, _) in zip(jax.random.split(block_key, 3 * config.blocks), config.layout):
        first, second = jax.random.split(k)
        blocks.append(
            {
                "first": _init_unit(first, inputs, outputs, config.norm),
                "second": _init_unit(second, outputs, outputs, config.norm),
            }
        )
    return {
        "stem": _init_unit(stem_key, config.in_channels, config.width, config.norm),
        "blocks": blocks,
        "head": _init_head(head_key, 4 * config.width, config.num_classes),
    }


def init_state(config: SmallCnnConfig | ResNetConfig) -> dict[str, Any]:
    """Running statistics before training: mean 0 and variance 1 per normalised channel.

    Args:
        config: of either net.

    Returns:
        One `{"mean", "variance"}` per norm, by name; empty unless `norm="batch"`.

    Example:
        >>> list(init_state(SmallCnnConfig(channels=(8, 16), norm="batch")))
        ['layers.0', 'layers.1']
    """
    if config.norm != "batch":
        return {}
    if isinstance(config, SmallCnnConfig):
        sizes = {f"layers.{index}": size for index, size in enumerate(config.channels)}
    else:
        sizes = {"stem": config.width}
        for index, (_, size, _) in enumerate(config.layout):
            sizes |= {f"blocks.{index}.first": size, f"blocks.{index}.second": size}
    return {name: {"mean": jnp.zeros(size), "variance": jnp.ones(size)} for name, size in sizes.items()}


def convolve(x: Array, params: Mapping[str, Any], name: str, stride: int) -> Array:
    """3x3 convolution that keeps the size at stride 1: the default of every `convolution` argument.

    Args:
        x: [batch, height, width, in].
        params: `{"kernel": [3, 3, in, out]}` and perhaps `"bias": [out]`.
        name: which convolution this is.
        stride: 1 or 2.

    Returns:
        [batch, ceil(height / stride), ceil(width / stride), out].

    Example:
        >>> convolve(jnp.ones((1, 5, 5, 1)), {"kernel": jnp.ones((3, 3, 1, 1))}, "stem", 2).shape
        (1, 3, 3, 1)
    """
    del name
    kernel = params["kernel"].astype(x.dtype)
    # Padding 1 on every side, also at stride 2, where "SAME" would pad an even image on one side only.
    y = jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y + params["bias"].astype(y.dtype) if "bias" in params else y


def small_cnn_forward(
    params: Mapping[str, Any],
    images: Float[Array | np.ndarray, "batch height width channels"],
    config: SmallCnnConfig,
    *,
    state: Mapping[str, Any] | None = None,
    training: bool = False,
    convolution: Convolution = convolve,
    linear: Linear = dense_linear,
) -> tuple[Float[Array, "batch classes"], dict[str, Any]]:
    """Logits of the small net.

    Args:
        params: from `init_small_cnn`.
        images: any size of at least `2 ** len(channels)` pixels each way.
        config: static under `jax.jit`.
        state: running statistics from `init_state`; needed with `norm="batch"` only.
        training: whether batch norm uses, and records, the statistics of this batch.
        convolution: `(x, params, name, stride) -> y` for every convolution, named `"layers.0"`, …
        linear: `(x, params, name) -> y` for the head, named `"head"`.

    Returns:
        float32 logits and the new state (unchanged unless batch norm trains).

    Raises:
        ValueError: for images that do not fit, or batch norm without its state.

    Example:
        >>> config = SmallCnnConfig(channels=(8, 16))
        >>> params = init_small_cnn(jax.random.key(0), config)
        >>> forward = jax.jit(small_cnn_forward, static_argnames="config")
        >>> logits, state = forward(params, jnp.ones((2, 8, 8, 3)), config)
        >>> logits.shape, state
        ((2, 10), {})
    """
    smallest = 2 ** len(config.channels)
    if min(images.shape[1:3]) < smallest:
        raise ValueError(f"images of shape {images.shape} are smaller than {smallest}x{smallest} pixels")
    run = _Units(config, images, state, training, convolution)
    x = jnp.asarray(images)
    for index, unit in enumerate(params["layers"]):
        x = jax.nn.relu(run(x, unit, f"layers.{index}"))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return linear(x.mean((1, 2)), params["head"], "head").astype(jnp.float32), run.state


def resnet_forward(
    params: Mapping[str, Any],
    images: Float[Array | np.ndarray, "batch height width channels"],
    config: ResNetConfig,
    *,
    state: Mapping[str, Any] | None = None,
    training: bool = False,
    convolution: Convolution = convolve,
    linear: Linear = dense_linear,
) -> tuple[Float[Array, "batch classes"], dict[str, Any]]:
    """Logits of the ResNet.

    Args:
        params: from `init_resnet`.
        images: any size.
        config: static under `jax.jit`.
        state: running statistics from `init_state`; needed with `norm="batch"` only.
        training: whether batch norm uses, and records, the statistics of this batch.
        convolution: `(x, params, name, stride) -> y` for every convolution: `"stem"`, `"blocks.0.first"`, …
        linear: `(x, params, name) -> y` for the head, named `"head"`.

    Returns:
        float32 logits and the new state (unchanged unless batch norm trains).

    Raises:
        ValueError: for images that do not fit, or batch norm without its state.

    Example:
        >>> config = ResNetConfig(width=8, blocks=1, norm="group")
        >>> params = init_resnet(jax.random.key(0), config)
        >>> forward = jax.jit(resnet_forward, static_argnames="config")
        >>> forward(params, jnp.ones((2, 8, 8, 3)), config)[0].shape
        (2, 10)
    """
    run = _Units(config, images, state, training, convolution)
    x = jax.nn.relu(run(jnp.asarray(images), params["stem"], "stem"))
    for index, (unit, (inputs, outputs, stride)) in enumerate(zip(params["blocks"], config.layout)):
        y = jax.nn.relu(run(x, unit["first"], f"blocks.{index}.first", stride))
        y = run(y, unit["second"], f"blocks.{index}.second")
        added = outputs - inputs
        skip = jnp.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (added // 2, added - added // 2)))
        x = jax.nn.relu(y + skip)
    return linear(x.mean((1, 2)), params["head"], "head").astype(jnp.float32), run.state


class _Units:
    """Runs convolution + norm units and collects the running statistics that they update."""

    def __init__(
        self, config: Any, images: Any, state: Any, training: bool, convolution: Convolution
    ) -> None:
        if images.shape[3] != config.in_channels:
            raise ValueError(f"images of shape {images.shape} do not have in_channels={config.in_channels}")
        if config.norm == "batch" and not state:
            raise ValueError("norm='batch' needs state=init_state(config)")
        self.config, self.training, self.convolution = config, training, convolution
        self.state: dict[str, Any] = dict(state or {})

    def __call__(self, x: Array, unit: Mapping[str, Any], name: str, stride: int = 1) -> Array:
        y = self.convolution(x, unit["convolution"], name, stride)
        if self.config.norm == "none":
            return y
        wide = y.astype(jnp.float32)
        mean, variance = self.statistics(wide, name)
        wide = (wide - mean) * jax.lax.rsqrt(variance + self.config.norm_epsilon)
        norm = unit["norm"]
        return (wide * norm["scale"] + norm["bias"]).astype(y.dtype)

    def statistics(self, x: Array, name: str) -> tuple[Array, Array]:
        """Mean and variance to normalise with, broadcastable to `x`."""
        norm = self.config.norm
        if norm == "channel":
            return x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        if norm == "group":
            batch, height, width, channels = x.shape
            grouped = x.reshape(batch, height * width, self.config.groups, -1)
            repeats = channels // self.config.groups
            mean, variance = (
                jnp.repeat(moment, repeats, axis=-1)[:, None, None]
                for moment in (grouped.mean((1, 3)), grouped.var((1, 3)))
            )
            return mean, variance
        old = self.state[name]
        if not self.training:
            return old["mean"], old["variance"]
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        keep = self.config.batch_momentum
        self.state[name] = {
            "mean": keep * old["mean"] + (1 - keep) * mean,
            "variance": keep * old["variance"] + (1 - keep) * variance,
        }
        return mean, variance


def _check(config: Any, channels: tuple[int, ...]) -> None:
    one_of("norm", config.norm, _NORMS)
    for name in ("num_classes", "in_channels", "groups", "norm_epsilon"):
        positive(name, getattr(config, name))
    for count in channels:
        positive("channels", count)
        if config.norm == "group" and count % config.groups:
            raise ValueError(f"groups={config.groups} must divide every channel count, not {count}")
    if not 0 <= config.batch_momentum < 1:
        raise ValueError(f"batch_momentum={config.batch_momentum!r} must be at least 0 and below 1")


def _init_unit(key: PRNGKeyArray, inputs: int, outputs: int, norm: str) -> dict[str, Any]:
    kernel = (2 / (9 * inputs)) ** 0.5 * jax.random.normal(key, (3, 3, inputs, outputs), jnp.float32)
    if norm == "none":
        return {"convolution": {"kernel": kernel, "bias": jnp.zeros(outputs)}}
    return {
        "convolution": {"kernel": kernel},
        "norm": {"scale": jnp.ones(outputs), "bias": jnp.zeros(outputs)},
    }


def _init_head(key: PRNGKeyArray, inputs: int, outputs: int) -> dict[str, Array]:
    kernel = inputs**-0.5 * jax.random.normal(key, (inputs, outputs), jnp.float32)
    return {"kernel": kernel, "bias": jnp.zeros(outputs)}
