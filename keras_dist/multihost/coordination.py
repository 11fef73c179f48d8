"""Joins JAX's coordination service in bounded time. The only file that uses JAX's private names for it.

The service runs in process 0; the clients of all processes send it heartbeats and store short messages in it.
"""

import functools
import ipaddress
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed as _jax_distributed
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from keras_dist._report.units import counted

HEARTBEAT_TIMEOUT = 60  # seconds without a heartbeat after which a process counts as dead
_RETRY_INTERVAL = 0.5  # seconds
_JAX_MARGIN = 5  # seconds that JAX waits for other processes beyond its `init_timeout`

heartbeat_timeout = 100  # that of this program; at first JAX's default, for processes that JAX itself has joined
_make_cpu_collectives = _jax.make_gloo_tcp_collectives


def client() -> Any:
    """Returns JAX's client of the service; raises ConnectionError if this process has not joined a cluster."""
    client = _jax_distributed.global_state.client
    if client is None:
        raise ConnectionError(
            "This process has left the other processes: jax.distributed.shutdown() was called, or the program is "
            "ending. Remove that call, and make all Keras calls before the program ends."
        )
    return client


def is_joined() -> bool:
    """Whether this process has joined a cluster, which may consist of this process alone."""
    return _jax_distributed.global_state.client is not None


def process_count() -> int:
    """Returns the number of processes, without initializing JAX's backends."""
    return _jax_distributed.global_state.num_processes if is_joined() else 1


def process_index() -> int:
    return _jax_distributed.global_state.process_id if is_joined() else 0


def address() -> str:
    """Returns the address of the service, as `"host:port"`."""
    return str(_jax_distributed.global_state.coordinator_address)


def join(timeout: float, initialize: Callable, **arguments) -> None:
    """Calls `jax.distributed.initialize`, bounds its waiting time, and raises an error where JAX would abort."""
    global heartbeat_timeout
    module: Any = _jax_distributed
    address = arguments.get("coordinator_address")
    host = None if address is None else _split_address(address)[0]
    if host is not None and _is_loopback(host):  # all processes are on this machine; by default JAX listens elsewhere
        arguments["coordinator_bind_address"] = address
        _jax.make_gloo_tcp_collectives = functools.partial(_make_cpu_collectives, hostname=host)
    else:
        _jax.make_gloo_tcp_collectives = _make_cpu_collectives
    heartbeat_timeout = max(1, int(min(HEARTBEAT_TIMEOUT, timeout)))
    jax.config.update("jax_enable_recoverability", True)  # else JAX aborts all processes when one dies
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:  # it would take SIGTERM, and do nothing with it by itself
        jax.config.update("jax_enable_preemption_service", False)
    library, module._jax = module._jax, _BoundedLibrary(timeout)
    try:
        initialize(
            initialization_timeout=max(1, int(timeout)), heartbeat_timeout_seconds=heartbeat_timeout, **arguments
        )
    except Exception:  # another call must be possible after a failed one
        state = _jax_distributed.global_state
        for part in filter(None, (state.client, state.service)):
            _shutdown_error(part)
        vars(state).clear()  # its class has the initial values
        raise
    finally:
        module._jax = library


def give_back_sigterm() -> None:
    """Undoes for SIGTERM what JAX's preemption service did where JAX itself has joined the processes.

    The service notes the signal in a handler that Python does not know, and does nothing with it by itself.
    """
    handler = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ and handler is not None and is_main:
        signal.signal(signal.SIGTERM, handler)


class _BoundedLibrary:
    """Replaces JAX's C++ library during `jax.distributed.initialize`, which passes it the detected cluster."""

    def __init__(self, timeout: float):
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._processes: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(_jax, name)

    def get_distributed_runtime_service(self, bind_address: str, processes: int, **options) -> Any:
        self._processes = processes
        _require_free_port(bind_address)
        return _jax.get_distributed_runtime_service(bind_address, processes, **options)

    def get_distributed_runtime_client(self, address: str, process: int, **options) -> Any:
        if process != 0:
            self._wait_for_listener(address, process)
        options["init_timeout"] = max(1, int(self._deadline - time.monotonic() - _JAX_MARGIN))
        # A client of JAX aborts this process when it cannot connect. With a Python callback it raises an exception
        # instead (it cannot convert the callback's argument, so the callback never runs), but then its message at the
        # death of process 0 is only "std::bad_cast". So a first client finds out whether all processes can join, and
        # a second one, with JAX's own messages, takes its place. That takes 3 ms.
        trial = _jax.get_distributed_runtime_client(address, process, missed_heartbeat_callback=print, **options)
        try:
            trial.connect()
        except Exception as error:
            raise RuntimeError(self._explain(address, process, _shutdown_error(trial) or str(error))) from None
        trial.shutdown()
        return _jax.get_distributed_runtime_client(address, process, **options)

    def _wait_for_listener(self, address: str, process: int) -> None:
        while True:
            try:
                patience = max(1, self._deadline - time.monotonic())
                with socket.create_connection(_split_address(address), timeout=patience):
                    return
            except OSError as error:
                if time.monotonic() + _RETRY_INTERVAL > self._deadline:
                    raise ConnectionError(
                        f"Process {process} could not connect to process 0 at {address!r} within {self._timeout:g} "
                        f"seconds: {error}. Check that process 0 runs on that host and has not failed, and that no "
                        "firewall blocks the port; if process 0 starts later, increase initialize(timeout=...)."
                    ) from None
            time.sleep(_RETRY_INTERVAL)

    def _explain(self, address: str, process: int, reason: str) -> str:
        if "newer incarnation" in reason or "ALREADY_EXISTS" in reason:
            return (
                f"Two processes joined {address} with process_id={process}. Give each process its own process_id, from "
                "0 to num_processes - 1."
            )
        if "Unexpected task" in reason:
            return (
                f"Process {process} joined {address}, but process 0 has a num_processes of {process} or less. Pass the "
                "same num_processes to all processes."
            )
        if "DEADLINE_EXCEEDED" in reason:
            count = "" if self._processes is None else f"{self._processes} "
            return (
                f"Process {process} waited {counted(self._timeout, 'second')} at {address}, but not all {count}"
                "processes joined. Check the output of the missing processes, that num_processes is the number of "
                "processes started, and that each has its own process_id; if they only start later, increase "
                "initialize(timeout=...)."
            )
        if any(status in reason for status in ("UNAVAILABLE", "ABORTED", "CANCELLED")):
            return (
                f"Process {process} joined {address}, but process 0 ended or stopped waiting before the others joined: "
                f"not all processes joined within its timeout. Check the output of process 0. JAX reports: {reason}"
            )
        return f"Process {process} could not join the others at {address}. JAX reports: {reason}"


def _shutdown_error(part: Any) -> str:
    """Shuts a client or service of JAX down. Returns its error; that of a failed client tells why it failed."""
    try:
        part.shutdown()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    """Whether only processes of this machine can connect to a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def _require_free_port(bind_address: str) -> None:
    """Raises a ValueError if another program listens at the port, which gRPC would share with it silently."""
    host, port = _split_address(bind_address)
    try:
        if host in ("::", "0.0.0.0") and socket.has_dualstack_ipv6():
            socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True).close()
        else:
            family = socket.AF_INET6 if ":" in host and host != "::" else socket.AF_INET
            socket.create_server(("" if host == "::" else host, port), family=family).close()
    except OSError as error:
        raise ValueError(
            f"Process 0 cannot listen at port {port}: {error}. Another program, or an earlier run of this one, may "
            "use it: end that program, or choose another port in job_addresses."
        ) from None
