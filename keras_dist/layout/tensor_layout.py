"""`TensorLayout`: which mesh axes the dims of one tensor are sharded over."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import keras
from jax.sharding import AxisType

from keras_dist._report.units import counted
from keras_dist.mesh.device_mesh import DeviceMesh, as_auto_mesh, as_device_mesh

Axes = tuple[str | tuple[str, ...] | None, ...]

HOST_MEMORY = "pinned_host"  # JAX's name of the memory of the host that a device is attached to


class TensorLayout(keras.distribution.TensorLayout):
    """The mesh axes that each dim of one tensor is sharded over.

    Two layouts are equal if their axes, meshes and kinds of memory are equal. A layout is immutable, except that a
    layout without a mesh can be given one, once.

    Args:
        axes: One entry per dim: `None` (not sharded), the name of a mesh axis, or a tuple of names for a dim that is
            sharded over several axes, outermost first. Dims beyond the last entry are not sharded. A
            `jax.sharding.PartitionSpec` is accepted as well.
        device_mesh: The mesh whose axes are named. May be set later, as `LayoutMap` does.
        memory_kind: JAX's name of the memory that shards are in, such as "pinned_host". By default that of the device.

    Raises:
        ValueError: An axis that the mesh does not have or that appears twice, or a `PartitionSpec` with
            `UNCONSTRAINED` dims or with `unreduced` or `reduced` axes.
        TypeError: `axes` is not a sequence of such entries.

    Example:

    >>> mesh = DeviceMesh((2, 4), ["data", "model"])
    >>> TensorLayout((None, "model"), mesh).backend_layout.shard_shape((16, 16))
    (16, 4)
    >>> TensorLayout((("data", "model"), None), mesh).backend_layout.shard_shape((16, 16))
    (2, 16)
    """

    def __init__(
        self,
        axes: Iterable,
        device_mesh: keras.distribution.DeviceMesh | jax.sharding.Mesh | None = None,
        memory_kind: str | None = None,
    ):
        self._axes: Axes = _standardize_axes(axes)
        self._memory_kind = memory_kind
        self._device_mesh: DeviceMesh | None = None if device_mesh is None else as_device_mesh(device_mesh)
        self._has_mesh_of_map = False
        known = None if self._device_mesh is None else list(self._device_mesh.axis_names)
        unknown = [] if known is None else [name for name in axis_names(self._axes) if name not in known]
        if unknown:
            raise ValueError(
                f"Invalid axis names for Layout {self._axes}: the mesh has no axis {unknown[0]!r}. Use one of its axes "
                f"{known}, or None."
            )

    @property
    def axes(self) -> Axes:
        """For each dim `None`, the name of a mesh axis, or a tuple of names."""
        return self._axes

    @property
    def memory_kind(self) -> str | None:
        """JAX's name of the memory that shards are in; None for that of the device."""
        return self._memory_kind

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh, or None if it is not set yet. It can be set once."""
        return self._device_mesh

    @device_mesh.setter
    def device_mesh(self, device_mesh: keras.distribution.DeviceMesh | jax.sharding.Mesh):
        if self._device_mesh is not None:
            raise ValueError(
                f"Cannot override device mesh value. The layout {self.axes} already has {self._device_mesh} and cannot "
                f"be moved to {device_mesh}. Create another TensorLayout for another mesh."
            )
        self._device_mesh = TensorLayout(self._axes, device_mesh).device_mesh

    @property
    def backend_layout(self) -> jax.sharding.NamedSharding:
        """This layout as a `jax.sharding.NamedSharding`.

        Raises:
            ValueError: The layout has no mesh.
        """
        if self._device_mesh is None:
            raise ValueError(
                f"Cannot create sharding when device mesh is not set for TensorLayout {self.axes}. Pass device_mesh, "
                "or assign the layout to a key of a LayoutMap."
            )
        spec = jax.sharding.PartitionSpec(*self._axes)
        return jax.sharding.NamedSharding(self._device_mesh.backend_mesh, spec, memory_kind=self._memory_kind)

    def __eq__(self, other):
        if not isinstance(other, keras.distribution.TensorLayout):
            return NotImplemented
        return (
            self._axes == other.axes
            and self._memory_kind == getattr(other, "memory_kind", None)
            and self._device_mesh == other.device_mesh  # which may be a plain Keras mesh; ours implements equality
        )

    def __hash__(self):
        return hash(self._axes)  # without the mesh, which may be set later


def as_tensor_layout(value) -> TensorLayout:
    """Converts axes, or a layout of Keras, to a `TensorLayout`, which has a mesh only if `value` has one."""
    if isinstance(value, (tuple, list, jax.sharding.PartitionSpec)):
        return TensorLayout(value)
    if not isinstance(value, keras.distribution.TensorLayout):
        raise ValueError(
            f"{value!r} should be a TensorLayout type or a tuple or list of axes, got {type(value).__name__}. "
            "Write, for example, (None, 'model')."
        )
    return value if isinstance(value, TensorLayout) else TensorLayout(value.axes, value.device_mesh)


def is_in_host_memory(layout: object) -> bool:
    """Returns whether a layout, also one of Keras or JAX, is one of host memory."""
    return getattr(layout, "memory_kind", None) == HOST_MEMORY


def with_map_mesh(layout: TensorLayout, device_mesh: DeviceMesh | None) -> TensorLayout:
    """Gives a layout without a mesh that of a `LayoutMap`, as Keras does; one with that of another map is copied."""
    mesh = layout.device_mesh
    has_own_mesh = mesh is not None and not layout._has_mesh_of_map
    if mesh is not None and set(mesh.axis_types) - {AxisType.Auto}:
        return TensorLayout(layout.axes, as_auto_mesh(mesh.backend_mesh), layout.memory_kind)
    if device_mesh is None or has_own_mesh or mesh == device_mesh:
        return layout
    given = layout if mesh is None else TensorLayout(layout.axes, memory_kind=layout.memory_kind)
    given.device_mesh = device_mesh
    given._has_mesh_of_map = True
    return given


def as_layout_on_mesh(value, distribution) -> TensorLayout:
    """Converts as `as_tensor_layout` does; a layout without a mesh gets that of `distribution`, ValueError if None."""
    layout = as_tensor_layout(value)
    if layout.device_mesh is not None:
        return layout
    if distribution is None:
        raise ValueError(
            f"layout={layout.axes!r} names axes of the active distribution's mesh, but no distribution is active. Pass "
            "keras_dist.TensorLayout(axes, device_mesh), or call keras_dist.set_distribution(...) first."
        )
    return TensorLayout(layout.axes, distribution.device_mesh, layout.memory_kind)


def layout_error(axes: Axes, shape: Sequence[int], axis_sizes: Mapping[str, int]) -> str | None:
    """Returns in a sentence why a tensor of this shape cannot have these axes, and in another the fix; None if it can.

    A dim of size None (unknown) fits every axis.

    >>> print(layout_error((None, "model"), (64, 6), {"model": 4}))
    dim 1 has size 6, which is not divisible by axis 'model' (size 4). Replicate it with (None, None), or use a \
'model' axis of size 1, 2, 3 or 6.
    """
    if len(axes) > len(shape):
        dims = counted(len(shape), "dim")
        return (
            f"the layout has {counted(len(axes), 'entry')}, but the tensor has {dims}. Shorten "
            f"the layout to {axes[: len(shape)]}, or write a separate rule for tensors with {dims}."
        )
    for dim, (entry, size) in enumerate(zip(axes, shape, strict=False)):
        names = axis_tuple(entry)
        axis_size = math.prod(axis_sizes[name] for name in names)
        if size is None or size % axis_size == 0:
            continue
        if len(names) == 1:
            axis, fix = f"axis {names[0]!r} (size {axis_size})", f"a {names[0]!r} axis of size {_divisors(size)}"
        else:
            axis, fix = f"axes {names} (product {axis_size})", f"axes whose product is {_divisors(size)}"
        # A rule with fewer entries than dims is often a matrix's, written for the last dims: of a convolution, say.
        other = nearest_fitting_axes(axes, shape, axis_sizes) if len(axes) < len(shape) and None not in shape else ()
        advice = f"Shard another dim with {other}, replicate it" if any(other) else "Replicate it"
        replicated = (*axes[:dim], None, *axes[dim + 1 :])
        return f"dim {dim} has size {size}, which is not divisible by {axis}. {advice} with {replicated}, or use {fix}."
    return None


def nearest_fitting_axes(axes: Axes, shape: Sequence[int], axis_sizes: Mapping[str, int]) -> Axes:
    """Returns the axes, one entry per dim, closest to the given ones that a tensor of this shape can have.

    Candidates are all ways to assign the given entries to dims. Of those that fit, the one with the most shards is
    chosen; of these, the one with most dims unchanged; of these, the one that shards the largest dims. An entry list
    that is too long is compared by its last entries.

    >>> nearest_fitting_axes(("model", None), (6, 16), {"model": 4})
    (None, 'model')
    >>> nearest_fitting_axes((None, None, "model"), (16, 32), {"model": 4})
    (None, 'model')
    """
    rank = len(shape)
    wanted = axes[len(axes) - rank :] if len(axes) > rank else (*axes, *[None] * (rank - len(axes)))
    entries = [entry for entry in axes if entry is not None]

    def shards(entry) -> int:
        return math.prod(axis_sizes[name] for name in axis_tuple(entry))

    def merit(candidate: Axes) -> tuple[int, int, int]:
        unchanged = sum(one == other for one, other in zip(candidate, wanted, strict=True))
        sharded_size = math.prod(size for size, entry in zip(shape, candidate, strict=True) if entry)
        return math.prod(map(shards, candidate)), unchanged, sharded_size

    candidates = set(itertools.permutations([*entries, *[None] * rank], rank))
    fitting = [c for c in candidates if all(size % shards(entry) == 0 for size, entry in zip(shape, c, strict=True))]
    return max(sorted(fitting, key=str), key=merit)


def axis_tuple(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns one entry of a layout's axes as a tuple of names: `None` as `()`, `"a"` as `("a",)`."""
    if entry is None:
        return ()
    if not isinstance(entry, Iterable):
        raise TypeError(f"Mesh axes {entry!r} must be None, the name of an axis, or a tuple of names.")
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axis_names(axes: Iterable[str | tuple[str, ...] | None]) -> list[str]:
    """Returns the names of the mesh axes that the entries of a layout use, in their order."""
    return [name for entry in axes for name in axis_tuple(entry)]


def _divisors(number: int) -> str:
    divisors = [d for d in range(1, min(number, 4096) + 1) if number % d == 0]
    if len(divisors) > 6:
        divisors = [*divisors[:5], divisors[-1]]
    *most, last = map(str, divisors)
    return f"{', '.join(most)} or {last}" if most else last


def _standardize_axes(axes: Iterable) -> Axes:
    if isinstance(axes, str) or not isinstance(axes, Iterable):
        raise TypeError(
            f"Axes must be a tuple or list with one entry per dim, but got {axes!r}. Write, for example, ({axes!r},)."
        )
    if isinstance(axes, jax.sharding.PartitionSpec) and (
        axes.unreduced or axes.reduced or axes.UNCONSTRAINED in tuple(axes)
    ):
        raise ValueError(
            f"{axes!r} cannot be a TensorLayout: UNCONSTRAINED dims and unreduced or reduced axes are not supported. "
            "Write None for a dim that is not sharded."
        )
    entries: list[str | tuple[str, ...] | None] = []
    for entry in axes:
        names = entry if isinstance(entry, (tuple, list)) else () if entry is None else (entry,)
        if not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"Axes {axes!r} contain the entry {entry!r}. Each entry must be None, the name of a mesh axis, or a "
                "tuple of names."
            )
        entries.append(None if not names else names[0] if len(names) == 1 else tuple(names))
    names = axis_names(entries)
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(
            f"Mesh axis {repeated!r} is used twice in {tuple(entries)}, but it can shard only one dim of a tensor. "
            "Remove it from the other dims."
        )
    return tuple(entries)
