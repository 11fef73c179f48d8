"""A lower bound on step time, and what sets it: compute, memory bandwidth, links or network."""

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from keras_dist.planning.costs.forecast import Forecast, compute_seconds
from keras_dist.planning.hardware.figures import Hardware
from keras_dist.planning.hardware.interconnect import Interconnect, inverse, seconds_for
from keras_dist.planning.hlo.collectives import Collective

# What joins the devices of a slice or host, and what joins slices or hosts, by platform.
_LINK_AND_NETWORK = {"tpu": ("ICI", "DCN"), "cpu": ("links", "network")}
_OF_GPUS = "NVLink", "network"
_OF_PCIE_GPUS = "PCIe", "network"


@dataclass(frozen=True)
class Roofline:
    """Lower bounds in seconds on the parts of a step on one device; None where the hardware's figure is unknown.

    Attributes:
        compute_seconds: Matrix multiplications and convolutions at the peak rate of their dtypes.
        memory_seconds: Reads and writes of device memory.
        ici_seconds: Collectives within a TPU slice (ICI) or among the GPUs of a host (NVLink or PCIe).
        dcn_seconds: Collectives that cross slices (DCN) or hosts (network).
        link: Name of the links within a slice or host: `"ICI"` for TPUs, `"NVLink"` or `"PCIe"` for GPUs.
        network: Name of the network between slices or hosts: `"DCN"` for TPUs, `"network"` otherwise.
        forecast: The time that a step probably takes; None if a figure of the hardware that it needs is unknown.
        host_seconds: Copies between the memories of host and device: the next batch, and what is in host memory.

    Example:

    >>> Roofline(compute_seconds=0.5, memory_seconds=0.25, ici_seconds=0.125, dcn_seconds=None).bound
    'compute'
    """

    compute_seconds: float | None
    memory_seconds: float | None
    ici_seconds: float | None
    dcn_seconds: float | None
    link: str = "ICI"
    network: str = "DCN"
    forecast: Forecast | None = None
    host_seconds: float | None = 0.0

    @classmethod
    def unknown(cls, platform: str) -> "Roofline":
        return cls(None, None, None, None, *_LINK_AND_NETWORK.get(platform, _OF_GPUS))

    @property
    def bound(self) -> str | None:
        """What takes longest: a key of `times_by_resource`, such as `"compute"`; None if no known part takes time."""
        known = self._known()
        longest = max(known, key=lambda part: known[part], default=None)
        return longest if longest is not None and known[longest] > 0 else None

    @property
    def seconds(self) -> float | None:
        """Lower bound on step time: all parts overlap, so the longest counts. None if none is known."""
        return max(self._known().values(), default=None)

    @property
    def serial_seconds(self) -> float | None:
        """Lower bound on step time if these parts do not overlap: the sum of those known. None if none is known."""
        known = self._known()
        return sum(known.values()) if known else None

    def _known(self) -> dict[str, float]:
        parts = times_by_resource(self)
        known = {part: seconds for part, seconds in parts.items() if seconds is not None}
        # Zero seconds in some parts bound nothing while other parts are unknown.
        return known if any(known.values()) or len(known) == len(parts) else {}


def times_by_resource(roofline: Roofline) -> dict[str, float | None]:
    """Returns the lower bounds in seconds, by the names that `Roofline.bound` has."""
    return {
        "compute": roofline.compute_seconds,
        "memory": roofline.memory_seconds,
        roofline.link: roofline.ici_seconds,
        roofline.network: roofline.dcn_seconds,
        "host": roofline.host_seconds,
    }


def roofline(
    hardware: Hardware | None,
    devices: np.ndarray,
    flops_by_dtype: Mapping[str, float],
    memory_bytes: float,
    collectives: Iterable[Collective],
    batch_bytes: float = 0.0,
    host_bytes: float = 0.0,
) -> Roofline:
    """Computes a lower bound on step time for one device; `devices` are in the shape of the mesh.

    * Compute: FLOP / peak, summed over HLO element types (`"bf16"`), see `compute_seconds`.
    * Memory: bytes / bandwidth.
    * Collectives: wire bytes of one device / its bandwidth within its group, times the number of runs, for the slowest
      group; `Interconnect` has the details. Those that use a common link run one after another, and the busiest link
      counts. They have no latency, so that small ones take longer in practice.
    * Link to the host: `batch_bytes`, which each device gets, and `host_bytes`, which a step copies from the host and
      back, over the bandwidth of one direction. As the link has two, the sum counts half.

    >>> from keras_dist import mock_tpus
    >>> from keras_dist.planning.hardware.registry import hardware
    >>> bounds = roofline(hardware["v5e"], np.array(mock_tpus("v5e:2x2")), {"bf16": 197e12}, 819e9 / 2, [])
    >>> bounds.seconds, bounds.bound
    (1.0, 'compute')

    Source: Austin et al., "How to Scale Your Model" (2025), "All About Rooflines", https://jax-ml.github.io/scaling-book
    """
    devices = np.asarray(devices)
    platform = devices.flat[0].platform
    hardware = Hardware("unknown", "cpu", "unknown") if hardware is None else hardware
    interconnect = Interconnect(hardware, devices)
    gpu_links = _OF_PCIE_GPUS if hardware.link_bytes_per_second and not hardware.links else _OF_GPUS
    busy: dict[bool, dict[Hashable, float | None]] = {False: {}, True: {}}  # by whether they cross the network
    for collective in collectives:
        if collective.wire_bytes > 0:
            crosses_network, seconds_per_byte = interconnect.seconds_per_byte(collective.kind, collective.groups)
            time = seconds_for(collective.count * collective.wire_bytes, seconds_per_byte)
            links = {"network"} if crosses_network else interconnect.links(collective.kind, collective.groups)
            for link in links:
                so_far = busy[crosses_network].get(link, 0.0)
                busy[crosses_network][link] = None if time is None or so_far is None else so_far + time
    return Roofline(
        compute_seconds(hardware, flops_by_dtype),
        seconds_for(memory_bytes, inverse(hardware.memory_bytes_per_second)),
        _longest(busy[False].values()),
        _longest(busy[True].values()),
        *_LINK_AND_NETWORK.get(platform, gpu_links),
        host_seconds=_host_seconds(hardware, max(batch_bytes, (batch_bytes + host_bytes) / 2)),
    )


def _longest(seconds: Collection[float | None]) -> float | None:
    return None if None in seconds else max(filter(None, seconds), default=0.0)


def _host_seconds(hardware: Hardware, sent: float) -> float | None:
    # The memory of a CPU device is that of the host.
    return 0.0 if hardware.platform == "cpu" else seconds_for(sent, inverse(hardware.host_bytes_per_second))
