"""Method cards: what every experiment is for and what it claims, found by scanning the `experiments` folder.

A card is read from the source file without running it, so that `effml list` needs neither jax nor the method:
each `experiments/NAME.py` has one top-level statement `METHOD = MethodCard(...)` with literal arguments.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from dataclasses import dataclass, field, fields
from pathlib import Path

from effml._validate import one_of
from effml.report.result import Result

__all__ = ["JOBS", "MethodCard", "committed_result", "experiments_folder", "find_cards", "read_card"]

JOBS = (
    "optimize",
    "quantize",
    "federate",
    "attend",
    "decode",
    "retrieve",
    "infer",
    "compose",
    "understand",
)


@dataclass(frozen=True)
class MethodCard:
    """What one method is for, what it claims and how long its experiment takes.

    Attributes:
        name: the experiment's file name without `.py`.
        job: the folder of effml that does this job, one of `JOBS`.
        title: the method's name as people write it.
        purpose: one plain sentence saying what it is for.
        claim: the sentence that the experiment can refute.
        module: where the code is, such as "effml.optimize".
        paper: title and arXiv id ("" if it has none).
        minutes: preset name to expected minutes on the machine the preset is meant for.
        headline: template over the committed summary, such as "{scale_loss:.2f} nats vs {adamw_loss:.2f}".

    Raises:
        ValueError: if `job` is unknown or `name`, `title`, `purpose`, `claim` or `module` is empty.

    Example:
        >>> card = MethodCard("scale", "optimize", "SCALE", "Trains with SGD's memory.", "As good as Adam.",
        ...                   "effml.optimize", ("A minimalist optimizer", "2506.16659"), {"cpu": 5.0},
        ...                   "{loss:.2f} nats")
        >>> card.headline_for(Result(method="scale", preset="cpu", seeds=(0,), summary={"loss": 1.234}))
        '1.23 nats'
    """

    name: str
    job: str
    title: str
    purpose: str
    claim: str
    module: str
    paper: tuple[str, str]
    minutes: dict[str, float | int] = field(default_factory=dict)
    headline: str | None = None

    def __post_init__(self) -> None:
        one_of("job", self.job, JOBS)
        for name in ("name", "title", "purpose", "claim", "module"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name}={value!r} must be text that is not empty")
        if len(self.paper) != 2 or not all(isinstance(part, str) for part in self.paper):
            raise ValueError(f"paper={self.paper!r} must be (title, arXiv id)")

    def headline_for(self, result: Result | None) -> str | None:
        """The headline filled from `result.summary`, or None if there is no template or no result.

        Raises:
            ValueError: if the template asks for a number that the summary lacks.
        """
        if self.headline is None or result is None:
            return None
        try:
            return self.headline.format(**result.summary)
        except (KeyError, IndexError) as error:
            raise ValueError(
                f"the headline of {self.name!r} asks for {error}, but the result has {sorted(result.summary)}"
            ) from error


def experiments_folder() -> Path:
    """The folder of the `experiments` package, found without importing it.

    Raises:
        FileNotFoundError: if the package is not installed.

    Example:
        >>> experiments_folder().name
        'experiments'
    """
    spec = importlib.util.find_spec("experiments")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise FileNotFoundError("the package 'experiments', which comes with effml, is not installed")
    return Path(places[0])


def find_cards(folder: str | os.PathLike[str] | None = None) -> list[MethodCard]:
    """The cards of all experiments, in the order of `JOBS` and then by name.

    Args:
        folder: where to look, the `experiments` package by default. Files that start with an underscore are
            helpers and are skipped.

    Raises:
        ValueError: if a file has no card or one that cannot be read, naming file and line.

    Example:
        >>> all(card.job in JOBS for card in find_cards())
        True
    """
    place = experiments_folder() if folder is None else Path(folder)
    files = sorted(path for path in place.glob("*.py") if not path.name.startswith("_"))
    return sorted(map(read_card, files), key=lambda card: (JOBS.index(card.job), card.name))


def read_card(path: str | os.PathLike[str]) -> MethodCard:
    """Reads `METHOD = MethodCard(...)` from a source file without running the file.

    Args:
        path: the experiment's file.

    Raises:
        ValueError: if the file cannot be parsed or has no card, an argument is not a literal or not valid, or
            the card's name is not the file's; the message names file and line.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "toy.py"
        >>> _ = path.write_text('''METHOD = MethodCard(name="toy", job="infer", title="Toy", purpose="A toy.",
        ... claim="It is read.", module="effml.infer.toy", paper=("On toys", ""))''')
        >>> read_card(path).title
        'Toy'
    """
    path = Path(path)
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", None) or 1
        raise ValueError(f"{path}:{line}: not valid Python: {error}") from error
    call = _card_call(module)
    if call is None:
        raise ValueError(f"{path}:1: no top-level statement METHOD = MethodCard(...)")
    names = [item.name for item in fields(MethodCard)]
    given = list(zip(names, call.args)) + [(keyword.arg, keyword.value) for keyword in call.keywords]
    arguments = {}
    for name, node in given:
        if name is None or isinstance(node, ast.Starred):
            raise ValueError(f"{path}:{node.lineno}: the card must not use * or **")
        try:
            arguments[name] = ast.literal_eval(node)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}:{node.lineno}: the card's {name} must be a literal, not {ast.unparse(node)!r:.60}"
            ) from error
    try:
        card = MethodCard(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}:{call.lineno}: {error}") from error
    if card.name != path.stem:
        raise ValueError(f"{path}:{call.lineno}: the card's name is {card.name!r}, not {path.stem!r}")
    return card


def _card_call(module: ast.Module) -> ast.Call | None:
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        value = statement.value
        if any(isinstance(target, ast.Name) and target.id == "METHOD" for target in targets):
            return value if isinstance(value, ast.Call) else None
    return None


def committed_result(name: str, folder: str | os.PathLike[str] | None = None) -> Result | None:
    """The committed result of an experiment, `results/NAME/cpu.json`, or None if there is none.

    Args:
        name: the experiment's name.
        folder: the experiments folder, that of the package by default.

    Raises:
        ValueError: if the file is damaged.

    Example:
        >>> committed_result("no_such_method") is None
        True
    """
    place = experiments_folder() if folder is None else Path(folder)
    path = place / "results" / name / "cpu.json"
    return Result.load(path) if path.is_file() else None
