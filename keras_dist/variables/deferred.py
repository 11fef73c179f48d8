"""Models without values: `deferred` creates them, `materialize` initializes them, and reports inspect `built` ones."""

import contextlib
import copy
import inspect
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_dist._keras import deferred_variables, internals, model_structure
from keras_dist._keras.active_distribution import distribution_of_model
from keras_dist._keras.global_state import global_state_restored
from keras_dist._keras.internals import as_sharding, variable_layout, variable_value
from keras_dist._report.units import counted
from keras_dist.variables.host_to_device import reshard
from keras_dist.variables.variable_layouts import ModelT, all_variables, is_on_attached_devices

# Constant arrays of up to this many elements are sent from the host, which takes less time than to compile a program.
_MAX_ELEMENTS_FROM_HOST = 2**16


def deferred() -> contextlib.AbstractContextManager[None]:
    """Creates models, optimizers and metrics with shapes, dtypes and layouts, but without values.

    A model of any size is created in seconds and without memory, also for devices that are not attached. Layouts are
    those of the active distribution. Variables that are created with a value (a learning rate, an array) keep it.

    Raises:
        ValueError: Keras runs with NNX enabled; later, when the value of a deferred variable is used.

    Example:

    >>> with deferred():
    ...     model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1_000_000_000)])
    >>> model.count_params()
    17000000000
    """
    return deferred_variables.deferring()


def materialize(model: ModelT) -> ModelT:
    """Initializes the variables of a deferred model, each shard directly on its device.

    The values equal those of the same model built without `deferred` from the same seed, up to floating-point rounding.
    The exception are initializers that draw from a stateful generator (a `keras.random.SeedGenerator`, or a function
    that uses no seed): variables are initialized in another order, so they may draw other numbers.

    Variables with the same initializer, shape and layout share one compiled program; small constant arrays, such as
    biases, need none. An initializer that is not a class of Keras runs on one device, and its result is then sharded.

    Args:
        model: A model or layer created inside `deferred()`. A model that does not declare its inputs must have been
            called there on a `keras.KerasTensor`. The optimizer of a compiled model is built too. Variables that have
            values keep them, and are moved if their layout requires it.

    Returns:
        The same model.

    Raises:
        TypeError: `model` is not a Keras model or layer.
        ValueError: The model is not built, or a layout uses devices that are not attached.

    Example:

    >>> from keras_dist import DataParallel
    >>> with DataParallel().scope():
    ...     with deferred():
    ...         model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    ...     model = materialize(model)
    >>> len(model.weights[0].value.sharding.device_set)
    8
    """
    if not isinstance(model, keras.Layer):
        raise TypeError(f"materialize takes a Keras model or layer, got {model!r} ({type(model).__name__}).")
    if not model.built:
        raise ValueError(
            f"Cannot materialize '{model.name}': it is not built, so it has no variables. Start it with "
            "keras.Input(shape), or call it on keras.KerasTensor(shape) inside keras_dist.deferred()."
        )
    build_optimizer(model)
    variables = list(all_variables(model))
    for variable in variables:
        if not is_on_attached_devices(variable):
            devices = as_sharding(variable_layout(variable)).device_set
            raise ValueError(
                f"Cannot materialize '{variable.path}': its layout uses {counted(len(devices), 'device')} "
                f"({next(iter(devices)).device_kind}) that are not attached. First call "
                "keras_dist.redistribute(model, distribution) with a distribution on attached devices."
            )
    with ThreadPoolExecutor() as pool:
        # All programs compile in the background while the first ones run.
        programs: dict[Any, Future] = {}
        initializations = [_initialization(variable, programs, pool) for variable in variables]
        for variable, initialize in zip(variables, initializations, strict=True):
            internals.place_variable(variable, variable_layout(variable), initialize())
    return model


def build_optimizer(model: keras.Layer) -> None:
    """Builds a model's optimizer, with deferred variables, if the model is built and its optimizer is not."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built and model_structure.is_built(model):
        author: Any = distribution_of_model(model)
        with deferred_variables.deferring(), contextlib.nullcontext() if author is None else author.scope():
            optimizer.build(model.trainable_variables)


def _initialization(variable: keras.Variable, programs: dict[Any, Future], pool: ThreadPoolExecutor) -> Callable:
    """Returns a function that computes a variable's value. A program that it needs starts to compile at once."""
    shape, dtype = tuple(variable.shape), internals.stored_dtype(variable)
    sharding = as_sharding(variable_layout(variable))
    initializer = deferred_variables.deferred_initializer(variable)
    if initializer is None:
        return lambda: reshard(variable_value(variable), sharding)
    constant = _constant(initializer)
    if constant is not None and math.prod(shape) <= _MAX_ELEMENTS_FROM_HOST:
        return lambda: reshard(np.full(shape, constant, jnp.dtype(dtype)), sharding)
    config = _config_without_seed(initializer)
    if config is None:
        return lambda: reshard(keras.ops.convert_to_tensor(initializer(shape, dtype=dtype), dtype=dtype), sharding)
    key = config, shape, dtype, sharding
    if key not in programs:
        programs[key] = pool.submit(_lower(initializer, shape, dtype, sharding).compile)
    return lambda: programs[key].result()(_seed(initializer))


def _config_without_seed(initializer: Any) -> tuple[type, str] | None:
    """Returns a key equal for initializers that differ in their seed alone; None for one that cannot share a program.

    Only Keras's own initializers are known to be determined by their configuration, and to pass an integer seed on to
    functions that accept an array instead.
    """
    kind = type(initializer)
    is_of_keras = getattr(keras.initializers, kind.__name__, None) is kind
    if not is_of_keras or not isinstance(getattr(initializer, "seed", 0), int):
        return None
    config = {name: value for name, value in initializer.get_config().items() if name != "seed"}
    try:
        return kind, json.dumps(config, sort_keys=True)
    except TypeError:  # an argument is an array
        return None


def _constant(initializer: Any) -> float | None:
    """The number that an initializer of Keras fills arrays with; None if it does something else."""
    if type(initializer) is keras.initializers.Constant:
        return initializer.value if isinstance(initializer.value, (bool, int, float)) else None
    return {keras.initializers.Zeros: 0, keras.initializers.Ones: 1}.get(type(initializer))


def _seed(initializer: Callable) -> Any:
    seed = getattr(initializer, "seed", None)
    return None if seed is None else internals.draw_seed(seed)


def _lower(initializer: Callable, shape: tuple[int, ...], dtype: str, sharding: Any) -> Any:
    """Lowers the program that computes a sharded value from a seed, or from None for an initializer without one."""

    def program(seed):
        seeded = copy.copy(initializer)
        if seed is not None:
            seeded.seed = seed  # pyright: ignore[reportFunctionMemberAccess]
        return keras.ops.convert_to_tensor(seeded(shape, dtype=dtype), dtype=dtype)

    return jax.jit(program, out_shardings=sharding).lower(_seed(initializer))


@contextlib.contextmanager
def built(model_or_builder: Any) -> Iterator[keras.Layer]:
    """Provides a built model. One that a function builds is deferred, and leaves Keras's names and seeds as they were.

    Raises TypeError for neither a model nor a function that returns one, and ValueError for a model that is not built.
    """
    with contextlib.ExitStack() as while_inspected:
        model = model_or_builder
        if not isinstance(model, keras.Layer):
            if not callable(model_or_builder):
                raise TypeError(
                    f"Expected a built Keras model or a function that returns one, got {model_or_builder!r} "
                    f"({type(model_or_builder).__name__}). Pass, for example, lambda: build(width=1024)."
                )
            require_no_arguments(model_or_builder)
            while_inspected.enter_context(global_state_restored())
            while_inspected.enter_context(deferred_variables.deferring())
            model = model_or_builder()
        if not isinstance(model, keras.Layer):
            name = getattr(model_or_builder, "__name__", type(model_or_builder).__name__)
            raise TypeError(
                f"'{name}' returned {model!r} ({type(model).__name__}) instead of a Keras model. Return the model that "
                "it builds."
            )
        if not model.built:
            raise ValueError(
                f"Model '{model.name}' is not built, so its variables are not known. Start it with keras.Input(shape), "
                "call it on keras.KerasTensor(shape), or pass a function that does so and returns it."
            )
        yield model


def require_no_arguments(build: Any) -> None:
    """Raises a TypeError with the fix for a function that cannot be called without arguments."""
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # of a callable that has none
        return
    try:
        signature.bind()
    except TypeError:
        name = getattr(build, "__name__", type(build).__name__)
        needed = [each.name for each in signature.parameters.values() if each.default is each.empty]
        call = "build" if name == "<lambda>" else name
        values = ", ".join(f"{each}=..." for each in needed)
        raise TypeError(
            f"The function that builds the model is called without arguments, but {name}{signature} needs "
            f"{', '.join(needed)}. Pass a function that passes them on: lambda: {call}({values})."
        ) from None
