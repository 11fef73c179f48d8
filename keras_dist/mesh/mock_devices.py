"""Devices that are described and not attached: to see and to test how a mesh lies on a cluster that is not there."""

import itertools
import math
import re
from dataclasses import dataclass

from keras_dist.mesh.tpu_generations import TPU_GENERATIONS

_HOST_SIDE = 2  # chips of a TPU host along x and along y


@dataclass(frozen=True, eq=False)
class MockDevice:
    """The description of a device, with the attributes of a `jax.Device` that say where it is; equal only to itself.

    Attributes:
        id: its number.
        platform: `"tpu"` or `"gpu"`.
        device_kind: what JAX calls it, such as `"TPU v5 lite"`.
        process_index: the number of the process, and so of the host, that it belongs to.
        slice_index: the number of its slice: TPU chips joined by ICI, or the GPUs of one host.
        coords: x, y and z of its chip on the torus of its slice; None for GPUs.
        core_on_chip: the number of the core.
    """

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int = 0
    coords: tuple[int, int, int] | None = None
    core_on_chip: int = 0


def mock_tpus(topology: str, slices: int = 1) -> list[MockDevice]:
    """Returns the devices of TPU slices as JAX would list them: host after host, each with a square of 2 x 2 chips.

    Args:
        topology: generation and shape of a slice in chips, such as `"v5e:16x16"` or `"v5p:4x4x4"`. Generations are v2,
            v3, v4, v5e, v5p, v6e and tpu7x.
        slices: how many slices, joined by the data center network.

    Returns:
        The devices: one for each core on v2, v3 and tpu7x, else one for each chip.

    Raises:
        ValueError: text of another form, a generation that is not known, or no slice.

    Example:

    >>> devices = mock_tpus("v5e:4x4", slices=2)
    >>> len(devices), devices[2].coords, devices[-1].process_index
    (32, (0, 1, 0), 7)
    """
    match = re.fullmatch(r"(\w+):([1-9]\d{0,3}(?:x[1-9]\d{0,3}){1,2})", topology) if isinstance(topology, str) else None
    if match is None or match[1] not in TPU_GENERATIONS or not isinstance(slices, int) or slices < 1:
        raise ValueError(
            f"Unknown TPU topology {topology!r} with slices={slices!r}. Write a generation "
            f"({', '.join(TPU_GENERATIONS)}) and a shape of 2 or 3 sides, for example 'v5e:16x16' or 'v5p:4x4x4', and "
            "at least 1 slice."
        )
    generation = TPU_GENERATIONS[match[1]]
    kind, cores = generation.device_kind, generation.devices_per_chip
    x, y, z = [*map(int, match[2].split("x")), 1][:3]
    hosts_x, hosts_y = math.ceil(x / _HOST_SIDE), math.ceil(y / _HOST_SIDE)
    devices = []
    for number, cz, cy, cx, core in itertools.product(*map(range, (slices, z, y, x, cores))):
        host = ((number * z + cz) * hosts_y + cy // _HOST_SIDE) * hosts_x + cx // _HOST_SIDE
        first = 100_000 * (number + 1) if slices > 1 else 0  # as JAX numbers the devices of several slices
        chip = (cz * y + cy) * x + cx
        devices.append(MockDevice(first + chip * cores + core, "tpu", kind, host, number, (cx, cy, cz), core))
    return sorted(devices, key=lambda device: device.process_index)


def mock_gpus(hosts: int, gpus_per_host: int = 8) -> list[MockDevice]:
    """Returns the devices of hosts of GPUs, each joined by NVLink, with one process on each host.

    Args:
        hosts: how many hosts, joined by a network.
        gpus_per_host: how many GPUs on each.

    Returns:
        The devices, host after host.

    Raises:
        ValueError: no host or no GPU.

    Example:

    >>> [device.process_index for device in mock_gpus(hosts=2, gpus_per_host=2)]
    [0, 0, 1, 1]
    """
    if not all(isinstance(count, int) and count > 0 for count in (hosts, gpus_per_host)):
        raise ValueError(
            "There is at least one host with at least one GPU. Received: "
            f"hosts={hosts!r}, gpus_per_host={gpus_per_host!r}. Write, for example, mock_gpus(16, 8)."
        )
    return [
        MockDevice(number, "gpu", "mock GPU", number // gpus_per_host, number // gpus_per_host)
        for number in range(hosts * gpus_per_host)
    ]
