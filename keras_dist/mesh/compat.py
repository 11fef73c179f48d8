"""The mesh APIs of datarax, artifex and eformer under their own names, made by what makes `create_device_mesh`'s."""

import contextlib
import math
import numbers
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from keras_dist.mesh.axes import (
    Axes,
    bring_names,
    known_product,
    parse_axes,
    solve_axes,
    spell_axes,
    split_axes,
    spread_axes,
)
from keras_dist.mesh.device_mesh import DeviceMesh, as_device_mesh, create_device_mesh
from keras_dist.mesh.devices import as_device_array, force_cpu, platform_devices
from keras_dist.mesh.topology import arrange_devices

_DIMS = (1, -1, 1, 1, 1)
_NAMES = ("dp", "fsdp", "ep", "tp", "sp")


class _OnClassOrInstance:
    """A method that may be called on the class too: there on an instance that was given nothing."""

    def __init__(self, function: Callable):
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        return types.MethodType(self.function, object.__new__(owner) if instance is None else instance)


class DeviceMeshManager:
    """Makes `jax.sharding.Mesh` objects: on the class, as in datarax, or on an instance, as in artifex.

    Args:
        devices: the devices that meshes are made of. By default all that JAX has when a mesh is made.

    Example:

    >>> dict(DeviceMeshManager.create_hybrid_mesh(2, 4).shape)
    {'data': 2, 'model': 4}
    >>> dict(DeviceMeshManager(jax.devices()[:4]).create_data_parallel_mesh(axis_name="batch").shape)
    {'batch': 4}
    """

    _devices: list[Any] | None = None

    def __init__(self, devices: Sequence[Any] | None = None):
        self._devices = None if devices is None else as_device_array(devices).ravel().tolist()

    @property
    def devices(self) -> list[Any]:
        """The devices, in a list of its own."""
        return list(jax.devices() if self._devices is None else self._devices)

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.devices)

    @_OnClassOrInstance
    def create_device_mesh(self, mesh_shape: Axes, devices: Sequence[Any] | None = None) -> Mesh:
        """Makes a mesh of any axes.

        Args:
            mesh_shape: `{"data": 2, "model": 4}`, `[("data", 2), ("model", 4)]` or `"data:2,model:4"`; one size may be
                -1.
            devices: the devices; if they are more than the mesh needs, the first ones are taken. By default the
                manager's. If those are all devices that there are, and more than the mesh needs, a warning says so.

        Returns:
            The mesh: axes of type `Auto`, and devices in the order that suits their links.

        Raises:
            ValueError: too few devices, or axes that are none.
            TypeError: a size that is no integer or a name that is no string.
        """
        axes = parse_axes(mesh_shape)
        given = self.devices if devices is None else as_device_array(devices).ravel().tolist()
        needed = known_product(axes)
        if needed > len(given):
            raise ValueError(
                f"Not enough devices: {spell_axes(axes)} = {needed}. Mesh requires {needed} devices, but only "
                f"{len(given)} are available. Choose sizes whose product is {len(given)} or less, or pass more."
            )
        takes_all = -1 in axes.values()
        if devices is None and self._devices is None and not takes_all and needed < len(given):
            warnings.warn(
                f"{spell_axes(axes)} = {needed} devices, but {len(given)} are available: {len(given) - needed} of them "
                f"have nothing to do. Give one axis the size -1, or pass devices=jax.devices()[:{needed}] if that is "
                "meant.",
                stacklevel=2,
            )
        return create_device_mesh(axes, given if takes_all else given[:needed]).backend_mesh

    @_OnClassOrInstance
    def create_data_parallel_mesh(self, num_devices: int | None = None, axis_name: str = "data") -> Mesh:
        """Makes a mesh of one axis.

        Args:
            num_devices: how many devices. By default, or with -1, all.
            axis_name: the name of the axis.

        Returns:
            The mesh.

        Raises:
            ValueError: too few devices, or no number of devices.
        """
        return self.create_device_mesh({axis_name: -1 if num_devices is None else num_devices}, self.devices)

    @_OnClassOrInstance
    def create_model_parallel_mesh(self, num_devices: int | None = None, axis_name: str = "model") -> Mesh:
        """Makes a mesh of one axis; `create_data_parallel_mesh` with another name for it."""
        return self.create_device_mesh({axis_name: -1 if num_devices is None else num_devices}, self.devices)

    @_OnClassOrInstance
    def create_hybrid_mesh(
        self,
        data_parallel_size: int = 1,
        model_parallel_size: int = 1,
        data_axis: str = "data",
        model_axis: str = "model",
    ) -> Mesh:
        """Makes a mesh of two axes.

        Args:
            data_parallel_size: the size of the outer axis.
            model_parallel_size: the size of the inner axis.
            data_axis: the name of the outer axis.
            model_axis: the name of the inner axis.

        Returns:
            The mesh.

        Raises:
            ValueError: too few devices, no number of devices, or twice the same name.
        """
        axes = [(data_axis, data_parallel_size), (model_axis, model_parallel_size)]
        return self.create_device_mesh(axes, self.devices)

    @_OnClassOrInstance
    def get_mesh_info(self, mesh: Mesh | DeviceMesh) -> dict[str, Any]:
        """Returns the number of devices of a mesh and the sizes of its axes; `DeviceMesh.info` returns more.

        Args:
            mesh: a mesh of JAX, of Keras or of this package.

        Returns:
            `{"total_devices": int, "axes": {name: size}}`.
        """
        axes = dict(mesh.shape) if isinstance(mesh.shape, Mapping) else dict(as_device_mesh(mesh).axis_sizes)
        return {"total_devices": math.prod(axes.values()), "axes": axes}


def create_mesh(
    axis_dims: Axes = _DIMS,
    axis_names: Sequence[str] | None = _NAMES,
    dcn_mesh_dims: Any = None,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = True,
    backend: str | None = None,
    use_jax: bool = False,
    axis_types: Any = None,
) -> Mesh:
    """Makes a `jax.sharding.Mesh` of all devices, in the call form of eformer.

    Args:
        axis_dims: the whole mesh, in any form of axes. One size may be -1: what is left.
        axis_names: one name for each axis, where `axis_dims` brings none.
        dcn_mesh_dims: how much of each axis crosses slices or hosts, in any form of `create_device_mesh`'s `dcn`.
        should_sort_granules_by_key: whether slices and hosts lie in the order of their numbers, else in JAX's.
        allow_split_physical_axes: whether one axis of a TPU's torus may serve several axes of the mesh.
        backend: `"cpu"`, `"gpu"` or `"tpu"`. By default accelerators where there are any.
        use_jax: taken for programs that pass it. The mesh is the same.
        axis_types: a `jax.sharding.AxisType`, `"auto"`, `"explicit"` or `"manual"`, or one for each axis. `"auto"`,
            unless asked.

    Returns:
        The mesh. While one is in use, JAX returns the same object again.

    Raises:
        ValueError: axes that are none, or that do not hold all devices, or a `dcn_mesh_dims` that does not fit them.
        TypeError: a size that is no integer or a name that is no string.

    Example:

    >>> create_mesh().shape["fsdp"]
    8
    >>> create_mesh((2, -1), ("data", "model")).devices.shape
    (2, 4)
    """
    devices = jax.devices() if backend is None else platform_devices(backend)
    if axis_names is _NAMES and bring_names(split_axes(axis_dims)):
        axis_names = None
    axes = solve_axes(parse_axes(axis_dims, axis_names), len(devices))
    arranged = arrange_devices(
        devices,
        axes,
        dcn_mesh_dims,
        sort_granules=should_sort_granules_by_key,
        allow_split_physical_axes=allow_split_physical_axes,
    )
    return DeviceMesh(axes, devices=arranged, axis_types=axis_types).backend_mesh


def create_cpu_mesh(axis_dims: Axes = _DIMS, axis_names: Sequence[str] | None = _NAMES) -> Mesh:
    """Makes a mesh of all CPU devices, on a machine with accelerators too.

    Args:
        axis_dims: the whole mesh, in any form of axes. One size may be -1: what is left.
        axis_names: one name for each axis, where `axis_dims` brings none.

    Returns:
        The mesh.

    Raises:
        ValueError: axes that are none, or that do not hold all devices.
        TypeError: a size that is no integer or a name that is no string.
    """
    return create_mesh(axis_dims, axis_names, backend="cpu")


def parse_mesh_from_string(axis_dims: str, names: Sequence[str]) -> Mesh:
    """Makes a mesh of all devices from text.

    Args:
        axis_dims: `"dp:2,tp:4"`, in the order of the text, or `"2,4"`, in that of the names. One size may be -1.
        names: the names of the axes, all of which the text must name, if it names any.

    Returns:
        The mesh.

    Raises:
        ValueError: other text, other names, or axes that do not hold all devices.

    Example:

    >>> dict(parse_mesh_from_string("dp:2, tp:-1", ["dp", "tp"]).shape)
    {'dp': 2, 'tp': 4}
    """
    return create_mesh(axis_dims, names)


def calculate_host_mesh_shape(
    global_mesh_shape: Axes, total_devices: int | None = None, num_processes: int | None = None
) -> tuple[int, ...]:
    """Returns which part of a mesh lies on each process, where processes lie along the outermost axes that can.

    So they do on hosts of GPUs and CPUs; on a slice of TPUs the torus decides where devices lie.

    Args:
        global_mesh_shape: the size of each axis of the whole mesh, in any form of axes.
        total_devices: the number of devices of each process. By default that of this one.
        num_processes: the number of processes. By default all that work together.

    Returns:
        The size of each axis on one process.

    Raises:
        ValueError: the mesh does not hold as many devices as the processes have, or these are no numbers.

    Example:

    >>> calculate_host_mesh_shape((2, 4), total_devices=4, num_processes=2)
    (1, 4)
    >>> calculate_host_mesh_shape((3, 4), total_devices=6, num_processes=2)
    (3, 2)
    """
    per_process = jax.local_device_count() if total_devices is None else total_devices
    processes = jax.process_count() if num_processes is None else num_processes
    if not all(isinstance(count, numbers.Integral) and count > 0 for count in (per_process, processes)):
        raise ValueError(
            "There is at least one process with at least one device. Received: "
            f"total_devices={per_process!r}, num_processes={processes!r}. Leave them out for those of this program."
        )
    entries = split_axes(global_mesh_shape)
    names = None if bring_names(entries) else [f"axis {i}" for i in range(len(entries))]
    axes = parse_axes(global_mesh_shape, names)
    axes = solve_axes(axes, per_process * processes, f"on {processes} processes of {per_process}")
    degrees = spread_axes(axes, processes, what="processes")
    return tuple(size // degrees[name] for name, size in axes.items())


@contextlib.contextmanager
def cpu_context() -> Iterator[Mesh]:
    """Computes on the CPU for a block of code: `force_cpu`, with `create_cpu_mesh` as the mesh of partition specs.

    Yields:
        The mesh: all CPU devices, along `"fsdp"`.

    Example:

    >>> with cpu_context() as mesh:
    ...     x = jax.lax.with_sharding_constraint(jax.numpy.ones((16, 2)), jax.P("fsdp"))
    >>> x.sharding.shard_shape(x.shape)
    (2, 2)
    """
    mesh = create_cpu_mesh()
    with contextlib.ExitStack() as stack:
        stack.enter_context(force_cpu())
        # Deprecated, but jax.set_mesh is another thing: it would lay every new array over the whole mesh.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            stack.enter_context(mesh)
        yield mesh
