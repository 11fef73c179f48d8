"""Keras's own tests of its distribution API pass on keras_dist, in a process of their own."""

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import keras
import pytest

# Tests of Keras that keras_dist fails on purpose, with the reason.
EXCLUDED = {
    "LayoutMapTest.test_add": "asserts that LayoutMap rejects a list of axes, which its docstring in Keras allows",
}

FILES = {
    "distribution/distribution_lib_test.py": 39,
    "backend/jax/distribution_lib_test.py": 17,
    "backend/jax/trainer_test.py": 8,
    "initializers/initializer_test.py": 2,
    "callbacks/orbax_checkpoint_test.py": 22,
}


SLOW = [pytest.param(file, marks=pytest.mark.slow) for file in list(FILES)[1:]]


@pytest.mark.parametrize("file", [next(iter(FILES)), *SLOW])
def test_all_tests_of_keras_but_the_excluded_pass(file, tmp_path):
    """Every test of the file passes or is excluded, and at least as many ran as Keras 3.15.1 has."""
    pytest.importorskip("tensorflow", reason="Keras's tests import tensorflow: pip install 'keras-dist[test]'")
    path = pathlib.Path(keras.__file__).parent / "src" / file
    if not path.exists():
        pytest.skip(f"the wheel of Keras {keras.__version__} does not include its tests; the wheel of 3.15.1 does")
    if "orbax" in file:
        pytest.importorskip("orbax.checkpoint", reason="needs Orbax: pip install 'keras-dist[test]'")
    report = tmp_path / "report.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-p", "support.keras_on_ours", "-p", "no:cacheprovider", "-c", os.devnull),
        # By default pytest ignores virtual environments and hidden folders, where Keras usually is.
        *("--rootdir", str(tmp_path), "--collect-in-virtualenv", "-o", "norecursedirs=", f"--junitxml={report}"),
        str(path),
    ]
    paths = [str(pathlib.Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "KERAS_BACKEND": "jax"}
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
