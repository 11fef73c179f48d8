"""`TrainSteps`: how the train steps of a distribution are computed, as its step options say."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import keras

from keras_dist._keras import internals, model_structure
from keras_dist._keras.train_step import TrainState, apply_gradients, compute_gradients
from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.layout.tensor_layout import HOST_MEMORY, TensorLayout, is_in_host_memory
from keras_dist.sharding.resharding import WeightLayouts, weight_layouts
from keras_dist.steps.gradient_accumulation import GradientAccumulation
from keras_dist.steps.host_offload import MIN_OFFLOAD_BYTES, apply_with_state_on_host, require_host_memory
from keras_dist.steps.microbatches import Microbatches
from keras_dist.steps.options import StepOptions
from keras_dist.steps.rematerialization import rematerializing
from keras_dist.steps.step_gradients import gradients_of_batch, row_axes
from keras_dist.steps.step_state import StepState, changed, step_state
from keras_dist.variables.variable_layouts import layout_under, optimizer_state_layout, optimizer_state_owners

# The attribute of an optimizer with the fraction of a state variable that a step keeps, by the name of the variable.
_KEPT = {
    "momentum": ("beta_1", "momentum"),
    "velocity": ("beta_2", "rho"),
    "norm": ("beta_2",),
    "average_gradient": ("rho",),
    "accumulated_grad": ("rho",),
    "accumulated_delta_var": ("rho",),
}


class TrainSteps:
    def __init__(self, distribution: Any, options: StepOptions, placer: BatchPlacer):
        self._distribution, self._options, self._placer = distribution, options, placer

    def state_dtype(self, optimizer: keras.optimizers.Optimizer, name: str | None, dtype: str) -> str:
        """Returns the dtype of a state variable of an optimizer, given its name and the dtype of its weight.

        A moving average keeps a fraction of its value in each step, and what a step adds is lost if it is less than the
        precision of the dtype. Sums, and averages of weights, keep the dtype of their weight.

        >>> steps = kd.DataParallel(step_options=kd.StepOptions(optimizer_state_dtype="bfloat16")).train_steps
        >>> adam = keras.optimizers.Adam(beta_1=0.9, beta_2=0.999)  # bfloat16 has a precision of 1/128
        >>> [steps.state_dtype(adam, name, "float32") for name in ("momentum", "velocity")]
        ['bfloat16', 'float32']
        """
        wanted = self._options.optimizer_state_dtype
        if wanted is None or "float" not in dtype:
            return dtype
        attributes = ("beta_2",) if isinstance(optimizer, keras.optimizers.Lion) else _KEPT.get(name or "", ())
        kept = [getattr(optimizer, attribute, None) for attribute in attributes]
        fractions = [fraction for fraction in kept if isinstance(fraction, (int, float))]
        return wanted if fractions and 1 - fractions[0] >= float(jnp.finfo(wanted).eps) else dtype

    def state_layout(self, variable: Any, layout: Any) -> Any:
        """Returns the layout of the optimizer state of a variable, given that of its update."""
        is_small = internals.stored_bytes(variable) <= MIN_OFFLOAD_BYTES
        if is_small or not isinstance(layout, TensorLayout) or "optimizer" not in self._options.offload:
            return layout
        require_host_memory(self._distribution.device_mesh)
        return TensorLayout(layout.axes, layout.device_mesh, HOST_MEMORY)

    @contextlib.contextmanager
    def scope(self, model: keras.Model) -> Iterator[StepState]:
        """Traces the train step of a model in a block, also one that the user defines."""
        wanted, optimizer = self._options.optimizer_state_dtype, model.optimizer
        if wanted is not None and all(str(variable.dtype) != wanted for variable in optimizer.variables):
            raise ValueError(
                f"optimizer_state_dtype={wanted!r} has no effect: {type(optimizer).__name__} was built without it, or "
                "has no moving average that a step changes by more than the precision of that dtype. Set the "
                "distribution before model.compile, use an optimizer with momentum, or leave the option out."
            )
        with (
            rematerializing(model, self._options, self._placer) as found,
            changed(rematerialization=found, with_options=[]) as state,
        ):
            yield state

    def compute(self, keras_train_step: Callable, model: keras.Model, state: tuple, batch: Any) -> tuple[Any, tuple]:
        """Returns logs and new state, as Keras's function does, of a train step that is being traced."""
        state, accumulation, kept = TrainState(*state), self.accumulation(model), self._tied_tables(model, batch)
        if accumulation is not None and not accumulation.is_in(state.optimizer):
            accumulation = None  # called in a loop of the user's own, with the values of the variables
        splits, improve = self._options.splits_gradients, self._distribution.steps.improve_of(model)
        if (found := step_state().with_options) is not None:
            found.append(True)
        if not splits and accumulation is None and not kept:
            if improve is None:
                return keras_train_step(model, state, batch)
            gradients, (logs, others, metrics) = compute_gradients(model, state, batch, 1.0, improve)
            weights, optimizer = apply_gradients(model, state, gradients)
            return logs, (weights, others, optimizer, metrics)
        layouts, for_keras = self._layouts(model), state
        if accumulation is not None:
            for_keras = state._replace(optimizer=accumulation.without(state.optimizer))
            is_split = row_axes(batch, self._placer) == self._placer.batch_axes
            kept = set(map(id, model.trainable_variables)) if is_split else set()
        if splits:
            gradients = Microbatches(model, for_keras, batch, self._options, self._placer, layouts, improve).gradients()
        else:
            gradients = gradients_of_batch(model, for_keras, batch, self._placer, kept, improve)
        new_state, dtype = gradients.state._replace(optimizer=state.optimizer), self._options.reduce_dtype
        if accumulation is not None:
            weights, optimizer = accumulation.apply(new_state, gradients, dtype)
        else:
            weights, optimizer = apply_gradients(model, new_state, gradients.reduced(layouts, dtype))
        return gradients.logs, tuple(new_state._replace(weights=weights, optimizer=optimizer))

    def accumulation(self, model: keras.Model) -> GradientAccumulation | None:
        """Returns how steps accumulate gradients; None: as Keras does, or not at all."""
        is_possible = self._options.reduce_gradients == "update" and "optimizer" not in self._options.offload
        if not is_possible or self._placer.num_batch_shards == 1 or not internals.computes_train_step_as_keras(model):
            return None
        accumulators = internals.gradient_accumulators(model.optimizer, model.trainable_variables)
        if accumulators is None:
            return None
        return GradientAccumulation(model, accumulators, self._layouts(model), self._placer)

    def _layouts(self, model: keras.Model) -> list[WeightLayouts]:
        return [weight_layouts(variable, self._distribution) for variable in model.trainable_variables]

    def _tied_tables(self, model: keras.Model, batch: Any) -> set[int]:
        """Returns the ids of the embedding tables that are trained and that layers also multiply with.

        XLA reduces the gradients of both uses. Not under context parallelism, where both would be reduced over the
        sequence axes nevertheless, apart from the batch axes.
        """
        if self._placer.num_batch_shards == 1 or self._placer.sequence_axes or not row_axes(batch, self._placer):
            return set()
        return model_structure.tied_tables(model) & set(map(id, model.trainable_variables))

    def apply_gradients(
        self, apply: Callable, optimizer: keras.optimizers.Optimizer, state: Sequence, gradients: Any, weights: Any
    ) -> tuple[list, list]:
        """Returns new weights and optimizer state, as Keras's function `apply(state, gradients, weights)` does."""
        if "optimizer" not in self._options.offload:
            return apply(state, gradients, weights)
        # The optimizer in a `LossScaleOptimizer` gets its variables, in a scope that has their values.
        state = [value.value if isinstance(value, keras.Variable) else value for value in state]
        owners = optimizer_state_owners(optimizer, internals.weights_of_optimizer(optimizer))

        def layout_on_host(variable: keras.Variable) -> TensorLayout | None:
            owner = owners.get(id(variable))
            if owner is None:
                return None
            layout = optimizer_state_layout(owner, layout_under(owner, self._distribution), self._distribution)
            return layout if is_in_host_memory(layout) else None

        return apply_with_state_on_host(
            apply, state, gradients, weights, list(map(layout_on_host, optimizer.variables))
        )
