"""Runs scripts of draws and says what became of them."""

import contextlib
import dataclasses
import faulthandler
import gc
import io
import linecache
import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
import warnings
from pathlib import Path

import keras_dist  # isort: skip
import jax
import keras

FAULTS = ("wrong number", "internal error", "abort", "timeout")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a draw.

    Args:
        kind: "equal"; "refused", by an error that keras_dist raises; "invalid", which fails on one device, too; or one
            of `FAULTS`.
        text: the error.
        place: the last function of keras_dist that the error passed through.
    """

    kind: str
    text: str = ""
    place: str = ""

    @property
    def is_fault(self):
        return self.kind in FAULTS


def judge(source, name="<attack>"):
    """Runs the script of a draw in this process, which has 8 devices."""
    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    keras.config.disable_traceback_filtering()
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    variables, kept = {"__name__": "attack"}, tempfile.tempdir
    tempfile.tempdir = tempfile.mkdtemp()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            exec(compile(source, name, "exec"), variables)
        return Verdict("equal")
    except Exception as error:
        return _verdict(error, variables)
    finally:
        shutil.rmtree(tempfile.tempdir, ignore_errors=True)
        tempfile.tempdir = kept
        variables.clear()
        jax.config.update("jax_traceback_filtering", filtering)
        keras_dist.set_distribution(None)
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        keras.config.enable_traceback_filtering()
        gc.collect()


def _verdict(error, variables):
    package, frames = str(Path(keras_dist.__file__).parent), traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(package)]
    place = f"{Path(ours[-1].filename).name}: {ours[-1].name}" if ours else ""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    is_not_finite = isinstance(error, AssertionError) and frames[-1].name == "<module>"  # what one device gives
    if "expected" not in variables or ("found" not in variables and is_not_finite):
        return Verdict("invalid", text, place)
    if "found" in variables:
        return Verdict("wrong number", text, place)
    # An error that is meant for users: `raise ValueError(...)` is the innermost line, and it is ours.
    is_raised = isinstance(error, ValueError | TypeError) and frames[-1] in ours and frames[-1].line.startswith("raise")
    return Verdict("refused" if is_raised else "internal error", text, place)


def judge_all(sources, time_limit):
    """Yields `(name, Verdict)` for scripts by name, which run in a process that is started anew when it ends.

    Args:
        sources: dict from names to scripts.
        time_limit: seconds for one script.
    """
    context = multiprocessing.get_context("spawn")
    worker = None
    try:
        for name, source in sources.items():
            is_x64 = "jax_enable_x64" in source
            if worker is not None and worker.is_x64 != is_x64:
                worker.end()
                worker = None
            worker = worker or _Worker(context, is_x64)
            verdict = worker.judge(source, name, time_limit)
            if verdict.kind in ("abort", "timeout"):
                worker.end()
                worker = None
            yield name, verdict
    finally:
        if worker is not None:
            worker.end()


class _Worker:
    def __init__(self, context, is_x64):
        self.is_x64 = is_x64
        self.log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.log.name), daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.recv()  # It has started JAX.

    def judge(self, source, name, time_limit):
        self.log.truncate(0)
        try:
            self.pipe.send((source, f"<draw {name}>"))
            if self.pipe.poll(time_limit):
                return self.pipe.recv()
            return Verdict("timeout", f"after {time_limit:.0f} s")
        except (EOFError, OSError):
            self.process.join()
            status = self.process.exitcode
            ended = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            lines = Path(self.log.name).read_text(errors="replace").splitlines()
            errors = [line for line in lines if "Check failed" in line or "Fatal" in line or "rror" in line]
            return Verdict("abort", f"{ended}: {next(iter([*errors, *lines[-1:]]), '')}")

    def end(self):
        self.process.kill()
        self.process.join()
        self.log.close()


def _serve(pipe, log):
    """Judges what comes through a pipe. Standard error goes to a file, which the XLA that aborts writes to."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.dup2(descriptor, 1)
    faulthandler.enable()
    keras_dist.simulate_devices(8)
    pipe.send("ready")
    count = 0
    while True:
        try:
            source, name = pipe.recv()
        except EOFError:
            return
        pipe.send(judge(source, name))
        count += 1
        if count % 20 == 0:
            jax.clear_caches()  # Each program keeps mappings of memory, of which Linux gives a process 65,530.
