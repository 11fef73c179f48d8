"""The prefetcher: order, limit, errors and end of its items; and `fit` on top of it."""

import gc
import itertools
import os
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keras_dist as kd
from keras_dist.data.prefetch import Prefetcher


def wait_until(condition):
    """Waits for another thread, at most ten seconds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def every_thread_ends():
    before = set(threading.enumerate())
    yield
    gc.collect()
    wait_until(lambda: set(threading.enumerate()) <= before)


class CountingIterator:
    """Counts how many items were requested."""

    def __init__(self, items=None):
        self.requested = 0
        self._items = itertools.count() if items is None else iter(items)

    def __iter__(self):
        return self

    def __next__(self):
        self.requested += 1
        return next(self._items)


@given(st.lists(st.integers()), st.none() | st.integers(0, 5))
def test_all_items_come_in_their_order(items, limit):
    assert list(Prefetcher(iter(items), limit)) == items


def test_one_item_waits_and_one_is_produced():
    source = CountingIterator()
    ahead = Prefetcher(source)
    assert next(ahead) == 0
    wait_until(lambda: source.requested == 3)  # one was taken, one waits, and one is produced and waits for room
    time.sleep(0.05)
    assert source.requested == 3
    assert next(ahead) == 1
    wait_until(lambda: source.requested == 4)
    ahead.close()


def test_nothing_is_read_before_the_first_request():
    source = CountingIterator()
    ahead = Prefetcher(source)
    time.sleep(0.02)
    assert source.requested == 0
    ahead.close()


def test_no_more_is_read_ahead_than_is_allowed():
    source = CountingIterator()
    ahead = Prefetcher(source, 0)
    ahead.allow(2)
    assert [next(ahead), next(ahead)] == [0, 1]
    time.sleep(0.05)
    assert source.requested == 2
    assert next(ahead) == 2  # a requested item is produced, allowed or not
    assert source.requested == 3
    ahead.close()


def test_an_error_is_raised_in_place_of_the_item():
    def broken():
        yield 1
        yield 2
        raise KeyError("third")

    ahead = Prefetcher(broken())
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(KeyError, match="third") as raised:
        next(ahead)
    assert any(entry.name == "broken" for entry in raised.traceback)
    assert list(ahead) == []


def test_a_deleted_prefetcher_ends_its_thread():
    ahead = Prefetcher(CountingIterator())
    next(ahead)
    del ahead  # the fixture waits for the thread


def test_a_closed_prefetcher_has_no_items():
    ahead = Prefetcher(CountingIterator())
    next(ahead)
    ahead.close()
    assert list(ahead) == []


# -------------------------------------------------------------------------------------------------- in `fit`


def small_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


BATCH = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")


def test_the_next_batch_is_read_while_a_step_runs():
    source, read = CountingIterator(itertools.repeat(BATCH)), []

    def batches():
        yield from source

    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: wait_until(lambda: read_ahead(batch))
    )

    def read_ahead(batch):
        read.append(source.requested)
        return source.requested > batch + 1 or batch == 4

    with kd.DataParallel().scope():
        small_model().fit(batches(), steps_per_epoch=5, callbacks=[callback], verbose=0)
    assert max(read) == 5


def test_a_generator_keeps_batches_that_no_step_used():
    def numbered():
        for number in itertools.count():
            yield BATCH[0] * number, BATCH[1]

    data = numbered()
    with kd.DataParallel().scope():
        small_model().fit(data, steps_per_epoch=3, epochs=2, verbose=0)
    assert next(data)[0][0, 0] == 6


def test_a_source_that_fails_in_the_middle_of_an_epoch_raises_its_own_error():
    def failing():
        yield BATCH
        yield BATCH
        yield BATCH
        raise OSError("the disk is gone")

    with kd.DataParallel().scope():
        model = small_model()
        with pytest.raises(OSError, match="the disk is gone"):
            model.fit(failing(), verbose=0)
        assert np.isfinite(model.get_weights()[0]).all()


def test_stopping_training_ends_prefetching():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    with kd.DataParallel().scope():
        history = small_model().fit(forever(), callbacks=[Stop()], epochs=1, verbose=0)
    assert len(history.epoch) == 1


def forever():
    while True:
        yield BATCH


ENDS_EARLY = """
import atexit, itertools, threading, time, weakref

atexit.register(lambda: print(threading.active_count()))  # the first is called last
weakref.finalize(threading, int)  # finalizers are called where the first of them was created
from keras_dist.data.prefetch import Prefetcher

is_preparing = threading.Event()

def source():
    yield 0
    is_preparing.set()
    time.sleep(0.2)  # as JAX does to copy a batch
    yield 1

idle = Prefetcher(itertools.count())
next(idle)
prefetcher = Prefetcher(source())
next(prefetcher)
is_preparing.wait()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_no_thread_is_preparing_a_batch_when_python_ends():
    """Python aborts if it ends while another thread drops an array of JAX."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    program = subprocess.run([sys.executable, "-c", ENDS_EARLY], env=environment, capture_output=True, text=True)
    assert (program.returncode, program.stdout) == (0, "1\n"), program.stderr
