"""How functions of Keras are replaced: declaring, installing and removing patches.

A patch replaces one function of Keras where Keras has no public hook. It belongs to a `PatchGroup`; the patches of a
group are installed and removed together. docs/patches.md lists them, CONTRIBUTING.md says how to add one. Example, from
`_patches/training.py`:

    @INSTALLED.patch(trainer, "_distribute_data", issue="keras#21167")
    def _distribute_data(original, distribution, data, *args, **kwargs):
        # The docstring says what is wrong or missing in Keras: "Without it, ..."
        return distribution.distribute_batch(data)

While the group is installed, `trainer._distribute_data(data)` calls this function with Keras's own function as
`original`, in threads where a distribution of this package is active, and Keras's own function in all others.
"""

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from keras_dist._keras.internals import unsupported_keras

_lock = threading.RLock()
GROUPS: list["PatchGroup"] = []


@dataclasses.dataclass(frozen=True, eq=False)
class Patch:
    """One function of Keras that is replaced.

    `context` returns what is passed to the replacement after `original`; where it returns None, Keras's function runs
    instead. Without a context the replacement is always called, with `original` only.
    """

    owner: Any  # the module or class that defines the function
    name: str
    replacement: Any  # a function, or a class that stands in for a class
    reason: str  # what is wrong or missing in Keras without the patch
    issue: str  # upstream, for example "keras#21167"
    context: Callable[[], Any] | None

    @property
    def target(self) -> str:
        """The dotted name of the function in Keras."""
        module = getattr(self.owner, "__module__", "")
        return f"{module}.{self.owner.__qualname__}.{self.name}" if module else f"{self.owner.__name__}.{self.name}"

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """Those of the replacement, without `original` and what the context returns."""
        before = 0 if isinstance(self.replacement, type) else 1 if self.context is None else 2
        return list(inspect.signature(self.replacement).parameters.values())[before:]

    def bound(self, original: Callable) -> Any:
        """Returns what is set on the owner: a function with the signature of Keras's, or the replacement class."""
        replacement, context = self.replacement, self.context
        if isinstance(replacement, type):
            return replacement

        @functools.wraps(original)
        def patched(*args, **kwargs):
            if context is None:
                return replacement(original, *args, **kwargs)
            value = context()
            return original(*args, **kwargs) if value is None else replacement(original, value, *args, **kwargs)

        return patched

    def check_signature(self) -> None:
        """Raises ValueError where Keras's function is missing, or has other parameters than the replacement.

        Keyword-only parameters of the replacement do not count. Where it takes `*args` or `**kwargs`, Keras's function
        may have more.
        """
        function, problem = vars(self.owner).get(self.name), "does not exist"
        if function is not None:
            expected = tuple(each.name for each in self.parameters if each.kind is each.POSITIONAL_OR_KEYWORD)
            passes_on_more = any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in self.parameters)
            found = tuple(inspect.signature(function).parameters)
            if expected == (found[: len(expected)] if passes_on_more else found):
                return
            problem = f"takes {found} instead of {expected}"
        raise ValueError(unsupported_keras(f"{self.target} {problem}. Without keras_dist's patch: {self.reason}"))


class PatchGroup:
    """Patches that are installed and removed together; `context` is that of its patches."""

    def __init__(self, name: str, when: str, context: Callable[[], Any] | None = None):
        self.name, self.when, self.patches, self._context = name, when, [], context
        self._installed: dict[Patch, tuple[Any, Any]] = {}  # what the owner had, and what replaced it
        self._checked: dict[Patch, Any] = {}  # what the owner had; patches are installed by each `with scope()`
        GROUPS.append(self)

    def patch(self, owner: Any, name: str, reason: str = "", issue: str = "", every_thread: bool = False) -> Callable:
        """Returns a decorator that declares a function, or a class, to be the replacement of one of Keras's.

        Without a reason, the docstring of the replacement is that: "Without it, ...". With `every_thread` the
        replacement is called without the group's context, in every thread.
        """

        def declare(replacement):
            assert not any(p.owner is owner and p.name == name for group in GROUPS for p in group.patches)
            why = reason or " ".join((replacement.__doc__ or "").split()).removeprefix("Without it, ").rstrip(".")
            context = None if every_thread else self._context
            self.patches.append(Patch(owner, name, replacement, why, issue, context))
            return replacement

        return declare

    def check_signatures(self) -> None:
        for patch in self.patches:
            function = vars(patch.owner).get(patch.name)
            if patch not in self._installed and (function is None or self._checked.get(patch) is not function):
                patch.check_signature()
                self._checked[patch] = function

    def install(self) -> None:
        """Installs the patches that are not installed yet; if one cannot be, raises ValueError and installs none."""
        with _lock:
            self.check_signatures()
            for patch in self.patches:
                if patch not in self._installed:
                    original = vars(patch.owner)[patch.name]
                    self._installed[patch] = original, patch.bound(original)
                    setattr(patch.owner, patch.name, self._installed[patch][1])

    def remove(self) -> None:
        """Restores Keras's functions.

        Where another library has replaced a function after this one did, its function stays, and calls the patch.
        """
        with _lock:
            for patch, (original, bound) in list(self._installed.items()):
                if vars(patch.owner).get(patch.name) is bound:
                    del self._installed[patch]
                    setattr(patch.owner, patch.name, original)
