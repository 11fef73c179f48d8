"""How a coverage prints: as text, and as HTML in a notebook. Bytes are in binary units (KiB, MiB, GiB)."""

import math
import re
from collections.abc import Iterator

from keras_dist._report.tables import Lines, Section, Table, render_html, render_text
from keras_dist._report.units import bytes_text, count_text, percent_text
from keras_dist._report.variable_groups import VARIABLE_COLUMNS, variable_rows
from keras_dist.diagnostics.coverage import Coverage
from keras_dist.mesh.axes import spell_axes

_MOST_GROUPS = {"weights": 30, "optimizer": 6, "other": 6}  # rows of each part
_MOST_FINDINGS = 20
_STARTS_A_LINE = re.compile(r" (?=layout_map\[)|; (?=')")  # rules that can be pasted, and what they are for


def as_text(coverage: Coverage) -> str:
    """Returns the report of a coverage as text of at most 120 columns, the same on every terminal.

    Args:
        coverage: the coverage.

    Returns:
        Lines: what each device holds, what was found, and the variables; those that differ by numbers in their paths
        only are one row. Of many rows, those that hold most on a device are shown.
    """
    return render_text(_sections(coverage))


def as_html(coverage: Coverage) -> str:
    """Returns the report of `as_text` as HTML for a notebook, of dark or of light theme.

    Args:
        coverage: the coverage.

    Returns:
        An element with its style. All that comes from the user is escaped.
    """
    return render_html(_sections(coverage))


def _sections(coverage: Coverage) -> Iterator[Section]:
    weights = [v for v in coverage.variables if v.part == "weights"]
    title = f"{coverage.model}, {count_text(sum(math.prod(v.shape) for v in weights))} parameters"
    yield title, [Lines(tuple(_summary(coverage)))]
    if coverage.findings:
        lines, more = [], len(coverage.findings) - _MOST_FINDINGS
        for number, finding in enumerate(coverage.findings[:_MOST_FINDINGS], 1):
            first, *others = _STARTS_A_LINE.split(finding.message)
            lines += [f"{number}. {first}", *(f"    {line}" for line in others)]
        lines += [f"... and {more} more in .findings"] if more > 0 else []
        yield "What is probably not meant", [Lines(tuple(lines))]
    yield _variables(coverage)


def _summary(coverage: Coverage) -> Iterator[str]:
    kind = coverage.distribution.lstrip("<").split()[0]
    yield f"{coverage.mesh.devices.size} devices, mesh {spell_axes(coverage.mesh.axis_sizes)}, {kind}"
    held, whole = coverage.bytes, coverage.whole_bytes
    text = f"Of {bytes_text(whole)}, a device holds {bytes_text(held)}; {coverage.copies:.3g} copies of each byte."
    if coverage.imbalance > 1.001:
        text += f" The fullest device holds {coverage.imbalance:.3g} times the mean."
    yield text
    if whole:
        replicated = coverage.replicated_bytes
        yield f"Replicated on every device: {bytes_text(replicated)} ({percent_text(replicated / whole)})."
    if coverage.rules:
        yield f"{len(coverage.rules)} rules, {len(coverage.unused)} of which lay nothing out."


def _variables(coverage: Coverage) -> Section:
    rows = variable_rows(coverage.variables, _MOST_GROUPS, lambda variable: variable.why)
    footer = ("on one device", "", "", "", bytes_text(coverage.bytes))
    return "Variables, and their bytes on one device", [Table(("path, why", *VARIABLE_COLUMNS), rows, footer)]
