"""Moves the state of a running model: from its variables into steps, from step to step, and back."""

import itertools
import sys
import weakref
from collections import UserList
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from keras_dist._keras.thread_value import ThreadValue


class NothingLeft(NamedTuple):
    """Instead of an iterator over batches: training resumes after the last batch of an epoch, which had these logs."""

    logs: dict[str, float]


# The models whose steps have taken values from variables.
_started: ThreadValue[frozenset[weakref.ref]] = ThreadValue(frozenset())


class _Leaves(UserList):
    """One part of a training state, for example the trainable variables, between two steps.

    The trainer assigns the state to an attribute of the model after each step, and Keras tracks attributes: at every
    step it would search a list of arrays for layers and variables, array by array. It does not search other sequences.

    Iterated over, it is the values of variables: `to_variables` of the state of steps, `data`, where the two differ.
    When Keras gives them back to the variables of `model`, it is emptied: only they refer to the arrays then.
    """

    def __init__(self, values, to_variables: Callable[[list], list] | None = None, model: Any = None):
        super().__init__(values)
        self._to_variables, self._model = to_variables, model

    def __iter__(self):
        values = self.data.copy()
        if self._is_given_back():
            self.data.clear()  # in place: frames of Keras and of tracebacks refer to the list
        return iter(values if self._to_variables is None else self._to_variables(values))

    def _is_given_back(self) -> bool:
        state = getattr(self._model, "_jax_state", None)
        return bool(state) and not self._model._jax_state_synced and any(part is self for part in state.values())


jax.tree_util.register_pytree_node(
    _Leaves,
    lambda leaves: (leaves.data, (leaves._to_variables, leaves._model)),
    lambda aux, values: _Leaves(values, *aux),
)


def state_variables(model, step: str) -> list[list]:
    """Returns the variables that a step takes and returns, in the parts and order of Keras's training state."""
    parts = [model.trainable_variables, model.non_trainable_variables]
    if step == "generate":
        return [*parts, model.sampler.variables]
    if step == "train":
        parts.append(model.optimizer.variables)
    if step != "predict":
        parts.append(model.metrics_variables)
    return parts


_OPTIMIZER = 2  # the part of a train step's state


def step_function(
    model, step: str, keras_function: Callable, finish: Callable[[Any, Any], Any] | None, accumulation: Any
) -> Callable:
    """Wraps Keras's function of a step: state is passed as `_Leaves`, and a step that fails loses no variable.

    Keras restores the values of variables only from a step that has ended. If the first step fails, they are lost.

    `finish` converts the outputs, given them and the iterator. `accumulation`, a `GradientAccumulation`, converts the
    state of the optimizer. They are None where steps have these as Keras does.
    """

    variables = []  # that the state was taken from: the first step may add others to the model

    def from_variables(state) -> tuple:
        variables[:] = state_variables(model, step)
        _started.value = frozenset(each for each in _started.value if each() is not None) | {weakref.ref(model)}
        _require_arrays(model, step, variables, state)
        _give_own_arrays(variables, state)
        if accumulation is None:
            return state
        return *state[:_OPTIMIZER], accumulation.from_variables(state[_OPTIMIZER]), *state[_OPTIMIZER + 1 :]

    def between_steps(state, before) -> tuple:
        if {*map(type, before)} == {_Leaves}:  # from the second step on: to make new ones takes longer
            for leaves, values in zip(before, state, strict=True):
                leaves.data = list(values)
            vars(model)["_jax_state"] = None  # until Keras assigns them: who iterates over them is given nothing back
            return before
        parts = [_Leaves(part, model=model) if type(part) is list else part for part in state]
        if accumulation is not None:
            parts[_OPTIMIZER] = _Leaves(state[_OPTIMIZER], accumulation.to_variables, model)
        return tuple(parts)

    def function(state, iterator):
        given = state
        try:
            if type(state[0]) is list:
                state = from_variables(state)
            else:  # from the step before
                state = tuple([part.data if type(part) is _Leaves else part for part in state])
            if isinstance(iterator, NothingLeft):
                return iterator.logs, between_steps(state, given)
            outputs, new_state = keras_function(state, iterator)
        except BaseException:
            _fill_parts(variables, given)
            for part in given:
                part.clear()  # a traceback, which may be kept, refers to it
            model._jax_state, model._jax_state_synced = None, True
            raise
        return outputs if finish is None else finish(outputs, iterator), between_steps(new_state, given)

    return function


def _references(values: list, index: int) -> int:
    return sys.getrefcount(values[index])


_FROM_LIST = _references([object()], 0)  # to an object to which only a list refers


def _give_own_arrays(variables: list[list], state: tuple) -> None:
    """Copies the arrays of variables to which anything else refers, since a step donates its arrays, each of them once.

    Two variables have one array after `a.assign(b)`, and so do each weight and its average after a `fit` with a moving
    average of the weights. Users keep arrays too: `variable.value`. Arrays are replaced in the lists of `state`, which
    has the values of the variables.
    """
    for part, values in zip(variables, state, strict=True):
        for index, variable in enumerate(part):
            has_value = variable._value is values[index]  # not in `fit`, `evaluate` and `predict`
            if _references(values, index) > _FROM_LIST + has_value:
                values[index] = own_copy(values[index])
                if has_value:
                    variable._value = values[index]


def with_own_arrays(model, step: str, keras_function: Callable) -> Callable:
    """Wraps Keras's function of a step where no distribution is active: no array of a variable is donated twice."""

    def function(state, iterator):
        if getattr(model, "_jax_state", None) is None:  # the values come from variables, not from the step before
            _give_own_arrays(state_variables(model, step), state)
        return keras_function(state, iterator)

    return function


def own_copy(array: jax.Array) -> jax.Array:
    """Returns a copy of an array with the same sharding, in memory of its own. Asks no other process."""
    if array.is_fully_addressable:
        return jax.device_put(array, array.sharding, may_alias=False)
    return _with_shards(array, [own_copy(shard.data) for shard in array.addressable_shards])


def lent(array: jax.Array) -> jax.Array:
    """Returns another object for an array, in the same memory, which a step may donate while somebody keeps the object.

    For writers of checkpoints: they copy the values to the host at once, and keep the arrays until all is written.
    """
    return _with_shards(array, [shard.data for shard in array.addressable_shards])


def _with_shards(array: jax.Array, shards: list[jax.Array]) -> jax.Array:
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards, dtype=array.dtype)


def _require_arrays(model, step: str, variables: list[list], state: tuple) -> None:
    """Raises ValueError for an array that was deleted. JAX 0.10 ends the process where a step takes one."""
    parts = itertools.starmap(zip, zip(variables, state, strict=True))
    deleted = [pair for pair in itertools.chain.from_iterable(parts) if pair[1].is_deleted()]
    for variable, value in deleted:
        variable._value = value  # Keras would initialize a variable without a value
    if deleted:
        raise ValueError(
            f"Cannot run the {step} step of {model.name!r}: the array of {deleted[0][0].path!r} has been deleted. A "
            "function that was compiled with jax.jit(..., donate_argnums=...) deletes the arrays that it is passed. "
            "Pass it jax.numpy.copy(variable.value), and assign this variable a value."
        )


def call_newly_made(model, step: str, state, iterator) -> Any:
    """Makes the function of a step, also in a running `fit`, and calls it."""
    state = tuple(map(list, state))
    # Keras reads the values when it makes a function. In a running `fit` they are in the state.
    filled = _fill_parts(state_variables(model, step), state)
    model._jax_state = None
    getattr(model, f"make_{step}_function")()
    for variable in filled:
        variable._value = None
    return getattr(model, f"{step}_function")(state, iterator)


def put_values_back(model) -> None:
    """Restores the values of a model's variables in the middle of a run, or after one that failed.

    While steps run, the variables hold no values, so that memory is not used twice. Keras restores them at the end of a
    run and, for `fit` only, when it fails. A variable that was assigned a value since then keeps it.

    The run may also be that of a model that has the same variables: one that this one is a part of, for example.
    """
    started = (reference() for reference in _started.value)
    if others := [each for each in started if each is not None and each is not model and _has_values(each)]:
        own = set(map(id, model.variables))
        for other in others:
            if not own.isdisjoint(map(id, other.variables)):
                _put_back(other)
    if _has_values(model):
        _put_back(model)


def _has_values(model) -> bool:
    """Whether the values of a model's variables are in a run."""
    return getattr(model, "_jax_state", None) is not None and not model._jax_state_synced


def _put_back(model) -> None:
    for part, values in model._jax_state.items():
        variables = model.optimizer.variables if part == "optimizer_variables" else getattr(model, part)
        _fill(variables, values)
    model._jax_state, model._jax_state_synced = None, True


def _fill(variables, values) -> list:
    filled = []
    for variable, value in zip(variables, values, strict=True):
        # A variable that a step creates holds what it was traced with.
        if (variable._value is None or isinstance(variable._value, Tracer)) and not value.is_deleted():
            variable._value = value
            filled.append(variable)
    return filled


def _fill_parts(variables: list[list], state: tuple) -> list:
    return [v for part in zip(variables, state, strict=True) for v in _fill(*part)]
