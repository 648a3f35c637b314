"""What `effml quantize` says: how long it will take, how far it is, and what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from effml.quantize import QuantizationPlan, QuantizationRows

__all__ = [
    "Progress",
    "about_training",
    "by_layer",
    "curves",
    "duration",
    "products_per_second",
    "seconds_of",
    "summary",
]


def products_per_second() -> float:
    """Operations per second of one large product."""
    import jax
    import jax.numpy as jnp

    size = 1024
    product = jax.jit(jnp.matmul)
    x = jnp.ones((size, size))
    product(x, x).block_until_ready()
    started = time.perf_counter()
    product(x, x).block_until_ready()
    return 2 * size**3 / (time.perf_counter() - started)


def seconds_of(plan: QuantizationPlan, windows: int, length: int) -> float:
    """A rough guess from operation counts and one timed product."""
    rate = products_per_second()
    weights = sum(row.inputs * row.outputs for row in plan.rows)
    seconds = 0.0
    if plan.weight_bits < 16:
        seconds += (80 if plan.clip else 1) * 4e-9 * weights
        if plan.rounding == "gptq":
            inputs = {(row.layer, row.name.split(".")[0], row.inputs): row.inputs for row in plan.rows}
            tokens = windows * length
            counted = 2 * 2 * tokens * weights + 2 * tokens * sum(n * n for n in inputs.values())
            counted += sum(2 * row.inputs**2 * (row.inputs + row.outputs) for row in plan.rows)
            seconds += counted / rate
    return 5 + seconds + plan.steps * plan.batch * length * 12 * weights / rate


def duration(seconds: float) -> str:
    """As one would say it.

    Example:
        >>> duration(12.3), duration(200.0)
        ('12 s', '3 min')
    """
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def by_layer(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each layer: bytes, the largest errors, seconds."""
    table = []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        own = [row for row in rows if row["layer"] == layer]
        line = {
            "layer": layer,
            "bits": own[0]["bits"],
            "kB": sum(row["bytes"] for row in own) / 1e3,
            "weight error": max(row["weight_error"] for row in own),
        }
        for name, key in (
            ("output error", "output_error"),
            ("orthogonality", "orthogonality"),
            ("basis change", "distance"),
            ("basis change error", "residual_error"),
        ):
            found = [row[key] for row in own if row.get(key) is not None]
            if found:
                line[name] = max(found)
        table.append({**line, "seconds": sum(row["seconds"] for row in own)})
    return table


def curves(rows: QuantizationRows) -> dict[str, Any]:
    """What training measured, and every skip."""
    if not rows.transitions:
        return {}
    training = rows.training or {}
    kept = {name: training[name] for name in ("losses", "evaluations") if name in training}
    return {**kept, "transitions": list(rows.transitions)}


def summary(rows: QuantizationRows) -> dict[str, float | int]:
    """Of training, the few numbers to read first."""
    if rows.training is None:
        return {}
    names = ("steps", "best_step", "mean_step", "max_step", "orthogonality")
    found = {name: rows.training[name] for name in names if rows.training[name] is not None}
    nats = dict(rows.training["evaluations"])
    return {**found, "nats_at_start": nats[0], "nats_at_best": nats[rows.training["best_step"]]}


def about_training(training: dict[str, Any]) -> str:
    """One line on which rotations were kept."""
    nats = dict(training["evaluations"])
    best = training["best_step"]
    chosen = (
        f"those after step {best} were the best, {nats[best]:.4f} nats per token"
        if best
        else "none was better"
    )
    return (
        f"rotations: of {training['steps']} steps, {chosen} on the fixed set ({nats[0]:.4f} at the start); "
        f"mean step {training['mean_step']:.3g}, its ceiling {training['max_step']:g}"
    )


class Progress:
    """Lines with the rest of the time: one that is written over on a terminal, one every 5 seconds elsewhere."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._stage = ""
        self._began = self._shown = 0.0
        self._first = 0

    def __call__(self, stage: str, done: int, total: int, detail: str) -> None:
        now = time.perf_counter()
        if stage == "checks":
            self._begin()
            return
        if stage != self._stage:
            self._stage, self._began, self._first, self._shown = stage, now, done, 0.0
        each = (now - self._began) / max(done - self._first, 1)
        left = f"about {duration(each * (total - done))} left" if done > self._first else ""
        line = " | ".join(part for part in (f"{stage} {done}/{total}", detail, left) if part)
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif done == total or now - self._shown >= 5:
            self._shown = now
            print(line, file=sys.stderr, flush=True)
