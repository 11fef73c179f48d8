"""What is replaced in JAX for a block of code: listed here, and in docs/patches.md, since no patch does it."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable)


class Replaced(NamedTuple):
    """Functions of JAX, while what they are replaced, why, and the module that does it."""

    functions: str
    when: str
    reason: str
    module: str


REPLACED: list[Replaced] = []


def replaces_in_jax(functions: str, when: str, reason: str) -> Callable[[FunctionT], FunctionT]:
    """Returns a decorator that lists what a function replaces in JAX."""

    def declare(function: FunctionT) -> FunctionT:
        REPLACED.append(Replaced(functions, when, reason, function.__module__))
        return function

    return declare
