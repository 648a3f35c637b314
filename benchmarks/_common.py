"""What the benchmarks share: taking turns, medians with spread, and where results go."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"


def take_turns(cases: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every call, the cases one after the other in each round, so that all meet the same noise.

    Each case runs twice before (the first call compiles).
    """
    for run in cases.values():
        run()
        run()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, run in cases.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    """Median, quartiles and best."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {"median": middle, "quartile_low": low, "quartile_high": high, "best": min(values)}


def ratio(slower: list[float], faster: list[float]) -> dict[str, float]:
    """How many times as fast the second is: median and quartiles of the rounds' ratios, and of the best times.

    On a machine with other work the best times are the fairer pair: torch's threads wait for each other by
    spinning, so it loses far more than XLA when a core is taken away.
    """
    rounds = spread([a / b for a, b in zip(slower, faster)])
    del rounds["best"]
    return {**rounds, "of_best": min(slower) / min(faster)}


def copier(gigabytes: float = 1.0) -> tuple[Callable[[], Any], int]:
    """A call that copies an array on all cores, and the bytes that it reads and writes."""
    import torch

    source = torch.ones(int(gigabytes * 2**30 / 4))
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.nbytes


def save(name: str, result: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Writes `NAME.json` with the machine and the versions."""
    from effml import report

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    about = {
        "machine": report.machine(),
        "versions": report.versions(("effml", "jax", "jaxlib", "numpy", "torch", "transformers")),
        "load_average": {
            "minute": round(os.getloadavg()[0], 2),
            "quarter_hour": round(os.getloadavg()[2], 2),
        },
    }
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps({**about, **_plain(result)}, indent=1) + "\n")
    temporary.replace(path)
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, (float, np.floating)) else value
