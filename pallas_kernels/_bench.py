"""What the `bench.py` of every op shares: contestants take turns, and meet the limit that their bytes set.

    limit    = bytes of the model / bandwidth of a copy
    share    = limit / time

The first contestant is the op; every other one is something to be faster than. A program may hold several steps that
wait for each other, so that a step's time is not that of a launch; times are of one step.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["Contestant", "copy_bandwidth", "in_a_row", "line", "measure", "write"]


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to compute a step.

    Attributes:
        run: a traceable function of `arguments` that does `steps` steps.
        arguments: arrays, or trees of them.
        moved: bytes that a step must move by the model; None has no limit to be compared with.
        steps: in one call of `run`.
        rolled: the steps are turns of one loop, whose body XLA's count of bytes sees once.
    """

    run: Callable[..., Any]
    arguments: Sequence[Any]
    moved: float | None = None
    steps: int = 1
    rolled: bool = False


def in_a_row(step: Callable[..., jax.Array], steps: int) -> Callable[..., jax.Array]:
    """Steps that wait for each other, as `run(x, *sets)`: step i is `step(x, *sets[i % len(sets)])`.

    The last output, too small to change x, is added to the next input.

    Example:
        >>> float(in_a_row(lambda x, a: x * a, 2)(jnp.ones(()), (jnp.array(2.0),), (jnp.array(3.0),)))
        3.0
    """
    step = jax.jit(step)  # traced once

    def run(x: jax.Array, *sets: Any) -> jax.Array:
        y = jnp.zeros((), x.dtype)
        for i in range(steps):
            x = x + y.ravel()[0].astype(x.dtype) * jnp.asarray(1e-30, x.dtype)
            y = step(x, *sets[i % len(sets)])
        return y

    return run


def copy_bandwidth(numbers: int) -> float:
    """Bytes per second of a copy of that many float32 numbers, read and write counted; the best of five.

    Example:
        >>> copy_bandwidth(1 << 10) > 0
        True
    """
    source = jnp.ones(numbers, jnp.float32)
    copy = jax.jit(lambda a: a + 1)
    jax.block_until_ready(copy(source))
    return 2 * source.nbytes / min(_seconds(copy, [source]) for _ in range(5))


def measure(contestants: Mapping[str, Contestant], repeats: int, *, bandwidth: float) -> dict[str, Any]:
    """Compiles all, runs each once, then times them in turns, so that all meet the same noise.

    Args:
        contestants: the op first.
        repeats: calls of each; medians are taken.
        bandwidth: bytes per second of a copy, the limit.

    Returns:
        By name: `seconds` (median of a step), `best_seconds`, `trace_seconds`, `compile_seconds`, `temporary_bytes`,
        `bytes_model`, `bytes_by_xla` (operands and results of what it runs, native and Pallas calls from outside).
        Of the op: `times_as_fast_as` by name, `achieved_bytes_per_second`, `copy_bytes_per_second`, `share_of_limit`.

    Example:
        >>> x = jnp.ones(8)
        >>> row = measure({"op": Contestant(jnp.sin, [x], 64), "other": Contestant(jnp.cos, [x])}, 1, bandwidth=1e9)
        >>> sorted(row["seconds"]), row["bytes_model"], row["bytes_by_xla"]["op"]
        (['op', 'other'], {'op': 64}, 64.0)
    """
    programs: dict[str, Any] = {}
    row: dict[str, Any] = {"trace_seconds": {}, "compile_seconds": {}}
    for name, one in contestants.items():
        started = time.perf_counter()
        lowered = jax.jit(one.run).lower(*one.arguments)
        row["trace_seconds"][name] = time.perf_counter() - started
        programs[name] = lowered.compile()
        row["compile_seconds"][name] = time.perf_counter() - started - row["trace_seconds"][name]
        jax.block_until_ready(programs[name](*one.arguments))
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, one in contestants.items():
            seconds[name].append(_seconds(programs[name], one.arguments) / one.steps)
    row["seconds"] = {name: statistics.median(times) for name, times in seconds.items()}
    row["best_seconds"] = {name: min(times) for name, times in seconds.items()}
    row["temporary_bytes"] = {name: _temporary(program) for name, program in programs.items()}
    row["bytes_model"] = {name: one.moved for name, one in contestants.items() if one.moved is not None}
    row["bytes_by_xla"] = {
        name: _counted(programs[name]) / (1 if one.rolled else one.steps) for name, one in contestants.items()
    }
    op = next(iter(contestants))
    spent = row["seconds"][op]
    row["times_as_fast_as"] = {name: t / spent for name, t in row["seconds"].items() if name != op}
    row["copy_bytes_per_second"] = bandwidth
    if op in row["bytes_model"]:
        row["achieved_bytes_per_second"] = row["bytes_model"][op] / spent
        row["share_of_limit"] = row["bytes_model"][op] / bandwidth / spent
    return row


def line(row: Mapping[str, Any]) -> str:
    """What `measure` found, in one line.

    Example:
        >>> x = jnp.ones(8)
        >>> print(line(measure({"op": Contestant(jnp.sin, [x], 64)}, 1, bandwidth=1e9)))
        op ... us (traced ... s, compiled ... s)  6.4e-05 MB by the model, 6.4e-05 by XLA  ... GB/s, ...% of a copy
    """
    op = next(iter(row["seconds"]))
    parts = [
        f"{op} {row['seconds'][op] * 1e6:9.1f} us (traced {row['trace_seconds'][op]:.2f} s, "
        f"compiled {row['compile_seconds'][op]:.2f} s)"
    ]
    parts += [f"{ratio:.2f}x {name}" for name, ratio in row["times_as_fast_as"].items()]
    if op in row["bytes_model"]:
        megabytes = row["bytes_model"][op] / 1e6, row["bytes_by_xla"][op] / 1e6
        parts.append(f"{megabytes[0]:.3g} MB by the model, {megabytes[1]:.3g} by XLA")
        parts.append(
            f"{row['achieved_bytes_per_second'] / 1e9:.1f} GB/s, {row['share_of_limit']:.0%} of a copy"
        )
    return "  ".join(parts)


def write(path: pathlib.Path, rows: Sequence[Mapping[str, Any]], **about: Any) -> None:
    """Writes the rows as JSON with the device's name and JAX's version; never a part of it."""
    device = jax.devices()[0]
    result = {
        "device": device.device_kind,
        "platform": device.platform,
        "host": platform.processor() or platform.machine(),
        "jax": jax.__version__,
        **about,
        "rows": list(rows),
    }
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)


def _seconds(run: Callable[..., Any], arguments: Sequence[Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return time.perf_counter() - started


def _temporary(program: Any) -> int | None:
    analysis = program.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


def _counted(program: Any) -> float:
    found = program.cost_analysis()
    return float((found or {}).get("bytes accessed", 0.0))
