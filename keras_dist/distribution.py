"""`Distribution`, `DataParallel` and `ModelParallel`: what lies where, and the one that is installed."""

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.core import Tracer

from keras_dist import keras_seam, keras_seam_overrides
from keras_dist.batches import BatchPlacer
from keras_dist.layout import TensorLayout, axis_tuple, misfit
from keras_dist.layout_map import Rule, as_layout_map
from keras_dist.mesh import DeviceMesh, as_mesh_of_layers, create_device_mesh
from keras_dist.outputs import distribute_outputs
from keras_dist.placement import check_placement, lies_on

BatchDimName = str | Sequence[str] | None


class Distribution(keras_seam_overrides.Hooks, keras_seam.KerasDistribution):
    """Says where variables, batches and layer outputs lie. The base of all distributions here.

    As it is, it replicates variables and leaves the outputs of layers to the compiler; a subclass may answer
    `get_variable_layout`, `get_data_layout` and `get_tensor_layout` otherwise. A distribution decides; it holds no
    model.

    Args:
        device_mesh: the mesh that everything lies on.
        batch_dim_name: the mesh axis, or axes, that dim 0 of a batch is sharded over; `None` replicates batches.
        auto_shard_dataset: with several processes, whether each is passed the whole dataset and takes its own part.
            `False` means that each is passed its own part.

    Raises:
        ValueError: no mesh, one with axes that are not of type `Auto`, a batch axis that the mesh does not have, or a
            mesh on which several processes share parts of a batch that Keras gives to each alone.
    """

    def __init__(
        self,
        device_mesh: keras.distribution.DeviceMesh | jax.sharding.Mesh,
        batch_dim_name: BatchDimName = None,
        auto_shard_dataset: bool = True,
    ):
        self._device_mesh = as_mesh_of_layers(device_mesh)
        batch_axes = axis_tuple(
            batch_dim_name if isinstance(batch_dim_name, (str, type(None))) else tuple(batch_dim_name)
        )
        for name in batch_axes:
            if name not in self._device_mesh.axis_sizes or batch_axes.count(name) > 1:
                raise ValueError(
                    f"batch_dim_name must name axes of the mesh, each once. Received: {batch_dim_name!r}, but the mesh "
                    f"has the axes {list(self._device_mesh.axis_sizes)}. Use one of them, or a tuple of several."
                )
        self._batch_dim_name = batch_dim_name
        self._auto_shard_dataset = auto_shard_dataset
        self._num_processes = keras_seam.num_processes()
        self._process_id = keras_seam.process_id()
        self._is_multi_process = self._num_processes > 1
        self._placer = BatchPlacer(self._device_mesh, batch_axes)
        if self._is_multi_process:
            self._placer.require_parts_of_processes()

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that everything lies on."""
        return self._device_mesh

    @property
    def batch_dim_name(self) -> BatchDimName:
        """The mesh axis, or axes, that dim 0 of a batch is sharded over."""
        return self._batch_dim_name

    @property
    def num_model_replicas(self) -> int:
        """Into how many parts a global batch is cut: the product of the batch axes' sizes."""
        return math.prod(self._device_mesh.axis_sizes[name] for name in self._placer.batch_axes)

    def get_data_layout(self, data_shape: Sequence[int]) -> TensorLayout:
        """Returns the layout of a batch: dim 0 over the batch axes.

        A batch whose rows the axes do not divide has this layout too; when it is placed, it is sharded over the
        largest part of the axes that divides it.

        Args:
            data_shape: the shape of one array of the batch. A 0-d array is replicated.

        Returns:
            The layout.
        """
        keras_seam_overrides.notice(self)
        batch = [self._placer.batch_axes] if len(data_shape) else []
        return TensorLayout(batch + [None] * (len(data_shape) - 1), self._device_mesh)

    def get_variable_layout(self, variable) -> TensorLayout:
        """Returns the layout that a variable brings, else that of the rule for its path, else one that replicates it.

        Args:
            variable: a `keras.Variable`.

        Returns:
            The layout.

        Raises:
            ValueError: several rules match the path, or the rule does not fit the variable's shape.
        """
        keras_seam_overrides.notice(self)
        layout = keras_seam.variable_layout(variable)
        if layout is not None:
            return layout
        rule = self.rule(variable.path)
        if rule is None:
            layout = TensorLayout([None] * len(variable.shape), self._device_mesh)
        else:
            layout = rule.layout
            problem = misfit(layout.axes, variable.shape, (layout.device_mesh or self._device_mesh).axis_sizes)
            if problem and 0 not in variable.shape:  # nothing of an empty tensor lies anywhere
                raise ValueError(
                    f"Cannot shard '{variable.path}' (shape {tuple(variable.shape)}) by the rule {rule.pattern!r}, "
                    f"{layout.axes}: {problem}"
                )
        if isinstance(variable, keras.Variable):
            keras_seam_overrides.remember_laid_out(variable, self)
        return layout

    def get_tensor_layout(self, path: str) -> Any:
        """Returns the layout that a layer's output is given, None to leave it to the compiler.

        Args:
            path: the path of the layer with `/output` behind it.

        Returns:
            None; a subclass may answer otherwise.
        """
        return None

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Installs this distribution for a block of code, in this thread."""
        with keras_seam_overrides.installed_in_this_thread(self):
            yield

    def distribute_batch(self, batch: Any) -> Any:
        """Lays a host batch over the mesh, as `fit` does; for training loops of one's own.

        Args:
            batch: nested tuples, lists and dicts of arrays with any number of rows, 0-d arrays and Python
                scalars; `None` stays `None`.

        Returns:
            The same structure of `jax.Array`: dim 0 sharded over the batch axes, or over the largest part of them
            that divides it.

        Example:

        >>> import numpy as np
        >>> distribution = DataParallel()
        >>> x, y = distribution.distribute_batch((np.ones((16, 3)), np.ones(5)))
        >>> x.sharding.shard_shape(x.shape), y.sharding.shard_shape(y.shape)
        ((2, 3), (5,))
        """
        return self._placer.place(batch)

    def batch_sharding(self, shape: Sequence[int]) -> jax.sharding.NamedSharding:
        """Returns how an array of a batch is sharded when it is placed.

        Args:
            shape: the shape of the array.

        Returns:
            The sharding: dim 0 over the batch axes, or over the largest part of them that divides it.
        """
        return self._placer.sharding(shape)

    def rule(self, path: str) -> Rule | None:
        """Returns the rule for the path of a variable, None where it is replicated.

        Args:
            path: the path of a variable.

        Returns:
            The key of a layout map and its layout, or None.
        """
        return None

    # What follows is asked by keras_seam_overrides.

    def _distribute_tensor(self, tensor, layout):
        return distribute_outputs(tensor, layout, self._placer.batch_axes)

    def _distribute_call(self, model, args, kwargs):
        weights = model.weights if model.built else []
        if not weights or not lies_on(keras_seam.variable_value(weights[0]), self._device_mesh.backend_mesh):
            return args, kwargs
        leaves, structure = jax.tree.flatten((args, kwargs))
        return jax.tree.unflatten(structure, [self._distribute_argument(leaf) for leaf in leaves])

    def _distribute_argument(self, leaf):
        is_concrete = isinstance(leaf, (np.ndarray, jax.Array)) and not isinstance(leaf, Tracer)
        if not is_concrete or leaf.ndim == 0 or hasattr(leaf, "_keras_mask"):
            return leaf
        return self._placer.place(leaf)

    def _check_placement(self, model, variables) -> None:
        check_placement(model, variables, self)


class DataParallel(Distribution, keras.distribution.DataParallel):
    """Replicates every variable and shards the batch.

    Args:
        device_mesh: a 1-d mesh. Of a mesh with several axes the first is used, with a warning.
        devices: the devices of a 1-d mesh, where no mesh is given. By default all of them.
        auto_shard_dataset: with several processes, whether each is passed the whole dataset and takes its own part.

    Raises:
        ValueError: both a mesh and devices, an empty list of devices, or no mesh.

    Example:

    >>> DataParallel(devices=["cpu:0", "cpu:1"])
    <DataParallel device_mesh=<DeviceMesh batch:2 on 2 of 8 cpu devices>>
    """

    def __init__(self, device_mesh=None, devices=None, auto_shard_dataset: bool = True):
        if device_mesh is not None and devices is not None:
            raise ValueError(
                "DataParallel takes a mesh or devices, not both. Received: "
                f"device_mesh={device_mesh}, devices={devices}. Leave one of them out."
            )
        if device_mesh is None:
            if devices is not None and np.size(devices) == 0:
                raise ValueError(
                    "DataParallel needs at least one device. Received: devices=[]. Leave `devices` out for all of them."
                )
            names = [keras_seam.DEFAULT_BATCH_DIM_NAME]
            if devices is None:
                device_mesh = create_device_mesh((-1,), axis_names=names)
            else:
                device_mesh = DeviceMesh(np.shape(devices), names, devices)
        device_mesh = as_mesh_of_layers(device_mesh)
        first_axis = device_mesh.axis_names[0]
        if device_mesh.devices.ndim != 1:
            warnings.warn(
                f"Expect the input mesh to be 1D, but received {device_mesh}. The first axis, {first_axis!r}, will be "
                "used for data-parallel sharding; along the others every device computes the same. To shard the "
                "batch over several axes, use ModelParallel(layout_map=LayoutMap(mesh), batch_dim_name=(...)).",
                stacklevel=2,
            )
        super().__init__(device_mesh, first_axis, auto_shard_dataset)


class ModelParallel(Distribution, keras.distribution.ModelParallel):
    """Shards variables as the rules of a layout map say, and the batch.

    Args:
        layout_map: the rules. A variable that none matches is replicated.
        batch_dim_name: the mesh axis that the batch is sharded over, or a tuple of several. By default the mesh's
            first axis.
        auto_shard_dataset: with several processes, whether each is passed the whole dataset and takes its own part.
        device_mesh: taken for programs that pass it; the mesh is that of the layout map, and must be this one.

    Raises:
        ValueError: no layout map, one without a mesh, or a batch axis that the mesh does not have.

    Example:

    >>> from keras_dist import LayoutMap
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
        replicas = self.num_model_replicas
        if self._num_processes > replicas and self._num_processes % replicas:
            raise ValueError(
                "If `num_processes` is greater than `num_model_replicas`, `num_processes` must be divisible by "
                f"`num_model_replicas`. Received: num_processes={self._num_processes}, num_model_replicas={replicas}, "
                f"the product of the batch axes {self._placer.batch_axes}. Choose a mesh where it divides."
            )

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        """Returns the layout that the rules give a layer's output, None to leave it to the compiler.

        Where the layer returns several tensors, the layout is given to each that has at least as many dims.

        Args:
            path: the path of the layer with `/output` behind it.

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


def distribution() -> Any:
    """Returns the installed distribution, or None; the same object as `keras.distribution.distribution()`."""
    return keras_seam.current_distribution()


def set_distribution(value: Any) -> None:
    """Installs a distribution, in Keras's own global.

    A distribution of this package is seen by all threads that have installed none of their own, and stays through
    `keras.utils.clear_session()`.

    Args:
        value: a distribution of this package or of Keras; None for none.

    Raises:
        TypeError: anything else.

    Example:

    >>> set_distribution(DataParallel())
    >>> keras.distribution.distribution()
    <DataParallel device_mesh=<DeviceMesh batch:8 on 8 cpu devices>>
    >>> set_distribution(None)
    """
    if value is not None and not isinstance(value, keras_seam.KerasDistribution):
        raise TypeError(
            f"set_distribution takes a distribution or None. Received: {value!r} (of type {type(value).__name__}). "
            "Pass, for example, keras_dist.DataParallel()."
        )
    keras_seam_overrides.install(value)


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
    return distribute_outputs(tensor, layout, batch_axes)
