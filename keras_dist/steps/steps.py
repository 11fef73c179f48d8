"""The steps of models under a distribution: traced to a program, which passes rewrite, on rows that are split."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.lax import with_sharding_constraint

from keras_dist._keras.active_distribution import active_distribution
from keras_dist._keras.internals import StatelessScope, attributes_replaced, get_keras_mask, set_keras_masks
from keras_dist._keras.train_step import Improve
from keras_dist._keras.training_state import state_variables
from keras_dist._report.user_warnings import warn
from keras_dist.data.batch_placement import BatchPlacer, UnequalShards, is_sparse
from keras_dist.layout.tensor_layout import axis_tuple
from keras_dist.mixtures.figures import summed_up
from keras_dist.mixtures.recognition import DENSE, MixtureCall
from keras_dist.passes.registry import FORWARD_PASSES, ON_ONE_DEVICE, PASSES, ForwardPass
from keras_dist.passes.rewriting import Pass, rewritten, rewritten_before_gradients
from keras_dist.passes.step_program import DimAxes, StepProgram, batch_axes
from keras_dist.sharding.resharding import weight_layouts
from keras_dist.steps.effect_checks import check_expert_axes, check_expert_options, check_loss_chunk
from keras_dist.steps.host_offload import with_blocks_on_host
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

# Otherwise JAX 0.12 inlines the function when it is lowered, and programs that users trace have a call.
_INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)

_choose_remat: Callable[[Any, Any, Any], Any] | None = None  # compiles steps, as a room above this one does


def choose_remat_by(function: Callable[[Any, Any, Any], Any]) -> None:
    """Sets what resolves `remat="auto"`: a function of distribution, model and batch to the distribution to use."""
    global _choose_remat
    _choose_remat = function


def stateless_step(model: Any, step: str) -> Callable:
    """Returns the function from state and batch to outputs and new state that Keras compiles for a step."""
    if step == "generate":
        return functools.partial(_generated, model)
    if step != "predict":
        distribution = active_distribution()
        return getattr(model, f"{step}_step") if distribution is None else distribution.steps.of_model(model, step)

    def predict_step(state, data):
        outputs, non_trainable_variables = model.predict_step(state, data)
        return outputs, (state[0], non_trainable_variables)

    return predict_step


def _generated(model: Any, state: Any, batch: Any) -> Any:
    """Generates tokens as the function that KerasHub compiles does, until all rows are full."""
    variables = itertools.chain.from_iterable(state_variables(model, "generate"))
    with StatelessScope(zip(variables, itertools.chain(*state), strict=True)):
        return model.generate_step(batch[0], None), state


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
        original = getattr(model, f"{step}_step")
        has_options = step == "train" and self._options != StepOptions()

        @functools.wraps(original)
        def computed(state: Any, batch: Any) -> Any:
            function = original
            if has_options:
                function = functools.partial(_compute_with_options, self._chosen(model, batch), model, original)
            return self.compute(step, model, function, state, batch)

        return computed

    def _chosen(self, model: Any, batch: Any) -> Any:
        """Returns the distribution, with `remat="auto"` resolved."""
        if self._options.remat != AUTO or _choose_remat is None:
            return self._distribution
        with nothing_alive():
            return _choose_remat(self._distribution, model, batch)

    def replaced(self, model: Any, step: str) -> contextlib.AbstractContextManager:
        """Replaces a model's train or test step by that of the distribution, for a block in which Keras compiles it.

        Keras looks the predict step up later, while it traces. A patch replaces that, unless models override it.
        """
        if step == "predict":
            return contextlib.nullcontext()
        return attributes_replaced(model, **{f"{step}_step": self.of_model(model, step)})

    def axes_in_step(self, step: str, rows: int) -> tuple[str, ...]:
        return self._placer.axes_in_step(rows, self._unequal_shards(step))

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
        if step_state().is_in_step or any(map(is_sparse, leaves)):
            return function(state, batch)
        if not all(isinstance(leaf, Tracer) for leaf in leaves):
            return function(state, batch if self._is_alone else self._placer.replicate(batch))
        rows = _num_rows(leaves)
        unequal, is_improved = self._unequal_shards(step), step != "train"  # nothing else is differentiated
        splits = self._placer.can_split_unequally(rows, unequal)
        known = {"unequal_shards": unequal if splits else UnequalShards.NONE, "weights": TracedWeights()}

        with changed(is_in_step=True, is_improved=is_improved, **known):
            traced = _Traced(function, state, batch)
            forward = [each for each in self._forward_passes if each.may_find(traced.jaxpr)]
            if FORWARD_PASSES["experts"] not in forward:
                self._check_experts((), model)
            if FORWARD_PASSES["chunked_loss"] not in forward and not is_improved:
                check_loss_chunk((), self._options)
            if forward and not is_improved:
                with changed(forward_passes=forward, weights=TracedWeights()):
                    traced = _Traced(function, state, batch)
        if splits:
            batch = structure.unflatten([self._placer.split(leaf, rows) for leaf in leaves])
        program = self._program(traced.jaxpr, model, state, leaves, self.axes_in_step(step, rows))
        if is_improved:
            program = self._improved(program, forward, model)
        outputs, state = traced.evaluate(rewritten(program, self._passes), state, batch)
        return jax.tree.map(functools.partial(self._joined, rows), outputs) if splits else outputs, state

    def improve_of(self, model: Any) -> Improve:
        """Returns what forward passes make of functions of a train step's state and batch; None if there are none."""
        passes = step_state().forward_passes

        def improve(function: Callable, state: Any, batch: Any) -> Any:
            with changed(is_improved=True):
                traced = _Traced(function, state, batch)
            arrays = jax.tree.leaves(batch)  # of a microbatch, for example
            axes = self.axes_in_step("train", _num_rows(arrays))
            capacity = self._options.expert_capacity
            figures = [] if step_state().is_monitored or capacity is not None else None
            known = {"num_trained": len(state[0]), "is_trained": True, "figures": figures, "expert_capacity": capacity}
            program = self._program(traced.jaxpr, model, state, arrays, axes, **known)
            program = self._improved(program, passes, model)
            check_loss_chunk(program.losses, self._options)
            if not (names := program.figures):
                return traced.evaluate(program.jaxpr, state, batch)
            outputs, figures = traced.evaluate(program.jaxpr, state, batch, further=len(names))
            loss, (logs, *others) = outputs
            return loss, (logs | summed_up(zip(names, figures, strict=True)), *others)

        return improve if passes else None

    def compute_call(self, model: Any, function: Callable, state: Any, inputs: Any) -> Any:
        """Returns `function(state, inputs)`, an outermost call of a model in a train step or function of a user.

        Forward passes are asked about it. In a function that users compile themselves, so are the passes over steps,
        also about the gradients of single operations. `inputs` are nested; what is no array stays as it is.
        """
        current = step_state()
        forward, others = current.forward_passes, []
        if not current.is_in_step:
            forward, others = self._forward_passes, self._passes
        # Which output of a call is a loss, if any, is not known.
        forward = [each for each in forward if each is not FORWARD_PASSES["chunked_loss"]]
        leaves, structure = jax.tree.flatten(inputs)
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
        arrays = [leaves[index] for index in places]
        # Arguments that are differentiated without `jax.jit` are tracers of known arrays.
        is_compiled = arrays and all(isinstance(root_of(each), Tracer) for each in arrays)
        if not is_compiled or current.is_improved or not (forward or others):
            return function(state, inputs)

        def call(state: Any, given: tuple[list, list]) -> Any:
            replaced = dict(zip(places, given[0], strict=True))
            set_keras_masks(*given)
            with changed(is_improved=True):
                outputs = function(state, structure.unflatten([replaced.get(i, leaf) for i, leaf in enumerate(leaves)]))
            return outputs, list(map(get_keras_mask, jax.tree.leaves(outputs)))  # attributes of tracers, or None

        given = arrays, list(map(get_keras_mask, arrays))
        traced = _Traced(call, state, given)
        axes = self._placer.axes_for(_num_rows(arrays))
        # What is differentiated outside of train steps is not known: all that could be.
        known = {"num_trained": len(state[0]), "is_trained": current.is_in_step}
        program = self._program(traced.jaxpr, model, state, jax.tree.leaves(given), axes, **known)
        forward = [each for each in forward if each.may_find(traced.jaxpr)]
        # A step may call other models, such as a teacher without experts.
        is_checked = current.is_in_step and FORWARD_PASSES["experts"] in forward
        program = self._improved(program, forward, model if is_checked else None)
        outputs, masks = traced.evaluate(rewritten_before_gradients(program, others), state, given)
        set_keras_masks(jax.tree.leaves(outputs), masks)
        return outputs

    @property
    def _forward_passes(self) -> Sequence[ForwardPass]:
        options = self._options
        left_out = {"experts": options.experts == "dense", "chunked_loss": options.loss_chunk is None}
        return [each for name, each in FORWARD_PASSES.items() if not left_out.get(name)]

    def _improved(self, program: StepProgram, passes: Sequence[ForwardPass], checked: Any) -> StepProgram:
        """Returns what passes make of a program. `checked`: the model whose step has to have what options name."""
        for each in passes:
            program = replace(program, jaxpr=each.improve(program))
        if step_state().rematerialization is not None:
            program = replace(program, jaxpr=with_blocks_on_host(program.jaxpr))
        if (calls := step_state().calls) is not None:
            calls.extend((*program.mixtures, *(each for each in program.losses if each.chunk)))
        self._warn_of_dense(program.mixtures)
        if checked is not None:
            self._check_experts(program.mixtures, checked)
        return program

    def _warn_of_dense(self, mixtures: Sequence[MixtureCall]) -> None:
        """Warns, once for each reason, of layers that compute experts that tokens have not chosen."""
        for mixture in mixtures:
            if mixture.form == DENSE and mixture.reason not in self._distribution.warned:
                self._distribution.warned.add(mixture.reason)
                layer = f"Layer {mixture.layer!r}" if mixture.layer else "A layer"
                warn(
                    f"{layer} computes all {mixture.num_experts} experts for each token, which chooses "
                    f"{mixture.num_chosen}: {mixture.reason}. Write its sum with keras_dist.experts, or accept it with "
                    "StepOptions(experts='dense')."
                )

    def _check_experts(self, mixtures: Sequence[MixtureCall], model: Any) -> None:
        if self._options.experts == "dense":
            return
        check_expert_options(mixtures, self._options)
        check_expert_axes(mixtures, model, self._distribution)

    def _program(
        self, jaxpr: Any, model: Any, state: Any, arrays: list, row_axes: tuple[str, ...], **known: Any
    ) -> StepProgram:
        """Returns a program of a step's state and arrays of a batch; `known`: further fields."""
        rows = _num_rows(arrays)
        axes = [batch_axes(each, rows, row_axes, self._placer) for each in arrays]
        expert_axes = axis_tuple(self._distribution.expert_dim_name)
        input_axes = [*self._axes_of_state(model, state), *axes]
        known |= {"num_state": len(input_axes) - len(arrays), "loss_chunk": self._options.loss_chunk}
        return StepProgram(jaxpr, self._placer, row_axes, input_axes, expert_axes=expert_axes, **known)

    def _axes_of_state(self, model: Any, state: Any) -> list[DimAxes]:
        """Returns the axes of the dims of each array of a step's state; only those of weights are known."""
        weights = model.trainable_variables, model.non_trainable_variables
        axes: list[DimAxes] = []
        for variables, values in zip(weights, state, strict=False):
            layouts = [weight_layouts(variable, self._distribution).compute.axes for variable in variables]
            known = [tuple(map(axis_tuple, each)) for each in layouts]
            axes += known if len(known) == len(values) else [()] * len(values)
        return axes + [()] * (len(jax.tree.leaves(state)) - len(axes))

    @property
    def _is_alone(self) -> bool:
        return self._placer.device_mesh.backend_mesh.size == 1

    @property
    def _passes(self) -> list[Pass]:
        """The passes over whole steps. One device needs few."""
        names = ON_ONE_DEVICE if self._is_alone else PASSES
        return [PASSES[name] for name in names if name not in self._options.without_passes]

    def _unequal_shards(self, step: str) -> UnequalShards:
        if step == "train" and self._options.splits_gradients:  # each device computes gradients of its rows
            return UnequalShards.NONE
        is_without_losses = step in ("predict", "generate")
        return UnequalShards.OVER_ANY_AXES if is_without_losses else UnequalShards.OVER_ALL_AXES

    def _joined(self, rows: int, output: Any) -> Any:
        # Logs may be Python numbers, which have no shape. Without a split before, each device would compute all rows.
        output = self._placer.split(jnp.asarray(output), rows)
        return with_sharding_constraint(output, self._placer.sharding(output.shape))


def _num_rows(arrays: list) -> int:
    return next((array.shape[0] for array in arrays if array.ndim), 0)


def _compute_with_options(distribution: Any, model: Any, step: Callable, state: Any, batch: Any) -> Any:
    """Returns `step(state, batch)` of a train step. One that the user defines may not have all options."""
    with distribution.train_steps.scope(model) as current:
        outputs = step(state, batch)
    options = distribution.step_options
    if (options.splits_gradients or options.loss_chunk) and not current.with_options:
        raise OptionWithoutEffectError(
            "microbatches" if options.splits_gradients else "loss_chunk",
            f"{type(model).__name__}.train_step computes its gradients itself, so {options} would have "
            "no effect. Call super().train_step(state, data) in it, override compute_loss instead, or leave "
            "out the options.",
        )
    return outputs


class _Traced:
    """A function that is traced once. What is recorded of its calls is kept if it is evaluated."""

    def __init__(self, function: Callable, *arguments: Any):
        self._calls: list | None = None if step_state().calls is None else []
        self._function = jax.jit(lambda *arguments: function(*arguments), inline=_INLINE)  # JAX keeps its program
        with changed(calls=self._calls):
            traced = self._function.trace(*arguments)
        self.jaxpr, self._structure = traced.jaxpr, jax.tree.structure(traced.out_info)
        if len(self.jaxpr.in_avals) > len(jax.tree.leaves(arguments)):  # it reads values of a trace around it, too
            self.jaxpr = jax.make_jaxpr(self._function)(*arguments)  # has these as constants, not as inputs

    def evaluate(self, program: Any, *arguments: Any, further: int = 0) -> Any:
        """Returns what a program computes: the function's own, or one that was made of it.

        With `further` outputs that were added to the function's, returns these in a list, too.
        """
        if (calls := step_state().calls) is not None:
            calls.extend(self._calls or ())
        if program is self.jaxpr:
            return self._function(*arguments)
        values = jaxpr_as_fun(program)(*jax.tree.leaves(arguments))
        count = len(values) - further
        outputs = jax.tree.unflatten(self._structure, values[:count])
        return (outputs, values[count:]) if further else outputs
