"""The guides run, and what they print is so."""

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("sklearn", reason="the guides read scikit-learn's digits: pip install scikit-learn")
GUIDES = pathlib.Path(__file__).parent.parent / "guides"


def test_the_guide_to_meshes():
    done = subprocess.run([sys.executable, GUIDES / "meshes.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "data:3 x model:4 = 12 devices, but 8 are available" in done.stdout
    rows = [line for line in done.stdout.splitlines() if "->" in line]
    assert len(rows) == 8
    order = ["no link", "1 hop", *(f"{hops} hops" for hops in range(2, 32)), "DCN"]
    for row in rows:  # the innermost axis has never a longer link than in the listed order
        before, after = row.rpartition(": ")[2].split(" -> ")
        assert order.index(after) <= order.index(before), row
    assert "dcn=fsdp           data: 2 hops, fsdp: DCN, model: 2 hops" in done.stdout
    assert "data=7 fsdp=15  tpu:200252 (12,15,0) host 126 slice 1" in done.stdout


def test_the_guide_to_planning():
    command = [sys.executable, GUIDES / "plan_before_you_pay.py", "cpu:8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "v5e" in done.stdout  # the table of hardware
    assert "1.41 G parameters, 24 blocks" in done.stdout
    table = done.stdout[done.stdout.rindex("compiled in") :]
    for layout in ("DP", "FSDP", "TP"):
        assert f"cpu:8 {layout} " in table
