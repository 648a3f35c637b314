"""The result of one experiment or pipeline run, its checks, and the JSON file it is kept in.

`result.json` and the committed `experiments/results/NAME/cpu.json` share one schema:

    {"method", "preset", "seeds", "versions", "machine", "rows", "curves", "summary",
     "checks": [{"name", "value", "op", "bound", "holds", "source"}], "seconds", "command", "date"}

JSON has no NaN or infinity, so they are written as the strings `"NaN"`, `"Infinity"` and `"-Infinity"` and
read back as floats. A text that happens to be one of these words gets a backslash in front while in the file.
"""

from __future__ import annotations

import datetime
import json
import math
import operator
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from effml._validate import one_of
from effml.report._files import write_atomic
from effml.report.environment import machine, versions

__all__ = ["Check", "CheckOutcome", "Result"]

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
}


@dataclass(frozen=True)
class CheckOutcome:
    """What one check found: `holds` is `value op bound`.

    Attributes:
        name: what was checked, in words.
        value: the measured number.
        op: `<=`, `>=`, `<`, `>` or `==`.
        bound: the number it was compared with.
        holds: whether the comparison is true; never true for NaN.
        source: where the bound comes from.

    Example:
        >>> CheckOutcome("loss", 1.9, "<=", 2.0, True, "spec").holds
        True
    """

    name: str
    value: float | int
    op: str
    bound: float | int
    holds: bool
    source: str


@dataclass(frozen=True)
class Check:
    """A claim that a run can refute: `measure(result) op bound`.

    Attributes:
        name: what is checked, in words.
        measure: reads one number from a `Result`.
        op: `<=`, `>=`, `<`, `>` or `==`.
        bound: what the number is compared with.
        source: where the bound comes from (table of a paper, specification).

    Raises:
        ValueError: if `op` is none of these.

    Example:
        >>> result = Result(method="scale", preset="smoke", seeds=(0,), summary={"loss": 1.9})
        >>> Check("final loss", lambda r: r.summary["loss"], "<=", 2.0, source="spec").evaluate(result).holds
        True
    """

    name: str
    measure: Callable[[Result], Any]
    op: str
    bound: float | int
    source: str = ""

    def __post_init__(self) -> None:
        one_of("op", self.op, _COMPARE)

    def evaluate(self, result: Result) -> CheckOutcome:
        """Measures `result` and compares; a measured NaN never holds.

        Raises:
            ValueError: if `measure` fails, naming the check.
        """
        try:
            value = float(self.measure(result))
        except Exception as error:
            raise ValueError(
                f"check {self.name!r} could not be measured: {type(error).__name__}: {error}"
            ) from error
        holds = _COMPARE[self.op](value, float(self.bound))
        return CheckOutcome(self.name, value, self.op, float(self.bound), bool(holds), self.source)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(kw_only=True)
class Result:
    """Everything one run measured; `save` and `load` keep it as JSON.

    Attributes:
        method: name of the experiment, or "pipeline".
        preset: "smoke", "cpu", "gpu", ….
        seeds: the seeds that were run; kept as a tuple.
        rows: the printed table, one dict per row. `{"loss": 1.9, "loss_spread": 0.1}` prints as 1.9 ± 0.1.
        curves: series for the plots (not printed): JSON values or arrays, in any nesting of dicts and lists.
        checks: outcomes of the claims.
        seconds: wall time of the whole run.
        summary: the few numbers that headlines and checks read, by name.
        versions: package versions, of this process unless given.
        machine: the machine, this one unless given.
        command: the command line that reproduces it.
        date: UTC time, ISO 8601.

    Example:
        >>> result = Result(method="scale", preset="smoke", seeds=(0,), rows=[{"loss": 2.0}])
        >>> Result.from_json(result.to_json()) == result
        True
    """

    method: str
    preset: str
    seeds: Sequence[int]
    rows: list[dict[str, Any]] = field(default_factory=list)
    curves: dict[str, Any] = field(default_factory=dict)
    checks: list[CheckOutcome] = field(default_factory=list)
    seconds: float | int = 0.0
    summary: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=versions)
    machine: dict[str, Any] = field(default_factory=machine)
    command: str = ""
    date: str = field(default_factory=_now)

    def __post_init__(self) -> None:
        self.seeds = tuple(int(seed) for seed in self.seeds)
        self.summary = {name: _number(value, name) for name, value in self.summary.items()}

    @property
    def holds(self) -> bool:
        """Whether every check holds (also true without checks)."""
        return all(check.holds for check in self.checks)

    def judged(self, checks: Sequence[Check]) -> Result:
        """A copy whose `checks` are the outcomes of `checks` on this result.

        Example:
            >>> result = Result(method="scale", preset="smoke", seeds=(0,), summary={"loss": 2.5})
            >>> result.judged([Check("loss", lambda r: r.summary["loss"], "<=", 2.0, "spec")]).holds
            False
        """
        return replace(self, checks=[check.evaluate(self) for check in checks])

    def to_json(self) -> str:
        """The file's text: indented JSON, arrays as lists, non-finite numbers as strings.

        Raises:
            TypeError: if a value has no JSON form, naming its place.
        """
        record = {item.name: getattr(self, item.name) for item in fields(self)}
        record["checks"] = [asdict(check) for check in self.checks]
        plain = {name: _encode(value, name) for name, value in record.items()}
        return _dumps(plain) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "result") -> Result:
        """Reads what `to_json` wrote.

        Args:
            text: the JSON.
            source: what to call it in errors, usually the path.

        Raises:
            ValueError: if it is not JSON (for example cut short) or a field is missing, unknown or of the
                wrong type; the message names the field.
        """
        try:
            record = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{source} is not a complete JSON file: {error}") from error
        return _validated(cls, _decode(record), source)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the result to `path` at once (temporary name, then rename); returns the path."""
        return write_atomic(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Result:
        """Reads a result file.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: if it is damaged or not of the schema, naming file and field.

        Example:
            >>> import tempfile
            >>> path = Path(tempfile.mkdtemp()) / "result.json"
            >>> saved = Result(method="scale", preset="cpu", seeds=(0, 1), summary={"loss": float("inf")})
            >>> Result.load(saved.save(path)) == saved
            True
        """
        try:
            text = Path(path).read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a text file: {error}") from error
        return cls.from_json(text, source=str(path))


def _number(value: Any, name: str) -> float | int:
    """A Python number from a Python, NumPy or JAX scalar."""
    plain = value.item() if getattr(value, "shape", None) == () else value
    if not _is_number(plain):
        raise TypeError(f"summary[{name!r}]={value!r:.60} must be a number")
    return plain


_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_RESERVED = re.compile(r"\\*(NaN|-?Infinity)")


def _encode(value: Any, place: str) -> Any:
    """Plain JSON values; raises TypeError naming `place` for anything that has no JSON form."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, str):
        return "\\" + value if _RESERVED.fullmatch(value) else str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{place} has the key {key!r}; JSON needs text keys")
        return {key: _encode(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars
        plain = value.tolist()
        if isinstance(plain, bool | int | float | str | list):
            return _encode(plain, place)
    raise TypeError(f"{place} is a {type(value).__name__}, which has no JSON form")


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        if value in _NON_FINITE:
            return _NON_FINITE[value]
        return value[1:] if value.startswith("\\") and _RESERVED.fullmatch(value) else value
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    return value


def _dumps(value: Any, indent: str = "") -> str:
    """Indented JSON that keeps a list of numbers on one line, so that files stay short and diffs readable."""
    deeper = indent + "  "
    if isinstance(value, dict) and value:
        items = [f"{deeper}{json.dumps(key)}: {_dumps(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + indent + "}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "[\n" + ",\n".join(deeper + _dumps(item, deeper) for item in value) + "\n" + indent + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_TEXT = (lambda value: isinstance(value, str), "text")
_NUMBER = (_is_number, "a number")
_SCHEMA: dict[str, tuple[Callable[[Any], bool], str]] = {
    "method": _TEXT,
    "preset": _TEXT,
    "seeds": (lambda v: isinstance(v, list) and all(map(_is_integer, v)), "a list of integers"),
    "versions": (
        lambda v: isinstance(v, dict) and all(isinstance(item, str) for item in v.values()),
        "an object of texts",
    ),
    "machine": (lambda v: isinstance(v, dict), "an object"),
    "rows": (lambda v: isinstance(v, list) and all(isinstance(row, dict) for row in v), "a list of objects"),
    "checks": (
        lambda v: isinstance(v, list) and all(isinstance(row, dict) for row in v),
        "a list of objects",
    ),
    "seconds": _NUMBER,
    "curves": (lambda v: isinstance(v, dict), "an object"),
    "summary": (lambda v: isinstance(v, dict) and all(map(_is_number, v.values())), "an object of numbers"),
    "command": _TEXT,
    "date": _TEXT,
}
_OPTIONAL = ("curves", "summary", "command", "date")
_CHECK_SCHEMA: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": _TEXT,
    "value": _NUMBER,
    "op": (lambda value: value in _COMPARE, f"one of {', '.join(_COMPARE)}"),
    "bound": _NUMBER,
    "holds": (lambda value: isinstance(value, bool), "true or false"),
    "source": _TEXT,
}


def _validated(cls: type[Result], record: Any, source: str) -> Result:
    _match(record, _SCHEMA, _OPTIONAL, source, "")
    for index, check in enumerate(record["checks"]):
        _match(check, _CHECK_SCHEMA, (), source, f"checks[{index}].")
    values = {**dict.fromkeys(("command", "date"), ""), **record}
    values["checks"] = [CheckOutcome(**check) for check in record["checks"]]
    return cls(**values)


def _match(
    record: Any,
    schema: dict[str, tuple[Callable[[Any], bool], str]],
    optional: Sequence[str],
    source: str,
    prefix: str,
) -> None:
    if not isinstance(record, dict):
        raise ValueError(f"{source} holds a {type(record).__name__}, not an object with {', '.join(schema)}")
    for name in schema:
        if name not in record and name not in optional:
            raise ValueError(f"{source} lacks the field {prefix + name!r}")
    for name, value in record.items():
        if name not in schema:
            raise ValueError(
                f"{source} has an unknown field {prefix + name!r} (allowed: {', '.join(schema)})"
            )
        accepts, description = schema[name]
        if not accepts(value):
            raise ValueError(
                f"{source}: the field {prefix + name!r} must be {description}, not {value!r:.60}"
            )
