"""Every experiment runs at its smoke preset, plots, prints and keeps its result."""

import importlib

import pytest

from effml import report

CARDS = report.find_cards()


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_smoke_preset_runs_and_its_result_round_trips(card, tmp_path):
    from experiments import _main

    module = importlib.import_module(f"experiments.{card.name}")
    _main.run_experiment(module, preset="smoke", seed=None, out=tmp_path)
    result = report.Result.load(tmp_path / "result.json")
    assert result.method == card.name
    assert result.rows
    assert len(result.checks) == len(module.CHECKS)
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_committed_result_has_three_seeds_and_every_check(card):
    result = report.committed_result(card.name)
    assert result is not None, f"experiments/results/{card.name}/cpu.json is missing"
    assert len(result.seeds) >= 3
    module = importlib.import_module(f"experiments.{card.name}")
    assert [check.name for check in result.checks] == [check.name for check in module.CHECKS]
    assert [check.bound for check in result.checks] == [check.bound for check in module.CHECKS]
