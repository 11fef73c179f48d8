"""A plan against what was measured: is it a plan of what runs, and what explains the difference."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from keras_dist._report.units import bytes_text, percent_text, seconds_text
from keras_dist.mesh.axes import spell_axes
from keras_dist.mesh.devices import Device
from keras_dist.monitoring.batches import BatchShape
from keras_dist.monitoring.summary import Summary
from keras_dist.planning.hardware.registry import hardware
from keras_dist.planning.reports.plan_report import Plan, distribution_name
from keras_dist.steps.options import AUTO
from keras_dist.strategies.base import Distribution


def require_plan(plan: Any) -> None:
    """Raises an error unless a plan can be compared with training."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan must be a keras_dist.Plan, but got {plan!r} ({type(plan).__name__}). Pass what "
            "keras_dist.plan(build, distribution, batch) returns."
        )
    if plan.step != "train":
        raise ValueError(
            f"plan is of the {plan.step} step of {plan.model!r}, and StepMonitor measures training. Plan with "
            'step="train", the default.'
        )


def differences_from_run(
    plan: Plan, batch: BatchShape, devices: Sequence[Device], distribution: Any
) -> tuple[str, ...]:
    """Returns in what a plan differs from what runs, so that its figures are of something else.

    Args:
        plan: The plan.
        batch: A batch that runs.
        devices: The devices that run it, in all processes.
        distribution: The active distribution; None without one.
    """
    found = []
    running = _name_of(devices[0])
    if (plan.target, plan.mesh.devices.size) != (running, len(devices)):
        found.append(f"planned for {plan.mesh.devices.size} x {plan.target}, running on {len(devices)} x {running}")
    if not is_planned_batch(plan, batch):
        found.append(f"planned for batch {_batch_text(_planned_arrays(plan))}, running with {batch_text(batch)}")
    planned_axes, axes = plan.mesh.axis_sizes, getattr(distribution, "device_mesh", None)
    if distribution is None:
        found.append(f"planned under {distribution_name(plan)}, running without a distribution")
    elif axes is None or planned_axes != dict(zip(axes.axis_names, axes.shape, strict=True)):
        found.append(f"planned for mesh {spell_axes(planned_axes)}, running on {_mesh_text(axes)}")
    elif _without_devices(plan.distribution) != _without_devices(repr(_with_planned_remat(distribution, plan))):
        found.append(f"planned under {distribution_name(plan)}, running under {type(distribution).__name__}")
    return tuple(found)


def is_planned_batch(plan: Plan, batch: BatchShape) -> bool:
    """Whether a plan is of batches with these shapes and dtypes."""
    return _planned_arrays(plan) == [_array_text(shape, dtype) for shape, dtype in batch.arrays]


def batch_text(batch: BatchShape) -> str:
    return _batch_text([_array_text(shape, dtype) for shape, dtype in batch.arrays])


def comparison_text(plan: Plan, summary: Summary) -> str:
    """Returns predicted against measured, with what explains the difference."""
    parts = []
    forecast = plan.roofline.forecast
    planned, name = (plan.roofline.seconds, "bound") if forecast is None else (forecast.seconds, "forecast")
    if planned and summary.median is not None:
        parts.append(f"{name} {seconds_text(planned)}, measured {_times(summary.median / planned)}")
        if named := _causes(summary.median / planned - 1, summary):
            parts[-1] += f": {named}"
    if summary.peak_memory is not None:
        parts.append(
            f"planned memory {bytes_text(plan.memory.total)}, peak {_times(summary.peak_memory / plan.memory.total)}"
        )
    return "; ".join(parts) or "nothing of the plan can be compared: neither its step time nor peak memory is known"


def forecast_ratio(plan: Plan | None, summary: Summary) -> float | None:
    """Returns measured step time over the plan's forecast, None if either is unknown."""
    forecast = None if plan is None else plan.roofline.forecast
    if forecast is None or not forecast.seconds or summary.median is None:
        return None
    return summary.median / forecast.seconds


def _times(ratio: float) -> str:
    """Returns how a measured value relates to a predicted one.

    >>> _times(1.25), _times(0.5), _times(12.0), _times(1.004)
    ('25% more', '50% less', '12.0 times as much', 'the same')
    """
    if ratio >= 3:
        return f"{ratio:.1f} times as much"
    if abs(ratio - 1) < 0.005:
        return "the same"
    return f"{percent_text(abs(ratio - 1))} {'more' if ratio > 1 else 'less'}"


def _causes(excess: float, summary: Summary) -> str:
    """Names where the time went in which devices had nothing to do, and what is left, as shares of the step."""
    if excess < 0.005:
        return ""
    data, host = summary.data_wait or 0.0, summary.host_work or 0.0
    parts = [f"waiting for data {percent_text(data)}"] if data >= 0.005 else []
    parts += [f"other work of the host {percent_text(host)}"] if host >= 0.005 else []
    rest = excess / (1 + excess) - data - host
    if rest >= 0.005:
        parts.append(f"on the devices {percent_text(rest)}")
    return ", ".join(parts) + " of the step" if parts else ""


def _planned_arrays(plan: Plan) -> list[str]:
    return jax.tree.leaves(plan.batch)


def _array_text(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{dtype}{list(shape)}"


def _batch_text(arrays: Sequence[str]) -> str:
    return f"({', '.join(arrays)})"


def _mesh_text(mesh: Any) -> str:
    return "no mesh" if mesh is None else f"mesh {spell_axes(dict(zip(mesh.axis_names, mesh.shape, strict=True)))}"


def _with_planned_remat(distribution: Any, plan: Plan) -> Any:
    """Returns a distribution with the mode that a plan has chosen for `remat="auto"`."""
    if not isinstance(distribution, Distribution) or distribution.step_options.remat != AUTO:
        return distribution
    return distribution.with_step_options(replace(distribution.step_options, remat=plan.step_options.remat))


def _without_devices(text: str) -> str:
    """Returns the `repr` of a distribution without that of its mesh, which names the kind of its devices.

    >>> _without_devices("<DataParallel device_mesh=<DeviceMesh data:8 on 8 cpu devices>>")
    '<DataParallel>'
    """
    return re.sub(r" device_mesh=<[^>]*>", "", text)


def _name_of(device: Device) -> str:
    known = hardware.of_device(device)
    return device.device_kind if known is None else known.name
