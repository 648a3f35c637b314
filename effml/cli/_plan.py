"""The work behind `effml plan`: one process per optimizer, because JAX reads its environment once, as it starts."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effml._validate import count, one_of

if TYPE_CHECKING:
    from effml.cli.plan import Command

_ERRORS = (ValueError, TypeError, ImportError)
# These exchange whole matrices over the mesh (LiMuon unless by factors or svd).
_DISTRIBUTED = ("limuon", "normuon")
_NOT_WORDS = ("distribute", "labels", "weight_dimension_numbers")  # a mesh, functions and trees
_TWO_DEVICES = ("v4", "v5p")  # a chip of these may show two devices
_GIB = 2**30


def requests(command: Command) -> list[dict[str, Any]]:
    """What to compile, one JSON object per optimizer; everything that can be checked without a compiler is.

    Raises:
        ValueError, TypeError: for a name that is not known, sizes that do not fit each other, or an optimizer that
            refuses its options or the model.
        ImportError: for a compiler that is not installed.
    """
    from effml.optimize import OPTIMIZERS
    from effml.train import parse_mesh
    from effml.train.plan import model_config, topology

    parsed = topology.parse_topology(command.topology)
    config = model_config(command.model)
    if not command.optimizer:
        raise ValueError(f"optimizer is empty; give one or several of {', '.join(OPTIMIZERS)}")
    for name in ("compute_dtype", "param_dtype"):
        one_of(name, getattr(command, name), ("bfloat16", "float32"))
    for name in ("sequences", "length", "accumulate"):
        count(name, getattr(command, name))
    if command.sequences % command.accumulate:
        raise ValueError(
            f"sequences={command.sequences} does not split into accumulate={command.accumulate} parts"
        )
    axes = parse_mesh(command.mesh) if command.mesh else {"fsdp": parsed.device_count}
    needed = 1
    for size in axes.values():
        needed *= size
    # The process that has the devices compares again.
    allowed = (1, 2) if parsed.kind in _TWO_DEVICES else (1,)
    if needed not in (factor * parsed.device_count for factor in allowed):
        raise ValueError(
            f"mesh={command.mesh!r} needs {needed} devices, but {command.topology} has {parsed.device_count}; "
            f"the sizes must multiply to {parsed.device_count}, for example fsdp={parsed.device_count}"
        )
    for written in command.optimizer:
        _check_optimizer(written, dataclasses.replace(config, param_dtype=command.param_dtype))
    topology.check_installed(parsed)
    shared = dataclasses.asdict(command) | {
        "out": None,
        "config": config.to_dict(),
        "axes": axes if command.mesh else {},
    }
    return [shared | {"optimizer": name} for name in command.optimizer]


def _check_optimizer(written: str, config: Any) -> None:
    """Builds an optimizer and its state's shapes, without a mesh: complains here, not in a minute."""
    import jax

    from effml.nn.transformer import init_params

    name, options = parse_optimizer(written)
    optimizer = _make(name, options)
    jax.eval_shape(lambda: optimizer.init(init_params(jax.random.key(0), config, scanned=True)))


def _make(name: str, options: Mapping[str, Any]) -> Any:
    from effml.optimize import make_optimizer

    defaults: dict[str, Any] = {"learning_rate": 1e-3, "weight_decay": 0.1}
    return make_optimizer(name, **(defaults | dict(options)))


def make_folder(path: Path) -> None:
    """Makes the folder of a file to be written.

    Raises:
        OSError: if there can be no such file, in one sentence.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"out={str(path)!r}: its folder can't be made ({error.strerror})") from error
    if path.is_dir():
        raise OSError(f"out={str(path)!r} is a folder; give the name of a JSON file")


def parse_optimizer(written: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `name` or `name:option=value,option=value`; values are JSON, or else words.

    Raises:
        ValueError: for an unknown name (with the nearest known one), an option that is not option=value, or one
            whose value is neither a number nor a word.

    Example:
        >>> parse_optimizer("limuon:rank=16,direction=factors")
        ('limuon', {'rank': 16, 'direction': 'factors'})
    """
    from effml.optimize import OPTIMIZERS

    name, _, rest = written.partition(":")
    one_of("optimizer", name, OPTIMIZERS)
    options: dict[str, Any] = {}
    for entry in filter(None, _entries(rest)):
        option, equals, value = entry.partition("=")
        if not equals or not option.isidentifier():
            raise ValueError(f"optimizer={written!r}: {entry!r} is not of the form option=value")
        if option in _NOT_WORDS:
            raise ValueError(
                f"optimizer={written!r}: {option} can't be given here: the mesh and the model decide it"
            )
        try:
            options[option] = json.loads(value)
        except ValueError:
            options[option] = value
    return name, options


def _entries(text: str) -> list[str]:
    """The pieces between the commas that stand outside all brackets."""
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces


def compile_elsewhere(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs `answer` in a process with the environment of the topology.

    Raises:
        ValueError, TypeError, ImportError: as `answer` raises them.
        ChildProcessError: if the compiler fails otherwise, or the process ends without an answer.
    """
    from effml.train.plan import topology

    environment = topology.environment(topology.parse_topology(request["topology"]))
    # Not the working directory: a folder called libtpu in it would hide the package.
    source = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (source, environment.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        program = subprocess.run(
            [sys.executable, "-P", "-m", "effml.cli._plan", str(path)],
            input=json.dumps(request),
            env=environment,
            text=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        if not path.exists():
            last = program.stderr.strip().splitlines()[-3:]
            raise ChildProcessError(
                f"the compiler's process ended with code {program.returncode}: {' '.join(last)}"
            )
        made = json.loads(path.read_text(encoding="utf-8"))
    if "error" in made:
        kind = next((kind for kind in _ERRORS if kind.__name__ == made["kind"]), ChildProcessError)
        raise kind(made["error"])
    return made


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Plans one optimizer, in this process."""
    from effml.nn.transformer import TransformerConfig
    from effml.train import plan

    topology = plan.parse_topology(request["topology"])
    mesh = plan.planning_mesh(request["axes"], topology)
    loss, init = plan.language_model(
        TransformerConfig.from_dict(request["config"]),
        mesh,
        **{name: request[name] for name in ("compute_dtype", "param_dtype", "rematerialize")},
    )
    optimizer, options = optimizer_for(request["optimizer"], mesh)
    rows = request["sequences"] * mesh.shape["data"] * mesh.shape["fsdp"]
    about = {name: request[name] for name in _ASKED} | {
        "config": request["config"],
        "versions": _versions(),
    }
    try:
        made = plan.plan_step(
            loss,
            init,
            optimizer,
            plan.token_batch(rows, request["length"]),
            mesh,
            platform=topology.platform,
            only_lower=topology.only_lower,
            accumulate=request["accumulate"],
            **options,
        )
    except plan.DoesNotFit as error:
        limits = {"message": str(error), "needed_bytes": error.needed, "available_bytes": error.available}
        return about | {"fits": False, **limits, "host_peak_bytes": _host_peak()}
    return about | {"fits": True, **made.to_dict(), "host_peak_bytes": _host_peak()}


_ASKED = (
    *("model", "optimizer", "topology", "sequences", "length", "accumulate"),
    *("compute_dtype", "param_dtype", "rematerialize"),
)


def optimizer_for(written: str, mesh: Any) -> tuple[Any, dict[str, Any]]:
    """The optimizer on a mesh, and what else `make_step` needs for it."""
    from effml import optimize

    name, options = parse_optimizer(written)
    # Without Newton-Schulz there is nothing to spread.
    alone = options.get("direction") == "factors" or options.get("polar") == "svd"
    if name in _DISTRIBUTED and mesh.shape["fsdp"] > 1 and not alone:
        spread = ("data",) if mesh.shape["data"] > 1 else ()
        options["distribute"] = optimize.Distribution(mesh, "fsdp", spread=spread)
    optimizer = _make(name, options)
    two_point = name in optimize.TWO_POINT
    return optimizer, {"extra_args": optimize.second_gradient} if two_point else {}


def _versions() -> dict[str, str]:
    from effml import report

    found = report.versions(("effml", "jax", "jaxlib", "optax", "libtpu"))
    return {name: version for name, version in found.items() if version}


def _host_peak() -> int:
    """Bytes of memory that this process has had at most (`ru_maxrss` counts KiB on Linux, bytes on macOS)."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def show(plans: Sequence[Mapping[str, Any]]) -> None:
    """Prints one column per optimizer, then every collective."""
    from rich.console import Console
    from rich.table import Table

    console, first = Console(), plans[0]
    per = "x".join(f"{name}={size}" for name, size in first.get("mesh", {}).items() if size > 1)
    table = Table(
        title=f"{first['model']} on {first['topology']} ({per or 'one device'}), "
        f"{first['sequences']} x {first['length']} tokens on each device",
        caption=", ".join(f"{name} {version}" for name, version in first["versions"].items()),
    )
    table.add_column("of one device")
    for plan in plans:
        table.add_column(plan["optimizer"], justify="right")
    for label, cell in _ROWS.items():
        table.add_row(label, *(_cell(cell, plan) for plan in plans))
    console.print(table)
    for plan in plans:
        if not plan["fits"]:
            console.print(f"{plan['optimizer']} {plan['message']}", markup=False)
        elif plan["collectives"] is None:
            console.print(
                f"{plan['optimizer']} was only lowered: without the CUDA plugin (pip install 'effml[cuda12]') there is "
                "no compiler to say what is sent and kept",
                markup=False,
            )
    _show_collectives(console, plans)


def _show_collectives(console: Any, plans: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title="collectives of one device in one step")
    for column in ("optimizer", "kind", "devices", "calls", "bytes", "ring bytes"):
        table.add_column(column, justify="left" if column in ("optimizer", "kind") else "right")
    for plan in plans:
        for row in plan.get("collectives") or ():
            sizes = (_bytes(row["bytes"]), _bytes(row["ring_bytes"]))
            table.add_row(plan["optimizer"], row["kind"], str(row["group"]), f"{row['calls']:,}", *sizes)
    if table.row_count:
        console.print(table)
    if any(loop["trips"] is None for plan in plans for loop in plan.get("loops", ())):
        console.print(
            "loops that run until they converge have no number of trips: what they hold is counted once"
        )


def _bytes(size: int) -> str:
    for unit, name in ((_GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


def _cell(cell: Any, plan: Mapping[str, Any]) -> str:
    try:
        return cell(plan)
    except (KeyError, TypeError):
        return "-"  # not known: the step does not fit, or was only lowered


_ROWS: dict[str, Any] = {
    "parameters": lambda plan: _bytes(plan["parameter_bytes"]),
    "optimizer state": lambda plan: _bytes(plan["optimizer_bytes"]),
    "activations, gradients, scratch": lambda plan: _bytes(plan["activation_bytes"]),
    "peak": lambda plan: _bytes(plan["peak_bytes"]),
    "FLOPs": lambda plan: f"{plan['device_flops']:.3g}",
    "model FLOPs / devices": lambda plan: f"{plan['model_flops'] / plan['devices']:.3g}",
    "optimizer FLOPs / devices": lambda plan: f"{plan['optimizer_flops'] / plan['devices']:.3g}",
    "work over what was asked for": lambda plan: f"{plan['repeated_work']:.2f}",
    "sent (rings)": lambda plan: _bytes(plan["ring_bytes"]),
    "seconds to compile": lambda plan: f"{plan['seconds']['compile']:.0f}",
    "memory to compile": lambda plan: _bytes(plan["host_peak_bytes"]),
}


def main() -> None:
    """Reads a request from standard input and writes the answer, or the error, to the file named."""
    request = json.load(sys.stdin)
    try:
        made = answer(request)
    except _ERRORS as error:
        kind = next(kind for kind in _ERRORS if isinstance(error, kind))
        made = {"error": str(error), "kind": kind.__name__}
    except RuntimeError as error:
        made = {"error": " ".join(str(error).split()), "kind": "RuntimeError"}
    Path(sys.argv[1]).write_text(json.dumps(made), encoding="utf-8")


if __name__ == "__main__":
    main()
