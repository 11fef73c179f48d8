"""The parts of Keras's train step: its loss with all updates, its metrics, and the update of the weights."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from keras_dist._keras.active_distribution import active_distribution
from keras_dist._keras.data_adapters import data_adapter_utils
from keras_dist._keras.thread_value import ThreadValue


class TrainState(NamedTuple):
    """The state of a train step, in Keras's order: values of the variables, in lists."""

    weights: Any
    others: Any
    optimizer: Any
    metrics: Any


def compute_loss(model: Any, state: TrainState, batch: Any) -> tuple[Any, tuple]:
    """Returns the loss, scaled by the optimizer, and what changes: the loss, outputs, and values of variables."""
    return model.compute_loss_and_updates(
        state.weights,
        state.others,
        state.metrics,
        *data_adapter_utils.unpack_x_y_sample_weight(batch),
        training=True,
        optimizer_variables=state.optimizer,
    )


def compute_gradients(model: Any, state: TrainState, batch: Any, scale: float) -> tuple[list, tuple[dict, list, list]]:
    """Does what Keras's train step does before the update.

    Args:
        model: the model.
        state: its state.
        batch: x, y and sample weights, as Keras's train step takes them.
        scale: what the loss is multiplied with before it is differentiated.

    Returns:
        The gradients, and the logs and new values of `others` and `metrics`.
    """
    x, y, sample_weight = data_adapter_utils.unpack_x_y_sample_weight(batch)

    def loss_and_updates(weights):
        loss, updates = compute_loss(model, state._replace(weights=weights), batch)
        return loss * scale, updates

    gradients, (loss, y_pred, others, metrics) = jax.grad(loss_and_updates, has_aux=True)(state.weights)
    logs, metrics = model._update_metrics_variables(metrics, loss, x, y, y_pred, sample_weight)
    return gradients, (logs, others, metrics)


def apply_gradients(model: Any, state: TrainState, gradients: Sequence[Any]) -> tuple[list, list]:
    """Returns the new values of the weights and of the optimizer's variables."""
    return model.optimizer.stateless_apply(state.optimizer, gradients, state.weights)


# ----------------------------------------------------------------------------------------- steps as Keras compiles them


def stateless_step(model: Any, step: str) -> Callable:
    """Returns the function from state and batch to outputs and new state that Keras compiles for a step."""
    if step != "predict":
        return step_of_distribution(model, step)

    def predict_step(state, data):
        outputs, non_trainable_variables = model.predict_step(state, data)
        return outputs, (state[0], non_trainable_variables)

    return predict_step


class OptionWithoutEffectError(ValueError):
    """An option of train steps would have no effect on a model.

    Attributes:
        option: the name of the option.
    """

    def __init__(self, option: str, message: str):
        super().__init__(message)
        self.option = option


_was_computed: ThreadValue[list | None] = ThreadValue(None)  # filled by steps that are computed with options


def note_computed() -> None:
    """Notes that the train step that is being traced is computed with the options of its distribution."""
    if _was_computed.value is not None:
        _was_computed.value.append(True)


def _active(distribution: Any, model: Any, batch: Any) -> Any:
    return distribution


def train_step_with_options(model: Any, resolve: Callable[[Any, Any, Any], Any] = _active) -> Callable:
    """Returns a model's train step, in the scope that its distribution has for it.

    One that the user defines raises ValueError if options of the distribution have no effect on it.

    Args:
        model: the model.
        resolve: returns the distribution whose scope it is for a batch, given the active one and the model.
    """
    step, distribution = model.train_step, active_distribution()
    if distribution is None or not distribution.train_steps.are_changed:
        return step

    @functools.wraps(step)
    def with_options(state, batch):
        with resolve(distribution, model, batch).train_steps.scope(model), _was_computed.set_to([]):
            outputs = step(state, batch)
            was_computed = bool(_was_computed.value)
        options = distribution.train_steps.required_options
        if options is not None and not was_computed:
            raise OptionWithoutEffectError(
                "microbatches",
                f"{type(model).__name__}.train_step computes its gradients itself, so {options} would have no effect. "
                "Call super().train_step(state, data) in it, override compute_loss instead, or leave out the options.",
            )
        return outputs

    return with_options


def step_of_distribution(model: Any, step: str, resolve: Callable[[Any, Any, Any], Any] = _active) -> Callable:
    """Returns a model's train or test step, computed as its distribution does."""
    function, distribution = getattr(model, f"{step}_step"), active_distribution()
    if distribution is None:
        return function
    if step == "train":
        function = train_step_with_options(model, resolve)

    @functools.wraps(function)
    def computed(state, batch):
        return distribution.compute_step(step, function, state, batch)

    return computed


@contextlib.contextmanager
def step_replaced(model: Any, step: str, resolve: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """Replaces a model's train or test step by that of its distribution, for a block in which Keras compiles it.

    Keras looks the predict step up later, while it traces. So a patch replaces that, in models that do not override it.
    """
    if step == "predict":
        yield
        return
    vars(model)[f"{step}_step"] = step_of_distribution(model, step, resolve)
    try:
        yield
    finally:
        del vars(model)[f"{step}_step"]
