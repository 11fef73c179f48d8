"""The distribution that is installed, and tensors laid out under it."""

from typing import Any

from keras_dist._keras import active_distribution, internals
from keras_dist.layout.tensor_layout import TensorLayout
from keras_dist.strategies.activations import distribute_tensors
from keras_dist.strategies.base import Distribution


def distribution() -> Any:
    """Returns the installed distribution, or None; the same object as `keras.distribution.distribution()`."""
    return internals.current_distribution()


def set_distribution(value: Any) -> None:
    """Installs a distribution, in Keras's own global.

    A distribution of this package is seen by all threads that have installed none of their own, and stays through
    `keras.utils.clear_session()`.

    Args:
        value: a distribution of this package or of Keras; None for none.

    Raises:
        TypeError: anything else.

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
            f"set_distribution takes a distribution or None. Received: {value!r} (of type {type(value).__name__}). "
            "Pass, for example, keras_dist.DataParallel()."
        )
    active_distribution.install(value)


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Lays a tensor out: a move outside of a compiled function, a sharding constraint inside.

    Args:
        tensor: an array, or nested tuples, lists and dicts of arrays. Keras's symbolic tensors come back as they are.
        layout: a `TensorLayout`, a tuple or list of axes of the installed distribution's mesh, or a sharding of JAX.

    Returns:
        The same structure, laid out. While a distribution of this package is installed, a dim over its batch axes
        that they do not divide is sharded over the largest part of them that does.

    Raises:
        ValueError: the layout does not fit the tensor's shape, or brings axes where no distribution is installed.

    Example:

    >>> import numpy as np
    >>> from keras_dist import DeviceMesh
    >>> layout = TensorLayout(("data", None), DeviceMesh((4, 2), ["data", "model"]))
    >>> distribute_tensor(np.ones((8, 3)), layout).sharding.shard_shape((8, 3))
    (2, 3)
    """
    installed = distribution()
    if isinstance(layout, (tuple, list)):
        if installed is None:
            raise ValueError(
                f"Axes need a mesh, and no distribution is installed. Received: layout={layout!r}. "
                "Pass TensorLayout(axes, device_mesh)."
            )
        layout = TensorLayout(layout, installed.device_mesh)
    batch_axes = installed._placer.batch_axes if isinstance(installed, Distribution) else ()
    return distribute_tensors(tensor, layout, batch_axes)
