"""The optimizers of the LiMuon experiment, and how they do on a vision transformer and on a stack of Mamba blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from effml import report, trees
from effml.optimize import limuon, make_optimizer
from experiments import _limuon_problems as problems
from experiments._language_model import batch_starts, load_tokens, schedules, windows

RATES = (3e-3, 1e-2)


def rank_in(name: str) -> int | None:
    """8 of "limuon r=8"; None of "limuon"."""
    return int(name.partition("r=")[2]) if "r=" in name else None


def make_muon(beta: Any, rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    """Muon with momentum 1 - beta for hidden matrices, Adam for the rest."""
    return _tables_on_adam(
        make_optimizer("muon", learning_rate=rate, vector_learning_rate=vector_rate, beta=1 - beta),
        vector_rate,
    )


def make_limuon(beta: Any, rank: int | None, rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    """LiMuon for hidden matrices, Adam for the rest."""
    return limuon(rate, beta, rank=rank, adam_learning_rate=vector_rate)


def _tables_on_adam(
    optimizer: optax.GradientTransformation, vector_rate: Any
) -> optax.GradientTransformation:
    """Embedding and head on Adam at the vectors' rate, as `limuon` has them here."""
    return optax.partition(
        {"matrix": optimizer, "others": optax.adam(vector_rate, 0.9, 0.95)},
        lambda params: jax.tree.map(
            lambda role: "matrix" if role == "matrix" else "others", trees.parameter_roles(params)
        ),
    )


def other_models_part(
    config: Any, result: report.Result, jit: Any, names: tuple[str, ...], say: Callable[[str], None]
) -> None:
    """A vision transformer and a Mamba stack; Muon at equal steps and at equal gradient evaluations."""
    table = []
    for model in config.models:
        for name, twice in (("muon", False), ("muon", True), *((name, False) for name in names)):
            steps = config.model_steps * (2 if twice else 1)
            scores = train_on(config, jit, model, name, steps)
            best = int(np.argmin(np.where(np.isfinite(scores), scores, np.inf).mean(-1)))
            beta, rate = [(b, r) for b in config.betas for r in RATES[: config.rates]][best]
            table.append(
                {
                    "model": model,
                    "optimizer": name,
                    "steps": steps,
                    "gradients": steps * (1 if name == "muon" else 2),
                    "beta": beta,
                    "rate": rate,
                    **report.mean_and_spread("loss", scores[best]),
                }
            )
        say(f"{model}: done")
    result.curves["other models"] = table


def train_on(config: Any, jit: Any, model: str, name: str, steps: int) -> np.ndarray:
    """Held-out losses [betas x rates, seeds] of a vision transformer or a Mamba stack."""
    if model == "mamba":
        tokens = load_tokens(config, config.vocabulary)
        train, vocabulary = jnp.asarray(tokens.train), tokens.vocabulary
        held_out = jnp.asarray(tokens.held_out[:64].reshape(-1, config.length + 1))
        initial, loss = functools.partial(problems.mamba, vocabulary=vocabulary), problems.mamba_loss
        draw = lambda seed: batch_starts(config, tokens, seed, steps)
        batch = lambda starts: windows(train, starts, config)
    else:
        data, split = problems.digits(), 1400
        held_out = (data.images[split:], data.labels[split:])
        initial = problems.vision_transformer
        loss = lambda params, pair: problems.cross_entropy(problems.vision_logits(params, pair[0]), pair[1])
        draw = lambda seed: np.random.default_rng(seed).integers(
            0, split, (steps, config.model_batch), dtype=np.int32
        )
        batch = lambda rows: (data.images[rows], data.labels[rows])
    two_point = name != "muon"
    rank = rank_in(name)

    def run(beta: jax.Array, rate: jax.Array, seed: jax.Array, rows: jax.Array) -> jax.Array:
        make = functools.partial(make_limuon, beta, rank) if two_point else functools.partial(make_muon, beta)
        optimizer = optax.with_extra_args_support(make(*schedules(rate, steps)))
        params = initial(jax.random.key(seed))

        def step(carry: Any, rows: jax.Array) -> tuple[Any, None]:
            params, previous, state = carry
            gradient = jax.grad(loss)(params, batch(rows))
            second = {"prev_params_grad": jax.grad(loss)(previous, batch(rows))} if two_point else {}
            updates, state = optimizer.update(gradient, state, params, **second)
            return (optax.apply_updates(params, updates), params, state), None

        params = jax.lax.scan(step, (params, params, optimizer.init(params)), rows)[0][0]
        return loss(params, held_out)

    seeds = range(config.seed, config.seed + config.seeds)
    cases = [(beta, rate, seed) for beta in config.betas for rate in RATES[: config.rates] for seed in seeds]
    betas, rates, numbers = map(np.array, zip(*cases))
    rows = np.stack([draw(int(seed)) for seed in numbers])
    every = jit(lambda *cases: jax.lax.map(lambda case: run(*case), cases))
    return np.asarray(every(np.float32(betas), np.float32(rates), numbers, rows)).reshape(-1, len(seeds))
