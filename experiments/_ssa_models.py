"""The models of the SSA experiment: one transformer, trained in several ways on text or on associative recall.

Every way (`Arm`) of a task has the same initial weights, the same batches in the same order, the same optimizer and the
same gates. Finished runs are kept below `~/.cache/effml/ssa-experiment`, so that a table that was stopped goes on with
the next run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from effml import data
from effml.attend import ssa
from effml.nn import transformer
from effml.train import schedule

CHUNK = 25  # steps of one compiled call


class Stage(NamedTuple):
    """A part of the training on recall."""

    length: int
    pairs: int
    batch: int
    steps: int


@dataclass(frozen=True)
class Task:
    """Sizes of the model, of its text or recall sequences, and of its training."""

    name: str = "text"
    steps: int = 500
    batch: int = 8
    length: int = 128
    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    mlp_width: int = 176
    block_size: int = 8
    num_blocks: int = 4
    rate: float = 3e-3
    text_bytes: int = 15_000_000
    pairs: int = 0
    """Of associative recall; 0 is text."""
    stages: tuple[Stage, ...] = ()
    """Of associative recall, short sequences first; `steps` and `batch` are then not read."""
    initializer_std: float | None = None
    """None makes activations as large as 0.02 does at the paper's width of 2,048."""

    @property
    def total_steps(self) -> int:
        """Of the whole training."""
        return sum(stage.steps for stage in self.stages) or self.steps

    def config(self) -> ssa.SSATransformerConfig:
        """The model."""
        model = transformer.TransformerConfig(
            vocab_size=256,
            width=self.width,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            mlp_width=self.mlp_width,
            max_length=4 * self.length,
            # The alignment's weight is tied to the size of activations.
            initializer_std=self.initializer_std or 0.02 * (2048 / self.width) ** 0.5,
        )
        return ssa.SSATransformerConfig(model, ssa.SSAConfig(self.block_size, self.num_blocks))


class Arm(NamedTuple):
    """A way to train: which streams the loss sees, and what pulls them together."""

    title: str
    mode: str  # "full", "sparse", or "both" (a coin at every step)
    align_weight: float = 0.0
    alignment: str = "two_sided"


ARMS = {
    "ssa": Arm("SSA (both streams, aligned)", "both", 10.0),
    "mix": Arm("both streams, not aligned", "both"),
    "sparse": Arm("sparse alone (as MoBA)", "sparse"),
    "full": Arm("full alone", "full"),
}
ABLATIONS = {
    "alpha_1": Arm("SSA, alpha 1", "both", 1.0),
    "full_only": Arm("SSA, the full stream moves alone", "both", 10.0, "full_only"),
    "sparse_only": Arm("SSA, the sparse stream moves alone", "both", 10.0, "sparse_only"),
    "joint": Arm("SSA without stop-gradients", "both", 10.0, "joint"),
}


class Text(NamedTuple):
    """Bytes of source text: uint8[n] each."""

    train: np.ndarray
    held_out: np.ndarray


@functools.lru_cache(maxsize=2)
def load_text(text_bytes: int) -> Text:
    """The Python standard library's source as bytes; whole files are held out."""
    corpus = data.load_corpus("stdlib", max_bytes=text_bytes)
    tokenizer = data.ByteTokenizer()
    sides = [
        np.asarray(data.encode_corpus(corpus, side, tokenizer), np.uint8) for side in ("train", "held_out")
    ]
    return Text(*sides)


def text_windows(side: np.ndarray, starts: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """`tokens` int32[..., length + 1] beginning at `starts`, every prediction of weight 1."""
    tokens = side[starts[..., None] + np.arange(length + 1)].astype(np.int32)
    return {"tokens": tokens, "weights": np.ones((*starts.shape, length), np.float32)}


def recall_windows(
    rng: np.random.Generator, shape: tuple[int, ...], length: int, pairs: int, dense: float | int = 0
) -> dict[str, np.ndarray]:
    """Associative recall: `pairs` of a key and a value, then each key once more among fillers.

    Keys are 1 to 127, no two alike in a sequence, values 128 to 255. The token behind a repeated key is its value: that
    prediction has weight 1, all others 0.

    Args:
        rng: source of the sequences.
        shape: of the batches.
        length: of the predictions.
        pairs: of keys and values.
        dense: share of the sequences that have no fillers: every place asks for a key drawn at random.
    """
    count = int(np.prod(shape))
    slots = (length + 1) // 2 - pairs
    if slots < pairs:
        raise ValueError(f"length={length} is too short for pairs={pairs}")
    keys = np.argsort(rng.random((count, 127)), axis=1)[:, :pairs] + 1
    values = rng.integers(128, 256, (count, pairs))
    # Each key at one place, drawn without repetition; -1 is a filler.
    asked = np.full((count, slots), -1)
    row = np.arange(count)[:, None]
    asked[row, np.argsort(rng.random((count, slots)), axis=1)[:, :pairs]] = np.arange(pairs)
    filled = rng.random((count, 1)) < dense
    asked = np.where(filled, rng.integers(0, pairs, (count, slots)), asked)
    tokens = np.zeros((count, length + 1), np.int32)
    weights = np.zeros((count, length), np.float32)
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    begin, end = 2 * pairs, 2 * (pairs + slots)
    tokens[:, begin:end:2] = np.where(asked < 0, 0, keys[row, asked])
    tokens[:, begin + 1 : end : 2] = np.where(asked < 0, 0, values[row, asked])
    weights[:, begin:end:2] = asked >= 0
    return {
        "tokens": tokens.reshape(*shape, -1),
        "weights": weights.reshape(*shape, -1),
    }


def training_batches(task: Task, seed: int) -> Any:
    """Chunks of batches, `tokens` int32[steps, batch, length + 1], the same for every arm."""
    rng = np.random.default_rng(seed)
    for length, pairs, batch, steps in task.stages or [
        Stage(task.length, task.pairs, task.batch, task.steps)
    ]:
        for begin in range(0, steps, CHUNK):
            shape = (min(CHUNK, steps - begin), batch)
            if pairs:
                # Many questions in a sequence make the way to answer them found soon.
                yield recall_windows(rng, shape, length, pairs, dense=0.5)
            else:
                side = load_text(task.text_bytes).train
                yield text_windows(side, rng.integers(0, len(side) - length - 1, shape), length)


class Programs:
    """The compiled programs of one model; equal models share them.

    Args:
        config: of the model.
        quick: compile quickly to poor code, for sizes where compiling is all the work.
    """

    def __init__(self, config: ssa.SSATransformerConfig, quick: bool = False):
        self.config = config
        options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        self._jit = functools.partial(jax.jit, compiler_options=options if quick else None)
        self.init = self._jit(lambda seed: ssa.init_params(jax.random.key(seed), config))
        self._losses = self._jit(self._loss_of_every_token, static_argnums=(2, 3))
        self.gaps = self._jit(self._gaps, static_argnums=2)
        self._advance: dict[Any, Any] = {}

    def advance(self, arm: Arm, optimizer: optax.GradientTransformation) -> Any:
        """`(params, state), batches, keys -> (params, state)` after the steps of a chunk."""
        if (arm, optimizer) not in self._advance:
            loss = self._loss_of(arm)

            def step(carry: Any, inputs: Any) -> tuple[Any, Any]:
                params, state = carry
                gradient = jax.grad(loss)(params, *inputs)
                updates, state = optimizer.update(gradient, state, params)
                return (optax.apply_updates(params, updates), state), None

            run = lambda carry, batches, keys: jax.lax.scan(step, carry, (batches, keys))[0]
            self._advance[arm, optimizer] = self._jit(run, donate_argnums=0)
        return self._advance[arm, optimizer]

    def _loss_of(self, arm: Arm) -> Any:
        """`loss(params, batch, key)`; arms that train one stream compute that one alone."""
        if arm.mode != "both":
            return lambda params, batch, key: ssa.next_token_loss(params, batch, self.config, mode=arm.mode)[
                0
            ]
        changed = dataclasses.replace(
            self.config.attention, align_weight=arm.align_weight, alignment=arm.alignment
        )
        config = dataclasses.replace(self.config, attention=changed)
        return lambda params, batch, key: ssa.training_loss(params, batch, config, step_key=key)[0]

    def _loss_of_every_token(self, params: Any, tokens: Any, mode: str, num_blocks: int) -> Any:
        logits = ssa.forward(params, tokens[:, :-1], self.config, mode=mode, num_blocks=num_blocks).logits
        targets = tokens[:, 1:]
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - chosen, (logits.argmax(-1) == targets).astype(jnp.float32)

    def losses(self, params: Any, batches: Any, mode: str, num_blocks: int | None = None) -> Any:
        """Nats and hits of every prediction, float32[windows, length] each.

        Args:
            params: of the model.
            batches: int32[count, batch, length + 1].
            mode: "full" or "sparse".
            num_blocks: of the sparse mode; None is the model's own.
        """
        budget = self.config.attention.num_blocks if num_blocks is None else num_blocks
        found = [self._losses(params, tokens, mode, budget) for tokens in batches]
        return tuple(np.concatenate([np.asarray(pair[i]) for pair in found]) for i in (0, 1))

    def _gaps(self, params: Any, tokens: Any, first: int) -> dict[str, Any]:
        """Of every layer in full mode, over positions from `first` on: float32[layers] each.

        Dropped mass and entropy are means; the gap is |o_full - o_sparse| over |o_full|, both root mean squares.
        """
        config = self.config.attention

        def attention(inputs: Any) -> Any:
            gate = jax.nn.sigmoid(inputs.hidden @ inputs.params["gate"]["kernel"])
            rows, scale = (inputs.query, inputs.key), inputs.scale
            streams: Any  # in training both of them are there
            output, _, streams = ssa.ssa_attention(
                *rows, inputs.value, gate, config, mode="full", train=True, scale=scale
            )
            far = jnp.square(output - streams.sparse)[:, first:].mean()
            lost = ssa.dropped_mass(*rows, streams.indices, block_size=config.block_size, scale=scale)
            return output, {
                "dropped": lost[:, first:].mean(),
                "entropy": ssa.attention_entropy(*rows, scale=scale)[:, first:].mean(),
                "gap": jnp.sqrt(far / jnp.square(output[:, first:]).mean()),
            }

        info = transformer.forward(params, tokens[:, :-1], self.config.model, attention=attention).info
        return jax.tree.map(lambda *layers: jnp.stack(layers), *info)

    def gradient_ratio(self, params: Any, batch: Any, arm: Arm) -> float:
        """Norm of the alignment's gradient with its weight over that of the cross entropy's, mean of both modes."""
        changed = dataclasses.replace(
            self.config.attention, align_weight=arm.align_weight, alignment=arm.alignment
        )

        def parts(params: Any, mode: Any) -> tuple[Any, Any]:
            output = ssa.forward(params, batch["tokens"][:, :-1], self.config, mode=mode, train=True)
            loss = transformer.weighted_loss(output.logits, batch["tokens"][:, 1:], batch["weights"])[0]
            return loss, ssa.ssa_loss(jnp.zeros(()), output.info, changed)

        def ratio(params: Any, mode: Any) -> Any:
            first, second = (jax.grad(lambda p, i=i: parts(p, mode)[i])(params) for i in (0, 1))
            return optax.global_norm(second) / optax.global_norm(first)

        compiled = self._jit(ratio)
        return float(np.mean([compiled(params, jnp.array(mode)) for mode in (False, True)]))


@functools.lru_cache(maxsize=4)
def programs(config: ssa.SSATransformerConfig, quick: bool = False) -> Programs:
    """The programs of a model."""
    return Programs(config, quick)


@functools.lru_cache(maxsize=8)
def _optimizer(rate: float, steps: int) -> optax.GradientTransformation:
    shape = schedule("cosine", rate, steps, warmup_fraction=0.1, final_fraction=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(shape, b2=0.95, weight_decay=0.01))


def train_arm(of: Programs, arm: Arm, task: Task, seed: int) -> Any:
    """Trained parameters."""
    optimizer = _optimizer(task.rate, task.total_steps)
    params = of.init(seed)
    carry = (params, jax.jit(optimizer.init)(params))
    keys = jax.random.split(jax.random.key(seed + 1000), task.total_steps)
    advance = of.advance(arm, optimizer)
    first = 0
    for batches in training_batches(task, seed):
        end = first + len(batches["tokens"])
        carry = advance(carry, batches, keys[first:end])
        first = end
    return carry[0]


def kept(name: str, arm: str, task: Task, seed: int) -> Path:
    """Where the record of a finished run lies."""
    cache = Path(os.environ.get("EFFML_CACHE") or Path.home() / ".cache/effml") / "ssa-experiment"
    about = json.dumps([dataclasses.asdict(task), *{**ARMS, **ABLATIONS}[arm]])
    digest = hashlib.blake2b(about.encode(), digest_size=6).hexdigest()
    return cache / f"{name}-{arm}-{seed}-{digest}.json"


def record(path: Path, content: dict[str, Any]) -> None:
    """Writes a record; it appears when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)
