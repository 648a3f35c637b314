"""The fake-quantised model as a function of its rotations, in the form that trains fastest.

The fused model rounds x A in front of a kernel A^T K, and its stream changes basis at every skip. Written in the
*original* basis, with e = round(x A) - x A held constant (the straight-through gradient), that is

    (x A + e) A^T K = x K + (e A^T) K

so that neither a kernel nor a skip has to be rotated: a product of [tokens, D] with [D, D] on either side of the
rounding replaces one of [D, D] with every kernel, and the backward pass has one product for each basis. The value is
that of the fused model with exact transitions, and so is the gradient along rotations (A A^T = I is used, which no
rotation leaves). With rounded kernels, w = round(A^T K B) - A^T K B likewise adds (x A + e) w B^T; then the kernels are
rotated in every step after all.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from effml import linalg
from effml._validate import count
from effml.nn import transformer
from effml.nn.transformer import AttentionInputs, TransformerConfig, dense_attention, plain_linear
from effml.quantize._fake import check_bits, fake_quant_act, fake_quant_weight
from effml.quantize.respinquant._rotations import RotationSet

__all__ = ["RotationTraining", "check_number", "check_training", "quantized_loss", "with_rotations"]


def check_number(name: str, value: Any) -> None:
    """Raises TypeError where a value can't be compared with numbers.

    Example:
        >>> check_number("max_step", "1.5")
        Traceback (most recent call last):
        ...
        TypeError: max_step='1.5' must be a number
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be a number")


def check_training(steps: Any, max_step: Any) -> None:
    """Raises where rotations can't be trained so.

    Raises:
        ValueError: for a number out of range.
        TypeError: for steps that are no integer, or a step that is no number.

    Example:
        >>> check_training(40, float("inf"))
        Traceback (most recent call last):
        ...
        ValueError: max_step=inf must be above 0 and finite
    """
    if isinstance(steps, bool) or not hasattr(steps, "__index__"):
        raise TypeError(f"steps={steps!r} must be an integer")
    if steps < 0:
        raise ValueError(f"steps={steps!r} must be 0 or more")
    check_number("max_step", max_step)
    if not 0 < max_step < math.inf:
        raise ValueError(f"max_step={max_step!r} must be above 0 and finite")


@dataclass(frozen=True)
class RotationTraining:
    """How rotations are trained, and what is rounded meanwhile.

    Attributes:
        steps: of gradient descent.
        max_step: ceiling of the step's size at the start; it falls to 0 as a cosine. SpinQuant's code has 1.5.
        activation_bits: of what products read, rounded per token, asymmetrically; 16 leaves them alone.
        weight_bits: of kernels, symmetric per output unit. 16 (they keep their precision while rotations train)
            is what one wants before GPTQ, and several times faster.
        key_value_bits: of keys and values, asymmetric per token and head; 16 leaves them alone.
        hadamard: whether what the down projection reads, and keys where they are rounded, go through a Hadamard
            transform before rounding.
        evaluate_every: steps between measurements on the calibration set that decides which rotations are kept.
        exact: the Cayley step by a solve; None does so up to a width of 1024.
        iters: iterations of the other form.
        renormalize_every: steps between QR factorisations that take rounding away.
        rematerialize: compute a layer's activations again in the backward pass instead of keeping them, for a third
            more time; None does so where they would take more than 256 MiB.
    """

    steps: int = 40
    max_step: float = 1.5
    activation_bits: int = 4
    weight_bits: int = 16
    key_value_bits: int = 16
    hadamard: bool = True
    evaluate_every: int = 5
    exact: bool | None = None
    iters: int = 5
    renormalize_every: int = 20
    rematerialize: bool | None = None

    def __post_init__(self) -> None:
        for name in ("activation_bits", "weight_bits", "key_value_bits"):
            check_bits(name, getattr(self, name))
        check_training(self.steps, self.max_step)
        for name in ("evaluate_every", "iters", "renormalize_every"):
            count(name, getattr(self, name))


def quantized_loss(
    rotations: RotationSet,
    params: Mapping[str, Any],
    tokens: Array,
    config: TransformerConfig,
    settings: RotationTraining,
) -> Array:
    """Mean nats per next token of the fake-quantised model, with exact transitions.

    Args:
        rotations: what the gradient is for.
        params: folded, with a head of its own, layers stacked and projections joined.
        tokens: int[batch, length + 1].
        config: of the model.
        settings: what is rounded.

    Returns:
        A number.
    """
    config = dataclasses.replace(config, compute_dtype="float32", tied_head=False)
    linear, attention = _seams(config, settings)
    return transformer.next_token_loss(
        with_rotations(params, rotations),
        {"tokens": tokens},
        config,
        linear=linear,
        attention=attention,
        rematerialize=bool(settings.rematerialize),
    )[0]


def with_rotations(params: Mapping[str, Any], rotations: RotationSet) -> dict[str, Any]:
    """Stacked, joined parameters whose kernels carry the rotations of what they read and write."""
    layers = params["layers"]
    attention, mlp = layers["attention"], layers["mlp"]
    a, m, v = rotations
    first = "query_key_value"
    second = "gate_up" if "gate_up" in mlp else "up"
    attention = {
        **attention,
        first: {**attention[first], "input": a[:-1], "values": v},
        "output": {**attention["output"], "heads": v, "out": m},
        "value_rotation": v,
    }
    mlp = {**mlp, second: {**mlp[second], "input": m}, "down": {**mlp["down"], "out": a[1:]}}
    return {**params, "layers": {**layers, "attention": attention, "mlp": mlp}}


def _seams(config: TransformerConfig, settings: RotationTraining) -> tuple[Any, Any]:
    head, values = config.head_dim, config.kv_heads * config.head_dim
    order = linalg.hadamard_order(config.mlp_width)

    def linear(x: Array, params: Mapping[str, Any], name: str) -> Array:
        if name == "head":
            return plain_linear(x, params, name)

        def turn(x: Array) -> Array:
            """What the fused kernel reads."""
            if "input" in params:
                return _product(x, params["input"])
            if "heads" in params:
                return _per_head(x, params["heads"])
            return linalg.fht(x, order=order) if settings.hadamard else x

        def turn_back(x: Array) -> Array:
            if "input" in params:
                return _product(x, params["input"].T)
            if "heads" in params:
                return _per_head(x, params["heads"].T)
            return linalg.fht(x, order=order) if settings.hadamard else x

        error = None
        if settings.activation_bits < 16:
            turned = jax.lax.stop_gradient(turn(x))
            error = jax.lax.stop_gradient(fake_quant_act(turned, settings.activation_bits)) - turned
        seen = x if error is None else x + turn_back(error)
        y = plain_linear(seen, params, name)
        if settings.weight_bits == 16:
            return y
        kernel = params["kernel"]
        turned_kernel = turn(kernel.T).T
        if "values" in params:
            rest, last = turned_kernel[:, :-values], turned_kernel[:, -values:]
            turned_kernel = jnp.concatenate([rest, _per_head(last, params["values"])], axis=-1)
        elif "out" in params:
            turned_kernel = _product(turned_kernel, params["out"])
        turned_kernel = jax.lax.stop_gradient(turned_kernel)
        rounded = fake_quant_weight(turned_kernel, settings.weight_bits, clip=None)
        wrong = jax.lax.stop_gradient(rounded - turned_kernel)
        read = turn(x) if error is None else turn(x) + error
        extra = jnp.matmul(read, wrong)
        if "values" in params:
            back = _per_head(extra[..., -values:], params["values"].T)
            extra = jnp.concatenate([extra[..., :-values], back], axis=-1)
        elif "out" in params:
            extra = _product(extra, params["out"].T)
        return y + extra

    def attention(inputs: AttentionInputs) -> tuple[Array, Any]:
        if settings.key_value_bits == 16:
            return dense_attention(inputs)
        blocks = linalg.hadamard_order(head)
        bits = settings.key_value_bits

        def transform(x: Array) -> Array:
            """Queries and keys go through the same one, which leaves their products alone."""
            return linalg.fht(x, order=blocks) if settings.hadamard else x

        turned = jax.lax.stop_gradient(transform(inputs.key))
        error = jax.lax.stop_gradient(fake_quant_act(turned, bits)) - turned
        key = inputs.key + transform(error)
        rotation = inputs.params["value_rotation"]
        turned = jax.lax.stop_gradient(_product(inputs.value, rotation))
        error = jax.lax.stop_gradient(fake_quant_act(turned, bits)) - turned
        return dense_attention(inputs._replace(key=key, value=inputs.value + _product(error, rotation.T)))

    return linear, attention


def _per_head(x: Array, rotation: Array) -> Array:
    heads = x.reshape(*x.shape[:-1], -1, rotation.shape[-1])
    return _product(heads, rotation).reshape(x.shape)


def _product(x: Array, rotation: Array) -> Array:
    """x @ rotation in full float32 on every device: a rotation that is rounded is none."""
    return jnp.matmul(x, rotation, precision=jax.lax.Precision.HIGHEST)
