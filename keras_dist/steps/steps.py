"""The steps of models under a distribution: traced to a program, which passes rewrite, on rows that are split."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding, PartitionSpec

from keras_dist._keras.active_distribution import active_distribution
from keras_dist._keras.internals import attributes_replaced, get_keras_mask, set_keras_mask
from keras_dist._keras.train_step import Improve
from keras_dist.data.batch_placement import BatchPlacer, is_sparse
from keras_dist.layout.tensor_layout import axis_tuple
from keras_dist.passes.registry import FORWARD_PASSES, PASSES
from keras_dist.passes.rewriting import Pass, rewritten, rewritten_before_gradients
from keras_dist.passes.step_program import DimAxes, StepProgram, batch_axes
from keras_dist.sharding.resharding import weight_layouts
from keras_dist.steps.options import AUTO, OptionWithoutEffectError, StepOptions
from keras_dist.steps.step_state import changed, nothing_alive, step_state
from keras_dist.tracing.traced_values import TracedWeights, root_of

# XLA:CPU of JAX 0.11 and 0.12 fuses some convolutions in bfloat16, the layers between them and a mean of the result, as
# at the end of a network for images, into one call of its library YNNPACK, which computes NaN. So the library is
# restricted to single products and convolutions.
_SINGLE_CALLS = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,"
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
}

_choose_remat: Callable[[Any, Any, Any], Any] | None = None  # compiles steps, as a room above this one does


def choose_remat_by(function: Callable[[Any, Any, Any], Any]) -> None:
    """Sets what resolves `remat="auto"`: a function of distribution, model and batch to the distribution to use."""
    global _choose_remat
    _choose_remat = function


def stateless_step(model: Any, step: str) -> Callable:
    """Returns the function from state and batch to outputs and new state that Keras compiles for a step."""
    if step != "predict":
        distribution = active_distribution()
        return getattr(model, f"{step}_step") if distribution is None else distribution.steps.of_model(model, step)

    def predict_step(state, data):
        outputs, non_trainable_variables = model.predict_step(state, data)
        return outputs, (state[0], non_trainable_variables)

    return predict_step


class Steps:
    """How a distribution computes the steps of models.

    JAX places arrays in equal shards only: 13 rows on 8 devices are replicated, and each device would compute all 13.
    A compiled step may have unequal shards. So the step begins with a constraint that splits the rows, here into
    shards of 2, 2, 2, 2, 2, 2, 1 and 0 rows, each padded to 2 by XLA, and what leaves the step is placed as batches
    are.
    """

    def __init__(self, distribution: Any, options: StepOptions, placer: BatchPlacer):
        self._distribution, self._options, self._placer = distribution, options, placer

    @property
    def compiler_options(self) -> dict[str, str]:
        """Options of XLA, by name, with which it compiles right numbers."""
        platform = self._placer.device_mesh.backend_mesh.devices.flat[0].platform
        return _SINGLE_CALLS if (0, 11) <= jax.__version_info__ < (0, 13) and platform == "cpu" else {}

    def of_model(self, model: Any, step: str) -> Callable:
        """Returns a model's train or test step, computed as the distribution does."""
        original = function = getattr(model, f"{step}_step")
        if step == "train" and self._options != StepOptions():
            function = functools.partial(self._compute_with_options, model, original)

        @functools.wraps(original)
        def computed(state: Any, batch: Any) -> Any:
            return self.compute(step, model, function, state, batch)

        return computed

    def _compute_with_options(self, model: Any, step: Callable, state: Any, batch: Any) -> Any:
        """Returns `step(state, batch)` of a train step. One that the user defines may not have all options."""
        chosen = self._distribution
        if self._options.remat == AUTO and _choose_remat is not None:
            with nothing_alive():
                chosen = _choose_remat(chosen, model, batch)
        with chosen.train_steps.scope(model) as current:
            outputs = step(state, batch)
        if self._options.splits_gradients and not current.with_options:
            raise OptionWithoutEffectError(
                "microbatches",
                f"{type(model).__name__}.train_step computes its gradients itself, so {self._options} would have "
                "no effect. Call super().train_step(state, data) in it, override compute_loss instead, or leave "
                "out the options.",
            )
        return outputs

    def replaced(self, model: Any, step: str) -> contextlib.AbstractContextManager:
        """Replaces a model's train or test step by that of the distribution, for a block in which Keras compiles it.

        Keras looks the predict step up later, while it traces. A patch replaces that, unless models override it.
        """
        if step == "predict":
            return contextlib.nullcontext()
        return attributes_replaced(model, **{f"{step}_step": self.of_model(model, step)})

    def axes_in_step(self, step: str, rows: int) -> tuple[str, ...]:
        return self._placer.axes_in_step(rows, self._splits(step, rows))

    def rows_of_device(self, step: str, rows: int) -> int:
        """Returns how many rows the devices with most of them compute in a step."""
        sizes = self._placer.device_mesh.axis_sizes
        return -(-rows // math.prod(sizes[name] for name in self.axes_in_step(step, rows)))

    def warning_for(self, step: str | None, rows: int) -> str | None:
        """Returns, once, a warning if train steps on batches of a number of rows leave devices idle or repeat rows."""
        return self._placer.warning_for(rows, self.axes_in_step(step, rows)) if step == "train" else None

    def compute(self, step: str, model: Any, function: Callable, state: Any, batch: Any) -> tuple[Any, Any]:
        """Returns `function(state, batch)`, outputs and new state of a step that is being traced.

        The function is traced to a program, which then runs on the rows that are split, with what XLA cannot partition
        in another form. XLA may choose unequal shards, of a slice for example, where those of the rows are equal. A
        step that is not compiled has no program, so each device computes the whole batch.
        """
        leaves, structure = jax.tree.flatten(batch, is_leaf=is_sparse)
        is_alone = self._placer.device_mesh.backend_mesh.size == 1
        if step_state().is_in_step or is_alone or any(map(is_sparse, leaves)):
            return function(state, batch)
        if not all(isinstance(leaf, Tracer) for leaf in leaves):
            return function(state, self._placer.replicate(batch))
        rows = _num_rows(leaves)
        splits = self._splits(step, rows)
        is_improved = step != "train"  # nothing is differentiated
        with changed(is_in_step=True, is_improved=is_improved, splits_rows=splits, weights=TracedWeights()):
            jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(state, batch)
        if splits:
            batch = structure.unflatten([self._split(leaf, rows) for leaf in leaves])
        program = self._program(jaxpr, model, state, leaves, self.axes_in_step(step, rows))
        passes = [*(self._selected(FORWARD_PASSES) if is_improved else []), *self._selected(PASSES)]
        outputs, state = _evaluated(rewritten(program, passes), shapes, state, batch)
        return jax.tree.map(self._joined, outputs) if splits else outputs, state

    def improve_of(self, model: Any, batch: Any) -> Improve:
        """Returns what forward passes make of functions of a train step's state and batch; None if there are none."""
        passes, arrays = self._selected(FORWARD_PASSES), jax.tree.leaves(batch, is_leaf=is_sparse)
        if not passes or not all(isinstance(array, Tracer) for array in arrays):
            return None

        def improve(function: Callable, state: Any, batch: Any) -> Any:
            with changed(is_improved=True):
                jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(state, batch)
            arrays = jax.tree.leaves(batch)  # of a microbatch, for example
            program = self._program(jaxpr, model, state, arrays, self.axes_in_step("train", _num_rows(arrays)))
            return _evaluated(rewritten(program, passes), shapes, state, batch)

        return improve

    def compute_call(self, model: Any, function: Callable, state: Any, inputs: Any) -> Any:
        """Returns `function(state, inputs)`, an outermost call of a model in a train step or function of a user.

        Forward passes are asked about it. In a function that users compile themselves, so are the passes over steps,
        also about the gradients of single operations. If they change nothing, the function itself is called. `inputs`
        are nested; what is no array stays as it is.
        """
        current = step_state()
        forward, others = self._selected(FORWARD_PASSES), [] if current.is_in_step else self._selected(PASSES)
        leaves, structure = jax.tree.flatten(inputs)
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
        arrays = [leaves[index] for index in places]
        # Arguments that are differentiated without `jax.jit` are tracers of known arrays.
        is_compiled = arrays and all(isinstance(root_of(each), Tracer) for each in arrays)
        is_alone = self._placer.device_mesh.backend_mesh.size == 1
        if not is_compiled or current.is_improved or is_alone or not (forward or others):
            return function(state, inputs)
        attention: list = []

        def traced(state: Any, arrays: list) -> Any:
            replaced = dict(zip(places, arrays, strict=True))
            with changed(is_improved=True, attention=None if current.attention is None else attention):
                outputs = function(state, structure.unflatten([replaced.get(i, leaf) for i, leaf in enumerate(leaves)]))
            return outputs, list(map(get_keras_mask, jax.tree.leaves(outputs)))  # attributes of tracers, or None

        jaxpr, shapes = jax.make_jaxpr(traced, return_shape=True)(state, arrays)
        program = self._program(jaxpr, model, state, arrays, self._placer.axes_for(_num_rows(arrays)))
        better = rewritten_before_gradients(program, forward, others)
        if better is jaxpr:
            return function(state, inputs)
        if current.attention is not None:
            current.attention.extend(attention)
        outputs, masks = _evaluated(better, shapes, state, arrays)
        for leaf, mask in zip(jax.tree.leaves(outputs), masks, strict=True):
            if mask is not None:
                set_keras_mask(leaf, mask)
        return outputs

    def _program(self, jaxpr: Any, model: Any, state: Any, arrays: list, row_axes: tuple[str, ...]) -> StepProgram:
        rows = _num_rows(arrays)
        axes = [batch_axes(each, rows, row_axes, self._placer) for each in arrays]
        return StepProgram(jaxpr, self._placer, row_axes, [*self._axes_of_state(model, state), *axes])

    def _axes_of_state(self, model: Any, state: Any) -> list[DimAxes]:
        """Returns the axes of the dims of each array of a step's state; only those of weights are known."""
        weights = model.trainable_variables, model.non_trainable_variables
        axes: list[DimAxes] = []
        for variables, values in zip(weights, state, strict=False):
            layouts = [weight_layouts(variable, self._distribution).compute.axes for variable in variables]
            known = [tuple(map(axis_tuple, each)) for each in layouts]
            axes += known if len(known) == len(values) else [()] * len(values)
        return axes + [()] * (len(jax.tree.leaves(state)) - len(axes))

    def _selected(self, passes: dict[str, Pass]) -> list[Pass]:
        return [each for name, each in passes.items() if name not in self._options.without_passes]

    def _splits(self, step: str, rows: int) -> bool:
        is_in_parts = step == "train" and self._options.splits_gradients  # each device computes gradients of its rows
        return self._placer.can_split_unequally(rows) and not is_in_parts

    def _split(self, leaf: Any, rows: int) -> Any:
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            return leaf
        spec = PartitionSpec(self._placer.batch_axes, *[PartitionSpec.UNCONSTRAINED] * (leaf.ndim - 1))
        return with_sharding_constraint(leaf, NamedSharding(self._placer.device_mesh.backend_mesh, spec))

    def _joined(self, output: Any) -> Any:
        # Logs may be Python numbers, which have no shape.
        return with_sharding_constraint(jnp.asarray(output), self._placer.sharding(np.shape(output)))


def _num_rows(arrays: list) -> int:
    return next((array.shape[0] for array in arrays if array.ndim), 0)


def _evaluated(program: Any, shapes: Any, *arguments: Any) -> Any:
    """Returns what a closed jaxpr computes, in the structure of `shapes`."""
    return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(program)(*jax.tree.leaves(arguments)))
