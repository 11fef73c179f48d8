"""A second layout of a model for a block of code: it trains under one distribution, and generates under another."""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import keras

from keras_dist._keras import internals, training_state
from keras_dist._keras.active_distribution import (
    PackageDistribution,
    distribution_of,
    distribution_of_model,
    what_instead_of_a_distribution,
)
from keras_dist.variables.variable_layouts import (
    all_variables,
    chosen_layouts,
    functions_exchanged,
    move_variables,
    place,
)

ModelT = TypeVar("ModelT", bound=keras.Model)


class _Placement(NamedTuple):
    """Where a variable was before the block, and its value there, None if it is not kept."""

    variable: keras.Variable  # so that no other one has its `id`
    layout: Any
    distribution: Any
    value: jax.Array | None


def inference_layout(
    model: ModelT, distribution: Any, keep: bool = True, max_bytes: int = 2**30
) -> contextlib.AbstractContextManager[ModelT]:
    """Moves a model that trains to another distribution for a block of code that generates, predicts or evaluates.

    In the block, the weights, metrics and random generators of the model have the layouts of `distribution`, which is
    the active one. Optimizer state stays where it is. Values go from device to device. After the block, also one that
    an exception ends, everything has its layout for training again. What the block assigned is kept. What it did not
    assign has the bits that it had, and with `keep=True` nothing is sent for it, except after `predict` and
    `evaluate`, which return new arrays. Programs are compiled in the first round of a loop only.

    Args:
        model: A built model. It cannot train in the block.
        distribution: The distribution of the block, on the devices that the model trains on.
        keep: Keep the weights in the layout for training, too, so that devices hold both.
        max_bytes: Wait for arrays that are moved whenever those that a device may still receive exceed so many bytes. A
            variable whose shard is larger is moved in one piece.

    Returns:
        A context manager of the same model.

    Raises:
        TypeError: The arguments are not a model and a distribution of keras_dist.
        ValueError: `max_bytes` is not a positive integer, the model is in such a block already, no distribution of
            keras_dist chose its layouts, or a rule does not fit a variable. In these cases, no variable is moved.
            Later: the model trains, or is redistributed, in the block.

    Example:

    >>> mesh = kd.create_device_mesh("data:2,model:4")
    >>> training = kd.FullyShardedDataParallel(mesh, shard_axis=("data", "model"), min_shard_bytes=0)
    >>> with training.scope():
    ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="up")])
    >>> kernel = model.layers[0].kernel
    >>> kernel.value.sharding.shard_shape((8, 16))
    (1, 16)
    >>> layout_map = kd.LayoutMap(mesh)
    >>> layout_map[".*up/kernel"] = (None, "model")
    >>> with inference_layout(model, kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")):
    ...     model.predict(np.ones((4, 8)), verbose=0).shape, kernel.value.sharding.shard_shape((8, 16))
    ((4, 16), (8, 4))
    >>> kernel.value.sharding.shard_shape((8, 16))
    (1, 16)
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"inference_layout takes a Keras model, but got {model!r} of type {type(model).__name__}.")
    if not isinstance(distribution, PackageDistribution):
        raise TypeError(
            f"inference_layout takes a distribution, but got {what_instead_of_a_distribution(distribution)}"
        )
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
        raise ValueError(
            f"max_bytes={max_bytes!r} must be a positive integer: the bytes that a device receives before "
            "inference_layout waits for them. Pass, for example, max_bytes=2**30 for 1 GiB."
        )
    if "_inference_distribution" in vars(model):
        raise ValueError(
            f"{model.name!r} is in a block of keras_dist.inference_layout already, under "
            f"{vars(model)['_inference_distribution']}. End that block before you begin one under {distribution}."
        )
    if distribution_of_model(model) is None:
        raise ValueError(
            f"No variable of {model.name!r} is distributed. Build the model under the distribution that it trains "
            "under before inference_layout, or only move it: keras_dist.redistribute(model, distribution)."
        )
    return _moved(model, distribution, keep, max_bytes)


@contextlib.contextmanager
def _moved(model: ModelT, distribution: Any, keep: bool, max_bytes: int) -> Iterator[ModelT]:
    training_state.put_values_back(model)
    staying = list(model.optimizer.variables) if getattr(model, "optimizer", None) else []
    variables = _all_but(staying, model)
    distribution.check_processes_agree("inference_layout", model, variables)
    training, layouts = distribution_of_model(model), chosen_layouts(model, distribution)
    before = {
        id(v): _Placement(
            v, internals.variable_layout(v), distribution_of(v), internals.variable_value(v) if keep else None
        )
        for v in variables
    }
    placed: dict[int, Any] = {}
    refusing = {"_inference_distribution": distribution, "make_train_function": functools.partial(_refuse, model)}
    with internals.attributes_replaced(model, **refusing):
        try:
            with functions_exchanged(model, distribution):
                move_variables([(v, layouts[id(v)], distribution) for v in variables], max_bytes)
            placed = {id(v): _reference(internals.variable_value(v)) for v in variables}
            with distribution.scope():
                yield model
        finally:
            training_state.put_values_back(model)
            with functions_exchanged(model, training):
                _move_back(_all_but(staying, model), model, training, before, placed, max_bytes)


def _reference(value: Any) -> Any:
    """Returns a function that returns a value. It does not keep it: steps copy arrays to which something refers."""
    return (lambda: None) if value is None else weakref.ref(value)


def _move_back(variables, model, training, before: dict[int, _Placement], placed: dict[int, Any], max_bytes: int):
    moves, new = [], None
    for variable in variables:
        if id(variable) not in before:  # created in the block
            new = chosen_layouts(model, training) if new is None else new
            moves.append((variable, new[id(variable)], training))
            continue
        _, layout, distribution, value = before[id(variable)]
        current, at_first = internals.variable_value(variable), placed.get(id(variable), lambda: None)()
        if value is not None and (current is at_first or current is value) and not value.is_deleted():
            place(variable, layout, distribution, value)
        else:
            moves.append((variable, layout, distribution))
    move_variables(moves, max_bytes)


def _all_but(staying: list[keras.Variable], model: keras.Model) -> list[keras.Variable]:
    ids = set(map(id, staying))
    return [variable for variable in all_variables(model) if id(variable) not in ids]


def _refuse(model: keras.Model, force: bool = False) -> None:
    raise ValueError(
        f"Cannot train {model.name!r} in a block of keras_dist.inference_layout: its optimizer state is in the layout "
        "for training. End the block first."
    )
