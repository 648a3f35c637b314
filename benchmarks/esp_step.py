"""What a pass of ESP takes besides the model's forward over the same rows: drafting, verifying, committing.

    python -m benchmarks.esp_step               # about 3 minutes; --small is for trying it

Random weights in SmolLM2's shapes (135M, float32), batch 1, a prompt of 64 tokens. In each round eight passes of ESP
run in one compiled loop, then eight forwards over as many rows behind the same cache, logits of all rows in both. The
goal is that the passes take at most 1.05 of the forwards. What they write depends on the weights and is not reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._common import RESULTS, ratio, save, spread, take_turns
from benchmarks.decode_throughput import SHAPES
from effml.decode import SamplingConfig, _loop, esp
from effml.nn import transformer

GOAL, PASSES, CAPACITY = 1.05, 8, 512
TREES = {"4 candidates": (4,), "14 candidates": (14,), "29 candidates": (29,)}


def measure(name: str, widths: tuple[int, ...], params: Any, config: Any, repeats: int) -> dict[str, Any]:
    """One row: seconds of both loops and their ratio."""
    model = _loop.freeze(functools.partial(transformer.forward, config=config), config, None, None, None)
    options = esp.ESPConfig(widths=widths, mask_init="vocab_mean")
    static: dict[str, Any] = {
        "model": model,
        "sampling": SamplingConfig(),
        "drafter": esp.ESPDrafter(options),
        "rules": esp.Rules(),
    }
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, (1, 64)).astype(np.int32)
    stops, length = jnp.full(4, -1, jnp.int32), np.array([64], np.int32)
    state = esp.prefill(
        params, prompt, length, None, stops, None, capacity=CAPACITY, room=CAPACITY + 2, **static
    )

    @jax.jit
    def passes(params: Any, state: Any) -> Any:
        step = lambda _, state: esp.esp_step(params, state, None, stops, jnp.int32(1_000), **static)
        return jax.lax.fori_loop(0, PASSES, step, state)

    tree = static["drafter"].draft(state.memory, esp.Text(state.text, state.length, state.written, None))
    spec = esp.tree_structure(widths, 1)
    rows = transformer.embed(params, tree.tokens, config)
    rows = jnp.concatenate([rows, jnp.repeat(state.memory.masks, tree.tokens.shape[1], axis=1)], axis=1)
    positions = (state.length - 1)[:, None] + jnp.asarray(spec.rel_pos)

    @jax.jit
    def forwards(params: Any, rows: Any, cache: Any) -> Any:
        def one(_: Any, rows: Any) -> Any:
            out = model.forward(
                params,
                None,
                embeddings=rows,
                positions=positions,
                mask=jnp.asarray(spec.attend)[None],
                cache=cache,
            )
            # The next forward waits for all logits of this one.
            return rows + 1e-30 * out.logits.mean()

        return jax.lax.fori_loop(0, PASSES, one, rows)

    seconds = take_turns(
        {
            "pass": lambda: jax.block_until_ready(passes(params, state)),
            "forward": lambda: jax.block_until_ready(forwards(params, rows, state.cache)),
        },
        repeats,
    )
    per_pass = {case: [value / PASSES for value in values] for case, values in seconds.items()}
    return {
        "tree": name,
        "rows": rows.shape[1],
        "seconds": {case: spread(values) for case, values in per_pass.items()},
        "ratio": ratio(per_pass["pass"], per_pass["forward"]),
    }


def main() -> None:
    """Measures, prints and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="4 layers of the 30")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    config = dataclasses.replace(SHAPES, num_layers=4) if arguments.small else SHAPES
    params = transformer.join_projections(transformer.init_params(jax.random.key(0), config))
    rows = [measure(name, widths, params, config, arguments.repeats) for name, widths in TREES.items()]
    for row in rows:
        of = row["ratio"]
        print(
            f"{row['tree']}, {row['rows']} rows: a pass takes {of['median']:.3f} of its forward "
            f"({of['quartile_low']:.3f}–{of['quartile_high']:.3f}; best times {of['of_best']:.3f})"
        )
    goal = f"pass / forward <= {GOAL}"
    result = {"goal": goal, "layers": config.num_layers, "rows": rows}
    print("written:", save("esp_step", result, arguments.out))


if __name__ == "__main__":
    main()
