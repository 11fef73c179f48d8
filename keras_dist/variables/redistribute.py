"""`redistribute`: moves the variables of a built model to another distribution."""

from typing import Any, TypeVar

import jax
import keras

from keras_dist._keras import internals, model_structure, training_state
from keras_dist._keras.active_distribution import is_of_this_package, record_distribution
from keras_dist._keras.internals import as_sharding
from keras_dist._keras.not_a_distribution import what_instead_of_a_distribution
from keras_dist.variables.gather import gather
from keras_dist.variables.host_to_device import reshard
from keras_dist.variables.variable_layouts import (
    VariableSpec,
    all_variables,
    expected_layouts,
    layouts_of,
    placement_problem,
)

ModelT = TypeVar("ModelT", bound=keras.Layer)


def redistribute(model: ModelT, distribution: internals.KerasDistribution | None = None) -> ModelT:
    """Moves a built model to a distribution: weights, optimizer and metric state, and states of random generators.

    Every variable gets the layout that it would have if the model had been created under the distribution. Values do
    not change. Functions that were compiled for the old layouts are compiled again at their next use. A callback may
    call this in the middle of `fit`, which then continues under the active distribution.

    Args:
        model: A model or layer.
        distribution: The distribution to move to. By default the active one; if none is active, the model moves to one
            device.

    Returns:
        The same model.

    Raises:
        TypeError: The arguments are not a model and a distribution.
        ValueError: A rule does not fit a variable. In this case, no variable is moved.

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
    training_state.put_values_back(model)

    def layout_of(variable):
        return None if target is None else target.get_variable_layout(VariableSpec.of(variable))

    layouts = layouts_of(model, target, layout_of)  # of all variables, before one is moved
    for variable in all_variables(model):
        _move_variable(variable, layouts[id(variable)], target)
    training_state.forget_compiled_functions(model)
    return model


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
            _move_variable(variable, layout, distribution)


def _move_variable(variable: keras.Variable, layout: Any, distribution: Any) -> None:
    value: Any = internals.variable_value(variable)
    if value is not None:
        # Without a layout not committed to a device, like the value of a variable created without a distribution.
        value = jax.device_put(gather(value)) if layout is None else reshard(value, as_sharding(layout))
    internals.place_variable(variable, layout, value)
    record_distribution(variable, distribution if is_of_this_package(distribution) else None)
