"""Extrapolates the figures of two compilations to a deeper model."""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from keras_dist._report.units import bytes_text
from keras_dist.planning.compiling.compilation import Compilation
from keras_dist.planning.costs.forecast import Forecast
from keras_dist.planning.costs.roofline import Roofline

_FIGURES = (
    "argument_bytes", "outputs", "temporaries", "cache", "program", "flops", "model_flops", "memory_traffic",
    "host_traffic",
)  # fmt: skip
_TRAFFIC = ("count", "tensors", "bytes", "wire_bytes", "seconds", "exposed_seconds")
_SECONDS = [field.name for field in fields(Roofline) if field.name.endswith("_seconds")]
_FORECAST_SECONDS = [field.name for field in fields(Forecast)]
_KIND_OF_TRAFFIC = operator.attrgetter("kind", "axes", "crosses_network")
_KIND_OF_ATTENTION = operator.attrgetter("implementation", "reason", "exchange")
_KIND_OF_MIXTURES = operator.attrgetter("form", "num_experts", "num_chosen", "reason", "exchange")


def extrapolated(compiled: Mapping[int, Compilation], depth: int, step: str) -> Compilation:
    """Extrapolates the figures of two compilations, by number of blocks (smaller first), linearly to a deeper model.

    It has at least the figures of the larger one, also where the compiler did better there.
    """
    depths, (shallow, deep) = tuple(compiled), compiled.values()
    factor = (depth - depths[1]) / (depths[1] - depths[0])

    def extrapolate(first: Any, second: Any, names: Iterable[str]) -> Any:
        """Returns the second object with fields that are extrapolated; what the first lacks is 0 there."""
        pairs = {name: (getattr(first, name, 0.0), getattr(second, name)) for name in names}
        figures = {name: None if None in (a, b) else b + max(0.0, b - a) * factor for name, (a, b) in pairs.items()}
        return replace(second, **figures)

    def extrapolate_each(first: Iterable, second: Iterable, kind_of: Callable, names: Iterable[str]) -> list:
        before = {kind_of(each): each for each in first}
        return [extrapolate(before.get(kind_of(each)), each, names) for each in second]

    traffic = extrapolate_each(shallow.traffic, deep.traffic, _KIND_OF_TRAFFIC, _TRAFFIC)
    attention = extrapolate_each(shallow.attention, deep.attention, _KIND_OF_ATTENTION, ["calls"])
    mixtures = extrapolate_each(shallow.mixtures, deep.mixtures, _KIND_OF_MIXTURES, ["calls", "flops"])
    roofline = extrapolate(shallow.roofline, deep.roofline, _SECONDS)
    forecast = None
    if shallow.roofline.forecast is not None and deep.roofline.forecast is not None:
        forecast = extrapolate(shallow.roofline.forecast, deep.roofline.forecast, _FORECAST_SECONDS)
        # A part that takes less time in the larger model stays as it is, so the parts may add up to more.
        parts = forecast.compute_seconds + forecast.exposed_seconds + forecast.copy_seconds
        forecast = replace(forecast, seconds=max(forecast.seconds, parts))
    compared = f"compilations of {depths[0]} and {depths[1]}"
    notes = [f"Extrapolated to {depth} blocks from {compared}; variables and batch are exact."]
    # In a step that trains, each block holds activations for the backward pass.
    if step == "train" and deep.temporaries <= shallow.temporaries:
        notes.append(
            f"{depth} blocks probably need more temporaries: the compiler needs no more for {depths[1]} blocks "
            f"({bytes_text(deep.temporaries)}) than for {depths[0]} ({bytes_text(shallow.temporaries)}), so they were "
            "not extrapolated. Use larger compile_depths, or compile the full model."
        )
    return replace(
        extrapolate(shallow, deep, _FIGURES),
        traffic=tuple(sorted(traffic, key=lambda each: -each.wire_bytes)),
        attention=tuple(attention),
        mixtures=tuple(mixtures),
        roofline=replace(roofline, forecast=forecast),
        refusal=deep.refusal or shallow.refusal,
        notes=(*notes, *deep.notes),
        seconds=shallow.seconds + deep.seconds,
    )
