"""`ModelParallel`: variables are sharded by the rules of a layout map."""

import itertools
from typing import Any

import keras

from keras_dist.layout.layout_map import LayoutMap, as_layout_map
from keras_dist.layout.rule_matching import is_for_activations
from keras_dist.layout.tensor_layout import axis_names, axis_tuple
from keras_dist.mesh.device_mesh import DeviceMesh, as_auto_mesh
from keras_dist.steps.options import StepOptions
from keras_dist.strategies.base import BatchDimName, Distribution


class ModelParallel(Distribution, keras.distribution.ModelParallel):
    """Shards variables by the rules of a layout map, and the batch.

    Args:
        layout_map: The rules. A variable that no rule matches is replicated.
        batch_dim_name: The mesh axis that the batch is sharded over, or a tuple of several. By default the mesh's
            first axis.
        auto_shard_dataset: With several processes, whether every process passes the same global dataset, of which its
            devices take their rows. With `False` every process passes its own rows.
        device_mesh: Accepted for compatibility with Keras; must be the mesh of the layout map.
        sequence_dim_name: The mesh axis, or axes, that dim 1 of a batch, the sequence, is sharded over (context
            parallelism). No rule for a weight may use it, except for experts.
        sequence_exchange: How devices that share a sequence exchange what attention needs: "all_to_all" over heads
            (Ulysses) or "all_gather" of keys and values. By default the one, or the combination, that sends the fewest
            bytes.
        expert_dim_name: The mesh axis, or axes, that experts are sharded over (expert parallelism). They may be axes of
            the batch or of sequences; over others, the batch is sharded in addition to `batch_dim_name`. Tokens are
            sent to the devices of their experts, or weights to the tokens, whichever sends fewer bytes. Rules shard
            dim 0 of the weights of experts over these axes; no other dim of a weight may use them.
        step_options: How training steps are computed, for example in microbatches. By default as Keras does.
        strict: Whether likely mistakes in the layout map (a rule that matches no variable, a large weight that is
            replicated although other weights are sharded) raise an error before the first step. By default they are
            reported once, as a `LayoutMapWarning`.

    Raises:
        ValueError: The layout map is missing or has no mesh, the mesh lacks an axis that is named, a rule shards a
            weight over an axis of sequences or experts, or the number of processes is larger than the number of batch
            shards and not divisible by it. When a step is traced: an expert axis that does not divide the number of
            experts, for which there is no rule, or under which no mixture of experts is found.

    Example:

    >>> layout_map = LayoutMap(DeviceMesh((2, 4), ["data", "model"]))
    >>> layout_map["dense.*/kernel"] = (None, "model")
    >>> distribution = ModelParallel(layout_map=layout_map, batch_dim_name="data")
    >>> with distribution.scope():
    ...     dense = keras.layers.Dense(8, name="dense")
    ...     dense.build((None, 16))
    >>> dense.kernel.value.sharding.shard_shape(dense.kernel.shape)
    (16, 2)
    """

    def __init__(
        self,
        *,
        layout_map=None,
        batch_dim_name: BatchDimName = None,
        auto_shard_dataset: bool = True,
        device_mesh=None,
        strict: bool = False,
        sequence_dim_name: BatchDimName = None,
        sequence_exchange: str | None = None,
        expert_dim_name: BatchDimName = None,
        step_options: StepOptions | None = None,
    ):
        if layout_map is None:
            raise ValueError("ModelParallel needs a layout_map. Create one with LayoutMap(device_mesh).")
        layout_map, mesh = self._map_and_mesh(layout_map, device_mesh)
        batch_dim_name = mesh.axis_names[0] if batch_dim_name is None else batch_dim_name
        super().__init__(
            mesh,
            batch_dim_name,
            auto_shard_dataset,
            sequence_dim_name,
            sequence_exchange,
            step_options,
            expert_dim_name=expert_dim_name,
        )
        expert_axes = axis_tuple(expert_dim_name)
        for pattern, layout in layout_map.items():
            is_weight = not is_for_activations(pattern)
            axes = axis_names(layout.axes if is_weight else layout.axes[:1])
            shared = set(axes) & set(axis_tuple(sequence_dim_name))
            if shared := shared.difference(expert_axes if is_weight else ()):
                raise ValueError(
                    f"Layout map rule {pattern!r}, {layout.axes}, shards {'a weight' if is_weight else 'the batch'} "
                    f"over {shared.pop()!r}, which sequence_dim_name={sequence_dim_name!r} shards sequences over. Use "
                    "another axis for one of them. tensor_parallel_layout_map takes sequence_dim_name, too."
                )
            for dim, name in itertools.product(range(1, len(layout.axes)), expert_axes):
                if is_weight and name in axis_tuple(layout.axes[dim]):
                    raise ValueError(
                        f"Layout map rule {pattern!r}, {layout.axes}, shards dim {dim} of a weight over {name!r}, but "
                        f"expert_dim_name={expert_dim_name!r} shards experts over it, dim 0 of their weights. Use "
                        "another axis for one of them."
                    )
        self._layout_map, self.strict = layout_map, strict
        replicas = self.num_model_replicas
        if self._num_processes > replicas and self._num_processes % replicas:
            raise ValueError(
                "`num_processes` must be divisible by `num_model_replicas` if it is larger, but "
                f"{self._num_processes} processes cannot share {replicas} batch shards (the product of the batch axes "
                f"{self._placer.batch_axes}) evenly. Choose batch axes whose product divides {self._num_processes}."
            )

    @classmethod
    def _map_and_mesh(cls, layout_map: Any, device_mesh: Any) -> tuple[LayoutMap, DeviceMesh]:
        layout_map = as_layout_map(layout_map)
        mesh = layout_map.device_mesh
        if mesh is None or (device_mesh is not None and as_auto_mesh(device_mesh) != mesh):
            raise ValueError(
                f"{cls.__name__} uses the mesh of its layout map, {mesh}, but got device_mesh={device_mesh}. "
                "Create the map with LayoutMap(device_mesh)."
            )
        return layout_map, mesh
