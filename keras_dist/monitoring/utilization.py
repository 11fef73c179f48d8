"""How long steps would take at the peak of a device, by their model FLOP: those of a plan, or counted from a trace."""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import keras

from keras_dist._keras.active_distribution import active_distribution
from keras_dist._keras.tracing_errors import describe
from keras_dist._report.user_warnings import warn
from keras_dist.mesh.devices import Device
from keras_dist.monitoring.batches import BatchShape
from keras_dist.planning.costs.forecast import compute_seconds
from keras_dist.planning.costs.model_flops import count_step_flops, main_dtype
from keras_dist.planning.hardware.registry import hardware
from keras_dist.planning.reports.plan_report import Plan
from keras_dist.steps.options import StepOptions
from keras_dist.steps.step_state import recorded_calls
from keras_dist.steps.steps import stateless_step
from keras_dist.strategies.base import Distribution

_ELEMENT_TYPES = {"bfloat16": "bf16", "float16": "f16", "int8": "s8"}


def planned_seconds_at_peak(plan: Plan) -> float | None:
    """Returns how long one device would need at its peak for a step of a plan; None if it has no peak or no FLOP."""
    seconds = plan.roofline.compute_seconds
    return plan.model_flops * seconds / plan.flops if seconds and plan.model_flops else None


def counted_seconds_at_peak(
    model: Any, batch: BatchShape, specs: tuple[Any, Any], device: Device, counted: Mapping[BatchShape, float | None]
) -> float | None:
    """Returns how long one device would need at its peak for a step; None if that is unknown.

    If a batch differs from a counted one only in its rows, as the last one of an epoch, FLOP are in proportion to them.
    For others, the step is traced with the specs of the state and the batch, unless the device has no known peak.
    """
    for other, seconds in counted.items():
        if seconds is not None and other.rows and batch.rows and other.with_rows(batch.rows) == batch:
            return seconds * batch.rows / other.rows
    known = hardware.of_device(device)
    if known is None or not known.flops_per_second or model.run_eagerly or not model.jit_compile:
        return None
    try:
        flops, dtype = trace_flops(model, *specs)
    except Exception as error:  # the step itself runs, so training goes on
        warn(
            f"StepMonitor cannot count the FLOP of {model.name!r}, because its train step cannot be traced a second "
            f"time: {describe(error)}. MFU is not reported; pass plan= if you have a plan of the model.",
        )
        return None
    if flops is None or dtype is None:
        return None
    is_float8 = dtype.startswith("float8_")
    element_type = f"f8{dtype.removeprefix('float8_')}" if is_float8 else _ELEMENT_TYPES.get(dtype, "f32")
    return compute_seconds(known, {element_type: flops})


def trace_flops(model: keras.Model, state: Any, batch: Any) -> tuple[float | None, str | None]:
    """Counts the model FLOP of a train step over all devices, and returns the dtype of most of them.

    As in a plan, FLOP of activations that are computed again do not count, so the step is traced without the options
    of its distribution.
    """
    distribution = active_distribution()
    scope = contextlib.nullcontext()
    if isinstance(distribution, Distribution) and distribution.step_options != StepOptions():
        scope = distribution.with_step_options(distribution.step_options.placement_only).scope()
    with scope, recorded_calls() as calls:
        jaxpr = jax.jit(stateless_step(model, "train")).trace(state, batch).jaxpr.jaxpr
    return count_step_flops(jaxpr, calls, "train"), main_dtype(jaxpr)
