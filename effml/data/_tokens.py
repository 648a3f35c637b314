"""Checks and files that every tokenizer shares."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

__all__ = ["META", "check_tokens", "read_meta", "utf8", "write_text"]

META = "effml_tokenizer.json"


def check_tokens(tokens: Any, vocab_size: int) -> Int32[np.ndarray, " *shape"]:
    """Token ids as int32, after a check that all of them are in the vocabulary.

    Args:
        tokens: integers of any shape: a list, or an array on any device.
        vocab_size: one more than the largest id allowed.

    Returns:
        The same ids, int32.

    Raises:
        TypeError: if they are not integers.
        ValueError: naming the first id outside the vocabulary and its place.

    Example:
        >>> check_tokens([1, 300], 256)
        Traceback (most recent call last):
        ...
        ValueError: token 300 at position 1 is outside the vocabulary 0..255
    """
    array = np.asarray(tokens)
    if array.size == 0:
        return array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"tokens must be integers, not {array.dtype}")
    outside = (array < 0) | (array >= vocab_size)
    if outside.any():
        place = np.unravel_index(int(np.argmax(outside)), array.shape)
        where = place[0] if array.ndim == 1 else tuple(map(int, place))
        raise ValueError(
            f"token {array[place]} at position {where} is outside the vocabulary 0..{vocab_size - 1}"
        )
    return array.astype(np.int32)


def utf8(text: str) -> bytes:
    """The UTF-8 bytes of a text; TypeError or ValueError if it is not text."""
    if not isinstance(text, str):
        raise TypeError(f"text must be a string, not {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        lone = f"U+{ord(text[error.start]):04X}"
        raise ValueError(f"text is not Unicode: lone surrogate {lone} at character {error.start}") from None


def read_meta(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The description that a tokenizer's `save` wrote into a folder; ValueError if there is none."""
    path = Path(folder) / META
    if not path.is_file():
        raise ValueError(f"{os.fspath(folder)!r} holds no tokenizer of effml ({META} is missing)")
    try:
        meta = json.loads(path.read_text("utf-8"))
        meta["kind"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}") from None
    if meta.get("format", 1) != 1:
        raise ValueError(f"{str(path)!r} has format={meta['format']!r}; this version of effml reads 1")
    return meta


def write_text(path: Path, text: str) -> None:
    """Writes a file under a temporary name and renames it, so that it is never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, "utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
