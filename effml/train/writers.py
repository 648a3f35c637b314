"""Where metrics go: JSON lines, TensorBoard, Weights & Biases, Trackio.

A writer has `resume(step)`, called once before the first step, which forgets what was written after that
step; `write(step, metrics)`; `flush()`; and `close()`. The packages behind the last three are imported when
one is made.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from effml._validate import missing_package

__all__ = ["JsonLinesWriter", "TensorBoardWriter", "TrackioWriter", "WandbWriter", "read_json_lines"]


def read_json_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads a metrics file; a last line that was cut short by a crash is left out.

    Raises:
        ValueError: if another line is not a JSON object.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "metrics.jsonl")
        ...     _ = path.write_text('{"step": 1}\\n{"st')
        ...     read_json_lines(path)
        [{'step': 1}]
    """
    return [row for _, row in _lines(Path(path))]


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    whole, newline, _ = path.read_text(encoding="utf-8").rpartition("\n")
    rows = []
    for number, line in enumerate(whole.split("\n") if newline else (), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is not JSON ({error}); move the file away") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"{path} line {number} is not an object with a step; is it a metrics file?")
        rows.append((line, row))
    return rows


class JsonLinesWriter:
    """Writes one JSON object per step to a file: `{"step": 3, "loss": 2.5, ...}`.

    Rows hold no clock, so two runs of one seed write the same bytes. Values that are not finite become null.

    Args:
        path: the file; made with its folder at the first `resume` or `write`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = JsonLinesWriter(Path(folder, "metrics.jsonl"))
        ...     writer.resume(0)
        ...     writer.write(1, {"loss": 0.5})
        ...     writer.close()
        ...     read_json_lines(writer.path)
        [{'step': 1, 'loss': 0.5}]
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._file: Any = None

    def resume(self, step: int) -> None:
        """Drops every row after `step`, and a torn last line; `resume(0)` starts the file afresh.

        Raises:
            ValueError: if the file is not a metrics file (it is then left as it is).
        """
        self.close()
        if self.path.exists():
            kept = "".join(f"{line}\n" for line, row in _lines(self.path) if row["step"] <= step)
            temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
            temporary.write_text(kept, encoding="utf-8")
            os.replace(temporary, self.path)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds one row."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8")
        row = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in {"step": step, **metrics}.items()
        }
        self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def flush(self) -> None:
        """Brings the rows to the disk, so that a checkpoint written next never runs ahead of them."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flushes and closes; a later `write` opens the file again."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None


class TensorBoardWriter:
    """Writes scalars as TensorBoard events.

    Args:
        folder: the event folder.

    Raises:
        ImportError: without tensorboardX, with the line that installs it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = TensorBoardWriter(folder)
        ...     writer.write(1, {"loss": 0.5})
        ...     writer.close()
        ...     len(list(Path(folder).iterdir()))
        1
    """

    def __init__(self, folder: str | os.PathLike[str]):
        try:
            import tensorboardX
        except ImportError as error:
            raise missing_package(
                "tensorboardX", "pip install 'effml[tracking]'", "write TensorBoard events"
            ) from error
        self._package = tensorboardX
        self.folder = Path(folder)
        self._events: Any = None

    def resume(self, step: int) -> None:
        """Tells TensorBoard to ignore what was recorded after `step`."""
        self._events = self._package.SummaryWriter(str(self.folder), purge_step=step + 1 if step else None)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds one scalar for each number in `metrics`."""
        if self._events is None:
            self.resume(0)
        events: Any = self._events
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                events.add_scalar(name, value, step)

    def flush(self) -> None:
        """Brings the events to the disk."""
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Closes the event file."""
        if self._events is not None:
            self._events.close()
            self._events = None


class _RunWriter:
    """What the two hosted trackers share: `init`, `log(metrics, step=)`, `finish`."""

    _package: str

    def __init__(self, project: str, **options: Any):
        import importlib

        try:
            self._module = importlib.import_module(self._package)
        except ImportError as error:
            purpose = f"track runs with {self._package}"
            raise missing_package(self._package, f"pip install {self._package}", purpose) from error
        self._run = self._module.init(project=project, **options)

    def resume(self, step: int) -> None:
        """Does nothing: what the service has can't be taken back. A resumed run sends some rows again."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs one row."""
        self._module.log(dict(metrics), step=step)

    def flush(self) -> None:
        """Nothing to do: the package sends by itself."""

    def close(self) -> None:
        """Ends the run."""
        self._module.finish()


class WandbWriter(_RunWriter):
    """Logs to Weights & Biases.

    Args:
        project: project name.
        **options: passed on to `wandb.init`, such as `name=`, `config=`, `id=` with `resume="allow"`.

    Raises:
        ImportError: without wandb, with the line that installs it.

    Example:
        >>> WandbWriter("effml")  # doctest: +SKIP
    """

    _package = "wandb"


class TrackioWriter(_RunWriter):
    """Logs to Trackio, which keeps its database on this machine.

    Args:
        project: project name.
        **options: passed on to `trackio.init`.

    Raises:
        ImportError: without trackio, with the line that installs it.

    Example:
        >>> TrackioWriter("effml")  # doctest: +SKIP
    """

    _package = "trackio"
