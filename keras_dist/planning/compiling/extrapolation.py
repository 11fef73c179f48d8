"""Extrapolates the figures of two compilations to a deeper model."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from keras_dist._report.units import bytes_text
from keras_dist.planning.compiling.compilation import Compilation
from keras_dist.planning.costs.forecast import SECONDS as _FORECAST_SECONDS

_FIGURES = (
    "argument_bytes", "outputs", "temporaries", "program", "flops", "model_flops", "memory_traffic", "host_traffic"
)  # fmt: skip
_TRAFFIC = ("count", "tensors", "bytes", "wire_bytes", "seconds", "exposed_seconds")
_SECONDS = ("compute_seconds", "memory_seconds", "ici_seconds", "dcn_seconds")


def extrapolated(compiled: Mapping[int, Compilation], depth: int, step: str) -> Compilation:
    """Extrapolates the figures of two compilations, by number of blocks (smaller first), linearly to a deeper model.

    It has at least the figures of the larger one, also where the compiler did better there.
    """
    depths, (shallow, deep) = tuple(compiled), compiled.values()
    factor = (depth - depths[1]) / (depths[1] - depths[0])

    def extrapolate(first: Any, second: Any, names: Iterable[str]) -> Any:
        """Returns the second object with fields that are extrapolated; what the first lacks is 0 there."""
        pairs = {name: (getattr(first, name, 0.0), getattr(second, name)) for name in names}
        return replace(
            second,
            **{
                name: None if None in pair else pair[1] + max(0.0, pair[1] - pair[0]) * factor
                for name, pair in pairs.items()
            },
        )

    before = {(each.kind, each.axes, each.crosses_network): each for each in shallow.traffic}
    traffic = [
        extrapolate(before.get((each.kind, each.axes, each.crosses_network)), each, _TRAFFIC) for each in deep.traffic
    ]
    calls = {each.way: each for each in shallow.attention}
    roofline = extrapolate(shallow.roofline, deep.roofline, _SECONDS)
    forecast = None
    if shallow.roofline.forecast is not None and deep.roofline.forecast is not None:
        forecast = extrapolate(shallow.roofline.forecast, deep.roofline.forecast, _FORECAST_SECONDS)
        # A part that takes less time in the larger model stays as it is, so the parts may add up to more.
        parts = forecast.compute_seconds + forecast.exposed_seconds + forecast.copy_seconds
        forecast = replace(forecast, seconds=max(forecast.seconds, parts))
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
        extrapolate(shallow, deep, _FIGURES),
        traffic=tuple(sorted(traffic, key=lambda each: -each.wire_bytes)),
        attention=tuple(extrapolate(calls.get(each.way), each, ["calls"]) for each in deep.attention),
        roofline=replace(roofline, forecast=forecast),
        refusal=deep.refusal or shallow.refusal,
        notes=(*notes, *deep.notes),
        seconds=shallow.seconds + deep.seconds,
    )
