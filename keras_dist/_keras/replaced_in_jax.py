"""What is replaced in JAX for a block of code: listed here, and in docs/patches.md, since no patch does it."""

from collections.abc import Callable
from typing import TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable)
REPLACED: list[tuple[str, str, str, str]] = []  # functions of JAX, while what they are replaced, why, the module


def replaces_in_jax(functions: str, when: str, reason: str) -> Callable[[FunctionT], FunctionT]:
    """Returns a decorator that lists what a function replaces in JAX."""

    def declare(function: FunctionT) -> FunctionT:
        REPLACED.append((functions, when, reason, function.__module__))
        return function

    return declare
