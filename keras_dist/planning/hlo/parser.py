"""The text of a compiled XLA module, as data: computations, instructions and shapes.

Reads what `compiled.as_text()` prints. Nothing here knows what an instruction costs.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import TypeAlias

# Values that live outside the device's main memory carry their memory space in the layout: S(1) is a TPU's VMEM,
# S(2), S(4) and S(6) are semaphores and scalar memory, S(5) is the host.
MAIN_MEMORY = 0


@dataclass(frozen=True)
class Array:
    """The shape of one array.

    Args:
        dtype: its HLO element type.
        dims: the sizes of its dims.
        space: the memory space that it lies in.
        stored_elements: its number of elements with the padding of a tiled layout.

    Example:

    >>> array = parse_shape("bf16[8,100]{1,0:T(8,128)(2,1)S(1)}")
    >>> str(array), array.space, array.bytes, array.stored_bytes
    ('bf16[8,100]', 1, 1600, 2048)
    """

    dtype: str
    dims: tuple[int, ...]
    space: int
    stored_elements: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size in bytes, without the padding of a tiled layout. Elements of 4 bits take half a byte."""
        return -(-self.elements * bits(self.dtype) // 8)

    @property
    def stored_bytes(self) -> int:
        """Size in bytes that it takes in memory, with the padding of a tiled layout."""
        return -(-self.stored_elements * bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Shape: TypeAlias = "Array | tuple[Shape, ...]"


@cache
def bits(dtype: str) -> int:
    """Returns the size in bits of one element of an HLO type: 16 for 'bf16', 0 for 'token'."""
    if dtype == "pred":
        return 8
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 0


def leaves(shape: Shape) -> Iterator[Array]:
    """Yields the arrays of a shape, which may be a tuple of tuples."""
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from leaves(part)


_SHAPE_TOKEN = re.compile(r"([()])|([a-z]\w*)\[([^\]]*)\](\{[^{}]*\})?")


@lru_cache(maxsize=16384)
def parse_shape(text: str) -> Shape:
    """Returns the shape that a text like `f32[8,128]{1,0:T(8,128)}` or `(f32[8], (s32[], u32[]))` describes."""
    stack: list[list] = [[]]
    for match in _SHAPE_TOKEN.finditer(text):
        bracket, dtype, dims, layout = match.groups()
        if bracket == "(":
            stack.append([])
        elif bracket == ")" and len(stack) > 1:
            inner = tuple(stack.pop())
            stack[-1].append(inner)
        elif bracket == ")":
            stack.append([])
        else:
            # "<=5" is a dim of at most 5.
            sizes = tuple(int(size.strip().removeprefix("<=")) for size in dims.split(",") if size.strip())
            stack[-1].append(_array(dtype, sizes, layout or ""))
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(
            f"A shape is an array like 'f32[8,128]{{1,0}}' or a tuple of them. Received: {text!r}. "
            "Pass the text of compiled.as_text() unchanged."
        )
    return stack[0][0]


def _array(dtype: str, dims: tuple[int, ...], layout: str) -> Array:
    """An array with a layout like `{1,0:T(8,128)(2,1)S(1)}`: dims from the minor one on, tiles, memory space."""
    order, _, rest = layout.strip("{}").partition(":")
    space, tile = re.search(r"S\((\d+)\)", rest), re.match(r"T\(([\d,]+)\)", rest)
    stored = list(dims)
    if tile:
        # The last number of the first tile is for the minor dim. Further tiles only reorder within it.
        for dim, size in zip(numbers(order), reversed(numbers(tile[1])), strict=False):
            stored[dim] = -(-dims[dim] // size) * size
    return Array(dtype, dims, int(space[1]) if space else MAIN_MEMORY, math.prod(stored))


def numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers in a text."""
    return tuple(int(number) for number in re.findall(r"\d+", text))


@dataclass(frozen=True)
class Instruction:
    """One instruction: `name = shape opcode(operands), attributes`.

    Args:
        literal: what a constant or a parameter has in place of operands: its value or its number.
        attributes: everything after the operands, as printed.
    """

    name: str
    shape_text: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @property
    def shape(self) -> Shape:
        """The result's shape."""
        return parse_shape(self.shape_text)

    @property
    def base_opcode(self) -> str:
        """The opcode, without the "-start" of an asynchronous instruction."""
        return self.opcode.removesuffix("-start")

    def attribute(self, key: str) -> str | None:
        """Returns the text of an attribute, None where the instruction has none of that key."""
        start = self._structure.find(f", {key}=")
        if start < 0:
            return None
        start += len(key) + 3
        return self._structure[start : _end_of_value(self._structure, start)]

    def integers(self, key: str) -> tuple[int, ...]:
        """Returns the numbers of an attribute like `dimensions={0,1}`; () where there is none."""
        return numbers(self.attribute(key) or "")

    def names(self, key: str) -> tuple[str, ...]:
        """Returns the names of computations in an attribute like `calls=%a` or `branch_computations={%a, %b}`."""
        return tuple(re.findall(r"[\w.\-]+", self.attribute(key) or ""))

    @property
    def target(self) -> str:
        """What a custom call calls, "" for other instructions."""
        return (self.attribute("custom_call_target") or "").strip('"') if self.opcode == "custom-call" else ""

    @property
    def op_name(self) -> str:
        """The JAX operation that asked for it, "" where the compiler kept none."""
        match = re.search(r'metadata=\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*?op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1] if match else ""

    @property
    def backend_config(self) -> str:
        """What the backend wrote about it, "" where it wrote nothing."""
        start = self.attributes.find(", backend_config=")
        return self.attributes[start:] if start >= 0 else ""

    @cached_property
    def _structure(self) -> str:
        # Metadata and backend config come last and are free text, in which keys must not be looked for.
        ends = (self.attributes.find(f", {key}=") for key in ("metadata", "backend_config"))
        return self.attributes[: min((end for end in ends if end >= 0), default=len(self.attributes))]


@dataclass
class Computation:
    """A named list of instructions in the order of their schedule."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Its parameters by number."""
        return {int(each.literal): each for each in self.instructions.values() if each.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that use a name's value."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        """Returns the instruction whose value is the operand of that number."""
        return self.instructions[instruction.operands[index]]


@dataclass(frozen=True)
class Module:
    """A compiled module: its computations by name, which one runs, and on how many devices."""

    name: str
    devices: int
    entry: str
    computations: dict[str, Computation]


def parse_module(text: str) -> Module:
    """Returns the module that `compiled.as_text()` printed.

    Args:
        text: the module's text. It is read line by line, in time linear in its size.

    Returns:
        The module.

    Raises:
        ValueError: the text is none of an HLO module.

    Example:

    >>> module = parse_module('''HloModule jit_f, num_partitions=8
    ...
    ... ENTRY %main (x: f32[4]) -> f32[4] {
    ...   %x = f32[4]{0} parameter(0)
    ...   ROOT %y = f32[4]{0} add(%x, %x), metadata={op_name="jit(f)/add"}
    ... }''')
    >>> module.devices, module.computations[module.entry].instructions["y"].op_name
    (8, 'jit(f)/add')
    """
    name, devices, entry, computation = "", 1, "", None
    computations: dict[str, Computation] = {}
    for line in _lines(text):
        if line.startswith((" ", "\t")):
            instruction = _parse_instruction(line) if computation else None
            if computation and instruction:
                computation.instructions[instruction.name] = instruction
                if line.lstrip().startswith("ROOT "):
                    computation.root = instruction.name
        elif line.startswith("HloModule "):
            name = re.split(r"[ ,]", line, maxsplit=2)[1]
            counts = dict(re.findall(r", (num_partitions|replica_count)=(\d+)", line))
            devices = int(counts.get("num_partitions", 1)) * int(counts.get("replica_count", 1))
        elif line.endswith("{"):
            computation_name = re.split(r"[ ({]", line.removeprefix("ENTRY ").lstrip("%"), maxsplit=1)[0]
            computation = computations[computation_name] = Computation(computation_name)
            if line.startswith("ENTRY "):
                entry = computation_name
        elif line.startswith("}"):
            computation = None
    if not entry:
        raise ValueError(
            f"A compiled module's text has an ENTRY computation. Received: {text[:80]!r}. Pass compiled.as_text()."
        )
    for computation in computations.values():
        # Without "ROOT" the last instruction is the root.
        computation.root = computation.root or next(reversed(computation.instructions), "")
    return Module(name, devices, entry, computations)


def _lines(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end]
        start = end + 1


def _parse_instruction(line: str) -> Instruction | None:
    equals = line.find(" = ")
    if equals < 0:
        return None
    start = equals + 3
    shape_end = _closing(line, start) + 1 if line[start] == "(" else line.find(" ", start)
    opening = line.find("(", shape_end)
    if shape_end < 0 or opening < 0:
        return None
    opcode, closing = line[shape_end:opening].strip(), _closing(line, opening)
    inside, literal, operands = line[opening + 1 : closing], "", ()
    if opcode in ("constant", "parameter"):
        literal = inside
    elif "%" in inside:
        operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    else:
        # Printed without percent signs, and perhaps with the operands' shapes before their names.
        bare = re.sub(r"/\*.*?\*/|\{[^{}]*\}|\[[^\]]*\]", "", inside)
        operands = tuple(part.split()[-1] for part in bare.split(",") if part.split())
    name = line[:equals].split()[-1].removeprefix("%")
    shape = line[start:shape_end]
    if opcode == "fusion-start":  # (operands, result, context): a fusion like any other, whose "-done" does nothing
        opcode, shape = "fusion", _second_element(shape)
    return Instruction(name, shape, opcode, operands, literal, line[closing + 1 :])


def _second_element(shape: str) -> str:
    commas, depth = [], 0
    for match in _BRACKET_OR_COMMA.finditer(shape):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if match[0] == "," and depth == 1:
            commas.append(match.start())
    return shape[commas[0] + 1 : commas[1] if len(commas) > 1 else -1].strip()


_PARENTHESIS = re.compile(r"[()]")
_BRACKET_OR_COMMA = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')


def _closing(line: str, opening: int) -> int:
    depth = 0
    for match in _PARENTHESIS.finditer(line, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)


def _end_of_value(text: str, start: int) -> int:
    # `mesh[...], device_ids=(...) {...}` is the one value with a comma outside brackets.
    in_mesh, depth = text.startswith("mesh[", start), 0
    for match in _BRACKET_OR_COMMA.finditer(text, start):
        token = match[0]
        if token in "([{":
            depth += 1
        elif token in ")]}":
            depth -= 1
            if in_mesh and depth == 0 and token == "}":
                return match.end()
        elif token == "," and depth == 0 and not in_mesh:
            return match.start()
    return len(text)
