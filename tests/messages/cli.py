"""Texts of `keras_dist/cli.py` and `keras_dist_cli.py`.

The help of `launch` is left out: argparse of Python 3.13 prints options with two names in another way.
"""

import contextlib
import io
import os
from pathlib import Path
from unittest import mock

from keras_dist_cli import main

FUNCTIONS = """
import keras
import keras_dist as kd

def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="dense")], name="mlp")
    model.compile("sgd", "mse")
    return model

def tokens():
    return keras.Sequential([keras.Input((None,), dtype="int32"), keras.layers.Embedding(8, 4)], name="tokens")

def uncompiled():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)], name="uncompiled")

class Subclassed(keras.Model):
    def call(self, x):
        return x

def subclassed():
    model = Subclassed(name="subclassed")
    model.build((None, 4))
    return model

def forgetful():
    build()

def no_layout(mesh):
    return {"dense/kernel": (None, "model")}

def of_another_mesh(mesh):
    return kd.DataParallel(kd.create_device_mesh("other:8"))
"""
TARGET = ("--target", "cpu:8", "--rows", "8")
PLAN = ("plan", "model.py:build", "--target", "cpu:8", "--mesh", "data:2,model:4", "--batch", "16")


def shown(*arguments):
    """What a command prints, in a directory with a file of functions."""
    Path("model.py").write_text(FUNCTIONS)
    output = io.StringIO()
    narrow = mock.patch.dict(os.environ, {"COLUMNS": "120"})
    with narrow, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        main(arguments)
    return output.getvalue().rstrip().replace(str(Path.cwd()), "/tmp")


def last_line(*arguments):
    """The error of a command without its usage, which argparse prints in other ways in other releases of Python."""
    return shown(*arguments).splitlines()[-1]


def changed(**options):
    """What `plan` prints with some other options."""
    pairs = [word for name, value in options.items() for word in (f"--{name}", value)]
    return shown(*PLAN, *pairs)


CASES = {
    "help": lambda: shown("--help"),
    "help for plan": lambda: shown("plan", "--help"),
    "help for auto": lambda: shown("auto", "--help"),
    "help for estimate": lambda: shown("estimate", "--help"),
    "help for mesh": lambda: shown("mesh", "--help"),
    "help for devices": lambda: shown("devices", "--help"),
    "no command": lambda: shown(),
    "a misspelled option in place of one that is needed": lambda: shown(*PLAN[:2], "--targt", *PLAN[3:]),
    "a misspelled option beside all that are needed": lambda: last_line(*PLAN, "--dept", "8", "--slics=2"),
    "a misspelled option of another command": lambda: last_line("devices", "--hardwear"),
    "a misspelled option of launch": lambda: last_line("launch", "-n", "2", "--device-per-process", "4", "train.py"),
    "a misspelled command": lambda: last_line("plann"),
    "a misspelled value": lambda: last_line(*PLAN, "--step", "trian"),
    "a misspelled step option": lambda: changed(**{"step-option": "microbatch=2"}),
    "a step option without a value": lambda: changed(**{"step-option": "microbatches"}),
    "a misspelled function": lambda: changed(layout="model.py:no_layuot"),
    "a program to launch that does not exist": lambda: last_line("launch", "-n", "2", "modell.py"),
    "Python in place of a program to launch": lambda: last_line("launch", "-n", "2", "python", "train.py"),
    "a module to launch that does not exist": lambda: last_line("launch", "-n", "2", "-m", "missing_module"),
    "a mesh that is larger than this machine": lambda: shown("mesh", "data:4,model:4"),
    "a mesh": lambda: shown("mesh", "data:2,model:4"),
    "slices without a target": lambda: shown("mesh", "data:8", "--slices", "2"),
    "several targets to choose the fastest for": lambda: shown(
        "auto", "model.py:build", "--batch", "16", "--target", "v5e:2x2", "--target", "v5e:2x4"
    ),
    "an estimate of state": lambda: "\n".join(shown("estimate", "model.py:build").splitlines()[:11]),
    "rows of an estimate without a target": lambda: shown("estimate", "model.py:build", "--rows", "8"),
    "a target of an estimate without rows": lambda: shown("estimate", "model.py:build", "--target", "cpu:8"),
    "an estimate for sequences of unknown length": lambda: shown("estimate", "model.py:tokens", *TARGET),
    "an estimate for sequences of a model without them": lambda: shown(
        "estimate", "model.py:build", *TARGET, "--sequence", "8"
    ),
    "an estimate of a model without known inputs": lambda: shown("estimate", "model.py:subclassed", *TARGET),
    "an estimate of a train step without a loss": lambda: shown("estimate", "model.py:uncompiled", *TARGET),
    "an estimate for sequences of no tokens": lambda: shown("estimate", "model.py:tokens", *TARGET, "--sequence", "0"),
    "an estimate of a function that returns no model": lambda: shown("estimate", "model.py:forgetful"),
    "a misspelled optimizer": lambda: shown("estimate", "model.py:build", "--optimizer", "adm"),
    "an optimizer that is unlike any": lambda: shown("estimate", "model.py:build", "--optimizer", "best"),
    "an optimizer that wraps another one": lambda: shown(
        "estimate", "model.py:build", "--optimizer", "lossscaleoptimizer"
    ),
    "a misspelled preset": lambda: shown("estimate", "bert_tiny_en_uncasd"),
    "a folder that is no preset": lambda: shown("estimate", "."),
    "a batch that is neither a number nor a function": lambda: changed(batch="many"),
    "a batch that is a function of rows": lambda: changed(batch="model.py:no_layout"),
    "a batch of no rows": lambda: changed(batch="0"),
    "a function that the file does not have": lambda: changed(layout="model.py:layout"),
    "a file that does not exist": lambda: changed(layout="other.py:layout"),
    "a module that does not exist": lambda: changed(layout="other:layout"),
    "no function": lambda: changed(layout="layout"),
    "a layout function that returns a dict": lambda: changed(layout="model.py:no_layout"),
    "a layout for another mesh": lambda: changed(layout="model.py:of_another_mesh"),
}
