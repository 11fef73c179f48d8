"""Keras's own tests of its distribution API, run against this package in a process of their own."""

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import keras
import pytest

# What Keras asserts and this package does not do: the test, and why.
EXCLUDED = {
    "LayoutMapTest.test_add": "asserts that a list of axes is refused, which LayoutMap's docstring in Keras promises",
}

FILES = {
    "distribution/distribution_lib_test.py": 39,
    "backend/jax/distribution_lib_test.py": 17,
    "backend/jax/trainer_test.py": 8,
    "initializers/initializer_test.py": 2,
    "callbacks/orbax_checkpoint_test.py": 22,
}


@pytest.mark.parametrize("file", FILES)
def test_all_but_the_excluded_pass(file, tmp_path):
    """Every test of the file passes or is excluded, and as many ran as the file is known to have."""
    pytest.importorskip("tensorflow", reason="Keras's tests import tensorflow: pip install 'keras-dist[test]'")
    path = pathlib.Path(keras.__file__).parent / "src" / file
    if not path.exists():
        pytest.skip(f"the wheel of Keras {keras.__version__} does not hold its tests; that of 3.15.1 does")
    if "orbax" in file:
        pytest.importorskip("orbax.checkpoint", reason="needs Orbax: pip install 'keras-dist[test]'")
    report = tmp_path / "report.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-p", "support.keras_on_ours", "-p", "no:cacheprovider", "-c", os.devnull),
        # Keras mostly lies in a virtual environment, and that in a hidden folder: pytest would pass over both.
        *("--rootdir", str(tmp_path), "--collect-in-virtualenv", "-o", "norecursedirs=", f"--junitxml={report}"),
        str(path),
    ]
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[1]), "KERAS_BACKEND": "jax"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert report.exists(), run.stdout + run.stderr

    cases = list(ElementTree.parse(report).iter("testcase"))
    names = {f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}": case for case in cases}
    failed = {
        name for name, case in names.items() if case.find("failure") is not None or case.find("error") is not None
    }
    skipped = {name for name, case in names.items() if case.find("skipped") is not None}
    assert failed == set(EXCLUDED) & set(names), run.stdout[-8000:]
    assert not skipped
    assert len(cases) >= FILES[file], run.stdout + run.stderr
