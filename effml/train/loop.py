"""The training loop: steps, evaluations, checkpoints, metric writers and orderly ends.

The loop never waits for the step it has just started. It lets the device run at most two steps ahead, reads
metrics that have long been computed, and drains everything only before an evaluation or a checkpoint. What it
writes is a function of data and seed alone (no clock), so a run that was killed and resumed leaves the same
files as one that was not.
"""

from __future__ import annotations

import itertools
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from effml._validate import count
from effml.train._state import TrainState
from effml.train.checkpoint import Checkpoints
from effml.train.progress import ProgressUpdate

__all__ = ["FitResult", "NonFiniteLoss", "evaluate", "fit"]

_RUN_AHEAD = 2


class NonFiniteLoss(FloatingPointError):
    """The loss or its gradient stopped being a number.

    Attributes:
        step: number of the first bad step, from 1.
        last_good_checkpoint: step of the newest checkpoint, all of whose values are finite, or None.
        state: the state as it was before the bad step.
    """

    def __init__(self, step: int, last_good_checkpoint: int | None, state: TrainState | None = None):
        self.step, self.last_good_checkpoint, self.state = step, last_good_checkpoint, state
        kept = (
            "there is no earlier checkpoint"
            if last_good_checkpoint is None
            else f"the last good checkpoint is step {last_good_checkpoint}"
        )
        super().__init__(
            f"the loss or its gradient is not finite at step {step}; {kept}. "
            "Lower the learning rate, or limit the gradient with clip_norm where the optimizer allows it"
        )


@dataclass(frozen=True)
class FitResult:
    """What `fit` leaves.

    Attributes:
        state: the last state.
        history: one dict per step of this call: `step`, `loss`, `gradient_norm`, `tokens`, ... and, where an
            evaluation took place, its numbers with `evaluation_` before their names.
        stopped: finished; interrupted (by a signal); or exhausted (the batches ended first).
        signal_number: the signal that interrupted, or None. A command line exits with 128 + this number.
        seconds: wall time of this call.
        tokens: tokens trained on in this call.
        tokens_per_second: rate after the first step (which compiles), without evaluations and checkpoints.
    """

    state: TrainState
    history: list[dict[str, Any]]
    stopped: Literal["finished", "interrupted", "exhausted"]
    signal_number: int | None
    seconds: float
    tokens: float
    tokens_per_second: float


def evaluate(
    eval_step: Callable[[PyTree, PyTree], tuple[Any, dict[str, Any]]],
    params: PyTree,
    batches: Iterable[PyTree],
) -> dict[str, float]:
    """The loss over all batches, each target counted once.

    nats = Σ lossᵢ tokensᵢ / Σ tokensᵢ, summed in float64, so that a last batch that is partly padding (weight
    0) counts for what it holds and no more.

    Args:
        eval_step: as from `make_eval_step`: (params, batch) to (mean loss, metrics with "tokens").
        params: the parameters.
        batches: finitely many batches.

    Returns:
        nats_per_token, perplexity (its exponential) and tokens.

    Raises:
        ValueError: if there is no batch, or none has a token.

    Example:
        >>> step = lambda params, batch: (batch["loss"], {"tokens": batch["n"]})
        >>> evaluate(step, None, [{"loss": 1.0, "n": 3}, {"loss": 5.0, "n": 1}])["nats_per_token"]
        2.0
    """
    pending = [(loss, metrics["tokens"]) for loss, metrics in (eval_step(params, b) for b in batches)]
    pairs = [(float(loss), float(tokens)) for loss, tokens in jax.device_get(pending)]
    tokens = math.fsum(n for _, n in pairs)
    if tokens <= 0:
        raise ValueError(f"nothing to evaluate: {len(pairs)} batches with {tokens:g} tokens")
    nats = math.fsum(loss * n for loss, n in pairs if n > 0) / tokens
    return {
        "nats_per_token": nats,
        "perplexity": math.exp(nats) if nats < 700 else math.inf,
        "tokens": tokens,
    }


class _Signals:
    """Notes SIGINT and SIGTERM; a second one acts as it did before."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def agreed(self, regular: bool) -> bool:
        """Whether to stop now: all processes must stop after the same step, so they ask each other now and
        then."""
        if jax.process_count() == 1:
            return self.number is not None
        if not regular:
            return False
        from jax.experimental import multihost_utils

        seen = multihost_utils.process_allgather(np.int32(self.number or 0))
        if not np.any(seen):
            return False
        self.number = int(np.max(seen))
        return True


class _Pending(NamedTuple):
    step: int
    metrics: dict[str, Any]
    further: dict[str, float]


@dataclass
class _Log:
    """Metrics on their way from the device to writers and history."""

    writers: Sequence[Any]
    pending: deque[_Pending] = field(default_factory=deque)
    history: list[dict[str, Any]] = field(default_factory=list)
    tokens: float = 0.0
    bad_step: int | None = None

    def wait(self) -> None:
        """Blocks until the device is at most two steps behind."""
        if len(self.pending) > _RUN_AHEAD:
            jax.block_until_ready(self.pending[-1 - _RUN_AHEAD].metrics["loss"])

    def drain(self, keep: int = 0) -> None:
        """Hands on all but the newest `keep` steps; stops at the first bad one."""
        ready = [self.pending.popleft() for _ in range(len(self.pending) - keep)]
        values = jax.device_get([entry.metrics for entry in ready])
        for entry, metrics in zip(ready, values):
            bad = int(metrics.pop("first_bad_step", -1))
            row = {name: float(value) for name, value in metrics.items()} | entry.further
            if bad < 0 and not math.isfinite(row["loss"]):
                bad = entry.step  # a step function of the caller's own, without the guard
            if bad >= 0:
                self.bad_step = bad
                break
            self.tokens += row.get("tokens", 0.0)
            self.history.append({"step": entry.step, **row})
            for writer in self.writers:
                writer.write(entry.step, row)
        self.flush()

    def flush(self) -> None:
        for writer in self.writers:
            writer.flush()


@jax.jit
def _all_finite(tree: PyTree) -> jax.Array:
    leaves = [a for a in jax.tree.leaves(tree) if jnp.issubdtype(a.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in leaves])) if leaves else jnp.bool_(True)


def fit(
    step: Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Any]]],
    state: TrainState,
    batches: Iterable[PyTree],
    *,
    steps: int,
    evaluate: Callable[[PyTree], dict[str, float]] | None = None,
    evaluate_every: int = 0,
    checkpoints: Checkpoints | None = None,
    checkpoint_every: int = 0,
    resume: bool = False,
    log_every: int = 10,
    writers: Sequence[Any] = (),
    on_progress: Callable[[ProgressUpdate], None] | None = None,
) -> FitResult:
    """Trains until `steps` updates have been made in all, counting those of the run that is resumed.

    Evaluation and checkpoint also take place after the last step. SIGINT or SIGTERM: the step under way is
    finished, a checkpoint written, and the result says "interrupted"; a second signal acts at once.

    Args:
        step: from `make_step`; it consumes the state.
        state: from `init_state`, or restored by the caller.
        batches: iterable of batches. If its iterator has `get_state()`/`set_state()`, as that of
            `effml.data.batches` has, its position is part of the checkpoint; of others, a resumed run skips as
            many batches as it had used.
        steps: the step number to end at.
        evaluate: function of the parameters giving named numbers.
        evaluate_every: steps between evaluations; 0 evaluates at the end only.
        checkpoints: where to save, or None.
        checkpoint_every: steps between checkpoints; 0 saves at the end only.
        resume: first restore the newest checkpoint, if there is one.
        log_every: steps between two deliveries of metrics to the writers (each step is one row all the same).
        writers: objects with `resume(step)`, `write(step, metrics)`, `flush()`; only process 0 uses them.
        on_progress: called after each step with a `ProgressUpdate`; its `close`, if any, is called at the
            end.

    Returns:
        The final state, the history and what the run cost.

    Raises:
        NonFiniteLoss: when a loss, a gradient or (before a checkpoint) a parameter is not finite. Bad values
            are never saved.
        ValueError: for counts that are not positive, `checkpoint_every` or `resume` without `checkpoints`, or
            a folder that already holds checkpoints of another run.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from effml.train import fit, init_state, make_step
        >>> optimizer = optax.sgd(0.1)
        >>> step = make_step(lambda params, batch: jnp.mean((params - batch) ** 2), optimizer)
        >>> state = init_state(jax.random.key(0), jnp.float32(0), optimizer)
        >>> result = fit(step, state, [np.ones(4, np.float32)] * 20, steps=20)
        >>> result.stopped, len(result.history), round(float(result.state.params), 2)
        ('finished', 20, 0.99)
    """
    count("steps", steps)
    count("log_every", log_every)
    for name, value in (("evaluate_every", evaluate_every), ("checkpoint_every", checkpoint_every)):
        if value < 0:
            raise ValueError(f"{name}={value} must not be negative (0 turns it off)")
    if checkpoints is None and (checkpoint_every or resume):
        raise ValueError("checkpoint_every and resume need checkpoints=Checkpoints(folder)")

    started = time.perf_counter()
    iterator = iter(batches)
    position: Any = iterator if hasattr(iterator, "get_state") and hasattr(iterator, "set_state") else None
    saved = checkpoints.latest_step() if checkpoints is not None else None
    if checkpoints is not None and saved is not None:
        if resume:
            state, data_state = checkpoints.restore(state)
            if position is not None and data_state is not None:
                position.set_state(data_state)
            else:
                deque(itertools.islice(iterator, int(state.step)), maxlen=0)
        elif saved != int(state.step):
            raise ValueError(
                f"{checkpoints.folder} already holds checkpoints up to step {saved}; "
                "pass resume=True to go on from there, or choose another folder"
            )
    first = int(state.step)
    log = _Log(writers if jax.process_index() == 0 else ())
    for writer in log.writers:
        writer.resume(first)
    stopped: Literal["finished", "interrupted", "exhausted"] = "finished"
    clock, paused, first_tokens = started, 0.0, 0.0

    def rate() -> float:
        seconds = time.perf_counter() - clock - paused
        return max(log.tokens - first_tokens, 0.0) / seconds if seconds > 0 else 0.0

    def settle() -> None:
        log.drain()
        if log.bad_step is not None:
            raise NonFiniteLoss(log.bad_step, saved, state)

    def save(number: int) -> None:
        nonlocal saved
        if checkpoints is None or saved == number:
            return
        settle()
        if not bool(_all_finite((state.params, state.optimizer_state))):
            raise NonFiniteLoss(number, saved, state)
        checkpoints.save(state, position.get_state() if position is not None else None)
        saved = number

    number = first
    try:
        with _Signals() as signals:
            while number < steps:
                try:
                    batch = next(iterator)
                except StopIteration:
                    stopped = "exhausted"
                    break
                state, metrics = step(state, batch)
                number += 1
                log.pending.append(_Pending(number, dict(metrics), {}))
                if number == first + 1:
                    jax.block_until_ready(metrics["loss"])
                    clock, paused = time.perf_counter(), 0.0
                    first_tokens = float(metrics.get("tokens", 0.0))
                log.wait()
                regular = number % log_every == 0
                if regular:
                    log.drain(keep=_RUN_AHEAD)
                    if log.bad_step is not None:
                        settle()
                last = number == steps
                if evaluate is not None and (last or (evaluate_every and number % evaluate_every == 0)):
                    jax.block_until_ready(state)
                    before = time.perf_counter()
                    scores = evaluate(state.params)
                    log.pending[-1].further.update({f"evaluation_{k}": float(v) for k, v in scores.items()})
                    paused += time.perf_counter() - before
                if checkpoint_every and number % checkpoint_every == 0:
                    log.drain()
                    before = time.perf_counter()
                    save(number)
                    paused += time.perf_counter() - before
                if on_progress is not None:
                    done = number - first - 1
                    left = (time.perf_counter() - clock) / done * (steps - number) if done else None
                    row = log.history[-1] if log.history else {}
                    on_progress(ProgressUpdate(number, steps, row, rate(), left))
                if not last and signals.agreed(regular):
                    stopped = "interrupted"
                    break
            settle()
            per_second = rate()
            if number > first:
                save(number)
    finally:
        # Whatever ends the loop, metrics that were computed reach the files, and the terminal is left clean.
        if log.bad_step is None and log.pending:
            log.drain()
        log.flush()
        close = getattr(on_progress, "close", None)
        if close is not None:
            close()
    seconds = time.perf_counter() - started
    if number - first < 2:
        per_second = log.tokens / seconds
    return FitResult(state, log.history, stopped, signals.number, seconds, log.tokens, per_second)
