"""`roofline`: the least time that a step can take on its hardware, and whether compute, memory or links bound it."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keras_dist.mesh.topology import Torus, coordinates_of, is_closed, networks_of
from keras_dist.planning.hardware import DTYPES, Hardware

if TYPE_CHECKING:
    from keras_dist.planning.hlo.module_costs import Collective

Groups = Sequence[Sequence[int]]  # flat positions in the mesh


@dataclass(frozen=True)
class Roofline:
    """The least time that one device needs for each part of a step, seconds; None where a figure is not known.

    Attributes:
        compute_seconds: matrix multiplications and convolutions, at the peak of their dtypes.
        memory_seconds: reads and writes of device memory.
        ici_seconds: collectives inside of a TPU slice, or among the GPUs of a host.
        dcn_seconds: collectives that cross the network between slices or hosts.

    Example:

    >>> Roofline(compute_seconds=0.5, memory_seconds=0.25, ici_seconds=0.125, dcn_seconds=None).bound
    'compute'
    """

    compute_seconds: float | None
    memory_seconds: float | None
    ici_seconds: float | None
    dcn_seconds: float | None

    @property
    def bound(self) -> str | None:
        """What takes longest: `"compute"`, `"memory"`, `"ICI"` or `"DCN"`; None where nothing known takes time."""
        known = self._known()
        longest = max(known, key=lambda part: known[part], default=None)
        return longest if longest is not None and known[longest] > 0 else None

    @property
    def seconds(self) -> float | None:
        """The time of a step whose parts all overlap: that of the longest; None where none is known."""
        return max(self._known().values(), default=None)

    @property
    def serial_seconds(self) -> float | None:
        """The time of a step whose parts follow each other: the sum of the known ones; None where none is known."""
        known = self._known()
        return sum(known.values()) if known else None

    def _known(self) -> dict[str, float]:
        parts = {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "ICI": self.ici_seconds,
            "DCN": self.dcn_seconds,
        }
        known = {part: seconds for part, seconds in parts.items() if seconds is not None}
        # Nothing to do in one part says nothing where the others are not known.
        return known if any(known.values()) or len(known) == len(parts) else {}


def roofline(
    hardware: Hardware | None,
    devices: np.ndarray,
    flops_by_dtype: Mapping[str, float],
    memory_bytes: float,
    collectives: Iterable["Collective"],
) -> Roofline:
    """Returns the least time that a step can take on one of its devices.

    * Compute: for each dtype FLOP / peak. Float16 counts as bfloat16. A dtype without a known peak runs at that of the
      next wider one that is known, one wider than float32 at float32's.
    * Memory: bytes / bandwidth.
    * Collectives: wire bytes of one device / what it can send in its group, times how often it runs; the group that is
      slowest counts. `wire_bytes` are those of rings, so that what a device sends bounds the time.

      - TPUs of a slice: each dim of the torus in which the chips of a group differ gives one link, and two where they
        close to a ring. Links that several groups run over, as with devices that are two to a chip, are shared.
      - GPUs of a host: all NVLinks, since a switch joins all with all.
      - Groups that cross slices or hosts: the slower of the above and the network, which gives what one device can
        send there, times the members of the group in one slice or host. They count as DCN as a whole.
      - All-to-all: bytes go further than to a neighbour. On a torus the links across the middle of each dim bound it;
        on the network what each device itself sends to others.
      - Collective-permute: each pair takes the shortest ways, and the busiest link bounds it.

    Collectives follow one another. Nothing here knows of latency, so small ones take longer.

    Source: Austin et al., "How to Scale Your Model" (2025): "All About Rooflines", "Sharded Matrices and How to
    Multiply Them" (rings, lines, several dims, all-to-all) and "How to Think About GPUs" (hosts), all at
    https://jax-ml.github.io/scaling-book; NCCL tests, "Performance reported by NCCL tests" (bus bandwidth),
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.

    Args:
        hardware: the figures of one device; None where none is known.
        devices: the devices in the shape of the mesh.
        flops_by_dtype: FLOP of one device in a step, by the HLO element type of what is multiplied, such as `"bf16"`.
        memory_bytes: bytes that one device reads from and writes to its memory in a step.
        collectives: those of a step; of each `kind`, `wire_bytes`, `count` and `groups` are read.

    Returns:
        The seconds of each part.

    Raises:
        TypeError: `hardware` is no `Hardware`.
        ValueError: work that is negative or no number, or a group of positions that the mesh does not have.

    Example:

    >>> from keras_dist import mock_tpus
    >>> from keras_dist.planning.hardware import hardware
    >>> least = roofline(hardware["v5e"], np.array(mock_tpus("v5e:2x2")), {"bf16": 197e12}, 819e9 / 2, [])
    >>> least.seconds, least.bound
    (1.0, 'compute')
    """
    hardware = Hardware("unknown", "cpu", "unknown") if hardware is None else hardware
    if not isinstance(hardware, Hardware):
        raise TypeError(
            f"A roofline is that of a Hardware. Received: {hardware!r}. Take keras_dist.target(name).hardware."
        )
    for what, amount in [("memory_bytes", memory_bytes), *((f"FLOP of {d}", f) for d, f in flops_by_dtype.items())]:
        if not (math.isfinite(amount) and amount >= 0):
            raise ValueError(f"Work is a finite number, 0 or more. Received: {what} = {amount!r}. Count it per device.")
    links = _Links(hardware, np.asarray(devices))
    seconds: dict[bool, float | None] = {False: 0.0, True: 0.0}
    for collective in collectives:
        if collective.wire_bytes > 0:
            crosses, seconds_per_byte = links.seconds_per_byte(collective.kind, collective.groups)
            time = _over(collective.count * collective.wire_bytes, seconds_per_byte)
            so_far = seconds[crosses]
            seconds[crosses] = None if time is None or so_far is None else so_far + time
    return Roofline(
        compute_seconds=_compute_seconds(hardware, flops_by_dtype),
        memory_seconds=_over(memory_bytes, _inverse(hardware.memory_bytes_per_second)),
        ici_seconds=seconds[False],
        dcn_seconds=seconds[True],
    )


def _compute_seconds(hardware: Hardware, flops_by_dtype: Mapping[str, float]) -> float | None:
    seconds = 0.0
    for element_type, flops in flops_by_dtype.items():
        if flops:
            peak = _peak(hardware, element_type)
            if peak is None:
                return None
            seconds += flops / peak
    return seconds


def _peak(hardware: Hardware, element_type: str) -> float | None:
    """FLOP per second of the dtype that an HLO element type runs as, or of the next wider one that is known."""
    if element_type.startswith(("f8e", "f6e", "f4e")):
        wider = ("float8", "bfloat16", "float32")
    elif element_type in ("s8", "u8", "s4", "u4", "s2", "u2", "s1", "u1", "pred"):
        wider = ("int8", "bfloat16", "float32")
    elif element_type in ("bf16", "f16"):
        wider = ("bfloat16", "float32")
    else:
        wider = DTYPES[:1]
    return next((hardware.flops_per_second[dtype] for dtype in wider if dtype in hardware.flops_per_second), None)


class _Links:
    """How long collectives take over the links and the network between the devices of a mesh."""

    def __init__(self, hardware: Hardware, devices: np.ndarray):
        flat = devices.ravel().tolist()
        self.size = len(flat)
        self.networks = networks_of(flat)
        on_torus = coordinates_of(flat[0]) is not None
        self.inside = (
            _TorusLinks(Torus(flat, self.networks), self.networks) if on_torus else _SwitchLinks(hardware.links)
        )
        self.link = _inverse(hardware.link_bytes_per_second)
        self.network = _inverse(hardware.network_bytes_per_second)
        self.known: dict[tuple, tuple[bool, float | None]] = {}

    def seconds_per_byte(self, kind: str, groups: Groups) -> tuple[bool, float | None]:
        """Returns whether a collective crosses the network, and its seconds for each wire byte, None if not known."""
        key = (kind, tuple(map(tuple, groups)))
        if key not in self.known:
            listed = [np.array(group, int) for group in groups if len(group)] or [np.arange(self.size)]
            if any(group.min() < 0 or group.max() >= self.size for group in listed):
                raise ValueError(
                    f"The groups of a collective hold positions in the mesh. Received: a {kind} over {groups}, but the "
                    f"mesh has {self.size} devices. Pass the devices of the mesh that the program was compiled for."
                )
            if kind == "collective-permute":
                listed = [pair for pair in listed if pair[0] != pair[1]]
            parts = [self._parts(group) for group in listed]
            inside = [part for of_group in parts for part in of_group if len(part) > 1]
            members = min((len(part) for of_group in parts if len(of_group) > 1 for part in of_group), default=0)
            if kind.endswith("all-to-all"):
                # A device sends the same to each of the others, of which these are so many for each wire byte.
                others = max(map(len, listed)) - 1
                over_links = self.inside.exchange(inside) / others
                over_network = (others + 1 - members) / others
            else:
                of_kind = self.inside.permute if kind == "collective-permute" else self.inside.ring
                over_links, over_network = of_kind(inside), 1 / max(members, 1)
            seconds = _over(over_links, self.link)
            crosses = members > 0
            self.known[key] = crosses, _max(seconds, _over(over_network, self.network)) if crosses else seconds
        return self.known[key]

    def _parts(self, group: np.ndarray) -> list[np.ndarray]:
        networks = self.networks[group]
        return [group[networks == number] for number in np.unique(networks)]


class _SwitchLinks:
    """GPUs of a host: a switch joins all with all, and a GPU sends over all of its links at once.

    Each method returns the bytes that the busiest link carries in one direction.
    """

    def __init__(self, links: int):
        self.links = max(links, 1)

    def ring(self, parts: list[np.ndarray]) -> float:
        """Where each device sends one byte to the next of its part."""
        return 1 / self.links if parts else 0.0

    def exchange(self, parts: list[np.ndarray]) -> float:
        """Where each device sends one byte to each of the others of its part."""
        return max((len(part) - 1 for part in parts), default=0) / self.links

    def permute(self, pairs: list[np.ndarray]) -> float:
        """Where the first of each pair sends one byte to the second."""
        return self.ring(pairs)


class _TorusLinks:
    """TPUs of slices: each chip has links to its neighbours along the dims of a torus.

    Each method returns the bytes that the busiest link carries in one direction.
    """

    def __init__(self, torus: Torus, slices: np.ndarray):
        self.chips = torus.coordinates[:, :3]
        self.rings = torus.rings[:, :3]
        self.slices = slices

    def ring(self, parts: list[np.ndarray]) -> float:
        """Where each device sends one byte to the next of its part, spread over all dims and directions of the part."""
        runs = self._runs_on_busiest_link(parts)
        busiest = 0.0
        for part in parts:
            ways = sum((2 if closed else 1) / runs[dim] for dim, _, closed in self._dims(part))
            busiest = max(busiest, 1 / ways if ways else 0.0)  # the cores of one chip need no link
        return busiest

    def exchange(self, parts: list[np.ndarray]) -> float:
        """Where each device sends one byte to each of the others of its part.

        Of n devices on c chips, those on a line of length L are n L / c. Where a places of it lie before its middle,
        they send n (L - a) / L bytes each past it, over one link or, on a ring, two.
        """
        runs = self._runs_on_busiest_link(parts)
        busiest = 0.0
        for part in parts:
            chips = len(np.unique(self.chips[part], axis=0))
            for dim, places, closed in self._dims(part):
                length, before = len(places), len(places) // 2
                crossing = len(part) / chips * before * len(part) * (length - before) / length
                busiest = max(busiest, crossing * runs[dim] / (2 if closed else 1))
        return busiest

    def permute(self, pairs: list[np.ndarray]) -> float:
        """Where the first of each pair sends one byte to the second, by the shortest ways.

        The byte is cut in as many parts as there are dims in which the two differ, each of which starts with another
        dim; where both ways around a ring are as long, half takes each.
        """
        load: dict[tuple, float] = defaultdict(float)
        for source, to in pairs:
            here, there, rings = self.chips[source].tolist(), self.chips[to].tolist(), self.rings[source].tolist()
            dims = [dim for dim in range(3) if here[dim] != there[dim]]
            for first in range(len(dims)):
                at = list(here)
                for dim in dims[first:] + dims[:first]:
                    ways = _shortest_ways(here[dim], there[dim], rings[dim])
                    for step, places in ways:
                        for place in places:
                            link = (self.slices[source], dim, step, *at[:dim], place, *at[dim + 1 :])
                            load[link] += 1 / len(dims) / len(ways)
                    at[dim] = there[dim]
        return max(load.values(), default=0.0)

    def _dims(self, part: np.ndarray) -> Iterator[tuple[int, np.ndarray, bool]]:
        """The dims in which the chips of a part differ, with their places there and whether these close to a ring."""
        for dim in range(3):
            places = np.unique(self.chips[part, dim])
            if len(places) > 1:
                yield dim, places, is_closed(places, int(self.rings[part[0], dim]))

    def _runs_on_busiest_link(self, parts: list[np.ndarray]) -> list[int]:
        """How many parts run over the busiest link along each dim: several where they interleave, or share chips."""
        runs: list[Counter] = [Counter(), Counter(), Counter()]
        for part in parts:
            for dim, _, closed in self._dims(part):
                lines = defaultdict(list)
                for place in self.chips[part].tolist():
                    at = place.pop(dim)
                    lines[self.slices[part[0]], *place].append(at)
                for line, at in lines.items():
                    links = range(int(self.rings[part[0], dim])) if closed else range(min(at), max(at))
                    runs[dim].update((line, link) for link in links)
        return [max(of_dim.values(), default=1) for of_dim in runs]


def _shortest_ways(here: int, there: int, ring: int) -> list[tuple[int, list[int]]]:
    """The shortest ways along one dim: the direction of each and the places that it leaves."""
    if not ring:
        step = 1 if here < there else -1
        return [(step, list(range(here, there, step)))]
    lengths = {1: (there - here) % ring, -1: (here - there) % ring}
    shortest = min(lengths.values())
    return [
        (step, [(here + step * done) % ring for done in range(length)])
        for step, length in lengths.items()
        if length == shortest
    ]


def _inverse(rate: float | None) -> float | None:
    return None if rate is None else 1 / rate


def _over(amount: float, seconds_for_each: float | None) -> float | None:
    """Seconds for an amount of work: none for no work, even where it is not known how long it takes."""
    return 0.0 if amount == 0 else None if seconds_for_each is None else amount * seconds_for_each


def _max(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else max(first, second)
