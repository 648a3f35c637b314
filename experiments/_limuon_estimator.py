"""How good the estimates of a gradient are: running mean, STORM, and STORM carried in low rank, on digits.

Everything is exact here: the gradient of the whole data set is known, and directions are polar factors by
singular value decomposition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effml import linalg, report
from effml.optimize import LowRank, scale_by_limuon
from effml.trees import MuonDimensionNumbers
from experiments._limuon_problems import Digits, digits, perceptron, perceptron_loss

BATCH = 8
DRIVER = 0.1  # weight of the new gradient in the running mean that drives the common trajectory


def _limuon(beta: Any, rank: int | None) -> Any:
    return scale_by_limuon(
        beta,
        rank=rank,
        polar="svd",
        shape_scale="none",
        weight_dimension_numbers=MuonDimensionNumbers(),
    )


def _map(function: Callable[..., Any], *trees: Any) -> Any:
    return jax.tree.map(function, *trees)


def _total(tree: Any) -> jax.Array:
    return sum(jax.tree.leaves(tree))  # pyright: ignore[reportReturnType]


def _squared_distance(one: Any, other: Any) -> jax.Array:
    return _total(_map(lambda a, b: jnp.sum(jnp.square(a - b)), one, other))


def _nuclear(tree: Any) -> jax.Array:
    return _total(_map(lambda a: jnp.sum(jnp.linalg.svd(a, compute_uv=False)), tree))


def _mean(beta: Any, mean: Any, gradient: Any, first: Any) -> Any:
    return _map(lambda m, g: jnp.where(first, g, beta * g + (1 - beta) * m), mean, gradient)


def _carried(state: Any) -> Any:
    """The whole matrices that a state stands for."""
    if not isinstance(state.factors, LowRank):
        return state.factors
    return _map(lambda u, s, vt: (u * s) @ vt, *state.factors)


def _batch(data: Digits, rows: jax.Array) -> Digits:
    return Digits(data.images[rows], data.labels[rows])


gradient_of = jax.grad(perceptron_loss)


def rows_of(seed: int, steps: int) -> np.ndarray:
    """int32[steps, BATCH]: the samples of each batch, drawn with replacement."""
    return np.random.default_rng(seed).integers(0, len(digits().labels), (steps, BATCH), dtype=np.int32)


def common_trajectory(
    jit: Callable[..., Any],
    eta: float,
    betas: tuple[float, ...],
    ranks: tuple[int, ...],
    seeds: range,
    steps: int,
) -> dict[str, np.ndarray]:
    """Errors and alignments of all estimates along the path of one optimizer, a Muon on a running mean.

        error = ||M - grad F||_F^2,    alignment = <polar(M), grad F> / ||grad F||_*

    The path has a constant rate. All estimates begin as the gradient of one batch, whose error takes some
    1 / beta steps to fade.

    Returns:
        For `raw`, `ema`, `storm` and `storm r=...`: float [seeds, betas, (error, alignment), (all steps,
        second half)], means over the steps.
    """
    data, table = digits(), jnp.array(betas)
    kinds: dict[str, int | None] = {"storm": None, **{f"storm r={rank}": rank for rank in ranks}}

    def judged(estimate: Any, direction: Any, exact: Any, size: jax.Array) -> jax.Array:
        aligned = _total(_map(lambda o, f: jnp.sum(o * f), direction, exact)) / size
        return jnp.stack([_squared_distance(estimate, exact), aligned])

    def step(carry: Any, inputs: Any) -> tuple[Any, Any]:
        weights, before, driver, mean, states = carry
        index, rows = inputs
        batch, first = _batch(data, rows), index == 0
        new, old = gradient_of(weights, batch), gradient_of(before, batch)
        exact = gradient_of(weights, data)
        size = _nuclear(exact)
        results = {"raw": jnp.tile(judged(new, _map(linalg.polar, new), exact, size), (len(betas), 1))}
        mean = jax.vmap(lambda beta, m: _mean(beta, m, new, first))(table, mean)
        results["ema"] = jax.vmap(lambda m: judged(m, _map(linalg.polar, m), exact, size))(mean)
        after = {}
        for name, rank in kinds.items():

            def one(beta: Any, state: Any, rank: int | None = rank) -> tuple[Any, jax.Array]:
                whole = _map(
                    lambda m, g, h: jnp.where(first, g, g + (1 - beta) * (m - h)), _carried(state), new, old
                )
                direction, state = _limuon(beta, rank).update(new, state, prev_params_grad=old)
                return state, judged(whole, direction, exact, size)

            after[name], results[name] = jax.vmap(one)(table, states[name])
        driver = _mean(DRIVER, driver, new, first)
        moved = _map(lambda w, m: w - eta * linalg.polar(m), weights, driver)
        return (moved, weights, driver, mean, after), results

    def run(seed: jax.Array, rows: jax.Array) -> Any:
        weights = perceptron(jax.random.key(seed))
        zeros = _map(jnp.zeros_like, weights)
        stack = lambda tree: _map(lambda a: jnp.tile(a, (len(betas),) + (1,) * a.ndim), tree)
        states = {name: stack(_limuon(0.1, rank).init(weights)) for name, rank in kinds.items()}
        start = (weights, weights, zeros, stack(zeros), states)
        results = jax.lax.scan(step, start, (jnp.arange(steps), rows))[1]
        return _map(lambda a: jnp.stack([a.mean(0), a[steps // 2 :].mean(0)], -1), results)

    rows = np.stack([rows_of(seed, steps) for seed in seeds])
    every = jit(lambda seeds, rows: jax.lax.map(lambda one: run(*one), (seeds, rows)))
    return _map(np.asarray, every(jnp.array(seeds), rows))


def frozen_variance(
    jit: Callable[..., Any], betas: tuple[float, ...], chains: int, seed: int
) -> dict[float, dict[str, float]]:
    """Squared errors with the weights held still, as shares of beta sigma^2 / (2 - beta).

    Both estimates run 10 / beta steps in `chains` chains of batches; the errors of the second half count,
    averaged over steps and chains.
    """
    data = digits()
    weights = perceptron(jax.random.key(seed))
    each = jax.vmap(lambda x, y: gradient_of(weights, Digits(x[None], y[None])))(*data)
    samples = jnp.concatenate([leaf.reshape(len(data.labels), -1) for leaf in jax.tree.leaves(each)], axis=1)
    exact = samples.mean(0)
    variance = float(jnp.mean(jnp.sum(jnp.square(samples - exact), axis=1))) / BATCH

    def measure(beta: float, steps: int) -> dict[str, float]:
        estimator = _limuon(beta, None)

        def step(carry: Any, inputs: Any) -> tuple[Any, Any]:
            mean, state = carry
            first, rows = inputs
            new = samples[rows].mean(1)
            mean = jnp.where(first, new, beta * new + (1 - beta) * mean)
            # The same batch at the same weights: both gradients are equal.
            advance = lambda g, state: estimator.update({"w": g}, state, prev_params_grad={"w": g})[1]
            state = jax.vmap(advance)(new[:, None], state)
            error = lambda m: jnp.mean(jnp.sum(jnp.square(m - exact), axis=1))
            return (mean, state), (error(mean), error(state.factors["w"][:, 0]))

        rows = np.random.default_rng(seed).integers(
            0, len(samples), (2 * steps, chains, BATCH), dtype=np.int32
        )
        zeros = jnp.zeros((chains, samples.shape[1]))
        start = (zeros, jax.vmap(lambda g: estimator.init({"w": g}))(zeros[:, None]))
        scan = jit(lambda rows: jax.lax.scan(step, start, (jnp.arange(2 * steps) == 0, rows))[1])
        expected = beta * variance / (2 - beta)
        mean, storm = (float(np.asarray(errors)[steps:].mean()) / expected for errors in scan(rows))
        return {"ema": mean, "storm": storm}

    return {beta: measure(beta, round(5 / beta)) for beta in betas}


def optimise(
    jit: Callable[..., Any],
    kind: str,
    rank: int | None,
    pairs: tuple[tuple[float, float], ...],
    seeds: range,
    steps: int,
) -> dict[str, np.ndarray]:
    """Trains on each estimate's own path, for each (eta, beta) of `pairs`, linear decay to 0.

    Returns:
        float [pairs, seeds] each: `error` and `nuclear`, means over steps, and the last `loss`.
    """
    data, every = digits(), min(10, steps)

    def step(eta: jax.Array, beta: jax.Array, carry: Any, inputs: Any) -> tuple[Any, Any]:
        weights, before, state, _ = carry
        index, rows = inputs
        batch = _batch(data, rows)
        new = gradient_of(weights, batch)
        if kind == "ema":
            state = estimate = _mean(beta, state, new, index == 0)
            direction = _map(linalg.polar, estimate)
        else:
            old = gradient_of(before, batch)
            held = _carried(state)
            estimate = _map(
                lambda m, g, h: jnp.where(index == 0, g, g + (1 - beta) * (m - h)), held, new, old
            )
            direction, state = _limuon(beta, rank).update(new, state, prev_params_grad=old)
        rate = eta * (1 - index / steps)
        moved = _map(lambda w, o: w - rate * o, weights, direction)
        return (moved, weights, state, estimate), None

    def chunk(eta: jax.Array, beta: jax.Array, carry: Any, inputs: Any) -> tuple[Any, Any]:
        carry, _ = jax.lax.scan(functools.partial(step, eta, beta), carry, inputs)
        exact = gradient_of(carry[1], data)
        return carry, (_squared_distance(carry[3], exact), _nuclear(exact))

    def run(eta: jax.Array, beta: jax.Array, seed: jax.Array, rows: jax.Array) -> Any:
        weights = perceptron(jax.random.key(seed))
        zeros = _map(jnp.zeros_like, weights)
        state = zeros if kind == "ema" else _limuon(beta, rank).init(weights)
        inputs = (jnp.arange(steps).reshape(-1, every), rows.reshape(-1, every, BATCH))
        start = (weights, weights, state, zeros)
        last, (errors, sizes) = jax.lax.scan(functools.partial(chunk, eta, beta), start, inputs)
        return errors.mean(), sizes.mean(), perceptron_loss(last[0], data)

    cases = [(eta, beta, seed, rows_of(seed, steps)) for eta, beta in pairs for seed in seeds]
    etas, betas, numbers, rows = map(np.array, zip(*cases))
    runs = jit(lambda *cases: jax.lax.map(lambda case: run(*case), cases))
    results = runs(np.float32(etas), np.float32(betas), numbers, rows)
    shape = (len(pairs), len(seeds))
    return {name: np.asarray(one).reshape(shape) for name, one in zip(("error", "nuclear", "loss"), results)}


def estimator_part(config: Any, result: report.Result, jit: Any, say: Callable[[str], None]) -> None:
    """All three measurements: curves `estimates`, `weights held still`, `own path`, and what is judged of them."""
    seeds = range(config.seed, config.seed + config.seeds)
    rows = []
    for eta in config.estimator_etas:
        found = common_trajectory(
            jit, eta, config.estimator_betas, config.estimator_ranks, seeds, config.estimator_steps
        )
        for index, beta in enumerate(config.estimator_betas):
            for name, values in found.items():
                whole, half = values[:, index, :, 0], values[:, index, :, 1]
                rows.append(
                    {
                        "eta": eta,
                        "beta": beta,
                        "estimate": name,
                        **report.mean_and_spread("error", half[:, 0]),
                        **report.mean_and_spread("alignment", half[:, 1]),
                        "error_all": float(whole[:, 0].mean()),
                        "alignment_all": float(whole[:, 1].mean()),
                    }
                )
        say(f"estimates along one path, eta {eta:g}: done")
    result.curves["estimates"] = rows
    at = {
        row["estimate"]: row
        for row in rows
        if (row["eta"], row["beta"]) == (config.estimator_etas[-1], config.estimator_betas[-1])
    }
    result.summary["error_ratio"] = at["storm"]["error"] / at["ema"]["error"]
    result.summary["alignment_gain"] = at["storm"]["alignment"] - at["ema"]["alignment"]

    frozen = frozen_variance(jit, config.estimator_betas, config.chains, config.seed)
    result.curves["weights held still"] = [{"beta": beta, **shares} for beta, shares in frozen.items()]
    result.summary["frozen_deviation"] = max(
        abs(share - 1) for shares in frozen.values() for share in shares.values()
    )

    table = []
    kinds = {"ema": None, "storm": None, **{f"storm r={rank}": rank for rank in config.estimator_ranks}}
    for name, rank in kinds.items() if config.own_path else ():
        kind, steps = (
            ("ema", 2 * config.own_path_steps) if name == "ema" else ("storm", config.own_path_steps)
        )
        found = optimise(jit, kind, rank, config.own_path, seeds, steps)
        for index, (eta, beta) in enumerate(config.own_path):
            means = {key: float(values[index].mean()) for key, values in found.items()}
            table.append({"eta": eta, "beta": beta, "estimate": name, "steps": steps, **means})
        say(f"own path, {name}: done")
    result.curves["own path"] = table
