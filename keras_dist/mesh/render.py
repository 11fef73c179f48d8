"""Tables of a mesh for the terminal and the notebook: the device at each position."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keras_dist._report.tables import Table, render_html
from keras_dist.mesh.axes import spell_axes
from keras_dist.mesh.devices import Device, device_name
from keras_dist.mesh.topology import coordinates_of, slice_of

_MAX_COLUMNS, _MAX_ROWS = 16, 32
_EDGE = 4  # rows and columns that are shown at each end of a larger mesh


class _Cell(NamedTuple):
    text: str
    group: int | None = None  # the index of the slice, or of the host if there is one slice


def mesh_text(devices: np.ndarray, axis_names: Sequence[str]) -> str:
    """Returns a table as text: columns along the innermost axis, rows along the others; of many, the first and last."""
    title, table = _title_and_table(devices, axis_names)
    widths = [max(len(cell.text) for cell in column) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.text.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join([title, *(line.rstrip() for line in lines)])


def mesh_html(devices: np.ndarray, axis_names: Sequence[str]) -> str:
    """Returns the table of `mesh_text` as HTML, with one background color per slice or host."""
    title, (head, *rows) = _title_and_table(devices, axis_names)
    groups = sorted({cell.group for row in rows for cell in row if cell.group is not None})

    def color(cell: _Cell) -> str | None:
        if cell.group is None:
            return None
        return f"hsla({360 * groups.index(cell.group) // len(groups)}, 60%, 60%, 0.35)"

    texts = [[cell.text for cell in row] for row in rows]
    table = Table([cell.text for cell in head], texts, colors=[list(map(color, row)) for row in rows])
    return render_html([(title, [table])])


def _title_and_table(devices: np.ndarray, axis_names: Sequence[str]) -> tuple[str, list[list[_Cell]]]:
    """Returns a title and the rows of a table, of which the first is the heading."""
    flat = devices.ravel().tolist()
    hosts, slices = len({device.process_index for device in flat}), len(set(map(slice_of, flat)))
    has_cores = any(getattr(device, "core_on_chip", 0) for device in flat)
    title = f"{spell_axes(dict(zip(axis_names, devices.shape, strict=True)))}, {len(flat)} {flat[0].device_kind} device"
    title += "s" * (len(flat) > 1) + f", {slices} slices" * (slices > 1) + f", {hosts} hosts" * (hosts > 1)

    def cell(device: Device) -> _Cell:
        coordinates = coordinates_of(device)
        parts = [device_name(device)]
        if coordinates is not None:
            parts.append(f"({','.join(map(str, coordinates))})" + (f"/{device.core_on_chip}" if has_cores else ""))
        parts += [f"host {device.process_index}"] * (hosts > 1) + [f"slice {slice_of(device)}"] * (slices > 1)
        return _Cell(" ".join(parts), slice_of(device) if slices > 1 else device.process_index)

    def label(row: int) -> _Cell:
        position = np.unravel_index(row, devices.shape[:-1]) if devices.ndim > 1 else ()
        return _Cell(" ".join(f"{name}={i}" for name, i in zip(axis_names[:-1], position, strict=True)))

    omitted = _Cell("...")
    grid = devices.reshape(-1, devices.shape[-1])
    columns, rows = visible_indices(grid.shape[1], _MAX_COLUMNS), visible_indices(grid.shape[0], _MAX_ROWS)
    table = [[_Cell(""), *(omitted if i is None else _Cell(f"{axis_names[-1]}={i}") for i in columns)]]
    for row in rows:
        if row is None:
            table.append([omitted] * (1 + len(columns)))
        else:
            table.append([label(row), *(omitted if i is None else cell(grid[row, i]) for i in columns)])
    return title, table


def visible_indices(count: int, most: int) -> list[int | None]:
    """Returns the rows or columns of a table to show; None stands for those that are omitted."""
    if count <= most:
        return list(range(count))
    return [*range(_EDGE), None, *range(count - _EDGE, count)]
