r"""One block at a time: tune what is still dense, factorise a layer, tune its factors, freeze it; then the next.

Every linear of the block always carries a kernel, latents of its rank and scales, and a mode that is an array. So a
whole block, and every block like it, needs two compiled programs: one that tunes kernels and one that tunes factors.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array

from effml._validate import count, positive, real
from effml.quantize.nanoquant._factorise import BinaryFactors, lb_admm
from effml.quantize.nanoquant._linear import DENSE, FROZEN, LATENT, BinaryTensor, moded_linear
from effml.quantize.nanoquant._rank import random_key

__all__ = ["BlockTuning", "adam", "reconstruct_block"]

BlockApply = Callable[..., Array]
Factorise = Callable[[Array, Array, Array, Array, int], BinaryFactors]


class BlockTuning(NamedTuple):
    """How a block is tuned; any optax chain does.

    Attributes:
        dense: optimizer of the kernels (and their biases) that are still dense, or None for no such tuning.
        factor: optimizer of one layer's latents, scales and bias, or None.
        dense_epochs: passes over the calibration windows, before each factorisation.
        factor_epochs: after each.
        dense_batch: windows of one step.
        factor_batch: likewise.

    Example:
        >>> BlockTuning.adam(windows=64, dense_epochs=4).dense_epochs
        4
    """

    dense: optax.GradientTransformation | None
    factor: optax.GradientTransformation | None
    dense_epochs: int = 8
    factor_epochs: int = 8
    dense_batch: int = 4
    factor_batch: int = 1

    @classmethod
    def adam(
        cls,
        windows: int,
        *,
        dense_rate: float | int | Any = 1e-4,
        factor_rate: float | int | Any = 1e-5,
        dense_epochs: int = 8,
        factor_epochs: int = 8,
        dense_batch: int = 4,
        factor_batch: int = 1,
    ) -> BlockTuning:
        """The method's own: `adam` with a cosine that ends at 1e-4 of the rate. 0 epochs leave a step out.

        Raises:
            ValueError: for counts or rates that are not above 0.
            TypeError: for counts that are no integers, or rates that are no numbers.

        Example:
            >>> BlockTuning.adam(windows=64, factor_epochs=0).factor is None
            True
        """

        count("windows", windows)
        for name, batch in (("dense_batch", dense_batch), ("factor_batch", factor_batch)):
            count(name, batch)
        for name, epochs in (("dense_epochs", dense_epochs), ("factor_epochs", factor_epochs)):
            if epochs != 0:
                count(name, epochs)
        for name, rate in (("dense_rate", dense_rate), ("factor_rate", factor_rate)):
            if not math.isfinite(positive(name, real(name, rate))):
                raise ValueError(f"{name}={rate!r} must be finite")

        def optimizer(rate: float | int, epochs: int, batch: int) -> optax.GradientTransformation | None:
            return None if epochs == 0 else adam(float(rate), epochs * -(-windows // batch), 1e-4)

        return cls(
            optimizer(dense_rate, dense_epochs, dense_batch),
            optimizer(factor_rate, factor_epochs, factor_batch),
            dense_epochs,
            factor_epochs,
            dense_batch,
            factor_batch,
        )


@functools.lru_cache(maxsize=64)
def adam(rate: float | int, steps: int, final: float | int) -> optax.GradientTransformation:
    """Adam with the method's constants and no weight decay; the rate falls along a cosine to `final` of itself.

    The same arguments give the same object, so that programs compiled for it are found again.

    Example:
        >>> adam(1e-4, 10, 0.0) is adam(1e-4, 10, 0.0)
        True
    """
    return optax.adam(optax.cosine_decay_schedule(rate, steps, final), b1=0.9, b2=0.99, eps=1e-6)


def reconstruct_block(
    block_apply: BlockApply,
    block_params: Mapping[str, Any],
    x_q: Any,
    target: Any,
    stats: Mapping[str, tuple[Any, Any]],
    plan: Mapping[str, int],
    opt: BlockTuning,
    *,
    key: Array | Any,
    factorise: Factorise = lb_admm,
    importance: Any = None,
    progress: Callable[[str, int], Any] | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    r"""Factorises the linears of one block in turn, each after what is still dense has been tuned to make up for the
    errors so far, and tunes its factors before the next.

    $$\min \sum_{n,t,i} \text{importance}_i\,\bigl(\text{block}(x_q) - \text{target}\bigr)_{nti}^2$$

    Args:
        block_apply: `block_apply(params, x, linear) -> y`, of [windows, length, width]; every linear of the plan is
            computed as `linear(x, its params, name)`. The same object for all blocks, so that programs are shared.
        block_params: of the block: a nested dict; each linear of the plan is `{"kernel": [in, out][, "bias": [out]]}`
            under its dotted name. All the rest stays as it is.
        x_q: float[windows, length, width], what the block reads behind its quantised predecessors.
        target: float[windows, length, width], what it gives in full precision on full-precision inputs.
        stats: second moments (in [in], out [out]) by name, shrunk.
        plan: rank by name, in the order in which they are factorised.
        opt: optimizers, epochs and batches.
        key: of the starts and of the order of windows.
        factorise: `(key, kernel, in_sq, out_sq, rank) -> BinaryFactors`.
        importance: [width], weights of the outputs; None takes the out moments of the plan's last linear, or ones
            where it has another size.
        progress: `(name, done)` after each linear.

    Returns:
        The block's parameters, with `{"binary": BinaryTensor[, "bias"]}` for each linear of the plan, and one row for
        each: `name`, `rank`, `bits_per_weight`, `bytes`, `installed_error` (weighted and squared, before its tuning),
        `loss_dense` and `loss_factors` (of the last pass, mean over elements), `seconds`.

    Raises:
        ValueError: for an empty plan, names that the block lacks, shapes that do not fit, or a loss that is not finite.

    Source: NanoQuant, arXiv 2602.06694, section 3, with the details of its code.

    Example:
        >>> apply = lambda params, x, linear: x + linear(jnp.tanh(x), params["mix"], "mix")
        >>> x = jax.random.normal(jax.random.key(0), (4, 8, 16))
        >>> params = {"mix": {"kernel": jax.random.normal(jax.random.key(1), (16, 16))}}
        >>> target = apply(params, x, lambda x, params, name: x @ params["kernel"])
        >>> stats = {"mix": (jnp.ones(16), jnp.ones(16))}
        >>> made, rows = reconstruct_block(
        ...     apply, params, x, target, stats, {"mix": 8}, BlockTuning.adam(4, factor_epochs=1), key=jax.random.key(2)
        ... )
        >>> made["mix"]["binary"].shape, rows[0]["rank"]
        ((16, 16), 8)
    """
    x_q, target = jnp.asarray(x_q, jnp.float32), jnp.asarray(target, jnp.float32)
    _check(block_params, x_q, target, stats, plan, opt)
    state = _Block.of(block_params, plan)
    last = list(plan)[-1]
    weights = stats[last][1] if importance is None else importance
    fits = np.shape(weights) == target.shape[-1:]
    if importance is not None and not fits:
        raise ValueError(f"importance of shape {np.shape(weights)} must be [{target.shape[-1]}]")
    # Its scale cancels in Adam; of mean one it keeps the sum of squares where epsilon is small against it.
    weights = jnp.asarray(weights if fits else np.ones(target.shape[-1]), jnp.float32)
    weights = weights / jnp.maximum(weights.mean(), 1e-30)
    rows = []
    keys = jax.random.split(random_key(key), 3 * len(plan)).reshape(len(plan), 3)
    for index, (name, rank) in enumerate(plan.items()):
        started = time.perf_counter()
        row: dict[str, Any] = {"name": name, "rank": rank}
        if opt.dense is not None:
            row["loss_dense"] = state.tune(
                "kernels",
                block_apply,
                opt.dense,
                x_q,
                target,
                weights,
                _orders(keys[index, 0], len(x_q), opt.dense_epochs, opt.dense_batch),
            )
        in_sq, out_sq = (jnp.asarray(one, jnp.float32) for one in stats[name])
        factors = factorise(keys[index, 1], state.linears[name]["kernel"], in_sq, out_sq, rank)
        row["installed_error"] = float(factors.err_installed)
        state.install(name, factors)
        if opt.factor is not None:
            row["loss_factors"] = state.tune(
                "factors",
                block_apply,
                opt.factor,
                x_q,
                target,
                weights,
                _orders(keys[index, 2], len(x_q), opt.factor_epochs, opt.factor_batch),
            )
        packed = state.freeze(name)
        row["bits_per_weight"] = packed.bits_per_weight
        row["bytes"] = packed.nbytes
        row["seconds"] = time.perf_counter() - started
        wrong = [key for key, value in row.items() if key != "name" and not np.isfinite(value)]
        if wrong:
            raise ValueError(
                f"{name}: {wrong[0]} is not finite; lower the rates, or look at the calibration text"
            )
        rows.append(row)
        if progress is not None:
            progress(name, index + 1)
    return state.packed(block_params), rows


def _check(
    block_params: Any,
    x: Array,
    target: Array,
    stats: Mapping[str, Any],
    plan: Mapping[str, int],
    opt: BlockTuning,
) -> None:
    if not plan:
        raise ValueError("plan is empty: name the linears to factorise and their ranks")
    if x.ndim != 3 or target.shape[:2] != x.shape[:2] or target.ndim != 3 or 0 in x.shape:
        raise ValueError(
            f"x_q {x.shape} and target {target.shape} must be [windows, length, width], none of them 0"
        )
    for kind in ("dense", "factor"):
        if getattr(opt, kind) is not None:
            count(f"{kind}_epochs", getattr(opt, f"{kind}_epochs"))
            count(f"{kind}_batch", getattr(opt, f"{kind}_batch"))
    for name, rank in plan.items():
        part = _get(block_params, name)
        if not isinstance(part, Mapping) or np.ndim(part.get("kernel", 0)) != 2:
            raise ValueError(f"the block has no linear {name!r} with a kernel [in, out]")
        inputs, outputs = np.shape(part["kernel"])
        if count("rank", rank) > min(inputs, outputs):
            raise ValueError(f"{name}: rank={rank} must be at most {min(inputs, outputs)}")
        if name not in stats:
            raise ValueError(f"stats lack {name!r}")
        shapes = tuple(np.shape(one) for one in stats[name])
        if shapes != ((inputs,), (outputs,)):
            raise ValueError(f"{name}: stats of shapes {shapes} do not fit a kernel of {inputs} x {outputs}")


def _get(tree: Any, name: str) -> Any:
    for part in name.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _put(tree: Any, name: str, value: Any) -> dict[str, Any]:
    first, _, rest = name.partition(".")
    return {**tree, first: _put(tree[first], rest, value) if rest else value}


def _orders(key: Array, windows: int, epochs: int, batch: int) -> Iterator[Array]:
    """int32[steps, batch] of each pass; a last batch that is not whole is filled from the pass's beginning."""
    steps = -(-windows // batch)
    for one in jax.random.split(key, epochs):
        order = jax.random.permutation(one, windows)
        yield jnp.resize(order, (steps * batch,)).reshape(steps, batch)


class _Block:
    """The state of one block: everything of every linear, and its mode."""

    def __init__(self, rest: dict[str, Any], linears: dict[str, dict[str, Array]], modes: dict[str, Array]):
        self.rest, self.linears, self.modes = rest, linears, modes

    @classmethod
    def of(cls, block_params: Mapping[str, Any], plan: Mapping[str, int]) -> _Block:
        # Copies: passes of tuning take over the memory of what they are given.
        rest: dict[str, Any] = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), dict(block_params))
        linears, ones = {}, functools.partial(jnp.ones, dtype=jnp.float32)
        for name, rank in plan.items():
            own = _get(rest, name)
            inputs, outputs = own["kernel"].shape
            linears[name] = {
                **own,
                "v": ones((inputs, rank)),
                "u": ones((rank, outputs)),
                "scale_in": ones(inputs),
                "scale_out": ones(outputs),
            }
            rest = _put(rest, name, {})
        return cls(rest, linears, {name: jnp.int32(DENSE) for name in plan})

    def install(self, name: str, factors: BinaryFactors) -> None:
        found = {"v": factors.v_lat, "u": factors.u_lat, "scale_in": factors.s_in, "scale_out": factors.s_out}
        self.linears[name] |= {part: jnp.asarray(value, jnp.float32) for part, value in found.items()}
        self.modes[name] = jnp.int32(LATENT)

    def freeze(self, name: str) -> BinaryTensor:
        """The rest of the block sees what is kept: signs, and scales of 16 bits."""
        linear = self.linears[name]
        packed = BinaryTensor.pack(linear["v"], linear["u"], linear["scale_in"], linear["scale_out"])
        v, u = packed.signs()
        scales = {part: getattr(packed, part).astype(jnp.float32) for part in ("scale_in", "scale_out")}
        self.linears[name] = {**linear, "v": v, "u": u, **scales}
        self.modes[name] = jnp.int32(FROZEN)
        return packed

    def packed(self, block_params: Mapping[str, Any]) -> dict[str, Any]:
        made = dict(block_params)
        for name, linear in self.linears.items():
            tensor = BinaryTensor.pack(linear["v"], linear["u"], linear["scale_in"], linear["scale_out"])
            bias = {"bias": linear["bias"]} if "bias" in linear else {}
            made = _put(made, name, {"binary": tensor, **bias})
        return made

    def tune(
        self,
        kind: str,
        block_apply: BlockApply,
        optimizer: optax.GradientTransformation,
        x: Array,
        target: Array,
        weights: Array,
        orders: Iterator[Array],
    ) -> float:
        """Trains what is dense, or what is latent; the mean weighted squared error during the last pass."""
        parts = ("kernel", "bias") if kind == "kernels" else ("v", "u", "scale_in", "scale_out", "bias")
        trained = {
            name: {part: own[part] for part in parts if part in own} for name, own in self.linears.items()
        }
        fixed = {
            name: {part: value for part, value in own.items() if part not in parts}
            for name, own in self.linears.items()
        }
        # One optimizer for all kernels; one for each linear's factors, of which a single one is at work.
        state: Any = _start(trained, kind=kind, optimizer=optimizer)
        losses = jnp.zeros(1)
        for order in orders:
            trained, state, losses = _tune_pass(
                trained,
                state,
                fixed,
                self.rest,
                self.modes,
                x,
                target,
                weights,
                order,
                kind=kind,
                block_apply=block_apply,
                optimizer=optimizer,
            )
        for name, own in trained.items():
            self.linears[name] |= own
        return float(losses.mean()) / (order.shape[1] * target[0].size)


@functools.partial(jax.jit, static_argnames=("kind", "optimizer"))
def _start(trained: Any, *, kind: str, optimizer: optax.GradientTransformation) -> Any:
    if kind == "kernels":
        return optimizer.init(trained)
    return {name: optimizer.init(own) for name, own in trained.items()}


@functools.partial(
    jax.jit, static_argnames=("kind", "block_apply", "optimizer"), donate_argnames=("trained", "state")
)
def _tune_pass(
    trained: dict[str, dict[str, Array]],
    state: Any,
    fixed: dict[str, dict[str, Array]],
    rest: dict[str, Any],
    modes: dict[str, Array],
    x: Array,
    target: Array,
    weights: Array,
    order: Array,
    *,
    kind: str,
    block_apply: BlockApply,
    optimizer: optax.GradientTransformation,
) -> tuple[Any, Any, Array]:
    """One pass over the windows, a scan over batches."""

    def loss(trained: Any, rows: Array) -> Array:
        whole = rest
        for name, own in trained.items():
            whole = _put(whole, name, {**own, **fixed[name], "mode": modes[name]})
        linear = lambda x, state, name: moded_linear(x, state, trained=kind)
        return (weights * jnp.square(block_apply(whole, x[rows], linear) - target[rows])).sum()

    wanted = DENSE if kind == "kernels" else LATENT
    moves = {name: modes[name] == wanted for name in trained}

    def all_kernels(gradient: Any, trained: Any, state: Any) -> tuple[Any, Any]:
        # What rests has no gradient, and does not move under a chain that would move it without one.
        still = lambda tree: {
            name: jax.tree.map(lambda leaf, m=moves[name]: jnp.where(m, leaf, 0), own)
            for name, own in tree.items()
        }
        updates, state = optimizer.update(still(gradient), state, trained)
        return optax.apply_updates(trained, still(updates)), state

    def one_layer(gradient: Any, trained: Any, state: Any) -> tuple[Any, Any]:
        def move(own: tuple[Any, Any, Any]) -> tuple[Any, Any]:
            gradient, trained, state = own
            updates, state = optimizer.update(gradient, state, trained)
            return optax.apply_updates(trained, updates), state

        moved = {
            name: lax.cond(
                moves[name], move, lambda own: own[1:], (gradient[name], trained[name], state[name])
            )
            for name in trained
        }
        return {name: one[0] for name, one in moved.items()}, {name: one[1] for name, one in moved.items()}

    update = all_kernels if kind == "kernels" else one_layer

    def step(carry: Any, rows: Array) -> tuple[Any, Array]:
        trained, state = carry
        value, gradient = jax.value_and_grad(loss)(trained, rows)
        return update(gradient, trained, state), value

    (trained, state), losses = lax.scan(step, (trained, state), order)
    return trained, state, losses
