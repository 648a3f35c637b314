"""A whole language model, block by block: settings, plan, and the work, which survives being killed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from effml._validate import count, one_of, positive, real
from effml.nn import transformer
from effml.nn.hub import _files
from effml.nn.transformer import TransformerConfig, dense_linear
from effml.quantize._calibrate import check_tokens
from effml.quantize._host import on_host
from effml.quantize._model import KEEP_DTYPES
from effml.quantize._plan import _check_fields
from effml.quantize._work import WorkFolder, digest
from effml.quantize.nanoquant._factorise import SCHEDULES, BinaryFactors, dbf_admm, dual_svid, lb_admm
from effml.quantize.nanoquant._linear import BinaryTensor, open_linear, open_signs
from effml.quantize.nanoquant._model import BinaryConfig, check_dense_params, kernel_shapes
from effml.quantize.nanoquant._rank import bits_per_weight, nanoquant_rank, random_key
from effml.quantize.nanoquant._reconstruct import BlockTuning, reconstruct_block
from effml.quantize.nanoquant._statistics import collect_diag_stats, shrink
from effml.quantize.nanoquant._tune_scales import tune_scales_kl
from effml.trees import path_name

__all__ = [
    "INITIALISERS",
    "NanoQuantConfig",
    "NanoQuantPlan",
    "NanoQuantRow",
    "QuantizedModel",
    "plan",
    "quantize_lm",
]

INITIALISERS = ("lb_admm", "dual_svid", "dbf_admm")
Progress = Callable[[str, int, int, str], None]
_MOST_TOKENS = 4096  # at a time, where nothing is learned


@dataclass(frozen=True)
class NanoQuantConfig:
    """Settings; the defaults are the paper's, for models of billions of parameters.

    Attributes:
        bits: per weight of the factorised kernels, signs and scales of 16 bits together. Never exceeded by more than
            2%: what can't be reached is an error.
        multiple: of every rank: 32 fills packed words, 8 wastes less of a small kernel's rate.
        min_rank: the least rank; None is `multiple`.
        allow_over: accept kernels so small that the least rank exceeds the rate; what it came to is reported.
        gamma: share of the mean in the second moments.
        init: "lb_admm", "dual_svid" or "dbf_admm".
        iterations: of the initialiser; None is its own number, 400 or 260.
        schedule: of lb_admm's penalty.
        dense_epochs: of tuning what is still dense, before every factorisation; 0 leaves it out.
        factor_epochs: of tuning the factors of each linear.
        scale_epochs: of tuning all scales, when all blocks are done.
        dense_rate: of learning; smaller models with less text want about ten times the paper's rates.
        factor_rate: likewise.
        scale_rate: likewise.
        dense_batch: windows of one step.
        factor_batch: likewise.
        scale_batch: likewise.
        keep_dtype: of embedding, positions and head: "float32" or "bfloat16".

    Raises:
        ValueError: for values out of range.
        TypeError: for counts that are no integers, or rates that are no numbers.

    Example:
        >>> NanoQuantConfig(bits=0.8, multiple=8).init
        'lb_admm'
    """

    bits: float | int | Any = 1.0
    multiple: int = 32
    min_rank: int | None = None
    allow_over: bool = False
    gamma: float | int | Any = 0.4
    init: str = "lb_admm"
    iterations: int | None = None
    schedule: str = "linear"
    dense_epochs: int = 8
    factor_epochs: int = 8
    scale_epochs: int = 8
    dense_rate: float | int | Any = 1e-4
    factor_rate: float | int | Any = 1e-5
    scale_rate: float | int | Any = 1e-5
    dense_batch: int = 4
    factor_batch: int = 1
    scale_batch: int = 1
    keep_dtype: str = "float32"

    def __post_init__(self) -> None:
        if not 0 < real("bits", self.bits) < math.inf:
            raise ValueError(f"bits={self.bits!r} must be finite and above 0")
        one_of("init", self.init, INITIALISERS)
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("keep_dtype", self.keep_dtype, KEEP_DTYPES)
        if not 0 <= real("gamma", self.gamma) <= 1:
            raise ValueError(f"gamma={self.gamma!r} must be from 0 to 1")
        for name in ("multiple", "dense_batch", "factor_batch", "scale_batch"):
            count(name, getattr(self, name))
        for name in ("dense_epochs", "factor_epochs", "scale_epochs"):
            if getattr(self, name) != 0 or isinstance(getattr(self, name), bool):
                count(name, getattr(self, name))
        for name in ("min_rank", "iterations"):
            if getattr(self, name) is not None:
                count(name, getattr(self, name))
        for name in ("dense_rate", "factor_rate", "scale_rate"):
            if not math.isfinite(positive(name, real(name, getattr(self, name)))):
                raise ValueError(f"{name}={getattr(self, name)!r} must be finite")


@dataclass(frozen=True)
class NanoQuantRow:
    """One kernel of a plan.

    Attributes:
        layer: its index.
        name: such as "mlp.down".
        inputs: of the kernel.
        outputs: of the kernel.
        rank: of its factors.
        bits_per_weight: what that comes to.
        bytes: in a file.
    """

    layer: int
    name: str
    inputs: int
    outputs: int
    rank: int
    bits_per_weight: float
    bytes: int


@dataclass(frozen=True)
class NanoQuantPlan:
    """Everything `quantize_lm` will do to a model, and the bytes that will come of it.

    Attributes:
        settings: a `NanoQuantConfig`.
        rows: one `NanoQuantRow` for each kernel, in the order of the work.
        kept_bytes: of everything that is not factorised.

    Example:
        >>> one = plan(TransformerConfig(256, 32, 2, 4, 64), NanoQuantConfig(bits=2, multiple=8))
        >>> one.bits, one.rows[0].rank, one.packed_bytes, NanoQuantPlan.from_dict(one.to_dict()) == one
        ('2', 16, 4928, True)
    """

    settings: NanoQuantConfig
    rows: tuple[NanoQuantRow, ...]
    kept_bytes: int
    method: str = "nanoquant"

    @property
    def bits(self) -> str:
        """Per weight, as asked for."""
        return f"{self.settings.bits:g}"

    @property
    def ranks(self) -> dict[str, int]:
        """By name; those of all blocks are alike."""
        return {row.name: row.rank for row in self.rows}

    @property
    def packed_bytes(self) -> int:
        """Of all factorised kernels: signs and scales."""
        return sum(row.bytes for row in self.rows)

    @property
    def realised_bits(self) -> float:
        """Per weight of all factorised kernels together.

        Example:
            >>> plan(TransformerConfig(256, 32, 2, 4, 64), NanoQuantConfig(bits=2, multiple=8)).realised_bits
            1.925
        """
        return 8 * self.packed_bytes / sum(row.inputs * row.outputs for row in self.rows)

    @property
    def needs_calibration(self) -> bool:
        """Always: second moments and tuning need text."""
        return True

    def summary(self) -> list[dict[str, Any]]:
        """One row for each kernel's name, over all layers.

        Example:
            >>> plan(TransformerConfig(256, 32, 2, 4, 64), NanoQuantConfig(bits=2, multiple=8)).summary()[0]["rank"]
            16
        """
        table = []
        for name in self.ranks:
            rows = [row for row in self.rows if row.name == name]
            table.append(
                {
                    "kernel": name,
                    "layers": len(rows),
                    "shape": f"{rows[0].inputs} x {rows[0].outputs}",
                    "rank": rows[0].rank,
                    "bits per weight": rows[0].bits_per_weight,
                    "MB": sum(row.bytes for row in rows) / 1e6,
                }
            )
        table.append({"kernel": "embedding, head, norms", "MB": self.kept_bytes / 1e6})
        table.append(
            {
                "kernel": "all",
                "bits per weight": self.realised_bits,
                "MB": (self.packed_bytes + self.kept_bytes) / 1e6,
            }
        )
        return table

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        content = dataclasses.asdict(self)
        return {**content, "rows": list(content["rows"])}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> NanoQuantPlan:
        """What `to_dict` gave.

        Raises:
            ValueError: for fields that are missing or unknown.
            TypeError: for fields of another type.

        Example:
            >>> NanoQuantPlan.from_dict({"bits": 1})
            Traceback (most recent call last):
            ...
            ValueError: plan field='bits' is not known (allowed: kept_bytes, method, rows, settings)
        """
        _check_fields("plan", content, cls)
        _check_fields("plan settings", content["settings"], NanoQuantConfig)
        if not isinstance(content["rows"], (list, tuple)):
            raise TypeError(f"plan rows must be a list, this is a {type(content['rows']).__name__}")
        for row in content["rows"]:
            _check_fields("plan row", row, NanoQuantRow)
        rows = tuple(NanoQuantRow(**row) for row in content["rows"])
        return cls(**{**content, "rows": rows, "settings": NanoQuantConfig(**content["settings"])})


def plan(config: TransformerConfig | Any, settings: NanoQuantConfig | Any = None) -> NanoQuantPlan:
    """Ranks and bytes of every kernel, from the model's configuration alone.

    Args:
        config: of the model.
        settings: None is `NanoQuantConfig()`.

    Returns:
        A `NanoQuantPlan`.

    Raises:
        ValueError: for a rate that a kernel can't keep.
        TypeError: for another kind of configuration or settings.

    Example:
        >>> plan(TransformerConfig(256, 32, 2, 4, 64), NanoQuantConfig(bits=0.5))
        Traceback (most recent call last):
        ...
        ValueError: attention.query: bpw=0.5 can't be reached for 32 x 32: rank 32, the least, ...
    """
    settings = NanoQuantConfig() if settings is None else settings
    for name, given, wanted in (
        ("config", config, TransformerConfig),
        ("settings", settings, NanoQuantConfig),
    ):
        if not isinstance(given, wanted):
            raise TypeError(f"{name} must be a {wanted.__name__}, this is a {type(given).__name__}")
    shapes, rows = kernel_shapes(config), []
    for name, (inputs, outputs) in shapes.items():
        try:
            rank = nanoquant_rank(
                inputs,
                outputs,
                settings.bits,
                multiple=settings.multiple,
                min_rank=settings.multiple if settings.min_rank is None else settings.min_rank,
                allow_over=settings.allow_over,
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        size = -(-inputs // 8) * rank + -(-rank // 8) * outputs + 2 * (inputs + outputs)
        rate = bits_per_weight(inputs, outputs, rank)
        rows.append(NanoQuantRow(0, name, inputs, outputs, rank, rate, size))
    every = [dataclasses.replace(row, layer=layer) for layer in range(config.num_layers) for row in rows]
    made = jax.eval_shape(functools.partial(transformer.init_params, config=config), jax.random.key(0))
    kept = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(made)[0]:
        name = path_name(path)
        if not (name.startswith("layers.") and name.endswith(".kernel")):
            kept += math.prod(leaf.shape) * (
                2 if _is_large(name) and settings.keep_dtype == "bfloat16" else 4
            )
    return NanoQuantPlan(settings, tuple(every), kept)


class QuantizedModel(NamedTuple):
    """What `quantize_lm` gives.

    Attributes:
        params: of the model, a list of layers: the first ones factorised, others (if it was stopped) as they were.
        config: a `BinaryConfig`, which says how many blocks are done.
        rows: one for each factorised kernel: `layer`, `name`, `rank`, `bits_per_weight`, `bytes`, `installed_error`
            (of the factors before their tuning, weighted, squared, relative), `loss_dense`, `loss_factors`,
            `block_error` (||y_q - y|| / ||y|| of its block's output on the calibration text), `seconds`.
        scale_losses: divergence from the model in full precision in nats per token, one for each pass over the scales.
    """

    params: dict[str, Any]
    config: BinaryConfig
    rows: list[dict[str, Any]]
    scale_losses: list[float]


def quantize_lm(
    params: Mapping[str, Any] | Any,
    config: TransformerConfig,
    calibration_tokens: Any,
    settings: NanoQuantConfig | NanoQuantPlan | Any = None,
    *,
    key: Array | Any,
    blocks: int | None = None,
    stats: Mapping[str, tuple[Any, Any]] | Any = None,
    work: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> QuantizedModel:
    """Factorises every linear of every block, in turn, then tunes all scales.

    Args:
        params: of the model, layers scanned or not, projections apart.
        config: of the model.
        calibration_tokens: int[windows, length + 1].
        settings: or a plan for this model; None is `NanoQuantConfig()`.
        key: of the starts and of the order of windows.
        blocks: stop after so many, a valid model whose other blocks are in full precision; scales are then not tuned
            over the whole model. None is all. With `work`, a later call goes on from there.
        stats: second moments by path, not shrunk, where `collect_diag_stats` was run before.
        work: a folder for finished blocks: with it, work that was killed goes on where it was, and ends the same.
            Delete it when the result is saved. None keeps nothing.
        progress: `(stage, done, total, detail)`.

    Returns:
        A `QuantizedModel`.

    Raises:
        ValueError: for a rate that can't be kept, a plan of another model or one that was edited, parameters or
            second moments that are not finite or do not fit, tokens that are missing or can't be read, or the work
            folder of another run; all before any work.
        TypeError: under `jit`, or for anything but settings, parameters and a key.

    Source: NanoQuant, arXiv 2602.06694, with the details of its code.

    Example:
        >>> config = TransformerConfig(64, 16, 2, 2, 16)
        >>> params = transformer.init_params(jax.random.key(0), config)
        >>> tokens = np.random.default_rng(0).integers(0, 64, (2, 9))
        >>> settings = NanoQuantConfig(bits=3, multiple=8, iterations=5, dense_epochs=0, factor_epochs=0)
        >>> made = quantize_lm(params, config, tokens, settings, key=jax.random.key(1), blocks=1)
        >>> made.config.label
        'nanoquant, 3 bits per weight (3 asked for), 1 of 2 blocks: the others are in full precision'
    """
    say = progress or (lambda *_: None)
    made = settings if isinstance(settings, NanoQuantPlan) else plan(config, settings)
    on_host("quantize_lm", params, calibration_tokens, key, stats)
    key = random_key(key)
    if not isinstance(params, Mapping) or "layers" not in params:
        raise TypeError("params must be the parameters of a transformer, a dict with its layers")
    params = transformer.unstack_layers(params)
    _check(params, config, made)
    if stats is not None:
        _check_statistics(stats, made)
    tokens = check_tokens(calibration_tokens, config)
    total = config.num_layers if blocks is None else count("blocks", blocks)
    if total > config.num_layers:
        raise ValueError(f"blocks={blocks} must be at most {config.num_layers}, the layers of the model")
    if work is None:
        return _quantize(made, params, config, tokens, key, total, stats, None, say)
    fingerprint = {
        "plan": made.to_dict(),
        "model configuration": config.to_dict(),
        "weights": digest(params),
        "calibration text": digest(tokens),
        "seed": digest(jax.random.key_data(key)),
    }
    if stats is not None:
        fingerprint["second moments"] = digest([stats[name] for name in sorted(stats)])
    folder = WorkFolder(work, fingerprint)
    with folder.locked():
        return _quantize(made, params, config, tokens, key, total, stats, folder, say)


def _check(params: Mapping[str, Any], config: TransformerConfig, made: NanoQuantPlan) -> None:
    check_dense_params("params", params, config)
    right = plan(config, made.settings)
    for row, wanted in zip(made.rows, right.rows):
        if row != wanted:
            raise ValueError(
                f"the plan has {row} where this model has {wanted}; make plans with nanoquant.plan"
            )
    if made != right:
        raise ValueError(
            "the plan is that of another model, or it was edited; make plans with nanoquant.plan"
        )
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not bool(jnp.isfinite(jnp.asarray(leaf)).all()):
            raise ValueError(f"{path_name(path)} holds values that are not finite; nothing was quantised")


def _check_statistics(stats: Any, made: NanoQuantPlan) -> None:
    if not isinstance(stats, Mapping):
        raise TypeError(f"stats must be those of collect_diag_stats, this is a {type(stats).__name__}")
    for row in made.rows:
        name = f"layers.{row.layer}.{row.name}"
        if name not in stats:
            raise ValueError(f"stats lack {name!r}")
        shapes = tuple(np.shape(one) for one in stats[name])
        if shapes != ((row.inputs,), (row.outputs,)):
            raise ValueError(
                f"{name}: stats of shapes {shapes} do not fit a kernel of {row.inputs} x {row.outputs}"
            )
    shrink(stats, made.settings.gamma)


def _quantize(
    made: NanoQuantPlan,
    params: dict[str, Any],
    config: TransformerConfig,
    tokens: np.ndarray,
    key: Array,
    total: int,
    stats: Mapping[str, tuple[Any, Any]] | None,
    work: WorkFolder | None,
    say: Progress,
) -> QuantizedModel:
    settings, depth = made.settings, config.num_layers
    plain = dataclasses.replace(config, param_dtype="float32", compute_dtype="float32")
    stats = _statistics(params, plain, tokens, stats, work, say)
    shrunk = shrink(stats, settings.gamma)
    tuning = BlockTuning.adam(
        len(tokens),
        dense_rate=settings.dense_rate,
        factor_rate=settings.factor_rate,
        dense_epochs=settings.dense_epochs,
        factor_epochs=settings.factor_epochs,
        dense_batch=settings.dense_batch,
        factor_batch=settings.factor_batch,
    )
    names = list(made.ranks)
    whole = _embedded(params, plain, tokens)
    quantized = whole
    layers: list[Any] = []
    rows: list[dict[str, Any]] = []
    for index in range(total):
        layer = params["layers"][index]
        target = _run(plain, layer, whole, dense_linear)
        found = None if work is None else work.load(index)
        if found is not None:
            packed, own = _restored(layer, found[0], made.ranks), found[1]
        else:

            def after(name: str, done: int, index: int = index) -> None:
                detail = f"block {index + 1} of {total}, {name}"
                say("linears", index * len(names) + done, total * len(names), detail)

            packed, own = reconstruct_block(
                _block_apply(plain),
                layer,
                quantized,
                target,
                {name: shrunk[f"layers.{index}.{name}"] for name in names},
                made.ranks,
                tuning,
                key=jax.random.fold_in(key, index),
                factorise=functools.partial(_factorise, settings=settings),
                progress=after,
            )
        quantized = _run(plain, _opened(packed), quantized, open_linear)
        error = float(np.linalg.norm(quantized - target) / max(float(np.linalg.norm(target)), 1e-30))
        if found is None:
            own = [{"layer": index, **row, "block_error": error} for row in own]
            if work is not None:
                work.save(index, _kept_arrays(packed), own)
        whole = target
        layers.append(packed)
        rows += own
        say("blocks", index + 1, total, f"block error {error:.3f}")
    keep = {name: part for name, part in params.items() if name != "layers"}
    others = [_kept(layer, settings.keep_dtype) for layer in params["layers"][total:]]
    layers = [_kept(layer, settings.keep_dtype) for layer in layers]
    result = {**_kept(keep, settings.keep_dtype), "layers": [*layers, *others]}
    ranks = tuple(made.ranks.items())
    binary = BinaryConfig(config, ranks, total, settings.bits, made.method, settings.keep_dtype)
    losses: list[float] = []
    if total == depth and settings.scale_epochs:
        tuned = tune_scales_kl(
            result,
            binary,
            params,
            tokens,
            key=jax.random.fold_in(key, depth),
            epochs=settings.scale_epochs,
            batch=settings.scale_batch,
            rate=settings.scale_rate,
            checkpoint=None if work is None else work.folder / "scales.safetensors",
            progress=lambda done, passes, loss: say("scales", done, passes, f"divergence {loss:.4f}"),
        )
        result, losses = tuned.params, tuned.losses
    return QuantizedModel(result, binary, rows, losses)


def _factorise(
    key: Array, kernel: Array, in_sq: Array, out_sq: Array, rank: int, *, settings: NanoQuantConfig
) -> BinaryFactors:
    iterations = {} if settings.iterations is None else {"iters": settings.iterations}
    if settings.init == "dual_svid":
        return dual_svid(key, kernel, in_sq, out_sq, rank)
    if settings.init == "dbf_admm":
        return dbf_admm(key, kernel, in_sq, out_sq, rank, **iterations)
    return lb_admm(key, kernel, in_sq, out_sq, rank, schedule=settings.schedule, **iterations)


def _statistics(
    params: dict[str, Any],
    config: TransformerConfig,
    tokens: np.ndarray,
    given: Mapping[str, tuple[Any, Any]] | None,
    work: WorkFolder | None,
    say: Progress,
) -> Mapping[str, tuple[Any, Any]]:
    """Measured once; one window is one batch."""
    if given is not None:
        return given
    path = None if work is None else work.folder / "statistics.safetensors"
    if path is not None and path.is_file():
        with contextlib.suppress(ValueError):  # a damaged file is work not done
            stored = _files.SafeTensors([path])
            names = sorted({name.rpartition(".")[0] for name in stored.shapes})
            return {name: (stored.read(f"{name}.in_sq"), stored.read(f"{name}.out_sq")) for name in names}

    def counted() -> Any:
        for index, window in enumerate(tokens):
            yield window[None]
            say("second moments", index + 1, len(tokens), "")

    stats = collect_diag_stats(config, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params), counted())
    if path is not None:
        arrays = {
            f"{name}.{part}": one
            for name, pair in stats.items()
            for part, one in zip(("in_sq", "out_sq"), pair)
        }
        temporary = path.with_suffix(".partial")
        _files.write_safetensors(temporary, arrays)
        temporary.replace(path)
    return stats


@functools.lru_cache(maxsize=8)
def _block_apply(config: TransformerConfig) -> Callable[..., Array]:
    """The same function for the same configuration, so that programs compiled for it are found again."""

    def apply(params: Any, x: Array, linear: Any) -> Array:
        positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
        return transformer.block(params, x, config=config, positions=positions, linear=linear)[0]

    return apply


@functools.partial(jax.jit, static_argnames=("config", "linear"))
def _apply_block(params: Any, x: Array, *, config: TransformerConfig, linear: Any) -> Array:
    return _block_apply(config)(params, x, linear)


def _run(config: TransformerConfig, layer: Any, hidden: np.ndarray, linear: Any) -> np.ndarray:
    """One block over all windows, which stay on the host."""
    layer = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), layer)
    parts = [np.asarray(_apply_block(layer, x, config=config, linear=linear)) for x in _split(hidden)]
    return np.concatenate(parts)


def _split(rows: np.ndarray) -> list[np.ndarray]:
    most = max(1, _MOST_TOKENS // rows.shape[1])
    batch = max(size for size in range(1, len(rows) + 1) if len(rows) % size == 0 and size <= most)
    return [rows[i : i + batch] for i in range(0, len(rows), batch)]


@functools.partial(jax.jit, static_argnames=("config",))
def _embed(params: Any, tokens: Array, config: TransformerConfig) -> Array:
    x = transformer.embed(params, tokens, config)
    if config.positions == "learned":
        x = x + params["positions"]["table"][: tokens.shape[1]].astype(x.dtype)
    return x


def _embedded(params: Mapping[str, Any], config: TransformerConfig, tokens: np.ndarray) -> np.ndarray:
    first = {name: part for name, part in params.items() if name in ("embedding", "positions")}
    return np.concatenate([np.asarray(_embed(first, part, config)) for part in _split(tokens[:, :-1])])


def _opened(layer: Any) -> Any:
    if isinstance(layer, Mapping):
        return (
            open_signs(layer) if "binary" in layer else {name: _opened(part) for name, part in layer.items()}
        )
    return layer


def _is_large(name: str) -> bool:
    return name.endswith((".table", "head.kernel"))


def _kept(tree: Any, dtype: str) -> Any:
    """Tables, head and kernels in the type that they are kept in, binary factors as they are, the rest in float32."""

    def cast(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, BinaryTensor):
            return leaf
        name = path_name(path)
        return jnp.asarray(leaf, dtype if _is_large(name) or name.endswith(".kernel") else jnp.float32)

    is_binary = lambda leaf: isinstance(leaf, BinaryTensor)
    return jax.tree_util.tree_map_with_path(cast, tree, is_leaf=is_binary)


_FIELDS = ("v_words", "u_words", "scale_in", "scale_out")


def _kept_arrays(layer: Any) -> dict[str, np.ndarray]:
    """What the work on a block made, by name: factors, and biases, which are tuned as well."""
    arrays = {}
    for block in ("attention", "mlp"):
        for part, own in layer[block].items():
            if "binary" in own:
                arrays |= {
                    f"{block}.{part}.{name}": np.asarray(getattr(own["binary"], name)) for name in _FIELDS
                }
                if "bias" in own:
                    arrays[f"{block}.{part}.bias"] = np.asarray(own["bias"])
    return arrays


def _restored(layer: Any, arrays: Mapping[str, np.ndarray], ranks: Mapping[str, int]) -> dict[str, Any]:
    made = {**layer, "attention": dict(layer["attention"]), "mlp": dict(layer["mlp"])}
    for name, rank in ranks.items():
        block, part = name.split(".")
        found = {field: jnp.asarray(arrays[f"{name}.{field}"]) for field in _FIELDS}
        tensor = BinaryTensor(**found, inputs=np.shape(layer[block][part]["kernel"])[0], rank=rank)
        bias = {"bias": jnp.asarray(arrays[f"{name}.bias"])} if f"{name}.bias" in arrays else {}
        made[block][part] = {"binary": tensor, **bias}
    return made
