"""Public names are documented, README commands and code run, and the README's method table is current."""

import importlib
import inspect
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

import effml

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def public_modules():
    for info in pkgutil.walk_packages(effml.__path__, "effml."):
        if not any(part.startswith("_") for part in info.name.split(".")[1:]):
            yield info.name


@pytest.mark.parametrize("name", sorted(public_modules()))
def test_every_public_name_has_a_docstring(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    for public in getattr(module, "__all__", []):
        value = getattr(module, public)
        if not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        assert inspect.getdoc(value), f"{name}.{public} has no docstring"
        if inspect.isclass(value) and value.__module__.startswith("effml"):
            for method, member in vars(value).items():
                if inspect.isfunction(member) and not method.startswith("_"):
                    assert inspect.getdoc(getattr(value, method)), (
                        f"{name}.{public}.{method} has no docstring"
                    )


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_readme_python_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    assert blocks("python")
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)


def readme_commands():
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [line.split("#")[0].strip() for line in lines if line.startswith("effml ")]


def test_readme_commands_run(tmp_path, monkeypatch, capfd):
    # The pipeline, a whole experiment and a 7B plan take minutes: .ci/run and the tests run their small forms.
    from effml.cli import main

    monkeypatch.chdir(tmp_path)
    commands = readme_commands()
    assert len(commands) >= 5
    for command in commands:
        words = shlex.split(command)[1:]
        if words[0] in ("pipeline", "plan", "run"):
            words += ["--help"]
            with pytest.raises(SystemExit, match="0"):
                main(words)
            continue
        assert main(words) == 0, command
    capfd.readouterr()


def test_readme_table_is_what_effml_list_prints(capsys):
    from effml.cli import main

    assert main(["list", "--markdown"]) == 0
    table = capsys.readouterr().out.strip()
    between = re.search(r"<!-- methods -->\n(.*?)\n<!-- /methods -->", README, flags=re.DOTALL)
    assert between, "README has no method table"
    assert between[1].strip() == table, "run `effml list --markdown` and paste it between the markers"


def test_the_project_speaks_only_of_itself():
    words = re.compile(
        r"\b(subagents?|language model assistant|this session|the prompt page|claude|chatgpt)\b",
        re.IGNORECASE,
    )
    for path in [*ROOT.glob("*.md"), *(ROOT / "effml").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]:
        assert not words.search(path.read_text(encoding="utf-8")), path
