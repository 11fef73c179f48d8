"""Shards what layers take and return, and any other tensors."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.core import Tracer

from keras_dist._keras import internals
from keras_dist.data.batch_placement import BatchPlacer, UnequalShards
from keras_dist.layout.tensor_layout import TensorLayout, axis_tuple, layout_error
from keras_dist.mesh.device_mesh import as_device_mesh
from keras_dist.sharding.resharding import with_gradient_layout


def distribute_tensors(
    tensors: Any,
    layout: Any,
    batch_axes: Sequence[str],
    sequence_axes: Sequence[str] = (),
    *,
    role: str = "output",
    unequal: UnequalShards = UnequalShards.NONE,
    inputs_layout: Any = None,
) -> Any:
    """Shards every tensor of a structure that has as many dims as the layout; if none has, those that have more.

    So the cache of keys and values that attention returns beside its output stays as it is. So do symbolic tensors.
    Masks of Keras are kept.

    While tracing this is a sharding constraint, otherwise a move. A dim that is sharded over `batch_axes` only or over
    any of `sequence_axes`, and of inputs and outputs of layers dim 0 and single positions, may have any size: it is
    sharded over those of its axes with the largest product that divides it, but a traced sequence over all of them, in
    shards of unequal sizes, and rows where `unequal` has it so. `role` is "input" or "output", for errors.
    `inputs_layout` is that of the layer whose outputs these are. Raises ValueError if the layout has more entries than
    every tensor has dims, or an axis does not divide its dim.
    """
    gradient_layout = _gradient_layout(inputs_layout, layout)
    is_on_mesh = isinstance(layout, keras.distribution.TensorLayout) and layout.device_mesh is not None
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(tensors, is_leaf=_is_symbolic)]
    ranks = set(map(len, shapes))  # of the tensors that are sharded
    if is_on_mesh:
        ranks = ranks & {len(layout.axes)} or {rank for rank in ranks if rank > len(layout.axes)}
        if shapes and not ranks:
            _require_fit(layout.axes, max(shapes, key=len), layout, role)

    def fit(leaf: Any, layout: Any) -> Any:
        return _fit(leaf, layout, batch_axes, sequence_axes, unequal, role)

    def distribute(leaf: Any) -> Any:
        if _is_symbolic(leaf) or np.ndim(leaf) not in ranks:
            return leaf
        fitted = fit(leaf, layout) if is_on_mesh else layout
        if not is_on_mesh or not isinstance(leaf, Tracer):
            sharded = internals.backend_lib.distribute_tensor(leaf, fitted)
        else:
            sharded = _constrain(leaf, fitted, None if gradient_layout is None else fit(leaf, gradient_layout))
        internals.set_keras_masks([sharded], [internals.get_keras_mask(leaf)])
        return sharded

    return jax.tree.map(distribute, tensors, is_leaf=_is_symbolic)


def _gradient_layout(inputs: Any, outputs: Any) -> TensorLayout | None:
    """Returns the layout in which a layer computes its outputs, None if it is `outputs`, that of their rule.

    An axis that shards one dim of the inputs and another dim of the outputs is one that the layer sums over.
    """
    if not isinstance(inputs, TensorLayout) or not isinstance(outputs, TensorLayout):
        return None
    dims = {name: dim for dim, entry in enumerate(inputs.axes) for name in axis_tuple(entry)}
    entries = [tuple(n for n in axis_tuple(e) if dims.get(n, dim) == dim) for dim, e in enumerate(outputs.axes)]
    computed = TensorLayout(entries, outputs.device_mesh)
    return None if computed.axes == outputs.axes else computed


def _fit(
    leaf: Any, layout: Any, batch_axes: Sequence[str], sequence_axes: Sequence[str], unequal: UnequalShards, role: str
) -> Any:
    mesh, shape = as_device_mesh(layout.device_mesh), np.shape(leaf)
    axes, even_axes = list(layout.axes), list(layout.axes)
    is_in_layer = bool(internals.current_path())
    for dim, entry in enumerate(axes):
        names = axis_tuple(entry)
        shards = math.prod(mesh.axis_sizes[name] for name in names)
        if not isinstance(shape[dim], int):  # symbolic, while Keras infers the shapes of outputs
            axes[dim] = even_axes[dim] = None
            continue
        if not shape[dim] % shards:
            continue
        is_sequence, is_token = bool(set(names) & set(sequence_axes)), dim == 1 == shape[dim] and len(shape) > 2
        if is_sequence and shape[dim] > shards and isinstance(leaf, Tracer):
            even_axes[dim] = None  # a compiled step has shards of unequal sizes
        # Dim 0 of what a layer takes or returns has the rows of a batch, and the last batch can have any number. So
        # have sequences: `generate()` calls layers on one token, also where rules shard them (sequence parallelism).
        elif is_sequence or (is_in_layer and (dim == 0 or is_token)) or set(names) <= set(batch_axes):
            axes[dim] = BatchPlacer(mesh, names).axes_in_step(shape[dim], unequal)
            even_axes[dim] = None if axes[dim] == names else axes[dim]  # as above, if the step splits rows unequally
    _require_fit(tuple(even_axes), shape, layout, role)
    return layout if axes == list(layout.axes) else TensorLayout(axes, mesh)


def _constrain(leaf: Tracer, layout: Any, gradient_layout: Any) -> Any:
    def constrain(tensor):
        if gradient_layout is None:
            return internals.backend_lib.distribute_tensor(tensor, layout)
        return with_gradient_layout(tensor, layout, gradient_layout)

    sizes = as_device_mesh(layout.device_mesh).axis_sizes
    # Without a `jit`, the tracers of `fit(run_eagerly=True)` cannot have shards of unequal sizes.
    return jax.jit(constrain)(leaf) if layout_error(layout.axes, leaf.shape, sizes) else constrain(leaf)


def _is_symbolic(leaf: Any) -> bool:
    return isinstance(leaf, keras.KerasTensor)


def _require_fit(axes: tuple, shape: tuple, layout: Any, role: str) -> None:
    problem = layout_error(axes, shape, as_device_mesh(layout.device_mesh).axis_sizes)
    if problem:
        path = internals.current_path()
        tensor = f"the {role} of {path!r}" if path else "a tensor"
        raise ValueError(f"Cannot shard {tensor} (shape {shape}) by {axes}: {problem}")
