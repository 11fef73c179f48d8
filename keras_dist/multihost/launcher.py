"""Starts several processes of one program on this machine, shows their output, and stops them together.

Uses neither JAX nor Keras.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, NamedTuple

FOLLOWER_STATUS = 70  # exit status of a process that ends because another one failed: EX_SOFTWARE of sysexits.h
STOPPED_STATUS = 75  # of a program that was asked to stop, and can continue: EX_TEMPFAIL of sysexits.h
STATUS_VARIABLE = "KERAS_DISTRIBUTION_STOPPED_STATUS"  # the exit status of `TrainingCheckpoint` after a signal
_GRACE = 15.0  # seconds that the others have to end by themselves after one failed
_ELASTIC_GRACE = 5.0  # the same in an elastic launch: they have saved, or wait for the dead process
_TERMINATION_GRACE = 5.0  # seconds from SIGTERM, which XLA catches and survives, to SIGKILL
STOP_GRACE = 30.0  # seconds that processes have to save and end after the launcher received one of the next line
# SIGTERM is how schedulers, clouds and `kill` end a program; Slurm sends SIGUSR1 if a job asks for it. Windows has one.
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
PIPE_VARIABLE = "KERAS_DISTRIBUTION_LAUNCHER_PIPE"  # descriptor and inode, for `failure_watch.end_with_launcher`
_DEVICES_FLAG = "--xla_force_host_platform_device_count"
_printing = threading.Lock()


class Outcome(NamedTuple):
    status: int  # 0, or the exit status of the first process that failed; 128 + n if signal n ended it
    failed: int | None  # the index of that process, or None if none failed before all were stopped
    statuses: list[int]  # exit status of each process; -n if signal n ended it


Events = queue.SimpleQueue["_Process | int"]  # processes that have ended, and signals that the launcher has received


def launch(
    command: Sequence[str],
    processes: int,
    devices_per_process: int | None = None,
    *,
    show: Callable[[int, str, str], None] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    grace: float = _GRACE,
    stop_grace: float = STOP_GRACE,
) -> Outcome:
    """Runs a command as several processes that `keras_dist.initialize()` joins, and waits until they end.

    If one fails, the others have `grace` seconds to end with their own error messages, and are then stopped. SIGINT and
    SIGHUP stop all. SIGTERM and SIGUSR1 are passed on to each, which has `stop_grace` seconds to save and end. If the
    launcher itself is killed, a process that has called `initialize` receives SIGTERM, and has 30 seconds.

    Each process has `devices_per_process` simulated CPU devices, by default the devices of this machine. `show` is
    called for each line of output with the index of the process, "stdout" or "stderr", and the line; by default it is
    `print_first_process`. `environment` takes the place of that of this process. After `timeout` seconds all are
    stopped.
    """
    with _received_signals() as events:
        return _run(command, processes, devices_per_process, events, show, environment, timeout, grace, stop_grace)[0]


def launch_elastic(
    command: Sequence[str],
    processes: int,
    devices_per_process: int | None = None,
    *,
    min_processes: int = 1,
    show: Callable[[int, str, str], None] | None = None,
    stop_grace: float = STOP_GRACE,
) -> Outcome:
    """Runs a command as `launch` does. If a process dies, starts all but one again; on SIGUSR2, all of them.

    The processes that are left cannot continue by themselves: a collective that waits for a dead process cannot be
    cancelled on CPUs and TPUs. So all are started again, and the program must continue from its newest checkpoint, for
    example with `kd.TrainingCheckpoint`. With fewer than `min_processes` it is not started again.

    A process counts as dead if a signal ended it, or if `kd.TrainingCheckpoint` stopped training for a signal that was
    not sent to the launcher, or if others ended because it no longer responded. Other failures are errors of the
    program, which would fail again, and end it.

    The processes share a cache of compiled programs for as long as the launcher runs, if the environment names none.
    Returns how the processes of the last start ended.
    """
    if not 1 <= min_processes <= processes:
        raise ValueError(f"min_processes={min_processes} is not between 1 and processes={processes}.")
    environment = {STATUS_VARIABLE: str(STOPPED_STATUS), **os.environ}
    count = processes
    with (
        tempfile.TemporaryDirectory(prefix="keras-dist-compiled-") as folder,
        _received_signals(signal.SIGUSR2) as events,
    ):
        if "JAX_COMPILATION_CACHE_DIR" not in environment:
            environment["JAX_COMPILATION_CACHE_DIR"] = folder  # so that a start compiles only what is new to it
            environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        while True:
            outcome, stopped_by = _run(
                command, count, devices_per_process, events, show, environment, None, _ELASTIC_GRACE, stop_grace
            )
            if outcome.status == 0:
                return outcome
            if stopped_by == signal.SIGUSR2:
                count, reason = processes, "Asked by SIGUSR2"
            elif outcome.failed is None or count == min_processes:
                return outcome
            else:
                status = outcome.statuses[outcome.failed]
                has_died = status < 0 or str(status) in (environment[STATUS_VARIABLE], str(FOLLOWER_STATUS))
                if not has_died:
                    return outcome
                count, reason = count - 1, f"Process {outcome.failed} ended with status {status}"
            noun = "process" if count == 1 else "processes"
            print(f"keras-dist: {reason}. Starting again with {count} {noun}.", file=sys.stderr, flush=True)


def _run(
    command: Sequence[str],
    processes: int,
    devices_per_process: int | None,
    events: Events,
    show: Callable[[int, str, str], None] | None,
    environment: Mapping[str, str] | None,
    timeout: float | None,
    grace: float,
    stop_grace: float,
) -> tuple[Outcome, int | None]:
    """Starts the processes once. Returns the outcome, and the signal to the launcher for which they were stopped."""
    for name, number in (("processes", processes), ("devices_per_process", devices_per_process)):
        if number is not None and number < 1:
            raise ValueError(f"{name}={number} is less than 1. Pass at least 1.")
    show = show or print_first_process
    common = dict(os.environ if environment is None else environment)
    if devices_per_process is not None:
        common |= _simulated_environment(devices_per_process, common.get("XLA_FLAGS", ""))
    group: list[_Process] = []
    pipe, writing = os.pipe()  # which ends for the processes when the launcher does, also if that is killed
    with open(pipe), open(writing, "w"), socket.socket() as reserved:
        # The port is given to no other program. The socket does not listen, and lets process 0 do so at its address.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        common |= {
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"127.0.0.1:{reserved.getsockname()[1]}",
            "KERAS_DISTRIBUTION_NUM_PROCESSES": str(processes),
            "PYTHONUNBUFFERED": "1",
            PIPE_VARIABLE: f"{pipe}:{os.fstat(pipe).st_ino}",
        }
        try:
            for rank in range(processes):
                own = common | {"KERAS_DISTRIBUTION_PROCESS_ID": str(rank)}
                group.append(_Process(rank, command, own, pipe, show, events))
            status, failed, stopped_by = _wait(group, events, timeout, grace, stop_grace)
        finally:
            _stop(group)
    return Outcome(status, failed, [process.wait() for process in group]), stopped_by


def _simulated_environment(devices: int, flags: str) -> dict[str, str]:
    from keras_dist.mesh.devices import cpu_thread_count  # the launcher itself needs nothing of this package

    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "NPROC": str(cpu_thread_count(devices)),
        "XLA_FLAGS": " ".join(flag for flag in flags.split() if not flag.startswith(_DEVICES_FLAG)),  # the older way
    }


class _Process(subprocess.Popen):
    """One process, with threads that read its output and wait for its end."""

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str], pipe: int, show, events):
        # In its own session, Ctrl-C reaches the launcher only, and its child processes can be signaled with it.
        super().__init__(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=(pipe,),
        )
        self.rank = rank
        self._readers = [
            threading.Thread(target=_read, args=(rank, name, getattr(self, name), show), daemon=True)
            for name in ("stdout", "stderr")
        ]
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._report_end, args=(events,), daemon=True).start()

    def _report_end(self, events: Events) -> None:
        self.finish(timeout=1)  # child processes may hold the streams open
        events.put(self)

    def signal_all(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
            os.killpg(self.pid, number)

    def finish(self, timeout: float) -> None:
        """Waits for the end of the process, and then at most `timeout` seconds for the rest of each output."""
        self.wait()
        for reader in self._readers:
            reader.join(timeout)


def _read(rank: int, name: str, stream: IO[str], show: Callable[[int, str, str], None]) -> None:
    with stream:
        for line in stream:
            show(rank, name, line.rstrip("\n"))


def print_all_processes(process: int, stream: str, line: str) -> None:
    with _printing:
        print(f"[{process}] {line}", file=getattr(sys, stream), flush=True)


def print_first_process(process: int, stream: str, line: str) -> None:
    """Prints standard output of process 0 alone, since the others repeat it, and standard error of all."""
    if process == 0 or stream == "stderr":
        print_all_processes(process, stream, line)


def _wait(
    group: list[_Process], events: Events, timeout: float | None, grace: float, stop_grace: float
) -> tuple[int, int | None, int | None]:
    """Waits until all have ended, or have had the time for it. Returns as `_run` and `Outcome`."""
    deadline = None if timeout is None else time.monotonic() + timeout
    failed: list[tuple[int, int]] = []
    running, stopped_by = len(group), None
    while running:
        try:
            event = events.get(timeout=None if deadline is None else max(0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(event, int):
            if event in (signal.SIGINT, signal.SIGHUP):
                return 128 + event, None, event
            number = event if event in STOP_SIGNALS else signal.SIGTERM
            for process in group:
                process.send_signal(number)  # not to its child processes, which may read its data
            if stopped_by is None:
                deadline = time.monotonic() + stop_grace
            if stopped_by not in STOP_SIGNALS:  # which are not followed by another start, in an elastic launch
                stopped_by = event
            continue
        if event not in group:  # but of an earlier start
            continue
        running -= 1
        if status := event.wait():
            failed.append((status if status > 0 else 128 - status, event.rank))
            if len(failed) == 1 and stopped_by is None:
                soon = time.monotonic() + grace
                deadline = soon if deadline is None else min(deadline, soon)
    if not failed:
        return (124 if running else 0), None, stopped_by  # 124 as in timeout(1)
    status, rank = next((each for each in failed if each[0] != FOLLOWER_STATUS), failed[0])
    return status, (rank if stopped_by is None else None), stopped_by


def _stop(group: list[_Process]) -> None:
    for process in group:
        if process.poll() is None:
            process.signal_all(signal.SIGTERM)
    deadline = time.monotonic() + _TERMINATION_GRACE
    while any(process.poll() is None for process in group) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in group:
        process.signal_all(signal.SIGKILL)
    for process in group:
        process.finish(timeout=5)


@contextlib.contextmanager
def _received_signals(*others: int) -> Iterator[Events]:
    """Yields a queue, to which the signals that the launcher receives are added: those of `launch`, and others."""
    events: Events = queue.SimpleQueue()
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield events
        return
    numbers = (signal.SIGINT, signal.SIGHUP, *STOP_SIGNALS, *others)
    before = [signal.signal(number, lambda number, frame: events.put(number)) for number in numbers]
    try:
        yield events
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
