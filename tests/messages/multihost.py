"""Errors of joining, messages and failures. Those that need real processes are made by the functions that word them."""

import os
from unittest import mock

import jax
import keras

import keras_dist as kd
from keras_dist.multihost import (
    coordination,
    failure_watch,
    initialize,
    launcher,
    messaging,
    program_comparison,
    value_comparison,
)
from keras_dist.variables import global_reads


def _initialize(**arguments):
    return lambda: kd.initialize(**arguments)


def _with_variable(name, value):
    def case():
        with mock.patch.dict(os.environ, {f"KERAS_DISTRIBUTION_{name}": value}):
            kd.initialize()

    return case


def _not_initialized():
    with mock.patch.dict(os.environ, {"KERAS_DISTRIBUTION_NUM_PROCESSES": "2"}):
        kd.set_distribution(kd.DataParallel())


def _second_call():
    state = mock.Mock(client=True, num_processes=2, process_id=0, coordinator_address="10.0.0.1:1234")
    with mock.patch.object(coordination._jax_distributed, "global_state", state):
        kd.initialize(num_processes=3)


def _no_cluster():
    error = ValueError("coordinator_address should be defined.")
    with (
        mock.patch.object(initialize, "has_jax_started", return_value=False),
        mock.patch.object(coordination, "join", side_effect=error),
    ):
        arguments = {"coordinator_address": None, "num_processes": None, "process_id": None}
        initialize._join(300, jax.distributed.initialize, **arguments)


def _different_numbers_of_processes():
    with (
        _messages_of(lambda topic, message: [4, 4, 3]),
        mock.patch.multiple(messaging, announce_start=mock.DEFAULT, process_count=lambda: 4),
        mock.patch.multiple(
            failure_watch,
            _report_uncaught_exceptions=mock.DEFAULT,
            atexit=mock.DEFAULT,
            threading=mock.DEFAULT,
            _live=set(),
            _threads=[],
        ),
    ):
        failure_watch.start()


def _waiting(**state):
    client = mock.Mock()
    client.blocking_key_value_get.side_effect = jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: no such key")
    replaced = {"client": lambda: client, "_look_up": lambda key: None, "ended_processes": list, **state}
    with mock.patch.multiple(messaging, **replaced):
        messaging._wait_for("keras_dist/model/0", "from/1", "'model'", lambda: "ended_processes" not in state)


def _not_joined(process, reason, processes=None):
    def case():
        library = coordination._BoundedLibrary(timeout=60)
        library._processes = processes
        return library._explain("10.0.0.1:1234", process, reason)

    return case


def _messages_of(processes):
    return mock.patch.object(messaging, "exchange", lambda topic, message, **_: processes(topic, message))


def _different_program():
    programs = [jax.make_jaxpr(function)(1.0) for function in (jax.numpy.sin, jax.numpy.tanh)]
    other = iter(
        [
            "another digest",
            [program_comparison.zlib.crc32(line.encode()) for line in program_comparison.program_lines(programs[1])],
            "b:f32[] = tanh a",
        ]
    )
    with _messages_of(lambda topic, message: [message, next(other)]):
        program_comparison.require_same_program(programs[0], "gpt")


def _different_calls():
    with _messages_of(lambda topic, message: [message, "get_weights() of 'bert', 4 variables"]):
        global_reads.require_same_call("reading of weights", "a/kernel", "All processes must read the same weights.")


def _unknown_variable():
    with global_reads._work.set_to(("save gpt.keras", {})):
        global_reads.request_shards(keras.Variable([1.0], name="scale"))


def _timeout(other=None):
    replaced = {
        "_by_process": lambda directory: {0: ""},
        "process_count": lambda: 2,
        "_look_up": lambda key: "host-1, pid 4321",
        "statuses": lambda topic: {} if other is None else {1: other},
    }
    with mock.patch.multiple(messaging, **replaced):
        return messaging._timeout_message("keras_dist/data 1/0", "'data 1' of evaluate")


def _behind():
    with (
        mock.patch.multiple(messaging, _look_up=lambda key: "host-1, pid 4321"),
        mock.patch.multiple(failure_watch, _fail=mock.DEFAULT) as replaced,
    ):
        failure_watch._require_equal_steps({0: 17, 1: 16, 2: 17})
    return replaced["_fail"].call_args.args[0]


def _different_values(place="the start of an epoch", rate=0.2):
    """Process 1 has another learning rate, and values of five kernels that differ by rounding."""
    rows = [[f"layer_{number}/kernel", "[:]", number, None, [2.0, 0.5]] for number in range(5)]
    others = [[name, part, checksum + 1, None, [2.0001, 0.5]] for name, part, checksum, *_ in rows]
    if rate is not None:
        rows.append(["sgd/learning_rate", "[]", 7, "0.01", None])
        others.append(["sgd/learning_rate", "[]", 8, f"{rate:g}", None])
    answers = iter([[["the start of an epoch", {"0,1": "a"}], [place, {"0,1": "b"}]], [rows, others]])
    with _messages_of(lambda topic, message: next(answers)):
        value_comparison.require_same_values("gpt", "the start of an epoch", [])


def _nothing_listens():
    library = coordination._BoundedLibrary(timeout=0)
    error = ConnectionRefusedError(111, "Connection refused")
    with mock.patch.object(coordination.socket, "create_connection", side_effect=error):
        library._wait_for_listener("10.0.0.1:1234", 1)


def _used_port():
    error = OSError(98, "Address already in use")
    with mock.patch.object(coordination.socket, "create_server", side_effect=error):
        coordination._require_free_port("[::]:1234")


CASES = {
    "an address without a port": _initialize(job_addresses="10.0.0.1"),
    "fewer addresses than processes": _initialize(job_addresses="10.0.0.1:1,10.0.0.2:1", num_processes=3),
    "a process id beyond the last": _initialize(num_processes=2, process_id=2),
    "no processes": _initialize(num_processes=0),
    "a process id of another type": _initialize(process_id="1"),
    "a timeout of 0": _initialize(timeout=0),
    "an invalid environment variable": _with_variable("NUM_PROCESSES", "two"),
    "initialize after JAX started": lambda: (kd.get_device_count(), kd.initialize("10.0.0.1:1234", 2, 0)),
    "a second call with other arguments": _second_call,
    "initialize without arguments and without a cluster": _no_cluster,
    "started as one of several, but not initialized": _not_initialized,
    "a port in use": _used_port,
    "process 0 is not there": _nothing_listens,
    "processes are missing": _not_joined(0, "DEADLINE_EXCEEDED", 4),
    "two processes with one id": _not_joined(1, "ALREADY_EXISTS"),
    "a process beyond the number of process 0": _not_joined(2, "Unexpected task"),
    "process 0 ends while others join": _not_joined(1, "UNAVAILABLE: failed to connect to all addresses"),
    "another error of JAX": _not_joined(1, "INTERNAL: connection lost"),
    "processes have different numbers of processes": _different_numbers_of_processes,
    "a message after jax.distributed.shutdown": coordination.client,
    "a process ends while another one waits": lambda: _waiting(ended_processes=lambda: [1]),
    "a comparison is cancelled": _waiting,
    "a process does not come in time": _timeout,
    "a process hangs before a step": _behind,
    "a process waits elsewhere": lambda: _timeout("'shared values' of fit"),
    "processes have other values": _different_values,
    "processes round in other ways": lambda: _different_values(rate=None),
    "processes train for other epochs": lambda: _different_values("the end of fit"),
    "processes run different programs": _different_program,
    "processes make different calls": _different_calls,
    "process 0 reads an unknown variable": _unknown_variable,
    "process 0 cannot save": lambda: str(
        global_reads._error_of_process_zero(["OSError", "disk full"], "save gpt.keras")
    ),
    "launch of no processes": lambda: launcher.launch(["true"], 0),
}
