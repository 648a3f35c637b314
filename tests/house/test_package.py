"""Importing effml and asking the command line for help stay quick and load nothing heavy."""

import subprocess
import sys

import pytest

LOADED = "import sys; {code}; print(sorted(m for m in ('jax', 'flax', 'optax', 'matplotlib', 'numpy') if m in sys.modules))"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_loads_no_jax():
    assert run(LOADED.format(code="import effml")).strip() == "[]"


def test_help_loads_no_jax():
    out = run(LOADED.format(code="from effml.cli import main; main(['--help'])"))
    assert out.strip().endswith("[]")
    assert "pipeline" in out


def fastest(command, times=5):
    import time

    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def test_import_takes_under_a_fifth_of_a_second():
    bare = fastest([sys.executable, "-c", "pass"])
    assert fastest([sys.executable, "-c", "import effml"]) - bare < 0.2


def test_help_answers_in_half_a_second():
    assert fastest([sys.executable, "-m", "effml", "--help"]) < 0.5


def test_every_name_of_the_package_can_be_reached():
    import effml

    for name in effml.__all__:
        assert getattr(effml, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = effml.nonsense
