"""Keras's own tests of its distribution API pass on keras_dist, in a process of their own."""

import ast
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import keras
import pytest
from support.slow_cases import slow

# Tests of Keras that keras_dist fails on purpose, with the reason.
EXCLUDED = {
    "LayoutMapTest.test_add": "asserts that LayoutMap rejects a list of axes, which its docstring in Keras allows",
}

FILES = (
    "backend/jax/distribution_lib_test.py",
    "backend/jax/trainer_test.py",
    "initializers/initializer_test.py",
    "callbacks/orbax_checkpoint_test.py",
)
SLOW = [slow(file) for file in FILES]


def defined_tests(path):
    """Returns how many tests a file of Keras defines; a parametrized one runs several times."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    return sum(node.name.startswith("test_") for each in classes for node in each.body if hasattr(node, "name"))


@pytest.mark.multiprocess
@pytest.mark.parametrize("file", ["distribution/distribution_lib_test.py", *SLOW])
def test_all_tests_of_keras_but_the_excluded_pass(file, tmp_path):
    """Every test of the file runs, and passes or is excluded."""
    pytest.importorskip("tensorflow", reason="Keras's tests import tensorflow: pip install '.[test]'")
    path = pathlib.Path(keras.__file__).parent / "src" / file
    if not path.exists():
        pytest.skip(f"the wheel of Keras {keras.__version__} does not include its tests; the wheel of 3.15.1 does")
    if "orbax" in file:
        pytest.importorskip("orbax.checkpoint", reason="needs Orbax: pip install '.[test]'")
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
    assert len(cases) >= defined_tests(path) > 0, run.stdout + run.stderr
