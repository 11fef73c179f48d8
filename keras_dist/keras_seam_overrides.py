"""Where Keras has no public hook, the smallest private function is replaced, and this says by what and for how long.

Replacements stand only while a distribution of ours is installed in some thread. They act only in threads where it is,
and hand everything else to Keras's own function. `OVERRIDES`, at the end of the file, lists them with what each is for.
"""

import contextlib
import dataclasses
import inspect
import itertools
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import keras
from jax.core import Tracer
from jax.extend.core import set_current_trace, take_current_trace

from keras_dist import keras_seam
from keras_dist.keras_seam import (
    GLOBAL_NAME,
    STEPS,
    current_distribution,
    distribution_lib,
    global_state,
    in_stateless_scope,
    put_values_back,
    state_variables,
    trainer,
)

_MISSING = object()


# --------------------------------------------------------------------------------------- what is installed, where


class Hooks:
    """What the overrides ask of a distribution of ours. Whatever inherits from this is "ours"."""

    def distribute_batch(self, batch):
        """Lays every array of a host batch over the mesh."""
        raise NotImplementedError

    def _distribute_tensor(self, tensor, layout):
        raise NotImplementedError

    def _distribute_call(self, model, args, kwargs):
        raise NotImplementedError

    def _check_rules(self, model) -> None:
        raise NotImplementedError

    def _distribute_read(self, variable, value):
        raise NotImplementedError

    def _distribute_inputs(self, path, inputs):
        raise NotImplementedError

    def _regathers(self, layer) -> bool:
        raise NotImplementedError

    def _slot_layout(self, variable):
        raise NotImplementedError

    def _check_placement(self, model, variables) -> None:
        raise NotImplementedError


_lock = threading.RLock()
_this_thread = threading.local()  # computing: the call without side effects that runs, if one does
_everywhere: Hooks | None = None  # ours, for every thread that has none of its own
_by_thread: "weakref.WeakKeyDictionary[threading.Thread, Hooks]" = weakref.WeakKeyDictionary()
# Ours in threads where Keras's own functions have installed one of Keras's since, and whether it held everywhere. It
# comes back if that was the beginning of a scope.
_set_aside: "weakref.WeakKeyDictionary[threading.Thread, tuple[Hooks, bool]]" = weakref.WeakKeyDictionary()
_laid_out: dict[int, tuple[weakref.ref, Hooks]] = {}  # living variables, by id, and who laid them out


def install(distribution) -> None:
    """Installs a distribution through Keras's global, and ours for threads that have none of their own."""
    global _everywhere
    with _lock:
        if isinstance(distribution, Hooks):
            _require_known_keras()
        _everywhere = distribution if isinstance(distribution, Hooks) else None
        _set_aside.pop(threading.current_thread(), None)
        _install_in_this_thread(distribution)


@contextlib.contextmanager
def installed_in_this_thread(distribution: Hooks) -> Iterator[None]:
    """Installs a distribution of ours for a block of code, in this thread only."""
    before = _by_thread.get(threading.current_thread(), _of_keras())
    _install_in_this_thread(distribution)
    try:
        yield
    finally:
        _install_in_this_thread(before)


def notice(distribution: Hooks) -> None:
    """Wakes the overrides for a distribution of ours that Keras's own `set_distribution` installed."""
    if not _is_active and current_distribution() is distribution:
        _install_in_this_thread(distribution)


def _install_in_this_thread(distribution) -> None:
    """Installs a distribution in this thread; `_MISSING` leaves it to what is installed everywhere."""
    with _lock:
        if isinstance(distribution, Hooks):
            _require_known_keras()
            _by_thread[threading.current_thread()] = distribution
        else:
            _by_thread.pop(threading.current_thread(), None)
        if distribution is not _MISSING:
            _original(global_state, "set_global_attribute")(GLOBAL_NAME, distribution)
        elif _of_keras() is not _MISSING:
            delattr(global_state.GLOBAL_STATE_TRACKER, GLOBAL_NAME)
        _put_in_or_out()


def _of_keras():
    """What Keras's global holds for this thread, `_MISSING` where nothing was set since it was cleared."""
    return getattr(global_state.GLOBAL_STATE_TRACKER, GLOBAL_NAME, _MISSING)


def remember_laid_out(variable, distribution: Hooks | None) -> None:
    """Notes which distribution of ours laid a variable out (None: it lies on one device again)."""
    key = id(variable)
    if distribution is None:
        _laid_out.pop(key, None)
    else:
        _laid_out[key] = (weakref.ref(variable, lambda _: _laid_out.pop(key, None)), distribution)


def laid_out_by(variable) -> Hooks | None:
    """The distribution of ours that laid a variable out, if one did."""
    entry = _laid_out.get(id(variable))
    return entry[1] if entry is not None and entry[0]() is variable else None


# ------------------------------------------------------------------------------------------------- replacements


def _ours() -> Hooks | None:
    installed = current_distribution()
    return installed if isinstance(installed, Hooks) else None


def _get_global_attribute(name, default=None, set_to_default=False):
    if name == GLOBAL_NAME and _of_keras() is _MISSING:
        return _by_thread.get(threading.current_thread(), _everywhere)
    return _original(global_state, "get_global_attribute")(name, default, set_to_default)


def _set_global_attribute(name, value):
    global _everywhere
    if name != GLOBAL_NAME:
        _original(global_state, "set_global_attribute")(name, value)
        return
    with _lock:
        thread = threading.current_thread()
        own, aside = _by_thread.get(thread), _set_aside.pop(thread, None)
        held_everywhere = own is not None and own is _everywhere
        if isinstance(value, Hooks):
            if aside == (value, True):
                _everywhere = value
            elif own is None and aside is None and value is _everywhere:
                value = _MISSING  # the end of a scope of Keras's in a thread that had nothing of its own
        else:
            if held_everywhere:
                _everywhere = None
            if own is not None:
                aside = own, held_everywhere
            if value is not None and aside is not None:
                _set_aside[thread] = aside
        _install_in_this_thread(value)


def _distribute_data(data, layouts=None):
    ours = _ours()
    if ours is None:
        return _original(trainer, "_distribute_data")(data, layouts)
    return ours.distribute_batch(data)


def _distribute_tensor(tensor, layout):
    ours = _ours()
    if ours is None:
        return _original(distribution_lib, "distribute_tensor")(tensor, layout)
    return ours._distribute_tensor(tensor, layout)


def _predict_on_batch(self, x):
    ours = _ours()
    if ours is not None:
        x = ours.distribute_batch(x)
    return _original(trainer.JAXTrainer, "predict_on_batch")(self, x)


def _call_model(self, *args, **kwargs):
    ours = _ours()
    if ours is not None and not in_stateless_scope():
        args, kwargs = ours._distribute_call(self, args, kwargs)
    return super(keras.Model, self).__call__(*args, **kwargs)


def _compile_model(self, *args, **kwargs):
    _original(trainer.base_trainer.Trainer, "compile")(self, *args, **kwargs)
    ours = _ours()
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


def _stateless_call(self, trainable_variables, non_trainable_variables, *args, return_losses=False, **kwargs):
    original, before = _original(keras.Layer, "stateless_call"), _computing()
    _this_thread.computing = _Computing(self, [*trainable_variables, *non_trainable_variables])
    try:
        return original(
            self, trainable_variables, non_trainable_variables, *args, return_losses=return_losses, **kwargs
        )
    finally:
        _this_thread.computing = before


def _read_variable(self, value):
    original, computing = _original(keras_seam.KerasVariable, "_maybe_autocast"), _computing()
    ours = None if computing is None or not isinstance(value, Tracer) else _ours()
    if computing is None or ours is None:
        return original(self, value)
    with computing.outside_of_loops(value):
        return ours._distribute_read(self, original(self, value))


def _call_operation(self, *args, **kwargs):
    original, ours = _original(keras.Operation, "__call__"), _ours() if isinstance(self, keras.Layer) else None
    if ours is None:
        return original(self, *args, **kwargs)
    args = ours._distribute_inputs(f"{keras_seam.path_of_open_scope()}/input", args)
    call = partial(original, self, *args, **kwargs)
    computing = _computing()
    # What is read in a loop is gathered before it. The backward pass begins with the last layers, whose weights are
    # still there.
    if (
        computing is None
        or computing.is_in_loop()
        or not ours._regathers(self)
        or self in keras_seam.last_layers(computing.model)
    ):
        return call()
    return keras_seam.rematerialized(self, computing.inside()(call))


def _add_variable_from_reference(self, reference_variable, name=None, initializer="zeros"):
    original, ours = _original(keras_seam.KerasOptimizer, "add_variable_from_reference"), _ours()
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
        original = _original(trainer.JAXTrainer, name)
        function = getattr(self, attribute)
        made_under = getattr(function, "made_under", None)
        ours = _ours()
        if ours is None:
            if force or function is None or made_under is not None:
                _warn_if_not_installed(self)
            return original(self, force)
        put_values_back(self)
        if force or function is None or made_under is not ours:
            ours._check_placement(self, itertools.chain.from_iterable(state_variables(self, step)))
            ours._check_rules(self)
            original(self, force=True)
            function = keras_seam.step_function(self, step, getattr(self, attribute))
            function.made_under = ours  # pyright: ignore[reportFunctionMemberAccess]
            setattr(self, attribute, function)
        return None

    return make


def _warn_if_not_installed(model) -> None:
    if not _laid_out:
        _put_in_or_out()
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


# -------------------------------------------------------------------------------------- putting them in and out


@dataclasses.dataclass(frozen=True)
class Override:
    """One private function of Keras that we replace.

    Attributes:
        owner: the module or class that holds it.
        name: its name there.
        parameters: the parameters it must have; another signature means a Keras that we do not know.
        replacement: ours.
        answers: what it is for.
        outlives: whether it must stay while variables that we laid out live, installed or not.
    """

    owner: Any
    name: str
    parameters: tuple[str, ...]
    replacement: Callable
    answers: str
    outlives: bool = False


OVERRIDES = (
    Override(
        trainer,
        "_distribute_data",
        ("data", "layouts"),
        _distribute_data,
        "batches of any size, 0-d arrays, and a batch structure that changes (keras#21167)",
    ),
    Override(
        trainer.JAXTrainer,
        "predict_on_batch",
        ("self", "x"),
        _predict_on_batch,
        "predict_on_batch replicates its input over all devices",
    ),
    Override(
        keras.Model,
        "__call__",
        ("self", "args", "kwargs"),
        _call_model,
        "model(x) replicates its input over all devices",
    ),
    Override(
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
        _compile_model,
        "rules that match nothing, in silence (keras-hub#2806, keras-hub#2810)",
    ),
    Override(
        keras.Layer,
        "stateless_call",
        ("self", "trainable_variables", "non_trainable_variables", "args", "return_losses", "kwargs"),
        _stateless_call,
        "tells what layers read from what optimizers read",
    ),
    Override(
        keras_seam.KerasVariable,
        "_maybe_autocast",
        ("self", "value"),
        _read_variable,
        "weights that lie in another layout than they are computed with",
    ),
    Override(
        keras.Operation,
        "__call__",
        ("self", "args", "kwargs"),
        _call_operation,
        "rules for what layers are called with, and layers that gather their weights once more for the backward pass",
    ),
    Override(
        keras_seam.KerasOptimizer,
        "add_variable_from_reference",
        ("self", "reference_variable", "name", "initializer"),
        _add_variable_from_reference,
        "optimizer state that lies elsewhere than its weight",
    ),
    Override(
        distribution_lib,
        "distribute_tensor",
        ("tensor", "layout"),
        _distribute_tensor,
        "output rules for layers that return tuples or dicts, and for batches of any size",
    ),
    Override(
        global_state,
        "get_global_attribute",
        ("name", "default", "set_to_default"),
        _get_global_attribute,
        "a distribution lost to clear_session(), or unseen by another thread",
    ),
    Override(
        global_state,
        "set_global_attribute",
        ("name", "value"),
        _set_global_attribute,
        "Keras's own set_distribution() puts the overrides in and out as ours does",
    ),
    *(
        Override(
            trainer.JAXTrainer,
            f"make_{step}_function",
            ("self", "force"),
            _make_function(step),
            "functions compiled under another distribution, and variables that lie elsewhere",
            outlives=True,
        )
        for step in STEPS
    ),
)

_is_active = False
_originals: dict[tuple[int, str], Any] = {}  # what stood in the owner's place, _MISSING where it only inherited


def _original(owner, name: str) -> Callable:
    """Keras's own function, whether or not ours stands in its place."""
    function = _originals.get((id(owner), name), _MISSING)
    return getattr(owner, name) if function is _MISSING else function


def _put_in_or_out() -> None:
    with _lock:
        if _everywhere is not None or _by_thread or _set_aside:
            _activate()
        else:
            _deactivate()


def _require_known_keras() -> None:
    if _is_active:
        return
    for override in OVERRIDES:
        function = getattr(override.owner, override.name, None)
        parameters = None if function is None else tuple(inspect.signature(function).parameters)
        if (id(override.owner), override.name) not in _originals and parameters != override.parameters:
            raise ValueError(
                f"This keras_dist does not know Keras {keras.__version__}: {override.owner.__name__}.{override.name} "
                f"{'is not there' if function is None else f'takes {parameters}'}, where {override.parameters} is "
                f"expected. It is replaced for: {override.answers}. Install a Keras that keras_dist's pyproject.toml "
                "names, or a newer keras_dist."
            )


def _activate() -> None:
    global _is_active
    if _is_active:
        return
    for override in OVERRIDES:
        key = (id(override.owner), override.name)
        if key not in _originals:
            _originals[key] = vars(override.owner).get(override.name, _MISSING)
            setattr(override.owner, override.name, override.replacement)
    _is_active = True


def _deactivate() -> None:
    global _is_active
    for override in OVERRIDES:
        key = (id(override.owner), override.name)
        # A name that somebody else has replaced over ours stays theirs; ours then hands on to Keras.
        ours_stands = vars(override.owner).get(override.name) is override.replacement
        if key not in _originals or not ours_stands or (override.outlives and _laid_out):
            continue
        original = _originals.pop(key)
        if original is _MISSING:
            delattr(override.owner, override.name)
        else:
            setattr(override.owner, override.name, original)
    _is_active = False
