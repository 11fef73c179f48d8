"""Parses the text of compiled XLA modules, `compiled.as_text()`: computations, instructions and their attributes."""

import operator
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from keras_dist.planning.hlo.shapes import Shape, numbers, parse_shape


@dataclass(frozen=True)
class Instruction:
    """One instruction, `name = shape opcode(operands), attributes`, with its shape and attributes as printed.

    `operands` are names of instructions; `literal` is the value of a constant or the number of a parameter.
    """

    name: str
    shape_text: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @property
    def shape(self) -> Shape:
        return parse_shape(self.shape_text)

    @property
    def base_opcode(self) -> str:
        """The opcode without the "-start" of an asynchronous instruction."""
        return self.opcode.removesuffix("-start")

    def attribute(self, key: str) -> str | None:
        """Returns the text of an attribute, None if the instruction lacks it."""
        start = self._structure.find(f", {key}=")
        if start < 0:
            return None
        start += len(key) + 3
        return self._structure[start : _end_of_value(self._structure, start)]

    def integers(self, key: str) -> tuple[int, ...]:
        """Returns the integers of an attribute like `dimensions={0,1}`; () if the instruction lacks it."""
        return numbers(self.attribute(key) or "")

    def names(self, key: str) -> tuple[str, ...]:
        """Returns the names of computations in an attribute like `calls=%a` or `branch_computations={%a, %b}`."""
        return tuple(re.findall(r"[\w.\-]+", self.attribute(key) or ""))

    @property
    def target(self) -> str:
        """Target of a custom call, "" for other instructions."""
        return (self.attribute("custom_call_target") or "").strip('"') if self.opcode == "custom-call" else ""

    @property
    def op_name(self) -> str:
        """The JAX operation that it comes from, "" if the compiler kept none."""
        match = re.search(r'metadata=\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*?op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1] if match else ""

    @property
    def backend_config(self) -> str:
        """Configuration that the backend attached, "" if there is none."""
        start = self.attributes.find(", backend_config=")
        return self.attributes[start:] if start >= 0 else ""

    @cached_property
    def _structure(self) -> str:
        # Metadata and backend config come last and are free text, which may contain what looks like other attributes.
        ends = (self.attributes.find(f", {key}=") for key in ("metadata", "backend_config"))
        return self.attributes[: min((end for end in ends if end >= 0), default=len(self.attributes))]


@dataclass
class Computation:
    """A computation: named instructions in the order of their schedule."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(each.literal): each for each in self.instructions.values() if each.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instructions that use a value, by its name."""
        users = defaultdict(list)
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        return self.instructions[instruction.operands[index]]

    def operand_shapes(self, instruction: Instruction) -> list[Shape]:
        return [self.instructions[name].shape for name in instruction.operands]


@dataclass(frozen=True)
class Module:
    """A compiled module: computations by name, the entry computation, and the number of devices that run it."""

    devices: int
    entry: str
    computations: dict[str, Computation]

    def called(self, caller: Instruction, key: str = "") -> Computation:
        """Returns the computation that an instruction names in an attribute, by default the one that it calls."""
        names = caller.names(key) if key else caller.names("calls") or caller.names("to_apply")
        return self.computations[names[0]]

    @cached_property
    def largest_loop_body(self) -> str:
        """The name of the largest loop's body; that of the entry if there is no loop."""
        instructions = (each for part in self.computations.values() for each in part.instructions.values())
        bodies = [self.called(each, "body") for each in instructions if each.opcode == "while"]
        return max(bodies, key=lambda body: len(body.instructions), default=self.computations[self.entry]).name

    @cached_property
    def callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """Instructions that call a computation, with the computations that have them, by its name."""
        callers = defaultdict(list)
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                if instruction.base_opcode in ("fusion", "call", "while", "async"):
                    for key in ("calls", "to_apply", "body", "condition"):
                        for name in instruction.names(key):
                            callers[name].append((computation, instruction))
        return callers


def parse_module(text: str) -> Module:
    """Parses `compiled.as_text()`, in time linear in its length. Raises a ValueError if it is not an HLO module.

    >>> module = parse_module('''HloModule jit_f, num_partitions=8
    ...
    ... ENTRY %main (x: f32[4]) -> f32[4] {
    ...   %x = f32[4]{0} parameter(0)
    ...   ROOT %y = f32[4]{0} add(%x, %x), metadata={op_name="jit(f)/add"}
    ... }''')
    >>> module.devices, module.computations[module.entry].instructions["y"].op_name
    (8, 'jit(f)/add')
    """
    devices, entry, computation = 1, "", None
    computations: dict[str, Computation] = {}
    for line in map(operator.itemgetter(0), _LINE.finditer(text)):  # lazily: texts can have 100 MB
        if line.startswith((" ", "\t")):
            if computation and (instruction := _parse_instruction(line)):
                computation.instructions[instruction.name] = instruction
                if line.lstrip().startswith("ROOT "):
                    computation.root = instruction.name
        elif line.startswith("HloModule "):
            counts = dict(re.findall(r", (num_partitions|replica_count)=(\d+)", line))
            devices = int(counts.get("num_partitions", 1)) * int(counts.get("replica_count", 1))
        elif line.endswith("{"):
            name = re.split(r"[ ({]", line.removeprefix("ENTRY ").lstrip("%"), maxsplit=1)[0]
            computation = computations[name] = Computation(name)
            if line.startswith("ENTRY "):
                entry = name
        elif line.startswith("}"):
            computation = None
    if not entry:
        raise ValueError(
            f"Found no ENTRY computation in the HLO module {text[:80]!r}. Pass the text of compiled.as_text()."
        )
    return Module(devices, entry, computations)


# The metadata of a TPU kernel, `kernel_metadata={...}`, has lines of its own within the line of an instruction.
_LINE = re.compile(r"(?:.*kernel_metadata=\{\n.*\n)?.+")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\(")


def _parse_instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    name, shape, opcode = match.groups()
    closing = next((token.start() for token, depth in _tokens(line, match.end() - 1) if depth == 0), len(line))
    inside = line[match.end() : closing]
    literal = inside if opcode in ("constant", "parameter") else ""
    operands = () if literal else tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, shape, opcode, operands, literal, line[closing + 1 :])


_BRACKET_OR_COMMA = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')


def _tokens(text: str, start: int) -> Iterator[tuple[re.Match[str], int]]:
    """Yields the brackets and commas of a text outside of strings, each with the number of brackets open after it."""
    depth = 0
    for match in _BRACKET_OR_COMMA.finditer(text, start):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        yield match, depth


def _end_of_value(text: str, start: int) -> int:
    if text.startswith("mesh[", start):  # `mesh[...], device_ids=(...) {...}` has a comma outside brackets
        return next((match.end() for match, depth in _tokens(text, start) if match[0] == "}" and depth == 0), len(text))
    return next((match.start() for match, depth in _tokens(text, start) if match[0] == "," and depth == 0), len(text))
