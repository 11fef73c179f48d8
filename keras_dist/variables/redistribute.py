"""`redistribute`: moves the variables of a built model onto a distribution."""

from typing import Any, TypeVar

import jax
import keras

from keras_dist._keras import internals, training_state
from keras_dist._keras.active_distribution import is_of_this_package, record_distribution
from keras_dist._keras.internals import as_sharding
from keras_dist.variables.gather import gather
from keras_dist.variables.host_to_device import reshard
from keras_dist.variables.variable_layouts import VariableSpec, all_variables, layouts_of

ModelT = TypeVar("ModelT", bound=keras.Layer)


def redistribute(model: ModelT, distribution: Any = None) -> ModelT:
    """Moves a built model onto a distribution: weights, optimizer, metrics and the state of random generators.

    Every variable is laid out anew as the distribution says, as if the model had been made under it; optimizer slots
    follow the variable that they belong to. What was compiled for the old layout is forgotten. Values stay the same.
    A callback may call it in the middle of a run, which then goes on under the installed distribution.

    Args:
        model: a model, or a layer.
        distribution: where to. By default the installed distribution; where none is installed, one device.

    Returns:
        The same model.

    Raises:
        TypeError: no model, or no distribution.
        ValueError: a rule that does not fit a variable; nothing has moved then.

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
        raise TypeError(f"redistribute takes a Keras model or layer. Received: {model!r} ({type(model).__name__}).")
    if distribution is not None and not isinstance(distribution, internals.KerasDistribution):
        raise TypeError(
            f"redistribute takes a distribution or None. Received: {distribution!r} ({type(distribution).__name__}). "
            "Pass, for example, keras_dist.DataParallel()."
        )
    target = internals.current_distribution() if distribution is None else distribution
    training_state.put_values_back(model)

    def wanted(variable):
        return None if target is None else target.get_variable_layout(VariableSpec.of(variable))

    layouts = layouts_of(model, target, wanted)  # of all, before one is moved
    for variable in all_variables(model):
        layout = layouts[id(variable)]
        internals.place_variable(variable, layout, _moved(internals.variable_value(variable), layout))
        record_distribution(variable, target if is_of_this_package(target) else None)
    training_state.forget_compiled_functions(model)
    return model


def _moved(value: Any, layout: Any) -> Any:
    if value is None:
        return None
    if layout is None:
        # Not tied to a device, like the value of a variable that was made without a distribution.
        return jax.device_put(gather(value))
    return reshard(value, as_sharding(layout))
