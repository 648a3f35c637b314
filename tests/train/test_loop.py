from __future__ import annotations

import json
import math
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effml.train import (
    Checkpoints,
    JsonLinesWriter,
    NonFiniteLoss,
    fit,
    init_state,
    make_step,
    read_json_lines,
)


def loss(params, batch):
    return jnp.mean((params - batch) ** 2)


OPTIMIZER = optax.sgd(0.1, momentum=0.9)
STEP = make_step(loss, OPTIMIZER)


def start():
    return init_state(jax.random.key(0), jnp.zeros(2), OPTIMIZER)


def targets(n, bad=()):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(n, 4, 2)).astype(np.float32)
    for i in bad:
        rows[i] = np.nan
    return list(rows)


class Stream:
    """Batches with a position, as effml.data gives them."""

    def __init__(self, rows):
        self.rows, self.index = rows, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.index == len(self.rows):
            raise StopIteration
        self.index += 1
        return self.rows[self.index - 1]

    def get_state(self):
        return {"next_index": self.index}

    def set_state(self, state):
        self.index = state["next_index"]


class Recorder:
    def __init__(self):
        self.rows, self.resumed, self.flushed = [], None, 0

    def resume(self, step):
        self.resumed = step

    def write(self, step, metrics):
        self.rows.append((step, dict(metrics)))

    def flush(self):
        self.flushed = len(self.rows)


def momentum_oracle(rows):
    p, m, losses = np.zeros(2), np.zeros(2), []
    for row in rows:
        losses.append(((p - row) ** 2).mean())
        m = 0.9 * m + 2 * (p - row).sum(0) / row.size
        p = p - 0.1 * m
    return p, losses


@pytest.mark.parametrize("log_every", [1, 4, 100])
def test_every_step_is_one_row_whatever_the_rhythm_of_logging(log_every):
    writer = Recorder()
    rows = targets(11)
    result = fit(STEP, start(), rows, steps=11, log_every=log_every, writers=[writer])
    params, losses = momentum_oracle(rows)
    np.testing.assert_allclose(result.state.params, params, rtol=1e-5)
    assert [step for step, _ in writer.rows] == list(range(1, 12))
    np.testing.assert_allclose([row["loss"] for _, row in writer.rows], losses, rtol=1e-5)
    assert [row["step"] for row in result.history] == list(range(1, 12))
    assert "first_bad_step" not in result.history[0]
    assert (result.stopped, result.signal_number, writer.resumed, writer.flushed) == ("finished", None, 0, 11)
    assert result.tokens == 44
    assert result.tokens_per_second > 0


def test_metrics_are_read_while_the_device_is_at_most_two_steps_ahead():
    class Watcher(Recorder):
        def write(self, step, metrics):
            super().write(step, metrics)
            seen.append((step, batches.index))

    seen = []
    batches = Stream(targets(20))
    fit(STEP, start(), batches, steps=20, log_every=5, writers=[Watcher()])
    assert all(used - step >= 2 for step, used in seen if used < 20)
    assert max(used - step for step, used in seen) <= 6


def test_evaluations_join_the_row_of_their_step_and_the_last_step_has_one():
    def score(params):
        return {"nats_per_token": float(np.asarray(params)[0])}

    result = fit(STEP, start(), targets(7), steps=7, evaluate=score, evaluate_every=3, log_every=2)
    evaluated = {row["step"]: row["evaluation_nats_per_token"] for row in result.history if len(row) > 4}
    assert sorted(evaluated) == [3, 6, 7]
    for step, value in evaluated.items():
        np.testing.assert_allclose(value, momentum_oracle(targets(7)[:step])[0][0], rtol=1e-5)


def test_batches_that_end_early_are_said_to_be_exhausted():
    result = fit(STEP, start(), targets(3), steps=5)
    assert (result.stopped, int(result.state.step)) == ("exhausted", 3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_resumes_exactly(tmp_path, number):
    def interrupt(update):
        if update.step == 5:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    rows = targets(12)
    path = tmp_path / "metrics.jsonl"
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    result = fit(
        STEP,
        start(),
        Stream(rows),
        steps=12,
        checkpoints=checkpoints,
        on_progress=interrupt,
        writers=[JsonLinesWriter(path)],
    )
    assert (result.stopped, result.signal_number, int(result.state.step)) == ("interrupted", number, 5)
    assert checkpoints.latest_step() == 5
    assert len(read_json_lines(path)) == 5
    assert signal.getsignal(number) is before
    result = fit(
        STEP,
        start(),
        Stream(rows),
        steps=12,
        checkpoints=checkpoints,
        resume=True,
        writers=[JsonLinesWriter(path)],
    )
    whole = fit(STEP, start(), rows, steps=12)
    assert result.stopped == "finished"
    np.testing.assert_array_equal(result.state.params, whole.state.params)
    assert read_json_lines(path) == json.loads(json.dumps(whole.history))


def test_a_second_interrupt_acts_at_once():
    def interrupt(update):
        if update.step == 3:
            # Unlike os.kill, handled before the next line: two pending signals would count as one.
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    # A shell starts its background jobs with SIGINT ignored, and then so would be the second one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            fit(STEP, start(), targets(9), steps=9, on_progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)


def test_plain_batches_are_skipped_to_the_place_where_the_run_stopped(tmp_path):
    rows = targets(9)
    fit(STEP, start(), rows, steps=4, checkpoints=Checkpoints(tmp_path))
    result = fit(STEP, start(), rows, steps=9, checkpoints=Checkpoints(tmp_path), resume=True)
    np.testing.assert_array_equal(result.state.params, fit(STEP, start(), rows, steps=9).state.params)


@pytest.mark.parametrize(("log_every", "bad"), [(1, 6), (3, 6), (50, 6), (50, 8)])
def test_a_bad_loss_stops_with_its_step_and_never_reaches_a_checkpoint(tmp_path, log_every, bad):
    writer = Recorder()
    checkpoints = Checkpoints(tmp_path, keep=2)
    with pytest.raises(NonFiniteLoss, match=f"step {bad}.*last good checkpoint is step 4") as caught:
        fit(
            STEP,
            start(),
            targets(20, bad=[bad - 1]),
            steps=20,
            log_every=log_every,
            checkpoints=checkpoints,
            checkpoint_every=4,
            writers=[writer],
        )
    assert (caught.value.step, caught.value.last_good_checkpoint) == (bad, 4)
    assert checkpoints.latest_step() == 4
    assert writer.rows[-1][0] == bad - 1
    assert writer.flushed == bad - 1
    np.testing.assert_allclose(
        caught.value.state.params, momentum_oracle(targets(20)[: bad - 1])[0], rtol=1e-5
    )


def test_parameters_that_overflow_are_not_saved(tmp_path):
    # A finite loss and gradient, and an update that is not: only the check before the save can see it in time.
    optimizer = optax.scale(-1e38)
    step = make_step(lambda params, batch: 1e3 * params + 0 * jnp.sum(batch), optimizer)
    state = init_state(jax.random.key(0), jnp.float32(0), optimizer)
    with pytest.raises(NonFiniteLoss, match="there is no earlier checkpoint"):
        fit(step, state, targets(1), steps=1, checkpoints=Checkpoints(tmp_path))
    assert Checkpoints(tmp_path).latest_step() is None


def test_a_step_without_the_guard_is_stopped_as_well():
    def step(state, batch):
        return state._replace(step=state.step + 1), {"loss": jnp.mean(batch)}

    with pytest.raises(NonFiniteLoss, match="step 3"):
        fit(step, start(), targets(5, bad=[2]), steps=5, log_every=1)


def test_metrics_reach_the_file_when_the_data_fails(tmp_path):
    def broken():
        yield from targets(5)
        raise OSError("disk gone")

    path = tmp_path / "metrics.jsonl"
    with pytest.raises(OSError, match="disk gone"):
        fit(STEP, start(), broken(), steps=9, log_every=100, writers=[JsonLinesWriter(path)])
    assert [row["step"] for row in read_json_lines(path)] == [1, 2, 3, 4, 5]


def test_progress_hears_of_every_step_and_is_closed():
    class Watch:
        def __init__(self):
            self.updates, self.closed = [], 0

        def __call__(self, update):
            self.updates.append(update)

        def close(self):
            self.closed += 1

    watch = Watch()
    fit(STEP, start(), targets(6), steps=6, log_every=2, on_progress=watch)
    assert [u.step for u in watch.updates] == [1, 2, 3, 4, 5, 6]
    assert watch.updates[-1].seconds_left == 0
    assert math.isfinite(watch.updates[-1].metrics["loss"])
    assert watch.closed == 1


def test_bad_arguments_are_named_before_anything_runs(tmp_path):
    for options, words in [
        ({"steps": 0}, "steps=0"),
        ({"steps": 1, "log_every": 0}, "log_every=0"),
        ({"steps": 1, "evaluate_every": -1}, "evaluate_every=-1"),
        ({"steps": 1, "checkpoint_every": 2}, "need checkpoints"),
        ({"steps": 1, "resume": True}, "need checkpoints"),
    ]:
        with pytest.raises(ValueError, match=words):
            fit(STEP, start(), targets(1), **options)
    fit(STEP, start(), targets(2), steps=2, checkpoints=Checkpoints(tmp_path))
    with pytest.raises(ValueError, match="already holds checkpoints up to step 2; pass resume=True"):
        fit(STEP, start(), targets(2), steps=2, checkpoints=Checkpoints(tmp_path))
