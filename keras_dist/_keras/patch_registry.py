"""How functions of Keras are replaced: declaring, installing and removing patches.

A patch replaces one function of Keras where Keras has no public hook. It belongs to a `PatchGroup`; the patches of a
group are installed and removed together. Example, from `_patches/training.py`:

    @INSTALLED.patch(trainer, "_distribute_data", reason="batches of any size")
    def _distribute_data(original, distribution, data, layouts=None):
        return distribution.distribute_batch(data)

While the group is installed, `trainer._distribute_data(data)` calls this function with Keras's own function as
`original`, in threads where a distribution of this package is active, and Keras's own function in all others.
"""

import dataclasses
import functools
import inspect
import itertools
import threading
from collections.abc import Callable
from typing import Any

from keras_dist._keras.internals import unsupported_keras

_lock = threading.RLock()
_INHERITED = object()  # in the place of an original that the owner does not define itself
GROUPS: list["PatchGroup"] = []


@dataclasses.dataclass(frozen=True, eq=False)
class Patch:
    """One function of Keras that is replaced.

    `context` returns what is passed to the replacement after `original`; where it returns None, Keras's function runs
    instead. Without a context the replacement is always called, with `original` only.
    """

    owner: Any  # the module or class that holds the function
    name: str
    parameters: tuple[str, ...]  # of Keras's function; other ones mean a Keras that is not supported
    replacement: Any  # a function, or a class that stands in for a class
    reason: str  # what is wrong or missing in Keras without the patch
    issue: str  # upstream, for example "keras#21167"
    context: Callable[[], Any] | None
    passes_on_more: bool = False  # whether Keras's function may have more parameters, which the replacement passes on

    @property
    def target(self) -> str:
        """The dotted name of the function in Keras."""
        module = getattr(self.owner, "__module__", "")
        return f"{module}.{self.owner.__qualname__}.{self.name}" if module else f"{self.owner.__name__}.{self.name}"

    def original(self) -> Callable:
        """Returns the function that is replaced: the owner's own one, else the one that it inherits."""
        if self.name in vars(self.owner):
            return vars(self.owner)[self.name]

        # Looked up at each call: subclasses have other bases, and a base may be patched itself.
        def inherited(instance, *args, **kwargs):
            return getattr(super(self.owner, instance), self.name)(*args, **kwargs)

        return functools.wraps(getattr(self.owner, self.name))(inherited)

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
        """Raises ValueError where Keras's function is missing or takes other parameters."""
        function = getattr(self.owner, self.name, None)
        found = None if function is None else _parameters_of(function)
        compared = found[: len(self.parameters)] if found and self.passes_on_more else found
        if compared != self.parameters:
            problem = "does not exist" if found is None else f"takes {found} instead of {self.parameters}"
            raise ValueError(unsupported_keras(f"{self.target} {problem}. Without keras_dist's patch: {self.reason}"))


@functools.cache  # patches are installed by each `with distribution.scope()`
def _parameters_of(function: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


class PatchGroup:
    """Patches that are installed and removed together; `context` is the default of `Patch.context`."""

    def __init__(self, name: str, when: str, context: Callable[[], Any] | None = None):
        self.name, self.when, self.patches, self._context = name, when, [], context
        self._installed: dict[Patch, tuple[Any, Any]] = {}  # what the owner had, and what replaced it
        GROUPS.append(self)

    def patch(
        self,
        owner: Any,
        name: str,
        reason: str,
        issue: str = "",
        parameters: tuple[str, ...] | None = None,
        every_thread: bool = False,
    ) -> Callable:
        """Returns a decorator that declares a function, or a class, to be the replacement of one of Keras's.

        By default Keras's function must have the parameters of the replacement, without `original` and the group's
        context; where the replacement takes `*args`, those before it, and any others. With `every_thread` the
        replacement is called without the group's context, in every thread.
        """

        def declare(replacement):
            assert not any(p.owner is owner and p.name == name for group in GROUPS for p in group.patches)
            context = None if every_thread else self._context
            expected, passes_on_more = parameters, False
            if expected is None:
                own_arguments = 0 if isinstance(replacement, type) else 1 if context is None else 2
                own_parameters = [*inspect.signature(replacement).parameters.values()][own_arguments:]
                passes_on_more = any(each.kind is each.VAR_POSITIONAL for each in own_parameters)
                compared = itertools.takewhile(lambda each: each.kind is not each.VAR_POSITIONAL, own_parameters)
                expected = tuple(each.name for each in compared)
            self.patches.append(Patch(owner, name, expected, replacement, reason, issue, context, passes_on_more))
            return replacement

        return declare

    def check_signatures(self) -> None:
        for patch in self.patches:
            if patch not in self._installed:
                patch.check_signature()

    def install(self) -> None:
        """Installs the patches that are not installed yet; if one cannot be, raises ValueError and installs none."""
        with _lock:
            self.check_signatures()
            for patch in self.patches:
                if patch in self._installed:
                    continue
                before, bound = vars(patch.owner).get(patch.name, _INHERITED), patch.bound(patch.original())
                self._installed[patch] = before, bound
                setattr(patch.owner, patch.name, bound)

    def remove(self) -> None:
        """Restores Keras's functions.

        Where another library has replaced a function after this one did, its function stays, and calls the patch.
        """
        with _lock:
            for patch, (before, bound) in list(self._installed.items()):
                if vars(patch.owner).get(patch.name) is not bound:
                    continue
                del self._installed[patch]
                if before is _INHERITED:
                    delattr(patch.owner, patch.name)
                else:
                    setattr(patch.owner, patch.name, before)
