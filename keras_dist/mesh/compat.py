"""The mesh APIs of datarax, artifex and eformer under their own names, implemented with `create_device_mesh`."""

import contextlib
import math
import numbers
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from keras_dist._report.units import counted
from keras_dist._report.user_warnings import warn
from keras_dist.mesh.axes import MeshAxes, default_names, known_product, parse_axes, solve_axes, spell_axes, spread_axes
from keras_dist.mesh.device_mesh import DeviceMesh, as_device_mesh, create_device_mesh
from keras_dist.mesh.devices import as_device_array, force_cpu, how_to_simulate, platform_devices
from keras_dist.mesh.topology import arrange_devices

_DIMS = (1, -1, 1, 1, 1)
_NAMES = ("dp", "fsdp", "ep", "tp", "sp")


class _OnClassOrInstance:
    """A method that can also be called on the class, where `self` is an instance without devices of its own."""

    def __init__(self, function: Callable):
        self.function = function

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        return types.MethodType(self.function, object.__new__(owner) if instance is None else instance)


class DeviceMeshManager:
    """Creates `jax.sharding.Mesh` objects: called on the class, as in datarax, or on an instance, as in artifex.

    Args:
        devices: The devices of the meshes. By default all devices that JAX has when a mesh is created.

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
        """A copy of the list of devices."""
        return list(jax.devices() if self._devices is None else self._devices)

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.devices)

    @_OnClassOrInstance
    def create_device_mesh(self, mesh_shape: MeshAxes, devices: Sequence[Any] | None = None) -> Mesh:
        """Creates a mesh of any axes.

        Args:
            mesh_shape: `{"data": 2, "model": 4}`, `[("data", 2), ("model", 4)]` or `"data:2,model:4"`; one size may be
                -1.
            devices: The devices, of which the mesh uses the first ones if it needs fewer. By default the manager's.

        Returns:
            The mesh, with axes of type `Auto` and its devices ordered by their links.

        Raises:
            ValueError: If there are too few devices, or the axes are invalid.
            TypeError: If a size is not an integer or a name is not a string.

        Warns:
            UserWarning: If neither the call nor the manager was given devices, and some devices remain unused.
        """
        axes = parse_axes(mesh_shape)
        given = self.devices if devices is None else as_device_array(devices).ravel().tolist()
        needed = known_product(axes)
        if needed > len(given):
            more = how_to_simulate(needed) if devices is self._devices is None else ", or pass more devices"
            raise ValueError(
                f"Not enough devices: mesh {spell_axes(axes)} requires {counted(needed, 'device')}, but only "
                f"{len(given)} {'is' if len(given) == 1 else 'are'} available. Choose sizes whose product is at most "
                f"{len(given)}{more}."
            )
        uses_all = -1 in axes.values()
        if devices is None and self._devices is None and not uses_all and needed < len(given):
            warn(
                f"Mesh {spell_axes(axes)} leaves {len(given) - needed} of {len(given)} devices idle. Give one axis the "
                f"size -1 to use all, or pass devices=jax.devices()[:{needed}] if this is intended."
            )
        return create_device_mesh(axes, given if uses_all else given[:needed]).backend_mesh

    @_OnClassOrInstance
    def create_data_parallel_mesh(self, num_devices: int | None = None, axis_name: str = "data") -> Mesh:
        """Creates a mesh of one axis.

        Args:
            num_devices: The number of devices. By default, or with -1, all.
            axis_name: The name of the axis.

        Raises:
            ValueError: If there are too few devices, or `num_devices` is below 1 and not -1.
        """
        return self.create_device_mesh({axis_name: -1 if num_devices is None else num_devices}, self.devices)

    @_OnClassOrInstance
    def create_model_parallel_mesh(self, num_devices: int | None = None, axis_name: str = "model") -> Mesh:
        """Creates a mesh of one axis, as `create_data_parallel_mesh` does, with another default name."""
        return self.create_data_parallel_mesh(num_devices, axis_name)

    @_OnClassOrInstance
    def create_hybrid_mesh(
        self,
        data_parallel_size: int = 1,
        model_parallel_size: int = 1,
        data_axis: str = "data",
        model_axis: str = "model",
    ) -> Mesh:
        """Creates a mesh of two axes.

        Args:
            data_parallel_size: The size of the outer axis.
            model_parallel_size: The size of the inner axis.
            data_axis: The name of the outer axis.
            model_axis: The name of the inner axis.

        Raises:
            ValueError: If there are too few devices, a size is invalid, or both axes have the same name.
        """
        axes = [(data_axis, data_parallel_size), (model_axis, model_parallel_size)]
        return self.create_device_mesh(axes, self.devices)

    @_OnClassOrInstance
    def get_mesh_info(self, mesh: Mesh | DeviceMesh) -> dict[str, Any]:
        """Returns the number of devices and the axis sizes of a mesh; `DeviceMesh.info` returns more.

        Args:
            mesh: A mesh of JAX, Keras or this package.

        Returns:
            `{"total_devices": int, "axes": {name: size}}`.
        """
        axes = dict(mesh.shape) if isinstance(mesh.shape, Mapping) else dict(as_device_mesh(mesh).axis_sizes)
        return {"total_devices": math.prod(axes.values()), "axes": axes}


def create_mesh(
    axis_dims: MeshAxes = _DIMS,
    axis_names: Sequence[str] | None = _NAMES,
    dcn_mesh_dims: Any = None,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = True,
    backend: str | None = None,
    use_jax: bool = False,
    axis_types: Any = None,
) -> Mesh:
    """Creates a `jax.sharding.Mesh` of all devices, with eformer's arguments.

    Args:
        axis_dims: The axes of the global mesh, in any form. One size may be -1, which stands for the remaining devices.
        axis_names: One name per axis, if `axis_dims` includes none.
        dcn_mesh_dims: The degree of each axis across slices or hosts, in any form of `create_device_mesh`'s `dcn`.
        should_sort_granules_by_key: Whether slices and hosts are ordered by their index instead of by JAX's order.
        allow_split_physical_axes: Whether one axis of a TPU torus may serve several axes of the mesh.
        backend: `"cpu"`, `"gpu"` or `"tpu"`. By default accelerators if there are any.
        use_jax: Accepted for compatibility, without effect.
        axis_types: How JAX treats the axes, as for `DeviceMesh`.

    Returns:
        The mesh. JAX returns the same object for equal meshes.

    Raises:
        ValueError: If the axes are invalid, their product is not the number of devices, or `dcn_mesh_dims` does not fit
            them.
        TypeError: If a size is not an integer or a name is not a string.

    Example:

    >>> create_mesh().shape["fsdp"]
    8
    >>> create_mesh((2, -1), ("data", "model")).devices.shape
    (2, 4)
    """
    devices = jax.devices() if backend is None else platform_devices(backend)
    if axis_names is _NAMES:
        axis_names = default_names(axis_dims, _NAMES)
    axes = solve_axes(parse_axes(axis_dims, axis_names), len(devices), more=how_to_simulate)
    arranged = arrange_devices(devices, axes, dcn_mesh_dims, should_sort_granules_by_key, allow_split_physical_axes)
    return DeviceMesh(axes, devices=arranged, axis_types=axis_types).backend_mesh


def create_cpu_mesh(axis_dims: MeshAxes = _DIMS, axis_names: Sequence[str] | None = _NAMES) -> Mesh:
    """Creates a mesh of all CPU devices, also on a machine with accelerators; otherwise like `create_mesh`.

    Args:
        axis_dims: The axes of the global mesh, in any form. One size may be -1, which stands for the remaining devices.
        axis_names: One name per axis, if `axis_dims` includes none.
    """
    return create_mesh(axis_dims, axis_names, backend="cpu")


def parse_mesh_from_string(axis_dims: str, names: Sequence[str]) -> Mesh:
    """Creates a mesh of all devices from text.

    Args:
        axis_dims: `"dp:2,tp:4"`, in the order of the text, or `"2,4"`, in the order of `names`. One size may be -1.
        names: The names of the axes. If the text includes names, they must be the same.

    Raises:
        ValueError: If the text has another form, the names differ, or the product is not the number of devices.

    Example:

    >>> dict(parse_mesh_from_string("dp:2, tp:-1", ["dp", "tp"]).shape)
    {'dp': 2, 'tp': 4}
    """
    return create_mesh(axis_dims, names)


def calculate_host_mesh_shape(
    global_mesh_shape: MeshAxes, total_devices: int | None = None, num_processes: int | None = None
) -> tuple[int, ...]:
    """Returns the shape of one process's part of a mesh, if processes are placed along the outermost axes.

    This holds for hosts of GPUs and CPUs. Within a slice of TPUs, the torus determines the positions of devices.

    Args:
        global_mesh_shape: The axes of the global mesh, in any form.
        total_devices: The number of devices of each process. By default that of this process.
        num_processes: The number of processes. By default that of this program.

    Raises:
        ValueError: If the mesh does not have as many devices as the processes together, or a number is below 1.

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
            f"total_devices={per_process!r} and num_processes={processes!r} must be integers of at least 1. Omit them "
            "to use those of this program."
        )
    axes = parse_axes(global_mesh_shape, default_names(global_mesh_shape))
    available = f"available on {counted(processes, 'process')} of {counted(per_process, 'device')}"
    axes = solve_axes(axes, per_process * processes, available)
    degrees = spread_axes(axes, processes, group_name="processes")
    return tuple(size // degrees[name] for name, size in axes.items())


@contextlib.contextmanager
def cpu_context() -> Iterator[Mesh]:
    """Computes on the CPU for a block of code, in which partition specs refer to a mesh of all CPU devices.

    Yields:
        The mesh, as `create_cpu_mesh` creates it by default: all CPU devices along `"fsdp"`.

    Example:

    >>> with cpu_context() as mesh:
    ...     x = jax.lax.with_sharding_constraint(jax.numpy.ones((16, 2)), jax.P("fsdp"))
    >>> x.sharding.shard_shape(x.shape)
    (2, 2)
    """
    mesh = create_cpu_mesh()
    with force_cpu(), contextlib.ExitStack() as stack:
        # Deprecated, but jax.set_mesh would also place every new array on the mesh.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            stack.enter_context(mesh)
        yield mesh
