"""The transformation at NorMuon's heart: momentum, orthogonalised, then normalised per neuron. See `_normuon`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from effml import linalg
from effml._validate import floating_dtype, one_of
from effml.optimize._distribution import (
    INPUTS,
    OUTPUTS,
    Distribution,
    Item,
    Reductions,
    exchange,
    split_sides,
)
from effml.optimize._layout import (
    Layout,
    Specs,
    from_matrices,
    from_rows,
    layouts,
    matrix_shape,
    statistic_shape,
    to_matrices,
    to_rows,
)

__all__ = ["NorMuonState", "scale_by_normuon"]

# What is checked at once; arrays may be traced.
NUMBERS: tuple[Any, ...] = (int, float, np.integer, np.floating)


class NorMuonState(NamedTuple):
    """Steps taken (int32), the momentum `mu` (like the parameters) and the neurons' mean squares `nu`.

    A leaf of `nu` is float32 with its parameter's axes, of size 1 where the statistic is a mean: [1, outputs]
    for a kernel [inputs, outputs], [layers, 1, outputs] for a stack of them. So it is split over devices as
    its parameter is.
    """

    count: jax.Array
    mu: PyTree
    nu: PyTree


def scale_by_normuon(
    b1: Any = 0.95,
    b2: Any = 0.95,
    eps: Any = 1e-8,
    *,
    nesterov: bool = False,
    ns_coeffs: Any = "muon5",
    ns_dtype: Any = None,
    normalize: bool = True,
    rms_target: Any = 0.2,
    rescale: str = "rms",
    shape_scale: str | None = None,
    neuron_axis: str = "output",
    mu_dtype: Any = None,
    v_floor: Any = 0.0,
    weight_dimension_numbers: Specs = None,
    distribute: Distribution | None = None,
) -> optax.GradientTransformation:
    """Momentum, orthogonalised and normalised per neuron; for matrices only, without rate and decay.

        u = rms_target sqrt(inputs outputs) / ||O'||_F O',    O' = O / (sqrt(v) + eps)       rescale="rms"
        u = shape ||O||_F / ||O'||_F O'                                                 rescale="preserve"

    with `shape` 1 (None), sqrt(max(1, outputs / inputs)) (`width`), sqrt(outputs / inputs) (`spectral`) or
    rms_target sqrt(max(inputs, outputs)) (`rms`).

    Args:
        b1: decay of the momentum, in [0, 1).
        b2: decay of the neurons' mean squares, in [0, 1).
        eps: added to their root.
        nesterov: orthogonalise (1 - b1) G + b1 M instead of the momentum M.
        ns_coeffs: `muon5`, `dion` or `polar_express`, or numbers, as in `effml.linalg.newton_schulz`.
        ns_dtype: dtype of the matrix products; None = bfloat16 on GPU and TPU, float32 on CPU. With
            `distribute`, matrices travel in it too.
        normalize: False = leave the neurons as they are: Muon with a measured norm.
        rms_target: root mean square of the update.
        rescale: `rms` or `preserve`.
        shape_scale: None, `width`, `spectral` or `rms`; with `rescale="preserve"` only, as `rms` has it all.
        neuron_axis: `output`, or `longer`: inputs are the neurons where there are more of them than outputs.
        mu_dtype: dtype of the momentum; None = that of the parameters.
        v_floor: smallest v, as a share of its mean over the neurons of the matrix.
        weight_dimension_numbers: input and output axes. None = by names and shapes
            (`effml.trees.dimension_numbers`); one `MuonDimensionNumbers` for all; a tree of them or a
            function to it. All other axes count separate matrices: layers of a scan, experts.
        distribute: spread the orthogonalisation over a mesh; see `effml.optimize.Distribution`.

    Returns:
        An `optax.GradientTransformation` with a `NorMuonState`.

    Raises:
        ValueError: a number out of range, an unknown option, coefficients of another shape than (3,) or
            (k, 3), a dtype that is not floating-point, a shape scale beside `rescale="rms"`; at init or
            update: a leaf with fewer than two axes, without axes, or with axes that overlap or do not exist,
            named by its path.

    Example:
        >>> import jax.numpy as jnp
        >>> transform = scale_by_normuon()
        >>> gradient = {"kernel": jnp.array([[1.0, 20.0], [3.0, -40.0]])}
        >>> update, state = transform.update(gradient, transform.init(gradient))
        >>> float(jnp.sqrt(jnp.mean(jnp.square(update["kernel"])))), state.nu["kernel"].shape
        (0.2..., (1, 2))
    """
    check_decays(b1=b1, b2=b2)
    for name, value in (("eps", eps), ("v_floor", v_floor)):
        if isinstance(value, NUMBERS) and not 0 <= value < math.inf:
            raise ValueError(f"{name}={value!r} must not be negative, and must be finite")
    if isinstance(rms_target, NUMBERS) and not 0 < rms_target < math.inf:
        raise ValueError(f"rms_target={rms_target!r} must be above 0, and finite")
    check_coefficients(ns_coeffs)
    ns_dtype, mu_dtype = floating_dtype("ns_dtype", ns_dtype), floating_dtype("mu_dtype", mu_dtype)
    one_of("rescale", rescale, ("rms", "preserve"))
    one_of("neuron_axis", neuron_axis, ("output", "longer"))
    if shape_scale is not None:
        one_of("shape_scale", shape_scale, ("width", "spectral", "rms"))
        if rescale == "rms":
            raise ValueError(
                f"shape_scale={shape_scale!r} beside rescale='rms' would count the shape twice; use "
                "rescale='preserve', or shape_scale=None"
            )
    use_floor = not (isinstance(v_floor, NUMBERS) and v_floor == 0)

    def kept_axis(shape: tuple[int, int, int]) -> int:
        return INPUTS if neuron_axis == "longer" and shape[1] > shape[2] else OUTPUTS

    def unit_axes(leaf: Any, layout: Layout) -> tuple[int, ...]:
        kept = kept_axis(matrix_shape(leaf.shape, layout))
        return layout.inputs if kept == INPUTS else layout.outputs

    def orthogonalize(matrices: jax.Array) -> jax.Array:
        return linalg.newton_schulz(matrices, ns_coeffs, dtype=ns_dtype)

    def finish(
        o: jax.Array, rows: jax.Array, shape: tuple[int, int], kept: int, sums: Reductions
    ) -> tuple[jax.Array, jax.Array]:
        """Normalises [n, inputs, outputs]; two passes over it, one to measure and one to scale."""
        inputs, outputs = shape
        summed = INPUTS + OUTPUTS - kept
        squares = sums.within(jnp.sum(jnp.square(o), axis=summed))
        rows = b2 * rows + (1 - b2) * squares / shape[summed - 1]
        inverse = jnp.ones_like(rows)
        if normalize:
            floored = rows
            if use_floor:
                mean = sums.across(jnp.sum(rows, axis=1, keepdims=True)) / shape[kept - 1]
                floored = jnp.maximum(rows, v_floor * mean)
            inverse = _reciprocal(jnp.sqrt(floored) + eps)
        # Both norms follow from the neurons' sums of squares, so a split matrix needs one sum of vectors.
        wanted = [squares * jnp.square(inverse)] + ([squares] if rescale == "preserve" else [])
        norms = jnp.sqrt(sums.across(jnp.stack([jnp.sum(w, axis=1) for w in wanted])))
        if rescale == "rms":
            target = rms_target * math.sqrt(inputs * outputs)
        else:
            target = norms[1] * _shape_factor(shape_scale, inputs, outputs, rms_target)
        factor = inverse * (target * _reciprocal(norms[0]))[:, None]
        return o * jnp.expand_dims(factor, summed), rows

    def init(params: PyTree) -> NorMuonState:
        found = layouts("scale_by_normuon", weight_dimension_numbers, params)
        if distribute is not None:
            split_sides(distribute, params, found, warn=True)

        def statistic(path: Any, leaf: Any) -> jax.Array:
            layout = found[tuple(path)]
            return jnp.zeros(statistic_shape(leaf.shape, layout, unit_axes(leaf, layout)), _wide(leaf.dtype))

        return NorMuonState(
            count=jnp.zeros([], jnp.int32),
            mu=jax.tree.map(lambda p: jnp.zeros_like(p, dtype=mu_dtype), params),
            nu=jax.tree_util.tree_map_with_path(statistic, params),
        )

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, NorMuonState]:
        del params
        found = layouts("scale_by_normuon", weight_dimension_numbers, updates)
        paths = [tuple(path) for path, _ in jax.tree_util.tree_flatten_with_path(updates)[0]]
        gradients, treedef = jax.tree.flatten(updates)
        momenta, statistics = jax.tree.leaves(state.mu), jax.tree.leaves(state.nu)

        means, items, kept = [], [], []
        for path, gradient, momentum, statistic in zip(paths, gradients, momenta, statistics):
            wide, layout = _wide(gradient.dtype), found[path]
            gradient = gradient.astype(wide)
            mean = b1 * momentum.astype(wide) + (1 - b1) * gradient
            means.append(mean.astype(momentum.dtype))
            direction = (1 - b1) * gradient + b1 * mean if nesterov else mean
            items.append(
                Item(to_matrices(direction, layout), to_rows(statistic, layout, unit_axes(gradient, layout)))
            )
            kept.append(kept_axis(matrix_shape(gradient.shape, layout)))

        alone = list(range(len(items)))
        if distribute is not None:
            sides = split_sides(distribute, updates, found, warn=False)
            shared = [i for i, path in enumerate(paths) if path in sides and gradients[i].size]
            alone = [i for i in alone if i not in shared]
            dtype = ns_dtype
            if dtype is None:
                dtype = jnp.float32 if distribute.platform in ("cpu", None) else jnp.bfloat16
            done = exchange(
                distribute,
                [items[i] for i in shared],
                [sides[paths[i]] for i in shared],
                [kept[i] for i in shared],
                lambda x: linalg.newton_schulz(x, ns_coeffs, dtype=dtype),
                finish,
                dtype,
            )
            for index, item in zip(shared, done):
                items[index] = item
        for i in alone:
            if gradients[i].size:
                shape = items[i].matrices.shape[1:]
                items[i] = Item(
                    *finish(orthogonalize(items[i].matrices), items[i].rows, shape, kept[i], Reductions())
                )

        moved = [
            from_matrices(item.matrices, gradient.shape, found[path]).astype(gradient.dtype)
            for path, gradient, item in zip(paths, gradients, items)
        ]
        rows = [
            from_rows(item.rows, old.shape, found[path], unit_axes(gradient, found[path])).astype(old.dtype)
            for path, gradient, old, item in zip(paths, gradients, statistics, items)
        ]
        new = NorMuonState(
            jnp.asarray(optax.safe_increment(state.count)), treedef.unflatten(means), treedef.unflatten(rows)
        )
        return treedef.unflatten(moved), new

    return optax.GradientTransformation(init, update)


def check_recipe(rate: Any, adam_rate: Any, weight_decay: Any, adam_weight_decay: Any, **decays: Any) -> Any:
    """Complains about the numbers of a recipe with a fallback on Adam; returns Adam's rate."""
    check_decays(**decays)
    for name, value in (("weight_decay", weight_decay), ("adam_weight_decay", adam_weight_decay)):
        if isinstance(value, NUMBERS) and not 0 <= value < math.inf:
            raise ValueError(f"{name}={value!r} must not be negative, and must be finite")
    check_rates(learning_rate=rate)
    if adam_rate is None:
        return rate
    check_rates(adam_learning_rate=adam_rate)
    if callable(rate) and not callable(adam_rate):
        raise ValueError(
            f"adam_learning_rate={adam_rate!r} is constant while learning_rate is a schedule; "
            "give a schedule of the same shape, or optax.constant_schedule if that is meant"
        )
    return adam_rate


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _reciprocal(value: jax.Array) -> jax.Array:
    """1 / value, and 0 where value is 0: a zero matrix or a dead neuron does not move."""
    return jnp.where(value > 0, 1 / jnp.where(value > 0, value, 1), 0)


def _shape_factor(shape_scale: str | None, inputs: int, outputs: int, rms_target: Any) -> Any:
    if shape_scale == "width":
        return math.sqrt(max(1.0, outputs / inputs))
    if shape_scale == "spectral":
        return math.sqrt(outputs / inputs)
    if shape_scale == "rms":
        return rms_target * math.sqrt(max(inputs, outputs))
    return 1.0


def check_decays(**decays: Any) -> None:
    """Raises where a number is no decay rate; what is traced is not looked at."""
    for name, value in decays.items():
        if isinstance(value, NUMBERS) and not 0 <= value < 1:
            raise ValueError(f"{name}={value!r} must be in [0, 1)")


def check_rates(**rates: Any) -> None:
    """Raises where something is neither a finite number nor a schedule; what is traced is not looked at."""
    for name, value in rates.items():
        if value is None or isinstance(value, str):
            raise TypeError(f"{name}={value!r} must be a number or a schedule")
        if isinstance(value, NUMBERS) and not math.isfinite(value):
            raise ValueError(f"{name}={value!r} must be finite")


def check_coefficients(ns_coeffs: Any) -> None:
    """Raises where these are no coefficients of Newton-Schulz, a name or numbers."""
    if isinstance(ns_coeffs, str):
        one_of("ns_coeffs", ns_coeffs, linalg.NEWTON_SCHULZ_COEFFICIENTS)
    elif (shape := np.shape(ns_coeffs)) != (3,) and (len(shape) != 2 or shape[1] != 3 or not shape[0]):
        raise ValueError(f"ns_coeffs of shape {shape} must have shape (3,) or (k, 3)")
