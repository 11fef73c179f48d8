"""What layers return, and any other tensors, laid out by a layout that was written for them or for their like."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.core import Tracer

from keras_dist._keras import internals
from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.layout.tensor_layout import TensorLayout, axis_tuple, layout_error
from keras_dist.mesh.device_mesh import as_device_mesh
from keras_dist.strategies.resharding import out_of_compute_layout


def distribute_outputs(
    outputs: Any,
    layout: Any,
    batch_axes: Sequence[str],
    *,
    what: str = "output",
    computed: TensorLayout | None = None,
) -> Any:
    """Lays out each tensor that has at least as many dims as the layout: a constraint while tracing, else a move.

    Args:
        outputs: a tensor, or nested tuples, lists and dicts of them. Symbolic tensors are returned as they are.
        layout: a layout of ours or of Keras, or a sharding of JAX.
        batch_axes: a dim sharded over some of these axes, and dim 0 of the inputs and outputs of layers, may have any
            size: it is sharded over those of its axes with the largest product that divides it.
        what: what of the layer that is called the tensors are, for errors.
        computed: the layout to bring the gradients to, while tracing, where it is another one.

    Returns:
        The same structure.

    Raises:
        ValueError: the layout has no mesh, or more entries than every tensor has dims, or an axis does not divide.
    """
    if not isinstance(layout, keras.distribution.TensorLayout) or layout.device_mesh is None:
        return jax.tree.map(lambda leaf: _distribute(leaf, layout), outputs, is_leaf=_is_symbolic)
    leaves, structure = jax.tree.flatten(outputs, is_leaf=_is_symbolic)
    shapes = [np.shape(leaf) for leaf in leaves]
    if shapes and max(map(len, shapes)) < len(layout.axes):
        raise ValueError(_message(layout.axes, max(shapes, key=len), layout, what))
    for index, shape in enumerate(shapes):
        if len(shape) >= len(layout.axes) and not _is_symbolic(leaves[index]):
            fitted = _fit(layout, shape, batch_axes, what)
            if computed is not None and isinstance(leaves[index], Tracer):
                inside = _fit(computed, shape, batch_axes, what)
                leaves[index] = out_of_compute_layout(leaves[index], fitted, inside)
            else:
                leaves[index] = _distribute(leaves[index], fitted)
    return jax.tree.unflatten(structure, leaves)


def _fit(layout: Any, shape: tuple[int, ...], batch_axes: Sequence[str], what: str) -> Any:
    mesh = as_device_mesh(layout.device_mesh)
    axes = list(layout.axes)
    is_in_layer = bool(internals.path_of_open_scope())
    for dim, entry in enumerate(axes):
        names = axis_tuple(entry)
        # Dim 0 of what a layer takes or returns has the rows of a batch, and the last batch can have any number.
        is_batch_dim = (dim == 0 and is_in_layer) or set(names) <= set(batch_axes)
        if is_batch_dim and shape[dim] % math.prod(mesh.axis_sizes[name] for name in names):
            axes[dim] = BatchPlacer(mesh, names).axes_for(shape[dim])
    if layout_error(tuple(axes), shape, mesh.axis_sizes):
        raise ValueError(_message(tuple(axes), shape, layout, what))
    return layout if axes == list(layout.axes) else TensorLayout(axes, mesh)


def _distribute(leaf: Any, layout: Any) -> Any:
    return leaf if _is_symbolic(leaf) else internals.distribute_with_keras(leaf, layout)


def _is_symbolic(leaf: Any) -> bool:
    return isinstance(leaf, keras.KerasTensor)


def _message(axes: tuple, shape: tuple, layout: Any, what: str) -> str:
    path = internals.path_of_open_scope()
    problem = layout_error(axes, shape, as_device_mesh(layout.device_mesh).axis_sizes)
    return f"Cannot lay out {f'the {what} of {path!r}' if path else 'a tensor'} (shape {shape}) as {axes}: {problem}"
