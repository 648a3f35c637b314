"""What one training step of a Llama costs each TPU chip, by optimizer: compiled ahead of time, no TPU needed.

7B on 16 x 16 chips and 1B on 4 x 4, float32 parameters, bfloat16 compute, one sequence of 2048 tokens on each chip.
Plans already in the result file are kept, so that an optimizer can be added or made again by name.

    python -m benchmarks.plan_table                       # about 20 minutes on two cores; needs libtpu
    python -m benchmarks.plan_table --optimizer limuon
    python -m benchmarks.plan_table --markdown            # the table of the committed results; compiles nothing
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks._common import RESULTS, save
from effml import report
from effml.cli import _plan
from effml.cli.plan import Command

SETTINGS = {
    "plan_llama-7b": Command(model="llama-7b", topology="v5e:16x16", mesh="data=16,fsdp=16"),
    "plan_llama-1b": Command(model="llama-1b", topology="v5e:4x4", mesh="fsdp=16"),
}
OPTIMIZERS = ("adamw", "muon", "normuon", "scale", "limuon", "limuon:rank=16,direction=factors")
GOAL = "compiles in under 3 minutes on two cores (compile_cpu under 360 s)"


def markdown(plans: list[dict[str, Any]]) -> str:
    """The table of the README: bytes of one chip, traffic and work of one step."""
    gib = lambda size: f"{size / 2**30:.2f}"
    rows = []
    for plan in sorted(plans, key=lambda plan: plan["peak_bytes"]):
        calls = dict.fromkeys(("all-to-all", "all-gather"), 0)
        for row in plan["collectives"]:
            if row["kind"] in calls:
                calls[row["kind"]] += row["calls"]
        rows.append(
            {
                "optimizer": plan["optimizer"],
                "optimizer state GiB": gib(plan["optimizer_bytes"]),
                "peak GiB": gib(plan["peak_bytes"]),
                "sent GiB": gib(plan["ring_bytes"]),
                "all-to-alls": calls["all-to-all"],
                "all-gathers": calls["all-gather"],
                "TFLOPs": f"{plan['device_flops'] / 1e12:.1f}",
                "of them asked for": f"{1 / plan['repeated_work']:.0%}",
                "CPU seconds to compile": f"{plan['seconds']['compile_cpu']:.0f}",
                "host GiB": gib(plan["host_peak_bytes"]),
            }
        )
    return report.markdown_table(rows)


def main() -> None:
    """Plans, prints the tables and writes one JSON per model after every plan."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizer", nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--setting", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.setting:
        path = arguments.out / f"{name}.json"
        plans = json.loads(path.read_text())["plans"] if path.exists() else []
        if arguments.markdown:
            print(f"{name}\n\n{markdown(plans)}\n")
            continue
        for optimizer in arguments.optimizer:
            command = Command(**(vars(SETTINGS[name]) | {"optimizer": (optimizer,)}))
            (request,) = _plan.requests(command)
            plans = [plan for plan in plans if plan["optimizer"] != optimizer]
            plans.append(_plan.compile_elsewhere(request))
            save(
                name,
                {"goal": GOAL, "plans": sorted(plans, key=lambda plan: plan["optimizer"])},
                arguments.out,
            )
        _plan.show(plans)
        print("written:", path)


if __name__ == "__main__":
    main()
