"""A step of SCALE against a step of optax's AdamW on the same parameters, float32.

    python -m benchmarks.scale_step

SCALE reads and writes no second moment, and no first one but the head's. Each round times one step of each,
one after the other, so that both meet the same noise. The goal is a ratio of at most 0.8.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import optax

from benchmarks._common import RESULTS, ratio, save, spread, take_turns
from benchmarks._optimizer_step import stepper
from effml.nn.transformer import TransformerConfig, param_count
from effml.optimize import scale

GOAL = 0.8
MODELS = {
    "4 layers of width 256": TransformerConfig(
        vocab_size=8192, width=256, num_layers=4, num_heads=4, mlp_width=688, tied_head=False
    ),
    "8 layers of width 512": TransformerConfig(
        vocab_size=16384, width=512, num_layers=8, num_heads=8, mlp_width=1376, tied_head=False
    ),
}


def measure(name: str, config: TransformerConfig, repeats: int) -> dict[str, Any]:
    """One row: seconds of each and their ratio."""
    cases = {
        "scale": stepper(scale(1e-3, weight_decay=0.1), config),
        "adamw": stepper(optax.adamw(1e-3, weight_decay=0.1), config),
    }
    seconds = take_turns(cases, repeats)
    return {
        "model": name,
        "parameters": param_count(config),
        "seconds": {case: spread(values) for case, values in seconds.items()},
        "ratio": ratio(seconds["scale"], seconds["adamw"]),
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
            f"{row['model']}: SCALE's step takes {of['median']:.2f} of AdamW's "
            f"({of['quartile_low']:.2f}–{of['quartile_high']:.2f}; best times {of['of_best']:.2f})"
        )
    goal = f"SCALE / AdamW <= {GOAL}"
    print("written:", save("scale_step", {"goal": goal, "rows": rows}, arguments.out))


if __name__ == "__main__":
    main()
