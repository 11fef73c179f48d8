"""If one process fails, the other ends in bounded time, with a message that names it."""

import time

import pytest
from multihost.programs import failures
from support.run_processes import output_of, run_processes

pytestmark = pytest.mark.multiprocess

WAIT = 12  # seconds that processes wait for one another after the start
HEARTBEAT = 20  # seconds without a heartbeat after which a process counts as dead
START = 60  # seconds that starting and working take at most on a busy machine

TOLD, FOLLOWS, ABORTED = {1}, {70, 1}, {-6}  # exit statuses of the other process

# How process `who` fails while it works with the other, its exit status, those of the other, and what the other
# prints. Process 0 holds the coordination service: if it is killed or stopped, JAX aborts the other.
TABLE = [
    ("messages", "raises", 0, 1, TOLD, "failed: KeyError: 'the reason'"),
    ("messages", "raises", 1, 1, TOLD, "failed: KeyError: 'the reason'"),
    ("messages", "is killed", 0, -9, ABORTED, "leader task was preempted/died"),
    ("messages", "is killed", 1, -9, TOLD, "Process 1 ("),
    ("messages", "ends early", 0, 0, TOLD, "Process 0 ("),
    ("messages", "ends early", 1, 0, TOLD, "Process 1 ("),
    ("messages", "is stopped", 0, -9, ABORTED | TOLD, "Heartbeat"),
    ("messages", "stalls", 0, 70, TOLD, "waited 12 seconds"),
    ("messages", "stalls", 1, 70, TOLD, "waited 12 seconds"),
    ("devices", "is killed", 1, -9, TOLD, "Process 1 ("),
    ("devices", "is stopped", 1, -9, {70}, "Process 1 ("),
    ("fit", "raises", 1, 1, FOLLOWS, "failed: KeyError: 'the reason'"),
    ("fit", "is killed", 0, -9, ABORTED | TOLD, "leader task was preempted/died"),
    ("fit", "is killed", 1, -9, FOLLOWS, "process 1 ("),
    ("fit", "crashes", 1, -11, FOLLOWS, "process 1 ("),
    ("fit", "is interrupted", 1, -2, FOLLOWS, "process 1 ("),
    ("fit", "is stopped", 1, -9, {70}, "process 1 ("),
    ("fit", "ends early", 1, 0, FOLLOWS, "process 1 ("),
    ("fit", "ends without cleanup", 1, 3, FOLLOWS, "process 1 ("),
    ("fit", "stalls", 1, 70, FOLLOWS, "waited 12 seconds"),
]
# One case of each way to detect a failure; the others are marked slow.
FAST = {("messages", "raises", 1), ("messages", "is killed", 0), ("devices", "is killed", 1), ("fit", "stalls", 1)}


@pytest.mark.parametrize(
    ("work", "failure", "who", "status", "statuses_of_other", "reason"),
    [
        pytest.param(*case, id=" ".join(map(str, case[:3])), marks=[] if case[:3] in FAST else [pytest.mark.slow])
        for case in TABLE
    ],
)
def test_the_other_process_ends_and_names_the_reason(work, failure, who, status, statuses_of_other, reason):
    begin = time.monotonic()
    done = run_processes(
        failures.fail,
        *(work, failure, who, WAIT),
        devices=1,
        check=False,
        wait_seconds=HEARTBEAT,
        timeout=START + WAIT + 2 * HEARTBEAT,
        grace=1 if failure == "is stopped" else 2 * HEARTBEAT,
    )
    seconds = time.monotonic() - begin
    output = output_of(done)
    assert done[who].returncode == status, output
    assert done[1 - who].returncode in statuses_of_other, output
    assert reason.lower() in done[1 - who].stderr.lower(), output
    assert "bad_cast" not in output
    assert seconds < START + WAIT + 2 * HEARTBEAT, output
