"""Processes that join, or fail to join, one another."""

import os
import signal
import socket
import time

import jax
import keras

import keras_dist as kd
from keras_dist.multihost import messaging


def failing_and_then_joining(ports):
    """Four attempts of three processes, and a fifth that succeeds."""
    rank = int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"])

    def attempt(port, count, number, timeout=8):
        try:
            kd.initialize(f"127.0.0.1:{port}", count, number, timeout=timeout)
        except (ValueError, RuntimeError, ConnectionError) as error:
            return [type(error).__name__, str(error)]
        return None

    results = []
    if rank == 0:
        with socket.create_server(("", ports[0])):
            results.append(attempt(ports[0], 3, 0))  # a port that is in use
    else:
        results.append(attempt(ports[1], 3, rank, timeout=2))  # where nobody is
    results.append(attempt(ports[2], 4, rank))  # one more than come
    results.append(attempt(ports[3], 3, min(rank, 1)))  # two as process 1
    results.append(attempt(ports[4], 2 if rank < 2 else 3, rank, timeout=60))  # one more comes than process 0 counts
    if rank == 2:
        return results

    kd.initialize()  # does nothing, though the environment says something else
    kd.initialize(num_processes=2, process_id=rank, timeout=60)
    for arguments in ({"num_processes": 3}, {"process_id": 1 - rank}, {"timeout": 5}, {"job_addresses": "a:1"}):
        try:
            kd.initialize(**arguments)
        except ValueError as error:
            results.append(str(error))
    return [*results, kd.num_processes(), kd.process_id(), kd.get_device_count(), float(keras.random.uniform(()))]


def with_different_counts():
    os.environ["KERAS_DISTRIBUTION_NUM_PROCESSES"] = str(2 + int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"]))
    kd.initialize()
    time.sleep(1000)


def after_jax():
    address = os.environ["KERAS_DISTRIBUTION_JOB_ADDRESSES"]
    rank = int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"])
    jax.distributed.initialize(address, 2, rank)
    kd.initialize()
    kd.initialize()
    assert messaging.exchange("numbers", rank) == [0, 1]
    return float(keras.random.uniform(())), ends_by_sigterm()


def ends_by_sigterm():
    """Whether SIGTERM ends this process: `signal.getsignal` does not know of handlers that are written in C++."""
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
