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
    assert "data:3 x model:4 = 12, but only 8 are available" in done.stdout
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
    table = done.stdout[done.stdout.rindex("max MFU") :]
    for layout in ("DP", "FSDP", "TP"):
        assert f"cpu:8 {layout} " in table


@pytest.fixture(scope="module")
def guide_to_layout_maps():
    done = subprocess.run([sys.executable, GUIDES / "layout_maps.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "so",
    [
        "sequential_3/head/kernel head/kernel (None, 'model')",
        "block1_norm1/gamma no rule, replicated",
        "block{0,1}_up/kernel 2 float32[64, 256] (None, model) 32 KiB",
        "findings: ()",
        "LayoutMapWarning: A layout map must lay out the model as it is meant. Received: 1 thing",
        "Received: 'block[0-9]+_donw/kernel', which matches nothing in 'transformer'. Did you mean "
        "layout_map['block[0-9]+_down/kernel'] = ('model', None)?",
        "strict=True: ValueError A layout map must lay out the model as it is meant.",
        "findings of what is meant to be whole: []",
        "block0_attention/query/kernel (None, 'model') head/kernel ()",
        "equal from source and from pickle: True",
        "layout_map['block[0-9]+_attention/attention_output/kernel'] = ('model', None, None)",
        "block0_up/kernel (64, 256) ('fsdp', 'model') on a device (32, 64)",
        "dense_0/lora_kernel_b (4, 64) (None, 'model') on a device (4, 16), follows 'dense_0/kernel'",
        "dense_1/kernel_scale (64,) ('model',) on a device (16,), follows 'dense_1/kernel'",
        "lora_kernel_b_momentum (4, 64) (None, 'model') on a device (4, 16), follows 'dense_0/kernel'",
        "(64, 256) as ('model', 'data') on data:2 x model:4",
    ],
)
def test_the_guide_to_layout_maps(guide_to_layout_maps, so):
    assert so in " ".join(guide_to_layout_maps.split())


@pytest.mark.parametrize(
    "message",
    [
        "A rule must match a variable, or the output of a layer.",
        "which axis 'model' (size 4) does not divide.",
        "Swapping the axes fits:",
        "the rule has 2 entries, but the tensor has 1 dim.",
        "matches multiple layout specification keys:",
        "replicated over it,",
        "all of whose paths are taken:",
        "The state of a random generator must stay whole,",
        "a LoRA factor of its layer",
        "as its head too (tied).",
    ],
)
def test_the_guide_to_layout_maps_has_each_message_and_what_to_do(guide_to_layout_maps, message):
    entries = guide_to_layout_maps.partition("--- 8.")[2].split("What to do:")[:-1]
    assert any(message in " ".join(entry.split()) for entry in entries)


def test_the_guide_to_checkpoints():
    done = subprocess.run([sys.executable, GUIDES / "checkpoints.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "killed in epoch 1 after batch 16, exit status -9" in done.stdout
    assert "all 69 losses equal" in done.stdout
    assert "ModelParallel            'up/kernel' (64, 256), shard of a device (64, 32)" in done.stdout
    assert "equal values: True" in done.stdout
    assert "ValueError: Checkpoint " in done.stdout


def test_the_guide_to_strategies():
    done = subprocess.run(
        [sys.executable, GUIDES / "strategies.py", "cpu:8"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names = ("DP", "ZeRO-1", "FSDP", "HSDP", "TP", "TP + SP", "FSDP x TP")
    lines = done.stdout.splitlines()
    for name in names:
        trained, planned = (line for line in lines if line.startswith(f"{name:10} "))
        assert float(trained.rpartition(" ")[2]) < 1e-5
        assert "MiB" in planned
    assert "layout_map['block[0-9]+_up/kernel'] = (None, 'model')" in done.stdout


def test_the_guide_to_many_hosts():
    command = [sys.executable, GUIDES / "many_hosts.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, killed, again = done.stdout.split("--- ")[1:]
    assert "[0] 2 processes, 8 devices" in first
    assert "saved and loaded: True" in first
    assert "process 0 passes 718 of 1437 rows, and is given 718 predictions" in first
    assert "[100, 100] on process 0, but [101, 101] on process 1" in first
    assert "exit status 137" in killed
    assert "Process 1" in done.stderr
    (loss,), (loss_again,) = ([line for line in part.splitlines() if " loss " in line] for part in (first, again))
    assert loss == loss_again
