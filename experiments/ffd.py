"""FFD: does a 2-bit scan find what matters in a cache, and is a margin in nats better than a number of blocks?

Claims under test: choosing blocks within δ of the largest score keeps more of the softmax than choosing the same number
everywhere; 2-bit codes choose well enough that a model loses next to nothing at δ = 7 and finds every needle; what is
read falls where attention is sharp, and not where it is flat.

    python -m experiments.ffd --preset cpu       three tiny models: about 6 minutes on two cores
    python -m experiments.ffd --preset full      the same, and SmolLM2-135M at up to 8,192 tokens: resumable, row by row

A tiny model with grouped queries (`_ffd_model.py`) learns source text of 1,024 bytes and to copy needles planted in it,
one for each seed. Its cache is filled densely, then its last 128 rows are read by every selector (`_ffd_selectors.py`)
with blocks of 16, and once more by FFD's own cache and kernel, row by row. Selectors without a δ get the mean share of
blocks that FFD with 2 bits kept. Text is scored in nats per byte, needles relative to those that dense attention finds.
Bytes are counted from the mask that the kernel kept, against a dense cache in bfloat16.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from effml import report
from effml.report import Check, MethodCard, Result
from experiments._ffd_model import NeedleModelConfig, load_text, train
from experiments._ffd_rows import Bench, traffic

METHOD = MethodCard(
    name="ffd",
    job="attend",
    title="FFD",
    purpose="Decoding that reads 2 bits of every key, and the rest of only those blocks that matter.",
    claim=(
        "Blocks within δ of the largest score hold more of the softmax than as many blocks everywhere; codes of 2 bits "
        "find them: every needle at δ = 7, next to no loss, and several times fewer bytes where attention is sharp."
    ),
    module="effml.attend.ffd",
    paper=("Faster Than Flash: exploiting attention sparsity for long-context decoding", "2609.00097"),
    minutes={"smoke": 0.4, "cpu": 6.0, "full": 60.0},
    headline=(
        "δ = 7: reads {keep_7:.0%} of the blocks, loses {lost_7:.4f} nats, finds {recall_7:.0%} of the needles"
    ),
)


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment; the defaults are the `cpu` preset."""

    preset: str = "cpu"
    seed: int = 0
    seeds: int = 3
    model: NeedleModelConfig = field(default_factory=NeedleModelConfig)
    block: int = 16
    windows: int = 8
    scored: int = 128
    needles: int = 48
    deltas: tuple[float, ...] = (5.0, 7.0)
    traffic_length: int = 16_384
    smollm2: bool = False


PRESETS = {
    "smoke": Config(
        preset="smoke",
        seeds=1,
        model=NeedleModelConfig(
            width=16, layers=1, heads=2, kv_heads=1, mlp_width=16, phases=((2, 2, 128, 4),), text_bytes=60_000
        ),
        windows=2,
        scored=16,
        needles=3,
        traffic_length=1024,
    ),
    "cpu": Config(),
    "full": Config(preset="full", smollm2=True),
}


def run(config: Config) -> Result:
    """Trains the models, reads their caches in every way, counts bytes, and judges."""
    began = time.perf_counter()
    seeds = range(config.seed, config.seed + config.seeds)
    result = Result(method=METHOD.name, preset=config.preset, seeds=seeds)
    outcomes = [_of_seed(config, seed) for seed in seeds]
    table = [row for outcome in outcomes for row in outcome["rows"]]
    for delta in config.deltas:
        for name in dict.fromkeys(row["selector"] for row in table):
            mine = [row for row in table if (row["selector"], row["delta"]) == (name, delta)]
            spread = report.mean_and_spread
            result.rows.append(
                {
                    "delta": delta,
                    "selector": name,
                    **spread("keep", [row["keep"] for row in mine]),
                    **spread("mass", [row["mass"] for row in mine]),
                    "least_head": min(row["least_head"] for row in mine),
                    "least_row": min(row["least_row"] for row in mine),
                    **spread("lost", [row["lost"] for row in mine]),
                    "recall": float(np.mean([row["recall"] for row in mine])),
                }
            )
        own = [outcome["own_path"][f"{delta:g}"] for outcome in outcomes]
        of_first = next(row for row in result.rows if row["delta"] == delta)
        result.summary[f"keep_{delta:g}"] = of_first["keep"]
        result.summary[f"lost_{delta:g}"] = max(one["lost"] for one in own)
        result.summary[f"recall_{delta:g}"] = float(np.mean([one["recall"] for one in own]))
        result.summary[f"apart_{delta:g}"] = max(one["apart"] for one in own)
    result.summary["dense_recall"] = float(np.mean([outcome["dense_recall"] for outcome in outcomes]))
    result.summary["dense_nats"] = float(np.mean([outcome["dense_nats"] for outcome in outcomes]))
    heads = traffic(config.traffic_length, 64, 128, 5.0, config.seed)
    for row in heads:
        for name in ("keep", "ratio", "mass"):
            result.summary[f"{row['head']}_{name}"] = row[name]
    result.curves["outcomes"] = outcomes
    if config.smollm2:
        from experiments import _ffd_smollm2 as smollm2

        result.curves["smollm2"] = smollm2.rows(say)
    result.seconds = time.perf_counter() - began
    return result.judged(CHECKS)


def _of_seed(config: Config, seed: int) -> dict[str, Any]:
    """One model's outcome; kept below `$EFFML_CACHE`, so that a run that was stopped goes on with the next model."""
    part = dataclasses.replace(config, preset="", seed=0, seeds=1, smollm2=False, traffic_length=0)
    mark = hashlib.sha256(repr(part).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("EFFML_CACHE") or Path.home() / ".cache/effml")
    path = cache / "ffd" / f"{mark}-{seed}.json"
    if config.preset != "smoke" and path.is_file():
        return json.loads(path.read_text())
    say(f"seed {seed}: training")
    text = load_text(config.model)
    bench = Bench(config, train(config.model, text, seed, say), text, seed)
    outcome = {
        "seed": seed,
        "dense_nats": bench.reference,
        "dense_recall": float(bench.found.mean()),
        "heavy": np.asarray(bench.report.heavy).mean(1).round(4).tolist(),
        "rows": [row for delta in config.deltas for row in bench.rows(delta)],
        "own_path": {f"{delta:g}": bench.own_path(delta) for delta in config.deltas},
    }
    say(
        f"seed {seed}: {bench.reference:.3f} nats, {outcome['dense_recall']:.0%} of the needles found densely"
    )
    if config.preset != "smoke":
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(outcome))
        temporary.replace(path)
    return outcome


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def _of(r: Result, selector: str, delta: float, name: str) -> float:
    found = [row[name] for row in r.rows if (row["selector"], row["delta"]) == (selector, delta)]
    return float(found[0])


SPEC = "FFD spec, section 5"
CHECKS = [
    *(
        Check(
            f"δ = {delta:g}: kept mass of exact top-δ less that of exact top-k, as many blocks on average",
            lambda r, delta=delta: (
                _of(r, "exact top-δ", delta, "mass") - _of(r, "exact top-k", delta, "mass")
            ),
            ">=",
            0.0,
            f"{SPEC}, E1 (i)",
        )
        for delta in (5.0, 7.0)
    ),
    Check(
        "δ = 7: share of the needles found", lambda r: r.summary["recall_7"], ">=", 1.0, f"{SPEC}, E1 (ii)"
    ),
    *(
        Check(
            f"δ = {delta:g}: most nats per byte lost by any model",
            lambda r, delta=delta: r.summary[f"lost_{delta:g}"],
            "<=",
            bound,
            f"{SPEC}, E1 (ii)",
        )
        for delta, bound in ((7.0, 0.02), (5.0, 0.05))
    ),
    Check(
        "share of blocks kept at δ = 5 less that at δ = 7",
        lambda r: r.summary["keep_5"] - r.summary["keep_7"],
        "<",
        0.0,
        f"{SPEC}, E1 (iii)",
    ),
    Check("share of blocks kept at δ = 7", lambda r: r.summary["keep_7"], "<", 1.0, f"{SPEC}, E1 (iii)"),
    *(
        Check(
            f"δ = {delta:g}: kept mass of FFD with 2 bits less that of Quest's bound",
            lambda r, delta=delta: (
                _of(r, "FFD, 2 bits", delta, "mass") - _of(r, "Quest's bound, top-k", delta, "mass")
            ),
            ">=",
            -0.005,
            f"{SPEC}, E1 (iv)",
        )
        for delta in (5.0, 7.0)
    ),
    *(
        Check(
            f"bytes of a dense cache / bytes read, {kind} head",
            lambda r, kind=kind: r.summary[f"{kind}_ratio"],
            ">=",
            2.5,
            f"{SPEC}, E2",
        )
        for kind in ("sink", "needle")
    ),
    Check("share of blocks kept, flat head", lambda r: r.summary["flat_keep"], "==", 1.0, f"{SPEC}, E2"),
    Check(
        "nats per byte between FFD's own cache and kernel and the selector that masks scores",
        lambda r: max(r.summary["apart_5"], r.summary["apart_7"]),
        "<=",
        1e-3,
        "both compute the same",
    ),
]
COLUMNS = {
    "delta": "δ (nats)",
    "selector": "blocks chosen by",
    "keep": "blocks kept",
    "mass": "softmax kept",
    "least_head": "softmax kept, least head",
    "least_row": "softmax kept, least row",
    "lost": "lost (nats per byte)",
    "recall": "needles found",
}


def table(result: Result) -> str:
    """Every selector at every δ as a Markdown table."""
    return report.markdown_table(result.rows, COLUMNS)


def notes(result: Result) -> list[str]:
    """What was measured and is reported without a bound."""
    of = result.summary
    lines = [
        f"Dense attention: {of['dense_nats']:.3f} nats per byte of text, {of['dense_recall']:.1%} of the needles "
        "found. What a selector finds is counted among those.",
        "The needle task is retrieval of a single token: a needle is one byte, and found when it is the likeliest.",
    ]
    for kind in ("sink", "needle", "flat"):
        lines.append(
            f"Made-up {kind} head at {PRESETS['cpu'].traffic_length if result.preset != 'smoke' else 1024:,} rows, "
            f"δ = 5: {of[f'{kind}_keep']:.1%} of the blocks kept, {of[f'{kind}_mass']:.4f} of the softmax, "
            f"{of[f'{kind}_ratio']:.2f} times fewer bytes than a dense cache in bfloat16."
        )
    weak = [row for row in result.rows if row["least_row"] < 0.5]
    for row in weak:
        lines.append(
            f"δ = {row['delta']:g}, {row['selector']}: some row of some head keeps only {row['least_row']:.2f} of its "
            "softmax."
        )
    if rows := result.curves.get("smollm2"):
        from experiments import _ffd_smollm2 as smollm2

        lines += smollm2.notes(rows)
    return lines


def plot(result: Result) -> Any:
    """What is lost and what is kept of the softmax, against the blocks read."""
    figure, axes = report.figures.panels(2, size=(5.6, 4.2))
    for place, delta in zip(axes, dict.fromkeys(row["delta"] for row in result.rows)):
        rows = [row for row in result.rows if row["delta"] == delta]
        report.bar_chart(
            {f"{row['selector']} ({row['keep']:.0%})": 1 - row["mass"] for row in rows},
            xlabel="share of the softmax left out",
            title=f"δ = {delta:g} (blocks kept)",
            axes=place,
        )
    return figure


if __name__ == "__main__":
    from experiments._main import main

    sys.exit(main(sys.modules[__name__]))
