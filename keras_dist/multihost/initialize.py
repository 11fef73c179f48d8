"""Joins this process to the others of a program, with settings from arguments, the environment or the cluster."""

import functools
import numbers
import os
from collections.abc import Callable
from typing import Any

import jax

from keras_dist._keras import internals
from keras_dist._report.units import counted
from keras_dist._report.user_warnings import warn
from keras_dist.mesh.devices import has_jax_started
from keras_dist.multihost import coordination, failure_watch, messaging

_KINDS = {str: (str, "a string"), int: (numbers.Integral, "an integer"), float: (numbers.Real, "a number of seconds")}
_timeout: float | None = None  # with which this process has joined


def initialize(
    job_addresses: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float | None = None,
) -> None:
    """Joins this process to the others of a multi-process program. Call it before anything else uses JAX.

    If neither arguments nor environment variables are set, JAX detects the cluster: Slurm, Open MPI, Kubernetes, Cloud
    TPU. `keras-dist launch` starts processes on one machine, for which `initialize()` needs no arguments. A second call
    does nothing.

    After this call, each process watches the others. If one raises an exception, dies, or does not take part in a
    common operation, the others end at most 10 seconds after the timeout, with a message that names it. All processes
    get one random seed.

    Args:
        job_addresses: `"host:port"` of process 0, or the addresses of all processes joined by commas, process
            0 first. Environment: `KERAS_DISTRIBUTION_JOB_ADDRESSES`.
        num_processes: Number of processes. Environment: `KERAS_DISTRIBUTION_NUM_PROCESSES`.
        process_id: Index of this process, from 0. Environment: `KERAS_DISTRIBUTION_PROCESS_ID`.
        timeout: For how many seconds processes wait for one another, at the start and later; 600 by default. A
            process that is killed or stopped is detected after `min(timeout, 60)` seconds. Environment:
            `KERAS_DISTRIBUTION_TIMEOUT`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is invalid, the port is in use, there is no cluster and no arguments, or a second
            call passes other arguments than the first.
        RuntimeError: JAX is already initialized, or not all processes joined within the timeout.
        ConnectionError: Process 0 does not listen at its address.

    Example: a program for `keras-dist launch -n 2 train.py` or `srun python train.py` begins with

        import keras_dist as kd

        kd.initialize()
    """
    global _timeout
    if coordination.is_joined():
        _require_same(job_addresses, num_processes, process_id, timeout)
    job_addresses = _argument_or_variable("job_addresses", job_addresses, str)
    num_processes = _argument_or_variable("num_processes", num_processes, int)
    process_id = _argument_or_variable("process_id", process_id, int)
    given_timeout = _argument_or_variable("timeout", timeout, float)
    _validate(job_addresses, num_processes, process_id, given_timeout)
    seconds = messaging.DEFAULT_TIMEOUT if given_timeout is None else given_timeout
    if not coordination.is_joined():
        internals.initialize(job_addresses, num_processes, process_id, functools.partial(_join, seconds))
    elif _timeout is None:  # `jax.distributed.initialize` or `keras.distribution.initialize` has joined the processes
        coordination.give_back_sigterm()
        _watch(seconds)
        internals.backend_lib.initialize_rng()


def _join(timeout: float, jax_initialize: Callable, **arguments) -> None:
    """Keras calls this in place of `jax.distributed.initialize`, before it draws one random seed for all processes."""
    if has_jax_started():
        devices = counted(jax.local_device_count(), f"{jax.default_backend()} device")
        raise RuntimeError(
            f"initialize() was called after JAX created its {devices}. Call keras_dist.initialize() directly after "
            "`import keras_dist`, before anything creates a Keras layer, a mesh or a JAX array, or lists devices."
        )
    try:
        coordination.join(timeout, jax_initialize, **arguments)
    except ValueError as error:
        if "must be defined" not in str(error) and "should be defined" not in str(error):
            raise
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        given = given.replace("coordinator_address=", "job_addresses=")  # JAX's name for it
        raise ValueError(
            f"initialize() found no cluster (Slurm, Open MPI, Kubernetes or Cloud TPU), and {given}. Pass "
            "job_addresses, num_processes and process_id, set the KERAS_DISTRIBUTION_* variables, or start the program "
            "with `keras-dist launch -n 2 ...`. A program of one process needs no initialize()."
        ) from None
    _watch(timeout)


def _watch(timeout: float) -> None:
    global _timeout
    _timeout = timeout
    failure_watch.end_with_launcher()
    if messaging.is_multi_process():
        messaging.timeout = timeout
        failure_watch.start()


def warn_unless_joined() -> None:
    """Warns if this process was started as one of several, as by `keras-dist launch`, but has not joined them."""
    count = os.environ.get("KERAS_DISTRIBUTION_NUM_PROCESSES", "1")
    if count != "1" and not jax.distributed.is_initialized():
        warn(
            f"This process is one of {count} (KERAS_DISTRIBUTION_NUM_PROCESSES), but it has not joined the others, so "
            "each of them trains a model of its own. Call keras_dist.initialize() directly after `import keras_dist`."
        )


def _argument_or_variable(name: str, value: Any, kind: type) -> Any:
    accepted, description = _KINDS[kind]
    if value is None:
        variable = f"KERAS_DISTRIBUTION_{name.upper()}"
        if (text := os.environ.get(variable)) is None:
            return None
        try:
            return kind(text)
        except ValueError:
            raise ValueError(
                f"Environment variable {variable}={text!r} is not {description}. Correct or unset it."
            ) from None
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} ({type(value).__name__}) is not {description}.")
    return kind(value)


def _validate(addresses: str | None, count: int | None, index: int | None, timeout: float | None) -> None:
    if count is not None and count < 1:
        raise ValueError(f"num_processes={count} is less than 1. Pass the number of processes that are started.")
    if index is not None and not 0 <= index < (index + 1 if count is None else count):
        raise ValueError(
            f"process_id={index} is not between 0 and num_processes - 1 (num_processes={count}). Number the processes "
            "from 0."
        )
    if timeout is not None and not 0 < timeout < float("inf"):
        raise ValueError(f"timeout={timeout:g} is not a positive, finite number of seconds.")
    if addresses is None:
        return
    listed = addresses.split(",")
    for address in listed:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                f"{address!r} in job_addresses={addresses!r} is not 'host:port'. Write, for example, '10.0.0.1:1234'; "
                "separate several addresses with commas."
            )
    if len(listed) > 1 and count is not None and len(listed) != count:
        raise ValueError(
            f"job_addresses={addresses!r} lists {len(listed)} addresses, but num_processes={count}. Pass the address "
            "of process 0 alone, or one address for each process."
        )


def _require_same(addresses: str | None, count: int | None, index: int | None, timeout: float | None) -> None:
    joined = {
        "job_addresses": (addresses and addresses.split(",")[0], coordination.address()),
        "num_processes": (count, messaging.process_count()),
        "process_id": (index, messaging.process_index()),
        "timeout": (timeout, timeout if _timeout is None else _timeout),
    }
    for name, (value, before) in joined.items():
        if value is not None and value != before:
            raise ValueError(
                f"A second initialize() passes {name}={value!r}, but this process joined with {name}={before!r}. "
                "Remove the second call or its arguments."
            )
