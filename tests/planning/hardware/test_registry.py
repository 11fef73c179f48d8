"""Figures of chips: each is a number with a public source, and a device is known by what JAX calls its kind."""

import dataclasses
import math
import pickle
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import keras_dist as kd
from keras_dist.planning.hardware.figures import DTYPES, FrozenMapping, GpuCompilerTarget, Hardware
from keras_dist.planning.hardware.registry import HardwareRegistry, hardware

IDENTITY = ("name", "platform", "device_kind", "sources")
SOURCES = {"memory_bytes": "a datasheet", "flops_per_second": "a datasheet"}


def own(**figures):
    return Hardware(**{"name": "own", "platform": "tpu", "device_kind": "TPU own", "sources": SOURCES} | figures)


def gpu(kind):
    return SimpleNamespace(platform="gpu", device_kind=kind)


@pytest.fixture
def registry():
    return HardwareRegistry(hardware.values())


@pytest.mark.parametrize("name", hardware)
def test_every_figure_of_built_in_hardware_has_a_public_source(name):
    entry = hardware[name]
    figures = [field.name for field in dataclasses.fields(entry) if field.name not in IDENTITY]
    for figure in figures:
        if getattr(entry, figure):
            source = entry.sources[figure]
            assert "{" not in source
            assert "http" in source or source.startswith(("libtpu", "PyTorch", "llama.cpp"))


def test_devices_that_are_two_to_a_chip_have_half_of_it():
    v3 = hardware["v3"]
    assert v3.flops_per_second["bfloat16"] == 123e12 / 2
    assert v3.memory_bytes_per_second == 900e9 / 2
    assert v3.links * v3.link_bytes_per_second == 4 * 656e9 / 8
    assert hardware["tpu7x"].network_bytes_per_second == 100e9 / 8 / 2


def test_float32_runs_as_jax_multiplies_by_default():
    assert hardware["v5p"].flops_per_second["float32"] == hardware["v5p"].flops_per_second["bfloat16"] == 459e12
    assert hardware["h100"].flops_per_second["float32"] == hardware["h100"].flops_per_second["bfloat16"] / 2
    assert all(set(entry.flops_per_second) <= set(DTYPES) for entry in hardware.values())


@pytest.mark.parametrize("name", [name for name, entry in hardware.items() if entry.platform == "gpu"])
def test_peaks_of_gpus_follow_their_generation(name):
    """Tensor cores multiply float16 since Volta, float32 (as TF32) and bfloat16 since Ampere, float8 since Ada."""
    entry = hardware[name]
    peaks, capability = entry.flops_per_second, entry.compiler_target.compute_capability
    is_tensor_core = {dtype: peaks[dtype] > 6 * peaks["float32"] for dtype in ("bfloat16", "float16")}
    if capability < (8, 0):
        assert is_tensor_core == {"bfloat16": False, "float16": capability >= (7, 0)}
        assert peaks["bfloat16"] == peaks["float32"]
    else:
        assert peaks["float16"] == peaks["bfloat16"] == pytest.approx(2 * peaks["float32"], rel=0.02)
    assert ("float8" in peaks) == (capability >= (8, 9))


def test_pcie_joins_gpus_without_nvlinks():
    assert (hardware["t4"].links, hardware["t4"].link_bytes_per_second) == (0, 16e9)
    assert hardware["v100"].links * hardware["v100"].link_bytes_per_second == 300e9 / 2
    assert hardware["gh200"].link_bytes_per_second is None


def test_nothing_is_known_of_a_cpu():
    cpu = hardware["cpu"]
    assert cpu.memory_bytes is cpu.memory_bytes_per_second is cpu.link_bytes_per_second is None
    assert cpu.flops_per_second == {}


def test_hardware_is_a_value():
    entry = own(flops_per_second={"bfloat16": 1e12})
    assert entry == own(flops_per_second={"bfloat16": 1e12}, sources={**SOURCES, "links": "another"})
    assert hash(entry) == hash(own(flops_per_second={"bfloat16": 1e12}))
    assert entry != own(flops_per_second={"bfloat16": 2e12})
    assert pickle.loads(pickle.dumps(hardware["h100"])) == hardware["h100"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.memory_bytes = 1
    with pytest.raises(TypeError):
        entry.flops_per_second["bfloat16"] = 1.0


def test_a_change_of_known_hardware_keeps_the_rest():
    more = dataclasses.replace(hardware["h100"], name="h100-96gb", memory_bytes=96 * 2**30)
    assert more.memory_bytes == 96 * 2**30
    assert more.flops_per_second == hardware["h100"].flops_per_second
    assert more.compiler_target == hardware["h100"].compiler_target


def test_figures_may_be_numpy_numbers():
    assert own(memory_bytes=np.int64(5)).memory_bytes == 5
    assert own(flops_per_second={"int8": np.float32(8.0)}).flops_per_second["int8"] == 8.0


@pytest.mark.parametrize("figure", ["memory_bytes", "memory_bytes_per_second", "link_bytes_per_second"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "5", True])
def test_figures_must_be_finite_positive_numbers(figure, value):
    with pytest.raises(ValueError, match=re.escape(f"'own' has {figure}={value!r},")):
        own(**{figure: value})


@pytest.mark.parametrize("peaks", [{"bfloat16": 0}, {"float64": 1e12}, {"int8": math.nan}])
def test_peaks_must_be_positive_numbers_for_known_dtypes(peaks):
    with pytest.raises(ValueError, match=re.escape(f"flops_per_second={peaks!r}")):
        own(flops_per_second=peaks)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "a:b"}, "'a:b'"),
        ({"name": ""}, "''"),
        ({"platform": "quantum"}, r"platform='quantum'.* tpu, gpu, cpu"),
        ({"device_kind": ""}, "device_kind=''"),
        ({"memory_bytes": 1.5}, "memory_bytes=1.5"),
        ({"links": -1}, "links=-1"),
        ({"links": 2.0}, "links=2.0"),
        ({"compiler_target": GpuCompilerTarget((9, 0), 1, 1, 1.0, 1, 1, 1)}, "compiler_target=GpuCompilerTarget"),
        ({"platform": "gpu", "compiler_target": {}}, "compiler_target={}"),
        ({"memory_bytes_per_second": 1e9}, "source of memory_bytes_per_second"),
        ({"memory_bytes": 1, "sources": {"memory_bytes": " "}}, "source of memory_bytes"),
        ({"links": 4}, "source of links"),
        ({"sources": {"speed": "a datasheet"}}, "'speed'"),
    ],
)
def test_invalid_fields_are_refused_with_their_value(wrong, message):
    with pytest.raises(ValueError, match=message):
        own(**wrong)


@pytest.mark.parametrize("field", ["flops_per_second", "sources"])
def test_other_types_in_place_of_a_mapping_are_refused(field):
    with pytest.raises(TypeError, match=f"{field} .* 5"):
        own(**{field: 5})


def test_frozen_mapping_is_hashable():
    frozen = FrozenMapping({"a": 1, "b": 2})
    assert frozen == {"a": 1, "b": 2} == dict(frozen)
    assert {frozen: 3}[FrozenMapping([("b", 2), ("a", 1)])] == 3
    assert repr(frozen) == "{'a': 1, 'b': 2}"


class TestRegistry:
    def test_registered_hardware_is_found_by_its_name(self, registry):
        entry = registry.register(own())
        assert registry["own"] is entry
        assert list(registry)[-1] == "own"
        assert "own" not in hardware

    def test_the_same_figures_can_be_registered_again(self, registry):
        registry.register(own())
        assert registry.register(own()) == own()

    def test_replacing_figures_must_be_explicit(self, registry):
        slower = dataclasses.replace(registry["v5e"], network_bytes_per_second=1e9)
        with pytest.raises(ValueError, match="'v5e'"):
            registry.register(slower)
        registry.register(slower, replace=True)
        assert registry["v5e"].network_bytes_per_second == 1e9

    def test_other_objects_cannot_be_registered(self, registry):
        with pytest.raises(TypeError, match="got 'v5e'"):
            registry.register("v5e")

    def test_unknown_name_lists_the_known(self, registry):
        with pytest.raises(KeyError, match=r"'v9'.* v2, .*cpu"):
            registry["v9"]
        assert registry.get("v9") is None

    def test_it_prints_as_a_table(self, registry):
        lines = str(registry).splitlines()
        assert len(lines) == len(registry) + 2
        v5e = next(line for line in lines if line.startswith("v5e"))
        assert "15.75 GiB" in v5e
        assert "4 x 50 GB/s" in v5e
        assert " PCIe 16 GB/s " in next(line for line in lines if line.startswith("t4"))
        assert lines[-1].split() == ["cpu"] + ["-"] * 9
        assert all(line == line.rstrip() for line in lines)

    def test_notebooks_show_a_table_of_escaped_text(self, registry):
        registry.register(own())
        shown = registry._repr_html_()
        assert shown.count("<tr>") == len(registry) + 1
        assert ">15.75 GiB</td>" in shown


class TestDevices:
    @pytest.mark.parametrize("name", ["v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"])
    def test_mock_tpus(self, name):
        assert hardware.of_device(kd.mock_tpus(f"{name}:2x2")[0]) is hardware[name]

    def test_aliases_of_tpu_device_kinds(self):
        for kind, name in {"TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v6e": "v6e"}.items():
            assert hardware.of_device(SimpleNamespace(platform="tpu", device_kind=kind)) is hardware[name]

    def test_gpus_are_identified_by_their_full_device_kind(self):
        assert hardware.of_device(gpu("NVIDIA H100 80GB HBM3")) is hardware["h100"]
        assert hardware.of_device(gpu("NVIDIA H100 PCIe")) is hardware["h100-pcie"]
        assert hardware.of_device(gpu("NVIDIA A100-SXM4-40GB")) is hardware["a100-40gb"]
        assert hardware.of_device(gpu("NVIDIA H100")) is None
        assert hardware.of_device(SimpleNamespace(platform="cpu", device_kind="NVIDIA H100 80GB HBM3")) is None
        assert hardware.of_device(kd.mock_gpus(1, 1)[0]) is None

    def test_cpu_of_this_machine(self):
        assert hardware.of_device(jax.devices("cpu")[0]) is hardware["cpu"]

    def test_hardware_of_the_same_device_kind_is_told_apart_by_a_label(self, registry):
        more = registry.register(dataclasses.replace(registry["h100"], name="h100-96gb", memory_bytes=96 * 2**30))
        assert registry.device_kind_for(registry["h100"]) == "NVIDIA H100 80GB HBM3"
        assert registry.device_kind_for(more) == "NVIDIA H100 80GB HBM3 (h100-96gb)"
        assert registry.of_device(gpu(registry.device_kind_for(more))) is more
        assert registry.of_device(gpu("NVIDIA H100 80GB HBM3")) is registry["h100"]

    def test_what_replaced_hardware_is_found(self, registry):
        less = registry.register(dataclasses.replace(registry["h100"], memory_bytes=2**30), replace=True)
        assert registry.of_device(gpu(registry.device_kind_for(less))) is less
