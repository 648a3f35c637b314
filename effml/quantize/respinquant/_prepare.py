"""From a model to its rotated form, ready for any rounding of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from effml._validate import one_of
from effml.nn import transformer
from effml.nn.transformer import TransformerConfig
from effml.quantize.respinquant._forward import RotationTraining
from effml.quantize.respinquant._fusion import fold_and_fuse, fold_norms, untie
from effml.quantize.respinquant._residual import check_rank, residual_subspace
from effml.quantize.respinquant._rotations import (
    ROTATION_KINDS,
    RotationSet,
    init_rotations,
    orthogonality,
    transformer_spec,
    transitions,
)
from effml.quantize.respinquant._training import Progress, TrainedRotations, train_rotations

__all__ = ["PreparedModel", "attach_residuals", "prepare", "rotate", "split_windows"]


class PreparedModel(NamedTuple):
    """A model in rotated bases, with floating-point weights.

    Attributes:
        params: a list of layers; each may hold `"residual"`: `{"attention", "mlp"}` of `{"q", "m"}` or `{"t"}`.
        config: of the model, its head separate.
        hadamard: whether the down projections expect `linalg.fht` of their input.
        rank: of the basis changes; None is exact, 0 is none at all.
        rotations: None for kind `none`.
        training: what training reported, or None.
        rows: one a transition: `layer`, `half`, `orthogonality`, `distance` (||T - I||_F), `residual_error`
            (||T - T^||_F) and `rank`.
    """

    params: dict[str, Any]
    config: TransformerConfig
    hadamard: bool
    rank: int | None
    rotations: RotationSet | None
    training: TrainedRotations | None
    rows: list[dict[str, Any]]


def prepare(
    params: Mapping[str, Any],
    config: TransformerConfig,
    calibration: Array | np.ndarray | None = None,
    *,
    key: Array,
    kind: str = "layerwise",
    rank: int | None = 32,
    settings: RotationTraining | None = None,
    batch: int = 1,
    start: str = "hadamard",
    checkpoint: Path | str | None = None,
    progress: Progress | None = None,
) -> PreparedModel:
    """Chooses or trains rotations, fuses them, and finds the basis changes of the skips.

    Args:
        params: of the model, unrolled or scanned.
        config: of the model.
        calibration: int[windows, length + 1]; needed by the learned kinds. The last eighth, at most 8 batches, is
            the fixed set that decides which rotations are kept; the rest is trained on.
        key: of the start.
        kind: see `ROTATION_KINDS`.
        rank: of the basis changes, even; None is exact. Only `layerwise` has basis changes.
        settings: of training; None is `RotationTraining()`. Its `hadamard` goes for the fused model too.
        batch: windows a training step.
        start: as in `init_rotations`.
        checkpoint: as in `train_rotations`.
        progress: likewise.

    Returns:
        A `PreparedModel`.

    Raises:
        ValueError: an unknown kind, an odd rank, no calibration tokens for a learned kind, or a model that cannot be
            rotated; all before any work.

    Example:
        >>> import jax
        >>> config = TransformerConfig(64, 16, 1, 2, 32)
        >>> params = transformer.init_params(jax.random.key(0), config)
        >>> ready = prepare(params, config, key=jax.random.key(1), kind="hadamard")
        >>> ready.hadamard, ready.config.tied_head, len(ready.rows)
        (True, False, 2)
    """
    one_of("kind", kind, ROTATION_KINDS)
    spec = transformer_spec(config)
    settings = RotationTraining() if settings is None else settings
    if rank is not None and kind == "layerwise":
        check_rank(rank, config.width)
    learned = kind in ("global", "layerwise")
    if learned and calibration is None:
        raise ValueError(f"kind={kind!r} learns its rotations and needs calibration tokens")
    if kind == "none":
        untied, config = untie(params, config)
        folded = transformer.unstack_layers(fold_norms(untied, spec))
        return PreparedModel(folded, config, False, 0, None, None, [])
    rotations = init_rotations(key, spec, start)
    training = None
    if learned and calibration is not None and settings.steps:
        batches, keep = split_windows(calibration, batch)
        training = train_rotations(
            params,
            rotations,
            batches,
            config,
            settings,
            kind=kind,
            keep=keep,
            checkpoint=checkpoint,
            progress=progress,
        )
        rotations = training.rotations
    rank = rank if kind == "layerwise" else 0
    return rotate(params, config, rotations, rank=rank, hadamard=settings.hadamard)._replace(
        training=training
    )


def rotate(
    params: Mapping[str, Any],
    config: TransformerConfig,
    rotations: RotationSet,
    *,
    rank: int | None = 32,
    hadamard: bool = True,
) -> PreparedModel:
    """The model fused with given rotations, with basis changes of a rank.

    Args:
        params: of the model.
        config: of the model.
        rotations: for it.
        rank: even; None is exact, 0 leaves the basis changes out, which only equal bases forgive.
        hadamard: whether the down projections get a Hadamard transform.

    Returns:
        A `PreparedModel` without `training`.

    Raises:
        ValueError: a model or rotations that do not fit, or an odd rank.

    Example:
        >>> import jax
        >>> config = TransformerConfig(64, 16, 1, 2, 32)
        >>> params = transformer.init_params(jax.random.key(0), config)
        >>> ready = rotate(params, config, init_rotations(jax.random.key(1), config), rank=None)
        >>> ready.params["layers"][0]["residual"]["mlp"]["t"].shape
        (16, 16)
    """
    spec = transformer_spec(config)
    params, config = untie(params, config)
    fused = fold_and_fuse(params, rotations, spec, hadamard=hadamard, dtype=np.float32)
    fused, rows = attach_residuals(fused, rotations, rank)
    return PreparedModel(fused, config, hadamard, rank, rotations, None, rows)


def attach_residuals(
    params: Mapping[str, Any], rotations: RotationSet, rank: int | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Basis changes in every layer's `"residual"`, float32, and the row of the report for each.

    Args:
        params: fused, a list of layers.
        rotations: that were fused.
        rank: even; None is exact; 0 adds nothing.

    Returns:
        New parameters, and rows as in `PreparedModel`.

    Example:
        >>> import jax
        >>> config = TransformerConfig(64, 16, 1, 2, 32)
        >>> params = transformer.init_params(jax.random.key(0), config)
        >>> attach_residuals(params, init_rotations(jax.random.key(1), config), 4)[1][0]["rank"]
        4
    """
    width = np.shape(rotations.m)[-1]
    if rank is not None:
        check_rank(rank, width)
    a, m, v = rotations
    layers, rows = [], []
    for layer, layer_params in enumerate(params["layers"]):
        # One layer's at a time: those of a large model would not fit in float64.
        one = RotationSet(a[layer : layer + 2], m[layer : layer + 1], v[layer : layer + 1])
        changes = [change[0] for change in transitions(one)]
        off = max(orthogonality(one) for one in (a[layer], a[layer + 1], m[layer], v[layer]))
        residual = {}
        for half, transition in zip(("attention", "mlp"), changes):
            error = 0.0
            if rank is None or rank == width:
                residual[half] = {"t": transition.astype(np.float32)}
            else:
                found = residual_subspace(transition, rank)
                error = found.error
                residual[half] = {"q": found.q.astype(np.float32), "m": found.m.astype(np.float32)}
            rows.append(
                {
                    "layer": layer,
                    "half": half,
                    "orthogonality": off,
                    "distance": float(np.linalg.norm(transition - np.eye(width))),
                    "residual_error": error,
                    "rank": width if rank is None else rank,
                }
            )
        layers.append(layer_params if rank == 0 else {**layer_params, "residual": residual})
    return {**params, "layers": layers}, rows


def split_windows(calibration: Any, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Batches to train on, and those that decide which rotations are kept.

    Raises:
        ValueError: for fewer windows than two batches.

    Example:
        >>> [part.shape for part in split_windows(np.zeros((9, 5), int), 2)]
        [(3, 2, 5), (1, 2, 5)]
    """
    tokens = np.asarray(calibration)
    if tokens.ndim != 2 or batch < 1 or len(tokens) < 2 * batch:
        raise ValueError(
            f"calibration of shape {tokens.shape} must be tokens [windows, length + 1], at least two batches of {batch}"
        )
    batches = tokens[: len(tokens) // batch * batch].reshape(-1, batch, tokens.shape[1])
    kept = min(max(len(batches) // 8, 1), 8)
    return batches[:-kept], batches[-kept:]
