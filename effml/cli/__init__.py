"""The `effml` command: a thin face over the library, one small module per command.

A command is a module of this folder that holds a frozen dataclass `Command` with a `run() -> int` method. Its
first docstring line is what `effml --help` shows; an underscore behind its name keeps Python's own name free
(`list_.py`). Nothing heavy is imported before a command is chosen.
"""

from __future__ import annotations

import builtins
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["commands", "main"]

_FIRST = ("pipeline", "train", "quantize", "evaluate", "generate")
_INTERRUPTED = 130


def commands() -> dict[str, str]:
    """The commands and their one-line summaries, main job first.

    Returns:
        A dict from command name to the first line of its module's docstring.

    Example:
        >>> list(commands())[0]
        'pipeline'
    """
    found = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        with path.open(encoding="utf-8") as file:
            found[path.stem.rstrip("_")] = file.readline().strip().strip('"').rstrip(".")
    return dict(sorted(found.items(), key=lambda item: (item[0] not in _FIRST, _order(item[0]), item[0])))


def _order(name: str) -> int:
    return _FIRST.index(name) if name in _FIRST else 0


def _help() -> str:
    from effml import __version__

    width = max(map(len, commands()))
    rows = [f"  {name:<{width}}  {summary}" for name, summary in commands().items()]
    return "\n".join(
        [
            f"effml {__version__}: machine learning with less memory, fewer bits and fewer model calls.",
            "",
            "usage: effml COMMAND [options]      (effml COMMAND --help shows the options)",
            "",
            *rows,
            "",
            "Start with `effml pipeline`: it trains, measures and serves a small language model on real text.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the words after `effml`; `sys.argv[1:]` when None.

    Returns:
        0 when all went well, 1 when a claim did not hold, 2 for input that can't be used, 130 when interrupted.
        Set `EFFML_TRACEBACK=1` to see the full traceback of an error.

    Example:
        >>> main(["--version"])
        effml 0.1.0
        0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] == "--version":
        from effml import __version__

        print(f"effml {__version__}")
        return 0
    name, *rest = words
    if argv is None and not os.environ.get("EFFML_TRACEBACK"):
        _quieten_orbax()
    try:
        if name not in commands():
            from effml._validate import one_of

            one_of("command", name, commands())
        return _run(name, rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has gone: that is its right, and no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except _expected_errors() as error:
        if os.environ.get("EFFML_TRACEBACK"):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, MemoryError):
            message = f"not enough memory ({message}); make the batch, the length or the model smaller"
        print(f"effml {name}: {message}", file=sys.stderr)
        return 2


def _quieten_orbax() -> None:
    """Leaves out the tracebacks that a failed checkpoint prints by the way; the error itself gets one line.

    Orbax logs a read or write that failed and abandons its tasks: asyncio logs them again, and TensorStore's threads
    call back into an event loop that is closed.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(
            lambda record: record.levelno < logging.ERROR or not record.exc_info
        )
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def _expected_errors() -> tuple[type[Exception], ...]:
    """What a message answers. Errors of the device, such as no memory left, have a class of JAX's own."""
    jax = sys.modules.get("jax")  # without it there can be no such error, and importing it takes long
    errors = (ValueError, TypeError, ImportError, OSError, OverflowError, FloatingPointError, MemoryError)
    return errors if jax is None else (*errors, jax.errors.JaxRuntimeError)


def _run(name: str, rest: list[str]) -> int:
    import tyro

    suffix = "_" if hasattr(builtins, name) else ""
    module = importlib.import_module(f"effml.cli.{name}{suffix}")
    command = tyro.cli(module.Command, prog=f"effml {name}", description=module.__doc__, args=rest)
    return int(command.run() or 0)
