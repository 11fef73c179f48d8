"""Joining the processes of one program: what they are told by arguments, environment or cluster, and if it can be."""

import functools
import numbers
import os
from collections.abc import Callable
from typing import Any

import jax

from keras_dist._keras import internals
from keras_dist.multihost import coordination, messaging

_VARIABLES = {
    "job_addresses": "KERAS_DISTRIBUTION_JOB_ADDRESSES",
    "num_processes": "KERAS_DISTRIBUTION_NUM_PROCESSES",
    "process_id": "KERAS_DISTRIBUTION_PROCESS_ID",
    "timeout": "KERAS_DISTRIBUTION_TIMEOUT",
}
_timeout: float | None = None  # with which this process has joined


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float | None = None,
) -> None:
    """Joins this process to the others of a multi-process program. Call it before anything else uses JAX.

    Where arguments and environment say nothing, JAX finds the cluster by itself: Slurm, Open MPI, Kubernetes, Cloud
    TPU. On one machine, `keras-dist launch` starts processes for which `initialize()` needs no arguments. A second call
    does nothing.

    From then on every process watches the others: where one fails, dies or does not come to what they do together, the
    others end within the timeout, with words that name it. All have one random seed.

    Args:
        job_addresses: `"host:port"` of process 0, or the addresses of all processes joined by commas, process
            0 first. Environment: `KERAS_DISTRIBUTION_JOB_ADDRESSES`.
        num_processes: how many processes there are. Environment: `KERAS_DISTRIBUTION_NUM_PROCESSES`.
        process_id: the number of this process, from 0. Environment: `KERAS_DISTRIBUTION_PROCESS_ID`.
        timeout: for how many seconds processes wait for one another, at the start and later; 600 by default.
            Environment: `KERAS_DISTRIBUTION_TIMEOUT`.

    Raises:
        TypeError: an argument of another type.
        ValueError: numbers or addresses that cannot be, a port that is in use, no cluster and no arguments, or other
            arguments than in the first call.
        RuntimeError: JAX has started already, or not all processes came within the timeout.
        ConnectionError: process 0 is not where `job_addresses` says.

    Example: a program that `keras-dist launch -n 2 train.py` runs, or `srun python train.py`, begins with

        import keras_dist as kd

        kd.initialize()
    """
    global _timeout
    if coordination.is_joined():
        _require_same(job_addresses, num_processes, process_id, timeout)
    job_addresses = _told("job_addresses", job_addresses, str)
    num_processes = _told("num_processes", num_processes, int)
    process_id = _told("process_id", process_id, int)
    told_timeout = _told("timeout", timeout, float)
    _check(job_addresses, num_processes, process_id, told_timeout)
    wait = messaging.DEFAULT_TIMEOUT if told_timeout is None else told_timeout
    if not coordination.is_joined():
        internals.initialize(job_addresses, num_processes, process_id, functools.partial(_start, wait))
    elif _timeout is None:  # JAX's own function, or Keras's, has joined the processes
        _timeout = wait
        _watch(wait)
        internals.initialize_seed()


def _start(timeout: float, real: Callable, **arguments) -> None:
    """What Keras calls as `jax.distributed.initialize`, before it makes one random seed with all processes."""
    global _timeout
    if coordination.has_jax_started():
        raise RuntimeError(
            "Processes are joined before JAX starts. Received: initialize() after JAX has made its "
            f"{jax.local_device_count()} {jax.default_backend()} device(s). Call keras_dist.initialize() directly "
            "after `import keras_dist`, before anything makes a Keras layer, a mesh or a JAX array, or lists devices."
        )
    try:
        coordination.join(timeout, real, **arguments)
    except ValueError as error:
        if "must be defined" not in str(error) and "should be defined" not in str(error):
            raise
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ValueError(
            "The processes of a program are told their number, their count and where process 0 is, or find it out from "
            f"Slurm, Open MPI, Kubernetes or Cloud TPU. Received: {given}, and none of these clusters is here. Pass "
            "job_addresses, num_processes and process_id, set the KERAS_DISTRIBUTION_* variables, or start the program "
            "with `keras-dist launch -n 2 ...`; a program of one process needs no initialize()."
        ) from None
    _timeout = timeout
    _watch(timeout)


def _watch(timeout: float) -> None:
    if messaging.are_several():
        messaging.set_timeout(timeout)
        messaging.watch()


# --------------------------------------------------------------------------------------------- what they are told


def _told(name: str, value: Any, kind: type) -> Any:
    """An argument, or what the environment says in its place."""
    if value is None:
        text = os.environ.get(_VARIABLES[name])
        if text is None:
            return None
        try:
            return kind(text)
        except ValueError:
            what = "an integer" if kind is int else "a number of seconds"
            raise ValueError(
                f"The environment variable {_VARIABLES[name]} must be {what}. Received: {text!r}. Correct or unset it."
            ) from None
    taken = {str: str, int: numbers.Integral, float: numbers.Real}[kind]
    if not isinstance(value, taken) or isinstance(value, bool):
        what = {str: "a string", int: "an integer", float: "a number of seconds"}[kind]
        raise TypeError(f"{name} is {what}. Received: {name}={value!r} ({type(value).__name__}). Correct it.")
    return kind(value)


def _check(addresses: str | None, count: int | None, number: int | None, timeout: float | None) -> None:
    if count is not None and count < 1:
        raise ValueError(f"There is one process or more. Received: num_processes={count}. Count all that are started.")
    if number is not None and not 0 <= number < (number + 1 if count is None else count):
        raise ValueError(
            f"process_id must lie between 0 and num_processes - 1. Received: process_id={number}, "
            f"num_processes={count}. Number the processes from 0."
        )
    if timeout is not None and not 0 < timeout < float("inf"):
        raise ValueError(f"Processes wait for a time above 0. Received: timeout={timeout:g}. Give a number of seconds.")
    if addresses is None:
        return
    listed = addresses.split(",")
    for address in listed:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                f"An address is 'host:port', several are joined by commas. Received: job_addresses={addresses!r}, of "
                f"which {address!r} is none. Write, for example, '10.0.0.1:1234'."
            )
    if len(listed) > 1 and count is not None and len(listed) != count:
        raise ValueError(
            f"There is one address for all processes, that of process 0, or one for each. Received: {len(listed)} in "
            f"job_addresses={addresses!r}, num_processes={count}. Correct either."
        )


def _require_same(addresses: str | None, count: int | None, number: int | None, timeout: float | None) -> None:
    """Raises an error where a second call says something else than the first."""
    joined = {
        "job_addresses": (addresses and addresses.split(",")[0], coordination.address()),
        "num_processes": (count, messaging.count()),
        "process_id": (number, messaging.index()),
        "timeout": (timeout, timeout if _timeout is None else _timeout),
    }
    for name, (now, before) in joined.items():
        if now is not None and now != before:
            raise ValueError(
                f"A process joins the others once. Received: {name}={now!r}, after it has joined with "
                f"{name}={before!r}. Drop the second initialize(), or its arguments."
            )
