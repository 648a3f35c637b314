"""The residual basis change at run time: x + ((x Q) M) Q^T + update, against x + update and x T + update.

    python -m benchmarks.residual_rotation                                       float32 at SmolLM2's width
    python -m benchmarks.residual_rotation --width 4096 --rows 32768 --dtype bfloat16      for a GPU

The goals, for a GPU, where adding is bound by memory: at most 1.35 times the plain sum, at most 0.1 times exact T.
Multiplications a row are in the JSON: 2 D r + r^2, against D^2 of the exact one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._common import RESULTS, ratio, save, spread, take_turns
from effml.quantize import respinquant

GOALS = {"over_plain_sum": 1.35, "over_exact": 0.1}


@jax.jit
def plain(x: jax.Array, update: jax.Array) -> jax.Array:
    return x + update


@jax.jit
def low_rank(x: jax.Array, update: jax.Array, q: jax.Array, m: jax.Array) -> jax.Array:
    return respinquant.residual_rotate(x, q, m) + update


@jax.jit
def exact(x: jax.Array, update: jax.Array, transition: jax.Array) -> jax.Array:
    return jnp.matmul(x, transition, preferred_element_type=jnp.float32).astype(x.dtype) + update


def measure(rows: int, width: int, rank: int, dtype: str, repeats: int) -> dict[str, Any]:
    """Seconds of the three, and the two ratios that have goals."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, update = (jax.random.normal(key, (rows, width), dtype) for key in keys[:2])
    q = jnp.asarray(np.linalg.qr(np.random.default_rng(0).normal(size=(width, rank)))[0], dtype)
    m = jax.random.normal(keys[2], (rank, rank), dtype)
    transition = (jnp.eye(width) + q.astype(jnp.float32) @ m.astype(jnp.float32) @ q.T).astype(dtype)
    cases = {
        "plain_sum": lambda: plain(x, update).block_until_ready(),
        "low_rank": lambda: low_rank(x, update, q, m).block_until_ready(),
        "exact": lambda: exact(x, update, transition).block_until_ready(),
    }
    seconds = take_turns(cases, repeats)
    return {
        "rows": rows,
        "width": width,
        "rank": rank,
        "dtype": dtype,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "over_plain_sum": ratio(seconds["low_rank"], seconds["plain_sum"]),
        "over_exact": ratio(seconds["low_rank"], seconds["exact"]),
        "multiplications": {"low_rank": respinquant.residual_macs(width, rank), "exact": width**2},
    }


def main() -> None:
    """Measures, prints and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    row = measure(arguments.rows, arguments.width, arguments.rank, arguments.dtype, arguments.repeats)
    print(
        f"{row['rows']} rows of {row['width']}, rank {row['rank']}: {row['over_plain_sum']['median']:.2f} times the "
        f"plain sum, {row['over_exact']['median']:.2f} times the exact change"
    )
    result = {"goals": GOALS, "device": jax.devices()[0].device_kind, "rows": [row]}
    print("written:", save("residual_rotation", result, arguments.out))


if __name__ == "__main__":
    main()
