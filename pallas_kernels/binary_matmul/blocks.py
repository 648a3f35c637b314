"""Block sizes of the kernels, and the rules that pick them."""

from __future__ import annotations

import dataclasses

from pallas_kernels._arguments import power_of_two, whole_number

__all__ = ["MATVEC_ROWS", "BlockSizes", "default_blocks"]

MATVEC_ROWS = (
    4  # up to here a GPU adds and subtracts in registers; above, padding rows to 16 for mma costs less
)


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """What one program of a kernel works on.

    Attributes:
        rows: rows of x. The GPU's matvec form (`rows` below 16) takes all rows at once.
        columns: columns of the signs, a multiple of 128 on TPU, a power of two on GPU.
        words: words along the sum, loaded at a time; a multiple of 128 on TPU (or all of them), a power of two of at
            least 16 on GPU.
        splits: GPU: how many programs share one sum. Their results are added up afterwards.
        num_warps: GPU: warps of a program.
        num_stages: GPU: depth of the software pipeline.
    """

    rows: int
    columns: int
    words: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            whole_number(f"block_sizes.{field.name}", getattr(self, field.name), 1)

    def refused_by(self, form: str, words: int) -> str | None:
        """Why a form can't work with these sizes on that many words along the sum; None if it can."""
        if form == "pallas_gpu":
            sizes = {"columns": self.columns, "words": self.words, "num_warps": self.num_warps}
            sizes |= {} if self.rows < 16 else {"rows": self.rows}
            for name, size in sizes.items():
                if not power_of_two(size) or (name == "words" and size < 16):
                    least = " from 16" if name == "words" else ""
                    return f"block_sizes.{name}={size} is no power of two{least}"
        if form == "pallas_tpu":
            if self.columns % 128:
                return f"block_sizes.columns={self.columns} is no multiple of 128"
            if self.words % 128 and self.words < words:
                return f"block_sizes.words={self.words} is no multiple of 128, and less than all {words}"
            if self.rows % 16:
                return f"block_sizes.rows={self.rows} is no multiple of 16"
        return None


def default_blocks(platform: str, rows: int, columns: int, words: int, *, cores: int = 132) -> BlockSizes:
    """Rules of thumb, by arithmetic and not by measurement: nothing here has been tuned on a device.

    Args:
        platform: `"gpu"` or `"tpu"`.
        rows: rows of x, after float32 has become three bfloat16 rows each (not for the GPU's matvec form).
        columns: columns of the signs.
        words: words along the sum.
        cores: multiprocessors of the GPU: the sum is split until there are about four programs for each.

    Returns:
        The sizes.

    Raises:
        ValueError: for another platform, or a size below 1.

    Example:
        >>> default_blocks("gpu", 1, 6336, 256).splits
        8
    """
    if platform not in ("gpu", "tpu"):
        raise ValueError(f"platform={platform!r} must be 'gpu' or 'tpu'")
    for name, size in (("rows", rows), ("columns", columns), ("words", words), ("cores", cores)):
        whole_number(name, size, 1)
    if platform == "tpu":
        block_rows = min(256, -(-rows // 16) * 16)
        return BlockSizes(block_rows, 256 if columns > 128 else 128, words if words <= 256 else 128)
    if rows <= MATVEC_ROWS:
        block_columns, block_words, block_rows = 128, 16, rows
        warps, stages = 4, 3
    else:
        block_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
        block_columns, block_words = 128, 32
        warps, stages = 4, 2
    programs = -(-rows // block_rows) * -(-columns // block_columns)
    steps = -(-words // block_words)
    splits = 1
    while splits * 2 <= min(16, steps) and programs * splits < 3 * cores:
        splits *= 2
    return BlockSizes(block_rows, block_columns, block_words, splits, warps, stages)
