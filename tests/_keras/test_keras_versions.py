"""Releases of Keras differ: the same names and numbers on all of them, one error on those that are not supported."""

import json
from unittest import mock

import keras
import numpy as np
import pytest
from support.new_process import run

import keras_dist as kd
from keras_dist._keras import internals
from keras_dist.data import executions


@pytest.mark.parametrize(
    ("replicas", "processes", "process", "shards", "shard"),
    [(8, 1, 0, 1, 0), (8, 2, 1, 2, 1), (2, 2, 1, 2, 1), (2, 4, 1, 2, 0), (2, 4, 2, 2, 1), (1, 4, 3, 1, 0)],
)
def test_data_shards_are_those_of_keras(replicas, processes, process, shards, shard):
    with (
        mock.patch.object(internals.backend_lib, "num_processes", return_value=processes),
        mock.patch.object(internals.backend_lib, "process_id", return_value=process),
    ):
        mesh = kd.DeviceMesh((replicas, 8 // replicas), ["data", "model"], [f"cpu:{index}" for index in range(8)])
        distribution = kd.ModelParallel(layout_map=kd.LayoutMap(mesh), batch_dim_name="data")
    assert (distribution.num_data_shards, distribution.data_shard_id) == (shards, shard)
    if hasattr(internals.KerasDistribution, "num_data_shards"):  # since 3.16
        assert internals.KerasDistribution.num_data_shards.fget(distribution) == shards


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return np.full((2, 1), index, "float32")


@pytest.mark.parametrize("data", [np.arange(16, dtype="float32")[:, None] // 2, Rows()], ids=["array", "dataset"])
def test_adapters_of_keras_read_all_batches(data):
    """An input pipeline gives each process its rows of every batch, so Keras must not leave out batches of others."""
    with mock.patch.object(internals.backend_lib, "num_processes", return_value=2):
        distribution = kd.DataParallel()
    with distribution.scope():
        adapter = internals.trainer.JAXEpochIterator(
            data, batch_size=None if isinstance(data, Rows) else 2
        ).data_adapter
    assert distribution.num_data_shards == 2
    assert adapter.num_batches == 8
    batches = [batch[0] if isinstance(batch, tuple) else batch for batch in adapter.get_jax_iterator()]
    assert [np.asarray(batch).ravel()[0] for batch in batches] == list(range(8))


def test_an_execution_of_several_steps_takes_a_list_of_batches_where_keras_expects_one_item(monkeypatch):
    batches = iter(range(5))
    monkeypatch.setattr(executions, "STACK_BATCHES", True)
    assert executions.batches_of_execution(batches, 1) is batches
    taken = [list(executions.batches_of_execution(batches, 2)) for _ in range(4)]
    assert taken == [[[0, 1]], [[2, 3]], [[4]], []]
    monkeypatch.setattr(executions, "STACK_BATCHES", False)
    batches = iter(range(3))
    assert [list(executions.batches_of_execution(batches, 2)) for _ in range(3)] == [[0, 1], [2], []]


REMOVED = [
    ("keras.src.backend.jax", "distribution_lib"),  # a module
    ("keras.src.trainers.data_adapters.py_dataset_adapter", "PyDatasetEnqueuer"),  # a class
    ("keras.src.backend.jax.trainer", "JAXEpochIterator"),  # a class that is patched
]
IMPORT_WITHOUT = """
import importlib, json, sys, keras

found = []
for module, name in json.loads(sys.argv[1]):
    owner, submodule = importlib.import_module(module), f"{module}.{name}"
    removed, was_imported = vars(owner).pop(name), submodule in sys.modules
    if was_imported:
        sys.modules[submodule] = None
    try:
        import keras_dist
    except ImportError as error:
        found.append(str(error))
    setattr(owner, name, removed)
    if was_imported:
        sys.modules[submodule] = removed
    for each in [each for each in sys.modules if each.startswith("keras_dist")]:
        del sys.modules[each]
print(json.dumps(found))
"""


@pytest.mark.multiprocess
def test_what_keras_lacks_is_named():
    done = run(f"import sys; sys.argv = ['', {json.dumps(REMOVED)!r}]\n{IMPORT_WITHOUT}", KERAS_BACKEND="jax")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for error, (_, name) in zip(found, REMOVED, strict=True):
        assert error.startswith(f"keras_dist does not support Keras {keras.__version__}: ")
        assert name in error
