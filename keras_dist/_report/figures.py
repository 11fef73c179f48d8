"""Figures of matplotlib, an extra: without pyplot, its windows and its state."""

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

from keras_dist._report.install_advice import install_command
from keras_dist._report.tables import Bar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_UNITS = {  # the largest first
    "bytes": (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("bytes", 1.0)),
    "seconds": (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)),
}


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure of a size in inches, on a white ground, which pages of any color show as it is."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"figure() needs matplotlib. Run: {install_command('plot')}.") from error

    class NotebookFigure(Figure):
        def _repr_png_(self) -> bytes:  # a notebook shows others only after pyplot has loaded its inline backend
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return NotebookFigure(figsize=(width, height), dpi=100, facecolor="white", layout="constrained")


def draw_bars(axes: "Axes", title: str, bars: Iterable[Bar], width: float, quantity: str, note: str = "") -> None:
    """Draws a bar chart whose bars of equal label and figures share a row.

    The bars are fractions of a width in bytes or seconds, as `quantity` says. A note is written after the unit.
    """
    unit, size = next((each for each in _UNITS[quantity] if width >= each[1]), _UNITS[quantity][-1])
    rows: dict[str, int] = {}
    for bar in bars:
        row = rows.setdefault("  ".join((bar.label, *filter(None, bar.figures))), len(rows))
        color = ("gray", 0.3) if bar.is_limit else f"C{row % 10}"
        axes.barh(row, (bar.end - bar.start) * width / size, left=bar.start * width / size, color=color)
    axes.set_yticks([*rows.values()], labels=[*rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(unit + note)
    axes.set_title(title, loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
