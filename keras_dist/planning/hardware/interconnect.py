"""How long a collective occupies the links within slices or hosts and the network between them, and its latency."""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator

import numpy as np

from keras_dist.mesh.topology import Torus, coordinates_of, is_closed, networks_of
from keras_dist.planning.hardware.figures import Hardware
from keras_dist.planning.hlo.replica_groups import Groups

# What a collective takes to start. TPUs: an all-gather over 3 hops of about 1 us takes 8 us, of which its bytes take 2,
# and the curve of a ring of 16 chips (8 hops) begins at 14 us: Austin et al., "How to Scale Your Model" (2025),
# "Sharded Matrices and How to Multiply Them", pop quiz 2, and "How to Think About GPUs", appendix B. GPUs: NCCL's ring
# for large messages, `ncclTunerConstantsDefaults` in https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc.
_TORUS_START_SECONDS, _NCCL_START_SECONDS = 4e-6, 8.4e-6


class Interconnect:
    """Seconds per wire byte of collectives, for devices in the shape of a mesh.

    `wire_bytes` are those that one device sends in a ring algorithm, so its bandwidth within its group bounds the time:

    * TPUs of a slice: each torus dim along which the chips of a group differ provides one link, or two if the group
      closes a ring. Groups that run over the same link (also those of two cores on one chip) share it.
    * GPUs of a host: all NVLinks, because a switch connects every GPU to every other; PCIe where there are none.
    * A group that crosses slices or hosts: the slower of the links and the network. The network carries what one device
      can send, times the members of the group in one slice or host.
    * All-to-all: bytes travel further than to a neighbour. On a torus the links across the middle of each dim are the
      bottleneck; on the network it is what each device sends to other slices or hosts.
    * Collective-permute: each pair uses the shortest paths, and the busiest link is the bottleneck.

    Source: Austin et al., "How to Scale Your Model" (2025): "Sharded Matrices and How to Multiply Them" (rings, lines,
    several dims, all-to-all) and "How to Think About GPUs" (hosts), https://jax-ml.github.io/scaling-book; bus
    bandwidth: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """

    def __init__(self, hardware: Hardware, devices: np.ndarray):
        flat = devices.ravel().tolist()
        self._hardware, self._networks = hardware, networks_of(flat)
        is_torus = coordinates_of(flat[0]) is not None
        self._torus = _TorusLinks(Torus(flat, self._networks), self._networks) if is_torus else None
        self.seconds_per_byte = functools.cache(self._seconds_per_byte)
        self.latency = functools.cache(self._latency)
        self.links = functools.cache(self._links_of)

    def _by_network(self, kind: str, groups: Groups) -> list[list[np.ndarray]]:
        """The members of each group in each slice or host. Groups of () are one group of all devices."""
        size = len(self._networks)
        arrays = [np.array(group, int) for group in groups if len(group)] or [np.arange(size)]
        assert all(array.min() >= 0 and array.max() < size for array in arrays), (groups, size)
        if kind == "collective-permute":
            arrays = [pair for pair in arrays if pair[0] != pair[1]]
        networks = [self._networks[array] for array in arrays]
        return [[group[of == each] for each in np.unique(of)] for group, of in zip(arrays, networks, strict=True)]

    def _latency(self, kind: str, groups: Groups) -> float | None:
        """Returns the seconds that a collective takes however few bytes it sends; None if unknown.

        A byte passes one link after another, each with the latency of a hop:

        * TPUs: along each dim of the torus, half the length of a ring, or all of a line. An all-reduce scatters and
          gathers, so it takes twice that. For a ring of 4 chips that is 2 hops, for an all-reduce 4.
        * GPUs: a ring passes all GPUs of a host.
        * Slices or hosts: a tree, with one hop of the network for each doubling of their number.

        To these, each collective adds the time that it takes to start.
        """
        link_hops, network_hops = 0, 0
        for parts in self._by_network(kind, groups):
            network_hops = max(network_hops, (len(parts) - 1).bit_length())
            for part in parts:
                hops = len(part) - 1 if self._torus is None else self._torus.hops(kind, part)
                link_hops = max(link_hops, hops)
        passes = 2 if kind == "all-reduce" else 1
        link = seconds_for(passes * link_hops, self._hardware.link_latency_seconds)
        network = seconds_for(passes * network_hops, self._hardware.network_latency_seconds)
        if link is None or network is None:
            return None
        start = _NCCL_START_SECONDS if self._torus is None else _TORUS_START_SECONDS
        return link + network + (start if link_hops + network_hops else 0.0)

    def _links_of(self, kind: str, groups: Groups) -> frozenset[Hashable]:
        """Returns what a collective occupies: links of a chip, as (dim, direction), or all NVLinks; and the network."""
        split = self._by_network(kind, groups)
        links: set[Hashable] = {"network"} if any(len(parts) > 1 for parts in split) else set()
        inside = [part for parts in split for part in parts if len(part) > 1]
        if self._torus is not None:
            links |= self._torus.used(kind, inside)
        elif inside:
            links.add("links")
        return frozenset(links)

    def _seconds_per_byte(self, kind: str, groups: Groups) -> tuple[bool, float | None]:
        """Returns (crosses the network, seconds per wire byte or None)."""
        split = self._by_network(kind, groups)
        inside = [part for parts in split for part in parts if len(part) > 1]
        members = min((len(part) for parts in split if len(parts) > 1 for part in parts), default=0)
        link_bytes, network_bytes = self._link_bytes(kind, inside), 1 / max(members, 1)
        if kind.endswith("all-to-all"):
            # Each device sends the same amount to each of the others, and all of that together is its wire bytes.
            others = max(sum(map(len, parts)) for parts in split) - 1
            link_bytes /= others
            network_bytes = (others + 1 - members) / others
        link_seconds = seconds_for(link_bytes, inverse(self._hardware.link_bytes_per_second))
        if not members:
            return False, link_seconds
        network_seconds = seconds_for(network_bytes, inverse(self._hardware.network_bytes_per_second))
        if link_seconds is None or network_seconds is None:
            return True, None
        return True, max(link_seconds, network_seconds)

    def _link_bytes(self, kind: str, groups: list[np.ndarray]) -> float:
        """Bytes that the busiest link of a slice or host carries in one direction, if each device sends one byte.

        In an all-to-all it sends one byte to each of the others.
        """
        if self._torus is None:  # a GPU sends over all of its links at once
            sent = [len(group) - 1 if kind.endswith("all-to-all") else 1 for group in groups]
            return max(sent, default=0) / max(self._hardware.links, 1)
        if kind.endswith("all-to-all"):
            return self._torus.exchange(groups)
        return self._torus.permute(groups) if kind == "collective-permute" else self._torus.ring(groups)


class _TorusLinks:
    """Links of TPUs in slices: each chip has some to its neighbours along the dims of a torus.

    Each method returns the bytes that the busiest link carries in one direction.
    """

    def __init__(self, torus: Torus, slices: np.ndarray):
        self._chips = torus.coordinates[:, :3]
        self._rings = torus.rings[:, :3]
        self._slices = slices

    def ring(self, groups: list[np.ndarray]) -> float:
        """Each device sends one byte to the next of its group, spread over all dims and directions of the group."""
        sharing = self._groups_on_busiest_link(groups)
        links = [sum((2 if closed else 1) / sharing[dim] for dim, _, closed in self._dims(group)) for group in groups]
        return max((1 / each for each in links if each), default=0.0)  # two cores of one chip need no link

    def exchange(self, groups: list[np.ndarray]) -> float:
        """Each device sends one byte to each of the others of its group.

        Example: of n devices on c chips, n L / c are on a line of L chips. The a chips before the middle of the line
        hold n a / c of them, and each sends n (L - a) / L bytes past the middle, over one link or, on a ring, two.
        For 4 chips in a line (n = c = L = 4, a = 2) that is 2 x 2 = 4 bytes over the middle link.
        """
        sharing = self._groups_on_busiest_link(groups)
        busiest = 0.0
        for group in groups:
            chips = len(np.unique(self._chips[group], axis=0))
            for dim, places, closed in self._dims(group):
                length, before = len(places), len(places) // 2
                crossing = len(group) / chips * before * len(group) * (length - before) / length
                busiest = max(busiest, crossing * sharing[dim] / (2 if closed else 1))
        return busiest

    def permute(self, pairs: list[np.ndarray]) -> float:
        """The first device of each pair sends one byte to the second, over the shortest paths.

        The byte is split into as many parts as there are dims along which the two differ. Each part starts with another
        dim. Where both directions around a ring are equally long, half takes each.
        """
        return max(self._load(pairs).values(), default=0.0)

    def used(self, kind: str, groups: list[np.ndarray]) -> set[Hashable]:
        """The links that leave a chip and that a collective uses, as (dim, direction).

        Devices do the same, so one that takes part stands for all of them. A permutation may use one direction only:
        on a ring, passing on to the next and to the previous device do not disturb each other.
        """
        if kind == "collective-permute" and groups:
            first = groups[0][0]
            leaving = (self._slices[first], *self._chips[first].tolist())
            return {(dim, step) for slice_, dim, step, *chip in self._load(groups) if (slice_, *chip) == leaving}
        return {(dim, step) for group in groups for dim, _, _ in self._dims(group) for step in (1, -1)}

    def _load(self, pairs: list[np.ndarray]) -> dict[tuple, float]:
        """Bytes on each link, as (slice, dim, direction, *chip that it leaves), if each pair sends one."""
        load: dict[tuple, float] = defaultdict(float)
        for source, target in pairs:
            start, end = self._chips[[source, target]].tolist()
            rings = self._rings[source].tolist()
            dims = [dim for dim in range(3) if start[dim] != end[dim]]
            for first in range(len(dims)):
                at = list(start)
                for dim in dims[first:] + dims[:first]:
                    paths = _shortest_paths(start[dim], end[dim], rings[dim])
                    for step, places in paths:
                        for place in places:
                            link = (self._slices[source], dim, step, *at[:dim], place, *at[dim + 1 :])
                            load[link] += 1 / len(dims) / len(paths)
                    at[dim] = end[dim]
        return load

    def hops(self, kind: str, group: np.ndarray) -> int:
        """The links that a byte passes one after another, from one device of a group to the farthest."""
        if kind == "collective-permute" and len(group) == 2:
            start, end = self._chips[group].tolist()
            rings = self._rings[group[0]].tolist()
            return sum(len(_shortest_paths(*dim)[0][1]) for dim in zip(start, end, rings, strict=True))
        return sum(
            int(self._rings[group[0], dim]) // 2 if closed else int(places.max() - places.min())
            for dim, places, closed in self._dims(group)
        )

    def _dims(self, group: np.ndarray) -> Iterator[tuple[int, np.ndarray, bool]]:
        """The dims along which the chips of a group differ, their places there, and whether these close a ring."""
        for dim in range(3):
            places = np.unique(self._chips[group, dim])
            if len(places) > 1:
                yield dim, places, is_closed(places, int(self._rings[group[0], dim]))

    def _groups_on_busiest_link(self, groups: list[np.ndarray]) -> list[int]:
        """How many groups share the busiest link along each dim: several if they interleave or share chips."""
        counts: list[Counter] = [Counter(), Counter(), Counter()]
        for group in groups:
            for dim, _, closed in self._dims(group):
                lines = defaultdict(list)
                for place in self._chips[group].tolist():
                    at = place.pop(dim)
                    lines[self._slices[group[0]], *place].append(at)
                for line, at in lines.items():
                    links = range(int(self._rings[group[0], dim])) if closed else range(min(at), max(at))
                    counts[dim].update((line, link) for link in links)
        return [max(count.values(), default=1) for count in counts]


def _shortest_paths(start: int, end: int, ring: int) -> list[tuple[int, list[float]]]:
    """The shortest paths along one dim, each as its direction and the places that it leaves."""
    length = ring or math.inf  # a line is a ring that does not close
    hops = {1: (end - start) % length, -1: (start - end) % length}
    shortest = min(hops.values())
    return [
        (step, [(start + step * done) % length for done in range(int(shortest))])
        for step, count in hops.items()
        if count == shortest
    ]


def inverse(rate: float | None) -> float | None:
    """Returns seconds per unit for units per second; None if unknown."""
    return None if rate is None else 1 / rate


def seconds_for(amount: float, seconds_per_unit: float | None) -> float | None:
    """Returns the seconds that an amount of work takes: 0 for no work even if the rate is unknown."""
    return 0.0 if amount == 0 else None if seconds_per_unit is None else amount * seconds_per_unit
