"""A step of NorMuon against a step of optax's Muon: same parameters, same coefficients, float32 in both.

    python -m benchmarks.normuon_step

Both orthogonalise the hidden matrices by five steps of the same polynomial and leave embedding, head and
vectors to Adam; NorMuon also measures and scales the neurons. Each round times one step of each, one after
the other, so that both meet the same noise. The goal is a ratio of at most 1.1. On a CPU the products are in
float32, as bfloat16 is emulated there.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import optax

from benchmarks._common import RESULTS, ratio, save, spread, take_turns
from benchmarks._optimizer_step import stepper
from effml import trees
from effml.nn.transformer import TransformerConfig, param_count
from effml.optimize import normuon

GOAL = 1.1
MODELS = {
    "2 layers of width 128": TransformerConfig(
        vocab_size=256, width=128, num_layers=2, num_heads=4, mlp_width=344, tied_head=False
    ),
    "2 layers of width 384": TransformerConfig(
        vocab_size=256, width=384, num_layers=2, num_heads=6, mlp_width=1024, tied_head=False
    ),
}


def measure(name: str, config: TransformerConfig, repeats: int) -> dict[str, Any]:
    """One row: seconds of each and their ratio."""
    muon = optax.contrib.muon(
        1e-3,
        nesterov=False,
        consistent_rms=0.2,
        adam_b2=0.95,
        muon_weight_dimension_numbers=functools.partial(trees.dimension_numbers, include=("matrix",)),
    )
    cases = {"normuon": stepper(normuon(1e-3), config), "muon": stepper(muon, config)}
    seconds = take_turns(cases, repeats)
    return {
        "model": name,
        "parameters": param_count(config),
        "seconds": {case: spread(values) for case, values in seconds.items()},
        "ratio": ratio(seconds["normuon"], seconds["muon"]),
    }


def main() -> None:
    """Measures, prints and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = [measure(name, config, arguments.repeats) for name, config in MODELS.items()]
    for row in rows:
        of = row["ratio"]
        print(
            f"{row['model']}: NorMuon's step takes {of['median']:.2f} of Muon's "
            f"({of['quartile_low']:.2f}–{of['quartile_high']:.2f}; best times {of['of_best']:.2f})"
        )
    goal = f"NorMuon / Muon <= {GOAL}"
    print("written:", save("normuon_step", {"goal": goal, "rows": rows}, arguments.out))


if __name__ == "__main__":
    main()
