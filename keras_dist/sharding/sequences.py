"""Shards dim 1 of what a step computes with over the sequence axes, and gathers it where it cannot be split."""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding, PartitionSpec

from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.sharding.per_device import call_per_device
from keras_dist.sharding.resharding import apply_to_gradient, unsharded_along
from keras_dist.sharding.rows import axes_for_rows
from keras_dist.variables.variable_layouts import is_on_mesh

_ANY = PartitionSpec.UNCONSTRAINED


@dataclass(frozen=True)
class SequenceSharding:
    """Constrains dim 1 of arrays. Without sequence axes, and inside of a `jax.shard_map`, they stay unchanged.

    `compute_unsharded`, `compute_rows`, `gather_gradient` and `gather_unequal` work without sequence axes, too.
    """

    placer: BatchPlacer

    def shard_inputs(self, model_name: str, inputs: Any) -> Any:
        """Shards dim 1 of a model's inputs in a step, also where the axes do not divide it.

        JAX places arrays in equal shards only, but a compiled step may split a dim into unequal ones. So sequences of
        odd length are placed unsplit, and split where the step begins. Raises ValueError if no input is a sequence.
        """
        if self._is_inactive():
            return inputs
        leaves, structure = jax.tree.flatten(inputs)
        shapes = [np.shape(leaf) for leaf in leaves if hasattr(leaf, "shape")]
        if shapes and not any(map(self.placer.is_sequence, shapes)):
            sizes, count = self.placer.device_mesh.axis_sizes, self.placer.num_sequence_shards
            axes = ",".join(f"{name}:{sizes[name]}" for name in self.placer.sequence_axes)
            raise ValueError(
                f"The inputs of {model_name!r} have no sequence to shard over the sequence axes ({axes}): their shapes "
                f"are {shapes}, and no dim 1 has a position for each of the {count} shards. Leave out "
                "sequence_dim_name, use a smaller axis, or pass longer sequences."
            )
        return jax.tree.unflatten(structure, [self._shard_input(leaf) for leaf in leaves])

    def shard(self, tensors: Any) -> Any:
        """Shards dim 1 of arrays that were computed from gathered ones, if it has a position for each shard."""
        return self._map(self._shard_again, tensors)

    def gather(self, tensors: Any) -> Any:
        """Gathers dim 1 of arrays, and of their gradients."""
        return self._map(lambda tensor: self._unshard(tensor, {1}), tensors)

    def compute_unsharded(self, function: Callable, tensors: Any, dims: Collection[int]) -> Any:
        """Returns `function(tensors)`, which the partitioner cannot split along some dims of operands and results.

        They are gathered before, over whatever axes of the mesh, with or without sequence axes.
        """
        mesh = self.placer.device_mesh.backend_mesh
        if mesh.size == 1 or jax.sharding.get_abstract_mesh().manual_axes:
            return function(tensors)
        unshard = functools.partial(self._unshard, dims=dims)
        # The results, too: otherwise the partitioner may split the function where they are needed in shards.
        outputs = self._map_on_devices(unshard, function(self._map_on_devices(unshard, tensors)))
        return self.shard(outputs)

    def gather_gradient(self, tensor: Any, dims: Collection[int], is_flat: bool) -> Any:
        """Returns a traced array whose gradient is gathered along those of its dims that may have unequal shards.

        `is_flat` is whether one dim may have rows and positions in one. XLA may split it over any axes.
        """
        unshard = self._unshard_unequal(tensor, dims, is_flat)
        return tensor if unshard is None else apply_to_gradient(unshard, tensor)

    def gather_unequal(self, tensor: Any, dims: Collection[int], is_flat: bool) -> Any:
        """Returns an array that is gathered, and whose gradient is, along such dims."""
        unshard = self._unshard_unequal(tensor, dims, is_flat)
        return tensor if unshard is None else unshard(tensor)

    def _unshard_unequal(self, tensor: Any, dims: Collection[int], is_flat: bool) -> Callable | None:
        shards = self.placer.device_mesh.backend_mesh.size if is_flat else self.placer.num_sequence_shards
        unequal = self._unequal_dims(tensor, dims, shards)
        return functools.partial(self._unshard, dims=unequal) if unequal else None

    def sort(self, function: Callable, tensor: Any, dims: Iterable[int], keeps_rows: bool) -> Any:
        """Returns `function(tensor)`, which sorts along some dims; its partitioned gradient would end the process.

        Each device computes its rows if the function keeps them in dim 0, and otherwise everything. That is only done
        for traced arrays that are sorted along the sequence, or that would have unequal shards.
        """
        if self._is_inactive() or not isinstance(tensor, Tracer):
            return function(tensor)
        if 1 not in dims and not self._unequal_dims(tensor, range(tensor.ndim), self.placer.num_sequence_shards):
            return function(tensor)
        outputs = self._compute_rows(function, tensor, keeps_rows and 0 not in dims)
        return self.shard(outputs) if outputs.shape == tensor.shape else outputs

    def compute_rows(self, function: Callable, tensors: Any, has_rows: bool) -> Any:
        """Returns `function(tensors)`, which each device computes for its rows, with all other dims gathered.

        `has_rows` is whether dim 0 of operands and results has rows that are computed alike. If not, each device
        computes everything.
        """
        if not any(map(self._is_on_devices, jax.tree.leaves(tensors))):
            return function(tensors)
        return self.shard(self._compute_rows(function, tensors, has_rows))

    def _compute_rows(self, function: Callable, tensors: Any, has_rows: bool) -> Any:
        operands, structure = jax.tree.flatten(tensors)
        rows = PartitionSpec(axes_for_rows(self.placer, operands[0].shape[0]) if has_rows else None)
        return call_per_device(
            lambda *operands: function(structure.unflatten(operands)),
            self.placer.device_mesh.backend_mesh,
            operands,
            (rows,) * len(operands),
            rows,
            len(operands),
            ((),) * len(operands),
        )

    def _unequal_dims(self, tensor: Any, dims: Iterable[int], shards: int) -> set[int]:
        if not isinstance(tensor, Tracer) or jax.sharding.get_abstract_mesh().manual_axes:
            return set()
        return {dim for dim in dims if isinstance(tensor.shape[dim], int) and tensor.shape[dim] % shards}

    def _is_inactive(self) -> bool:
        return not self.placer.sequence_axes or bool(jax.sharding.get_abstract_mesh().manual_axes)

    def _shard_input(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tracer) or not self.placer.is_sequence(leaf.shape):
            return leaf
        return self._constrained(leaf, self.placer.axes_for(leaf.shape[0]), self.placer.sequence_axes)

    def _shard_again(self, tensor: Any) -> Any:
        if not self.placer.is_sequence(tensor.shape):
            return tensor
        # The first constraint keeps the partitioner from splitting the operation that computed the array.
        return self._constrained(self._unshard(tensor, {1}), _ANY, self.placer.sequence_axes)

    def _map(self, function: Callable, tensors: Any) -> Any:
        return tensors if self._is_inactive() else self._map_on_devices(function, tensors)

    def _map_on_devices(self, function: Callable, tensors: Any) -> Any:
        def apply(leaf):
            return function(leaf) if self._is_on_devices(leaf) and np.ndim(leaf) > 1 else leaf

        return jax.tree.map(apply, tensors)

    def _is_on_devices(self, leaf: Any) -> bool:
        """Returns whether an array is traced or on the mesh. Eager arrays that are elsewhere are not moved."""
        return isinstance(leaf, Tracer) or is_on_mesh(leaf, self.placer.device_mesh.backend_mesh)

    def _unshard(self, tensor: Any, dims: Collection[int]) -> Any:
        return _constrain_to(unsharded_along(dims, tensor.ndim, self.placer.device_mesh.backend_mesh))(tensor)

    def _constrained(self, tensor: Any, *axes_of_dims: Any) -> Any:
        """Constrains the first dims of an array. The compiler chooses the layout of the others, and of `_ANY`."""
        spec = PartitionSpec(*axes_of_dims, *[_ANY] * (tensor.ndim - len(axes_of_dims)))
        return _constrain_to(NamedSharding(self.placer.device_mesh.backend_mesh, spec))(tensor)


def is_pointwise(kernel_size: Sequence[int], strides: int | Sequence[int]) -> bool:
    """Returns whether each output of a convolution is computed from the input at one position, its own."""
    return set(kernel_size) <= {1} and set(np.atleast_1d(strides)) <= {1}


@functools.lru_cache
def _constrain_to(sharding: NamedSharding) -> Callable:
    """Returns a sharding constraint in a `jit` of its own: eager arrays cannot be split unequally without one."""
    return jax.jit(lambda tensor: with_sharding_constraint(tensor, sharding), inline=True)
