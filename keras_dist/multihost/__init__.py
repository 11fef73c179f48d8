"""Several processes that work as one: joining, messages, failures, and launching them on one machine.

* `initialize.py`: `initialize`, which joins this process to the others.
* `coordination.py`: JAX's coordination service, joined in bounded time.
* `coordination_service.py`: that service as a program of its own.
* `messaging.py`: short messages between processes, and detecting that one failed.
* `launcher.py`: starts many processes on this machine, for development.
"""
