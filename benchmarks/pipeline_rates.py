"""Finds the learning rate of each optimizer on the pipeline's model and text: the same grid for all of them.

    python -m benchmarks.pipeline_rates          about 20 minutes on two cores

Trains the pipeline's model with every optimizer at every rate (one seed, not the pipeline's own) and writes the
held-out losses to benchmarks/results/pipeline_rates.json. `effml.pipeline.LEARNING_RATES` holds the best of each.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

from effml import report
from effml.data import load_corpus
from effml.optimize import OPTIMIZERS
from effml.pipeline import train_model
from effml.pipeline.runner import PRESETS

GRID = (1e-3, 3e-3, 1e-2)
STEPS = {"cpu": 300}  # no fewer than the pipeline's
RESULT = Path(__file__).parent / "results" / "pipeline_rates.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="cpu", choices=sorted(PRESETS))
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()

    base = PRESETS[options.preset]
    steps = STEPS.get(options.preset, base.steps)
    base = dataclasses.replace(
        base, seed=options.seed, steps=steps, evaluation_tokens=65_536, evaluate_every=0, checkpoint_every=0
    )
    corpus = load_corpus(base.data, max_bytes=base.max_bytes)
    started = time.perf_counter()
    rows, summary = [], {}
    for optimizer in OPTIMIZERS:
        losses = {}
        for rate in GRID:
            config = dataclasses.replace(base, optimizer=optimizer, learning_rate=rate)
            with tempfile.TemporaryDirectory() as folder:
                trained = train_model(config, Path(folder) / "run", corpus=corpus)
            losses[rate] = trained.held_out["nats_per_token"]
        best = min(losses, key=losses.__getitem__)
        rows.append({"optimizer": optimizer, **{f"{rate:g}": losses[rate] for rate in GRID}, "best": best})
        summary[f"{optimizer}_rate"] = best
    result = report.Result(
        method="pipeline_rates",
        preset=options.preset,
        seeds=(options.seed,),
        rows=rows,
        summary=summary,
        seconds=time.perf_counter() - started,
        command=f"python -m benchmarks.pipeline_rates --preset {options.preset} --seed {options.seed}",
    )
    report.print_result(result)
    print(f"wrote {result.save(options.out)}")


if __name__ == "__main__":
    main()
