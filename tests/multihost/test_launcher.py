"""`keras-dist launch` with programs that do not use JAX."""

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest
from support.slow_cases import slow

import keras_dist
from keras_dist.multihost import launcher
from keras_dist.multihost.launcher import launch, print_all_processes
from keras_dist_cli import main


def run(source, *arguments, processes=3, devices=None, **options):
    """Returns the outcome, and the lines of each stream of each process."""
    lines = {}
    outcome = launch(
        [sys.executable, "-c", source, *arguments],
        processes,
        devices,
        show=lambda rank, name, line: lines.setdefault((rank, name), []).append(line),
        **options,
    )
    return outcome, lines


def test_each_process_gets_its_index_and_all_get_one_address():
    source = """
import os, sys
for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID"):
    print(os.environ["KERAS_DISTRIBUTION_" + name])
print(sys.argv[1:], file=sys.stderr)
"""
    outcome, lines = run(source, "a", "-b")
    assert outcome == (0, None, [0, 0, 0])
    assert [lines[rank, "stdout"][1:] for rank in range(3)] == [["3", "0"], ["3", "1"], ["3", "2"]]
    [address] = {lines[rank, "stdout"][0] for rank in range(3)}
    assert address.startswith("127.0.0.1:")
    assert [lines[rank, "stderr"] for rank in range(3)] == [["['a', '-b']"]] * 3


def test_devices_are_simulated_if_requested():
    source = "import os; print(*map(os.environ.get, ('JAX_PLATFORMS', 'JAX_NUM_CPU_DEVICES', 'NPROC', 'XLA_FLAGS')))"
    flags = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=3 --xla_dump_to=x", "NPROC": "3"}
    flags.pop("JAX_PLATFORMS", None)
    flags.pop("JAX_NUM_CPU_DEVICES", None)
    _, lines = run(source, processes=1, devices=12, environment=flags)
    assert lines[0, "stdout"] == ["cpu 12 24 --xla_dump_to=x"]
    _, lines = run(source, processes=1, environment=flags)
    assert lines[0, "stdout"] == ["None None 3 " + flags["XLA_FLAGS"]]


TWO_STREAMS = """
import os, sys
rank = os.environ["KERAS_DISTRIBUTION_PROCESS_ID"]
print("first", rank)
print("second", rank, file=sys.stderr)
sys.stdout.write("the last, without an end")
"""


@pytest.mark.parametrize(
    ("show", "of_process_1"), [(None, []), (print_all_processes, ["[1] first 1", "[1] the last, without an end"])]
)
def test_each_line_is_printed_after_the_index_of_its_process(show, of_process_1, capfd):
    assert launch([sys.executable, "-c", TWO_STREAMS], 2, show=show).status == 0
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == ["[0] first 0", "[0] the last, without an end", *of_process_1]
    assert sorted(shown.err.splitlines()) == ["[0] second 0", "[1] second 1"]


def test_output_that_the_program_does_not_flush_is_shown_at_once():
    source = "import os, time; print('begun'); time.sleep(1000)"
    seen = []

    def show(rank, name, line):
        seen.append(line)

    assert launch([sys.executable, "-c", source], 1, show=show, timeout=2).status == 124
    assert seen == ["begun"]


@pytest.mark.parametrize(
    ("end", "status", "own"),
    [slow("sys.exit(3)", 3, 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137, -9), slow("raise KeyError(1)", 1, 1)],
)
def test_the_first_failure_stops_the_others_and_is_the_status(end, status, own, monkeypatch):
    monkeypatch.setattr(launcher, "_TERMINATION_GRACE", 1.0)
    source = f"""
import os, signal, sys, time
rank = int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"])
if rank == 1:
    {end}
if rank == 2:
    signal.signal(signal.SIGTERM, lambda *_: None)  # as XLA does
    while True:
        time.sleep(1)
time.sleep(1000)
"""
    outcome, _ = run(source, grace=1)
    assert outcome == (status, 1, [-15, own, -9])


@pytest.mark.slow
def test_the_others_have_time_to_end_with_their_own_errors():
    source = """
import os, sys, time
if os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] == "1":
    sys.exit(5)
time.sleep(2)
print("the last")
sys.exit(70)
"""
    outcome, lines = run(source)
    assert outcome == (5, 1, [70, 5, 70])
    assert lines[0, "stdout"] == lines[2, "stdout"] == ["the last"]


def test_the_status_is_not_that_of_a_process_that_ended_because_of_another():
    source = """
import os, sys, time
if os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] == "1":
    sys.exit(70)
time.sleep(1)
sys.exit(3)
"""
    assert run(source)[0].status == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_stops_all_processes(number, tmp_path):
    source = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print("pids", os.getpid(), child.pid)
time.sleep(1000)
"""
    (tmp_path / "program.py").write_text(source)
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "program.py")], stdout=subprocess.PIPE, text=True
    )
    lines = [process.stdout.readline().split() for _ in range(2)]
    pids = [int(word) for line in lines for word in line[2:]]
    assert len(pids) == 4
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, pids))


# Without the rest of the package, which the launcher does not need, so it starts fast.
LAUNCHER = f"""
import importlib.util, sys
specification = importlib.util.spec_from_file_location("launch", {keras_dist.__path__[0] + "/multihost/launcher.py"!r})
launch = importlib.util.module_from_spec(specification)
sys.modules["launch"] = launch
specification.loader.exec_module(launch)
assert "jax" not in sys.modules
sys.exit(launch.launch([sys.executable, sys.argv[1]], 2, show=launch.print_all_processes).status)
"""


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.multiprocess
def test_processes_end_when_the_launcher_is_killed(tmp_path):
    source = """
import os, signal, sys, time
sys.modules["tensorflow"] = None  # which Keras imports to set a random seed, in six seconds
import keras_dist as kd
if os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] == "0":  # like TrainingCheckpoint, which saves first
    signal.signal(signal.SIGTERM, lambda *_: (open(__file__ + ".saved", "w").close(), os._exit(0)))
kd.initialize()
print("pid", os.getpid())
while True:
    time.sleep(0.1)  # a signal that comes just before a sleep does not end it, and its handler runs after it
"""
    program = tmp_path / "program.py"
    program.write_text(source)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(program)], stdout=subprocess.PIPE, text=True, env=environment
    )
    lines = (line.split() for line in process.stdout)
    pids = [int(words[2]) for words in itertools.islice((words for words in lines if "pid" in words), 2)]
    assert all(map(is_running, pids))
    process.kill()
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, pids))
    assert program.with_suffix(".py.saved").exists()


# ------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize("module", [False, True])
def test_the_command_passes_arguments_to_the_program(module, tmp_path, monkeypatch, capfd):
    (tmp_path / "program.py").write_text("import sys; print(sys.argv[1:]); sys.exit(4)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    program = ["-m", "program"] if module else [str(tmp_path / "program.py")]
    assert main(["launch", "-n", "1", *program, "--epochs", "3", "-n", "7", "--help"]) == 4
    shown = capfd.readouterr()
    assert shown.out == "[0] ['--epochs', '3', '-n', '7', '--help']\n"
    assert shown.err == "keras-dist: process 0 was the first to fail, with exit status 4.\n"


@pytest.mark.parametrize("options", [["-n", "0"], ["-n", "1", "--devices-per-process", "0"]])
def test_less_than_one_process_or_device_is_an_error(options, capsys, tmp_path):
    (tmp_path / "program.py").touch()
    assert main(["launch", *options, str(tmp_path / "program.py")]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("keras-dist: error: ")
    assert "processes=0" in shown or "devices_per_process=0" in shown


@pytest.mark.parametrize("arguments", [["launch"], ["launch", "-n", "2"], ["launch", "program.py"]])
def test_the_command_needs_a_number_of_processes_and_a_program(arguments, capsys):
    assert main(arguments) == 2
    assert "error: the following arguments are required" in capsys.readouterr().err


def test_a_missing_program_is_refused_before_processes_start(capfd, tmp_path):
    assert main(["launch", "-n", "1", str(tmp_path / "nothing.py")]) == 2
    assert str(tmp_path / "nothing.py") in capfd.readouterr().err
