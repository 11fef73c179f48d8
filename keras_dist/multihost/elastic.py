"""Starts a program again with fewer processes when one dies, and with all of them when asked.

Uses neither JAX nor Keras. The processes that are left cannot continue by themselves: a collective that waits for a
dead process cannot be cancelled on CPUs and TPUs. So all are started again, and continue from their newest checkpoint.
"""

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

from keras_dist.multihost import launcher
from keras_dist.multihost.launcher import FOLLOWER_STATUS, Outcome

STOPPED_STATUS = 75  # of a program that was asked to stop, and can continue: EX_TEMPFAIL of sysexits.h
STATUS_VARIABLE = "KERAS_DISTRIBUTION_STOPPED_STATUS"  # the exit status of `TrainingCheckpoint` after a signal
_GRACE = 5.0  # seconds that the others have to end: they have saved, or wait for the dead process


def launch_elastic(
    command: Sequence[str],
    processes: int,
    devices_per_process: int | None = None,
    *,
    min_processes: int = 1,
    show: Callable[[int, str, str], None] | None = None,
    environment: Mapping[str, str] | None = None,
    stop_grace: float = launcher.STOP_GRACE,
) -> Outcome:
    """Runs a command as `launch` does. If a process dies, starts all but one again; on SIGUSR2, all of them.

    A process counts as dead if a signal ended it, or if `kd.TrainingCheckpoint` stopped training for a signal that was
    not sent to the launcher, or if others ended because it no longer responded. Other failures are errors of the
    program, which would fail again, and end it.

    The processes share a cache of compiled programs for as long as the launcher runs, if the environment names none.

    Arguments are as for `launch`, except that the program must resume by itself, for example with
    `kd.TrainingCheckpoint`, that `stop_grace` is also for processes that are started again after SIGUSR2, and that the
    program is not started again with fewer than `min_processes`. Returns how the processes of the last start ended.
    """
    if not 1 <= min_processes <= processes:
        raise ValueError(f"min_processes={min_processes} is not between 1 and processes={processes}.")
    environment = dict(os.environ if environment is None else environment)
    environment.setdefault(STATUS_VARIABLE, str(STOPPED_STATUS))
    count = processes
    with _compiled_programs(environment), launcher.received_signals(signal.SIGUSR2) as events:
        while True:
            outcome, stopped_by = launcher.run(
                command, count, devices_per_process, events, show, environment, None, _GRACE, stop_grace
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


@contextlib.contextmanager
def _compiled_programs(environment: dict[str, str]) -> Iterator[None]:
    """Gives the processes a folder for compiled programs, so that a start compiles only what is new to it."""
    if "JAX_COMPILATION_CACHE_DIR" in environment:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="keras-dist-compiled-") as folder:
        environment["JAX_COMPILATION_CACHE_DIR"] = folder
        environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield
