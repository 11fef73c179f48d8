"""Trip counts of the while loops in a compiled module."""

import math
import re
from dataclasses import dataclass, field
from functools import cached_property

from keras_dist.planning.hlo.parser import Computation, Instruction, Module
from keras_dist.planning.hlo.shapes import bits, leaves

_PASSES_ON = frozenset({"copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier"})
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}


@dataclass(frozen=True)
class _Value:
    """A known integer `offset`, or an element of the tuple carried by a loop (a condition or body) plus `offset`."""

    offset: int
    loop: str | None = None
    element: int = 0


@dataclass
class Loops:
    """Computes trip counts of a module's while loops."""

    module: Module
    _depth: int = field(default=0, init=False)
    _values: dict[tuple, _Value | None] = field(default_factory=dict, init=False)

    def trip_count(self, computation: Computation, loop: Instruction) -> int | None:
        """Returns the number of iterations of a `while` instruction, None if it is unknown.

        Uses the compiler's `known_trip_count` if there is one. Otherwise the condition, the initial value and the step
        of the counter must be constants: literals, or values that are carried unchanged or passed through copies,
        tuples, fusions and calls.

        Example: condition `i < 10`, body `(i + 3, ...)`, initial tuple `(1, ...)`: the compared value is element 0 of
        the carried tuple plus 0, the body returns element 0 plus 3, and the initial element 0 is 1. So `i` is 1, 4, 7,
        and the loop runs 3 times.
        """
        known = re.search(r'known_trip_count"?:\{"n":"?(\d+)', loop.backend_config)
        if known:
            return int(known[1])
        condition = self.module.computations[loop.names("condition")[0]]
        body = self.module.computations[loop.names("body")[0]]
        comparison = self._comparison(condition)
        if comparison is None:
            return None
        compared_in, compare, left, right = comparison
        for direction, counter, bound in ((compare, left, right), (_MIRRORED[compare], right, left)):
            carried = self._value(compared_in, counter, condition.name)
            limit = self._value(compared_in, bound, None)
            if carried is None or carried.loop is None or limit is None:
                continue
            step, first = self._step(body, carried.element), self._first(computation, loop, carried.element)
            if step and first is not None:
                return _iterations(direction, first + carried.offset, step, limit.offset)
        return None

    @cached_property
    def _callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in self.module.computations.values():
            for instruction in computation.instructions.values():
                if instruction.base_opcode in ("fusion", "call", "while", "async"):
                    for key in ("calls", "to_apply", "body", "condition"):
                        for name in instruction.names(key):
                            callers.setdefault(name, []).append((computation, instruction))
        return callers

    def _comparison(self, condition: Computation) -> tuple[Computation, str, str, str] | None:
        """The computation in which a condition compares, the direction, and the names of the two operands."""
        computation, instruction = condition, condition.instructions[condition.root]
        while instruction.opcode in _PASSES_ON or instruction.opcode in ("fusion", "call"):
            if instruction.opcode in _PASSES_ON:
                instruction = computation.operand(instruction, 0)
            else:
                computation = self._called(instruction)
                instruction = computation.instructions[computation.root]
        direction = instruction.attribute("direction")
        if instruction.opcode != "compare" or direction is None:
            return None
        left, right = instruction.operands
        return computation, direction, left, right

    def _called(self, instruction: Instruction) -> Computation:
        return self.module.computations[(instruction.names("calls") or instruction.names("to_apply"))[0]]

    def _step(self, body: Computation, element: int) -> int | None:
        """What the body adds to an element of its carried tuple; None if it does anything else."""
        value = self._value(body, body.root, body.name, element)
        return value.offset if value and value.loop == body.name and value.element == element else None

    def _first(self, computation: Computation, loop: Instruction, element: int) -> int | None:
        value = self._value(computation, loop.operands[0], None, element)
        return value.offset if value and value.loop is None else None

    def _value(self, computation: Computation, name: str, loop: str | None, element: int | None = None):
        """The value of an instruction, or of one element of its tuple; None if unknown.

        Within the condition or body named `loop`, carried elements are symbolic. Elsewhere a carried element is known
        only if the loop does not change it.
        """
        key = computation.name, name, loop, element
        # Counters pass through a handful of instructions. Longer chains are not followed.
        if key not in self._values and self._depth < 200:
            # Unknown while it is being computed: a value that depends on itself is not constant.
            self._values[key] = None
            self._depth += 1
            self._values[key] = self._follow(computation, computation.instructions[name], loop, element)
            self._depth -= 1
        return self._values.get(key)

    def _follow(self, computation: Computation, instruction: Instruction, loop: str | None, element: int | None):
        opcode = instruction.opcode
        if opcode == "constant":
            number = re.fullmatch(r"[{}\s]*(-?\d+)[{}\s]*", instruction.literal)
            return _Value(_signed(int(number[1]), instruction)) if number else None
        if opcode == "parameter":
            return self._parameter(computation, instruction, loop, element)
        if opcode == "get-tuple-element":
            return self._value(computation, instruction.operands[0], loop, instruction.integers("index")[0])
        if opcode == "tuple" and element is not None:
            return self._value(computation, instruction.operands[element], loop)
        if opcode in _PASSES_ON:
            return self._value(computation, instruction.operands[0], loop, element)
        if opcode in ("fusion", "call"):
            called = self._called(instruction)
            return self._value(called, called.root, loop, element)
        if opcode == "while" and element is not None:
            body = self.module.computations[instruction.names("body")[0]]
            is_unchanged = self._step(body, element) == 0
            return self._value(computation, instruction.operands[0], loop, element) if is_unchanged else None
        if opcode in ("add", "subtract"):
            left, right = (self._value(computation, operand, loop) for operand in instruction.operands)
            if left and right and left.loop is not None and right.loop is not None:
                # Both are carried; one of them may be unchanged by the loop, and so a known integer.
                fixed = self._value(computation, instruction.operands[1], None)
                if fixed is None:
                    left = self._value(computation, instruction.operands[0], None)
                right = fixed or right
            return _sum(left, right, -1 if opcode == "subtract" else 1)
        return None

    def _parameter(self, computation: Computation, instruction: Instruction, loop: str | None, element: int | None):
        if computation.name == loop:
            return _Value(0, loop, element) if element is not None else None
        callers = self._callers.get(computation.name, [])
        if len(callers) != 1:
            return None
        outer, caller = callers[0]
        if caller.opcode != "while":
            return self._value(outer, caller.operands[int(instruction.literal)], loop, element)
        body = self.module.computations[caller.names("body")[0]]
        if element is None or self._step(body, element) != 0:
            return None
        return self._value(outer, caller.operands[0], loop, element)


def _signed(number: int, instruction: Instruction) -> int:
    """Reads a large unsigned number as negative: adding 2^32 - 1 to a uint32 counter subtracts 1."""
    dtype = next(leaves(instruction.shape)).dtype
    width = bits(dtype)
    return number - (1 << width) if dtype.startswith("u") and width and number >= 1 << (width - 1) else number


def _sum(left: _Value | None, right: _Value | None, sign: int) -> _Value | None:
    if left is None or right is None or (right.loop is not None and (left.loop is not None or sign < 0)):
        return None
    carried = left if left.loop is not None else right
    return _Value(left.offset + sign * right.offset, carried.loop, carried.element)


def _iterations(direction: str, first: int, step: int, bound: int) -> int | None:
    """Number of iterations of `for (i = first; i <direction> bound; i += step)`; None if it does not end."""
    distance = bound - first
    if direction == "NE":
        return distance // step if step and distance % step == 0 and distance // step >= 0 else None
    if direction == "EQ":
        return (1 if step else None) if distance == 0 else 0
    if direction in ("GT", "GE"):
        distance, step = -distance, -step
    if direction in ("LE", "GE"):
        distance += 1
    if distance <= 0:
        return 0
    return math.ceil(distance / step) if step > 0 else None
