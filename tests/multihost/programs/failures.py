"""Two processes that work together until one of them fails."""

import asyncio
import errno
import functools
import os
import resource
import signal
import sys
import time

import jax
import keras
import numpy as np
import tensorstore

import keras_dist as kd
from keras_dist.checkpoint import checkpoint_files, checksums
from keras_dist.multihost import messaging


def _raise():
    raise KeyError("the reason")


def _send(number):
    return lambda: os.kill(os.getpid(), number)


FAILURES = {
    "raises": _raise,
    "is killed": _send(signal.SIGKILL),
    "crashes": _send(signal.SIGSEGV),
    "is interrupted": _send(signal.SIGINT),
    "is stopped": _send(signal.SIGSTOP),
    "ends early": lambda: sys.exit(0),
    "ends without cleanup": lambda: os._exit(3),
    "stalls": lambda: time.sleep(1000),
    "stops after an epoch": lambda: None,  # while the other trains for two
}


def fail(work, failure, who, wait_seconds):
    """Works with the other process; after three steps, process `who` fails."""

    def act():
        messaging.timeout = wait_seconds
        if messaging.process_index() == who:
            FAILURES[failure]()

    if work in ("fit", "last batches"):
        epochs = 2 if failure == "stops after an epoch" and messaging.process_index() != who else 1
        _fit(act, epochs, 3 if work == "fit" else 14)
        return
    # The first, second, fourth ... of single batches are compared, before a step waits.
    last = 4 if work == "single batches" else 3
    for step in range(last + 2):
        if step == last:
            act()
        {"messages": _exchange, "devices": _sum_over_devices, "single batches": _train_on_batch}[work](step)


def _exchange(step):
    assert messaging.exchange("steps", step) == [step, step]


def _sum_over_devices(step):
    mesh = jax.sharding.Mesh(jax.devices(), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    ones = jax.make_array_from_callback((jax.device_count(),), sharding, lambda index: np.ones(1))
    float(jax.jit(lambda x: x.sum())(ones))


@functools.cache
def _model():
    kd.set_distribution(kd.DataParallel())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def _train_on_batch(step):
    _model().train_on_batch(np.ones((4, 4)), np.ones((4, 1)))


def _fit(act, epochs, when):
    class Act(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            float(logs["loss"])  # waits for the devices of both processes
            if batch == when:
                act()

    _model().fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=4, epochs=epochs, verbose=0, callbacks=[Act()])


def cannot_write(directory, who, file, arguments, wait_seconds):
    """Trains with checkpoints, of which process `who` cannot write its part from the seventh batch on."""

    class Full(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch != 6:
                return
            checkpoint._files._finish()  # the checkpoint before is complete
            messaging.timeout = wait_seconds
            if messaging.process_index() != who:
                return
            if file == "progress":
                checkpoint_files._ProcessFiles.save = _no_space
            elif file == "blocked progress":
                checkpoint_files._ProcessFiles._write = lambda self, folder: time.sleep(1000)
            elif file == "blocked checksums":
                checksums._written_by_this_process = lambda folder: time.sleep(1000)
            elif file == "blocked arrays":
                tensorstore.open = lambda *arguments, **options: asyncio.sleep(1000)
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))

    kd.set_distribution(kd.FullyShardedDataParallel(min_shard_bytes=0))
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(64)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).random((128, 64), dtype="float32")
    checkpoint = kd.TrainingCheckpoint(directory, **arguments)
    model.fit(x, x, batch_size=16, verbose=0, callbacks=[Full(), checkpoint])


async def _no_space(self, directory):
    raise OSError(errno.ENOSPC, "No space left on device")
