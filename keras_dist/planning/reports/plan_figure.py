"""The memory of a device and the schedule of a step, as a figure."""

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from keras_dist._report.figures import draw_bars, new_figure
from keras_dist._report.tables import Bar
from keras_dist._report.units import seconds_text
from keras_dist.planning.compiling.compilation import Traffic
from keras_dist.planning.costs.roofline import Roofline, times_by_resource
from keras_dist.planning.reports.forecast_section import axes_text, sum_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plan_figure(
    title: str, memory: tuple[Bar, ...], memory_width: float, roofline: Roofline, traffic: Iterable[Traffic]
) -> "Figure":
    """Returns a figure with the memory of a device above the schedule of a step, if its time is known.

    `memory_width` are the bytes that the full width of the bars of `memory` stands for.
    """
    schedule = _schedule(roofline, traffic)
    heights = [len(memory), *([len({bar.label for bar in schedule})] if schedule else [])]
    figure = new_figure(9, 1.2 + 0.3 * sum(heights) + 0.6 * len(heights))
    figure.suptitle(title, fontsize="medium")
    above, *below = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    draw_bars(above, "Memory per device", memory, memory_width, "bytes")
    for axes in below:
        note = "" if roofline.forecast is None else " (gray: hidden by compute)"
        draw_bars(axes, _title(roofline), schedule, _longest(roofline), "seconds", note)
    return figure


def bound_bars(roofline: Roofline) -> list[Bar]:
    """Returns a bar for the lower bound on step time of each resource."""
    names, longest = {"memory": "HBM"}, roofline.seconds or 1.0
    return [
        Bar(names.get(part, part), (seconds_text(time),), 0, (time or 0) / longest)
        for part, time in times_by_resource(roofline).items()
    ]


def _longest(roofline: Roofline) -> float:
    return (roofline.seconds or 0.0) if roofline.forecast is None else roofline.forecast.seconds


def _title(roofline: Roofline) -> str:
    bound = f"lower bound {seconds_text(roofline.seconds)}"
    if roofline.forecast is None:
        return f"Time of a step: {bound}"
    return f"Time of a step: forecast {seconds_text(roofline.forecast.seconds)}, {bound}"


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
