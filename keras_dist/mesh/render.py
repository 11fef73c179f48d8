"""Tables of a mesh for the terminal and the notebook: the device at each position."""

from collections.abc import Sequence

import numpy as np

from keras_dist._report.tables import Table, render_html
from keras_dist._report.units import counted
from keras_dist.mesh.axes import spell_axes
from keras_dist.mesh.devices import Device, device_name
from keras_dist.mesh.topology import coordinates_of, slice_of

_MAX_COLUMNS, _MAX_ROWS = 16, 32
_EDGE = 4  # rows and columns that are shown at each end of a larger mesh


def mesh_text(devices: np.ndarray, axis_names: Sequence[str]) -> str:
    """Returns a table as text: columns along the innermost axis, rows along the others; of many, the first and last."""
    title, table, _ = _title_and_table(devices, axis_names)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join([title, *(line.rstrip() for line in lines)])


def mesh_html(devices: np.ndarray, axis_names: Sequence[str]) -> str:
    """Returns the table of `mesh_text` as HTML, with one background color per slice or host."""
    title, (head, *rows), groups = _title_and_table(devices, axis_names)
    numbers = sorted({number for row in groups for number in row if number is not None})
    colors = {number: f"hsla({360 * i // len(numbers)}, 60%, 60%, 0.35)" for i, number in enumerate(numbers)}
    table = Table(head, rows, colors=[[None if number is None else colors[number] for number in row] for row in groups])
    return render_html([(title, [table])])


def _title_and_table(
    devices: np.ndarray, axis_names: Sequence[str]
) -> tuple[str, list[list[str]], list[list[int | None]]]:
    """Returns a title, the rows of a table, the heading first, and the slice or host of each cell below the heading."""
    flat = devices.ravel().tolist()
    hosts, slices = len({device.process_index for device in flat}), len(set(map(slice_of, flat)))
    has_cores = any(getattr(device, "core_on_chip", 0) for device in flat)
    title = spell_axes(dict(zip(axis_names, devices.shape, strict=True)))
    title += f", {counted(len(flat), f'{flat[0].device_kind} device')}"
    title += f", {slices} slices" * (slices > 1) + f", {hosts} hosts" * (hosts > 1)
    group_of = slice_of if slices > 1 else lambda device: device.process_index

    def text(device: Device | None) -> str:
        if device is None:
            return "..."
        parts = [device_name(device)]
        if coordinates := coordinates_of(device):
            parts.append(f"({','.join(map(str, coordinates))})" + (f"/{device.core_on_chip}" if has_cores else ""))
        parts += [f"host {device.process_index}"] * (hosts > 1) + [f"slice {slice_of(device)}"] * (slices > 1)
        return " ".join(parts)

    grid = devices.reshape(-1, devices.shape[-1])
    columns, rows = visible_indices(grid.shape[1], _MAX_COLUMNS), visible_indices(grid.shape[0], _MAX_ROWS)
    table = [["", *("..." if i is None else f"{axis_names[-1]}={i}" for i in columns)]]
    groups = []
    for row in rows:
        position = () if row is None else np.unravel_index(row, devices.shape[:-1])
        label = " ".join(f"{name}={i}" for name, i in zip(axis_names, position, strict=False))
        shown = [None if row is None or i is None else grid[row, i] for i in columns]
        table.append(["..." if row is None else label, *map(text, shown)])
        groups.append([None, *(None if device is None else group_of(device) for device in shown)])
    return title, table, groups


def visible_indices(count: int, most: int) -> list[int | None]:
    """Returns the rows or columns of a table to show; None stands for those that are omitted."""
    if count <= most:
        return list(range(count))
    return [*range(_EDGE), None, *range(count - _EDGE, count)]
