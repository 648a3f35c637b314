"""Optimizers by name, for the command line and for comparisons: one call, one calling convention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jaxtyping import PyTree
from optax.contrib import muon

from effml import trees
from effml._validate import one_of
from effml.optimize._limuon import limuon
from effml.optimize._normuon import normuon
from effml.optimize._scale import scale
from effml.optimize._two_point import with_previous_params

__all__ = ["OPTIMIZERS", "TWO_POINT", "make_optimizer"]


def make_optimizer(
    name: str,
    *,
    learning_rate: optax.ScalarOrSchedule,
    vector_learning_rate: optax.ScalarOrSchedule | None = None,
    weight_decay: float = 0.0,
    params_for_roles: PyTree | None = None,
    tied_head: bool | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer called `name`, with the rules each one needs for embeddings, head and vectors.

    | name | matrices | embedding and head | vectors |
    |---|---|---|---|
    | `adamw` | AdamW | AdamW | AdamW, no weight decay |
    | `limuon` | orthogonalised estimate from two gradients | AdamW | AdamW, no weight decay |
    | `muon` | Muon, rescaled to AdamW's step size (RMS 0.2) | AdamW | AdamW, no weight decay |
    | `normuon` | orthogonalised, normalised per output neuron | AdamW | AdamW, no weight decay |
    | `scale` | normalised per output unit | the same; momentum on the head | AdamW |

    Args:
        name: one of `effml.optimize.OPTIMIZERS`.
        learning_rate: a number or a schedule (`effml.train.schedule`).
        vector_learning_rate: rate of the vectors, a number or schedule; None = `learning_rate`.
        weight_decay: decoupled weight decay.
        params_for_roles: parameters or shapes; roles are then decided and checked at once instead of at
            `init`.
        tied_head: the model uses its embedding as the head; None = when it has no head.
        options: passed on: `b1`, `b2` to `adamw`; `beta`, `nesterov`, `ns_steps`, ... to
            `optax.contrib.muon`; anything `effml.optimize.limuon`, `effml.optimize.normuon` or
            `effml.optimize.scale` takes.

    Returns:
        An optax transformation. Those in `effml.optimize.TWO_POINT` keep the previous parameters
        (`with_previous_params`) and take `gradient_at`: `extra_args=effml.optimize.second_gradient` of
        `effml.train.make_step`.

    Raises:
        ValueError: unknown name, or arguments the method refuses.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"embedding": {"table": jnp.ones((9, 4))}, "head": {"kernel": jnp.ones((4, 9))}}
        >>> optimizer = make_optimizer("muon", learning_rate=1e-3, params_for_roles=params)
        >>> state = optimizer.init(params)
    """
    make = _MAKERS[one_of("optimizer", name, OPTIMIZERS)]
    if callable(learning_rate) and vector_learning_rate is not None and not callable(vector_learning_rate):
        raise ValueError(
            f"vector_learning_rate={vector_learning_rate!r} is constant while learning_rate is a schedule; "
            "give a schedule of the same shape, or optax.constant_schedule if that is meant"
        )
    optimizer = make(learning_rate, vector_learning_rate, weight_decay, tied_head, options)
    optimizer = optax.with_extra_args_support(optimizer)
    if params_for_roles is not None:
        jax.eval_shape(optimizer.init, params_for_roles)
    return optimizer


def _group(kept: Callable[[str], str]) -> Callable[[PyTree], PyTree]:
    return lambda params: jax.tree.map(kept, trees.parameter_roles(params))


def _vectors(rate: Any, vector_rate: Any, options: dict[str, Any]) -> optax.GradientTransformation:
    """AdamW without decay, with the options that a recipe has for its own Adam."""
    if "labels" in options:
        raise ValueError(
            "labels is not taken by make_optimizer, which goes by names; give it to effml.optimize.normuon or limuon"
        )
    if vector_rate is None:
        vector_rate = options.get("adam_learning_rate", rate)
    return optax.adamw(
        vector_rate, b1=options.get("adam_b1", 0.9), b2=options.get("adam_b2", 0.95), weight_decay=0.0
    )


def _adamw(rate: Any, vector_rate: Any, weight_decay: float, tied_head: Any, options: dict[str, Any]) -> Any:
    del tied_head
    options = {"b1": 0.9, "b2": 0.95, **options}
    return optax.partition(
        {
            "weights": optax.adamw(rate, weight_decay=weight_decay, **options),
            "vector": optax.adamw(rate if vector_rate is None else vector_rate, weight_decay=0.0, **options),
            "frozen": optax.set_to_zero(),
        },
        _group(lambda role: role if role in ("vector", "frozen") else "weights"),
    )


def _limuon(rate: Any, vector_rate: Any, weight_decay: float, tied_head: Any, options: dict[str, Any]) -> Any:
    del tied_head
    options = {"adam_learning_rate": rate, "adam_weight_decay": weight_decay, **options}
    return with_previous_params(
        optax.partition(
            {
                "weights": limuon(rate, weight_decay=weight_decay, **options),
                "vector": _vectors(rate, vector_rate, options),
                "frozen": optax.set_to_zero(),
            },
            _group(lambda role: role if role in ("vector", "frozen") else "weights"),
            mask_compatible_extra_args=True,
        )
    )


def _muon(rate: Any, vector_rate: Any, weight_decay: float, tied_head: Any, options: dict[str, Any]) -> Any:
    del tied_head
    options = {"consistent_rms": 0.2, **options}
    tables = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=weight_decay)
    return optax.partition(
        {
            "matrix": muon(
                rate,
                weight_decay=weight_decay,
                muon_weight_dimension_numbers=lambda params: trees.dimension_numbers(
                    params, include=("matrix",)
                ),
                **options,
            ),
            "tables": tables,
            "vector": optax.adamw(
                rate if vector_rate is None else vector_rate, b1=0.9, b2=0.95, weight_decay=0.0
            ),
            "frozen": optax.set_to_zero(),
        },
        _group(lambda role: "tables" if role in ("embedding", "head") else role),
    )


def _normuon(
    rate: Any, vector_rate: Any, weight_decay: float, tied_head: Any, options: dict[str, Any]
) -> Any:
    del tied_head
    options = {"adam_learning_rate": rate, "adam_weight_decay": weight_decay, **options}
    return optax.partition(
        {
            "weights": normuon(rate, weight_decay=weight_decay, **options),
            "vector": _vectors(rate, vector_rate, options),
            "frozen": optax.set_to_zero(),
        },
        _group(lambda role: role if role in ("vector", "frozen") else "weights"),
    )


def _scale(rate: Any, vector_rate: Any, weight_decay: float, tied_head: Any, options: dict[str, Any]) -> Any:
    return scale(
        rate, adam_learning_rate=vector_rate, weight_decay=weight_decay, tied_head=tied_head, **options
    )


_MAKERS: dict[str, Callable[..., Any]] = {
    "adamw": _adamw,
    "limuon": _limuon,
    "muon": _muon,
    "normuon": _normuon,
    "scale": _scale,
}
OPTIMIZERS: tuple[str, ...] = tuple(_MAKERS)
TWO_POINT: tuple[str, ...] = ("limuon",)
