"""Extrapolates the figures of two compilations to a deeper model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from keras_dist._report.units import bytes_text
from keras_dist.planning.compiling.compilation import Compilation, by_bytes_sent
from keras_dist.planning.costs.forecast import SECONDS as FORECAST_SECONDS
from keras_dist.planning.costs.forecast import Forecast


def extrapolated(compiled: Mapping[int, Compilation], depth: int, step: str) -> Compilation:
    """Extrapolates the figures of two compilations, by number of blocks (smaller first), linearly to a deeper model.

    It has at least the figures of the larger one, also where the compiler did better there.
    """
    depths, (shallow, deep) = tuple(compiled), compiled.values()
    factor = (depth - depths[1]) / (depths[1] - depths[0])

    def extrapolate(first: Any, second: Any) -> Any:
        return None if first is None or second is None else second + max(0.0, second - first) * factor

    figures = {name: extrapolate(getattr(shallow, name), getattr(deep, name)) for name in _FIGURES}
    seconds = {name: extrapolate(getattr(shallow.roofline, name), getattr(deep.roofline, name)) for name in _SECONDS}
    seconds["forecast"] = _extrapolated_forecast(shallow.roofline.forecast, deep.roofline.forecast, extrapolate)
    before = {(each.kind, each.axes, each.crosses_network): each for each in shallow.traffic}
    traffic = []
    for each in deep.traffic:
        first = before.get((each.kind, each.axes, each.crosses_network))
        sums = {name: extrapolate(getattr(first, name, 0.0), getattr(each, name)) for name in _TRAFFIC}
        traffic.append(replace(each, **sums))
    calls = {each.way: each.calls for each in shallow.attention}
    attention = tuple(replace(e, calls=extrapolate(calls.get(e.way, 0), e.calls)) for e in deep.attention)
    notes = [
        f"Extrapolated to {depth} blocks from compilations of {depths[0]} and {depths[1]}; variables and batch are "
        "exact."
    ]
    # In a step that trains, each block holds activations for the backward pass.
    if step == "train" and deep.temporaries <= shallow.temporaries:
        notes.append(
            f"{depth} blocks probably need more temporaries: the compiler needs no more for {depths[1]} blocks "
            f"({bytes_text(deep.temporaries)}) than for {depths[0]} ({bytes_text(shallow.temporaries)}), so they were "
            "not extrapolated. Use larger compile_depths, or compile the full model."
        )
    return replace(
        deep,
        **figures,
        traffic=by_bytes_sent(traffic),
        attention=attention,
        roofline=replace(deep.roofline, **seconds),
        refusal=deep.refusal or shallow.refusal,
        notes=(*notes, *deep.notes),
        seconds=shallow.seconds + deep.seconds,
    )


def _extrapolated_forecast(
    shallow: Forecast | None, deep: Forecast | None, extrapolate: Callable[[Any, Any], Any]
) -> Forecast | None:
    if shallow is None or deep is None:
        return None
    found = Forecast(**{name: extrapolate(getattr(shallow, name), getattr(deep, name)) for name in FORECAST_SECONDS})
    # A part that takes less time in the larger model stays as it is, so the parts may add up to more.
    parts = found.compute_seconds + found.exposed_seconds + found.copy_seconds
    return replace(found, seconds=max(found.seconds, parts))


_FIGURES = (
    "argument_bytes", "outputs", "temporaries", "program", "flops", "model_flops", "memory_traffic", "host_traffic"
)  # fmt: skip
_TRAFFIC = ("count", "tensors", "bytes", "wire_bytes", "seconds", "exposed_seconds")
_SECONDS = ("compute_seconds", "memory_seconds", "ici_seconds", "dcn_seconds")
