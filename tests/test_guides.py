"""The guides run, and what they print is so.

Each runs here as a script. Where the documentation has been built, which runs them too and fails if one does,
KERAS_DIST_EXECUTED_GUIDES is set to its folder, so that they need not run a second time.
"""

import html
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

pytest.importorskip("sklearn", reason="the guides read scikit-learn's digits: pip install scikit-learn")
GUIDES = pathlib.Path(__file__).parent.parent / "guides"
EXECUTED = os.environ.get("KERAS_DIST_EXECUTED_GUIDES")
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def output_of(name: str, *arguments: str) -> str:
    """Returns what a guide prints, from the documentation if that has been built."""
    if EXECUTED:
        notebook = pathlib.Path(EXECUTED, "_build", "jupyter_execute", "guides", f"{name}.ipynb")
        return text_of_notebook(notebook) if notebook.exists() else text_of_page(name)
    command = [sys.executable, GUIDES / f"{name}.py", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def text_of_notebook(file: pathlib.Path) -> str:
    """Returns what the cells of an executed notebook printed, and the text of what they displayed."""
    texts = []
    for cell in json.loads(file.read_text())["cells"]:
        text = ""
        for output in cell.get("outputs", []):
            displayed = "".join(output.get("data", {}).get("text/html", ""))
            part = "".join(output.get("text", "")) + html.unescape(re.sub("<[^>]+>", " ", displayed))
            text += "" if part in text else part  # MyST-NB merges streams, and keeps their parts
        texts.append(text)
    return "\n".join(texts)


def text_of_page(name: str) -> str:
    """Returns what a guide printed whose page shows a script."""
    page = pathlib.Path(EXECUTED, "guides", f"{name}.md").read_text()
    return page.partition("## What it prints")[2].split("```")[1]


def test_the_guide_to_meshes():
    printed = output_of("meshes")
    assert "data:3 x model:4 = 12, but only 8 are available" in printed
    rows = [line for line in printed.splitlines() if "->" in line]
    assert len(rows) == 8
    order = ["no link", "1 hop", *(f"{hops} hops" for hops in range(2, 32)), "network"]
    for row in rows:  # the innermost axis has never a longer link than in the listed order
        before, after = row.rpartition(": ")[2].split(" -> ")
        assert order.index(after) <= order.index(before), row
    assert "dcn=fsdp           data: 2 hops, fsdp: network, model: 2 hops" in printed
    assert "data=7 fsdp=15 tpu:200252 (12,15,0) host 126 slice 1" in " ".join(printed.split())


@pytest.mark.slow
def test_the_quick_start():
    printed = output_of("quickstart")  # which asserts that the losses are equal
    assert "largest relative difference" in printed.partition("--- ModelParallel")[2]


@pytest.mark.slow
def test_the_guide_to_planning():
    printed = output_of("plan_before_you_pay")
    assert "819 GB/s" in printed  # in the table of hardware
    assert "1.41 G parameters, 24 blocks" in printed
    table = printed[printed.rindex("forecast") :]
    for layout in ("DP", "FSDP", "TP"):
        assert re.search(rf"(cpu|v5e):8 {layout} ", table)
    if "v5e:8 DP" in table:
        assert re.search(r"v5e:8 DP .*?does not fit.*?v5e:8 FSDP .*?fits", " ".join(table.split()))


@pytest.fixture(scope="module")
def guide_to_layout_maps():
    return output_of("layout_maps")


@pytest.mark.parametrize(
    "words",
    [
        "sequential_3/head/kernel head/kernel (None, 'model')",
        "block1_norm1/gamma no rule, replicated",
        "findings: ()",
        "LayoutMapWarning: 1 possible problem in the layout map for 'transformer'",
        "'block[0-9]+_donw/kernel' matches no variable of 'transformer'. Did you mean: "
        "layout_map['block[0-9]+_down/kernel'] = ('model', None)",
        "strict=True: ValueError 1. Layout map rule 'block[0-9]+_donw/kernel'",
        "findings with a rule of only None: []",
        "block0_attention/query/kernel (None, 'model') head/kernel ()",
        "equal from source and from pickle: True",
        "layout_map['block[0-9]+_attention/attention_output/kernel'] = ('model', None, None)",
        "block0_up/kernel (64, 256) ('fsdp', 'model') shard (32, 64)",
        "dense_0/lora_kernel_b (4, 64) (None, 'model') shard (4, 16), same as 'dense_0/kernel'",
        "dense_1/kernel_scale (64,) ('model',) shard (16,), same as 'dense_1/kernel'",
        "lora_kernel_b_momentum (4, 64) (None, 'model') shard (4, 16), same as 'dense_0/kernel'",
        "(64, 256) as ('model', 'data') on data:2 x model:4",
    ],
)
def test_the_guide_to_layout_maps(guide_to_layout_maps, words):
    assert words in " ".join(guide_to_layout_maps.split())


def test_the_guide_to_layout_maps_shows_the_table(guide_to_layout_maps):
    printed = " ".join(guide_to_layout_maps.split())  # the rule is below the path, or beside it in HTML
    assert re.search(r"block\{0,1\}_up/kernel (rule \S+ )?2 float32\[64, 256\] .*?\(None, model\) 32 KiB", printed)


@pytest.mark.parametrize(
    "words",
    [
        "'dens_[01]/kernel' matches no variable",
        "dim 1 has size 10, which is not divisible by axis 'model' (size 4)",
        "2 entries, but the tensor has 1 dim",
        "matches multiple layout specification keys:",
        "are replicated over axis 'model' (size 4)",
        "'.*_1/kernel' has no effect",
        "the state of a random generator",
        "a LoRA factor)",
        "tied weights",
    ],
)
def test_the_guide_to_layout_maps_has_each_message_with_its_fix(guide_to_layout_maps, words):
    entries = guide_to_layout_maps.partition("--- messages")[2].split("What to do:")[:-1]
    assert any(words in " ".join(entry.split()) for entry in entries)


@pytest.mark.slow
def test_the_guide_to_fine_tuning():
    printed = output_of("fine_tune_llm")  # which asserts that losses fall, and that those of resumed training are equal
    for target in ("t4:2", "v5e:8", "h100:8"):
        assert f"{target}: not planned" in printed or f"{target}: fits" in printed
    assert "trainable with LoRA: 17.1 of 1252.9 million weights" in printed
    assert re.search(r"lora_kernel_a +\(96, 4, 8\) +shard \(96, 2, 8\)", printed)
    assert "the losses are those of the training without interruption" in printed
    assert re.search(r"parameters: [\d,]+ with LoRA, 399,840 merged", printed)
    assert len(re.findall("^Function: .*\nDescription: ", printed, re.MULTILINE)) >= 3


@pytest.mark.slow
def test_the_guide_to_vision():
    printed = output_of("vision")  # which asserts that losses are equal, and that the network learns
    assert "v5e:8: not planned" in printed or re.search(r"bfloat16, augmented +8 x v5e", printed)
    assert re.search(r"FSDP +loss \d", printed)
    assert "float32 (3, 3, 64, 64), shard of a device (3, 3, 8, 64)" in printed


@pytest.mark.slow
def test_the_guide_to_checkpoints():
    printed = output_of("checkpoints")
    assert "killed in epoch 1 after batch 16, exit status -9" in printed
    assert "all 69 losses equal" in printed
    assert "ModelParallel            'up/kernel' (64, 256), shard of a device (64, 32)" in printed
    assert "equal values: True" in printed
    assert "ValueError: Checkpoint " in printed


@pytest.mark.slow
def test_the_guide_to_strategies():
    printed = output_of("strategies")
    names = ("DP", "ZeRO-1", "FSDP", "HSDP", "TP", "TP + SP", "FSDP x TP", "FSDP x CP")
    lines = printed.splitlines()
    for name in names:
        trained, planned = (line for line in lines if line.startswith(f"{name:10} "))
        assert float(trained.rpartition(" ")[2]) < 1e-5
        assert "MiB" in planned
    assert "layout_map['block[0-9]+_up/kernel'] = (None, 'model')" in printed


@pytest.mark.multiprocess
def test_the_guide_to_many_hosts():
    first, killed, again = output_of("many_hosts").split("--- ")[1:]
    assert "[0] 2 processes, 8 devices" in first
    assert "saved and loaded: True" in first
    assert "process 0 passes 718 of 1437 rows, and is given 718 predictions" in first
    assert "[100, 100] on process 0" in first
    assert "[101, 101] on process 1" in first
    assert "exit status 137" in killed
    assert "process 1 was the first to fail, with exit status 137" in killed
    (loss,), (loss_again,) = ([line for line in part.splitlines() if " loss " in line] for part in (first, again))
    assert loss == loss_again


@pytest.mark.slow
def test_the_guide_to_data():
    pytest.importorskip("grain", reason="the guide reads by Grain: pip install grain")
    one, two, packing = output_of("data").split("--- ")[1:]  # which asserts that losses are equal
    for name in ("Grain", "PyDataset"):
        assert re.search(rf"{name} +process 0 reads 45 of 45 rows", one)
        assert re.search(rf"{name} +process 0 reads 23 of 45 rows", two)
    assert "different documents, largest relative difference" in packing


@pytest.mark.slow
def test_the_guide_to_step_options():
    printed = output_of("step_options")
    rows = [line.split() for line in printed.splitlines() if "GFLOP" in line]
    losses, temporaries, wire_bytes, flops = zip(*([row[0], row[1], row[3], row[5]] for row in rows[-5:]), strict=True)
    assert len(set(losses)) == 1
    if jax.__version_info__ >= (0, 12):  # `remat="full"` saves nothing with the compiler for CPUs of JAX 0.10
        assert float(temporaries[3]) < float(temporaries[0])
    assert float(wire_bytes[2]) > 2 * float(wire_bytes[1])  # gradients are reduced in each microbatch
    assert float(flops[3]) > float(flops[0])
