"""SCALE: can a language model be trained well with hardly any optimizer state?

Claim under test: normalising every matrix's gradient per output unit, with momentum on the head only, is as
good as Adam at less than half of its bytes; and the head's momentum is what makes the difference to
normalisation alone.

    python -m experiments.scale --preset cpu        about 10 minutes on two cores

A Llama-style model (width 64, two layers) learns 1.1M tokens of the Python standard library's own source with
nine optimizers. Each gets three learning rates, the best of which (by the mean of three seeds) counts. The
rates are 1e-3, 3e-3 and 1e-2, except for SGD with and without momentum, whose steps have the gradient's own
size: theirs lie around their own best. Vectors are on Adam at 3e-3 everywhere; all share model, data order,
warm-up and cosine schedule. The paper's table: at 60M parameters and vocabulary 32k SCALE reaches 30.81
perplexity against Adam's 30.05, column normalisation alone 39.89.

Row normalisation is reported and not judged: its weakness needs a large vocabulary, so the largest entry of
its head update is measured at vocabulary 8192 too.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from effml import data, report, trees
from effml.nn import transformer
from effml.optimize import make_optimizer, memory_report, normalize_columns, scale
from effml.report import Check, MethodCard, Result
from effml.train import schedule

METHOD = MethodCard(
    name="scale",
    job="optimize",
    title="SCALE",
    purpose="Train with almost no optimizer memory: no state for any matrix except the output head.",
    claim=(
        "Gradients normalised per output unit, with momentum on the head only, train a language model as well "
        "as Adam with less than half the bytes; the head's momentum is what normalisation alone lacks."
    ),
    module="effml.optimize",
    paper=("Memory-Efficient LLM Pretraining via Minimalist Optimizer Design", "2506.16659"),
    minutes={"smoke": 0.15, "cpu": 8.0, "gpu": 3.0},
    headline="{scale_loss:.2f} nats vs Adam's {adam_loss:.2f} at {scale_bytes:.2f} of its bytes",
)

GRID = (1e-3, 3e-3, 1e-2)
VECTOR_RATE = 3e-3


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment; the defaults are the `cpu` preset."""

    preset: str = "cpu"
    seed: int = 0
    seeds: int = 3
    steps: int = 400
    batch: int = 16
    length: int = 32
    width: int = 64
    layers: int = 2
    mlp_width: int = 176
    heads: int = 4
    vocabulary: int = 1024
    tokens: int = 1_100_000
    evaluations: int = 20
    small_batch: int = 32
    large_batch: int = 512
    large_vocabulary: int = 8192
    large_steps: int = 100
    rates: int = 3
    optimizers: tuple[str, ...] = (
        "scale",
        "adam",
        "column norm only",
        "row norm only",
        "muon",
        "adafactor",
        "galore",
        "sgd momentum",
        "sgd",
    )

    def model(self, vocabulary: int | None = None) -> transformer.TransformerConfig:
        """The model under test: untied head, so that the head's momentum is the head's alone."""
        return transformer.TransformerConfig(
            vocab_size=vocabulary or self.vocabulary,
            width=self.width,
            num_layers=self.layers,
            num_heads=self.heads,
            mlp_width=self.mlp_width,
            max_length=self.length,
            tied_head=False,
        )


PRESETS = {
    "smoke": Config(
        preset="smoke",
        seeds=1,
        steps=8,
        batch=4,
        length=8,
        width=16,
        layers=1,
        mlp_width=32,
        heads=2,
        vocabulary=256,
        tokens=20_000,
        evaluations=2,
        small_batch=2,
        large_batch=8,
        large_vocabulary=256,
        large_steps=2,
        rates=2,
        optimizers=("scale", "adam"),
    ),
    "cpu": Config(),
    "gpu": Config(
        preset="gpu",
        steps=1000,
        batch=64,
        length=128,
        width=256,
        layers=4,
        mlp_width=704,
        heads=4,
        tokens=4_000_000,
    ),
}


class Recipe(NamedTuple):
    """How one optimizer is made and which peak learning rates it is tuned over.

    make(rate, vector_rate) takes schedules. `vmapped` = the runs may go in parallel on an accelerator; under
    vmap a condition runs both branches, which for GaLore means an SVD at every step.
    """

    make: Callable[[Any, Any], optax.GradientTransformation]
    grid: tuple[float, ...] = GRID
    vmapped: bool = True


def _with_vectors(weights: optax.GradientTransformation, vector_rate: Any) -> optax.GradientTransformation:
    """`weights` for matrices, embedding and head; Adam for vectors."""
    return optax.partition(
        {"weights": weights, "vector": optax.adam(vector_rate)},
        lambda params: jax.tree.map(
            lambda role: "vector" if role == "vector" else "weights", trees.parameter_roles(params)
        ),
    )


def _sgd(momentum: float | None, rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    return _with_vectors(optax.sgd(rate, momentum=momentum), vector_rate)


def _column(rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    return _with_vectors(optax.chain(normalize_columns(), optax.scale_by_learning_rate(rate)), vector_rate)


def row_axes(updates: Any) -> Any:
    """The usual axes with inputs and outputs exchanged: one norm per input unit."""
    swap = lambda numbers: trees.MuonDimensionNumbers(numbers.output_axis, numbers.reduction_axis)
    return jax.tree.map(
        swap, trees.dimension_numbers(updates), is_leaf=lambda x: isinstance(x, trees.MuonDimensionNumbers)
    )


def _row(rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    rows = optax.chain(normalize_columns(row_axes), optax.scale_by_learning_rate(rate))
    return _with_vectors(rows, vector_rate)


def _scale(rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    return scale(rate, adam_learning_rate=vector_rate)


def _adam(rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    return _with_vectors(optax.adam(rate, b1=0.9, b2=0.95), vector_rate)


def _muon(rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    return make_optimizer("muon", learning_rate=rate, vector_learning_rate=vector_rate)


def _adafactor(rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    weights = optax.adafactor(rate, min_dim_size_to_factor=8, multiply_by_parameter_scale=False)
    return _with_vectors(weights, vector_rate)


def _galore(rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    """Rank width/4 on hidden matrices, Adam on embedding and head, as its authors use it."""

    def make(params: Any) -> optax.GradientTransformation:
        roles = trees.parameter_roles(params)
        rank = max(1, min(leaf.shape[-2] for leaf in jax.tree.leaves(params) if leaf.ndim == 2) // 4)
        return optax.partition(
            {
                "matrix": optax.contrib.galore(rate, rank=rank, update_proj_gap=50, scale=1.0),
                "tables": optax.adam(rate, b1=0.9, b2=0.95),
                "vector": optax.adam(vector_rate),
            },
            jax.tree.map(lambda role: "tables" if role in ("embedding", "head") else role, roles),
        )

    return optax.GradientTransformation(
        lambda params: make(params).init(params),
        lambda updates, state, params=None: make(params).update(updates, state, params),
    )


RECIPES: dict[str, Recipe] = {
    "scale": Recipe(_scale),
    "adam": Recipe(_adam),
    "column norm only": Recipe(_column),
    "row norm only": Recipe(_row),
    "muon": Recipe(_muon),
    "adafactor": Recipe(_adafactor),
    "galore": Recipe(_galore, vmapped=False),
    "sgd momentum": Recipe(functools.partial(_sgd, 0.9), (0.03, 0.1, 0.3)),
    "sgd": Recipe(functools.partial(_sgd, None), (0.3, 1.0, 3.0)),
}


class Tokens(NamedTuple):
    """A tokenized corpus: train int32[n], held_out int32[batches, batch, length + 1] with weights."""

    train: np.ndarray
    held_out: np.ndarray
    weights: np.ndarray
    vocabulary: int


def load_tokens(config: Config, vocabulary: int) -> Tokens:
    """The standard library's source as byte-pair tokens, nine parts of it for training."""
    # A token of these vocabularies is 2 to 4 bytes of source; too much text is cut after encoding.
    corpus = data.load_corpus("stdlib", max_bytes=5 * config.tokens)
    tokenizer: Any = data.ByteTokenizer()
    if vocabulary > tokenizer.vocab_size:
        tokenizer = data.BpeTokenizer.train((text for _, text in corpus.text("train")), vocabulary)
    held_out_size = config.tokens // 10
    train = np.asarray(data.encode_corpus(corpus, "train", tokenizer))[: config.tokens - held_out_size]
    held_out = np.asarray(data.encode_corpus(corpus, "held_out", tokenizer))[:held_out_size]
    windows = data.evaluation_batches(held_out, batch_size=4 * config.batch, length=config.length)
    return Tokens(
        train,
        np.stack([window["tokens"] for window in windows]),
        np.stack([window["weights"] for window in windows]),
        tokenizer.vocab_size,
    )


def batch_starts(config: Config, tokens: Tokens, seed: int, steps: int) -> np.ndarray:
    """int32[steps, batch]: where each window of each batch begins; one order per seed for all optimizers."""
    return np.random.default_rng(seed).integers(
        0, len(tokens.train) - config.length, (steps, config.batch), dtype=np.int32
    )


def windows(train: jax.Array, starts: jax.Array, config: Config) -> jax.Array:
    """int32[batch, length + 1] tokens."""
    return train[starts[:, None] + jnp.arange(config.length + 1)]


def _schedules(rate: Any, steps: int) -> tuple[Any, Any]:
    shape = schedule("cosine", 1.0, steps, warmup_fraction=0.1, final_fraction=0.1)
    return (lambda step: rate * shape(step)), (lambda step: VECTOR_RATE * shape(step))


class Trainer:
    """Trains all runs of an optimizer in one compiled program.

    Args:
        config: the experiment's sizes.
        tokens: the corpus.
        steps: length of the runs, `config.steps` by default.
        vmapped: runs side by side (quicker on an accelerator) instead of one after another (quicker on two
            cores: 1.4 against 1.7 CPU seconds for ten steps of nine runs); None = by the device.
    """

    def __init__(self, config: Config, tokens: Tokens, steps: int | None = None, vmapped: bool | None = None):
        self.config, self.tokens, self.steps = config, tokens, steps or config.steps
        self.vmapped = jax.default_backend() != "cpu" if vmapped is None else vmapped
        self.model = config.model(tokens.vocabulary)
        self.train = jnp.asarray(tokens.train)
        self._initial = self.jit(lambda seed: transformer.init_params(jax.random.key(seed), self.model))
        self.evaluate = self.jit(
            lambda params, batches, weights: jax.lax.map(
                lambda one: self._held_out_loss(one, batches, weights), params
            )
        )

    def jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`jax.jit`, with quick and poor code for the sizes where compiling is all the work."""
        quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        return jax.jit(function, compiler_options=quick if self.config.preset == "smoke" else None, **options)

    def initial(self, seed: int) -> Any:
        """The parameters that every optimizer starts from."""
        return self._initial(seed)

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Mean nats per token of int32[batch, length + 1]."""
        return transformer.next_token_loss(params, {"tokens": tokens}, self.model)[0]

    def _held_out_loss(self, params: Any, batches: jax.Array, weights: jax.Array) -> jax.Array:
        def total(batch: Any) -> jax.Array:
            tokens, weight = batch
            loss, _ = transformer.next_token_loss(params, {"tokens": tokens, "weights": weight}, self.model)
            return loss * weight.sum()

        return jax.lax.map(total, (batches, weights)).sum() / weights.sum()

    def optimizer(self, name: str, rate: Any) -> optax.GradientTransformation:
        """The recipe `name` on this run's schedule with the peak `rate`."""
        return RECIPES[name].make(*_schedules(rate, self.steps))

    def advance(self, name: str) -> Callable[..., Any]:
        """advance(params, state, rate, starts int32[steps, batch]) -> (params, state), for a single run."""

        def run(params: Any, state: Any, rate: jax.Array, starts: jax.Array) -> tuple[Any, Any]:
            optimizer = self.optimizer(name, rate)

            def step(carry: Any, starts: jax.Array) -> tuple[Any, None]:
                params, state = carry
                gradient = jax.grad(self.loss)(params, windows(self.train, starts, self.config))
                updates, state = optimizer.update(gradient, state, params)
                return (optax.apply_updates(params, updates), state), None

            return jax.lax.scan(step, (params, state), starts)[0]

        return run

    def grid(self, name: str, watch: Callable[[Any], None] | None = None) -> dict[str, np.ndarray]:
        """All runs of one optimizer: `loss` [rates, seeds] and `curve` [rates, seeds, evaluations].

        The curve is measured on every sixteenth held-out batch, the final loss on all of them. `watch` is
        called at every evaluation with the parameters of the run at the second rate with the first seed.
        """
        config, recipe = self.config, RECIPES[name]
        grid, seeds = recipe.grid[: config.rates], range(config.seed, config.seed + config.seeds)
        pairs = [(rate, seed) for rate in grid for seed in seeds]
        watched = pairs.index((grid[1], config.seed))
        rates = jnp.array([rate for rate, _ in pairs], jnp.float32)
        starts = np.stack([batch_starts(config, self.tokens, seed, self.steps) for _, seed in pairs])
        first = {seed: self.initial(seed) for seed in seeds}
        params = jax.tree.map(lambda *leaves: np.stack(leaves), *(first[seed] for _, seed in pairs))
        init = lambda params, rate: self.optimizer(name, rate).init(params)
        state = self.jit(jax.vmap(init))(params, rates)
        one = self.advance(name)
        side_by_side = self.vmapped and recipe.vmapped
        every = jax.vmap(one) if side_by_side else lambda *runs: jax.lax.map(lambda run: one(*run), runs)
        advance = self.jit(every, donate_argnums=(0, 1))
        held_out, weights = self.tokens.held_out, self.tokens.weights
        # The first batches come from other files than the last ones, so the curve takes them evenly.
        part = slice(0, None, 16 if len(held_out) > 16 else 1)
        curve = []
        for chunk in np.split(starts, config.evaluations, axis=1):
            params, state = advance(params, state, rates, chunk)
            curve.append(self.evaluate(params, held_out[part], weights[part]))
            if watch is not None:
                watch(jax.tree.map(lambda leaf: np.array(leaf)[watched], params))
        loss = np.asarray(self.evaluate(params, held_out, weights))
        shape = (len(grid), config.seeds)
        return {"loss": np.float64(loss).reshape(shape), "curve": np.stack(curve, -1).reshape(*shape, -1)}


class NoiseProbe:
    """How noisy each matrix's gradient is, at each set of parameters it is shown.

    `large_batch` windows are cut into batches of `small_batch`. With g_i the gradient of one small batch and
    g their mean, the gradient of the large one, per matrix:

        variance = mean_i |g_i - g|^2 / elements            relative = variance / (|g|^2 / elements)

    (With single windows against 16 of them every matrix measures about 14, the value of pure noise being 15.)
    """

    def __init__(self, trainer: Trainer, count: int):
        config = trainer.config
        many = dataclasses.replace(config, batch=config.large_batch)
        self.starts = iter(batch_starts(many, trainer.tokens, config.seed + 1000, count))
        self.measured: list[list[tuple[Any, Any]]] = []

        def measure(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
            mean = leaf.mean(0)
            variance = jnp.square(leaf - mean).mean()
            return variance, variance / jnp.square(mean).mean()

        def probe(params: Any, starts: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
            groups = windows(trainer.train, starts, config).reshape(-1, config.small_batch, config.length + 1)
            gradients = jax.lax.map(lambda group: jax.grad(trainer.loss)(params, group), groups)
            return [measure(leaf) for leaf in jax.tree.leaves(gradients)]

        self._probe = trainer.jit(probe)

    def __call__(self, params: Any) -> None:
        """Measures once more."""
        self.roles = jax.tree.leaves(trees.parameter_roles(params))
        self.names = trees.leaf_names(params)
        self.measured.append(self._probe(params, next(self.starts)))

    def rows(self) -> list[dict[str, Any]]:
        """One row per matrix: its path, role, and both quantities at every probe."""
        return [
            {
                "path": name,
                "role": role,
                "variance": [float(probe[index][0]) for probe in self.measured],
                "relative": [float(probe[index][1]) for probe in self.measured],
            }
            for index, (name, role) in enumerate(zip(self.names, self.roles))
            if role != "vector"
        ]


def head_is_noisiest(noise: list[dict[str, Any]], quantity: str) -> float:
    """Share of the probes at which the head has the largest `quantity` of all matrices."""
    table = np.array([row[quantity] for row in noise])
    heads = [index for index, row in enumerate(noise) if row["role"] == "head"]
    return float(np.isin(table.argmax(0), heads).mean())


def largest_head_update(trainer: Trainer) -> dict[str, float]:
    """Largest |entry| of the head's update, in units of the rate, when normalised by rows or by columns.

    Both are taken of the same gradients, those of a run that is trained with row normalisation.
    """
    config = trainer.config
    params = trainer.initial(config.seed)
    optimizer = trainer.optimizer("row norm only", GRID[1])

    def step(carry: Any, starts: jax.Array) -> tuple[Any, Any]:
        params, state = carry
        gradient = jax.grad(trainer.loss)(params, windows(trainer.train, starts, config))
        updates, state = optimizer.update(gradient, state, params)
        head = {"head": gradient["head"]}
        largest = [
            jnp.abs(normalize_columns(axis).update(head, optax.EmptyState())[0]["head"]["kernel"]).max()
            for axis in (1, 0)
        ]
        return (optax.apply_updates(params, updates), state), largest

    starts = batch_starts(config, trainer.tokens, config.seed, trainer.steps)
    _, (row, column) = trainer.jit(lambda *start: jax.lax.scan(step, start, starts))(
        params, optimizer.init(params)
    )
    return {"row": float(row.max()), "column": float(column.max())}


def run(config: Config) -> Result:
    """Trains the whole grid, probes the gradients and judges the claim."""
    began = time.perf_counter()
    tokens = load_tokens(config, config.vocabulary)
    trainer = Trainer(config, tokens)
    shapes = jax.eval_shape(lambda: transformer.init_params(jax.random.key(0), trainer.model))
    result = Result(
        method=METHOD.name, preset=config.preset, seeds=range(config.seed, config.seed + config.seeds)
    )
    steps = (np.arange(config.evaluations) + 1) * (config.steps // config.evaluations)
    probe = NoiseProbe(trainer, config.evaluations)
    for name in config.optimizers:
        start = time.perf_counter()
        grid = RECIPES[name].grid[: config.rates]
        runs = trainer.grid(name, probe if name == "scale" else None)
        means = np.where(np.isfinite(runs["loss"]).all(1), runs["loss"].mean(1), np.inf)
        best = int(means.argmin())
        memory = memory_report(trainer.optimizer(name, 1.0), shapes)
        result.rows.append(
            {
                "optimizer": name,
                "rate": grid[best],
                **report.mean_and_spread("loss", runs["loss"][best]),
                "grid": " / ".join("diverged" if not np.isfinite(m) else f"{m:.3f}" for m in means),
                "bytes": memory["total_bytes"] / memory["param_bytes"],
                "of_adam": memory["ratio_vs_adam"],
                "seconds": (time.perf_counter() - start) / runs["loss"].size,
            }
        )
        result.curves[name] = {"steps": steps, "loss": runs["curve"][best]}
        result.summary[f"{_key(name)}_loss"] = float(means[best])
        result.summary[f"{_key(name)}_bytes"] = memory["ratio_vs_adam"]
        print(f"{name}: {means[best]:.3f} nats at {grid[best]:g}", file=sys.stderr, flush=True)

    noise = probe.rows()
    result.curves["gradient noise"] = {"steps": steps, "matrices": noise}
    result.summary["head_noisiest_relative"] = head_is_noisiest(noise, "relative")
    result.summary["head_noisiest_absolute"] = head_is_noisiest(noise, "variance")
    large = Trainer(config, load_tokens(config, config.large_vocabulary), config.large_steps)
    largest = largest_head_update(large)
    result.summary["row_largest_head_update"] = largest["row"]
    result.summary["column_largest_head_update"] = largest["column"]
    result.seconds = time.perf_counter() - began
    return result.judged(CHECKS)


def _key(name: str) -> str:
    return name.replace(" ", "_")


def _above(result: Result, other: str) -> float:
    """SCALE's loss minus another's; NaN, which no check accepts, where a preset leaves that one out."""
    return result.summary["scale_loss"] - result.summary.get(f"{_key(other)}_loss", float("nan"))


SPEC = "SCALE spec, section 5"
CHECKS = [
    Check("SCALE's loss minus Adam's (nats)", lambda r: _above(r, "adam"), "<=", 0.03, f"{SPEC} (a)"),
    Check(
        "SCALE's loss minus column normalisation alone (nats)",
        lambda r: _above(r, "column norm only"),
        "<=",
        -0.08,
        f"{SPEC} (b): the head's momentum",
    ),
    Check(
        "SCALE's loss minus the best plain SGD (nats)", lambda r: _above(r, "sgd"), "<=", -0.5, f"{SPEC} (c)"
    ),
    Check(
        "bytes of parameters and state, as a share of Adam's",
        lambda r: r.summary["scale_bytes"],
        "<=",
        0.45,
        f"{SPEC} (d)",
    ),
]
COLUMNS = {
    "optimizer": "optimizer",
    "rate": "best rate",
    "loss": "held-out loss (nats per token)",
    "grid": "loss at each rate, slow to fast",
    "bytes": "bytes of parameters and state / parameters",
    "of_adam": "of Adam's bytes",
    "seconds": "seconds per run",
}
BEST = {"loss": "min"}


def table(result: Result) -> str:
    """The rows as a Markdown table."""
    return report.markdown_table(result.rows, COLUMNS, best=BEST)


def notes(result: Result) -> list[str]:
    """What was measured and is reported without a bound."""
    of = result.summary
    lines = [
        f"{SPEC} (e), reported and not a gate: the head's gradient is the noisiest of all matrices, relative to its "
        f"mean, at {of['head_noisiest_relative']:.0%} of the probes (expected: 80 % or more; this "
        f"{'holds' if of['head_noisiest_relative'] >= 0.8 else 'does not hold here'}); by its variance alone at "
        f"{of['head_noisiest_absolute']:.0%}.",
        f"Largest entry of the head's update, in units of the rate, at the large vocabulary: "
        f"{of['row_largest_head_update']:.1f} under row normalisation, {of['column_largest_head_update']:.1f} under "
        "column normalisation of the same gradients.",
    ]
    ours = next(row["loss"] for row in result.rows if row["optimizer"] == "scale")
    better = [row["optimizer"] for row in result.rows if row["loss"] < ours]
    if better:
        lines.append(f"Lower loss than SCALE: {', '.join(better)}.")
    edges = [row["optimizer"] for row in result.rows if row["rate"] == RECIPES[row["optimizer"]].grid[-1]]
    if edges:
        lines.append(
            f"Best at the fastest rate of its grid, so perhaps better beyond it: {', '.join(edges)}."
        )
    return lines


def plot(result: Result) -> Any:
    """Loss against steps, loss against bytes, and where the gradient is noisy."""
    figure, axes = report.figures.panels(3, size=(5.6, 4.4))
    losses = {row["optimizer"]: row["loss"] for row in result.rows}
    shown = [name for name in losses if name in ("scale", "adam", "column norm only", "muon", "sgd momentum")]
    report.line_chart(
        {name: (result.curves[name]["steps"], result.curves[name]["loss"]) for name in shown},
        xlabel="step",
        ylabel="held-out loss (nats per token)",
        title="Loss while training (band: seeds)",
        axes=axes[0],
    )
    report.scatter_chart(
        {
            row["optimizer"]: (row["bytes"], row["loss"], row.get("loss_spread", 0.0))
            for row in result.rows
            if np.isfinite(row["loss"])
        },
        xlabel="bytes of parameters and state / parameters",
        ylabel="held-out loss (nats per token)",
        title="Final loss against memory",
        axes=axes[1],
    )
    noise = result.curves["gradient noise"]["matrices"]
    medians = {_short(row["path"]): float(np.median(row["relative"])) for row in noise}
    report.bar_chart(
        dict(sorted(medians.items(), key=lambda item: -item[1])),
        xlabel="gradient variance / squared mean",
        title="How noisy each matrix's gradient is (median)",
        highlight=("head",),
        axes=axes[2],
    )
    return figure


def _short(path: str) -> str:
    return (
        path.removesuffix(".kernel").removesuffix(".table").replace("layers.", "").replace("attention.", "")
    )


if __name__ == "__main__":
    from experiments._main import main

    sys.exit(main(sys.modules[__name__]))
