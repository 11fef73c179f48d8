"""Several processes give variables their values, read them, and write files once."""

import importlib.util

import h5py
import keras
import numpy as np
import pytest
from multihost.programs import state
from support.run_processes import run_processes

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    folder = tmp_path_factory.mktemp("values")
    return folder, [process.result for process in run_processes(state.values, str(folder), timeout=400)]


@pytest.mark.slow
def test_values_are_assigned_without_communication(values):
    _, found = values
    for each in found:
        assert each["assigned"]
        assert each["created from array"]
        assert each["no comparison"] == each["no comparison in all"] == 0


def test_variables_are_read_by_all(values):
    _, found = values
    for each in found:
        assert each["numpy"]
        assert each["get_weights"]
        assert each["convert_to_numpy"]
        assert "(512, 1024)" in each["repr"]
        assert "value=" not in each["repr"]
        assert each["laid out"] == [True, [6, 4]]
    assert found[0]["bias"] == [1024]


def test_outputs_of_a_model_are_read_by_all(values):
    assert max(each["outputs"] for each in values[1]) < 0.02  # the model computes in bfloat16


def test_a_store_is_written_once(values):
    assert all(each["own.weights.h5"] for each in values[1])


def test_files_are_written_once_and_read_by_all(values):
    folder, found = values
    for each in found:
        assert each["files"] == [
            "directory",
            "m.h5",
            "m.keras",
            "s.weights.json",
            "s_00000.weights.h5",
            "s_00001.weights.h5",
            "s_00002.weights.h5",
            "w.weights.h5",
        ]
        for name in ("m.keras", "w.weights.h5", "m.h5", "s.weights.json", "directory"):
            assert each[name], name
    one = keras.models.load_model(folder / "m.keras")
    with h5py.File(folder / "w.weights.h5") as file:
        np.testing.assert_array_equal(one.get_weights()[0], file["layers/dense/vars/0"])
    with h5py.File(folder / "lora.weights.h5") as file:
        np.testing.assert_allclose(np.abs(file["layers/dense/vars/0"]).sum(), found[0]["lora"], rtol=1e-5)


def test_errors_are_the_same_on_all_processes(values):
    _, found = values
    for each in found:
        assert each["other path"].startswith("ValueError: ")
        assert "of_0.weights.h5" in each["other path"]
        assert "of_1.weights.h5" in each["other path"]
        assert each["no folder"].startswith("FileNotFoundError")
        assert each["other variable"].startswith("ValueError: ")
        assert "a/kernel'" in each["other variable"]
        assert "b/kernel'" in each["other variable"]
        assert not [name for name in each["files at the end"] if name.startswith((".", "of_"))]


def test_callbacks_write_once(tmp_path):
    found = [process.result for process in run_processes(state.callbacks, str(tmp_path), timeout=400, tensorflow=True)]
    alone = [each.pop("own backup") for each in found]
    for traces in (each.pop("traces") for each in found):
        assert len([name for name in traces if name.endswith("xplane.pb")]) == 1
    each = found[0]
    assert each == found[1]
    assert each["kept"] == "HeldShards"
    assert each["restored"]
    assert each["held"]
    assert each["lines"] == each["epochs"] + 1
    assert len(each["board"]) == (1 if importlib.util.find_spec("tensorboard") else 0)
    assert each["files"] == [
        *("best.keras", "deep", "log.csv", "step.weights.h5"),
        *(f"{epoch + 1}.weights.h5" for epoch in range(each["epochs"])),
    ]
    assert each["first"]
    assert each["laid out"][0] == [6, 4]
    assert each["laid out"][1].startswith("ValueError: ")
    assert "(6, 64)" in each["laid out"][1]
    assert each["backup"] == ["latest.weights.h5", "training_metadata.json"]
    assert each["epochs after backup"] == [1, 2, 3]
    assert not each["backup at the end"]
    for folder, message in zip(("none", "deep"), alone, strict=True):
        assert message.startswith("ValueError: ")
        assert repr(str(tmp_path / folder)) in message


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_the_file_as_it_was(tmp_path):
    done = run_processes(state.is_killed_while_it_saves, str(tmp_path), timeout=200, check=False)
    assert [process.result for process in done] == [None, None]
    assert all(process.returncode for process in done)
    with h5py.File(tmp_path / "w.weights.h5") as file:
        assert np.any(file["layers/dense/vars/0"])
