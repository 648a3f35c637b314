"""The training step: gradients, accumulation, clipping, the optimizer and a guard, compiled once.

`make_step` turns a loss and an optax optimizer into `step(state, batch) -> (state, metrics)`. Two things are
decided here that a hand-written step often leaves out:

- **Weighted means stay exact.** A loss is a mean over weighted targets. With accumulation the parts of a
  batch are joined as Σ wᵢ gᵢ / Σ wᵢ with wᵢ the weight of part i, so a ragged batch gives the gradient of the
  whole batch.
- **A bad update is never applied.** If loss or gradient norm is not finite, the state keeps its last finite
  values and remembers which step was bad; later steps leave it alone as well. Nothing waits for the device to
  find this out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key, PyTree

from effml._validate import count, one_of, positive
from effml.train import sharding
from effml.train._state import CACHE_SIZE, Function, TrainState, check_optimizer, constrain

__all__ = ["Step", "UpdateContext", "make_eval_step", "make_step"]

_COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


class UpdateContext(NamedTuple):
    """What an `extra_args` function may use to make the optimizer's further arguments.

    Fields: `step` (updates done so far), `loss`, `params` (before the update), `gradients` (after clipping),
    `batch` and `key` (of this step), and `gradient_at`: a function from other parameters to their gradient of
    the same batch, with the same key and accumulation, which costs as much as the first gradient and nothing
    if it is not called. It is never clipped, so a step with `clip_norm` refuses it.
    """

    step: Int[Array, ""]
    loss: Float[Array, ""]
    params: PyTree
    gradients: PyTree
    batch: PyTree
    key: Key[Array, ""]
    gradient_at: Callable[[PyTree], PyTree]


@dataclass(frozen=True)
class Step:
    """A compiled function of (state or parameters, batch); with a mesh it spreads the batch first.

    `jitted` is the `jax.jit` function itself, for lowering and inspection.
    """

    jitted: Any
    mesh: Mesh | None = None
    accumulate: int = 1
    traces: list[None] = field(default_factory=list, compare=False, repr=False)

    def __call__(self, state: PyTree, batch: PyTree) -> Any:
        """Runs the function on one batch (every leaf [batch, ...]).

        Raises:
            ValueError: if the batch does not split into `accumulate` parts or over the mesh.
        """
        if self.mesh is not None:
            batch = sharding.to_global(batch, self.mesh)
        if self.accumulate > 1:
            rows = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(batch)}
            parts = 1 if self.mesh is None else self.mesh.shape["data"] * self.mesh.shape["fsdp"]
            if any(n == 0 or n % (self.accumulate * parts) for n in rows):
                over = f" × {parts} devices" if parts > 1 else ""
                raise ValueError(
                    f"a batch of {'/'.join(map(str, sorted(rows)))} rows does not split into "
                    f"accumulate={self.accumulate}{over} equal parts"
                )
        return self.jitted(state, batch)

    def compilations(self) -> int:
        """How many programs have been made so far: one for each set of argument shapes and types."""
        return len(self.traces)


_KEYS = ("key", "step_key")


def _taken_keys(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters
    return tuple(name for name in _KEYS if name in parameters)


def _select(good: Array, new: Array, old: Array) -> Array:
    if not jnp.issubdtype(old.dtype, jax.dtypes.extended):
        new = new.astype(old.dtype)
    return jnp.where(good, new, old)


def _cast(params: PyTree, dtype: str | None) -> PyTree:
    if dtype is None:
        return params
    return jax.tree.map(lambda p: p.astype(dtype) if jnp.issubdtype(p.dtype, jnp.floating) else p, params)


def _norm(gradients: PyTree) -> Array:
    return jnp.sqrt(sum((jnp.sum(g * g) for g in jax.tree.leaves(gradients)), jnp.float32(0)))


def _evaluate_loss(
    loss_fn: Callable[..., Any], params: PyTree, batch: PyTree, keys: dict[str, Array | None]
) -> tuple[Array, dict[str, Any]]:
    result = loss_fn(params, batch, **keys)
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    if jnp.shape(loss) != ():
        raise ValueError(f"the loss must be a scalar, got shape {jnp.shape(loss)}")
    metrics = dict(metrics)
    if "tokens" not in metrics:
        weights = batch.get("weights") if isinstance(batch, Mapping) else None
        rows = jax.tree.leaves(batch)[0].shape[0]
        metrics["tokens"] = jnp.float32(rows) if weights is None else jnp.sum(weights)
    return jnp.asarray(loss, jnp.float32), {k: jnp.asarray(v, jnp.float32) for k, v in metrics.items()}


def make_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation | optax.GradientTransformationExtraArgs,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    compute_dtype: str | None = None,
    mesh: Mesh | None = None,
    extra_args: Callable[[UpdateContext], dict[str, Any]] | None = None,
    summed: tuple[str, ...] = ("tokens", "correct"),
) -> Step:
    """Compiles one training step.

    The step is compiled once for equal arguments: `loss_fn`, `optimizer` and `extra_args` are compared by
    identity (an optax transformation is a tuple of closures), `functools.partial` objects by the function and
    the arguments they bind. So hold on to the optimizer, or build it by a cached factory.

    Args:
        loss_fn: `loss_fn(params, batch)` or, when it has arguments of these names, with `key=` and `step_key=` as
            well: the parts of an accumulated batch have different keys and the same step key, which makes the choices
            that belong to the step. Returns the loss, a mean over the batch's weights, or (loss, metrics).
            `metrics["tokens"]` is the sum of those weights; without it, the sum of `batch["weights"]` or else
            the number of rows is taken.
        optimizer: the optax optimizer.
        accumulate: number of parts that a batch [B, ...] is cut into and run one after the other; divides B.
        clip_norm: largest global norm of the gradient; None leaves it.
        compute_dtype: float32, bfloat16 or float16: the loss sees floating parameters in this type while
            parameters, gradients, their accumulation and the optimizer keep the parameters' own. None casts
            nothing.
        mesh: a mesh of `make_mesh`: parameters and optimizer state are split by `param_specs`, the batch by
            rows.
        extra_args: makes further keyword arguments for `optimizer.update` from an `UpdateContext`, a second
            gradient of the batch among them (`effml.optimize.second_gradient`).
        summed: metrics that add up over the parts of a batch; all others are averaged by weight.

    Returns:
        A `Step`, called as `step(state, batch) -> (state, metrics)`; the state passed in is consumed
        (donated). Metrics are scalars on the device: `loss`, `gradient_norm` (before clipping), `tokens`,
        `first_bad_step` and whatever the loss reports.

    Raises:
        TypeError: if `loss_fn` can't be called or `optimizer` is not an optax one.
        ValueError: for `accumulate` or `clip_norm` that are not positive, or an unknown `compute_dtype`.

    Example:
        >>> import numpy as np
        >>> from effml.train import init_state
        >>> def loss(params, batch):
        ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> optimizer = optax.sgd(0.1)
        >>> step = make_step(loss, optimizer, accumulate=2)
        >>> state = init_state(jax.random.key(0), {"w": jnp.zeros(3)}, optimizer)
        >>> state, metrics = step(state, {"x": np.eye(4, 3, dtype=np.float32), "y": np.ones(4, np.float32)})
        >>> float(metrics["loss"]), int(state.step)
        (1.0, 1)
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn={loss_fn!r} can't be called")
    check_optimizer(optimizer)
    count("accumulate", accumulate)
    if clip_norm is not None:
        positive("clip_norm", clip_norm)
    if compute_dtype is not None:
        one_of("compute_dtype", compute_dtype, _COMPUTE_DTYPES)
    extra = None if extra_args is None else Function(extra_args)
    return _make_step(
        Function(loss_fn), optimizer, accumulate, clip_norm, compute_dtype, mesh, extra, ("tokens", *summed)
    )


@functools.lru_cache(maxsize=CACHE_SIZE)
def _make_step(
    loss: Function,
    optimizer: Any,
    accumulate: int,
    clip_norm: float | None,
    compute_dtype: str | None,
    mesh: Mesh | None,
    extra_args: Function | None,
    summed: tuple[str, ...],
) -> Step:
    taken = _taken_keys(loss.function)
    optimizer = optax.with_extra_args_support(optimizer)

    def gradients_of(params, batch, key, step_key):
        keys = {name: value for name, value in zip(_KEYS, (key, step_key)) if name in taken}

        def objective(p):
            return _evaluate_loss(loss.function, _cast(p, compute_dtype), batch, keys)

        (value, metrics), gradients = jax.value_and_grad(objective, has_aux=True)(params)
        return value, metrics, jax.tree.map(lambda g: g.astype(jnp.float32), gradients)

    def accumulated(params, batch, key, step_key):
        # Part i takes rows i, i + accumulate, ...: with rows split over devices, each device keeps its own.
        parts = jax.tree.map(lambda a: jnp.swapaxes(a.reshape(-1, accumulate, *a.shape[1:]), 0, 1), batch)
        if mesh is not None:
            rows = NamedSharding(mesh, PartitionSpec(None, *sharding.batch_sharding(mesh).spec))
            parts = jax.lax.with_sharding_constraint(parts, rows)
        keys = jax.random.split(key, accumulate)

        def part(total, inputs):
            value, metrics, gradients = gradients_of(params, *inputs, step_key=step_key)
            weight = metrics["tokens"]
            # A part without any weight has the loss 0/0, and must not count.
            terms = jax.tree.map(
                lambda a: jnp.where(weight > 0, weight * a, 0.0), (value, metrics, gradients)
            )
            sums = {name: metrics[name] for name in summed if name in metrics}
            return jax.tree.map(jnp.add, total, (*terms, sums)), None

        first = jax.tree.map(lambda a: a[0], (parts, keys))
        shapes = jax.eval_shape(lambda inputs: gradients_of(params, *inputs, step_key=step_key), first)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        start = (*zeros, {name: zeros[1][name] for name in summed if name in zeros[1]})
        (value, metrics, gradients, sums), _ = jax.lax.scan(part, start, (parts, keys))
        whole = jnp.maximum(sums["tokens"], jnp.finfo(jnp.float32).tiny)
        value, metrics, gradients = jax.tree.map(lambda a: a / whole, (value, metrics, gradients))
        return value, metrics | sums, gradients

    def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Array]]:
        traces.append(None)
        key = jax.random.fold_in(state.key, state.step)
        compute = gradients_of if accumulate == 1 else accumulated
        step_key = jax.random.fold_in(key, 1)
        value, metrics, gradients = compute(state.params, batch, key, step_key)
        norm = _norm(gradients)
        if clip_norm is not None:
            scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
            gradients = jax.tree.map(lambda g: g * scale, gradients)
        gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, state.params)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)

        def gradient_at(params: PyTree) -> PyTree:
            if clip_norm is not None:
                raise ValueError(
                    f"clip_norm={clip_norm!r} would clip one of the two gradients that the optimizer compares, and "
                    "not the other; leave clip_norm at None"
                )
            # One backward pass after the other: their activations need not be alive together.
            params, _ = jax.lax.optimization_barrier((params, gradients))
            _, _, others = compute(params, batch, key, step_key)
            return jax.tree.map(lambda g, p: g.astype(p.dtype), others, params)

        extra = {}
        if extra_args is not None:
            context = UpdateContext(state.step, value, state.params, gradients, batch, key, gradient_at)
            extra = extra_args.function(context)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, state.params, **extra)
        params = optax.apply_updates(state.params, updates)

        if extra_args is not None:
            # A second gradient that is not finite shows in what the optimizer made of it.
            finite &= jnp.isfinite(_norm(updates))
        first_bad = jnp.where(
            (state.first_bad_step < 0) & ~finite, state.step + 1, jnp.asarray(state.first_bad_step, jnp.int32)
        )
        good = first_bad < 0
        new = TrainState(state.step + 1, params, optimizer_state, state.key, first_bad)
        old = state._replace(first_bad_step=first_bad)
        state = constrain(jax.tree.map(lambda a, b: _select(good, a, b), new, old), mesh)
        return state, metrics | {"loss": value, "gradient_norm": norm, "first_bad_step": first_bad}

    traces: list[None] = []
    return Step(jax.jit(train_step, donate_argnums=0), mesh, accumulate, traces)


def make_eval_step(
    loss_fn: Callable[..., Any], *, compute_dtype: str | None = None, mesh: Mesh | None = None
) -> Step:
    """Compiles the loss alone, for `evaluate`; cached as `make_step` is.

    Args:
        loss_fn: as for `make_step`; its `key` and `step_key` get None, which must mean "no randomness".
        compute_dtype: as for `make_step`.
        mesh: a mesh of `make_mesh`.

    Returns:
        A `Step`, called as `eval_step(params, batch) -> (loss, metrics)` with `metrics["tokens"]` present.

    Raises:
        TypeError: if `loss_fn` can't be called.
        ValueError: for an unknown `compute_dtype`.

    Example:
        >>> import numpy as np
        >>> eval_step = make_eval_step(lambda params, batch: jnp.mean(batch["x"] * params))
        >>> loss, metrics = eval_step(jnp.float32(2), {"x": np.ones(3, np.float32)})
        >>> float(loss), float(metrics["tokens"])
        (2.0, 3.0)
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn={loss_fn!r} can't be called")
    if compute_dtype is not None:
        one_of("compute_dtype", compute_dtype, _COMPUTE_DTYPES)
    return _make_eval_step(Function(loss_fn), compute_dtype, mesh)


@functools.lru_cache(maxsize=CACHE_SIZE)
def _make_eval_step(loss: Function, compute_dtype: str | None, mesh: Mesh | None) -> Step:
    keys = dict.fromkeys(_taken_keys(loss.function))

    def eval_step(params: PyTree, batch: PyTree) -> tuple[Array, dict[str, Array]]:
        traces.append(None)
        return _evaluate_loss(loss.function, _cast(params, compute_dtype), batch, keys)

    traces: list[None] = []
    return Step(jax.jit(eval_step), mesh, traces=traces)
