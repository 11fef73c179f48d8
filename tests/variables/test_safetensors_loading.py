"""Checkpoints of Hugging Face that KerasHub converts are views of files, of which each device receives its shard."""

import contextlib
import struct
import threading
import tracemalloc

import jax
import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hub_checkpoints import CODES, FAMILIES, write_checkpoint, write_safetensors
from support.slow_cases import slow

import keras_dist as kd
from keras_dist.variables.host_to_device import _read_shards, place
from keras_dist.variables.lazy_tensor import LazyTensor
from keras_dist.variables.safetensors_files import FileView, JoinedViews, SafetensorsFile, is_view

safetensors = pytest.importorskip("safetensors", reason="needs safetensors: pip install '.[hub]'")


def fully_sharded():
    return kd.FullyShardedDataParallel(min_shard_bytes=0).scope()


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    """Tensors of every type in a file: a name, its view, and the array."""
    rng, arrays = np.random.default_rng(0), {}
    for number, dtype in enumerate(CODES):
        arrays[f"{dtype}.a"] = (rng.normal(size=(4, 6, 8)) * 50).astype(np.dtype(dtype))
        arrays[f"{dtype}.b"] = (rng.normal(size=(4, 6, 8)) * 50).astype(np.dtype(dtype))
        arrays[f"odd{number}"] = np.ones(3, "int8")  # what follows does not begin at a multiple of its size
    arrays |= {"scalar": np.asarray(2.5, "float32"), "empty": np.zeros((0, 3), "int8")}
    path = tmp_path_factory.mktemp("tensors") / "model.safetensors"
    write_safetensors(path, arrays)
    with fully_sharded(), safetensors.safe_open(path, framework="np") as file:
        return path, {name: file.get_tensor(name) for name in file.keys()}, arrays  # noqa: SIM118


def same(got, expected):
    return got.shape == expected.shape and got.dtype == expected.dtype and got.tobytes() == expected.tobytes()


# -------------------------------------------------------------------------------------------------------------- views


@st.composite
def chains(draw):
    """Functions that move data, to be applied one after the other to a pair of arrays."""
    shape, steps = (4, 6, 8), []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["transpose", "reshape", "slice", "squeeze", "stack", "concatenate"]))
        if kind == "transpose":
            order = draw(st.permutations(range(len(shape))))
            steps.append((kind, lambda pair, order=tuple(order): [np.transpose(each, order) for each in pair]))
        elif kind == "reshape":
            dim = draw(st.integers(0, len(shape) - 1))
            factors = [n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0] or [1]
            factor = draw(st.sampled_from(factors))
            to = (*shape[:dim], factor, shape[dim] // factor, *shape[dim + 1 :])
            if draw(st.booleans()):
                to = (*shape[:dim], -1) if 0 not in shape else shape
            steps.append((kind, lambda pair, to=to: [np.reshape(each, to) for each in pair]))
        elif kind == "squeeze":
            new = draw(st.integers(0, len(shape)))
            steps.append((kind, lambda pair, new=new: [np.squeeze(np.expand_dims(each, new), new) for each in pair]))
        elif kind == "slice":
            bound = st.none() | st.integers(-5, 5)
            step = st.sampled_from([None, 1, 2, -1])
            index = tuple(draw(st.builds(slice, bound, bound, step)) for _ in range(draw(st.integers(1, len(shape)))))
            steps.append((kind, lambda pair, index=index: [each[index] for each in pair]))
        else:
            axis = draw(st.integers(-len(shape), len(shape) - 1))
            join = np.stack if kind == "stack" else np.concatenate
            steps.append((kind, lambda pair, join=join, axis=axis: [join(pair, axis=axis), join(pair[::-1], axis)]))
        shape = steps[-1][1]([np.empty(shape, "int8")] * 2)[0].shape
        if len(shape) > 6 or np.prod(shape) > 20000:
            break
    spans = (st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted).map(tuple) for size in shape)
    bounds = st.tuples(*spans)
    return steps, draw(st.lists(bounds, min_size=1, max_size=3))


@given(chain=chains(), dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "bool"]))
def test_shards_of_what_is_moved_equal_those_of_arrays(tensors, chain, dtype):
    _, views, arrays = tensors
    (steps, shards), got, expected = chain, *([of[f"{dtype}.a"], of[f"{dtype}.b"]] for of in (views, arrays))
    joined = False
    for kind, function in steps:
        before, got, expected = got, function(got), function(expected)
        joined |= kind in ("stack", "concatenate")
        if kind != "reshape" and all(map(is_view, before)) and not (kind in ("slice", "squeeze") and joined):
            assert all(map(is_view, got))
            assert isinstance(got[0], JoinedViews if joined else FileView)
    for value, array in zip(got, expected, strict=True):
        assert not isinstance(value, LazyTensor) or value._array is None  # not read yet
        for bounds, shard in _read_shards(value, shards, value.dtype):
            assert same(shard, array[tuple(slice(*bound) for bound in bounds)])
        assert same(np.asarray(value), array)


@pytest.mark.parametrize("spec", [("data",), (None, "model"), ("model", None, "data"), ()])
def test_stacked_views_are_placed_by_shards(tensors, spec, mesh):
    _, views, arrays = tensors
    both = [[np.transpose(of[f"bfloat16.{name}"]) for name in "abab"] for of in (views, arrays)]
    sharding = kd.TensorLayout((*spec, *[None] * (4 - len(spec))), mesh).backend_layout
    placed = place(np.stack(both[0]), sharding)
    assert same(np.asarray(placed), np.stack(both[1]))


def test_transposes_of_joined_views_are_those_of_numpy(tensors):
    _, views, arrays = tensors
    got, expected = ([np.stack([of["int8.a"], of["int8.b"]], axis=1)] for of in (views, arrays))
    for function in (
        lambda a: a.T,
        lambda a: a.transpose(),
        lambda a: a.transpose(None),
        lambda a: a.transpose(-1, 0, 1, -2),
        lambda a: a.transpose((1, 0, 3, 2)),
        lambda a: np.moveaxis(a, 0, 2),
        lambda a: np.concatenate([a.T, a.T], axis=-1),
        lambda a: np.stack([a, a], -1),
    ):
        assert isinstance(function(got[0]), JoinedViews)
        assert same(np.asarray(function(got[0])), function(expected[0]))
    for axes in ((0, 0, 1, 2), (0, 1), (0, 1, 2, 4)):
        with pytest.raises(ValueError, match="ax"):
            got[0].transpose(axes)
    got[0].load()
    assert same(np.asarray(np.concatenate([got[0], got[0]])), np.concatenate([expected[0]] * 2))


def test_what_is_computed_is_an_ordinary_array(tensors):
    _, views, arrays = tensors
    got, expected = ([of["float32.a"], of["float32.b"]] for of in (views, arrays))
    for function in (
        lambda a, b: a + b,
        lambda a, b: a.astype("float16"),
        lambda a, b: np.sum(a, axis=0),
        lambda a, b: np.sum(np.stack([a, b])),
        lambda a, b: np.stack([a, b])[0, 1:],
        lambda a, b: np.where(a > b, a, b),
        lambda a, b: np.concatenate([a, np.zeros_like(np.asarray(b))]),
        lambda a, b: np.concatenate([a, b], axis=None),
        lambda a, b: np.stack([a, b], dtype="float16", casting="same_kind"),
        lambda a, b: np.stack([a, b.astype("float16")]),
        lambda a, b: np.vstack([a, b]) * 2,
    ):
        result = function(*got)
        assert type(result) in (np.ndarray, np.float32)
        assert same(result, function(*expected))
    for function in (
        lambda a, b: np.stack([a, b[:1]]),
        lambda a, b: np.concatenate([a, b[0]]),
        lambda a, b: np.stack([a, b], axis=7),
    ):
        messages = []
        for pair in (got, expected):
            with pytest.raises(ValueError) as error:  # noqa: PT011
                function(*pair)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


def test_writes_to_a_tensor_stay_in_memory(tensors):
    path, _, arrays = tensors
    before = path.read_bytes()
    with fully_sharded(), safetensors.safe_open(path, "np") as file:
        tensor = file.get_tensor("float32.a")
        tensor += 1
        assert same(np.asarray(tensor), arrays["float32.a"] + 1)
        variable = keras.Variable(np.zeros(tensor.shape, "float32"))
        variable.assign(tensor)
    assert path.read_bytes() == before
    np.testing.assert_array_equal(np.asarray(variable), arrays["float32.a"] + 1)


# -------------------------------------------------------------------------------------------------------------- files


def test_tensors_of_every_type_equal_what_the_file_contains(tensors):
    path, views, arrays = tensors
    assert set(views) == set(arrays)
    for name, array in arrays.items():
        assert isinstance(views[name], FileView)
        assert same(np.asarray(views[name]), array)
    with safetensors.safe_open(path, framework="np") as file:
        for name in ("float32.a", "bfloat16.b", "int64.a", "scalar", "empty"):
            assert same(np.asarray(views[name]), file.get_tensor(name))


def test_the_rest_is_that_of_safetensors(tensors):
    path, *_ = tensors
    with fully_sharded():
        file = safetensors.safe_open(filename=str(path), framework="numpy", device="cpu")
        with file as entered, safetensors.safe_open(path, "np") as stock:
            assert entered is file
            assert isinstance(file, SafetensorsFile)
            assert file.keys() == stock.keys()
            assert file.offset_keys() == stock.offset_keys()
            assert file.metadata() == {"format": "np"}
            assert same(file.get_slice("float32.a")[1:2], stock.get_slice("float32.a")[1:2])
            for missing in ("nothing", "__metadata__"):
                with pytest.raises(KeyError, match=rf"model\.safetensors.*{missing}"):
                    file.get_tensor(missing)
        with pytest.raises(safetensors.SafetensorError, match="closed"):
            file.get_tensor("float32.a")


def test_only_numpy_in_threads_with_a_distribution_is_read_as_views(tensors):
    path, *_ = tensors
    stock, found = safetensors.safe_open, {}

    def elsewhere():
        found["thread"] = type(safetensors.safe_open(path, "np"))

    begun = threading.Event()
    thread = threading.Thread(target=lambda: (begun.wait(), elsewhere()))
    thread.start()
    with fully_sharded():
        begun.set()
        thread.join()
        found["jax"] = type(safetensors.safe_open(path, "jax"))
        with keras.distribution.DataParallel().scope():
            found["keras"] = type(safetensors.safe_open(path, "np"))
    assert found == dict.fromkeys(("thread", "jax", "keras"), stock)
    assert safetensors.safe_open is stock


def file_with(header: str) -> bytes:
    return struct.pack("<Q", len(header)) + header.encode()


def test_files_that_are_not_complete_are_named(tensors, tmp_path):
    path, *_ = tensors
    data, bad = path.read_bytes(), tmp_path / "bad.safetensors"
    (length,) = struct.unpack("<Q", data[:8])
    contents = {
        b"": "has 0 bytes, but its header ends at byte 8",
        b"abc": "has 3 bytes, but its header ends at byte",
        data[:100]: f"has 100 bytes, but its header ends at byte {8 + length}",
        data[:-1]: f"has {len(data) - 1} bytes, but its last tensor ends at byte {len(data)}",
        b"{" + data: f"has {len(data) + 1} bytes, but its header ends at byte",
        file_with("{"): "its header, the 1 bytes from byte 8 on, is not one of tensors",
        file_with("[1]"): "its header, the 3 bytes from byte 8 on, is not one of tensors",
        file_with('{"a": 1}'): "is not one of tensors",
        file_with('{"a": {"data_offsets": [0]}}'): "is not one of tensors",
    }
    for content, fault in contents.items():
        bad.write_bytes(content)
        for read in (lambda: safetensors.safe_open(bad, framework="np"), lambda: SafetensorsFile(bad)):
            with fully_sharded(), pytest.raises(ValueError, match=rf"bad\.safetensors'.*{fault}.*download"):
                read()
        with pytest.raises(safetensors.SafetensorError):
            safetensors.safe_open(bad, framework="np")


def test_other_errors_of_safetensors_are_raised_as_they_are(tmp_path):
    path, errors = tmp_path / "hole.safetensors", []
    path.write_bytes(file_with('{"a": {"dtype": "I8", "shape": [3], "data_offsets": [1, 4]}}') + bytes(4))
    for scope in (contextlib.nullcontext(), fully_sharded()):
        with scope, pytest.raises(safetensors.SafetensorError) as error:
            safetensors.safe_open(path, framework="np")
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    with fully_sharded(), pytest.raises(FileNotFoundError, match="absent"):
        safetensors.safe_open(tmp_path / "absent", framework="np")


def test_a_type_that_numpy_lacks_raises_the_error_of_safetensors(tmp_path):
    path, errors = tmp_path / "a.safetensors", []
    write_safetensors(path, {"packed": np.zeros(4, "int8"), "a": np.zeros(4, "int8")}, {"packed": "F4"})
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"F4", "shape": [4]', b'"F4", "shape": [8]'))
    for scope in (contextlib.nullcontext(), fully_sharded()):
        with scope, safetensors.safe_open(path, framework="np") as file:
            assert same(np.asarray(file.get_tensor("a")), np.zeros(4, "int8"))
            with pytest.raises(AttributeError, match="float4") as error:
                file.get_tensor("packed")
        errors.append(str(error.value))
    assert errors[0] == errors[1]


# ------------------------------------------------------------------------------------------------------------- models


def backbone(folder, **options):
    keras_hub = pytest.importorskip("keras_hub", reason="needs KerasHub: pip install '.[hub]'", exc_type=ImportError)
    return keras_hub.models.Backbone.from_preset(str(folder), **options)


@pytest.mark.parametrize(
    ("family", "dtype", "files"),
    [*((family, "float32", files) for family in FAMILIES for files in (1, 3)), slow("mixtral", "bfloat16", 3)],
)
def test_checkpoints_equal_the_import_of_keras_hub_and_devices_receive_shards(
    family, dtype, files, tmp_path, largest_transfer
):
    write_checkpoint(tmp_path, family, dtype, files)
    expected = backbone(tmp_path, dtype=dtype)
    with fully_sharded():
        largest_transfer[0] = 0
        loaded = backbone(tmp_path, dtype=dtype)
        largest = largest_transfer[0]
    for variable, of_keras_hub in zip(loaded.weights, expected.weights, strict=True):
        assert same(np.asarray(variable.value), np.asarray(of_keras_hub.value))
    shards = [variable.value.addressable_data(0) for variable in loaded.weights]
    assert largest == max(shard.size for shard in shards)
    assert largest < max(np.prod(variable.shape) for variable in loaded.weights)


def test_deferred_models_receive_shards(tmp_path, largest_transfer):
    write_checkpoint(tmp_path, "mixtral")
    expected = backbone(tmp_path)
    with fully_sharded():
        largest_transfer[0] = 0
        with kd.deferred():
            loaded = backbone(tmp_path)
        kd.materialize(loaded)
        assert largest_transfer[0] == max(variable.value.addressable_data(0).size for variable in loaded.weights)
    for variable, of_keras_hub in zip(loaded.weights, expected.weights, strict=True):
        assert same(np.asarray(variable.value), np.asarray(of_keras_hub.value))


def test_checkpoints_in_float8_equal_their_values(tmp_path):
    write_checkpoint(tmp_path, "mixtral", "float8_e4m3fn")
    with fully_sharded():
        loaded = backbone(tmp_path)
        with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
            kernels = [file.get_tensor(f"model.layers.1.block_sparse_moe.experts.{i}.w1.weight").T for i in range(4)]
    experts = next(v for v in loaded.get_layer("transformer_layer_1").weights if tuple(v.shape) == (4, 64, 128))
    np.testing.assert_array_equal(np.asarray(experts.value), np.asarray(np.stack(kernels)).astype("float32"))
    assert kernels[0].dtype == ml_dtypes.float8_e4m3fn


@pytest.mark.slow
def test_the_host_never_holds_all_of_a_variable_of_stacked_experts(tmp_path):
    write_checkpoint(tmp_path, "mixtral", hidden=256, intermediate=512, experts=8)
    with fully_sharded():
        backbone(tmp_path)  # what is compiled and imported once is not measured
        jax.clear_caches()
        tracemalloc.start()
        loaded = backbone(tmp_path)
        on_devices, peak = tracemalloc.get_traced_memory()  # CPU devices keep arrays of the host without a copy
        tracemalloc.stop()
    largest = max(np.prod(variable.shape) * 4 for variable in loaded.weights)
    assert largest == 8 * 256 * 512 * 4
    assert peak - on_devices < largest
