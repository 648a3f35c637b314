"""Reading the text of a compiled XLA program: computations, instructions, shapes, and how often a loop runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["Instruction", "Program", "array_shapes", "byte_size", "parse", "tuple_parts"]

WIDTHS = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2", "f8e4m3", "f8e8m0fnu"), 1.0),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 0.5),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2.0),
    **dict.fromkeys(("s32", "u32", "f32"), 4.0),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8.0),
    "c128": 16.0,
    **dict.fromkeys(("token", "opaque"), 0.0),
}
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_OPCODE = re.compile(r"(?<=[\]})]) ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


class Instruction(NamedTuple):
    """One line of a computation.

    Fields: `name`; `shape`, the result's type as text; `opcode`; `operands`, the names in the parentheses (the text
    itself for constants and parameters); `attributes`, what follows the parentheses.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    def called(self, *keys: str) -> list[str]:
        """Names of the computations that the attributes `keys` point to."""
        found = []
        for key in keys:
            for braced, single in re.findall(rf"\b{key}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.attributes):
                found += [name.strip().lstrip("%") for name in (braced or single).split(",") if name.strip()]
        return found


class Program(NamedTuple):
    """A compiled program: its computations by name, each a dict of instructions in order, and the entry's name."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def root(self, computation: str) -> Instruction:
        """The instruction whose value the computation returns; XLA prints it last, or marks it (see `parse`)."""
        return self.computations[computation]["ROOT"]

    def instructions(self, computation: str) -> Iterator[Instruction]:
        """All instructions of a computation."""
        return (line for name, line in self.computations[computation].items() if name != "ROOT")

    def trip_count(self, loop: Instruction, inside: str) -> int | None:
        """How often a `while` runs; None when the text does not tell.

        CPU and GPU programs carry the count. TPU programs do not: there it is (bound − start) / step, read from the
        condition's comparison, from what enters the loop, and from the addition in the body.

        Args:
            loop: the `while` instruction.
            inside: the computation that it is part of.
        """
        if known := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', loop.attributes):
            return int(known[1])
        condition, body = loop.called("condition"), loop.called("body")
        test = self._value(condition[0], "ROOT", {})
        if test is None or test[0] != "compare" or test[1] not in ("LT", "GT", "LE", "GE", "NE"):
            return None
        direction, left, right = test[1:]
        if left is not None and left[0] == "const":  # bound > i is i < bound
            left, right = right, left
            direction = {"GT": "LT", "LT": "GT", "LE": "GE", "GE": "LE"}.get(direction, direction)
        if left is None or left[0] != "item" or right is None:
            return None
        start = self._entering(inside, loop, left[1])
        bound = right[1] if right[0] == "const" else self._carried(body[0], inside, loop, right)
        step = self._step(body[0], left[1])
        if start is None or bound is None or not step:
            return None
        trips = (bound - start + (step if direction in ("LE", "GE") else 0)) / step
        return math.ceil(trips) if trips > 0 else None

    def _step(self, body: str, index: int) -> int | None:
        value = self._output(body, index)
        if value is None or value[0] not in ("add", "subtract"):
            return None
        terms = value[1:]
        constants = [term[1] for term in terms if term is not None and term[0] == "const"]
        if ("item", index) not in terms or len(constants) != 1:
            return None
        return constants[0] if value[0] == "add" else -constants[0]

    def _carried(self, body: str, inside: str, loop: Instruction, bound: Any) -> int | None:
        """A bound that travels through the loop unchanged."""
        if bound[0] != "item" or self._output(body, bound[1]) != bound:
            return None
        return self._entering(inside, loop, bound[1])

    def _output(self, body: str, index: int) -> Any:
        root = self.root(body)
        return self._value(body, root.operands[index], {}) if root.opcode == "tuple" else None

    def _entering(self, inside: str, loop: Instruction, index: int) -> int | None:
        start = self.computations[inside].get(loop.operands[0])
        while start is not None and start.opcode in ("copy", "opt-barrier"):
            start = self.computations[inside].get(start.operands[0])
        if start is None or start.opcode != "tuple":
            return None
        value = self._value(inside, start.operands[index], {})
        return value[1] if value is not None and value[0] == "const" else None

    def _value(self, computation: str, name: str, arguments: dict[int, Any], depth: int = 0) -> Any:
        """A scalar as ("const", n), ("item", i) of the loop's tuple, or an operation on such; None for all else."""
        line = self.computations[computation].get(name)
        if line is None or depth > 30:
            return None
        evaluate = lambda operand: self._value(computation, operand, arguments, depth + 1)
        if line.opcode == "constant":
            return ("const", int(line.operands[0])) if re.fullmatch(r"-?\d+", line.operands[0]) else None
        if line.opcode == "parameter":
            return arguments.get(int(line.operands[0]))
        if line.opcode == "get-tuple-element":
            source = self.computations[computation].get(line.operands[0])
            index = re.search(r"index=(\d+)", line.attributes)
            if source is not None and source.opcode == "parameter" and index:
                return ("item", int(index[1]))
            return None
        if line.opcode in ("copy", "bitcast", "convert"):
            return evaluate(line.operands[0])
        if line.opcode in ("add", "subtract"):
            return (line.opcode, *map(evaluate, line.operands))
        if line.opcode == "compare":
            direction = re.search(r"direction=(\w+)", line.attributes)
            return ("compare", direction[1] if direction else "", *map(evaluate, line.operands))
        if line.opcode in ("fusion", "call"):
            given = dict(enumerate(map(evaluate, line.operands)))
            return self._value(line.called("calls", "to_apply")[0], "ROOT", given, depth + 1)
        return None


def parse(text: str) -> Program:
    """Reads `compiled.as_text()`.

    Args:
        text: an HLO module, scheduled or not, of any backend.

    Returns:
        The program. Each computation also has its root under the name "ROOT".

    Raises:
        ValueError: if there is no entry computation.

    Example:
        >>> program = parse("ENTRY %main (x: f32[4]) -> f32[4] {\\n  ROOT %x = f32[4]{0} parameter(0)\\n}")
        >>> program.root("main").opcode
        'parameter'
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            instruction = _instruction(found[2], found[3])
            if instruction is not None:
                current[instruction.name] = instruction
                if found[1]:
                    current["ROOT"] = instruction
    if entry is None:
        raise ValueError("the text holds no ENTRY computation, so it is not an HLO module")
    return Program(computations, entry)


def _instruction(name: str, rest: str) -> Instruction | None:
    opcode = _OPCODE.search(rest)
    if opcode is None:
        return None
    depth, end = 1, opcode.end()
    while end < len(rest) and depth:
        depth += {"(": 1, ")": -1}.get(rest[end], 0)
        end += 1
    inside = rest[opcode.end() : end - 1]
    if opcode[1] in ("constant", "parameter"):
        operands = (inside.strip(),)
    else:
        operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, rest[: opcode.start()].strip(), opcode[1], operands, rest[end:])


def array_shapes(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Element type and sizes of every array in a type.

    Example:
        >>> array_shapes("(f32[4,8]{1,0:T(8,128)}, u32[]{:S(2)})")
        [('f32', (4, 8)), ('u32', ())]
    """
    return [(kind, tuple(map(int, filter(None, sizes.split(","))))) for kind, sizes in _ARRAY.findall(shape)]


def byte_size(shape: str) -> int:
    """Bytes of all arrays in a type, without padding.

    Example:
        >>> byte_size("(bf16[4,8]{1,0}, f32[])")
        68
    """
    return int(sum(WIDTHS.get(kind, 4.0) * math.prod(sizes) for kind, sizes in array_shapes(shape)))


def tuple_parts(shape: str) -> list[str]:
    """The members of a tuple type, or the type itself in a list.

    Example:
        >>> tuple_parts("((f32[4]{0}, f32[2]{0}), u32[])")
        ['(f32[4]{0}, f32[2]{0})', 'u32[]']
    """
    if not shape.startswith("("):
        return [shape]
    parts, depth, begin = [], 0, 1
    for at, character in enumerate(shape):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(character, 0)
        if (character == "," and depth == 1) or (at == len(shape) - 1 and depth == 0):
            parts.append(shape[begin:at].strip())
            begin = at + 1
    return [part for part in parts if part]
