"""Which hardware and shape a name stands for."""

import re

import pytest

from keras_dist.planning.hardware.registry import hardware
from keras_dist.planning.targets.target_names import _MACHINES, parse_target_name


@pytest.mark.parametrize(
    ("name", "chip", "shape"),
    [
        ("v5e:4x4", "v5e", (4, 4)),
        ("v5p:2x2x2", "v5p", (2, 2, 2)),
        ("h100:2x8", "h100", (2, 8)),
        ("cpu:8", "cpu", (8,)),
    ],
)
def test_hardware_and_shape(name, chip, shape):
    entry, found = parse_target_name(name)
    assert (entry.name, found) == (chip, shape)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("v5e:1", (1, 1)),
        ("v5e:8", (2, 4)),
        ("v6e:256", (16, 16)),
        ("v5p:4", (2, 2, 1)),
        ("v5p:8", (2, 2, 2)),
        ("v4:32", (2, 4, 4)),
        ("v4:4096", (16, 16, 16)),
    ],
)
def test_number_of_chips_stands_for_the_usual_slice(name, shape):
    assert parse_target_name(name)[1] == shape


# Source: https://cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e}, "Configurations": accelerator type and topology.
@pytest.mark.parametrize(
    ("name", "chip", "shape"),
    [
        ("v2-8", "v2", (2, 2)),
        ("v3-32", "v3", (4, 4)),
        ("v4-8", "v4", (2, 2, 1)),
        ("v4-512", "v4", (4, 8, 8)),
        ("v5litepod-8", "v5e", (2, 4)),
        ("v5e-16", "v5e", (4, 4)),
        ("v5p-8", "v5p", (2, 2, 1)),
        ("v5p-128", "v5p", (4, 4, 4)),
        ("v6e-64", "v6e", (8, 8)),
        ("a2-ultragpu-4g", "a100", (4,)),
        ("a3-highgpu-8g", "h100", (8,)),
        ("a3-ultragpu-8g", "h200", (8,)),
        ("a4-highgpu-8g", "b200", (8,)),
        ("p5.48xlarge", "h100", (8,)),
        ("p5en.48xlarge", "h200", (8,)),
        ("tpu7x-8", "tpu7x", (2, 2, 1)),
        ("TPU v5e-8", "v5e", (2, 4)),
        ("v5e-1 TPU", "v5e", (1, 1)),
        ("GPU T4 x2", "t4", (2,)),
        ("GPU P100", "p100", (1,)),
        ("a2-highgpu-2g", "a100-40gb", (2,)),
        ("a2-megagpu-16g", "a100-40gb", (1, 16)),
        ("g2-standard-96", "l4", (8,)),
        ("g4-standard-192", "rtx-pro-6000", (4,)),
        ("a4x-highgpu-4g", "gb200", (4,)),
        ("p3dn.24xlarge", "v100-32gb", (8,)),
        ("p4d.24xlarge", "a100-40gb", (8,)),
        ("g4dn.xlarge", "t4", (1,)),
        ("g5.12xlarge", "a10g", (4,)),
        ("g6.48xlarge", "l4", (8,)),
        ("g6e.2xlarge", "l40s", (1,)),
        ("p6-b300.48xlarge", "b300", (8,)),
        ("Standard_NC64as_T4_v3", "t4", (4,)),
        ("Standard_NC96ads_A100_v4", "a100-pcie", (4,)),
        ("Standard_NC80adis_H100_v5", "h100-nvl", (2,)),
        ("Standard_ND96isr_H100_v5", "h100", (8,)),
    ],
)
def test_names_of_cloud_slices_and_machines(name, chip, shape):
    entry, found = parse_target_name(name)
    assert (entry.name, found) == (chip, shape)


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("H100:8", "h100:8"),
        ("H100x8", "h100:8"),
        ("8xH100", "h100:8"),
        ("2 x T4", "t4:2"),
        ("a100-80gb:4", "a100:4"),
        ("A100-40GB", "a100-40gb:8"),
        ("nvidia-h100", "h100:8"),
        ("h10:2x8", "h100:2x8"),
        ("TPU v4", "v4:2x2x2"),
        ("V5E:4x4", "v5e:4x4"),
        ("v5e", "v5e:4x4"),
        ("cpu", "cpu:8"),
        ("h100:0", "h100:8"),
        ("h100:2x0", "h100:8"),
        ("v5x:2x4", "v5e:2x4"),
        ("v5:2x4", "v5e:2x4"),
        ("v5:2x2x4", "v5p:2x2x4"),
        ("v5p 2x4", "v5p:2x4x1"),
        ("v5e 2x2x2", "v5e:4x4"),
        ("v5x:3x5", "v5e:4x4"),
        ("v7:2x2x2", "tpu7x:2x2x2"),
        ("h100:100000", "h100:8"),
    ],
)
def test_near_misses_have_a_suggestion_that_is_a_target(name, suggested):
    with pytest.raises(ValueError, match=re.escape(f"{name!r}. Did you mean {suggested!r}?")):
        parse_target_name(name)
    parse_target_name(suggested)


@pytest.mark.parametrize("name", ["mi300x:8", "trainium:16"])
def test_other_hardware_has_a_list_in_place_of_a_suggestion(name):
    with pytest.raises(ValueError, match=rf"in target '{name}'\. Use one of v2, .* or add yours"):
        parse_target_name(name)


@pytest.mark.parametrize(
    "name", ["g5.3xlarge", "a3-megagpu-4g", "g5.12xlarge:2", "Standard_ND96isr_H100", "p3.16xlarge "]
)
def test_names_that_no_machine_has_are_refused(name):
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        parse_target_name(name)


def test_every_machine_has_known_hardware():
    assert {chip for _, chip, *_ in _MACHINES["machines"]} <= set(hardware)


@pytest.mark.parametrize("name", ["v5e:3x5", "v5e:2x2x2", "v5e:512", "v5p:3x3x3", "h100:2x2x2", "cpu:2x4"])
def test_shapes_that_do_not_exist_are_refused_before_a_compiler_is_looked_for(name):
    with pytest.raises(ValueError, match=re.escape(name.split(":")[0])):
        parse_target_name(name)


def test_numbers_of_chips_without_a_usual_slice_are_refused():
    with pytest.raises(ValueError, match=r"'v5e:6' has 6 chips.*'v5e:2x4'"):
        parse_target_name("v5e:6")
