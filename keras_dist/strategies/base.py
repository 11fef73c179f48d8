"""`Distribution`, the base class of all distributions."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import jax
import keras
import numpy as np
from jax.core import Tracer

from keras_dist._keras import internals, model_structure
from keras_dist._keras.active_distribution import expect_distribution, installed_in_this_thread
from keras_dist._keras.distribution_hooks import DistributionHooks
from keras_dist._keras.global_state import random_seed
from keras_dist.attention.attention import attention
from keras_dist.attention.exchange import EXCHANGES
from keras_dist.data.batch_placement import BatchPlacer, assemble, is_global
from keras_dist.data.consistency import BatchComparison, order_of_devices, require_same_model
from keras_dist.data.input_pipeline import InputPipeline, LocalRows, local_rows, select_local_rows
from keras_dist.layout.derived_weights import BaseWeight, base_weight_of, derived_axes
from keras_dist.layout.layout_map import Rule
from keras_dist.layout.tensor_layout import TensorLayout, axis_tuple, layout_error
from keras_dist.mesh.device_mesh import DeviceMesh, as_auto_mesh
from keras_dist.multihost.initialize import warn_unless_joined
from keras_dist.multihost.value_comparison import require_same_values
from keras_dist.passes.compiler_options import compiler_options
from keras_dist.sharding.activations import distribute_tensors
from keras_dist.sharding.lookups import Lookup
from keras_dist.sharding.resharding import to_compute_layout
from keras_dist.sharding.rows import axes_for_rows
from keras_dist.sharding.sequences import SequenceSharding
from keras_dist.sharding.weight_layouts import weight_layouts
from keras_dist.steps.microbatches import weights_are_gathered
from keras_dist.steps.options import StepOptions
from keras_dist.steps.rematerialization import current_rematerialization
from keras_dist.steps.step_gradients import reduced_later
from keras_dist.steps.traced_step import RowSharding
from keras_dist.steps.train_steps import TrainSteps
from keras_dist.tracing.traced_weights import TracedWeights
from keras_dist.variables.variable_layouts import describe_variable, is_on_mesh

BatchDimName = str | Sequence[str] | None


class Distribution(DistributionHooks, internals.KerasDistribution):
    """Chooses the layouts of variables, batches, and inputs and outputs of layers. Base class of all distributions.

    This class replicates variables and leaves the inputs and outputs of layers to the compiler. Subclasses override
    `get_variable_layout`, `get_compute_layout`, `get_update_layout`, `get_data_layout` and `get_tensor_layout`, which
    have no side effects. A distribution holds no model.

    Args:
        device_mesh: the mesh of devices.
        batch_dim_name: the mesh axis, or axes, that dim 0 of a batch is sharded over; `None` replicates batches.
        auto_shard_dataset: with several processes, whether every process passes the same global dataset, of which its
            devices take their rows. With `False` every process passes its own rows, any number of them, and the global
            batch consists of the rows of all processes.
        sequence_dim_name: the mesh axis, or axes, that dim 1 of a batch is sharded over (context parallelism).
        sequence_exchange: how devices that share a sequence exchange what attention needs: "all_to_all" over heads
            (Ulysses) or "all_gather" of keys and values. By default the one, or the combination, that sends the fewest
            bytes.
        step_options: how training steps are computed, for example in microbatches. By default as Keras does.

    Raises:
        TypeError: `step_options` is something else.
        ValueError: no mesh, a mesh with axes that are not of type `Auto`, or a batch or sequence axis that the mesh
            does not have or that is named twice, or an unknown exchange.
    """

    def __init__(
        self,
        device_mesh: keras.distribution.DeviceMesh | jax.sharding.Mesh,
        batch_dim_name: BatchDimName = None,
        auto_shard_dataset: bool = True,
        sequence_dim_name: BatchDimName = None,
        sequence_exchange: str | None = None,
        step_options: StepOptions | None = None,
    ):
        self._device_mesh = as_auto_mesh(device_mesh)
        batch_axes, sequence_axes = axis_tuple(batch_dim_name), axis_tuple(sequence_dim_name)
        for argument, axes in (("batch_dim_name", batch_axes), ("sequence_dim_name", sequence_axes)):
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
        self._batch_dim_name, self._sequence_dim_name = batch_dim_name, sequence_dim_name
        self._sequence_exchange = sequence_exchange
        if not isinstance(step_options, StepOptions | None):
            raise TypeError(
                f"step_options must be a keras_dist.StepOptions, but got {step_options!r} "
                f"({type(step_options).__name__}). Pass, for example, keras_dist.StepOptions(microbatches=4)."
            )
        self._step_options = StepOptions() if step_options is None else step_options
        self._auto_shard_dataset = auto_shard_dataset
        self._num_processes = internals.num_processes()
        self._process_id = internals.process_id()
        self._is_multi_process = self._num_processes > 1  # Keras reads it under this name
        self.strict = False
        self._placer = BatchPlacer(self._device_mesh, batch_axes, sequence_axes)
        self._sequences = SequenceSharding(self._placer)
        self._comparisons: dict[bool, BatchComparison] = {}
        self._traced_weights = TracedWeights()
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
    def step_options(self) -> StepOptions:
        """How training steps are computed."""
        return self._step_options

    def with_step_options(self, step_options: StepOptions) -> Self:
        """Returns the same distribution with other step options.

        Args:
            step_options: how training steps are computed.

        Example:

        >>> from keras_dist import DataParallel, StepOptions
        >>> DataParallel().with_step_options(StepOptions(remat="full")).step_options
        StepOptions(remat='full')
        """
        changed = copy.copy(self)
        changed._step_options = step_options
        return changed

    def __repr__(self) -> str:
        options = f" step_options={self._step_options}" if self._step_options != StepOptions() else ""
        return f"<{type(self).__name__} device_mesh={self._device_mesh}{options}>"

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
            data_shape: the shape of one array of the batch. A 0-d array is replicated.
        """
        entries = [self._placer.batch_axes, self._placer.sequence_axes_for(data_shape)][: len(data_shape)]
        return TensorLayout([*entries, *[None] * (len(data_shape) - len(entries))], self._device_mesh)

    def get_variable_layout(self, variable) -> TensorLayout:
        """Returns the layout in which a variable is stored.

        Args:
            variable: a `keras.Variable`.

        Returns:
            The layout that the variable was created with, else that of the rule for its path, else a replicated one.

        Raises:
            ValueError: several rules match the path, or the rule does not fit the variable's shape.
        """
        layout = internals.variable_layout(variable)
        return self._stored_layout(variable) if layout is None else layout

    def get_compute_layout(self, variable) -> TensorLayout:
        """Returns the layout in which layers compute with a variable, by default the stored one.

        A variable is resharded to it when a layer reads it.

        Args:
            variable: a `keras.Variable`.
        """
        return self.get_variable_layout(variable)

    def get_update_layout(self, variable) -> TensorLayout:
        """Returns the layout of a variable's gradient and of its optimizer state, by default that of the variable.

        Args:
            variable: a `keras.Variable`.
        """
        return self.get_variable_layout(variable)

    def _stored_layout(self, variable) -> TensorLayout:
        """Returns the layout in which a variable is stored that was created without a layout."""
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
        """Returns the layout of a layer's inputs or outputs.

        Args:
            path: the path of the layer, followed by `/input` or `/output`.

        Returns:
            None by default, which leaves the layout to the compiler.
        """
        return None

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
            batch: nested tuples, lists and dicts of arrays with any number of rows, 0-d arrays and Python
                scalars; `None` stays `None`. With several processes, all of them call this, each with the global batch
                or with its own rows, depending on `auto_shard_dataset`.

        Returns:
            The same structure of `jax.Array`: dim 1 sharded over the sequence axes if they divide it, and dim 0
            sharded over the batch axes, or over the largest part of them
            that divides it.

        Example:

        >>> import numpy as np
        >>> from keras_dist import DataParallel
        >>> distribution = DataParallel()
        >>> x, y = distribution.distribute_batch((np.ones((16, 3)), np.ones(5)))
        >>> x.sharding.shard_shape(x.shape), y.sharding.shard_shape(y.shape)
        ((2, 3), (5,))
        """
        return self.place_single_batch(batch)[0]

    def batch_sharding(self, shape: Sequence[int]) -> jax.sharding.NamedSharding:
        """Returns the sharding with which an array of a batch is placed.

        Dim 0 is sharded over the batch axes, or over the largest part of them that divides it.

        Args:
            shape: the shape of the array.
        """
        return self._placer.sharding(shape)

    def rule(self, path: str) -> Rule | None:
        """Returns the key of a layout map and its layout for the path of a variable, None where it is replicated.

        Args:
            path: the path of a variable.
        """
        return None

    # Methods of `DistributionHooks`, which has their docstrings.

    def distribute_outputs(self, outputs: Any, layout: Any) -> Any:
        path = internals.current_path()
        inputs = self.get_tensor_layout(f"{path}/input") if path else None
        axes = self._placer.batch_axes, self._placer.sequence_axes
        return distribute_tensors(outputs, layout, *axes, gradient_layout=_gradient_layout(inputs, layout))

    def distribute_inputs(self, path: str, inputs: Any) -> Any:
        layout = self.get_tensor_layout(path)
        if not layout or not jax.tree.leaves(inputs):
            return inputs
        return distribute_tensors(inputs, layout, self._placer.batch_axes, self._placer.sequence_axes, role="input")

    def distribute_weight(self, variable: keras.Variable, value: Any) -> Any:
        stored, used, update = weight_layouts(variable, self)
        if weights_are_gathered.value and variable.trainable:
            stored = used
        if self.reduces_later(variable):
            update = None
        remat = current_rematerialization.value
        if remat is not None and update is not None and variable.trainable:
            value = remat.weight(value, update)
        value = to_compute_layout(value, stored, used, update, self._placer.batch_axes + self._placer.sequence_axes)
        self._traced_weights.add(value, used.axes)
        return value

    def reduces_later(self, variable: keras.Variable) -> bool:
        return id(variable) in reduced_later.value

    def lookup(self, layer: keras.layers.Embedding, indices_shape: Sequence[int], is_tied: bool) -> Lookup | None:
        table = model_structure.embedding_table(layer)
        layouts, reduces_later = weight_layouts(table, self), self.reduces_later(table)
        if weights_are_gathered.value and table.trainable:
            layouts = layouts._replace(stored=layouts.compute)
        lookup = Lookup(table.shape, indices_shape, layouts, self._placer, is_tied, reduces_later)
        if not lookup.has_sharded_rows:
            return None
        return lookup if lookup.exchanges_rows or model_structure.casts_rows_to_fewer_bytes(layer) else None

    def compute_attention(self, query, key, value, bias, mask, **options) -> Any:
        return attention(
            query,
            key,
            value,
            bias,
            mask,
            **options,
            mesh=self._device_mesh.backend_mesh,
            batch_axes=axes_for_rows(self._placer, query.shape[0]),
            sequence_axes=self._placer.sequence_axes,
            sequence_exchange=self._sequence_exchange,
            axes_of_weight=self._traced_weights.axes_of,
        )

    @property
    def train_steps(self) -> TrainSteps:
        return TrainSteps(self, self._step_options, self._placer)

    @property
    def step_rows(self) -> RowSharding:
        """How the steps of this distribution split rows over devices."""
        return RowSharding(self._placer, self._step_options, lambda variable: weight_layouts(variable, self).compute)

    @property
    def compiler_options(self) -> dict[str, str]:
        return compiler_options(self._device_mesh.backend_mesh)

    def compute_step(
        self, step: str, model: keras.Model, function: Callable, state: Any, batch: Any
    ) -> tuple[Any, Any]:
        return self.step_rows.compute(step, model, function, state, batch)

    def compute_call(self, layer: keras.Layer, function: Callable, state: Any, inputs: Any) -> Any:
        return self.step_rows.compute_call(layer, function, state, inputs)

    def distribute_step_inputs(self, model: keras.Model, inputs: Any) -> Any:
        return self._sequences.shard_inputs(model.name, inputs)

    def gather_sequences(self, tensors: Any) -> Any:
        return self._sequences.gather(tensors)

    def shard_sequences(self, tensors: Any) -> Any:
        return self._sequences.shard(tensors)

    @property
    def regathers(self) -> bool:
        return False

    def regathers_weights(self, layer: keras.Layer) -> bool:
        return False

    def distribute_call(self, model: keras.Model, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        weights = model.weights if model.built else []
        if not weights or not is_on_mesh(internals.variable_value(weights[0]), self._device_mesh.backend_mesh):
            return args, kwargs
        leaves, structure = jax.tree.flatten((args, kwargs))
        return jax.tree.unflatten(structure, [self._distribute_argument(leaf) for leaf in leaves])

    def _distribute_argument(self, leaf):
        is_concrete = isinstance(leaf, (np.ndarray, jax.Array)) and not isinstance(leaf, Tracer)
        if not is_concrete or leaf.ndim == 0 or internals.has_mask(leaf) or is_global(leaf):
            return leaf
        return self.distribute_batch(leaf)

    def make_input_pipeline(
        self,
        batches: Callable[[], Iterator],
        step: str | None,
        steps_per_epoch: int | None,
        position_of: Callable[[Iterator], Any] | None,
    ) -> InputPipeline:
        warning_for = functools.partial(self.step_rows.warning_for, step)
        settings = self.auto_shard_dataset, step, steps_per_epoch, position_of
        return InputPipeline(batches, self._placer, *settings, warning_for)

    def place_single_batch(self, batch: Any) -> tuple[Any, list[LocalRows | None]]:
        if not self.is_multi_process:
            return self._placer.place(batch), [None]
        is_global_batch = self.auto_shard_dataset
        is_first = is_global_batch not in self._comparisons
        comparison = self._comparisons.setdefault(
            is_global_batch, BatchComparison("single batches", is_global_batch, "one batch")
        )
        if is_global_batch:
            if is_first:
                comparison.compare_batch(batch)
            return self._placer.place(batch), [None]
        rows = comparison.compare_batch(batch)
        assert rows is not None  # single batches do not end
        return assemble(self._placer.place_local(batch, rows)), [local_rows(rows)]

    def outputs_of_process(self, outputs: Any, rows: list) -> Any:
        outputs = self._placer.replicate(outputs)
        if not rows or None in rows:
            return outputs
        return select_local_rows(jax.tree.map(np.asarray, outputs), rows)

    def check_processes_agree(self, step: str, model: keras.Model, variables: Iterable[keras.Variable]) -> None:
        if self.is_multi_process:
            settings = ("jit_compile", "run_eagerly", "steps_per_execution")
            facts = {name: getattr(model, name) for name in settings} | {
                "random seed": random_seed(),
                "distribution": repr(self),
                "order of devices in the mesh": order_of_devices(self._device_mesh.backend_mesh),
                "auto_shard_dataset": self.auto_shard_dataset,
            }
            require_same_model(step, model.name, [(v.path, describe_variable(v)) for v in variables], facts)

    def check_values_agree(self, model: keras.Model, variables: Iterable[keras.Variable], place: str) -> None:
        if self.is_multi_process:
            mesh = self._device_mesh.backend_mesh
            values = [(variable.path, internals.variable_value(variable)) for variable in variables]
            require_same_values(model.name, place, [pair for pair in values if is_on_mesh(pair[1], mesh)])

    def layout_rules(self) -> list[tuple[str, tuple]] | None:
        return None


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
