"""What all ops ask of their arguments, in the same words."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
from jax.core import Tracer

__all__ = ["as_array", "finite_number", "power_of_two", "whole_number"]


def as_array(name: str, value: Any) -> Any:
    """An array as it is, and lists or numbers as NumPy's.

    Example:
        >>> as_array("x", [1, 2])
        array([1, 2])
        >>> as_array("x", None)
        Traceback (most recent call last):
        TypeError: x must be an array of numbers, not NoneType
    """
    if not hasattr(value, "dtype"):
        try:
            found = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"{name} must be an array of numbers: {error}") from None
        if found.dtype.kind not in "biuf":
            raise TypeError(f"{name} must be an array of numbers, not {type(value).__name__}")
        return found
    return value


def finite_number(name: str, value: Any) -> float:
    """A finite number that is known when a call is traced.

    Example:
        >>> finite_number("scale", float("nan"))
        Traceback (most recent call last):
        ValueError: scale=nan must be finite
    """
    if isinstance(value, Tracer):
        raise TypeError(f"{name} must be a number that is known when the call is traced, not a traced array")
    try:
        if isinstance(value, str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={value!r} must be a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}={number} must be finite")
    return number


def whole_number(name: str, value: Any, least: int) -> int:
    """A whole number, NumPy's too, that is large enough.

    Example:
        >>> whole_number("rows", 2.5, 1)
        Traceback (most recent call last):
        ValueError: rows=2.5 must be an int from 1
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be an int from {least}")
    return int(value)


def power_of_two(value: int) -> bool:
    """Whether Triton takes it as a size.

    Example:
        >>> [n for n in range(1, 9) if power_of_two(n)]
        [1, 2, 4, 8]
    """
    return value > 0 and not value & (value - 1)
