"""The functions that stand in the place of Keras's own while a distribution of ours is installed, and what each is for.

Each hands what it is not for to Keras's own function. When they stand, and for which threads, is decided in
`_keras/patch_registry.py`.
"""

import contextlib
import itertools
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import keras
from jax.core import Tracer
from jax.extend.core import set_current_trace, take_current_trace

from keras_dist._keras import internals
from keras_dist._keras.internals import (
    STEPS,
    current_distribution,
    distribution_lib,
    in_stateless_scope,
    trainer,
)
from keras_dist._keras.patch_registry import any_laid_out, keras_own, laid_out_by, ours_here, put_in_or_out, replaces
from keras_dist._keras.training_state import put_values_back, state_variables, step_function
from keras_dist._patches.epoch_iterator import announce
from keras_dist.data.input_pipeline import Feed, own_rows_of
from keras_dist.variables import global_reads, process_zero

_this_thread = threading.local()  # computing: the call without side effects that runs, if one does


@replaces(
    trainer,
    "_distribute_data",
    ("data", "layouts"),
    "batches of any size, 0-d arrays, and a batch structure that changes (keras#21167)",
)
def _distribute_data(data, layouts=None):
    ours = ours_here()
    if ours is None:
        return keras_own(trainer, "_distribute_data")(data, layouts)
    return ours.distribute_batch(data)


@replaces(
    distribution_lib,
    "distribute_tensor",
    ("tensor", "layout"),
    "output rules for layers that return tuples or dicts, and for batches of any size",
)
def _distribute_tensor(tensor, layout):
    ours = ours_here()
    if ours is None:
        return keras_own(distribution_lib, "distribute_tensor")(tensor, layout)
    return ours._distribute_tensor(tensor, layout)


@replaces(
    trainer.JAXTrainer,
    "predict_on_batch",
    ("self", "x"),
    "predict_on_batch replicates its input over all devices",
)
def _predict_on_batch(self, x):
    ours, original = ours_here(), keras_own(trainer.JAXTrainer, "predict_on_batch")
    if ours is None:
        return original(self, x)
    x, rows = ours._place_now(x)
    outputs = original(self, x)
    return outputs if None in rows else own_rows_of(outputs, rows)


@replaces(
    keras.Model,
    "__call__",
    ("self", "args", "kwargs"),
    "model(x) replicates its input over all devices",
)
def _call_model(self, *args, **kwargs):
    ours = ours_here()
    if ours is not None and not in_stateless_scope():
        args, kwargs = ours._distribute_call(self, args, kwargs)
    return super(keras.Model, self).__call__(*args, **kwargs)


@replaces(
    trainer.base_trainer.Trainer,
    "compile",
    (
        "self",
        "optimizer",
        "loss",
        "loss_weights",
        "metrics",
        "weighted_metrics",
        "run_eagerly",
        "steps_per_execution",
        "jit_compile",
        "auto_scale_loss",
    ),
    "rules that match nothing, in silence (keras-hub#2806, keras-hub#2810)",
)
def _compile_model(self, *args, **kwargs):
    keras_own(trainer.base_trainer.Trainer, "compile")(self, *args, **kwargs)
    ours = ours_here()
    if ours is not None and self.built:
        ours._check_rules(self)


class _Computing:
    """A call of a model without side effects: the trace that it began in, and the values of variables it was given.

    What a layer reads of these in a loop of its own is laid out once, before the loop: gathered inside, it would be
    gathered at every turn, and so would its gradient be reduced.
    """

    def __init__(self, model, values):
        self.model = model
        self._trace, self._given = _current_trace(), {id(value) for value in values}

    def is_in_loop(self) -> bool:
        return _current_trace() is not self._trace

    def outside_of_loops(self, value) -> contextlib.AbstractContextManager:
        """Runs a block in the trace that the call began in, if the value is known there."""
        return set_current_trace(self._trace) if id(value) in self._given else contextlib.nullcontext()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Begins the call anew in the current trace, for a block."""
        before, self._trace = self._trace, _current_trace()
        try:
            yield
        finally:
            self._trace = before


def _current_trace():
    """What JAX traces into at the moment; in a loop another one than around it."""
    with take_current_trace() as trace:
        return trace


def _computing() -> _Computing | None:
    return getattr(_this_thread, "computing", None)


@replaces(
    keras.Layer,
    "stateless_call",
    ("self", "trainable_variables", "non_trainable_variables", "args", "return_losses", "kwargs"),
    "tells what layers read from what optimizers read",
)
def _stateless_call(self, trainable_variables, non_trainable_variables, *args, return_losses=False, **kwargs):
    original, before = keras_own(keras.Layer, "stateless_call"), _computing()
    _this_thread.computing = _Computing(self, [*trainable_variables, *non_trainable_variables])
    try:
        return original(
            self, trainable_variables, non_trainable_variables, *args, return_losses=return_losses, **kwargs
        )
    finally:
        _this_thread.computing = before


@replaces(
    internals.KerasVariable,
    "_maybe_autocast",
    ("self", "value"),
    "weights that lie in another layout than they are computed with, and what process 0 alone computes with",
)
def _read_variable(self, value):
    original, computing = keras_own(internals.KerasVariable, "_maybe_autocast"), _computing()
    if process_zero.is_leading():
        value = global_reads.local_value(self, value)
    ours = None if computing is None or not isinstance(value, Tracer) else ours_here()
    if computing is None or ours is None:
        return original(self, value)
    with computing.outside_of_loops(value):
        return ours._distribute_read(self, original(self, value))


@replaces(
    keras.Operation,
    "__call__",
    ("self", "args", "kwargs"),
    "rules for what layers are called with, and layers that gather their weights once more for the backward pass",
)
def _call_operation(self, *args, **kwargs):
    original, ours = keras_own(keras.Operation, "__call__"), ours_here() if isinstance(self, keras.Layer) else None
    if ours is None:
        return original(self, *args, **kwargs)
    args = ours._distribute_inputs(f"{internals.path_of_open_scope()}/input", args)
    call = partial(original, self, *args, **kwargs)
    computing = _computing()
    # What is read in a loop is gathered before it. The backward pass begins with the last layers, whose weights are
    # still there.
    if (
        computing is None
        or computing.is_in_loop()
        or not ours._regathers(self)
        or self in internals.last_layers(computing.model)
    ):
        return call()
    return internals.rematerialized(self, computing.inside()(call))


@replaces(
    internals.KerasOptimizer,
    "add_variable_from_reference",
    ("self", "reference_variable", "name", "initializer"),
    "optimizer state that lies elsewhere than its weight",
)
def _add_variable_from_reference(self, reference_variable, name=None, initializer="zeros"):
    original, ours = keras_own(internals.KerasOptimizer, "add_variable_from_reference"), ours_here()
    if ours is not None and isinstance(reference_variable, keras.Variable):
        reference_variable = types.SimpleNamespace(
            path=reference_variable.path,
            shape=reference_variable.shape,
            dtype=reference_variable.dtype,
            _layout=ours._slot_layout(reference_variable),
        )
    return original(self, reference_variable, name, initializer)


def _make_function(step: str) -> Callable:
    """Returns the replacement of `make_train_function`, `make_test_function` or `make_predict_function`.

    Keras freezes the shardings of the variables into the function that it makes, and keeps it. The replacement makes
    it anew where another distribution is installed than it was made under, and asks first whether the model's
    variables lie where that distribution wants them.
    """
    name, attribute = f"make_{step}_function", f"{step}_function"

    def make(self, force=False):
        original = keras_own(trainer.JAXTrainer, name)
        function = getattr(self, attribute)
        made_under = getattr(function, "made_under", None)
        ours = ours_here()
        if ours is None:
            if force or function is None or made_under is not None:
                _warn_if_not_installed(self)
            return original(self, force)
        put_values_back(self)
        announce(step)
        if force or function is None or made_under is not ours:
            ours._check_placement(self, itertools.chain.from_iterable(state_variables(self, step)))
            ours._check_rules(self)
            ours._agree_on_model(step, self, itertools.chain.from_iterable(state_variables(self, step)))
            original(self, force=True)
            finish = _own_outputs if step == "predict" and ours._is_multi_process else _as_they_are
            function = step_function(self, step, getattr(self, attribute), finish)
            function.made_under = ours  # pyright: ignore[reportFunctionMemberAccess]
            setattr(self, attribute, function)
        return None

    return make


def _as_they_are(outputs, iterator):
    return outputs


def _own_outputs(outputs, iterator):
    ours = ours_here()
    assert ours is not None
    return ours._own_outputs(outputs, iterator.take_own_rows() if isinstance(iterator, Feed) else [None])


def _warn_if_not_installed(model) -> None:
    if not any_laid_out():
        put_in_or_out()
    elif current_distribution() is None:
        distribution = next(filter(None, map(laid_out_by, model.variables)), None)
        if distribution is not None:
            warnings.warn(
                f"A model trains as its distribution says only while that is installed. The variables of "
                f"{model.name!r} were laid out by {distribution}, but no distribution is installed in this thread, so "
                "its batches are not sharded and every device computes all of them. Call set_distribution(...) "
                "before, or stay inside `with distribution.scope():`; keras_dist.redistribute(model) brings it "
                "back to one device.",
                stacklevel=5,
            )


for _step in STEPS:
    replaces(
        trainer.JAXTrainer,
        f"make_{_step}_function",
        ("self", "force"),
        "functions compiled under another distribution, and variables that lie elsewhere",
        outlives=True,
    )(_make_function(_step))
