"""Counts what JAX compiles."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[float]]:
    """Yields a list that gets the seconds of each program that is compiled, or read from the cache, in the block."""
    found = []

    def listen(event: str, seconds: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
