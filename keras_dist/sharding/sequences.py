"""Shards dim 1 of what a step computes with over the sequence axes, and gathers it where it cannot be split."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding, PartitionSpec

from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.mesh.devices import is_on_mesh
from keras_dist.sharding.per_device import in_shard_map

_ANY = PartitionSpec.UNCONSTRAINED


@dataclass(frozen=True)
class SequenceSharding:
    """Constrains dim 1 of arrays. Without sequence axes, and inside of a `jax.shard_map`, they stay unchanged."""

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

        def shard(tensor: Any) -> Any:
            if not self.placer.is_sequence(tensor.shape):
                return tensor
            # The first constraint keeps the partitioner from splitting the operation that computed the array.
            return self._constrained(self._constrained(tensor, _ANY, None), _ANY, self.placer.sequence_axes)

        return self._map(shard, tensors)

    def gather(self, tensors: Any) -> Any:
        """Gathers dim 1 of arrays, and of their gradients."""
        return self._map(lambda tensor: self._constrained(tensor, _ANY, None), tensors)

    def _is_inactive(self) -> bool:
        return not self.placer.sequence_axes or in_shard_map()

    def _shard_input(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tracer) or not self.placer.is_sequence(leaf.shape):
            return leaf
        return self._constrained(leaf, self.placer.axes_for(leaf.shape[0]), self.placer.sequence_axes)

    def _map(self, function: Callable, tensors: Any) -> Any:
        def apply(leaf):  # eager arrays that are elsewhere are not moved
            is_here = isinstance(leaf, Tracer) or is_on_mesh(leaf, self.placer.device_mesh.backend_mesh)
            return function(leaf) if is_here and np.ndim(leaf) > 1 else leaf

        return tensors if self._is_inactive() else jax.tree.map(apply, tensors)

    def _constrained(self, tensor: Any, *axes_of_dims: Any) -> Any:
        """Constrains the first dims of an array. The compiler chooses the layout of the others, and of `_ANY`."""
        spec = PartitionSpec(*axes_of_dims, *[_ANY] * (tensor.ndim - len(axes_of_dims)))
        return _constrain_to(NamedSharding(self.placer.device_mesh.backend_mesh, spec))(tensor)


@functools.lru_cache
def _constrain_to(sharding: NamedSharding) -> Callable:
    """Returns a sharding constraint in a `jit` of its own: eager arrays cannot be split unequally without one."""
    return jax.jit(lambda tensor: with_sharding_constraint(tensor, sharding), inline=True)
