"""Who may import whom, read from the source of every module."""

import ast
import json
import subprocess
import sys
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
# Whole modules that are an adapter to one package, and are themselves imported in a function.
ADAPTERS = {("effml.data._grain", "grain")}
HEAVY = {
    "bm25s",
    "flwr",
    "gguf",
    "grain",
    "jax_triton",
    "jinja2",
    "matplotlib",
    "networkx",
    "numpyro",
    "orbax",
    "pandas",
    "ray",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "tensorboardX",
    "tokenizers",
    "torch",
    "trackio",
    "transformers",
    "wandb",
}


def module_name(path):
    return path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__").replace("/", ".")


def imported(source):
    """(module, loaded when the importing module is) of every import; those for type checkers alone are left out."""

    def visit(node, loaded):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from visit(child, loaded)
            return
        if isinstance(node, ast.Import):
            yield from ((alias.name, loaded) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "." * node.level + (node.module or ""), loaded
            elif node.module == "effml":
                yield from ((f"effml.{alias.name}", loaded) for alias in node.names)
            else:
                yield node.module, loaded
        inside = loaded and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), True)


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


def broken_rules(name, source):
    """What the module called `name` imports and may not."""
    importer = area(name) or "__init__"
    for target, loaded in imported(source):
        package = target.split(".")[0]
        if target.startswith("."):
            yield f"{name} imports {target} relatively"
        elif target == "effml":
            yield f"{name} imports effml as a whole, which hides what it uses"
        elif package == "effml" and not allowed(importer, area(target)):
            yield f"{name} ({importer}) must not import {target}"
        elif package in ("tests", "benchmarks", *([] if importer == "cli" else ["experiments"])):
            yield f"{name} imports {target}"
        elif package in HEAVY and loaded and (name, package) not in ADAPTERS:
            yield f"{name} imports {target} when it is loaded; import it in the function that needs it"


def broken_kernel_rules(name, source):
    """What a module of `pallas_kernels` imports and may not: jax and numpy alone, other packages only in functions."""
    for target, loaded in imported(source):
        package = target.split(".")[0]
        if package in ("effml", "experiments", "tests", "benchmarks", ""):
            yield f"{name} imports {target}"
        elif loaded and package not in {"jax", "jaxlib", "numpy", "pallas_kernels", *sys.stdlib_module_names}:
            if package == "triton" and name.endswith(".triton_kernel"):
                continue  # a kernel in Triton's language is loaded by its launcher alone, on first use
            yield f"{name} imports {target} when it is loaded"


@pytest.mark.parametrize("path", sorted((ROOT / "effml").rglob("*.py")), ids=module_name)
def test_effml_module_imports_only_what_its_layer_may(path):
    assert not list(broken_rules(module_name(path), path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", sorted((ROOT / "pallas_kernels").rglob("*.py")), ids=module_name)
def test_kernels_need_only_jax_and_numpy(path):
    assert not list(broken_kernel_rules(module_name(path), path.read_text(encoding="utf-8")))


def test_nothing_changes_global_jax_configuration_on_import():
    code = """
import importlib, json, os, pkgutil, jax
before, environment = dict(jax.config.values), dict(os.environ)
import effml, pallas_kernels
names = [m.name for p in (effml, pallas_kernels) for m in pkgutil.walk_packages(p.__path__, p.__name__ + ".")]
for name in names:
    if name != "effml.__main__" and not name.endswith(".triton_kernel"):
        importlib.import_module(name)
changed = [k for k, v in jax.config.values.items() if before.get(k) != v]
changed += [k for k in {*os.environ, *environment} if os.environ.get(k) != environment.get(k)]
print(json.dumps([len(names), changed]))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    count, changed = json.loads(out.stdout.splitlines()[-1])
    assert count > 50
    assert changed == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("effml.nn.mlp", "from effml.optimize import scale"),
        ("effml.nn.mlp", "def f():\n    import effml.decode"),
        ("effml.nn.mlp", "import effml"),
        ("effml.nn.mlp", "from ..optimize import scale"),
        ("effml.data.corpus", "from effml import models"),
        ("effml.train.loop", "try:\n    import orbax.checkpoint\nexcept ImportError:\n    pass"),
        ("effml.report.figures", "import matplotlib.pyplot as plt"),
        ("effml.report.figures", "class A:\n    import rich"),
        ("effml.trees", "from effml.nn import mlp"),
        ("effml.linalg", "from effml import trees"),
        ("effml.optimize._scale", "from effml.report import Result"),
        ("effml.optimize._scale", "from effml.decode import generate"),
        ("effml.attend.ssa", "from effml.decode import generate"),
        ("effml.quantize.nanoquant", "from experiments import nanoquant"),
        ("effml.pipeline.stages", "import experiments"),
        ("effml.data.packing", "import grain"),
        ("effml.data._grain", "import torch"),
        ("effml.models", "from tests import helpers"),
    ],
)
def test_the_rules_refuse(name, source):
    assert len(list(broken_rules(name, source))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("effml.decode.esp", "from effml.attend import cache\nfrom effml.nn.transformer import forward"),
        ("effml.federate.dfmpq", "from effml.quantize import nanoquant"),
        ("effml.pipeline.stages", "from effml.optimize import scale\nfrom effml import report"),
        ("effml.cli.run", "def run():\n    import experiments._main"),
        ("effml.nn.hub", "def f():\n    import gguf, torch\n    from tokenizers import Tokenizer"),
        ("effml.report.page", "if TYPE_CHECKING:\n    import matplotlib\n    from effml import pipeline"),
        (
            "effml.optimize._scale",
            "import jax, optax\nfrom effml._validate import positive\nimport pallas_kernels",
        ),
    ],
)
def test_the_rules_allow(name, source):
    assert not list(broken_rules(name, source))


@pytest.mark.parametrize(
    "source",
    ["import optax", "def f():\n    from effml.nn import mlp", "from . import x", "import jax_triton"],
)
def test_the_kernel_rules_refuse(source):
    assert len(list(broken_kernel_rules("pallas_kernels.op.api", source))) == 1


def test_the_kernel_rules_allow_the_standard_library_and_peers_in_functions():
    source = "import jax, numpy as np, time\ndef peer():\n    import torch"
    assert not list(broken_kernel_rules("pallas_kernels.op.bench", source))
