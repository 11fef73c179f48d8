"""What patches ask of a distribution."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import keras


class DistributionHooks(Protocol):
    """What patches ask of the active distribution.

    A class that inherits from this protocol is a distribution of this package; Keras's own distributions do not.
    `strategies.base.Distribution` implements it. Layouts are `keras.distribution.TensorLayout`s.
    """

    strict: bool
    """Whether likely mistakes in the layout map are errors."""

    @property
    def is_multi_process(self) -> bool:
        """Whether training runs in several processes."""
        ...

    def layout_rules(self) -> list[tuple[str, tuple]] | None:
        """Returns the patterns and axes of the layout map; None where the distribution has no layout map."""
        ...

    def distribute_batch(self, batch: Any) -> Any:
        """Returns the arrays of a host batch as global arrays, sharded over the batch axes."""
        ...

    def batch_sharding(self, shape: Sequence[int]) -> Any:
        """Returns the `jax.sharding.NamedSharding` with which an array of a batch is placed."""
        ...

    def place_single_batch(self, batch: Any) -> tuple[Any, list]:
        """Returns what `distribute_batch` does, and which rows of the global batch this process passed."""
        ...

    def make_input_pipeline(
        self,
        batches: Callable[[], Iterator],
        step: str | None,
        steps_per_epoch: int | None,
        position_of: Callable[[Iterator], Any] | None,
    ) -> Any:
        """Returns an `InputPipeline` of global batches, made from this process's host batches."""
        ...

    def outputs_of_process(self, outputs: Any, rows: list) -> Any:
        """Returns the rows of a prediction that this process passed, as arrays that it can read."""
        ...

    def distribute_call(self, model: keras.Model, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Returns the arguments of an eager `model(...)` with its arrays sharded like a batch."""
        ...

    def distribute_inputs(self, path: str, inputs: Any) -> Any:
        """Returns the inputs of a layer, constrained to the layout of the rule for `path`."""
        ...

    def distribute_outputs(self, outputs: Any, layout: Any) -> Any:
        """Returns the outputs of a layer, constrained to a layout."""
        ...

    def distribute_weight(self, variable: keras.Variable, value: Any) -> Any:
        """Returns the traced value of a variable in the layout in which layers compute with it."""
        ...

    def reduces_later(self, variable: keras.Variable) -> bool:
        """Returns whether the gradient of a weight is reduced once for all its reads in the step that is traced."""
        ...

    def lookup(self, layer: keras.layers.Embedding, indices_shape: Sequence[int], is_tied: bool) -> Any:
        """Returns how a layer looks up rows of its table, a `sharding.lookups.Lookup`; None: as Keras does.

        `is_tied` is whether layers also multiply with the table.
        """
        ...

    def compute_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: Any,
        mask: Any,
        *,
        scale: float | None,
        is_causal: bool,
        flash_attention: bool | None,
        soft_cap: float | None,
    ) -> Any:
        """Returns what `keras.ops.dot_product_attention` does, for operands of one dtype and a boolean mask."""
        ...

    @property
    def train_steps(self) -> "TrainStepHooks":
        """How train steps are computed."""
        ...

    @property
    def compiler_options(self) -> dict[str, str]:
        """Options of XLA, by name, with which steps are compiled."""
        ...

    def compute_step(
        self, step: str, model: keras.Model, function: Callable, state: Any, batch: Any
    ) -> tuple[Any, Any]:
        """Returns `function(state, batch)`, outputs and new state of a step that is being traced.

        Args:
            step: `"train"`, `"test"` or `"predict"`.
            model: the model.
            function: the step.
            state: what it takes of the model, nested lists of arrays.
            batch: nested arrays, of any number of rows.
        """
        ...

    def compute_call(self, layer: keras.Layer, function: Callable, state: Any, inputs: Any) -> Any:
        """Returns `function(state, inputs)`, a call of a layer outside of steps that may be traced.

        Args:
            layer: the layer.
            function: the call.
            state: the values of its trainable and of its other variables, in lists.
            inputs: its arguments, in a tuple, and its keyword arguments, in a dict.
        """
        ...

    def distribute_step_inputs(self, model: keras.Model, inputs: Any) -> Any:
        """Returns the inputs of a model in a step, with sequences of any length sharded over the sequence axes."""
        ...

    def gather_sequences(self, tensors: Any) -> Any:
        """Returns arrays with dim 1 gathered, for a computation that cannot be split along the sequence."""
        ...

    def shard_sequences(self, tensors: Any) -> Any:
        """Returns what was computed from gathered sequences, with dim 1 sharded over the sequence axes again."""
        ...

    @property
    def regathers(self) -> bool:
        """Whether weights that were gathered are dropped after the forward pass and gathered again."""
        ...

    def regathers_weights(self, layer: keras.Layer) -> bool:
        """Returns whether a layer has weights of its own that are gathered again."""
        ...

    def check_processes_agree(self, step: str, model: keras.Model, variables: Iterable[keras.Variable]) -> None:
        """Raises ValueError where processes are about to run a step of different models."""
        ...

    def check_values_agree(self, model: keras.Model, variables: Iterable[keras.Variable], place: str) -> None:
        """Raises ValueError where values that several processes hold differ, or the places in training they are at."""
        ...


class TrainStepHooks(Protocol):
    """What patches ask of a distribution about train steps. `steps.train_steps.TrainSteps` implements it."""

    @property
    def are_changed(self) -> bool:
        """Whether train steps are computed otherwise than Keras does, in any way."""
        ...

    @property
    def required_options(self) -> Any:
        """The options that have an effect in `compute` only, None if there are none."""
        ...

    def state_dtype(self, optimizer: keras.optimizers.Optimizer, name: str | None, dtype: str) -> str:
        """Returns the dtype of a state variable of an optimizer, given its name and the dtype of its weight."""
        ...

    def state_layout(self, variable: Any, layout: Any) -> Any:
        """Returns the layout of the optimizer state of a variable, given that of its update."""
        ...

    def scope(self, model: keras.Model) -> AbstractContextManager:
        """Returns the context in which the train step of a model is traced, also one that the user defines."""
        ...

    def accumulation(self, model: keras.Model) -> Any:
        """Returns how steps accumulate gradients, a `steps.gradient_accumulation.GradientAccumulation`.

        None: as Keras does, or not at all.
        """
        ...

    def compute(self, keras_train_step: Callable, model: keras.Model, state: tuple, batch: Any) -> tuple[Any, tuple]:
        """Returns logs and new state, as Keras's function does, of a train step that is being traced."""
        ...

    def apply_gradients(
        self,
        apply: Callable,
        optimizer: keras.optimizers.Optimizer,
        state: Sequence[Any],
        gradients: Sequence[Any],
        weights: Sequence[Any],
    ) -> tuple[list, list]:
        """Returns new weights and optimizer state, as Keras's function `apply(state, gradients, weights)` does."""
        ...
