"""JAX's coordination service as a program of its own, which process 0 starts: `coordination_service.py options`.

In process 0 itself it would end with it, at which JAX aborts all other processes before they can say why. Here it lives
on until they know. It also holds one connection to each process, which an end of the process closes at once, where
JAX's heartbeats take until their timeout to miss it.

It imports nothing of this package, so that it starts fast. What it is told and says:

* `options`, in JSON: `address` to listen at, the number of `processes`, and in seconds `heartbeat_timeout`,
  `shutdown_timeout` and `linger`, for how long it outlives process 0 where that dies.
* First it prints a line of JSON: `port` and `token` for the connections, or an `error`.
* A connection begins with a line `token number`. A line `left` says that the process comes to its end as it should.
  Over each comes a line with the number of every process that ends without it.
* It ends after a line on its standard input and the end of the other processes, or `linger` seconds after its standard
  input is closed.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time


class _Links:
    """The connections to the processes, and who has gone."""

    def __init__(self):
        self.token = secrets.token_hex(16)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self.port = self._server.getsockname()[1]
        self._lock = threading.Lock()
        self._open: dict[int, socket.socket] = {}
        self._gone: list[int] = []
        self._seen: set[int] = set()

    def serve(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._hold, args=(connection,), daemon=True).start()

    def _hold(self, connection: socket.socket) -> None:
        connection.settimeout(60)  # for its first line
        lines = connection.makefile(encoding="ascii", errors="replace")
        try:
            token, _, number = lines.readline().strip().partition(" ")
        except OSError:
            token, number = "", ""
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            connection.close()
            return
        connection.settimeout(None)
        rank = int(number)
        with self._lock:
            self._open[rank] = connection
            self._seen.add(rank)
            for gone in self._gone:
                _tell(connection, gone)
        try:
            last = lines.readline().strip()
        except OSError:  # reset
            last = ""
        with self._lock:
            if last != "left":
                self._gone.append(rank)
                for other in self._open.values():
                    _tell(other, rank)
        if last == "left":
            with contextlib.suppress(OSError):  # reset
                lines.read()  # until it ends
        with self._lock:
            del self._open[rank]
        connection.close()

    def wait(self, processes: int, seconds: float) -> None:
        """Waits until all processes but 0 have ended, at which JAX's clients abort where the service is not there."""
        deadline = time.monotonic() + seconds
        while self._open.keys() - {0} and time.monotonic() < deadline:
            time.sleep(0.05)
        if len(self._seen) < processes:  # some could not connect
            time.sleep(min(5, seconds))


def _tell(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(f"{number}\n".encode())
    except OSError:
        return  # it has ended too, which its own thread sees


def main() -> None:
    """Starts the service, says where, and ends with the processes."""
    options = json.loads(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which the processes may live through as well
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    try:
        from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

        service = _jax.get_distributed_runtime_service(
            options["address"],
            options["processes"],
            heartbeat_timeout=options["heartbeat_timeout"],
            shutdown_timeout=options["shutdown_timeout"],
            recoverable=True,
        )
    except Exception as error:
        print(json.dumps({"error": " ".join(str(error).split())}), flush=True)
        os._exit(1)  # JAX's clean-up of a service that did not start can crash
    links = _Links()
    threading.Thread(target=links.serve, daemon=True).start()
    print(json.dumps({"port": links.port, "token": links.token}), flush=True)
    while os.getppid() == parent and not select.select([sys.stdin], [], [], 1)[0]:
        continue
    if os.getppid() != parent or not sys.stdin.readline():
        time.sleep(options["linger"])
    else:
        links.wait(options["processes"], options["linger"])
    service.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
