"""The README stays one page, its commands are one line each, and its example prints what it shows."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else ""
FENCE = r"```\w*\n(.*?)```"


def test_it_stays_one_page():
    assert README.count("\n") <= 150
    assert len(README.split()) <= 1000


def test_its_two_commands_have_one_line_each():
    commands = dict(re.findall(r"<!-- command: (\w+) -->\n" + FENCE, README, re.S))
    assert set(commands) == {"quickstart", "tests"}
    for command in commands.values():
        assert len(command.strip().splitlines()) == 1
    assert (ROOT / commands["quickstart"].split()[-1]).is_file()


@pytest.mark.slow
def test_its_example_prints_what_it_shows():
    (program, output), *rest = re.findall(r"<!-- example -->\n" + FENCE + r"\s+" + FENCE, README, re.S)
    assert not rest
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.rstrip() for line in done.stdout.splitlines()] == output.splitlines()


def test_its_links_lead_to_files():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target
