"""Which distribution is active in which thread, and which one chose the layout of a variable.

Keras keeps the active distribution in a thread-local global, which `clear_session()` clears and which other threads do
not see. Here it is also kept by thread and for all threads, so that it survives both. The patches are installed while a
distribution of this package is active in any thread.

A thread that starts while a scope is open has the distribution of that scope. Python does not say which thread started
it (before 3.14, which can pass on context variables), so it counts that it did not exist when the scope began.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import keras

from keras_dist._keras.internals import (
    GLOBAL_NAME,
    KerasDistribution,
    attributes_replaced,
    current_distribution,
    global_state,
)
from keras_dist._keras.patch_registry import PatchGroup
from keras_dist._report.units import counted
from keras_dist._report.user_warnings import warn


class PackageDistribution:
    """A distribution of this package; Keras's own ones are not. `strategies.base.Distribution` is the only subclass."""

    asked_by_patches = (  # mostly objects that the distribution hands out
        *("attention", "auto_shard_dataset", "batches", "layer_calls", "sequences", "steps", "train_steps"),
        *("check_processes_agree", "check_values_agree", "is_multi_process", "layout_rules", "strict"),
    )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class _Scope(NamedTuple):
    """A scope that is open in a thread, and the threads that existed when it began."""

    thread: threading.Thread
    distribution: PackageDistribution
    older_threads: "weakref.WeakSet[threading.Thread]"


_UNSET = object()
_lock = threading.RLock()
_for_all_threads: PackageDistribution | None = None  # in threads that have set none of their own
_by_thread: "weakref.WeakKeyDictionary[threading.Thread, PackageDistribution]" = weakref.WeakKeyDictionary()
# What a distribution of Keras has replaced in a thread since, and whether it was active in all threads. It becomes
# active again when the scope of Keras's distribution ends.
_shadowed: "weakref.WeakKeyDictionary[threading.Thread, tuple[PackageDistribution, bool]]" = weakref.WeakKeyDictionary()
_scopes: tuple[_Scope, ...] = ()  # inner scopes after outer ones
_intent: str | None = ""  # what shows that several devices are meant to be used; None once anything was set
_warned: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()  # about scopes of other threads
_distributions: dict[int, tuple[weakref.ref, PackageDistribution]] = {}  # by the id of a living variable


def active_distribution() -> PackageDistribution | None:
    """Returns the distribution of this package that is active in this thread, if one is."""
    active = current_distribution()
    return active if isinstance(active, PackageDistribution) else None


ALWAYS = PatchGroup("always", "As soon as keras_dist is imported.")
INSTALLED = PatchGroup(
    "installed",
    "While a distribution of keras_dist is active in any thread. They act in threads where it is.",
    active_distribution,
)
VARIABLES = PatchGroup(
    "variables",
    "While a distribution of keras_dist is active in any thread, and after that while variables exist whose layout it "
    "chose. Also from the creation of a distribution, or `simulate_devices`, until one is set or a model runs without.",
)


# -------------------------------------------------------------------------------------------- setting the distribution


def install(distribution: Any) -> None:
    """Makes a distribution active in this thread and, if it is of this package, in all that have set none."""
    global _for_all_threads, _scopes
    with _lock:
        if isinstance(distribution, PackageDistribution):
            _install_patches()
        _for_all_threads = distribution if isinstance(distribution, PackageDistribution) else None
        thread = threading.current_thread()
        _shadowed.pop(thread, None)
        _scopes = tuple(scope for scope in _scopes if scope.thread is not thread)
        _set_in_this_thread(distribution)


@contextlib.contextmanager
def installed_in_this_thread(distribution: PackageDistribution) -> Iterator[None]:
    """Makes a distribution active in this thread, and in those that start meanwhile, for a block of code."""
    global _scopes
    thread = threading.current_thread()
    before = _by_thread.get(thread, _keras_global())
    scope = _Scope(thread, distribution, weakref.WeakSet(threading.enumerate()))
    with _lock:
        _set_in_this_thread(distribution)
        _scopes += (scope,)
    try:
        yield
    finally:
        with _lock:
            _scopes = tuple(each for each in _scopes if each is not scope)
            _set_in_this_thread(before)


def no_distribution_in_this_thread() -> contextlib.AbstractContextManager:
    """Hides the active distribution from Keras in this thread for a block of code."""
    return attributes_replaced(global_state.GLOBAL_STATE_TRACKER, **{GLOBAL_NAME: None})


def set_by_keras(distribution: Any) -> None:
    """Follows Keras's own `set_distribution` and `scope`, of any distribution or None, in this thread."""
    global _for_all_threads
    with _lock:
        thread = threading.current_thread()
        own, shadowed = _by_thread.get(thread), _shadowed.pop(thread, None)
        was_for_all = own is not None and own is _for_all_threads
        if isinstance(distribution, PackageDistribution):
            if shadowed == (distribution, True):
                _for_all_threads = distribution
            elif own is None and shadowed is None and distribution is _for_all_threads:
                distribution = _UNSET  # the end of a scope of Keras's in a thread that had set none of its own
        else:
            if was_for_all:
                _for_all_threads = None
            if own is not None:
                shadowed = own, was_for_all
            if distribution is not None and shadowed is not None:
                _shadowed[thread] = shadowed
        _set_in_this_thread(distribution)


def fallback() -> PackageDistribution | None:
    """Returns what is active in this thread where Keras's global is unset, in a new thread or after it was cleared."""
    thread = threading.current_thread()
    if thread in _by_thread or not _scopes:
        return _by_thread.get(thread, _for_all_threads)
    inherited = {scope.thread: scope.distribution for scope in _scopes if thread not in scope.older_threads}
    # Several threads may have scopes: which of them started this one is not known.
    return next(iter(inherited.values())) if len(set(map(id, inherited.values()))) == 1 else _for_all_threads


def warn_of_other_scopes(path: str) -> None:
    """Warns once in a thread without a distribution that creates a variable while other threads have scopes.

    Not in the main thread, which no other thread started or passed work to.
    """
    thread, scopes = threading.current_thread(), _scopes
    if scopes and is_unset() and thread not in _warned and thread is not threading.main_thread():
        _warned.add(thread)
        others = ", ".join(dict.fromkeys(f"that of {s.distribution} in {s.thread.name!r}" for s in scopes))
        cause = (
            "scopes are open in several threads that may have started it"
            if any(thread not in scope.older_threads for scope in scopes)
            else "it started before the scope"
        )
        warn(
            f"{path!r} is created in thread {thread.name!r}, where no distribution is active, and so is on one device, "
            f"although scopes are open in other threads: {others}. The thread has none of them, because {cause}. Open "
            "one in this thread (`with distribution.scope():`), or call keras_dist.set_distribution(distribution), "
            "which applies to all threads. If one device is intended, call keras.distribution.set_distribution(None) "
            "in this thread."
        )


def expect_distribution(intent: str) -> None:
    """Lets `warn_of_idle_devices` warn, unless a distribution or None was or will be set, in any thread."""
    global _intent
    with _lock:
        if _intent is not None:
            VARIABLES.install()  # which call `warn_of_idle_devices`
            _intent = intent


def warn_of_idle_devices(model_name: str) -> None:
    """Warns, once in a process, that a model runs on one of several devices, if more were meant to be used."""
    global _intent
    intent, _intent = _intent, None
    if intent and jax.device_count() > 1:
        warn(
            f"{model_name!r} runs on one of {counted(jax.device_count(), 'device')}, because no distribution is "
            f"active, although {intent}. Call keras_dist.set_distribution(distribution) before the model is created, "
            "or keras_dist.set_distribution(None) if one device is intended."
        )


@contextlib.contextmanager
def intent_kept() -> Iterator[None]:
    """Lets `warn_of_idle_devices` warn after a block, which has a distribution for a plan only, as before it."""
    global _intent
    intent = _intent
    try:
        yield
    finally:
        _intent = intent


def is_unset() -> bool:
    """Returns whether nothing was set in Keras's global in this thread since it began or was cleared."""
    return _keras_global() is _UNSET


def _set_in_this_thread(distribution: Any) -> None:
    """Sets the distribution of this thread; `_UNSET` leaves the thread to the one for all threads."""
    global _intent
    with _lock:
        _intent = None
        if isinstance(distribution, PackageDistribution):
            _install_patches()
            _by_thread[threading.current_thread()] = distribution
        else:
            _by_thread.pop(threading.current_thread(), None)
        _write_keras_global(distribution)
        remove_unused_patches()


def _keras_global() -> Any:
    return getattr(global_state.GLOBAL_STATE_TRACKER, GLOBAL_NAME, _UNSET)


def _write_keras_global(value: Any) -> None:
    # As Keras's `set_global_attribute` does, which is patched.
    if value is not _UNSET:
        setattr(global_state.GLOBAL_STATE_TRACKER, GLOBAL_NAME, value)
    elif not is_unset():
        delattr(global_state.GLOBAL_STATE_TRACKER, GLOBAL_NAME)


def _install_patches() -> None:
    VARIABLES.check_signatures()  # of both groups, before one of them is installed
    INSTALLED.install()
    VARIABLES.install()


def remove_unused_patches() -> None:
    with _lock:
        if _for_all_threads is None and not _by_thread and not _shadowed:
            INSTALLED.remove()
            if not _distributions and not _intent:
                VARIABLES.remove()


def what_instead_of_a_distribution(value: Any) -> str:
    """Returns what a value is that is no distribution, as the end of a sentence, and how to make a distribution."""
    if isinstance(value, type) and issubclass(value, KerasDistribution):
        rules = "layout_map=layout_map" if issubclass(value, keras.distribution.ModelParallel) else ""
        arguments = "" if value.__name__ == "FullyShardedDataParallel" else rules
        return f"the class {value.__name__}. Call it: {value.__name__}({arguments})."
    if isinstance(value, KerasDistribution):
        name = type(value).__name__
        return f"Keras's own {name}. Use keras_dist.{name}, which takes the same arguments."
    fix = "Pass, for example, keras_dist.DataParallel()."
    if isinstance(getattr(value, "distribution", None), KerasDistribution):  # a `Choice`
        fix = "Pass its attribute `distribution`."
    elif isinstance(value, keras.distribution.LayoutMap):
        fix = "Pass keras_dist.ModelParallel(layout_map=layout_map)."
    elif isinstance(value, (keras.distribution.DeviceMesh, jax.sharding.Mesh)):
        fix = "Pass a distribution on this mesh, for example keras_dist.FullyShardedDataParallel(mesh)."
    elif isinstance(value, str) and ":" in value:
        fix = f"Pass, for example, keras_dist.DataParallel(keras_dist.create_device_mesh({value!r}))."
    return f"{value!r} of type {type(value).__name__}. {fix}"


# --------------------------------------------------------------------------------------- the distribution of a variable


def variables_of(distribution: PackageDistribution) -> list[keras.Variable]:
    """Returns the living variables whose layout a distribution chose."""
    references = [reference for reference, chooser in list(_distributions.values()) if chooser is distribution]
    return [variable for variable in (reference() for reference in references) if variable is not None]


def record_distribution(variable: keras.Variable, distribution: PackageDistribution | None) -> None:
    """Records which distribution of this package chose the layout of a variable; None where none did."""
    key = id(variable)
    if distribution is None:
        _distributions.pop(key, None)
    else:
        _distributions[key] = (weakref.ref(variable, lambda _: _distributions.pop(key, None)), distribution)


def distribution_of(variable: keras.Variable) -> PackageDistribution | None:
    """Returns the distribution of this package that chose the layout of a variable, if one did."""
    entry = _distributions.get(id(variable))
    return entry[1] if entry is not None and entry[0]() is variable else None


def distribution_of_model(model: keras.Model) -> PackageDistribution | None:
    return next(filter(None, map(distribution_of, model.variables)), None)
