"""Writing a file so that a reader never sees half of it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_atomic"]


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Writes `content` to a temporary name beside `path`, then renames it over `path`.

    Args:
        path: where the file should be; missing parent folders are made.
        content: text (written as UTF-8) or bytes.

    Returns:
        `path`.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_atomic(folder / "new" / "note.txt", "hello").read_text()
        'hello'
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target
