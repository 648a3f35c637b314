"""Greedy tokens per second with NanoQuant's binary factors against float32 and bfloat16, in SmolLM2's shapes, on a CPU.

The factors are random signs of the ranks that `nanoquant.plan` gives for the rate: nothing was calibrated, as speed
does not depend on which signs they are. Batch 1, all in the form of `LoadedModel.for_decoding`, with native products
where the machine can build them, taking turns. Embedding and head are kept in float32, or in bfloat16 where the row
says so: at one bit a float32 head is nine tenths of what a token reads. The time to read the prompt (a run for one
token) is taken off. The goal is 1.2 times the tokens of the dense model in float32.

    python -m benchmarks.binary_decode           # about 3 minutes; needs pip install 'effml[peers]' (torch copies)
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import rich

from benchmarks._common import RESULTS, copier, ratio, save, spread, take_turns
from benchmarks.decode_throughput import SHAPES
from benchmarks.packed_decode import dense
from effml import decode, models, trees
from effml.nn import transformer
from effml.quantize import nanoquant
from effml.report import table
from pallas_kernels.binary_matmul import availability

GOAL = 1.2
"""Tokens per second over those of float32."""


def binary(
    bits: float, keep: str = "float32", shapes: transformer.TransformerConfig = SHAPES
) -> models.LoadedModel:
    """Random signs of the planned ranks, as `effml quantize --method nanoquant` would write them."""
    random = np.random.default_rng(0)
    plan = nanoquant.plan(shapes, nanoquant.NanoQuantConfig(bits=bits, keep_dtype=keep))
    config = nanoquant.BinaryConfig(
        shapes, tuple(plan.ranks.items()), shapes.num_layers, bits, keep_dtype=keep
    )
    made = jax.eval_shape(functools.partial(transformer.init_params, config=shapes), jax.random.key(0))
    layers = []
    for index in range(shapes.num_layers):
        layer: dict[str, Any] = {
            name: {"scale": jnp.ones(shapes.width)} for name in ("attention_norm", "mlp_norm")
        }
        for row in plan.rows:
            if row.layer == index:
                block, part = row.name.split(".")
                layer.setdefault(block, {})[part] = {"binary": _factors(random, row)}
        layers.append(layer)
    embedding = 0.02 * random.standard_normal(made["embedding"]["table"].shape, np.float32)
    params = {
        "embedding": {"table": jnp.asarray(embedding, keep)},
        "layers": layers,
        "final_norm": {"scale": jnp.ones(shapes.width)},
    }
    nanoquant.check_binary_params("random factors", params, config)
    run = functools.partial(nanoquant.forward, config=config)
    return models.LoadedModel(config.label, "binary", config, params, None, None, run, 0, "").for_decoding()


def _factors(random: np.random.Generator, row: nanoquant.NanoQuantRow) -> nanoquant.BinaryTensor:
    """Outputs are about as large as inputs."""
    v, u = (
        2 * random.integers(0, 2, shape, np.int8) - 1
        for shape in ((row.inputs, row.rank), (row.rank, row.outputs))
    )
    scale = (row.inputs * row.rank) ** -0.25
    return nanoquant.BinaryTensor.pack(v, u, np.full(row.inputs, scale), np.full(row.outputs, scale))


def main() -> None:
    """Measures, prints a table and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    built = {
        "float32": dense("float32"),
        "bfloat16": dense("bfloat16"),
        "1 bit": binary(1.0),
        "1 bit, bfloat16 head": binary(1.0, "bfloat16"),
        "0.55 bits, bfloat16 head": binary(0.55, "bfloat16"),
    }
    prompt = np.random.default_rng(0).integers(100, SHAPES.vocab_size, (1, 8)).astype(np.int32)

    def write(model: models.LoadedModel, count: int) -> Callable[[], Any]:
        return lambda: decode.generate(model, prompt, max_new_tokens=count)

    cases = {name: write(model, arguments.tokens) for name, model in built.items()}
    cases |= {f"{name}, first token": write(model, 1) for name, model in built.items()}
    copy, copied_bytes = copier()
    seconds = take_turns({**cases, "copy": copy}, arguments.repeats)
    rows, per_token = [], {}
    for name, model in built.items():
        first = spread(seconds[f"{name}, first token"])["median"]
        per_token[name] = [(whole - first) / (arguments.tokens - 1) for whole in seconds[name]]
        read = trees.byte_count(model.params)
        against = ratio(per_token["float32"], per_token[name])
        row = {
            "weights": name,
            "bytes_per_token": read,
            "seconds_per_token": spread(per_token[name]),
            "tokens_per_second": 1 / spread(per_token[name])["median"],
            "against_float32": against,
            "share_of_limit": spread(
                [read * one / copied_bytes / own for one, own in zip(seconds["copy"], per_token[name])]
            ),
        }
        if model.kind == "binary":
            row |= {
                "bits_per_weight": model.config.bits_per_weight,
                "goal_met": bool(against["median"] >= GOAL),
            }
        rows.append(row)
    rich.print(table([_shown(row) for row in rows]))
    result = {
        "products": availability(),
        "tokens": arguments.tokens,
        "goal": GOAL,
        "copy_bytes_per_second": copied_bytes / spread(seconds["copy"])["median"],
        "rows": rows,
    }
    print("written:", save("binary_decode", result, arguments.out))


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    against = row["against_float32"]
    return {
        "weights": row["weights"],
        "MB per token": f"{row['bytes_per_token'] / 1e6:.0f}",
        "tokens/s": f"{row['tokens_per_second']:.1f}",
        "against float32": f"{against['median']:.2f}",
        "quartiles": f"{against['quartile_low']:.2f}–{against['quartile_high']:.2f}",
        "share of limit": f"{row['share_of_limit']['median']:.0%}",
    }


if __name__ == "__main__":
    main()
