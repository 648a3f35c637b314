"""Checks of user input that every part of the library words the same way."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable
from typing import Any

__all__ = ["count", "floating_dtype", "missing_package", "one_of", "positive", "real", "seed_in_range"]


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


def count(argument: str, value: Any) -> int:
    """Returns `value` as an int if it is an integer above zero, else raises naming `argument`.

    Raises:
        TypeError: if it is no integer; 2.5 steps are neither 2 nor 3.
        ValueError: if it is not above zero.

    Example:
        >>> count("steps", 4)
        4
    """
    try:
        whole = operator.index(value)
    except TypeError:
        # What is not above zero, NaN among it, is called that: the type is then the lesser fault.
        if isinstance(value, float):
            positive(argument, value)
        raise TypeError(f"{argument}={value!r} must be an integer") from None
    return int(positive(argument, whole))


def real(argument: str, value: Any) -> float:
    """Returns `value` as a float if it is a real number, NaN and infinity among them, else raises naming `argument`.

    Raises:
        TypeError: for text, None, a boolean, or an array of several numbers.

    Example:
        >>> real("delta", 5)
        5.0
    """
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{argument}={value!r} must be a number") from None


def floating_dtype(argument: str, value: Any) -> Any:
    """Returns `value` as a dtype if it is a floating-point one, else raises naming `argument`. None stays None.

    Raises:
        ValueError: if it is another dtype, or no dtype.

    Example:
        >>> floating_dtype("mu_dtype", "bfloat16")
        dtype(bfloat16)
    """
    if value is None:
        return None
    import jax.numpy as jnp

    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError, SyntaxError):
        raise ValueError(f"{argument}={value!r} is no dtype") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{argument}={dtype.name!r} must be a floating-point dtype")
    return dtype


def seed_in_range(value: int) -> int:
    """Returns `value` if it is a seed that gives random numbers of its own: JAX keeps 32 bits of a seed.

    Example:
        >>> seed_in_range(2**32)
        Traceback (most recent call last):
        ...
        ValueError: seed=4294967296 must be at most 4294967295: 32 bits are used
    """
    if value < 0:
        raise ValueError(f"seed={value!r} must not be negative")
    if value >= 2**32:
        raise ValueError(f"seed={value!r} must be at most {2**32 - 1}: 32 bits are used")
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
