"""Ways to compute one row of a binary product on a CPU, against the dense product in float32, in SmolLM2's layers.

| form | how |
|---|---|
| native | C++ called through `jax.ffi`: what `binary_matmul(implementation="cpu")` runs |
| xla | what `binary_matmul(implementation="xla")` runs: sign bits flip x, 32 at a time |
| bytes | XLA: a table of the 256 sums that 8 inputs can give, looked up by each byte of signs |
| numba | the same tables in machine code by numba, called through `jax.pure_callback`; left out where numba is absent |
| unpack | XLA: signs become a matrix of +1 and -1, then a dot |
| dense | `jnp.dot` with the float32 kernel; dense_native is `pallas_kernels.matvec` |

One program computes 16 products in a row, each on weights of its own and each waiting for the one before, so that
kernels do not stay in a cache and a program's start is not what is timed. The forms take turns.

    python -m benchmarks.binary_forms           # about 2 minutes; pip install numba for the form of that name
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import rich
from jax import lax

from benchmarks._common import RESULTS, ratio, save, spread, take_turns
from effml.report import table
from pallas_kernels import _bench
from pallas_kernels.binary_matmul import availability, binary_matmul, unpack_signs
from pallas_kernels.binary_matmul.bench import PRESETS, Case, relative_error, weights
from pallas_kernels.matvec import matvec

COPIES = 16


def sign_bytes(words: jax.Array) -> jax.Array:
    """uint32[words, n] as uint8[4 * words, n]: sign i lies in bit i % 8 of byte i // 8."""
    parts = jnp.stack([(words >> shift).astype(jnp.uint8) for shift in (0, 8, 16, 24)], axis=1)
    return parts.reshape(-1, words.shape[1])


def byte_product(x: jax.Array, rows: jax.Array) -> jax.Array:
    """y_j = sum_g T[g, rows[g, j]] with T[g, b] the sum of x[8 g + k] with the sign that bit k of b says.

    Args:
        x: float32[in].
        rows: uint8[groups, out], at least in / 8 groups; what lies beyond x counts as 0.

    Returns:
        float32[out].
    """
    groups = jnp.pad(x, (0, 8 * rows.shape[0] - x.shape[0])).reshape(-1, 8)
    sums = jnp.zeros((len(groups), 1), jnp.float32)
    for k in range(8):  # a bit doubles the table: 0 adds, 1 subtracts
        one = groups[:, k, None]
        sums = jnp.concatenate([sums + one, sums - one], axis=1)
    return jnp.take_along_axis(sums, rows.astype(jnp.int32), axis=1, mode="promise_in_bounds").sum(0)


def byte_matmul(
    x: jax.Array, v: jax.Array, u: jax.Array, scale_in: jax.Array, scale_out: jax.Array
) -> jax.Array:
    """float32[1, in] to float32[1, out], with `sign_bytes` of both factors."""
    h = byte_product(x[0] * scale_in.astype(jnp.float32), v)
    return (byte_product(h, u) * scale_out.astype(jnp.float32))[None]


def unpacked_matmul(
    x: jax.Array, v: jax.Array, u: jax.Array, scale_in: jax.Array, scale_out: jax.Array
) -> jax.Array:
    """Signs as a float32 matrix, then a dot, twice."""
    rank = v.shape[1]
    h = jnp.dot(x * scale_in.astype(jnp.float32), unpack_signs(v, x.shape[1], dtype=jnp.float32))
    return jnp.dot(h, unpack_signs(u, rank, dtype=jnp.float32)) * scale_out.astype(jnp.float32)


def numba_matmul() -> Callable[..., jax.Array] | None:
    """`byte_matmul` by numba; None where it is not installed."""
    if importlib.util.find_spec("numba") is None:
        return None
    import numba  # type: ignore[import-not-found]

    @numba.njit(fastmath=True, cache=False)
    def product(x: Any, rows: Any) -> Any:
        y = np.zeros(rows.shape[1], np.float32)
        sums = np.zeros(256, np.float32)
        for group in range(rows.shape[0]):
            sums[0], size = 0.0, 1
            for k in range(8):
                i = 8 * group + k
                one = x[i] if i < x.shape[0] else np.float32(0)
                for place in range(size):
                    sums[size + place] = sums[place] - one
                    sums[place] += one
                size *= 2
            row = rows[group]
            for j in range(row.shape[0]):
                y[j] += sums[row[j]]
        return y

    def on_host(x: Any, v: Any, u: Any, scale_in: Any, scale_out: Any) -> Any:
        x, v, u, scale_in, scale_out = (np.asarray(one) for one in (x, v, u, scale_in, scale_out))
        h = product(x[0] * scale_in, v)
        return (product(h, u) * scale_out)[None]

    def run(x: jax.Array, v: jax.Array, u: jax.Array, scale_in: jax.Array, scale_out: jax.Array) -> jax.Array:
        scales = scale_in.astype(jnp.float32), scale_out.astype(jnp.float32)
        made = jax.ShapeDtypeStruct((1, u.shape[1]), jnp.float32)
        return jax.pure_callback(on_host, made, x, v, u, *scales)

    return run


def forms() -> dict[str, tuple[Callable[..., jax.Array], bool]]:
    """Each form, and whether it reads bytes of signs (words otherwise)."""

    def of(implementation: str) -> Callable[..., jax.Array]:
        return lambda x, *factors: binary_matmul(x, *factors, implementation=implementation)

    found = {"native": (of("cpu"), False), "xla": (of("xla"), False), "bytes": (byte_matmul, True)}
    if (run := numba_matmul()) is not None:
        found["numba"] = (run, True)
    return {**found, "unpack": (unpacked_matmul, False)}


def measure(case: Case, repeats: int, copies: int = COPIES) -> dict[str, Any]:
    """All forms in turns on one layer: seconds of a product, how many times as fast as the dense one, errors."""
    sets = weights(case, copies)
    in_bytes = [(sign_bytes(v), sign_bytes(u), *scales) for v, u, *scales in sets]
    keys = jax.random.split(jax.random.key(2), copies)
    kernels = [(jax.random.normal(key, (case.inputs, case.outputs)),) for key in keys]
    x = jax.random.normal(jax.random.key(1), (1, case.inputs))
    steps: dict[str, tuple[Any, Any]] = {
        name: (run, in_bytes if reads else sets) for name, (run, reads) in forms().items()
    }
    steps["dense"] = (lambda x, kernel: lax.dot(x, kernel), kernels)
    steps["dense_native"] = (lambda x, kernel: matvec(x, kernel), kernels)

    def call(step: Any, arguments: Any) -> Callable[[], Any]:
        program = jax.jit(_bench.in_a_row(step, copies))
        return lambda: jax.block_until_ready(program(x, *arguments))

    times = take_turns({name: call(*one) for name, one in steps.items()}, repeats)
    times = {name: [one / copies for one in own] for name, own in times.items()}
    return {
        "inputs": case.inputs,
        "outputs": case.outputs,
        "rank": case.rank,
        "bits_per_weight": case.bits_per_weight,
        "seconds": {name: spread(own) for name, own in times.items()},
        "times_as_fast_as_dense": {name: ratio(times["dense"], own) for name, own in times.items()},
        "relative_error": {
            name: relative_error(case, jax.jit(run)(x, *(in_bytes if reads else sets)[0]), x, sets[0])
            for name, (run, reads) in forms().items()
        },
    }


def main() -> None:
    """Measures, prints a table and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = [measure(case, arguments.repeats) for case in PRESETS["decode"][0]]
    shown = [
        {
            "layer": f"{row['inputs']} x {row['outputs']}, rank {row['rank']}",
            **{name: f"{one['median']:.2f}" for name, one in row["times_as_fast_as_dense"].items()},
        }
        for row in rows
    ]
    rich.print(table(shown))
    result = {"products": availability(), "products_in_a_row": COPIES, "rows": rows}
    print("written:", save("binary_forms", result, arguments.out))


if __name__ == "__main__":
    main()
