"""Bytes of a model's weights, gradients and optimizer state, and how many devices hold them under FSDP."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras

from keras_dist._keras import internals
from keras_dist._report.tables import Lines, Table, render_text
from keras_dist._report.units import bytes_text, count_text
from keras_dist.layout.tensor_layout import TensorLayout
from keras_dist.mesh.device_mesh import DeviceMesh
from keras_dist.planning.hardware.registry import hardware
from keras_dist.sharding.shard_dim import shard_one_more_dim
from keras_dist.variables.deferred import built
from keras_dist.variables.variable_layouts import VariableSpec, layouts_of

_COUNTS = tuple(2**power for power in range(13))


@dataclasses.dataclass(frozen=True)
class State:
    """Bytes of a model's state. All gradients are counted, as if they were held at once, in the dtypes of weights."""

    model: str
    parameters: int
    optimizer: str | None  # name of its class; None for a step that does not train
    weights: int
    gradients: int
    optimizer_state: int
    devices: Mapping[str, int | None]  # the fewest of 1, 2, 4, ... whose memory holds all under FSDP, by hardware


def estimate_state(build_model: Callable[[], keras.Model], step: str) -> State:
    """Returns the state of a model that a function builds, of a train step with Adam if it is not compiled."""
    with built(build_model) as model:
        parts, optimizer = [model.weights], None
        if step == "train":
            model.optimizer = optimizer = getattr(model, "optimizer", None) or keras.optimizers.Adam()
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
            parts += [model.trainable_variables, optimizer.variables]
        needed = {count: _bytes_on_a_device(model, parts, count) for count in _COUNTS}
        weights, gradients, optimizer_state, *_ = [sum(map(internals.stored_bytes, part)) for part in (*parts, [], [])]
        memories = {each.name: each.memory_bytes for each in hardware.values() if each.memory_bytes}
        return State(
            model=model.name,
            parameters=sum(math.prod(each.shape) for each in model.weights),
            optimizer=type(optimizer).__name__ if optimizer else None,
            weights=weights,
            gradients=gradients,
            optimizer_state=optimizer_state,
            devices={name: next((n for n in _COUNTS if needed[n] <= most), None) for name, most in memories.items()},
        )


def state_text(states: Mapping[str, State]) -> str:
    """Returns tables of the state of a model by dtype policy."""
    first, *_ = values = list(states.values())
    columns = (">weights", *([">gradients", f">optimizer ({first.optimizer})", ">sum"] if first.optimizer else []))
    held = [(state.weights, state.gradients, state.optimizer_state) for state in values]
    rows = [[dtype, *map(bytes_text, (*each, sum(each)))] for dtype, each in zip(states, held, strict=True)]
    lines = ["Without activations: add --target and --rows to compile the step for hardware."]
    if {"float32", "bfloat16"} <= states.keys() and len(set(held)) == 1:
        lines.append("The model sets its dtypes itself: the policy changes nothing.")
    counts = [
        [name, bytes_text(hardware[name].memory_bytes or 0), *(str(each.devices[name] or "more") for each in values)]
        for name in first.devices
    ]
    by_dtype = Table(("dtype policy", *columns), [row[: 1 + len(columns)] for row in rows])
    by_hardware = Table(("hardware", ">memory", *(f">{dtype}" for dtype in states)), counts)
    title = f"{first.model}, {count_text(first.parameters)} parameters"
    fewest = f"Fewest devices (1, 2, 4, ..., {_COUNTS[-1]}) that hold this under FSDP"
    return render_text([(title, [by_dtype, Lines(tuple(lines))]), (fewest, [by_hardware])])


def _bytes_on_a_device(model: keras.Model, parts: Iterable[Iterable[Any]], count: int) -> int:
    """Returns the bytes of variables on each of some devices under `FullyShardedDataParallel`."""
    mesh = DeviceMesh((count,), ["fsdp"], [f"cpu:{number}" for number in range(count)])  # its sizes are all that counts

    def layout_of(variable: Any) -> TensorLayout:
        spec, is_table = VariableSpec.of(variable), internals.is_embedding_table(variable.path)
        return shard_one_more_dim(
            TensorLayout((None,) * len(spec.shape), mesh), spec, ["fsdp"], mesh, prefers_columns=is_table
        )

    layouts = layouts_of(model, None, layout_of)
    return sum(
        internals.stored_bytes(each) // (count if any(layouts[id(each)].axes) else 1) for part in parts for each in part
    )
