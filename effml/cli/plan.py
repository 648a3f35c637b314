"""Compile a training step for devices that are not here: bytes, FLOPs and collectives of each device.

TPU topologies need the libtpu wheel (pip install 'effml[kernel-ci]') and no TPU. Compiling takes one to three minutes
on two cores for any number of devices. The exit code is 1 if a step does not fit into the devices' memory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Command:
    """Options of `effml plan`."""

    model: str = "llama-60m"
    """llama-60m, 130m, 350m, 1b, 7b or 70b, or a Hugging Face folder, of which only config.json is read."""
    optimizer: tuple[str, ...] = ("adamw",)
    """One or several: adamw, limuon, muon, normuon, scale; with options as in limuon:rank=16,direction=factors."""
    topology: str = "v5e:2x2"
    """TPU chips v5e:16x16 (v4, v5p, v6e), forced host devices cpu:64, or GPUs cuda:8 (cuda:4x8: hosts x devices)."""
    mesh: str = ""
    """How the devices are used, such as data=16,fsdp=16; empty is fsdp over all of them."""
    sequences: int = 1
    """Sequences that one device works on in one step."""
    length: int = 2048
    """Tokens of one sequence."""
    accumulate: int = 1
    """Micro-batches that one step is cut into; divides sequences."""
    compute_dtype: str = "bfloat16"
    """float32 or bfloat16: activations and gathered weights."""
    param_dtype: str = "float32"
    """float32 or bfloat16: parameters, and the optimizer's state with them."""
    rematerialize: bool = True
    """Recompute each block in the backward pass instead of keeping its activations."""
    out: Path | None = None
    """JSON file (default: runs/plan/MODEL-TOPOLOGY.json)."""

    def run(self) -> int:
        """Plans each optimizer in a process of its own, prints a table and writes the JSON."""
        import sys

        from effml.cli import _plan

        requests = _plan.requests(self)
        model = Path(self.model).name if Path(self.model).exists() else self.model
        path = self.out or Path("runs/plan") / f"{model}-{self.topology.replace(':', '-')}.json"
        _plan.make_folder(path)  # before the minutes of compiling
        plans: list[dict[str, Any]] = []
        for request in requests:
            print(
                f"compiling {self.model} with {request['optimizer']} for {self.topology} ...",
                file=sys.stderr,
                flush=True,
            )
            plans.append(_plan.compile_elsewhere(request))
        _plan.show(plans)
        path.write_text(json.dumps({"plans": plans}, indent=1) + "\n", encoding="utf-8")
        print(f"result: {path}")
        return 0 if all(plan["fits"] for plan in plans) else 1
