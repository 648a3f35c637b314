r"""Integer weights packed without gaps: 3 bits take 3 bits.

$$K_{io} = s_{o,\lfloor i/g \rfloor}\,(c_{oi} - 2^{b-1}), \qquad 0 \le c_{oi} < 2^b,
  \qquad g = \lceil \text{in}/\text{groups} \rceil$$

Eight consecutive codes along the inputs fill b bytes, as one little-endian integer: code j lies in bits
$jb \ldots (j+1)b - 1$. With 4 bits a byte holds two codes, the first in its low half; with 3 bits 8 codes lie in
3 bytes. A row ends on a multiple of 8 codes; what fills it up is the code of zero, $2^{b-1}$.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8

from effml.quantize._fake import FULL, check_bits
from effml.quantize._host import on_host

__all__ = ["PackedTensor", "packed_bytes"]

_LANE = 8


def packed_bytes(inputs: int, outputs: int, bits: int, groups: int = 1) -> int:
    """Bytes of a packed kernel: codes and scales.

    Example:
        >>> packed_bytes(576, 1536, 4), packed_bytes(576, 1536, 3)
        (448512, 337920)
    """
    return outputs * (-(-inputs // _LANE) * bits + 4 * groups)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["bits", "inputs"]
)
@dataclass(frozen=True)
class PackedTensor:
    """A kernel [in, out] as packed codes and scales: a pytree of two arrays.

    Invariants: `codes` is uint8[out, ceil(in / 8) * bits], `scale` float32[out, groups], and the kernel is
    `scale[o, i // ceil(in / groups)] * (code[o, i] - 2^(bits - 1))`. One scale per output is `groups == 1`. Both may
    have the same leading axes, as stacked layers do; then the kernel is [..., in, out].

    Attributes:
        codes: the packed codes of each output, along its inputs.
        scale: of each group of inputs.
        bits: 2 to 8, of one code.
        inputs: how many codes of a row are real.

    Example:
        >>> packed = PackedTensor.pack(np.array([[1], [-2], [0]]), np.array([[0.5]]), bits=4)
        >>> packed.codes.tolist(), packed.dense().ravel().tolist(), packed.nbytes
        ([[105, 136, 136, 136]], [0.5, -1.0, 0.0], 8)
    """

    codes: Any
    scale: Any
    bits: int
    inputs: int

    @classmethod
    def pack(cls, codes: Any, scale: Any, bits: int) -> PackedTensor:
        """Packs integer codes, on the host.

        Args:
            codes: integers [in, out], -2^(bits-1) ... 2^(bits-1) - 1.
            scale: [out, groups], above zero.
            bits: 2 to 8.

        Raises:
            ValueError: for shapes that don't fit, codes out of range, or scales that are not finite and positive.
            TypeError: for codes that are no integers, or under `jit`.

        Example:
            >>> PackedTensor.pack(np.array([[7], [-8]]), np.ones((1, 1)), bits=3)
            Traceback (most recent call last):
            ...
            ValueError: codes -8 to 7 don't fit 3 bits (-4 to 3)
        """
        if check_bits("bits", bits) == FULL:
            raise ValueError("bits=16 is not packed; give 2 to 8")
        on_host("PackedTensor.pack", codes, scale)
        codes, scale = np.asarray(codes), np.asarray(scale, np.float32)
        if not np.issubdtype(codes.dtype, np.integer):
            raise TypeError(f"codes hold {codes.dtype}, must hold integers")
        if codes.ndim != 2 or 0 in codes.shape:
            raise ValueError(f"codes of shape {codes.shape} must be [in, out], neither of them 0")
        inputs, outputs = codes.shape
        if scale.ndim != 2 or scale.shape[0] != outputs or not 1 <= scale.shape[1] <= inputs:
            raise ValueError(
                f"scale of shape {scale.shape} must be [{outputs}, groups], 1 to {inputs} groups"
            )
        if not (np.isfinite(scale) & (scale > 0)).all():
            raise ValueError("scale must be finite and above 0 everywhere")
        half = 1 << (bits - 1)
        least, most = int(codes.min()), int(codes.max())
        if least < -half or most >= half:
            raise ValueError(f"codes {least} to {most} don't fit {bits} bits ({-half} to {half - 1})")
        blocks = -(-inputs // _LANE)
        stored = np.full((outputs, blocks * _LANE), half, np.uint8)
        stored[:, :inputs] = (codes.astype(np.int16) + half).astype(np.uint8).T
        planes = np.unpackbits(stored[..., None], axis=-1, count=bits, bitorder="little")
        packed = np.packbits(planes.reshape(outputs, blocks * _LANE * bits), axis=-1, bitorder="little")
        return cls(jnp.asarray(packed), jnp.asarray(scale), int(bits), int(inputs))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the kernel: [in, out], behind the leading axes.

        Example:
            >>> PackedTensor.pack(np.zeros((3, 2), int), np.ones((2, 1)), bits=2).shape
            (3, 2)
        """
        *leading, outputs, _ = self.codes.shape
        return *leading, self.inputs, outputs

    @property
    def group_size(self) -> int:
        """Inputs that share a scale.

        Example:
            >>> PackedTensor.pack(np.zeros((6, 2), int), np.ones((2, 3)), bits=2).group_size
            2
        """
        return -(-self.inputs // self.scale.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales.

        Example:
            >>> PackedTensor.pack(np.zeros((8, 2), int), np.ones((2, 1)), bits=3).nbytes
            14
        """
        return self.codes.size + 4 * self.scale.size

    def unpack(self) -> Int8[Array, "*leading inputs outputs"]:
        """The signed codes; works under `jit`.

        Example:
            >>> PackedTensor.pack(np.array([[1], [-2]]), np.ones((1, 1)), bits=2).unpack().ravel().tolist()
            [1, -2]
        """
        return _unpack(self)

    def dense(self, dtype: Any = jnp.float32) -> Float[Array, "*leading inputs outputs"]:
        """The kernel that the codes stand for; works under `jit`.

        Args:
            dtype: of the result; codes and scales are multiplied in float32.

        Example:
            >>> PackedTensor.pack(np.array([[1], [-2]]), np.full((1, 1), 0.25), bits=2).dense().ravel().tolist()
            [0.25, -0.5]
        """
        return _dense(self, jnp.dtype(dtype))


def _rows(packed: PackedTensor) -> Array:
    """int8[..., out, in]."""
    *outer, size = packed.codes.shape
    bits = packed.bits
    parts = packed.codes.reshape(*outer, size // bits, bits).astype(jnp.uint16)
    columns = []
    for j in range(_LANE):
        byte, shift = divmod(j * bits, 8)
        column = parts[..., byte]
        if shift + bits > 8:
            column = column | (parts[..., byte + 1] << 8)
        columns.append((column >> shift) & ((1 << bits) - 1))
    codes = jnp.stack(columns, axis=-1).reshape(*outer, -1)[..., : packed.inputs]
    return (codes.astype(jnp.int16) - (1 << (bits - 1))).astype(jnp.int8)


@jax.jit
def _unpack(packed: PackedTensor) -> Array:
    return _rows(packed).mT


@functools.partial(jax.jit, static_argnames=("dtype",))
def _dense(packed: PackedTensor, dtype: Any) -> Array:
    scale = jnp.repeat(packed.scale, packed.group_size, axis=-1)[..., : packed.inputs]
    return (_rows(packed).astype(jnp.float32) * scale).mT.astype(dtype)
