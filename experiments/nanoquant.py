"""NanoQuant: one bit a weight, and less, from low-rank binary factors that are tuned block by block.

Claims under test: at equal or fewer bits the factors lose far less than signs with row scales; every stage of the
method (dense tuning before each factorisation, tuning through the signs, scales by the teacher's logits) adds to it;
and the start that LB-ADMM finds is worth its time.

    python -m experiments.nanoquant --preset cpu       one trained model, three seeds of text and starts
    python -m experiments.nanoquant --preset full      one trained model for each seed; resumable, job by job

Two parts. Matrices (`_nanoquant_matrix.py`): weighted errors of single factorisations. A small language model
(`_nanoquant_tiny.py`): 64 windows of 128 tokens calibrate, held-out windows of other files measure, and what is
reported is the *excess*, nats per token over the model in full precision. Ranks are multiples of 8, and the realised
rate is reported beside the one asked for. Learning rates are ten times the paper's, whose ratio of 10 : 1 is kept: a
model of a million parameters sees few steps. Stages and starts are compared at 0.8 bits, where the paper compares them.

Finished jobs are kept below `~/.cache/effml/nanoquant`, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from effml import report
from effml.report import Check, MethodCard, Result
from experiments import _nanoquant_matrix as matrix
from experiments._nanoquant_tiny import INIT_TITLES, STAGES, TinyBench, TinyConfig, cache

METHOD = MethodCard(
    name="nanoquant",
    job="quantize",
    title="NanoQuant",
    purpose="Weights of one bit and less: two matrices of signs and two scales for each kernel, tuned block by block.",
    claim=(
        "Low-rank binary factors at 1 bit and below lose at most half of what signs with row scales lose; every stage "
        "of tuning helps, and LB-ADMM is the better start."
    ),
    module="effml.quantize.nanoquant",
    paper=("NanoQuant: sub-1-bit weights by low-rank binary factorisation", "2602.06694"),
    minutes={"smoke": 0.2, "cpu": 25.0, "full": 40.0},
    headline=(
        "a small model loses {kl_1:.3f} nats at {kl_1_bits:.2f} bits, where signs with row scales lose "
        "{sign_row_scale_1:.3f} at {sign_row_scale_1_bits:.2f}"
    ),
)


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment; the defaults are the `cpu` preset."""

    preset: str = "cpu"
    seed: int = 0
    seeds: int = 3
    tiny: TinyConfig = field(default_factory=TinyConfig)
    matrices: matrix.MatrixConfig = field(default_factory=matrix.MatrixConfig)


PRESETS = {
    "smoke": Config(
        preset="smoke",
        seeds=1,
        tiny=TinyConfig(
            steps=0,
            windows=2,
            length=16,
            measured=2,
            epochs=1,
            iterations=4,
            ablated=3.0,
            bits=(3.0,),
            inits=(),
        ),
        matrices=matrix.SMOKE,
    ),
    "cpu": Config(),
    "full": Config(preset="full", tiny=TinyConfig(model_each=True)),
}


def run(config: Config) -> Result:
    """Quantises the model in every way for every seed, and judges."""
    began = time.perf_counter()
    seeds = range(config.seed, config.seed + config.seeds)
    result = Result(method=METHOD.name, preset=config.preset, seeds=seeds)
    smoke = config.preset == "smoke"
    rows: list[dict[str, Any]] = []
    with _quickly_compiled() if smoke else contextlib.nullcontext():
        matrices, summary = _matrices(config, seeds, keep=not smoke)
        for seed in seeds:
            rows += TinyBench(config.tiny, seed, keep=not smoke).rows(say)
    whole = {row["seed"]: row["nats"] for row in rows if row["kind"] == "whole"}
    for row in rows:
        row["excess"] = row["nats"] - whole[row["seed"]]
    for kind, bits in dict.fromkeys((row["kind"], row["asked"]) for row in rows):
        mine = [row for row in rows if (row["kind"], row["asked"]) == (kind, bits)]
        name = f"{kind}_{bits:g}"
        excess = [row["excess"] for row in mine]
        result.summary[name] = float(np.mean(excess))
        result.summary[f"{name}_bits"] = mine[0]["bits_per_weight"]
        if kind == "whole":
            result.summary["whole"] = float(np.mean([row["nats"] for row in mine]))
            continue
        result.rows.append(
            {
                "way": mine[0]["title"],
                "asked": bits if "ranks" in mine[0] else None,
                "bits_per_weight": mine[0]["bits_per_weight"],
                **report.mean_and_spread("excess", excess),
                **_mean_of(mine, "installed_error", "seconds"),
            }
        )
    shares = [row["stored_share"] / (row["bits_per_weight"] / 16) for row in rows if "stored_share" in row]
    result.summary["stored"] = float(max(shares, key=lambda share: abs(share - 1)))
    result.summary["ablated"] = config.tiny.ablated
    result.summary |= summary
    result.curves["details"] = rows
    result.curves["matrices"] = matrices
    result.seconds = time.perf_counter() - began
    return result.judged(CHECKS)


def _matrices(config: Config, seeds: Any, keep: bool) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The matrix part, done now or before."""
    about = json.dumps([dataclasses.asdict(config.matrices), list(seeds)])
    path = cache() / f"matrices-{hashlib.blake2b(about.encode(), digest_size=6).hexdigest()}.json"
    if keep and path.is_file():
        rows, summary = json.loads(path.read_text())
        return rows, summary
    rows, summary = matrix.measure(config.matrices, seeds, say)
    if keep:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".partial")
        temporary.write_text(json.dumps([rows, summary], indent=1))
        temporary.replace(path)
    return rows, summary


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _quickly_compiled() -> Iterator[None]:
    """Programs that run once are not worth optimising."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def _mean_of(rows: list[dict[str, Any]], *names: str) -> dict[str, float]:
    values = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    return {name: float(np.mean(found)) for name, found in values.items() if found}


def _of(r: Result, name: str) -> float:
    """A mean excess; NaN, which no check accepts, where a preset leaves it out."""
    return float(r.summary.get(name, float("nan")))


def _ratio(r: Result, over: str, under: str) -> float:
    return float(np.float64(_of(r, over)) / _of(r, under)) if _of(r, under) else float("nan")


def _at(r: Result, kind: str) -> str:
    """The name of a row at the rate where stages and starts are compared."""
    return f"{kind}_{r.summary['ablated']:g}"


SPEC = "NanoQuant spec, section 6b"
CHECKS = [
    *matrix.CHECKS,
    Check(
        "excess of the full pipeline at 1 bit / of signs with row scales",
        lambda r: _ratio(r, "kl_1", "sign_row_scale_1"),
        "<=",
        0.5,
        f"{SPEC} (1)",
    ),
    Check(
        "excess of the full pipeline at 1 bit / of OneBit-SVID",
        lambda r: _ratio(r, "kl_1", "onebit_svid_1"),
        "<",
        1.0,
        f"{SPEC} (1)",
    ),
    Check(
        "realised bits of the full pipeline at 1 bit / of signs with row scales",
        lambda r: _ratio(r, "kl_1_bits", "sign_row_scale_1_bits"),
        "<=",
        1.0,
        f"{SPEC}: at equal or fewer bits",
    ),
    Check(
        "excess of LB-ADMM alone / with dense tuning",
        lambda r: _ratio(r, _at(r, "admm"), _at(r, "dense")),
        ">",
        1.0,
        f"{SPEC} (2)",
    ),
    Check(
        "excess with dense tuning / with factor tuning as well",
        lambda r: _ratio(r, _at(r, "dense"), _at(r, "ste")),
        ">",
        1.0,
        f"{SPEC} (2)",
    ),
    Check(
        "excess of the full pipeline / of all stages but the last",
        lambda r: _ratio(r, _at(r, "kl"), _at(r, "ste")),
        "<=",
        1.01,
        f"{SPEC} (2): the KL step may be flat",
    ),
    Check(
        "excess from Dual-SVID / from LB-ADMM",
        lambda r: _ratio(r, _at(r, "dual_svid"), _at(r, "kl")),
        ">=",
        1.1,
        f"{SPEC} (3)",
    ),
    Check(
        "excess from DBF-ADMM / from LB-ADMM",
        lambda r: _ratio(r, _at(r, "dbf_admm"), _at(r, "kl")),
        ">=",
        1.0,
        f"{SPEC} (3): in between or equal",
    ),
    Check(
        "excess from DBF-ADMM / from Dual-SVID",
        lambda r: _ratio(r, _at(r, "dbf_admm"), _at(r, "dual_svid")),
        "<=",
        1.0,
        f"{SPEC} (3): in between or equal",
    ),
    Check(
        "excess at 0.55 bits / at 0.8 bits",
        lambda r: _ratio(r, "kl_0.55", "kl_0.8"),
        ">",
        1.0,
        f"{SPEC} (4)",
    ),
    Check("excess at 0.8 bits / at 1 bit", lambda r: _ratio(r, "kl_0.8", "kl_1"), ">", 1.0, f"{SPEC} (4)"),
    Check(
        "stored bytes of the factors / bf16 bytes x realised bits / 16: largest distance from 1",
        lambda r: abs(_of(r, "stored") - 1),
        "<=",
        0.01,
        f"{SPEC} (5)",
    ),
]
COLUMNS = {
    "way": "way",
    "asked": "bits asked for",
    "bits_per_weight": "bits per weight",
    "excess": "excess over full precision (nats per token)",
    "installed_error": "weighted error of the factors",
    "seconds": "seconds",
}


def table(result: Result) -> str:
    """Every way as a Markdown table."""
    return report.markdown_table(result.rows, COLUMNS)


def notes(result: Result) -> list[str]:
    """What was measured and is reported without a bound."""
    of = result.summary
    each = (
        "one trained model for each seed"
        if result.preset == "full"
        else "one trained model, seeds draw text and starts"
    )
    lines = [
        f"Full precision: {of['whole']:.4f} nats per token; {len(result.seeds)} seeds ({each}).",
        f"Stages and starts are compared at {of['ablated']:g} bits asked for; seconds include compilation.",
    ]
    details = result.curves["details"]
    for kind in (*STAGES[:-1], "kl", *INIT_TITLES):
        found = [row["excess"] for row in details if row["kind"] == kind and row["asked"] == of["ablated"]]
        if found:
            lines.append(f"{kind}: excess by seed {', '.join(f'{one:.4f}' for one in found)}.")
    matrices = result.curves["matrices"]
    tables = f"Weighted errors of single matrices, and bytes of Llama-2:\n\n{matrix.table(matrices)}\n"
    return [*lines, *matrix.notes(matrices), tables]


def plot(result: Result) -> Any:
    """Excess of every way, and of the full pipeline against its bits."""
    figure, axes = report.figures.panels(2, size=(5.6, 4.2))
    report.bar_chart(
        {_label(row): row["excess"] for row in result.rows},
        xlabel="excess over full precision (nats per token)",
        title="What each way loses",
        axes=axes[0],
    )
    full = sorted(
        (row["bits_per_weight"], row["excess"]) for row in result.rows if row["way"].startswith("+ scales")
    )
    other = [(row["bits_per_weight"], row["excess"]) for row in result.rows if row["asked"] is None]
    report.line_chart(
        {
            "full pipeline": tuple(map(list, zip(*full))),
            "signs without factors": tuple(map(list, zip(*sorted(other)))),
        },
        xlabel="realised bits per weight",
        ylabel="excess (nats per token)",
        title="Rate and loss",
        axes=axes[1],
    )
    return figure


def _label(row: dict[str, Any]) -> str:
    return row["way"] if row["asked"] is None else f"{row['way']}, {row['asked']:g} bits"


if __name__ == "__main__":
    from experiments._main import main

    sys.exit(main(sys.modules[__name__]))
