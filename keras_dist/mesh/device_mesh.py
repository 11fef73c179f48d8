"""`DeviceMesh`: devices in an n-dimensional arrangement, with a name for every axis."""

import numbers
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import AxisType

from keras_dist.mesh.axes import Axes, parse_axes, solve_axes, spell_axes
from keras_dist.mesh.devices import (
    as_device_array,
    available_devices,
    device_name,
    first_devices,
    is_alive,
    is_described,
    list_devices,
    num_processes,
    to_jax_devices,
)
from keras_dist.mesh.render import picture_html, picture_text
from keras_dist.mesh.topology import arrange_devices, coordinates_of, longest_links, slice_of


class DeviceMesh(keras.distribution.DeviceMesh):
    """Devices in an n-dimensional arrangement, with a name for every axis.

    A mesh is a value: it does not change, and two meshes of the same devices in the same arrangement with the same
    axis names are equal and hash alike. A plain `keras.distribution.DeviceMesh` may equal one too.

    Devices that are given keep their order. Without them all devices that `list_devices()` names are taken, in the
    order that suits their links where there is one process, and host after host where there are several.
    `create_device_mesh` puts all devices in the order that suits their links.

    Args:
        shape: the axes: `{"data": 2, "model": 4}`, `[("data", 2), ("model", 4)]`, `"data:2,model:4"`, or only sizes,
            `(2, 4)` or `"2,4"`. One size may be -1: what is left.
        axis_names: one distinct name per axis, for example `["data", "model"]`, where `shape` brings none.
        devices: the devices in row-major order, as `"type:id"` strings or `jax.Device` objects.
        axis_types: how JAX treats the axes: a `jax.sharding.AxisType`, `"auto"`, `"explicit"` or `"manual"`, or one for
            each axis. `"auto"`, unless asked.

    Raises:
        ValueError: empty or unequal shape and names, a size below 1, a name or a device used twice, or a shape whose
            product is not the number of devices.
        TypeError: a size that is no integer or a name that is no string.

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
        shape: Axes,
        axis_names: Sequence[str] | None = None,
        devices: Any = None,
        axis_types: Any = None,
    ):
        axes = parse_axes(shape, axis_names)
        if devices is None:
            names = list_devices()
            axes = solve_axes(axes, len(names))
            array = _arranged(names, axes) if num_processes() == 1 else np.array(names)
        else:
            array = as_device_array(devices)
            axes = solve_axes(axes, array.size, "given")
        flat = array.ravel().tolist()
        if len(set(flat)) != len(flat):
            twice = next(device for i, device in enumerate(flat) if device in flat[:i])
            raise ValueError(
                f"A mesh holds each device once, but {device_name(twice)!r} is given twice. "
                f"Received: shape={shape}, {len(flat)} devices. Remove the repetition."
            )
        is_list = isinstance(shape, list) and not isinstance(shape[0], (list, tuple))
        self._shape = list(axes.values()) if is_list else tuple(axes.values())
        self._axis_names = tuple(axes) if isinstance(axis_names, tuple) else list(axes)
        self._axis_types = as_axis_types(axis_types, len(axes))
        self._devices = array.reshape(tuple(axes.values()))
        self._devices.flags.writeable = False

    @classmethod
    def from_jax_mesh(cls, mesh: jax.sharding.Mesh) -> "DeviceMesh":
        """Returns the mesh of the same devices, axes and axis types as one of JAX.

        Args:
            mesh: a `jax.sharding.Mesh`.

        Returns:
            A `DeviceMesh` whose `backend_mesh` is `mesh`.

        Raises:
            TypeError: anything else, such as a `jax.sharding.AbstractMesh`, which has no devices.
            ValueError: an axis name or a device that is used twice.

        Example:

        >>> DeviceMesh.from_jax_mesh(jax.make_mesh((2, 4), ("data", "model")))
        <DeviceMesh data:2 (Explicit) x model:4 (Explicit) on 8 cpu devices>
        """
        if not isinstance(mesh, jax.sharding.Mesh):
            raise TypeError(
                f"from_jax_mesh takes a jax.sharding.Mesh, which has devices. Received: {mesh!r} "
                f"(of type {type(mesh).__name__}). Make one with keras_dist.create_device_mesh(axes)."
            )
        made = cls(mesh.devices.shape, mesh.axis_names, mesh.devices, mesh.axis_types)
        made._backend_mesh = mesh
        return made

    @property
    def shape(self) -> Sequence[int]:
        """The size of each axis, as a list if it was given as one, else as a tuple."""
        return self._shape[:]

    @property
    def axis_names(self) -> Sequence[str]:
        """The name of each axis, as a list if it was given as one, else as a tuple."""
        return self._axis_names[:]

    @property
    def devices(self) -> np.ndarray:
        """The devices as they were given, in an array of the mesh's shape that cannot be written to."""
        return self._devices

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """The size of each axis by its name, outermost axis first."""
        return dict(zip(self._axis_names, self._devices.shape, strict=True))

    @property
    def axis_types(self) -> tuple[AxisType, ...]:
        """How JAX treats each axis: `jax.sharding.AxisType.Auto`, unless another was asked for."""
        return self._axis_types

    @property
    def backend_mesh(self) -> jax.sharding.Mesh:
        """The `jax.sharding.Mesh` of the same devices and axes, made at the first use.

        A mesh whose devices are named is lowered anew after JAX has made its devices anew.

        Raises:
            ValueError: a device that this process does not know, or does not have any more.
        """
        mesh = getattr(self, "_backend_mesh", None)
        if mesh is None or not is_alive(mesh.devices.flat[0]):
            devices = as_device_array(to_jax_devices(self._devices.ravel().tolist())).reshape(self._devices.shape)
            if not is_alive(devices.flat[0]):
                raise ValueError(
                    f"The devices of a mesh must be those that JAX has now. Received: {self}, whose backend was "
                    "cleared. Make the mesh anew, or of names, which outlive the devices."
                )
            mesh = jax.sharding.Mesh(devices, tuple(self._axis_names), axis_types=self._axis_types)
            self._backend_mesh = mesh
        return mesh

    def info(self) -> dict[str, Any]:
        """Returns what the mesh is made of, as plain data.

        Returns:
            A dict of `total_devices`; `available_devices`, as many as there are, of which the mesh may use a part;
            `axes`, the size of each by its name; `platform`; `device_kind`; `processes` and `slices`, how many of them
            the devices belong to; and `longest_link`, for each axis the longest link between neighbours on its rings,
            as a named tuple of `dcn`, whether it crosses the network, and `hops`, how many ICI links it is; a slice
            of TPUs is taken for the box around the mesh's devices.

        Raises:
            ValueError: a device that this process does not know.

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
        """Returns a picture of which device (id, coordinates, host, slice) sits where, to print.

        Coordinates are those of TPU chips, with the core behind them where chips have several. The host is the number
        of the JAX process; it is shown where there are several, and so is the slice.

        Raises:
            ValueError: a device that this process does not know.

        Example:

        >>> print(DeviceMesh("data:2,model:4").picture())
        data:2 x model:4, 8 cpu devices
                  model=0  model=1  model=2  model=3
        data=0    cpu:0    cpu:1    cpu:2    cpu:3
        data=1    cpu:4    cpu:5    cpu:6    cpu:7
        """
        return picture_text(self.backend_mesh.devices, self._axis_names)

    def _repr_html_(self) -> str | None:
        first = self._devices.flat[0]
        if isinstance(first, str) and available_devices(first) is None:
            return None  # to show a mesh must not start JAX; notebooks then show the repr
        try:
            return picture_html(self.backend_mesh.devices, self._axis_names)
        except ValueError:  # devices that are not here have a repr only
            return None

    @cached_property
    def _key(self) -> tuple:
        return _identity(self)

    def __eq__(self, other):
        if self is other:
            return True
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
        return f"<{type(self).__name__} {spell_axes(axes)} on {count} {platform} device{'s' * (known > 1)}>"

    def __copy__(self):
        return self  # it does not change, and devices that are only compiled for would become names of none

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self):
        # JAX's mesh and its devices belong to this process; a copy elsewhere looks for devices of the same names.
        state = {key: value for key, value in vars(self).items() if key != "_backend_mesh"}
        if isinstance(self._devices.flat[0], jax.Device):
            names = list(map(device_name, self._devices.ravel().tolist()))
            state["_devices"] = np.array(names).reshape(self._devices.shape)
        return state

    def __setstate__(self, state):
        vars(self).update(state)
        self._devices.flags.writeable = False


def create_device_mesh(
    axes: Axes,
    devices: Any = None,
    dcn: Any = None,
    *,
    axis_names: Sequence[str] | None = None,
    axis_types: Any = None,
) -> DeviceMesh:
    """Makes a mesh of devices in the order that suits their links.

    On TPUs each axis gets a part of the torus that its slice is, in a ring of short links. Between slices, and between
    hosts of GPUs or CPUs, the axes of `dcn` cross the network, and all others stay inside. The shape is that of `axes`
    on every machine.

    Args:
        axes: the whole mesh: `{"data": 2, "model": 4}`, `[("data", 2), ("model", 4)]`, `"data:2,model:4"`, or only
            sizes, `(2, 4)` or `"2,4"`, with `axis_names`. Outermost axis first; the innermost is to be the one that
            communicates most. One size may be -1: what is left.
        devices: the devices, as `"type:id"` strings or `jax.Device` objects in any order, or how many of
            `list_devices()` to take. By default all.
        dcn: the axes that may cross the network between slices or hosts. By default the outermost that can hold them.
            Names, `"data"` or `["data", "fsdp"]`: these, each as much as it can, the first one first. Degrees in any
            form of axes, `{"data": 2, "fsdp": 2}` or `(2, 2, 1)`: so many slices along each axis.
        axis_names: one distinct name per axis, where `axes` brings none.
        axis_types: how JAX treats the axes: a `jax.sharding.AxisType`, `"auto"`, `"explicit"` or `"manual"`, or one for
            each axis. `"auto"`, unless asked.

    Returns:
        The mesh.

    Raises:
        ValueError: axes that are none, a product that is not the number of devices, or a `dcn` that cannot hold all
            slices or hosts.
        TypeError: a size that is no integer or a name that is no string.

    Example:

    >>> create_device_mesh("data:2,model:-1")
    <DeviceMesh data:2 x model:4 on 8 cpu devices>
    >>> create_device_mesh({"data": 2, "model": 2}, devices=4)
    <DeviceMesh data:2 x model:2 on 4 of 8 cpu devices>
    """
    parsed = parse_axes(axes, axis_names)
    given = "given"
    if devices is None:
        devices, given = list_devices(), "available"
    elif isinstance(devices, numbers.Integral) and not isinstance(devices, bool):
        devices = first_devices(int(devices))
    devices = as_device_array(devices).ravel().tolist()
    solved = solve_axes(parsed, len(devices), given)
    return DeviceMesh(solved, None, _arranged(devices, solved, dcn), axis_types)


def as_device_mesh(mesh) -> DeviceMesh:
    """Returns a mesh as ours: ours itself, or one of the devices, axes and axis types of a mesh of Keras or of JAX.

    Args:
        mesh: a mesh of ours, a `keras.distribution.DeviceMesh` or a `jax.sharding.Mesh`.

    Returns:
        A `DeviceMesh` of this package.

    Raises:
        ValueError: anything else.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    if isinstance(mesh, keras.distribution.DeviceMesh):
        return DeviceMesh(mesh.shape, mesh.axis_names, mesh.devices)
    if isinstance(mesh, jax.sharding.Mesh):
        return DeviceMesh.from_jax_mesh(mesh)
    raise ValueError(
        f"Expect `device_mesh` to be an instance of `DeviceMesh`. Received: {mesh!r} (of type {type(mesh).__name__}). "
        "Make one with keras_dist.create_device_mesh(axes)."
    )


def as_mesh_of_layers(mesh) -> DeviceMesh:
    """Returns a mesh as ours, with axes of type `Auto`: Keras's layers leave the layout of results to the compiler.

    Args:
        mesh: as `as_device_mesh` takes it. The axes of a `jax.sharding.Mesh` become `Auto` ones, since `jax.make_mesh`
            makes `Explicit` ones unasked.

    Returns:
        A `DeviceMesh` of this package.

    Raises:
        ValueError: no mesh, or a `DeviceMesh` with axes that are not `Auto`.
    """
    if isinstance(mesh, jax.sharding.Mesh):
        mesh = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    mesh = as_device_mesh(mesh)
    if set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(
            "Keras's layers leave the layout of their results to the compiler, which needs axes of type Auto. "
            f"Received: {mesh}. Make the mesh without axis_types."
        )
    return mesh


def as_axis_types(axis_types: Any, count: int) -> tuple[AxisType, ...]:
    """Returns axis types in all their forms as one `jax.sharding.AxisType` for each axis.

    Args:
        axis_types: None for `Auto`; an `AxisType` or its name in any case, for all axes; or a sequence of one for each
            axis, or of a single one for all.
        count: the number of axes.

    Returns:
        As many types as there are axes.

    Raises:
        ValueError: a name of no axis type, or as many types as there are not axes.
        TypeError: another type.
    """
    by_name = {axis_type.name.lower(): axis_type for axis_type in AxisType}
    received = f"Received: axis_types={axis_types!r} for {count} axes."
    types = ["auto"] if axis_types is None else axis_types
    types = [types] if isinstance(types, (AxisType, str)) else types
    if not isinstance(types, (list, tuple)) or not all(isinstance(each, (AxisType, str)) for each in types):
        raise TypeError(f"An axis type is a jax.sharding.AxisType or its name. {received} Use {', '.join(by_name)}.")
    if len(types) not in (1, count):
        raise ValueError(f"There is one axis type for all axes, or one for each. {received} Give 1 or {count}.")
    named = [each.strip().lower() if isinstance(each, str) else each.name.lower() for each in types]
    if any(name not in by_name for name in named):
        raise ValueError(f"An axis type has one of JAX's names. {received} Use {', '.join(by_name)}.")
    return tuple(by_name[name] for name in named) * (count if len(named) == 1 else 1)


def _arranged(devices: list, axes: dict[str, int], dcn: Any = None) -> np.ndarray:
    """The devices, names or objects as they came, in the order that suits their links."""
    objects = to_jax_devices(devices)
    platforms = {device.platform for device in objects}
    if len(platforms) > 1:
        raise ValueError(
            f"The devices of a mesh are of one type. Received: {', '.join(sorted(platforms))}. "
            "Make a mesh for each type."
        )
    arranged = arrange_devices(objects, axes, dcn)
    came_as = {id(device): given for device, given in zip(objects, devices, strict=True)}
    return as_device_array([came_as[id(device)] for device in arranged.ravel().tolist()]).reshape(arranged.shape)


def _identity(mesh: keras.distribution.DeviceMesh) -> tuple:
    devices = np.ravel(mesh.devices).tolist()
    # A name says all of a device of this process. Described ones may be of another kind, or elsewhere on a torus.
    described = [d for d in devices if not isinstance(d, str) and is_described(d)]
    types = mesh.axis_types if isinstance(mesh, DeviceMesh) else (AxisType.Auto,) * len(mesh.axis_names)
    return (
        tuple(mesh.axis_names),
        tuple(np.shape(mesh.devices)),
        types,
        tuple(map(device_name, devices)),
        tuple((device.device_kind, coordinates_of(device)) for device in described),
    )
