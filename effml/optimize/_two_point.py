"""Optimizers that need two gradients of one batch: at the parameters, and at those of the step before.

Three ways to run one, which take the same steps:

| loop | who keeps the previous parameters |
|---|---|
| your own, with `two_point_grad` | you |
| `two_point_step` | its `TwoPointState` |
| `effml.train.make_step` and other loops with one gradient | the optimizer's state, by `with_previous_params` |

The previous parameters are a full copy of the weights. `two_point_memory` counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from effml import trees
from effml._validate import count
from effml.optimize._limuon_estimator import rank_energy

__all__ = [
    "PreviousParamsState",
    "RecomputingTransformation",
    "TwoPointState",
    "second_gradient",
    "two_point_grad",
    "two_point_init",
    "two_point_step",
    "with_previous_params",
]


class RecomputingTransformation(optax.GradientTransformationExtraArgs):
    """A transformation that can compute the previous parameters from its state, or some of them.

    Attributes:
        keep: keep(params) -> the same tree with `optax.MaskedNode()` for what needs no copy.
        previous: previous(params, state, copies) -> all parameters of the step before, where `copies` is
            what `keep` gave for them.
    """

    keep: Callable[[PyTree], PyTree]
    previous: Callable[[PyTree, Any, PyTree], PyTree]

    def __new__(cls, init: Any, update: Any, keep: Any, previous: Any) -> RecomputingTransformation:
        self = super().__new__(cls, init, update)
        self.keep, self.previous = keep, previous
        return self


def _keep(tx: Any, params: PyTree) -> PyTree:
    return tx.keep(params) if isinstance(tx, RecomputingTransformation) else params


def _previous(tx: Any, params: PyTree, state: Any, copies: PyTree) -> PyTree:
    return tx.previous(params, state, copies) if isinstance(tx, RecomputingTransformation) else copies


def two_point_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, accum: int = 1, sequential: bool = True
) -> Callable[..., Any]:
    """The gradients of one batch at two sets of parameters, with the same random key.

        g = grad loss(params; batch, rng),    h = grad loss(prev_params; batch, rng)

    Args:
        loss_fn: `loss_fn(params, batch, rng)` -> scalar, or (scalar, aux) with `has_aux`.
        has_aux: whether the loss comes with further results.
        accum: number of equal parts that the batch [B, ...] is cut into, run one after the other and averaged
            with equal weights, both gradients alike. Part i gets the key `fold_in(rng, i)`.
        sequential: the second gradient starts when the first is done, so that activations of one are alive
            at a time; False leaves the order to the compiler.

    Returns:
        A function (params, prev_params, batch, rng) -> (value, g, h). The value is that of `params`: the loss,
        or (loss, aux) with `has_aux` (aux averaged over the parts). `rng` may be None without `accum`.

    Raises:
        ValueError: accum < 1; when called, a batch that does not split into `accum` parts.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> loss = lambda params, batch, rng: jnp.mean((batch * params) ** 2)
        >>> value, new, old = two_point_grad(loss)(jnp.float32(2), jnp.float32(1), jnp.ones(4), None)
        >>> float(value), float(new), float(old)
        (4.0, 4.0, 2.0)
    """
    count("accum", accum)
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=has_aux)

    def both(params: PyTree, prev_params: PyTree, batch: PyTree, rng: Any) -> tuple[Any, PyTree, PyTree]:
        value, new = value_and_grad(params, batch, rng)
        if sequential:
            prev_params, new = jax.lax.optimization_barrier((prev_params, new))
        _, old = value_and_grad(prev_params, batch, rng)
        return value, new, old

    def accumulated(
        params: PyTree, prev_params: PyTree, batch: PyTree, rng: Any
    ) -> tuple[Any, PyTree, PyTree]:
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
            if not leaf.ndim or leaf.shape[0] % accum:
                raise ValueError(
                    f"two_point_grad: {trees.path_name(path) or 'the batch'} of shape {tuple(leaf.shape)} does "
                    f"not split into accum={accum} equal parts"
                )
        parts = jax.tree.map(lambda a: a.reshape(accum, -1, *a.shape[1:]), batch)

        def part(total: Any, indexed: Any) -> tuple[Any, None]:
            index, piece = indexed
            key = None if rng is None else jax.random.fold_in(rng, index)
            result = both(params, prev_params, piece, key)
            return jax.tree.map(lambda t, r: t + r / accum, total, result), None

        first = jax.tree.map(lambda a: a[0], parts)
        shapes = jax.eval_shape(lambda piece: both(params, prev_params, piece, rng), first)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)), shapes)
        total, _ = jax.lax.scan(part, zeros, (jnp.arange(accum), parts))
        value, new, old = total
        like = lambda tree: jax.tree.map(lambda g, s: g.astype(s.dtype), tree, shapes[1])
        return value, like(new), like(old)

    return both if accum == 1 else accumulated


class TwoPointState(NamedTuple):
    """What `two_point_step` changes: step (int32), parameters, those of the step before, optimizer state.

    With an optimizer that computes previous parameters itself, `prev_params` has holes for those.
    """

    step: jax.Array
    params: PyTree
    prev_params: PyTree
    opt_state: Any


def two_point_init(
    params: PyTree, tx: optax.GradientTransformation, *, mesh: Mesh | None = None
) -> TwoPointState:
    """The state that `two_point_step` starts from; parameters are copied, as steps consume their state.

    Args:
        params: where training starts.
        tx: the optimizer.
        mesh: a mesh of `effml.train.make_mesh`: parameters, previous parameters and optimizer state are split
            as `effml.train` splits them.

    Returns:
        A `TwoPointState` at step 0, whose previous parameters equal the parameters.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> state = two_point_init({"w": jnp.ones(3)}, optax.sgd(0.1))
        >>> state.prev_params["w"].tolist()
        [1.0, 1.0, 1.0]
    """

    def start(params: PyTree) -> TwoPointState:
        params = jax.tree.map(jnp.copy, params)
        copies = jax.tree.map(jnp.copy, _keep(tx, params))
        return _placed(TwoPointState(jnp.zeros([], jnp.int32), params, copies, tx.init(params)), mesh)

    return jax.jit(start)(params)


def _placed(state: TwoPointState, mesh: Mesh | None) -> TwoPointState:
    if mesh is None:
        return state
    from effml.train import sharding

    specs = sharding.param_specs(state.params, mesh)

    def like_params(tree: PyTree) -> PyTree:
        return sharding.shard_tree(tree, sharding.state_specs(tree, state.params, mesh), mesh)

    return TwoPointState(
        sharding.shard_tree(state.step, jax.sharding.PartitionSpec(), mesh),
        sharding.shard_tree(state.params, specs, mesh),
        like_params(state.prev_params),
        like_params(state.opt_state),
    )


def two_point_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    accum: int = 1,
    mesh: Mesh | None = None,
) -> Callable[..., tuple[TwoPointState, dict[str, Any]]]:
    """A compiled step (state, batch, rng) -> (state, metrics) of an optimizer that needs two gradients.

        g, h = grad loss(params), grad loss(prev_params)        same batch, same key
        updates = tx.update(g, opt_state, params, prev_params_grad=h)
        params, prev_params <- params + updates, params

    The state passed in is consumed (donated): the buffer of the parameters becomes that of the previous ones,
    and the new parameters are written over the old previous ones.

    Args:
        loss_fn: as for `two_point_grad`.
        tx: the optimizer, such as `limuon`; it must be the first that sees the gradients.
        has_aux: as for `two_point_grad`; the metrics then have `aux`.
        accum: as for `two_point_grad`.
        mesh: a mesh of `effml.train.make_mesh`: state as in `two_point_init`, batches split by rows.

    Returns:
        The step. Its attribute `jitted` is the compiled function (params, prev_params, step, opt_state, batch,
        rng). Metrics: `loss`, `gradient_norm` (of g) and, for a low-rank LiMuon, `rank_energy` (its mean).

    Raises:
        ValueError: as `two_point_grad` does.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from effml.optimize import limuon
        >>> loss = lambda params, batch, rng: jnp.mean((batch @ params["up"]["kernel"] - 1) ** 2)
        >>> optimizer = limuon(0.1)
        >>> state = two_point_init({"up": {"kernel": jnp.zeros((3, 2))}}, optimizer)
        >>> step = two_point_step(loss, optimizer)
        >>> for _ in range(3):
        ...     state, metrics = step(state, jnp.eye(3), jax.random.key(0))
        >>> int(state.step), float(metrics["loss"]) < 1
        (3, True)
    """
    gradients = two_point_grad(loss_fn, has_aux=has_aux, accum=accum)
    tx = tx if isinstance(tx, RecomputingTransformation) else optax.with_extra_args_support(tx)

    # Donated buffers are paired with results of their type in order: with parameters first among the arguments
    # and previous parameters first among the results, passing the one on as the other copies nothing.
    def advance(
        params: PyTree, prev_params: PyTree, step: jax.Array, opt_state: Any, batch: PyTree, rng: Any
    ) -> tuple[Any, ...]:
        before = _previous(tx, params, opt_state, prev_params)
        value, new, old = gradients(params, before, batch, rng)
        updates, opt_state = tx.update(new, opt_state, params, prev_params_grad=old)
        moved = optax.apply_updates(params, updates)
        state = _placed(TwoPointState(step + 1, moved, _keep(tx, params), opt_state), mesh)
        loss, aux = value if has_aux else (value, None)
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(new)}
        energies = list(rank_energy(opt_state).values())
        if energies:
            metrics["rank_energy"] = sum(energies) / len(energies)
        if has_aux:
            metrics["aux"] = aux
        return state.prev_params, state.params, state.step, state.opt_state, metrics

    jitted = jax.jit(advance, donate_argnums=(0, 1, 2, 3))

    def run(state: TwoPointState, batch: PyTree, rng: Any = None) -> tuple[TwoPointState, dict[str, Any]]:
        if mesh is not None:
            from effml.train import sharding

            batch = sharding.to_global(batch, mesh)
        prev_params, params, step, opt_state, metrics = jitted(
            state.params, state.prev_params, state.step, state.opt_state, batch, rng
        )
        return TwoPointState(step, params, prev_params, opt_state), metrics

    run.jitted = jitted  # pyright: ignore[reportFunctionMemberAccess]
    return run


class PreviousParamsState(NamedTuple):
    """The state of the wrapped transformation, and the parameters of the step before."""

    inner: Any
    previous: PyTree


def with_previous_params(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keeps the previous parameters in the optimizer state, for loops that keep parameters and state only.

        h = gradient_at(previous),    updates = tx.update(g, inner, params, prev_params_grad=h)
        previous <- params

    So checkpoints, shardings and byte counts see the previous parameters. `update` takes `gradient_at`, a
    function from parameters to the gradient of the same batch with the same key; `effml.train.make_step` has
    it in its `UpdateContext`: pass `extra_args=second_gradient`. In the first step previous and new
    parameters are the same.

    Args:
        tx: the optimizer that takes `prev_params_grad`.

    Returns:
        An optax transformation with a `PreviousParamsState`. Inside `optax.apply_if_finite` a rejected step
        also keeps the previous parameters, which a loop of one's own has to take care of.

    Raises:
        ValueError: `update` without `gradient_at` or without parameters. Clipping in the loop would change
            one gradient only: `make_step` refuses `clip_norm` with it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from effml.optimize import limuon
        >>> from effml.train import init_state, make_step
        >>> loss = lambda params, batch: jnp.mean((batch @ params["up"]["kernel"] - 1) ** 2)
        >>> optimizer = with_previous_params(limuon(0.1, rank=1))
        >>> step = make_step(loss, optimizer, extra_args=second_gradient)
        >>> state = init_state(jax.random.key(0), {"up": {"kernel": jnp.zeros((3, 2))}}, optimizer)
        >>> state, metrics = step(state, jnp.eye(3))
        >>> state.optimizer_state.previous["up"]["kernel"].tolist()
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    """
    inner = tx if isinstance(tx, RecomputingTransformation) else optax.with_extra_args_support(tx)

    def init(params: PyTree) -> PreviousParamsState:
        copies = jax.tree.map(jnp.copy, _keep(inner, params))
        return PreviousParamsState(inner.init(params), copies)

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        gradient_at: Callable[[PyTree], PyTree] | None = None,
        **extra: Any,
    ) -> tuple[PyTree, PreviousParamsState]:
        if params is None or gradient_at is None:
            missing = "params" if params is None else "gradient_at"
            raise ValueError(
                f"with_previous_params: update needs {missing}: update(gradients, state, params, "
                "gradient_at=...), where gradient_at(p) is the gradient of the same batch at p. With "
                "effml.train.make_step, give extra_args=effml.optimize.second_gradient"
            )
        old = gradient_at(_previous(inner, params, state.inner, state.previous))
        moved, inner_state = inner.update(updates, state.inner, params, prev_params_grad=old, **extra)
        return moved, PreviousParamsState(inner_state, _keep(inner, params))

    return optax.GradientTransformationExtraArgs(init, update)


def second_gradient(context: Any) -> dict[str, Any]:
    """`extra_args` of `effml.train.make_step` for an optimizer in `with_previous_params`.

    Example:
        >>> from types import SimpleNamespace
        >>> second_gradient(SimpleNamespace(gradient_at=abs))["gradient_at"](-2)
        2
    """
    return {"gradient_at": context.gradient_at}
