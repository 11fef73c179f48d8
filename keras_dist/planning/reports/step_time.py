"""The time of a step in the report of a plan, and its schedule below the memory of a device in a figure."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from keras_dist._report.figures import draw_bars, new_figure
from keras_dist._report.tables import Bar, Bars, Lines, Section, Table
from keras_dist._report.units import count_text, percent_text, seconds_text
from keras_dist._report.variable_groups import path_kind, path_pattern
from keras_dist.planning.compiling.compilation import Traffic
from keras_dist.planning.costs.forecast import Forecast
from keras_dist.planning.costs.roofline import Roofline, times_by_resource
from keras_dist.planning.hlo.collectives import Collective
from keras_dist.planning.hlo.op_names import layer_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_ROWS = 6


def forecast_section(
    forecast: Forecast, utilization: float | None, collectives: Iterable[Collective], depth: int | None
) -> Section:
    parts = {
        "compute": forecast.compute_seconds,
        "exposed collectives": forecast.exposed_seconds,
        "waiting for copies": forecast.copy_seconds,
    }
    bars, end, longest = [], 0.0, forecast.seconds or 1.0
    for label, seconds in parts.items():
        start, end = end, end + seconds
        bars.append(Bar(label, (seconds_text(seconds),), start / longest, end / longest))
    text = f"Probably {seconds_text(forecast.seconds)} a step."
    if utilization is not None:
        text += f" Model FLOP utilization {percent_text(utilization)}."
    text += f" The compiler estimated {percent_text(forecast.estimated_share)} of the compute time."
    of = "" if depth is None else " (of the deepest model compiled)"
    rows = _exposed_rows(collectives)
    table = Table((f"most exposed{of}", "over axes", "layer", ">count", ">total", ">exposed"), rows)
    return "Forecast of step time", [Bars(tuple(bars)), Lines((text,)), *([table] if rows else [])]


def axes_text(axes: Sequence[str] | None) -> str:
    return "other groups" if axes is None else ", ".join(axes)


def sum_of(collectives: Iterable[Any], figure: str) -> float:
    return sum(getattr(each, figure) or 0.0 for each in collectives)


def _exposed_rows(collectives: Iterable[Collective]) -> list[tuple[str, ...]]:
    """Returns a table row for each of the most exposed collectives. Those of equal layers share one."""
    groups: dict[tuple, list[Collective]] = defaultdict(list)
    for each in collectives:
        if each.exposed_seconds:
            path, is_gradient = layer_path(each.op_name)
            groups[each.kind, each.axes, path_kind(path), is_gradient].append(each)
    ordered = sorted(groups.items(), key=lambda item: -sum_of(item[1], "exposed_seconds"))
    rows = []
    for (kind, axes, _, is_gradient), group in ordered[:_MAX_ROWS]:
        paths = {layer_path(each.op_name)[0] for each in group}
        path = path_pattern(sorted(paths, key=_by_numbers))
        layer = (path or "several layers") + ", gradient" * is_gradient
        rows.append((kind, axes_text(axes), _fold(layer), *_figures(group)))
    rest = [each for _, group in ordered[_MAX_ROWS:] for each in group]
    if rest:
        rows.append((f"... and {len(ordered) - _MAX_ROWS} more", "", "", *_figures(rest)))
    return rows


def _by_numbers(path: str) -> list[tuple[str, int]]:
    """Sorts "block_2" before "block_10"."""
    return [(word, int(number or 0)) for word, number in re.findall(r"(\D+)(\d*)", path)]


def _figures(group: Sequence[Collective]) -> tuple[str, ...]:
    times = (seconds_text(sum_of(group, name)) for name in ("seconds", "exposed_seconds"))
    return count_text(sum_of(group, "count")), *times


def _fold(path: str) -> str:
    """Breaks a path into lines of at most 48 characters, after a separator where there is one."""
    return "\n  ".join(re.findall(r".{1,48}(?:(?<=[/_, ])|$)|.{48}", path))


def plan_figure(
    title: str, memory: tuple[Bar, ...], memory_width: float, roofline: Roofline, traffic: Iterable[Traffic]
) -> "Figure":
    """Returns a figure with the memory of a device above the schedule of a step, if its time is known."""
    schedule = _schedule(roofline, traffic)
    heights = [len(memory), *([len({bar.label for bar in schedule})] if schedule else [])]
    figure = new_figure(9, 1.2 + 0.3 * sum(heights) + 0.6 * len(heights))
    figure.suptitle(title, fontsize="medium")
    above, *below = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    draw_bars(above, "Memory per device", memory, memory_width, "bytes")
    for axes in below:
        forecast, note = "", ""
        if roofline.forecast is not None:
            forecast, note = f"forecast {seconds_text(roofline.forecast.seconds)}, ", " (gray: hidden by compute)"
        schedule_title = f"Time of a step: {forecast}lower bound {seconds_text(roofline.seconds)}"
        draw_bars(axes, schedule_title, schedule, _longest(roofline), "seconds", note)
    return figure


def bound_bars(roofline: Roofline) -> list[Bar]:
    """Returns a bar for the lower bound on step time of each resource."""
    names, longest = {"memory": "HBM"}, roofline.seconds or 1.0
    return [
        Bar(names.get(part, part), (seconds_text(time),), 0, (time or 0) / longest)
        for part, time in times_by_resource(roofline).items()
        if part != "host" or time is None or time >= 0.01 * longest
    ]


def _longest(roofline: Roofline) -> float:
    return (roofline.seconds or 0.0) if roofline.forecast is None else roofline.forecast.seconds


def _schedule(roofline: Roofline, traffic: Iterable[Traffic]) -> list[Bar]:
    """Returns bars of the forecast, one after another, or those of the lower bounds if there is none.

    A collective runs while the device computes, until the device waits for it: what compute hides is drawn before the
    end of compute, and what it does not, the exposed time, after what the device waited for before.
    """
    longest, forecast = _longest(roofline), roofline.forecast
    if not longest:
        return []
    if forecast is None:
        return bound_bars(roofline)
    by_axes: dict[str, list[Traffic]] = defaultdict(list)
    for each in traffic:
        by_axes[axes_text(each.axes)].append(each)
    computed = end = forecast.compute_seconds / longest
    bars = [Bar("compute", (seconds_text(forecast.compute_seconds),), 0, end)]
    for axes, group in by_axes.items():
        total, exposed = sum_of(group, "seconds"), sum_of(group, "exposed_seconds")
        label = f"collectives over {axes}", (seconds_text(total), f"{seconds_text(exposed)} exposed")
        start, end = end, end + exposed / longest
        bars += [
            Bar(*label, max(0.0, computed - (total - exposed) / longest), computed, is_limit=True),
            Bar(*label, start, end),
        ]
    return [*bars, Bar("copies", (seconds_text(forecast.copy_seconds),), end, end + forecast.copy_seconds / longest)]
