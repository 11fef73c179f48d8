"""`visualize`: which device holds which shard of a tensor, as text, as HTML and as a figure."""

import itertools
import math
import numbers
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import keras
from jax.core import Tracer
from jax.sharding import Sharding

from keras_dist._keras import internals
from keras_dist._report.figures import new_figure
from keras_dist._report.tables import Lines, Table, render_html, render_text
from keras_dist._report.units import counted
from keras_dist.layout.tensor_layout import as_layout_on_mesh, axis_tuple, layout_error
from keras_dist.mesh.axes import spell_axes
from keras_dist.mesh.device_mesh import as_device_mesh
from keras_dist.mesh.render import visible_indices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_COLUMNS, _MAX_ROWS, _MAX_RANGES, _MAX_WRITTEN = 12, 32, 4, 1024

Range = tuple[int, int]  # start and stop of a shard along one dim


@dataclass(frozen=True)
class TensorPicture:
    """Which device holds which shard of a tensor. Prints as a grid of up to two dims.

    Attributes:
        title: Shape and layout.
        notes: How each dim is sharded, and which dims are shown.
        dims: The dims shown, rows first: at most two, and only sharded ones.
        parts: For each dim shown, start and stop of its shards.
        cells: For each shard shown, by its index along each dim shown, the ids of the devices that hold it. If more
            than two dims are sharded, these are the shards with index 0 along the dims that are not shown.
    """

    title: str
    notes: tuple[str, ...]
    dims: tuple[int, ...]
    parts: tuple[tuple[Range, ...], ...]
    cells: Mapping[tuple[int, ...], tuple[int, ...]]

    def __str__(self) -> str:
        return render_text([(self.title, [Lines(self.notes), self._table()])])

    def _repr_html_(self) -> str:
        return render_html([(self.title, [Lines(self.notes), self._table()])])

    def figure(self) -> "Figure":
        """Returns a `matplotlib.figure.Figure`: a rectangle per shard, colored by the devices that hold it.

        A notebook shows it.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        rows, columns, grid = self._grid()
        colors = {ids: number for number, ids in enumerate(dict.fromkeys(self.cells.values()))}
        figure = new_figure(8, 6)
        axes = figure.subplots()
        edges = [[*(part[0] for part in parts), parts[-1][1]] for parts in (columns, rows)]
        numbers = [[colors[ids] for ids in row] for row in grid]
        axes.pcolormesh(*edges, numbers, cmap="viridis", alpha=0.4, edgecolors="white", vmin=0, vmax=len(colors))
        if len(rows) * len(columns) <= _MAX_WRITTEN:
            for row, ids_of_row in zip(rows, grid, strict=True):
                for column, ids in zip(columns, ids_of_row, strict=True):
                    axes.text(sum(column) / 2, sum(row) / 2, _ids_text(ids), ha="center", va="center", fontsize=8)
        axes.invert_yaxis()
        axes.set_title("\n".join([self.title, *self.notes]), fontsize=9)
        vertical, horizontal = (None, *self.dims)[-2:] if self.dims else (None, None)
        axes.set_xlabel("" if horizontal is None else f"dim {horizontal}")
        axes.set_ylabel("" if vertical is None else f"dim {vertical}")
        axes.set_xticks(edges[0] if horizontal is not None and len(edges[0]) <= 33 else [])
        axes.set_yticks(edges[1] if vertical is not None and len(edges[1]) <= 33 else [])
        return figure

    def _grid(self) -> tuple[Sequence[Range], Sequence[Range], list[list[tuple[int, ...]]]]:
        """Returns the ranges of rows, those of columns, and the ids of devices for each; a dim not shown has one."""
        rows, columns = (((0, 1),), ((0, 1),), *self.parts)[-2:]
        start = 2 - len(self.dims)
        return rows, columns, [[self.cells[(i, j)[start:]] for j in range(len(columns))] for i in range(len(rows))]

    def _table(self) -> Table:
        rows, columns, grid = self._grid()
        shown = visible_indices(len(columns), _MAX_COLUMNS)
        corner = " \\ ".join(f"dim {dim}" for dim in self.dims)
        heads = ["..." if j is None else "{}:{}".format(*columns[j]) if self.dims else "all" for j in shown]
        lines = []
        for i in visible_indices(len(rows), _MAX_ROWS):
            if i is None:
                lines.append(["..."] * (1 + len(shown)))
                continue
            label = "{}:{}".format(*rows[i]) if len(self.dims) == 2 else "device"
            lines.append([label, *("..." if j is None else _ids_text(grid[i][j]) for j in shown)])
        return Table([corner, *heads], lines)


def visualize(
    tensor: jax.Array | keras.Variable | Sequence[int],
    layout: keras.distribution.TensorLayout | Sequence[str | Sequence[str] | None] | Sharding | None = None,
) -> TensorPicture:
    """Returns a picture of which device holds which shard of a tensor.

    Args:
        tensor: A `jax.Array`, a variable (real or deferred), or a shape, for which `layout` is required.
        layout: For a shape: a `TensorLayout`, axes on the installed distribution's mesh (a tuple or list), or a JAX
            sharding. The devices need not be attached.

    Returns:
        The picture. Print it, show it in a notebook, or call its `figure()`.

    Raises:
        TypeError: `tensor` is not an array, a variable or a shape, or a layout is passed with an array.
        ValueError: The layout does not fit the shape or has no mesh, or a variable has no layout.

    Example:

    >>> from keras_dist import TensorLayout, create_device_mesh
    >>> layout = TensorLayout(("data", "model"), create_device_mesh("data:2,model:4"))
    >>> print(visualize((16, 8), layout))  # doctest: +ELLIPSIS
    (16, 8) as ('data', 'model') on data:2 x model:4 ───...
    Dim 0: 2 shards of size 8. Dim 1: 4 shards of size 2.
    Each shard is on 1 of 8 devices.
    dim 0 \\ dim 1  0:2  2:4  4:6  6:8
    ─────────────────────────────────
    0:8            0    1    2    3
    8:16           4    5    6    7
    """
    shape, sharding = _shape_and_sharding(tensor, layout)
    indices = sharding.devices_indices_map(shape)
    ranges = [sorted({index[dim].indices(size)[:2] for index in indices.values()}) for dim, size in enumerate(shape)]
    sharded = [dim for dim in range(len(shape)) if len(ranges[dim]) > 1]
    dims, hidden = tuple(sharded[-2:]), sharded[:-2]
    numbers = [{each: number for number, each in enumerate(ranges[dim])} for dim in range(len(shape))]
    cells: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for device, index in indices.items():
        position = [numbers[dim][index[dim].indices(size)[:2]] for dim, size in enumerate(shape)]
        if not any(position[dim] for dim in hidden):
            cells[tuple(position[dim] for dim in dims)].append(device.id)
    replicas = len(indices) // math.prod(len(ranges[dim]) for dim in sharded)
    shards = [f"Dim {dim}: {len(ranges[dim])} shards of size {ranges[dim][0][1]}." for dim in sharded]
    notes = [
        " ".join(shards) if sharded else "No dim is sharded.",
        f"Each shard is on {replicas} of {counted(len(indices), 'device')}.",
    ]
    if hidden:
        names = " and ".join(f"dim {dim}" for dim in hidden)
        notes.append(f"Dims {dims[0]} and {dims[1]} are shown, for the first shard of {names}.")
    return TensorPicture(
        title=f"{shape} as {_layout_text(sharding)}",
        notes=tuple(notes),
        dims=dims,
        parts=tuple(tuple(ranges[dim]) for dim in dims),
        cells={position: tuple(sorted(ids)) for position, ids in cells.items()},
    )


def _shape_and_sharding(tensor: Any, layout: Any) -> tuple[tuple[int, ...], Any]:
    sizes = tensor if isinstance(tensor, (tuple, list)) else [None]
    is_shape = all(isinstance(size, numbers.Integral) and int(size) >= 0 for size in sizes)
    if is_shape != (layout is not None) or not (is_shape or isinstance(tensor, (jax.Array, keras.Variable))):
        raise TypeError(
            f"Cannot visualize {_named(tensor)} with layout={layout!r}. Pass a jax.Array or a variable, or a shape and "
            'a layout: visualize((16, 8), TensorLayout(("data", None), device_mesh)).'
        )
    shape: tuple[int, ...] = tuple(tensor) if is_shape else tuple(getattr(tensor, "shape", ()))
    if isinstance(layout, Sharding):
        return shape, layout
    if is_shape:
        layout = as_layout_on_mesh(layout, internals.current_distribution())
        problem = layout_error(layout.axes, shape, as_device_mesh(layout.device_mesh).axis_sizes)
        if problem:
            raise ValueError(f"Cannot shard a tensor of shape {shape} as {layout.axes}: {problem}")
        return shape, layout.backend_layout
    value = internals.variable_value(tensor) if isinstance(tensor, keras.Variable) else tensor
    if isinstance(value, jax.Array) and not isinstance(value, Tracer):
        return shape, value.sharding
    given = internals.variable_layout(tensor)
    if given is None:
        raise ValueError(
            f"Variable {getattr(tensor, 'path', tensor)!r} has no value and no layout. Create it while a distribution "
            "is active, or pass a shape and a layout."
        )
    return shape, internals.as_sharding(given)


def _named(tensor: Any) -> str:
    if hasattr(tensor, "shape"):
        return f"a value of type {type(tensor).__name__} and shape {tuple(tensor.shape)}"
    return f"{str(tensor)[:80]} ({type(tensor).__name__})"


def _layout_text(sharding: Any) -> str:
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return type(sharding).__name__
    axes = [names if len(names := axis_tuple(entry)) > 1 else (*names, None)[0] for entry in sharding.spec]
    return f"{tuple(axes)} on {spell_axes(dict(sharding.mesh.shape))}"


def _ids_text(ids: Sequence[int]) -> str:
    """Returns ascending ids as ranges: `0-3,8`."""
    by_offset = itertools.groupby(enumerate(ids), lambda pair: pair[1] - pair[0])  # equal for consecutive ids
    runs = [[number for _, number in run] for _, run in by_offset]
    texts = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(texts) > _MAX_RANGES:
        texts = [*texts[: _MAX_RANGES - 2], "..", texts[-1]]
    return ",".join(texts)
