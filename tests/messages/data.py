"""Texts of `keras_dist/data`."""

from unittest import mock

import keras
import numpy as np
from jax.experimental import sparse

import keras_dist as kd
from keras_dist.data import batch_placement
from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.data.consistency import BatchComparison, require_same_model
from keras_dist.multihost import messaging

X, Y = np.ones((24, 4), "float32"), np.ones((24, 1), "float32")
KERNEL, BIAS = ("dense/kernel", "(4, 8) float32"), ("dense/bias", "(8,) float32")


def fit(x, y, *between, batch_size=8, **options):
    with kd.DataParallel(**options).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1), *between])
        model.compile("sgd", "mse")
        model.fit(x, y, batch_size=batch_size, verbose=0)


def sparse_local_rows():
    placer = BatchPlacer(kd.DeviceMesh((8,), ["data"]), ["data"])
    placer.place_local(sparse.BCOO.fromdense(np.eye(4)), [[4]])


def as_process_0(program, theirs, mine):
    """Runs a program as process 1 with `theirs` and then as process 0 with `mine`, which receives the messages of 1."""
    sent = {}

    def exchange(topic, message, is_abandoned=None, method=None):
        sent.setdefault(topic, []).append(message)
        return sent[topic][::-1]

    with (
        mock.patch.object(messaging, "exchange", exchange),
        mock.patch.object(messaging, "describe", return_value="process 1 (host-1, pid 42)"),
    ):
        program(theirs)
        return program(mine)


def compare(mine, theirs, auto_shard_dataset=True, **settings):
    """Compares a batch of process 0 with one of process 1. None is the end of the data; settings are of process 1."""

    def program(batch):
        arguments = {"step": "train"} | (settings if batch is theirs else {})
        comparison = BatchComparison("data", auto_shard_dataset, **arguments)
        if isinstance(batch, Exception):
            comparison.report_error(batch)
        elif batch is None:
            comparison.report_end()
        else:
            comparison.compare_batch(batch)
        return "\n".join(comparison.take_warnings())

    return as_process_0(program, theirs, mine)


def compare_models(mine, theirs, seeds=(1, 1)):
    """Compares the variables of a model on process 0 with those on process 1."""

    def program(variables):
        is_other = variables is theirs
        if is_other:
            messaging.exchange("model in full", [f"{path} {description}" for path, description in variables])
        require_same_model("train", "gpt", variables, {"random seed": seeds[is_other]})

    as_process_0(program, theirs, mine)


def array_of_several_processes():
    with mock.patch.object(batch_placement, "is_global", return_value=True):
        kd.DataParallel(auto_shard_dataset=False)._placer._place_local(X, [24])


CASES = {
    "arrays without rows": lambda: fit(X[:0], Y[:0]),
    "an array of strings": lambda: fit(np.full((24, 4), "one"), Y),
    "batches smaller than the devices": lambda: fit(X[:6], Y[:6]),
    "batches that microbatches need in equal shards": lambda: fit(
        X, Y, batch_size=12, step_options=kd.StepOptions(microbatches=2)
    ),
    "processes run different steps": lambda: compare((X, Y), (X, Y[:]), step="test"),
    "processes pass different steps_per_epoch": lambda: compare((X, Y), (X, Y[:]), steps_per_epoch=3),
    "processes pass arrays of different shapes": lambda: compare((X, Y), (X[:, :3], Y)),
    "processes pass different numbers of rows": lambda: compare((X, Y), (X[:8], Y[:8])),
    "processes pass different rows": lambda: compare((X, Y), (X + 1, Y)),
    "a process has fewer batches of the global dataset": lambda: compare((X, Y), None),
    "a process has fewer batches of its own": lambda: compare((X, Y), None, auto_shard_dataset=False),
    "processes pass the same rows as their own": lambda: compare((X, Y), (X, Y[:]), auto_shard_dataset=False),
    "a process cannot read its data": lambda: compare((X, Y), OSError("disk failure")),
    "an array of several processes with auto_shard_dataset=False": array_of_several_processes,
    "a sparse array with auto_shard_dataset=False": sparse_local_rows,
    "processes have different seeds": lambda: compare_models([KERNEL], [KERNEL], seeds=(1, 2)),
    "processes have different models": lambda: compare_models([KERNEL, BIAS], [KERNEL]),
}
