"""Finding and reading the text files of a source: the standard library, a folder or one file."""

from __future__ import annotations

import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

__all__ = ["candidates", "no_text", "read_text", "source_files"]

# Folders of the standard library that are not its sources: packages of others, and tests with their data.
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def source_files(source: str | os.PathLike[str]) -> list[Path]:
    """The text files of a source, sorted by relative path.

    A file is text when its bytes are UTF-8 without a NUL and it holds something other than blanks; its
    suffix does not matter. Hidden files and folders, linked folders (so no loops), devices, and files that
    cannot be read are skipped.

    Args:
        source: "stdlib" for the Python standard library's own sources (without tests and installed
            packages), a folder, or one file. A folder called stdlib is written `./stdlib`.

    Returns:
        Absolute or relative paths, as `source` was given.

    Raises:
        ValueError: if the source does not exist or holds no text.

    Example:
        >>> [path.name for path in source_files("stdlib")][:2]
        ['__future__.py', '__hello__.py']
    """
    skipped: Counter[str] = Counter()
    found = []
    for _, path in candidates(source, skipped):
        reason = read_text(path)[1]
        if reason:
            skipped[reason] += 1
        else:
            found.append(path)
    if not found:
        raise no_text(source, skipped)
    return found


def candidates(source: str | os.PathLike[str], skipped: Counter[str]) -> list[tuple[str, Path]]:
    """(relative name, path) of every regular file of a source, sorted by name; nothing is opened."""
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"data source must be 'stdlib' or a path, not {type(source).__name__}")
    if not os.fspath(source):
        raise ValueError("data source is empty; give 'stdlib', a folder or a file")
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = _walk(root, skipped, _STDLIB_SKIPPED)
        # _sysconfigdata is written by the build and differs from machine to machine.
        return [(n, p) for n, p in files if p.suffix == ".py" and not p.name.startswith("_sysconfigdata")]
    root = Path(source).expanduser()
    if root.is_dir():
        return _walk(root, skipped, ())
    if not root.exists():
        siblings = os.listdir(root.parent) if root.parent.is_dir() else []
        close = get_close_matches(root.name, [*siblings, "stdlib"], n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"data source {os.fspath(source)!r} does not exist{hint} (a folder, a file or 'stdlib')"
        )
    if not root.is_file():
        raise ValueError(f"data source {os.fspath(source)!r} is neither a folder nor a regular file")
    reason = read_text(root)[1]
    if reason:
        raise ValueError(f"data source {os.fspath(source)!r} is {reason}; text must be UTF-8")
    return [(root.name, root)]


def _walk(root: Path, skipped: Counter[str], excluded: Collection[str]) -> list[tuple[str, Path]]:
    found = []

    def unreadable(error: OSError) -> None:
        skipped["unreadable"] += 1

    for folder, folders, files in os.walk(root, onerror=unreadable, followlinks=False):
        kept = []
        for name in folders:
            if name.startswith(".") or name in excluded:
                continue
            if os.path.islink(os.path.join(folder, name)):
                skipped["linked folder"] += 1
            else:
                kept.append(name)
        folders[:] = kept
        for name in files:
            if name.startswith("."):
                continue
            path = Path(folder, name)
            found.append((path.relative_to(root).as_posix(), path))
    return sorted(found)


def read_text(path: Path) -> tuple[str, str]:
    """(text, reason): the normalised text of a file, or why it is not used."""
    try:
        # Opening a pipe would wait for ever, so the kind is looked at first.
        if not stat.S_ISREG(path.stat().st_mode):
            return "", "not a regular file"
        data = path.read_bytes()
    except OSError:
        return "", "unreadable"
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "", "UTF-16"
    if b"\0" in data:
        return "", "binary"
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return "", "not UTF-8"
    if not text.strip():
        return "", "empty"
    return text.replace("\r\n", "\n").replace("\r", "\n"), ""


def no_text(source: str | os.PathLike[str], skipped: Counter[str]) -> ValueError:
    """The error for a source without text, saying what was found in it."""
    found = ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items())) or "no files"
    return ValueError(f"data source {os.fspath(source)!r} holds no UTF-8 text (found {found})")
