"""Mock devices: descriptions of TPUs and GPUs, to design and test meshes for clusters that are not attached."""

import itertools
import math
import re
from dataclasses import dataclass

from keras_dist.mesh.tpu_generations import TPU_GENERATIONS

_HOST_SIDE = 2  # chips of a TPU host along x and y


@dataclass(frozen=True, eq=False)
class MockDevice:
    """A mock device with the attributes of a `jax.Device` that describe its position; equal only to itself."""

    id: int
    platform: str  # "tpu" or "gpu"
    device_kind: str  # JAX's name for the device, such as "TPU v5 lite"
    process_index: int  # each host runs one process
    slice_index: int = 0  # a slice is TPU chips joined by ICI, or the GPUs of one host
    coords: tuple[int, int, int] | None = None  # x, y and z of its chip on the torus of its slice; None for GPUs
    core_on_chip: int = 0


def mock_tpus(topology: str, slices: int = 1) -> list[MockDevice]:
    """Returns mock devices of TPU slices in JAX's order: host by host, each with 2 x 2 chips.

    Args:
        topology: The generation and the shape of a slice in chips, such as `"v5e:16x16"` or `"v5p:4x4x4"`. Generations
            are v2, v3, v4, v5e, v5p, v6e and tpu7x.
        slices: The number of slices, which the data center network joins.

    Returns:
        The devices: one per core for v2, v3 and tpu7x, else one per chip.

    Raises:
        ValueError: If `topology` has another form, the generation is unknown, or `slices` is below 1.

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
        first = 100_000 * (number + 1) if slices > 1 else 0  # JAX's ids of the devices of several slices
        chip = (cz * y + cy) * x + cx
        devices.append(MockDevice(first + chip * cores + core, "tpu", kind, host, number, (cx, cy, cz), core))
    return sorted(devices, key=lambda device: device.process_index)


def mock_gpus(hosts: int, gpus_per_host: int = 8) -> list[MockDevice]:
    """Returns mock devices of hosts of GPUs, with NVLink within a host, and one process per host.

    Args:
        hosts: The number of hosts, which a network joins.
        gpus_per_host: The number of GPUs per host.

    Returns:
        The devices, host by host.

    Raises:
        ValueError: If a number is below 1.

    Example:

    >>> [device.process_index for device in mock_gpus(hosts=2, gpus_per_host=2)]
    [0, 0, 1, 1]
    """
    if not all(isinstance(count, int) and count > 0 for count in (hosts, gpus_per_host)):
        raise ValueError(
            f"hosts={hosts!r} and gpus_per_host={gpus_per_host!r} must be integers of at least 1. Write, for example, "
            "mock_gpus(16, 8)."
        )
    return [
        MockDevice(number, "gpu", "mock GPU", number // gpus_per_host, number // gpus_per_host)
        for number in range(hosts * gpus_per_host)
    ]
