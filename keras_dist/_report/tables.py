"""The parts of reports, each as text and as HTML: `Table`, `Bars` and `Lines`."""

import html
import io
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 120  # columns of text, whatever the terminal
_BAR_WIDTH = 60

# Inline, since the selectors of JupyterLab for tables outrank those of a style sheet in the output of a cell.
_TEXT_STYLE = "text-align: left"
_FIGURE_STYLE = "text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums"


@dataclass(frozen=True)
class Table:
    """Rows of cells with one or several lines of text, below a heading, with an optional last row of totals.

    A leading ">" in `columns` marks a column of figures, which is right-aligned. `colors` are the CSS colors of the
    cells' background in HTML.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    footer: Sequence[str] | None = None
    colors: Sequence[Sequence[str | None]] | None = None

    def to_text(self) -> str:
        """Returns lines of at most `WIDTH` columns; cells that do not fit are folded."""
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable

        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        for column in self.columns:
            is_figure = column.startswith(">")  # figures are never folded, names are
            justify = "right" if is_figure else "left"
            table.add_column(column.removeprefix(">"), justify=justify, overflow="fold", no_wrap=is_figure)
        for row in [*self.rows, *([] if self.footer is None else [self.footer])]:
            table.add_row(*row)
        file = io.StringIO()
        # Text depends neither on terminal, notebook and environment, nor on brackets and colons in paths of variables.
        off: Any = dict.fromkeys(("force_terminal", "force_jupyter", "legacy_windows", "markup", "emoji"), False)
        Console(file=file, width=WIDTH, color_system=None, **off).print(table)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def to_html(self) -> str:
        def line(cells: Iterable[str], tag: str, colors: Sequence[str | None]) -> str:
            elements = []
            for column, cell, color in zip(self.columns, cells, colors, strict=True):
                style = _FIGURE_STYLE if column.startswith(">") else _TEXT_STYLE
                elements.append(_element(tag, cell, style + (f"; background: {color}" if color else "")))
            return f"<tr>{''.join(elements)}</tr>"

        uncolored = [None] * len(self.columns)
        head = line([column.removeprefix(">") for column in self.columns], "th", uncolored)
        colors = self.colors or [uncolored] * len(self.rows)
        body = "\n".join(line(row, "td", each) for row, each in zip(self.rows, colors, strict=True))
        foot = "" if self.footer is None else f"\n<tfoot>{line(self.footer, 'th', uncolored)}</tfoot>"
        return f"<table>\n<thead>{head}</thead>\n<tbody>{body}</tbody>{foot}\n</table>"


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart. `start` and `end` are fractions of the width; a limit for other bars is drawn lighter."""

    label: str
    figures: tuple[str, ...]
    start: float
    end: float
    is_limit: bool = False


@dataclass(frozen=True)
class Bars:
    bars: tuple[Bar, ...]

    def to_text(self) -> str:
        cells = [(bar.label, *bar.figures) for bar in self.bars]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for bar, (label, *figures) in zip(self.bars, cells, strict=True):
            aligned = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
            lines.append("  ".join([label.ljust(widths[0]), *aligned, _blocks(bar)]).rstrip())
        return "\n".join(lines)

    def to_html(self) -> str:
        rows = []
        for number, bar in enumerate(self.bars):
            figures = "".join(_element("td", figure, _FIGURE_STYLE) for figure in bar.figures)
            color = "currentColor" if bar.is_limit else f"hsl({210 + 47 * number % 360}, 60%, 55%)"
            width = max(bar.end - bar.start, 0.002) if bar.end > 0 else 0
            svg = (
                '<svg width="360" height="12" viewBox="0 0 360 12" role="img">'
                f'<rect x="{360 * bar.start:.1f}" width="{360 * width:.1f}" height="12" fill="{color}" '
                f'opacity="{0.2 if bar.is_limit else 1}"/></svg>'
            )
            label = _element("th", bar.label, _TEXT_STYLE)
            rows.append(f'<tr>{label}{figures}<td style="{_TEXT_STYLE}">{svg}</td></tr>')
        return "<table>\n<tbody>" + "\n".join(rows) + "</tbody>\n</table>"


@dataclass(frozen=True)
class Lines:
    lines: tuple[str, ...]

    def to_text(self) -> str:
        return "\n".join(map(_wrap, self.lines))

    def to_html(self) -> str:
        return "\n".join(_element("p", line) for line in self.lines)


Section = tuple[str, Sequence[Table | Bars | Lines]]  # a title and the parts below it

# Colors come from the notebook, so that both dark and light themes are readable.
_STYLE = """<style>
.keras-dist { font-size: 13px; line-height: 1.4; color: inherit; }
.keras-dist h4 { margin: 1em 0 0.3em; font-size: 14px; }
.keras-dist p { margin: 0.2em 0; }
.keras-dist table { margin: 0; border-collapse: collapse; color: inherit; background: none; }
.keras-dist th, .keras-dist td { padding: 1px 10px 1px 0; vertical-align: top; background: none; }
.keras-dist thead th, .keras-dist tfoot th { border-bottom: 1px solid rgba(128, 128, 128, 0.5); }
</style>"""


def render_text(sections: Iterable[Section]) -> str:
    blocks = []
    for title, parts in sections:
        heading = _wrap(title if len(title) > WIDTH - 2 else f"{title} ".ljust(WIDTH, "─"))
        blocks.append("\n".join([heading, *(part.to_text() for part in parts)]))
    return "\n\n".join(blocks)


def render_html(sections: Iterable[Section]) -> str:
    """Renders sections as one HTML element, which includes its style sheet and loads nothing."""
    blocks = ["\n".join([_element("h4", title), *(part.to_html() for part in parts)]) for title, parts in sections]
    return "\n".join([_STYLE, '<div class="keras-dist">', *blocks, "</div>"])


def html_page(title: str, body: str) -> str:
    """Returns a file with an element as its body, in the light or dark colors of the reader's browser."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 1.5em; overflow-x: auto; font-family: system-ui, sans-serif; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def _wrap(line: str) -> str:
    """Returns a line in lines of at most WIDTH columns. "Run: " and the command after it stay on one, to be copied."""
    joined = re.sub(r"Run: .*", lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), line)
    wrapped = textwrap.wrap(joined, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(wrapped).replace("\N{NO-BREAK SPACE}", " ")


def _element(tag: str, text: str, style: str = "") -> str:
    attribute = f' style="{style}"' if style else ""
    return f"<{tag}{attribute}>{html.escape(text).replace(chr(10), '<br>')}</{tag}>"


def _blocks(bar: Bar) -> str:
    start, end = round(bar.start * _BAR_WIDTH), round(bar.end * _BAR_WIDTH)
    if bar.end <= bar.start:
        return ""
    if end == start:
        return " " * min(start, _BAR_WIDTH - 1) + "▏"
    return " " * start + ("░" if bar.is_limit else "█") * (end - start)
