r"""Second moments of what every kernel reads, and of the gradients of what it gives, one backward pass a batch.

With x what a kernel reads and g = d loss / d y of what it gives, over all tokens t of a batch,

$$\text{in\_sq}_j = \mathbb{E}_t\,[c_t^2\, x_{tj}^2], \qquad
  \text{out\_sq}_i = 10^6\, \mathbb{E}_t\,[c_t^2\, g_{ti}^2], \qquad c_t = \min(1, \tau / \lVert x_t \rVert)$$

where tau is the largest 99.9th percentile of token norms met so far: a few tokens of a huge norm must not decide. A
batch that raises tau raises what was summed before it by the square of the ratio.

Neither activations nor gradients are kept. Each product gets a probe, an argument of zeros that adds nothing to the
product but whose "gradient" is defined to be that batch's moments; so they come out of an ordinary `jax.grad`, also
through scanned and recomputed layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from effml._validate import real
from effml.nn import transformer
from effml.nn.transformer import TransformerConfig
from effml.quantize._calibrate import check_tokens

__all__ = ["collect_diag_stats", "shrink"]

Statistics = Mapping[str, tuple[Any, Any]]
_GRADIENT_SCALE = 1e6  # before squaring, so that small gradients do not underflow; divided out once
_PROBE = "probe"


def collect_diag_stats(
    loss: TransformerConfig | Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    *,
    clip_percentile: float = 0.999,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Second moments of inputs and output gradients of every kernel, outlier tokens clipped.

    Args:
        loss: of a transformer's configuration, the mean next-token loss is taken; or `(params, batch, linear) ->
            scalar`, which computes every product as `linear(x, layer_params, name)`, where `layer_params` is the dict
            of `params` that holds its `"kernel"`.
        params: of the model; a transformer's layers may be scanned or not.
        batches: each an int[batch, length + 1], or int[length + 1] for one window; or whatever `loss` takes. A batch
            of another shape compiles again.
        clip_percentile: share of a batch's tokens that is not clipped by tau itself.

    Returns:
        By path, such as "layers.0.attention.query": float32[in] and float32[out], the latter times 1e6. Relative
        sizes within a vector decide which errors count; the overall size only how large latents are beside a step of
        their tuning. The head is left out.

    Raises:
        ValueError: for no batches, a percentile outside 0 ... 1, no kernels, tokens that can't be read, or moments
            that are not finite.

    Source: NanoQuant, arXiv 2602.06694, the "online" strategy of its code.

    Example:
        >>> config = TransformerConfig(256, 32, 2, 4, 64)
        >>> params = transformer.init_params(jax.random.key(0), config)
        >>> stats = collect_diag_stats(config, params, np.ones((2, 9), int))
        >>> len(stats), [part.shape for part in stats["layers.1.mlp.down"]]
        (14, [(64,), (32,)])
    """
    if not 0 < clip_percentile < 1:
        raise ValueError(f"clip_percentile={clip_percentile!r} must be between 0 and 1")
    scanned = isinstance(loss, TransformerConfig)
    params = transformer.stack_layers(params) if scanned else params
    params = jax.tree.map(jnp.asarray, params)
    kernels = dict(_kernels(params))
    if not kernels:
        raise ValueError("params hold no dict with a kernel of two axes, so there is nothing to observe")
    state = {path: _empty(shape) for path, shape in kernels.items()}
    step = functools.partial(_step, loss=loss, percentile=float(clip_percentile))
    batches_read = 0
    for batch in batches:
        if scanned:
            batch = _check_window(batch, loss)
        state = step(state, params, batch)
        batches_read += 1
    if not batches_read:
        raise ValueError("batches is empty: at least one batch of calibration text is needed")
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for path, (sums, _) in state.items():
        moments = [np.asarray(part) / np.float32(batches_read) for part in sums]
        if not all(np.isfinite(part).all() for part in moments):
            raise ValueError(f"{path}: activations or gradients are not finite on the calibration text")
        if len(kernels[path]) == 2:
            found[path] = (moments[0], moments[1])
            continue
        for layer, pair in enumerate(zip(*moments)):
            found[f"layers.{layer}.{path.removeprefix('layers.')}"] = pair
    return found


def shrink(stats: Statistics, gamma: float | int | Any = 0.4) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    r"""Second moments drawn towards their mean, so that none is zero and few tokens decide less.

    $$h \leftarrow (1 - \gamma)\, h + \gamma\, \mathrm{mean}(h)$$

    Args:
        stats: from `collect_diag_stats`.
        gamma: 0 leaves them as they are, 1 makes them constant.

    Returns:
        Likewise. A vector of zeros, which tells no channel from another, becomes one of ones.

    Raises:
        ValueError: for gamma outside 0 ... 1, or 0 where a channel is zero; for moments that are no vector of finite
            numbers, none below 0.

    Source: NanoQuant, arXiv 2602.06694.

    Example:
        >>> shrink({"a": (np.array([0.0, 2.0]), np.array([4.0]))}, 0.5)["a"][0].tolist()
        [0.5, 1.5]
    """
    if not 0 <= real("gamma", gamma) <= 1:
        raise ValueError(f"gamma={gamma!r} must be from 0 to 1")
    return {path: _pair(path, pair, gamma) for path, pair in stats.items()}


def _pair(path: str, pair: tuple[Any, Any], gamma: float | int) -> tuple[np.ndarray, np.ndarray]:
    first, second = pair
    return _drawn(path, "in_sq", first, gamma), _drawn(path, "out_sq", second, gamma)


def _drawn(path: str, name: str, moments: Any, gamma: float | int) -> np.ndarray:
    moments = np.asarray(moments)
    moments = moments if np.issubdtype(moments.dtype, np.floating) else moments.astype(np.float32)
    if moments.ndim != 1 or not moments.size or not (np.isfinite(moments) & (moments >= 0)).all():
        raise ValueError(f"{path}: {name} must be a vector of finite second moments, none below 0")
    if gamma == 0:
        if zeros := int((moments == 0).sum()):
            raise ValueError(
                f"{path}: {name} has {zeros} channels of 0, whose scales would be without bound: gamma must be above 0"
            )
        return moments
    if not moments.any():
        return np.ones_like(moments)
    return ((1 - gamma) * moments + gamma * moments.mean()).astype(moments.dtype)


def _kernels(tree: Any, path: tuple[str, ...] = ()) -> Iterable[tuple[str, tuple[int, ...]]]:
    if isinstance(tree, Mapping):
        shape = np.shape(tree["kernel"]) if "kernel" in tree else ()
        scanned = path[:1] == ("layers",) and len(shape) == 3
        if (len(shape) == 2 or scanned) and "head" not in path:
            yield ".".join(path), shape
        for name, part in tree.items():
            yield from _kernels(part, (*path, str(name)))
    elif isinstance(tree, (list, tuple)):
        for index, part in enumerate(tree):
            yield from _kernels(part, (*path, str(index)))


def _empty(shape: tuple[int, ...]) -> Any:
    """Sums of squares of inputs and of gradients, and the clipping norm of each."""
    *layers, inputs, outputs = shape
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    return (zeros((*layers, inputs)), zeros((*layers, outputs))), (zeros(layers), zeros(layers))


def _with_probes(tree: Any, probes: Mapping[str, Any], path: tuple[str, ...] = ()) -> Any:
    if isinstance(tree, Mapping):
        made = {name: _with_probes(part, probes, (*path, str(name))) for name, part in tree.items()}
        return {**made, _PROBE: probes[".".join(path)]} if ".".join(path) in probes else made
    if isinstance(tree, (list, tuple)):
        return [_with_probes(part, probes, (*path, str(index))) for index, part in enumerate(tree)]
    return tree


def _check_window(batch: Any, config: TransformerConfig) -> np.ndarray:
    batch = np.asarray(batch)
    return check_tokens(batch[None] if batch.ndim == 1 else batch, config)


@functools.partial(jax.jit, static_argnames=("loss", "percentile"))
def _step(state: Any, params: Any, batch: Any, *, loss: Any, percentile: float) -> Any:
    linear = functools.partial(_observed_linear, percentile=percentile)

    def value(probes: Any) -> Array:
        probed = _with_probes(params, probes)
        if not isinstance(loss, TransformerConfig):
            return loss(probed, batch, linear)
        seams = {"linear": linear, "rematerialize": True}
        return transformer.next_token_loss(probed, {"tokens": batch}, loss, **seams)[0]

    seen = jax.grad(value)(state)
    return {path: _add(state[path], seen[path]) for path in state}


def _add(before: Any, seen: Any) -> Any:
    sums, norms = [], []
    for old, new, largest, tau in zip(before[0], seen[0], before[1], seen[1]):
        raised = jnp.maximum(largest, tau)
        ratio = jnp.where(largest > 0, raised / jnp.where(largest > 0, largest, 1), 1)
        sums.append(old * jnp.square(ratio)[..., None] + new)
        norms.append(raised)
    return tuple(sums), tuple(norms)


def _observed_linear(x: Array, params: Mapping[str, Any], name: str, *, percentile: float) -> Array:
    y = transformer.dense_linear(x, params, name)
    if _PROBE not in params:
        return y
    probe = params[_PROBE]
    seen = _moments(jax.lax.stop_gradient(x), jax.lax.stop_gradient(probe[1][0]), percentile)
    return _observe(y, seen, probe, percentile)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _observe(y: Array, seen: Any, probe: Any, percentile: float) -> Array:
    """y; the gradient with respect to `probe` is that batch's moments and clipping norms."""
    del seen, probe, percentile
    return y


def _observe_forward(y: Array, seen: Any, probe: Any, percentile: float) -> tuple[Array, Any]:
    del percentile
    return y, (seen, probe[1][1])


def _observe_backward(percentile: float, saved: Any, dy: Array) -> tuple[Array, None, Any]:
    (in_moments, in_tau), largest = saved
    out_moments, out_tau = _moments(dy.astype(jnp.float32) * _GRADIENT_SCALE, largest, percentile)
    return dy, None, ((in_moments, out_moments / _GRADIENT_SCALE), (in_tau, out_tau))


_observe.defvjp(_observe_forward, _observe_backward)


def _moments(x: Array, largest: Array, percentile: float) -> tuple[Array, Array]:
    """Mean squares over tokens, each clipped to the largest tau so far, and this batch's tau."""
    x = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    norms = jnp.linalg.norm(x, axis=1)
    tau = jax.lax.top_k(norms, max(1, int(len(norms) * (1.0 - percentile))))[0][-1]
    clip = jnp.minimum(1.0, jnp.maximum(largest, tau) / (norms + 1e-8))
    return jnp.square(x * clip[:, None]).mean(0), tau
