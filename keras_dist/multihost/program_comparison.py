"""Compares the traced steps of all processes before one is compiled.

Where processes run different programs whose shapes agree (another activation, loss, dropout rate or optimizer
setting), devices exchange numbers that mean different things, and nothing fails.
"""

import hashlib
import itertools
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from keras_dist.multihost import messaging

_MAX_LINE = 200  # characters of an instruction in an error


def compare_programs(step: Any, name: str) -> Callable:
    """Wraps a jitted step of state and batch so that all processes compare its program before they compile it.

    Each program is compared once for each structure, shapes and dtypes of the batch. Tracing is shared with the call
    that follows. `name` is that of the model, for errors.
    """
    compared = set()

    def compared_step(state, batch):
        leaves, structure = jax.tree.flatten(batch)
        key = structure, tuple(map(jax.typeof, leaves))
        if key not in compared:
            require_same_program(step.trace(state, batch).jaxpr, name)
            compared.add(key)
        return step(state, batch)

    return compared_step


def require_same_program(program: Any, name: str) -> None:
    """Raises a ValueError on all processes if their programs, each a `ClosedJaxpr`, differ."""
    lines = program_lines(program)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests = messaging.exchange("program", digest)
    process = next((process for process, other in enumerate(digests) if other != digests[0]), None)
    if process is None:
        return
    checksums = messaging.exchange("checksums of the program", [zlib.crc32(line.encode()) for line in lines])
    pairs = itertools.zip_longest(checksums[0], checksums[process])
    number = next((number for number, (first, other) in enumerate(pairs) if first != other), len(lines))
    line = lines[number].strip() if number < len(lines) else "end of the program"
    differing = messaging.exchange("line of the program", line[:_MAX_LINE])
    raise ValueError(
        f"The step of {name!r} differs between processes. First difference: `{differing[0]}` on process 0, "
        f"`{differing[process]}` on process {process}. Build and compile the model with the same code and the same "
        "settings in all processes."
    )


def program_lines(program: Any) -> list[str]:
    """Returns the lines of a program, then checksums of its arrays, without addresses and with sets in order."""
    text = re.sub(r" at 0x[0-9a-f]+|\bid=\d+", "", str(program))
    text = re.sub(r"frozenset\(\{([^{}]*)\}\)", lambda match: str(sorted(match[1].split(", "))), text)
    return [*text.splitlines(), *map(_checksum, _constants(program.jaxpr, program.consts))]


def _constants(jaxpr: Any, values: Any) -> Iterator[Any]:
    yield from values
    for equation in jaxpr.eqns:
        yield from (x.val for x in equation.invars if np.ndim(getattr(x, "val", 0)))
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(parameter, "eqns"):
                yield from _constants(getattr(parameter, "jaxpr", parameter), getattr(parameter, "consts", ()))


def _checksum(value: Any) -> str:
    if isinstance(value, jax.Array):
        if not value.is_fully_replicated or jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
            return f"constant {value.dtype}{value.shape}"
        value = value.addressable_data(0)
    array = np.ascontiguousarray(value)
    return f"constant {array.dtype}{array.shape} with checksum {zlib.crc32(array.tobytes())}"
