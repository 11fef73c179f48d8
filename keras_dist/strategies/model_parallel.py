"""`ModelParallel`: variables are sharded by the rules of a layout map."""

import keras

from keras_dist.layout.layout_map import Rule, as_layout_map
from keras_dist.layout.tensor_layout import TensorLayout
from keras_dist.mesh.device_mesh import as_mesh_of_layers
from keras_dist.strategies.base import BatchDimName, Distribution


class ModelParallel(Distribution, keras.distribution.ModelParallel):
    """Shards variables as the rules of a layout map say, and the batch.

    Args:
        layout_map: the rules. A variable that none matches is replicated.
        batch_dim_name: the mesh axis that the batch is sharded over, or a tuple of several. By default the mesh's
            first axis.
        auto_shard_dataset: with several processes, whether each is passed the whole dataset and takes its own part.
        device_mesh: taken for programs that pass it; the mesh is that of the layout map, and must be this one.
        strict: whether rules that match nothing, and weights that are replicated though an axis is meant for
            sharding them, are an error before the first step. By default a `LayoutMapWarning` says so once.

    Raises:
        ValueError: no layout map, one without a mesh, or a batch axis that the mesh does not have.

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
    ):
        if layout_map is None:
            raise ValueError("You must specify a layout_map argument. Received: None. Make one with LayoutMap(mesh).")
        layout_map = as_layout_map(layout_map)
        mesh = layout_map.device_mesh
        if mesh is None or (device_mesh is not None and as_mesh_of_layers(device_mesh) != mesh):
            raise ValueError(
                f"ModelParallel lies on the mesh of its layout map. Received: layout_map.device_mesh={mesh}, "
                f"device_mesh={device_mesh}. Make the map with LayoutMap(device_mesh)."
            )
        super().__init__(mesh, mesh.axis_names[0] if batch_dim_name is None else batch_dim_name, auto_shard_dataset)
        self._layout_map = layout_map
        self.strict = strict
        replicas = self.num_model_replicas
        if self._num_processes > replicas and self._num_processes % replicas:
            raise ValueError(
                "If `num_processes` is greater than `num_model_replicas`, `num_processes` must be divisible by "
                f"`num_model_replicas`. Received: num_processes={self._num_processes}, num_model_replicas={replicas}, "
                f"the product of the batch axes {self._placer.batch_axes}. Choose a mesh where it divides."
            )

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        """Returns the layout that the rules give a layer's inputs or outputs, None to leave them to the compiler.

        Of several tensors that the layer returns, or is called with by position, each is given the layout that has
        at least as many dims.

        Args:
            path: the path of the layer with `/input` or `/output` behind it.

        Returns:
            The layout, or None.

        Raises:
            ValueError: several rules match.
        """
        return self._layout_map[path]

    def rule(self, path: str) -> Rule | None:
        """Returns the rule of the layout map for the path of a variable, None where it is replicated.

        Args:
            path: the path of a variable.

        Returns:
            The key of the layout map and its layout, or None.

        Raises:
            ValueError: several rules match.
        """
        return self._layout_map.rule(path)

    def layout_rules(self) -> list[tuple[str, tuple]]:
        """Returns the patterns and axes of the layout map."""
        return [(pattern, layout.axes) for pattern, layout in self._layout_map.items()]
