"""The active distribution, and tensors that are distributed under it."""

from typing import Any

import jax
import keras

from keras_dist._keras import active_distribution, internals
from keras_dist._keras.active_distribution import what_instead_of_a_distribution
from keras_dist._report.user_warnings import warn
from keras_dist.layout.tensor_layout import as_layout_on_mesh
from keras_dist.sharding.activations import distribute_tensors
from keras_dist.strategies.base import Distribution


def distribution() -> internals.KerasDistribution | None:
    """Returns the active distribution, or None; the same object as `keras.distribution.distribution()`."""
    return internals.current_distribution()


def set_distribution(value: internals.KerasDistribution | None) -> None:
    """Makes a distribution the active one, for Keras too.

    A distribution of this package is active in all threads that have set none of their own, and stays active after
    `keras.utils.clear_session()`.

    Args:
        value: A distribution of this package, or None. One of Keras behaves as in Keras, with a warning.

    Raises:
        TypeError: The value is neither a distribution nor None.

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
    if type(value) in (keras.distribution.DataParallel, keras.distribution.ModelParallel):
        warn(f"set_distribution got {what_instead_of_a_distribution(value)}")
    active_distribution.install(value)


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Places a tensor in a layout. Inside a compiled function, this is a sharding constraint.

    Args:
        tensor: An array, or nested tuples, lists and dicts of arrays. Keras's symbolic tensors are returned unchanged.
        layout: A `TensorLayout`, a tuple or list of axes of the active distribution's mesh, or a JAX sharding.

    Returns:
        The same structure of arrays in the layout. While a distribution of this package is active, and its batch axes
        do not divide a dim that is sharded over them, the dim is sharded over the largest part of these axes that
        divides it.

    Raises:
        ValueError: The layout does not fit the tensor's shape, or is a tuple of axes and no distribution is active.

    Example:

    >>> import numpy as np
    >>> from keras_dist import DeviceMesh, TensorLayout
    >>> layout = TensorLayout(("data", None), DeviceMesh((4, 2), ["data", "model"]))
    >>> distribute_tensor(np.ones((8, 3)), layout).sharding.shard_shape((8, 3))
    (2, 3)
    """
    installed = distribution()
    if isinstance(layout, (tuple, list, jax.sharding.PartitionSpec)):
        layout = as_layout_on_mesh(layout, installed)
    batch_axes = installed._placer.batch_axes if isinstance(installed, Distribution) else ()
    return distribute_tensors(tensor, layout, batch_axes)
