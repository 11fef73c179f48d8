"""What reports are made of, each as text and as HTML: `Table`, `Bars` and `Lines`."""

import html
import io
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 120  # columns of text, whatever the terminal
_BAR_WIDTH = 60


@dataclass(frozen=True)
class Table:
    """Rows of text with a heading.

    Attributes:
        columns: the heading of each column; one that starts with ">" is of figures, which stand on the right.
        rows: as many cells each. A cell may have several lines.
        footer: a last row, of sums; None where there is none.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    footer: Sequence[str] | None = None

    def to_text(self) -> str:
        """Returns lines of at most `WIDTH` columns; what does not fit goes on in the next line."""
        from rich import box
        from rich.table import Table as RichTable

        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        for column in self.columns:
            is_figure = column.startswith(">")  # which stay whole; names give way
            justify = "right" if is_figure else "left"
            table.add_column(column.removeprefix(">"), justify=justify, overflow="fold", no_wrap=is_figure)
        for row in [*self.rows, *([] if self.footer is None else [self.footer])]:
            table.add_row(*row)
        return _printed(table)

    def to_html(self) -> str:
        """Returns a `<table>` element; cells are escaped."""

        def line(cells: Iterable[str], tag: str) -> str:
            elements = []
            for column, cell in zip(self.columns, cells, strict=True):
                style = ' class="figure"' if column.startswith(">") else ""
                elements.append(f"<{tag}{style}>{_escaped(cell)}</{tag}>")
            return f"<tr>{''.join(elements)}</tr>"

        head = line([column.removeprefix(">") for column in self.columns], "th")
        body = "\n".join(line(row, "td") for row in self.rows)
        foot = "" if self.footer is None else f"\n<tfoot>{line(self.footer, 'th')}</tfoot>"
        return f"<table>\n<thead>{head}</thead>\n<tbody>{body}</tbody>{foot}\n</table>"


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart.

    Attributes:
        label: what it is of.
        figures: its figures, as text.
        start: where the bar starts, as a part of the chart's width, 0 to 1.
        end: where it ends.
        is_limit: whether it is a limit for the others, drawn lighter.
    """

    label: str
    figures: tuple[str, ...]
    start: float
    end: float
    is_limit: bool = False


@dataclass(frozen=True)
class Bars:
    """A bar chart, one row a bar."""

    bars: tuple[Bar, ...]

    def to_text(self) -> str:
        """Returns a line a bar: label, figures, and blocks."""
        cells = [(bar.label, *bar.figures) for bar in self.bars]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for bar, (label, *figures) in zip(self.bars, cells, strict=True):
            aligned = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
            lines.append("  ".join([label.ljust(widths[0]), *aligned, _blocks(bar)]).rstrip())
        return "\n".join(lines)

    def to_html(self) -> str:
        """Returns a `<table>` element with an SVG a bar."""
        rows = []
        for number, bar in enumerate(self.bars):
            figures = "".join(f'<td class="figure">{_escaped(figure)}</td>' for figure in bar.figures)
            colour = "currentColor" if bar.is_limit else f"hsl({210 + 47 * number % 360}, 60%, 55%)"
            opacity = 0.2 if bar.is_limit else 1
            width = max(bar.end - bar.start, 0.002) if bar.end > 0 else 0
            svg = (
                '<svg width="360" height="12" viewBox="0 0 360 12" role="img">'
                f'<rect x="{360 * bar.start:.1f}" width="{360 * width:.1f}" height="12" fill="{colour}" '
                f'opacity="{opacity}"/></svg>'
            )
            rows.append(f"<tr><th>{_escaped(bar.label)}</th>{figures}<td>{svg}</td></tr>")
        return "<table>\n<tbody>" + "\n".join(rows) + "</tbody>\n</table>"


@dataclass(frozen=True)
class Lines:
    """Sentences."""

    lines: tuple[str, ...]

    def to_text(self) -> str:
        """Returns them, those that are too long in several lines."""
        return "\n".join(_wrapped(line) for line in self.lines)

    def to_html(self) -> str:
        """Returns a `<p>` element each."""
        return "\n".join(f"<p>{_escaped(line)}</p>" for line in self.lines)


Section = tuple[str, Sequence[Table | Bars | Lines]]  # a title and what stands under it

# Colours are those of the notebook, so that dark themes and light ones can be read.
_STYLE = """<style>
.keras-dist { font-size: 13px; line-height: 1.4; color: inherit; }
.keras-dist h4 { margin: 1em 0 0.3em; font-size: 14px; }
.keras-dist p { margin: 0.2em 0; }
.keras-dist table { border-collapse: collapse; color: inherit; background: none; }
.keras-dist th, .keras-dist td { padding: 1px 10px 1px 0; text-align: left; vertical-align: top; background: none; }
.keras-dist thead th, .keras-dist tfoot th { border-bottom: 1px solid rgba(128, 128, 128, 0.5); }
.keras-dist .figure { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
</style>"""


def text_of(sections: Iterable[Section]) -> str:
    """Returns sections as text, an empty line between them."""
    blocks = []
    for title, parts in sections:
        heading = [_wrapped(title if len(title) > WIDTH - 2 else f"{title} ".ljust(WIDTH, "─"))]
        blocks.append("\n".join([*heading, *(part.to_text() for part in parts)]))
    return "\n\n".join(blocks)


def html_of(sections: Iterable[Section]) -> str:
    """Returns sections as one HTML element that brings its style and fetches nothing."""
    blocks = []
    for title, parts in sections:
        blocks.append("\n".join([f"<h4>{_escaped(title)}</h4>", *(part.to_html() for part in parts)]))
    return "\n".join([_STYLE, '<div class="keras-dist">', *blocks, "</div>"])


def _wrapped(line: str) -> str:
    return "\n".join(textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def _escaped(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")


def _blocks(bar: Bar) -> str:
    start, end = round(bar.start * _BAR_WIDTH), round(bar.end * _BAR_WIDTH)
    if bar.end <= bar.start:
        return ""
    if end == start:
        return " " * min(start, _BAR_WIDTH - 1) + "▏"
    return " " * start + ("░" if bar.is_limit else "█") * (end - start)


def _printed(renderable: Any) -> str:
    """What rich prints, whatever the terminal, the notebook and the environment are."""
    from rich.console import Console

    file = io.StringIO()
    Console(
        file=file,
        width=WIDTH,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
        markup=False,  # paths and names of the user hold brackets
        emoji=False,
        highlight=False,
    ).print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
