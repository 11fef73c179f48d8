"""A picture of a tensor shows which device holds which shard."""

import re
import sys

import jax
import keras
import numpy as np
import pytest

import keras_dist as kd
from keras_dist._report.install_advice import install_command


@pytest.fixture
def mesh():
    """Three axes over 8 devices."""
    return kd.create_device_mesh("a:2,b:2,c:2")


def rows(picture) -> list[list[str]]:
    """The words of the table of a picture, below the line under its heading."""
    lines = str(picture).split("\n")
    start = max(number for number, line in enumerate(lines) if set(line) == {"─"})
    return [line.split() for line in lines[start + 1 :]]


def held(picture) -> dict[int, tuple]:
    return {device: place for place, ids in picture.cells.items() for device in ids}


def test_two_dims(mesh):
    picture = kd.visualize((8, 4), kd.TensorLayout(("a", "b"), mesh))
    assert picture.title == "(8, 4) as ('a', 'b') on a:2 x b:2 x c:2"
    assert picture.notes == (
        "Dim 0: 2 shards of size 4. Dim 1: 2 shards of size 2.",
        "Each shard is on 2 of 8 devices.",
    )
    assert rows(picture) == [["0:4", "0-1", "2-3"], ["4:8", "4-5", "6-7"]]


def test_one_dim_over_two_axes(mesh):
    picture = kd.visualize((2, 16), kd.TensorLayout((None, ("c", "a")), mesh))
    assert picture.dims == (1,)
    assert rows(picture) == [["device", "0,2", "4,6", "1,3", "5,7"]]
    assert "dim 1   0:4  4:8  8:12  12:16" in str(picture)


def test_no_dim(mesh):
    for shape in ((), (4,), (0, 3)):
        picture = kd.visualize(shape, kd.TensorLayout([None] * len(shape), mesh))
        assert rows(picture) == [["device", "0-7"]]
        assert picture.notes == ("No dim is sharded.", "Each shard is on 8 of 8 devices.")


def test_of_more_than_two_sharded_dims_the_last_two_are_shown(mesh):
    picture = kd.visualize((4, 3, 4, 4), kd.TensorLayout(("a", None, "b", "c"), mesh))
    assert picture.dims == (2, 3)
    assert picture.notes[0].startswith("Dim 0: 2 shards of size 2. Dim 2: 2 shards")
    assert picture.notes[-1] == "Dims 2 and 3 are shown, for the first shard of dim 0."
    assert rows(picture) == [["0:2", "0", "1"], ["2:4", "2", "3"]]


def test_the_shards_of_an_array(mesh):
    layout = kd.TensorLayout((("c", "b"), "a"), mesh)
    array = kd.distribute_tensor(np.arange(64).reshape(16, 4), layout)
    picture = kd.visualize(array)
    for shard in array.addressable_shards:
        place = held(picture)[shard.device.id]
        assert [(part.start, part.stop) for part in shard.index] == [
            picture.parts[dim][number] for dim, number in enumerate(place)
        ]
    assert kd.visualize((16, 4), layout) == kd.visualize((16, 4), array.sharding) == picture


@pytest.mark.parametrize("deferred", [False, True])
def test_a_variable(mesh, deferred):
    layout_map = kd.LayoutMap(mesh)
    layout_map[".*kernel"] = ("a", "b")

    def build():
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]).layers[0].kernel

    with kd.ModelParallel(layout_map=layout_map).scope():
        if deferred:
            with kd.deferred():
                kernel = build()
        else:
            kernel = build()
    assert kd.visualize(kernel) == kd.visualize((8, 4), kd.TensorLayout(("a", "b"), mesh))


def test_axes_are_those_of_the_installed_distribution(mesh):
    kd.set_distribution(kd.ModelParallel(layout_map=kd.LayoutMap(mesh)))
    assert kd.visualize((8, 4), ("a", "b")) == kd.visualize([8, 4], kd.TensorLayout(("a", "b"), mesh))


def test_an_array_on_one_device():
    picture = kd.visualize(jax.numpy.ones((4, 2)))
    assert picture.title == "(4, 2) as SingleDeviceSharding"
    assert rows(picture) == [["device", "0"]]


def test_thousands_of_absent_devices():
    mesh = kd.create_device_mesh("data:64,model:64", devices=kd.mock_tpus("v5p:16x16x16"))
    for axes in (("data", "model"), (("data", "model"), None), (None, "model"), (None, None)):
        picture = kd.visualize((4096, 4096), kd.TensorLayout(axes, mesh))
        text = str(picture)
        assert len(text) < 6000
        assert max(map(len, text.split("\n"))) <= 120
        assert len(picture._repr_html_()) < 12000
    assert len(held(kd.visualize((4096, 4096), kd.TensorLayout(("data", "model"), mesh)))) == 4096


def test_html_is_one_table(mesh):
    page = kd.visualize((8, 4), kd.TensorLayout(("a", "b"), mesh))._repr_html_()
    assert page.count("<table>") == 1
    assert page.count("<td ") == 6


@pytest.mark.parametrize("axes", [("a", "b", "c"), ("a",), (None, ("b", "c")), ()])
def test_a_figure_has_a_text_for_each_shard(mesh, axes):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = kd.visualize((8, 8, 8), kd.TensorLayout(axes, mesh))
    figure = picture.figure()
    [axis] = figure.axes
    assert len(axis.texts) == len(picture.cells)
    assert figure._repr_png_().startswith(b"\x89PNG")  # which a notebook shows, without pyplot and its backends


def test_a_figure_of_thousands_of_shards_has_no_texts():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    mesh = kd.create_device_mesh("data:64,model:64", devices=kd.mock_tpus("v5p:16x16x16"))
    [axis] = kd.visualize((4096, 4096), kd.TensorLayout(("data", "model"), mesh)).figure().axes
    assert not axis.texts


def test_a_figure_needs_matplotlib(mesh, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=re.escape(install_command("plot"))):
        kd.visualize((8,), kd.TensorLayout(("a",), mesh)).figure()


def test_invalid_arguments_raise(mesh):
    layout = kd.TensorLayout(("a",), mesh)
    for arguments in ((np.ones(4),), ((4,),), (jax.numpy.ones(4), layout), ("x", layout), ((-1,), layout)):
        with pytest.raises(TypeError, match=r"Cannot visualize .*layout="):
            kd.visualize(*arguments)
    with pytest.raises(ValueError, match=r"shape \(3,\) as \('a',\): dim 0 has size 3"):
        kd.visualize((3,), layout)
    with pytest.raises(ValueError, match=r"layout=\('a',\)"):
        kd.visualize((4,), ("a",))
    with kd.deferred():
        variable = keras.Variable(lambda shape, dtype: None, shape=(4,), name="nowhere")
    with pytest.raises(ValueError, match="'nowhere'"):
        kd.visualize(variable)
