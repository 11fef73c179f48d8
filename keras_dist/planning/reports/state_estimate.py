"""`StateEstimate`: bytes of a model's weights, gradients and optimizer state, and how many devices hold them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import keras

from keras_dist._keras import internals
from keras_dist._report.report import Report
from keras_dist._report.tables import Lines, Section, Table
from keras_dist._report.units import bytes_text, count_text, counted
from keras_dist.layout.tensor_layout import TensorLayout
from keras_dist.mesh.device_mesh import DeviceMesh
from keras_dist.planning.hardware.registry import hardware
from keras_dist.sharding.shard_dim import shard_one_more_dim
from keras_dist.variables.deferred import built
from keras_dist.variables.variable_layouts import VariableSpec, layouts_of

_DEVICES = tuple(2**power for power in range(13))


class State(NamedTuple):
    """Bytes of a model's state. Gradients have the dtypes of trainable weights, and are counted as if all were held."""

    weights: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class StateEstimate(Report):
    """Bytes of weights, gradients and optimizer state of a model, without activations, for each dtype policy.

    Attributes:
        model: Name of the model.
        parameters: Number of elements of all weights.
        trainable: Number of those that are trained.
        optimizer: Name of the optimizer's class; None for a step that does not train.
        state: Bytes by dtype policy.
        devices: The fewest devices, of 1, 2, 4, ..., 4096, whose memory holds this state under FSDP, by hardware and
            dtype policy; None if more are needed.
    """

    model: str
    parameters: int
    trainable: int
    optimizer: str | None
    state: Mapping[str, State]
    devices: Mapping[str, Mapping[str, int | None]]

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures, in bytes and numbers of devices, by dtype policy."""
        return {**vars(self), "state": {dtype: state._asdict() for dtype, state in self.state.items()}}

    def _sections(self) -> Iterator[Section]:
        title = (
            f"{self.model}, {counted(count_text(self.parameters), 'parameter')}, {count_text(self.trainable)} trained"
        )
        columns = (">weights", ">gradients", f">optimizer ({self.optimizer})", ">sum")
        kept = columns if self.optimizer else columns[:1]
        rows = [
            [dtype, *[bytes_text(each) for each in (*state, sum(state))][: len(kept)]]
            for dtype, state in self.state.items()
        ]
        lines = ["Without activations: add --target and --rows to compile the step for hardware."]
        if {"float32", "bfloat16"} <= self.state.keys() and len(set(self.state.values())) == 1:
            lines.append("The model sets its dtypes itself: the policy changes nothing.")
        yield title, [Table(("dtype policy", *kept), rows), Lines(tuple(lines))]
        rows = [
            [name, bytes_text(hardware[name].memory_bytes or 0), *(str(each or "more") for each in counts.values())]
            for name, counts in self.devices.items()
        ]
        columns = ("hardware", ">memory", *(f">{dtype}" for dtype in self.state))
        yield f"Fewest devices (1, 2, 4, ..., {_DEVICES[-1]}) that hold this under FSDP", [Table(columns, rows)]


def estimate_state(
    build_under: Callable[[str], Callable[[], keras.Model]], dtypes: Sequence[str], step: str
) -> StateEstimate:
    """Returns the state of a model for each dtype policy.

    Args:
        build_under: Returns, for a dtype policy, the function that builds the model.
        dtypes: Dtype policies.
        step: `"train"` for weights, gradients and optimizer state, otherwise for weights only.
    """
    states, on_a_device, facts = {}, {}, {}
    for dtype in dtypes:
        with built(build_under(dtype)) as model:
            is_trained, optimizer = step == "train", getattr(model, "optimizer", None)
            if is_trained and optimizer is None:
                model.optimizer = optimizer = keras.optimizers.Adam()
            if is_trained and not optimizer.built:
                optimizer.build(model.trainable_variables)
            trained = model.trainable_variables if is_trained else []
            parts = [model.weights, trained, optimizer.variables if is_trained else []]
            states[dtype] = State(*(sum(map(_bytes, part)) for part in parts))
            on_a_device[dtype] = [_bytes_on_a_device(model, parts, count) for count in _DEVICES]
            facts = {
                "model": model.name,
                "parameters": sum(math.prod(each.shape) for each in model.weights),
                "trainable": sum(math.prod(each.shape) for each in model.trainable_variables),
                "optimizer": type(optimizer).__name__ if is_trained else None,
            }
    known = [each for each in hardware.values() if each.memory_bytes]
    held = {each.name: {d: _fewest(on_a_device[d], each.memory_bytes or 0) for d in dtypes} for each in known}
    return StateEstimate(**facts, state=states, devices=held)


def _fewest(needed: Sequence[int], memory: int) -> int | None:
    return next((count for count, bytes in zip(_DEVICES, needed, strict=True) if bytes <= memory), None)


def _bytes(variable: keras.Variable) -> int:
    return math.prod(variable.shape) * jnp.dtype(internals.stored_dtype(variable)).itemsize


def _bytes_on_a_device(model: keras.Model, parts: Sequence[Sequence[keras.Variable]], count: int) -> int:
    """Returns the bytes of variables on each of some devices under `FullyShardedDataParallel`."""
    mesh = DeviceMesh((count,), ["fsdp"], [f"cpu:{number}" for number in range(count)])  # its sizes are all that counts

    def layout_of(variable: keras.Variable) -> TensorLayout:
        unsharded, is_table = (
            TensorLayout((None,) * len(variable.shape), mesh),
            internals.is_embedding_table(variable.path),
        )
        return shard_one_more_dim(unsharded, VariableSpec.of(variable), ["fsdp"], mesh, prefers_columns=is_table)

    layouts = layouts_of(model, None, layout_of)
    return sum(_bytes(each) // (count if any(layouts[id(each)].axes) else 1) for part in parts for each in part)
