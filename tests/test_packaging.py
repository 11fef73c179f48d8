"""The package's metadata, its version and the changelog agree, and releases are made of nothing else."""

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

import keras_dist as kd

ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RELEASES = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)


def numbers(version):
    return tuple(map(int, version.split(".")))


def test_the_version_is_that_of_the_changelog():
    """Below "Unreleased" the version is a later one in development; without it, the newest release."""
    newest, *_ = [heading.partition(" - ")[0] for heading in RELEASES if heading != "Unreleased"]
    if RELEASES[0] == "Unreleased":
        assert numbers(kd.__version__.removesuffix(".dev0")) > numbers(newest)
        assert kd.__version__.endswith(".dev0")
    else:
        assert kd.__version__ == newest


def test_releases_are_in_order():
    versions = [heading.partition(" - ") for heading in RELEASES if heading != "Unreleased"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, _, date in versions)
    ordered = [numbers(version) for version, _, _ in versions]
    assert ordered == sorted(set(ordered), reverse=True)


def release_notes(tmp_path, tag, version, changelog):
    for folder in (".ci", "keras_dist"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci" / "release_notes", tmp_path / ".ci")
    (tmp_path / "keras_dist" / "__init__.py").write_text(f'"""A package."""\n\n__version__ = "{version}"\n')
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    command = [sys.executable, tmp_path / ".ci" / "release_notes", tag]
    return subprocess.run(command, capture_output=True, text=True, check=False)


CHANGELOG = "# Changelog\n\n## 0.2.0 - 2027-01-02\n\n### Added\n\n- A.\n\n## 0.1.0 - 2026-11-22\n\n- B.\n"


def test_a_release_has_the_notes_of_its_section(tmp_path):
    done = release_notes(tmp_path, "v0.2.0", "0.2.0", CHANGELOG)
    assert done.returncode == 0
    assert done.stdout == "### Added\n\n- A.\n"


@pytest.mark.parametrize(
    ("tag", "version", "changelog", "named"),
    [
        ("v0.2.0", "0.2.1", CHANGELOG, ["v0.2.0", "0.2.1"]),
        ("v0.2.0.dev0", "0.2.0.dev0", CHANGELOG, ["0.2.0.dev0"]),
        ("v0.3.0", "0.3.0", CHANGELOG, ["0.3.0"]),
        ("v0.2.0", "0.2.0", CHANGELOG.replace("0.2.0 - 2027-01-02", "Unreleased"), ["0.2.0", "Unreleased"]),
    ],
)
def test_other_tags_are_refused(tmp_path, tag, version, changelog, named):
    done = release_notes(tmp_path, tag, version, changelog)
    assert done.returncode == 1
    assert done.stdout == ""
    assert all(name in done.stderr for name in named)


def test_the_long_description_has_no_relative_links():
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = "".join((ROOT / fragment["path"]).read_text() for fragment in hook["fragments"])
    for substitution in hook["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    links = re.findall(r"\]\(([^)]+)\)|(?:src|href)=\"([^\"]+)\"", text)
    assert len(links) > 20
    assert all(re.match("https://|#", markdown or html) for markdown, html in links)
    assert PYPROJECT["project"]["urls"]["Source"] + "/blob/v$HFPR_VERSION/docs/strategies.md" in text
    assert not re.search(r"!\[[^]]*\]\(https://github.com/[^)]+/blob/", text), "a page, not the image"


def test_only_pyproject_states_where_the_project_is():
    home = PYPROJECT["project"]["urls"]["Homepage"]
    pages = [*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.y*ml"), ROOT / "docs" / "conf.py"]
    pages += [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "_extensions").glob("*"),
        *(ROOT / "guides").glob("*.py"),
    ]
    assert [str(page) for page in pages if page.is_file() and home in page.read_text()] == []


def test_every_tested_python_is_a_classifier():
    versions = set(re.findall(r"find_python (.+)\)", (ROOT / ".ci" / "common.sh").read_text())[:2])
    named = {version for line in versions for version in line.split()}
    classifiers = PYPROJECT["project"]["classifiers"]
    assert named
    assert all(f"Programming Language :: Python :: {version}" in classifiers for version in named)
