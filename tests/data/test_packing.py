"""Batches: every token where it belongs, the same order always, and exact resumption."""

import json
import os
import subprocess
import sys

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effml.data import (
    BatchIterator,
    BpeTokenizer,
    ByteTokenizer,
    WindowBatches,
    batches,
    encode_corpus,
    evaluation_batches,
    load_corpus,
)
from effml.data.packing import ResumableBatches

sizes = {"batch_size": st.integers(1, 5), "length": st.integers(1, 7)}


def stream(count: int) -> np.ndarray:
    """Tokens that tell their place."""
    return np.arange(count, dtype=np.int32)


def rows(iterator) -> list[list[int]]:
    return [row for batch in iterator for row in batch["tokens"].tolist()]


def same(one: dict, two: dict) -> bool:
    return all(np.array_equal(one[name], two[name]) for name in ("tokens", "weights"))


def test_a_stream_is_the_documents_in_order_each_with_an_end(tmp_path):
    for name, text in (("b.txt", "second é"), ("a.txt", "first"), ("c.txt", "third")):
        (tmp_path / name).write_text(text, "utf-8")
    corpus = load_corpus(tmp_path, held_out_fraction=0.01)
    train = encode_corpus(corpus, "train", ByteTokenizer())
    assert ByteTokenizer().decode(train) == "".join(text + "\0" for _, text in corpus.text("train"))
    assert train.dtype == np.int32
    assert not train.flags.writeable
    assert encode_corpus(corpus, "train", ByteTokenizer()) is train


def test_text_of_a_document_cannot_end_it(tmp_path):
    (tmp_path / "a.txt").write_text("x <|end|> y\n" * 10)
    tokenizer = BpeTokenizer.train(["x y"], vocab_size=257)
    tokens = encode_corpus(load_corpus(tmp_path), "train", tokenizer)
    assert tokens.tolist().count(tokenizer.end_id) == 1


@given(count=st.integers(2, 200), **sizes)
def test_an_epoch_visits_windows_that_tile_the_stream(count, batch_size, length):
    windows = (count - 1) // length
    if windows < batch_size:
        return
    seen = rows(batches(stream(count), batch_size=batch_size, length=length, seed=3, epochs=1))
    assert len(seen) == windows // batch_size * batch_size
    starts = [row[0] for row in seen]
    assert len(set(starts)) == len(starts)
    assert all(start % length == 0 for start in starts)
    assert all(row == list(range(row[0], row[0] + length + 1)) for row in seen)


def test_an_epoch_that_divides_covers_every_target_once():
    seen = rows(batches(stream(4 * 3 * 5 + 1), batch_size=3, length=5, seed=0, epochs=1))
    assert sorted(token for row in seen for token in row[1:]) == list(range(1, 61))


@given(count=st.integers(2, 200), **sizes)
def test_evaluation_covers_every_target_exactly_once_in_order(count, batch_size, length):
    result = evaluation_batches(stream(count), batch_size=batch_size, length=length)
    targets, inputs = [], []
    for batch in result:
        assert batch["tokens"].shape == (batch_size, length + 1)
        assert batch["weights"].shape == (batch_size, length)
        assert batch["tokens"].dtype == np.int32
        assert batch["weights"].dtype == np.float32
        inputs += batch["tokens"][:, :-1][batch["weights"] == 1].tolist()
        targets += batch["tokens"][:, 1:][batch["weights"] == 1].tolist()
        assert set(np.unique(batch["weights"])) <= {0.0, 1.0}
    assert targets == list(range(1, count))
    assert inputs == list(range(count - 1))
    assert result[-1]["weights"].any()


def test_batches_have_the_documented_shapes_and_types():
    batch = next(batches(stream(100), batch_size=4, length=8, seed=0))
    assert set(batch) == {"tokens", "weights"}
    assert batch["tokens"].shape == (4, 9)
    assert batch["tokens"].dtype == np.int32
    assert batch["weights"].dtype == np.float32
    assert np.array_equal(batch["weights"], np.ones((4, 8)))


def test_changing_a_batch_does_not_change_the_tokens():
    tokens = stream(100)
    next(batches(tokens, batch_size=4, length=8, seed=0))["tokens"][:] = -1
    assert np.array_equal(tokens, stream(100))


def test_order_depends_on_seed_and_epoch_and_on_nothing_else():
    def epoch_rows(seed):
        seen = rows(batches(stream(401), batch_size=4, length=4, seed=seed, epochs=2))
        return seen[:100], seen[100:]

    first, second = epoch_rows(0)
    assert first != second
    assert sorted(first) == sorted(second)
    assert epoch_rows(0) == (first, second)
    assert not {str(first), str(second)} & {str(epoch) for epoch in epoch_rows(1)}


def test_shuffling_mixes_the_whole_stream():
    starts = np.array(
        [row[0] for row in rows(batches(stream(4001), batch_size=10, length=4, seed=0, epochs=1))]
    )
    # The rank correlation of a random order of 1000 has standard deviation 1 / sqrt(999) = 0.032.
    assert abs(np.corrcoef(starts, np.arange(1000))[0, 1]) < 5 * 0.032


def test_epochs_end_and_none_goes_on():
    assert len(list(batches(stream(41), batch_size=5, length=4, seed=0, epochs=3))) == 6
    endless = batches(stream(41), batch_size=5, length=4, seed=0)
    assert len([next(endless) for _ in range(50)]) == 50


@settings(max_examples=40)
@given(steps=st.integers(0, 25), more=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_resuming_anywhere_equals_never_stopping(steps, more, seed):
    def make():
        return batches(stream(101), batch_size=3, length=4, seed=seed)

    uninterrupted = make()
    for _ in range(steps):
        next(uninterrupted)
    state = json.loads(json.dumps(uninterrupted.get_state()))
    resumed = make()
    next(resumed)
    resumed.set_state(state)
    for _ in range(more):
        assert same(next(uninterrupted), next(resumed))


def test_resuming_at_the_end_stays_at_the_end():
    finished = batches(stream(41), batch_size=5, length=4, seed=0, epochs=1)
    list(finished)
    resumed = batches(stream(41), batch_size=5, length=4, seed=0, epochs=1)
    resumed.set_state(finished.get_state())
    assert list(resumed) == []


@given(process_count=st.sampled_from([1, 2, 3, 6]), steps=st.integers(1, 12))
def test_processes_share_each_global_batch(process_count, steps):
    tokens = stream(201)
    whole = batches(tokens, batch_size=6, length=4, seed=5)
    shards = [
        batches(tokens, batch_size=6, length=4, seed=5, process_index=i, process_count=process_count)
        for i in range(process_count)
    ]
    for _ in range(steps):
        parts = [next(shard) for shard in shards]
        assert {len(part["tokens"]) for part in parts} == {6 // process_count}
        assert np.array_equal(np.concatenate([part["tokens"] for part in parts]), next(whole)["tokens"])


def test_shards_of_an_epoch_are_disjoint_and_make_the_whole():
    shards = [
        rows(batches(stream(241), batch_size=6, length=4, seed=1, epochs=1, process_index=i, process_count=3))
        for i in range(3)
    ]
    assert [len(shard) for shard in shards] == [20, 20, 20]
    starts = [{row[0] for row in shard} for shard in shards]
    assert set.union(*starts) == set(range(0, 240, 4))


def test_a_position_is_good_for_another_number_of_processes():
    one = batches(stream(201), batch_size=6, length=4, seed=5)
    next(one)
    two = batches(stream(201), batch_size=6, length=4, seed=5, process_index=1, process_count=2)
    two.set_state(one.get_state())
    assert np.array_equal(next(two)["tokens"], next(one)["tokens"][3:])


def test_it_is_a_grain_iterator():
    iterator = batches(stream(100), batch_size=4, length=8, seed=0)
    assert isinstance(iterator, grain.DatasetIterator)
    assert isinstance(iterator, BatchIterator)
    assert iter(iterator) is iterator
    next(iterator)
    iterator.close()
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


def test_windows_feed_a_grain_pipeline():
    source = WindowBatches(stream(101), 4, 5, seed=2, epochs=2)
    pipeline = grain.MapDataset.source(source).map(lambda batch: batch["tokens"]).to_iter_dataset()
    expected = batches(stream(101), batch_size=4, length=5, seed=2, epochs=2)
    assert [batch.tolist() for batch in pipeline] == [batch["tokens"].tolist() for batch in expected]


def test_without_grain_the_batches_are_the_same(monkeypatch):
    expected = list(batches(stream(101), batch_size=4, length=5, seed=2, epochs=2))
    monkeypatch.setitem(sys.modules, "grain", None)
    monkeypatch.delitem(sys.modules, "effml.data._grain", raising=False)
    plain = batches(stream(101), batch_size=4, length=5, seed=2, epochs=2)
    assert type(plain) is ResumableBatches
    assert all(same(one, two) for one, two in zip(plain, expected, strict=True))


def test_batches_are_the_same_in_every_process():
    code = (
        "import numpy as np; from effml.data import batches;"
        "it = batches(np.arange(1000), batch_size=4, length=16, seed=9);"
        "print([next(it)['tokens'][:, 0].tolist() for _ in range(40)])"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = batches(stream(1000), batch_size=4, length=16, seed=9)
    assert other.strip() == str([next(here)["tokens"][:, 0].tolist() for _ in range(40)])


class TestBadInput:
    def test_text_shorter_than_one_batch_says_what_is_there_and_what_is_needed(self):
        arguments = {"batch_size": 16, "length": 128, "seed": 0}
        with pytest.raises(ValueError, match=r"2,048 tokens are there, .*needs 2,049"):
            batches(stream(2048), **arguments)
        next(batches(stream(2049), **arguments))

    def test_nothing_to_measure(self):
        for count in (0, 1):
            with pytest.raises(ValueError, match=f"{count} tokens are there, 2 are needed"):
                evaluation_batches(stream(count), batch_size=1, length=1)

    @pytest.mark.parametrize("name", ["batch_size", "length"])
    @pytest.mark.parametrize("value", [0, -1])
    def test_sizes_must_be_positive(self, name, value):
        arguments = {"batch_size": 2, "length": 2, name: value}
        with pytest.raises(ValueError, match=f"{name}={value} must be above 0"):
            batches(stream(50), seed=0, **arguments)
        with pytest.raises(ValueError, match=f"{name}={value} must be above 0"):
            evaluation_batches(stream(50), **arguments)

    @pytest.mark.parametrize("tokens", [np.zeros(50), np.zeros((5, 10), np.int32)])
    def test_tokens_must_be_a_row_of_integers(self, tokens):
        with pytest.raises(TypeError):
            batches(tokens, batch_size=2, length=2, seed=0)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"epochs": 0}, "epochs=0 must be above 0"),
            ({"seed": -1}, "seed=-1 must not be negative"),
            ({"process_index": 0}, "together, or neither"),
            ({"process_index": 2, "process_count": 2}, r"process_index=2 must be in 0\.\.1"),
            ({"process_index": 0, "process_count": 0}, "process_count=0 must be above 0"),
            ({"process_index": 0, "process_count": 3}, "batch_size=4 is not divisible by process_count=3"),
        ],
    )
    def test_other_numbers(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            batches(stream(50), **{"batch_size": 4, "length": 2, "seed": 0, **arguments})

    @pytest.mark.parametrize(
        "change", [{"seed": 1}, {"batch_size": 3}, {"length": 3}, {"tokens": stream(51)}]
    )
    def test_a_position_in_other_batches_is_refused(self, change):
        arguments = {"tokens": stream(50), "batch_size": 2, "length": 2, "seed": 0}
        state = batches(**arguments).get_state()
        other = batches(**{**arguments, **change})
        with pytest.raises(ValueError, match=f"of other batches: {next(iter(change))} was"):
            other.set_state(state)

    @pytest.mark.parametrize(("step", "message"), [(-1, "step -1"), (99, "step 99 of 12")])
    def test_a_position_outside_is_refused(self, step, message):
        iterator = batches(stream(50), batch_size=2, length=2, seed=0, epochs=1)
        with pytest.raises(ValueError, match=message):
            iterator.set_state({**iterator.get_state(), "step": step})
        with pytest.raises(ValueError, match="lacks batch_size, length, seed, tokens"):
            iterator.set_state({"step": 1})


def test_token_ids_past_int32_are_refused_not_wrapped():
    with pytest.raises(ValueError, match="tokens reach 1099511627776"):
        batches(np.array([2**40] * 9), batch_size=2, length=2, seed=0)


def test_a_position_between_two_steps_is_refused():
    iterator = batches(np.arange(9), batch_size=2, length=2, seed=0)
    with pytest.raises(TypeError):
        iterator.set_state({**iterator.get_state(), "step": 1.5})
