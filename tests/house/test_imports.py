"""Who may import whom, read from the source of every module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOUNDATIONS = {"nn", "data", "train", "report", "linalg", "trees"}
METHODS = {
    "optimize",
    "quantize",
    "federate",
    "attend",
    "decode",
    "retrieve",
    "infer",
    "compose",
    "understand",
}
TOP = {"models", "pipeline", "cli"}
EXCEPTIONS = {("federate", "quantize"), ("decode", "attend")}


def module_name(path):
    return path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__").replace("/", ".")


def imported(tree, package):
    """(module, at top level) of every import, type-checking ones left out."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(id(child) for part in node.body for child in ast.walk(part))
    top_level = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{package}: relative import"
            names = [node.module]
            if node.module == "effml":
                names = [f"effml.{alias.name}" for alias in node.names]
        yield from ((name, id(node) in top_level) for name in names)


def area(name):
    parts = name.split(".")
    return parts[1] if parts[0] == "effml" and len(parts) > 1 else None


def allowed(importer, target):
    """May a module of area `importer` import area `target`?"""
    if importer == target or target in ("_validate", "__version__"):
        return True
    if importer in ("trees", "linalg", "_validate"):
        return False
    if importer in TOP or importer in ("__init__", "__main__"):
        return True
    if importer in FOUNDATIONS:
        return target in FOUNDATIONS
    if importer in METHODS:
        return target in FOUNDATIONS - {"report"} or (importer, target) in EXCEPTIONS
    return False


MODULES = sorted((ROOT / "effml").rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_effml_module_imports_only_what_its_layer_may(path):
    name = module_name(path)
    importer = area(name) or "__init__"
    for target, _ in imported(ast.parse(path.read_text()), name):
        assert not target.startswith("experiments") or importer == "cli", f"{name} imports {target}"
        if target.split(".")[0] == "effml" and area(target):
            assert allowed(importer, area(target)), f"{name} ({importer}) must not import {target}"


@pytest.mark.parametrize("path", sorted((ROOT / "pallas_kernels").rglob("*.py")), ids=module_name)
def test_kernels_need_only_jax_and_numpy(path):
    standard = {
        "__future__",
        "collections",
        "dataclasses",
        "functools",
        "math",
        "typing",
        "importlib",
        "argparse",
        "json",
        "time",
        "pathlib",
        "statistics",
        "sys",
        "os",
    }
    for target, top in imported(ast.parse(path.read_text()), module_name(path)):
        package = target.split(".")[0]
        assert package in {"jax", "jaxlib", "numpy", "pallas_kernels"} | standard or not top, (
            f"{path} imports {target}"
        )


HEAVY = {
    "matplotlib",
    "tokenizers",
    "torch",
    "transformers",
    "orbax",
    "tensorboardX",
    "wandb",
    "trackio",
    "flwr",
    "gguf",
    "jinja2",
}


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_heavy_packages_are_imported_where_they_are_used(path):
    for target, top in imported(ast.parse(path.read_text()), module_name(path)):
        assert not (top and target.split(".")[0] in HEAVY), f"{path} imports {target} at module level"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_nothing_changes_global_jax_configuration_on_import(path):
    for node in ast.parse(path.read_text()).body:
        assert "config.update" not in ast.unparse(node) or isinstance(
            node, (ast.FunctionDef, ast.ClassDef)
        ), path


def test_the_rules_refuse_what_they_should():
    assert not allowed("nn", "optimize")
    assert not allowed("optimize", "report")
    assert not allowed("trees", "nn")
    assert not allowed("optimize", "decode")
    assert allowed("decode", "attend")
    assert not allowed("attend", "decode")
    assert allowed("pipeline", "optimize")
