"""A new virtual environment with nothing but the wheel: what a user does first, and each command that an error advises.

CI names an environment with the wheel in KERAS_DIST_FRESH_ENVIRONMENT. Without it, one is made of the source tree.
"""

import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SNAPSHOT = re.sub(r"\s+", " ", (ROOT / "tests" / "messages" / "snapshot.md").read_text())
INSTALL = r'pip install(?: --\w+)*(?: "[^"]+")+'
pytestmark = pytest.mark.multiprocess

MODEL = """
import keras

def build():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    model.compile("adam", "mse")
    return model
"""
NEEDS_AN_EXTRA = {
    "checkpoint": "import keras_dist as kd; kd.TrainingCheckpoint('checkpoints')",
    "plot": "import keras_dist as kd; mesh = kd.mock_gpus(1, 2); "
    "kd.visualize((8, 8), kd.TensorLayout(('a', None), kd.create_device_mesh('a:2', devices=mesh))).figure()",
}


class Environment:
    """A virtual environment, and a folder to run commands in, away from the source tree."""

    def __init__(self, path, folder):
        self.folder = folder
        left_out = ("JAX_", "XLA_", "KERAS_", "TF_", "TPU_", "PYTHONPATH", "PYTEST", "NPROC")
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        self.variables |= {"PATH": f"{path}/bin:{os.environ['PATH']}", "VIRTUAL_ENV": str(path)}
        (site,) = path.glob("lib/python*/site-packages")
        (self.distribution,) = importlib.metadata.distributions(name="keras-dist", path=[str(site)])
        self.wheel = pathlib.Path(
            json.loads(self.distribution.read_text("direct_url.json") or "")["url"].removeprefix("file://")
        )

    def run(self, command, **variables):
        """Runs a command in a shell, with variables of the environment."""
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.variables | variables,
            input="y\n",
            capture_output=True,
            text=True,
            check=False,
        )

    def must_run(self, command):
        done = self.run(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("away")
    path = pathlib.Path(os.environ.get("KERAS_DIST_FRESH_ENVIRONMENT", folder / "venv"))
    if not path.exists():
        if not (ROOT / "keras_dist").exists():
            pytest.skip("there is no source tree to build a wheel from, and no KERAS_DIST_FRESH_ENVIRONMENT")
        for command in (
            [sys.executable, "-m", "venv", path],
            [path / "bin" / "pip", "wheel", "-q", "--no-deps", "-w", folder / "dist", ROOT],
            ["bash", "-c", f'"{path}/bin/pip" install -q "{folder}"/dist/*.whl'],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no package index: {done.stderr}")
    (folder / "model.py").write_text(MODEL)
    return Environment(path, folder)


@pytest.fixture(scope="module")
def index(environment):
    """Skips a test that installs packages where there is no index."""
    done = environment.run('pip install -q --dry-run --no-deps --ignore-installed "matplotlib"')
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr}")


def advised(done):
    """The command that the error of a process advises."""
    assert done.returncode != 0
    (command,) = re.findall(INSTALL, done.stderr)
    return command


def test_the_package_is_away_from_the_source(environment):
    file, version = environment.must_run(
        "python -c 'import keras_dist; print(keras_dist.__file__, keras_dist.__version__)'"
    ).split()
    assert ROOT not in pathlib.Path(file).parents
    assert version == environment.distribution.version


def test_the_long_description_has_no_relative_links(environment):
    links = re.findall(r"\]\(([^)]+)\)", environment.distribution.metadata.get_payload())
    assert len(links) > 20
    assert all(re.match("https://|#", link) for link in links)
    assert f"/blob/v{environment.distribution.version}/docs/planning.md" in " ".join(links)


def test_doctor_reports(environment):
    done = environment.run("keras-dist doctor")
    assert done.returncode in (0, 1)  # 1 on a host with GPUs or TPUs, for which nothing is installed
    assert f"keras-dist {environment.distribution.version}" in done.stdout


def test_a_plan_is_made(environment):
    plan = "keras-dist plan model.py:build --target cpu:8 --mesh data:8 --batch 64 --json"
    assert json.loads(environment.must_run(plan))["mesh"]


@pytest.mark.parametrize("extra", NEEDS_AN_EXTRA)
def test_what_an_error_advises_mends_it(environment, index, extra):
    """Before the quick start, whose extra installs matplotlib, too."""
    program = f'python -c "{NEEDS_AN_EXTRA[extra]}"'
    environment.must_run(advised(environment.run(program)))
    environment.must_run(program)


@pytest.mark.slow
def test_the_quick_start_runs_with_the_documented_command(environment, index):
    shutil.copy(environment.wheel, environment.folder)
    shutil.copy(ROOT / "guides" / "quickstart.py", environment.folder)
    documented = (ROOT / "docs" / "get_started.md").read_text()
    (install,) = re.findall(r'`(pip install "\$\(ls keras_dist-\*\.whl\)\[tpu\]")`', documented)
    environment.must_run(install.replace("tpu", "guides"))
    assert "largest relative difference" in environment.must_run("python quickstart.py")


@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
def test_errors_name_the_compiler_to_install(environment, index, target):
    done = environment.run(f"keras-dist plan model.py:build --target {target} --mesh data:8 --batch 64")
    assert advised(done) in re.findall(INSTALL, SNAPSHOT)


def commands():
    """The commands of the snapshot of messages; slow ones look up gigabytes of CUDA's libraries."""
    found = [command.replace("install", "install --dry-run") for command in re.findall(INSTALL, SNAPSHOT)]
    assert len(found) > 5
    found += re.findall(r"pip uninstall(?: [\w-]+)+|python -c '[^']+'", SNAPSHOT)
    # Dots stand for a program: only the options before it are read.
    found += [command.replace(" ...", " --help") for command in re.findall(r"`(keras-dist [^`<]+)`", SNAPSHOT)]
    return [pytest.param(each, marks=[pytest.mark.slow] if "[cuda" in each else []) for each in dict.fromkeys(found)]


@pytest.mark.parametrize("command", commands())
def test_commands_of_messages_run(environment, index, command):
    done = environment.run(command, PIP_CONSTRAINT="")  # machines in messages need not have CI's oldest versions
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "does not provide the extra" not in done.stderr
