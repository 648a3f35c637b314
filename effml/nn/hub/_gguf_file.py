"""The GGUF container: metadata and tensors, every length checked against the size of the file.

The reader of the `gguf` package trusts the header (a false count makes it loop for hours) and takes seconds
on a vocabulary of fifty thousand; this one reads the format once, in order, and refuses what does not fit.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from effml._validate import missing_package

__all__ = ["GgufFile", "GgufTensor"]

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """Where a tensor lies: shape (row-major, as in NumPy), quantisation type, first byte and byte count."""

    shape: tuple[int, ...]
    kind: Any
    offset: int
    byte_count: int


class GgufFile:
    """Metadata and tensors of a .gguf file.

    Args:
        path: the file.

    Attributes:
        metadata: value of every key; numbers, booleans, strings, NumPy arrays, lists of strings.
        tensors: a `GgufTensor` for each name.

    Raises:
        ImportError: with the pip line, if the package `gguf` is absent.
        ValueError: if the file is missing, no GGUF, cut short, or its header contradicts itself.

    Example:
        >>> GgufFile("no/such/model.gguf")
        Traceback (most recent call last):
        ...
        ValueError: no/such/model.gguf does not exist
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            import gguf
        except ImportError:
            raise missing_package("gguf", "pip install 'effml[hub]'", "read .gguf files") from None
        if not self.path.is_file():
            raise ValueError(f"{self.path} does not exist")
        self._gguf = gguf
        self.byte_count = self.path.stat().st_size
        try:
            if self.byte_count < 24:
                raise ValueError(f"it has {self.byte_count} bytes")
            with self.path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._position = 0
            self.metadata: dict[str, Any] = {}
            self.tensors: dict[str, GgufTensor] = {}
            self._read_header()
        except (ValueError, struct.error) as error:
            raise ValueError(
                f"{self.path} is not a whole GGUF file ({error}); it is cut short or damaged, fetch it again"
            ) from None

    def read(self, name: str) -> np.ndarray:
        """The tensor called `name` in float32, dequantised where needed.

        Raises:
            ValueError: naming a quantisation type that the `gguf` package cannot undo.
        """
        shape, kind, offset, byte_count = self.tensors[name]
        stored = np.frombuffer(self._data, np.uint8, byte_count, offset).reshape(*shape[:-1], -1)
        try:
            values = self._gguf.quants.dequantize(stored, kind)
        except NotImplementedError:
            raise ValueError(
                f"{self.path}: tensor {name!r} has the type {kind.name}, which is not supported"
            ) from None
        return values.reshape(shape).astype(np.float32, copy=False)

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if end > self.byte_count:
            raise ValueError(f"the header runs past the end at byte {self.byte_count}")
        chunk = self._data[self._position : end]
        self._position = end
        return chunk

    def _number(self, layout: str) -> int:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _text(self) -> str:
        raw = self._take(self._number("<Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"a text before byte {self._position} is not UTF-8") from None

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _SCALARS:
            return self._scalars(kind, 1)[0].item()
        if kind != _ARRAY:
            raise ValueError(f"value type {kind} before byte {self._position} does not exist")
        item, count = self._number("<I"), self._number("<Q")
        if item in _SCALARS:
            return self._scalars(item, count)
        if item != _STRING:
            raise ValueError(f"an array of value type {item} before byte {self._position} is not supported")
        return [self._text() for _ in range(count)]

    def _scalars(self, kind: int, count: int) -> np.ndarray:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _read_header(self) -> None:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        version = self._number("<I")
        if version not in (2, 3):
            big = " (a big-endian file)" if version & 0xFFFF == 0 else ""
            raise ValueError(f"version {version}{big} is not supported, 2 and 3 are")
        tensor_count, key_count = self._number("<Q"), self._number("<Q")
        for _ in range(key_count):
            key = self._text()
            if key in self.metadata:
                raise ValueError(f"the key {key!r} occurs twice")
            self.metadata[key] = self._value(self._number("<I"))
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment={alignment!r} is no power of two")
        start = -(-self._position // alignment) * alignment
        for name, tensor in infos:
            if name in self.tensors:
                raise ValueError(f"the tensor {name!r} occurs twice")
            tensor = tensor._replace(offset=start + tensor.offset)
            if tensor.offset + tensor.byte_count > self.byte_count:
                raise ValueError(
                    f"tensor {name!r} ends at byte {tensor.offset + tensor.byte_count} of {self.byte_count}"
                )
            self.tensors[name] = tensor

    def _tensor_info(self) -> tuple[str, GgufTensor]:
        name, rank = self._text(), self._number("<I")
        if not 1 <= rank <= 4:
            raise ValueError(f"tensor {name!r} has {rank} dimensions")
        shape = tuple(self._number("<Q") for _ in range(rank))[::-1]
        code, offset = self._number("<I"), self._number("<Q")
        try:
            kind = self._gguf.GGMLQuantizationType(code)
        except ValueError:
            raise ValueError(f"tensor {name!r} has the unknown type {code}") from None
        block, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ValueError(f"rows of tensor {name!r} have {shape[-1]} values, no multiple of {block}")
        count = 1
        for size in shape:
            count *= size
        return name, GgufTensor(shape, kind, offset, count // block * block_bytes)
