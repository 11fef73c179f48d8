"""Mock devices equal the devices that JAX lists, compared with those of libtpu if it is installed."""

import json
import re

import pytest
from support.compilers import needs_libtpu

import keras_dist as kd

ATTRIBUTES = ("id", "platform", "device_kind", "process_index", "slice_index", "coords", "core_on_chip")


def test_devices_are_listed_host_by_host_with_a_square_of_chips_each():
    devices = kd.mock_tpus("v5e:4x4")
    assert [device.coords[:2] for device in devices[:6]] == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0)]
    assert [device.id for device in devices[:6]] == [0, 1, 4, 5, 2, 3]
    assert [device.process_index for device in devices] == [i // 4 for i in range(16)]
    assert len({device.coords for device in kd.mock_tpus("v5p:3x5x2")}) == 30


def test_slices_are_numbered_as_in_jax():
    devices = kd.mock_tpus("v3:2x2", slices=2)
    assert [device.id for device in devices[::5]] == [100000, 100005, 200002, 200007]
    assert [device.slice_index for device in devices[::5]] == [0, 0, 1, 1]
    assert [device.core_on_chip for device in devices[:4]] == [0, 1, 0, 1]


@pytest.mark.parametrize("topology", ["v9:2x2", "v5e", "v5e:4", "v5e:0x4", "v5e:2x2x2x2", "2x2", "v5e:axb", None, 3])
def test_other_topologies_are_refused(topology):
    with pytest.raises(ValueError, match=re.escape(repr(topology))):
        kd.mock_tpus(topology)


def test_numbers_below_one_are_refused():
    with pytest.raises(ValueError, match="slices=0"):
        kd.mock_tpus("v5e:4x4", slices=0)
    for counts in ((0, 8), (2, -1), (2.0, 8)):
        with pytest.raises(ValueError, match="hosts={} and gpus_per_host={}".format(*counts)):
            kd.mock_gpus(*counts)


@pytest.mark.compiler
@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "slices"), [("v3:4x4", 1), ("v5e:4x4", 1), ("v5e:4x4", 3), ("v5p:4x4x8", 1), ("tpu7x:2x2x2", 2)]
)
def test_they_equal_the_devices_of_libtpu(topology, slices):
    real = [[getattr(device, name, 0) for name in ATTRIBUTES] for device in kd.target(topology, slices)]
    ours = [[getattr(device, name) for name in ATTRIBUTES] for device in kd.mock_tpus(topology, slices)]
    assert json.loads(json.dumps(ours)) == json.loads(json.dumps(real))
