"""Patches of the steps of `fit`, `evaluate` and `predict`: their functions, their batches, and optimizer state."""

import functools
import itertools
import math
import types
import weakref
from typing import Any

import jax
import keras

from keras_dist._keras import internals, model_structure
from keras_dist._keras.active_distribution import (
    INSTALLED,
    VARIABLES,
    active_distribution,
    distribution_of_model,
    remove_unused_patches,
    warn_of_idle_devices,
)
from keras_dist._keras.deferred_variables import require_values
from keras_dist._keras.internals import STEPS, JaxTrainer, current_distribution, loss_lib, trainer
from keras_dist._keras.running_fit import running_fit
from keras_dist._keras.training_state import put_values_back, state_variables, step_function, with_own_arrays
from keras_dist._patches.epoch_iterator import announce_step, check_values_agree
from keras_dist._report.user_warnings import warn
from keras_dist.data.batches import InputPipeline, select_local_rows
from keras_dist.data.executions import batches_of_execution
from keras_dist.diagnostics.layout_warning import check_rules
from keras_dist.multihost.failure_watch import begin_step
from keras_dist.multihost.program_comparison import compare_programs
from keras_dist.steps.looped_steps import looped
from keras_dist.steps.step_state import changed, step_state
from keras_dist.variables.variable_layouts import (
    check_placement,
    layout_under,
    optimizer_state_layout,
    place_new_seed_generators,
)


@INSTALLED.patch(trainer, "_distribute_data", issue="keras#21167")
def _distribute_data(original, distribution, data, *args, **kwargs):
    """Without it, 0-d arrays, batches that the batch axes do not divide, and a batch structure that changes fail."""
    return distribution.distribute_batch(data)


@INSTALLED.patch(JaxTrainer, "fit")
def _fit(original, distribution, self, *args, **kwargs):
    """Without it, callbacks do not learn that an exception has ended training, so signals stay without effect."""
    callbacks = kwargs.get("callbacks")
    for callback in callbacks if isinstance(callbacks, (list, tuple)) else ():
        if isinstance(callback, type):
            raise TypeError(f"callbacks has the class {callback.__name__}. Call it: {callback.__name__}(...).")
    with running_fit():
        history = original(self, *args, **kwargs)
    if active_distribution() not in (distribution, distribution_of_model(self)):
        warn(
            f"The distribution was changed while fit of {self.name!r} ran, from {distribution} to "
            f"{current_distribution()}, and fit kept the first one to its end. Change it between two calls of fit, and "
            "move the model with keras_dist.redistribute(model)."
        )
    check_values_agree(self, "the end of fit")  # after callbacks have seen the end of the last epoch
    return history


@INSTALLED.patch(JaxTrainer, "train_step")
def _train_step(original, distribution, self, state, data):
    """Without it, sums of gradients (`gradient_accumulation_steps`, tied tables) are all-reduced term by term."""
    return distribution.train_steps.compute(original, self, state, data)


@INSTALLED.patch(JaxTrainer, "_get_state_sharding_spec")
def _get_state_sharding_spec(original, distribution, self):
    """Without it, a step may not create variables of metrics, and accumulated gradients are not placed as variables."""
    weights, others, optimizer, metrics = original(self)
    accumulation = distribution.train_steps.accumulation(self) if optimizer else None
    if all(sharding.is_fully_replicated for sharding in metrics):
        metrics = distribution.batch_sharding(())  # of those that do not exist yet, too
    return weights, others, optimizer if accumulation is None else accumulation.shardings(optimizer), metrics


@INSTALLED.patch(JaxTrainer, "predict_step")
def _predict_step(original, distribution, self, state, data):
    """Without it, every device computes all rows of a batch that the batch axes do not divide."""
    return distribution.steps.compute("predict", self, functools.partial(original, self), state, data)


@INSTALLED.patch(internals.KerasOptimizer, "stateless_apply")
def _stateless_apply(original, distribution, self, optimizer_variables, grads, trainable_variables):
    """Without it, state in host memory (`offload`) cannot be computed with, and devices would hold it all at once."""
    apply = functools.partial(original, self)
    return distribution.train_steps.apply_gradients(apply, self, optimizer_variables, grads, trainable_variables)


@INSTALLED.patch(internals.jax_optimizer.JaxOptimizer, "_backend_apply_gradients")
def _backend_apply_gradients(original, distribution, self, grads, trainable_variables):
    """Without it, an update with accumulated gradients keeps the old state too, for batches without an update."""
    if not step_state().is_update_unconditional or self.use_ema:
        return original(self, grads, trainable_variables)
    grads = self._clip_gradients([gradient / self.gradient_accumulation_steps for gradient in grads])
    self._apply_weight_decay(trainable_variables)
    self._backend_update_step(grads, trainable_variables, self.learning_rate)


@INSTALLED.patch(loss_lib, "reduce_weighted_values")
def _reduce_weighted_values(
    original, distribution, values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None
):
    """Without it, a mean over the unmasked elements of each microbatch differs from that over the batch."""
    loss = original(values, sample_weight, mask, reduction, dtype)
    parts = step_state().losses
    return loss if parts is None else parts.corrected(loss, reduction, _divisor(values, sample_weight, mask, reduction))


@INSTALLED.patch(JaxTrainer.__base__, "_aggregate_additional_loss")
def _aggregate_additional_loss(original, distribution, self, loss):
    """Without it, losses that a layer adds for each row, which Keras sums, are divided by the microbatches."""
    total, parts = original(self, loss), step_state().losses
    return total if parts is None or not loss.shape else parts.corrected_sum(total, math.prod(loss.shape))


def _divisor(values, sample_weight, mask, reduction):
    """Returns what a mean was divided by, None if that is the number of its values."""
    if getattr(values, "ndim", 0) == 0 or (
        mask is None and (sample_weight is None or reduction != "mean_with_sample_weight")
    ):
        return None
    if reduction == "mean_with_sample_weight":
        dtype = "float32" if sample_weight is None else sample_weight.dtype
        return keras.ops.sum(loss_lib.apply_mask(sample_weight, mask, dtype, reduction))
    return keras.ops.sum(keras.ops.cast(mask, "float32"))


@INSTALLED.patch(JaxTrainer, "predict_on_batch", reason="`predict_on_batch` replicates its input over all devices")
def _predict_on_batch(original, distribution, self, x):
    x, rows = distribution.batches.place(x)
    outputs = original(self, x)
    return outputs if None in rows else select_local_rows(outputs, rows)


@INSTALLED.patch(JaxTrainer.__base__, "compile", issue="keras-hub#2806, keras-hub#2810")
def _compile(original, distribution, self, *args, **kwargs):
    """Without it, layout map rules that match no variable are ignored silently."""
    original(self, *args, **kwargs)
    if self.built:
        _check_layout_map(distribution, self)


# What was checked last, by distribution and model.
_checked: "weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[keras.Model, tuple]]" = weakref.WeakKeyDictionary()


def _check_layout_map(distribution: Any, model: keras.Model) -> None:
    rules = distribution.layout_rules()
    state = len(model.variables), rules  # LoRA adds variables later, and users add rules
    checked = _checked.setdefault(distribution, weakref.WeakKeyDictionary())
    if rules is not None and checked.get(model) != state:
        check_rules(model, distribution, distribution.strict, others=checked)
        checked[model] = state


@INSTALLED.patch(internals.KerasOptimizer, "add_variable_from_reference")
def _add_variable_from_reference(original, distribution, self, reference_variable, name=None, initializer="zeros"):
    """Without it, optimizer state has the layout, dtype and memory of its weight, and not its own (ZeRO-1, FSDP)."""
    if isinstance(reference_variable, keras.Variable):
        layout = layout_under(reference_variable, distribution)
        reference_variable = types.SimpleNamespace(
            path=reference_variable.path,
            shape=reference_variable.shape,
            dtype=distribution.train_steps.state_dtype(self, name, reference_variable.dtype),
            _layout=optimizer_state_layout(reference_variable, layout, distribution),
        )
    return original(self, reference_variable, name, initializer)


@INSTALLED.patch(trainer, "jit")
def _jit(original, distribution, *args, **kwargs):
    """Without it, processes that run different programs train with wrong numbers, or abort; XLA:CPU computes NaN for
    convolutions in bfloat16; each of the steps of an execution is a call of its own.
    """
    if "donate_argnums" not in kwargs:  # how outputs are concatenated
        return original(*args, **kwargs)
    if not keras.config.is_nnx_enabled():  # then it is `nnx.jit`, which has no options
        kwargs["compiler_options"] = distribution.steps.compiler_options
    state = step_state()
    if state.looped_step is not None:
        args = looped(args[0], state.looped_step == "predict"), *args[1:]
    function = original(*args, **kwargs)
    return function if state.compared_model is None else compare_programs(function, state.compared_model)


def _patch_make_function(step: str) -> None:
    """Declares the patch of `make_train_function`, `make_test_function` or `make_predict_function`.

    Keras compiles the shardings of the variables into the function and keeps it. The patch makes a new one when another
    distribution is active, and first checks that the variables are placed where that distribution places them.
    """
    attribute = f"{step}_function"

    @VARIABLES.patch(JaxTrainer, f"make_{step}_function")
    def make_function(original, self, force=False):
        """Without it, functions compiled for another distribution are used, and no misplaced variable is reported."""
        function = getattr(self, attribute)
        made_under = getattr(function, "made_under", None)
        distribution = active_distribution()
        if distribution is None:
            is_distributed = (force or function is None or made_under is not None) and _warn_if_not_active(self)
            original(self, force)
            if is_distributed and (made := getattr(self, attribute)) is not function:
                setattr(self, attribute, with_own_arrays(self, step, made))
            return None
        require_values(self, step)
        put_values_back(self)
        announce_step(step, self)
        is_of_user = function is not None and not str(getattr(function, "__module__", "")).startswith("keras")
        if force or (made_under is not distribution and not is_of_user):
            variables = list(itertools.chain.from_iterable(state_variables(self, step)))
            seeds = {id(state) for state in model_structure.seed_generator_states(self)}
            placed = [variable for variable in variables if id(variable) not in seeds]
            check_placement(self, placed, distribution)
            place_new_seed_generators(self, distribution)
            if reason := model_structure.why_not_compiled(self):
                warn(f"The operations of {self.name!r} run one by one, which is slow: {reason}")
            _check_layout_map(distribution, self)
            distribution.check_processes_agree(step, self, variables)
            compared = self.name if distribution.is_multi_process else None
            is_compiled = internals.compiles_steps(self)
            looped_step = step if is_compiled else None
            with distribution.steps.replaced(self, step), changed(compared_model=compared, looped_step=looped_step):
                original(self, force=True)
            keras_function, finish = _executing(getattr(self, attribute), self, step, is_compiled), None
            if distribution.is_multi_process:
                keras_function = _counted(keras_function)
                finish = _outputs_of_process if step == "predict" else None
            accumulation = distribution.train_steps.accumulation(self) if step == "train" else None
            function = step_function(self, step, keras_function, finish, accumulation)
            function.made_under = distribution  # pyright: ignore[reportFunctionMemberAccess]
            setattr(self, attribute, function)
        return None


for _step in STEPS:
    _patch_make_function(_step)


def _executing(function, model, step, is_compiled):
    """Wraps Keras's function of a step: it takes the batches of an execution."""
    if model.steps_per_execution == 1:
        return function
    before = None  # returns an output of the execution before

    def execute(state, iterator):
        nonlocal before
        count = model.steps_per_execution
        outputs, state = function(state, batches_of_execution(iterator, count, is_compiled))
        if count > 1 and is_compiled:
            if before is not None:  # JAX would run many executions ahead, with all their batches on the devices
                jax.block_until_ready(before())
            output = min(jax.tree.leaves(outputs), key=lambda leaf: leaf.size, default=None)
            # Predictions are large, and Keras keeps them as long as it needs.
            before = weakref.ref(output) if step == "predict" and output is not None else lambda: output
        return outputs, state

    return execute


def _counted(function):
    def begin_and_call(state, iterator):
        begin_step()
        return function(state, iterator)

    return begin_and_call


def _outputs_of_process(outputs, iterator):
    distribution = active_distribution()
    assert distribution is not None
    rows = iterator.take_local_rows() if isinstance(iterator, InputPipeline) else [None]
    return distribution.batches.outputs_of_process(outputs, rows)


def _warn_if_not_active(model: keras.Model) -> bool:
    """Returns whether variables of a model are distributed although no distribution is active, and then warns."""
    distribution = distribution_of_model(model)
    if distribution is None:
        warn_of_idle_devices(model.name)
    remove_unused_patches()
    if distribution is None or current_distribution() is not None:
        return False
    warn(
        f"No distribution is active in this thread, so the batches of {model.name!r} are not sharded and every "
        f"device computes all rows, although its variables are distributed by {distribution}. Call "
        "keras_dist.set_distribution(...) or stay inside `with distribution.scope():` while it runs, or call "
        "keras_dist.redistribute(model) to move it to one device."
    )
    return True
