"""The order of devices: measured on described clusters, against JAX's mesh_utils and against a plain reshape.

The tests compute distances from the attributes of devices, independently of the package.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import mesh_utils
from support.slow_cases import slow_unless

import keras_dist as kd
from keras_dist.mesh.topology import Link, arrange_devices, longest_links

TORI = {
    "v3:2x2": (2, 2, 1),
    "v3:4x4": (0, 0, 0),
    "v4:4x4x4": (4, 4, 4),
    "v5p:4x4x4": (4, 4, 4),
    "v5p:2x2x4": (0, 0, 0),
    "v5p:4x4x8": (4, 4, 8),
    "v5e:16x16": (16, 16, 1),
    "v5e:4x8": (0, 0, 0),
    "v5e:8x16": (0, 16, 0),
    "tpu7x:2x2x2": (0, 0, 0),
}  # the length of the ring that each side closes to; 0 where it has two ends


def without_slices(devices):
    return [dataclasses.replace(device, slice_index=None) for device in devices]


CLUSTERS = {topology: (kd.mock_tpus(topology), TORI[topology]) for topology in TORI}
CLUSTERS |= {
    "2 slices of v5e:4x8": (kd.mock_tpus("v5e:4x8", slices=2), TORI["v5e:4x8"]),
    "4 slices of v5e:4x8": (kd.mock_tpus("v5e:4x8", slices=4), TORI["v5e:4x8"]),
    "2 slices of v5e:16x16": (kd.mock_tpus("v5e:16x16", slices=2), TORI["v5e:16x16"]),
    "4 slices of v4:4x4x4": (kd.mock_tpus("v4:4x4x4", slices=4), TORI["v4:4x4x4"]),
    "16 hosts of 8 GPUs": (kd.mock_gpus(16, 8), None),
    "16 hosts of 8 GPUs without slices": (without_slices(kd.mock_gpus(16, 8)), None),
}
SLICES = {name: len({d.slice_index for d in devices}) for name, (devices, _) in CLUSTERS.items()}
SLICES["16 hosts of 8 GPUs without slices"] = 16


def distance(one, other, rings):
    """Infinite across the network; else the ICI links on the way."""
    if (one.slice_index, one.process_index if rings is None else 0) != (
        other.slice_index,
        other.process_index if rings is None else 0,
    ):
        return math.inf
    if rings is None:
        return 1
    ways = [abs(a - b) for a, b in zip(one.coords, other.coords, strict=True)]
    return sum(min(way, ring - way) if ring else way for way, ring in zip(ways, rings, strict=True))


def worst_hops(array, rings):
    """For each axis the longest way between neighbours on any of its rings."""
    worst = []
    for axis in range(array.ndim):
        lines = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis]).tolist()
        worst.append(max(distance(line[i - 1], line[i], rings) for line in lines for i in range(len(line))))
    return worst


@functools.cache
def factorisations(count, most):
    """Ordered factorisations into 1 to `most` factors above 1."""
    shapes = [(count,)]
    if most > 1:
        for factor in (f for f in range(2, count) if count % f == 0):
            shapes += [(factor, *rest) for rest in factorisations(count // factor, most - 1)]
    return shapes


def plain(devices, shape):
    array = np.empty(len(devices), object)
    array[:] = devices
    return array.reshape(shape)


def by_mesh_utils(devices, shape, slices):
    """What mesh_utils makes of it, with the same part of each axis across slices as ours."""
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    dcn, left = [], slices
    for size in shape:
        dcn.append(math.gcd(size, left))
        left //= dcn[-1]
    inner = [size // part for size, part in zip(shape, dcn, strict=True)]
    has_slices = devices[0].slice_index is not None
    return mesh_utils.create_hybrid_device_mesh(
        inner, dcn, devices, process_is_granule=not has_slices, allow_split_physical_axes=True
    )


def arranged(devices, shape, dcn=None, **options):
    return arrange_devices(devices, {f"axis{i}": size for i, size in enumerate(shape)}, dcn, **options)


@pytest.mark.parametrize(
    "name", [slow_unless(len(devices) < 128 or rings is None, name) for name, (devices, rings) in CLUSTERS.items()]
)
def test_no_link_is_longer_than_mesh_utils_or_a_plain_reshape_makes_it(name):
    devices, rings = CLUSTERS[name]
    shapes = factorisations(len(devices), 4 if len(devices) <= 128 else 3)
    shorter = 0
    for shape in shapes:
        ours = worst_hops(arranged(devices, shape), rings)
        theirs = worst_hops(by_mesh_utils(devices, shape, SLICES[name]), rings)
        assert all(a <= b for a, b in zip(ours, theirs, strict=True)), (shape, ours, theirs)
        assert ours[-1] <= worst_hops(plain(devices, shape), rings)[-1], shape
        shorter += ours != theirs
    assert shorter >= len(shapes) / 2 or rings is None or name in ("v3:2x2", "tpu7x:2x2x2")  # reordering pays off


@st.composite
def clusters_and_shapes(draw):
    name = draw(st.sampled_from(list(CLUSTERS)))
    left, shape = len(CLUSTERS[name][0]), []
    for _ in range(draw(st.integers(0, 5))):
        shape.append(draw(st.sampled_from([f for f in range(1, left + 1) if left % f == 0])))
        left //= shape[-1]
    shape.append(left)
    return name, tuple(draw(st.permutations(shape)))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(clusters_and_shapes(), st.randoms(use_true_random=False))
def test_any_shape_contains_each_device_once(case, random):
    name, shape = case
    devices, rings = CLUSTERS[name]
    names = [f"axis{i}" for i in range(len(shape))]
    mesh = kd.create_device_mesh(shape, random.sample(devices, len(devices)), axis_names=names)
    assert mesh == kd.create_device_mesh(shape, devices, axis_names=names)  # however they are listed
    assert mesh.devices.shape == shape
    assert {id(device) for device in mesh.devices.flat} == {id(device) for device in devices}
    assert mesh.devices.size == len(devices)
    # The reported links are correct.
    for link, hops in zip(longest_links(mesh.devices), worst_hops(mesh.devices, rings), strict=True):
        assert (link.dcn, 0 if link.dcn else link.hops) == (hops == math.inf, 0 if hops == math.inf else hops) or (
            link == Link(False, 0) and hops == 1 and rings is None  # an axis of size 1
        )
    # An inner axis crosses the network only if no outer axis can.
    crossing = [hops == math.inf for hops in worst_hops(mesh.devices, rings)]
    left = SLICES[name]
    for size, crosses in zip(shape, crossing, strict=True):
        assert crosses == (math.gcd(size, left) > 1)
        left //= math.gcd(size, left)


@pytest.mark.parametrize(
    ("shape", "dcn", "crossing"),
    [
        ((2, 4), (1, 2), (1, 2)),
        ((2, 4), {"axis1": 2}, (1, 2)),
        ((2, 4), "axis1", (1, 2)),
        ((2, 4), None, (2, 1)),
        ((8,), None, (2,)),
        ((1, 8), "axis1:-1", (1, 2)),
    ],
)
def test_axes_cross_slices_where_dcn_says(shape, dcn, crossing):
    devices = kd.mock_tpus("v5e:2x2", slices=2)
    array = arranged(devices, shape, dcn)
    assert array.shape == shape
    for axis, slices in enumerate(crossing):
        along = np.moveaxis(array, axis, -1).reshape(-1, shape[axis]).tolist()
        # Each slice is one run of neighbours, so that a ring leaves it once.
        assert all(
            [key for key, _ in itertools.groupby(d.slice_index for d in line)] == sorted({d.slice_index for d in line})
            for line in along
        )
        assert all(len({d.slice_index for d in line}) == slices for line in along)


@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 8), (4, 2, 4)])
def test_several_axes_can_share_four_slices(shape):
    devices = kd.mock_tpus(f"v5e:{math.prod(shape) // 4}x1", slices=4)
    array = arranged(devices, shape)
    slices = np.array([d.slice_index for d in array.flat]).reshape(shape)
    assert array.shape == shape
    assert len(set(slices.ravel())) == 4
    assert (slices[0] < slices[1]).all()  # the outermost axis takes what it can


def test_hosts_of_one_slice_of_gpus_stay_together_on_the_inner_axes():
    gpus = [dataclasses.replace(gpu, slice_index=gpu.process_index // 2) for gpu in kd.mock_gpus(4, 4)]
    array = arranged(gpus, (4, 2, 2))
    assert [len({gpu.process_index for gpu in row.flat}) for row in array] == [1, 1, 1, 1]
    assert [gpu.slice_index for gpu in array[:, 0, 0]] == [0, 0, 1, 1]
    # Between hosts of one slice there is NVLink, so only the slices are a network apart.
    assert longest_links(array) == (Link(True, 0), Link(False, 1), Link(False, 1))


def test_processes_with_one_gpu_each_are_not_hosts():
    gpus = [dataclasses.replace(gpu, process_index=gpu.id) for gpu in kd.mock_gpus(2, 4)]
    assert longest_links(arranged(gpus, (2, 4))) == (Link(True, 0), Link(False, 1))
    assert longest_links(arranged(gpus[:4], (2, 2))) == (Link(False, 1), Link(False, 1))
    for dcn in ("axis0", {"axis0": 1}, None):  # one host, so nothing crosses a network
        assert arranged(gpus[:4], (2, 2), dcn).ravel().tolist() == gpus[:4]


def test_processes_of_several_gpus_are_hosts_for_dcn():
    gpus = [dataclasses.replace(gpu, slice_index=0) for gpu in kd.mock_gpus(4, 4)]
    assert [[gpu.process_index for gpu in row] for row in arranged(gpus, (4, 4), "axis1")] == [[0, 1, 2, 3]] * 4
    with pytest.raises(ValueError, match="axis0:2 = 2 processes, but the devices form 4"):
        arranged(gpus, (2, 8), "axis0")


def test_hosts_within_slices_are_sorted_unless_disabled():
    gpus = [dataclasses.replace(gpu, slice_index=gpu.process_index // 2) for gpu in kd.mock_gpus(4, 2)][::-1]
    assert [gpu.process_index for gpu in arranged(gpus, (8,))] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [gpu.process_index for gpu in arranged(gpus, (8,), sort_groups=False)] == [3, 3, 2, 2, 1, 1, 0, 0]


@pytest.mark.parametrize("number", [None, 0])
def test_processes_of_cpus_stay_together_on_the_inner_axes(number):
    @dataclasses.dataclass(frozen=True)
    class Cpu:
        id: int
        process_index: int
        slice_index: int | None = number
        platform: str = "cpu"
        device_kind: str = "cpu"

    # In no order, and as JAX describes CPUs: on one machine all are of slice 0.
    cpus = [Cpu(process * 1000 + i, process) for i in range(4) for process in (1, 0)]
    assert [[cpu.process_index for cpu in row] for row in arranged(cpus, (2, 4))] == [[0] * 4, [1] * 4]
    for dcn in ("axis1", {"axis1": 2}, {"axis1": -1}, (1, 2), (1, -1)):
        assert [[cpu.process_index for cpu in row] for row in arranged(cpus, (2, 4), dcn)] == [[0, 0, 1, 1]] * 2
    assert [cpu.process_index for cpu in arranged(cpus, (8,), sort_groups=False)] == [1] * 4 + [0] * 4


def test_hosts_of_one_tpu_slice_matter_only_if_the_degrees_of_dcn_match_their_number():
    devices = kd.mock_tpus("v5e:4x4")
    assert len({device.process_index for device in arranged(devices, (4, 4), "axis0")[0]}) > 1
    for dcn in ((4, 1), {"axis0": 4}, (4, -1)):
        by_host = arranged(devices, (4, 4), dcn)
        assert [{device.process_index for device in row} for row in by_host] == [{0}, {1}, {2}, {3}]
    assert arranged(devices, (4, 4), (-1, 1)).tolist() == arranged(devices, (4, 4)).tolist()
    with pytest.raises(ValueError, match="axis0:2 x axis1:1 = 2 slices, but the devices form 1"):
        arranged(devices, (4, 4), (2, 1))


def test_slices_of_unequal_size_are_placed_in_sequence():
    devices = kd.mock_tpus("v5e:2x2", slices=2)[:6]
    array = arranged(devices, (3, 2))
    assert [[d.slice_index for d in row] for row in array] == [[0, 0], [0, 0], [1, 1]]
    with pytest.raises(ValueError, match=r"dcn='axis0' .*\[4, 2\]"):
        arranged(devices, (3, 2), "axis0")


def test_chips_that_do_not_form_a_box_keep_the_order_of_jax():
    devices = [device for device in kd.mock_tpus("v5e:4x4") if device.coords != (1, 1, 0)][:12]
    assert arranged(devices[::-1], (3, 4)).ravel().tolist() == devices


def test_two_cores_of_a_chip_are_zero_hops_apart():
    devices = kd.mock_tpus("v3:2x2")
    assert longest_links(arranged(devices, (4, 2))) == (Link(False, 1), Link(False, 0))


def test_meshes_that_mesh_utils_refuses_are_arranged():
    cores = [dataclasses.replace(device, device_kind="TPU v4") for device in kd.mock_tpus("v3:2x2")]
    assert longest_links(arranged(cores, (4, 2))) == (Link(False, 1), Link(False, 0))
    for topology, shape in (("v5p:4x4x20", (10, 32)), ("v4:4x4x28", (14, 32)), ("v4:4x4x20", (5, 2, 32))):
        assert arranged(kd.mock_tpus(topology), shape).shape == shape


def test_the_innermost_axis_gets_shorter_links_than_from_mesh_utils():
    cores = kd.mock_tpus("tpu7x:2x2x1")[:4]  # two chips of two cores
    assert [[core.coords[0] for core in chip] for chip in arranged(cores, (2, 2))] == [[0, 0], [1, 1]]
    for shape in ((2, 2), (2, 2, 1), (1, 2, 1, 2)):
        assert [core.id for core in arranged(cores, shape).flat] == [0, 1, 2, 3]


@settings(max_examples=50, deadline=None)
@given(clusters_and_shapes())
def test_an_axis_of_size_1_changes_nothing(case):
    name, shape = case
    devices = CLUSTERS[name][0]
    assert arranged(devices, (*shape, 1)).ravel().tolist() == arranged(devices, shape).ravel().tolist()
    without = tuple(size for size in shape if size > 1) or (1,)
    assert arranged(devices, without).ravel().tolist() == arranged(devices, shape).ravel().tolist()


def test_a_reordering_that_makes_another_ring_longer_is_not_used():
    """If chips do not form a box, the rings of one axis may differ."""
    devices = kd.mock_tpus("v5e:8x8")[:24]
    array, listed = arranged(devices, (2, 12)), plain(devices, (2, 12))
    assert all(a <= b for a, b in zip(longest_links(array), longest_links(listed), strict=True))


def test_a_torus_axis_is_split_only_if_allowed():
    devices = kd.mock_tpus("v5p:4x4x4")
    assert arranged(devices, (4, 16), allow_split_physical_axes=False).shape == (4, 16)
    with pytest.raises(ValueError, match=r"8 x 8 .* 4 x 4 x 4"):
        arranged(devices, (8, 8), allow_split_physical_axes=False)


def test_a_line_with_two_ends_is_visited_there_and_back():
    row = [device for device in kd.mock_tpus("v5e:8x8") if device.coords[1] == 0]
    assert [device.coords[0] for device in arranged(row, (8,))] == [0, 2, 4, 6, 7, 5, 3, 1]
    closed = [device for device in kd.mock_tpus("v5e:16x16") if device.coords[1] == 0]
    assert [device.coords[0] for device in arranged(closed, (16,))] == list(range(16))


def test_boxes_with_only_odd_sides_need_steps_of_two():
    chips = kd.mock_tpus("v5e:8x8")
    square = [device for device in chips if max(device.coords) < 3]
    assert longest_links(arranged(square, (9,))) == (Link(False, 2),)
    for x, y in ((3, 4), (4, 3)):  # one even side is enough for steps of one
        box = [device for device in chips if device.coords[0] < x and device.coords[1] < y]
        assert longest_links(arranged(box, (12,))) == (Link(False, 1),)


def test_links_compare_and_read_well():
    links = [Link(True, 0), Link(False, 3), Link(False, 1), Link(False, 0)]
    assert sorted(links, reverse=True) == links
    assert [str(link) for link in links] == ["network", "3 hops", "1 hop", "no link"]
