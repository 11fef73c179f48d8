"""What `keras-dist doctor` finds, given the facts of a machine; and the facts of this one."""

import dataclasses
import json

import jax
import pytest

from keras_dist._report.install_advice import install_command
from keras_dist.monitoring import system_facts
from keras_dist.monitoring.doctor import diagnose
from keras_dist.monitoring.system_facts import SystemFacts
from keras_dist_cli import main

VERSIONS = {"keras": "3.15.1", "jax": "0.12.0", "jaxlib": "0.12.0"}
HEALTHY = SystemFacts("3.13.0", VERSIONS, {}, cores=8)
CUDA12 = {"jax-cuda12-plugin": "0.12.0", "jax-cuda12-pjrt": "0.12.0"}


def device(platform, kind="cpu"):
    figures = {"hardware": None, "links": None, "memory_bytes": None, "used_bytes": None}
    return {"name": f"{platform}:0", "kind": kind, "platform": platform, "process": 0, **figures}


CPU, GPU = (device("cpu"),), (device("gpu", "NVIDIA H100 80GB HBM3"),)


def facts(versions=None, environment=None, **changed):
    return dataclasses.replace(
        HEALTHY, versions=VERSIONS | (versions or {}), environment=environment or {}, **{"devices": CPU, **changed}
    )


@pytest.mark.parametrize(
    ("found", "must_change", "words"),
    [
        (facts(environment={"KERAS_BACKEND": "torch"}), True, ["torch", "KERAS_BACKEND=jax"]),
        (facts({"keras": "3.10.0"}), True, ["3.10.0", '"keras>=3.15"']),
        (facts({"jax": "0.10.1"}), True, ["0.10.1", '"jax>=0.10.2"']),
        (facts(CUDA12 | {"jax-cuda13-plugin": "0.12.0"}, devices=GPU), True, ["jax-cuda12-plugin", "jax-cuda13"]),
        (facts(CUDA12 | {"jax-cuda12-plugin": "0.11.0"}), True, ["0.11.0", "0.12.0", install_command("cuda12")]),
        (facts(environment={"XLA_FLAGS": "--xla_a=1 --xla_a=2"}), True, ["--xla_a", "'1'", "'2'"]),
        (facts(environment={"XLA_FLAGS": "--xla_a=1 , --xla_b"}), True, ["','"]),
        (facts(gpus=8), True, ["8 NVIDIA", install_command("cuda13")]),
        (facts(gpus=8, cuda_extra="cuda12"), True, ["8 NVIDIA", install_command("cuda12")]),
        (
            facts(CUDA12, gpus=8, output="  RuntimeError: Unable to load cuDNN."),
            True,
            ["cuDNN", install_command("cuda12")],
        ),
        (facts(CUDA12, {"JAX_PLATFORMS": "cpu"}, gpus=8), False, ["hides", "JAX_PLATFORMS"]),
        (facts(tpus=4), True, ["4 TPU", install_command("tpu")]),
        (facts(environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=64"}), True, ["64", "NPROC=128"]),
        (facts(environment={"JAX_NUM_CPU_DEVICES": "16", "NPROC": "4"}), True, ["NPROC=4", "NPROC=32"]),
        (facts(environment={"JAX_NUM_CPU_DEVICES": "16"}, devices=GPU), False, ["16", "gpu"]),
        (facts(environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, devices=GPU), False, ["PREALLOCATE"]),
        (facts(environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": "90"}, devices=GPU), True, ["=90"]),
        (facts(devices=(), failure="Unknown flag in XLA_FLAGS: --xla_a"), True, ["--xla_a", "Remove"]),
        (facts(devices=(), failure="x", output="libtpu already in use"), True, ["lsof"]),
        (facts(environment={"JAX_PLATFORMS": "rocm"}, devices=(), failure="x"), True, ["JAX_PLATFORMS=rocm"]),
        (facts(devices=(), failure="x"), True, ["jax.devices()"]),
    ],
)
def test_what_is_found(found, must_change, words):
    diagnosis = diagnose(found)
    (finding,) = diagnosis.findings
    assert diagnosis.must_change == finding.must_change == must_change
    assert all(word in f"{finding.fault} {finding.fix}" for word in words)


@pytest.mark.parametrize(
    "found",
    [
        facts(),
        facts(CUDA12, gpus=8, devices=GPU),
        facts(environment={"KERAS_BACKEND": "jax", "NPROC": "32", "JAX_NUM_CPU_DEVICES": "16"}),
        facts(environment={"XLA_FLAGS": "--xla_a=1 --xla_a=1", "JAX_NUM_CPU_DEVICES": "8"}),
        facts(environment={"XLA_FLAGS": "flags.txt"}),
        facts(environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}, devices=GPU),
    ],
)
def test_what_is_fine(found):
    assert diagnose(found).findings == ()
    assert not diagnose(found).must_change


def test_what_must_change_comes_first():
    found = facts(CUDA12, {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "64"}, gpus=8)
    assert [finding.must_change for finding in diagnose(found).findings] == [True, False]


def test_facts_of_devices():
    found = system_facts.collect_devices()
    assert [each["name"] for each in found["devices"]] == [f"cpu:{number}" for number in range(jax.device_count())]
    assert found["longest_link"] == "1 hop"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_command_with_what_keeps_jax_from_starting(monkeypatch, capsys):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["environment"]["KERAS_BACKEND"] == "torch"
    assert "--xla_no_such_flag=1" in found["failure"]
    assert len(found["findings"]) == 2


def test_devices_that_never_start(monkeypatch):
    monkeypatch.setattr(system_facts, "TIMEOUT", 0.01)
    found = system_facts.collect(None)
    assert found.devices == ()
    assert "0.01 seconds" in found.failure
