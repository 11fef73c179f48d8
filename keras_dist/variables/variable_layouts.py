"""Layouts of a model's variables: the ones they have, the ones that a distribution chooses, and moves to these."""

import collections
import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import keras
import numpy as np
from jax.core import Tracer

from keras_dist._keras import internals, model_structure, training_state
from keras_dist._keras.active_distribution import (
    PackageDistribution,
    distribution_of,
    distribution_of_model,
    record_distribution,
    what_instead_of_a_distribution,
)
from keras_dist._keras.compiled_functions import exchange_functions
from keras_dist._keras.internals import as_sharding
from keras_dist._keras.quantized_weights import FloatWeight, quantized_from, record_variables
from keras_dist._report.units import counted
from keras_dist.layout.tensor_layout import TensorLayout
from keras_dist.mesh.devices import is_attached, is_on_mesh
from keras_dist.variables.gather import gather
from keras_dist.variables.host_to_device import reshard, source_of

ModelT = TypeVar("ModelT", bound=keras.Layer)


class VariableSpec(NamedTuple):
    """What a distribution needs to choose a variable's layout: the variable without its value and its layout."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    name: str
    trainable: bool
    quantized_from: FloatWeight | None = None

    @classmethod
    def of(cls, variable: keras.Variable) -> "VariableSpec":
        weight = quantized_from(variable)
        dtype = internals.stored_dtype(variable)
        return cls(variable.path, tuple(variable.shape), dtype, variable.name, variable.trainable, weight)


def all_variables(model: keras.Layer) -> Iterator[keras.Variable]:
    """Yields each variable of a model once: weights, state of layers, metrics, optimizer."""
    record_variables(model)  # of those that were created while no distribution was active
    optimizer = getattr(model, "optimizer", None)
    groups = [model.variables, getattr(model, "metrics_variables", ()), optimizer.variables if optimizer else ()]
    groups += [metric.variables for metric in internals.unbuilt_metrics(model)]
    if hasattr(model, "generate_function"):
        groups.append(getattr(getattr(model, "sampler", None), "variables", ()))  # its random states
    yield from {id(variable): variable for group in groups for variable in group}.values()


def optimizer_state_owners(optimizer: Any, variables: Iterable[keras.Variable]) -> dict[int, keras.Variable]:
    """Returns which of some variables each state of an optimizer belongs to, if any, by the `id` of the state."""
    states = {id(variable): variable for variable in optimizer.variables} if optimizer else {}
    # Keras names the state of 'a/kernel' 'a_kernel_momentum'. Of several weights that fit, the longest name is meant.
    weights = {(v.path.replace("/", "_"), tuple(v.shape)): v for v in variables if id(v) not in states}
    owners = {}
    for key, state in states.items():
        name = state.name
        while "_" in name and key not in owners:
            name = name[: name.rindex("_")]
            if (name, tuple(state.shape)) in weights:
                owners[key] = weights[name, tuple(state.shape)]
    return owners


def layouts_of(model: keras.Layer, distribution: Any, layout_of: Callable[[keras.Variable], Any]) -> dict[int, Any]:
    """Returns the layout of each variable of a model by `id`; `layout_of` chooses all but those of optimizer state."""
    variables = list(all_variables(model))
    owners = optimizer_state_owners(getattr(model, "optimizer", None), variables)
    layouts = {id(variable): layout_of(variable) for variable in variables if id(variable) not in owners}
    states = {key: optimizer_state_layout(owner, layouts[id(owner)], distribution) for key, owner in owners.items()}
    return layouts | states


def chosen_layouts(model: keras.Layer, distribution: Any) -> dict[int, Any]:
    """Returns the layouts that a distribution chooses for a model's variables, by `id`; all None without one."""

    def layout_of(variable):
        return None if distribution is None else distribution.get_variable_layout(VariableSpec.of(variable))

    return layouts_of(model, distribution, layout_of)


def optimizer_state_layout(variable: keras.Variable, layout: Any, distribution: Any) -> Any:
    """Returns the layout of a variable's optimizer state: `layout`, the variable's own, if the user passed that."""
    if not isinstance(distribution, PackageDistribution):
        return layout
    chooser: Any = distribution
    spec = VariableSpec.of(variable)
    chosen = chooser.get_update_layout(spec) if layout == chooser.get_variable_layout(spec) else layout
    return chooser.train_steps.state_layout(spec, chosen)


def layout_under(variable: keras.Variable, distribution: Any) -> Any:
    """Returns the layout that the user created a variable with, else the one that a distribution chooses."""
    layout, chosen_by = internals.variable_layout(variable), distribution_of(variable)
    if layout is not None and chosen_by in (None, distribution):
        devices = distribution.device_mesh.backend_mesh.devices.flat
        if chosen_by is not None or as_sharding(layout).device_set == set(devices):
            return layout
    return distribution.get_variable_layout(VariableSpec.of(variable))


def check_placement(model: keras.Model, variables: Iterable[keras.Variable], distribution: Any) -> None:
    """Raises ValueError if variables of a model that a step uses are not placed as the distribution places them.

    They may be on other devices, or have a layout of another distribution, or of this one before its rules changed.
    """
    variables, layouts = list(variables), expected_layouts(model, distribution)
    problems = [(v, problem) for v in variables if (problem := placement_problem(v, layouts[id(v)], distribution))]
    if problems:
        variable, problem = problems[0]
        raise ValueError(
            f"{model.name!r} was not built under {distribution}, or the distribution has changed since: "
            f"{len(problems)} of {counted(len(variables), 'variable')} {'is' if len(problems) == 1 else 'are'} placed "
            f"differently. The first, '{variable.path}', {problem}. Call keras_dist.redistribute(model) to move the "
            "model, or set the distribution before you create the model and its optimizer."
        )


def expected_layouts(model: keras.Layer, distribution: Any) -> dict[int, Any]:
    """Returns the layouts that a model's variables must have under a distribution, by the `id` of the variable."""

    def expected(variable):
        layout = internals.variable_layout(variable)
        was_passed = layout is not None and distribution_of(variable) is None
        return layout if was_passed else distribution.get_variable_layout(VariableSpec.of(variable))

    return layouts_of(model, distribution, expected)


def placement_problem(variable: keras.Variable, expected: Any, distribution: Any) -> str | None:
    """Returns how the placement of a variable differs from the layout it should have, None where it does not."""
    value = internals.variable_value(variable)
    if isinstance(value, jax.Array) and not is_on_mesh(value, distribution.device_mesh.backend_mesh):
        devices = sorted(value.sharding.device_set, key=lambda device: device.id)
        names = [f"{device.platform}:{device.id}" for device in devices[:4]]
        return f"is on {', '.join(names)}{f' and {len(devices) - 4} more' if len(devices) > 4 else ''}"
    chosen_by, layout = distribution_of(variable), internals.variable_layout(variable)
    if chosen_by is None or not isinstance(layout, TensorLayout):
        return None
    if as_sharding(layout).is_equivalent_to(as_sharding(expected), len(variable.shape)):
        return None
    origin = "the rules before they changed" if chosen_by is distribution else str(chosen_by)
    return f"has layout {layout.axes} from {origin}, instead of {expected.axes}"


def is_on_attached_devices(variable: keras.Variable) -> bool:
    """Returns whether all devices of a variable's layout are attached, and not only described."""
    sharding = as_sharding(internals.variable_layout(variable))
    return sharding is None or all(map(is_attached, sharding.device_set))


def describe_variable(variable: keras.Variable) -> str:
    """Returns a variable's shape, dtype and layout, and where every device holds all of it its number or checksum.

    Where each process has other shards of a host value, a checksum of that value.
    """
    value, layout = internals.variable_value(variable), internals.variable_layout(variable)
    text = f"{tuple(variable.shape)} {variable.dtype} {getattr(layout, 'axes', layout)}"
    if isinstance(value, jax.Array) and value.is_fully_replicated and not isinstance(value, Tracer):
        array = np.asarray(value)
        text += f" {array.reshape(-1)[0]!s}" if array.size == 1 else f" checksum {zlib.crc32(array.tobytes()):08x}"
    source = source_of(value)
    return f"{text} made of a host value with checksum {source}" if source else text


def redistribute(model: ModelT, distribution: internals.KerasDistribution | None = None) -> ModelT:
    """Moves a built model to a distribution: weights, optimizer and metric state, and states of random generators.

    Every variable gets the layout that it would have if the model had been created under the distribution. Values do
    not change. Functions are compiled for the new layouts at their next use; those of the last four distributions are
    kept for when the model returns. A callback may call `set_distribution` and this in the middle of `fit`, which then
    continues under the new distribution; if that has other devices, at the start or the end of an epoch only, and not
    with `steps_per_epoch`.

    Args:
        model: A model or layer.
        distribution: The distribution to move to. By default the active one; if none is active, the model moves to one
            device.

    Returns:
        The same model.

    Raises:
        TypeError: The arguments are not a model and a distribution.
        ValueError: A rule does not fit a variable. In this case, no variable is moved. Later, in `fit`: a callback has
            moved the model to other devices in the middle of an epoch.

    Example:

    >>> from keras_dist import DataParallel
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> len(model.weights[0].value.sharding.device_set)
    1
    >>> model = redistribute(model, DataParallel())
    >>> len(model.weights[0].value.sharding.device_set)
    8
    """
    if not isinstance(model, keras.Layer):
        what = f"variable {model.path!r}" if isinstance(model, keras.Variable) else f"{model!r}"
        swapped = " Write redistribute(model, distribution)." if isinstance(distribution, keras.Layer) else ""
        kind = type(model).__name__
        raise TypeError(f"redistribute takes a Keras model or layer, not {what} (of type {kind}).{swapped}")
    if distribution is not None and not isinstance(distribution, internals.KerasDistribution):
        raise TypeError(
            f"redistribute takes a distribution or None, but got {what_instead_of_a_distribution(distribution)}"
        )
    target = internals.current_distribution() if distribution is None else distribution
    if "_inference_distribution" in vars(model):
        raise ValueError(
            f"Cannot redistribute {model.name!r} in a block of keras_dist.inference_layout, which will move it back. "
            "End the block first."
        )
    training_state.put_values_back(model)
    layouts = chosen_layouts(model, target)  # of all variables, before one is moved
    with functions_exchanged(model, target):
        move_variables([(variable, layouts[id(variable)], target) for variable in all_variables(model)])
    return model


@contextlib.contextmanager
def functions_exchanged(model: keras.Layer, distribution: Any) -> Iterator[None]:
    """Gives a model that a block moves to a distribution the functions that were compiled when it was there last."""

    def placement():
        return [(id(v), v.trainable, as_sharding(internals.variable_layout(v))) for v in all_variables(model)]

    left, before = distribution_of_model(model), placement()
    yield
    exchange_functions(model, left, before, distribution, placement())


def place_new_seed_generators(model: keras.Layer, distribution: Any) -> None:
    """Moves the states of random generators to the active distribution, if they are not placed as it places them.

    A layer that is added outside of the distribution's scope may have a random generator (dropout) but no weights, and
    thus nothing that a user would think of redistributing.
    """
    states = model_structure.seed_generator_states(model)
    layouts = expected_layouts(model, distribution) if states else {}
    for variable in states:
        layout = layouts.get(id(variable))
        if layout is not None and placement_problem(variable, layout, distribution):
            move_variables([(variable, layout, distribution)])


def move_variables(moves: Sequence[tuple[keras.Variable, Any, Any]], max_bytes: int = 2**30) -> None:
    """Moves variables, each to a layout that a distribution chose.

    Arrays are moved one after the other, and one that several variables share is moved once. JAX computes ahead of the
    program, so this waits whenever the arrays that a device may still receive exceed `max_bytes`.
    """
    left = collections.Counter(id(internals.variable_value(variable)) for variable, *_ in moves)
    shared, in_flight, num_bytes = {}, [], 0
    for variable, layout, distribution in moves:
        before: Any = internals.variable_value(variable)
        value, key, sharding = None, (id(before), layout), as_sharding(layout)
        if key in shared:
            value = shared[key]
        elif before is not None and layout is None:
            # Not committed to a device, like the value of a variable created without a distribution.
            value = jax.device_put(gather(before))
        elif before is not None:
            value = reshard(before, sharding)
            in_flight.append(value)
            num_bytes += max((shard.data.nbytes for shard in value.addressable_shards), default=0)
            if num_bytes > max_bytes:
                jax.block_until_ready(in_flight)
                in_flight, num_bytes = [], 0
        left[id(before)] -= 1
        if left[id(before)]:
            shared[key] = value
        place(variable, layout, distribution, value)


def place(variable: keras.Variable, layout: Any, distribution: Any, value: Any) -> None:
    """Sets the layout of a variable, the distribution that chose it, and its value in that layout unless it is None."""
    internals.place_variable(variable, layout, value)
    record_distribution(variable, distribution if isinstance(distribution, PackageDistribution) else None)
