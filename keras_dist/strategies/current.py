"""The active distribution, and tensors that are distributed under it."""

from typing import Any

import jax
import keras

from keras_dist._keras import active_distribution, internals
from keras_dist.layout.tensor_layout import as_layout_on_mesh
from keras_dist.strategies.activations import distribute_tensors
from keras_dist.strategies.base import Distribution


def distribution() -> internals.KerasDistribution | None:
    """Returns the active distribution, or None; the same object as `keras.distribution.distribution()`."""
    return internals.current_distribution()


def set_distribution(value: internals.KerasDistribution | None) -> None:
    """Makes a distribution the active one, for Keras too.

    A distribution of this package is active in all threads that have set none of their own, and stays active after
    `keras.utils.clear_session()`.

    Args:
        value: a distribution of this package or of Keras, or None.

    Raises:
        TypeError: the value is neither a distribution nor None.

    Example:

    >>> import keras
    >>> from keras_dist import DataParallel
    >>> set_distribution(DataParallel())
    >>> keras.distribution.distribution()
    <DataParallel device_mesh=<DeviceMesh batch:8 on 8 cpu devices>>
    >>> set_distribution(None)
    """
    if value is not None and not isinstance(value, internals.KerasDistribution):
        raise TypeError(
            f"set_distribution takes a distribution or None, but got {what_instead_of_a_distribution(value)}"
        )
    active_distribution.install(value)


def what_instead_of_a_distribution(value: Any) -> str:
    """Returns what a value is that is no distribution, as the end of a sentence, and how to make a distribution."""
    if isinstance(value, type) and issubclass(value, internals.KerasDistribution):
        rules = "layout_map=layout_map" if issubclass(value, keras.distribution.ModelParallel) else ""
        arguments = "" if value.__name__ == "FullyShardedDataParallel" else rules
        return f"the class {value.__name__}. Call it: {value.__name__}({arguments})."
    if isinstance(value, internals.KerasDistribution):
        name = type(value).__name__
        return f"Keras's own {name}. Use keras_dist.{name}, which takes the same arguments."
    fix = "Pass, for example, keras_dist.DataParallel()."
    if isinstance(value, keras.distribution.LayoutMap):
        fix = "Pass keras_dist.ModelParallel(layout_map=layout_map)."
    elif isinstance(value, (keras.distribution.DeviceMesh, jax.sharding.Mesh)):
        fix = "Pass a distribution on this mesh, for example keras_dist.FullyShardedDataParallel(mesh)."
    elif isinstance(value, str) and ":" in value:
        fix = f"Pass, for example, keras_dist.DataParallel(keras_dist.create_device_mesh({value!r}))."
    return f"{value!r} of type {type(value).__name__}. {fix}"


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Places a tensor in a layout. Inside a compiled function, this is a sharding constraint.

    Args:
        tensor: an array, or nested tuples, lists and dicts of arrays. Keras's symbolic tensors are returned unchanged.
        layout: a `TensorLayout`, a tuple or list of axes of the active distribution's mesh, or a JAX sharding.

    Returns:
        The same structure of arrays in the layout. While a distribution of this package is active, and its batch axes
        do not divide a dim that is sharded over them, the dim is sharded over the largest part of these axes that
        divides it.

    Raises:
        ValueError: the layout does not fit the tensor's shape, or is a tuple of axes and no distribution is active.

    Example:

    >>> import numpy as np
    >>> from keras_dist import DeviceMesh, TensorLayout
    >>> layout = TensorLayout(("data", None), DeviceMesh((4, 2), ["data", "model"]))
    >>> distribute_tensor(np.ones((8, 3)), layout).sharding.shard_shape((8, 3))
    (2, 3)
    """
    installed = distribution()
    if isinstance(layout, (tuple, list)):
        layout = as_layout_on_mesh(layout, installed)
    batch_axes = installed._placer.batch_axes if isinstance(installed, Distribution) else ()
    return distribute_tensors(tensor, layout, batch_axes)
