"""Gradient descent on the rotations of a frozen, fake-quantised model."""

from __future__ import annotations

import functools
import json
import math
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from effml import linalg
from effml._validate import one_of
from effml.nn import transformer
from effml.nn.transformer import TransformerConfig
from effml.quantize.respinquant._forward import RotationTraining, quantized_loss
from effml.quantize.respinquant._fusion import _check_rotations, fold_norms, untie
from effml.quantize.respinquant._rotations import RotationSet, orthogonality, transformer_spec

__all__ = ["TrainedRotations", "evaluate_rotations", "train_rotations"]

_MOST_KEPT = 256 * 2**20  # bytes of activations
_OFF = 1e-5  # entries of |X^T X - I| that rounding explains
_POLAR_STEPS = 12

Progress = Callable[[int, int, float], Any]


class TrainedRotations(NamedTuple):
    """What training gives.

    Attributes:
        rotations: the best on the fixed calibration set, float32.
        losses: nats per token of the training batches, one a step.
        evaluations: (step, nats per token on the calibration set), the start first.
        best_step: steps after which the best were found; 0 is the start.
        taken: mean realised Cayley step, one a training step; the ceiling may be far above. Empty with an optimizer
            of the caller's.
        orthogonality: largest entry of |R^T R - I| of `rotations`.
        seconds: of the whole, this call.
    """

    rotations: RotationSet
    losses: list[float]
    evaluations: list[tuple[int, float]]
    best_step: int
    taken: list[float]
    orthogonality: float
    seconds: float


def train_rotations(
    params: Mapping[str, Any],
    rotations: RotationSet,
    batches: Array | np.ndarray,
    config: TransformerConfig,
    settings: RotationTraining | None = None,
    *,
    kind: str = "layerwise",
    keep: Array | np.ndarray | None = None,
    optimizer: optax.GradientTransformation | None = None,
    checkpoint: Path | str | None = None,
    progress: Progress | None = None,
) -> TrainedRotations:
    """Trains rotations by the next-token loss of the fake-quantised model; weights are frozen, transitions exact.

    The loss of one batch is noisy, so a fixed calibration set decides: the best rotations on it are returned, and
    never worse ones than the start. The optimizer is given rotations and nothing else: weight decay, clipping by global
    norm or a step on other leaves would take them off the orthogonal group.

    Args:
        params: the model's own parameters, neither folded nor fused.
        rotations: the start, from `init_rotations`; float32 is kept whatever the model's dtype.
        batches: int[n, batch, length + 1]; step i trains on batch i modulo n.
        config: of the model.
        settings: None is `RotationTraining()`.
        kind: `layerwise`, or `global`: one basis for the whole stream (the first of the start), which is SpinQuant.
        keep: int[m, batch, length + 1], the calibration set that decides; None is the first two of `batches`.
        optimizer: an optax transformation of rotation leaves whose updates are X_new - X, such as
            `effml.optimize.scale_by_cayley`; None takes the same step with a cosine ceiling. What its updates leave is
            made orthogonal again.
        checkpoint: a file for what is needed to go on after an interruption, written at every evaluation. One of
            another run is refused.
        progress: called as progress(step, steps, loss) after each step.

    Returns:
        `TrainedRotations`.

    Raises:
        ValueError: shapes that do not fit, an unknown kind, a start whose loss is not finite, or a checkpoint of
            another run.

    Source: Kim et al., arXiv 2604.11080, and SpinQuant's code. The form of the loss is in `_forward.py`.

    Example:
        >>> from effml.quantize.respinquant import init_rotations
        >>> config = TransformerConfig(64, 16, 1, 2, 32)
        >>> params = transformer.init_params(jax.random.key(0), config)
        >>> batches = jax.random.randint(jax.random.key(1), (1, 2, 9), 0, 64)
        >>> start = init_rotations(jax.random.key(2), config)
        >>> trained = train_rotations(params, start, batches, config, RotationTraining(steps=2, evaluate_every=2))
        >>> trained.evaluations[-1][1] <= trained.evaluations[0][1] or trained.best_step == 0
        True
    """
    started = time.perf_counter()
    settings = RotationTraining() if settings is None else settings
    one_of("kind", kind, ("global", "layerwise"))
    spec = transformer_spec(config)
    _check_rotations(rotations, spec)
    batches = _token_batches("batches", batches, config)
    keep = batches[:2] if keep is None else _token_batches("keep", keep, config)
    params, config = _prepared(params, config)
    if settings.exact is None:
        settings = replace(settings, exact=spec.width <= 1024)
    if settings.rematerialize is None:
        settings = replace(settings, rematerialize=_activation_bytes(batches, config) > _MOST_KEPT)
    leaves = _leaves(rotations, kind)
    state = () if optimizer is None else optimizer.init(leaves)
    best, losses, taken, evaluations = leaves, [], [], []
    fingerprint = ""
    if checkpoint is not None:
        made_by = _kind_of(optimizer, state)
        fingerprint = _fingerprint(params, leaves, batches, keep, config, settings, kind, made_by)
        found = _load(Path(checkpoint), fingerprint, (leaves, best, state))
        if found is not None:
            (leaves, best, state), losses, taken, evaluations = found

    def evaluate(step: int) -> None:
        nonlocal best, leaves
        leaves = _back_to_rotations(leaves)
        loss = _mean_loss(leaves, params, keep, config, settings)
        if math.isfinite(loss) and loss < min((one for _, one in evaluations), default=math.inf):
            best = jax.tree.map(np.asarray, leaves)
        evaluations.append((step, loss))
        if checkpoint is not None:
            _save(Path(checkpoint), fingerprint, (leaves, best, state), losses, taken, evaluations)

    if not evaluations:
        evaluate(0)
    if not math.isfinite(evaluations[0][1]):
        raise ValueError(
            f"the loss at the start is {evaluations[0][1]} on the calibration set: with activations of "
            f"{settings.activation_bits} bits there is nothing to learn from"
        )
    for step in range(len(losses), settings.steps):
        ceiling = settings.max_step * 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        renormalize = (step + 1) % settings.renormalize_every == 0
        batch = batches[step % len(batches)]
        if optimizer is None:
            leaves, loss, realised = _cayley_training_step(
                leaves, params, batch, ceiling, renormalize, config=config, settings=_compiled_for(settings)
            )
            taken.append(float(realised))
        else:
            loss, gradient = _loss_and_gradient(
                leaves, params, batch, config=config, settings=_compiled_for(settings)
            )
            updates, state = optimizer.update(gradient, state, leaves)
            leaves = _back_to_rotations(optax.apply_updates(leaves, updates))
        losses.append(float(loss))
        if progress is not None:
            progress(step + 1, settings.steps, losses[-1])
        if (step + 1) % settings.evaluate_every == 0 or step + 1 == settings.steps:
            evaluate(step + 1)
    kept = RotationSet(*(np.asarray(leaf, np.float32) for leaf in _expand(best, spec.num_layers)))
    first = min(range(len(evaluations)), key=lambda i: (_worst_if_nan(evaluations[i][1]), i))
    return TrainedRotations(
        kept,
        losses,
        evaluations,
        evaluations[first][0],
        taken,
        max(orthogonality(leaf) for leaf in kept),
        time.perf_counter() - started,
    )


def evaluate_rotations(
    params: Mapping[str, Any],
    rotations: RotationSet,
    batches: Array | np.ndarray,
    config: TransformerConfig,
    settings: RotationTraining | None = None,
) -> float:
    """Mean nats per token of the fake-quantised model over int[n, batch, length + 1] tokens.

    Example:
        >>> from effml.quantize.respinquant import init_rotations
        >>> config = TransformerConfig(64, 16, 1, 2, 32)
        >>> params = transformer.init_params(jax.random.key(0), config)
        >>> batches = jax.random.randint(jax.random.key(1), (1, 2, 9), 0, 64)
        >>> round(evaluate_rotations(params, init_rotations(jax.random.key(2), config), batches, config), 1)
        4.2
    """
    settings = RotationTraining() if settings is None else settings
    _check_rotations(rotations, transformer_spec(config))
    batches = _token_batches("batches", batches, config)
    params, config = _prepared(params, config)
    leaves = _leaves(rotations, "layerwise")
    return _mean_loss(leaves, params, batches, config, settings)


def _prepared(params: Mapping[str, Any], config: TransformerConfig) -> tuple[Any, TransformerConfig]:
    """Folded float32 parameters, layers stacked and projections joined."""
    params, config = untie(params, config)
    # Folded as a whole: what is left of arrays of one layer's size stays with the allocator.
    stacked = fold_norms(transformer.stack_layers(params), transformer_spec(config))
    stacked = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), stacked)
    return transformer.join_projections(stacked), config


def _leaves(rotations: RotationSet, kind: str) -> dict[str, Array]:
    a, m, v = (jnp.asarray(leaf, jnp.float32) for leaf in rotations)
    return {"basis": a[0], "v": v} if kind == "global" else {"a": a, "m": m, "v": v}


def _expand(leaves: Mapping[str, Any], layers: int) -> RotationSet:
    if "basis" in leaves:
        basis = leaves["basis"]
        return RotationSet(
            jnp.broadcast_to(basis, (layers + 1, *basis.shape)),
            jnp.broadcast_to(basis, (layers, *basis.shape)),
            leaves["v"],
        )
    return RotationSet(leaves["a"], leaves["m"], leaves["v"])


def _loss(
    leaves: Any, params: Any, tokens: Array, config: TransformerConfig, settings: RotationTraining
) -> Array:
    return quantized_loss(_expand(leaves, config.num_layers), params, tokens, config, settings)


_STATIC = ("config", "settings")
_loss_alone = jax.jit(_loss, static_argnames=_STATIC)
_loss_and_gradient = jax.jit(jax.value_and_grad(_loss), static_argnames=_STATIC)


@functools.partial(jax.jit, static_argnames=_STATIC)
def _cayley_training_step(
    leaves: Any,
    params: Any,
    tokens: Array,
    ceiling: Any,
    renormalize: Any,
    *,
    config: TransformerConfig,
    settings: RotationTraining,
) -> tuple[Any, Array, Array]:
    loss, gradient = jax.value_and_grad(_loss)(leaves, params, tokens, config, settings)
    exact, iters = bool(settings.exact), settings.iters

    def step(pair: tuple[Array, Array]) -> linalg.CayleyStep:
        moved = linalg.cayley_step(*pair, ceiling, exact=exact, iters=iters, renormalize=renormalize)
        return moved if exact else moved._replace(matrix=_orthogonal(moved.matrix))

    # One matrix after the other: the temporaries of all at once would be several times the rotations.
    moved = {
        name: step((leaf, gradient[name]))
        if leaf.ndim == 2
        else linalg.CayleyStep(*jax.lax.map(step, (leaf, gradient[name])))
        for name, leaf in leaves.items()
    }
    # What has no gradient (the basis before a head that is not rounded) has a step of its ceiling that moves nothing.
    sizes = jnp.concatenate([one.step.reshape(-1) for one in moved.values()])
    moving = jnp.concatenate([jnp.abs(gradient[name]).max((-2, -1)).reshape(-1) > 0 for name in moved])
    realised = (sizes * moving).sum() / jnp.maximum(moving.sum(), 1)
    return {name: one.matrix for name, one in moved.items()}, loss, realised


def _orthogonal(matrix: Array) -> Array:
    r"""The orthogonal matrix next to one that is nearly so: its polar factor, by products alone.

    $$X \leftarrow X (3 I - X^T X) / 2$$

    squares the error. A few fixed-point iterations of a Cayley step leave 1e-2 where its skew matrix is large, which is
    where the columns of the rotation and of its gradient line up.
    """

    def error(x: Array) -> Array:
        return jnp.eye(x.shape[-1], dtype=x.dtype) - jnp.matmul(x.T, x, precision=jax.lax.Precision.HIGHEST)

    def improve(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        x, off, count = carry
        x = x + 0.5 * jnp.matmul(x, off, precision=jax.lax.Precision.HIGHEST)
        return x, error(x), count + 1

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        return (jnp.abs(carry[1]).max() > _OFF) & (carry[2] < _POLAR_STEPS)

    return jax.lax.while_loop(unfinished, improve, (matrix, error(matrix), jnp.asarray(0)))[0]


@jax.jit
def _back_to_rotations(leaves: Any) -> Any:
    """Whatever an optimizer's step left, on the orthogonal group again."""
    return {
        name: _orthogonal(leaf) if leaf.ndim == 2 else jax.lax.map(_orthogonal, leaf)
        for name, leaf in leaves.items()
    }


def _kind_of(optimizer: optax.GradientTransformation | None, state: Any) -> str:
    """A word for what takes the steps: two kinds must not go on with each other's work."""
    if optimizer is None:
        return "cosine Cayley"
    update = optimizer.update
    name = getattr(update, "__qualname__", type(update).__qualname__)
    return f"{getattr(update, '__module__', '')}.{name} {jax.tree.structure(state)}"


def _compiled_for(settings: RotationTraining) -> RotationTraining:
    """The settings with what a compiled step does not depend on set aside, so that schedules share one program."""
    return replace(settings, steps=1, max_step=1.0, evaluate_every=1, renormalize_every=1)


def _mean_loss(leaves: Any, params: Any, batches: Any, config: Any, settings: Any) -> float:
    settings = _compiled_for(settings)
    losses = [
        float(_loss_alone(leaves, params, batch, config=config, settings=settings)) for batch in batches
    ]
    return float(np.mean(losses))


def _activation_bytes(batches: np.ndarray, config: TransformerConfig) -> int:
    """Roughly what a backward pass keeps of every layer: the stream, normed, rounded and turned, and the MLP's."""
    tokens = batches.shape[1] * (batches.shape[2] - 1)
    return 4 * tokens * config.num_layers * (12 * config.width + 6 * config.mlp_width)


def _worst_if_nan(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _token_batches(name: str, tokens: Any, config: TransformerConfig) -> np.ndarray:
    tokens = np.asarray(tokens)
    if tokens.ndim != 3 or 0 in tokens.shape or tokens.shape[-1] < 2:
        raise ValueError(f"{name} of shape {tokens.shape} must be tokens [batches, batch, length + 1]")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"{name} must hold token ids, it is {tokens.dtype}")
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ValueError(f"{name} holds ids outside 0 ... {config.vocab_size - 1}")
    return tokens.astype(np.int32)


def _fingerprint(
    params: Any, leaves: Any, batches: Any, keep: Any, config: Any, settings: Any, kind: str, made_by: str
) -> str:
    total = 0
    for leaf in jax.tree.leaves((params, leaves, batches, keep)):
        total = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, total)
    return json.dumps([total, kind, made_by, asdict(settings), config.to_dict()])


def _save(path: Path, fingerprint: str, trees: Any, losses: Any, taken: Any, evaluations: Any) -> None:
    arrays: dict[str, Any] = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(trees))}
    arrays |= {
        "fingerprint": np.array(fingerprint),
        "losses": np.array(losses, np.float64),
        "taken": np.array(taken, np.float64),
        "evaluations": np.array(evaluations, np.float64),
    }
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("wb") as file:
        np.savez(file, **arrays)
    temporary.replace(path)


def _load(path: Path, fingerprint: str, trees: Any) -> Any:
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = dict(archive)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"checkpoint={str(path)!r} is damaged ({error}); remove it") from None
    leaves, structure = jax.tree.flatten(trees)
    names = {"fingerprint", "losses", "taken", "evaluations", *(f"leaf{i}" for i in range(len(leaves)))}
    if names != found.keys() or str(found["fingerprint"]) != fingerprint:
        raise ValueError(
            f"checkpoint={str(path)!r} is of another run (other weights, tokens, start, optimizer or settings); "
            "remove it, or name another file"
        )
    restored = [jnp.asarray(found[f"leaf{i}"]) for i in range(len(leaves))]
    evaluations = [(int(step), float(loss)) for step, loss in found["evaluations"]]
    return structure.unflatten(restored), found["losses"].tolist(), found["taken"].tolist(), evaluations
