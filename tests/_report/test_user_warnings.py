"""Warnings point at the user's code. Those of each kind are tested in `tests/test_messages.py`."""

import concurrent.futures
import warnings

import keras
import numpy as np
import pytest

import keras_dist as kd
from keras_dist._report import user_warnings


def test_through_frames_of_keras_jax_and_this_package():
    class Layer(keras.layers.Layer):
        def call(self, inputs):
            return keras.ops.vectorized_map(lambda row: user_warnings.warn("in a trace") or row, inputs)

    with pytest.warns(UserWarning, match="in a trace") as caught:
        keras.Sequential([Layer()]).predict(np.ones((2, 4)), verbose=0)
    assert {each.filename for each in caught} == {__file__}


def test_fit_warns_at_its_line_of_batches():
    with kd.DataParallel().scope(), warnings.catch_warnings(record=True) as caught:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(np.ones((5, 4)), np.ones((5, 1)), verbose=0)
        line = test_fit_warns_at_its_line_of_batches.__code__.co_firstlineno + 4
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, line)]


def test_in_a_thread_without_a_frame_of_the_user():
    with concurrent.futures.ThreadPoolExecutor() as pool, pytest.warns(FutureWarning, match="no user"):
        pool.submit(user_warnings.warn, "no user", FutureWarning).result()
