"""What a quantisation will do, as data to look at before anything is done."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from effml._validate import count, one_of
from effml.nn.transformer import TransformerConfig, init_params
from effml.quantize._fake import CLIPS, FULL, group_count
from effml.quantize._model import KEEP_DTYPES, METHODS
from effml.quantize._packed import packed_bytes
from effml.quantize.respinquant import ROTATION_KINDS, transformer_spec
from effml.quantize.respinquant._forward import check_number, check_training
from effml.quantize.respinquant._residual import check_rank
from effml.trees import path_name

__all__ = ["METHODS", "PlanRow", "QuantizationPlan", "check_plan", "parse_bits", "plan"]

_ROUNDINGS = ("rtn", "gptq")


def parse_bits(bits: str | Any) -> tuple[int, int, int]:
    """Bits of weights, activations, and keys and values, from the field's short form.

    Args:
        bits: such as "W4A4", "W3A3", "W4A16", "W4A4KV4" or "W4"; what is not named is 16, not rounded.

    Returns:
        Three numbers, each 2 to 8 or 16.

    Raises:
        ValueError: for another form, or other numbers.
        TypeError: for anything but text.

    Example:
        >>> parse_bits("W4A4KV4"), parse_bits("w3")
        ((4, 4, 4), (3, 16, 16))
    """
    if not isinstance(bits, str):
        raise TypeError(f"bits={bits!r} must be text, such as 'W4A4'")
    found = re.fullmatch(r"W(\d{1,2})(?:A(\d{1,2}))?(?:KV(\d{1,2}))?", bits.strip(), re.IGNORECASE | re.ASCII)
    if found is None:
        raise ValueError(f"bits={bits!r} is not known (allowed: W4A4, W3A3, W4A16, W4A4KV4 and the like)")
    weights, activations, rows = (FULL if part is None else int(part) for part in found.groups())
    for name, value in (("weights", weights), ("activations", activations), ("keys and values", rows)):
        if not (2 <= value <= 8 or value == FULL):
            raise ValueError(f"bits={bits!r}: {value} bits for {name} must be 2 to 8, or 16 for none")
    return weights, activations, rows


@dataclass(frozen=True)
class PlanRow:
    """One kernel of a plan.

    Attributes:
        layer: its index.
        name: such as "mlp.down".
        inputs: of the kernel.
        outputs: of the kernel.
        bits: of its codes; 16 leaves it as it is.
        groups: scales of one output.
        bytes: packed.
    """

    layer: int
    name: str
    inputs: int
    outputs: int
    bits: int
    groups: int
    bytes: int


@dataclass(frozen=True)
class QuantizationPlan:
    """Everything `apply` will do, and the bytes that will come of it.

    Attributes:
        method: one of `METHODS`.
        weight_bits: of all kernels of the layers; 16 is none.
        activation_bits: of what they read; 16 is none.
        key_value_bits: of keys and values; 16 is none.
        group_size: inputs that share a scale, or None.
        clip: "mse", or None.
        rounding: of the weights, "rtn" or "gptq".
        rotation: one of `respinquant.ROTATION_KINDS`.
        rank: of the basis changes; None is exact.
        steps: of training rotations.
        max_step: ceiling of a step's size.
        batch: windows of one such step.
        percdamp: of GPTQ.
        keep_dtype: of embedding, positions and head.
        rows: one `PlanRow` for each kernel.
        kept_bytes: of everything that is not packed.

    Example:
        >>> config = TransformerConfig(256, 32, 2, 4, 64)
        >>> one = plan(config, method="rtn", bits="W4")
        >>> one.packed_bytes, one.kept_bytes, QuantizationPlan.from_dict(one.to_dict()) == one
        (12544, 33408, True)
    """

    method: str
    weight_bits: int
    activation_bits: int
    key_value_bits: int
    group_size: int | None
    clip: str | None
    rounding: str
    rotation: str
    rank: int | None
    steps: int
    max_step: float
    batch: int
    percdamp: float
    keep_dtype: str
    rows: tuple[Any, ...]
    kept_bytes: int

    @property
    def bits(self) -> str:
        """In the field's short form.

        Example:
            >>> plan(TransformerConfig(256, 32, 2, 4, 64), method="rtn", bits="w3").bits
            'W3A16'
        """
        rows = "" if self.key_value_bits == FULL else f"KV{self.key_value_bits}"
        return f"W{self.weight_bits}A{self.activation_bits}{rows}"

    @property
    def packed_bytes(self) -> int:
        """Of all kernels of the layers: codes and scales.

        Example:
            >>> plan(TransformerConfig(256, 32, 1, 4, 64), method="rtn", bits="w4").packed_bytes
            6272
        """
        return sum(row.bytes for row in self.rows)

    @property
    def needs_calibration(self) -> bool:
        """Whether `apply` wants tokens.

        Example:
            >>> plan(TransformerConfig(256, 32, 1, 4, 64), method="gptq", bits="w4").needs_calibration
            True
        """
        rounds = self.rounding == "gptq" and self.weight_bits != FULL
        return rounds or self.rotation in ("global", "layerwise")

    def summary(self) -> list[dict[str, Any]]:
        """One row for each kernel's name, over all layers.

        Example:
            >>> plan(TransformerConfig(256, 32, 1, 4, 64), method="rtn", bits="w4").summary()[0]["kernel"]
            'attention.query'
        """
        names = list(dict.fromkeys(row.name for row in self.rows))
        table = []
        for name in names:
            rows = [row for row in self.rows if row.name == name]
            weights = sum(row.inputs * row.outputs for row in rows)
            size = sum(row.bytes for row in rows)
            table.append(
                {
                    "kernel": name,
                    "layers": len(rows),
                    "shape": f"{rows[0].inputs} x {rows[0].outputs}",
                    "bits": rows[0].bits,
                    "scales per output": rows[0].groups,
                    "bits per weight": 8 * size / weights,
                    "MB": size / 1e6,
                }
            )
        table.append({"kernel": "embedding, head, norms, basis changes", "MB": self.kept_bytes / 1e6})
        table.append({"kernel": "all", "MB": (self.packed_bytes + self.kept_bytes) / 1e6})
        return table

    def to_dict(self) -> dict[str, Any]:
        """JSON types only.

        Example:
            >>> plan(TransformerConfig(256, 32, 1, 4, 64), method="rtn", bits="w4").to_dict()["rounding"]
            'rtn'
        """
        content = dataclasses.asdict(self)
        return {**content, "rows": list(content["rows"])}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any] | Any) -> QuantizationPlan:
        """What `to_dict` gave.

        Raises:
            ValueError: for fields that are missing or unknown. What they hold is checked by `apply`.
            TypeError: for anything but a dict.

        Example:
            >>> QuantizationPlan.from_dict({"method": "rtn"})
            Traceback (most recent call last):
            ...
            ValueError: plan lacks weight_bits, ...
        """
        _check_fields("plan", content, cls)
        if not isinstance(content["rows"], list | tuple):
            raise ValueError(f"plan field rows must be a list, it is a {type(content['rows']).__name__}")
        for row in content["rows"]:
            _check_fields("plan row", row, PlanRow)
        return cls(**{**content, "rows": tuple(PlanRow(**row) for row in content["rows"])})


def _check_fields(what: str, content: Any, kind: type) -> None:
    if not isinstance(content, Mapping):
        raise TypeError(f"{what} must be a dict, this is a {type(content).__name__}")
    names = [field.name for field in dataclasses.fields(kind)]
    for name in content:
        one_of(f"{what} field", name, names)
    if missing := [name for name in names if name not in content]:
        raise ValueError(f"{what} lacks {', '.join(missing)}")


def check_plan(given: QuantizationPlan | Any, config: TransformerConfig) -> None:
    """Raises where `plan` would not have made this one for a model: a plan may come from a file that was edited.

    Args:
        given: the plan.
        config: of the model.

    Raises:
        ValueError: naming the field that `plan` refuses, or would have made otherwise.
        TypeError: for anything but a plan.

    Example:
        >>> config = TransformerConfig(256, 32, 2, 4, 64)
        >>> check_plan(dataclasses.replace(plan(config, method="rtn", bits="W4"), steps=3), config)
        Traceback (most recent call last):
        ...
        ValueError: the plan's steps=3 should be 0 with its other fields; make plans with effml.quantize.plan
    """
    if not isinstance(given, QuantizationPlan):
        if getattr(given, "method", None) == "nanoquant":
            raise TypeError(
                "this is a plan of nanoquant's: effml.quantize.nanoquant.quantize_lm carries it out"
            )
        raise TypeError(
            f"plan must be a QuantizationPlan, this is a {type(given).__name__}: make one with "
            "effml.quantize.plan, or QuantizationPlan.from_dict"
        )
    rotates = given.method == "respinquant"
    wanted = plan(
        config,
        method=given.method,
        bits=f"W{given.weight_bits}A{given.activation_bits}KV{given.key_value_bits}",
        group_size=given.group_size,
        clip=given.clip,
        rounding=given.rounding if rotates else None,
        rotation=given.rotation if rotates else None,
        rank=given.rank,
        steps=given.steps,
        max_step=given.max_step,
        batch=given.batch,
        percdamp=given.percdamp,
        keep_dtype=given.keep_dtype,
    )
    for row, right in zip(given.rows, wanted.rows):
        if row != right:
            raise ValueError(
                f"the plan has {row} where this model has {right}; make plans with effml.quantize.plan, for this model"
            )
    if len(given.rows) != len(wanted.rows):
        raise ValueError(f"the plan has {len(given.rows)} kernels, the model {len(wanted.rows)}")
    for field in dataclasses.fields(QuantizationPlan):
        value, right = getattr(given, field.name), getattr(wanted, field.name)
        if field.name != "rows" and (value, type(value)) != (right, type(right)):
            raise ValueError(
                f"the plan's {field.name}={value!r} should be {right!r} with its other fields; make plans with "
                "effml.quantize.plan"
            )


def plan(
    config: TransformerConfig | Any,
    *,
    method: str,
    bits: str | Any = "W4A4",
    group_size: int | None = None,
    clip: str | None = "mse",
    rounding: str | None = None,
    rotation: str | None = None,
    rank: int | None = 32,
    steps: int = 40,
    max_step: float | int | Any = 1.5,
    batch: int = 1,
    percdamp: float | int | Any = 0.01,
    keep_dtype: str = "float32",
) -> QuantizationPlan:
    """Decides what happens to every kernel, from the model's configuration alone.

    Args:
        config: of the model.
        method: "rtn", "gptq" or "respinquant".
        bits: as for `parse_bits`.
        group_size: inputs that share a scale, a divisor of every kernel's inputs; None is one scale for each output.
        clip: "mse" searches a clip ratio for each scale, None clips nothing.
        rounding: of the rotated weights, "rtn" or "gptq" (the default); only for respinquant.
        rotation: "layerwise" (the default), "global", "hadamard" or "none"; only for respinquant.
        rank: of the basis changes of layerwise rotations, even; None is exact. At most the width counts.
        steps: of training rotations.
        max_step: ceiling of a step's size.
        batch: windows of one such step. The paper has 8 of 2048 tokens; 1 is what a CPU's memory and patience hold
            for a model of 10^8 weights and windows of 512. Short windows want more: their losses are noisy.
        percdamp: of GPTQ.
        keep_dtype: of embedding, positions and head: "float32" or "bfloat16".

    Returns:
        A `QuantizationPlan`.

    Raises:
        ValueError: for values out of range, bits that round nothing, options that the method has no use for, groups
            that do not fit, or a model that can't be rotated.
        TypeError: for another configuration, or values of another type.

    Example:
        >>> plan(TransformerConfig(256, 32, 2, 4, 64), method="respinquant").rotation
        'layerwise'
    """
    if not isinstance(config, TransformerConfig):
        raise TypeError(f"config must be a TransformerConfig, this is a {type(config).__name__}")
    if method == "nanoquant":
        raise ValueError(
            "method='nanoquant' has plans of its own: call effml.quantize.nanoquant.plan(config, "
            "NanoQuantConfig(bits=1.0)), and quantize_lm of that module instead of apply"
        )
    one_of("method", method, METHODS)
    weight_bits, activation_bits, key_value_bits = parse_bits(bits)
    if weight_bits == activation_bits == key_value_bits == FULL:
        raise ValueError(f"bits={bits!r} rounds nothing: there is nothing to quantise")
    if clip not in CLIPS:
        raise ValueError(f"clip={clip!r} is not known (allowed: 'mse', None)")
    one_of("keep_dtype", keep_dtype, KEEP_DTYPES)
    check_training(steps, max_step)
    count("batch", batch)
    check_number("percdamp", percdamp)
    if not 0 < percdamp < float("inf"):
        raise ValueError(f"percdamp={percdamp!r} must be finite and above 0")
    if method != "respinquant":
        for name, value in (("rounding", rounding), ("rotation", rotation)):
            if value is not None:
                raise ValueError(f"{name}={value!r} is for method='respinquant', not {method!r}")
        rounding, rotation, rank = method, "none", 0
    else:
        rounding = one_of("rounding", "gptq" if rounding is None else rounding, _ROUNDINGS)
        rotation = one_of("rotation", "layerwise" if rotation is None else rotation, ROTATION_KINDS)
        transformer_spec(config)
        if rotation != "layerwise":
            rank = 0
        elif rank is not None:
            rank = check_rank(min(rank, config.width), config.width)
    shapes = _shapes(config, untied=method == "respinquant")
    rows, kept = [], 0
    for layer in range(config.num_layers):
        for name, (inputs, outputs) in shapes["kernels"].items():
            try:
                groups = group_count(inputs, group_size)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            if weight_bits == FULL:
                size = inputs * outputs * _itemsize(keep_dtype)
            else:
                size = packed_bytes(inputs, outputs, weight_bits, groups)
            rows.append(PlanRow(layer, name, inputs, outputs, weight_bits, groups, size))
    kept = shapes["tables"] * _itemsize(keep_dtype) + 4 * shapes["rest"]
    if rank != 0:
        full = rank is None or rank == config.width
        change = config.width**2 if full else (config.width + (rank or 0)) * (rank or 0)
        kept += 2 * config.num_layers * 4 * change
    return QuantizationPlan(
        method=method,
        weight_bits=weight_bits,
        activation_bits=activation_bits,
        key_value_bits=key_value_bits,
        group_size=group_size,
        clip=clip,
        rounding=rounding,
        rotation=rotation,
        rank=rank,
        steps=steps if rotation in ("global", "layerwise") else 0,
        max_step=float(max_step),
        batch=batch,
        percdamp=float(percdamp),
        keep_dtype=keep_dtype,
        rows=tuple(rows),
        kept_bytes=kept,
    )


def _itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


@functools.lru_cache(maxsize=8)
def _shapes(config: TransformerConfig, untied: bool) -> dict[str, Any]:
    """Shapes of one layer's kernels, and how many numbers the tables and everything else hold."""
    if untied:
        config = dataclasses.replace(config, tied_head=False)
    made = jax.eval_shape(functools.partial(init_params, config=config), jax.random.key(0))
    kernels: dict[str, tuple[int, int]] = {}
    tables = rest = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(made)[0]:
        name, size = path_name(path), math.prod(leaf.shape)
        if name.startswith("layers.") and name.endswith(".kernel"):
            kernels[".".join(name.split(".")[2:-1])] = leaf.shape
        elif name.endswith((".table", "head.kernel")):
            tables += size
        else:
            rest += size
    order = ("attention.query", "attention.key", "attention.value", "attention.output")
    order += ("mlp.gate", "mlp.up", "mlp.down")
    return {"kernels": {n: kernels[n] for n in order if n in kernels}, "tables": tables, "rest": rest}
