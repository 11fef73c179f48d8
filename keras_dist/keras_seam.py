"""Every private name of Keras that this package touches, and nothing else touches one.

Three parts:

* the backend: Keras must run on JAX, and this file says so before Keras is imported;
* reading: small functions around private names, so that a new Keras is met in one place;
* overriding: where Keras has no public hook, the smallest private function is replaced. Replacements stand only
  while a distribution of ours is installed in some thread, act only in threads where it is, and hand everything
  else to Keras's own function. `OVERRIDES`, at the end of the file, lists them with the issue each one answers.
"""

import contextlib
import dataclasses
import inspect
import itertools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def _require_jax_backend() -> None:
    if "keras" in sys.modules:
        import keras

        backend, where = keras.config.backend(), "Keras is imported already and runs on"
    elif os.environ.get("KERAS_BACKEND"):
        backend, where = os.environ["KERAS_BACKEND"], "KERAS_BACKEND is"
    else:
        os.environ["KERAS_BACKEND"] = backend = "jax"
        where = ""
    if backend != "jax":
        raise ValueError(
            f"keras_dist needs Keras's JAX backend, but {where} {backend!r}. "
            "Set the environment variable KERAS_BACKEND=jax before anything imports Keras."
        )


_require_jax_backend()

import jax  # noqa: E402  (the backend is chosen first)
import keras  # noqa: E402

try:
    from keras.src.backend.common import global_state as _global_state
    from keras.src.backend.common.name_scope import current_path as _current_path
    from keras.src.backend.common.stateless_scope import in_stateless_scope as _in_stateless_scope
    from keras.src.backend.jax import distribution_lib as _backend_lib
    from keras.src.backend.jax import trainer as _trainer
    from keras.src.distribution import distribution_lib as _lib
except ImportError as error:
    raise ImportError(
        f"This keras_dist does not know Keras {keras.__version__}: {error}. Install a Keras that its "
        "pyproject.toml names, or a newer keras_dist."
    ) from error

KerasDistribution = _lib.Distribution
DEFAULT_BATCH_DIM_NAME = _lib.DEFAULT_BATCH_DIM_NAME
GLOBAL_NAME = _lib.GLOBAL_ATTRIBUTE_NAME
_MISSING = object()


# ---------------------------------------------------------------------------------------------------- reading


def list_devices(device_type: str | None) -> list[str]:
    """Keras's own list of devices (looked up when called, so that it can be replaced for a test)."""
    return _lib.list_devices(device_type)


def get_device_count(device_type: str | None) -> int:
    """Keras's own count of devices."""
    return _lib.get_device_count(device_type)


def num_processes() -> int:
    """Keras's own count of processes."""
    return _backend_lib.num_processes()


def process_id() -> int:
    """Keras's own number of this process."""
    return _backend_lib.process_id()


def initialize(job_addresses: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Starts JAX's multi-process runtime and gives all processes one random seed, as Keras does."""
    _backend_lib.initialize(job_addresses, num_processes, process_id)


def path_of_open_scope() -> str:
    """The path of the layer that is being called or built, `""` outside of any."""
    return _current_path()


def variable_layout(variable):
    """The layout that a variable was created with: a TensorLayout, something of JAX's, or None."""
    return getattr(variable, "_layout", None)


def variable_value(variable):
    """The array a variable holds, or None where its creation or a running step defers it."""
    return getattr(variable, "_value", None)


def place_variable(variable, layout, value) -> None:
    """Gives a variable another layout (None: no distribution) together with its value so laid out."""
    variable._layout = layout
    if value is not None:
        variable._value = value


def forget_compiled_functions(model) -> None:
    """Makes a model compile its train, test and predict functions anew at their next use."""
    for step in ("train", "test", "predict"):
        setattr(model, f"{step}_function", None)


def is_running(model) -> bool:
    """Whether the model is in the middle of fit, evaluate or predict, its values held by the running step."""
    return getattr(model, "_jax_state", None) is not None and not model._jax_state_synced


def distribute_with_keras(tensor, layout):
    """Keras's own placing of one tensor: a sharding constraint while tracing, else a move."""
    return _backend_lib.distribute_tensor(tensor, layout)


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

    def _check_placement(self, model, variables) -> None:
        raise NotImplementedError


_lock = threading.RLock()
_everywhere: Hooks | None = None  # ours, for every thread that has none of its own
_by_thread: "weakref.WeakKeyDictionary[threading.Thread, Hooks]" = weakref.WeakKeyDictionary()
_laid_out: dict[int, tuple[weakref.ref, Hooks]] = {}  # living variables, by id, and who laid them out


def current_distribution():
    """Keras's own answer to which distribution is installed."""
    return _global_state.get_global_attribute(GLOBAL_NAME)


def install(distribution) -> None:
    """Installs a distribution through Keras's global, and ours for threads that have none of their own."""
    global _everywhere
    with _lock:
        _everywhere = distribution if isinstance(distribution, Hooks) else None
        _install_in_this_thread(distribution)


@contextlib.contextmanager
def installed_in_this_thread(distribution: Hooks) -> Iterator[None]:
    """Installs a distribution of ours for a block of code, in this thread only."""
    before = current_distribution()
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
    with _lock:
        _original(_global_state, "set_global_attribute")(GLOBAL_NAME, distribution)
        if isinstance(distribution, Hooks):
            _by_thread[threading.current_thread()] = distribution
        else:
            _by_thread.pop(threading.current_thread(), None)
        _put_in_or_out()


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
    if name == GLOBAL_NAME and not hasattr(_global_state.GLOBAL_STATE_TRACKER, name):
        return _by_thread.get(threading.current_thread(), _everywhere)
    return _original(_global_state, "get_global_attribute")(name, default, set_to_default)


def _set_global_attribute(name, value):
    global _everywhere
    if name != GLOBAL_NAME:
        _original(_global_state, "set_global_attribute")(name, value)
        return
    with _lock:
        if value is None and current_distribution() is _everywhere:
            _everywhere = None
        _install_in_this_thread(value)


def _distribute_data(data, layouts=None):
    ours = _ours()
    if ours is None:
        return _original(_trainer, "_distribute_data")(data, layouts)
    return ours.distribute_batch(data)


def _distribute_tensor(tensor, layout):
    ours = _ours()
    if ours is None:
        return _original(_lib, "distribute_tensor")(tensor, layout)
    return ours._distribute_tensor(tensor, layout)


def _predict_on_batch(self, x):
    ours = _ours()
    if ours is not None:
        x = ours.distribute_batch(x)
    return _original(_trainer.JAXTrainer, "predict_on_batch")(self, x)


def _call_model(self, *args, **kwargs):
    ours = _ours()
    if ours is not None and not _in_stateless_scope():
        args, kwargs = ours._distribute_call(self, args, kwargs)
    return super(keras.Model, self).__call__(*args, **kwargs)


class _Leaves(Sequence):
    """One part of a training state between two steps.

    The trainer assigns the state to an attribute of the model after each step, and Keras tracks attributes: a list
    of arrays would be searched for layers and variables, one array at a time, at every step. It looks no further
    into a sequence of another type.
    """

    __slots__ = ("values",)

    def __init__(self, values: list):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]

    def __iter__(self):
        return iter(self.values)


jax.tree_util.register_pytree_node(
    _Leaves, lambda leaves: (leaves.values, None), lambda _, values: _Leaves(list(values))
)


def _step_function(model, step: str, keras_function: Callable) -> Callable:
    """Wraps the function that runs a step: its state travels as `_Leaves`, and a failure loses no variable.

    While a step runs the variables hold no values, so that memory is not taken twice, and Keras puts values back only
    from a step that has ended. Where the first batch of a run fails, the weights would be gone.
    """

    def function(state, iterator):
        state = tuple(part.values if type(part) is _Leaves else part for part in state)
        try:
            outputs, new_state = keras_function(state, iterator)
        except BaseException:
            for variables, values in zip(_state_variables(model, step), state, strict=True):
                for variable, value in zip(variables, values, strict=True):
                    if variable._value is None and not value.is_deleted():
                        variable._value = value
            raise
        return outputs, tuple(_Leaves(part) if type(part) is list else part for part in new_state)

    return function


def _make_function(step: str) -> Callable:
    """Returns the replacement of `make_train_function`, `make_test_function` or `make_predict_function`.

    Keras freezes the shardings of the variables into the function that it makes, and keeps it. The replacement makes
    it anew where another distribution is installed than it was made under, and asks first whether the model's
    variables lie where that distribution wants them.
    """
    name, attribute = f"make_{step}_function", f"{step}_function"

    def make(self, force=False):
        original = _original(_trainer.JAXTrainer, name)
        function = getattr(self, attribute)
        made_under = getattr(function, "made_under", None)
        ours = _ours()
        if ours is None:
            if force or function is None or made_under is not None:
                _warn_if_not_installed(self)
            return original(self, force)
        self.jax_state_sync()  # the values of a run that was interrupted
        if force or function is None or made_under is not ours:
            ours._check_placement(self, itertools.chain.from_iterable(_state_variables(self, step)))
            original(self, force=True)
            function = _step_function(self, step, getattr(self, attribute))
            function.made_under = ours  # pyright: ignore[reportFunctionMemberAccess]
            setattr(self, attribute, function)
        return None

    return make


def _state_variables(model, step: str) -> list[list]:
    """The variables that a step takes and returns, in the parts and the order of Keras's training state."""
    parts = [model.trainable_variables, model.non_trainable_variables]
    if step == "train":
        parts.append(model.optimizer.variables)
    if step != "predict":
        parts.append(model.metrics_variables)
    return parts


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
        _trainer,
        "_distribute_data",
        ("data", "layouts"),
        _distribute_data,
        "batches of any size, 0-d arrays, and a batch structure that changes (keras#21167)",
    ),
    Override(
        _trainer.JAXTrainer,
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
        _lib,
        "distribute_tensor",
        ("tensor", "layout"),
        _distribute_tensor,
        "output rules for layers that return tuples or dicts, and for batches of any size",
    ),
    Override(
        _global_state,
        "get_global_attribute",
        ("name", "default", "set_to_default"),
        _get_global_attribute,
        "a distribution lost to clear_session(), or unseen by another thread",
    ),
    Override(
        _global_state,
        "set_global_attribute",
        ("name", "value"),
        _set_global_attribute,
        "Keras's own set_distribution() puts the overrides in and out as ours does",
    ),
    *(
        Override(
            _trainer.JAXTrainer,
            f"make_{step}_function",
            ("self", "force"),
            _make_function(step),
            "functions compiled under another distribution, and variables that lie elsewhere",
            outlives=True,
        )
        for step in ("train", "test", "predict")
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
        if _everywhere is not None or _by_thread:
            _activate()
        else:
            _deactivate()


def _activate() -> None:
    global _is_active
    if _is_active:
        return
    for override in OVERRIDES:
        parameters = tuple(inspect.signature(getattr(override.owner, override.name)).parameters)
        if (id(override.owner), override.name) not in _originals and parameters != override.parameters:
            raise ValueError(
                f"This keras_dist does not know Keras {keras.__version__}: {override.owner.__name__}.{override.name} "
                f"takes {parameters} and not {override.parameters}. It is overridden for: {override.answers}. "
                "Install a Keras that keras_dist's pyproject.toml names, or a newer keras_dist."
            )
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
