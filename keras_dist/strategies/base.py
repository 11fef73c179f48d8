"""`Distribution`, the base class of all distributions."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import jax
import keras

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import PackageDistribution, expect_distribution, installed_in_this_thread
from keras_dist._keras.global_state import get_random_seed
from keras_dist.attention.attention import attention
from keras_dist.attention.exchange import EXCHANGES
from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.data.batches import Batches
from keras_dist.data.consistency import BatchComparison, order_of_devices, require_same_model
from keras_dist.layout.derived_weights import BaseWeight, base_weight_of, derived_axes
from keras_dist.layout.layout_map import LayoutMap, Rule
from keras_dist.layout.rule_matching import is_for_activations
from keras_dist.layout.tensor_layout import TensorLayout, axis_names, axis_tuple, layout_error
from keras_dist.mesh.device_mesh import DeviceMesh, as_auto_mesh
from keras_dist.mesh.devices import is_on_mesh, num_processes, process_id, require_attached
from keras_dist.multihost.initialize import warn_unless_joined
from keras_dist.multihost.value_comparison import require_same_values
from keras_dist.sharding.resharding import without_axes
from keras_dist.sharding.sequences import SequenceSharding
from keras_dist.steps.layer_calls import LayerCalls
from keras_dist.steps.options import StepOptions
from keras_dist.steps.step_state import step_state
from keras_dist.steps.steps import Steps
from keras_dist.steps.train_steps import TrainSteps
from keras_dist.variables.host_to_device import source_of
from keras_dist.variables.variable_layouts import describe_variable

BatchDimName = str | Sequence[str] | None


def _checked_options(step_options: Any) -> StepOptions:
    if not isinstance(step_options, StepOptions):
        raise TypeError(
            f"step_options must be a keras_dist.StepOptions, but got {step_options!r} "
            f"({type(step_options).__name__}). Pass, for example, keras_dist.StepOptions(microbatches=4)."
        )
    return step_options


class Distribution(PackageDistribution, internals.KerasDistribution):
    """Chooses the layouts of variables, batches, and inputs and outputs of layers. Base class of all distributions.

    This class replicates variables and leaves the inputs and outputs of layers to the compiler. Subclasses override
    `get_variable_layout`, `get_compute_layout`, `get_update_layout`, `get_data_layout` and `get_tensor_layout`, which
    have no side effects. The first three are passed a variable, or before it exists its path, shape, dtype, name and
    `trainable`, so they should use nothing else of it. A distribution holds no model.

    Args:
        device_mesh: The mesh of devices.
        batch_dim_name: The mesh axis, or axes, that dim 0 of a batch is sharded over; `None` replicates batches.
        auto_shard_dataset: With several processes, whether every process passes the same global dataset, of which its
            devices take their rows. With `False` every process passes its own rows, any number of them, and the global
            batch consists of the rows of all processes.
        sequence_dim_name: The mesh axis, or axes, that dim 1 of a batch is sharded over (context parallelism).
        sequence_exchange: As for `ModelParallel`.
        step_options: As for `ModelParallel`.
        expert_dim_name: As for `ModelParallel`.

    Raises:
        TypeError: `step_options` is something else.
        ValueError: No mesh, a mesh with axes that are not of type `Auto`, or a batch, sequence or expert axis that the
            mesh does not have or that is named twice, or an unknown exchange.
    """

    def __init__(
        self,
        device_mesh: keras.distribution.DeviceMesh | jax.sharding.Mesh,
        batch_dim_name: BatchDimName = None,
        auto_shard_dataset: bool = True,
        sequence_dim_name: BatchDimName = None,
        sequence_exchange: str | None = None,
        step_options: StepOptions | None = None,
        *,
        expert_dim_name: BatchDimName = None,
    ):
        self._device_mesh = as_auto_mesh(device_mesh)
        batch_axes, sequence_axes = axis_tuple(batch_dim_name), axis_tuple(sequence_dim_name)
        arguments = {"batch_dim_name": batch_axes, "sequence_dim_name": sequence_axes}
        arguments["expert_dim_name"] = expert_axes = axis_tuple(expert_dim_name)
        for argument, axes in arguments.items():
            for name in axes:
                if name not in self._device_mesh.axis_sizes or axes.count(name) > 1:
                    raise ValueError(
                        f"{argument}={axes if len(axes) > 1 else name!r} must name axes of the mesh, each once. The "
                        f"mesh has the axes {list(self._device_mesh.axis_sizes)}."
                    )
        if set(batch_axes) & set(sequence_axes):
            raise ValueError(
                f"sequence_dim_name={sequence_dim_name!r} names an axis that dim 0 of a batch is sharded over, "
                f"{batch_dim_name!r}: that of batch_dim_name, or by default the first of the mesh, "
                f"{list(self._device_mesh.axis_sizes)}. Choose another axis, or put that of batches first."
            )
        if sequence_exchange not in (None, *EXCHANGES) or (sequence_exchange and not sequence_axes):
            raise ValueError(
                f"sequence_exchange={sequence_exchange!r} with sequence_dim_name={sequence_dim_name!r}: it must be "
                f"one of {list(EXCHANGES)}, and needs an axis that sequences are sharded over. By default the exchange "
                "that sends the fewest bytes is used."
            )
        if isinstance(auto_shard_dataset, str):  # each text would be true
            raise TypeError(f"auto_shard_dataset={auto_shard_dataset!r} is text. Pass True or False.")
        if added := tuple(name for name in expert_axes if name not in batch_axes + sequence_axes):
            batch_dim_name = batch_axes = batch_axes + added
        self._step_options = StepOptions() if step_options is None else _checked_options(step_options)
        self._batch_dim_name, self._auto_shard_dataset = batch_dim_name, auto_shard_dataset
        self._sequence_dim_name, self._sequence_exchange = sequence_dim_name, sequence_exchange
        self._expert_dim_name = expert_dim_name
        self._num_processes, self._process_id = num_processes(), process_id()
        self._is_multi_process = self._num_processes > 1  # Keras reads it under this name
        self.strict = self.reshard_after_forward = False  # only strategies with an argument for it set it
        self._layout_map: LayoutMap | None = None
        is_overridden = type(self).get_data_layout is not Distribution.get_data_layout
        layout_of = self.get_data_layout if is_overridden else None
        self._placer = BatchPlacer(self._device_mesh, batch_axes, sequence_axes, layout_of)
        self._comparisons: dict[bool, BatchComparison] = {}
        self.warned: set[str | None] = set()  # why layers compute experts that no token chose
        if self._device_mesh.devices.size > 1:
            expect_distribution(f"a {type(self).__name__} was created")
            warn_unless_joined()

    @property
    def is_multi_process(self) -> bool:
        """Whether training runs in several processes."""
        return self._is_multi_process

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of devices."""
        return self._device_mesh

    @property
    def batch_dim_name(self) -> BatchDimName:
        """The mesh axis, or axes, that dim 0 of a batch is sharded over."""
        return self._batch_dim_name

    @property
    def sequence_dim_name(self) -> BatchDimName:
        """The mesh axis, or axes, that dim 1 of a batch is sharded over; `None` without context parallelism."""
        return self._sequence_dim_name

    @property
    def expert_dim_name(self) -> BatchDimName:
        """The mesh axis, or axes, that experts are sharded over; `None` without expert parallelism."""
        return self._expert_dim_name

    @property
    def step_options(self) -> StepOptions:
        """How training steps are computed."""
        return self._step_options

    def with_step_options(self, step_options: StepOptions) -> Self:
        """Returns the same distribution with other step options.

        Args:
            step_options: How training steps are computed.

        Raises:
            TypeError: `step_options` is something else.

        Example:

        >>> from keras_dist import DataParallel, StepOptions
        >>> DataParallel().with_step_options(StepOptions(remat="full")).step_options
        StepOptions(remat='full')
        """
        changed = copy.copy(self)
        changed._step_options = _checked_options(step_options)
        return changed

    def __repr__(self) -> str:
        experts = f" expert_dim_name={self._expert_dim_name!r}" if self._expert_dim_name else ""
        options = f" step_options={self._step_options}" if self._step_options != StepOptions() else ""
        return f"<{type(self).__name__} device_mesh={self._device_mesh}{experts}{options}>"

    @property
    def num_model_replicas(self) -> int:
        """The number of shards of a global batch: the product of the sizes of the batch axes."""
        return self._placer.num_batch_shards

    @property
    def num_data_shards(self) -> int:
        """The number of shards of a dataset that processes read: the number of processes, or of batch shards if fewer.

        `data_shard_id` is the index of the shard of this process. Both count as Keras does, which assumes that devices
        are in the order of processes and that the batch axes come first in the mesh. Keras has the former since 3.16.
        """
        return min(self.num_model_replicas, self.num_processes)

    def get_data_layout(self, data_shape: Sequence[int]) -> TensorLayout:
        """Returns the layout of a batch: dim 0 over the batch axes, dim 1 over the sequence axes.

        A batch whose rows the axes do not divide has this layout too. When it is placed, it is sharded over the largest
        part of the axes that divides it. A dim 1 that the sequence axes do not divide is not sharded.

        Args:
            data_shape: The shape of one array of the batch. A 0-d array is replicated.
        """
        entries = [self._placer.batch_axes, self._placer.sequence_axes_for(data_shape)][: len(data_shape)]
        return TensorLayout([*entries, *[None] * (len(data_shape) - len(entries))], self._device_mesh)

    def get_variable_layout(self, variable) -> TensorLayout:
        """Returns the layout in which a variable is stored.

        Args:
            variable: A `keras.Variable`.

        Returns:
            The layout that the variable was created with, else that of the rule for its path, else a replicated one.

        Raises:
            ValueError: Several rules match the path, or the rule does not fit the variable's shape.
        """
        layout = internals.variable_layout(variable)
        return self._stored_layout(variable) if layout is None else layout

    def get_compute_layout(self, variable) -> TensorLayout:
        """Returns the layout in which layers compute with a variable, by default the stored one without batch axes.

        A variable is resharded to it when a layer reads it, in the dtype that the layer computes in. Devices with other
        rows of the batch need the same weight. Left to XLA, some products with one that is sharded over batch axes are
        wrong, and so are some gradients. Experts stay on their devices, and so do the rows of an embedding table.

        Args:
            variable: A `keras.Variable`.
        """
        layout, kept = self.get_variable_layout(variable), [*axis_tuple(self._expert_dim_name)]
        if internals.is_embedding_table(variable.path):
            kept += axis_names(layout.axes[:1])
        shared = set(axis_names(layout.axes)).intersection(self._placer.batch_axes).difference(kept)
        return without_axes(layout, shared) if shared else layout

    def get_update_layout(self, variable) -> TensorLayout:
        """Returns the layout of a variable's gradient and of its optimizer state, by default that of the variable.

        Args:
            variable: A `keras.Variable`.
        """
        return self.get_variable_layout(variable)

    def _stored_layout(self, variable) -> TensorLayout:
        return self._layout_by_rule(variable)

    def _layout_by_rule(self, variable) -> TensorLayout:
        shape, (rule, base) = tuple(variable.shape), self._rule_and_base(variable)
        if rule is None:
            return TensorLayout([None] * len(shape), self._device_mesh)
        layout, mesh = rule.layout, rule.layout.device_mesh or self._device_mesh
        of, ruled_shape = "", shape
        if base is not None:
            layout = TensorLayout(derived_axes(layout.axes, base.dims, shape, mesh.axis_sizes), mesh)
            of, ruled_shape = " before it is quantized", base.shape
        problem = None if ruled_shape is None else layout_error(rule.layout.axes, ruled_shape, mesh.axis_sizes)
        if problem and 0 not in shape:  # an empty tensor has no shards
            raise ValueError(
                f"Cannot shard '{variable.path}' (shape {ruled_shape}{of}) by the rule {rule.pattern!r}, "
                f"{rule.layout.axes}: {problem}"
            )
        return layout

    def _rule_and_base(self, variable) -> tuple[Rule | None, BaseWeight | None]:
        """Returns the rule that decides the layout of a variable, and its base weight if the rule is that one's."""
        rule, base = self.rule(variable.path), base_weight_of(variable)
        base_rule = None if base is None else self.rule(base.path)
        # A rule that matches both is meant for the base weight.
        return (base_rule, base) if base_rule is not None and rule in (None, base_rule) else (rule, None)

    def get_tensor_layout(self, path: str) -> Any:
        """Returns the layout of a layer's inputs or outputs; without one the compiler chooses.

        If the layer returns several tensors, or is called with several by position, the layout applies to those that
        have as many dims; if none has, to those that have more.

        Args:
            path: The path of the layer, with `/input` or `/output` appended.

        Returns:
            The layout of the rule that matches, or None.

        Raises:
            ValueError: Several rules match.
        """
        return None if self._layout_map is None else self._layout_map[path]

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Makes this distribution the active one for a block of code in this thread, and for threads that start in it.

        It does not apply to threads that started earlier. `set_distribution` applies to all threads.
        """
        with installed_in_this_thread(self):
            yield

    def distribute_batch(self, batch: Any) -> Any:
        """Places a host batch on the mesh, as `fit` does, for custom training loops.

        Args:
            batch: Nested tuples, lists and dicts of arrays with any number of rows, 0-d arrays and Python
                scalars; `None` stays `None`. With several processes, all of them call this, each with the global batch
                or with its own rows, depending on `auto_shard_dataset`.

        Returns:
            The same structure of `jax.Array`: dim 1 sharded over the sequence axes if they divide it, and dim 0
            sharded over the batch axes, or over the largest part of them that divides it.

        Example:

        >>> import numpy as np
        >>> from keras_dist import DataParallel
        >>> distribution = DataParallel()
        >>> x, y = distribution.distribute_batch((np.ones((16, 3)), np.ones(5)))
        >>> x.sharding.shard_shape(x.shape), y.sharding.shard_shape(y.shape)
        ((2, 3), (5,))
        """
        require_attached(self._device_mesh.backend_mesh.devices.ravel())
        return self.batches.place(batch)[0]

    def batch_sharding(self, shape: Sequence[int]) -> jax.sharding.NamedSharding:
        """Returns the sharding with which an array of a batch is placed.

        Dim 0 is sharded over the batch axes, or over the largest part of them that divides it.

        Args:
            shape: The shape of the array.
        """
        return self._placer.sharding(shape)

    def rule(self, path: str) -> Rule | None:
        """Returns the rule that matches the path of a variable: its key in the layout map and its layout.

        Args:
            path: The path of a variable.

        Returns:
            The rule, or None if none matches or there is no layout map: the variable is replicated.

        Raises:
            ValueError: Several rules match.
        """
        return None if self._layout_map is None else self._layout_map.rule(path)

    # What patches and plans ask for.

    @property
    def batches(self) -> Batches:
        return Batches(self, self._placer, self._comparisons)

    @property
    def steps(self) -> Steps:
        return Steps(self, self._step_options, self._placer)

    @property
    def train_steps(self) -> TrainSteps:
        return TrainSteps(self, self._step_options, self._placer)

    @property
    def layer_calls(self) -> LayerCalls:
        return LayerCalls(self, self._placer)

    @property
    def sequences(self) -> SequenceSharding:
        return SequenceSharding(self._placer)

    def attention(self, query: Any, key: Any, value: Any, bias: Any, mask: Any, **options: Any) -> Any:
        """Returns what `keras.ops.dot_product_attention` does, for operands of one dtype and a boolean mask."""
        state = step_state()
        return attention(
            query,
            key,
            value,
            bias,
            mask,
            **options,
            mesh=self._device_mesh.backend_mesh,
            batch_axes=self._placer.axes_in_step(query.shape[0], state.unequal_shards),
            sequence_axes=self._placer.sequence_axes,
            sequence_exchange=self._sequence_exchange,
            axes_of_weight=state.weights.axes_of,
            calls=state.calls,
        )

    def layout_rules(self) -> list[tuple[str, tuple]] | None:
        """Returns the patterns and axes of the layout map; None where the distribution has no layout map."""
        return None if self._layout_map is None else [(key, layout.axes) for key, layout in self._layout_map.items()]

    @property
    def lacks_rule_for_experts(self) -> bool:
        """Whether experts are sharded by rules alone, and none shards dim 0 of a weight over each expert axis."""
        rules = [axes for key, axes in self.layout_rules() or () if not is_for_activations(key)]
        return not set(axis_tuple(self._expert_dim_name)) <= {name for axes in rules for name in axis_names(axes[:1])}

    def check_processes_agree(self, step: str, model: keras.Model, variables: Iterable[keras.Variable]) -> None:
        """Raises ValueError where processes are about to run a step of different models."""
        if self.is_multi_process:
            settings = ("jit_compile", "run_eagerly", "steps_per_execution")
            facts = {name: getattr(model, name) for name in settings} | {
                "random seed": get_random_seed(),
                "distribution": repr(self),
                "order of devices in the mesh": order_of_devices(self._device_mesh.backend_mesh),
                "auto_shard_dataset": self.auto_shard_dataset,
            }
            require_same_model(step, model.name, [(v.path, describe_variable(v)) for v in variables], facts)

    def check_values_agree(self, model: keras.Model, variables: Iterable[keras.Variable], place: str) -> None:
        """Raises ValueError where values that several processes hold differ, or the places in training they are at."""
        values = [(variable.path, internals.variable_value(variable)) for variable in variables]
        mesh = self._device_mesh.backend_mesh
        on_mesh = [(path, array, source_of(array)) for path, array in values if is_on_mesh(array, mesh)]
        require_same_values(model.name, place, on_mesh)
