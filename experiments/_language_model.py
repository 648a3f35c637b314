"""What the experiments on a small language model share: its sizes, its text, and one way to train it.

A Llama-style model (width 64, two layers) learns 1.1M tokens of the Python standard library's own source.
Every optimizer is a `Recipe`: how it is made, and the peak learning rates it is tuned over. `Trainer.grid`
trains all rates and seeds of one recipe in one compiled program; model, data order, warm-up and cosine
schedule are the same for all. Vectors are on Adam at `VECTOR_RATE` everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from effml import data, trees
from effml.nn import transformer
from effml.optimize import make_optimizer, scale
from effml.train import schedule

GRID = (1e-3, 3e-3, 1e-2)
VECTOR_RATE = 3e-3


@dataclass(frozen=True)
class LanguageModelConfig:
    """Sizes of an experiment; the defaults are the `cpu` preset."""

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
    rates: int = 3

    def model(self, vocabulary: int | None = None) -> transformer.TransformerConfig:
        """The model under test: untied head, so that the rules for head and embedding stay apart."""
        return transformer.TransformerConfig(
            vocab_size=vocabulary or self.vocabulary,
            width=self.width,
            num_layers=self.layers,
            num_heads=self.heads,
            mlp_width=self.mlp_width,
            max_length=self.length,
            tied_head=False,
        )


SMOKE: dict[str, Any] = {
    "preset": "smoke",
    "seeds": 1,
    "steps": 8,
    "batch": 4,
    "length": 8,
    "width": 16,
    "layers": 1,
    "mlp_width": 32,
    "heads": 2,
    "vocabulary": 256,
    "tokens": 20_000,
    "evaluations": 2,
    "rates": 2,
}
GPU: dict[str, Any] = {
    "preset": "gpu",
    "steps": 1000,
    "batch": 64,
    "length": 128,
    "width": 256,
    "layers": 4,
    "mlp_width": 704,
    "heads": 4,
    "tokens": 4_000_000,
}


class Recipe(NamedTuple):
    """How one optimizer is made and which peak learning rates it is tuned over.

    make(rate, vector_rate) takes schedules. `vmapped` = the runs may go in parallel on an accelerator; under
    vmap a condition runs both branches, which for GaLore means an SVD at every step. `two_point` = the update
    takes a second gradient of the same batch, at the parameters of the step before, as `prev_params_grad`.
    """

    make: Callable[[Any, Any], optax.GradientTransformation]
    grid: tuple[float, ...] = GRID
    vmapped: bool = True
    two_point: bool = False


def with_vectors(weights: optax.GradientTransformation, vector_rate: Any) -> optax.GradientTransformation:
    """`weights` for matrices, embedding and head; Adam for vectors."""
    return optax.partition(
        {"weights": weights, "vector": optax.adam(vector_rate)},
        lambda params: jax.tree.map(
            lambda role: "vector" if role == "vector" else "weights", trees.parameter_roles(params)
        ),
    )


def _sgd(momentum: float | None, rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    return with_vectors(optax.sgd(rate, momentum=momentum), vector_rate)


def _scale(rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    return scale(rate, adam_learning_rate=vector_rate)


def _adam(rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    return with_vectors(optax.adam(rate, b1=0.9, b2=0.95), vector_rate)


def _muon(rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    return make_optimizer("muon", learning_rate=rate, vector_learning_rate=vector_rate)


def _adafactor(rate: Any, vector_rate: Any) -> optax.GradientTransformation:
    weights = optax.adafactor(rate, min_dim_size_to_factor=8, multiply_by_parameter_scale=False)
    return with_vectors(weights, vector_rate)


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


def load_tokens(config: LanguageModelConfig, vocabulary: int) -> Tokens:
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


def batch_starts(config: LanguageModelConfig, tokens: Tokens, seed: int, steps: int) -> np.ndarray:
    """int32[steps, batch]: where each window of each batch begins; one order per seed for all optimizers."""
    return np.random.default_rng(seed).integers(
        0, len(tokens.train) - config.length, (steps, config.batch), dtype=np.int32
    )


def windows(train: jax.Array, starts: jax.Array, config: LanguageModelConfig) -> jax.Array:
    """int32[batch, length + 1] tokens."""
    return train[starts[:, None] + jnp.arange(config.length + 1)]


def schedules(rate: Any, steps: int) -> tuple[Any, Any]:
    """The schedules of a run: the recipe's own with the peak `rate`, and that of the vectors."""
    shape = schedule("cosine", 1.0, steps, warmup_fraction=0.1, final_fraction=0.1)
    return (lambda step: rate * shape(step)), (lambda step: VECTOR_RATE * shape(step))


class Carry(NamedTuple):
    """A run between two steps; `previous` are the parameters one step before, kept where a recipe needs them."""

    params: Any
    state: Any
    previous: Any = ()


class Trainer:
    """Trains all runs of an optimizer in one compiled program.

    Args:
        config: the experiment's sizes.
        tokens: the corpus.
        recipes: the optimizers by name.
        steps: length of the runs, `config.steps` by default.
        vmapped: runs side by side (quicker on an accelerator) instead of one after another (quicker on two
            cores: 1.4 against 1.7 CPU seconds for ten steps of nine runs); None = by the device.
    """

    def __init__(
        self,
        config: LanguageModelConfig,
        tokens: Tokens,
        recipes: Mapping[str, Recipe] = RECIPES,
        steps: int | None = None,
        vmapped: bool | None = None,
    ):
        self.config, self.tokens, self.recipes = config, tokens, recipes
        self.steps = steps or config.steps
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
        return self.recipes[name].make(*schedules(rate, self.steps))

    def start(self, name: str, params: Any, rate: Any) -> Carry:
        """Where a run begins; the first step has no step before it, so both its gradients are the same."""
        # A copy: one buffer can't be given away twice.
        previous = jax.tree.map(jnp.copy, params) if self.recipes[name].two_point else ()
        return Carry(params, self.optimizer(name, rate).init(params), previous)

    def advance(self, name: str) -> Callable[..., Carry]:
        """advance(carry, rate, starts int32[steps, batch]) -> carry, for a single run."""
        two_point = self.recipes[name].two_point

        def run(carry: Carry, rate: jax.Array, starts: jax.Array) -> Carry:
            optimizer = optax.with_extra_args_support(self.optimizer(name, rate))

            def step(carry: Carry, starts: jax.Array) -> tuple[Carry, None]:
                batch = windows(self.train, starts, self.config)
                gradient = jax.grad(self.loss)(carry.params, batch)
                second = {"prev_params_grad": jax.grad(self.loss)(carry.previous, batch)} if two_point else {}
                updates, state = optimizer.update(gradient, carry.state, carry.params, **second)
                moved = optax.apply_updates(carry.params, updates)
                return Carry(moved, state, carry.params if two_point else ()), None

            return jax.lax.scan(step, carry, starts)[0]

        return run

    def grid(self, name: str, watch: Callable[[Any], None] | None = None) -> dict[str, np.ndarray]:
        """All runs of one optimizer: `loss` [rates, seeds] and `curve` [rates, seeds, evaluations].

        The curve is measured on every sixteenth held-out batch, the final loss on all of them. `watch` is
        called at every evaluation with the parameters of the run at the second rate with the first seed.
        """
        config, recipe = self.config, self.recipes[name]
        grid, seeds = recipe.grid[: config.rates], range(config.seed, config.seed + config.seeds)
        pairs = [(rate, seed) for rate in grid for seed in seeds]
        watched = pairs.index((grid[1], config.seed))
        rates = jnp.array([rate for rate, _ in pairs], jnp.float32)
        starts = np.stack([batch_starts(config, self.tokens, seed, self.steps) for _, seed in pairs])
        first = {seed: self.initial(seed) for seed in seeds}
        params = jax.tree.map(lambda *leaves: np.stack(leaves), *(first[seed] for _, seed in pairs))
        carry = self.jit(jax.vmap(functools.partial(self.start, name)))(params, rates)
        one = self.advance(name)
        side_by_side = self.vmapped and recipe.vmapped
        every = jax.vmap(one) if side_by_side else lambda *runs: jax.lax.map(lambda run: one(*run), runs)
        advance = self.jit(every, donate_argnums=0)
        held_out, weights = self.tokens.held_out, self.tokens.weights
        # The first batches come from other files than the last ones, so the curve takes them evenly.
        part = slice(0, None, 16 if len(held_out) > 16 else 1)
        curve = []
        for chunk in np.split(starts, config.evaluations, axis=1):
            carry = advance(carry, rates, chunk)
            curve.append(self.evaluate(carry.params, held_out[part], weights[part]))
            if watch is not None:
                watch(jax.tree.map(lambda leaf: np.array(leaf)[watched], carry.params))
        loss = np.asarray(self.evaluate(carry.params, held_out, weights))
        shape = (len(grid), config.seeds)
        return {"loss": np.float64(loss).reshape(shape), "curve": np.stack(curve, -1).reshape(*shape, -1)}
