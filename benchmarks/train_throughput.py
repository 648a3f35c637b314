"""Training tokens per second of the pipeline's model against `transformers` + torch, on the same CPU, in turns.

Same sizes, same batch, float32, AdamW, no clipping; each takes whole steps (forward, backward, update).

    python -m benchmarks.train_throughput            # about 2 minutes; needs pip install 'effml[peers]'
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import rich

from benchmarks._common import RESULTS, ratio, save, spread, take_turns
from effml import train
from effml.nn.transformer import TransformerConfig, init_params, next_token_loss, param_count
from effml.optimize import make_optimizer
from effml.pipeline import TrainConfig
from effml.report import table


def ours(config: TransformerConfig, batch: dict[str, np.ndarray], rate: float) -> Callable[[], float]:
    """A call that takes one step and returns the loss."""
    import functools

    optimizer = make_optimizer("adamw", learning_rate=rate)
    step = train.make_step(functools.partial(next_token_loss, config=config), optimizer)
    initial = functools.partial(init_params, config=config)
    state = train.init_state(jax.random.key(0), initial, optimizer)

    def run() -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics["loss"])

    return run


def theirs(config: TransformerConfig, batch: dict[str, np.ndarray], rate: float) -> Callable[[], float]:
    """The same step in torch."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.mlp_width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_length,
            tie_word_embeddings=config.tied_head,
            attn_implementation="sdpa",
            use_cache=False,
        )
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    tokens = torch.from_numpy(batch["tokens"].astype(np.int64))

    def run() -> float:
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return run


def measure(
    name: str, config: TransformerConfig, batch_size: int, length: int, repeats: int
) -> dict[str, Any]:
    """One row of the table."""
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, config.vocab_size, (batch_size, length + 1)).astype(np.int32),
        "weights": np.ones((batch_size, length), np.float32),
    }
    cases = {"effml": ours(config, batch, 1e-3), "torch": theirs(config, batch, 1e-3)}
    seconds = take_turns(cases, repeats)
    tokens = batch_size * length
    return {
        "model": name,
        "parameters": param_count(config),
        "batch_size": batch_size,
        "length": length,
        "seconds": {case: spread(values) for case, values in seconds.items()},
        "tokens_per_second": {case: tokens / spread(values)["median"] for case, values in seconds.items()},
        "ratio": ratio(seconds["torch"], seconds["effml"]),
    }


def main() -> None:
    """Measures, prints a table and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    pipeline = TrainConfig()
    wider = TransformerConfig(256, 256, 4, 8, 688, max_length=256, tied_head=False)
    rows = [
        measure("pipeline", pipeline.model(256), pipeline.batch_size, pipeline.length, arguments.repeats),
        measure("4 layers of width 256", wider, 16, 256, arguments.repeats),
    ]
    rich.print(
        table(
            [
                {
                    "model": row["model"],
                    "parameters": f"{row['parameters']:,}",
                    "effml tokens/s": f"{row['tokens_per_second']['effml']:,.0f}",
                    "torch tokens/s": f"{row['tokens_per_second']['torch']:,.0f}",
                    "ratio": f"{row['ratio']['median']:.2f}",
                    "quartiles": f"{row['ratio']['quartile_low']:.2f}–{row['ratio']['quartile_high']:.2f}",
                    "of best": f"{row['ratio']['of_best']:.2f}",
                }
                for row in rows
            ]
        )
    )
    print("written:", save("train_throughput", {"goal": "ratio >= 1.0", "rows": rows}, arguments.out))


if __name__ == "__main__":
    main()
