"""Costs of one execution of a compiled module on one device: collectives, FLOP, memory traffic, large values.

Reads the optimized, scheduled HLO of XLA's CPU, GPU and TPU compilers (`compiled.as_text()`), for devices that are
attached or not.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from keras_dist.planning.hlo import instruction_costs
from keras_dist.planning.hlo.collectives import Collective, is_collective, read_collective, with_part_of
from keras_dist.planning.hlo.kernel_costs import attention_kernel, kernel_flops, workspace_bytes
from keras_dist.planning.hlo.megascale import slices_of
from keras_dist.planning.hlo.parser import Computation, Instruction, parse_module
from keras_dist.planning.hlo.shapes import leaves
from keras_dist.planning.hlo.trip_counts import trip_count


@dataclass(frozen=True)
class LargeValue:
    """A temporary value in device memory.

    Args:
        bytes: Size in device memory in bytes, with the padding of a tiled layout.
        shape: Element type and dims, like "bf16[8,128]".
        op_name: The JAX operation that it comes from, "" if the compiler kept none.
        name: Name of the instruction.
    """

    bytes: int
    shape: str
    op_name: str
    name: str


@dataclass(frozen=True)
class ModuleCosts:
    """Costs of one execution of a compiled module on one device: FLOP (2 per multiply-add) and estimated bytes.

    Each of the `unknown_loops` counts as one iteration, and `opaque_calls`, targets of custom calls, as no FLOP.
    Of `closed_forms`, other targets, the FLOP come from closed forms, and `workspace_bytes` is an estimate of their
    largest workspace that is not part of the module. `flops_by_dtype` is by the wider HLO element type of the operands.
    `host_bytes` are copied between the memories of host and device. `collectives` are in the order of the schedule;
    `largest_values` are the ten largest, without parameters and results.
    """

    collectives: tuple[Collective, ...]
    flops: float
    flops_by_dtype: Mapping[str, float]
    memory_bytes: float
    host_bytes: float
    unknown_loops: int
    largest_values: tuple[LargeValue, ...]
    opaque_calls: tuple[str, ...]
    closed_forms: tuple[str, ...]
    workspace_bytes: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one execution."""
        return sum(each.wire_bytes * each.count for each in self.collectives)


@dataclass
class Costs:
    """Costs of one run of a computation, including what it calls."""

    counts: dict[str, int] = field(default_factory=dict)  # runs of a collective, by "computation/instruction"
    flops: dict[str, float] = field(default_factory=dict)  # by HLO element type
    memory_bytes: float = 0.0
    host_bytes: float = 0.0
    wire_bytes: float = 0.0
    unknown_loops: int = 0
    kernels: int = 0  # calls of fused attention kernels

    def rank(self) -> tuple[float, ...]:
        """Ranks the branches of a conditional. One without a fused kernel stands in where the kernel cannot run.

        If all have kernels, the last ones stand in where the cheapest cannot run.
        """
        moved = -self.memory_bytes if self.kernels else self.memory_bytes
        return self.kernels, self.wire_bytes, self.host_bytes, sum(self.flops.values()), moved

    def add(self, other: "Costs", times: int = 1) -> None:
        for key, count in other.counts.items():
            self.counts[key] = self.counts.get(key, 0) + times * count
        for dtype, flop in other.flops.items():
            self.flops[dtype] = self.flops.get(dtype, 0.0) + times * flop
        self.memory_bytes += times * other.memory_bytes
        self.host_bytes += times * other.host_bytes
        self.wire_bytes += times * other.wire_bytes
        self.unknown_loops += other.unknown_loops
        self.kernels += other.kernels


class ModuleReader:
    """Visits the computations that a module, `compiled.as_text()`, runs, each once.

    Loop bodies count once per iteration. Of the branches of a conditional, the one that sends most counts; if some call
    a fused attention kernel, the one of them that moves the fewest bytes does.

    `axes` are the sizes of the mesh axes, outermost first. For each position in the flattened mesh, `networks` has the
    number of its slice (None: one slice) and `ids` its device id (None: the devices of each slice are in the order of
    their ids, and all are in the mesh). Device i of the module is at position i; if the module is for several TPU
    slices, it is the i-th device of every slice.

    `collectives` are by "computation/instruction", with a count of 1. `chains` has the key of each collective that TPUs
    split into fragments, `memory_bytes` those of each instruction outside of fusions that has any, and `host_copies`
    those of each that copies between the memories of host and device, and whether to the host.
    """

    def __init__(
        self,
        text: str,
        axes: Mapping[str, int] | None = None,
        networks: Sequence[int] | None = None,
        ids: Sequence[int] | None = None,
    ):
        module = parse_module(text)
        self.module = module
        self.collectives: dict[str, Collective] = {}
        self.chains: dict[tuple[str, str | None], str] = {}
        self.memory_bytes: dict[tuple[str, str], float] = {}
        self.host_copies: dict[tuple[str, str], tuple[float, bool]] = {}
        self.large_values: list[LargeValue] = []
        self.opaque_calls: set[str] = set()
        self.closed_forms: set[str] = set()
        self.workspace_bytes = 0
        self._axes, self._slices = dict(axes or {}), slices_of(module.devices, networks, ids)
        self._costs: dict[tuple[str, bool], Costs] = {}
        self._seen_chains: set[tuple[str, str | None]] = set()
        starts = [each for each in module.computations.values() if instruction_costs.starts_chain(each)]
        fused = [instruction for each in starts for instruction in each.instructions.values()]
        self._started_chains = set(map(instruction_costs.chain, fused))

    def module_costs(self, times: Mapping[str, tuple[float, float]] | None = None) -> ModuleCosts:
        """Returns the costs of the module. `times` are the seconds of each collective, in total and exposed."""
        costs = self.costs(self.module.entry)
        collectives = []
        for key, count in costs.counts.items():
            if count:
                seconds, exposed = (None, None) if times is None else times.get(key, (0.0, 0.0))
                found = replace(self.collectives[key], count=count, seconds=seconds, exposed_seconds=exposed)
                collectives.append(found)
        return ModuleCosts(
            collectives=tuple(with_part_of(collectives)),
            flops=sum(costs.flops.values()),
            flops_by_dtype=MappingProxyType(dict(costs.flops)),
            memory_bytes=costs.memory_bytes,
            host_bytes=costs.host_bytes,
            unknown_loops=costs.unknown_loops,
            largest_values=tuple(heapq.nlargest(10, self.large_values, key=lambda value: value.bytes)),
            opaque_calls=tuple(sorted(self.opaque_calls)),
            closed_forms=tuple(sorted(self.closed_forms)),
            workspace_bytes=self.workspace_bytes,
        )

    def costs(self, name: str, in_fusion: bool = False, op_name: str = "") -> Costs:
        """Returns the costs of one run of a computation. Inside a fusion, values are not in memory."""
        if (name, in_fusion) not in self._costs:
            costs = self._costs[name, in_fusion] = Costs()
            computation = self.module.computations[name]
            for instruction in computation.instructions.values():
                self._add(costs, computation, instruction, in_fusion, op_name)
            if not in_fusion:
                self.large_values += self._large_values(computation)
        return self._costs[name, in_fusion]

    def _add(self, costs: Costs, computation: Computation, instruction: Instruction, in_fusion: bool, op_name: str):
        opcode = instruction.base_opcode
        if not in_fusion:
            if moved := instruction_costs.memory_bytes(self.module, computation, instruction):
                self.memory_bytes[computation.name, instruction.name] = moved
                costs.memory_bytes += moved
            if copied := instruction_costs.host_copy(computation, instruction):
                self.host_copies[computation.name, instruction.name] = copied
                costs.host_bytes += copied[0]
        if is_collective(instruction):
            if self._is_counted(computation, instruction):
                found = read_collective(self.module, computation, instruction, in_fusion, self._axes, self._slices)
                key = f"{computation.name}/{instruction.name}"
                self.collectives[key] = replace(found, op_name=found.op_name or op_name)
                costs.counts[key] = 1
                if fragments := instruction_costs.chain(instruction):
                    self.chains[fragments] = key
                costs.wire_bytes += found.wire_bytes
        elif opcode == "while":
            trips = trip_count(self.module, computation, instruction)
            costs.unknown_loops += trips is None
            for key in ("condition", "body") if trips != 0 else ():
                costs.add(self.costs(self.module.called(instruction, key).name), trips or 1)
        elif opcode == "conditional":
            costs.add(self.costs(self.branch(instruction)))
        elif opcode in ("fusion", "call", "async"):
            called = self.module.called(instruction).name
            costs.add(self.costs(called, in_fusion or opcode == "fusion", instruction.op_name))
        elif opcode in ("dot", "ragged-dot", "convolution", "custom-call"):
            costs.kernels += attention_kernel(instruction) is not None
            self.workspace_bytes = max(self.workspace_bytes, workspace_bytes(computation, instruction))
            if kernel_flops(computation, instruction):
                self.closed_forms.add(instruction.target)
            if work := instruction_costs.flops(computation, instruction):
                dtype, flop = work
                costs.flops[dtype] = costs.flops.get(dtype, 0.0) + flop
            elif instruction_costs.is_opaque(instruction):
                self.opaque_calls.add(instruction.target)

    def branch(self, conditional: Instruction) -> str:
        keys = ("branch_computations", "true_computation", "false_computation")
        return max((name for key in keys for name in conditional.names(key)), key=lambda name: self.costs(name).rank())

    def _is_counted(self, computation: Computation, instruction: Instruction) -> bool:
        """False for all but the first of the fusions that TPUs spread one asynchronous collective over."""
        key = instruction_costs.chain(instruction)
        if key is None:
            return True
        if key in self._started_chains:
            return instruction_costs.starts_chain(computation)
        is_first = key not in self._seen_chains
        self._seen_chains.add(key)
        return is_first

    def _large_values(self, computation: Computation) -> Iterator[LargeValue]:
        results = _results(computation) if computation.name == self.module.entry else set()
        for instruction in computation.instructions.values():
            is_free = instruction.opcode in instruction_costs.FREE
            if is_free or instruction.opcode.endswith(("send", "-done", "-update")) or instruction.name in results:
                continue
            for array, written in instruction_costs.written_arrays(self.module, computation, instruction):
                if array.is_in_memory and array.dims and written is array:
                    yield LargeValue(array.stored_bytes, str(array), instruction.op_name, instruction.name)


def changed_bytes(body: Computation) -> int:
    """Returns the bytes of the floating-point numbers that the body of a loop changes and carries to its next run.

    Those of `generate()` are its caches: what a loop only reads, such as weights, is passed on as it is.
    """
    changed = 0
    for index, name in enumerate(body.instructions[body.root].operands):
        value = body.instructions[name]
        is_passed_on = value.opcode == "get-tuple-element" and value.integers("index") == (index,)
        if not is_passed_on or body.operand(value, 0).opcode != "parameter":
            changed += sum(array.stored_bytes for array in leaves(value.shape) if "f" in array.dtype)
    return changed


def _results(computation: Computation) -> set[str]:
    """Names of the instructions that compute the results of a computation."""
    names, waiting = set(), [computation.root]
    while waiting:
        instruction = computation.instructions[waiting.pop()]
        names.add(instruction.name)
        if instruction.opcode in ("tuple", "bitcast") or instruction.opcode.endswith("-done"):
            waiting += instruction.operands
    return names
