"""What `initialize` is told. Arguments come first, then the environment; joining itself is tested by real processes."""

import pytest
from support.new_process import run

import keras_dist as kd
from keras_dist._keras import internals


@pytest.fixture
def calls(monkeypatch):
    calls = []
    monkeypatch.setattr(internals, "initialize", lambda *arguments: calls.append(arguments[:3]))
    for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID", "TIMEOUT"):
        monkeypatch.delenv(f"KERAS_DISTRIBUTION_{name}", raising=False)
    return calls


def test_nothing_is_left_to_jax(calls):
    kd.initialize()
    assert calls == [(None, None, None)]


def test_arguments_win_over_the_environment(calls, monkeypatch):
    monkeypatch.setenv("KERAS_DISTRIBUTION_JOB_ADDRESSES", "10.0.0.1:1234")
    monkeypatch.setenv("KERAS_DISTRIBUTION_NUM_PROCESSES", "4")
    monkeypatch.setenv("KERAS_DISTRIBUTION_PROCESS_ID", "3")
    kd.initialize()
    kd.initialize(num_processes=2, process_id=1)
    assert calls == [("10.0.0.1:1234", 4, 3), ("10.0.0.1:1234", 2, 1)]


def test_a_number_that_is_none_is_named(calls, monkeypatch):
    monkeypatch.setenv("KERAS_DISTRIBUTION_NUM_PROCESSES", "two")
    with pytest.raises(ValueError, match=r"KERAS_DISTRIBUTION_NUM_PROCESSES must be an integer. Received: 'two'"):
        kd.initialize()


def test_a_process_beyond_the_last_is_refused(calls):
    with pytest.raises(ValueError, match="process_id=2, num_processes=2"):
        kd.initialize("10.0.0.1:1234", 2, 2)
    assert calls == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"job_addresses": "10.0.0.1", "num_processes": 2}, ValueError, "of which '10.0.0.1' is none"),
        ({"job_addresses": "a:1,b:x", "num_processes": 2}, ValueError, "of which 'b:x' is none"),
        ({"job_addresses": "a:1,b:1", "num_processes": 3}, ValueError, "2 in job_addresses='a:1,b:1', num_processes=3"),
        ({"job_addresses": 3}, TypeError, "job_addresses is a string. Received: job_addresses=3"),
        ({"num_processes": 0}, ValueError, "Received: num_processes=0"),
        ({"num_processes": 2.0}, TypeError, "num_processes is an integer"),
        ({"num_processes": True}, TypeError, "num_processes is an integer"),
        ({"process_id": -1}, ValueError, "process_id=-1"),
        ({"timeout": 0}, ValueError, "a time above 0. Received: timeout=0"),
        ({"timeout": float("nan")}, ValueError, "a time above 0"),
        ({"timeout": "long"}, TypeError, "timeout is a number of seconds. Received: timeout='long'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_waits(calls, arguments, error, message):
    with pytest.raises(error, match=message):
        kd.initialize(**arguments)
    assert calls == []


def test_after_jax_has_started_it_is_too_late():
    kd.get_device_count()
    with pytest.raises(RuntimeError, match=r"before JAX starts\. Received: .* its 8 cpu device\(s\)\. Call"):
        kd.initialize("127.0.0.1:1", 1, 0)


def test_without_a_cluster_and_arguments_the_ways_to_join_are_named():
    code = (
        "import keras_dist as kd\n"
        "for arguments in ({}, {'num_processes': 2, 'process_id': 0}, {'job_addresses': '127.0.0.1:1'}):\n"
        "    try:\n"
        "        kd.initialize(**arguments)\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
        "kd.simulate_devices(2)\n"
        "print(kd.num_processes(), kd.get_device_count())\n"
    )
    nothing = dict.fromkeys(f"KERAS_DISTRIBUTION_{name}" for name in ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID"))
    done = run(code, **nothing)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("none of these clusters is here") == 3
    assert "keras-dist launch -n 2" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 2"


def test_slurm_is_found():
    code = (
        "import socket, keras_dist as kd\n"
        "kd.simulate_devices(2)\n"
        "kd.initialize(timeout=30)\n"
        "kd.initialize()\n"
        "print(kd.num_processes(), kd.process_id(), kd.get_device_count())\n"
    )
    slurm = {"SLURM_JOB_ID": "4321", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "1"}
    done = run(code, SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_STEP_NUM_NODES="1", SLURM_JOB_NUM_NODES="1", **slurm)
    assert done.stdout.strip().endswith("1 0 2"), done.stderr


def test_a_process_can_join_a_cluster_of_one():
    code = (
        "import socket, keras_dist as kd\n"
        "with socket.socket() as s:\n"
        "    s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]\n"
        "kd.simulate_devices(2)\n"
        "kd.initialize(f'127.0.0.1:{port}', 1, 0)\n"
        "print(kd.num_processes(), kd.process_id(), kd.get_device_count())\n"
    )
    done = run(code)
    assert done.stdout.strip().endswith("1 0 2"), done.stderr
