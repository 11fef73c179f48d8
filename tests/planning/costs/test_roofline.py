"""Lower bounds on step time, against values computed by hand."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.compilers import needs_cuda, needs_libtpu

import keras_dist as kd
from keras_dist.planning.costs.roofline import Roofline, roofline
from keras_dist.planning.hardware.registry import hardware

V5E, V5P, H100 = hardware["v5e"], hardware["v5p"], hardware["h100"]
WIRE = 1e9  # bytes that one device sends in the collective of a test


def collective(kind, groups, wire_bytes=WIRE, count=1):
    return SimpleNamespace(kind=kind, groups=tuple(map(tuple, groups)), wire_bytes=wire_bytes, count=count)


def groups_along(devices, *axes):
    """The groups of positions in a mesh that differ in these of its axes only."""
    positions = np.arange(devices.size).reshape(devices.shape)
    size = math.prod(devices.shape[axis] for axis in axes)
    return np.moveaxis(positions, axes, range(-len(axes), 0)).reshape(-1, size).tolist()


def bounds_of(entry, devices, *collectives):
    return roofline(entry, devices, {}, 0, collectives)


def tpus(topology, slices=1):
    """Described TPUs in the shape of their torus: slices, x, y, z and cores, without the sides of length 1."""
    devices = kd.mock_tpus(topology, slices)
    order = sorted(devices, key=lambda device: (device.slice_index, *device.coords, device.core_on_chip))
    sides = [len({getattr(d, name) for d in devices}) for name in ("slice_index", "core_on_chip")]
    shape = [sides[0], *(len({d.coords[dim] for d in devices}) for dim in range(3)), sides[1]]
    return as_array(order, [side for side in shape if side > 1])


def gpus(hosts, each=8):
    return as_array(kd.mock_gpus(hosts, each), (hosts, each))


def as_array(devices, shape):
    array = np.empty(len(devices), object)
    array[:] = devices
    return array.reshape(shape)


class TestParts:
    def test_the_link_to_the_host_carries_the_batch_and_copies(self):
        step = roofline(V5E, tpus("v5e:2x2"), {}, 0, [], batch_bytes=15e9, host_bytes=5e9)
        assert (step.bound, step.seconds) == ("host", 1.0)
        assert roofline(V5E, tpus("v5e:2x2"), {}, 0, [], batch_bytes=15e9, host_bytes=45e9).seconds == 2.0
        unknown = dataclasses.replace(V5E, host_bytes_per_second=None)
        assert roofline(unknown, tpus("v5e:2x2"), {}, 0, [], batch_bytes=1.0).host_seconds is None

    def test_each_part_has_its_own_bound(self):
        step = roofline(V5E, tpus("v5e:2x2"), {"bf16": 197e12, "s8": 393e12}, 819e9 / 4, [])
        assert step == Roofline(2.0, 0.25, 0.0, 0.0)
        assert step.bound == "compute"
        assert step.seconds == 2.0
        assert step.serial_seconds == 2.25

    @pytest.mark.parametrize(
        ("entry", "element_type", "dtype"),
        [
            ("h100", "f32", "float32"),
            ("h100", "f16", "bfloat16"),
            ("t4", "f16", "float16"),
            ("t4", "bf16", "float32"),
            ("v5e", "f16", "bfloat16"),
            ("h100", "f8e4m3fn", "float8"),
            ("h100", "f8e5m2", "float8"),
            ("h100", "f4e2m1fn", "float8"),
            ("h100", "s4", "int8"),
            ("h100", "f64", "float32"),
            ("a100", "f8e4m3fn", "bfloat16"),
            ("v3", "s8", "bfloat16"),
            ("tpu7x", "u8", "bfloat16"),
        ],
    )
    def test_a_dtype_runs_at_its_peak_or_that_of_the_next_wider_one(self, entry, element_type, dtype):
        step = roofline(hardware[entry], gpus(1), {element_type: 1e15}, 0, [])
        assert step.compute_seconds == pytest.approx(1e15 / hardware[entry].flops_per_second[dtype])

    def test_unknown_figures_give_unknown_bounds(self):
        cpu = hardware["cpu"]
        devices = gpus(2)
        step = roofline(cpu, devices, {"f32": 1.0}, 1, [collective("all-reduce", groups_along(devices, 1))])
        assert step == Roofline(None, None, None, 0.0, "NVLink", "network")
        assert step.bound is None
        assert Roofline(None, None, None, None).seconds is None
        assert Roofline(None, None, None, None).serial_seconds is None
        assert Roofline(None, 1.0, None, 2.0).serial_seconds == 3.0

    def test_unknown_hardware_has_unknown_bounds(self):
        devices = tpus("v5e:4x4", slices=2)
        inside, across = (collective("all-reduce", groups_along(devices, axis)) for axis in (1, 0))
        assert roofline(None, devices, {"f32": 1.0}, 1, [inside]) == Roofline(None, None, None, 0.0)
        assert roofline(None, devices, {}, 0, [across]) == Roofline(0.0, 0.0, 0.0, None)

    def test_no_work_takes_no_time_on_unknown_hardware(self):
        step = roofline(hardware["cpu"], gpus(1), {"f32": 0.0}, 0, [collective("all-reduce", [range(8)], 0.0)])
        assert step == Roofline(0.0, 0.0, 0.0, 0.0, "NVLink", "network")
        assert step.seconds == 0.0
        assert step.bound is None

    @pytest.mark.parametrize(
        ("seconds", "bound"),
        [((2, 1, 1, 1), "compute"), ((1, 2, 1, 1), "memory"), ((1, 1, 2, 1), "ICI"), ((1, 1, 1, 2), "DCN")],
    )
    def test_bound_is_the_longest_part(self, seconds, bound):
        assert Roofline(*seconds).bound == bound

    def test_collectives_count_once_per_run(self):
        devices = gpus(1)
        step = bounds_of(
            H100, devices, collective("all-gather", [range(8)], count=3), collective("all-gather", [range(8)])
        )
        assert step.ici_seconds == pytest.approx(4 * WIRE / 450e9)

    def test_collective_without_groups_spans_all_devices(self):
        assert bounds_of(H100, gpus(1), collective("all-reduce", [])) == bounds_of(
            H100, gpus(1), collective("all-reduce", [range(8)])
        )


class TestRings:
    """Reductions and gathers: wire bytes over what a device can send to its neighbours on rings and lines."""

    @pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter"])
    def test_a_line_has_one_link(self, kind):
        devices = tpus("v5e:4x4")
        assert bounds_of(V5E, devices, collective(kind, groups_along(devices, 1))).ici_seconds == WIRE / 50e9

    def test_several_dims_have_a_link_each(self):
        devices = tpus("v5e:4x4")
        assert (
            bounds_of(V5E, devices, collective("all-gather", groups_along(devices, 0, 1))).ici_seconds == WIRE / 100e9
        )

    def test_a_ring_has_two_links(self):
        devices = tpus("v5e:16x16")
        assert bounds_of(V5E, devices, collective("all-gather", groups_along(devices, 0))).ici_seconds == WIRE / 100e9
        assert (
            bounds_of(V5E, devices, collective("all-gather", groups_along(devices, 0, 1))).ici_seconds == WIRE / 200e9
        )

    def test_only_the_long_side_of_half_a_pod_closes(self):
        devices = tpus("v5e:8x16")
        assert bounds_of(V5E, devices, collective("all-gather", groups_along(devices, 0))).ici_seconds == WIRE / 50e9
        assert bounds_of(V5E, devices, collective("all-gather", groups_along(devices, 1))).ici_seconds == WIRE / 100e9

    def test_a_cube_has_all_six_links(self):
        devices = tpus("v5p:4x4x4")
        whole = bounds_of(V5P, devices, collective("all-reduce", groups_along(devices, 0, 1, 2)))
        assert whole.ici_seconds == pytest.approx(WIRE / (6 * 100e9))
        devices = tpus("v5p:2x2x2")
        whole = bounds_of(V5P, devices, collective("all-reduce", groups_along(devices, 0, 1, 2)))
        assert whole.ici_seconds == pytest.approx(WIRE / (3 * 100e9))

    def test_groups_that_interleave_on_a_ring_share_its_links(self):
        devices = tpus("v5e:16x16").reshape(4, 4, 16)
        apart = bounds_of(V5E, devices, collective("all-gather", groups_along(devices, 0)))
        assert apart.ici_seconds == pytest.approx(4 * WIRE / (2 * 50e9))
        near = bounds_of(V5E, devices, collective("all-gather", groups_along(devices, 1)))
        assert near.ici_seconds == WIRE / 50e9

    def test_groups_that_interleave_on_a_line_share_its_middle_link(self):
        devices = tpus("v5e:4x4").reshape(2, 2, 4)
        assert (
            bounds_of(V5E, devices, collective("all-gather", groups_along(devices, 0))).ici_seconds == 2 * WIRE / 50e9
        )

    def test_two_cores_share_the_links_of_their_chip(self):
        v3, devices = hardware["v3"], tpus("v3:2x2")
        by_core = bounds_of(v3, devices, collective("all-reduce", groups_along(devices, 0)))
        assert by_core.ici_seconds == pytest.approx(2 * WIRE / 82e9)
        with_core = bounds_of(v3, devices, collective("all-reduce", groups_along(devices, 0, 2)))
        assert with_core.ici_seconds == pytest.approx(WIRE / 82e9)

    def test_the_cores_of_one_chip_need_no_link(self):
        devices = tpus("v3:2x2")
        assert bounds_of(hardware["v3"], devices, collective("all-reduce", groups_along(devices, 2))).ici_seconds == 0.0

    def test_the_slowest_group_counts(self):
        devices = tpus("v5e:4x4")
        groups = [[0, 1, 4, 5], [2, 3], [6, 7]]
        assert bounds_of(V5E, devices, collective("all-gather", groups)).ici_seconds == WIRE / 50e9

    def test_gpus_of_a_host_send_over_all_links(self):
        devices = gpus(2)
        step = bounds_of(H100, devices, collective("all-reduce", groups_along(devices, 1)))
        assert step.ici_seconds == pytest.approx(WIRE / (18 * 25e9))
        assert step.dcn_seconds == 0.0

    def test_a_group_across_hosts_sends_over_the_network_of_its_members(self):
        devices = gpus(2)
        one_each = bounds_of(H100, devices, collective("all-reduce", groups_along(devices, 0)))
        assert one_each.dcn_seconds == WIRE / 50e9
        assert one_each.ici_seconds == 0.0
        all_of_both = bounds_of(H100, devices, collective("all-reduce", groups_along(devices, 0, 1)))
        assert all_of_both.dcn_seconds == WIRE / (8 * 50e9)

    def test_group_across_hosts_is_no_faster_than_within_one(self):
        faster = dataclasses.replace(H100, name="faster", network_bytes_per_second=100e9)
        devices = gpus(2)
        step = bounds_of(faster, devices, collective("all-reduce", groups_along(devices, 0, 1)))
        assert step.dcn_seconds == pytest.approx(WIRE / 450e9)

    def test_a_group_across_slices_sends_over_the_network(self):
        devices = tpus("v5e:4x4", slices=2)
        step = bounds_of(V5E, devices, collective("all-reduce", groups_along(devices, 0)))
        assert step.dcn_seconds == WIRE / 3.125e9
        all_of_both = bounds_of(V5E, devices, collective("all-reduce", groups_along(devices, 0, 1, 2)))
        assert all_of_both.dcn_seconds == pytest.approx(WIRE / (16 * 3.125e9))
        assert all_of_both.bound == "DCN"

    def test_slices_have_separate_links(self):
        devices = tpus("v5e:4x4", slices=2)
        gather = collective("all-gather", groups_along(devices, 2))
        pairs = [(first + i, first + i + 1) for first in (0, 16) for i in (0, 1)]
        shift = collective("collective-permute", pairs)
        assert bounds_of(V5E, devices, gather).ici_seconds == WIRE / 50e9
        assert bounds_of(V5E, devices, shift).ici_seconds == WIRE / 50e9

    def test_unknown_network_bandwidth_gives_an_unknown_bound(self):
        devices = tpus("v3:2x2", slices=2)
        across = collective("all-reduce", groups_along(devices, 0))
        inside = collective("all-reduce", groups_along(devices, 1))
        step = bounds_of(hardware["v3"], devices, across, inside)
        assert step.dcn_seconds is None
        assert step.ici_seconds > 0
        assert step.bound == "ICI"

    def test_processes_with_several_gpus_are_hosts_if_all_are_one_slice(self):
        devices = as_array([dataclasses.replace(gpu, slice_index=0) for gpu in kd.mock_gpus(2, 4)], (2, 4))
        assert bounds_of(H100, devices, collective("all-reduce", groups_along(devices, 0))).dcn_seconds == WIRE / 50e9

    def test_processes_with_one_gpu_each_are_not_hosts(self):
        alone = [dataclasses.replace(gpu, slice_index=0, process_index=gpu.id) for gpu in kd.mock_gpus(1, 4)]
        devices = as_array(alone, (4,))
        assert bounds_of(H100, devices, collective("all-reduce", [range(4)])).dcn_seconds == 0.0


class TestAllToAll:
    """All-to-all: on a torus most bytes go further than to a neighbour."""

    def test_on_a_ring_it_takes_a_quarter_of_an_all_gather(self):
        devices = tpus("v5e:16x16")
        groups, array = groups_along(devices, 0), 16e9
        exchange = collective("all-to-all", groups, array / 16 * 15 / 16)  # of the 16th that each device holds
        assert bounds_of(V5E, devices, exchange).ici_seconds == pytest.approx(array / 100e9 / 4)

    def test_on_a_line_the_link_in_the_middle_bounds_it(self):
        devices = tpus("v5e:4x4")
        exchange = collective("all-to-all", groups_along(devices, 0), 3.0)  # one byte to each of 3 others
        assert bounds_of(V5E, devices, exchange).ici_seconds == pytest.approx(2 * 2 / 50e9)

    def test_groups_that_interleave_share_links(self):
        devices = tpus("v5e:16x16").reshape(4, 4, 16)
        exchange = collective("all-to-all", groups_along(devices, 0), 3.0)
        assert bounds_of(V5E, devices, exchange).ici_seconds == pytest.approx(4 * (2 * 2) / 2 / 50e9)

    def test_on_two_dims_the_longer_bounds_it(self):
        devices = tpus("v5e:2x4")
        exchange = collective("all-to-all", groups_along(devices, 0, 1), 7.0)
        assert bounds_of(V5E, devices, exchange).ici_seconds == pytest.approx(4 * 4 / 2 / 50e9)

    def test_two_cores_send_over_the_links_of_their_chip(self):
        devices = tpus("v3:2x2")
        exchange = collective("all-to-all", groups_along(devices, 0, 1, 2), 7.0)
        assert bounds_of(hardware["v3"], devices, exchange).ici_seconds == pytest.approx(4 * 4 / 2 / 82e9)

    def test_in_a_host_a_switch_joins_all_with_all(self):
        devices = gpus(1)
        for kind in ("all-to-all", "ragged-all-to-all"):
            assert bounds_of(H100, devices, collective(kind, [range(8)])).ici_seconds == pytest.approx(WIRE / 450e9)

    def test_across_hosts_each_device_sends_what_leaves_its_host(self):
        devices = gpus(2)
        step = bounds_of(H100, devices, collective("all-to-all", [range(16)], 15.0))
        assert step.dcn_seconds == pytest.approx(8 / 50e9)


class TestCollectivePermute:
    """Each pair takes the shortest ways, and the busiest link bounds them."""

    def shift(self, size, by, stride=1, start=0):
        return [(start + stride * i, start + stride * ((i + by) % size)) for i in range(size)]

    def test_a_shift_around_a_ring_takes_one_link_in_one_direction(self):
        devices = tpus("v5e:16x16")
        assert bounds_of(V5E, devices, collective("collective-permute", self.shift(16, 1))).ici_seconds == WIRE / 50e9
        assert bounds_of(V5E, devices, collective("collective-permute", self.shift(16, -1))).ici_seconds == WIRE / 50e9

    def test_shifts_in_both_directions_overlap_and_those_in_one_do_not(self):
        devices = tpus("v5e:16x16")
        forward, backward = (collective("collective-permute", self.shift(16, by)) for by in (1, -1))
        assert bounds_of(V5E, devices, forward, backward).ici_seconds == WIRE / 50e9
        assert bounds_of(V5E, devices, forward, backward, forward).ici_seconds == 2 * WIRE / 50e9

    def test_longer_shifts_share_links(self):
        devices = tpus("v5e:16x16")
        assert (
            bounds_of(V5E, devices, collective("collective-permute", self.shift(16, 3))).ici_seconds == 3 * WIRE / 50e9
        )

    def test_both_ways_around_half_a_ring_are_taken(self):
        devices = tpus("v5e:16x16")
        assert (
            bounds_of(V5E, devices, collective("collective-permute", self.shift(16, 8))).ici_seconds == 4 * WIRE / 50e9
        )

    def test_shift_on_a_line_shares_no_link(self):
        devices = tpus("v5e:4x4")
        assert bounds_of(V5E, devices, collective("collective-permute", self.shift(4, 1))).ici_seconds == WIRE / 50e9

    def test_diagonal_pairs_use_two_links(self):
        devices = tpus("v5e:4x4")
        assert bounds_of(V5E, devices, collective("collective-permute", [(0, 15)])).ici_seconds == WIRE / 100e9

    def test_the_cores_of_one_chip_need_no_link(self):
        devices = tpus("v3:2x2")
        assert bounds_of(hardware["v3"], devices, collective("collective-permute", [(0, 1)])).ici_seconds == 0.0

    def test_the_cores_of_two_chips_share_their_link(self):
        devices = tpus("v3:2x2")
        both = collective("collective-permute", [(0, 2), (1, 3)])
        assert bounds_of(hardware["v3"], devices, both).ici_seconds == 2 * WIRE / 82e9

    @pytest.mark.parametrize(("entry", "devices"), [(V5E, tpus("v5e:2x2")), (H100, gpus(1))])
    def test_device_that_sends_to_itself_sends_nothing(self, entry, devices):
        assert bounds_of(entry, devices, collective("collective-permute", [(0, 0)])).ici_seconds == 0.0

    def test_paths_across_the_wrap_around_link_share_links(self):
        devices = tpus("v5e:16x16").T.ravel()
        apart = bounds_of(V5E, devices, collective("collective-permute", [(13, 0), (0, 3)]))
        assert apart.ici_seconds == WIRE / 50e9
        meeting = bounds_of(V5E, devices, collective("collective-permute", [(14, 1), (0, 3)]))
        assert meeting.ici_seconds == 2 * WIRE / 50e9

    def test_in_a_host_a_gpu_sends_over_all_links(self):
        step = bounds_of(H100, gpus(1), collective("collective-permute", self.shift(8, 1)))
        assert step.ici_seconds == pytest.approx(WIRE / 450e9)

    def test_one_pair_across_hosts_makes_it_cross_the_network(self):
        step = bounds_of(H100, gpus(2), collective("collective-permute", self.shift(16, 1)))
        assert step.dcn_seconds == WIRE / 50e9
        assert step.ici_seconds == 0.0

    def test_one_pair_across_slices_makes_it_cross_the_network(self):
        step = bounds_of(V5E, tpus("v5e:2x2", slices=2), collective("collective-permute", self.shift(8, 1)))
        assert step.dcn_seconds == WIRE / 3.125e9


def test_links_follow_device_coordinates_not_mesh_order():
    devices = tpus("v5e:4x4").T
    assert bounds_of(V5E, devices, collective("all-gather", [range(4)])).ici_seconds == WIRE / 50e9
    scattered = devices.ravel()[[0, 5, 10, 15]]
    assert bounds_of(V5E, scattered, collective("all-gather", [range(4)])).ici_seconds == WIRE / 100e9


@pytest.mark.parametrize("group", [[0, 4], [-1, 0]])
def test_groups_hold_positions_in_the_mesh(group):
    with pytest.raises(AssertionError, match=r"4\)"):
        bounds_of(V5E, tpus("v5e:2x2"), collective("all-gather", [group]))


@pytest.mark.parametrize(
    ("entry", "devices", "link", "network"),
    [
        (V5E, tpus("v5e:2x2", slices=2), "ICI", "DCN"),
        (H100, gpus(2), "NVLink", "network"),
        (hardware["cpu"], np.array(jax.devices()[:8]).reshape(2, 4), "links", "network"),
        (None, gpus(2), "NVLink", "network"),
    ],
    ids=["TPU", "GPU", "CPU", "unknown GPU"],
)
def test_links_are_named_by_the_platform(entry, devices, link, network):
    bounds = bounds_of(entry, devices, collective("all-reduce", groups_along(devices, 0)))
    assert (bounds.link, bounds.network) == (link, network)
    assert bounds.bound in (network, None)
    unknown = Roofline.unknown(devices.flat[0].platform)
    assert (unknown.link, unknown.network, unknown.seconds) == (link, network, None)


def test_gpus_without_nvlinks_send_over_pcie():
    devices = np.array(kd.mock_gpus(1, 2))
    bounds = bounds_of(hardware["t4"], devices, collective("all-reduce", [(0, 1)]))
    assert bounds.link == "PCIe"
    assert bounds.ici_seconds == pytest.approx(collective("all-reduce", [(0, 1)]).wire_bytes / 16e9)


@pytest.mark.compiler
@needs_libtpu
@pytest.mark.parametrize(("topology", "slices"), [("v5e:4x4", 1), ("v5p:4x4x4", 1), ("v3:2x2", 1), ("v5e:4x4", 2)])
def test_libtpu_devices_have_the_links_of_mock_devices(topology, slices):
    from keras_dist.planning.targets.target import target

    made = target(topology, slices)
    steps = []
    for devices in (as_array(list(made), (-1, 4)), as_array(kd.mock_tpus(topology, slices), (-1, 4))):
        collectives = [
            collective("all-reduce", groups_along(devices, 0)),
            collective("all-to-all", groups_along(devices, 1)),
            collective("collective-permute", [(i, (i + 1) % devices.size) for i in range(devices.size)]),
        ]
        steps.append(bounds_of(made.hardware, devices, *collectives))
    assert steps[0] == steps[1]


@pytest.mark.compiler
@needs_cuda
def test_hosts_of_cuda_targets_are_connected_by_the_network():
    from keras_dist.planning.targets.target import target

    devices = as_array(list(target("h100:2x8")), (2, 8))
    step = bounds_of(H100, devices, collective("all-reduce", groups_along(devices, 0)))
    assert step == bounds_of(H100, gpus(2), collective("all-reduce", groups_along(gpus(2), 0)))
