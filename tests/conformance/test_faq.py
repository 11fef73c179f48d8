"""The FAQ quotes literal messages; each one is caused here, by plain Keras in a new process and by this package."""

import concurrent.futures
import functools
import pathlib
import re
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from support.keras_scenarios import OLDER_KERAS

import keras_dist as kd
from keras_dist.attention import attention
from keras_dist.passes.registry import PASSES

FAQ = (pathlib.Path(__file__).parents[2] / "docs" / "faq.md").read_text()

PLAIN_KERAS = """
import os
os.environ |= {"KERAS_BACKEND": "jax", "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "NPROC": "16"}
import unittest.mock
import jax, keras, numpy as np
D = keras.distribution
x, y = np.ones((97, 4), "float32"), np.ones((97, 1), "float32")

def build(width=8):
    layers = keras.layers.Dense(width, name="dense"), keras.layers.Dense(1, name="out")
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", "mse")
    return model

def under(rules=None):
    layout_map = D.LayoutMap(D.DeviceMesh((2, 4), ["data", "model"]))
    for pattern, axes in (rules or {}).items():
        layout_map[pattern] = axes
    D.set_distribution(D.DataParallel() if rules is None else D.ModelParallel(layout_map=layout_map))

def built_before():
    model = build()
    under()
    model.fit(x[:96], y[:96], verbose=0)

def scalar_in_a_batch():
    under()
    inputs = keras.Input((4,)), keras.Input(())
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs[0]))
    model.compile("sgd", "mse")
    model.train_on_batch([x[:8], np.float32(1)], y[:8])

def output_of_a_tuple():
    under({".*lstm/output": ("data", None)})
    inputs = keras.Input((5, 4))
    model = keras.Model(inputs, keras.layers.LSTM(8, return_state=True, name="lstm")(inputs)[0])
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 5, 4)), np.ones((8, 8)), verbose=0)

def attention_on_tpus():
    under()
    query = D.distribute_tensor(np.ones((8, 128, 4, 16), "float32"), D.distribution().get_data_layout((8, 128, 4, 16)))
    step = jax.jit(lambda query: keras.ops.dot_product_attention(query, query, query))
    with unittest.mock.patch("jax.devices", lambda: [unittest.mock.Mock(platform="tpu")]):
        step.trace(query).lower(lowering_platforms=("tpu",))

for case in (
    lambda: (under(), build().fit(x, y, verbose=0)),
    lambda: (under({".*dense/kernel": (None, "model")}), build(10)),
    built_before,
    lambda: (under({".*dense/kernel": (None, None, "model")}), build()),
    scalar_in_a_batch,
    lambda: (under({".*dense.*": (None, "model"), ".*kernel": (None, None)}), build()),
    lambda: under({"dense": (None, ("data", "model"))}),
    lambda: D.DeviceMesh((3, 4), ["data", "model"]),
    lambda: D.ModelParallel(),
    output_of_a_tuple,
    attention_on_tpus,
):
    D.set_distribution(None)
    keras.utils.clear_session()
    try:
        case()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def quotes(part):
    """The literal texts of a part of the FAQ, each split at what it leaves out."""
    section = FAQ.split("\n## ")[part]
    return [re.split(r"\s?\.\.\.\s?", text) for text in re.findall(r"(?m)^\*\*Message\.\*\* `([^`]+: [^`]+)`", section)]


def unquoted(fragments, messages):
    """Whether no message contains all fragments of a quote; sets of names have no order."""
    return not any(all(fragment.strip("().") in message for fragment in fragments) for message in messages)


@pytest.mark.slow
@pytest.mark.skipif(not OLDER_KERAS, reason="the quotes have the names of Keras 3.15")
def test_quotes_of_keras_and_jax_are_literal():
    done = subprocess.run([sys.executable, "-c", PLAIN_KERAS], capture_output=True, text=True, check=False)
    messages = done.stdout.replace("{'model', 'data'}", "{'data', 'model'}").splitlines()
    assert len(messages) >= 11, done.stderr
    # Those of several processes, and one with which XLA ends the program.
    others = ("multi-worker", "non-addressable", "not the same on each process", "Check failed")
    found = [quote for quote in quotes(1) if not any(words in "".join(quote) for words in others)]
    assert len(found) == 11
    assert [quote for quote in found if unquoted(quote, messages)] == []


def test_quotes_of_this_package_are_literal(monkeypatch):
    def build():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    def train(model):
        model.fit(np.ones((16, 4)), np.ones((16, 1)), verbose=0)

    def built_before():
        model = build()
        kd.set_distribution(kd.DataParallel())
        train(model)

    def without_distribution():
        kd.set_distribution(kd.DataParallel())
        model = build()
        kd.set_distribution(None)
        train(model)

    def attention_in_float16():
        monkeypatch.setattr(attention, "kernel_platform", lambda mesh: "tpu")
        monkeypatch.setattr(attention, "_warned", set())
        kd.set_distribution(kd.DataParallel())
        layer, x = keras.layers.MultiHeadAttention(4, 16, dtype="float16", name="attention"), np.ones((8, 128, 4))
        layer(x, x)

    def in_an_older_thread():
        with concurrent.futures.ThreadPoolExecutor(1, "worker") as worker:
            worker.submit(str).result()  # so that the thread has started
            with kd.DataParallel().scope():
                worker.submit(build).result()

    def with_rotations():
        kd.set_distribution(kd.DataParallel())
        rotations, pooling = keras.layers.RandomRotation(0.1), keras.layers.GlobalMaxPooling2D()
        model = keras.Sequential([keras.Input((4, 4, 1)), rotations, pooling])
        model.compile("adam", "mse")
        model.predict(np.ones((8, 4, 4, 1)), verbose=0)

    def with_a_pass_that_fails():
        def windows(equation, program):
            if equation.primitive.name == "conv_general_dilated":
                raise KeyError("a fault")

        monkeypatch.setitem(PASSES, "windows", windows)
        kd.set_distribution(kd.DataParallel())
        model = keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Conv2D(16, 3)])
        model.compile("adam", "mse")
        model.predict(np.ones((8, 32, 32, 3)), verbose=0)

    messages = []
    no_mesh = functools.partial(kd.create_device_mesh, "data:3,model:4")
    cases = no_mesh, built_before, without_distribution, attention_in_float16, in_an_older_thread, with_rotations
    cases += (with_a_pass_that_fails,)
    for case in cases:
        kd.set_distribution(None)
        keras.utils.clear_session(free_memory=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                case()
            except ValueError as error:
                messages.append(f"{type(error).__name__}: {error}")
        messages += [f"UserWarning: {warning.message}" for warning in caught]
    in_new_processes = ("JAX backend", "simulate_devices", "waiting for")  # tests/mesh/test_devices.py
    found = [quote for quote in quotes(2) if not any(words in "".join(quote) for words in in_new_processes)]
    assert len(found) == len(cases)
    assert [quote for quote in found if unquoted(quote, messages)] == []
