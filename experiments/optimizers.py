"""Optimizers, head to head: what does a step, a gradient, a second and a byte buy?

Claim under test: SCALE and NorMuon train a language model at least as well as Adam with less optimizer state;
NorMuon is no worse than Muon, nor is LiMuon in as many steps.

    python -m experiments.optimizers --preset cpu        about 10 minutes on two cores

A Llama-style model (width 64, two layers) learns 1.1M tokens of the Python standard library's own source with
every first-order method of the library and four of optax. Each gets three learning rates, the best of which
(by the mean of three seeds) counts; model, data order, warm-up and cosine schedule are the same, vectors are on
Adam at 3e-3 everywhere. Beside Muon, NorMuon, LiMuon and GaLore embedding and head are on Adam.

LiMuon takes two gradients in a step, so it runs twice: for as many steps as the others, and for half as many,
which are as many gradients. Its beta is 0.2 (Muon's momentum of 0.95 would be 0.05), as its own experiment found.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from effml import report
from effml.nn import transformer
from effml.optimize import limuon, memory_report
from effml.report import Check, MethodCard, Result
from experiments import _language_model, normuon
from experiments._language_model import (
    GPU,
    SMOKE,
    LanguageModelConfig,
    Recipe,
    Trainer,
    batch_starts,
    load_tokens,
)

METHOD = MethodCard(
    name="optimizers",
    job="optimize",
    title="Optimizers, head to head",
    purpose="Choose an optimizer by what counts for you: steps, gradients, wall time or memory.",
    claim=(
        "SCALE and NorMuon train a language model at least as well as Adam with less optimizer state; NorMuon, and "
        "at equal steps LiMuon, are no worse than Muon."
    ),
    module="effml.optimize",
    paper=("NorMuon, LiMuon and SCALE against optax", "2510.05491, 2509.14562, 2506.16659"),
    minutes={"smoke": 0.15, "cpu": 10.0, "gpu": 3.0},
    headline="{normuon_loss:.2f} NorMuon, {muon_loss:.2f} Muon, {scale_loss:.2f} SCALE, {adam_loss:.2f} Adam (nats)",
)


@dataclass(frozen=True)
class Config(LanguageModelConfig):
    """Sizes of the experiment; the defaults are the `cpu` preset.

    A step of each optimizer is timed over `timed_steps` steps, in `timed_rounds` turns.
    """

    timed_steps: int = 20
    timed_rounds: int = 7
    optimizers: tuple[str, ...] = (
        "adam",
        "muon",
        "normuon",
        "limuon",
        "limuon rank 8",
        "scale",
        "adafactor",
        "galore",
        "sgd momentum",
    )


PRESETS = {
    "smoke": Config(**SMOKE, timed_steps=2, timed_rounds=2, optimizers=("adam", "normuon", "limuon")),
    "cpu": Config(),
    "gpu": Config(**GPU),
}


def _limuon(rank: int | None, rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    return limuon(rate, 0.2, rank=rank, adam_learning_rate=vector_rate)


RECIPES: dict[str, Recipe] = {
    "adam": _language_model.RECIPES["adam"],
    "muon": normuon.RECIPES["muon"],
    "normuon": normuon.RECIPES["normuon"],
    "limuon": Recipe(functools.partial(_limuon, None), two_point=True),
    "limuon rank 8": Recipe(functools.partial(_limuon, 8), two_point=True),
    "scale": _language_model.RECIPES["scale"],
    "adafactor": _language_model.RECIPES["adafactor"],
    "galore": _language_model.RECIPES["galore"],
    "sgd momentum": _language_model.RECIPES["sgd momentum"],
}


class Tuned(NamedTuple):
    """The best rate of a recipe: its place in the grid, the mean loss of every rate, and the best one's runs."""

    rate: float
    means: np.ndarray
    loss: np.ndarray
    curve: np.ndarray


def tune(trainer: Trainer, name: str) -> Tuned:
    """Trains the whole grid of one recipe."""
    runs = trainer.grid(name)
    means = np.where(np.isfinite(runs["loss"]).all(1), runs["loss"].mean(1), np.inf)
    best = int(means.argmin())
    return Tuned(trainer.recipes[name].grid[best], means, runs["loss"][best], runs["curve"][best])


def seconds_per_step(trainer: Trainer, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Seconds [rounds] of one step of each optimizer, batch 16 and one run at a time, all in turns."""
    config = trainer.config
    assert isinstance(config, Config)
    starts = batch_starts(config, trainer.tokens, config.seed, config.timed_steps)
    programs = {}
    for name in names:
        params = trainer.initial(config.seed)
        rate = trainer.recipes[name].grid[0]
        carry = trainer.jit(functools.partial(trainer.start, name))(params, rate)
        programs[name] = (trainer.jit(trainer.advance(name)), carry, rate)
        jax.block_until_ready(programs[name][0](carry, rate, starts))
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(config.timed_rounds):
        for name, (advance, carry, rate) in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(advance(carry, rate, starts))
            taken[name].append((time.perf_counter() - began) / config.timed_steps)
    return {name: np.array(values) for name, values in taken.items()}


def run(config: Config) -> Result:
    """Trains every optimizer's grid, times their steps, counts their bytes and judges the claim."""
    began = time.perf_counter()
    tokens = load_tokens(config, config.vocabulary)
    trainer = Trainer(config, tokens, RECIPES)
    half = Trainer(config, tokens, RECIPES, steps=config.steps // 2)
    shapes = jax.eval_shape(lambda: transformer.init_params(jax.random.key(0), trainer.model))
    seconds = seconds_per_step(trainer, config.optimizers)
    result = Result(
        method=METHOD.name, preset=config.preset, seeds=range(config.seed, config.seed + config.seeds)
    )
    for name in config.optimizers:
        recipe = RECIPES[name]
        tuned = tune(trainer, name)
        same_gradients = tune(half, name) if recipe.two_point else tuned
        memory = memory_report(trainer.optimizer(name, 1.0), shapes)
        # A two-point method needs the parameters of the step before as well.
        total = memory["total_bytes"] + (memory["param_bytes"] if recipe.two_point else 0)
        step = float(np.median(seconds[name]))
        result.rows.append(
            {
                "optimizer": name,
                "rate": tuned.rate,
                **report.mean_and_spread("loss", tuned.loss),
                **report.mean_and_spread("same_gradients", same_gradients.loss),
                "grid": " / ".join("diverged" if not np.isfinite(m) else f"{m:.3f}" for m in tuned.means),
                "milliseconds": 1e3 * step,
                "of_adam_time": float(np.median(seconds[name] / seconds["adam"])),
                "bytes": total / memory["param_bytes"],
                "of_adam": total / memory["adam_bytes"],
            }
        )
        steps = (np.arange(config.evaluations) + 1) * (config.steps // config.evaluations)
        result.curves[name] = {"steps": steps, "loss": tuned.curve, "seconds": steps * step}
        result.curves[f"{name}: gradients"] = {"gradients": steps, "loss": same_gradients.curve}
        key = _key(name)
        result.summary[f"{key}_loss"] = float(tuned.loss.mean())
        result.summary[f"{key}_same_gradients_loss"] = float(same_gradients.loss.mean())
        result.summary[f"{key}_bytes"] = total / memory["adam_bytes"]
        print(f"{name}: {tuned.loss.mean():.3f} nats at {tuned.rate:g}", file=sys.stderr, flush=True)
    result.seconds = time.perf_counter() - began
    return result.judged(CHECKS)


def _key(name: str) -> str:
    return name.replace(" ", "_")


def _above(result: Result, name: str, other: str) -> float:
    """The loss of one minus another's; NaN, which no check accepts, where a preset leaves one out."""
    missing = float("nan")
    return result.summary.get(f"{name}_loss", missing) - result.summary.get(f"{other}_loss", missing)


CHECKS = [
    Check(
        "SCALE's loss minus Adam's (nats)", lambda r: _above(r, "scale", "adam"), "<=", 0.03, "SCALE spec (a)"
    ),
    Check(
        "NorMuon's loss minus Adam's (nats)",
        lambda r: _above(r, "normuon", "adam"),
        "<=",
        0.0,
        "NorMuon spec (a)",
    ),
    Check(
        "NorMuon's loss minus Muon's (nats)",
        lambda r: _above(r, "normuon", "muon"),
        "<=",
        0.02,
        "NorMuon spec (b): not inferior",
    ),
    Check(
        "LiMuon's loss minus Muon's, equal steps (nats)",
        lambda r: _above(r, "limuon", "muon"),
        "<=",
        0.03,
        "LiMuon spec (a): not inferior at equal steps",
    ),
]
COLUMNS = {
    "optimizer": "optimizer",
    "rate": "best rate",
    "loss": "held-out loss, equal steps (nats per token)",
    "same_gradients": "held-out loss, equal gradient evaluations",
    "grid": "loss at each rate, slow to fast",
    "milliseconds": "ms per step",
    "of_adam_time": "of Adam's step",
    "bytes": "bytes kept / parameters",
    "of_adam": "of Adam's bytes",
}
BEST = {"loss": "min", "same_gradients": "min", "milliseconds": "min", "bytes": "min"}


def table(result: Result) -> str:
    """The rows as a Markdown table."""
    return report.markdown_table(result.rows, COLUMNS, best=BEST)


def notes(result: Result) -> list[str]:
    """How to read the table, and what it says that no check judges."""
    by_name = {row["optimizer"]: row for row in result.rows}
    lines = [
        "Bytes kept: parameters, optimizer state and, for LiMuon, the parameters of the step before; gradients and "
        "activations are not counted. A step is timed at this small width, where the model's own work is short.",
        "Embedding and head stay on Adam at 3e-3 beside Muon, NorMuon and LiMuon, as their specs have it; Muon with "
        "tables at its own tuned rate ends lower (experiment scale).",
        "Equal gradient evaluations: LiMuon, which takes two in a step, gets half the steps and tunes its rate anew.",
    ]
    for name in ("limuon", "limuon rank 8"):
        if name in by_name and "muon" in by_name:
            behind = by_name[name]["same_gradients"] - by_name["muon"]["loss"]
            word = "above" if behind > 0 else "below"
            lines.append(
                f"At equal gradient evaluations {name} ends {abs(behind):.3f} nats {word} Muon (no bound)."
            )
    order = sorted(by_name, key=lambda name: by_name[name]["loss"])
    lines.append(f"From low to high loss at equal steps: {', '.join(order)}.")
    edges = [name for name in order if by_name[name]["rate"] == RECIPES[name].grid[-1]]
    if edges:
        lines.append(
            f"Best at the fastest rate of its grid, so perhaps better beyond it: {', '.join(edges)}."
        )
    return lines


def plot(result: Result) -> Any:
    """Loss against steps, gradient evaluations, wall time and bytes."""
    figure, axes = report.figures.panels(2, 2, size=(5.8, 4.2))
    names = [row["optimizer"] for row in result.rows]
    shown = [name for name in names if name not in ("adafactor", "galore")]
    ends = [np.asarray(result.curves[name]["loss"])[:, -1].mean() for name in shown]
    # The first evaluations are far above everything that is to be told apart.
    limits = (None, float(max(ends)) + 0.8)
    panels = [
        ("steps", "step", "Equal steps (band: seeds)", ""),
        ("gradients", "gradient evaluations", "Equal gradient evaluations", ": gradients"),
        ("seconds", "seconds of training on this machine", "Equal wall time", ""),
    ]
    for (x, xlabel, title, suffix), axis in zip(panels, axes):
        report.line_chart(
            {
                name: (result.curves[f"{name}{suffix}"][x], result.curves[f"{name}{suffix}"]["loss"])
                for name in shown
            },
            xlabel=xlabel,
            ylabel="held-out loss (nats per token)",
            title=title,
            ylim=limits,
            axes=axis,
        )
    report.scatter_chart(
        {
            row["optimizer"]: (row["bytes"], row["loss"], row.get("loss_spread", 0.0))
            for row in result.rows
            if np.isfinite(row["loss"])
        },
        xlabel="bytes of parameters and what is kept / parameters",
        ylabel="held-out loss (nats per token)",
        title="Final loss against memory",
        axes=axes[3],
    )
    return figure


if __name__ == "__main__":
    from experiments._main import main

    sys.exit(main(sys.modules[__name__]))
