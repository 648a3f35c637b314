"""Numbers that the code holds are those that a committed run has found."""

from pathlib import Path

from effml import report
from effml.pipeline import LEARNING_RATES

ROOT = Path(__file__).parents[2]


def test_the_pipelines_learning_rates_are_the_best_of_the_committed_grid():
    result = report.Result.load(ROOT / "benchmarks/results/pipeline_rates.json")
    for row in result.rows:
        losses = {float(name): value for name, value in row.items() if name not in ("optimizer", "best")}
        assert LEARNING_RATES[row["optimizer"]] == row["best"] == min(losses, key=losses.__getitem__)
    assert {row["optimizer"] for row in result.rows} == set(LEARNING_RATES)
