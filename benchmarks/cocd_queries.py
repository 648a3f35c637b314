"""How many evaluations of a loss per second CoCD makes in vmapped chunks, against one after the other, in turns.

One after the other means two things: 128 calls of a compiled loss from Python (`calls`, the way of the method's
reference code), and one compiled loop over them (`loop`, `eval_chunk=1`), which saves the calls but, on a CPU, already
keeps a core busy. Central differences of 64 coordinates of the digits' MLP (64-16-10, 1,210 parameters) and of a
wider one.

    python -m benchmarks.cocd_queries                # about half a minute
    python -m benchmarks.cocd_queries --preset gpu   # a net of ResNet-20's size on 32x32 images, batch 128
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

if os.environ.get("JAX_PLATFORMS") is None and not os.environ.get("CUDA_VISIBLE_DEVICES"):
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax
import rich
from jax.flatten_util import ravel_pytree

from benchmarks._common import RESULTS, ratio, save, spread, take_turns
from effml.nn import convnet, mlp
from effml.optimize import finite_difference_coordinates
from effml.report import table

COORDINATES = 64
EVALUATIONS = 2 * COORDINATES


def measure(
    name: str,
    forward: Callable[..., Any],
    params: Any,
    shape: tuple[int, ...],
    repeats: int,
    chunks: tuple[int, ...],
) -> list[dict[str, Any]]:
    """One row per chunk: seconds of all evaluations, beside those of one after the other."""
    inputs = jax.random.normal(jax.random.key(1), shape)
    targets = jnp.arange(shape[0]) % 10

    def loss(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        logits = forward(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def together(chunk: int) -> Callable[[], Any]:
        @jax.jit
        def run(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
            value_fn = lambda params: loss(params, inputs, targets)
            return finite_difference_coordinates(value_fn, params, jnp.arange(COORDINATES), 0.1, chunk=chunk)

        return lambda: run(params, inputs, targets).block_until_ready()

    vector, restore = ravel_pytree(params)
    one = jax.jit(lambda vector, place, move, *batch: loss(restore(vector.at[place].add(move)), *batch))

    def calls() -> Any:
        values = [
            one(vector, place, move, inputs, targets) for place in range(COORDINATES) for move in (0.1, -0.1)
        ]
        return [value.block_until_ready() for value in values]

    cases = {"calls": calls, "loop": together(1)} | {str(chunk): together(chunk) for chunk in chunks}
    seconds = take_turns(cases, repeats)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    return [
        {
            "model": name,
            "parameters": size,
            "batch": shape[0],
            "chunk": chunk,
            "evaluations_per_second": {
                case: EVALUATIONS / spread(seconds[case])["median"] for case in ("calls", "loop", str(chunk))
            },
            "ratio_to_calls": ratio(seconds["calls"], seconds[str(chunk)]),
            "ratio_to_loop": ratio(seconds["loop"], seconds[str(chunk)]),
        }
        for chunk in chunks
    ]


def rows(preset: str, repeats: int) -> list[dict[str, Any]]:
    """All measurements of a preset."""
    key = jax.random.key(0)
    if preset == "gpu":
        config = convnet.ResNetConfig(norm="group")
        forward = lambda params, images: convnet.resnet_forward(params, images, config)[0]
        return measure(
            "ResNet-20", forward, convnet.init_resnet(key, config), (128, 32, 32, 3), repeats, (16, 128)
        )
    found = []
    for widths, batch in (((64, 16, 10), 32), ((64, 16, 10), 256), ((64, 128, 10), 32)):
        name = f"MLP {'-'.join(map(str, widths))}"
        params = mlp.init_mlp(key, widths)
        found += measure(name, mlp.mlp_forward, params, (batch, widths[0]), repeats, (8, 16, 64))
    return found


def main() -> None:
    """Measures, prints a table and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found = rows(arguments.preset, arguments.repeats)
    rich.print(
        table(
            [
                {
                    "model": row["model"],
                    "batch": row["batch"],
                    "chunk": row["chunk"],
                    "evaluations/s": f"{row['evaluations_per_second'][str(row['chunk'])]:,.0f}",
                    **{
                        f"against {other}": f"{row[f'ratio_to_{other}']['median']:.2f} "
                        f"({row[f'ratio_to_{other}']['quartile_low']:.2f}–"
                        f"{row[f'ratio_to_{other}']['quartile_high']:.2f})"
                        for other in ("calls", "loop")
                    },
                }
                for row in found
            ]
        )
    )
    name = "cocd_queries" if arguments.preset == "cpu" else f"cocd_queries_{arguments.preset}"
    print(
        "written:",
        save(
            name,
            {"goal": "ratio_to_calls >= 2.0; on a GPU ratio_to_loop >= 2.0", "rows": found},
            arguments.out,
        ),
    )


if __name__ == "__main__":
    main()
