"""`effml quantize --method nanoquant`: about one bit a weight, block by block."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effml.cli import _quantize

if TYPE_CHECKING:
    from effml.cli.quantize import Command
    from effml.models import LoadedModel
    from effml.quantize.nanoquant import NanoQuantPlan, QuantizedModel

__all__ = ["OPTIONS", "run"]

OPTIONS = ("blocks", "epochs", "iterations", "multiple", "gamma", "init", "tuning_rate", "allow_over")
"""Of `effml quantize`, that only this method has a use for."""
_OTHERS = ("group_size", "no_clip", "rotation", "rank", "exact", "steps", "max_step", "batch", "rounding")
_MOST_ROWS = 32


def run(command: Command, out: Path) -> int:
    """Plans, and unless it is a dry run reconstructs the blocks and writes the model."""
    import jax
    from rich.console import Console

    from effml import models, quantize, report
    from effml.quantize import nanoquant

    started = time.perf_counter()
    for name in _OTHERS:
        if getattr(command, name) not in (None, False):
            raise ValueError(
                f"--{name.replace('_', '-')} has no use here, leave it out: it is not nanoquant's"
            )
    settings = _settings(command)
    work = out.with_name(out.name + ".partial")
    loaded = models.load(command.model)
    if loaded.kind != "dense":
        raise ValueError(
            f"model={command.model!r} is of kind {loaded.kind!r}; only dense models are quantised"
        )
    try:
        plan = nanoquant.plan(loaded.config, settings)
    except ValueError as error:
        reason, _, advice = str(error).partition("; ")  # the advice is in words of the library
        raise ValueError(
            f"{reason}; give more --bits, a smaller --multiple (it is {settings.multiple}), or --allow-over"
            if advice
            else reason
        ) from None
    blocks = _blocks(command, loaded)
    windows, length = command.window_shape(loaded)
    if command.dry_run:
        _show(plan, loaded, blocks, windows * length)
        return 0
    tokens = command.windows(loaded)
    _show(plan, loaded, blocks, windows * length)
    line = f"work folder: {work}; if it is interrupted, the same command goes on there"
    print(line, file=sys.stderr, flush=True)
    shown = _quantize.Progress(lambda: None)

    def progress(stage: str, done: int, total: int, detail: str) -> None:
        if stage != "blocks":  # linears are counted through all blocks
            shown(stage, done, total, detail)

    made = nanoquant.quantize_lm(
        loaded.params,
        loaded.config,
        tokens,
        plan,
        key=jax.random.key(command.seed),
        blocks=blocks,
        work=work,
        progress=progress,
    )
    models.save(
        out,
        made.params,
        made.config,
        loaded.tokenizer,
        loaded.chat_template,
        kind="binary",
        extra={
            **loaded.extra,
            "quantized_from": loaded.name,
            "calibration": command.data or "stdlib",
            "label": made.config.label,
        },
    )
    result = report.Result(
        method="quantize",
        preset="cpu",
        seeds=(command.seed,),
        rows=made.rows,
        curves={"scale_losses": made.scale_losses},
        summary={
            "bits_per_weight": made.config.bits_per_weight,
            "blocks_done": made.config.blocks_done,
            "blocks": loaded.config.num_layers,
        },
        seconds=time.perf_counter() - started,
        command=command.words(),
    )
    result.save(out / "result.json")
    Console().print(report.table(_rows(made)))
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print(f"{made.config.label}: {size / 1e6:.1f} MB, was {loaded.bytes_on_disk / 1e6:.1f} MB on disk")
    if made.scale_losses:
        first, last = made.scale_losses[0], made.scale_losses[-1]
        print(f"scales: {first:.4f} to {last:.4f} nats per token from the model in full precision")
    print(f"model: {out}   rows: {out / 'result.json'}")
    if made.config.partial:
        print(f"unfinished: the same command with more --blocks, or without, goes on from {work}")
    else:
        quantize.WorkFolder.discard(work)
    print(f"go on with: effml evaluate {out}   or   effml generate {out} --prompt TEXT")
    return 0


def continues(out: Path) -> bool:
    """Whether `out` is a partly quantised model whose work lies beside it."""
    from effml.nn.hub import _files

    try:
        meta = _files.read_json(out / "effml.json")
    except ValueError:
        return False
    config = meta.get("config")
    if (
        meta.get("kind") != "binary"
        or not isinstance(config, dict)
        or not isinstance(config.get("model"), dict)
    ):
        return False
    partial = config.get("blocks_done", 0) < config["model"].get("num_layers", 0)
    return partial and out.with_name(out.name + ".partial").is_dir()


def _settings(command: Command) -> Any:
    from effml.quantize import nanoquant

    try:
        bits = float(command.bits or "1.0")
    except ValueError:
        raise ValueError(
            f"bits={command.bits!r} must be a number for nanoquant: bits per weight, such as 1.0 or 0.8"
        ) from None
    given: dict[str, Any] = {
        name: getattr(command, name)
        for name in ("multiple", "gamma", "init", "iterations")
        if getattr(command, name) is not None
    }
    if command.epochs is not None:
        given |= {f"{kind}_epochs": command.epochs for kind in ("dense", "factor", "scale")}
    if command.tuning_rate is not None:
        given["dense_rate"] = command.tuning_rate
        given |= {f"{kind}_rate": command.tuning_rate / 10 for kind in ("factor", "scale")}
    for without, names, why in (
        (command.init == "dual_svid", ("iterations",), "--init dual_svid does not iterate"),
        (command.epochs == 0, ("tuning_rate",), "nothing is tuned with --epochs 0"),
    ):
        for name in names:
            if without and getattr(command, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} has no use here, leave it out: {why}")
    return nanoquant.NanoQuantConfig(
        bits=bits, allow_over=command.allow_over, keep_dtype=command.keep_dtype, **given
    )


def _blocks(command: Command, loaded: LoadedModel) -> int | None:
    from effml._validate import count

    if command.blocks is not None and count("blocks", command.blocks) > loaded.config.num_layers:
        raise ValueError(
            f"blocks={command.blocks} must be at most {loaded.config.num_layers}, the layers of the model"
        )
    return command.blocks


def _show(plan: NanoQuantPlan, loaded: LoadedModel, blocks: int | None, tokens: int) -> None:
    from rich.console import Console

    from effml import report, trees

    Console().print(report.table(plan.summary()))
    before, after = trees.byte_count(loaded.params), plan.packed_bytes + plan.kept_bytes
    total = loaded.config.num_layers
    only = "" if blocks in (None, total) else f" (only {blocks} of {total} blocks will be done)"
    print(
        f"nanoquant: {plan.realised_bits:.4g} bits per weight, {plan.bits} asked for: {before / 1e6:.1f} MB of "
        f"parameters become {after / 1e6:.1f} MB{only}; about "
        f"{_quantize.duration(_seconds(plan, blocks or total, total, tokens))} on this machine"
    )


def _seconds(plan: NanoQuantPlan, blocks: int, total: int, tokens: int) -> float:
    """A rough guess from operation counts and one timed product."""
    settings = plan.settings
    rows = [row for row in plan.rows if row.layer == 0]
    weights = sum(row.inputs * row.outputs for row in rows)
    tuned = 6 * weights * tokens * len(rows) * (settings.dense_epochs + settings.factor_epochs)
    iterations = {"lb_admm": 400, "dbf_admm": 3 * 260, "dual_svid": 30}[settings.init]
    if settings.iterations is not None:
        iterations = settings.iterations
    solved = sum(
        row.rank * (8 * row.inputs * row.outputs + 8 * row.rank * (row.inputs + row.outputs)) for row in rows
    )
    scales = 8 * weights * tokens * total * settings.scale_epochs if blocks == total else 0
    counted = blocks * (tuned + solved * iterations) + scales + 6 * weights * tokens * total
    return 30 + counted / (0.5 * _quantize.products_per_second())


def _rows(made: QuantizedModel) -> list[dict[str, Any]]:
    """Each linear, or each block where those are many."""
    if len(made.rows) <= _MOST_ROWS:
        return [
            {
                "layer": row["layer"],
                "kernel": row["name"],
                "rank": row["rank"],
                "bits per weight": row["bits_per_weight"],
                "installed error": row["installed_error"],
                "block error": row["block_error"],
                "seconds": row["seconds"],
            }
            for row in made.rows
        ]
    table = []
    for layer in dict.fromkeys(row["layer"] for row in made.rows):
        own = [row for row in made.rows if row["layer"] == layer]
        table.append(
            {
                "layer": layer,
                "ranks": f"{min(row['rank'] for row in own)} to {max(row['rank'] for row in own)}",
                "bits per weight": made.config.bits_per_weight,
                "largest installed error": max(row["installed_error"] for row in own),
                "block error": own[0]["block_error"],
                "seconds": sum(row["seconds"] for row in own),
            }
        )
    return table
