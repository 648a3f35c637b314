"""What the SSA experiment trains on and how it judges."""

import dataclasses

import numpy as np
import pytest

from effml.report import Result
from experiments import _ssa_models as models
from experiments import ssa


def answers(tokens, pairs):
    """By reading from the left: what each asked key had as its value, by place."""
    known = {int(tokens[2 * i]): int(tokens[2 * i + 1]) for i in range(pairs)}
    return {
        place: known[int(token)]
        for place, token in enumerate(tokens[:-1])
        if place >= 2 * pairs and int(token) in known
    }


@pytest.mark.parametrize(("length", "pairs"), [(16, 2), (256, 16), (25, 6)])
def test_recall_asks_for_values_that_were_given(length, pairs):
    for dense in (0, 1):
        batch = models.recall_windows(np.random.default_rng(0), (2, 4), length, pairs, dense)
        tokens = batch["tokens"].reshape(8, length + 1)
        weights = batch["weights"].reshape(8, length)
        for row, weight in zip(tokens, weights):
            asked = answers(row, pairs)
            assert sorted(asked) == np.flatnonzero(weight).tolist()
            assert all(row[place + 1] == value for place, value in asked.items())
            if dense:
                assert len(asked) == (length + 1) // 2 - pairs
            else:
                assert sorted(row[list(asked)]) == sorted(row[0 : 2 * pairs : 2])
    with pytest.raises(ValueError, match="too short for pairs=9"):
        models.recall_windows(np.random.default_rng(0), (1,), 32, 9)


def test_every_arm_learns_the_same_batches_of_all_stages():
    stages = (models.Stage(16, 2, 6, 30), models.Stage(32, 4, 3, 10))
    task = dataclasses.replace(ssa.Config().recall, stages=stages)
    first, second = (list(models.training_batches(task, 1)) for _ in range(2))
    assert task.total_steps == 40
    assert [chunk["tokens"].shape for chunk in first] == [(25, 6, 17), (5, 6, 17), (10, 3, 33)]
    for one, other in zip(first, second):
        np.testing.assert_array_equal(one["tokens"], other["tokens"])
    assert (first[0]["tokens"] != next(iter(models.training_batches(task, 2)))["tokens"]).any()


def held(**changes):
    """Which checks hold for numbers that satisfy all of them but for the changes."""
    arms = {"ssa": (0.1, 0.08), "mix": (0.2, 0.12), "sparse": (0.2, 0.13), "full": (0.2, 0.13)}
    summary = {f"{name}_dropped": dropped for name, (dropped, _) in arms.items()}
    summary |= {f"{name}_gap": gap for name, (_, gap) in arms.items()}
    summary |= {f"ssa_sparse_{budget}": 2.0 - 0.01 * budget for budget in (2, 4, 8, 16)}
    summary |= {"full_sparse_4": 1.99, "sparse_sparse_4": 1.96, "ssa_full": 1.9, "full_full": 1.9}
    for name, full, sparse in (("ssa", 0.99, 0.9), ("sparse", 0.9, 0.9), ("full", 0.99, 0.6)):
        summary |= {f"recall_{name}_full_accuracy": full, f"recall_{name}_sparse_accuracy": sparse}
    result = Result(method="ssa", preset="cpu", seeds=(0, 1, 2))
    result.summary = summary | changes
    return {check.name for check in result.judged(ssa.CHECKS).checks if not check.holds}


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 0),
        ({"mix_dropped": 0.12}, 1),
        ({"ssa_gap": 0.11}, 1),
        ({"full_sparse_4": 1.95}, 1),
        ({"sparse_sparse_4": 1.94}, 1),
        ({"full_full": 1.87}, 1),
        ({"ssa_sparse_8": 1.97}, 1),
        ({"recall_ssa_sparse_accuracy": 0.88}, 1),
        ({"recall_ssa_full_accuracy": 0.97}, 1),
        ({"recall_full_sparse_accuracy": 0.95}, 1),
        ({"recall_full_full_accuracy": 0.94}, 1),
        ({"ssa_gap": float("nan")}, 1),
    ],
)
def test_each_gate_can_fail_alone(changes, count):
    assert len(held(**changes)) == count


def test_the_row_of_the_list_reads_the_summary():
    assert ssa.METHOD.headline
    names = [part.split(":")[0] for part in ssa.METHOD.headline.split("{")[1:]]
    assert not [name for name in names if "." in name]
    assert ssa.METHOD.headline.format(**dict.fromkeys(names, 1.0))
