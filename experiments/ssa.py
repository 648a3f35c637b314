"""SSA: does one model, trained on full and block-sparse attention at once and pulled together, serve both better?

Claims under test: aligned streams drop less attention mass and lie closer together than those of any other way to
train; the aligned model loses nothing when it is read in full and is as good as a sparse-trained one when it is read
through a quarter of the keys; and more blocks never hurt it.

    python -m experiments.ssa --preset cpu       text and recall, three seeds each
    python -m experiments.ssa --preset full      with 1,500 steps of text and the ablations; resumable run by run

Text: a two-layer transformer (width 64) learns bytes of the Python standard library's source in windows of 128, blocks
of 8, budget 4. Four arms with the same data order: SSA, both streams without alignment, sparse alone (as MoBA), full
alone, all with the same gates. Losses are over positions from 32 on, which is where a budget of four blocks leaves
something out, and over windows of four times the training length by position.

Recall: pairs of a key and a value, then every key once more among fillers, whose value is asked for. The training goes
from 2 pairs in 16 tokens to 16 pairs in 256, and half of its sequences ask at every place. The model that is trained in
full must recall, and lose when it is read sparse, or the task says nothing.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from effml import report
from effml.report import Check, MethodCard, Result
from experiments import _ssa_models as models
from experiments._ssa_models import ABLATIONS, ARMS, Stage, Task

METHOD = MethodCard(
    name="ssa",
    job="attend",
    title="SSA",
    purpose="Train once, then serve with full attention or with any budget of key blocks.",
    claim=(
        "Training both streams and aligning their outputs at every layer concentrates attention: less mass is dropped, "
        "the streams lie closer, and one model is as good as the specialised ones in either mode."
    ),
    module="effml.attend.ssa",
    paper=(
        "SSA: Sparse Sparse Attention by Aligning Full and Sparse Attention Outputs in Feature Space",
        "2511.20102",
    ),
    minutes={"smoke": 0.15, "cpu": 15.0, "full": 60.0},
    headline="a quarter of the keys {ssa_sparse_4:.3f} nats, all {ssa_full:.3f} (trained in full {full_full:.3f})",
)


# All arms learn on these. Rate and size of the weights were chosen for the model that is trained in full, by its share
# of recalled values: at the weights of text the identity of a token drowns, and nothing is learnt.
STAGES = (Stage(16, 2, 128, 100), Stage(32, 4, 64, 100), Stage(64, 8, 32, 100), Stage(256, 16, 16, 200))


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment; the defaults are the `cpu` preset."""

    preset: str = "cpu"
    seed: int = 0
    seeds: int = 3
    text: Task = field(default_factory=Task)
    recall: Task = field(
        default_factory=lambda: Task(
            "recall", length=256, pairs=16, stages=STAGES, initializer_std=0.05, text_bytes=0
        )
    )
    budgets: tuple[int, ...] = (2, 4, 8, 16)
    first: int = 32
    """First position that counts in the losses of text."""
    windows: int = 256
    long: int = 4
    """Length of the long windows, in training lengths."""
    long_windows: int = 32
    recall_windows: int = 256
    arms: tuple[str, ...] = tuple(ARMS)
    ablations: tuple[str, ...] = ()

    @property
    def smoke(self) -> bool:
        """Whether this only tries the code."""
        return self.preset == "smoke"


_SMALL: dict[str, Any] = {"steps": 2, "batch": 2, "length": 48, "rate": 3e-3}
_SMALL |= {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "mlp_width": 24, "num_blocks": 2}
PRESETS = {
    "smoke": Config(
        preset="smoke",
        seeds=1,
        text=Task("text", text_bytes=60_000, **_SMALL),
        recall=Task("recall", pairs=4, **_SMALL),
        budgets=(2,),
        first=24,
        windows=2,
        long=1,
        long_windows=2,
        recall_windows=2,
        arms=("ssa", "full"),
    ),
    "cpu": Config(),
    "full": Config(preset="full", text=Task(steps=1500), ablations=tuple(ABLATIONS)),
}
BATCH = 16  # windows measured at once
BINS = 16  # of positions, in the curves by position


def run(config: Config) -> Result:
    """Trains every arm on both tasks, or reads the record of it, and judges."""
    seeds = range(config.seed, config.seed + config.seeds)
    result = Result(method=METHOD.name, preset=config.preset, seeds=seeds)
    plain = {name: ARMS[name] for name in config.arms}
    arms = {**plain, **{name: ABLATIONS[name] for name in config.ablations}}
    tasks = (
        ("text", config.text, arms, functools.partial(_measure_text, config)),
        ("recall", config.recall, plain, functools.partial(_measure_recall, config)),
    )
    for task_name, task, of_task, measure in tasks:
        for name, arm in of_task.items():
            found = [_one(config, task_name, name, arm, task, measure, seed) for seed in seeds]
            result.rows.append(_row(task_name, arm.title, found))
            result.seconds += sum(one["seconds"] for one in found)  # of kept runs too
            for key in found[0]:
                values = [one[key] for one in found]
                if np.ndim(values[0]) == 0:
                    result.summary[f"{_key(task_name, name)}_{key}"] = float(np.mean(values))
                else:
                    result.curves.setdefault(key, {})[_key(task_name, name)] = np.asarray(values)
    return result.judged(CHECKS)


def _key(task: str, arm: str) -> str:
    return arm if task == "text" else f"{task}_{arm}"


def _one(
    config: Config, task_name: str, name: str, arm: Any, task: Task, measure: Any, seed: int
) -> dict[str, Any]:
    """The record of one run, trained unless it is kept."""
    path = models.kept(task_name, name, task, seed)
    about = [config.budgets, config.first, config.windows, config.long_windows, config.recall_windows]
    about = json.loads(json.dumps(about))
    if not config.smoke and path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        if before.pop("measured", None) == about:
            return before
    began = time.perf_counter()
    of = models.programs(task.config(), config.smoke)
    params = models.train_arm(of, arm, task, seed)
    content = measure(of, task, arm, params)
    content["seconds"] = time.perf_counter() - began
    if not config.smoke:
        models.record(path, {**content, "measured": about})
    shown = ", ".join(f"{k} {v:.4f}" for k, v in content.items() if np.ndim(v) == 0)
    print(f"{task_name}, {name}, seed {seed}: {shown}", file=sys.stderr, flush=True)
    return content


def _measure_text(config: Config, of: models.Programs, task: Task, arm: Any, params: Any) -> dict[str, Any]:
    """Losses in every mode, what is dropped, layer by layer, and losses by position in long windows."""
    side = models.load_text(task.text_bytes).held_out
    batches = lambda count, length: models.text_windows(
        side,
        np.random.default_rng(0).integers(0, len(side) - length - 1, (-(-count // BATCH), min(count, BATCH))),
        length,
    )["tokens"]
    short, long = (
        batches(config.windows, task.length),
        batches(config.long_windows, config.long * task.length),
    )
    found: dict[str, Any] = {"full": float(of.losses(params, short, "full")[0][:, config.first :].mean())}
    for budget in config.budgets:
        nats, _ = of.losses(params, short, "sparse", budget)
        found[f"sparse_{budget}"] = float(nats[:, config.first :].mean())
    measured = [jax.device_get(of.gaps(params, tokens, config.first)) for tokens in short[:8]]
    for name in measured[0]:
        layers = np.mean([one[name] for one in measured], axis=0)
        found[f"{name}_by_layer"] = layers.tolist()
        found[name] = float(layers.mean())
    for mode in ("full", "sparse"):
        nats, _ = of.losses(params, long, mode)
        found[f"{mode}_by_position"] = nats.mean(0).reshape(BINS, -1).mean(1).tolist()
        found[f"beyond_{mode}"] = float(nats[:, -task.length :].mean())
    if arm.align_weight and not config.smoke:
        train = models.text_windows(side, np.arange(BATCH) * task.length, task.length)
        found["gradient_ratio"] = of.gradient_ratio(params, train, arm)
    return found


def _measure_recall(config: Config, of: models.Programs, task: Task, arm: Any, params: Any) -> dict[str, Any]:
    """Share of the asked values that are recalled, in both modes."""
    shape = (-(-config.recall_windows // BATCH), min(config.recall_windows, BATCH))
    batch = models.recall_windows(np.random.default_rng(10_000), shape, task.length, task.pairs)
    weights = batch["weights"].reshape(-1, task.length)
    found = {}
    for mode in ("full", "sparse"):
        _, hits = of.losses(params, batch["tokens"], mode)
        found[f"{mode}_accuracy"] = float((hits * weights).sum() / weights.sum())
    return found


def _row(task: str, title: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {**dict.fromkeys(COLUMNS), "task": task, "arm": title}
    for name in COLUMNS:
        if name in found[0]:
            row |= report.mean_and_spread(name, [one[name] for one in found])
    return row


def _of(result: Result, *names: str) -> list[float]:
    """Numbers of the summary; NaN, which no check accepts, where a preset leaves one out."""
    return [result.summary.get(name, float("nan")) for name in names]


def _ratio_of_dropped(r: Result) -> float:
    ours, *others = _of(r, "ssa_dropped", "mix_dropped", "sparse_dropped", "full_dropped")
    return float(np.float64(ours) / min(others))


def _ratio_of_gaps(r: Result) -> float:
    ours, mix = _of(r, "ssa_gap", "mix_gap")
    return float(np.float64(ours) / mix)


def _difference(first: str, second: str) -> Any:
    def value(r: Result) -> float:
        a, b = _of(r, first, second)
        return a - b

    return value


def _worst_budget(r: Result) -> float:
    losses = [r.summary[f"ssa_sparse_{budget}"] for budget in _budgets(r)]
    return float(max(np.diff(losses))) if len(losses) > 1 else float("nan")


def _budgets(r: Result) -> list[int]:
    found = (name.removeprefix("ssa_sparse_") for name in r.summary if name.startswith("ssa_sparse_"))
    return sorted(int(budget) for budget in found if budget.isdigit())


SPEC = "SSA spec, section 5"
CHECKS = [
    Check("dropped mass: SSA / the least of the others", _ratio_of_dropped, "<=", 0.80, f"{SPEC} E1 (P1)"),
    Check("relative output gap: SSA / not aligned", _ratio_of_gaps, "<=", 0.85, f"{SPEC} E1 (P2)"),
    Check(
        "read sparse: SSA minus trained in full (nats)",
        _difference("ssa_sparse_4", "full_sparse_4"),
        "<=",
        0.0,
        f"{SPEC} E1 (P3)",
    ),
    Check(
        "read sparse: SSA minus trained sparse (nats)",
        _difference("ssa_sparse_4", "sparse_sparse_4"),
        "<=",
        0.01,
        f"{SPEC} E1 (P3)",
    ),
    Check(
        "read in full: SSA minus trained in full (nats)",
        _difference("ssa_full", "full_full"),
        "<=",
        0.02,
        f"{SPEC} E1 (P4)",
    ),
    Check("most that one more budget costs SSA (nats)", _worst_budget, "<=", 0.005, f"{SPEC} E1 (P5)"),
    Check(
        "recall, read sparse: SSA minus trained sparse",
        _difference("recall_ssa_sparse_accuracy", "recall_sparse_sparse_accuracy"),
        ">=",
        -0.01,
        f"{SPEC} E2",
    ),
    Check(
        "recall, read in full: SSA minus trained in full",
        _difference("recall_ssa_full_accuracy", "recall_full_full_accuracy"),
        ">=",
        -0.01,
        f"{SPEC} E2",
    ),
    Check(
        "recall: the model trained in full, read in full",
        lambda r: _of(r, "recall_full_full_accuracy")[0],
        ">=",
        0.95,
        "else nothing was learnt",
    ),
    Check(
        "recall: what the model trained in full loses when it is read sparse",
        _difference("recall_full_full_accuracy", "recall_full_sparse_accuracy"),
        ">=",
        0.05,
        f"{SPEC} E2: else the task is too easy",
    ),
]
COLUMNS = {
    "task": "task",
    "arm": "trained on",
    "full": "read in full (nats)",
    "sparse_4": "4 blocks (nats)",
    "sparse_2": "2 blocks",
    "sparse_8": "8 blocks",
    "sparse_16": "16 blocks",
    "dropped": "dropped mass",
    "gap": "relative output gap",
    "entropy": "entropy (nats)",
    "beyond_full": "at 4 training lengths, full",
    "beyond_sparse": "at 4 training lengths, 4 blocks",
    "full_accuracy": "recalled, full",
    "sparse_accuracy": "recalled, sparse",
    "seconds": "seconds per run",
}


def table(result: Result) -> str:
    """Every arm of both tasks as a Markdown table."""
    return report.markdown_table(result.rows, COLUMNS)


def notes(result: Result) -> list[str]:
    """What was measured and is reported without a bound."""
    of = result.summary
    lines = []
    for name, arm in {**ARMS, **ABLATIONS}.items():
        if f"{name}_dropped" not in of:
            continue
        layers = np.mean(result.curves["dropped_by_layer"][name], axis=0)
        ratio = (
            f"; the alignment's gradient is {of[f'{name}_gradient_ratio']:.2g} of the loss's"
            if (f"{name}_gradient_ratio" in of)
            else ""
        )
        lines.append(
            f"{arm.title}: dropped mass by layer {', '.join(f'{value:.3f}' for value in layers)}, entropy "
            f"{of[f'{name}_entropy']:.3f} nats{ratio}."
        )
    if "joint_full" in of:
        lines.append(
            "Without stop-gradients the alignment has exactly twice the gradient (proved in the tests), so that row is "
            "SSA with alpha 20: the stop-gradients of both terms together change the weight, not the direction."
        )
    lowest = min((of[f"{name}_entropy"], arm.title) for name, arm in ARMS.items() if f"{name}_entropy" in of)
    lines.append(
        f"The paper says that SSA's attention is the sparsest; by entropy it is here that of: {lowest[1]}."
    )
    if {"ssa_beyond_full", "full_beyond_full"} <= of.keys():
        lines.append(
            f"In the last of {Config.long} training lengths: SSA {of['ssa_beyond_full']:.2f} nats in full and "
            f"{of['ssa_beyond_sparse']:.2f} through 4 blocks, trained in full {of['full_beyond_full']:.2f} and "
            f"{of['full_beyond_sparse']:.2f}; within the first {of['ssa_full']:.2f} and {of['full_full']:.2f}."
        )
    names = [f"recall_{name}_sparse_accuracy" for name in ("ssa", "mix", "sparse", "full")]
    if set(names) <= of.keys():
        values = ", ".join(f"{of[name]:.3f}" for name in names)
        lines.append(
            f"Recalled through 4 blocks by SSA, both streams not aligned, sparse alone, full alone: {values}. SSA "
            "closes what reading sparse loses only if the first is above the last; no bound is set on that."
        )
    return lines


def plot(result: Result) -> Any:
    """Loss against budget, loss by position, dropped mass, recall."""
    figure, axes = report.figures.panels(4, size=(5.6, 4.2))
    budgets, of = _budgets(result), result.summary
    shown = {name: arm for name, arm in {**ARMS, **ABLATIONS}.items() if f"{name}_dropped" in of}
    report.line_chart(
        {
            arm.title: (budgets, [of[f"{name}_sparse_{budget}"] for budget in budgets])
            for name, arm in shown.items()
            if name in ARMS
        },
        xlabel="blocks that a token reads",
        ylabel="held-out loss (nats per byte)",
        title="One model, any budget",
        axes=axes[0],
    )
    curves = {
        f"{name}, {mode}": result.curves[f"{mode}_by_position"][name]
        for name, mode in (("ssa", "full"), ("ssa", "sparse"), ("full", "full"), ("full", "sparse"))
    }
    report.line_chart(
        {name: (4 * (np.arange(BINS) + 1) / BINS, values) for name, values in curves.items()},
        xlabel="position / training length",
        ylabel="held-out loss (nats per byte)",
        title="Beyond the training length (trained on, read)",
        axes=axes[1],
    )
    report.bar_chart(
        {arm.title: of[f"{name}_dropped"] for name, arm in shown.items()},
        xlabel="attention mass outside of 4 blocks",
        title="What a budget of four drops",
        axes=axes[2],
    )
    report.bar_chart(
        {
            f"{name}, read {mode}": of[f"recall_{name}_{mode}_accuracy"]
            for name in shown
            if name in ARMS
            for mode in ("full", "sparse")
        },
        xlabel="share of values recalled",
        title="Associative recall",
        axes=axes[3],
    )
    return figure


if __name__ == "__main__":
    from experiments._main import main

    sys.exit(main(sys.modules[__name__]))
