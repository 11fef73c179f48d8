"""Where `auto` may place a model: devices, the meshes on them, and the code that creates these."""

import jax
import numpy as np
import pytest

import keras_dist as kd
from keras_dist.planning.search.places import place_of

AXES = {"data": 2, "model": 2}


def made(source):
    return eval(source, {"kd": kd})


def test_axes_are_kept_in_every_form():
    for keep in ({"data": 4}, "data:4", {"data": np.int64(4)}, {"data": np.array(4)}):
        assert place_of(None, keep).keep == {"data": 4}
    assert place_of(None, None).keep == {}


@pytest.mark.parametrize(
    ("keep", "error", "message"),
    [
        ({"data": True}, ValueError, "must be a positive integer"),
        ({"data": 2.0}, ValueError, "must be a positive integer"),
        ("data:-1", ValueError, "must be a positive integer"),
        ("data=4", ValueError, "data=4"),
        (["data"], TypeError, "must be sizes of axes"),
    ],
)
def test_sizes_that_cannot_be_kept(keep, error, message):
    with pytest.raises(error, match=message):
        place_of(None, keep)


@pytest.mark.parametrize("chosen", [range(4), (4, 5, 6, 7), (7, 1, 2, 0)])
def test_code_for_some_devices_of_a_machine_names_them(chosen):
    devices = [jax.devices()[number] for number in chosen]
    place = place_of(devices, None)
    mesh = place.mesh(AXES)
    assert set(mesh.backend_mesh.devices.flat) == set(devices)
    assert made(place.mesh_source(mesh)) == mesh


def test_code_for_all_devices_names_none():
    place = place_of(None, None)
    mesh = place.mesh({"data": 4, "model": 2})
    assert place.mesh_source(mesh) == 'kd.create_device_mesh("data:4,model:2")'
    elsewhere = place_of(kd.mock_tpus("v5e:2x2"), None)
    assert elsewhere.mesh_source(elsewhere.mesh(AXES)) == 'kd.create_device_mesh("data:2,model:2")'


@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data")])
def test_a_passed_mesh_keeps_its_devices_in_their_places(axes):
    order = [5, 0, 3, 6, 1, 7, 2, 4]
    passed = kd.DeviceMesh((2, 4), list(axes), [jax.devices()[number] for number in order])
    place = place_of(passed, None)
    mesh = place.mesh({axis: passed.axis_sizes[axis] for axis in ("data", "model")})
    assert mesh.axis_names == ["data", "model"]
    for indices in np.ndindex(2, 4):
        by_name = dict(zip(axes, indices, strict=True))
        assert mesh.backend_mesh.devices[by_name["data"], by_name["model"]] == passed.backend_mesh.devices[indices]
    assert made(place.mesh_source(mesh)) == mesh


def test_axes_of_size_1_do_not_matter():
    place = place_of(kd.create_device_mesh("replica:1,model:8"), None)
    mesh = place.mesh({"data": 1, "model": 8})
    assert mesh.axis_sizes == {"data": 1, "model": 8}
    with pytest.raises(ValueError, match="Cannot keep model:4"):
        place_of(kd.create_device_mesh("replica:1,model:8"), {"model": 4})


def test_devices_of_two_targets_are_refused():
    with pytest.raises(ValueError, match="several targets"):
        place_of([*kd.mock_tpus("v5e:2x2"), *kd.mock_tpus("v5p:2x2x1")], None)
