"""Commands that messages advise: they work whichever way the package got here."""

import importlib.metadata
import importlib.util
import json
import pathlib
import re
import tomllib

import pytest

from keras_dist._report import install_advice
from keras_dist._report.install_advice import EXTRAS, OLDEST, cuda_extra, install_command

ROOT = pathlib.Path(__file__).parents[2]


def installed(monkeypatch, files):
    """Lets the distribution have these files of metadata; None is no distribution."""

    class Installed(importlib.metadata.Distribution):
        def read_text(self, filename):
            return files.get(filename)

        def locate_file(self, path):
            raise AssertionError

    def distribution(name):
        if files is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return Installed()

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


def test_a_package_from_an_index_has_its_extras_there(monkeypatch):
    installed(monkeypatch, {"METADATA": "Name: keras-dist"})
    assert install_command("tpu") == 'pip install "keras-dist[tpu]"'


@pytest.mark.parametrize(
    "origin",
    [
        {"url": "file:///home/clone", "dir_info": {}},
        {"url": "file:///home/clone", "dir_info": {"editable": True}},
        {"url": "file:///home/keras_dist-0.2.0-py3-none-any.whl", "archive_info": {}},
        {"url": "https://example.com/keras-dist", "vcs_info": {"vcs": "git", "commit_id": "1"}},
        None,
    ],
)
def test_otherwise_what_the_extra_requires_is_installed(monkeypatch, origin):
    installed(monkeypatch, None if origin is None else {"direct_url.json": json.dumps(origin)})
    assert install_command("tpu") == 'pip install "jax[tpu]"'
    assert install_command("checkpoint") == 'pip install "orbax-checkpoint>=0.12"'


def test_requirements_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert EXTRAS.items() <= {extra: first for extra, (first, *_) in project["optional-dependencies"].items()}.items()
    assert {f"{package}>={version}" for package, version in OLDEST.items()} <= set(project["dependencies"])
    assert len(OLDEST) == sum(">" in requirement for requirement in project["dependencies"])


X86 = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12.2.0"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  {}  Release Build  (root@host)"


@pytest.mark.parametrize(
    ("driver", "by_cuda_13", "extra"),
    [
        (None, True, "cuda13"),
        (None, False, "cuda12"),
        (X86.format("535.104.05"), True, "cuda12"),
        (X86.format("580.65.06"), True, "cuda13"),
        (X86.format("580.65.06"), False, "cuda12"),
        (OPEN.format("575.57.08"), True, "cuda12"),
        (OPEN.format("590.12"), True, "cuda13"),
        ("unreadable", True, "cuda13"),
    ],
)
def test_extra_for_gpus_is_the_newest_that_they_can_use(monkeypatch, tmp_path, driver, by_cuda_13, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    file = tmp_path / "version"
    if driver is not None:
        file.write_text(driver)
    monkeypatch.setattr(install_advice, "_DRIVER_FILE", file)
    assert cuda_extra(by_cuda_13) == extra


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_extra_for_gpus_is_that_of_the_installed_plugin(monkeypatch, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == f"jax_{extra}_plugin" or None)
    assert cuda_extra(by_cuda_13=False) == extra


def test_commands_of_messages_are_quoted():
    snapshot = (ROOT / "tests" / "messages" / "snapshot.md").read_text()
    text = re.sub(r"\s+", " ", snapshot)
    assert len(re.findall(r'pip install(?: --\w+)*(?: "[^"]+")+', text)) == text.count("pip install") > 5
