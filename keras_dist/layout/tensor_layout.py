"""`TensorLayout`: which mesh axes the dims of one tensor are sharded over."""

import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import keras

from keras_dist.mesh.device_mesh import DeviceMesh, as_device_mesh

Axes = tuple[str | tuple[str, ...] | None, ...]


class TensorLayout(keras.distribution.TensorLayout):
    """How one tensor lies on a mesh: for each of its dims, the mesh axes it is sharded over.

    Two layouts are equal when their axes and their meshes are. A layout without a mesh can be given one later, once;
    apart from that it does not change.

    Args:
        axes: one entry for each dim: `None` (not sharded), the name of a mesh axis, or a tuple of names for a dim that
            is sharded over several axes, the first one outermost. Dims beyond the last entry are not sharded. A
            `jax.sharding.PartitionSpec` says the same.
        device_mesh: the mesh that the names belong to. May be set later, as `LayoutMap` does.

    Raises:
        ValueError: an axis that the mesh does not have, or that is used for two dims, or a `PartitionSpec` that
            leaves a dim to the compiler (`UNCONSTRAINED`) or has axes that are `unreduced` or `reduced`.
        TypeError: axes that are no sequence of the entries above.

    Example:

    >>> mesh = DeviceMesh((2, 4), ["data", "model"])
    >>> TensorLayout((None, "model"), mesh).backend_layout.shard_shape((16, 16))
    (16, 4)
    >>> TensorLayout((("data", "model"), None), mesh).backend_layout.shard_shape((16, 16))
    (2, 16)
    """

    def __init__(self, axes: Iterable, device_mesh: keras.distribution.DeviceMesh | jax.sharding.Mesh | None = None):
        self._axes: Axes = _standardize_axes(axes)
        self._device_mesh: DeviceMesh | None = None if device_mesh is None else as_device_mesh(device_mesh)
        self._mesh_is_from_a_map = False
        self._validate_axes()

    @property
    def axes(self) -> Axes:
        """For each dim `None`, the name of an axis, or a tuple of names."""
        return self._axes

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh, or None where the layout has none yet. Can be set once."""
        return self._device_mesh

    @device_mesh.setter
    def device_mesh(self, device_mesh: keras.distribution.DeviceMesh | jax.sharding.Mesh):
        if self._device_mesh is not None:
            raise ValueError(
                f"Cannot override device mesh value. The layout {self.axes} lies on {self._device_mesh}. Received: "
                f"{device_mesh}. Make another TensorLayout for another mesh."
            )
        device_mesh = as_device_mesh(device_mesh)
        _require_axes(self._axes, device_mesh)
        self._device_mesh = device_mesh

    @property
    def backend_layout(self) -> jax.sharding.NamedSharding:
        """The `jax.sharding.NamedSharding` of this layout, made at the first use.

        Raises:
            ValueError: the layout has no mesh.
        """
        if self._device_mesh is None:
            raise ValueError(
                f"Cannot create sharding when device mesh is not set for TensorLayout. Received: axes={self.axes}. "
                "Pass device_mesh, or put the layout into a LayoutMap."
            )
        sharding, mesh = getattr(self, "_backend_layout", None), self._device_mesh.backend_mesh
        if sharding is None or sharding.mesh is not mesh:
            spec = jax.sharding.PartitionSpec(*self._axes)
            sharding = self._backend_layout = jax.sharding.NamedSharding(mesh, spec)
        return sharding

    def with_map_mesh(self, device_mesh: DeviceMesh | None) -> "TensorLayout":
        """Returns this layout for a `LayoutMap` of the given mesh.

        A layout without a mesh takes the map's, as it does in Keras. One that has its mesh from another map is left
        alone, and a copy on this map's mesh is returned. One that was made with a mesh keeps it.

        Args:
            device_mesh: the map's mesh, None where it has none.

        Returns:
            This layout or a copy.

        Raises:
            ValueError: axes that the map's mesh does not have.
        """
        made_with_its_mesh = self._device_mesh is not None and not self._mesh_is_from_a_map
        if device_mesh is None or made_with_its_mesh or self._device_mesh == device_mesh:
            return self
        layout = self if self._device_mesh is None else TensorLayout(self._axes)
        layout.device_mesh = device_mesh
        layout._mesh_is_from_a_map = True
        return layout

    def _validate_axes(self):
        if self._device_mesh is not None:
            _require_axes(self._axes, self._device_mesh)

    def __eq__(self, other):
        if not isinstance(other, keras.distribution.TensorLayout):
            return NotImplemented
        # The mesh of `other` may be a plain Keras one, which only ours knows how to compare.
        return self._axes == other.axes and (
            self._device_mesh is other.device_mesh
            or (self._device_mesh is not None and self._device_mesh == other.device_mesh)
        )

    def __hash__(self):
        # Not of the mesh, which may be set later.
        return hash(self._axes)

    def __getstate__(self):
        return {key: value for key, value in vars(self).items() if key != "_backend_layout"}


def as_tensor_layout(value) -> TensorLayout:
    """Returns a layout as ours: ours itself, one made of axes, or one equal to a layout of Keras.

    Args:
        value: a layout of ours or of Keras, or axes: a tuple, a list or a `jax.sharding.PartitionSpec`.

    Returns:
        A layout, without a mesh where `value` brings none.

    Raises:
        ValueError: another type, or axes that its mesh does not have.
    """
    if isinstance(value, (tuple, list, jax.sharding.PartitionSpec)):
        return TensorLayout(value)
    if not isinstance(value, keras.distribution.TensorLayout):
        raise ValueError(
            f"{value!r} should be a TensorLayout type or a tuple or list of axes, got {type(value).__name__}. "
            "Write, for example, (None, 'model')."
        )
    return value if isinstance(value, TensorLayout) else TensorLayout(value.axes, value.device_mesh)


def layout_error(axes: Axes, shape: Sequence[int], axis_sizes: Mapping[str, int]) -> str | None:
    """Says why a tensor cannot have a layout, and the nearest one that it can; None where it fits.

    Args:
        axes: the layout's axes.
        shape: the tensor's shape; an unknown dim (None) fits everything.
        axis_sizes: the sizes of the mesh's axes by name.

    Returns:
        A sentence with the reason and one with the way out, or None.

    Example:

    >>> print(layout_error((None, "model"), (64, 6), {"model": 4}))
    dim 1 has size 6, which axis 'model' (size 4) does not divide. Replicate that dim with (None, None), or use a \
'model' axis of size 1, 2, 3 or 6.
    """
    if len(axes) > len(shape):
        dims = f"{len(shape)} dim{'s' * (len(shape) != 1)}"
        return (
            f"the rule has {len(axes)} entr{'y' if len(axes) == 1 else 'ies'}, but the tensor has {dims}. "
            f"Give tensors of {dims} a rule of their own, or shorten the rule to {axes[: len(shape)]}."
        )
    for dim, entry in enumerate(axes):
        names = axis_tuple(entry)
        size = math.prod(axis_sizes[name] for name in names)
        rows = shape[dim]
        if rows is None or rows % size == 0:
            continue
        whole = (*axes[:dim], None, *axes[dim + 1 :])
        if len(names) == 1:
            axis, product = f"axis {names[0]!r} (size {size})", f"a {names[0]!r} axis of size {_divisors(rows)}"
        else:
            axis, product = f"axes {names} (product {size})", f"axes whose product is {_divisors(rows)}"
        return (
            f"dim {dim} has size {rows}, which {axis} does not divide. "
            f"Replicate that dim with {whole}, or use {product}."
        )
    return None


def axis_tuple(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns one entry of a layout's axes as a tuple of names: `None` as `()`, `"a"` as `("a",)`."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry


def _divisors(number: int) -> str:
    divisors = [d for d in range(1, min(number, 4096) + 1) if number % d == 0]
    if len(divisors) > 6:
        divisors = [*divisors[:5], divisors[-1]]
    *most, last = map(str, divisors)
    return f"{', '.join(most)} or {last}" if most else last


def _standardize_axes(axes: Iterable) -> Axes:
    if isinstance(axes, str) or not isinstance(axes, Iterable):
        raise TypeError(
            f"Axes must be a tuple or list with one entry for each dim. Received: {axes!r}. "
            f"Write, for example, ({axes!r},)."
        )
    if isinstance(axes, jax.sharding.PartitionSpec) and (
        axes.unreduced or axes.reduced or axes.UNCONSTRAINED in tuple(axes)
    ):
        raise ValueError(
            "A layout says for each dim which mesh axes it is sharded over: it leaves none to the compiler, and has no "
            f"unreduced or reduced axes. Received: {axes!r}. Write None for a dim that is not sharded."
        )
    entries: list[str | tuple[str, ...] | None] = []
    for entry in axes:
        names = entry if isinstance(entry, (tuple, list)) else () if entry is None else (entry,)
        if not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"Each entry of a layout is None, the name of a mesh axis, or a tuple of names. Received: {axes!r}."
            )
        entries.append(None if not names else names[0] if len(names) == 1 else tuple(names))
    names = [name for entry in entries for name in axis_tuple(entry)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"A mesh axis can shard one dim of a tensor, but axis {twice!r} is used twice. Received: "
            f"axes={tuple(entries)}. Leave it out of all dims but one."
        )
    return tuple(entries)


def _require_axes(axes: Axes, device_mesh: DeviceMesh) -> None:
    unknown = [name for entry in axes for name in axis_tuple(entry) if name not in device_mesh.axis_sizes]
    if unknown:
        raise ValueError(
            f"Invalid axis names for Layout. The mesh has the axes {list(device_mesh.axis_sizes)}. Got {axes}, "
            f"where {unknown[0]!r} is none of them. Use one of the mesh's axes, or None."
        )
