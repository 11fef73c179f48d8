"""What one device does in one execution of a compiled module: collectives, FLOP, memory traffic, large values.

Reads the optimized and scheduled HLO that the CPU, GPU and TPU compilers print (`compiled.as_text()`), whether the
hardware is attached or not.

>>> module = '''HloModule jit_step, num_partitions=8
...
... ENTRY %main (x: f32[256]) -> f32[256] {
...   %x = f32[256]{0} parameter(0)
...   ROOT %psum = f32[256]{0} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
... }'''
>>> [found] = read_module(module, {"data": 2, "model": 4}).collectives
>>> found.kind, found.axes, found.bytes, found.wire_bytes
('all-reduce', ('model',), 1024, 1536.0)
"""

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from keras_dist.planning.hlo.instruction_costs import (
    chain,
    flops,
    in_memory,
    is_opaque,
    made,
    memory_bytes,
    starts_chain,
)
from keras_dist.planning.hlo.megascale import Slices, slices_of, transfer
from keras_dist.planning.hlo.parser import (
    Computation,
    Instruction,
    Module,
    leaves,
    parse_module,
)
from keras_dist.planning.hlo.replica_groups import Groups, axes_of_groups, axes_of_pairs, parse_groups
from keras_dist.planning.hlo.trip_counts import Loops

COLLECTIVES = frozenset({
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
    "ragged-all-to-all",
})  # fmt: skip
_NO_NEW_VALUE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "opt-barrier",
    "send",
})  # fmt: skip


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled module, or what it sends to other slices for one.

    Args:
        kind: its HLO opcode, without "-start": "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
            "collective-permute", "collective-broadcast" or "ragged-all-to-all".
        name: the instruction's name.
        op_name: the JAX operation that asked for it, "" where the compiler kept none.
        tensors: how many tensors it combines.
        bytes: payload of one run on one device, in bytes: the full size of what is reduced, gathered, scattered,
            exchanged or sent.
        wire_bytes: bytes that one device sends in one run, see `wire_bytes`.
        count: how often one execution of the module runs it.
        group_size: devices in a group; 2 for a permute, which pairs them.
        axes: mesh axes along which the devices of a group differ, outermost first; () for a group of one; None where
            the groups follow no axes, or the axes are not known. An axis that a collective runs on only a part of is
            named, too: compilers take a collective over an axis of several slices or hosts apart into collectives
            inside each of them and between them. `group_size` tells these from the whole.
        groups: positions in the flattened mesh; for a permute its pairs of source and target. () where the module
            names devices that are not known.
        dtype: HLO element type of its largest tensor.
        part_of: "all-gather" or "reduce-scatter" for a permute that the compiler made of one, to overlap it with the
            matrix multiplication that needs it (a windowed einsum); None elsewhere.
    """

    kind: str
    name: str
    op_name: str
    tensors: int
    bytes: int
    wire_bytes: float
    count: int
    group_size: int
    axes: tuple[str, ...] | None
    groups: Groups
    dtype: str
    part_of: str | None = None


@dataclass(frozen=True)
class LargeValue:
    """A value that a compiled module computes and keeps in device memory for a time.

    Args:
        bytes: its size in device memory in bytes, with the padding of a tiled layout.
        shape: its element type and sizes, like "bf16[8,128]".
        op_name: the JAX operation that it comes from, "" where the compiler kept none.
        name: the instruction's name.
    """

    bytes: int
    shape: str
    op_name: str
    name: str


@dataclass(frozen=True)
class ModuleCosts:
    """What one device does in one execution of a compiled module.

    Args:
        collectives: every collective that runs, in the order of the schedule.
        flops: FLOP of matrix multiplications and convolutions, 2 for each multiply-add.
        flops_by_dtype: the same by HLO element type of the operands (of the wider one where they differ).
        memory_bytes: bytes read from and written to device memory, by operands and results: an estimate.
        unknown_loops: while loops of which the text does not say how often they run. They count once.
        largest_values: the ten largest values that are neither parameters nor results, largest first.
        devices: how many devices run the module.
        opaque_calls: targets of the custom calls of which the text does not say what they compute. Their FLOP are
            missing here.
    """

    collectives: tuple[Collective, ...]
    flops: float
    flops_by_dtype: Mapping[str, float]
    memory_bytes: float
    unknown_loops: int
    largest_values: tuple[LargeValue, ...]
    devices: int
    opaque_calls: tuple[str, ...]

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one execution."""
        return sum(each.wire_bytes * each.count for each in self.collectives)


def read_module(
    text: str,
    axes: Mapping[str, int] | None = None,
    networks: Sequence[int] | None = None,
    ids: Sequence[int] | None = None,
) -> ModuleCosts:
    """Reads what one device does in one execution of a compiled module.

    Loops count as often as they run; of the branches of a condition the one counts that sends most.

    Args:
        text: `compiled.as_text()`.
        axes: sizes of the mesh's axes by name, outermost first. Device i of the module is the device at position i of
            the flattened mesh.
        networks: number of the slice of each position in the flattened mesh, None for one slice. The module for
            several slices of TPUs is that of one of them: device i of it is the i-th of each slice in the flattened
            mesh.
        ids: the id of the device at each position, by which such a module may name it. None where the devices of each
            slice are in the order of their ids, and all of them are in the mesh.

    Returns:
        The costs.

    Raises:
        ValueError: no text of a compiled module.
    """
    module = parse_module(text)
    slices = slices_of(module.devices, networks, ids)
    reader = _Reader(module, dict(axes or {}), slices)
    costs = reader.costs(module.entry)
    collectives = [replace(reader.found[place], count=count) for place, count in costs.counts.items() if count]
    return ModuleCosts(
        collectives=tuple(_with_part_of(collectives)),
        flops=sum(costs.flops.values()),
        flops_by_dtype=MappingProxyType(dict(costs.flops)),
        memory_bytes=costs.memory_bytes,
        unknown_loops=costs.unknown_loops,
        largest_values=tuple(heapq.nlargest(10, reader.values, key=lambda value: value.bytes)),
        devices=slices.devices,
        opaque_calls=tuple(sorted(reader.opaque_calls)),
    )


def wire_bytes(kind: str, payload: float, group_size: int) -> float:
    """Returns the bytes that one device sends for a collective, by the ring algorithms.

    Args:
        kind: an HLO opcode, such as "all-reduce".
        payload: bytes of the full tensor: what is reduced, what is gathered in the end, what is scattered in the
            beginning, what one device exchanges, sends or broadcasts.
        group_size: devices in a group.

    Returns:
        Bytes.

    Example:

    >>> wire_bytes("all-reduce", 800, 8), wire_bytes("all-gather", 800, 8), wire_bytes("collective-permute", 800, 2)
    (1400.0, 700.0, 800.0)

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
    Parallel and Distributed Computing 69 (2009); "Bus bandwidth" in
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    share = (group_size - 1) / group_size
    if kind == "all-reduce":
        return 2 * payload * share
    if kind in ("collective-permute", "collective-broadcast"):
        return float(payload) if group_size > 1 else 0.0
    return payload * share


@dataclass
class _Costs:
    """Costs of one run of one computation, with all that it calls."""

    counts: dict[str, int] = field(default_factory=dict)  # runs of a collective, by computation/instruction
    flops: dict[str, float] = field(default_factory=dict)
    memory_bytes: float = 0.0
    wire_bytes: float = 0.0
    unknown_loops: int = 0

    def add(self, other: "_Costs", times: int = 1):
        """Adds the costs of a computation that runs so many times."""
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + times * count
        for dtype, count in other.flops.items():
            self.flops[dtype] = self.flops.get(dtype, 0.0) + times * count
        self.memory_bytes += times * other.memory_bytes
        self.wire_bytes += times * other.wire_bytes
        self.unknown_loops += other.unknown_loops


class _Reader:
    """Goes through the computations that a module runs, each once."""

    def __init__(self, module: Module, axes: dict[str, int], slices: Slices):
        self.module, self.axes, self.slices, self.loops = module, axes, slices, Loops(module)
        self.found: dict[str, Collective] = {}
        self.values: list[LargeValue] = []
        self.opaque_calls: set[str] = set()
        self._known: dict[tuple[str, bool], _Costs] = {}
        self._seen_chains: set[tuple[str, str | None]] = set()
        self._started_chains = {
            chain(instruction)
            for computation in module.computations.values()
            if starts_chain(computation)
            for instruction in computation.instructions.values()
        }

    def costs(self, name: str, in_fusion: bool = False, op_name: str = "") -> _Costs:
        """Returns what one run of a computation costs. Inside a fusion nothing goes through memory."""
        if (name, in_fusion) not in self._known:
            costs = _Costs()
            computation = self.module.computations[name]
            for instruction in computation.instructions.values():
                self._add(costs, computation, instruction, in_fusion, op_name)
            if not in_fusion:
                self.values += self._large_values(computation)
            self._known[name, in_fusion] = costs
        return self._known[name, in_fusion]

    def _add(self, costs: _Costs, computation: Computation, instruction: Instruction, in_fusion: bool, op_name: str):
        opcode = instruction.base_opcode
        if not in_fusion:
            costs.memory_bytes += memory_bytes(self.module, computation, instruction)
        is_sent = opcode == "send" and ("_source_target_pairs" in instruction.attributes or transfer(instruction))
        if opcode in COLLECTIVES or is_sent:
            if self._counts(computation, instruction):
                collective = self._collective(computation, instruction, in_fusion, op_name)
                place = f"{computation.name}/{instruction.name}"
                self.found[place] = collective
                costs.counts[place] = costs.counts.get(place, 0) + 1
                costs.wire_bytes += collective.wire_bytes
        elif opcode == "while":
            trips = self.loops.trip_count(computation, instruction)
            costs.unknown_loops += trips is None
            for key in ("condition", "body"):
                costs.add(self.costs(instruction.names(key)[0]), 1 if trips is None else trips)
        elif opcode == "conditional":
            keys = ("branch_computations", "true_computation", "false_computation")
            branches = [self.costs(name) for key in keys for name in instruction.names(key)]
            costs.add(max(branches, key=lambda each: (each.wire_bytes, sum(each.flops.values()), each.memory_bytes)))
        elif opcode == "fusion":
            costs.add(self.costs(instruction.names("calls")[0], True, instruction.op_name))
        elif opcode in ("call", "async"):
            for name in instruction.names("calls") or instruction.names("to_apply"):
                costs.add(self.costs(name, in_fusion, instruction.op_name))
        elif opcode in ("dot", "ragged-dot", "convolution", "custom-call"):
            work = flops(computation, instruction)
            if work:
                costs.flops[work[0]] = costs.flops.get(work[0], 0.0) + work[1]
            if is_opaque(instruction):
                self.opaque_calls.add(instruction.target)

    def _counts(self, computation: Computation, instruction: Instruction) -> bool:
        """TPUs spread one asynchronous collective over several fusions. Only the one that starts it counts."""
        fragment_of = chain(instruction)
        if fragment_of is None:
            return True
        if fragment_of in self._started_chains:
            return starts_chain(computation)
        is_first = fragment_of not in self._seen_chains
        self._seen_chains.add(fragment_of)
        return is_first

    def _collective(self, computation: Computation, instruction: Instruction, in_fusion: bool, op_name: str):
        kind, numbered, groups = self._groups(instruction)
        tensors = [array for name in instruction.operands for array in leaves(computation.instructions[name].shape)]
        says_where = kind == "ragged-all-to-all" or (instruction.attribute("slice_sizes") and kind.endswith("permute"))
        if says_where or instruction.opcode == "send":
            # The other operands say where the data goes, or what goes first.
            tensors = tensors[:1]
        if kind == "all-reduce" and in_fusion and _only_slices(computation, instruction.name):
            # A fusion that all-reduces and keeps a slice is how TPUs write a reduce-scatter.
            kind = "reduce-scatter"
        largest = max(tensors, key=lambda array: array.bytes)
        payload, count = sum(array.bytes for array in tensors), len(tensors)
        if kind == "collective-permute":
            size, axes_of = 2, axes_of_pairs
            sources = [source for source, target in numbered if source != target]
            wire = payload * max((sources.count(source) for source in set(sources)), default=0)
        else:
            size, axes_of = max(len(group) for group in numbered), axes_of_groups
            payload *= size if kind == "all-gather" else 1
            wire = wire_bytes(kind, payload, size)
        axes = axes_of(groups, self.axes) if groups or not numbered else None
        if kind == "all-to-all" and instruction.attribute("dimensions") is None:
            # Without a dim to split, its operands are the pieces of one tensor.
            count = 1
        return Collective(
            kind, instruction.name, instruction.op_name or op_name, count, payload, float(wire), 1, size, axes, groups,
            largest.dtype, _windowed(computation.name),
        )  # fmt: skip

    def _groups(self, instruction: Instruction) -> tuple[str, Groups, Groups]:
        """The kind of a collective, and its groups or pairs: of the numbers in the text, and of positions."""
        kind, pairs = instruction.base_opcode, instruction.attribute("source_target_pairs")
        sent = transfer(instruction)
        if sent:
            kind, numbered = sent
            return kind, numbered, self.slices.of_ids(numbered)
        if kind == "send":
            found = re.search(r'_source_target_pairs="?(\{\{.*?\}\})', instruction.attributes)
            kind, pairs = "collective-permute", found[1] if found else "{}"
        if pairs is not None:
            numbered = () if pairs == "{}" else parse_groups(pairs, self.module.devices)
        else:
            text = instruction.attribute("replica_groups") or instruction.attribute("device_list") or "{}"
            numbered = parse_groups(text, self.module.devices)
        return kind, numbered, self.slices.in_mesh(numbered)

    def _large_values(self, computation: Computation) -> Iterator[LargeValue]:
        results = _results(computation) if computation.name == self.module.entry else set()
        for instruction in computation.instructions.values():
            done = instruction.opcode.endswith(("-done", "-update"))
            if instruction.opcode in _NO_NEW_VALUE or done or instruction.name in results:
                continue
            for array, part in made(self.module, computation, instruction):
                if in_memory(array) and array.dims and part is array:
                    yield LargeValue(array.stored_bytes, str(array), instruction.op_name, instruction.name)


def _only_slices(computation: Computation, name: str) -> bool:
    """Whether all that becomes of a value are slices of it."""
    users = computation.users.get(name, [])
    return bool(users) and all(
        user.opcode == "dynamic-slice"
        or (user.opcode in ("bitcast", "get-tuple-element", "reshape", "copy") and _only_slices(computation, user.name))
        for user in users
    )


def _windowed(computation_name: str) -> str | None:
    match = re.search(r"windowed_dot_general_body_(ag|rs)", computation_name)
    return {"ag": "all-gather", "rs": "reduce-scatter"}[match[1]] if match else None


def _with_part_of(collectives: list[Collective]) -> Iterator[Collective]:
    """The first or last permute of a windowed einsum lies outside its loop, and comes from the same operation."""
    parts = {each.op_name: each.part_of for each in collectives if each.part_of and each.op_name}
    for each in collectives:
        if each.kind == "collective-permute" and each.part_of is None:
            yield replace(each, part_of=parts.get(each.op_name))
        else:
            yield each


def _results(computation: Computation) -> set[str]:
    """Names of the instructions that make the results of a computation."""
    names, waiting = set(), [computation.root]
    while waiting:
        instruction = computation.instructions[waiting.pop()]
        names.add(instruction.name)
        if instruction.opcode in ("tuple", "bitcast") or instruction.opcode.endswith("-done"):
            waiting += instruction.operands
    return names
