r"""What a compiled program sends between devices and how much it multiplies, every loop counted as often as it runs.

XLA's own cost analysis, and a search through the program's text, count the body of a loop once: for a model whose
layers are scanned that is `num_layers` times too little. Here the call graph is walked from the entry and each
computation multiplied by the trip counts around it.

For a collective over g devices whose whole array has b bytes, one device sends

| kind | bytes sent by a ring |
|---|---|
| all-gather, reduce-scatter, all-to-all | $b\,(g-1)/g$ |
| all-reduce | $2\,b\,(g-1)/g$ |
| collective-permute, collective-broadcast | $b$ |
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

from effml.train.plan._text import Instruction, Program, array_shapes, byte_size, parse, tuple_parts

__all__ = ["Collective", "Counts", "Loop", "count"]

_KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_CALLS = ("calls", "to_apply", "called_computations")
# Libraries and kernels of the backends that may hold matrix products.
_HIDDEN = re.compile(
    r'custom_call_target="([^"]*(?:matmul|gemm|dot|conv|tpu_custom_call|triton|mosaic)[^"]*)"'
)
_BRANCHES = ("branch_computations", "true_computation", "false_computation")


@dataclass(frozen=True)
class Collective:
    """All calls of one kind over groups of one size, in one step of one device.

    Attributes:
        kind: `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all`, `collective-permute`, ...
        group: devices that take part in one call (2 for a permute: one sends, one receives).
        calls: per step.
        bytes: of the whole arrays: the gathered, or those before they are reduced or scattered.
        ring_bytes: what one device sends if the calls are carried out by rings.
    """

    kind: str
    group: int
    calls: int
    bytes: int
    ring_bytes: int


@dataclass(frozen=True)
class Loop:
    """A loop of the program: where, and how often it runs each time it is reached (None: the text does not tell)."""

    body: str
    trips: int | None


@dataclass(frozen=True)
class Counts:
    """What one step of one device does.

    Attributes:
        collectives: largest traffic first.
        matmul_flops: multiplications and additions of all matrix products, work that the partitioner repeats on
            several devices included.
        loops: every loop; one with unknown trips is counted once, so look for None.
        uncounted: calls of matrix products that are hidden in libraries of the backend, by name.
    """

    collectives: tuple[Collective, ...]
    matmul_flops: int
    loops: tuple[Loop, ...]
    uncounted: dict[str, int]

    def total(self, kind: str = "") -> Collective:
        """Sum over all collectives of a kind, or over all.

        Example:
            >>> Counts((Collective("all-reduce", 4, 1, 8, 12),), 0, (), {}).total().ring_bytes
            12
        """
        chosen = [c for c in self.collectives if kind in ("", c.kind)]
        sums = (sum(getattr(c, name) for c in chosen) for name in ("calls", "bytes", "ring_bytes"))
        return Collective(kind or "all", 0, *sums)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)


def count(text: str, devices: int) -> Counts:
    """Counts a compiled program.

    Where a program branches, the branch with more traffic (then: more products) counts.

    Args:
        text: `compiled.as_text()`.
        devices: number of devices the program is for; the size of a group that is not written out.

    Returns:
        The counts.

    Raises:
        ValueError: if the text is not an HLO module.

    Example:
        >>> lines = ["ENTRY %main (x: f32[8]) -> f32[8] {", "  %x = f32[8]{0} parameter(0)",
        ...     "  ROOT %sum = f32[8]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add", "}"]
        >>> count("\\n".join(lines), 4).collectives
        (Collective(kind='all-reduce', group=2, calls=1, bytes=32, ring_bytes=32),)
    """
    walk = _Walk(parse(text), devices)
    tally = walk.visit(walk.program.entry, set())
    rows = [Collective(kind, group, *map(round, sums)) for (kind, group), sums in tally.collectives.items()]
    rows.sort(key=lambda row: (-row.ring_bytes, row.kind, row.group))
    return Counts(tuple(rows), tally.flops, tuple(walk.loops), dict(tally.uncounted))


@dataclass
class _Tally:
    collectives: dict[tuple[str, int], list[float]] = dataclasses.field(default_factory=dict)
    flops: int = 0
    uncounted: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, other: _Tally, times: int = 1) -> None:
        for key, sums in other.collectives.items():
            mine = self.collectives.setdefault(key, [0, 0, 0])
            mine[:] = [a + times * b for a, b in zip(mine, sums)]
        self.flops += times * other.flops
        for name, calls in other.uncounted.items():
            self.uncounted[name] += times * calls

    def weight(self) -> tuple[float, int]:
        return sum(sums[2] for sums in self.collectives.values()), self.flops


class _Walk:
    def __init__(self, program: Program, devices: int):
        self.program = program
        self.devices = devices
        self.loops: list[Loop] = []

    def visit(self, name: str, seen: set[Any]) -> _Tally:
        """Counts one computation; `seen` holds the asynchronous collectives of the loop body it is part of."""
        tally = _Tally()
        for line in self.program.instructions(name):
            if line.opcode in ("async-update", "async-done"):
                continue  # They name the computation that their async-start runs.
            if line.opcode == "while":
                trips = self.program.trip_count(line, name)
                body = line.called("body")[0]
                self.loops.append(Loop(body, trips))
                tally.add(self.visit(body, set()), 1 if trips is None else trips)
                continue
            if line.opcode == "conditional":
                branches = [self.visit(branch, set()) for branch in line.called(*_BRANCHES)]
                tally.add(max(branches, key=_Tally.weight))
                continue
            if line.opcode.removesuffix("-start") in _KINDS:
                self._collective(line, name, seen, tally)
                continue
            if line.opcode == "dot":
                tally.flops += self._dot_flops(line, name)
            elif line.opcode == "convolution":
                tally.flops += self._convolution_flops(line, name)
            elif line.opcode == "custom-call":
                target = _HIDDEN.search(line.attributes)
                if target:
                    tally.uncounted[target[1]] += 1
            if line.opcode not in ("reduce", "scatter", "sort", "reduce-window", "select-and-scatter", "map"):
                for inner in line.called(*_CALLS):
                    if inner in self.program.computations:
                        tally.add(self.visit(inner, seen))
        return tally

    def _collective(self, line: Instruction, computation: str, seen: set[Any], tally: _Tally) -> None:
        # One asynchronous TPU collective is printed in several fusions (start, steps, done), chained by an id.
        chain = re.search(r'chain_id="(\d+)"', line.attributes)
        channel = re.search(r"channel_id=(\d+)", line.attributes)
        if chain and channel:
            identity = (line.opcode, channel[1], chain[1])
            if identity in seen:
                return
            seen.add(identity)
        kind = line.opcode.removesuffix("-start")
        parts, group = tuple_parts(line.shape), self._group(line)
        if line.opcode in ("all-gather-start", "reduce-scatter-start", "collective-permute-start"):
            size = byte_size(parts[1])  # operands, results, and perhaps scratch
        else:
            size = sum(map(byte_size, parts))
        if kind == "reduce-scatter":
            size *= group
        elif kind == "all-reduce" and "all-reduce-scatter" in computation:
            kind = "reduce-scatter"  # so a TPU writes it: an all-reduce of which each device keeps a slice
        if kind in ("collective-permute", "collective-broadcast"):
            sent = float(size)
        else:
            sent = size * (group - 1) / group * (2 if kind == "all-reduce" else 1)
        if group > 1:
            row = tally.collectives.setdefault((kind, group), [0, 0, 0])
            row[:] = [row[0] + 1, row[1] + size, row[2] + sent]

    def _group(self, line: Instruction) -> int:
        text = line.attributes
        if "source_target_pairs" in text:
            return 2
        if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
            sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
            axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])
            return math.prod(int(part or sizes[axis]) for axis, part in axes)
        if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", text):
            return listed[1].count(",") + 1
        if tiled := re.search(r"replica_groups=\[\d+,(\d+)\]", text):
            return int(tiled[1])
        return self.devices

    def _sizes(self, computation: str, operand: str) -> tuple[int, ...]:
        return array_shapes(self.program.computations[computation][operand].shape)[0][1]

    def _dot_flops(self, line: Instruction, computation: str) -> int:
        left = self._sizes(computation, line.operands[0])
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.attributes)
        axes = [int(axis) for axis in contracted[1].split(",") if axis] if contracted else []
        return 2 * math.prod(array_shapes(line.shape)[0][1]) * math.prod(left[axis] for axis in axes)

    def _convolution_flops(self, line: Instruction, computation: str) -> int:
        """TPU programs hold their matrix products as convolutions, batch axes among the spatial ones."""
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.attributes)
        if labels is None:
            return 0
        left, right = (self._sizes(computation, operand) for operand in line.operands[:2])
        result = array_shapes(line.shape)[0][1]
        window = dict(
            re.findall(r"(\w+)=([\w\-]+)", "".join(re.findall(r"window=\{([^}]*)\}", line.attributes)))
        )

        def option(name: str, at: int, default: int) -> int:
            # Padding has a low and a high side; the high one follows from the sizes.
            return int(window[name].split("x")[at].split("_")[0]) if name in window else default

        pairs = 1
        for axis in sorted(set(labels[3]) - {"b", "f"}):
            at = int(axis)
            pairs *= _touching(
                left[labels[1].index(axis)],
                right[labels[2].index(axis)],
                result[labels[3].index(axis)],
                stride=option("stride", at, 1),
                input_step=option("lhs_dilate", at, 1),
                kernel_step=option("rhs_dilate", at, 1),
                low=option("pad", at, 0),
            )
        outputs = result[labels[3].index("b")] * result[labels[3].index("f")]
        return 2 * outputs * right[labels[2].index("i")] * pairs


def _touching(
    inputs: int, kernel: int, outputs: int, *, stride: int, input_step: int, kernel_step: int, low: int
) -> int:
    """Pairs of (output position, kernel position) along one axis that meet an input, not padding or a hole."""
    pairs = 0
    for place in range(kernel):
        first = place * kernel_step - low
        for output in range(outputs):
            at = first + output * stride
            pairs += at % input_step == 0 and 0 <= at // input_step < inputs
    return pairs
