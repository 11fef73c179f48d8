"""Model FLOP of the steps that run, counted from a trace, and the peak of the devices that run them."""

import contextlib
from typing import Any, NamedTuple

import jax
import keras

from keras_dist._keras.active_distribution import active_distribution
from keras_dist._keras.tracing_errors import describe
from keras_dist._report.user_warnings import warn
from keras_dist.mesh.devices import Device
from keras_dist.monitoring.batches import BatchShape
from keras_dist.planning.costs.compute_time import compute_seconds
from keras_dist.planning.costs.model_flops import count_step_flops, main_dtype
from keras_dist.planning.hardware.registry import hardware
from keras_dist.planning.reports.plan_report import Plan
from keras_dist.steps.options import StepOptions
from keras_dist.steps.step_state import recorded_attention
from keras_dist.steps.steps import stateless_step
from keras_dist.strategies.base import Distribution

_ELEMENT_TYPES = {"bfloat16": "bf16", "float16": "f16", "int8": "s8"}


class StepFlops(NamedTuple):
    """FLOP that a model requires for one batch, over all devices, and the peak per second of a device for them."""

    flops: float
    peak: float


def trace_flops(model: keras.Model, state: Any, batch: Any, device: Device) -> StepFlops | None:
    """Counts the model FLOP of a train step by tracing it once more, with shapes in place of arrays; None if unknown.

    As in a plan, FLOP of activations that are computed again do not count, so the step is traced without the options
    of its distribution.
    """
    distribution = active_distribution()
    scope = contextlib.nullcontext()
    if isinstance(distribution, Distribution) and distribution.step_options != StepOptions():
        scope = distribution.with_step_options(distribution.step_options.placement_only).scope()
    with scope, recorded_attention() as calls:
        jaxpr = jax.jit(stateless_step(model, "train")).trace(state, batch).jaxpr.jaxpr
    flops, peak = count_step_flops(jaxpr, calls, "train"), peak_flops_per_second(device, main_dtype(jaxpr))
    return None if flops is None or peak is None else StepFlops(flops, peak)


def planned_flops(plan: Plan) -> StepFlops | None:
    """Returns the FLOP of a plan, and the peak for their dtypes; None if it has none."""
    seconds = plan.roofline.compute_seconds
    return StepFlops(plan.model_flops, plan.flops / seconds) if seconds and plan.model_flops else None


def peak_flops_per_second(device: Device, dtype: str | None) -> float | None:
    """Returns the peak of a device for matrix multiplications of a dtype, None if it is unknown.

    >>> import types
    >>> device = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", platform="gpu")
    >>> peak_flops_per_second(device, "bfloat16")
    989400000000000.0
    >>> peak_flops_per_second(jax.devices("cpu")[0], "bfloat16")
    """
    known = hardware.of_device(device)
    if known is None or dtype is None:
        return None
    if dtype.startswith("float8_"):
        element_type = f"f8{dtype.removeprefix('float8_')}"
    else:
        element_type = _ELEMENT_TYPES.get(dtype, "f32")
    seconds = compute_seconds(known, {element_type: 1.0})
    return 1 / seconds if seconds else None


class FlopCounter:
    """Knows the model FLOP of batches, once for each shape.

    A batch that differs only in its number of rows, as the last one of an epoch, has FLOP in proportion to them.
    """

    def __init__(self, model: keras.Model, device: Device):
        known = hardware.of_device(device)
        self._has_peak = known is not None and bool(known.flops_per_second)
        self._model: Any = model
        self._device = device
        self._counted: dict[BatchShape, StepFlops | None] = {}

    def add(self, batch: BatchShape, flops: StepFlops | None) -> None:
        """Adds what is known of a batch."""
        if flops is not None:
            self._counted[batch] = flops

    def count(self, batch: BatchShape, state: Any, arrays: Any) -> None:
        """Counts a batch, given specs of the state and the batch, unless that is done or the device has no known peak.

        Takes as long as tracing a step.
        """
        if self._has_peak and batch not in self._counted:
            self._counted[batch] = self._in_proportion(batch) or self._trace(state, arrays)

    @property
    def has_counted(self) -> bool:
        """Whether the FLOP of a batch are known."""
        return any(counted is not None for counted in self._counted.values())

    def seconds_at_peak(self, batch: BatchShape) -> float | None:
        """Returns how long one device would need for a batch at its peak, None if that is unknown."""
        counted = self._counted.get(batch)
        return None if counted is None else counted.flops / counted.peak

    def _in_proportion(self, batch: BatchShape) -> StepFlops | None:
        for other, counted in self._counted.items():
            if counted is not None and other.rows and batch.rows and other.with_rows_of(batch) == batch:
                return StepFlops(counted.flops * batch.rows / other.rows, counted.peak)
        return None

    def _trace(self, state: Any, arrays: Any) -> StepFlops | None:
        if self._model.run_eagerly or not self._model.jit_compile:
            return None
        try:
            return trace_flops(self._model, state, arrays, self._device)
        except Exception as error:  # the step itself runs, so training goes on
            warn(
                f"StepMonitor cannot count the FLOP of {self._model.name!r}, because its train step cannot be traced "
                f"a second time: {describe(error)}. MFU is not reported; pass plan= if you have a plan of the model.",
            )
            return None
