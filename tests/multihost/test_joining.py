"""`initialize` with real processes: what cannot be is an error in bounded time, after which it can be tried again."""

import contextlib
import os
import socket

from support.run_processes import in_words, run_processes

import keras_dist as kd


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def failing_and_then_joining(ports):
    """Four attempts of three processes, and a fifth that succeeds."""
    import socket

    rank = int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"])

    def attempt(port, count, number, timeout=8):
        try:
            kd.initialize(f"127.0.0.1:{port}", count, number, timeout=timeout)
        except (ValueError, RuntimeError, ConnectionError) as error:
            return [type(error).__name__, str(error)]
        return None

    said = []
    if rank == 0:
        with socket.create_server(("", ports[0])):
            said.append(attempt(ports[0], 3, 0))  # a port that is in use
    else:
        said.append(attempt(ports[1], 3, rank, timeout=2))  # where nobody is
    said.append(attempt(ports[2], 4, rank))  # one more than come
    said.append(attempt(ports[3], 3, min(rank, 1)))  # two as process 1
    said.append(attempt(ports[4], 2 if rank < 2 else 3, rank, timeout=60))  # one more comes than process 0 counts
    if rank == 2:
        return said

    kd.initialize()  # does nothing, though the environment says something else
    kd.initialize(num_processes=2, process_id=rank, timeout=60)
    for arguments in ({"num_processes": 3}, {"process_id": 1 - rank}, {"timeout": 5}, {"job_addresses": "a:1"}):
        try:
            kd.initialize(**arguments)
        except ValueError as error:
            said.append(str(error))
    import keras

    return [*said, kd.num_processes(), kd.process_id(), kd.get_device_count(), float(keras.random.uniform(()))]


def test_what_cannot_be_is_an_error_after_which_it_can_be_tried_again():
    done = run_processes(
        failing_and_then_joining, free_ports(5), processes=3, devices=2, initialize=False, timeout=240, check=False
    )
    words = in_words(done)
    assert [process.returncode for process in done] == [0, 0, 0], words
    first, short, twice, last = zip(*(process.result[:4] for process in done), strict=True)

    assert first[0][0] == "ValueError"
    assert "Process 0 listens at a free port of its host. Received: port" in first[0][1]
    for rank in (1, 2):
        assert first[rank][0] == "ConnectionError"
        assert f"process {rank} has found nobody for 2 seconds" in first[rank][1]

    for rank in range(3):
        assert short[rank][0] == "RuntimeError"
        assert f"wait for one another for 8 seconds at its start. Received: process {rank} at" in short[rank][1]

    assert "to which not all 3 processes came" in twice[0][1]
    assert sorted(who in twice[rank][1] for rank in (1, 2) for who in ("a number of its own", "not all")) == [
        *(False, False),
        *(True, True),
    ]

    assert last[:2] == (None, None)
    assert "process 0 counts fewer processes" in last[2][1]

    for rank in range(2):
        *others, count, number, devices, _ = done[rank].result[4:]
        assert (count, number, devices) == (2, rank, 4)
        assert len(others) == 4
        assert "Received: num_processes=3, after it has joined with num_processes=2" in others[0]
    assert done[0].result[-1] == done[1].result[-1]


def test_processes_that_count_differently_are_an_error_in_all():
    program = """
    os.environ["KERAS_DISTRIBUTION_NUM_PROCESSES"] = str(2 + int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"]))
    kd.initialize()
    import time
    time.sleep(1000)
    """
    done = run_processes(program, devices=1, initialize=False, check=False)
    words = in_words(done)
    assert "ValueError: All processes count the same number of processes. Received: num_processes=3" in done[1].stderr
    assert done[1].returncode == 1, words
    assert "Process 1 (" in done[0].stderr, words
    assert done[0].returncode == 70, words


def test_processes_that_keras_or_jax_has_joined_are_taken():
    program = """
    import jax, keras
    from keras_dist.multihost import messaging
    address = os.environ["KERAS_DISTRIBUTION_JOB_ADDRESSES"]
    rank = int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"])
    jax.distributed.initialize(address, 2, rank)
    kd.initialize()
    kd.initialize()
    assert messaging.exchange("numbers", rank) == [0, 1]
    give_back(float(keras.random.uniform(())))
    """
    first, second = run_processes(program, devices=1, initialize=False)
    assert first.result == second.result is not None
