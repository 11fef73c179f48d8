"""Walks the schedule of a compiled module in order, and adds up the time of one execution on one device.

* The device runs one instruction after another: a synchronous one advances the clock by its duration.
* An asynchronous collective or copy begins where it starts in the schedule, or once its links are free, and runs while
  the device goes on. Where it is done in the schedule, the device waits for the rest of it, which is `exposed`.
* A loop takes its trip count times one iteration, a conditional the time of the branch that counts.

Example: a collective of 10 ms starts, a matrix multiplication of 6 ms runs, then the collective is done. The device
computes for 6 ms and waits for 4 ms, so 4 of the 10 ms are exposed, and all of it takes 10 ms.
"""

import operator
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from keras_dist.planning.costs.forecast import Forecast, TimeModel
from keras_dist.planning.hlo.collectives import is_collective
from keras_dist.planning.hlo.instruction_costs import chain, flops
from keras_dist.planning.hlo.kernel_costs import attention_kernel
from keras_dist.planning.hlo.module_costs import ModuleReader
from keras_dist.planning.hlo.parser import Computation, Instruction
from keras_dist.planning.hlo.trip_counts import trip_count

# What the walk adds up, besides ("total", key) and ("exposed", key) of each collective.
_COMPUTE, _ESTIMATED, _COPIES = ("compute", ""), ("estimated", ""), ("copies", "")
_COPY_LINK, _HOST_LINK, _ASYNC_WORK_LINK = "copies", "host", "asynchronous work"
_PASSES_ON = frozenset({"get-tuple-element", "bitcast", "opt-barrier"})


def walk_schedule(
    reader: ModuleReader, times: TimeModel, bound: float = 0.0
) -> tuple[Forecast, dict[str, tuple[float, float]]]:
    """Returns the forecast for a module that takes at least `bound` seconds, and the time of each of its collectives.

    The latter is by "computation/instruction": the seconds in total, and those that are exposed.
    """
    reader.costs(reader.module.entry)
    walk = _Walk(reader, times)
    walk.run(reader.module.entry)
    sums = walk.sums
    exposed = {key: seconds for (part, key), seconds in sums.items() if part == "exposed"}
    waited = sum(exposed.values())
    seconds = max(bound, sums[_COMPUTE] + waited + sums[_COPIES])
    collectives = {key: (total, exposed.get(key, 0.0)) for (part, key), total in sums.items() if part == "total"}
    return Forecast(seconds, sums[_COMPUTE], waited, sums[_COPIES], sums[_ESTIMATED]), collectives


@dataclass
class _Transfer:
    """A collective or a copy on its links. It waited for `previous`, if that was still on one of them."""

    key: tuple[str, str]  # under which waiting for it is added up
    start: float
    end: float
    previous: "_Transfer | None"


class _Walk:
    """The state of a walk: the clock, what is on the links, and sums of seconds.

    Forms of asynchronous instructions:

    * `all-gather-start` and `all-gather-done`, likewise for the other collectives, and `copy-start`, `slice-start`.
    * `async-start` and `fusion-start` call a computation, and `async-done` and `fusion-done` are its end.
    * TPUs: a fusion calls `AsyncCollectiveStart`, and one with the same `chain_id` `AsyncCollectiveDone`. Between them,
      fusions with that `chain_id` go on with the collective while they compute.
    * Between TPU slices: `send`, and `recv-done` of the `recv` with the same rendezvous.
    """

    def __init__(self, reader: ModuleReader, times: TimeModel):
        self.clock = 0.0
        self.sums: dict[tuple[str, str], float] = defaultdict(float)
        self._reader, self._times = reader, times
        self._on_link: dict[Hashable, _Transfer] = {}
        self._pending: dict[Hashable, Sequence[_Transfer | None]] = {}
        self._work: dict[tuple[str, str], tuple[float, bool]] = {}
        # The collectives that TPUs split into fragments, those in each computation, and the fusions with the last ones.
        self._fragmented = set(reader.chains.values())
        self._fragments = {name: self._chains_in(each) for name, each in reader.module.computations.items()}
        self._last_fragments = {name: self._last(each) for name, each in reader.module.computations.items()}

    def run(self, name: str) -> None:
        computation = self._reader.module.computations[name]
        for instruction in computation.instructions.values():
            self._step(computation, instruction)

    def _step(self, computation: Computation, instruction: Instruction) -> None:
        opcode, module = instruction.opcode, self._reader.module
        if opcode == "while":
            self._loop(computation, instruction)
        elif opcode == "conditional":
            self.run(self._reader.branch(instruction))
        elif opcode == "call":
            self.run(module.called(instruction).name)
        elif opcode == "fusion":
            self._fusion(computation, instruction)
        elif opcode in ("async-start", "fusion-start"):
            self._start_async(computation, instruction)
        elif opcode.endswith("-start") or opcode == "send":
            key = _rendezvous(instruction) if opcode == "send" else (computation.name, instruction.name)
            self._pending[key] = [self._begin(computation, instruction)]
        elif opcode == "recv-done":
            self._wait(self._pending.pop(_rendezvous(_source(computation, instruction)), ()))
        elif opcode.endswith("-done") and opcode != "send-done":
            self._wait(self._pending.pop((computation.name, _source(computation, instruction).name), ()))
        elif (opcode != "recv" and is_collective(instruction)) or self._is_host_copy(computation, instruction):
            self._wait([self._begin(computation, instruction)])
        elif opcode not in ("recv", "send-done", "async-update"):
            self._advance(computation, instruction)

    def _loop(self, computation: Computation, loop: Instruction) -> None:
        """Walks two iterations: the first may wait for what began before the loop, the others are like the second."""
        trips = trip_count(self._reader.module, computation, loop)
        trips = 1 if trips is None else trips
        names = [self._reader.module.called(loop, key).name for key in ("condition", "body")]
        before, start = self.sums, self.clock
        for _ in range(min(trips, 2)):
            before, start = self.sums.copy(), self.clock
            for name in names:
                self.run(name)
        if trips > 2:
            self.clock += (trips - 2) * (self.clock - start)
            for key, seconds in self.sums.items():
                self.sums[key] += (trips - 2) * (seconds - before[key])

    def _fusion(self, computation: Computation, fusion: Instruction) -> None:
        fused = self._reader.module.called(fusion).name
        costs = self._reader.costs(fused, True)
        # What a fusion with a collective moves in memory is moved by the collective.
        moved = self._reader.memory_bytes.get((computation.name, fusion.name), 0.0)
        begun = {key: self._begin_collective(key, moved) for key in costs.counts}
        for key in begun.keys() & self._fragmented:
            self._pending["chain", key] = [begun.pop(key)]
        if not costs.counts or costs.flops or _cycles(fusion) is not None:
            self._advance(computation, fusion)
        self._wait(begun.values())
        if self._fragments[fused]:
            for key, last in self._last_fragments[computation.name].items():
                if last == fusion.name:
                    self._wait(self._pending.pop(("chain", key), ()))

    def _start_async(self, computation: Computation, instruction: Instruction) -> None:
        called = self._reader.module.called(instruction).name
        costs = self._reader.costs(called, instruction.base_opcode == "fusion")
        begun = [self._begin_collective(key, 0.0) for key in costs.counts]
        begun += [self._begin_host_copy(key) for key in self._reader.host_copies if key[0] == called]
        if not begun:  # work on other units of the device, such as a SparseCore
            seconds, _ = self._times.of_work(costs.flops, costs.memory_bytes)
            begun = [self._put_on_links((_ASYNC_WORK_LINK,), _COMPUTE, seconds)]
        self._pending[computation.name, instruction.name] = begun

    def _begin(self, computation: Computation, instruction: Instruction) -> _Transfer | None:
        """Begins a collective or a copy; None if it takes no time."""
        moved = self._reader.memory_bytes.get((computation.name, instruction.name), 0.0)
        if is_collective(instruction):
            return self._begin_collective(f"{computation.name}/{instruction.name}", moved)
        if instruction.opcode == "send":
            return None
        if self._is_host_copy(computation, instruction):
            return self._begin_host_copy((computation.name, instruction.name))
        return self._put_on_links((_COPY_LINK,), _COPIES, self._times.of_copy(moved)) if moved else None

    def _is_host_copy(self, computation: Computation, instruction: Instruction) -> bool:
        return (computation.name, instruction.name) in self._reader.host_copies

    def _begin_host_copy(self, key: tuple[str, str]) -> _Transfer:
        copied, is_to_host = self._reader.host_copies[key]
        return self._put_on_links(((_HOST_LINK, is_to_host),), _COPIES, self._times.of_host_copy(copied))

    def _begin_collective(self, key: str, moved: float) -> _Transfer | None:
        collective = self._reader.collectives.get(key)
        if collective is None or collective.wire_bytes <= 0:
            return None
        # A collective is no faster than the memory that it reads and writes.
        seconds = max(self._times.of_collective(collective), self._times.of_copy(moved))
        self.sums["total", key] += seconds
        return self._put_on_links(self._times.links(collective), ("exposed", key), seconds)

    def _put_on_links(self, links: Iterable[Hashable], key: tuple[str, str], seconds: float) -> _Transfer:
        links = tuple(links)
        earlier = (self._on_link[link] for link in links if link in self._on_link)
        before = max(earlier, key=operator.attrgetter("end"), default=None)
        if before is not None and before.end <= self.clock:
            before = None
        start = self.clock if before is None else before.end
        transfer = _Transfer(key, start, start + seconds, before)
        self._on_link.update(dict.fromkeys(links, transfer))
        return transfer

    def _wait(self, transfers: Iterable[_Transfer | None]) -> None:
        """Waits until transfers are over. What each occupied its links for while the device waits counts as its own."""
        for waited_for in filter(None, transfers):
            transfer, until = waited_for, waited_for.end
            while transfer is not None and until > self.clock:
                since = max(self.clock, transfer.start)
                if until > since:
                    self.sums[transfer.key] += until - since
                until, transfer = min(until, transfer.start), transfer.previous
            self.clock = max(self.clock, waited_for.end)

    def _advance(self, computation: Computation, instruction: Instruction) -> None:
        key = computation.name, instruction.name
        if key not in self._work:
            self._work[key] = self._seconds_of_work(computation, instruction)
        seconds, is_estimate = self._work[key]
        self.clock += seconds
        self.sums[_COMPUTE] += seconds
        self.sums[_ESTIMATED] += seconds * is_estimate

    def _seconds_of_work(self, computation: Computation, instruction: Instruction) -> tuple[float, bool]:
        moved = self._reader.memory_bytes.get((computation.name, instruction.name), 0.0)
        counted: Mapping[str, float] = {}
        if instruction.opcode == "fusion":
            counted = self._reader.costs(self._reader.module.called(instruction).name, True).flops
        elif instruction.opcode in ("dot", "ragged-dot", "convolution", "custom-call"):
            found = flops(computation, instruction)
            counted = {} if found is None else dict([found])
        cycles = _cycles(instruction)
        if not moved and not counted and cycles is None:
            return 0.0, False
        is_attention = attention_kernel(instruction) is not None
        return self._times.of_work(counted, moved, cycles, _microseconds(instruction), is_attention)

    def _chains_in(self, computation: Computation) -> list[str]:
        keys = (chain(each) for each in computation.instructions.values() if is_collective(each))
        return [self._reader.chains[key] for key in keys if key in self._reader.chains]

    def _last(self, computation: Computation) -> dict[str, str]:
        """The name of the fusion that has the last fragment of each collective."""
        fusions = [each for each in computation.instructions.values() if each.opcode == "fusion"]
        return {key: each.name for each in fusions for key in self._fragments[self._reader.module.called(each).name]}


def _source(computation: Computation, done: Instruction) -> Instruction:
    """The start of which an instruction is the end, unless another computation has it."""
    instruction = computation.operand(done, 0)
    while instruction.opcode in _PASSES_ON or instruction.opcode.endswith("-update"):
        instruction = computation.operand(instruction, 0)
    return instruction


_LATENCY_HIDING_MODEL = "sol"  # knows collectives and matrix multiplications, and gives almost nothing for the rest
_UNKNOWN_CYCLES = 2**62  # XLA:TPU writes 2^63 - 1 for what it cannot estimate


def _cycles(instruction: Instruction) -> float | None:
    found = re.search(r'"estimated_cycles":"?(\d+)', instruction.attributes)
    return float(found[1]) if found and float(found[1]) < _UNKNOWN_CYCLES else None


def _microseconds(instruction: Instruction) -> float | None:
    """Returns the shortest time that a cost model of XLA:GPU gives an instruction.

    There are several models, and none is too fast for what it knows. The first one counts what a fused reduction reads
    again for each element that needs the result: seconds where a softmax fused by Triton takes microseconds.
    """
    found = re.search(r'"reification_cost":\[([^\]]*)\]', instruction.attributes)
    times = re.findall(r'"exec_time_us":([\d.eE+-]+)[^{}]*?"name":"([^"]*)"', found[1]) if found else ()
    return min((float(time) for time, name in times if name != _LATENCY_HIDING_MODEL), default=None)


def _rendezvous(instruction: Instruction) -> Hashable:
    key = r'_xla_(?:host_transfer_rendezvous|send_recv_source_target_pairs)="?([^",]*)'
    found = re.search(key, instruction.attributes)
    return "rendezvous", found[1] if found else instruction.attribute("channel_id")
