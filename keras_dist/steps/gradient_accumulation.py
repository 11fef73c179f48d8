"""Gradients that an optimizer accumulates over several batches, reduced once for each update of the weights.

With `optimizer.gradient_accumulation_steps=k`, Keras adds the gradient of each batch to variables of the optimizer, the
accumulators, and updates the weights after every k batches. To be added to a variable, the gradient of each batch must
be reduced. So here, while steps run, an accumulator is an array (shards of the batch, ...): each device adds its own
summands, and the step that updates the weights reduces their sum. Whatever reads the variables between steps, such as a
checkpoint, finds the sum that Keras has.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding

from keras_dist._keras import internals
from keras_dist._keras.train_step import TrainState, apply_gradients
from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.sharding.resharding import WeightLayouts, as_summands, reduce_summands, sharding_of_summands
from keras_dist.steps.step_gradients import StepGradients
from keras_dist.steps.step_state import changed
from keras_dist.steps.unreduced_gradients import Summands
from keras_dist.variables import global_reads


class GradientAccumulation:
    """How the train steps of a model accumulate gradients. Each weight that is trained has an accumulator."""

    def __init__(self, model: Any, accumulators: Sequence, layouts: Sequence[WeightLayouts], placer: BatchPlacer):
        self._model, self._optimizer, self._weights = model, model.optimizer, model.trainable_variables
        self._layouts, self._axes, self._num_shards = layouts, placer.batch_axes, placer.num_batch_shards
        self._shardings = [sharding_of_summands(each.compute, self._axes) for each in layouts]
        places = {id(variable): index for index, variable in enumerate(self._optimizer.variables)}
        self._places = [places[id(variable)] for variable in accumulators]  # in the state of the optimizer
        self._place_of_iterations = places[id(internals.iterations(self._optimizer))]
        self._split, self._join = self._compiled(as_summands), self._compiled(reduce_summands)

    # ------------------------------------------------------------------------------------------ between steps

    def specs(self, specs: Sequence[Any]) -> list[Any]:
        """Returns shapes, dtypes and shardings of an optimizer's state while steps run, given those of variables."""
        each = zip(self._accumulators_in(specs), self._shardings, strict=True)
        new = [spec.update(shape=(self._num_shards, *spec.shape), sharding=sharding) for spec, sharding in each]
        return self._replaced(specs, new)

    def shardings(self, shardings: Sequence[Any]) -> list[Any]:
        return self._replaced(shardings, self._shardings)

    def from_variables(self, values: Sequence[Any]) -> list[Any]:
        return self._replaced(values, self._split(self._accumulators_in(values)))

    def to_variables(self, values: Sequence[Any]) -> list[Any]:
        """Returns the values of an optimizer's variables, given its state after a step. All processes must call it."""
        summands = self._accumulators_in(values)
        if any(value.is_deleted() for value in summands):  # a step that failed
            return list(values)
        several = jax.process_count() > 1
        with global_reads.agreed("accumulated gradients") if several else contextlib.nullcontext():
            return self._replaced(values, self._join(summands))

    def _compiled(self, convert: Callable) -> Callable[[list], list]:
        def converted(values: list) -> list:
            each = zip(values, self._layouts, strict=True)
            return [convert(value, self._axes, layouts.compute, layouts.update) for value, layouts in each]

        return jax.jit(converted)

    # ------------------------------------------------------------------------------------------------ in a step

    def is_in(self, values: Sequence[Any]) -> bool:
        """Returns whether an optimizer's state is that of steps."""
        each = zip(self._accumulators_in(values), self._weights, strict=True)
        return any(value.ndim > len(weight.shape) for value, weight in each)

    def without(self, values: Sequence[Any]) -> list[Any]:
        """Returns an optimizer's state, as Keras takes it, with zeros in its accumulators."""
        return self._replaced(values, [jnp.zeros(weight.shape, weight.dtype) for weight in self._weights])

    def apply(self, state: TrainState, gradients: StepGradients, dtype: Any) -> tuple[list, list]:
        """Adds the gradients of a step to the accumulators, and updates the weights if it is time.

        Returns the new values of the weights and of the optimizer's variables, given the state before the step.
        Gradients are sent in `dtype`; None: the one that they were computed in.
        """
        steps, iterations = self._optimizer.gradient_accumulation_steps, state.optimizer[self._place_of_iterations]
        sums = self._added(self._accumulators_in(state.optimizer), gradients)
        state = state._replace(optimizer=self.without(state.optimizer))

        def update() -> tuple[list, list, list]:
            summands = [Summands(value, None) for value in sums]
            total = gradients._replace(summands=summands, axes=self._axes).reduced(self._layouts, dtype)
            with changed(is_update_unconditional=True):
                # Keras divides by the number of batches.
                weights, optimizer = apply_gradients(self._model, state, total)
            each = zip(weights, self._layouts, strict=True)
            # Otherwise, ZeRO-1 would gather the weights after this branch, in every step.
            weights = [with_sharding_constraint(weight, layouts.stored.backend_layout) for weight, layouts in each]
            return weights, self.without(optimizer), list(map(jnp.zeros_like, sums))

        def skip() -> tuple[list, list, list]:
            # Then Keras changes averages of weights, or weights, also in steps that do not update them.
            if self._optimizer.use_ema or any(weight.constraint is not None for weight in self._weights):
                weights, optimizer = apply_gradients(self._model, state, list(map(jnp.zeros_like, state.weights)))
                return list(weights), self.without(optimizer), sums
            counted = list(state.optimizer)
            counted[self._place_of_iterations] = iterations + 1
            return list(state.weights), counted, sums

        weights, optimizer, sums = jax.lax.cond((iterations + 1) % steps == 0, update, skip)
        return weights, self._replaced(optimizer, sums)

    def _added(self, accumulated: list, gradients: StepGradients) -> list:
        if gradients.axes != self._axes:  # a batch with too few rows, or with a number that the axes do not divide
            reduced = gradients.reduced(self._layouts)
            gradients = gradients._replace(summands=[Summands(None, gradient) for gradient in reduced])

        def added(value: Any, summands: Summands, layouts: WeightLayouts, sharding: NamedSharding) -> Any:
            own = summands.unreduced
            if summands.reduced is not None:
                rest = as_summands(summands.reduced, self._axes, layouts.compute, layouts.update)
                own = rest if own is None else own + rest
            return with_sharding_constraint(value + own.astype(value.dtype), sharding)

        return list(map(added, accumulated, gradients.summands, self._layouts, self._shardings))

    def _accumulators_in(self, values: Sequence[Any]) -> list[Any]:
        return [values[place] for place in self._places]

    def _replaced(self, values: Sequence[Any], accumulators: Sequence[Any]) -> list[Any]:
        replaced = list(values)
        for place, value in zip(self._places, accumulators, strict=True):
            replaced[place] = value
        return replaced
