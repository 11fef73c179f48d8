"""How a plan prints: as text, as HTML in a notebook, and as two bar charts.

Bytes are in binary units (KiB, MiB, GiB), held and sent alike; FLOP and counts are in decimal ones.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from keras_dist._report.tables import Bar, Bars, Lines, Section, Table, html_of, text_of
from keras_dist._report.units import bytes_text, count_text, flops_text, percent_text, seconds_text
from keras_dist._report.variable_groups import GROUP_COLUMNS, cells_of, groups_of
from keras_dist.mesh.axes import spell_axes
from keras_dist.planning.plan import PARTS, Plan, PlannedVariable

_MOST_GROUPS = {"weights": 12, "optimizer": 6, "other": 3}  # rows of each part
_MEMORY = (*PARTS, "batch", "padding", "outputs", "temporaries", "program")
_LABELS = {"other": "other state", "memory": "HBM"}


def as_text(plan: Plan) -> str:
    """Returns the report of a plan as text of at most 120 columns, the same on every terminal.

    Args:
        plan: the plan.

    Returns:
        Lines: what is planned and whether it fits, memory and time with bars, collectives, variables, notes. Variables
        that differ by numbers in their paths only are one row, as are those that an optimizer keeps for each of them;
        of many rows those that hold most are shown. Parts of memory that hold nothing are left out.
    """
    return text_of(_sections(plan))


def as_html(plan: Plan) -> str:
    """Returns the report of `as_text` as HTML for a notebook, of dark or of light theme.

    Args:
        plan: the plan.

    Returns:
        An element with its style and its SVG bars. All that comes from the user is escaped.
    """
    return html_of(_sections(plan))


def picture(plan: Plan) -> str:
    """Returns only the bars of a plan as text: the memory of one device, and what a step takes at least.

    Args:
        plan: the plan.
    """
    return text_of([_memory(plan), _time(plan)])


def _fits_text(plan: Plan) -> str:
    """Returns in one sentence whether a plan fits, and by how much."""
    memory = plan.memory
    needed = f"{bytes_text(memory.total)} on each device"
    if memory.capacity is not None:
        needed = f"{bytes_text(memory.total)} of {bytes_text(memory.capacity)} on each device"
        needed += f" ({percent_text(memory.total / memory.capacity)})"
    if plan.fits is None:
        return f"Needs {needed}; how much one has is not known."
    free = 0 if memory.capacity is None else memory.capacity - memory.total
    if plan.fits:
        return f"Fits: {needed}, {bytes_text(free)} are free."
    too_much = f", {bytes_text(-free)} too much." if free < 0 else "; the compiler cannot place it."
    return f"DOES NOT FIT: {needed}{too_much}"


def _sections(plan: Plan) -> Iterator[Section]:
    yield _headline(plan)
    yield _memory(plan)
    if plan.fits is False:
        rows = [(name, bytes_text(held)) for name, held in plan.largest_holders()]
        yield "What holds most on one device", [Table(("what", ">bytes"), rows)]
    yield _time(plan)
    yield _collectives(plan)
    yield _variables(plan)
    if plan.notes:
        yield "Notes", [Lines(plan.notes)]


def _headline(plan: Plan) -> Section:
    depth = f", {plan.depth} blocks" if plan.depth is not None else ""
    title = f"{plan.model}, {plan.step} step, {count_text(plan.parameters)} parameters{depth}"
    where = (
        f"{plan.mesh.devices.size} x {plan.target}, mesh {spell_axes(plan.mesh.axis_sizes)}, {distribution_name(plan)}"
    )
    return title, [Lines((where, f"batch {_batch(plan.batch)}", _fits_text(plan)))]


def distribution_name(plan: Plan) -> str:
    """Returns the name of the kind of a plan's distribution."""
    found = re.match(r"<?(\w+)", plan.distribution)
    return found[1] if found else plan.distribution


def _batch(batch: Any) -> str:
    parts = batch if isinstance(batch, tuple) else (batch,)
    named = zip(("x", "y", "sample_weight"), parts, strict=False)
    return ", ".join(f"{name} {part}".replace("'", "") for name, part in named if part is not None)


# -------------------------------------------------------------------------------------------------- memory and time


def _memory(plan: Plan) -> Section:
    memory = plan.memory
    whole = max(memory.total, memory.capacity or 0, 1)

    def percent(held: int) -> tuple[str, ...]:
        return () if memory.capacity is None else (percent_text(held / memory.capacity),)

    bars, held = [], 0
    for part in _MEMORY:
        size = getattr(memory, part)
        if size:
            figures = (bytes_text(size), *percent(size))
            bars.append(Bar(_LABELS.get(part, part), figures, held / whole, (held + size) / whole))
            held += size
    bars.append(Bar("total", (bytes_text(memory.total), *percent(memory.total)), 0, memory.total / whole))
    if memory.capacity is not None:
        figures = (bytes_text(memory.capacity), percent_text(1))
        bars.append(Bar("capacity", figures, 0, memory.capacity / whole, is_limit=True))
    return "Memory of one device", [Bars(tuple(bars))]


def _time(plan: Plan) -> Section:
    roofline = plan.roofline
    parts = {
        "compute": (roofline.compute_seconds, flops_text(plan.flops)),
        "HBM": (roofline.memory_seconds, bytes_text(plan.memory_traffic)),
        roofline.link: (roofline.ici_seconds, ""),
        roofline.network: (roofline.dcn_seconds, ""),
    }
    longest = roofline.seconds or 1
    bars = tuple(
        Bar(label, (amount, seconds_text(seconds)), 0, (seconds or 0) / longest)
        for label, (seconds, amount) in parts.items()
    )
    return "Time of one step, at least", [Bars(bars), Lines((_bound(plan),))]


def _bound(plan: Plan) -> str:
    roofline = plan.roofline
    unknown = [part for part, seconds in vars(roofline).items() if seconds is None]
    if not roofline.seconds:
        return "What bounds it is not known." if unknown else "It takes no time that is counted."
    text = f"At least {seconds_text(roofline.seconds)}, bound by {bound_text(plan)}"
    text += f"; {seconds_text(roofline.serial_seconds)} where nothing overlaps."
    if plan.model_flops_utilization is not None:
        text += f" Model FLOP utilization at most {percent_text(plan.model_flops_utilization)}"
        text += f" ({flops_text(plan.model_flops)} on all devices)."
    return text + " What is not known is left out." * bool(unknown)


def bound_text(plan: Plan) -> str:
    """Returns what bounds a step, as the report calls it; "not known" where nothing known takes time."""
    bound = plan.roofline.bound
    return "not known" if bound is None else _LABELS.get(bound, bound)


# -------------------------------------------------------------------------------------------------- collectives


def _collectives(plan: Plan) -> Section:
    title = "Collectives of one step"
    if not plan.traffic:
        return title, [Lines(("None.",))]
    rows = [
        (
            each.kind,
            ("other groups" if each.axes is None else ", ".join(each.axes))
            + f" ({plan.roofline.network})" * each.crosses_network,
            count_text(each.count),
            count_text(each.tensors),
            bytes_text(each.bytes),
            bytes_text(each.wire_bytes),
        )
        for each in plan.traffic
    ]
    counts = count_text(sum(each.count for each in plan.traffic)), count_text(sum(t.tensors for t in plan.traffic))
    moved = bytes_text(sum(each.bytes for each in plan.traffic)), bytes_text(plan.wire_bytes)
    columns = ("kind", "over axes", ">count", ">tensors", ">bytes", ">a device sends")
    return title, [Table(columns, rows, ("total", "", *counts, *moved))]


# -------------------------------------------------------------------------------------------------- variables


def _variables(plan: Plan) -> Section:
    rows: list[tuple[str, ...]] = []
    for part, most in _MOST_GROUPS.items():
        groups = groups_of(variable for variable in plan.variables if variable.part == part)
        shown = most if len(groups) > most + 1 else len(groups)  # the last one takes no more room than its mention
        rows += map(_row, groups[:shown])
        rest = [variable for group in groups[shown:] for variable in group]
        if rest:
            replicated = sum(map(_is_replicated, rest))
            text = f"... and {len(rest)} more of {part}" + f", {replicated} of them replicated" * (replicated > 0)
            rows.append((text, "", "", "", bytes_text(sum(v.bytes for v in rest))))
    weights = [variable for variable in plan.variables if variable.part == "weights"]
    replicated = [variable for variable in weights if _is_replicated(variable)]
    text = f"Replicated: {len(replicated)} of {len(weights)} weights, {bytes_text(sum(v.bytes for v in replicated))}."
    return "Variables, and their bytes on one device", [Table(("path, rule", *GROUP_COLUMNS), rows), Lines((text,))]


def _row(group: Sequence[PlannedVariable]) -> tuple[str, ...]:
    """A line for variables that are alike, and where they are sharded a second one for the rule and what is left."""
    return cells_of(group, "" if _is_replicated(group[0]) else group[0].rule or "no rule")


def _is_replicated(variable: PlannedVariable) -> bool:
    return all(axis is None for axis in variable.axes)
