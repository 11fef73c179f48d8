"""Which distribution of ours is installed where, and the functions of Keras that are replaced while one is.

Where Keras has no public hook, the smallest private function is replaced, by one in `_patches/training.py`.
Replacements stand only while a distribution of ours is installed in some thread. They act only in threads where it is,
and hand everything else to Keras's own function.
"""

import contextlib
import dataclasses
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_dist._keras.internals import GLOBAL_NAME, current_distribution, global_state

_MISSING = object()


# ----------------------------------------------------------------------------------------- functions of Keras replaced


@dataclasses.dataclass(frozen=True)
class Override:
    """One private function of Keras that is replaced.

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


OVERRIDES: list[Override] = []
_is_active = False
_originals: dict[tuple[int, str], Any] = {}  # what stood in the owner's place, _MISSING where it only inherited


def replaces(owner: Any, name: str, parameters: tuple[str, ...], answers: str, outlives: bool = False) -> Callable:
    """Marks a function as what stands in the place of one of Keras's, while a distribution of ours is installed.

    Args:
        owner: the module or class that holds Keras's function.
        name: its name there.
        parameters: the parameters it must have.
        answers: what it is replaced for.
        outlives: whether the replacement must stay while variables that we laid out live.
    """

    def mark(replacement: Callable) -> Callable:
        OVERRIDES.append(Override(owner, name, parameters, replacement, answers, outlives))
        return replacement

    return mark


def keras_own(owner, name: str) -> Callable:
    """Keras's own function, whether or not ours stands in its place."""
    function = _originals.get((id(owner), name), _MISSING)
    return getattr(owner, name) if function is _MISSING else function


def put_in_or_out() -> None:
    """Puts the replacements in where a distribution of ours is installed in some thread, else takes them out."""
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

    _is_multi_process: bool

    def _feed(self, batches, step, steps_per_epoch, state_of):
        raise NotImplementedError

    def _place_now(self, batch):
        raise NotImplementedError

    def _own_outputs(self, outputs, rows):
        raise NotImplementedError

    def _agree_on_model(self, step, model, variables) -> None:
        raise NotImplementedError


_lock = threading.RLock()
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


@contextlib.contextmanager
def hidden_in_this_thread() -> Iterator[None]:
    """Runs a block of code in which Keras finds no distribution in this thread."""
    before = _of_keras()
    keras_own(global_state, "set_global_attribute")(GLOBAL_NAME, None)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(global_state.GLOBAL_STATE_TRACKER, GLOBAL_NAME)
        else:
            keras_own(global_state, "set_global_attribute")(GLOBAL_NAME, before)


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
            keras_own(global_state, "set_global_attribute")(GLOBAL_NAME, distribution)
        elif _of_keras() is not _MISSING:
            delattr(global_state.GLOBAL_STATE_TRACKER, GLOBAL_NAME)
        put_in_or_out()


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


def any_laid_out() -> bool:
    """Whether a variable lives that a distribution of ours laid out."""
    return bool(_laid_out)


def ours_here() -> Hooks | None:
    """The distribution of ours that is installed in this thread, if one is."""
    installed = current_distribution()
    return installed if isinstance(installed, Hooks) else None


@replaces(
    global_state,
    "get_global_attribute",
    ("name", "default", "set_to_default"),
    "a distribution lost to clear_session(), or unseen by another thread",
)
def _get_global_attribute(name, default=None, set_to_default=False):
    if name == GLOBAL_NAME and _of_keras() is _MISSING:
        return _by_thread.get(threading.current_thread(), _everywhere)
    return keras_own(global_state, "get_global_attribute")(name, default, set_to_default)


@replaces(
    global_state,
    "set_global_attribute",
    ("name", "value"),
    "Keras's own set_distribution() puts the overrides in and out as ours does",
)
def _set_global_attribute(name, value):
    global _everywhere
    if name != GLOBAL_NAME:
        keras_own(global_state, "set_global_attribute")(name, value)
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
