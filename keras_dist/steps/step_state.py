"""What is alive while a step of a model is traced: one object, which whatever is traced asks.

It begins with the step, or with a call of a model outside of steps. Blocks of code change parts of it:

    with changed(kept_gradients=kept):
        ...  # what is traced here finds them in step_state()
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from keras_dist._keras.thread_value import ThreadValue
from keras_dist.attention.attention import AttentionCall
from keras_dist.data.batch_placement import UnequalShards
from keras_dist.mixtures.recognition import MixtureCall
from keras_dist.passes.registry import ForwardPass
from keras_dist.passes.token_part import LossCall
from keras_dist.steps.loss_parts import LossParts
from keras_dist.tracing.traced_values import TracedWeights

Call = AttentionCall | MixtureCall | LossCall


@dataclass(frozen=True)
class StepState:
    is_in_step: bool = False  # whether the program of a step is traced
    is_improved: bool = False  # whether forward passes are asked about what is traced
    forward_passes: Sequence[ForwardPass] = ()  # those that are to be asked about parts of the step
    unequal_shards: UnequalShards = UnequalShards.NONE  # of rows, if those of the step are split so
    weights: TracedWeights = field(default_factory=TracedWeights)  # the layouts of those that were read
    kept_gradients: Collection[int] = ()  # ids of the weights whose gradients are not reduced
    are_weights_gathered: bool = False  # for all microbatches
    losses: LossParts | None = None  # those of a microbatch
    rematerialization: Any = None  # a `Rematerialization`, or None
    is_update_unconditional: bool = False  # whether the update of the weights is that of accumulated gradients
    with_options: list[bool] | None = None  # filled by train steps that are computed with the options
    calls: list[Call] | None = None  # filled with how attention, mixtures and losses are computed, if somebody asks
    is_monitored: bool = False  # whether the step returns the load of experts among its logs
    call: Any = None  # the innermost call of a model or layer, a `ModelCall`
    is_generating: bool = False  # whether a layer is called in a function that is no step, such as `generate()`
    compared_model: str | None = None  # the name of the one whose step Keras compiles, if processes compare its program
    looped_step: str | None = None  # the step that Keras compiles, if it may take several batches


_state: ThreadValue[StepState] = ThreadValue(StepState())


def step_state() -> StepState:
    return _state.value


@contextlib.contextmanager
def changed(**changes: Any) -> Iterator[StepState]:
    with _state.set_to(replace(_state.value, **changes)):
        yield _state.value


def nothing_alive() -> contextlib.AbstractContextManager:
    """Traces something else in the middle of a step, such as a plan of it."""
    return _state.set_to(StepState(calls=_state.value.calls))


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """Records how attention and mixtures of experts are computed that are traced in a block."""
    calls: list[Call] = []
    with changed(calls=calls):
        yield calls
