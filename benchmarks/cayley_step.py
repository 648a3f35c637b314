"""One Cayley step on a stack of rotations: by a solve, and by five fixed-point products.

    python -m benchmarks.cayley_step                      8 matrices of 576, one of 2048
    python -m benchmarks.cayley_step --shapes 61x576      all of SmolLM2-135M
    python -m benchmarks.cayley_step --shapes 65x4096     all of LLaMA-3-8B; for a GPU, goal below 2 s

Steps take turns, one matrix after the other as training does it. Orthogonality is that of the stepped matrices after
ten steps with random gradients, without the QR factorisation that training adds every twentieth step.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import jax

from benchmarks._common import RESULTS, ratio, save, spread, take_turns
from effml import linalg

GOAL = "65 matrices of 4096 on a GPU: below 2 s a step, orthogonality below 1e-3"
SHAPES = ("8x576", "1x2048")
FORMS = {"exact": True, "fixed_point": False}
ITERATIONS = 5


@functools.partial(jax.jit, static_argnames="exact")
def step(matrices: jax.Array, gradients: jax.Array, exact: bool) -> jax.Array:
    move = functools.partial(linalg.cayley_step, exact=exact, iters=ITERATIONS)
    return jax.lax.map(lambda pair: move(*pair).matrix, (matrices, gradients))


def measure(shape: str, repeats: int) -> dict[str, Any]:
    """One row: seconds of each form, their ratio, and how orthogonal the results stay."""
    count, width = map(int, shape.split("x"))
    start = jax.numpy.broadcast_to(linalg.hadamard(width), (count, width, width))
    gradients = jax.random.normal(jax.random.key(0), (count, width, width))
    errors = {}
    for name, exact in FORMS.items():
        stepped = start[:1]
        for index in range(10):
            stepped = step(stepped, jax.numpy.roll(gradients[:1], index, -1), exact)
        errors[name] = float(linalg.orthogonality_error(stepped).max())
    cases = {
        name: functools.partial(lambda exact: step(start, gradients, exact).block_until_ready(), exact)
        for name, exact in FORMS.items()
    }
    seconds = take_turns(cases, repeats)
    return {
        "matrices": count,
        "width": width,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "fixed_point_over_exact": ratio(seconds["fixed_point"], seconds["exact"]),
        "orthogonality_after_10_steps": errors,
    }


def main() -> None:
    """Measures, prints and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="COUNTxWIDTH ...")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = [measure(shape, arguments.repeats) for shape in arguments.shapes]
    for row in rows:
        times = ", ".join(f"{name} {row['seconds'][name]['median']:.3g} s" for name in FORMS)
        off = ", ".join(f"{row['orthogonality_after_10_steps'][name]:.1e}" for name in FORMS)
        print(f"{row['matrices']} of {row['width']}: {times} a step; off by {off} after 10")
    result = {"goal": GOAL, "device": jax.devices()[0].device_kind, "rows": rows}
    print("written:", save("cayley_step", result, arguments.out))


if __name__ == "__main__":
    main()
