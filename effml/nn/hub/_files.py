"""Files that are whole or refused: JSON, safetensors, and folders that appear in one step."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["SafeTensors", "new_folder", "read_json", "write_json", "write_safetensors"]

_CHECKSUMS = "effml.crc32"


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that must hold an object.

    Raises:
        ValueError: naming the file, if it is missing, cut short or no object.

    Example:
        >>> read_json(Path("no/such/config.json"))
        Traceback (most recent call last):
        ...
        ValueError: no/such/config.json does not exist
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not whole JSON ({error}); it may be cut short") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds a {type(content).__name__}")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an object as indented JSON.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "config.json"
        >>> write_json(path, {"width": 4})
        >>> read_json(path)
        {'width': 4}
    """
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class SafeTensors:
    """Named tensors in one or more safetensors files, read one at a time.

    Args:
        files: file of each shard. With `weight_map` (tensor name to file) the shards must agree with it.
        weight_map: the map of a sharded model's index file.
        types: the stored types that are allowed, as safetensors calls them; None allows all that NumPy has.

    Attributes:
        shapes: shape of every tensor, known without reading any.
        byte_count: size of the files.
        metadata: of each file, what was written beside its tensors and their checksums.

    Tensors of files that `write_safetensors` made are compared with their checksums when they are read.

    Raises:
        ValueError: if a file is missing, cut short or damaged, or holds numbers of a type that is not
            allowed.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> write_safetensors(path, {"scale": np.ones(3, np.float32)})
        >>> SafeTensors([path]).shapes
        {'scale': (3,)}
    """

    def __init__(
        self,
        files: Collection[Path],
        weight_map: Mapping[str, Path] | None = None,
        types: Collection[str] | None = ("F32", "F16", "BF16"),
    ):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.byte_count = 0
        self._file_of: dict[str, Path] = {}
        self.metadata: dict[Path, dict[str, str]] = {}
        self._checksums: dict[Path, dict[str, str]] = {}
        for path in sorted(files):
            with _opened(path) as handle:
                self._checksums[path] = _checksums_in(path, handle)
                self.metadata[path] = {
                    key: text for key, text in (handle.metadata() or {}).items() if key != _CHECKSUMS
                }
                for name in handle.keys():  # noqa: SIM118 (the handle is no mapping)
                    part = handle.get_slice(name)
                    if types is not None and part.get_dtype() not in types:
                        raise ValueError(
                            f"{path}: tensor {name!r} is stored as {part.get_dtype()} "
                            f"(supported: {', '.join(types)})"
                        )
                    if weight_map is None or weight_map.get(name) == path:
                        self.shapes[name] = tuple(part.get_shape())
                        self._file_of[name] = path
            self.byte_count += path.stat().st_size
        absent = sorted(set(weight_map or ()) - set(self.shapes))
        if absent:
            raise ValueError(
                f"the index lists {absent[0]!r}, which {(weight_map or {})[absent[0]]} does not hold"
            )

    def read(self, name: str) -> np.ndarray:
        """The tensor called `name`, in its stored type.

        Raises:
            ValueError: if it is not what was written.
        """
        path = self._file_of[name]
        with _opened(path) as handle:
            tensor = handle.get_tensor(name)
        wanted = self._checksums[path]
        if wanted and wanted[name] != _checksum(name, tensor):
            raise ValueError(
                f"{path}: tensor {name!r} is not what was written (its checksum is another): the file is damaged, "
                "fetch or make it again"
            )
        return tensor


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    import safetensors

    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        with safetensors.safe_open(path, framework="numpy") as handle:
            yield handle
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}); it is cut short or damaged, fetch it again"
        ) from None


def _checksum(name: str, tensor: np.ndarray) -> str:
    """CRC-32 of a tensor's name, type, shape and bytes, as eight hexadecimal digits."""
    state = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    return f"{zlib.crc32(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data, state):08x}"


def _checksums_in(path: Path, handle: Any) -> dict[str, str]:
    """Of every tensor, where the file has them: one after the other, in the order of the sorted names."""
    found, names = (handle.metadata() or {}).get(_CHECKSUMS), sorted(handle.keys())
    if found is None:
        return {}
    if len(found) != 8 * len(names):
        raise ValueError(
            f"{path}: the checksums are not those of its tensors: damaged, fetch or make it again"
        )
    return {name: found[8 * i : 8 * i + 8] for i, name in enumerate(names)}


def write_safetensors(
    path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes named arrays (NumPy or JAX, any shape) to one safetensors file, with a checksum of each.

    Readers who do not know of checksums (the metadata `effml.crc32`) need not. The file's mode follows the umask, as
    that of any other file does.

    Raises:
        OSError: where the file can't be written, a full disk among the reasons.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> write_safetensors(path, {"kernel": np.eye(2, dtype=np.float32)})
        >>> SafeTensors([path]).read("kernel").tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    arrays = {name: np.asarray(value, order="C") for name, value in tensors.items()}
    checksums = "".join(_checksum(name, arrays[name]) for name in sorted(arrays))
    # The library writes for the owner alone; a file made in the ordinary way tells what the umask allows.
    new = not path.exists()
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(arrays, path, metadata={"format": "pt", **(metadata or {}), _CHECKSUMS: checksums})
    except SafetensorError as error:
        if new:
            path.unlink(missing_ok=True)
        raise OSError(f"{path} can't be written: {error}") from None
    path.chmod(mode)


@contextlib.contextmanager
def new_folder(folder: str | os.PathLike[str], owned: Collection[str]) -> Iterator[Path]:
    """A folder that appears under its name only when the block has ended without an error.

    An existing folder is replaced if it is empty or holds nothing but files called as in `owned`;
    the files of anybody else are never deleted.

    Args:
        folder: where the folder shall be.
        owned: the names that the caller writes; the first is the one that marks a folder as the caller's.

    Yields:
        the temporary folder to write into, beside `folder`.

    Raises:
        ValueError: if `folder` is a file, or holds files that the caller does not write.

    Example:
        >>> target = Path(tempfile.mkdtemp()) / "model"
        >>> with new_folder(target, ["note.txt"]) as path:
        ...     _ = (path / "note.txt").write_text("whole")
        >>> (target / "note.txt").read_text()
        'whole'
    """
    target = Path(folder).absolute()
    if target.exists():
        if not target.is_dir():
            raise ValueError(f"folder={str(folder)!r} is a file; name a folder that may be created")
        names = {entry.name for entry in target.iterdir()}
        foreign = sorted(names - set(owned))
        if names and (foreign or next(iter(owned)) not in names):
            raise ValueError(
                f"folder={str(folder)!r} holds other files ({', '.join(foreign or sorted(names))}); "
                "they would be lost, so choose a new or empty folder"
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-new-", dir=target.parent))
    try:
        yield temporary
        # A temporary folder is for its owner alone; one made in the ordinary way tells what the umask allows.
        ordinary = temporary / ".mode"
        ordinary.mkdir()
        temporary.chmod(stat.S_IMODE(ordinary.stat().st_mode))
        ordinary.rmdir()
        if target.exists():
            retired = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            os.replace(target, retired)
            os.replace(temporary, target)
            shutil.rmtree(retired)
        else:
            os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
