"""A step of LiMuon against a step of optax's Muon: same parameters, same coefficients, float32 in both.

    python -m benchmarks.limuon_step

Both orthogonalise the hidden matrices by five steps of the same polynomial and leave embedding, head and
vectors to Adam. LiMuon in low rank also makes a random sketch of each estimate; its second gradient is given
and not timed. The sketch's basis comes from Householder reflections or from Cholesky-QR2. Each round times one
step of each, one after the other, so that all meet the same noise. The goal is a ratio of at most 1.3 for
rank 8. Sketches alone, and the goals on a GPU (section 6 of the spec), are in the JSON where they were
measured.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._common import RESULTS, ratio, save, spread, take_turns
from benchmarks._optimizer_step import gradients, stepper
from benchmarks.normuon_step import MODELS
from effml import linalg, trees
from effml.nn.transformer import TransformerConfig, param_count
from effml.optimize import limuon

GOAL = 1.3


def two_point_stepper(
    optimizer: optax.GradientTransformationExtraArgs, config: TransformerConfig
) -> Callable[[], None]:
    """As `stepper`, with a second gradient that is another array than the first."""
    gradient, second = gradients(config), gradients(config, 2)
    params = gradients(config, 1)
    carry = [params, jax.jit(optimizer.init)(params)]

    def step(params: Any, state: Any, gradient: Any, second: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradient, state, params, prev_params_grad=second)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1))

    def run() -> None:
        carry[:] = compiled(*carry, gradient, second)
        jax.block_until_ready(carry)

    return run


def measure(name: str, config: TransformerConfig, repeats: int) -> dict[str, Any]:
    """One row: seconds of each and their ratios to Muon."""
    muon = optax.contrib.muon(
        1e-3,
        nesterov=False,
        consistent_rms=0.2,
        adam_b2=0.95,
        muon_weight_dimension_numbers=functools.partial(trees.dimension_numbers, include=("matrix",)),
    )
    cases = {
        "muon": stepper(muon, config),
        "full": two_point_stepper(limuon(1e-3), config),
        "rank 8, householder": two_point_stepper(limuon(1e-3, rank=8), config),
        "rank 8, cholesky2": two_point_stepper(limuon(1e-3, rank=8, qr="cholesky2"), config),
        "rank 8, factors": two_point_stepper(limuon(1e-3, rank=8, direction="factors"), config),
    }
    seconds = take_turns(cases, repeats)
    return {
        "model": name,
        "parameters": param_count(config),
        "seconds": {case: spread(values) for case, values in seconds.items()},
        "ratios": {
            case: ratio(values, seconds["muon"]) for case, values in seconds.items() if case != "muon"
        },
    }


def sketches(repeats: int, shape: tuple[int, int, int] = (4, 384, 1024), rank: int = 8) -> dict[str, Any]:
    """Randomised decompositions of a stack of matrices by either basis, beside five Newton-Schulz steps."""
    stack = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    key = jax.random.key(0)
    run = lambda function: lambda: jax.block_until_ready(function(key, stack))
    cases = {
        "householder": run(jax.jit(functools.partial(linalg.rsvd, rank=rank))),
        "cholesky2": run(jax.jit(functools.partial(linalg.rsvd, rank=rank, qr="cholesky2"))),
        "newton_schulz": run(jax.jit(lambda key, stack: linalg.newton_schulz(stack))),
    }
    seconds = take_turns(cases, repeats)
    return {
        "shape": list(shape),
        "rank": rank,
        "seconds": {case: spread(values) for case, values in seconds.items()},
        "cholesky2_of_householder": ratio(seconds["cholesky2"], seconds["householder"]),
        "rsvd_of_newton_schulz": ratio(seconds["cholesky2"], seconds["newton_schulz"]),
    }


def main() -> None:
    """Measures, prints and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = [measure(name, config, arguments.repeats) for name, config in MODELS.items()]
    for row in rows:
        for case, of in row["ratios"].items():
            print(
                f"{row['model']}: LiMuon's step ({case}) takes {of['median']:.2f} of Muon's "
                f"({of['quartile_low']:.2f}–{of['quartile_high']:.2f}; best times {of['of_best']:.2f})"
            )
    thin = sketches(arguments.repeats)
    print(
        f"sketch of {thin['shape']}: Cholesky-QR2 takes {thin['cholesky2_of_householder']['median']:.2f} of "
        f"Householder's time, and {thin['rsvd_of_newton_schulz']['median']:.2f} of Newton-Schulz's"
    )
    result = {"goal": f"LiMuon rank 8 / Muon <= {GOAL}", "rows": rows, "sketch": thin, "gpu": "not measured"}
    print("written:", save("limuon_step", result, arguments.out))


if __name__ == "__main__":
    main()
