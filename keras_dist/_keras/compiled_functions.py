"""The compiled functions of a model that moves between distributions: those of each one are kept.

They refer to the model, and so does the attribute of the model that holds them: nothing else would let go of both.
"""

import collections
from typing import Any, NamedTuple

from keras_dist._keras.internals import STEPS
from keras_dist._keras.training_state import call_newly_made

_OF_STEPS = {f"{step}_function": step for step in STEPS}
_GENERATE = "generate_function"  # of KerasHub, which makes a new one where it is None
_MAX_DISTRIBUTIONS = 4  # of which functions are kept


class _Kept(NamedTuple):
    """The functions of a model, and what they were compiled for."""

    compile_config: Any  # which `compile` makes anew
    placement: Any
    functions: dict[str, Any]


class _MadeAtNextUse:
    """Takes the place of a step's function after a move, also in a running `fit`, which calls it without making it."""

    def __init__(self, model: Any, attribute: str, known: Any):
        self._model, self._attribute, self.known = model, attribute, known
        self.made_under = getattr(known, "made_under", None)

    def __call__(self, state: Any, iterator: Any) -> Any:
        setattr(self._model, self._attribute, self.known)
        return call_newly_made(self._model, _OF_STEPS[self._attribute], state, iterator)


def exchange_functions(model: Any, left: Any, before: Any, entered: Any, after: Any) -> None:
    """Gives a model that was moved the functions that were compiled when it was there last.

    What is not known is compiled at its next use, also in a running `fit`.

    Args:
        model: The model.
        left: The distribution that it was moved from, or None.
        before: How its variables were placed there. Functions are used again where this is equal.
        entered: The distribution that it was moved to, or None.
        after: How its variables are placed there.
    """
    config = getattr(model, "_compile_config", None)
    functions = {
        name: function for name in (*_OF_STEPS, _GENERATE) if (function := getattr(model, name, None)) is not None
    }
    made = {name: _made(function) for name, function in functions.items()}
    # Not by assignment, by which Keras tracks what models have.
    kept = vars(model).setdefault("_functions_by_distribution", collections.UserDict())
    found = kept.pop(entered, None)
    kept.pop(left, None)
    kept[left] = _Kept(config, before, made)
    for oldest in list(kept)[:-_MAX_DISTRIBUTIONS]:
        del kept[oldest]
    is_valid = found is not None and found.compile_config is config and found.placement == after
    known = found.functions if found is not None and is_valid else {}
    for name in {**functions, **known}:
        function = known.get(name)
        setattr(model, name, function if name == _GENERATE else _MadeAtNextUse(model, name, function))


def _made(function: Any) -> Any:
    """Returns the function that was made, without a monitor that wraps it; None if it is yet to be made."""
    while hasattr(function, "observed"):
        function = function.observed
    return getattr(function, "known", function)
