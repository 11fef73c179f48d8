"""A program whose processes die is started again with fewer, and with all of them when asked."""

import json
import os
import signal
import subprocess
import sys

import pytest
from multihost.programs import preempted
from support.run_processes import TESTS

from keras_dist.multihost import launcher
from keras_dist_cli import main


@pytest.mark.slow
@pytest.mark.multiprocess
def test_training_continues_with_fewer_processes_and_with_all_again(tmp_path):
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [sys.executable, "-m", "keras_dist", "launch", "-n", "3", "--devices-per-process", "1", "--elastic"]
    command += ["-m", "multihost.programs.preempted", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"PYTHONPATH": paths, "KERAS_BACKEND": "jax"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Process 1 ended with status -9. Starting again with 2 processes." in done.stderr
    assert "Asked by SIGUSR2. Starting again with 3 processes." in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "losses.txt").read_text().splitlines()]
    starts = [0, *(index for index in range(1, len(rows)) if rows[index][0] != rows[index - 1][0])]
    assert [rows[start][0] for start in starts] == [3, 2, 3]
    first, second = (rows[start][1] for start in starts[1:])
    assert first in (4, 6)  # after the newest checkpoint that was complete
    assert second in (10, 11)  # after the batch that all had finished when they were asked to stop
    compiled = [rows[end - 1][3] for end in [*starts[1:], len(rows)]]  # programs that process 0 did not find
    assert compiled[2] < compiled[0] / 2, compiled  # at most what the first start did not reach
    losses = preempted.train(str(tmp_path / "one process"))[0]
    assert [*range(len(losses))] == sorted({step for _, step, *_ in rows})
    for _, step, loss, _ in rows:
        assert loss == pytest.approx([*losses.values()][step], rel=1e-6), step


PROGRAM = """
import os, signal, sys
count = os.environ["KERAS_DISTRIBUTION_NUM_PROCESSES"]
rank = os.environ["KERAS_DISTRIBUTION_PROCESS_ID"]
with open(sys.argv[1], "a") as file:
    file.write(count)
if rank == "0":
    {end}
"""


@pytest.mark.parametrize(
    ("end", "least", "chosen", "starts", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 2, None, "333" + "22", 137),
        ("sys.exit(int(os.environ['KERAS_DISTRIBUTION_STOPPED_STATUS']))", 1, None, "333" + "22" + "1", 75),
        ("sys.exit(int(os.environ['KERAS_DISTRIBUTION_STOPPED_STATUS']))", 1, "3", "333" + "22" + "1", 3),
        ("raise KeyError", 1, None, "333", 1),
        ("pass", 1, None, "333", 0),
    ],
)
def test_what_is_started_again(end, least, chosen, starts, status, tmp_path, monkeypatch):
    if chosen is not None:
        monkeypatch.setenv("KERAS_DISTRIBUTION_STOPPED_STATUS", chosen)
    program = PROGRAM.format(end=end)
    outcome = launcher.launch_elastic([sys.executable, "-c", program, str(tmp_path / "starts")], 3, min_processes=least)
    assert outcome.status == status
    assert (tmp_path / "starts").read_text() == starts


@pytest.mark.parametrize(
    ("number", "starts", "status"), [(signal.SIGUSR2, [3, 2, 3], 0), (signal.SIGTERM, [3, 2], 143)]
)
def test_a_signal_between_two_starts_is_not_lost(number, starts, status, tmp_path, monkeypatch):
    """It comes while the launcher stops what is left of the first start, so it ends the processes of the second."""
    program = """
import os, signal, sys, time
if os.environ["KERAS_DISTRIBUTION_NUM_PROCESSES"] == "2":
    time.sleep(1000)
if not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    stop, found = launcher._stop, []

    def stop_and_raise(group):
        stop(group)
        found.append(len(group))
        if found == [3]:
            signal.raise_signal(number)

    monkeypatch.setattr(launcher, "_stop", stop_and_raise)
    outcome = launcher.launch_elastic([sys.executable, "-c", program, str(tmp_path / "begun")], 3)
    assert (outcome.status, found) == (status, starts)


def test_the_command_checks_the_number_of_processes(capsys, tmp_path):
    (tmp_path / "program.py").touch()
    for options, value in [
        (["--min-processes", "2"], "--min-processes 2 needs --elastic"),
        (["--elastic", "--min-processes", "3"], "min_processes=3"),
    ]:
        assert main(["launch", "-n", "2", *options, str(tmp_path / "program.py")]) == 2
        assert value in capsys.readouterr().err
