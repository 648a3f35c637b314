"""Checks of user input that every part of the library words the same way."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["missing_package", "one_of", "positive"]


def one_of(argument: str, value: str, allowed: Iterable[str]) -> str:
    """Returns `value` if it is one of `allowed`, else raises naming the nearest allowed name.

    Args:
        argument: name of the argument, as the user typed it.
        value: what was given.
        allowed: the names that are accepted.

    Returns:
        `value`, unchanged.

    Raises:
        ValueError: if `value` is not allowed.

    Example:
        >>> one_of("optimizer", "scale", ["adamw", "scale"])
        'scale'
    """
    names = sorted(allowed)
    if value in names:
        return value
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"{argument}={value!r} is not known{hint} (allowed: {', '.join(names)})")


def positive(argument: str, value: int | float) -> int | float:
    """Returns `value` if it is above zero, else raises `ValueError` naming `argument`.

    Example:
        >>> positive("batch_size", 4)
        4
    """
    if not value > 0:
        raise ValueError(f"{argument}={value!r} must be above 0")
    return value


def missing_package(package: str, install: str, purpose: str) -> ImportError:
    """The error for an optional package that is absent, with the pip line that brings it.

    Example:
        >>> raise missing_package("gguf", "pip install 'effml[hub]'", "read .gguf files")
        Traceback (most recent call last):
        ...
        ImportError: to read .gguf files, install the package 'gguf': pip install 'effml[hub]'
    """
    return ImportError(f"to {purpose}, install the package {package!r}: {install}")
