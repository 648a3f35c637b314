"""LiMuon: is a variance-reduced gradient estimate worth a second gradient?

Claims under test: the STORM estimate is closer to the gradient than a running mean; Muon on it trains a
language model at least as well per step; carried in low rank it loses little.

    python -m experiments.limuon --preset cpu        about 10 minutes on two cores
    python -m experiments.limuon --preset full       more ranks, rates and steps: about half an hour

Three parts. *Digits*: a perceptron small enough that the exact gradient is known; all estimates along one
path, then with the weights held still, then each on its own path with equal gradient evaluations. *Language
model*: the one of the other optimizer experiments with batches of 4 x 32 tokens, so that noise dominates;
hidden matrices on the optimizer under test, embedding, head and vectors on Adam at 3e-3. *Other models*: a
small vision transformer on digits and a stack of Mamba blocks on text, with equal gradient evaluations.

LiMuon takes two gradients per step, so at equal gradient evaluations it takes half the steps. Those
comparisons are reported, whichever wins, and judged by nothing. The paper's table, per step: on Mamba-130M
perplexity 47.8 for LiMuon (62.2 with rank 8) against Muon's 71.3.
"""

from __future__ import annotations

import functools
import sys
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from effml import report
from effml.optimize import memory_report, two_point_memory
from effml.report import Check, MethodCard, Result
from experiments._language_model import (
    GPU,
    SMOKE,
    LanguageModelConfig,
    Recipe,
    Trainer,
    load_tokens,
)
from experiments._limuon_estimator import estimator_part
from experiments._limuon_models import RATES, make_limuon, make_muon, other_models_part, rank_in

METHOD = MethodCard(
    name="limuon",
    job="optimize",
    title="LiMuon",
    purpose="Muon on a variance-reduced estimate from two gradients, carried in full or in low rank.",
    claim=(
        "The two-gradient estimate follows the gradient more closely than momentum does, and Muon on it is no worse "
        "per step; carried in a few singular triples only, it loses little."
    ),
    module="effml.optimize",
    paper=("LiMuon: Light and Fast Muon Optimizer for Large Models", "2509.14562"),
    minutes={"smoke": 0.15, "cpu": 10.0, "full": 30.0, "gpu": 3.0},
    headline=(
        "error {error_ratio:.2f} of momentum's; {full:.3f} nats vs Muon's {muon:.3f} per step, "
        "{equal:+.3f} at equal cost"
    ),
)


@dataclass(frozen=True)
class Config(LanguageModelConfig):
    """Sizes of the experiment; the defaults are the `cpu` preset."""

    batch: int = 4
    steps: int = 300
    rates: int = 2
    evaluations: int = 10
    betas: tuple[float, ...] = (0.05, 0.2)
    methods: tuple[str, ...] = ("muon at equal evaluations", "muon", "limuon", "limuon r=8")
    estimator_steps: int = 600
    estimator_etas: tuple[float, ...] = (0.002,)
    estimator_betas: tuple[float, ...] = (0.1, 0.03, 0.01)
    estimator_ranks: tuple[int, ...] = (4,)
    chains: int = 256
    own_path: tuple[tuple[float, float], ...] = ((0.01, 0.03),)
    own_path_steps: int = 1000
    models: tuple[str, ...] = ("vision transformer", "mamba")
    model_steps: int = 120
    model_batch: int = 16


PRESETS = {
    "smoke": Config(
        **{**SMOKE, "batch": 2},
        betas=(0.2,),
        methods=("muon", "limuon r=8"),
        estimator_steps=6,
        estimator_etas=(0.002,),
        estimator_betas=(0.01,),
        estimator_ranks=(),
        chains=4,
        own_path=(),
        models=(),
    ),
    "cpu": Config(),
    "full": Config(
        preset="full",
        methods=("muon at equal evaluations", "muon", "limuon", "limuon r=16", "limuon r=8"),
        estimator_etas=(0.0005, 0.002),
        estimator_ranks=(8, 4),
        own_path=((0.003, 0.1), (0.003, 0.03), (0.01, 0.03)),
        model_steps=400,
    ),
    "gpu": Config(**{**GPU, "batch": 8}),
}


def recipes(config: Config) -> dict[str, Recipe]:
    """One for each optimizer and beta."""
    found = {}
    for beta in config.betas:
        for name in config.methods:
            if name.startswith("muon"):
                found[f"muon {beta:g}"] = Recipe(functools.partial(make_muon, beta), RATES)
            else:
                make = functools.partial(make_limuon, beta, rank_in(name))
                found[f"{name} {beta:g}"] = Recipe(make, RATES, two_point=True)
    return found


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


# The language model


def language_model_part(config: Config, result: Result) -> None:
    """Every optimizer at every rate and beta, at equal steps; Muon at equal gradient evaluations too."""
    tokens, table = load_tokens(config, config.vocabulary), recipes(config)
    trainer = Trainer(config, tokens, table)
    longer = Trainer(config, tokens, table, 2 * config.steps)
    params = trainer.initial(config.seed)
    best_of_beta = {}
    for name in config.methods:
        equal = name == "muon at equal evaluations"
        method, runner = ("muon", longer) if equal else (name, trainer)
        start = time.perf_counter()
        candidates = []
        for beta in config.betas:
            runs = runner.grid(f"{method} {beta:g}")
            loss = np.where(np.isfinite(runs["loss"]), runs["loss"], np.inf)
            for index, rate in enumerate(RATES[: config.rates]):
                candidates.append((loss[index].mean(), beta, rate, runs["loss"][index], runs["curve"][index]))
                before = best_of_beta.get((name, beta), np.inf)
                best_of_beta[name, beta] = min(before, loss[index].mean())
        mean, beta, rate, losses, curve = min(candidates, key=lambda found: found[0])
        passes = 2 if equal or method != "muon" else 1
        steps = runner.steps
        evaluations = steps * (2 if method != "muon" else 1)
        result.rows.append(
            {
                "optimizer": name,
                "steps": steps,
                "gradients": evaluations,
                "rate": rate,
                "beta": beta,
                **report.mean_and_spread("loss", losses),
                "grid": " / ".join(f"{found[0]:.3f}" for found in candidates),
                **_bytes(method, trainer, params),
                "seconds": (time.perf_counter() - start) / (len(candidates) * config.seeds),
            }
        )
        at = (np.arange(config.evaluations) + 1) * (steps // config.evaluations)
        result.curves[name] = {"steps": at, "gradients": at * (evaluations // steps), "loss": curve}
        result.summary[_key(name)] = float(mean)
        say(f"{name}: {mean:.3f} nats ({passes * config.steps} gradients)")
    # NaN, which no check accepts, where a preset leaves a method out.
    at_last = lambda name: float(best_of_beta.get((name, config.betas[-1]), np.nan))
    of = lambda name: result.summary.get(_key(name), float("nan"))
    result.summary["full"] = of("limuon")
    result.summary["full_at_last_beta"] = at_last("limuon")
    result.summary["low_at_last_beta"] = at_last("limuon r=8")
    result.summary["equal"] = of("limuon") - of("muon at equal evaluations")


def _bytes(method: str, trainer: Trainer, params: Any) -> dict[str, float]:
    """Estimator and persistent bytes as shares of the parameters' own."""
    if method == "muon":
        memory = memory_report(trainer.optimizer(f"muon {trainer.config.betas[0]:g}", 1.0), params)
        return {"persistent": memory["total_bytes"] / memory["param_bytes"]}
    name = f"{method} {trainer.config.betas[0]:g}"
    memory = two_point_memory(trainer.optimizer(name, 1.0), params)
    return {
        "estimator": memory["estimator_bytes"] / memory["param_bytes"],
        "persistent": memory["persistent_bytes"] / memory["param_bytes"],
    }


def _key(name: str) -> str:
    return name.replace(" ", "_").replace("=", "")


def run(config: Config) -> Result:
    """All three parts, and what is judged."""
    began = time.perf_counter()
    result = Result(
        method=METHOD.name, preset=config.preset, seeds=range(config.seed, config.seed + config.seeds)
    )
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    jit = functools.partial(jax.jit, compiler_options=quick if config.preset == "smoke" else None)
    estimator_part(config, result, jit, say)
    language_model_part(config, result)
    names = tuple(name for name in config.methods if name.startswith("limuon"))
    other_models_part(config, result, jit, names, say)
    result.seconds = time.perf_counter() - began
    return result.judged(CHECKS)


SPEC = "LiMuon spec, section 5"
CHECKS = [
    Check(
        "error of STORM / error of the running mean, along one path",
        lambda r: r.summary["error_ratio"],
        "<=",
        0.55,
        f"bound of {SPEC}, eta .002, beta .01; over the second half of the steps, which is our reading",
    ),
    Check(
        "alignment of STORM minus that of the running mean",
        lambda r: r.summary["alignment_gain"],
        ">=",
        0.02,
        f"bound of {SPEC}, eta .002, beta .01; over the second half of the steps, which is our reading",
    ),
    Check(
        "weights held still: largest deviation of either error from beta sigma^2 / (2 - beta)",
        lambda r: r.summary["frozen_deviation"],
        "<=",
        0.1,
        f"{SPEC}, after 5 / beta steps",
    ),
    Check(
        "LiMuon's loss minus Muon's at equal steps (nats)",
        lambda r: r.summary["full"] - r.summary["muon"],
        "<=",
        0.03,
        f"{SPEC} (a): each at its best rate and beta",
    ),
    Check(
        "loss with rank 8 minus loss in full, at beta 0.2 (nats)",
        lambda r: r.summary["low_at_last_beta"] - r.summary["full_at_last_beta"],
        "<=",
        0.06,
        f"{SPEC} (b)",
    ),
]
COLUMNS = {
    "optimizer": "optimizer",
    "steps": "steps",
    "gradients": "gradient evaluations",
    "rate": "best rate",
    "beta": "best beta",
    "loss": "held-out loss (nats per token)",
    "grid": "loss at each beta and rate",
    "estimator": "bytes of the estimate / parameters",
    "persistent": "all persistent bytes / parameters",
    "seconds": "seconds per run",
}
BEST = {"loss": "min"}


def table(result: Result) -> str:
    """The language model's rows as a Markdown table."""
    return report.markdown_table(result.rows, COLUMNS, best=BEST)


def notes(result: Result) -> list[str]:
    """What was measured and is reported without a bound."""
    of, curves = result.summary, result.curves
    lines = []
    if np.isfinite(of["equal"]):
        lines.append(
            f"{SPEC} (c), equal gradient evaluations, reported and not a gate: Muon with twice the steps reaches "
            f"{of['muon_at_equal_evaluations']:.3f} nats, LiMuon {of['full']:.3f}: "
            f"{'LiMuon' if of['equal'] < 0 else 'plain Muon'} is better by {abs(of['equal']):.3f}."
        )
    low, muon = (
        next((row for row in result.rows if row["optimizer"] == n), None) for n in ("limuon r=8", "muon")
    )
    if low and muon:
        lines.append(
            f"Memory: the estimate of {low['optimizer']} takes {low['estimator']:.2f} of the parameters' bytes, but "
            f"all that persists is {low['persistent']:.2f} of them, as the parameters of the step before are kept "
            f"too; for Muon it is {muon['persistent']:.2f}."
        )
    if low and muon:
        lines.append(
            f"Rank 8 ends {low['loss'] - muon['loss']:+.3f} nats from Muon at equal steps (no bound)."
        )
    at = {
        (row["eta"], row["beta"], row["estimate"]): row["error_all"]
        for row in curves["estimates"]
        if (row["eta"], row["beta"]) == (0.002, 0.01)
    }
    if at:
        ratio = at[0.002, 0.01, "storm"] / at[0.002, 0.01, "ema"]
        lines.append(
            f"Over all steps, with the transient of the first gradients, the ratio of errors is {ratio:.2f}: the bound "
            f"of 0.55 {'holds' if ratio <= 0.55 else 'does not hold'} there. The spec's own prototype numbers are met "
            "by the second half only."
        )
    lines.append(
        "Muon here is optax's with Nesterov momentum; embedding and head are on Adam at 3e-3 beside both."
    )
    for row in curves["estimates"]:
        if row["estimate"] == "ema":
            rows = [
                other
                for other in curves["estimates"]
                if (other["eta"], other["beta"]) == (row["eta"], row["beta"])
            ]
            lines.append(
                f"One path, eta {row['eta']:g}, beta {row['beta']:g}, squared error and alignment in the second half "
                "(over all steps): "
                + "; ".join(
                    f"{r['estimate']} {r['error']:.3g}, {r['alignment']:.3f} "
                    f"({r['error_all']:.3g}, {r['alignment_all']:.3f})"
                    for r in rows
                )
                + "."
            )
    for row in curves["weights held still"]:
        lines.append(
            f"Weights held still, beta {row['beta']:g}, squared error / (beta sigma^2 / (2 - beta)): running mean "
            f"{row['ema']:.3f}, STORM {row['storm']:.3f}."
        )
    for pair in dict.fromkeys((row["eta"], row["beta"]) for row in curves["own path"]):
        rows = [row for row in curves["own path"] if (row["eta"], row["beta"]) == pair]
        lines.append(
            f"Own path at equal gradient evaluations, eta {pair[0]:g}, beta {pair[1]:g}, squared error / nuclear norm "
            "of the gradient / final loss: "
            + "; ".join(
                f"{row['estimate']} ({row['steps']} steps) {row['error']:.2g} / {row['nuclear']:.3f} / "
                f"{row['loss']:.4f}"
                for row in rows
            )
            + "."
        )
    for model in dict.fromkeys(row["model"] for row in curves["other models"]):
        rows = sorted(
            (row for row in curves["other models"] if row["model"] == model), key=lambda r: r["loss"]
        )
        lines.append(
            f"Held-out loss, {model}: "
            + "; ".join(
                f"{row['optimizer']} ({row['steps']} steps, {row['gradients']} gradients) {row['loss']:.3f} ± "
                f"{row['loss_spread']:.3f}"
                for row in rows
            )
            + "."
        )
    return lines


def plot(result: Result) -> Any:
    """The estimates' errors, the language model's loss by step and by gradient evaluation."""
    figure, axes = report.figures.panels(3, size=(5.6, 4.4))
    last = result.curves["estimates"][-1]["eta"]
    rows = sorted(
        (row for row in result.curves["estimates"] if row["eta"] == last), key=lambda row: row["beta"]
    )
    kinds = [kind for kind in dict.fromkeys(row["estimate"] for row in rows) if kind != "raw"]
    report.line_chart(
        {
            kind: (
                [row["beta"] for row in rows if row["estimate"] == kind],
                [row["error"] for row in rows if row["estimate"] == kind],
            )
            for kind in kinds
        },
        xlabel="beta",
        ylabel="squared error of the estimate",
        title="Estimates of the gradient, along one path",
        axes=axes[0],
    )
    axes[0].set_xscale("log")
    axes[0].set_yscale("log")
    names = [row["optimizer"] for row in result.rows]
    for place, key, label, title in (
        (axes[1], "steps", "step", "Language model, by steps"),
        (axes[2], "gradients", "gradient evaluations", "The same, by gradient evaluations"),
    ):
        shown = [name for name in names if key == "gradients" or name != "muon at equal evaluations"]
        report.line_chart(
            {name: (result.curves[name][key], result.curves[name]["loss"]) for name in shown},
            xlabel=label,
            ylabel="held-out loss (nats per token)",
            title=title,
            axes=place,
        )
    return figure


if __name__ == "__main__":
    from experiments._main import main

    sys.exit(main(sys.modules[__name__]))
