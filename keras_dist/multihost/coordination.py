"""JAX's coordination service, through which processes find and hear each other: joined in bounded time, in clear words.

JAX ends a process in C++, with a stack trace, where it cannot join. What can be known before is asked before, and
what JAX finds comes back as an error. This is the only file that knows JAX's private names for it.
"""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed as _jax_distributed
from jax._src import xla_bridge as _xla_bridge
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

LINGER = 30  # seconds that the service outlives a process 0 that dies, for the others to hear of it
_MAX_HEARTBEAT = 100  # seconds, JAX's default
_RETRY = 0.5  # seconds
_START = 60  # seconds that the program of the service may take to start
_JAX_EXTRA = 5  # seconds that JAX waits longer for the others than it is told


def client() -> Any:
    """Returns JAX's client of the service, None where there are no other processes."""
    return _jax_distributed.global_state.client


def is_joined() -> bool:
    """Whether this process has joined others, or a cluster of one."""
    return client() is not None


def process_count() -> int:
    """Returns the number of processes that were joined, for which JAX need not start."""
    return _jax_distributed.global_state.num_processes if is_joined() else 1


def process_index() -> int:
    """Returns the number of this process."""
    return _jax_distributed.global_state.process_id if is_joined() else 0


def address() -> str:
    """Returns the address of the service that was joined, as `"host:port"`."""
    return str(_jax_distributed.global_state.coordinator_address)


def has_jax_started() -> bool:
    """Whether JAX has made its devices, after which no other processes can be joined."""
    return _xla_bridge.backends_are_initialized()


# ------------------------------------------------------------------------------------------------- joining


def join(timeout: float, start: Callable, **arguments) -> None:
    """Calls `jax.distributed.initialize` so that it waits for a bounded time and ends with an error in words.

    Args:
        timeout: seconds for everything.
        start: `jax.distributed.initialize`.
        **arguments: of it.

    Raises:
        ValueError: what the processes were told cannot be.
        RuntimeError: not all processes have come.
    """
    state, joining = _jax_distributed.global_state, _Joining(timeout)
    jax.config.update("jax_enable_recoverability", True)  # or the death of a process aborts the others
    module: Any = _jax_distributed
    real, module._jax = module._jax, joining
    try:
        heartbeat = max(1, int(min(_MAX_HEARTBEAT, timeout)))
        start(initialization_timeout=max(1, int(timeout)), heartbeat_timeout_seconds=heartbeat, **arguments)
    except Exception as error:
        said = _forget(state)
        if joining.address is None or isinstance(error, ConnectionError):
            raise
        raise RuntimeError(joining.explain(said or str(error))) from None
    finally:
        module._jax = real


class _Joining:
    """Stands for JAX's library while `jax.distributed.initialize` runs, which has found out by then who is who."""

    def __init__(self, timeout: float):
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._processes: int | None = None
        self._process = 0
        self.address: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(_jax, name)

    def get_distributed_runtime_service(self, bind_address: str, processes: int, **options) -> Any:
        self._processes = processes
        known = ("heartbeat_timeout", "shutdown_timeout", "recoverable")
        others = [option for option, value in options.items() if value and option not in known]  # those of TLS
        if processes == 1 or others or not sys.executable:
            return _jax.get_distributed_runtime_service(bind_address, processes, **options)
        return _Service(bind_address, processes, options["heartbeat_timeout"], options["shutdown_timeout"])

    def get_distributed_runtime_client(self, address: str, process: int, **options) -> Any:
        self.address, self._process = address, process
        if process != 0:
            _wait_for_listener(address, process, self._deadline, self._timeout)
        left = self._deadline - time.monotonic() - _JAX_EXTRA
        options["init_timeout"] = max(1, int(left))
        # With a function of Python as the callback, JAX raises an error where it would abort; it is never called,
        # since nothing turns its argument into Python.
        return _jax.get_distributed_runtime_client(address, process, missed_heartbeat_callback=_ignore, **options)

    def explain(self, said: str) -> str:
        """The error of a process that reached the service and was not taken in."""
        who = f"process {self._process}"
        if "newer incarnation" in said or "ALREADY_EXISTS" in said:
            return (
                f"Each process has a number of its own. Received: process_id={self._process} at {self.address}, as "
                f"which another process has come too. Number the processes from 0, each number once."
            )
        if "Unexpected task" in said:
            return (
                f"A process has a number below the count of processes. Received: process_id={self._process} at "
                f"{self.address}, where process 0 counts fewer processes. Give all of them one num_processes."
            )
        if "DEADLINE_EXCEEDED" in said:
            count = "all" if self._processes is None else f"all {self._processes}"
            return (
                f"The processes of a program wait for one another for {self._timeout:g} seconds at its start. "
                f"Received: {who} at {self.address}, to which not {count} processes came in that time. See "
                "that num_processes is the number of processes that were started, that each has a process_id of its "
                "own, and what those that are missing say; if they only take longer, raise initialize(timeout=...)."
            )
        return (
            f"The processes of a program join at process 0. Received: {who} at {self.address}, where JAX says: {said}"
        )


def _ignore(status: Any) -> None:
    return None


def _forget(state: Any) -> str:
    """Leaves JAX as before a failed attempt to join. Returns what its client says was wrong."""
    said = ""
    for attribute in ("client", "service"):
        part = getattr(state, attribute)
        setattr(state, attribute, None)
        if part is not None:
            try:
                part.shutdown()
            except jax.errors.JaxRuntimeError as error:
                said = str(error)
    state.process_id, state.num_processes, state.coordinator_address = 0, 1, None
    return said


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of `"host:port"`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _wait_for_listener(address: str, process: int, deadline: float, timeout: float) -> None:
    """Waits until something listens at an address.

    Raises:
        ConnectionError: nothing does within the timeout.
    """
    while True:
        try:
            with socket.create_connection(split_address(address), timeout=max(1, deadline - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() + _RETRY > deadline:
                raise ConnectionError(
                    f"Process 0 listens at the address that all processes are given. Received: {address!r}, at which "
                    f"process {process} has found nobody for {timeout:g} seconds: {error}. See that process 0 runs "
                    "on that host, that it has not failed, and that no firewall lies between; if it only starts "
                    "later, raise initialize(timeout=...)."
                ) from None
        time.sleep(_RETRY)


# ------------------------------------------------------------------------------------------------- the service


class _Service:
    """The service in a process of its own, with the one method of JAX's own that JAX calls."""

    def __init__(self, bind_address: str, processes: int, heartbeat_timeout: int, shutdown_timeout: int):
        _require_free(bind_address)
        options = {
            "address": bind_address,
            "processes": processes,
            "heartbeat_timeout": heartbeat_timeout,
            "shutdown_timeout": shutdown_timeout,
            "linger": LINGER,
        }
        program = Path(__file__).with_name("coordination_service.py")
        self._program = subprocess.Popen(
            [sys.executable, "-P", str(program), json.dumps(options)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._shutdown_timeout = LINGER + shutdown_timeout
        assert self._program.stdout is not None
        if not select.select([self._program.stdout], [], [], _START)[0]:
            self._program.kill()
        line = self._program.stdout.readline()
        said = json.loads(line) if line else {"error": f"it ended with status {self._program.wait()}"}
        if "error" in said:
            self._program.wait()
            raise ValueError(_not_free(bind_address, said["error"]))
        self.port, self.token = said["port"], said["token"]

    def shutdown(self) -> None:
        """Ends it. All other processes have left by then."""
        assert self._program.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._program.stdin.write("end\n")
            self._program.stdin.close()
        try:
            self._program.wait(self._shutdown_timeout)
        except subprocess.TimeoutExpired:
            self._program.kill()


def _require_free(bind_address: str) -> None:
    """Raises an error where another program listens, at whose side gRPC would listen in silence."""
    host, port = split_address(bind_address)
    try:
        if host in ("::", "0.0.0.0") and socket.has_dualstack_ipv6():
            socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True).close()
        else:
            family = socket.AF_INET6 if ":" in host and host != "::" else socket.AF_INET
            socket.create_server(("" if host == "::" else host, port), family=family).close()
    except OSError as error:
        raise ValueError(_not_free(bind_address, str(error))) from None


def _not_free(bind_address: str, why: str) -> str:
    return (
        f"Process 0 listens at a free port of its host. Received: port {split_address(bind_address)[1]}, where it "
        f"cannot: {why}. Another program, or one that was started before and still runs, may have it: end that, or "
        "choose another port in job_addresses."
    )


class Link:
    """The connection of this process to the service's host, over which it hears at once that another has ended.

    Args:
        process: the number of this process.
        port: the port of the service's program.
        token: what proves that this is a process of the program.

    Raises:
        OSError: there is no way to that port.
    """

    def __init__(self, process: int, port: int, token: str):
        self._socket = socket.create_connection((split_address(address())[0], port), timeout=10)
        self._socket.sendall(f"{token} {process}\n".encode())
        os.register_at_fork(after_in_child=self._socket.close)  # or a child that lives on would seem to be this process
        self._words = b""

    def gone(self, seconds: float) -> list[int]:
        """Waits for some seconds, or until processes have ended that did not leave. Returns their numbers.

        Raises:
            ConnectionError: the service has ended.
        """
        if not select.select([self._socket], [], [], seconds)[0]:
            return []
        received = self._socket.recv(4096)
        if not received:
            raise ConnectionError("it has ended")
        *lines, self._words = (self._words + received).split(b"\n")
        return [int(line) for line in lines]

    def leave(self) -> None:
        """Says that this process comes to its end as it should."""
        with contextlib.suppress(OSError):  # nobody is there to hear it
            self._socket.sendall(b"left\n")


def service_of_this_process() -> "_Service | None":
    """Returns the service that this process has started, None in all but process 0."""
    service = _jax_distributed.global_state.service
    return service if isinstance(service, _Service) else None
