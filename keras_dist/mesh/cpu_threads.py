"""The number of threads that XLA needs for simulated CPU devices. Imports neither JAX nor Keras."""


def cpu_thread_count(devices: int) -> int:
    """Returns the `NPROC`, from which XLA's CPU client sizes its thread pool, for the simulated devices of one process.

    Each device that waits in a collective holds a thread. With fewer threads than devices need, the collective aborts
    after 40 seconds. XLA reads the variable once, when it creates the client.
    """
    return min(max(16, 2 * devices), 256)
