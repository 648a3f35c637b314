r"""The last step, over the whole model: scales alone learn to give the logits of the model in full precision.

$$\min_{s}\; \frac{1}{T} \sum_{t} \sum_v p_{tv} \log \frac{p_{tv}}{q_{tv}(s)}, \qquad
  p = \mathrm{softmax}(\text{teacher}),\; q = \mathrm{softmax}(\text{student})$$

The teacher is run again for each batch: its
logits on all calibration text would be larger than the model.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array

from effml._validate import count, positive, real
from effml.nn import transformer
from effml.nn.hub import _files
from effml.nn.transformer import TransformerConfig
from effml.quantize._calibrate import check_tokens
from effml.quantize._work import digest
from effml.quantize.nanoquant._linear import BinaryTensor, open_linear, open_signs
from effml.quantize.nanoquant._model import BinaryConfig, check_binary_params, check_dense_params
from effml.quantize.nanoquant._rank import random_key
from effml.quantize.nanoquant._reconstruct import adam
from effml.trees import path_name

__all__ = ["TunedScales", "scale_labels", "tune_scales_kl"]


class TunedScales(NamedTuple):
    """What tuning gives.

    Attributes:
        params: of the model, with other scales.
        losses: mean divergence from the teacher, in nats per token, of each pass while it went on, with scales in
            float32; `params` has them rounded to the type that they came in.
    """

    params: dict[str, Any]
    losses: list[float]


def scale_labels(params: Any) -> Any:
    """ "scale" for the scales of binary factors, "frozen" for all else: labels for `optax.multi_transform`.

    Example:
        >>> tensor = BinaryTensor.pack(np.ones((4, 2)), np.ones((2, 5)), np.ones(4), np.ones(5))
        >>> labels = scale_labels({"binary": tensor, "bias": np.zeros(5)})
        >>> labels["bias"], labels["binary"].scale_in, labels["binary"].v_words
        ('frozen', 'scale', 'frozen')
    """

    def label(path: Any, leaf: Any) -> str:
        return "scale" if path_name(path).split(".")[-1] in ("scale_in", "scale_out") else "frozen"

    return jax.tree_util.tree_map_with_path(label, params)


def tune_scales_kl(
    params: Mapping[str, Any],
    config: BinaryConfig,
    teacher_params: Mapping[str, Any] | Any,
    tokens: Any,
    optimizer: optax.GradientTransformation | Any = None,
    *,
    key: Array | Any,
    epochs: int = 8,
    batch: int = 1,
    rate: float | int | Any = 1e-5,
    checkpoint: Path | str | None = None,
    progress: Callable[[int, int, float], Any] | None = None,
) -> TunedScales:
    """Moves the scales of all factorised linears towards the teacher's logits; signs and all else stay bit by bit.

    Args:
        params: of the model of binary factors, a list of layers.
        config: of that model.
        teacher_params: of the model in full precision, layers scanned or not.
        tokens: int[windows, length + 1], the last of each window is not read.
        optimizer: any optax chain, of a flat dict of scales; None is Adam with a cosine to 0. Weight decay is 0: a
            scale that shrinks for its own sake only makes outputs too small, and the 1e-2 of the paper's code looks
            like a default that nobody chose.
        key: of the order of windows.
        epochs: passes over the windows.
        batch: windows of one step.
        rate: of the default optimizer.
        checkpoint: a file for what is needed to go on after an interruption, written after each pass. One of another
            run is refused.
        progress: called as progress(pass, passes, loss) after each pass.

    Returns:
        `TunedScales`, its scales in the type that they came in.

    Raises:
        ValueError: for tokens that can't be read, a model without factors, a teacher of other sizes, a divergence that
            is not finite, or a checkpoint of another run.
        TypeError: for what is no key, rate or optimizer.

    Source: NanoQuant, arXiv 2602.06694, section 3, with the details of its code.

    Example:
        >>> model = TransformerConfig(64, 16, 1, 2, 32)
        >>> teacher = transformer.init_params(jax.random.key(0), model)
        >>> ones = BinaryTensor.pack(np.ones((16, 8)), np.ones((8, 32)), np.ones(16), np.ones(32))
        >>> layer = {**teacher["layers"][0], "mlp": {**teacher["layers"][0]["mlp"], "up": {"binary": ones}}}
        >>> config = BinaryConfig(model, (("mlp.up", 8),), 1)
        >>> found = tune_scales_kl({**teacher, "layers": [layer]}, config, teacher, np.ones((2, 9), int),
        ...                        key=jax.random.key(1), epochs=1)
        >>> len(found.losses), found.params["layers"][0]["mlp"]["up"]["binary"].scale_in.dtype
        (1, dtype(bfloat16))
    """
    check_binary_params("params", params, config)
    key = random_key(key)
    if not math.isfinite(positive("rate", real("rate", rate))):
        raise ValueError(f"rate={rate!r} must be finite")
    if not (optimizer is None or (hasattr(optimizer, "init") and hasattr(optimizer, "update"))):
        raise TypeError(f"optimizer={optimizer!r} must be a GradientTransformation of optax, or None")
    tokens = check_tokens(tokens, config.model)[:, :-1]
    epochs, batch = count("epochs", epochs), count("batch", batch)
    if config.blocks_done == 0:
        raise ValueError("no block is factorised, so there are no scales to tune")
    windows = len(tokens)
    steps = -(-windows // batch)
    optimizer = adam(float(rate), epochs * steps, 0.0) if optimizer is None else optimizer
    student, split = _opened(params, config)
    scales = {path: jnp.array(leaf) for path, leaf in _flat(student).items() if _is_scale(path)}
    if not isinstance(teacher_params, Mapping) or "layers" not in teacher_params:
        raise TypeError("teacher_params must be the parameters of a transformer, a dict with its layers")
    teacher = transformer.unstack_layers(teacher_params)
    check_dense_params("teacher_params", teacher, config.model)
    teacher = transformer.stack_layers(teacher) if not split else teacher
    teacher = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), teacher)
    state = jax.jit(optimizer.init)(scales)
    losses: list[float] = []
    fingerprint = ""
    if checkpoint is not None:
        about = [digest(tree) for tree in (params, teacher, tokens, jax.random.key_data(key))]
        settings = [*about, config.to_dict(), epochs, batch, repr(rate)]
        fingerprint = hashlib.blake2b(json.dumps(settings).encode(), digest_size=12).hexdigest()
        found = _load(Path(checkpoint), fingerprint, (scales, state))
        if found is not None:
            (scales, state), losses = found
    model = _plain(config.model)
    on_device = jnp.asarray(tokens)
    for index in range(len(losses), epochs):
        order = jax.random.permutation(jax.random.fold_in(key, index), windows)
        order = jnp.resize(order, (steps * batch,)).reshape(steps, batch)
        scales, state, found = _scale_pass(
            scales, state, student, teacher, on_device, order, config=model, optimizer=optimizer
        )
        losses.append(float(found.mean()))
        if not np.isfinite(losses[-1]):
            raise ValueError(
                f"the divergence from the teacher is {losses[-1]} in pass {index + 1}; lower the rate"
            )
        if checkpoint is not None:
            _save(Path(checkpoint), fingerprint, (scales, state), losses)
        if progress is not None:
            progress(index + 1, epochs, losses[-1])
    return TunedScales(_with_scales(params, scales, split), losses)


def _plain(config: TransformerConfig) -> TransformerConfig:
    return dataclasses.replace(config, param_dtype="float32", compute_dtype="float32")


def _opened(params: Mapping[str, Any], config: BinaryConfig) -> tuple[dict[str, Any], bool]:
    """Signs as int8, scales in float32; layers stacked where they are alike, else True."""

    def walk(tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return jnp.asarray(tree, jnp.float32)
        if "binary" in tree:
            return open_signs(tree, jnp.int8)
        return {name: walk(part) for name, part in tree.items()}

    layers = [walk(layer) for layer in params["layers"]]
    opened = {**walk({name: part for name, part in params.items() if name != "layers"}), "layers": layers}
    return (opened, True) if config.partial else (transformer.stack_layers(opened), False)


def _flat(tree: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _is_scale(path: str) -> bool:
    return path.split(".")[-1] in ("scale_in", "scale_out")


def _put_scales(student: Any, scales: Mapping[str, Array]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: scales.get(path_name(path), leaf), student)


def _many_activations(config: TransformerConfig, tokens: Array) -> bool:
    """Whether one batch keeps more than 512 MB for its backward pass."""
    of_token = config.num_layers * (12 * config.width + 6 * config.mlp_width)
    return 4 * tokens.size * of_token > 512e6


@functools.partial(jax.jit, static_argnames=("config", "optimizer"), donate_argnames=("scales", "state"))
def _scale_pass(
    scales: dict[str, Array],
    state: Any,
    student: Any,
    teacher: Any,
    tokens: Array,
    order: Array,
    *,
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
) -> tuple[Any, Any, Array]:
    def loss(scales: Any, tokens: Array) -> Array:
        wanted = transformer.forward(teacher, tokens, config).logits
        params = _put_scales(student, scales)
        given = transformer.forward(
            params, tokens, config, linear=open_linear, rematerialize=_many_activations(config, tokens)
        ).logits
        wanted, given = (jax.nn.log_softmax(one) for one in (wanted, given))
        return (jnp.exp(wanted) * (wanted - given)).sum(-1).mean()

    def step(carry: Any, rows: Array) -> tuple[Any, Array]:
        scales, state = carry
        value, gradient = jax.value_and_grad(loss)(scales, tokens[rows])
        updates, state = optimizer.update(gradient, state, scales)
        return (optax.apply_updates(scales, updates), state), value

    (scales, state), losses = lax.scan(step, (scales, state), order)
    return scales, state, losses


def _with_scales(params: Mapping[str, Any], scales: Mapping[str, Array], split: bool) -> dict[str, Any]:
    """The model with these scales, in the types that it has its own in."""

    def walk(tree: Any, path: str, layer: int) -> Any:
        if isinstance(tree, BinaryTensor):
            key = path.removesuffix(".binary")
            found = {}
            for name in ("scale_in", "scale_out"):
                new = (
                    scales[f"layers.{layer}.{key}.{name}"] if split else scales[f"layers.{key}.{name}"][layer]
                )
                found[name] = new.astype(getattr(tree, name).dtype)
            return BinaryTensor(tree.v_words, tree.u_words, **found, inputs=tree.inputs, rank=tree.rank)
        if isinstance(tree, Mapping):
            return {name: walk(part, f"{path}.{name}".lstrip("."), layer) for name, part in tree.items()}
        return tree

    return {**params, "layers": [walk(layer, "", index) for index, layer in enumerate(params["layers"])]}


def _save(path: Path, fingerprint: str, tree: Any, losses: list[float]) -> None:
    arrays = {f"{index:05d}": np.asarray(leaf) for index, leaf in enumerate(jax.tree.leaves(tree))}
    temporary = path.with_name(path.name + ".partial")
    _files.write_safetensors(temporary, arrays, {"fingerprint": fingerprint, "losses": json.dumps(losses)})
    os.replace(temporary, path)


def _load(path: Path, fingerprint: str, tree: Any) -> tuple[Any, list[float]] | None:
    import safetensors

    if not path.is_file():
        return None
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            arrays = [file.get_tensor(name) for name in sorted(file.keys())]
            losses = json.loads(about["losses"])
    except (safetensors.SafetensorError, KeyError, ValueError):
        return None  # a damaged file is work not done
    if about.get("fingerprint") != fingerprint:
        raise ValueError(
            f"{path} belongs to a run with another model, text, seed or settings; remove it to begin anew"
        )
    leaves, structure = jax.tree.flatten(tree)
    # A file has no scalars: they come back with one axis.
    return structure.unflatten(
        [jnp.array(one).reshape(old.shape) for old, one in zip(leaves, arrays)]
    ), losses
