"""Where `auto` may place a model: a target, attached devices, or fewer of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras

from keras_dist.mesh.device_mesh import as_auto_mesh
from keras_dist.mesh.devices import as_device_array, available_devices, is_attached, list_devices, to_jax_devices
from keras_dist.mesh.topology import networks_of
from keras_dist.planning.candidates import AXES
from keras_dist.planning.compile_target import Target
from keras_dist.planning.compile_target import target as target_of
from keras_dist.planning.hardware import hardware
from keras_dist.planning.hardware_figures import Hardware


@dataclass(frozen=True)
class Place:
    """Devices to choose for.

    Attributes:
        devices: the devices, or a target.
        hardware: their hardware; None if it is not registered.
        keep: sizes of mesh axes that are fixed.
    """

    devices: Sequence[Any]
    hardware: Hardware | None
    keep: Mapping[str, int]

    @property
    def per_network(self) -> int:
        """The number of devices of a slice or host, or a divisor of it if they differ."""
        networks = networks_of(list(self.devices)).tolist()
        return math.gcd(*(networks.count(network) for network in set(networks)))

    @property
    def num_devices_argument(self) -> str:
        """The argument of `create_device_mesh` for these devices in Python code: empty if they are all of a machine."""
        first, count = self.devices[0], len(self.devices)
        return f", devices={count}" if is_attached(first) and available_devices(first) != count else ""

    def __str__(self) -> str:
        if isinstance(self.devices, Target):
            slices = self.devices.slices
            return self.devices.name + (f" x {slices} slices" if slices > 1 else "")
        kind = self.devices[0].device_kind if self.hardware is None else self.hardware.name
        return f"{len(self.devices)} x {kind}"

    def with_fewer_devices(self) -> Iterator["Place"]:
        """Yields the same hardware with 1, 2, 4, ... times the devices of the kept axes, at last all of it."""
        count, total = math.prod(self.keep.values()), len(self.devices)
        while count < total:
            devices = self.devices
            smaller = _smaller_target(devices, count) if isinstance(devices, Target) else devices[:count]
            if smaller is not None:
                yield Place(smaller, self.hardware, self.keep)
            count *= 2
        yield self


def place_of(target: Any, keep: Mapping[str, int] | None) -> Place:
    """Returns the place that `target` and `keep` of `auto` stand for. Raises a ValueError with the fix."""
    kept = dict(keep or {})
    if isinstance(target, str):
        target = target_of(target)
    if isinstance(target, (keras.distribution.DeviceMesh, jax.sharding.Mesh)):
        mesh = as_auto_mesh(target)
        kept, target = {**mesh.axis_sizes, **kept}, mesh.backend_mesh.devices
    for axis, size in kept.items():
        if axis not in AXES:
            raise ValueError(
                f"Cannot keep axis {axis!r}: the axes of candidates are {', '.join(map(repr, AXES))}. Rename it, or "
                "pass the devices in place of the mesh."
            )
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"The size of axis {axis!r} must be a positive integer, but got {size!r}.")
    if isinstance(target, Target):
        devices, entry = target, target.hardware
    else:
        given = list_devices() if target is None else as_device_array(target).ravel().tolist()
        if not given:
            raise ValueError("The list of devices is empty. Leave `target` out to use all devices.")
        devices = to_jax_devices(given)
        # A CPU device has a share of this machine's memory, which only a target knows.
        entry = target_of("cpu:1").hardware if devices[0].platform == "cpu" else hardware.of_device(devices[0])
    product = math.prod(kept.values())
    if len(devices) % product:
        axes = ", ".join(f"{axis}:{size}" for axis, size in kept.items())
        raise ValueError(
            f"Cannot keep {axes}: {product} does not divide the number of devices, {len(devices)}. Choose sizes whose "
            f"product divides {len(devices)}."
        )
    return Place(devices, entry, kept)


def _smaller_target(target: Target, count: int) -> Target | None:
    """Returns a target of the same hardware with fewer devices, None if there is none with `count` of them.

    Example: those of "h100:2x8" are "h100:1", "h100:2", "h100:4" and "h100:8"; those of two slices of "v5e:4x4" are
    "v5e:1" to "v5e:16".
    """
    platform, name = target.hardware.platform, target.hardware.name
    networks = len(set(networks_of(list(target)).tolist()))
    per_network = len(target) // networks
    if count >= per_network:
        fewer = count // per_network
        if count % per_network:
            return None
        if platform == "tpu":
            return target_of(target.name, slices=fewer)
        return target_of(f"{name}:{fewer}x{per_network}" if fewer > 1 else f"{name}:{count}")
    if platform != "tpu":
        return target_of(f"{name}:{count}")
    chips = math.prod(map(int, target.name.partition(":")[2].split("x")))
    per_chip = per_network // chips
    if count % per_chip or (count // per_chip) & (count // per_chip - 1):
        return None
    return target_of(f"{name}:{count // per_chip}")
