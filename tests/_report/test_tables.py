"""Tables, bars and lines as text and as HTML."""

import re

from keras_dist._report.tables import Bar, Bars, Lines, Table, render_html, render_text

TABLE = Table(("path", ">bytes"), [("a\nb", "1"), ("long <name>", "100")], ("total", "101"))


def cells_by_style(html):
    """Maps the style of cells to their contents, in order."""
    styles: dict[str, list[str]] = {}
    for style, content in re.findall(r'<t[dh] style="([^"]*)">(.*?)</t[dh]>', html):
        styles.setdefault(style, []).append(content)
    return styles


def test_a_cell_may_have_several_lines_and_figures_are_right_aligned():
    assert [line for line in TABLE.to_text().split("\n") if "─" not in line] == [
        "path         bytes",
        "a                1",
        "b",
        "long <name>    100",
        "total          101",
    ]


def test_html_aligns_every_cell_inline_which_outranks_the_selectors_of_jupyterlab():
    text, figures = cells_by_style(TABLE.to_html()).items()
    assert text == ("text-align: left", ["path", "a<br>b", "long &lt;name&gt;", "total"])
    assert figures[0].startswith("text-align: right; ")
    assert figures[1] == ["bytes", "1", "100", "101"]
    assert len(re.findall("<t[dh] ", TABLE.to_html())) == 8


def test_cells_may_have_a_background():
    table = Table(("a", "b"), [("1", "2"), ("3", "4")], colors=[(None, "red"), ("blue", None)])
    assert cells_by_style(table.to_html()) == {
        "text-align: left": ["a", "b", "1", "4"],
        "text-align: left; background: red": ["2"],
        "text-align: left; background: blue": ["3"],
    }


def test_bars_start_and_end_at_fractions_of_the_width():
    bars = Bars((Bar("used", ("1 GiB", "25%"), 0, 0.25), Bar("limit", ("4 GiB", "100%"), 0, 1, is_limit=True)))
    assert bars.to_text() == f"used   1 GiB   25%  {'█' * 15}\nlimit  4 GiB  100%  {'░' * 60}"
    assert re.findall(r'x="([\d.]+)" width="([\d.]+)"', bars.to_html()) == [("0.0", "90.0"), ("0.0", "360.0")]
    assert cells_by_style(bars.to_html())["text-align: left"][::2] == ["used", "limit"]


def test_sections_are_separated_by_empty_lines_and_wrapped_at_120_columns():
    text = render_text([("First", [Lines(("word " * 50,))]), ("Second", [TABLE])])
    blocks = text.split("\n\n")
    assert [block.split()[0] for block in blocks] == ["First", "Second"]
    assert max(map(len, text.splitlines())) <= 120
    html = render_html([("First", [Lines(("a < b",))]), ("Second", [TABLE])])
    assert re.findall(r"<(?:h4|p)>(.*?)</", html) == ["First", "a &lt; b", "Second"]
    assert "http" not in html


def test_a_command_is_not_wrapped():
    text = Lines(("word " * 22 + 'Run: pip install --upgrade "a" "b".',)).to_text()
    assert text.splitlines() == [("word " * 22).strip(), '  Run: pip install --upgrade "a" "b".']
