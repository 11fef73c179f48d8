"""The steps of a model as its distribution computes them, for Keras to compile."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from keras_dist._keras.active_distribution import active_distribution
from keras_dist._keras.thread_value import ThreadValue
from keras_dist.steps.options import OptionWithoutEffectError


def stateless_step(model: Any, step: str) -> Callable:
    """Returns the function from state and batch to outputs and new state that Keras compiles for a step."""
    if step != "predict":
        return step_of_distribution(model, step)

    def predict_step(state, data):
        outputs, non_trainable_variables = model.predict_step(state, data)
        return outputs, (state[0], non_trainable_variables)

    return predict_step


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
        return distribution.compute_step(step, model, function, state, batch)

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
