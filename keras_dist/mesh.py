"""`DeviceMesh`: devices in an n-dimensional arrangement, with a name for every axis."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import keras
import numpy as np

from keras_dist.axes import validate_axes
from keras_dist.devices import device_name, list_devices, to_jax_devices


class DeviceMesh(keras.distribution.DeviceMesh):
    """Devices in an n-dimensional arrangement, with a name for every axis.

    A mesh is a value: it does not change, and two meshes of the same devices in the same arrangement with the same
    axis names are equal and hash alike. A plain `keras.distribution.DeviceMesh` may equal one too.

    Args:
        shape: the size of each axis, for example `(8,)` or `(4, 2)`.
        axis_names: one distinct name per axis, for example `["data", "model"]`.
        devices: the devices in row-major order, as `"type:id"` strings or `jax.Device` objects. By default all
            devices that `list_devices()` names.

    Raises:
        ValueError: empty or unequal shape and names, a size below 1, a name or a device used twice, or a shape whose
            product is not the number of devices.
        TypeError: a size that is no integer or a name that is no string.

    Example:

    >>> mesh = DeviceMesh((4, 2), ["data", "model"])
    >>> mesh
    <DeviceMesh shape=(4, 2), axis_names=['data', 'model']>
    >>> mesh.axis_sizes
    {'data': 4, 'model': 2}
    """

    def __init__(self, shape: Sequence[int], axis_names: Sequence[str], devices: Any = None):
        axes = validate_axes(shape, axis_names)
        array = np.array(list_devices() if devices is None else devices)
        if math.prod(axes.values()) != array.size:
            equation = " x ".join(f"{name}:{size}" for name, size in axes.items())
            raise ValueError(
                f"Shape does not match the number of devices: {equation} = {math.prod(axes.values())} devices, but "
                f"{array.size} are {'available' if devices is None else 'given'}. "
                f"Received: shape={shape}; devices.shape={array.shape}. Choose sizes whose product is {array.size}"
                f"{', or pass the devices to use as `devices`' if devices is None else ''}."
            )
        flat = array.ravel().tolist()
        if len(set(flat)) != len(flat):
            twice = next(device for i, device in enumerate(flat) if device in flat[:i])
            raise ValueError(
                f"A mesh holds each device once, but {device_name(twice)!r} is given twice. "
                f"Received: shape={shape}, {len(flat)} devices. Remove the repetition."
            )
        self._shape = type(shape)(axes.values()) if isinstance(shape, (list, tuple)) else tuple(axes.values())
        self._axis_names = list(axes) if isinstance(axis_names, list) else tuple(axes)
        self._devices = array.reshape(tuple(axes.values()))
        self._devices.flags.writeable = False

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
    def backend_mesh(self) -> jax.sharding.Mesh:
        """The `jax.sharding.Mesh` of the same devices and axes, made at the first use.

        Raises:
            ValueError: a device that this process does not know.
        """
        if not hasattr(self, "_backend_mesh"):
            # Not np.array: it would look at every device for the parts of a nested sequence, as long as all the rest.
            devices = np.fromiter(to_jax_devices(self._devices.ravel().tolist()), object, self._devices.size)
            self._backend_mesh = jax.sharding.Mesh(devices.reshape(self._devices.shape), tuple(self._axis_names))
        return self._backend_mesh

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

    def __getstate__(self):
        # JAX's mesh belongs to this process; a copy elsewhere makes its own.
        return {key: value for key, value in vars(self).items() if key != "_backend_mesh"}


def as_device_mesh(mesh) -> DeviceMesh:
    """Returns a mesh as ours: ours itself, or one equal to a plain `keras.distribution.DeviceMesh`.

    Args:
        mesh: a mesh of ours or of Keras.

    Returns:
        A `DeviceMesh` of this package.

    Raises:
        ValueError: anything else.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    if isinstance(mesh, keras.distribution.DeviceMesh):
        return DeviceMesh(mesh.shape, mesh.axis_names, mesh.devices)
    raise ValueError(
        f"Expect `device_mesh` to be an instance of `DeviceMesh`. Received: {mesh!r} (of type {type(mesh).__name__}). "
        "Make one with keras_dist.DeviceMesh(shape, axis_names)."
    )


def _identity(mesh: keras.distribution.DeviceMesh) -> tuple:
    names = tuple(map(device_name, np.ravel(mesh.devices).tolist()))
    return tuple(mesh.axis_names), tuple(np.shape(mesh.devices)), names
