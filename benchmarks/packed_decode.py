"""Greedy tokens per second with packed weights against float32 and bfloat16, in SmolLM2's shapes, on one CPU, in turns.

Random weights (speed does not depend on them), batch 1, activations not rounded, all in the form of
`LoadedModel.for_decoding`, with native products where the machine can build them. Embedding and head stay in the type
given; at 4 bits the float32 head is two thirds of what a token reads. A model of fewer bits reads fewer bytes, and
unpacking costs arithmetic; "share of limit" tells which of the two holds it back: bytes read per token / copy bandwidth
(1 GB, read + written, measured in the same rounds), over the time per token.

    python -m benchmarks.packed_decode           # about 4 minutes; needs pip install 'effml[peers]' (torch copies)
"""

from __future__ import annotations

import argparse
import dataclasses
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
from effml import decode, models, quantize, trees
from effml.nn import transformer
from effml.report import table
from pallas_kernels.matvec import availability


def dense(dtype: str) -> models.LoadedModel:
    """Random floating-point weights, ready for decoding."""
    config = dataclasses.replace(SHAPES, param_dtype=dtype, compute_dtype=dtype)
    params = transformer.init_params(jax.random.key(0), config)
    run = functools.partial(transformer.forward, config=config)
    return models.LoadedModel(dtype, "dense", config, params, None, None, run, 0, "").for_decoding()


def packed(bits: int, group_size: int | None = None, keep: str = "float32") -> models.LoadedModel:
    """Random codes, as `effml quantize` would write them."""
    random = np.random.default_rng(bits)
    config = quantize.PackedConfig(SHAPES, weight_bits=bits, group_size=group_size, keep_dtype=keep)
    shapes = jax.eval_shape(functools.partial(transformer.init_params, config=SHAPES), jax.random.key(0))

    def linear(kernel: Any) -> dict[str, Any]:
        inputs, outputs = kernel.shape
        groups = 1 if group_size is None else inputs // group_size
        codes = random.integers(0, 256, (outputs, -(-inputs // 8) * bits), dtype=np.uint8)
        scale = np.full((outputs, groups), 0.04 / 2**bits, np.float32)
        return {"packed": quantize.PackedTensor(jnp.asarray(codes), jnp.asarray(scale), bits, inputs)}

    is_linear = lambda node: isinstance(node, dict) and "kernel" in node
    layers = jax.tree.map(
        lambda node: linear(node["kernel"]) if is_linear(node) else jnp.ones(node.shape, node.dtype),
        shapes["layers"],
        is_leaf=is_linear,
    )
    embedding = shapes["embedding"]["table"].shape
    params = {
        "embedding": {"table": jnp.asarray(0.02 * random.standard_normal(embedding, np.float32), keep)},
        "layers": layers,
        "final_norm": {"scale": jnp.ones(SHAPES.width)},
    }
    run = functools.partial(quantize.forward, config=config)
    return models.LoadedModel(f"{bits} bits", "packed", config, params, None, None, run, 0, "").for_decoding()


def main() -> None:
    """Measures, prints a table and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    built = {
        "float32": dense("float32"),
        "bfloat16": dense("bfloat16"),
        "8 bits": packed(8),
        "4 bits": packed(4),
        "4 bits, groups of 64": packed(4, 64),
        "4 bits, bfloat16 head": packed(4, keep="bfloat16"),
        "3 bits": packed(3),
        "2 bits": packed(2),
    }
    prompt = np.random.default_rng(0).integers(100, SHAPES.vocab_size, (1, 8)).astype(np.int32)

    def write(model: models.LoadedModel, count: int) -> Callable[[], Any]:
        return lambda: decode.generate(model, prompt, max_new_tokens=count)

    cases = {name: write(model, arguments.tokens) for name, model in built.items()}
    cases |= {f"{name}, first token": write(model, 1) for name, model in built.items()}
    copy, copied_bytes = copier()
    seconds = take_turns({**cases, "copy": copy}, arguments.repeats)
    bandwidth = copied_bytes / spread(seconds["copy"])["median"]
    rows = []
    per_token = {}
    for name, model in built.items():
        first = spread(seconds[f"{name}, first token"])["median"]
        per_token[name] = [(whole - first) / (arguments.tokens - 1) for whole in seconds[name]]
        read = trees.byte_count(model.params)
        limits = [read * one / copied_bytes for one in seconds["copy"]]
        rows.append(
            {
                "weights": name,
                "bytes_per_token": read,
                "seconds_per_token": spread(per_token[name]),
                "tokens_per_second": 1 / spread(per_token[name])["median"],
                "against_float32": ratio(per_token["float32"], per_token[name]),
                "share_of_limit": spread([a / b for a, b in zip(limits, per_token[name])]),
            }
        )
    shown = [
        {
            "weights": row["weights"],
            "MB per token": f"{row['bytes_per_token'] / 1e6:.0f}",
            "tokens/s": f"{row['tokens_per_second']:.1f}",
            "against float32": f"{row['against_float32']['median']:.2f}",
            "quartiles": f"{row['against_float32']['quartile_low']:.2f}–{row['against_float32']['quartile_high']:.2f}",
            "share of limit": f"{row['share_of_limit']['median']:.0%}",
        }
        for row in rows
    ]
    rich.print(table(shown))
    result = {
        "products": availability(),
        "tokens": arguments.tokens,
        "copy_bytes_per_second": bandwidth,
        "rows": rows,
    }
    print("written:", save("packed_decode", result, arguments.out))


if __name__ == "__main__":
    main()
