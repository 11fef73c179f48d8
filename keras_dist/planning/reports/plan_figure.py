"""The memory of a device and the schedule of a step, as a figure."""

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from keras_dist._report.figures import draw_bars, new_figure
from keras_dist._report.tables import Bar
from keras_dist._report.units import seconds_text
from keras_dist.planning.compiling.compilation import Traffic
from keras_dist.planning.costs.roofline import Roofline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plan_figure(
    title: str, memory: tuple[Bar, ...], memory_width: float, roofline: Roofline, traffic: Iterable[Traffic]
) -> "Figure":
    """Returns a figure with the memory of a device above the schedule of a step, if its time is known.

    Args:
        title: Written above both.
        memory: A bar for each part of the memory.
        memory_width: Bytes that the full width of these bars stands for.
        roofline: Lower bound on step time, and its forecast.
        traffic: The collectives, with their times.
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
        parts = {
            "compute": roofline.compute_seconds,
            "HBM": roofline.memory_seconds,
            roofline.link: roofline.ici_seconds,
            roofline.network: roofline.dcn_seconds,
        }
        return [Bar(name, (seconds_text(time),), 0, (time or 0) / longest) for name, time in parts.items()]

    by_axes: dict[str, list[Traffic]] = defaultdict(list)
    for each in traffic:
        by_axes["other groups" if each.axes is None else ", ".join(each.axes)].append(each)
    computed = end = forecast.compute_seconds / longest
    bars = [Bar("compute", (seconds_text(forecast.compute_seconds),), 0, end)]
    for axes, group in by_axes.items():
        total = sum(each.seconds or 0.0 for each in group)
        exposed = sum(each.exposed_seconds or 0.0 for each in group)
        label = f"collectives over {axes}", (seconds_text(total), f"{seconds_text(exposed)} exposed")
        start, end = end, end + exposed / longest
        bars += [
            Bar(*label, max(0.0, computed - (total - exposed) / longest), computed, is_limit=True),
            Bar(*label, start, end),
        ]
    return [*bars, Bar("copies", (seconds_text(forecast.copy_seconds),), end, end + forecast.copy_seconds / longest)]
