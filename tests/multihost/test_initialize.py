"""The arguments of `initialize`, its environment variables, and clusters of one process; see also test_joining.py."""

import signal

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


def test_without_arguments_jax_detects_the_cluster(calls):
    kd.initialize()
    assert calls == [(None, None, None)]


def test_arguments_win_over_the_environment(calls, monkeypatch):
    monkeypatch.setenv("KERAS_DISTRIBUTION_JOB_ADDRESSES", "10.0.0.1:1234")
    monkeypatch.setenv("KERAS_DISTRIBUTION_NUM_PROCESSES", "4")
    monkeypatch.setenv("KERAS_DISTRIBUTION_PROCESS_ID", "3")
    kd.initialize()
    kd.initialize(num_processes=2, process_id=1)
    assert calls == [("10.0.0.1:1234", 4, 3), ("10.0.0.1:1234", 2, 1)]


def test_an_invalid_variable_is_named(calls, monkeypatch):
    monkeypatch.setenv("KERAS_DISTRIBUTION_NUM_PROCESSES", "two")
    with pytest.raises(ValueError, match="KERAS_DISTRIBUTION_NUM_PROCESSES='two'"):
        kd.initialize()


def test_a_process_id_beyond_the_last_is_refused(calls):
    with pytest.raises(ValueError, match=r"process_id=2 .*num_processes=2"):
        kd.initialize("10.0.0.1:1234", 2, 2)
    assert calls == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"job_addresses": "10.0.0.1", "num_processes": 2}, ValueError, "'10.0.0.1' in job_addresses='10.0.0.1'"),
        ({"job_addresses": "a:1,b:x", "num_processes": 2}, ValueError, "'b:x' in job_addresses='a:1,b:x'"),
        (
            {"job_addresses": "a:1,b:1", "num_processes": 3},
            ValueError,
            "lists 2 addresses, but num_processes=3",
        ),
        ({"job_addresses": 3}, TypeError, r"job_addresses=3 \(int\)"),
        ({"num_processes": 0}, ValueError, "num_processes=0"),
        ({"num_processes": 2.0}, TypeError, r"num_processes=2.0 \(float\)"),
        ({"num_processes": True}, TypeError, r"num_processes=True \(bool\)"),
        ({"process_id": -1}, ValueError, "process_id=-1"),
        ({"timeout": 0}, ValueError, "timeout=0"),
        ({"timeout": float("nan")}, ValueError, "timeout=nan"),
        ({"timeout": "long"}, TypeError, r"timeout='long' \(str\)"),
    ],
)
def test_invalid_arguments_are_refused(calls, arguments, error, message):
    with pytest.raises(error, match=message):
        kd.initialize(**arguments)
    assert calls == []


def test_joining_after_jax_started_is_refused():
    kd.get_device_count()
    with pytest.raises(RuntimeError, match="8 cpu devices"):
        kd.initialize("127.0.0.1:1", 1, 0)


@pytest.mark.slow
def test_without_cluster_and_arguments_there_is_an_error():
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
    assert done.stdout.count("initialize() found no cluster") == 3
    assert "num_processes=2, process_id=0" in done.stdout
    assert "keras-dist launch -n 2" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 2"


@pytest.mark.slow
def test_slurm_is_detected():
    code = (
        "import keras_dist as kd\n"
        "kd.simulate_devices(2)\n"
        "kd.initialize(timeout=30)\n"
        "kd.initialize()\n"
        "print(kd.num_processes(), kd.process_id(), kd.get_device_count())\n"
    )
    slurm = {"SLURM_JOB_ID": "4321", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "1"}
    done = run(code, SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_STEP_NUM_NODES="1", SLURM_JOB_NUM_NODES="1", **slurm)
    assert done.stdout.strip().endswith("1 0 2"), done.stderr


ALONE = """
import os, signal, socket
import keras_dist as kd

def action_of_sigterm():
    "What SIGTERM does: `signal.getsignal` does not know of handlers that are written in C++."
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return "ends the process" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM else "nothing"

def listening():
    "The addresses at which this process listens, as /proc has them."
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    mine = {os.readlink(path) for path in paths if os.path.exists(path)}
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    return {line[1].rpartition(":")[0][-8:] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine}

with socket.socket() as free:
    free.bind(("127.0.0.2", 0))
    port = free.getsockname()[1]
kd.simulate_devices(2)
kd.initialize(f"127.0.0.2:{port}", 1, 0, timeout=30)
actions = [action_of_sigterm()]
import keras, numpy as np
kd.set_distribution(kd.DataParallel())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((8, 4), "float32")
for _ in range(2):
    actions.append(action_of_sigterm())
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: actions.append(action_of_sigterm()))
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[note])
actions.append(action_of_sigterm())
print({*actions}, len(actions))
print(kd.num_processes(), kd.process_id(), kd.get_device_count(), listening())
os.kill(os.getpid(), signal.SIGTERM)
print("alive")
"""


@pytest.mark.multiprocess
def test_one_process_can_be_a_cluster():
    """JAX's own defaults are that SIGTERM does nothing, and that sockets listen at the address of the host's name."""
    done = run(ALONE)
    of_sigterm, of_cluster = done.stdout.splitlines()[-2:]
    assert of_sigterm == "{'ends the process'} 6", done.stderr
    assert of_cluster == "1 0 2 {'0200007F'}", done.stderr
    assert done.returncode == -signal.SIGTERM
