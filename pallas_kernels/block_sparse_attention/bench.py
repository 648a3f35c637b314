"""Time, bytes and ratios of block-sparse attention against dense attention, in one run.

    python -m pallas_kernels.block_sparse_attention.bench [--preset cpu|crossover|gpu] [--out FILE.json]

Bytes are a model: what each form must move when nothing stays in a cache but queries, sums and index of a row. On a
machine without the device of a preset this stops with its reason.

The goals on an H200 at 32768 tokens are a forward pass at least 4 times, and gradients at least 2.5 times as fast as
dense. No kernel has been timed on a GPU or TPU yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.block_sparse_attention import BlockSizes, block_sparse_attention

__all__ = ["Case", "bytes_moved", "measure"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape."""

    tokens: int
    heads: int = 8
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    slots: int = 16
    dtype: str = "float32"

    @property
    def density(self) -> float:
        """Keys of the chosen blocks by all keys."""
        return self.slots * self.block_size / self.tokens


PRESETS = {
    "smoke": ([Case(64, heads=2, kv_heads=1, dim=16, block_size=8, slots=2)], 1),
    "cpu": (
        [Case(4096, heads=2), Case(4096, heads=4), Case(4096, heads=8), Case(8192, heads=2, slots=32)],
        3,
    ),
    # From which length on the sparse form is the faster one, 1 key in 16 being seen.
    "crossover": ([Case(tokens, heads=2, slots=tokens // 256) for tokens in (256, 512, 1024, 2048)], 15),
    "gpu": (
        [Case(32768, 32, 2, 64, block, 16, "bfloat16") for block in (16, 64)]
        + [Case(8192, 32, 8, 128, 64, 8, "bfloat16")],
        20,
    ),
}


def bytes_moved(case: Case) -> dict[str, float]:
    """The model, for the forward pass and for forward and backward together.

    Forward: q and the output once, a row's blocks of keys and values once per KV head, the indices. Backward: that
    again for dq (with the output's gradient), and for dk and dv every query and gradient of the output once per chosen
    block.
    """
    width = jnp.dtype(case.dtype).itemsize
    rows = case.tokens * case.kv_heads
    group = case.heads // case.kv_heads
    query = rows * group * case.dim * width
    blocks = rows * case.slots * case.block_size * 2 * case.dim * width
    index = rows * case.slots * 4
    keys = rows * 2 * case.dim * width
    forward = 2 * query + blocks + index
    backward = 4 * query + blocks + 2 * index + 2 * case.slots * query + keys
    return {"forward": float(forward), "gradients": float(forward + backward)}


def arrays(case: Case, seed: int = 0) -> tuple[Array, Array, Array, Array]:
    """q, k, v and a choice of the own block and of random ones before it."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        jnp.asarray(rng.normal(size=(1, case.tokens, heads, case.dim)).astype("f"), case.dtype)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    own = np.arange(case.tokens) // case.block_size
    indices = rng.integers(0, own[:, None, None] + 1, (case.tokens, case.kv_heads, case.slots))
    indices[..., 0] = own[:, None]
    return q, k, v, jnp.asarray(indices[None], jnp.int32)


def dense(case: Case) -> dict[str, Callable[..., Array]]:
    """Functions of q, k, v and the indices, which they ignore.

    JAX's own attention, on GPU cuDNN's. On CPU, which has no fused one, also one that takes 128 queries at a time, so
    that logits stay in the cache.
    """

    def library(q, k, v, _):
        implementation = "cudnn" if jax.default_backend() == "gpu" else None
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    def tiled(q, k, v, _):
        size = min(128, case.tokens)
        group = case.heads // case.kv_heads
        pieces = q.reshape(case.tokens // size, size, case.kv_heads, group, case.dim)

        def step(piece):
            q, number = piece
            logits = jnp.einsum("thgd,jhd->hgtj", q, k[0]) * case.dim**-0.5
            seen = jnp.arange(case.tokens) <= (number * size + jnp.arange(size))[:, None]
            return jnp.einsum("hgtj,jhd->thgd", jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)), v[0])

        return jax.lax.map(jax.checkpoint(step), (pieces, jnp.arange(case.tokens // size))).reshape(q.shape)

    return {"dense": library, **({"dense_tiled": tiled} if jax.default_backend() == "cpu" else {})}


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - started


def _bandwidth() -> float:
    """Bytes per second of a copy, read and write counted."""
    source = jnp.ones(2**26 if jax.default_backend() == "cpu" else 2**28, jnp.float32)
    copy = jax.jit(lambda a: a + 1)
    jax.block_until_ready(copy(source))
    return 2 * source.nbytes / min(_seconds(lambda: copy(source)) for _ in range(5))


def measure(
    case: Case, repeats: int, implementation: str | None = None, blocks: BlockSizes | None = None
) -> Iterator[dict[str, Any]]:
    """A row for the forward pass and one for forward and gradients; all contestants in turns."""
    given = arrays(case)
    limit = _bandwidth()
    size = {"block_size": case.block_size, "implementation": implementation, "blocks": blocks}
    contestants = {"sparse": lambda q, k, v, i: block_sparse_attention(q, k, v, i, **size), **dense(case)}
    for what in ("forward", "gradients"):
        functions, compile_seconds = {}, {}
        for name, function in contestants.items():

            def total(q, k, v, i, function=function):
                return jnp.sum(function(q, k, v, i).astype(jnp.float32) ** 2)

            chosen = function if what == "forward" else jax.grad(total, (0, 1, 2))
            started = time.perf_counter()
            functions[name] = jax.jit(chosen).lower(*given).compile()
            compile_seconds[name] = time.perf_counter() - started
            jax.block_until_ready(functions[name](*given))
        seconds: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(repeats):
            for name, function in functions.items():
                seconds[name].append(_seconds(lambda function=function: function(*given)))
        typical = {name: statistics.median(times) for name, times in seconds.items()}
        moved = bytes_moved(case)[what]
        yield {
            **dataclasses.asdict(case),
            "density": case.density,
            "what": what,
            "seconds": typical,
            "best_seconds": {name: min(times) for name, times in seconds.items()},
            "compile_seconds": compile_seconds,
            "times_as_fast_as": {n: typical[n] / typical["sparse"] for n in typical if n != "sparse"},
            "bytes_model": moved,
            "achieved_bytes_per_second": moved / typical["sparse"],
            "copy_bytes_per_second": limit,
            "share_of_limit": moved / limit / typical["sparse"],
            "temporary_bytes": {n: _temporary(f) for n, f in functions.items()},
        }


def _temporary(compiled: Any) -> int | None:
    analysis = compiled.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--preset", choices=list(PRESETS), default="cpu")
    parser.add_argument("--implementation", choices=["xla", "pallas"], default=None)
    parser.add_argument(
        "--blocks", default="{}", help='sizes of the pieces as JSON, such as {"num_warps": 2}'
    )
    parser.add_argument("--out", type=pathlib.Path, help="write the rows as JSON too")
    options = parser.parse_args(arguments)
    if options.preset == "gpu" and jax.default_backend() != "gpu":
        parser.error(f"--preset gpu needs a GPU; this process has {jax.default_backend()}")
    cases, repeats = PRESETS[options.preset]
    blocks = BlockSizes(**json.loads(options.blocks))
    rows = []
    for case in cases:
        for row in measure(case, repeats, options.implementation, blocks):
            rows.append(row)
            print(
                f"T {case.tokens:>6}  heads {case.heads:>2}/{case.kv_heads}  block {case.block_size:>3}  "
                f"1/{1 / case.density:.0f}  {row['what']:<9}  {row['seconds']['sparse'] * 1e3:9.2f} ms  "
                f"(compile {row['compile_seconds']['sparse']:.1f} s)  "
                + "  ".join(f"{ratio:.2f}x {name}" for name, ratio in row["times_as_fast_as"].items())
                + f"  {row['achieved_bytes_per_second'] / 1e9:.1f} GB/s, {row['share_of_limit']:.0%} of a copy",
                flush=True,
            )
    device = jax.devices()[0]
    result = {
        "device": device.device_kind,
        "platform": device.platform,
        "host": platform.processor() or platform.machine(),
        "jax": jax.__version__,
        "implementation": options.implementation,
        "blocks": dataclasses.asdict(blocks),
        "rows": rows,
    }
    if options.out:
        temporary = options.out.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=1) + "\n")
        temporary.replace(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
