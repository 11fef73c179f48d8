"""Costs of programs compiled for several TPU slices: each slice's module, and transfers between slices."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.hlo_programs import SLICES, axes_of, mapped, mesh_of_slices
from support.hlo_text import read_module

from keras_dist.mesh.topology import networks_of

pytestmark = pytest.mark.usefixtures("full_compilation")


TILE = ((24 * 16, 1024), jnp.float32)  # splits among 2, 3, 4, 6, 8 and 12 devices
TILE_BYTES = 24 * 16 * 1024 * 4

# Per device, what is asked for along an axis of n, with the bytes of the whole and its wire bytes over those.
ALONG_AXIS = {
    "all-reduce": (lambda t, axis, n: lax.psum(t, axis), lambda n: TILE_BYTES, lambda n: 2 * (n - 1) / n),
    "all-gather": (
        lambda t, axis, n: lax.all_gather(t, axis, tiled=True),
        lambda n: n * TILE_BYTES,
        lambda n: (n - 1) / n,
    ),
    "reduce-scatter": (
        lambda t, axis, n: lax.psum_scatter(t, axis, tiled=True),
        lambda n: TILE_BYTES,
        lambda n: (n - 1) / n,
    ),
    "all-to-all": (
        lambda t, axis, n: lax.all_to_all(t, axis, 0, 1, tiled=True),
        lambda n: TILE_BYTES,
        lambda n: (n - 1) / n,
    ),
    "collective-permute": (
        lambda t, axis, n: lax.ppermute(t, axis, [(i, (i + 1) % n) for i in range(n)]),
        lambda n: TILE_BYTES,
        lambda n: 1,
    ),
}


def along(mesh, kind, axis):
    """Text of a program that does one thing along one axis."""
    function, n = ALONG_AXIS[kind][0], mesh.shape[axis]
    everywhere = P(mesh.axis_names)
    summed = kind in ("all-reduce", "all-gather")
    rest = tuple(name for name in mesh.axis_names if name != axis)
    out = P(rest or None) if summed else everywhere
    return mapped(mesh, lambda t: function(t, axis, n), (everywhere,), out, TILE)


def costs_of(text, mesh):
    devices = mesh.devices.ravel().tolist()
    return read_module(text, axes_of(mesh), networks_of(devices).tolist(), [device.id for device in devices])


def groups_along(mesh, kind, axis):
    """The groups, or pairs, of positions that differ only along an axis."""
    positions = np.arange(mesh.size).reshape(mesh.devices.shape)
    lines = np.moveaxis(positions, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis]).tolist()
    if kind == "collective-permute":
        return {(line[i - 1], line[i]) for line in lines for i in range(len(line))}
    return {frozenset(line) for line in lines}


def found_groups(collective):
    as_set = tuple if collective.kind == "collective-permute" else frozenset
    return {as_set(group) for group in collective.groups}


def in_order(slices):
    return np.arange(4 * slices).reshape(slices, 4)


def numbered_otherwise(slices):
    places = in_order(slices)
    places[1] = places[1][[2, 0, 3, 1]]
    return places


class TestSeveralSlices:
    """The module is that of one slice, and what crosses slices are sends to the hosts."""

    LAYOUTS = (
        pytest.param(("slice", "chip"), in_order, id="slices outside"),
        pytest.param(("chip", "slice"), lambda slices: in_order(slices).T, id="slices inside"),
        pytest.param(("slice", "chip"), lambda slices: in_order(slices)[::-1, [2, 0, 3, 1]], id="in another order"),
        pytest.param(("slice", "chip"), numbered_otherwise, id="each slice in its own order"),
    )

    @pytest.mark.parametrize("slices", SLICES)
    @pytest.mark.parametrize(("names", "places"), LAYOUTS)
    @pytest.mark.parametrize("kind", ALONG_AXIS)
    @pytest.mark.parametrize("axis", ["slice", "chip"])
    def test_each_kind_between_and_within_slices(self, slices, names, places, kind, axis):
        sizes = {"slice": slices, "chip": 4}
        mesh = mesh_of_slices(slices, {name: sizes[name] for name in names}, places(slices))
        costs = costs_of(along(mesh, kind, axis), mesh)
        [found] = costs.collectives
        n, (_, size, per_byte) = sizes[axis], ALONG_AXIS[kind]
        assert (found.kind, found.axes, found.count, found.tensors) == (kind, (axis,), 1, 1)
        assert (found.bytes, found.group_size, found.dtype) == (size(n), 2 if kind.endswith("permute") else n, "f32")
        assert found.wire_bytes == pytest.approx(size(n) * per_byte(n))
        assert found_groups(found) == groups_along(mesh, kind, axis)
        assert costs.opaque_calls == ()

    @pytest.mark.parametrize("slices", SLICES)
    @pytest.mark.parametrize("kind", ALONG_AXIS)
    @pytest.mark.parametrize("axis", ["a", "b"])
    def test_each_kind_within_slices_along_two_axes_around_the_slice_axis(self, slices, kind, axis):
        places = in_order(slices).reshape(slices, 2, 2).transpose(1, 0, 2)
        mesh = mesh_of_slices(slices, {"a": 2, "slice": slices, "b": 2}, places)
        [found] = costs_of(along(mesh, kind, axis), mesh).collectives
        assert (found.kind, found.axes, found.group_size) == (kind, (axis,), 2)
        assert found_groups(found) == groups_along(mesh, kind, axis)

    @pytest.mark.parametrize("slices", SLICES)
    @pytest.mark.parametrize(
        "places", [in_order, lambda slices: in_order(slices).T], ids=["slice after slice", "slices taking turns"]
    )
    def test_all_reduce_across_slices_is_reduce_scatter_all_reduce_all_gather(self, slices, places):
        n = 4 * slices
        mesh = mesh_of_slices(slices, {"data": n}, places(slices))
        first, between, last = costs_of(along(mesh, "all-reduce", "data"), mesh).collectives
        assert [each.kind for each in (first, between, last)] == ["reduce-scatter", "all-reduce", "all-gather"]
        assert [each.axes for each in (first, between, last)] == [("data",)] * 3
        assert [each.group_size for each in (first, between, last)] == [4, slices, 4]
        ordered = np.argsort(places(slices).ravel()).reshape(slices, 4)
        assert found_groups(first) == found_groups(last) == {frozenset(chips) for chips in ordered.tolist()}
        assert found_groups(between) == {frozenset(places) for places in ordered.T.tolist()}
        # All three together send what one ring through all devices would.
        assert first.wire_bytes + between.wire_bytes + last.wire_bytes == pytest.approx(2 * TILE_BYTES * (n - 1) / n)

    @pytest.mark.parametrize("slices", SLICES)
    def test_collective_permute_across_slices_is_one_within_and_one_between(self, slices):
        mesh = mesh_of_slices(slices, {"data": 4 * slices}, in_order(slices))
        between, inside = costs_of(along(mesh, "collective-permute", "data"), mesh).collectives
        assert found_groups(between) | found_groups(inside) == groups_along(mesh, "collective-permute", "data")
        assert found_groups(between) == {(4 * i + 3, 4 * (i + 1) % mesh.size) for i in range(slices)}
        assert (between.axes, between.wire_bytes) == (inside.axes, inside.wire_bytes) == (("data",), TILE_BYTES)

    @pytest.mark.parametrize("slices", SLICES)
    def test_all_to_all_across_slices_is_one_collective(self, slices):
        n = 4 * slices
        mesh = mesh_of_slices(slices, {"data": n}, in_order(slices))
        [found] = costs_of(along(mesh, "all-to-all", "data"), mesh).collectives
        assert (found.kind, found.axes, found.group_size, found.bytes) == ("all-to-all", ("data",), n, TILE_BYTES)
        assert found.wire_bytes == pytest.approx(TILE_BYTES * (n - 1) / n)

    @pytest.mark.parametrize("slices", SLICES)
    @pytest.mark.parametrize("chips", [[1, 3], [2, 3], [2]], ids=str)
    @pytest.mark.parametrize("kind", ["all-reduce", "collective-permute"])
    def test_some_chips_of_each_slice(self, slices, chips, kind):
        mesh = mesh_of_slices(slices, {"slice": slices, "chip": len(chips)}, in_order(slices)[:, chips])
        [found] = costs_of(along(mesh, kind, "slice"), mesh).collectives
        assert (found.kind, found.axes, found.bytes) == (kind, ("slice",), TILE_BYTES)
        assert found_groups(found) == groups_along(mesh, kind, "slice")

    @pytest.mark.parametrize("slices", SLICES)
    def test_ids_are_needed_only_where_devices_are_not_in_their_order(self, slices):
        mesh = mesh_of_slices(slices, {"slice": slices, "chip": 4}, in_order(slices))
        text = along(mesh, "all-to-all", "slice")
        networks = networks_of(mesh.devices.ravel().tolist()).tolist()
        assert read_module(text, axes_of(mesh), networks) == costs_of(text, mesh)
        [unknown] = read_module(text, axes_of(mesh)).collectives
        assert (unknown.kind, unknown.bytes, unknown.group_size) == ("all-to-all", TILE_BYTES, slices)
        assert (unknown.axes, unknown.groups) == (None, ())

    @pytest.mark.parametrize("slices", SLICES)
    def test_all_reduce_between_slices_in_a_scan_runs_once_per_step(self, slices):
        mesh = mesh_of_slices(slices, {"slice": slices, "chip": 4}, in_order(slices))

        def program(t, weights):
            return lax.scan(lambda c, w: (jnp.tanh(lax.psum(c @ w, "slice")), None), t, weights)[0]

        arguments = ((128, 256), jnp.float32), ((12, 256, 256), jnp.float32)
        costs = costs_of(mapped(mesh, program, (P(("slice", "chip")), P()), P("chip"), *arguments), mesh)
        [found] = costs.collectives
        assert (found.kind, found.axes, found.bytes, found.count) == ("all-reduce", ("slice",), 128 * 256 * 4, 12)
        assert costs.flops == 12 * 2 * 128 * 256 * 256

    @pytest.mark.parametrize("slices", SLICES)
    def test_small_tensors_are_sent_with_their_padding(self, slices):
        mesh = mesh_of_slices(slices, {"slice": slices, "chip": 4}, in_order(slices))
        everywhere = P(("slice", "chip"))
        text = mapped(mesh, lambda t: lax.psum(t, "slice"), (everywhere,), P("chip"), ((7,), jnp.bfloat16))
        costs = costs_of(text, mesh)
        [found] = costs.collectives
        assert (found.kind, found.axes, found.dtype, found.bytes) == ("all-reduce", ("slice",), "bf16", 256 * 2)
        assert costs.opaque_calls == ()
