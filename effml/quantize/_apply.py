"""From a plan and a model to packed parameters, layer by layer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from effml.nn import transformer
from effml.nn.transformer import TransformerConfig
from effml.quantize import respinquant
from effml.quantize._calibrate import INPUT_OF, LayerStream, check_tokens
from effml.quantize._fake import FULL
from effml.quantize._gptq import RoundedKernel, gptq, rtn
from effml.quantize._host import on_host
from effml.quantize._model import PackedConfig
from effml.quantize._packed import PackedTensor
from effml.quantize._plan import QuantizationPlan, check_plan
from effml.quantize._work import WorkFolder, digest
from effml.quantize.respinquant._prepare import split_windows
from effml.trees import path_name

__all__ = ["ApplyProgress", "QuantizationRows", "apply"]

ApplyProgress = Callable[[str, int, int, str], None]


class QuantizationRows(list[dict[str, Any]]):
    """One row for each kernel, and what there is to say about rotations.

    Attributes:
        training: of the rotations: `steps`, `best_step` (after which the best were found; 0 is the start), `mean_step`
            (of the steps taken, whose ceiling is `max_step`), `losses` (of the training batches), `evaluations` ([step,
            nats per token on the fixed set]), `orthogonality`, `seconds`; None where nothing was trained.
        transitions: one row for each skip: `layer`, `half`, `orthogonality`, `distance` (||T - I||_F),
            `residual_error` (||T - T^||_F), `rank`.

    Example:
        >>> QuantizationRows([{"layer": 0}]).training is None
        True
    """

    training: dict[str, Any] | None = None
    transitions: tuple[dict[str, Any], ...] = ()


def apply(
    plan: QuantizationPlan | Any,
    model_params: Mapping[str, Any] | Any,
    config: TransformerConfig,
    calibration_tokens: Any = None,
    *,
    key: Array | Any,
    work: str | os.PathLike[str] | None = None,
    progress: ApplyProgress | None = None,
) -> tuple[dict[str, Any], PackedConfig, QuantizationRows]:
    """Does what a plan says.

    GPTQ sees each layer's input as the layers before it, already rounded, make it.

    Args:
        plan: made by `plan` for this configuration.
        model_params: of the model, layers scanned or not, projections apart.
        config: of the model.
        calibration_tokens: int[windows, length + 1]; may be None where `plan.needs_calibration` is false. With tokens
            every row has an output error.
        key: of the rotations' start.
        work: a folder for finished layers and rotations: with it, work that was killed goes on where it was. Delete it
            when the result is saved. None keeps nothing.
        progress: `(stage, done, total, detail)`, called with the stage "checks" when nothing was found wrong, then
            after each step of training ("rotations") and each layer ("layers").

    Returns:
        The parameters of a packed model (a list of layers), its configuration, and `QuantizationRows`, one for each
        kernel: `layer`, `name`, `bits`, `groups`, `bytes`, `weight_error` (||K^ - K|| / ||K||), `output_error` (the
        same of the product's output on the calibration text, or None), `seconds`; with rotations also `orthogonality`,
        `distance` and `residual_error` of the skip around the kernel.

    Raises:
        ValueError: for a plan of another model or one that was edited, parameters that are not finite, calibration
            tokens that are missing, too few or unreadable, or the work folder of another run: all before any work. For
            activations that are not finite, naming layer and kernel; the work folder keeps what was done before.
        TypeError: under `jit`, or for anything but a plan, parameters and a key.

    Example:
        >>> from effml.quantize import plan
        >>> config = TransformerConfig(256, 32, 2, 4, 64)
        >>> params = transformer.init_params(jax.random.key(0), config)
        >>> one = plan(config, method="rtn", bits="W4")
        >>> packed, packed_config, rows = apply(one, params, config, key=jax.random.key(1))
        >>> packed["layers"][0]["mlp"]["up"]["packed"].shape, len(rows)
        ((32, 64), 14)
    """
    if not isinstance(plan, QuantizationPlan):
        check_plan(plan, config)
    if not isinstance(model_params, Mapping) or "layers" not in model_params:
        raise TypeError("model_params must be the parameters of a transformer, a dict with its layers")
    if not hasattr(key, "dtype"):
        raise TypeError(f"key={key!r} must be a jax.random.key")
    on_host("quantize.apply", model_params, calibration_tokens, key)
    params = transformer.unstack_layers(model_params)
    _check(plan, params, config)
    tokens = None if calibration_tokens is None else check_tokens(calibration_tokens, config)
    if plan.needs_calibration and tokens is None:
        raise ValueError(
            f"method={plan.method!r} with this plan learns from text: it needs calibration tokens"
        )
    if plan.steps:
        split_windows(tokens, plan.batch)
    if work is None:
        return _apply(plan, params, config, tokens, key, None, progress)
    fingerprint = {
        "plan": plan.to_dict(),
        "model configuration": config.to_dict(),
        "weights": digest(model_params),
        "calibration text": digest(tokens),
        "seed": digest(jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key),
    }
    folder = WorkFolder(work, fingerprint)
    with folder.locked():
        return _apply(plan, params, config, tokens, key, folder, progress)


def _check(plan: QuantizationPlan, params: Mapping[str, Any], config: TransformerConfig) -> None:
    if len(params["layers"]) != config.num_layers:
        raise ValueError(
            f"params have {len(params['layers'])} layers, the config says num_layers={config.num_layers}"
        )
    for row in plan.rows:
        block, _, name = row.name.partition(".")
        found = params["layers"][row.layer].get(block, {}) if row.layer < config.num_layers else {}
        kernel = found.get(name, {}).get("kernel")
        if kernel is None or np.shape(kernel) != (row.inputs, row.outputs):
            raise ValueError(
                f"the plan has layers.{row.layer}.{row.name} as a kernel of {row.inputs} x {row.outputs}, the model "
                f"{'has none' if kernel is None else f'has {np.shape(kernel)}'}: plan for this model, projections apart"
            )
    check_plan(plan, config)
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not bool(jnp.isfinite(jnp.asarray(leaf)).all()):
            raise ValueError(f"{path_name(path)} holds values that are not finite; nothing was quantised")


def _apply(
    plan: QuantizationPlan,
    params: dict[str, Any],
    config: TransformerConfig,
    tokens: np.ndarray | None,
    key: Array,
    work: WorkFolder | None,
    progress: ApplyProgress | None,
) -> tuple[dict[str, Any], PackedConfig, QuantizationRows]:
    say = progress or (lambda *_: None)
    say("checks", 1, 1, "")
    rows = QuantizationRows()
    hadamard, residuals = False, {}
    if plan.method == "respinquant":
        ready = respinquant.prepare(
            params,
            config,
            tokens,
            key=key,
            kind=plan.rotation,
            rank=plan.rank,
            settings=respinquant.RotationTraining(
                steps=plan.steps,
                max_step=plan.max_step,
                activation_bits=plan.activation_bits,
                key_value_bits=plan.key_value_bits,
            ),
            batch=plan.batch,
            checkpoint=None if work is None else work.rotations,
            progress=lambda step, steps, loss: say("rotations", step, steps, f"loss {loss:.4f}"),
        )
        params, config, hadamard = ready.params, ready.config, ready.hadamard
        rows.transitions = tuple(ready.rows)
        rows.training = _about(ready.training, plan)
        residuals = {(row["layer"], row["half"]): row for row in ready.rows}
    packed_config = PackedConfig(
        model=config,
        weight_bits=plan.weight_bits,
        group_size=plan.group_size,
        activation_bits=plan.activation_bits,
        key_value_bits=plan.key_value_bits,
        hadamard=hadamard,
        residual_rank=plan.rank,
        method=plan.method,
        keep_dtype=plan.keep_dtype,
    )
    stream = (
        None if tokens is None or plan.weight_bits == FULL else LayerStream(params, tokens, packed_config)
    )
    layers = []
    for index, layer in enumerate(params["layers"]):
        found = None if work is None else work.load(index)
        if found is not None:
            rounded, layer_rows = _restored(layer, found[0], plan), found[1]
        else:
            rounded, layer_rows = _round_layer(index, layer, plan, stream)
            for row in layer_rows:
                half = residuals.get((index, row["name"].split(".")[0]))
                if half is not None:
                    row |= {name: half[name] for name in ("orthogonality", "distance", "residual_error")}
            if work is not None:
                work.save(index, _codes(rounded), layer_rows)
        rounded = _without_narrow(rounded)
        layers.append(rounded)
        rows += layer_rows
        worst = max((row["weight_error"] for row in layer_rows), default=0.0)
        say("layers", index + 1, len(params["layers"]), f"largest weight error {worst:.3f}")
        if stream is not None and index + 1 < len(params["layers"]):
            stream.advance(rounded)
    keep = {name: part for name, part in params.items() if name != "layers"}
    return {**_kept(keep, plan.keep_dtype), "layers": layers}, packed_config, rows


def _kept(parts: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Tables and head in the dtype that the plan keeps them in, norms in float32."""

    def cast(path: Any, leaf: Any) -> Array:
        large = path_name(path).endswith((".table", "head.kernel"))
        return jnp.asarray(leaf, dtype if large else jnp.float32)

    return jax.tree_util.tree_map_with_path(cast, dict(parts))


def _without_narrow(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Norms, biases and basis changes in float32, whatever the model had; kernels as they are."""

    def cast(path: Any, leaf: Any) -> Array:
        kernel = path_name(path).endswith((".kernel", ".codes"))
        return jnp.asarray(leaf) if kernel else jnp.asarray(leaf, jnp.float32)

    return jax.tree_util.tree_map_with_path(cast, dict(layer))


def _about(training: respinquant.TrainedRotations | None, plan: QuantizationPlan) -> dict[str, Any] | None:
    if training is None:
        return None
    return {
        "steps": len(training.losses),
        "best_step": training.best_step,
        "max_step": plan.max_step,
        "mean_step": float(np.mean(training.taken)) if training.taken else None,
        "losses": training.losses,
        "evaluations": [list(one) for one in training.evaluations],
        "orthogonality": training.orthogonality,
        "seconds": training.seconds,
    }


def _places(layer: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    places = [(name, *name.split(".")) for name in INPUT_OF]
    return [(name, block, part) for name, block, part in places if part in layer[block]]


def _round_layer(
    index: int, layer: Mapping[str, Any], plan: QuantizationPlan, stream: LayerStream | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    rounded = {**layer, "attention": dict(layer["attention"]), "mlp": dict(layer["mlp"])}
    rows: list[dict[str, Any]] = []
    sizes = {row.name: row for row in plan.rows if row.layer == index}
    if plan.weight_bits == FULL:
        for _, block, part in _places(layer):
            old = layer[block][part]
            rounded[block][part] = {**old, "kernel": jnp.asarray(old["kernel"], plan.keep_dtype)}
        return rounded, rows
    started = time.perf_counter()
    seen = {} if stream is None else stream.statistics(layer)
    for name, block, part in _places(layer):
        old = layer[block][part]
        kernel = np.asarray(old["kernel"], np.float32)
        read = seen.get(INPUT_OF[name])
        hessian = None if read is None else read.hessian
        try:
            result = _rounded(kernel, hessian, plan)
            packed = PackedTensor.pack(result.codes, result.scale, plan.weight_bits)
        except ValueError as error:
            raise ValueError(f"layers.{index}.{name}: {error}") from None
        rounded[block][part] = {
            "packed": packed,
            **{name: value for name, value in old.items() if name != "kernel"},
        }
        wrong = np.asarray(result.kernel) - kernel
        finished = time.perf_counter()
        rows.append(
            {
                "layer": index,
                "name": name,
                "bits": plan.weight_bits,
                "groups": sizes[name].groups,
                "bytes": packed.nbytes,
                "weight_error": float(np.linalg.norm(wrong) / max(float(np.linalg.norm(kernel)), 1e-30)),
                "output_error": None if hessian is None else _output_error(wrong, kernel, hessian),
                "seconds": finished - started,
            }
        )
        started = finished
    return rounded, rows


def _rounded(kernel: np.ndarray, hessian: np.ndarray | None, plan: QuantizationPlan) -> RoundedKernel:
    shared = {"clip": plan.clip, "group_size": plan.group_size}
    if plan.rounding == "gptq":
        return gptq(kernel, hessian, plan.weight_bits, percdamp=plan.percdamp, **shared)
    return rtn(kernel, plan.weight_bits, **shared)


def _output_error(wrong: np.ndarray, kernel: np.ndarray, hessian: np.ndarray) -> float:
    """||X (K^ - K)|| / ||X K||, from the mean of X^T X."""
    lost, whole = (float(np.vdot(one, hessian @ one)) for one in (wrong, kernel))
    return float(np.sqrt(max(lost, 0.0) / max(whole, 1e-30)))


def _codes(layer: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What rounding made, by name."""
    arrays = {}
    for name, block, part in _places(layer):
        packed = layer[block][part].get("packed")
        if packed is not None:
            arrays |= {f"{name}.codes": np.asarray(packed.codes), f"{name}.scale": np.asarray(packed.scale)}
    return arrays


def _restored(
    layer: Mapping[str, Any], arrays: Mapping[str, np.ndarray], plan: QuantizationPlan
) -> dict[str, Any]:
    rounded = {**layer, "attention": dict(layer["attention"]), "mlp": dict(layer["mlp"])}
    for name, block, part in _places(layer):
        old = layer[block][part]
        rest = {key: value for key, value in old.items() if key != "kernel"}
        if plan.weight_bits == FULL:
            rounded[block][part] = {**rest, "kernel": jnp.asarray(old["kernel"], plan.keep_dtype)}
            continue
        packed = PackedTensor(
            jnp.asarray(arrays[f"{name}.codes"]),
            jnp.asarray(arrays[f"{name}.scale"]),
            plan.weight_bits,
            np.shape(old["kernel"])[0],
        )
        rounded[block][part] = {"packed": packed, **rest}
    return rounded
