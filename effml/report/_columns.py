"""Turns rows of a result into aligned, readable cells, the same for terminal, Markdown and HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from effml._validate import one_of

__all__ = ["SPREAD", "Column", "format_number", "format_value", "mean_and_spread", "read_columns"]

SPREAD = "_spread"
Best = Mapping[str, str]
Columns = Sequence[str] | Mapping[str, str]


@dataclass(frozen=True)
class Column:
    """One printed column: header, cell texts, whether they are numbers, and which cells are the best."""

    key: str
    header: str
    cells: tuple[str, ...]
    numeric: bool
    best: frozenset[int]


def mean_and_spread(name: str, values: Iterable[Any]) -> dict[str, float]:
    """Mean and sample standard deviation over seeds, named so that a table prints them as `mean ± spread`.

    spread = sqrt(sum_i (x_i - mean)^2 / (n - 1)); 0 for a single value.

    Args:
        name: the column's name.
        values: one number per seed.

    Returns:
        `{name: mean, name + "_spread": standard deviation}`.

    Raises:
        ValueError: if there are no values.

    Example:
        >>> mean_and_spread("loss", [1.0, 2.0, 3.0])
        {'loss': 2.0, 'loss_spread': 1.0}
    """
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError(f"no values of {name!r} to average")
    mean = math.fsum(numbers) / len(numbers)
    if len(numbers) == 1 or not all(map(math.isfinite, numbers)):
        return {name: mean, name + SPREAD: 0.0 if len(numbers) == 1 else math.nan}
    variance = math.fsum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)
    return {name: mean, name + SPREAD: math.sqrt(variance)}


def format_number(value: float | int, decimals: int | None = None) -> str:
    """A number for people: thousands separated, four significant digits unless `decimals` says otherwise.

    Example:
        >>> [format_number(value) for value in (1234567, 0.123456, 12.0, 3.2e-7, float("nan"))]
        ['1,234,567', '0.1235', '12.00', '3.2e-07', 'NaN']
    """
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if decimals is not None:
        return f"{value:,.{decimals}f}"
    if value != 0 and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.3g}"
    return f"{value:,.{_decimals_for(value)}f}"


def format_value(value: Any) -> str:
    """Any cell as text: "–" for None, yes/no for booleans, lists joined by commas.

    Example:
        >>> [format_value(value) for value in (None, True, [1, 2], "text", 0.5)]
        ['–', 'yes', '1, 2', 'text', '0.5000']
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    value = _scalar(value)
    if isinstance(value, int | float):
        return format_number(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value))
    return str(value)


def read_columns(
    rows: Sequence[Mapping[str, Any]], columns: Columns | None = None, best: Best | None = None
) -> list[Column]:
    """Columns of `rows`, with `loss` and `loss_spread` joined to one column "1.90 ± 0.02".

    Args:
        rows: one mapping per row; a missing key prints as "–".
        columns: which keys, in which order; a mapping gives headers too. All keys in order of appearance by
            default.
        best: "min" or "max" for the columns whose best value is to be marked.

    Raises:
        ValueError: if a wanted column is in no row.
    """
    rows = list(rows)
    present = list(dict.fromkeys(key for row in rows for key in row))
    if columns is None:
        shown = [key for key in present if not (key.endswith(SPREAD) and key[: -len(SPREAD)] in present)]
        headers = {key: key.replace("_", " ") for key in shown}
    elif isinstance(columns, Mapping):
        headers = dict(columns)
    else:
        headers = {key: key.replace("_", " ") for key in columns}
    for key in headers if rows else ():
        one_of("column", key, present)
    for key in best or ():
        one_of("best", key, headers)
    return [_column(rows, key, header, (best or {}).get(key)) for key, header in headers.items()]


def _column(rows: Sequence[Mapping[str, Any]], key: str, header: str, better: str | None) -> Column:
    values = [_scalar(row.get(key)) for row in rows]
    spreads = [_scalar(row.get(key + SPREAD)) for row in rows]
    numbers = [value if _is_number(value) else None for value in values]
    numeric = any(number is not None for number in numbers) and all(
        value is None or _is_number(value) for value in values
    )
    if not numeric:
        return Column(key, header, tuple(map(format_value, values)), False, frozenset())
    decimals = _column_decimals(numbers, spreads)
    if decimals and not any(map(_is_number, spreads)):
        decimals = _without_common_zeros(numbers, decimals)
    cells = []
    for number, spread in zip(numbers, spreads):
        if number is None:
            cells.append("–")
            continue
        cell = format_number(number, None if isinstance(number, int) else decimals)
        if _is_number(spread):
            cell += f" ± {format_number(float(spread), decimals)}"
        cells.append(cell)
    return Column(key, header, tuple(cells), True, _best(numbers, better))


def _best(numbers: Sequence[float | int | None], better: str | None) -> frozenset[int]:
    finite = [number for number in numbers if number is not None and math.isfinite(number)]
    if better is None or len(finite) < 2:
        return frozenset()
    top = (min if one_of("best", better, ("min", "max")) == "min" else max)(finite)
    return frozenset(index for index, number in enumerate(numbers) if number == top)


def _column_decimals(numbers: Sequence[float | int | None], spreads: Sequence[Any]) -> int | None:
    """One number of decimals for the column, so that points align; None if its values differ too much.

    With spreads, two significant digits of the smallest one; otherwise four of the largest value.
    """
    sizes = [abs(n) for n in numbers if isinstance(n, float) and math.isfinite(n) and n != 0]
    noise = [float(s) for s in spreads if _is_number(s) and math.isfinite(s) and s > 0]
    if not sizes:
        return None if not noise else min(6, max(0, _decimals_for(min(noise), 2)))
    if max(sizes) / min(sizes) > 1e3 or max(sizes) >= 1e9 or max(sizes) < 1e-3:
        return None
    decimals = _decimals_for(max(sizes))
    if noise:
        decimals = min(_decimals_for(min(noise), 2), decimals + 2)
    return max(0, min(decimals, 6))


def _without_common_zeros(numbers: Sequence[float | int | None], decimals: int) -> int:
    """Fewer decimals, at least one, if the last ones are 0 in the whole column."""
    texts = [f"{n:.{decimals}f}" for n in numbers if isinstance(n, float) and math.isfinite(n)]
    while decimals > 1 and all(text.endswith("0") for text in texts):
        texts, decimals = [text[:-1] for text in texts], decimals - 1
    return decimals


def _decimals_for(value: float | int, digits: int = 4) -> int:
    if value == 0:
        return digits - 1
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scalar(value: Any) -> Any:
    """NumPy and JAX scalars as Python numbers; anything else unchanged."""
    if not isinstance(value, bool | int | float | str) and getattr(value, "shape", None) == ():
        return value.item()
    return value
