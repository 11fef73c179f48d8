"""`initialize` with real processes: failures are errors in bounded time, and joining can be tried again."""

import contextlib
import socket

import pytest
from multihost.programs import joining
from support.run_processes import output_of, run_processes

pytestmark = pytest.mark.multiprocess


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.mark.slow
def test_failed_attempts_are_errors_after_which_joining_works():
    arguments = joining.failing_and_then_joining, free_ports(5)
    done = run_processes(*arguments, processes=3, devices=2, initialize=False, timeout=240, check=False)
    assert [process.returncode for process in done] == [0, 0, 0], output_of(done)
    port, missing, duplicate, count = zip(*(process.result[:4] for process in done), strict=True)

    assert port[0][0] == "ValueError"
    for rank in (1, 2):
        assert port[rank][0] == "ConnectionError"
        assert f"Process {rank}" in port[rank][1]
        assert "2 seconds" in port[rank][1]

    assert "Process 0 waited 8 seconds" in missing[0][1]
    for rank in range(3):
        assert missing[rank][0] == "RuntimeError"
        # Process 0 waits no longer, and tells the others. It may have left before they hear of it.
        told, left = f"Process {rank} waited 8 seconds", "process 0 ended or stopped waiting"
        assert told in missing[rank][1] or left in missing[rank][1]

    assert "not all 3 processes" in duplicate[0][1]
    assert sorted("process_id=1" in duplicate[rank][1] for rank in (1, 2)) == [False, True]
    assert sorted("not all" in duplicate[rank][1] for rank in (1, 2)) == [False, True], duplicate

    assert count[:2] == (None, None)
    assert count[2][0] == "RuntimeError"
    assert "num_processes of 2 or less" in count[2][1]

    for rank in range(2):
        *second_calls, processes, index, devices, _ = done[rank].result[4:]
        assert (processes, index, devices) == (2, rank, 4)
        assert len(second_calls) == 4
        assert "num_processes=3" in second_calls[0]
        assert "num_processes=2" in second_calls[0]
    assert done[0].result[-1] == done[1].result[-1]


def test_different_numbers_of_processes_end_all():
    done = run_processes(joining.with_different_counts, devices=1, initialize=False, check=False)
    for process in done:
        assert process.returncode == 1, output_of(done)
        assert "ValueError: Process 1 has num_processes=3, but process 0 has num_processes=2" in process.stderr


def test_processes_that_jax_has_joined_are_accepted():
    first, second = run_processes(joining.after_jax, devices=1, initialize=False)
    random, ends_by_sigterm = first.result
    assert second.result == [random, ends_by_sigterm]
    assert ends_by_sigterm  # JAX's preemption service took the signal
