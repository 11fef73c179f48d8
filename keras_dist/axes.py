"""Mesh axes as plain data: names and sizes, validated once. No JAX and no Keras in here."""

import operator
from collections.abc import Sequence


def validate_axes(shape: Sequence[int], axis_names: Sequence[str]) -> dict[str, int]:
    """Returns the axes of a mesh as an ordered `{name: size}`, or says what is wrong with them.

    Args:
        shape: the size of each axis, positive integers.
        axis_names: one distinct, non-empty name per axis.

    Returns:
        The size of each axis by its name, outermost axis first.

    Raises:
        ValueError: empty, of unequal length, a size below 1, or a name used twice.
        TypeError: a size that is no integer, or a name that is no string.

    Example:

    >>> validate_axes((2, 4), ["data", "model"])
    {'data': 2, 'model': 4}
    """
    received = f"Received: shape={shape}, axis_names={axis_names}"
    if isinstance(axis_names, str) and axis_names:
        raise TypeError(
            f"axis_names must be a list or tuple of names, one per axis. {received}. Write axis_names=[{axis_names!r}]."
        )
    if isinstance(shape, int):
        raise TypeError(f"shape must be a tuple with one size per axis. {received}. Write shape=({shape},).")
    if len(shape) == 0 or len(axis_names) == 0:
        raise ValueError(
            f"Shape and axis_names cannot be empty. {received}. "
            "Name at least one axis, for example shape=(8,), axis_names=['data']."
        )
    if len(shape) != len(axis_names):
        raise ValueError(
            f"Shape and axis_names should have same size. {received}. Give one name for each axis of the mesh."
        )
    axes: dict[str, int] = {}
    for size, name in zip(shape, axis_names, strict=True):
        if not isinstance(name, str) or not name:
            raise TypeError(f"An axis name must be a non-empty string, not {name!r}. {received}.")
        if name in axes:
            raise ValueError(
                f"Axis names must be distinct, but {name!r} is used twice. {received}. Rename one of them."
            )
        axes[name] = _positive_integer(size, name, received)
    return axes


def _positive_integer(size, name: str, received: str) -> int:
    try:
        value = operator.index(size)
    except TypeError:
        raise TypeError(
            f"The size of an axis must be an integer, but axis {name!r} has size {size!r}. {received}."
        ) from None
    if value < 1:
        raise ValueError(f"The size of an axis must be at least 1, but axis {name!r} has size {value}. {received}.")
    return value
