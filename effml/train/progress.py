"""Progress of long work: a live bar with rate and time left on a terminal, plain lines every few seconds
elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from effml._validate import positive

__all__ = ["Progress", "ProgressUpdate"]


class ProgressUpdate(NamedTuple):
    """Where training stands.

    Fields: `step` and `steps`; `metrics` of the newest step that has been read back (it lags behind, and is
    empty at first); `tokens_per_second`; `seconds_left`, None while there is no rate.
    """

    step: int
    steps: int
    metrics: Mapping[str, Any]
    tokens_per_second: float
    seconds_left: float | None


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Shows the updates of `fit`; give it as `on_progress`.

    Args:
        steps: step number at the end.
        label: what is running, shown in front.
        stream: where to write; None is standard error.
        interval: seconds between two plain lines.

    Example:
        >>> import sys
        >>> progress = Progress(10, label="adamw", stream=sys.stdout)
        >>> progress(ProgressUpdate(10, 10, {"loss": 2.5}, 1234.0, 0.0))
        adamw 10/10 | loss 2.5000 | 1,234 tokens/s | 0:00 left
    """

    def __init__(self, steps: int, label: str = "train", stream: Any = None, interval: float = 5.0):
        self.steps = int(positive("steps", steps))
        self.label = label
        self.interval = interval
        self._stream = stream
        self._last_line: float | None = None
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, update: ProgressUpdate) -> None:
        """Shows one update; the last one closes the display."""
        stream = sys.stderr if self._stream is None else self._stream
        if stream.isatty():
            self._show_bar(update, stream)
        else:
            now = time.monotonic()
            due = self._last_line is None or now - self._last_line >= self.interval
            if (due and update.metrics) or update.step >= update.steps:
                self._last_line = now
                print(self._line(update), file=stream, flush=True)
        if update.step >= update.steps:
            self.close()

    def _text(self, update: ProgressUpdate) -> list[str]:
        loss = update.metrics.get("loss")
        held_out = update.metrics.get("evaluation_nats_per_token")
        parts = [] if loss is None else [f"loss {loss:.4f}"]
        if held_out is not None:
            parts.append(f"held out {held_out:.4f}")
        parts.append(f"{update.tokens_per_second:,.0f} tokens/s")
        return parts

    def _line(self, update: ProgressUpdate) -> str:
        parts = [f"{self.label} {update.step}/{update.steps}", *self._text(update)]
        return " | ".join([*parts, f"{_duration(update.seconds_left)} left"])

    def _show_bar(self, update: ProgressUpdate, stream: Any) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                console=Console(file=stream),
            )
            self._task = self._bar.add_task(self.label, total=self.steps, text="")
            self._bar.start()
        left = f"{_duration(update.seconds_left)} left"
        self._bar.update(
            self._task,
            completed=update.step,
            total=update.steps,
            text=" · ".join([*self._text(update), left]),
        )

    def close(self) -> None:
        """Leaves the terminal as it was; safe to call twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
