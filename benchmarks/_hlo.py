"""Reads compiled programs (`compiled.as_text()`): loops, kernels, FLOPs, bytes that move between memory and kernels.

Two counts are upper bounds: a conditional has all of its branches, and a convolution the products with the zeros of padding and
of dilation.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "opt-barrier"} | {
    *("partition-id", "replica-id", "copy-done", "fusion-done", "async-done", "async-update", "slice-done"),
    *("dynamic-slice-done", "all-reduce-done"),
}
"""Operations that launch nothing: names of values, and the ends of operations whose beginning counts."""
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s64": 8, "u64": 8, "f64": 8}


_PICKS = {"slice", "dynamic-slice", "gather"}
"""Operations that read a part of their first operand."""


class Instruction(NamedTuple):
    """One line of a program: name, type of the result, operation, and the rest of the line from the operation on."""

    name: str
    form: str
    operation: str
    rest: str


class Cost(NamedTuple):
    """Of a body, without the loops inside it: kernels, FLOPs of products and convolutions, bytes read and written."""

    kernels: int
    flops: float
    bytes: float

    def seconds(self, flops: float, bandwidth: float) -> float:
        """The time that rates of arithmetic and memory allow at best; launches take none."""
        return max(self.flops / flops, self.bytes / bandwidth)


class Loop(NamedTuple):
    """The body of a loop, or the program itself at depth 0.

    Attributes:
      depth, name: where it is.
      cost: of a step, without the loops inside it.
      steps: how often it runs, where the compiler knows; `None` if the host of a GPU must ask for the condition after each step.
    """

    depth: int
    name: str
    cost: Cost
    steps: int | None


class Program:
    """A compiled program."""

    def __init__(self, text: str) -> None:
        self._bodies: dict[str, list[Instruction]] = {}
        self._entry = ""
        self._flops: dict[str, float] = {}
        body: list[Instruction] | None = None
        for line in text.splitlines():
            header = re.match(r"^(ENTRY\s+)?%?([\w.\-]+)\s+\(.*->.*\{\s*$", line)
            if header:
                body = self._bodies[header[2]] = []
                self._entry = header[2] if header[1] else self._entry
            elif line.startswith("}"):
                body = None
            elif body is not None:
                found = re.match(r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$", line)
                if found:
                    form, rest = _form_and_rest(found[2])
                    body.append(Instruction(found[1], form, re.match(r"[\w\-]*", rest)[0], rest))  # type: ignore[index]
        self._forms = {name: {line.name: line.form for line in lines} for name, lines in self._bodies.items()}

    def instructions(self) -> Iterator[Instruction]:
        """All instructions, those inside kernels too."""
        for lines in self._bodies.values():
            yield from lines

    def loops(self) -> list[Loop]:
        """The program and its loops, each before those inside it."""
        return list(self._loops(self._entry, 0, "program", 1))

    def _loops(self, name: str, depth: int, label: str, steps: int | None) -> Iterator[Loop]:
        own, inside = self._own(name)
        yield Loop(depth, label, own, steps)
        for loop, body, count in inside:
            yield from self._loops(body, depth + 1, loop, count)

    def _own(self, name: str) -> tuple[Cost, list[tuple[str, str, int | None]]]:
        """(cost of a body with what it calls, its loops as (name, body, steps))."""
        kernels, flops, moved, inside = 0, 0.0, 0.0, []
        for line in self._bodies.get(name, []):
            if line.operation == "while":
                known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line.rest)
                inside.append((line.name, _called(line.rest, "body")[0], int(known[1]) if known else None))
                continue
            if line.operation in ("call", "conditional"):
                words = ("to_apply", "branch_computations", "true_computation", "false_computation")
                for called in (body for word in words for body in _called(line.rest, word)):
                    cost, more = self._own(called)
                    kernels, flops, moved = kernels + cost.kernels, flops + cost.flops, moved + cost.bytes
                    inside += more
                continue
            if line.operation in _FREE:
                continue
            kernels += 1
            flops += self._flops_of(name, line)
            moved += self._bytes_of(name, line)
        return Cost(kernels, flops, moved), inside

    def _bytes_of(self, body: str, line: Instruction) -> float:
        operands = [size(self._forms[body].get(name, "")) for name in _operands(line.rest)]
        inside = self._bodies.get((_called(line.rest, "calls") or [""])[0]) if line.operation == "fusion" else None
        if inside is None:
            if line.operation in _PICKS:
                return 2.0 * size(line.form)
            # An update in place touches what it writes.
            if line.operation == "dynamic-update-slice":
                return 2.0 * operands[1]
            # cuBLAS may use the last result as a workspace, which is no data.
            made = re.sub(r", s8\[\d+\]\S*\)$", ")", line.form) if "__cublas" in line.rest else line.form
            return float(size(made) + sum(operands))
        forms = {inner.name: inner.form for inner in inside}
        same = {inner.name: _operands(inner.rest)[0] for inner in inside if inner.operation == "bitcast"}
        written = 0.0
        root = inside[-1]
        for name in _operands(root.rest) if root.operation == "tuple" else [root.name]:
            maker = next(inner for inner in inside if inner.name == _origin(name, same))
            update = maker.operation == "dynamic-update-slice"
            written += size(forms[_operands(maker.rest)[1]] if update else maker.form)
        read = 0.0
        for inner in inside:
            if inner.operation == "parameter":
                whole = size(inner.form)
                uses = [user for user in inside if user.operation != "bitcast" and inner.name in self._reads(user, same)]
                # A kernel that takes slices or rows of a large array reads no more than these.
                parts = [self._part(user, inner.name, same) for user in uses]
                read += min(whole, sum(whole if part is None else part for part in parts))
        return written + read

    @staticmethod
    def _reads(line: Instruction, same: dict[str, str]) -> list[str]:
        """The origins of what an instruction reads."""
        return [_origin(name, same) for name in _operands(line.rest)]

    def _part(self, line: Instruction, name: str, same: dict[str, str]) -> int | None:
        """Bytes of the value `name` that an instruction reads; `None` for all of it."""
        first = self._reads(line, same).index(name) == 0
        if line.operation in _PICKS and first:
            return size(line.form)
        return 0 if line.operation == "dynamic-update-slice" and first else None

    def _flops_of(self, body: str, line: Instruction) -> float:
        shape = _shape(line.form)
        operands = _operands(line.rest)
        if line.operation == "fusion":
            called = _called(line.rest, "calls")
            return self._flops_inside(called[0]) if called else 0.0
        if line.operation == "dot" or (line.operation == "custom-call" and "dot_dimension_numbers" in line.rest):
            found = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', line.rest)
            left = _shape(self._forms[body].get(operands[0], ""))
            axes = [int(axis) for axis in re.findall(r"\d+", found[1])] if found else []
            return 2.0 * math.prod(shape) * math.prod(left[axis] for axis in axes)
        if line.operation == "convolution":
            kernel = _shape(self._forms[body].get(operands[1], ""))
            labels = re.search(r"dim_labels=\w+_(\w+)->", line.rest)
            return 2.0 * math.prod(shape) * math.prod(n for n, c in zip(kernel, labels[1], strict=True) if c != "o")  # type: ignore[index]
        return 0.0

    def _flops_inside(self, name: str) -> float:
        if name not in self._flops:
            self._flops[name] = 0.0
            self._flops[name] = sum(self._flops_of(name, line) for line in self._bodies.get(name, []))
        return self._flops[name]


def _origin(name: str, same: dict[str, str]) -> str:
    """The value that `name` is another shape of."""
    while name in same:
        name = same[name]
    return name


def size(form: str) -> int:
    """Bytes of a type, e.g. of `(f32[2,3], s32[])`."""
    shapes = re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", form)
    return sum(_BYTES.get(kind, 4) * math.prod(int(n) for n in extents.split(",") if n) for kind, extents in shapes)


def _shape(form: str) -> list[int]:
    found = re.search(r"\b[a-z]+\d*\w*\[([\d,]*)\]", form)
    return [int(n) for n in found[1].split(",") if n] if found else []


def _form_and_rest(text: str) -> tuple[str, str]:
    """The type at the beginning of a line, and what follows."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c in "({") - (c in ")}")
        if c == " " and depth == 0:
            return text[:i], text[i + 1 :]
    return text, ""


def _operands(rest: str) -> list[str]:
    begin = rest.find("(")
    depth = 0
    for i in range(begin, len(rest)):
        depth += (rest[i] == "(") - (rest[i] == ")")
        if depth == 0:
            return re.findall(r"%([\w.\-]+)", rest[begin:i])
    return []


def _called(rest: str, word: str) -> list[str]:
    found = re.search(rf"\b{word}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", rest)
    return [name.strip().lstrip("%") for name in (found[1] or found[2]).split(",")] if found else []
