"""Models without values: `deferred` makes them, `materialize` gives them values that are sharded from the start."""

import contextlib
import copy
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_dist._keras import deferred_variables, internals
from keras_dist._keras.active_distribution import distribution_of
from keras_dist._keras.internals import as_sharding, variable_layout, variable_value
from keras_dist.variables.fused_threefry import fused_key
from keras_dist.variables.host_to_device import move
from keras_dist.variables.variable_layouts import all_variables, is_on_attached_devices

ModelT = TypeVar("ModelT", bound=keras.Layer)

# Elements up to which an array of one number is sent to the devices, sooner than a program that fills it is compiled.
_SMALL = 2**16


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Models, optimizers and metrics made inside have shapes, dtypes and layouts, but no values.

    A model of any size is made in seconds and without memory, for devices that are not attached too. Values that are
    given (a learning rate, an array) are kept where they are. Layouts are those of the distribution that is installed.

    Raises:
        ValueError: Keras runs with NNX enabled; later, where the value of a deferred variable is used.

    Example:

    >>> with deferred():
    ...     model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1_000_000_000)])
    >>> model.count_params()
    17000000000
    """
    with deferred_variables.deferring():
        yield


def materialize(model: ModelT) -> ModelT:
    """Gives a deferred model its values, each part on its device from the start.

    The values are those of the same model built in the normal way with the same seed, up to the rounding of the last
    bits, which a compiler may do otherwise. Only an initializer that draws from a generator with a state (a
    `keras.random.SeedGenerator`, or no seed at all in a function of one's own) may give others, since the values
    are drawn in another order. Variables of equal initializer, shape and layout share one compiled program; biases,
    counters and other small arrays of one number need none. An initializer that is no class of Keras runs on one
    device, and its value is then distributed.

    Args:
        model: a model, or a layer, made inside `deferred()`; one that does not know its inputs must have been called
            there on a `keras.KerasTensor`. A compiled model's optimizer is built with it. Variables that have values
            keep them; values that do not lie where they should are moved there.

    Returns:
        The same model.

    Raises:
        TypeError: no model.
        ValueError: a model that is not built, or a layout on devices that are only described.

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
        raise TypeError(f"materialize takes a Keras model or layer. Received: {model!r} ({type(model).__name__}).")
    if not model.built:
        raise ValueError(
            f"Only a built model has variables to give values to. Received: {model.name!r}, which is not built. Call "
            "it on keras.KerasTensor(shape) inside keras_dist.deferred()."
        )
    build_optimizer(model)
    variables = list(all_variables(model))
    for variable in variables:
        _require_attached(variable)
    with ThreadPoolExecutor() as pool:
        # All programs compile while the first ones run.
        programs: dict[Any, Future] = {}
        values = [_value_to_come(variable, programs, pool) for variable in variables]
        for variable, value in zip(variables, values, strict=True):
            deferred_variables.set_value(variable, value())
    return model


def build_optimizer(model: keras.Layer) -> None:
    """Makes the variables of a model's optimizer, without values, where it has one that is not built.

    Args:
        model: a model or a layer. The optimizer of a model with layers that are not built is left as it is.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built and internals.is_built(model):
        author: Any = next(filter(None, map(distribution_of, model.variables)), None)
        with deferred_variables.deferring(), contextlib.nullcontext() if author is None else author.scope():
            optimizer.build(model.trainable_variables)


def _require_attached(variable: keras.Variable) -> None:
    if not is_on_attached_devices(variable):
        devices = as_sharding(variable_layout(variable)).device_set
        raise ValueError(
            f"Only attached devices hold values. Received: '{variable.path}', laid out over {len(devices)} devices "
            f"that are not attached ({next(iter(devices)).device_kind}). Call keras_dist.redistribute(model, "
            "distribution) with one on attached devices before."
        )


def _value_to_come(variable: keras.Variable, programs: dict[Any, Future], pool: ThreadPoolExecutor) -> Callable:
    """A function that returns the value of a variable, laid out. The program that it needs starts to compile."""
    shape, dtype, sharding = (
        tuple(variable.shape),
        internals.stored_dtype(variable),
        as_sharding(variable_layout(variable)),
    )
    initializer = deferred_variables.deferred_initializer(variable)
    if initializer is None:
        return partial(_moved, variable, sharding)
    number = _constant(initializer)
    if number is not None and math.prod(shape) <= _SMALL:
        return partial(_filled, number, shape, dtype, sharding)
    kind = _kind(initializer)
    if kind is None:
        return partial(_drawn_on_one_device, initializer, shape, dtype, sharding)
    key = kind, shape, dtype, sharding
    if key not in programs:
        programs[key] = pool.submit(_lower(initializer, shape, dtype, sharding).compile)
    return lambda: programs[key].result()(_seed(initializer))


def _moved(variable: keras.Variable, sharding: Any) -> jax.Array:
    value: Any = variable_value(variable)
    in_place = sharding is None or value.sharding.is_equivalent_to(sharding, value.ndim)
    return value if in_place else move(value, sharding)


def _filled(number: float, shape: tuple[int, ...], dtype: str, sharding: Any) -> jax.Array:
    whole = np.full(shape, number, jnp.dtype(dtype))
    return jnp.asarray(whole) if sharding is None else jax.make_array_from_callback(shape, sharding, whole.__getitem__)


def _drawn_on_one_device(initializer: Callable, shape: tuple[int, ...], dtype: str, sharding: Any) -> jax.Array:
    return move(keras.ops.convert_to_tensor(initializer(shape, dtype=dtype), dtype=dtype), sharding)


def _kind(initializer: Any) -> tuple | None:
    """What tells one initializer from another but for its seed; None for one that must run by itself.

    Only of Keras's own initializers it is known that their configuration says all, and that their seed, where it is a
    number, only goes to a function of Keras that takes an array in its place.
    """
    kind = type(initializer)
    if getattr(keras.initializers, kind.__name__, None) is not kind:
        return None
    if not isinstance(getattr(initializer, "seed", 0), int):
        return None
    config = {name: value for name, value in initializer.get_config().items() if name != "seed"}
    try:
        return kind, json.dumps(config, sort_keys=True)
    except TypeError:  # an array among the arguments
        return None


def _constant(initializer: Any) -> float | None:
    """The number that an initializer of Keras fills arrays with, if it is one."""
    if type(initializer) is keras.initializers.Constant:
        return initializer.value if isinstance(initializer.value, (bool, int, float)) else None
    return {keras.initializers.Zeros: 0, keras.initializers.Ones: 1}.get(type(initializer))


def _seed(initializer: Callable) -> Any:
    seed = getattr(initializer, "seed", None)
    return None if seed is None else internals.draw_seed(seed)


def _lower(initializer: Callable, shape: tuple[int, ...], dtype: str, sharding: Any) -> Any:
    """Lowers the program from a seed, or from None, to the value of a variable, laid out."""

    def program(seed):
        seeded = copy.copy(initializer)
        if seed is not None:
            seeded.seed = fused_key(seed)  # pyright: ignore[reportFunctionMemberAccess]
        return keras.ops.convert_to_tensor(seeded(shape, dtype=dtype), dtype=dtype)

    return jax.jit(program, out_shardings=sharding).lower(_seed(initializer))
