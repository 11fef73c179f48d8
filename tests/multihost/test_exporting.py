"""Exports of several processes: each writes files of its own, and an error of one is raised on all."""

import os

import pytest
from multihost.programs import exporting
from support.hub_checkpoints import write_family
from support.run_processes import run_processes

from keras_dist.variables.safetensors_files import SafetensorsFile, read_header

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_each_process_writes_files_of_its_own(tmp_path):
    like, out = write_family(tmp_path / "like", "gpt2"), tmp_path / "out"
    completed = run_processes(exporting.write, str(like), str(out), processes=2, devices=2, tensorflow=True)
    first, second = (process.result for process in completed)
    names = sorted(path.name for path in out.glob("*.safetensors"))
    assert sorted(first["created"] + second["created"]) == names
    assert first["created"]
    assert second["created"]
    expected = SafetensorsFile(like / "model.safetensors", None)
    found = {name: SafetensorsFile(out / file, None) for file in names for name in read_header(out / file)[0]}
    assert found.keys() == read_header(like / "model.safetensors")[0].keys()
    for name, file in found.items():
        assert file.get_tensor(name).tobytes() == expected.get_tensor(name).tobytes()
    assert "Process 1 could not write" in first["error"]
    for result in (first, second):
        assert "but a file of the export takes" in result["error"]
        assert not result["left"]
        assert "float16" in result["rounded"]  # of one process while it writes, and others gather
    assert sorted(os.listdir(tmp_path)) == ["like", "out"]
