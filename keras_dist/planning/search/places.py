"""Where `auto` may place a model: a target, attached devices, or fewer of them."""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras

from keras_dist.mesh.axes import parse_axes, spell_axes
from keras_dist.mesh.device_mesh import DeviceMesh, as_auto_mesh, create_device_mesh
from keras_dist.mesh.devices import as_device_array, device_name, is_attached, list_devices, to_jax_devices
from keras_dist.mesh.topology import networks_of
from keras_dist.planning.hardware.figures import Hardware
from keras_dist.planning.search.candidates import AXES, DATA
from keras_dist.planning.targets.target import Target, hardware_of, require_one_target
from keras_dist.planning.targets.target import target as target_of


@dataclass(frozen=True)
class Place:
    """Devices to choose for, and the meshes on them."""

    devices: Sequence[Any]  # or a target
    hardware: Hardware | None  # None if it is not registered
    keep: Mapping[str, int]  # sizes of mesh axes that are fixed
    arrangement: DeviceMesh | None = None  # the mesh that the user passed, if it is the only one

    @property
    def per_network(self) -> int:
        """The number of devices of a slice or host, or a divisor of it if they differ."""
        networks = networks_of(list(self.devices)).tolist()
        return math.gcd(*(networks.count(network) for network in set(networks)))

    def mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        """Returns the mesh of some axes. A mesh that was passed keeps its devices in their places."""
        passed = self.arrangement
        if passed is None:
            return create_device_mesh(dict(axes), devices=list(self.devices))
        names = [name for name in axes if name in passed.axis_names]
        others = [name for name in passed.axis_names if name not in names]  # of size 1
        order = [passed.axis_names.index(name) for name in (*others, *names)]
        return DeviceMesh(dict(axes), None, passed.backend_mesh.devices.transpose(order).reshape(tuple(axes.values())))

    def mesh_source(self, mesh: DeviceMesh) -> str:
        """Returns Python code that creates such a mesh on the machine that it runs on."""
        axes = ",".join(f"{axis}:{size}" for axis, size in mesh.axis_sizes.items())
        devices = mesh.backend_mesh.devices.ravel().tolist()
        is_here = is_attached(devices[0])
        available = to_jax_devices(list_devices()) if is_here else sorted(devices, key=lambda device: device.id)
        arranged = create_device_mesh(mesh.axis_sizes, devices=available[: len(devices)])
        if devices == arranged.backend_mesh.devices.ravel().tolist():
            count = f", devices={len(devices)}" if len(devices) < len(available) else ""
            return f'kd.create_device_mesh("{axes}"{count})'
        if self.arrangement is not None:
            return f'kd.DeviceMesh("{axes}", devices={list(map(device_name, devices))})'
        named = f", devices={list(map(device_name, self.devices))}" if is_here else ""
        return f'kd.create_device_mesh("{axes}"{named})'

    def __str__(self) -> str:
        if isinstance(self.devices, Target):
            slices = self.devices.slices
            return self.devices.name + (f" x {slices} slices" if slices > 1 else "")
        kind = self.devices[0].device_kind if self.hardware is None else self.hardware.name
        return f"{len(self.devices)} x {kind}"

    def with_fewer_devices(self) -> Iterator["Place"]:
        """Yields the same hardware with 1, 2, 4, ... times the devices of the kept axes, at last all of it."""
        count, devices = math.prod(self.keep.values()), self.devices
        while count < len(devices):
            smaller = _smaller_target(devices, count) if isinstance(devices, Target) else devices[:count]
            if smaller is not None:
                yield Place(smaller, self.hardware, self.keep)
            count *= 2
        yield self


def place_of(target: Any, keep: Mapping[str, int] | str | None) -> Place:
    """Returns the place that `target` and `keep` of `auto` stand for. Raises a ValueError with the fix."""
    mesh, kept = None, _kept_sizes(keep)
    if isinstance(target, str):
        target = target_of(target)
    if isinstance(target, (keras.distribution.DeviceMesh, jax.sharding.Mesh)):
        mesh = as_auto_mesh(target)
        require_one_target(mesh)
        target = mesh.backend_mesh.devices
        for axis, size in kept.items():
            if mesh.axis_sizes.get(axis, 1) != size:
                raise ValueError(f"Cannot keep {axis}:{size}, because {mesh} is kept. Pass its devices, or no keep.")
        kept = _kept_sizes(mesh.axis_sizes) | kept
    if isinstance(target, Target):
        devices, entry = target, target.hardware
    else:
        given = list_devices() if target is None else as_device_array(target).ravel().tolist()
        if not given:
            raise ValueError("The list of devices is empty. Leave `target` out to use all devices.")
        devices = to_jax_devices(given)
        require_one_target(create_device_mesh({DATA: len(devices)}, devices=devices))
        entry = hardware_of(devices[0])
    product = math.prod(kept.values())
    if len(devices) % product:
        raise ValueError(
            f"Cannot keep {spell_axes(kept)}: {product} does not divide the number of devices, {len(devices)}. "
            f"Choose sizes whose product divides {len(devices)}."
        )
    return Place(devices, entry, kept, mesh)


def _kept_sizes(keep: Any) -> dict[str, int]:
    """Returns the sizes of axes that are kept as integers. Raises an error with the fix."""
    if keep is not None and not isinstance(keep, (str, Mapping)):
        raise TypeError(
            f'keep must be sizes of axes, such as {{"data": 4}} or "data:4", but got {keep!r} ({type(keep).__name__}).'
        )
    checked = {}
    for axis, size in (parse_axes(keep) if isinstance(keep, str) else keep or {}).items():
        if axis not in AXES:
            raise ValueError(
                f"Cannot keep axis {axis!r}: the axes of candidates are {', '.join(map(repr, AXES))}. Rename it, or "
                "pass the devices in place of the mesh."
            )
        checked[axis] = operator.index(size) if hasattr(size, "__index__") and not isinstance(size, bool) else 0
        if checked[axis] < 1:
            raise ValueError(f"The size of axis {axis!r} must be a positive integer, but got {size!r}.")
    return checked


def _smaller_target(target: Target, count: int) -> Target | None:
    """Returns a target of the same hardware with fewer devices, None if there is none with `count` of them.

    Example: those of "h100:2x8" are "h100:1", "h100:2", "h100:4" and "h100:8"; those of two slices of "v5e:4x4" are
    "v5e:1" to "v5e:16".
    """
    name, per_network = target.hardware.name, len(target) // len(set(networks_of(list(target)).tolist()))
    networks, rest = divmod(count, per_network)
    if networks and rest:
        return None
    if target.hardware.platform != "tpu":
        return target_of(f"{name}:{networks}x{per_network}" if networks > 1 else f"{name}:{count}")
    if networks:
        return target_of(target.name, slices=networks)
    per_chip = per_network // math.prod(map(int, target.name.partition(":")[2].split("x")))
    chips, rest = divmod(count, per_chip)
    return None if rest or chips.bit_count() > 1 else target_of(f"{name}:{chips}")
