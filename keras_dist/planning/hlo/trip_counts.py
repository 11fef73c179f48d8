"""Trip counts of the while loops in a compiled module."""

import re
from typing import NamedTuple

from keras_dist.mixtures.rounds import EXTRA_ROUNDS
from keras_dist.planning.hlo.parser import Computation, Instruction, Module
from keras_dist.planning.hlo.shapes import bits, leaves

_PASSES_ON = frozenset({"copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier"})


class _Value(NamedTuple):
    """A known integer `offset`, or an element of the tuple carried by a loop plus `offset`."""

    offset: int
    element: int | None = None


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns the number of iterations of a `while` instruction, None if it is unknown.

    Loops over what only unbalanced routing of tokens to experts needs have none.

    Uses the compiler's `known_trip_count` if there is one; libtpu writes none. Otherwise both sides of the condition
    must change by constants: literals, or values that are carried unchanged or passed through copies, tuples, fusions
    and calls.

    Example: condition `i < 10`, body `(i + 3, ...)`, initial tuple `(1, ...)`: the left side is element 0 of the
    carried tuple, which is first 1 and grows by 3, the right side is 10. So `i` is 1, 4, 7, and the loop runs 3 times.
    """
    if EXTRA_ROUNDS in loop.op_name:
        return 0
    if known := re.search(r'known_trip_count"?:\{"n":"?(\d+)', loop.backend_config):
        return int(known[1])
    condition = module.called(loop, "condition")
    compared_in, compare, _ = _origin(module, condition, condition.root)
    direction = compare.attribute("direction")
    if direction is None:
        return None
    sides = [_value(module, compared_in, operand, condition.name) for operand in compare.operands]
    left, right = (_first_and_step(module, computation, loop, side) for side in sides)
    if left is None or right is None:
        return None
    return _iterations(direction, left[0] - right[0], left[1] - right[1])


def _first_and_step(module: Module, computation: Computation, loop: Instruction, value: _Value | None):
    """What a value in a loop's condition is at first, and what each iteration adds; None if unknown."""
    if value is None:
        return None
    if value.element is None:
        return value.offset, 0
    body = module.called(loop, "body")
    first = _value(module, computation, loop.operands[0], None, value.element)
    after = _value(module, body, body.root, body.name, value.element)
    if first is None or after is None or after.element != value.element:
        return None
    return first.offset + value.offset, after.offset


def _origin(
    module: Module, computation: Computation, name: str, element: int | None = None, body: Computation | None = None
) -> tuple[Computation, Instruction, int | None]:
    """The computation and instruction that compute a value or an element of a tuple, and the element there.

    Follows copies, tuples, what is called from one place, and what loops carry unchanged; not out of `body`.
    """
    while True:
        instruction = computation.instructions[name]
        opcode, callers = instruction.opcode, module.callers[computation.name]
        if opcode == "get-tuple-element":
            name, [element] = instruction.operands[0], instruction.integers("index")
        elif opcode == "tuple" and element is not None:
            name, element = instruction.operands[element], None
        elif opcode in _PASSES_ON or (opcode == "while" and _is_unchanged(module, instruction, element)):
            name = instruction.operands[0]
        elif opcode in ("fusion", "call"):
            computation = module.called(instruction)
            name = computation.root
        elif opcode == "parameter" and len(callers) == 1 and computation is not body:
            outer, caller = callers[0]
            if caller.opcode == "while" and not _is_unchanged(module, caller, element):
                return computation, instruction, element
            computation, name = outer, caller.operands[int(instruction.literal)]
        else:
            return computation, instruction, element


def _is_unchanged(module: Module, loop: Instruction, element: int | None) -> bool:
    """Whether each iteration of a loop passes on an element of the carried tuple."""
    body = module.called(loop, "body")
    origin, instruction, carried = _origin(module, body, body.root, element, body)
    return element is not None and carried == element and origin is body and instruction.opcode == "parameter"


def _value(module: Module, computation: Computation, name: str, loop: str | None, element: int | None = None):
    """The value of an instruction, or of one element of its tuple; None if unknown.

    Elements that the condition or body named `loop` carries and changes are symbolic.
    """
    offset = 0
    while True:
        computation, instruction, element = _origin(module, computation, name, element)
        if instruction.opcode == "parameter" and computation.name == loop and element is not None:
            return _Value(offset, element)
        known = _integer(instruction)
        if known is not None:
            return _Value(offset + known)
        if instruction.opcode not in ("add", "subtract"):
            return None
        name, term = instruction.operands
        if instruction.opcode == "add" and _integer(_origin(module, computation, term)[1]) is None:
            name, term = term, name
        known = _integer(_origin(module, computation, term)[1])
        if known is None:
            return None
        offset += known if instruction.opcode == "add" else -known


def _integer(instruction: Instruction) -> int | None:
    """The value of an integer constant. A large unsigned one is negative: adding 2^32 - 1 to a uint32 subtracts 1."""
    number = re.fullmatch(r"[{}\s]*(-?\d+)[{}\s]*", instruction.literal) if instruction.opcode == "constant" else None
    if number is None:
        return None
    value, dtype = int(number[1]), next(leaves(instruction.shape)).dtype
    return value - 2 ** bits(dtype) if dtype.startswith("u") and value >= 2 ** (bits(dtype) - 1) else value


def _iterations(direction: str, difference: int, step: int) -> int | None:
    """Number of iterations while `difference <direction> 0`, which grows by `step`; None if the loop does not end."""
    if direction == "NE":
        return -difference // step if step and difference % step == 0 and -difference // step >= 0 else None
    if direction == "EQ":
        return (1 if step else None) if difference == 0 else 0
    if direction in ("GT", "GE"):
        difference, step = -difference, -step
    if direction in ("LE", "GE"):
        difference -= 1
    if difference >= 0:
        return 0
    return -(difference // step) if step > 0 else None
