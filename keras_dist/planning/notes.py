"""What a plan notes beside its figures: idle mesh axes, missing figures, dropout in attention, short executions."""

import math
from collections.abc import Iterable

import keras

from keras_dist._keras.model_structure import layers_by_path
from keras_dist._report.units import bytes_text, counted, seconds_text
from keras_dist._report.variable_groups import PlacedVariable
from keras_dist.attention.kernels import FUSED_KERNELS
from keras_dist.layout.tensor_layout import axis_names, axis_tuple
from keras_dist.planning.compiling.abstract_step import Step
from keras_dist.planning.compiling.compilation import Compilation, Traffic
from keras_dist.planning.costs.forecast import Forecast
from keras_dist.planning.targets.target import hardware_of
from keras_dist.strategies.base import Distribution

# What the host takes for a step of `fit`. Source: case "mlp" of benchmarks/one_gpu.py, 12 dense layers with Adam, took
# 1.1 ms a step on an H100, which needs 0.4 ms for it by forecast.
HOST_SECONDS = 1e-3


def notes_on_compilation(
    compiled: Compilation, distribution: Distribution, variables: Iterable[PlacedVariable]
) -> tuple[str, ...]:
    """Notes on a compiled step: the compiler's refusal or idle mesh axes, and the figure that a forecast lacks."""
    if compiled.refusal:
        notes = (f"The compiler reports: {compiled.refusal}",)
    else:
        notes = _notes_on_idle_axes(distribution, variables, compiled.traffic)
    chip = hardware_of(distribution.device_mesh.backend_mesh.devices.flat[0])
    if compiled.host_traffic and chip is not None and chip.platform != "cpu" and chip.host_bytes_per_second is None:
        notes += (
            f"How long copies to the host and back take is unknown, and so is the forecast, because hardware "
            f"{chip.name!r} has no host_bytes_per_second. Plan for kd.hardware.register(dataclasses.replace("
            f"kd.hardware[{chip.name!r}], name=..., host_bytes_per_second=..., sources=...)).",
        )
    return notes + compiled.notes


def _notes_on_idle_axes(
    distribution: Distribution, variables: Iterable[PlacedVariable], traffic: Iterable[Traffic]
) -> tuple[str, ...]:
    """Notes on mesh axes over which neither variables nor the batch are sharded, and no collective runs."""
    used = {axis for variable in variables for axis in axis_names(variable.axes)}
    used |= {axis for each in traffic for axis in each.axes or ()}
    used |= {*axis_tuple(distribution.batch_dim_name), *axis_tuple(distribution.sequence_dim_name)}
    return tuple(
        f"Mesh axis '{axis}' (size {size}) is unused: its {size} devices hold the same values and repeat the same "
        "work. Shard weights over it with layout map rules, or add it to the batch axes or the sequence axes."
        for axis, size in distribution.device_mesh.axis_sizes.items()
        if size > 1 and axis not in used
    )


def notes_on_attention(step: Step) -> tuple[str, ...]:
    """Notes on layers with dropout of attention weights, whose attention Keras computes without a kernel."""
    kinds = keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention
    found = layers_by_path(step.model).items()
    layers = [path for path, layer in found if isinstance(layer, kinds) and layer.dropout]
    if not layers or step.distribution.device_mesh.backend_mesh.devices.flat[0].platform not in FUSED_KERNELS:
        return ()
    others = f" and {counted(len(layers) - 1, 'more layer')}" * (len(layers) > 1)
    return (
        f"Attention of {layers[0]!r}{others} has dropout, so XLA holds all logits (queries x keys for each "
        "head) in memory. Build the model without dropout in attention to have a fused kernel compute it.",
    )


def notes_on_executions(step: str, batches: int, batch_bytes: int, forecast: Forecast | None) -> tuple[str, ...]:
    """Notes on what an execution of `batches` steps by `fit` needs beside what a plan of one step counts."""
    if step == "generate":
        return ()
    notes = ()
    if batches > 1:
        notes += (
            f"The plan is of one step and one batch, but fit holds the {counted(batches, 'batch')} of an execution "
            f"(steps_per_execution={batches}) on the devices: {bytes_text(batches * batch_bytes)} each.",
        )
    if forecast is not None and batches * forecast.seconds < HOST_SECONDS:
        notes += (
            f"The devices need {seconds_text(batches * forecast.seconds)} for an execution by forecast, less than the "
            f"{seconds_text(HOST_SECONDS)} that the host can need to start one. Compile the model with "
            f"steps_per_execution={math.ceil(HOST_SECONDS / forecast.seconds)} or more.",
        )
    return notes
