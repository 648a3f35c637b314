"""Training a model on text: what is written, that it resumes exactly, and that it compiles once."""

import json

import jax
import numpy as np
import pytest

from effml import models, train
from effml.pipeline import TrainConfig, train_model
from effml.train import step as step_module

TINY = {"steps": 6, "batch_size": 4, "length": 16, "width": 16, "num_layers": 1, "num_heads": 2}
TINY |= {"evaluate_every": 3, "checkpoint_every": 3, "evaluation_tokens": 256}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for number in range(6):
        words = rng.choice(["alpha", "beta", "gamma", "delta", "epsilon"], size=400)
        (folder / f"part-{number}.txt").write_text(" ".join(words) + "\n")
    return str(folder)


def config(text, **changes):
    return TrainConfig(**{**TINY, "data": text, **changes})


def equal(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), a, b)))


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "scale"])
def test_a_run_leaves_a_model_metrics_and_checkpoints(text, tmp_path, optimizer):
    trained = train_model(config(text, optimizer=optimizer), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["evaluation_nats_per_token"] == pytest.approx(trained.held_out["nats_per_token"])
    loaded = models.load(str(tmp_path / "run/model"))
    assert equal(loaded.params, trained.params)
    assert trained.signal_number is None


def test_optimizer_memory_is_what_the_methods_promise(text, tmp_path):
    runs = {
        name: train_model(config(text, optimizer=name, steps=1), tmp_path / name)
        for name in ("adamw", "muon", "scale")
    }
    parameters = runs["adamw"].parameter_bytes
    assert runs["adamw"].optimizer_bytes == pytest.approx(2 * parameters, rel=0.01)
    assert runs["scale"].optimizer_bytes < 0.5 * parameters
    assert runs["scale"].optimizer_bytes < runs["muon"].optimizer_bytes < runs["adamw"].optimizer_bytes


def test_training_twice_compiles_once(text, tmp_path):
    train_model(config(text, seed=1), tmp_path / "first")
    before = step_module._make_step.cache_info().hits
    train_model(config(text, seed=2), tmp_path / "second")
    assert step_module._make_step.cache_info().hits == before + 1
    functions = [value for value in (step_module._make_step,) if value.cache_info().currsize]
    assert functions
    from effml.pipeline import training

    settings = config(text)
    step = train.make_step(
        training._loss(settings.model(256)),
        training._optimizer(settings.optimizer, settings.rate, settings.schedule, settings.steps, 0.0, None),
    )
    assert step.compilations() == 1


@pytest.mark.parametrize("optimizer", ["scale", "limuon"])
def test_a_stopped_run_resumes_to_the_same_numbers(text, tmp_path, monkeypatch, optimizer):
    settings = config(text, optimizer=optimizer)
    whole = train_model(settings, tmp_path / "whole")

    # Stop after step 4 by the signal a user's Ctrl-C sends.
    import os
    import signal

    shown = train.Progress.__call__

    def stop_at_four(self, update):
        shown(self, update)
        if update.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(train.Progress, "__call__", stop_at_four)
    stopped = train_model(settings, tmp_path / "parts")
    monkeypatch.undo()
    assert stopped.signal_number == signal.SIGINT
    assert not (tmp_path / "parts/model").exists()
    resumed = train_model(settings, tmp_path / "parts", resume=True)
    assert equal(resumed.params, whole.params)
    assert (tmp_path / "parts/metrics.jsonl").read_text() == (tmp_path / "whole/metrics.jsonl").read_text()
    assert resumed.history == whole.history


def test_clipping_is_refused_where_two_gradients_are_compared(text):
    with pytest.raises(ValueError, match=r"clip_norm=1\.0 does not go with limuon"):
        config(text, optimizer="limuon", clip_norm=1.0)


def test_bpe_tokens_give_a_loss_per_byte_too(text, tmp_path):
    trained = train_model(config(text, tokenizer="bpe", vocab_size=300), tmp_path / "run")
    assert trained.held_out["nats_per_byte"] < trained.held_out["nats_per_token"]


def test_not_a_number_stops_at_its_step_and_keeps_the_last_good_checkpoint(text, tmp_path):
    # A rate that overflows float32 in a few steps; AdamW's first update is about the rate itself.
    settings = config(text, optimizer="adamw", learning_rate=1e30, schedule="constant", steps=30)
    with pytest.raises(train.NonFiniteLoss) as raised:
        train_model(settings, tmp_path / "run")
    assert 1 < raised.value.step <= 30
    assert f"step {raised.value.step}" in str(raised.value)
    assert not (tmp_path / "run/model").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "sclae"}, "did you mean 'scale'"),
        ({"steps": 0}, "steps"),
        ({"batch_size": -1}, "batch_size"),
        ({"length": 0}, "length"),
        ({"num_heads": 3}, "num_heads"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"tokenizer": "words"}, "tokenizer"),
        ({"attention": "linear"}, "attention"),
        ({"accumulate": 3}, "accumulate"),
        ({"checkpoint_every": -1}, "checkpoint_every"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"compute_dtype": "float8"}, "compute_dtype"),
        ({"mesh": "data=3"}, "data"),
        ({"mesh": "dota=1"}, "dota"),
    ],
)
def test_bad_settings_are_named_before_anything_is_written(text, tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        train_model(config(text, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_run_is_not_overwritten(text, tmp_path):
    train_model(config(text, steps=1), tmp_path / "run")
    with pytest.raises(ValueError, match="already holds a run"):
        train_model(config(text, steps=1), tmp_path / "run")
    with pytest.raises(ValueError, match="width was 16, now 32"):
        train_model(config(text, steps=1, width=32), tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="no run to resume"):
        train_model(config(text, steps=1), tmp_path / "other", resume=True)


def test_text_shorter_than_a_batch_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("one line\nanother\n")
    with pytest.raises(ValueError, match="token"):
        train_model(config(str(tmp_path / "short.txt")), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 2**33}, "32 bits"),
        ({"seed": 2**70}, "32 bits"),
        ({"learning_rate": float("inf")}, "learning_rate=inf must be finite"),
        ({"weight_decay": float("nan")}, "weight_decay=nan must be finite"),
        ({"mlp_width": 0}, "mlp_width=0"),
    ],
)
def test_numbers_that_would_be_read_as_others_are_refused(text, changes, words):
    with pytest.raises(ValueError, match=words):
        config(text, **changes)


def test_two_runs_do_not_share_a_folder(text, tmp_path):
    """The second is refused while the first goes on, and the first one's rows stay one a step."""
    folder = tmp_path / "run"
    refused = []

    class Second:
        def resume(self, step):
            for resume in (False, True):
                with pytest.raises(ValueError, match=r"already holds a run|is in use"):
                    train_model(config(text), folder, resume=resume)
                refused.append(resume)

        def write(self, step, metrics): ...

        def flush(self): ...

    train_model(config(text), folder, trackers=[Second()])
    assert refused == [False, True]
    rows = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 4, 5, 6]
    train_model(config(text), folder, resume=True)  # the hold has ended with the run


@pytest.mark.parametrize("name", ["metrics.jsonl", "model", "checkpoints"])
def test_what_others_left_in_the_folder_is_refused_before_training(text, tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"holds {name} of something else"):
        train_model(config(text), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_train_json_that_is_no_object_is_named(text, tmp_path):
    (tmp_path / "train.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"train\.json is not the description of a run"):
        train_model(config(text), tmp_path, resume=True)
