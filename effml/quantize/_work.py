"""A folder in which long work survives being killed: one file for every layer that is done."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from effml.nn.hub import _files

__all__ = ["WorkFolder", "digest"]

_FINGERPRINT = "work.json"
_ROTATIONS = "rotations.npz"
_LAYER = r"layer-\d{4}\.safetensors"
_PASSING = {"work.partial", "lock"}  # what a run leaves that is killed before its first layer


def digest(tree: Any) -> str:
    """A short hash of every array of a tree, its names aside.

    Example:
        >>> digest([np.zeros(2)]) == digest([np.zeros(2)]), digest([np.zeros(2)]) == digest([np.ones(2)])
        (True, False)
    """
    import hashlib

    state = hashlib.blake2b(digest_size=12)
    for leaf in jax.tree.leaves(tree):
        array = np.ascontiguousarray(leaf)
        state.update(f"{array.dtype}{array.shape}".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def _digest_of(tensors: Mapping[str, Any], rows: str | None) -> str:
    names = sorted(tensors)
    return digest([np.frombuffer(json.dumps([names, rows]).encode(), np.uint8), [tensors[n] for n in names]])


class WorkFolder:
    """Finished layers of one run. A folder of a run with another fingerprint is refused.

    Args:
        folder: made where it does not exist.
        fingerprint: JSON types that say what the run is; equal ones may go on with each other's work.

    Raises:
        ValueError: if the folder belongs to another run, naming what differs, or holds anything else.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "out.partial"
        >>> work = WorkFolder(path, {"seed": 0})
        >>> work.save(3, {"scale": np.ones(2)}, [{"name": "mlp.up"}])
        >>> WorkFolder(path, {"seed": 0}).load(3)[1], work.load(4)
        ([{'name': 'mlp.up'}], None)
    """

    def __init__(self, folder: str | os.PathLike[str], fingerprint: Mapping[str, Any]):
        self.folder = Path(folder)
        content = json.loads(json.dumps(dict(fingerprint)))
        path = self.folder / _FINGERPRINT
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"work folder {str(self.folder)!r} is a file")
        if path.exists():
            try:
                found = _files.read_json(path)
            except ValueError as error:
                raise ValueError(f"{error}; remove {self.folder} to begin anew") from None
            differs = [name for name in {**content, **found} if content.get(name) != found.get(name)]
            if differs:
                raise ValueError(
                    f"{self.folder} holds the unfinished work of a run with another {', '.join(sorted(differs))}; "
                    "give what it had to go on with it, or remove the folder"
                )
        else:
            found = {one.name for one in self.folder.iterdir()} if self.folder.exists() else set()
            if any(name == _ROTATIONS or re.fullmatch(_LAYER, name) for name in found):
                raise ValueError(
                    f"{self.folder} holds unfinished work without its {_FINGERPRINT}, which says of what; remove "
                    f"{self.folder} to begin anew"
                )
            if found - _PASSING:
                raise ValueError(f"work folder {str(self.folder)!r} holds other files; name another")
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".partial")
            _files.write_json(temporary, content)
            temporary.replace(path)

    def _path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:04d}.safetensors"

    @property
    def rotations(self) -> Path:
        """Where training keeps the rotations.

        Example:
            >>> import tempfile
            >>> WorkFolder(Path(tempfile.mkdtemp()) / "out.partial", {"seed": 0}).rotations.name
            'rotations.npz'
        """
        return self.folder / _ROTATIONS

    def load(self, layer: int) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]] | None:
        """Tensors and report rows of a finished layer; None where it is not finished, or its file is damaged."""
        path = self._path(layer)
        if not path.is_file():
            return None
        try:
            stored = _files.SafeTensors([path], types=None)
            tensors = {name: stored.read(name) for name in stored.shapes}
        except ValueError:
            return None
        about = stored.metadata[path]
        if about.keys() != {"format", "rows", "digest"}:
            return None
        if about.get("digest") != _digest_of(tensors, about.get("rows")):
            return None
        return tensors, json.loads(about["rows"])

    def save(self, layer: int, tensors: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
        """Keeps a finished layer; it appears in one step."""
        path = self._path(layer)
        temporary = path.with_suffix(".partial")
        about = json.dumps(rows)
        _files.write_safetensors(temporary, tensors, {"rows": about, "digest": _digest_of(tensors, about)})
        temporary.replace(path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process at a time works here.

        Raises:
            ValueError: if another one does.
        """
        try:
            import fcntl
        except ImportError:  # not on Windows, where the folder goes unguarded
            yield
            return
        with (self.folder / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"another process is at work in {self.folder}") from None
            yield

    @staticmethod
    def discard(folder: str | os.PathLike[str]) -> None:
        """Deletes a work folder, and nothing that is none: the work is done and lies elsewhere.

        Example:
            >>> import tempfile
            >>> work = WorkFolder(Path(tempfile.mkdtemp()) / "out.partial", {"seed": 0})
            >>> WorkFolder.discard(work.folder)
            >>> work.folder.exists()
            False
        """
        import shutil

        if (Path(folder) / _FINGERPRINT).is_file():
            shutil.rmtree(folder)
