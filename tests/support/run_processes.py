"""Runs a function of a module as several processes on this machine, each with simulated devices.

A process with JAX and Keras takes seconds to start, so let one run do much.
"""

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_dist.multihost.launcher import launch

TESTS = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Completed:
    """One process that has ended.

    Attributes:
        rank: its index.
        returncode: its exit status; -n if signal n ended it.
        stdout: its standard output.
        stderr: its standard error.
        result: what the function returned, or None if it did not return.
    """

    rank: int
    returncode: int
    stdout: str
    stderr: str
    result: Any


def run_processes(
    function: Callable,
    *arguments: Any,
    processes: int = 2,
    devices: int = 2,
    timeout: float = 300,
    initialize: bool = True,
    wait_seconds: float = 60,
    heartbeat_timeout: float = 60,
    end_grace: float = 10,
    check: bool = True,
    grace: float = 30,
    tensorflow: bool = False,
    **environment: str | None,
) -> list[Completed]:
    """Runs a function as several processes.

    Args:
        function: a function of a module that the processes can import, such as `multihost.programs.state`. It returns
            what JSON can represent.
        *arguments: arguments of the function, which JSON can represent.
        processes: number of processes.
        devices: simulated CPU devices of each.
        timeout: seconds after which all are killed.
        initialize: whether `kd.initialize()` is called before the function.
        wait_seconds: for how long the processes wait for one another (`initialize(timeout=...)`).
        heartbeat_timeout: seconds without a heartbeat after which a process counts as dead.
        end_grace: seconds that a process has to end by itself after another one failed.
        check: whether all must end with status 0; if not, an AssertionError shows their output.
        grace: seconds for the others to end after one failed.
        tensorflow: whether Keras may import TensorFlow, which it does to set a random seed, in six seconds.
        **environment: variables to set for all; None unsets.

    Returns:
        The processes in their order.
    """
    inherited = {*os.environ} - {"KERAS_BACKEND", "NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    variables = {key: os.environ[key] for key in inherited} | {
        "KERAS_DISTRIBUTION_TIMEOUT": str(wait_seconds),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **environment,
    }
    output: dict[tuple[int, str], list[str]] = {
        (rank, name): [] for rank in range(processes) for name in ("stdout", "stderr")
    }
    with tempfile.TemporaryDirectory() as directory:
        call = [function.__module__, function.__name__, json.dumps(arguments), str(int(initialize))]
        call += [str(heartbeat_timeout), str(end_grace), str(int(tensorflow)), directory]
        outcome = launch(
            [sys.executable, "-m", "support.process_main", *call],
            processes,
            devices,
            show=lambda rank, name, line: output[rank, name].append(line),
            environment={key: value for key, value in variables.items() if value is not None},
            timeout=timeout,
            grace=grace,
        )
        files = [Path(directory, f"{rank}.json") for rank in range(processes)]
        results = [json.loads(file.read_text()) if file.is_file() else None for file in files]
    completed = [
        Completed(rank, status, "\n".join(output[rank, "stdout"]), "\n".join(output[rank, "stderr"]), results[rank])
        for rank, status in enumerate(outcome.statuses)
    ]
    if check and any(process.returncode for process in completed):
        raise AssertionError(f"Some processes failed, or took longer than {timeout:g} s:\n{output_of(completed)}")
    return completed


def output_of(completed: list[Completed]) -> str:
    """Returns the output of all processes, for the message of an assertion."""
    return "\n".join(
        f"--- process {process.rank}, exit status {process.returncode}\n{process.stdout}\n{process.stderr}"
        for process in completed
    )
