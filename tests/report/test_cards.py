from __future__ import annotations

import pytest

from effml.report import JOBS, MethodCard, Result, committed_result, experiments_folder, find_cards, read_card

CARD = """
import jax_is_not_imported
from effml.report import MethodCard

METHOD = MethodCard(
    name="{name}", job="{job}", title="T", purpose="For this.",
    claim="It is so, " "in two pieces.", module="effml.optimize", paper=("Paper", "2501.00001"),
    minutes={{"smoke": 0.1, "cpu": 5}}, headline="{{loss:.2f}} nats",
)
raise RuntimeError("the file must not be run")
"""


def write(folder, name, text=None, job="optimize"):
    path = folder / f"{name}.py"
    path.write_text(text if text is not None else CARD.format(name=name, job=job))
    return path


def test_a_card_is_read_without_running_its_file(tmp_path):
    card = read_card(write(tmp_path, "toy"))
    assert card == MethodCard(
        name="toy",
        job="optimize",
        title="T",
        purpose="For this.",
        claim="It is so, in two pieces.",
        module="effml.optimize",
        paper=("Paper", "2501.00001"),
        minutes={"smoke": 0.1, "cpu": 5},
        headline="{loss:.2f} nats",
    )


def test_positional_arguments_qualified_names_and_annotations_are_read(tmp_path):
    text = "METHOD: report.MethodCard = report.MethodCard('toy', 'infer', 'T', 'P.', 'C.', 'm', ('p', ''))\n"
    assert read_card(write(tmp_path, "toy", text)).job == "infer"


def test_cards_are_found_by_scanning_in_the_order_of_jobs(tmp_path):
    write(tmp_path, "b", job="optimize")
    write(tmp_path, "a", job="understand")
    write(tmp_path, "c", job="optimize")
    write(tmp_path, "_helper", "x = 1\n")
    write(tmp_path, "__init__", "")
    (tmp_path / "results").mkdir()
    assert [card.name for card in find_cards(tmp_path)] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", r"toy\.py:1: no top-level statement METHOD"),
        ("METHOD = None\n", r"toy\.py:1: no top-level statement METHOD"),
        ("def f(:\n", r"toy\.py:1: not valid Python"),
        (
            "\n\nMETHOD = MethodCard(name='toy',\n  claim=CLAIM)\n",
            r"toy\.py:4: the card's claim must be a literal, not 'CLAIM'",
        ),
        ("METHOD = MethodCard(**kwargs)\n", r"toy\.py:1: the card must not use \* or \*\*"),
        ("\nMETHOD = MethodCard(name='toy')\n", r"toy\.py:2: .*missing .*'job'"),
        (CARD.format(name="other", job="optimize"), r"toy\.py:5: the card's name is 'other', not 'toy'"),
        (CARD.format(name="toy", job="optimise"), r"toy\.py:5: job='optimise' .* did you mean 'optimize'"),
    ],
)
def test_a_wrong_card_is_an_error_with_file_and_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_card(write(tmp_path, "toy", text))


@pytest.mark.parametrize("name", ["name", "title", "purpose", "claim", "module"])
def test_an_empty_text_is_refused(name):
    texts = {"name": "n", "title": "t", "purpose": "p", "claim": "c", "module": "m"}
    with pytest.raises(ValueError, match=f"{name}='' must be text"):
        MethodCard(**{**texts, name: ""}, job="infer", paper=("p", ""))


def test_headlines_are_filled_from_the_committed_result(tmp_path):
    card = read_card(write(tmp_path, "toy"))
    assert committed_result("toy", tmp_path) is None
    assert card.headline_for(None) is None
    result = Result(method="toy", preset="cpu", seeds=(0,), summary={"loss": 1.234})
    result.save(tmp_path / "results" / "toy" / "cpu.json")
    assert committed_result("toy", tmp_path) == result
    assert card.headline_for(result) == "1.23 nats"
    with pytest.raises(ValueError, match=r"headline of 'toy' asks for 'loss', but the result has \['los'\]"):
        card.headline_for(Result(method="toy", preset="cpu", seeds=(0,), summary={"los": 1.0}))


def test_the_shipped_experiments_all_have_cards_with_headlines_that_fill():
    names = {path.stem for path in experiments_folder().glob("*.py") if not path.name.startswith("_")}
    cards = find_cards()
    assert {card.name for card in cards} == names
    for card in cards:
        assert card.job in JOBS
        card.headline_for(committed_result(card.name))
