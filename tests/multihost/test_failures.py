"""If one process fails, the other ends in bounded time, with a message that names it."""

import pytest
from multihost.programs import failures
from support.run_processes import output_of, run_processes
from support.slow_cases import slow, slow_unless

from keras_dist.checkpoint import restore
from keras_dist.multihost import launcher

pytestmark = pytest.mark.multiprocess

SHORT_WAIT, LONG_WAIT = 5, 60  # seconds that processes wait for messages of one another after the start
HEARTBEAT_TIMEOUT = 10  # seconds without a heartbeat after which a process counts as dead; a busy machine delays some
END_GRACE = 4  # seconds that a process has to end by itself after another one failed
START = 60  # seconds that starting and working take at most on a busy machine

RAISES, ENDS, ABORTS = {1}, {70, 1}, {-6}  # exit statuses of the other process

# How process `who` fails while it works with the other, its exit status, those of the other, and what the other
# prints. Process 0 holds the coordination service: if it is killed or stopped, JAX aborts the other.
TABLE = [
    ("messages", "raises", 0, 1, RAISES, "failed: KeyError: 'the reason'"),
    ("messages", "raises", 1, 1, RAISES, "failed: KeyError: 'the reason'"),
    ("messages", "is killed", 0, -9, ABORTS, "leader task was preempted/died"),
    ("messages", "is killed", 1, -9, RAISES, "Process 1 ("),
    ("messages", "ends early", 0, 0, RAISES, "Process 0 ("),
    ("messages", "ends early", 1, 0, RAISES, "Process 1 ("),
    ("messages", "is stopped", 0, -9, ABORTS | RAISES, "Heartbeat"),
    ("messages", "stalls", 0, 70, ENDS, "waited 5 seconds"),
    ("messages", "stalls", 1, 70, ENDS, "waited 5 seconds"),
    ("devices", "is killed", 1, -9, RAISES, "Process 1 ("),
    ("devices", "is stopped", 1, -9, {70}, "Process 1 ("),
    ("fit", "raises", 1, 1, ENDS, "failed: KeyError: 'the reason'"),
    ("fit", "is killed", 0, -9, ABORTS | RAISES, "leader task was preempted/died"),
    ("fit", "is killed", 1, -9, ENDS, "process 1 ("),
    ("fit", "crashes", 1, -11, ENDS, "process 1 ("),
    ("fit", "is interrupted", 1, -2, ENDS, "process 1 ("),
    ("fit", "is stopped", 1, -9, {70}, "process 1 ("),
    ("fit", "ends early", 1, 0, ENDS, "process 1 ("),
    ("fit", "ends without cleanup", 1, 3, ENDS, "process 1 ("),
    ("fit", "stalls", 1, 70, ENDS, "waited 5 seconds"),
    ("last batches", "stalls", 1, 70, ENDS, "Process 1 ("),
    ("single batches", "stalls", 0, 70, ENDS, "has not begun step 5 of this program"),
    ("single batches", "stalls", 1, 70, ENDS, "has not begun step 5 of this program"),
    ("fit", "stops after an epoch", 0, 1, ENDS, "different numbers of epochs"),
]
# One case of each way to detect a failure; the others are marked slow.
FAST = {
    ("messages", "raises", 1),
    ("devices", "is killed", 1),
}


@pytest.mark.parametrize(
    ("work", "failure", "who", "status", "statuses_of_other", "reason"),
    [slow_unless(case[:3] in FAST, *case) for case in TABLE],
    ids=[" ".join(map(str, case[:3])) for case in TABLE],
)
def test_the_other_process_ends_and_names_the_reason(
    work, failure, who, status, statuses_of_other, reason, monkeypatch
):
    monkeypatch.setattr(launcher, "_TERMINATION_GRACE", 1.0)  # a stopped process only reacts to SIGKILL
    done = run(work, failure, who, SHORT_WAIT if failure == "stalls" else LONG_WAIT)
    output = output_of(done)
    assert done[who].returncode == status, output
    assert done[1 - who].returncode in statuses_of_other, output
    assert reason.lower() in done[1 - who].stderr.lower(), output
    assert "bad_cast" not in output


@pytest.mark.slow
def test_a_process_is_named_that_misses_a_message_before_a_heartbeat():
    done = run("fit", "is killed", 1, SHORT_WAIT)
    assert done[0].returncode in ENDS, output_of(done)
    assert "for process 1 (" in done[0].stderr, output_of(done)
    assert "Exception in thread" not in done[0].stderr


@pytest.mark.parametrize(
    ("who", "file", "arguments"),
    [
        (1, "arrays", {"save_freq": 4}),  # the last save, at the eighth batch, of which the end of fit learns
        slow(0, "progress", {"save_freq": 4}),
        slow(0, "progress", {"save_freq": 3, "save_on_background": False, "max_to_keep": 2}),
        slow(1, "arrays", {"save_freq": 3, "save_on_background": False}),
    ],
)
def test_all_processes_end_where_one_cannot_write_its_part_of_a_checkpoint(who, file, arguments, tmp_path):
    done = run_until_one_cannot_write(tmp_path, who, file, arguments, LONG_WAIT)
    output = output_of(done)
    assert done[who].returncode == 1, output
    assert done[1 - who].returncode in ENDS, output
    reason = "No space left on device" if file == "progress" else "File too large"
    assert "OSError: A checkpoint could not be written to" in done[who].stderr, output
    assert f"Process {who} (" in done[1 - who].stderr, output
    assert reason in done[1 - who].stderr, output
    assert restore.steps(str(tmp_path))[0] == ("6" if arguments["save_freq"] == 3 else "4")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "file", "arguments"),
    [
        (1, "blocked arrays", {"save_freq": 4}),
        (0, "blocked arrays", {"save_freq": 3}),
        (1, "blocked progress", {"save_freq": 3, "save_on_background": False}),
        (1, "blocked checksums", {"save_freq": 4}),
    ],
)
def test_all_processes_end_where_the_write_of_one_never_returns(who, file, arguments, tmp_path):
    done = run_until_one_cannot_write(tmp_path, who, file, arguments, SHORT_WAIT)
    output = output_of(done)
    place = "checksums of a new checkpoint" if file == "blocked checksums" else "writing of a checkpoint"
    for process in done:
        assert process.returncode in ENDS, output
        assert f"Process {1 - who} waited 5 seconds at '{place}' for process {who} (" in process.stderr, output
    assert restore.steps(str(tmp_path))[0] == ("6" if arguments["save_freq"] == 3 else "4")


def run_until_one_cannot_write(directory, *arguments):
    call = failures.cannot_write, str(directory), *arguments
    return run_processes(*call, devices=1, check=False, end_grace=END_GRACE, timeout=2 * START, grace=START)


def run(work, failure, who, wait):
    limit = START + SHORT_WAIT + HEARTBEAT_TIMEOUT + 2 * END_GRACE  # after which the launcher kills all
    return run_processes(
        failures.fail,
        *(work, failure, who, wait),
        devices=1,
        check=False,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        end_grace=END_GRACE,
        timeout=limit,
        grace=1 if failure == "is stopped" else limit,
    )
