"""Lets tables fit narrow screens: where code may break, and headings of cells, which site.css shows on phones."""

import html
import re

CODE = re.compile(r"(?s)(<td.*?</td>)")
TABLE = re.compile(r'(?s)<table class="table">.*?</table>')


def break_code(match: re.Match) -> str:
    """Lets the code in a cell break after punctuation, and so not within words."""
    parts = re.split(r"(<[^>]*>)", match[0])
    parts[::2] = [re.sub(r"([(\[{,=/.|])(?=\w)", r"\1<wbr>", text) for text in parts[::2]]
    return "".join(parts)


def label_cells(match: re.Match) -> str:
    """Writes the heading of its column into each cell of a table."""
    head, separator, body = match[0].partition("<tbody>")
    headings = [html.escape(re.sub("<.*?>", "", each).strip()) for each in re.findall(r"(?s)<th\b.*?</th>", head)]
    rows = re.split(r"(?=<tr)", body)
    for number, row in enumerate(rows):
        labels = iter(headings)
        rows[number] = re.sub("<td", lambda cell: f'<td data-label="{next(labels, "")}"', row)  # noqa: B023
    return CODE.sub(break_code, head + separator + "".join(rows))


def mend_tables(app, name: str, template: str, context: dict, doctree) -> None:
    if "body" in context:
        context["body"] = TABLE.sub(label_cells, context["body"])


def setup(app):
    app.connect("html-page-context", mend_tables)
    return {"parallel_read_safe": True}
