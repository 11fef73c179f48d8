"""`DeviceMesh`: devices in an n-dimensional array with named axes, and functions that create one."""

import contextlib
import numbers
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import AxisType

from keras_dist._report.units import counted
from keras_dist.mesh.axes import MeshAxes, parse_axes, solve_axes, spell_axes
from keras_dist.mesh.devices import (
    as_device_array,
    available_devices,
    device_name,
    first_devices,
    how_to_simulate,
    is_alive,
    is_attached,
    list_devices,
    num_processes,
    to_jax_devices,
)
from keras_dist.mesh.render import mesh_html, mesh_text
from keras_dist.mesh.topology import arrange_devices, coordinates_of, longest_links, slice_of


class DeviceMesh(keras.distribution.DeviceMesh):
    """Devices in an n-dimensional array with named axes.

    A mesh is an immutable value: two meshes with equal devices, shapes, axis names and axis types are equal and have
    the same hash. A plain `keras.distribution.DeviceMesh` can be equal to one, too.

    Devices that are passed keep their order. Without `devices`, the mesh contains all devices of `list_devices()`. In a
    single process they are ordered by their links, as in `create_device_mesh`. In several processes they are ordered
    host by host.

    Args:
        shape: The axes: `{"data": 2, "model": 4}`, `[("data", 2), ("model", 4)]`, `"data:2,model:4"`, or only sizes,
            `(2, 4)` or `"2,4"`. One size may be -1, which stands for the remaining devices.
        axis_names: One distinct name per axis, for example `["data", "model"]`, if `shape` includes none.
        devices: The devices in row-major order, as `"type:id"` strings or `jax.Device` objects.
        axis_types: How JAX treats the axes: a `jax.sharding.AxisType`, `"auto"`, `"explicit"` or `"manual"`, or one per
            axis. By default `"auto"`.

    Raises:
        ValueError: If shape and names are empty or differ in length, a size is below 1, a name or a device is used
            twice, or the product of the shape is not the number of devices.
        TypeError: If a size is not an integer or a name is not a string.

    Example:

    >>> mesh = DeviceMesh((4, 2), ["data", "model"])
    >>> mesh
    <DeviceMesh data:4 x model:2 on 8 cpu devices>
    >>> mesh.axis_sizes
    {'data': 4, 'model': 2}
    >>> mesh == DeviceMesh("data:4,model:-1")
    True
    """

    def __init__(
        self,
        shape: MeshAxes,
        axis_names: Sequence[str] | None = None,
        devices: Sequence[Any] | np.ndarray | None = None,
        axis_types: AxisType | str | Sequence[AxisType | str] | None = None,
    ):
        axes = parse_axes(shape, axis_names)
        if devices is None:
            names = list_devices()
            axes = solve_axes(axes, len(names), more=how_to_simulate)
            array = _arrange(names, axes) if num_processes() == 1 else np.array(names)
        else:
            array = as_device_array(devices)
            axes = solve_axes(axes, array.size, "given")
        flat = array.ravel().tolist()
        if len(set(flat)) != len(flat):
            repeated = next(device for i, device in enumerate(flat) if device in flat[:i])
            raise ValueError(
                f"Mesh {spell_axes(axes)} contains device {device_name(repeated)!r} twice. Pass each device once."
            )
        is_list = isinstance(shape, list) and not isinstance(shape[0], (list, tuple))
        self._shape = list(axes.values()) if is_list else tuple(axes.values())
        self._axis_names = tuple(axes) if isinstance(axis_names, tuple) else list(axes)
        self._axis_types = _parse_axis_types(axis_types, len(axes))
        self._devices = array.reshape(tuple(axes.values()))
        self._devices.flags.writeable = False

    @classmethod
    def from_jax_mesh(cls, mesh: jax.sharding.Mesh) -> "DeviceMesh":
        """Converts a mesh of JAX to a `DeviceMesh` with the same devices, axes and axis types.

        Args:
            mesh: The mesh.

        Returns:
            A `DeviceMesh` whose `backend_mesh` is `mesh`.

        Raises:
            TypeError: If `mesh` is anything else, such as a `jax.sharding.AbstractMesh`, which has no devices.
            ValueError: If an axis name or a device is used twice.

        Example:

        >>> DeviceMesh.from_jax_mesh(jax.make_mesh((2, 4), ("data", "model")))
        <DeviceMesh data:2 (Explicit) x model:4 (Explicit) on 8 cpu devices>
        """
        if not isinstance(mesh, jax.sharding.Mesh):
            raise TypeError(
                f"from_jax_mesh takes a jax.sharding.Mesh, not {mesh!r} of type {type(mesh).__name__}. "
                "To create a mesh from axes, call keras_dist.create_device_mesh(axes)."
            )
        return cls(mesh.devices.shape, mesh.axis_names, mesh.devices, mesh.axis_types)

    @property
    def shape(self) -> Sequence[int]:
        """The size of each axis, as a list if it was given as a list of sizes, else as a tuple."""
        return self._shape[:]

    @property
    def axis_names(self) -> Sequence[str]:
        """The name of each axis, as a tuple if names were given as a tuple, else as a list."""
        return self._axis_names[:]

    axis_name = axis_names  # KerasHub's errors about a mesh that lacks an axis show `device_mesh.axis_name`

    @property
    def devices(self) -> np.ndarray:
        """The devices, as names or objects as they were given, in a read-only array of the mesh's shape."""
        return self._devices

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """The size of each axis by its name, outermost axis first."""
        return dict(zip(self._axis_names, self._devices.shape, strict=True))

    @property
    def axis_types(self) -> tuple[AxisType, ...]:
        """How JAX treats each axis, by default as `jax.sharding.AxisType.Auto`."""
        return self._axis_types

    @property
    def backend_mesh(self) -> jax.sharding.Mesh:
        """The `jax.sharding.Mesh` of the same devices and axes, created on first use.

        If the devices were given as names, it is created again after JAX's backends were cleared.

        Raises:
            ValueError: If this process does not have a device, or no longer has it.
        """
        mesh = getattr(self, "_backend_mesh", None)
        if mesh is None or not is_alive(mesh.devices.flat[0]):
            devices = as_device_array(to_jax_devices(self._devices.ravel().tolist())).reshape(self._devices.shape)
            if not is_alive(devices.flat[0]):
                raise ValueError(
                    f"The devices of {self} no longer exist, since JAX's backends were cleared. Create the mesh again, "
                    "or create it from device names, which remain valid."
                )
            mesh = jax.sharding.Mesh(devices, tuple(self._axis_names), axis_types=self._axis_types)
            self._backend_mesh = mesh
        return mesh

    def info(self) -> dict[str, Any]:
        """Returns facts about the mesh.

        Returns:
            A dict with the entries `total_devices` of the mesh; `available_devices`, the number of devices that exist;
            `axes`, the size of each axis by its name; `platform`; `device_kind`; the number of `processes` and of
            `slices` of the devices; and `longest_link`, for each axis the longest link between neighbors on its rings,
            as a named tuple of `dcn` (whether it crosses the network) and `hops` (the number of ICI links). A slice of
            TPUs is assumed to be the bounding box of the mesh's devices.

        Raises:
            ValueError: If this process does not have a device.

        Example:

        >>> info = DeviceMesh("data:2,model:2", devices=list_devices()[:4]).info()
        >>> info["total_devices"], info["available_devices"], info["axes"]
        (4, 8, {'data': 2, 'model': 2})
        >>> str(info["longest_link"]["model"])
        '1 hop'
        """
        array = self.backend_mesh.devices
        devices = array.ravel().tolist()
        return {
            "total_devices": len(devices),
            "available_devices": available_devices(devices[0]) or len(devices),
            "axes": dict(self.axis_sizes),
            "platform": devices[0].platform,
            "device_kind": devices[0].device_kind,
            "processes": len({device.process_index for device in devices}),
            "slices": len(set(map(slice_of, devices))),
            "longest_link": dict(zip(self.axis_sizes, longest_links(array), strict=True)),
        }

    def picture(self) -> str:
        """Returns a table to print of the device (id, coordinates, host, slice) at each position of the mesh.

        Coordinates are those of TPU chips, followed by `/core` if chips have several cores. The host is the index of
        the JAX process. Host and slice are shown only if there are several.

        Raises:
            ValueError: If this process does not have a device.

        Example:

        >>> print(DeviceMesh("data:2,model:4").picture())
        data:2 x model:4, 8 cpu devices
                  model=0  model=1  model=2  model=3
        data=0    cpu:0    cpu:1    cpu:2    cpu:3
        data=1    cpu:4    cpu:5    cpu:6    cpu:7
        """
        return mesh_text(self.backend_mesh.devices, self._axis_names)

    def _repr_html_(self) -> str | None:
        first = self._devices.flat[0]
        if isinstance(first, str) and available_devices(first) is None:
            return None  # showing a mesh must not start JAX; notebooks then show the repr
        with contextlib.suppress(ValueError):  # devices that this process does not have
            return mesh_html(self.backend_mesh.devices, self._axis_names)
        return None

    @cached_property
    def _key(self) -> tuple:
        return _identity(self)

    def __eq__(self, other):
        if not isinstance(other, keras.distribution.DeviceMesh):
            return NotImplemented
        return self._key == (other._key if isinstance(other, DeviceMesh) else _identity(other))

    def __hash__(self):
        return hash(self._key)

    def __repr__(self):
        axes = {
            name: f"{size}" if axis_type == AxisType.Auto else f"{size} ({axis_type.name})"
            for (name, size), axis_type in zip(self.axis_sizes.items(), self._axis_types, strict=True)
        }
        first, size = self._devices.flat[0], self._devices.size
        known = available_devices(first) or size
        count = size if known == size else f"{size} of {known}"
        platform = device_name(first).partition(":")[0]
        return f"<{type(self).__name__} {spell_axes(axes)} on {counted(count, f'{platform} device')}>"

    def __copy__(self):
        return self  # immutable; pickling would turn the devices of targets and mock devices into unknown names

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        # JAX's devices belong to this process; a copy elsewhere uses its devices of the same names.
        devices = self._devices.ravel().tolist()
        devices = list(map(device_name, devices)) if isinstance(devices[0], jax.Device) else devices
        return type(self), (self._shape, self._axis_names, devices, self._axis_types)


def create_device_mesh(
    axes: MeshAxes,
    devices: Sequence[Any] | np.ndarray | int | None = None,
    dcn: MeshAxes | Sequence[str] | None = None,
    *,
    axis_names: Sequence[str] | None = None,
    axis_types: AxisType | str | Sequence[AxisType | str] | None = None,
) -> DeviceMesh:
    """Creates a mesh with its devices ordered by the links between them.

    On TPUs, each axis is mapped to a part of the slice's torus and runs around it in a ring of short links. Between
    slices, and between hosts of GPUs or CPUs, only the axes of `dcn` cross the network. The mesh always has the shape
    of `axes`.

    Args:
        axes: The axes: `{"data": 2, "model": 4}`, `[("data", 2), ("model", 4)]`, `"data:2,model:4"`, or only sizes,
            `(2, 4)` or `"2,4"`, with `axis_names`. Outermost axis first; the innermost should be the one that
            communicates most. One size may be -1, which stands for the remaining devices.
        devices: The devices in any order, as `"type:id"` strings or `jax.Device` objects, or the number of devices of
            `list_devices()` to use. By default all of them.
        dcn: The axes that may cross the network between slices or hosts. By default the outermost axes that can. If
            names are passed, such as `"data"` or `["data", "fsdp"]`: only these axes, in this order, each as far as
            possible. If degrees are passed, in any form of axes, such as `{"data": 2, "fsdp": 2}` or `(2, 2, 1)`:
            exactly this number of slices along each axis.
        axis_names: One distinct name per axis, if `axes` includes none.
        axis_types: How JAX treats the axes, as for `DeviceMesh`.

    Raises:
        ValueError: If the axes are invalid, their product is not the number of devices, or the axes of `dcn` cannot
            span all slices or hosts.
        TypeError: If a size is not an integer or a name is not a string.

    Example:

    >>> create_device_mesh("data:2,model:-1")
    <DeviceMesh data:2 x model:4 on 8 cpu devices>
    >>> create_device_mesh({"data": 2, "model": 2}, devices=4)
    <DeviceMesh data:2 x model:2 on 4 of 8 cpu devices>
    """
    parsed = parse_axes(axes, axis_names)
    given, more = "given", None
    if devices is None:
        devices, given, more = list_devices(), "available", how_to_simulate
    elif isinstance(devices, numbers.Integral) and not isinstance(devices, bool):
        devices = first_devices(int(devices))
    devices = as_device_array(devices).ravel().tolist()
    solved = solve_axes(parsed, len(devices), given, more)
    return DeviceMesh(solved, None, _arrange(devices, solved, dcn), axis_types)


def as_device_mesh(mesh) -> DeviceMesh:
    """Converts a mesh of Keras or JAX to a `DeviceMesh` of this package; returns one of this package unchanged."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    if isinstance(mesh, keras.distribution.DeviceMesh):
        return DeviceMesh(mesh.shape, mesh.axis_names, mesh.devices)
    if isinstance(mesh, jax.sharding.Mesh):
        return DeviceMesh.from_jax_mesh(mesh)
    what, devices = f"{mesh!r} of type {type(mesh).__name__}", ""
    if isinstance(mesh, (list, tuple)) and mesh and hasattr(mesh[0], "device_kind"):
        what, devices = counted(len(mesh), "device"), ", devices=devices"
    axes = repr(mesh) if isinstance(mesh, (str, dict)) and mesh else "axes"
    fix = f"Create one with keras_dist.create_device_mesh({axes}{devices})."
    if isinstance(mesh, keras.distribution.LayoutMap):
        fix = "Pass a layout map by name: layout_map=layout_map."
    elif isinstance(mesh, keras.Layer):
        fix = "A distribution takes no model: set it with keras_dist.set_distribution before the model is created."
    raise ValueError(f"Expect `device_mesh` to be an instance of `DeviceMesh`, not {what}. {fix}")


def as_auto_mesh(mesh) -> DeviceMesh:
    """Converts a mesh as `as_device_mesh` does, and requires axes of type `Auto`.

    Keras's layers do not annotate their results, so the compiler must choose their layouts. The axes of a
    `jax.sharding.Mesh` are converted to `Auto`, since `jax.make_mesh` creates `Explicit` axes by default.
    """
    if isinstance(mesh, jax.sharding.Mesh):
        mesh = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    mesh = as_device_mesh(mesh)
    if set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(
            f"Keras's layers need mesh axes of type Auto, but got {mesh}. Create the mesh without axis_types, or pass "
            "the jax.sharding.Mesh itself, whose axes are converted."
        )
    return mesh


def _parse_axis_types(axis_types: Any, count: int) -> tuple[AxisType, ...]:
    """Converts None (`Auto`), one type or its name, or a list of these, to one `AxisType` for each of `count` axes."""
    by_name = {axis_type.name.lower(): axis_type for axis_type in AxisType}
    types = "auto" if axis_types is None else axis_types
    types = [types] if isinstance(types, (AxisType, str)) else types
    invalid, fix = f"Invalid axis_types {axis_types!r} for {counted(count, 'axis')}", f"Use {', '.join(by_name)}."
    if not isinstance(types, (list, tuple)) or not all(isinstance(each, (AxisType, str)) for each in types):
        raise TypeError(f"{invalid}: an axis type is a jax.sharding.AxisType or its name. {fix}")
    if len(types) not in (1, count):
        raise ValueError(f"{invalid}: expected one type, or one per axis.")
    names = [each.strip().lower() if isinstance(each, str) else each.name.lower() for each in types]
    if any(name not in by_name for name in names):
        raise ValueError(f"{invalid}: unknown name. {fix}")
    return tuple(by_name[name] for name in names) * (count if len(names) == 1 else 1)


def _arrange(devices: list, axes: dict[str, int], dcn: Any = None) -> np.ndarray:
    """Orders devices by their links; names remain names, and objects remain objects."""
    objects = to_jax_devices(devices)
    platforms = {device.platform for device in objects}
    if len(platforms) > 1:
        raise ValueError(f"A mesh cannot mix device types: {', '.join(sorted(platforms))}. Create one mesh per type.")
    arranged = arrange_devices(objects, axes, dcn)
    as_given = {id(device): given for device, given in zip(objects, devices, strict=True)}
    return as_device_array([as_given[id(device)] for device in arranged.ravel().tolist()]).reshape(arranged.shape)


def _identity(mesh: keras.distribution.DeviceMesh) -> tuple:
    devices = np.ravel(mesh.devices).tolist()
    # A name identifies a device of this process. Mock devices and those of targets also differ in kind and position.
    unattached = [d for d in devices if not isinstance(d, str) and not is_attached(d)]
    types = mesh.axis_types if isinstance(mesh, DeviceMesh) else (AxisType.Auto,) * len(mesh.axis_names)
    return (
        tuple(mesh.axis_names),
        tuple(np.shape(mesh.devices)),
        types,
        tuple(map(device_name, devices)),
        tuple((device.device_kind, coordinates_of(device)) for device in unattached),
    )
