"""Train one language model on text: what `effml train` and the pipeline's first stage do.

Reads a corpus, builds tokenizer, model and optimizer, trains with checkpoints, measures on held-out files and
writes a model folder that `effml.models.load` reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effml._validate import one_of, positive, seed_in_range

if TYPE_CHECKING:
    import optax
    from jax.sharding import Mesh

    from effml.attend.ssa import SSATransformerConfig
    from effml.data import Corpus, Tokenizer
    from effml.nn.transformer import TransformerConfig

__all__ = ["LEARNING_RATES", "TrainConfig", "TrainedModel", "measure", "read_config", "train_model"]

# The best of {1e-3, 3e-3, 1e-2} for each, on the pipeline's model and text: benchmarks/pipeline_rates.py.
LEARNING_RATES = {"adamw": 3e-3, "limuon": 1e-2, "muon": 1e-2, "normuon": 1e-2, "scale": 1e-3}
_EVALUATION_BATCH = 32


@dataclass(frozen=True)
class TrainConfig:
    """What to train, on what, and how.

    Raises:
        ValueError: for an unknown name, a size that is not positive or heads that do not divide the width.

    Example:
        >>> TrainConfig(optimizer="scale", steps=10).rate
        0.001
    """

    data: str = "stdlib"
    """Text to learn from: a folder, a file, or stdlib (this Python's own library sources)."""
    optimizer: str = "scale"
    """adamw, limuon, muon, normuon or scale."""
    learning_rate: float | None = None
    """Peak learning rate; None takes the rate tuned for this optimizer on the default model."""
    weight_decay: float = 0.0
    """Decoupled from the gradient, multiplied by the learning rate."""
    schedule: str = "cosine"
    """constant, cosine, linear or wsd, after a warm-up over a tenth of the steps."""
    clip_norm: float | None = None
    """Largest global gradient norm; None leaves gradients as they are."""
    steps: int = 400
    batch_size: int = 16
    """Sequences in one step."""
    length: int = 128
    """Tokens in one sequence."""
    accumulate: int = 1
    """Micro-batches that one step is cut into, to save activation memory."""
    width: int = 128
    """Features of a token between the blocks; the number of heads divides it."""
    num_layers: int = 4
    num_heads: int = 4
    """Attention heads."""
    num_kv_heads: int | None = None
    """Heads of keys and values, shared by groups of attention heads; None is one for each."""
    mlp_width: int | None = None
    """Hidden size of the SwiGLU block; None is 8/3 of the width, rounded up to a multiple of 8."""
    tied_head: bool = False
    """Use the token embedding as the output head too."""
    attention: str = "full"
    """full: dense causal attention. ssa: trained for full and block-sparse attention at once (`effml.attend.ssa`)."""
    block_size: int | None = None
    """With ssa: keys of a block, from 8; None is 16."""
    num_blocks: int | None = None
    """With ssa: blocks that a token reads in the sparse stream; None is a quarter of those in `length`, at least 2."""
    align_weight: float | None = None
    """With ssa: weight of the streams' distance in the loss; None is 10."""
    compute_dtype: str = "float32"
    """float32 or bfloat16; parameters, norms and logits stay float32."""
    tokenizer: str = "byte"
    """byte, or bpe trained on the training files."""
    vocab_size: int = 1024
    """Size of a bpe vocabulary; a byte vocabulary has 256."""
    max_bytes: int | None = None
    """Reads at most this many bytes of text."""
    evaluate_every: int = 100
    """Steps between two measurements on held-out text; 0 measures at the end only."""
    evaluation_tokens: int = 65_536
    """Held-out tokens that each evaluation covers, the same ones every time."""
    checkpoint_every: int = 100
    """Steps between two checkpoints; 0 keeps one at the end only."""
    mesh: str = ""
    """Devices to spread over, such as data=4,fsdp=2; empty is one device."""
    seed: int = 0

    def __post_init__(self) -> None:
        from effml.optimize import OPTIMIZERS, TWO_POINT

        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("attention", self.attention, ("full", "ssa"))
        one_of("tokenizer", self.tokenizer, ("byte", "bpe"))
        for name in ("steps", "batch_size", "length", "accumulate", "evaluation_tokens", "vocab_size"):
            positive(name, getattr(self, name))
        for name in ("learning_rate", "clip_norm", "max_bytes"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        for name in ("evaluate_every", "checkpoint_every", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must not be negative (0 turns it off)")
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r} must be finite")
        if self.clip_norm is not None and self.optimizer in TWO_POINT:
            raise ValueError(
                f"clip_norm={self.clip_norm!r} does not go with {self.optimizer}, which compares two gradients of a "
                "batch: clipping would change one of them only; leave clip_norm out"
            )
        if self.learning_rate is not None and not math.isfinite(self.learning_rate):
            raise ValueError(f"learning_rate={self.learning_rate!r} must be finite")
        seed_in_range(self.seed)
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} does not split into accumulate={self.accumulate} parts"
            )
        for name in ("block_size", "num_blocks", "align_weight"):
            if self.attention == "full" and getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)!r} needs attention='ssa'")
        self.model(256)

    @property
    def rate(self) -> float:
        """The peak learning rate that is used."""
        return self.learning_rate if self.learning_rate is not None else LEARNING_RATES[self.optimizer]

    def model(self, vocab_size: int) -> TransformerConfig | SSATransformerConfig:
        """The model's configuration for a vocabulary of `vocab_size` tokens."""
        from effml.nn.transformer import TransformerConfig

        sizes = TransformerConfig(
            vocab_size=vocab_size,
            width=self.width,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            mlp_width=-(-self.width * 8 // 24) * 8 if self.mlp_width is None else self.mlp_width,
            max_length=max(2048, self.length),
            tied_head=self.tied_head,
            compute_dtype=self.compute_dtype,  # pyright: ignore[reportArgumentType]
        )
        if self.attention == "full":
            return sizes
        from effml.attend import ssa

        block_size = 16 if self.block_size is None else self.block_size
        quarter = max(2, -(-self.length // max(block_size, 1)) // 4)
        attention = ssa.SSAConfig(
            block_size=block_size,
            num_blocks=quarter if self.num_blocks is None else self.num_blocks,
            align_weight=10.0 if self.align_weight is None else self.align_weight,
        )
        return ssa.SSATransformerConfig(sizes, attention)


@dataclass(frozen=True)
class TrainedModel:
    """A trained model and what its training cost.

    Attributes:
        config: what was trained.
        model: its configuration.
        params: its parameters.
        tokenizer: what turns text into its tokens.
        folder: where it was written.
        history: one dict per step of the whole run: `step`, `loss`, and `evaluation_nats_per_token` where the
            held-out text was measured.
        held_out: `nats_per_token`, `perplexity`, `tokens` and `nats_per_byte`, which compares tokenizers; of an SSA
            model with full attention, and `sparse_nats_per_token` with its blocks alone.
        signal_number: the signal that stopped it before its last step, or None.
        seconds: wall time of this call.
        tokens_per_second: training speed without compilation, evaluations and checkpoints.
        parameter_bytes: size of the parameters.
        optimizer_bytes: size of the optimizer's state.
    """

    config: TrainConfig
    model: TransformerConfig | SSATransformerConfig
    params: Any
    tokenizer: Tokenizer
    folder: Path
    history: list[dict[str, Any]]
    held_out: dict[str, float | int]
    signal_number: int | None
    seconds: float
    tokens_per_second: float
    parameter_bytes: int
    optimizer_bytes: int


@functools.lru_cache(maxsize=32)
def _loss(model: TransformerConfig | SSATransformerConfig) -> Callable[..., Any]:
    from effml.nn.transformer import TransformerConfig, next_token_loss

    if isinstance(model, TransformerConfig):
        return functools.partial(next_token_loss, config=model)
    from effml.attend import ssa

    return functools.partial(ssa.training_loss, config=model)


@functools.lru_cache(maxsize=32)
def _evaluation_loss(
    model: TransformerConfig | SSATransformerConfig, mode: str = "full"
) -> Callable[..., Any]:
    from effml.nn.transformer import TransformerConfig

    if isinstance(model, TransformerConfig):
        return _loss(model)
    from effml.attend import ssa

    return functools.partial(ssa.next_token_loss, config=model, mode=mode)


def _initial(model: TransformerConfig | SSATransformerConfig) -> Callable[..., Any]:
    from effml.nn.transformer import TransformerConfig, init_params

    if isinstance(model, TransformerConfig):
        return functools.partial(init_params, config=model, scanned=False)
    from effml.attend import ssa

    return functools.partial(ssa.init_params, config=model, scanned=False)


@functools.lru_cache(maxsize=32)
def _sharded_loss(model: TransformerConfig | SSATransformerConfig, mesh: Mesh) -> Callable[..., Any]:
    """The same loss; each layer's weights are gathered where they are used, and their gradients are not."""
    from effml import train
    from effml.nn.transformer import TransformerConfig, dense_linear

    dtype = (model if isinstance(model, TransformerConfig) else model.model).compute_dtype
    return train.fsdp_loss(_loss(model), mesh, linear=dense_linear, dtype=dtype)


@functools.lru_cache(maxsize=32)
def _optimizer(
    name: str, rate: float, schedule: str, steps: int, weight_decay: float, mesh: Mesh | None = None
) -> optax.GradientTransformationExtraArgs:
    # Cached, as `_loss` is, because a step compiled for one optimizer object is found again by its identity.
    from effml import train
    from effml.optimize import Distribution, make_optimizer

    options: dict[str, Any] = {}
    if name in ("limuon", "normuon") and mesh is not None and mesh.shape["fsdp"] > 1:
        spread = ("data",) if mesh.shape["data"] > 1 else ()
        options["distribute"] = Distribution(mesh, "fsdp", spread=spread)
    return make_optimizer(
        name, learning_rate=train.schedule(schedule, rate, steps), weight_decay=weight_decay, **options
    )


def train_model(
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    corpus: Corpus | None = None,
    trackers: Sequence[Any] = (),
) -> TrainedModel:
    """Trains a model and leaves it in `folder`.

    Writes `train.json` (the configuration), `metrics.jsonl` (one object per logged step), `checkpoints/` and, at the
    end, `model/`, which `effml.models.load` reads. In a job of several processes (`effml.train.initialize_distributed`)
    every process calls this with the same arguments and a folder that all of them see; the first one writes.

    Args:
        config: what to train.
        folder: where to write; made if absent.
        resume: go on from the last checkpoint in `folder`, exactly as if the run had not been stopped.
        corpus: text that is already loaded; None loads `config.data`.
        trackers: further metric writers, called with (step, metrics).

    Returns:
        The trained model with its history, its held-out loss and its cost.

    Raises:
        ValueError: for unusable text, a folder that already holds a run (without `resume`) or in which one is going
            on, a checkpoint of another model, a mesh that does not fit the devices, or several processes without one.
        effml.train.NonFiniteLoss: when the loss is no longer a number; the last good checkpoint stays.
    """
    with contextlib.ExitStack() as stack:
        return _train_model(config, Path(folder), resume, corpus, trackers, stack)


def _train_model(
    config: TrainConfig,
    folder: Path,
    resume: bool,
    corpus: Corpus | None,
    trackers: Sequence[Any],
    stack: contextlib.ExitStack,
) -> TrainedModel:
    import jax

    from effml import data, models, train, trees
    from effml.nn.transformer import TransformerConfig
    from effml.optimize import TWO_POINT, second_gradient

    first_process = jax.process_index() == 0
    if jax.process_count() > 1 and not config.mesh:
        raise ValueError(
            f"mesh is empty, but the job has {jax.process_count()} processes; "
            f"give a mesh over all their devices, such as data={jax.device_count()}"
        )
    _refuse_other_run(folder, config, resume)
    corpus = corpus or data.load_corpus(config.data, max_bytes=config.max_bytes)
    tokenizer = data.train_tokenizer(config.tokenizer, corpus, config.vocab_size)
    tokens = data.encode_corpus(corpus, "train", tokenizer)
    held_out = data.encode_corpus(corpus, "held_out", tokenizer)[: config.evaluation_tokens + 1]
    model = config.model(tokenizer.vocab_size)
    batches = data.batches(tokens, batch_size=config.batch_size, length=config.length, seed=config.seed)

    mesh = train.make_mesh(train.parse_mesh(config.mesh)) if config.mesh else None
    split = mesh is not None and mesh.shape["fsdp"] > 1
    loss = _sharded_loss(model, mesh) if split else _loss(model)
    optimizer = _optimizer(
        config.optimizer, config.rate, config.schedule, config.steps, config.weight_decay, mesh
    )
    step = train.make_step(
        loss,
        optimizer,
        accumulate=config.accumulate,
        clip_norm=config.clip_norm,
        mesh=mesh,
        extra_args=second_gradient if config.optimizer in TWO_POINT else None,
    )
    state = train.init_state(jax.random.key(config.seed), _initial(model), optimizer, mesh=mesh)
    train.sync_processes("the folder is looked at")
    if first_process:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(_held(folder))
        _refuse_other_run(folder, config, resume)  # again: a run that began meanwhile may have left something
        _write_json(folder / "train.json", dataclasses.asdict(config))

    evaluation = _evaluation_batches(held_out, config.length, mesh)
    parameter_bytes, optimizer_bytes = trees.byte_count(state.params), trees.byte_count(state.optimizer_state)
    if first_process:
        # The first step compiles for a while: say what has begun.
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        print(
            f"{config.optimizer}: {parameters:,} parameters, {len(tokens):,} tokens of {corpus.source}, "
            f"{config.steps:,} steps of {config.batch_size} x {config.length}; compiling",
            file=sys.stderr,
            flush=True,
        )
    about = {"model": model.to_dict(), "optimizer": config.optimizer, "data": corpus.fingerprint}
    started = time.perf_counter()
    with train.Checkpoints(folder / "checkpoints", metadata=about) as checkpoints:
        result = train.fit(
            step,
            state,
            batches,
            steps=config.steps,
            evaluate=lambda params: measure(params, model, evaluation, mesh),
            evaluate_every=config.evaluate_every,
            checkpoints=checkpoints,
            checkpoint_every=config.checkpoint_every,
            resume=resume,
            writers=[train.JsonLinesWriter(folder / "metrics.jsonl"), *trackers],
            on_progress=train.Progress(config.steps, label=config.optimizer) if first_process else None,
        )
    seconds = time.perf_counter() - started
    params = result.state.params
    scores = dict(measure(params, model, evaluation, mesh))
    text_bytes = len(tokenizer.decode(held_out[1:]).encode("utf-8"))
    scores["nats_per_byte"] = scores["nats_per_token"] * scores["tokens"] / max(text_bytes, 1)
    if jax.process_count() > 1:
        params = train.to_host(params)
    if result.stopped == "finished" and first_process:
        kind = "dense" if isinstance(model, TransformerConfig) else "ssa"
        extra = {"trained_length": config.length}
        models.save(folder / "model", params, model, tokenizer, kind=kind, extra=extra)
    train.sync_processes("the model is written")
    return TrainedModel(
        config=config,
        model=model,
        params=params,
        tokenizer=tokenizer,
        folder=folder,
        history=train.read_json_lines(folder / "metrics.jsonl"),
        held_out=scores,
        signal_number=result.signal_number,
        seconds=seconds,
        tokens_per_second=result.tokens_per_second,
        parameter_bytes=parameter_bytes,
        optimizer_bytes=optimizer_bytes,
    )


def _evaluation_batches(tokens: Any, length: int, mesh: Mesh | None) -> list[dict[str, Any]]:
    """Batches of the held-out text, of which each process keeps the rows that its devices compute."""
    import jax

    from effml import data

    parts = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    rows = -(-_EVALUATION_BATCH // parts) * parts
    share = rows // jax.process_count()
    own = slice(jax.process_index() * share, (jax.process_index() + 1) * share)
    batches = data.evaluation_batches(tokens, batch_size=rows, length=length)
    return [{name: value[own] for name, value in batch.items()} for batch in batches]


def measure(
    params: Any,
    model: TransformerConfig | SSATransformerConfig,
    batches: Sequence[Mapping[str, Any]],
    mesh: Mesh | None = None,
) -> dict[str, float | int]:
    """Mean loss of a model over batches, weighted by tokens.

    Args:
        params: parameters of `effml.nn.transformer` or `effml.attend.ssa`.
        model: their configuration.
        batches: dicts with `tokens` int32[batch, length + 1] and `weights` float32[batch, length]; with several
            processes the rows of this one.
        mesh: the mesh that the parameters are on; None is one device.

    Returns:
        `nats_per_token`, `perplexity` and `tokens`; of an SSA model with full attention, and `sparse_nats_per_token`.
    """
    from effml import train
    from effml.nn.transformer import TransformerConfig

    scores = train.evaluate(train.make_eval_step(_evaluation_loss(model), mesh=mesh), params, batches)
    if isinstance(model, TransformerConfig):
        return scores
    sparse = train.make_eval_step(_evaluation_loss(model, "sparse"), mesh=mesh)
    return {**scores, "sparse_nats_per_token": train.evaluate(sparse, params, batches)["nats_per_token"]}


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Keeps a folder for one run at a time. The hold ends with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows has no such locks
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"out={str(folder)!r} is in use: another run is going on in it; wait for it, or give another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)


def _refuse_other_run(folder: Path, config: TrainConfig, resume: bool) -> None:
    path = folder / "train.json"
    if not path.exists():
        if resume:
            raise ValueError(f"out={str(folder)!r} holds no run to resume (there is no train.json)")
        foreign = [name for name in ("checkpoints", "metrics.jsonl", "model") if (folder / name).exists()]
        if foreign:
            raise ValueError(
                f"out={str(folder)!r} holds {', '.join(foreign)} of something else (there is no train.json); "
                "give another folder"
            )
        return
    if not resume:
        if not any((folder / name).exists() for name in ("checkpoints", "metrics.jsonl", "model")):
            return  # stopped before its first step: nothing is lost by beginning again
        raise ValueError(
            f"out={str(folder)!r} already holds a run: give --resume to go on with it, or another folder"
        )
    before = _read_json(path)
    now = json.loads(json.dumps(dataclasses.asdict(config)))
    # What a run of an earlier version did not know of, it did as it is done by default.
    before = {**json.loads(json.dumps(dataclasses.asdict(TrainConfig()))), **before}
    changed = sorted(name for name in now if before[name] != now[name])
    if changed:
        details = ", ".join(f"{name} was {before.get(name)!r}, now {now[name]!r}" for name in changed)
        raise ValueError(f"out={str(folder)!r} holds another run ({details}); resume it with its own options")


def read_config(folder: Path) -> TrainConfig:
    """The configuration of the run in `folder`.

    Raises:
        ValueError: if the folder holds no run, or one whose options this version does not know.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "train.json").write_text(json.dumps(dataclasses.asdict(TrainConfig(steps=7))))
        >>> read_config(folder).steps
        7
    """
    path = Path(folder) / "train.json"
    if not path.exists():
        raise ValueError(f"out={str(folder)!r} holds no run to resume (there is no train.json)")
    values = _read_json(path)
    unknown = sorted(set(values) - {field.name for field in dataclasses.fields(TrainConfig)})
    if unknown:
        raise ValueError(f"{path} has options that this version does not know: {', '.join(unknown)}")
    return TrainConfig(**values)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); give another folder") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not the description of a run; give another folder")
    return values


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
