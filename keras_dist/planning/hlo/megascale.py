"""Modules for several TPU slices: each slice runs the same module, and its hosts send data to other slices.

libtpu (0.0.42 and 0.0.50) compiles for the full mesh and prints the module of one slice:

* It has the partitions of one slice. Partition i is the i-th of the slice's devices in the flattened mesh, in every
  slice. Replica groups and source-target pairs are partition numbers, the same for all slices.
* Data crosses slices by a `send` and a `recv` of the "xla_megascale_runtime". Their attributes name the collective that
  the hosts run (`_xla_megascale_transfer_type`) and the participating devices (`_xla_megascale_target`). The id of a
  device is 100000 times the number of its slice, counted from 1, plus its number in the slice.

Source of the transfer types: `ComputeTransmittedDataSize` in TensorFlow's
`tensorflow/core/profiler/convert/xspace_to_dcn_slack_analysis.cc`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from keras_dist.planning.hlo.parser import Instruction
from keras_dist.planning.hlo.replica_groups import Groups
from keras_dist.planning.hlo.shapes import numbers

_IDS_PER_SLICE = 100_000


@dataclass(frozen=True)
class Slices:
    """Positions in the flattened mesh of the devices that run a module.

    `partitions` has the position of each partition of each slice; all devices are one slice unless they are several TPU
    slices. `positions_by_id` is by MegaScale id.
    """

    partitions: tuple[tuple[int, ...], ...]
    positions_by_id: Mapping[int, int] = field(default_factory=dict)

    def in_mesh(self, groups: Groups) -> Groups:
        """Converts groups of partitions to groups of positions in the flattened mesh, for all slices.

        >>> Slices(((0, 2), (1, 3))).in_mesh(((0, 1),))
        ((0, 2), (1, 3))
        """
        if len(self.partitions) == 1:
            return groups
        return tuple(tuple(of[each] for each in group) for of in self.partitions for group in groups)

    def of_ids(self, groups: Groups) -> Groups:
        """Converts groups of MegaScale ids to groups of positions; () if the mesh lacks one of them."""
        if not all(number in self.positions_by_id for group in groups for number in group):
            return ()
        return tuple(tuple(self.positions_by_id[number] for number in group) for group in groups)


def slices_of(partitions: int, networks: Sequence[int] | None, ids: Sequence[int] | None) -> Slices:
    """Returns the positions in the mesh of the devices that run a module with a number of partitions.

    `networks` and `ids` are those of `ModuleReader`. If the ids are not MegaScale ids, the devices of a slice are
    numbered in the order of their ids; without ids, in the order of the mesh.

    >>> slices_of(2, [0, 1, 0, 1], None).partitions
    ((0, 2), (1, 3))
    >>> slices_of(4, [0, 1, 0, 1], None).partitions
    ((0, 1, 2, 3),)
    """
    one_slice = Slices((tuple(range(partitions)),))
    if networks is None:
        return one_slice
    positions: dict[int, list[int]] = {}
    for position, network in enumerate(networks):
        positions.setdefault(network, []).append(position)
    if len(positions) == 1 or any(len(each) != partitions for each in positions.values()):
        return one_slice
    known = range(len(networks)) if ids is None else ids
    if min(known) >= _IDS_PER_SLICE:
        positions_by_id = {number: position for position, number in enumerate(known)}
    else:
        positions_by_id = {
            _IDS_PER_SLICE * (network + 1) + number: position
            for network, each in positions.items()
            for number, position in enumerate(sorted(each, key=known.__getitem__))
        }
    return Slices(tuple(map(tuple, positions.values())), positions_by_id)


def transfer(instruction: Instruction) -> tuple[str, Groups] | None:
    """Returns the kind of collective that a `send` to other slices is part of, and its groups or pairs of ids.

    None for other instructions, and for the offsets and sizes that accompany a ragged-all-to-all.
    """
    if instruction.opcode != "send" or '"xla_megascale_runtime"' not in instruction.attributes:
        return None
    kind = re.search(r'_xla_megascale_transfer_type="?(\w+)', instruction.attributes)
    target = re.search(r'_xla_megascale_target=(?:"([^"]*)"|(\{\{.*?\}\}))', instruction.attributes)
    operand = re.search(r'_xla_megascale_ragged_operand_index="?(\d+)', instruction.attributes)
    if not kind or not target or (operand and operand[1] != "0"):
        return None
    name = "collective-permute" if kind[1] == "ONE_TO_ONE" else kind[1].lower().replace("_", "-")
    return name, parse_target(target[1] or target[2])


def parse_target(text: str) -> Groups:
    """Parses a `_xla_megascale_target` into groups, or (source, target) pairs, of device ids.

    >>> parse_target("{1,2}x{0,2:3}")
    ((100000, 200000), (100002, 200002), (100003, 200003))
    >>> parse_target("{{100000->200001},{200001->100000}}")
    ((100000, 200001), (200001, 100000))
    """
    slices, product, devices = text.partition("x")
    if product:
        return tuple(
            tuple(_IDS_PER_SLICE * slice_number + device for slice_number in _counted(slices))
            for device in _counted(devices)
        )
    return tuple(numbers(group) for group in re.findall(r"\{([\d,>\- ]+)\}", text))


def _counted(text: str) -> Iterator[int]:
    """The numbers in a list of numbers and inclusive ranges, like `{0,2:3}`."""
    for first, last in re.findall(r"(\d+)(?::(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)
