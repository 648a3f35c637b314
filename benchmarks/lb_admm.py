"""LB-ADMM on one kernel of SmolLM2's size, against the same iterations written plainly in torch on the CPU.

    python -m benchmarks.lb_admm                                  576 x 1536 at 1 bit per weight, 400 iterations
    python -m benchmarks.lb_admm --inputs 256 --outputs 256 --iters 50

Both run in float32 with all cores, from random starts of their own, and must end with the same error. Goal: at least
twice as fast.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._common import RESULTS, ratio, save, spread, take_turns
from effml.quantize import nanoquant

GOALS = {"speedup": 2.0}


def torch_lb_admm(
    kernel: np.ndarray, in_sq: np.ndarray, out_sq: np.ndarray, rank: int, iters: int
) -> Callable[[], float]:
    """A call that runs LB-ADMM in torch, as its equations read, and gives the weighted error of the layer installed."""
    import torch

    ridge, power_iters = 3e-2, 5
    weight = torch.tensor(kernel.T)  # [out, in], as torch keeps it
    d_in, d_out = torch.tensor(np.sqrt(in_sq)), torch.tensor(np.sqrt(out_sq))[:, None]
    target = d_out * weight * d_in
    turned = len(target) < target.shape[1]
    target = (target.T if turned else target).contiguous()

    def svid(matrix: torch.Tensor) -> torch.Tensor:
        magnitude = matrix.abs()
        v = torch.randn(matrix.shape[1])
        v /= v.norm()
        for _ in range(power_iters):
            u = magnitude @ v
            u /= u.norm()
            v = magnitude.T @ u
            v /= v.norm()
        return torch.outer(magnitude @ v, v) * torch.where(matrix >= 0, 1.0, -1.0)

    def solve(x: torch.Tensor, y: torch.Tensor, pull: torch.Tensor, rho: float) -> torch.Tensor:
        gram = x.T @ x
        gram = (gram + gram.T) / 2
        gram.diagonal().add_(rho * gram.diagonal().mean() + ridge)
        factor, failed = torch.linalg.cholesky_ex(gram)
        right = x.T @ y + rho * pull
        return torch.linalg.solve(gram, right) if failed.item() else torch.cholesky_solve(right, factor)

    @torch.no_grad()
    def run() -> float:
        torch.manual_seed(0)
        a, b = torch.randn(len(target), rank), torch.randn(rank, target.shape[1])
        a_z, b_z = svid(a), svid(b)
        a_u, b_u = a - a_z, b - b_z
        for t in range(iters):
            rho = t / iters
            a = solve((b_z / b_z.norm(dim=1, keepdim=True)).T, target.T, (a_z - a_u).T, rho).T
            b = solve(a_z / a_z.norm(dim=0), target, b_z - b_u, rho)
            a_z, b_z = svid(a + a_u), svid(b + b_u)
            a_u, b_u = a_u + a - a_z, b_u + b - b_z
        signs = [torch.where(part >= 0, 1.0, -1.0) for part in (a + a_u, b + b_u)]
        s_a = (a_z / a_z.norm(dim=0)).abs().mean(1, keepdim=True)
        found = s_a * (signs[0] @ signs[1]) * b_z.abs().mean(0)
        return float((found - target).square().sum() / target.square().sum())

    return run


def measure(inputs: int, outputs: int, bpw: float, iters: int, repeats: int) -> dict[str, Any]:
    """Seconds and errors of both."""
    noise = np.random.default_rng(0)
    kernel = noise.normal(size=(inputs, outputs)).astype(np.float32)
    in_sq = np.exp(noise.normal(size=inputs)).astype(np.float32)
    out_sq = np.exp(noise.normal(size=outputs) / 2).astype(np.float32)
    rank = nanoquant.nanoquant_rank(inputs, outputs, bpw)
    key = jax.random.key(0)
    plain = torch_lb_admm(kernel, in_sq, out_sq, rank, iters)
    solve = functools.partial(nanoquant.lb_admm, key, *map(jnp.asarray, (kernel, in_sq, out_sq)))
    ours = lambda: float(solve(rank=rank, iters=iters).err_installed)
    seconds = take_turns({"ours": ours, "torch": plain}, repeats)
    return {
        "inputs": inputs,
        "outputs": outputs,
        "rank": rank,
        "bits_per_weight": nanoquant.bits_per_weight(inputs, outputs, rank),
        "iterations": iters,
        "errors": {"ours": ours(), "torch": plain()},
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "speedup": ratio(seconds["torch"], seconds["ours"]),
    }


def main() -> None:
    """Measures, prints and writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=576)
    parser.add_argument("--outputs", type=int, default=1536)
    parser.add_argument("--bpw", type=float, default=1.0)
    parser.add_argument("--iters", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    row = measure(arguments.inputs, arguments.outputs, arguments.bpw, arguments.iters, arguments.repeats)
    print(
        f"{row['inputs']} x {row['outputs']}, rank {row['rank']}, {row['iterations']} iterations: "
        f"{row['seconds']['ours']['median']:.2f} s, torch {row['seconds']['torch']['median']:.2f} s, "
        f"{row['speedup']['median']:.2f} times as fast ({row['speedup']['of_best']:.2f} of the best times); "
        f"errors {row['errors']['ours']:.4f} and {row['errors']['torch']:.4f}"
    )
    print("written:", save("lb_admm", {"goals": GOALS, "rows": [row]}, arguments.out))


if __name__ == "__main__":
    main()
