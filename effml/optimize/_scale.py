"""SCALE: gradients normalised per output unit, and momentum on the output head only.

A transformer trained by plain SGD falls far behind Adam; Adam pays two extra copies of every weight for it.
SCALE keeps one extra copy of one matrix, the head, and no state for any other matrix:

    m_l <- beta * m_l + (1 - beta) * g_l     if l is the head (m starts at 0, no bias correction)
    m_l <- g_l                               for every other matrix: no state at all
    W_l <- W_l - lr * (C(m_l) + weight_decay * W_l)

C divides all incoming weights of one output unit by their root mean square: for a kernel [in, out] one number
per column, reduced over axis 0. The norm sees through any positive rescaling of a unit's gradient, which is
what makes layers with very different gradient sizes train at one learning rate; the head is where the
gradient is noisiest, so momentum pays there. Vectors (gains, biases) go to AdamW.

The heart is the axis (output units, in either layout) and the momentum on the head alone; the rest is
plumbing.

Source: Glentis, Li, Han, Hong, "Memory-Efficient LLM Pretraining via Minimalist Optimizer Design", arXiv
2506.16659. Where the paper and its code differ (the paper's norm is l2, the code's RMS), the default is the
code's.

Things to know:

* Rates do not transfer between `norm="rms"` and `norm="l2"`: the two differ by sqrt(inputs) in every layer.
* Clipping by global norm before `scale` changes only the head and the vectors: matrices without momentum are
  scale free.
* Average gradients *before* normalising: put `optax.MultiSteps` around `scale`, not inside a chain after it.
* In bfloat16 without a float32 copy, small steps are rounded away: of weights of size 0.02 (normal), one step
  leaves 32 % where they were at a rate of 1e-4, 12 % at 3e-4, 4 % at 1e-3. Keep the parameters in float32, or
  round stochastically when adding the update.
* A unit whose gradient is all zero gets a zero update. One whose gradient is tiny noise gets a full-sized
  one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree
from optax.contrib import MuonDimensionNumbers

from effml import trees
from effml._validate import one_of, positive

__all__ = ["SCALE_RULES", "MomentumState", "normalize_columns", "scale"]

SCALE_RULES = {
    "matrix": "normalised per output unit, no state",
    "embedding": "normalised per feature, no state",
    "head": "momentum, then normalised per output unit",
    "vector": "AdamW",
    "frozen": "not moved",
}

Specs = MuonDimensionNumbers | int | Sequence[int] | Callable[[PyTree], PyTree] | PyTree | None


def normalize_columns(
    reduction_axes: Specs = None, *, norm: str = "rms", eps: Any = 1e-8
) -> optax.GradientTransformation:
    """Divides every output unit's gradient by its norm over the input axes; keeps no state.

        u[..., j] = g[..., j] / max(sqrt(mean_i g[i, j]^2), eps)        norm="rms"
        u[..., j] = g[..., j] / max(sqrt(sum_i g[i, j]^2), eps)         norm="l2"

    Norms are taken in float32 whatever the gradient's dtype; the result has the gradient's dtype. A unit with
    an entry above about 1e19, whose square overflows, gets a zero update. Where the input axes are sharded, the
    compiler sums one number per output unit over the devices.

    Args:
        reduction_axes: the input axes. None = by the names and shapes of `effml.trees.dimension_numbers`; an
            int, a sequence of ints or a `MuonDimensionNumbers` = the same for every leaf; a tree of
            `MuonDimensionNumbers`, or a function from the updates to such a tree. Axes that are neither input
            nor output are batch axes.
        norm: `rms` or `l2`.
        eps: smallest norm that is divided by.

    Returns:
        A stateless `optax.GradientTransformation`.

    Raises:
        ValueError: unknown norm, eps <= 0; at init or update: a leaf with fewer than two axes, or without a
            spec.

    Example:
        >>> import jax.numpy as jnp
        >>> transform = normalize_columns(0, norm="l2")
        >>> updates, _ = transform.update({"kernel": jnp.array([[3.0, 0.0], [4.0, 0.0]])}, transform.init({}))
        >>> updates["kernel"].tolist()
        [[0.6..., 0.0], [0.8..., 0.0]]
    """
    one_of("norm", norm, ("rms", "l2"))
    if isinstance(eps, (int, float)):
        positive("eps", eps)
    reduce = jnp.mean if norm == "rms" else jnp.sum

    def normalize(update: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        wide = update.astype(jnp.promote_types(update.dtype, jnp.float32))
        size = jnp.sqrt(reduce(jnp.square(wide), axis=axes, keepdims=True))
        # Changes no digit, but keeps XLA:CPU from fusing the sum into the division, where it runs at half its speed.
        info = jnp.finfo(size.dtype)
        size = jax.lax.reduce_precision(size, info.nexp, info.nmant)
        return (wide / jnp.maximum(size, eps)).astype(update.dtype)

    def init(params: PyTree) -> optax.EmptyState:
        _reduction_axes(reduction_axes, params)
        return optax.EmptyState()

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        del params
        axes = _reduction_axes(reduction_axes, updates)
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: normalize(leaf, axes[tuple(path)]), updates
        ), state

    return optax.GradientTransformation(init, update)


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, MuonDimensionNumbers)


def _reduction_axes(specs: Specs, tree: PyTree) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """The input axes of each leaf, by its path, so that a masked tree finds its own among all of them."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    for path, leaf in leaves:
        if leaf.ndim < 2:
            raise ValueError(
                f"normalize_columns: {_described(path, leaf)} needs an input and an output axis. Send "
                "vectors to another optimizer (effml.optimize.scale does)"
            )
    by_path: dict[tuple[Any, ...], Any] = {}
    if isinstance(specs, int | MuonDimensionNumbers) or _is_axes(specs):
        by_path = {tuple(path): specs for path, _ in leaves}
    else:
        chosen = trees.dimension_numbers if specs is None else specs
        chosen = chosen(tree) if callable(chosen) else chosen
        for path, spec in jax.tree_util.tree_flatten_with_path(chosen, is_leaf=_is_spec)[0]:
            by_path[tuple(path)] = spec
    result = {}
    for path, leaf in leaves:
        spec = by_path.get(tuple(path))
        if spec is None:
            raise ValueError(f"normalize_columns: no axes are given for {_described(path, leaf)}")
        axes = spec.reduction_axis if isinstance(spec, MuonDimensionNumbers) else spec
        axes = (axes,) if isinstance(axes, int) else tuple(axes)
        if any(not -leaf.ndim <= axis < leaf.ndim for axis in axes):
            raise ValueError(f"normalize_columns: axes {axes} are given for {_described(path, leaf)}")
        result[tuple(path)] = axes
    return result


def _is_axes(specs: Any) -> bool:
    return isinstance(specs, Sequence) and all(isinstance(axis, int) for axis in specs)


def _described(path: Any, leaf: Any) -> str:
    return f"{trees.path_name(path) or 'the leaf'} of shape {tuple(leaf.shape)}"


class MomentumState(NamedTuple):
    """The running mean of the head's gradient: one array per head and nothing else."""

    momentum: PyTree


def _momentum(decay: Any, dtype: Any = None) -> optax.GradientTransformation:
    """m <- decay * m + (1 - decay) * g without bias correction, in float32, stored in `dtype`.

    `optax.ema` is the same without dtype care: a float32 decay (from `inject_hyperparams`) would turn a
    bfloat16 accumulator into float32 at the first step.
    """

    def init(params: PyTree) -> MomentumState:
        return MomentumState(jax.tree.map(lambda p: jnp.zeros_like(p, dtype=dtype or p.dtype), params))

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, MomentumState]:
        del params

        def blend(update: jax.Array, momentum: jax.Array) -> jax.Array:
            wide = jnp.promote_types(update.dtype, jnp.float32)
            return decay * momentum.astype(wide) + (1 - decay) * update.astype(wide)

        blended = jax.tree.map(blend, updates, state.momentum)
        stored = jax.tree.map(lambda new, old: new.astype(old.dtype), blended, state.momentum)
        out = jax.tree.map(lambda new, update: new.astype(update.dtype), blended, updates)
        return out, MomentumState(stored)

    return optax.GradientTransformation(init, update)


def _hold() -> optax.GradientTransformation:
    """Zero updates in the parameter's own dtype, also for the float0 gradients of integer leaves."""

    def zero(update: Any, param: Any = None) -> jax.Array:
        dtype = (update if param is None else param).dtype
        return jnp.zeros(update.shape, jnp.int32 if dtype == jax.dtypes.float0 else dtype)

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Any]:
        return jax.tree.map(zero, updates, *([] if params is None else [params])), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale(
    learning_rate: optax.ScalarOrSchedule,
    *,
    momentum: Any = 0.9,
    norm: str = "rms",
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: Any = 0.9,
    adam_b2: Any = 0.999,
    labels: PyTree | Callable[[PyTree], PyTree] | None = None,
    weight_dimension_numbers: Specs = None,
    momentum_dtype: Any = None,
    tied_head: bool | None = None,
    allow_no_head: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """SCALE: per-output-unit normalised SGD, with momentum on the head only and AdamW for vectors.

        head:               m <- beta m + (1 - beta) g,   W <- W - lr (C(m) + weight_decay W)
        other matrices:                                   W <- W - lr (C(g) + weight_decay W)

    State: one array per head, two per vector, nothing per hidden matrix or embedding. Against Adam's three
    copies of all weights that is about 0.35 to 0.45 of the bytes for language models with a 32k vocabulary.

    Every number may be wrapped by `optax.inject_hyperparams(scale, static_args=("labels",
    "weight_dimension_numbers", "momentum_dtype"))` and changed without compiling again.

    Args:
        learning_rate: step of the matrices; with `norm="rms"` every entry of an update has about this size.
            1e-3 up to 350M parameters, 2e-4 at 1B, 1e-4 at 7B in the paper, with 10 % warm-up and a cosine to
            0.1 of the peak.
        momentum: beta of the head, in [0, 1). 0 makes the head an ordinary matrix that still keeps its array.
        norm: `rms` (rates are alike for all widths) or `l2` (the paper's text).
        eps: smallest norm that is divided by.
        weight_decay: decoupled, multiplied by the rate, for every leaf.
        adam_learning_rate: rate of the vectors; None = `learning_rate`. Beside a schedule it must be a
            schedule too, normally of the same shape with its own peak.
        adam_b1: Adam's decay of the first moment, vectors only.
        adam_b2: Adam's decay of the second moment, vectors only.
        labels: a tree of roles (see `effml.trees.parameter_roles`) or a function that makes one from the
            parameters.
        weight_dimension_numbers: input and output axes as in `normalize_columns`. For parameters in torch's
            layout: `functools.partial(effml.trees.dimension_numbers, layout="torch")`.
        momentum_dtype: dtype of the head's momentum; None = the head's own.
        tied_head: True = the token embedding is also the head: it gets momentum and one norm per token (over
            the features). None = so when there is no head, with a warning; the paper does not cover tied
            weights.
        allow_no_head: accept a model without any head; nothing gets momentum then.

    Returns:
        An optax transformation. Its `update` needs `params` when `weight_decay` is not 0.

    Raises:
        ValueError: bad numbers, at once; no head or an unknown role, at init.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> params = {"embedding": {"table": jnp.ones((9, 4))}, "head": {"kernel": jnp.ones((4, 9))}}
        >>> optimizer = optax.chain(optax.clip_by_global_norm(1.0), scale(1e-3))
        >>> updates, state = optimizer.update(params, optimizer.init(params), params)
        >>> float(abs(updates["head"]["kernel"]).max())
        0.001...
    """
    if isinstance(momentum, (int, float)) and not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum!r} must be in [0, 1)")
    for name, value in (("adam_b1", adam_b1), ("adam_b2", adam_b2)):
        if isinstance(value, (int, float)) and not 0 <= value < 1:
            raise ValueError(f"{name}={value!r} must be in [0, 1)")
    if isinstance(weight_decay, (int, float)) and not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay={weight_decay!r} must not be negative, and must be finite")
    for name, value in (("learning_rate", learning_rate), ("adam_learning_rate", adam_learning_rate)):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}={value!r} must be finite")
    if callable(learning_rate) and adam_learning_rate is not None and not callable(adam_learning_rate):
        raise ValueError(
            f"adam_learning_rate={adam_learning_rate!r} is constant while learning_rate is a schedule; "
            "give a schedule of the same shape, or optax.constant_schedule if that is meant"
        )
    adam_learning_rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    no_decay = isinstance(weight_decay, (int, float)) and weight_decay == 0

    def step(rate: Any, *transforms: optax.GradientTransformation) -> optax.GradientTransformation:
        decay = () if no_decay else (optax.add_decayed_weights(weight_decay),)
        return optax.chain(*transforms, *decay, optax.scale_by_learning_rate(rate))

    normalize_columns(0, norm=norm, eps=eps)  # complains about norm and eps before there are parameters

    def partition(params: PyTree, warn: bool) -> optax.GradientTransformationExtraArgs:
        roles = _scale_roles(params, labels, tied_head, allow_no_head, warn)
        specs = weight_dimension_numbers
        if specs is None:
            specs = trees.dimension_numbers(params, roles)
        elif callable(specs):
            specs = specs(params)
        normalize = normalize_columns(specs, norm=norm, eps=eps)
        plain = step(learning_rate, normalize)
        return optax.partition(
            {
                "matrix": plain,
                "embedding": plain,
                "head": step(learning_rate, _momentum(momentum, momentum_dtype), normalize),
                "vector": step(adam_learning_rate, optax.scale_by_adam(adam_b1, adam_b2, eps=1e-8)),
                "frozen": _hold(),
            },
            roles,
        )

    def init(params: PyTree) -> optax.OptState:
        return partition(params, warn=True).init(params)

    def update(
        updates: PyTree, state: optax.OptState, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, optax.OptState]:
        # From the parameters where there are any: the gradient of an integer leaf has a type of its own.
        known = updates if params is None else params
        return partition(known, warn=False).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _scale_roles(
    params: PyTree, labels: Any, tied_head: bool | None, allow_no_head: bool, warn: bool
) -> PyTree:
    if labels is not None:
        roles = labels(params) if callable(labels) else labels
        for role in set(jax.tree.leaves(roles)):
            one_of("labels", role, trees.ROLES)
    else:
        roles = trees.parameter_roles(params, tied_head=bool(tied_head))
    found = jax.tree.leaves(roles)
    heads = found.count("head")
    if heads > 1 and warn:
        warnings.warn(f"{heads} parameters have the role 'head'; each of them gets momentum", stacklevel=4)
    if heads or allow_no_head or not found:
        return roles
    if labels is None and tied_head is None and "embedding" in found:
        if warn:
            warnings.warn(
                "no head found: the token embedding is taken to be tied, so it gets momentum and one norm "
                "per token. Say tied_head=True to mean that, or allow_no_head=True for no momentum at all",
                stacklevel=4,
            )
        return trees.parameter_roles(params, tied_head=True)
    raise ValueError(
        f"no parameter has the role 'head' (searched path components: {', '.join(trees.HEAD_PATTERNS)}; "
        f"parameters: {', '.join(trees.leaf_names(params)[:8])}, ...). Give labels, or allow_no_head=True to "
        "train without head momentum"
    )
