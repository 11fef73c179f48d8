"""Several processes that run one program: joining them, messages between them, failures, and launching them.

* `initialize.py`: `initialize`, which joins this process to the others.
* `coordination.py`: joins JAX's coordination service in bounded time.
* `messaging.py`: short messages between processes.
* `stop_agreement.py`: all processes stop at the same point, soon after one is asked to.
* `program_comparison.py`: compares the traced steps of all processes.
* `value_comparison.py`: compares weights that several processes hold.
* `failure_watch.py`: detects that another process failed, and ends this one.
* `launcher.py`: starts several processes on this machine, and again when one dies.
"""
