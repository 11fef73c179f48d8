"""A plan against what was measured: is it a plan of what runs, and what explains the difference."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from keras_dist._report.units import bytes_text, percent_text, seconds_text
from keras_dist._report.user_warnings import warn
from keras_dist.mesh.axes import spell_axes
from keras_dist.mesh.devices import Device
from keras_dist.monitoring.batches import BatchShape
from keras_dist.monitoring.summary import Summary
from keras_dist.planning.hardware.registry import hardware
from keras_dist.planning.reports.plan_report import Plan, distribution_name
from keras_dist.steps.options import AUTO
from keras_dist.strategies.base import Distribution


def require_plan(plan: Any) -> None:
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
    """Returns in what a plan differs from what runs on the devices of all processes, under a distribution or none."""
    found = []
    known = hardware.of_device(devices[0])
    running = devices[0].device_kind if known is None else known.name
    if (plan.target, plan.mesh.devices.size) != (running, len(devices)):
        found.append(f"planned for {plan.mesh.devices.size} x {plan.target}, running on {len(devices)} x {running}")
    if not _is_planned_batch(plan, batch):
        planned, given = ", ".join(jax.tree.leaves(plan.batch)), ", ".join(_array_texts(batch))
        found.append(f"planned for batch ({planned}), running with ({given})")
    mesh = getattr(distribution, "device_mesh", None)
    axes = None if mesh is None else dict(zip(mesh.axis_names, mesh.shape, strict=True))
    if distribution is None:
        found.append(f"planned under {distribution_name(plan)}, running without a distribution")
    elif axes != plan.mesh.axis_sizes:
        active = "no mesh" if axes is None else f"mesh {spell_axes(axes)}"
        found.append(f"planned for mesh {spell_axes(plan.mesh.axis_sizes)}, running on {active}")
    elif _without_devices(plan.distribution) != _without_devices(repr(_with_planned_remat(distribution, plan))):
        found.append(f"planned under {distribution_name(plan)}, running under {type(distribution).__name__}")
    return tuple(found)


def warn_of_differences(plan: Plan, batch: BatchShape, devices: Sequence[Device], distribution: Any) -> tuple[str, ...]:
    """Returns in what a plan differs from what runs, and warns if it does."""
    differences = differences_from_run(plan, batch, devices, distribution)
    if differences:
        advice = "" if _is_planned_batch(plan, batch) else " A plan has the global batch: the rows of all processes."
        warn(
            f"StepMonitor does not compare with the plan of {plan.model!r}, which is of another run: "
            f"{'; '.join(differences)}. Plan what runs, or leave out plan=.{advice}",
        )
    return differences


def _is_planned_batch(plan: Plan, batch: BatchShape) -> bool:
    return jax.tree.leaves(plan.batch) == _array_texts(batch)


def _array_texts(batch: BatchShape) -> list[str]:
    return [f"{dtype}{list(shape)}" for shape, dtype in batch.arrays]


def comparison_text(plan: Plan, summary: Summary) -> str:
    """Returns predicted against measured, with what explains the difference."""
    parts = []
    forecast = plan.roofline.forecast
    planned, name = (plan.roofline.seconds, "bound") if forecast is None else (forecast.seconds, "forecast")
    if planned and summary.median is not None:
        ratio = summary.median / planned
        parts.append(f"{name} {seconds_text(planned)}, measured {_times(ratio)}{_causes(ratio - 1, summary)}")
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
    rest = excess / (1 + excess) - data - host
    shares = (("waiting for data", data), ("other work of the host", host), ("on the devices", rest))
    parts = [f"{name} {percent_text(share)}" for name, share in shares if share >= 0.005]
    return f": {', '.join(parts)} of the step" if parts else ""


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
