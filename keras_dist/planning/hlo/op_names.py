"""The layers that instructions come from, read from the names that JAX gives to operations."""

import re
from collections.abc import Iterator
from functools import lru_cache

_NAME = re.compile(r"\w[\w.\-]*")
_TRANSFORMED = re.compile(r"(\w+)\((.*)\)")
# Components that JAX and XLA add between those of layers.
_OF_JAX = re.compile(r"checkpoint|rematted_computation|shard_map|while|body|cond|branch_\d+_fun|closed_call|custom_\w+")


@lru_cache(maxsize=16384)
def layer_path(op_name: str) -> tuple[str, bool]:
    """Returns the path of the layer that an operation comes from, and whether the operation is a part of its gradient.

    The path is "" if there is none, and the common part for operations of several layers that XLA combined.

    >>> layer_path("jit(train_step)/transpose(jvp(gpt))/block_1/dense/bij,jk->bik/dot_general")
    ('gpt/block_1/dense', True)
    >>> layer_path("jit(train_step)/jvp(gpt)/block_0/(query/add:key/add)")
    ('gpt/block_0', False)
    """
    path, is_gradient = [], False
    *components, last = _split(op_name)
    if last.startswith("("):  # several operations with a common beginning
        components.append(last)
    for component in components:
        while match := _TRANSFORMED.fullmatch(component):
            is_gradient |= match[1] == "transpose"
            component = "" if match[1] in ("jit", "pjit") else match[2]
        if component.startswith("("):
            break
        if _NAME.fullmatch(component) and not _OF_JAX.fullmatch(component):
            path.append(component)
    return "/".join(path), is_gradient


def _split(op_name: str) -> Iterator[str]:
    """Splits at slashes outside parentheses."""
    depth, start = 0, 0
    for position, character in enumerate(op_name):
        depth += (character == "(") - (character == ")")
        if character == "/" and depth == 0:
            yield op_name[start:position]
            start = position + 1
    yield op_name[start:]
