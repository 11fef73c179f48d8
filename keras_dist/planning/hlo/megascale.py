"""Modules for several slices of TPUs: each slice runs the module by itself and sends to others through its hosts.

The compiler is told of the whole mesh, and prints what one slice does:

* The module has the partitions of one slice. Partition i is the i-th of the slice's devices in the flattened mesh, in
  every slice. Replica groups and pairs are numbers of partitions, and all slices run the same ones.
* What crosses slices is a `send` and a `recv` for the "xla_megascale_runtime". They carry the collective that the hosts
  run in between (`_xla_megascale_transfer_type`) and the devices that take part (`_xla_megascale_target`), each by its
  id: 100000 times its slice's number, counted from 1, plus its number in the slice.

This is what libtpu 0.0.42 and 0.0.50 print. Source of the types of transfers: `ComputeTransmittedDataSize` in
TensorFlow's `tensorflow/core/profiler/convert/xspace_to_dcn_slack_analysis.cc`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from keras_dist.planning.hlo.parser import Instruction, numbers
from keras_dist.planning.hlo.replica_groups import Groups

_IDS_OF_A_SLICE = 100_000


@dataclass(frozen=True)
class Slices:
    """Where in the flattened mesh the devices are that run a module.

    Args:
        partitions: for each network whose devices run the module by themselves, where each of its partitions is. One
            network of all devices where these run one module together, as they do on anything but slices of TPUs.
        places: where the device of each id is that MegaScale names it by.
    """

    partitions: tuple[tuple[int, ...], ...]
    places: Mapping[int, int] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """How many devices run the module."""
        return sum(map(len, self.partitions))

    def in_mesh(self, groups: Groups) -> Groups:
        """Returns groups of partitions as those of positions in the flattened mesh, those of all slices.

        Example:

        >>> Slices(((0, 2), (1, 3))).in_mesh(((0, 1),))
        ((0, 2), (1, 3))
        """
        if len(self.partitions) == 1:
            return groups
        return tuple(tuple(of[partition] for partition in group) for of in self.partitions for group in groups)

    def of_ids(self, groups: Groups) -> Groups:
        """Returns groups of MegaScale's ids as those of positions; () where the mesh is not known to have them."""
        if not all(number in self.places for group in groups for number in group):
            return ()
        return tuple(tuple(self.places[number] for number in group) for group in groups)


def slices_of(partitions: int, networks: Sequence[int] | None, ids: Sequence[int] | None) -> Slices:
    """Returns where in the mesh the devices are that run a module.

    Args:
        partitions: how many partitions the module has.
        networks: number of the slice, from 0, of each position in the flattened mesh; None for one network.
        ids: the device's id of each position. Where these are not given, or are none of MegaScale's, the devices of
            a slice count as numbered in the order of their ids, or as they are in the mesh.

    Example:

    >>> slices_of(2, [0, 1, 0, 1], None).partitions
    ((0, 2), (1, 3))
    >>> slices_of(4, [0, 1, 0, 1], None).partitions
    ((0, 1, 2, 3),)
    """
    together = Slices((tuple(range(partitions)),))
    if networks is None:
        return together
    positions: dict[int, list[int]] = {}
    for position, network in enumerate(networks):
        positions.setdefault(network, []).append(position)
    if len(positions) == 1 or any(len(each) != partitions for each in positions.values()):
        return together
    known = range(len(networks)) if ids is None else ids
    if min(known) >= _IDS_OF_A_SLICE:
        places = {number: position for position, number in enumerate(known)}
    else:
        places = {
            _IDS_OF_A_SLICE * (network + 1) + number: position
            for network, each in positions.items()
            for number, position in enumerate(sorted(each, key=known.__getitem__))
        }
    return Slices(tuple(map(tuple, positions.values())), places)


def transfer(instruction: Instruction) -> tuple[str, Groups] | None:
    """Returns what a `send` to other slices is part of: the kind of collective and its groups or pairs of ids.

    None for anything else, and for what goes along with a ragged exchange to say which rows go where.

    Args:
        instruction: any instruction.
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
    """Returns the groups, or pairs of source and target, of the ids of devices that a `_xla_megascale_target` names.

    Example:

    >>> parse_target("{1,2}x{0,2:3}")
    ((100000, 200000), (100002, 200002), (100003, 200003))
    >>> parse_target("{{100000->200001},{200001->100000}}")
    ((100000, 200001), (200001, 100000))
    """
    slices, product, devices = text.partition("x")
    if product:
        return tuple(
            tuple(_IDS_OF_A_SLICE * slice_number + device for slice_number in _counted(slices))
            for device in _counted(devices)
        )
    return tuple(numbers(group) for group in re.findall(r"\{([\d,>\- ]+)\}", text))


def _counted(text: str) -> Iterator[int]:
    """The numbers of a list of numbers and ranges, like `{0,2:3}`."""
    for first, last in re.findall(r"(\d+)(?::(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)
