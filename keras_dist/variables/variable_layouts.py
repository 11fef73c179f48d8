"""The layouts of a built model's variables: which they have, and which a distribution gives them."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from jax.core import Tracer

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import distribution_of, is_of_this_package
from keras_dist._keras.internals import as_sharding
from keras_dist.layout.tensor_layout import TensorLayout
from keras_dist.mesh.devices import is_described


class VariableSpec(NamedTuple):
    """What a distribution is told of a variable that it has not laid out: a variable without a value or a layout."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    name: str
    trainable: bool

    @classmethod
    def of(cls, variable: keras.Variable) -> "VariableSpec":
        """Returns the spec of a variable."""
        return cls(variable.path, tuple(variable.shape), variable.dtype, variable.name, variable.trainable)


def check_placement(model: keras.Model, variables: Iterable[keras.Variable], distribution: Any) -> None:
    """Says so where variables of a model do not lie where a distribution wants them.

    Args:
        model: the model, for its name.
        variables: those that a step is going to use.
        distribution: the installed distribution.

    Raises:
        ValueError: a variable lies on other devices, or is laid out as another distribution said, or this one before
            its rules were changed.
    """

    def wanted(variable):
        layout, author = internals.variable_layout(variable), distribution_of(variable)
        brought = layout is not None and author is None
        return layout if brought else distribution.get_variable_layout(VariableSpec.of(variable))

    variables, layouts = list(variables), layouts_of(model, distribution, wanted)
    problems = [(v, problem) for v in variables if (problem := _misplacement(v, layouts[id(v)], distribution))]
    if problems:
        variable, problem = problems[0]
        raise ValueError(
            f"The variables of {model.name!r} must lie where the installed distribution wants them. Received: "
            f"{len(problems)} of {len(variables)} variables that lie elsewhere under {distribution}; the first, "
            f"'{variable.path}', {problem}. Call keras_dist.redistribute(model) to move the model, or install the "
            "distribution before the model and its optimizer are made."
        )


def lies_on(value: Any, mesh: jax.sharding.Mesh) -> bool:
    """Whether an array lies on the devices of a mesh, in its order where the array's sharding has one.

    Args:
        value: anything; what is no concrete `jax.Array` lies nowhere.
        mesh: the mesh.

    Returns:
        Whether it does.
    """
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return False
    sharding = value.sharding
    if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.devices is not None:
        return sharding.mesh is mesh or list(sharding.mesh.devices.flat) == list(mesh.devices.flat)
    return sharding.device_set == set(mesh.devices.flat)


def _misplacement(variable: keras.Variable, wanted: Any, distribution: Any) -> str | None:
    value = internals.variable_value(variable)
    if isinstance(value, jax.Array) and not lies_on(value, distribution.device_mesh.backend_mesh):
        devices = sorted(value.sharding.device_set, key=lambda device: device.id)
        names = [f"{device.platform}:{device.id}" for device in devices[:4]]
        return f"lies on {', '.join(names)}{f' and {len(devices) - 4} more' if len(devices) > 4 else ''}"
    author = distribution_of(variable)
    if author is None:
        return None
    lies = internals.variable_layout(variable)
    if not isinstance(lies, TensorLayout) or as_sharding(lies).is_equivalent_to(
        as_sharding(wanted), len(variable.shape)
    ):
        return None
    whose = "its rules as they were" if author is distribution else author
    return f"is laid out as {lies.axes} by {whose}, and not as {wanted.axes}"


def describe(variable: keras.Variable) -> str:
    """Returns shape, dtype and layout of a variable in words, and a checksum of its value where all devices hold it."""
    value, layout = internals.variable_value(variable), internals.variable_layout(variable)
    words = f"{tuple(variable.shape)} {variable.dtype} {getattr(layout, 'axes', layout)}"
    if isinstance(value, jax.Array) and value.is_fully_replicated and not isinstance(value, Tracer):
        words += f" {zlib.crc32(np.asarray(value).tobytes()):08x}"
    return words


def all_variables(model: keras.Layer) -> Iterator[keras.Variable]:
    """Yields each variable of a model once: weights, state of layers, metrics, optimizer."""
    optimizer = getattr(model, "optimizer", None)
    groups = [model.variables, getattr(model, "metrics_variables", ()), optimizer.variables if optimizer else ()]
    groups += [metric.variables for metric in internals.metrics_to_build(model)]
    seen = set()
    for variable in (variable for group in groups for variable in group):
        if id(variable) not in seen:
            seen.add(id(variable))
            yield variable


def owners_of_slots(model: keras.Layer, variables: Iterable[keras.Variable]) -> dict[int, keras.Variable]:
    """Returns the variable that each optimizer slot was made for.

    Args:
        model: the model.
        variables: its variables, those of the optimizer among them.

    Returns:
        The owner by the `id` of the slot. A variable of the optimizer that belongs to no other one is not in it.
    """
    optimizer = getattr(model, "optimizer", None)
    slots = {id(variable): variable for variable in optimizer.variables} if optimizer else {}
    # Keras names a slot after the path of its variable; of several that fit, the longest is meant.
    weights = {(v.path.replace("/", "_"), tuple(v.shape)): v for v in variables if id(v) not in slots}
    owners = {}
    for key, slot in slots.items():
        name = slot.name
        while "_" in name and key not in owners:
            name = name[: name.rindex("_")]
            if (name, tuple(slot.shape)) in weights:
                owners[key] = weights[name, tuple(slot.shape)]
    return owners


def layouts_of(model: keras.Layer, distribution: Any, layout_of: Callable[[keras.Variable], Any]) -> dict[int, Any]:
    """Returns the layout of each variable of a model under a distribution, by the `id` of the variable.

    Args:
        model: the model.
        distribution: says where the variables of an optimizer lie that belong to another one.
        layout_of: says the layout of all others.
    """
    variables = list(all_variables(model))
    owners = owners_of_slots(model, variables)
    layouts = {id(variable): layout_of(variable) for variable in variables if id(variable) not in owners}
    return layouts | {slot: slot_layout(owner, layouts[id(owner)], distribution) for slot, owner in owners.items()}


def slot_layout(variable: keras.Variable, layout: Any, distribution: Any) -> Any:
    """Returns the layout of what an optimizer keeps for a variable: that of the variable's update.

    Args:
        variable: the variable that it is kept for.
        layout: where that lies. If it is not where the distribution would lay it, what is kept for it lies there too.
        distribution: a distribution of ours or of Keras, or None.
    """
    if not is_of_this_package(distribution):
        return layout
    ours: Any = distribution
    spec = VariableSpec.of(variable)
    return ours.get_update_layout(spec) if layout == ours.get_variable_layout(spec) else layout


def layout_under(variable: keras.Variable, distribution: Any) -> Any:
    """Returns the layout that a variable has under a distribution: the one it brought with it, else the distribution's.

    Args:
        variable: the variable, laid out by any distribution or none.
        distribution: a distribution of ours.

    Raises:
        ValueError: several rules match the path, or the rule does not fit the variable's shape.
    """
    layout, author = internals.variable_layout(variable), distribution_of(variable)
    if layout is not None and author in (None, distribution):  # None: the variable brought it
        devices = distribution.device_mesh.backend_mesh.devices.flat
        if author is not None or as_sharding(layout).device_set == set(devices):
            return layout
    return distribution.get_variable_layout(VariableSpec.of(variable))


def is_on_attached_devices(variable: keras.Variable) -> bool:
    """Returns whether all devices of a variable's layout are attached, and not only described."""
    sharding = as_sharding(internals.variable_layout(variable))
    return sharding is None or not any(map(is_described, sharding.device_set))
