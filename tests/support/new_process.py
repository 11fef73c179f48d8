"""Runs code in a new process, for what must happen before JAX starts or must not touch the JAX of the other tests."""

import os
import subprocess
import sys


def run(code, **environment):
    """Returns the completed process; a variable of the environment that is set to None is unset."""
    variables = {key: value for key, value in os.environ.items() if key not in ("KERAS_BACKEND", "NPROC", "XLA_FLAGS")}
    variables |= {key: value for key, value in environment.items() if value is not None}
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
