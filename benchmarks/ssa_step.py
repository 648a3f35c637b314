"""A training step with SSA against one with full attention, and reading with a quarter of the work against reading all.

    python -m benchmarks.ssa_step
    python -m benchmarks.ssa_step --lengths 4096 --repeats 9

Training: the same transformer, window and optimizer; SSA computes both streams, their distance and both gradients. The
goal is at most 2.2 times the time at 1,024 tokens. Inference: one forward pass of one attention layer over a whole
text, selection included, 256 keys read by each token; the goal is less time than full attention from 4,096 tokens on.
Decoding: one new token of one layer over a cache of that length. Each round times every case once, one after the other,
so that all meet the same noise.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks._common import RESULTS, ratio, save, spread, take_turns
from effml import train
from effml.attend import ssa
from effml.nn import transformer
from effml.nn.cache import DenseCache
from effml.nn.cache import attend as dense_attend

GOALS = "step SSA / full <= 2.2 at 1,024 tokens; sparse inference faster than full from 4,096"
TRAINED_LENGTH = 1024
LENGTHS = (1024, 4096, 8192)
MODEL = transformer.TransformerConfig(
    vocab_size=1024, width=256, num_layers=4, num_heads=8, num_kv_heads=2, mlp_width=688, max_length=16384
)
CONFIG = ssa.SSATransformerConfig(MODEL, ssa.SSAConfig(block_size=16, num_blocks=16))


def step_of(loss: Any, params: Any, batch: Any) -> Any:
    """A call that takes one training step and waits for it."""
    optimizer = optax.adamw(1e-3)
    step = train.make_step(loss, optimizer)
    carry = [train.init_state(jax.random.key(0), params, optimizer)]

    def run() -> None:
        carry[0], metrics = step(carry[0], batch)
        jax.block_until_ready((carry[0].params, metrics))

    return run


def training(repeats: int) -> dict[str, Any]:
    """One step of the same model with each attention."""
    tokens = jax.random.randint(jax.random.key(1), (1, TRAINED_LENGTH + 1), 0, MODEL.vocab_size)
    params = ssa.init_params(jax.random.key(0), CONFIG)
    full = functools.partial(ssa.next_token_loss, config=CONFIG)
    cases = {
        "ssa": step_of(functools.partial(ssa.training_loss, config=CONFIG), params, {"tokens": tokens}),
        "full": step_of(full, params, {"tokens": tokens}),
    }
    seconds = take_turns(cases, repeats)
    return {
        "length": TRAINED_LENGTH,
        "seconds": {case: spread(values) for case, values in seconds.items()},
        "ssa_over_full": ratio(seconds["ssa"], seconds["full"]),
    }


def inference(length: int, repeats: int) -> dict[str, Any]:
    """One attention layer over a text of `length` tokens, and one step of decoding behind it."""
    keys = jax.random.split(jax.random.key(length), 3)
    heads = (MODEL.num_heads, MODEL.kv_heads, MODEL.kv_heads)
    rows = [jax.random.normal(key, (1, length, n, MODEL.head_dim)) for key, n in zip(keys, heads)]
    gate = jnp.ones((1, length, MODEL.num_heads))
    scale = MODEL.score_scale

    @functools.partial(jax.jit, static_argnums=2)
    def attend(rows: Any, gate: Any, mode: str) -> Any:
        return ssa.ssa_attention(*rows, gate, CONFIG.attention, mode=mode)[0]

    @jax.jit
    def select(rows: Any) -> Any:
        return ssa.select_blocks(*rows[:2], block_size=16, num_blocks=16).indices

    cache = ssa.SSACache(
        DenseCache(
            rows[1].transpose(0, 2, 3, 1), rows[2].transpose(0, 2, 1, 3), jnp.full(1, length - 1, jnp.int32)
        ),
        rows[1].transpose(0, 2, 1, 3).reshape(1, MODEL.kv_heads, length // 16, 16, -1).sum(3),
    )
    last = [row[:, -1:] for row in rows]

    @functools.partial(jax.jit, static_argnums=2)
    def decode(cache: Any, last: Any, mode: str) -> Any:
        if mode == "sparse":
            return ssa.attend(last[0], cache, *last[1:], num_blocks=16, scale=scale)
        return dense_attend(last[0], cache.rows, *last[1:], scale=scale)

    wait = lambda call, *arguments: lambda: jax.block_until_ready(call(*arguments))
    cases = {
        "full": wait(attend, rows, gate, "full"),
        "sparse": wait(attend, rows, gate, "sparse"),
        "selection": wait(select, rows),
        "decode_full": wait(decode, cache, last, "full"),
        "decode_sparse": wait(decode, cache, last, "sparse"),
    }
    seconds = take_turns(cases, repeats)
    return {
        "length": length,
        "seconds": {case: spread(values) for case, values in seconds.items()},
        "full_over_sparse": ratio(seconds["full"], seconds["sparse"]),
        "decode_full_over_sparse": ratio(seconds["decode_full"], seconds["decode_sparse"]),
        "selection_share": ratio(seconds["selection"], seconds["sparse"])["median"],
    }


def main() -> None:
    """Measures, prints and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    step = training(arguments.repeats)
    of = step["ssa_over_full"]
    print(
        f"a training step of {TRAINED_LENGTH} tokens: SSA takes {of['median']:.2f} times full attention "
        f"({of['quartile_low']:.2f}–{of['quartile_high']:.2f}; best times {of['of_best']:.2f})",
        flush=True,
    )
    rows = []
    for length in arguments.lengths:
        rows.append(row := inference(length, arguments.repeats))
        of, decode = row["full_over_sparse"], row["decode_full_over_sparse"]
        print(
            f"{length} tokens: sparse {of['median']:.2f} times as fast as full (best times {of['of_best']:.2f}), "
            f"selection {row['selection_share']:.0%} of it; decoding {decode['median']:.2f} times as fast",
            flush=True,
        )
    print("written:", save("ssa_step", {"goal": GOALS, "training": step, "inference": rows}, arguments.out))


if __name__ == "__main__":
    main()
