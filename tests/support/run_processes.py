"""Runs code as several processes on this machine, each with simulated devices, and hands back what each of them said.

A process with JAX and Keras takes seconds to start: let one run do much.
"""

import dataclasses
import inspect
import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_dist.multihost.launcher import launch

# A file for each process, since libraries print to standard output in the middle of lines of others.
_PREAMBLE = '''
import json, os, sys
import keras_dist as kd

def give_back(value):
    """Hands a value that JSON can hold back to the test; what is given back last counts."""
    with open(os.path.join(os.path.dirname(__file__), os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] + ".json"), "w") as f:
        json.dump(value, f)

'''


@dataclasses.dataclass(frozen=True)
class Completed:
    """One process that has ended.

    Attributes:
        rank: its number.
        returncode: its exit status; negative where a signal ended it.
        stdout: what it printed.
        stderr: what it printed there.
        result: what it gave back by `give_back`, or what the function returned; None where it did not.
    """

    rank: int
    returncode: int
    stdout: str
    stderr: str
    result: Any


def run_processes(
    program: str | Callable,
    *arguments: Any,
    processes: int = 2,
    devices: int = 2,
    timeout: float = 300,
    initialize: bool = True,
    wait_seconds: float = 60,
    check: bool = True,
    grace: float = 30,
    **environment: str | None,
) -> list[Completed]:
    """Runs a program as several processes.

    Args:
        program: source code, or a function whose source is taken: it imports what it uses, and what it returns is its
            result. Both find `kd`, `os`, `sys`, `json` and `give_back(value)`.
        *arguments: of the function, as literals of Python (`repr` is what the processes read).
        processes: how many.
        devices: simulated CPU devices of each.
        timeout: seconds after which all are killed.
        initialize: whether `kd.initialize()` is called before the program.
        wait_seconds: for how long the processes wait for one another (`initialize(timeout=...)`).
        check: whether all must end with status 0; else an AssertionError shows what they said.
        grace: seconds for the others to end after one failed.
        **environment: variables to set for all; None unsets.

    Returns:
        The processes in their order.
    """
    if callable(program):
        source = textwrap.dedent(inspect.getsource(program))
        call = f"give_back({program.__name__}({', '.join(map(repr, arguments))}))"
        source = f"{source}\n\n{call}\n"
    else:
        source = textwrap.dedent(program)
    source = _PREAMBLE + ("kd.initialize()\n" if initialize else "") + source

    left_out = ("KERAS_BACKEND", "NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    variables = {key: value for key, value in os.environ.items() if key not in left_out}
    variables["KERAS_DISTRIBUTION_TIMEOUT"] = str(wait_seconds)
    here = Path(__file__).resolve()
    paths = [str(here.parents[2]), str(here.parents[1]), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    for key, value in environment.items():
        if value is None:
            variables.pop(key, None)
        else:
            variables[key] = value

    said: dict[tuple[int, str], list[str]] = {
        (rank, name): [] for rank in range(processes) for name in ("stdout", "stderr")
    }
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "program.py")
        file.write_text(source)
        outcome = launch(
            [sys.executable, str(file)],
            processes,
            devices,
            show=lambda rank, name, line: said[rank, name].append(line),
            environment=variables,
            timeout=timeout,
            grace=grace,
        )
        results = [Path(directory, f"{rank}.json") for rank in range(processes)]
        given = [json.loads(result.read_text()) if result.is_file() else None for result in results]
    completed = [
        Completed(rank, status, "\n".join(said[rank, "stdout"]), "\n".join(said[rank, "stderr"]), given[rank])
        for rank, status in enumerate(outcome.statuses)
    ]
    if check and any(process.returncode for process in completed):
        raise AssertionError(f"Some processes failed, or took longer than {timeout:g} s:\n{in_words(completed)}")
    return completed


def in_words(completed: list[Completed]) -> str:
    """Everything that the processes said, for the message of a test."""
    return "\n".join(
        f"--- process {process.rank}, exit status {process.returncode}\n{process.stdout}\n{process.stderr}"
        for process in completed
    )
