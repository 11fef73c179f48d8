"""The parts of Keras's train step: its loss with all updates, its metrics, and the update of the weights."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from keras_dist._keras.data_adapters import data_adapter_utils


class TrainState(NamedTuple):
    """The state of a train step, in Keras's order: values of the variables, in lists."""

    weights: Any
    others: Any
    optimizer: Any
    metrics: Any


def compute_loss(model: Any, state: TrainState, batch: Any) -> tuple[Any, tuple]:
    """Returns the loss, scaled by the optimizer, and what changes: the loss, outputs, and values of variables."""
    try:
        return model.compute_loss_and_updates(
            state.weights,
            state.others,
            state.metrics,
            *data_adapter_utils.unpack_x_y_sample_weight(batch),
            training=True,
            optimizer_variables=state.optimizer,
        )
    except BaseException:
        model._losses_override.clear()  # Keras would take the losses that layers have added for those of the next call
        raise


Improve = Callable[[Callable, TrainState, Any], Any] | None
"""Returns `function(state, batch)`, given function, state and batch; None: the function is called."""


def compute_gradients(
    model: Any, state: TrainState, batch: Any, scale: float, improve: Improve
) -> tuple[list, tuple[dict, list, list]]:
    """Does what Keras's train step does before the update.

    Returns the gradients of the loss times `scale`, and the logs and new values of `others` and `metrics`.
    """

    def loss_and_logs(state: TrainState, batch: Any) -> tuple[Any, tuple[dict, list, list]]:
        loss, updates = compute_loss(model, state, batch)
        # As with Keras, metrics have no gradients, and what the model computed has no masks any more.
        unscaled, y_pred, others, metrics = jax.tree.map(jax.lax.stop_gradient, updates)
        x, y, sample_weight = data_adapter_utils.unpack_x_y_sample_weight(batch)
        logs, metrics = model._update_metrics_variables(metrics, unscaled, x, y, y_pred, sample_weight)
        return loss * scale, (logs, others, metrics)

    def loss_of_weights(weights: Any) -> Any:
        arguments = state._replace(weights=weights), batch
        return loss_and_logs(*arguments) if improve is None else improve(loss_and_logs, *arguments)

    return jax.grad(loss_of_weights, has_aux=True)(state.weights)


def apply_gradients(model: Any, state: TrainState, gradients: Sequence[Any]) -> tuple[list, list]:
    return model.optimizer.stateless_apply(state.optimizer, gradients, state.weights)
