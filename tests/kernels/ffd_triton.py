"""Runs the decoding kernel in Triton's own interpreter: `TRITON_INTERPRET=1 python -m tests.kernels.ffd_triton`.

Prints the shares of blocks that were kept, as JSON; raises if a result is not the oracle's.
"""

import json

import numpy as np

from pallas_kernels.ffd_decode import FFDStats, triton
from pallas_kernels.ffd_decode.body import Spec, bound_of
from tests.kernels.ffd_cases import Oracle, case, check


class Buffer:
    """NumPy memory as Triton's interpreter wants it: what it calls on a tensor."""

    kinds = {"float8_e4m3fn": "fp8e4nv", "bfloat16": "bf16", "float32": "fp32", "int32": "i32", "uint8": "u8"}

    def __init__(self, array):
        self.array = np.array(array, order="C")
        self.dtype = self.kinds[self.array.dtype.name]

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    cpu = untyped_storage

    def copy_(self, other):
        """The host's memory is the device's."""

    def new_empty(self, *args, **options):
        return Buffer(np.zeros(0, "f"))

    def set_(self, storage, *rest):
        self.array, self.dtype = storage.array, storage.dtype

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides


def merged(m, total, acc):
    """The partials of all splits as one, in NumPy."""
    top = m.max(0)
    weight = np.where(m == -np.inf, 0, np.exp(m - np.where(top == -np.inf, 0, top)))
    sums = (weight * total).sum(0)
    safe = np.where(sums == 0, 1, sums)
    out = (weight[..., None] * acc).sum(0) / safe[..., None]
    return out, np.where(sums == 0, -np.inf, top + np.log(safe))


def run(number, shape, mode):
    """One call of the kernel against the oracle; the share of kept blocks."""
    from pallas_kernels.ffd_decode.triton_kernel import ffd_decode_kernel

    arrays = case(number, tail=0, blocks=4, counts=[4, 1], **shape)
    bits = shape.get("bits", 2)
    threshold = Oracle(arrays, bits).threshold(mode, 0.5).astype("f")
    code, scale, resid, v, count = (arrays[n] for n in ("k_code", "k_scale", "k_resid", "v", "num_blocks"))
    (b, h, blocks, d), width, splits = scale.shape, v.shape[-1], 3
    rows = arrays["q"].reshape(b, h, -1, d)
    r = rows.shape[2]
    # Products are in float32: the interpreter multiplies bfloat16 as whole numbers.
    bound = bound_of(bits, resid.dtype, True)
    spec = Spec(bits, code.shape[2] // blocks, d**-0.5, mode == "certified", bound)
    shapes = [(splits, b, h, r), (splits, b, h, r), (splits, b, h, r, width)]
    outs = [np.full(s, np.nan, "f") for s in shapes] + [np.zeros((b, h, blocks), "i")]
    buffers = [Buffer(x) for x in (count, threshold, rows, code, scale, resid, v, *outs)]
    sizes = triton.constants(spec, r, d, width, code.shape[-1], blocks, splits)
    ffd_decode_kernel[(splits, h, b)](*buffers, **sizes)
    m, total, acc, kept = (x.array for x in buffers[-4:])
    out, lse = merged(m, total, acc)
    ratio = (kept > 0).sum((1, 2)) / (h * count)
    stats = FFDStats(kept > 0, ratio, threshold.reshape(b, -1), lse.reshape(b, -1))
    given = {**arrays, "threshold": threshold}
    out = out.reshape(b, -1, width).astype(arrays["q"].dtype)
    return float(check((out, stats), given, {"bits": bits, "threshold": mode}).mean())


def main():
    """Odd sizes, 4 bits with bounds, bfloat16."""
    runs = (
        ({"d": 33, "block": 24}, "pseudo"),
        ({"bits": 4}, "certified"),
        ({"dtype": "bfloat16", "group": 1}, "pseudo"),
    )
    print(json.dumps([run(number, *given) for number, given in enumerate(runs)]))


if __name__ == "__main__":
    main()
