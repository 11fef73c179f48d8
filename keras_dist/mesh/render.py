"""Pictures of a mesh, for the terminal and the notebook: which device sits where."""

import html
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keras_dist.mesh.axes import spell_axes
from keras_dist.mesh.devices import Device, device_name
from keras_dist.mesh.topology import coordinates_of, slice_of

_MOST_COLUMNS, _MOST_ROWS = 16, 32
_EDGE = 4  # how many rows and columns of a larger mesh are shown at each end


class _Cell(NamedTuple):
    text: str
    place: int | None = None  # the number of the slice, or of the host where there is one slice


def picture_text(devices: np.ndarray, axis_names: Sequence[str]) -> str:
    """Returns a table as text: columns along the innermost axis, rows along all others.

    Args:
        devices: the devices in the shape of the mesh.
        axis_names: the name of each axis.

    Returns:
        Lines of text. Of a mesh of many rows or columns the first and the last are shown.
    """
    title, table = _table(devices, axis_names)
    widths = [max(len(cell.text) for cell in column) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.text.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join([title, *(line.rstrip() for line in lines)])


def picture_html(devices: np.ndarray, axis_names: Sequence[str]) -> str:
    """Returns the table of `picture_text` as HTML, one colour for each slice or host.

    Args:
        devices: the devices in the shape of the mesh.
        axis_names: the name of each axis.

    Returns:
        A `<table>` element.
    """
    title, table = _table(devices, axis_names)
    places = sorted({cell.place for row in table for cell in row if cell.place is not None})

    def element(cell: _Cell) -> str:
        if cell.place is None:
            return f"<th>{html.escape(cell.text)}</th>"
        hue = 360 * places.index(cell.place) // len(places)
        return f'<td style="background: hsla({hue}, 60%, 60%, 0.35)">{html.escape(cell.text)}</td>'

    rows = "\n".join(f"<tr>{''.join(map(element, row))}</tr>" for row in table)
    return f"<table><caption>{html.escape(title)}</caption>\n{rows}\n</table>"


def _table(devices: np.ndarray, axis_names: Sequence[str]) -> tuple[str, list[list[_Cell]]]:
    """A title, and the rows of a table, the first of which is the heading."""
    flat = devices.ravel().tolist()
    hosts, slices = len({device.process_index for device in flat}), len(set(map(slice_of, flat)))
    has_cores = any(getattr(device, "core_on_chip", 0) for device in flat)
    kind = flat[0].platform if flat[0].device_kind == flat[0].platform else flat[0].device_kind
    title = f"{spell_axes(dict(zip(axis_names, devices.shape, strict=True)))}, {len(flat)} {kind} device"
    title += "s" * (len(flat) > 1) + f", {slices} slices" * (slices > 1) + f", {hosts} hosts" * (hosts > 1)

    def cell(device: Device) -> _Cell:
        coordinates = coordinates_of(device)
        parts = [device_name(device)]
        if coordinates is not None:
            parts.append(f"({','.join(map(str, coordinates))})" + (f"/{device.core_on_chip}" if has_cores else ""))
        parts += [f"host {device.process_index}"] * (hosts > 1) + [f"slice {slice_of(device)}"] * (slices > 1)
        return _Cell(" ".join(parts), slice_of(device) if slices > 1 else device.process_index)

    def label(row: int) -> _Cell:
        at = np.unravel_index(row, devices.shape[:-1]) if devices.ndim > 1 else ()
        return _Cell(" ".join(f"{name}={i}" for name, i in zip(axis_names[:-1], at, strict=True)))

    left_out = _Cell("...")
    grid = devices.reshape(-1, devices.shape[-1])
    columns, rows = indices_shown(grid.shape[1], _MOST_COLUMNS), indices_shown(grid.shape[0], _MOST_ROWS)
    table = [[_Cell(""), *(left_out if i is None else _Cell(f"{axis_names[-1]}={i}") for i in columns)]]
    for row in rows:
        if row is None:
            table.append([left_out] * (1 + len(columns)))
        else:
            table.append([label(row), *(left_out if i is None else cell(grid[row, i]) for i in columns)])
    return title, table


def indices_shown(count: int, most: int) -> list[int | None]:
    """Returns which rows or columns of a table are shown; None stands for those left out."""
    if count <= most:
        return list(range(count))
    return [*range(_EDGE), None, *range(count - _EDGE, count)]
