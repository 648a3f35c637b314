"""Time and bytes of decoding on a low-bit cache against dense attention to the same keys, in one run.

    python -m pallas_kernels.ffd_decode.bench [--preset cpu|gpu] [--out FILE.json]

A planted share of the blocks has keys that the queries like; the rule must find them. One program runs several steps
that wait for each other; times are of one step. Bytes are a model: codes and scales of all blocks, residuals and values
of the kept ones. `cpu` takes about a minute, `gpu` (an H200) under three. On a CPU a cache that its last-level cache
holds is read several times as fast as memory, for dense attention as well: 16,384 keys here (17 MB) are such a case,
131,072 keys (134 MB) are not.

The goals on an H200 at 262,144 keys, 32 query and 8 KV heads of 128: at a keep ratio of at most 0.05 five times as fast
as dense and 40 % of the limit that the bytes set; at 1.0 at most 1.3 times as slow as dense.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ffd_decode import code_bytes, ffd_decode, quantize_blocks

__all__ = ["GOALS", "PRESETS", "Case", "bytes_moved", "goals_met", "measure"]

GOALS = {
    "few": {"times_as_fast_as_dense": 5.0, "share_of_limit": 0.4},
    "all": {"times_as_fast_as_dense": 1 / 1.3},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One step of decoding."""

    tokens: int
    keep: float
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    channels: int = 128
    block: int = 128
    bits: int = 2
    dtype: str = "bfloat16"


PRESETS = {  # cases, steps in a program, repeats
    "smoke": ([Case(512, 0.5, heads=2, kv_heads=1, channels=16, block=32, dtype="float32")], 2, 1),
    "cpu": (
        [
            Case(tokens, keep, heads=heads, kv_heads=2, channels=64, dtype="float32")
            for tokens, heads in ((4096, 2), (16384, 2), (16384, 8), (131072, 8))
            for keep in (0.03, 0.2, 0.5, 1.0)
        ],
        4,
        7,
    ),
    "gpu": (
        [Case(tokens, keep) for tokens in (1 << 15, 1 << 17, 1 << 18) for keep in (0.03, 0.2, 1.0)],
        50,
        5,
    ),
}


def bytes_moved(case: Case, keep: float) -> dict[str, float]:
    """The model of a step, by what is read; `dense` reads all keys and values as they were."""
    width = jnp.dtype(case.dtype).itemsize
    keys = case.batch * case.kv_heads * case.tokens
    scan = keys * code_bytes(case.channels, case.bits) + keys // case.block * case.channels * 4
    return {
        "scan": float(scan),
        "kept": float(keep * keys * case.channels * (1 + width)),
        "ffd": float(scan + keep * keys * case.channels * (1 + width)),
        "dense": float(2 * keys * case.channels * width),
    }


@functools.partial(jax.jit, static_argnums=0)
def planted(case: Case) -> tuple[jax.Array, ...]:
    """q, k and v: a share of the blocks, the first and last among them, lies along the queries, the rest against."""
    a, b, c, d = jax.random.split(jax.random.key(0), 4)
    blocks = case.tokens // case.block
    size = case.batch, case.kv_heads, case.tokens, case.channels
    inner = jax.random.permutation(d, jnp.arange(blocks - 2) < round(case.keep * blocks) - 2)
    liked = jnp.concatenate([jnp.array([True]), inner, jnp.array([True])])
    direction = jax.random.rademacher(c, (case.channels,), jnp.float32)
    along = jnp.where(jnp.repeat(liked, case.block), 0.5, -1.0)[:, None] * direction
    k = jax.random.normal(a, size, case.dtype) * 0.5 + along.astype(case.dtype)
    v = jax.random.normal(b, size, case.dtype)
    q = jax.random.normal(c, (case.batch, case.heads, case.channels)) * 0.5 + direction
    return q.astype(case.dtype), k, v


def dense_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of one token to all keys by XLA."""
    b, h, _, d = k.shape
    rows = q.reshape(b, h, -1, d)
    s = jnp.einsum("bhrd,bhtd->bhrt", rows, k, preferred_element_type=jnp.float32) * d**-0.5
    p = jnp.exp(s - s.max(-1, keepdims=True))
    out = jnp.einsum("bhrt,bhtd->bhrd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return (out / p.sum(-1)[..., None]).reshape(q.shape).astype(q.dtype)


def _in_a_row(step: Callable[..., jax.Array], steps: int) -> Callable[..., jax.Array]:
    """Steps that wait for each other: the output, too small to change q, is added to the next q."""

    def run(q: jax.Array, *cache: jax.Array) -> jax.Array:
        def one(_: Any, q: jax.Array) -> jax.Array:
            return q + step(q, *cache) * jnp.asarray(1e-30, q.dtype)

        return jax.lax.fori_loop(0, steps, one, q)

    return run


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - started


def _bandwidth(size: int) -> float:
    """Bytes per second of a copy of that many numbers, read and write counted."""
    source = jnp.ones(size, jnp.float32)
    copy = jax.jit(lambda a: a + 1)
    jax.block_until_ready(copy(source))
    return 2 * source.nbytes / min(_seconds(lambda: copy(source)) for _ in range(5))


def measure(
    case: Case, steps: int, repeats: int, implementation: str | None = None, *, bandwidth: float
) -> dict[str, Any]:
    """One row: the op, its XLA path and dense attention, in turns.

    Args:
        case: what to compute.
        steps: in one program.
        repeats: calls of each contestant; medians are taken.
        implementation: of the op.
        bandwidth: bytes per second of a copy, the limit.
    """
    q, k, v = planted(case)
    code = functools.partial(quantize_blocks, block=case.block, bits=case.bits)
    cache: tuple[Any, ...] = (*jax.jit(code)(k), v)
    op = functools.partial(ffd_decode, bits=case.bits, implementation=implementation)
    through_xla = functools.partial(ffd_decode, bits=case.bits, implementation="xla")
    contestants: dict[str, tuple[Any, tuple[jax.Array, ...]]] = {
        "ffd": (op, cache),
        "dense": (dense_attention, (k, v)),
    }
    if implementation != "xla":
        contestants["ffd_xla"] = (through_xla, cache)
    functions, compile_seconds = {}, {}
    for name, (step, arrays) in contestants.items():
        started = time.perf_counter()
        functions[name] = jax.jit(_in_a_row(step, steps)).lower(q, *arrays).compile()
        compile_seconds[name] = time.perf_counter() - started
        jax.block_until_ready(functions[name](q, *arrays))
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            arrays = contestants[name][1]
            seconds[name].append(_seconds(lambda f=function, a=arrays: f(q, *a)) / steps)
    out, stats = op(q, *cache, return_stats=True)
    wanted = np.asarray(dense_attention(q, k, v), np.float64)
    keep = float(np.mean(stats.keep_ratio))
    typical = {name: statistics.median(times) for name, times in seconds.items()}
    moved = bytes_moved(case, keep)
    return {
        **dataclasses.asdict(case),
        "keep_ratio": keep,
        "seconds": typical,
        "best_seconds": {name: min(times) for name, times in seconds.items()},
        "compile_seconds": compile_seconds,
        "times_as_fast_as_dense": typical["dense"] / typical["ffd"],
        "bytes_model": moved,
        "achieved_bytes_per_second": moved["ffd"] / typical["ffd"],
        "copy_bytes_per_second": bandwidth,
        "share_of_limit": moved["ffd"] / bandwidth / typical["ffd"],
        "relative_difference_to_dense": float(
            np.abs(np.asarray(out, np.float64) - wanted).max() / np.abs(wanted).max()
        ),
    }


def _xla_column(row: dict[str, Any]) -> str:
    seconds = row["seconds"]
    if "ffd_xla" not in seconds:
        return f"{'':8} {'':6}"
    return f"{seconds['ffd_xla'] * 1e6:7.0f}u {seconds['dense'] / seconds['ffd_xla']:6.2f}"


def goals_met(row: dict[str, Any]) -> dict[str, bool]:
    """Which of the goals for this row hold; none are set but for the longest cache."""
    if row["tokens"] < 1 << 18:
        return {}
    kind = "few" if row["keep_ratio"] <= 0.05 else "all" if row["keep_ratio"] == 1.0 else ""
    return {name: row[name] >= bound for name, bound in GOALS.get(kind, {}).items()}


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Prints a line per case, and writes all of them with the machine's name."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=list(PRESETS), default="cpu")
    parser.add_argument(
        "--implementation", default=None, help="xla, cpu, pallas or triton; the platform's best without"
    )
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args(arguments)
    cases, steps, repeats = PRESETS[options.preset]
    device = jax.devices()[0]
    bandwidth = _bandwidth(1 << (28 if device.platform != "cpu" else 18 if options.preset == "smoke" else 25))
    print(
        f"{device.device_kind} {platform.machine()}, JAX {jax.__version__}: copies {bandwidth / 1e9:.1f} GB/s"
    )
    print(
        "    keys heads  keep |      ffd    dense  ratio      xla  ratio | MB model  GB/s of limit | compile  vs dense"
    )
    rows = []
    for case in cases:
        row = measure(case, steps, repeats, options.implementation, bandwidth=bandwidth)
        row["goals"] = goals_met(row)
        rows.append(row)
        print(
            f"{case.tokens:8d} {case.heads:2d}/{case.kv_heads:<2d} {row['keep_ratio']:5.3f} | "
            f"{row['seconds']['ffd'] * 1e6:7.0f}u {row['seconds']['dense'] * 1e6:7.0f}u "
            f"{row['times_as_fast_as_dense']:6.2f} {_xla_column(row)} | {row['bytes_model']['ffd'] / 1e6:8.1f} "
            f"{row['achieved_bytes_per_second'] / 1e9:5.1f} {row['share_of_limit']:8.1%}  | "
            f"{row['compile_seconds']['ffd']:5.1f} s {row['relative_difference_to_dense']:10.1e}",
            flush=True,
        )
    if options.out:
        report = {
            "device": device.device_kind,
            "jax": jax.__version__,
            "preset": options.preset,
            "rows": rows,
        }
        temporary = options.out.with_name(options.out.name + ".partial")
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        temporary.replace(options.out)
    return rows


if __name__ == "__main__":
    main()
