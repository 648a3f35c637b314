"""The estimate that LiMuon orthogonalises, and how it is carried; see `effml.optimize._limuon`."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from effml import linalg, trees
from effml._validate import floating_dtype, one_of, seed_in_range
from effml.optimize._distribution import OUTPUTS, Distribution, Item, exchange, split_sides
from effml.optimize._layout import Layout, Specs, from_matrices, layouts, matrix_shape, to_matrices
from effml.optimize._neuron_norm import NUMBERS, check_coefficients

__all__ = ["LiMuonState", "LowRank", "rank_energy", "scale_by_limuon"]


class LowRank(NamedTuple):
    """Three trees like the parameters: M is close to (u * s[..., None, :]) @ vt.

    For a kernel [m, n]: u [m, r], s [r], vt [r, n], with further leading axes for stacks of matrices. So u
    is split over devices as the rows of its parameter are, and vt as the columns.
    """

    u: PyTree
    s: PyTree
    vt: PyTree


class LiMuonState(NamedTuple):
    """What `scale_by_limuon` keeps.

    Fields:
        count: int32, steps taken.
        key: uint32, of the random sketches; step and leaf are folded into it.
        factors: the carried estimate: a `LowRank`, or a tree of whole matrices with `rank=None`.
        rank_energy: with a rank, one number per leaf: ||carried||^2 / ||M||^2 at the last step.
    """

    count: jax.Array
    key: jax.Array
    factors: Any
    rank_energy: PyTree


def scale_by_limuon(
    beta: Any = 0.05,
    *,
    rank: int | Any = None,
    oversampling: int | Any = None,
    power_iters: int | Any = None,
    polar: str = "ns",
    ns_coeffs: Any = "muon5",
    ns_steps: int | Any = None,
    ns_dtype: Any = None,
    direction: str = "momentum",
    shape_scale: str = "rms",
    weight_dimension_numbers: Specs = None,
    seed: int | Any = 0,
    factor_dtype: Any = None,
    qr: str = "householder",
    distribute: Distribution | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The polar factor of the STORM estimate; for matrices only, without rate and decay.

        M_t = g + (1 - beta) (M_{t-1} - h),    u = shape * polar(M_t)

    `update(g, state, params, prev_params_grad=h)` takes the gradient at the parameters and, as an extra
    argument of the same tree, the gradient of the same batch at the parameters of the step before. In the
    first step there is none; any tree of that shape is accepted then, g itself for instance.

    Args:
        beta: weight of the new gradient, in [0, 1], or a schedule. 1 is orthogonalised SGD, 0 never forgets.
        rank: triples to carry from step to step; None = whole matrices (the paper's option 1).
        oversampling: further columns of the random sketch, at least 2; None = 5.
        power_iters: power iterations of the sketch; None = 0.
        polar: `ns` (Newton-Schulz) or `svd` (exact).
        ns_coeffs: `muon5`, `dion`, `polar_express` or numbers, as in `effml.linalg.newton_schulz`.
        ns_steps: Newton-Schulz steps; None = as many as the coefficients have.
        ns_dtype: dtype of its products; None = bfloat16 on GPU and TPU, float32 on CPU.
        direction: `momentum`, or `factors`: step along U V^T of the carried factors. Only r directions move
            then, and the old parameters can be computed from the new (`limuon`). It needs a rank, and is not
            in the paper.
        shape_scale: `rms` = 0.2 sqrt(max(m, n)), so that updates have Adam's usual size in every layer;
            `width` = sqrt(max(1, outputs / inputs)); `none` = 1, as in the paper's boxes.
        weight_dimension_numbers: input and output axes. None = by names and shapes
            (`effml.trees.dimension_numbers`); one `MuonDimensionNumbers` for all; a tree of them or a
            function to it. All other axes count separate matrices.
        seed: of the sketches.
        factor_dtype: dtype of what is carried; None = float32, or float64 for float64 parameters.
        qr: `householder` or `cholesky2`: how the sketch's basis is made. The second moves
            only small matrices between devices; on a CPU it is a little slower.
        distribute: spread Newton-Schulz over a mesh; see `effml.optimize.Distribution`.

    Returns:
        An optax transformation with a `LiMuonState`. All devices must hold the same `state.key`.

    Raises:
        ValueError: numbers or options out of range, coefficients of another shape than (3,) or (k, 3), a dtype
            that is not floating-point; at init or update: a leaf without two axes; at update: no
            `prev_params_grad`, or one of another tree or shape than the gradient. There is no fallback to a
            running mean.
        TypeError: a seed that is no integer; a count that is not an integer known before tracing. Under
            `optax.inject_hyperparams` list `rank` (and other counts that you give) in `static_args`.

    Example:
        >>> import jax.numpy as jnp
        >>> transform = scale_by_limuon(beta=0.1, rank=2)
        >>> gradient = {"kernel": jnp.eye(4, 6)}
        >>> state = transform.init(gradient)
        >>> update, state = transform.update(gradient, state, prev_params_grad=gradient)
        >>> state.factors.u["kernel"].shape, state.factors.vt["kernel"].shape
        ((4, 2), (2, 6))
        >>> float(state.rank_energy["kernel"])
        0.5...
    """
    if isinstance(beta, NUMBERS) and not 0 <= beta <= 1:
        raise ValueError(f"beta={beta!r} must be in [0, 1]")
    one_of("polar", polar, ("ns", "svd"))
    one_of("direction", direction, ("momentum", "factors"))
    one_of("shape_scale", shape_scale, ("rms", "width", "none"))
    one_of("qr", qr, ("householder", "cholesky2"))
    check_coefficients(ns_coeffs)
    ns_dtype = floating_dtype("ns_dtype", ns_dtype)
    factor_dtype = floating_dtype("factor_dtype", factor_dtype)
    _check_seed(seed)
    rank = _known("rank", rank, None, least=1)
    oversampling = _known("oversampling", oversampling, 5, least=2)
    power_iters = _known("power_iters", power_iters, 0, least=0)
    ns_steps = _known("ns_steps", ns_steps, None, least=1)
    if direction == "factors" and rank is None:
        raise ValueError("direction='factors' steps along the carried factors: give a rank")
    if distribute is not None and (polar == "svd" or direction == "factors"):
        raise ValueError("distribute spreads Newton-Schulz: it goes with polar='ns', direction='momentum'")

    def init(params: PyTree) -> LiMuonState:
        found = layouts("scale_by_limuon", weight_dimension_numbers, params)
        if distribute is not None:
            split_sides(distribute, params, found, warn=True)

        def carried(path: Any, leaf: Any) -> Any:
            dtype = _wide(leaf.dtype) if factor_dtype is None else factor_dtype
            if rank is None:
                return jnp.zeros(leaf.shape, dtype)
            batch, m, n = _factor_shape(leaf.shape, found[tuple(path)])
            r = min(rank, m, n)
            shapes = ((*batch, m, r), (*batch, r), (*batch, r, n))
            return LowRank(*(jnp.zeros(shape, dtype) for shape in shapes))

        factors = jax.tree_util.tree_map_with_path(carried, params)
        energy = jax.tree.map(lambda leaf: jnp.ones([], jnp.float32), params)
        key = jax.random.key_data(jax.random.key(seed))
        return LiMuonState(
            jnp.zeros([], jnp.int32),
            key,
            factors if rank is None else _inside_out(factors, params),
            () if rank is None else energy,
        )

    def polar_factor(matrices: jax.Array) -> jax.Array:
        if polar == "svd":
            return linalg.polar(matrices)
        return linalg.newton_schulz(matrices, ns_coeffs, steps=ns_steps, dtype=ns_dtype)

    def update(
        updates: PyTree, state: Any, params: PyTree = None, *, prev_params_grad: PyTree = None, **extra: Any
    ) -> tuple[PyTree, LiMuonState]:
        del params, extra
        check_second_gradient("scale_by_limuon", updates, prev_params_grad)
        found = layouts("scale_by_limuon", weight_dimension_numbers, updates)
        paths = [tuple(path) for path, _ in jax.tree_util.tree_flatten_with_path(updates)[0]]
        leaves, treedef = jax.tree.flatten(updates)
        first = state.count == 0
        weight: Any = beta(state.count) if callable(beta) else beta
        keep = 1 - weight
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.count)

        estimates = []
        carried = _leaves(state.factors, rank is not None)
        for path, leaf, second, before in zip(paths, leaves, jax.tree.leaves(prev_params_grad), carried):
            new, old = (to_matrices(g.astype(_wide(leaf.dtype)), found[path]) for g in (leaf, second))
            if rank is None:
                before = to_matrices(before.astype(new.dtype), found[path])
            else:
                before = _product(LowRank(*(part.astype(new.dtype) for part in before))).reshape(new.shape)
            estimates.append(jnp.where(first, new, new + keep * (before - old)).astype(new.dtype))

        factors, energies = [], []
        for index, (path, leaf, estimate, before) in enumerate(zip(paths, leaves, estimates, carried)):
            if rank is None:
                whole = from_matrices(estimate, leaf.shape, found[path])
                factors.append(whole.astype(before.dtype))
                continue
            if not leaf.size:
                factors.append(before)
                energies.append(jnp.ones([], jnp.float32))
                continue
            sketch_key = jax.random.fold_in(key, index)
            u, s, v = linalg.rsvd(sketch_key, estimate, rank, oversampling, power_iters, qr=qr)
            factors.append(
                LowRank(
                    *(
                        new.reshape(old.shape).astype(old.dtype)
                        for new, old in zip(LowRank(u, s, v.mT), before)
                    )
                )
            )
            whole = jnp.sum(jnp.square(estimate))
            kept = jnp.sum(jnp.square(s)) / jnp.where(whole > 0, whole, 1)
            energies.append(jnp.where(whole > 0, kept, 1).astype(jnp.float32))

        if direction == "factors":
            directions = [
                factor_direction(LowRank(*(part.astype(estimate.dtype) for part in low))).reshape(
                    estimate.shape
                )
                for low, estimate in zip(factors, estimates)
            ]
        elif distribute is not None:
            directions = _distributed(
                distribute, updates, found, estimates, ns_coeffs, ns_steps, ns_dtype, polar_factor
            )
        else:
            directions = [polar_factor(estimate) if estimate.size else estimate for estimate in estimates]
        moved = [
            from_matrices(
                shape_factor(shape_scale, leaf.shape, found[path]) * one, leaf.shape, found[path]
            ).astype(leaf.dtype)
            for path, leaf, one in zip(paths, leaves, directions)
        ]
        return treedef.unflatten(moved), LiMuonState(
            jnp.asarray(optax.safe_increment(state.count)),
            state.key,
            treedef.unflatten(factors)
            if rank is None
            else LowRank(*(treedef.unflatten([low[part] for low in factors]) for part in range(3))),
            () if rank is None else treedef.unflatten(energies),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _known(name: str, value: Any, default: int | None, least: int) -> Any:
    """An integer that shapes depend on; `optax.inject_hyperparams` makes arrays of them unless told not to."""
    if value is None:
        return default
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r} must be an integer known before tracing; under optax.inject_hyperparams, list "
            f"{name!r} in static_args"
        ) from None
    if value < least:
        raise ValueError(f"{name}={value!r} must be at least {least}")
    return value


def _check_seed(seed: Any) -> None:
    """Raises where this is no seed; an integer array may be traced, as under `optax.inject_hyperparams`."""
    if isinstance(seed, jax.Array) and seed.ndim == 0 and jnp.issubdtype(seed.dtype, jnp.integer):
        return
    try:
        if isinstance(seed, (bool, np.bool_)):
            raise TypeError
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed={seed!r} must be an integer") from None
    seed_in_range(number)


def check_second_gradient(caller: str, gradients: PyTree, second: PyTree) -> None:
    """Raises ValueError unless `second` has the tree and shapes of `gradients`."""
    if second is None:
        raise ValueError(
            f"{caller} needs the gradient of the same batch at the previous parameters: "
            "update(gradients, state, params, prev_params_grad=...). effml.optimize.two_point_grad computes "
            "both gradients; effml.optimize.with_previous_params keeps the previous parameters"
        )
    ours, others = (
        {tuple(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
        for tree in (gradients, second)
    )
    for path in [*ours, *others]:
        if (path in ours) != (path in others):
            where = "prev_params_grad" if path in others else "the gradients"
            raise ValueError(
                f"{caller}: {trees.path_name(path)} is in {where} only. Inside optax.masked or optax.partition, "
                "pass mask_compatible_extra_args=True to it"
            )
    for path, leaf in ours.items():
        if leaf.shape != others[path].shape:
            raise ValueError(
                f"{caller}: prev_params_grad has the shape {tuple(others[path].shape)} for "
                f"{trees.path_name(path)}, the gradient {tuple(leaf.shape)}"
            )


def rank_energy(state: Any) -> dict[str, jax.Array]:
    """How much of each estimate the carried factors hold, from any optimizer state with LiMuon in it.

        ||carried||_F^2 / ||M||_F^2,    between 0 and 1

    Args:
        state: the state of `scale_by_limuon`, or of anything built around it.

    Returns:
        A float32 scalar for each parameter's name; empty without a rank.

    Example:
        >>> import jax.numpy as jnp
        >>> transform = scale_by_limuon(rank=1)
        >>> gradient = {"kernel": jnp.eye(2)}
        >>> _, state = transform.update(gradient, transform.init(gradient), prev_params_grad=gradient)
        >>> {name: round(float(value), 2) for name, value in rank_energy(state).items()}
        {'kernel': 0.5}
    """
    found = {}
    for one in limuon_states(state):
        for path, value in jax.tree_util.tree_flatten_with_path(one.rank_energy)[0]:
            found[trees.path_name(path)] = value
    return found


def limuon_states(state: Any) -> list[LiMuonState]:
    """All states of `scale_by_limuon` inside a state."""
    is_ours = lambda node: isinstance(node, LiMuonState)
    return [leaf for leaf in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(leaf)]


def factor_direction(low: LowRank) -> jax.Array:
    """U V^T of the triples that are not zero: the polar factor of the carried matrix."""
    rounding = jnp.finfo(low.s.dtype).eps * max(low.u.shape[-2], low.vt.shape[-1])
    present = low.s > rounding * low.s[..., :1]
    return _product(LowRank(low.u, present.astype(low.s.dtype), low.vt))


def shape_factor(shape_scale: str, shape: tuple[int, ...], layout: Layout) -> float:
    """The number that the polar factor of a leaf is multiplied by."""
    _, inputs, outputs = matrix_shape(shape, layout)
    if shape_scale == "rms":
        return 0.2 * math.sqrt(max(inputs, outputs))
    return math.sqrt(max(1.0, outputs / inputs)) if shape_scale == "width" else 1.0


def _product(low: LowRank) -> jax.Array:
    return jnp.matmul(low.u * low.s[..., None, :], low.vt, precision=jax.lax.Precision.HIGHEST)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _factor_shape(shape: tuple[int, ...], layout: Layout) -> tuple[tuple[int, ...], int, int]:
    _, m, n = matrix_shape(shape, layout)
    return tuple(shape[axis] for axis in layout.batch), m, n


def _inside_out(factors: PyTree, params: PyTree) -> LowRank:
    """A tree of triples as a triple of trees."""
    triples = jax.tree.structure(params).flatten_up_to(factors)
    unflatten = jax.tree.structure(params).unflatten
    return LowRank(*(unflatten([triple[part] for triple in triples]) for part in range(3)))


def _leaves(factors: Any, low: bool) -> list[Any]:
    if not low:
        return jax.tree.leaves(factors)
    return [LowRank(*parts) for parts in zip(*(jax.tree.leaves(tree) for tree in factors))]


def _distributed(
    distribute: Distribution,
    updates: PyTree,
    found: dict[Any, Layout],
    estimates: list[jax.Array],
    ns_coeffs: Any,
    ns_steps: int | None,
    ns_dtype: Any,
    alone: Any,
) -> list[jax.Array]:
    """The polar factors, of split matrices by way of one exchange per shape."""
    sides = split_sides(distribute, updates, found, warn=False)
    paths = [tuple(path) for path, _ in jax.tree_util.tree_flatten_with_path(updates)[0]]
    if ns_dtype is None:
        ns_dtype = jnp.float32 if distribute.platform in ("cpu", None) else jnp.bfloat16
    shared = [index for index, path in enumerate(paths) if path in sides and estimates[index].size]
    unused = lambda x: jnp.zeros((x.shape[0], x.shape[2]), x.dtype)
    done = exchange(
        distribute,
        [Item(estimates[index], unused(estimates[index])) for index in shared],
        [sides[paths[index]] for index in shared],
        [OUTPUTS] * len(shared),
        lambda x: linalg.newton_schulz(x, ns_coeffs, steps=ns_steps, dtype=ns_dtype),
        lambda x, rows, shape, kept, sums: (x, rows),
        ns_dtype,
    )
    exchanged = dict(zip(shared, done))
    return [
        exchanged[index].matrices if index in exchanged else alone(estimate)
        for index, estimate in enumerate(estimates)
    ]
