"""The code cells of every notebook run in order (lines for the notebook shell are left out)."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EFFML_REDUCED", "1")
    namespace = {"__name__": "__main__"}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            lines = [line for line in "".join(cell["source"]).splitlines() if not line.startswith(("%", "!"))]
            exec(compile("\n".join(lines), str(path), "exec"), namespace)
