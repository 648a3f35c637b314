from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys

import numpy as np
import pytest

from effml.report import Check, CheckOutcome, Result, _files, machine, versions


def full_result() -> Result:
    return Result(
        method="scale",
        preset="cpu",
        seeds=(0, 1, 2),
        rows=[{"optimizer": "adamw", "loss": 2.0, "steps": 10, "diverged": False, "note": None}],
        curves={"adamw": {"step": [1, 2], "loss": [[3.0, 2.0], [3.1, 2.1]]}},
        checks=[CheckOutcome("loss", 1.9, "<=", 2.0, True, "spec")],
        seconds=12.5,
        summary={"loss": 1.9, "steps": 10},
        command="effml run scale",
    )


def test_a_saved_result_is_equal_after_loading(tmp_path):
    result = full_result()
    assert Result.load(result.save(tmp_path / "deep" / "result.json")) == result


def test_the_file_has_the_documented_fields(tmp_path):
    record = json.loads(full_result().save(tmp_path / "r.json").read_text())
    wanted = {
        "method",
        "preset",
        "seeds",
        "versions",
        "machine",
        "rows",
        "checks",
        "seconds",
        "curves",
        "summary",
    }
    assert wanted <= set(record)
    assert set(record["checks"][0]) == {"name", "value", "op", "bound", "holds", "source"}
    assert record["seeds"] == [0, 1, 2]


def test_non_finite_numbers_are_legible_strict_json_and_come_back():
    result = Result(
        method="m",
        preset="cpu",
        seeds=(0,),
        rows=[{"loss": math.nan}],
        curves={"loss": [math.inf, -math.inf, 1.0]},
        checks=[CheckOutcome("loss", math.nan, "<=", 2.0, False, "")],
        summary={"worst": math.inf},
    )
    text = result.to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert '"NaN"' in text
    assert '"-Infinity"' in text
    loaded = Result.from_json(text)
    assert math.isnan(loaded.rows[0]["loss"])
    assert math.isnan(loaded.checks[0].value)
    assert loaded.curves["loss"] == [math.inf, -math.inf, 1.0]
    assert loaded.summary["worst"] == math.inf


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "\\NaN", "\\\\NaN", "nan", "\\other"])
def test_a_text_that_looks_like_a_number_stays_text(text):
    result = Result(method="m", preset="cpu", seeds=(0,), rows=[{"sample": text}])
    assert Result.from_json(result.to_json()).rows == [{"sample": text}]


def test_numpy_values_become_plain_json():
    result = Result(
        method="m",
        preset="cpu",
        seeds=[0, 1],
        rows=[{"loss": np.float32(0.5), "steps": np.int64(3), "ok": np.bool_(True)}],
        curves={"x": np.array([[1.0, np.nan]])},
        summary={"loss": np.float32(0.25)},
    )
    loaded = Result.from_json(result.to_json())
    assert loaded.rows == [{"loss": 0.5, "steps": 3, "ok": True}]
    assert loaded.seeds == (0, 1)
    assert loaded.summary == {"loss": 0.25}
    assert loaded.curves["x"][0][0] == 1.0
    assert math.isnan(loaded.curves["x"][0][1])


def test_a_value_without_json_form_is_named_by_its_place():
    result = Result(method="m", preset="cpu", seeds=(0,), rows=[{"model": object()}])
    with pytest.raises(TypeError, match=r"rows\[0\]\.model is a object"):
        result.to_json()
    with pytest.raises(TypeError, match=r"curves\.a has the key 1"):
        Result(method="m", preset="cpu", seeds=(0,), curves={"a": {1: [2]}}).to_json()


@pytest.mark.parametrize(
    "field", ["method", "preset", "seeds", "versions", "machine", "rows", "checks", "seconds"]
)
def test_a_missing_field_is_named(field):
    record = json.loads(full_result().to_json())
    del record[field]
    with pytest.raises(ValueError, match=f"cpu.json lacks the field '{field}'"):
        Result.from_json(json.dumps(record), source="cpu.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", 3),
        ("seeds", "0"),
        ("seeds", [0.5]),
        ("seeds", [True]),
        ("versions", {"jax": 1}),
        ("machine", []),
        ("rows", {"loss": 1}),
        ("rows", [1]),
        ("seconds", "12"),
        ("seconds", True),
        ("summary", {"loss": "low"}),
        ("curves", [1]),
        ("date", None),
    ],
)
def test_a_field_of_the_wrong_type_is_named(field, value):
    record = json.loads(full_result().to_json()) | {field: value}
    with pytest.raises(ValueError, match=f"the field '{field}' must be"):
        Result.from_json(json.dumps(record))


def test_a_wrong_check_is_named_by_its_index():
    record = json.loads(full_result().to_json())
    record["checks"].append({**record["checks"][0], "op": "~"})
    with pytest.raises(ValueError, match=r"checks\[1\]\.op' must be one of <="):
        Result.from_json(json.dumps(record))
    del record["checks"][1]["op"]
    with pytest.raises(ValueError, match=r"lacks the field 'checks\[1\]\.op'"):
        Result.from_json(json.dumps(record))


def test_an_unknown_field_is_an_error():
    record = json.loads(full_result().to_json()) | {"sumary": {}}
    with pytest.raises(ValueError, match="unknown field 'sumary'"):
        Result.from_json(json.dumps(record))


def test_curves_and_summary_may_be_absent():
    record = json.loads(full_result().to_json())
    del record["curves"], record["summary"]
    loaded = Result.from_json(json.dumps(record))
    assert loaded.curves == {}
    assert loaded.summary == {}


def test_a_truncated_file_is_one_clear_error_at_any_length(tmp_path):
    text = full_result().to_json().rstrip()
    path = tmp_path / "result.json"
    for length in range(0, len(text), 37):
        path.write_text(text[:length])
        with pytest.raises(ValueError, match=r"result\.json is not a complete JSON file"):
            Result.load(path)
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="holds a list, not an object"):
        Result.load(path)
    path.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(ValueError, match="is not a text file"):
        Result.load(path)


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = full_result().save(tmp_path / "result.json")
    before = path.read_bytes()

    def disk_full(handle):
        raise OSError("disk full")

    monkeypatch.setattr(_files.os, "fsync", disk_full)
    with pytest.raises(OSError, match="disk full"):
        Result(method="other", preset="cpu", seeds=(0,)).save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_a_reader_of_the_old_file_is_not_disturbed_by_a_new_one(tmp_path):
    path = full_result().save(tmp_path / "result.json")
    with open(path, encoding="utf-8") as reader:
        Result(method="other", preset="cpu", seeds=(0,)).save(path)
        assert Result.from_json(reader.read()).method == "scale"
    assert Result.load(path).method == "other"


@pytest.mark.parametrize(
    ("op", "below", "equal", "above"),
    [
        ("<=", True, True, False),
        ("<", True, False, False),
        (">=", False, True, True),
        (">", False, False, True),
        ("==", False, True, False),
    ],
)
def test_checks_compare_as_written_and_nan_never_holds(op, below, equal, above):
    result = Result(method="m", preset="cpu", seeds=(0,))
    outcomes = [
        Check("c", lambda _, value=value: value, op, 2.0).evaluate(result).holds
        for value in (1.0, 2.0, 3.0, math.nan)
    ]
    assert outcomes == [below, equal, above, False]


def test_a_check_that_cannot_be_measured_is_named():
    check = Check("final loss", lambda r: r.summary["loss"], "<=", 2.0)
    with pytest.raises(ValueError, match=r"check 'final loss' could not be measured: KeyError: 'loss'"):
        check.evaluate(Result(method="m", preset="cpu", seeds=(0,)))


def test_an_unknown_comparison_is_refused():
    with pytest.raises(ValueError, match="op='=<' is not known"):
        Check("c", lambda r: 0.0, "=<", 1.0)


def test_a_result_holds_only_if_all_checks_hold():
    result = Result(method="m", preset="cpu", seeds=(0,), summary={"a": 1.0})
    good = Check("good", lambda r: r.summary["a"], "<", 2.0)
    bad = Check("bad", lambda r: r.summary["a"], ">", 2.0)
    assert result.holds
    assert result.judged([good]).holds
    assert not result.judged([good, bad]).holds
    assert result.checks == []


def test_a_summary_that_is_not_a_number_is_refused():
    with pytest.raises(TypeError, match=r"summary\['loss'\]='low' must be a number"):
        Result(method="m", preset="cpu", seeds=(0,), summary={"loss": "low"})


def test_versions_are_those_of_this_process():
    assert versions()["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions()["numpy"] == np.__version__


def test_the_machine_is_described_without_its_owner(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "secret-host")
    found = machine()
    assert 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert found["memory_gib"] > 0
    assert "secret-host" not in json.dumps(found)


def test_importing_report_loads_nothing_heavy():
    code = (
        "import sys, effml.report as r; r.find_cards(); r.versions(); r.machine(); "
        "heavy = {'jax', 'matplotlib', 'rich', 'numpy', 'optax', 'flax'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
