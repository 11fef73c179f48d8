"""Values from memory and from every file format of Keras are placed on devices shard by shard."""

import io
import warnings
import zipfile

import h5py
import jax
import keras
import ml_dtypes
import numpy as np
import pytest
from support.slow_cases import crossed, slow

import keras_dist as kd
from keras_dist._keras.internals import saving_lib
from keras_dist.variables import host_to_device, lazy_hdf5

WIDTH = 1024  # a kernel of 4 MiB, more than what is read at once


def sharded(*specs):
    """A distribution over 2 x 4 devices with one layout for kernels."""
    mesh = kd.DeviceMesh((2, 4), ["data", "model"])
    layout_map = kd.LayoutMap(mesh)
    layout_map[".*kernel"] = kd.TensorLayout(specs or (None, "model"), mesh)
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")


def new_model(dtype="float32", width=WIDTH):
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width, name="a"), keras.layers.Dense(4)])
    if dtype != "float32":
        model = keras.Sequential(
            [keras.Input((width,)), keras.layers.Dense(width, name="a", dtype=dtype), keras.layers.Dense(4)]
        )
    model.compile("adam", keras.losses.MeanSquaredError())  # a name is not read back from legacy files
    model.optimizer.build(model.trainable_variables)
    return model


# ------------------------------------------------------------------------------------------------------- from memory


@pytest.mark.parametrize(
    "spec", [slow((None, "model")), slow(("model", None)), ("data", "model"), (("data", "model"), None)]
)
def test_assign_sends_each_device_only_its_shard(spec, largest_transfer):
    with sharded(*spec).scope():
        model = new_model()
        kernel = model.layers[0].kernel
        expected_value = np.random.default_rng(0).normal(size=kernel.shape).astype("float32")
        largest_transfer[0] = 0
        kernel.assign(expected_value)
    assert largest_transfer[0] == kernel.value.addressable_data(0).size
    assert kernel.value.sharding.spec == jax.sharding.PartitionSpec(*spec)
    np.testing.assert_array_equal(np.asarray(kernel.value), expected_value)


def test_assigned_arrays_are_copied():
    with sharded().scope():
        for variable in (keras.Variable(np.zeros((64, 64), "float32")), new_model().layers[0].kernel):
            value = np.zeros(variable.shape, "float32")
            variable.assign(value)
            value[:] = 1
            assert not np.asarray(variable.value).any()


@pytest.mark.parametrize(
    ("of", "to"),
    crossed(
        ["float64", "float32", "bfloat16", "int64", "int8", "bool", "uint32"],
        ["float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool", "float8_e4m3fn"],
    ),
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast", "ignore:overflow encountered in cast")
def test_dtype_conversion_equals_that_of_keras(of, to):
    value = (np.random.default_rng(0).normal(size=(8, 512)) * 200).astype("float64").astype(np.dtype(of))
    expected = keras.Variable(np.zeros(value.shape), dtype=to)
    expected.assign(value)
    with kd.FullyShardedDataParallel().scope():
        variable = keras.Variable(np.zeros(value.shape), dtype=to)
        variable.assign(value)
        made = keras.Variable(value, dtype=to)
        as_it_is = keras.Variable(value)
    assert variable.dtype == made.dtype == to
    assert as_it_is.dtype == keras.Variable(value).dtype
    for got in (variable, made):
        np.testing.assert_array_equal(np.asarray(got.value).astype("f8"), np.asarray(expected.value).astype("f8"))


def test_assign_raises_the_errors_of_keras():
    with sharded().scope():
        kernel = new_model(width=8).layers[0].kernel
        with pytest.raises(ValueError, match=r"variable.shape=\(8, 8\), Received: value.shape=\(8, 4\)"):
            kernel.assign(np.zeros((8, 4), "float32"))
        with pytest.raises(Exception, match="str"):
            kernel.assign(np.full((8, 8), "a"))


def test_assign_numbers_lists_and_jax_arrays():
    with sharded().scope():
        variable = keras.Variable(np.zeros((4,), "float32"))
        variable.assign([1, 2, 3, 4])
        np.testing.assert_array_equal(np.asarray(variable.value), [1, 2, 3, 4])
        variable.assign(jax.numpy.arange(4))
        np.testing.assert_array_equal(np.asarray(variable.value), [0, 1, 2, 3])
        number = keras.Variable(0.5)
        number.assign(0.25)
        number.assign_add(1)
        assert float(number.value) == 1.25
        assert len(number.value.sharding.device_set) == 8


def test_what_is_sharded_as_its_variable_is_not_moved(monkeypatch):
    with kd.DataParallel().scope():
        variable = keras.Variable(np.zeros(4, "float32"))
        value = variable.value + 1
        monkeypatch.setattr(host_to_device, "reshard", lambda *arguments: pytest.fail("moved"))
        variable.assign(value)
        assert variable.value is value


def test_set_weights_and_optimizer_state():
    expected = new_model()
    state = [np.asarray(v.value) + number for number, v in enumerate(expected.optimizer.variables)]
    with sharded().scope():
        model = new_model()
        model.set_weights(expected.get_weights())
        model.optimizer.set_weights(state)
    for got, expected_value in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected_value)
    for variable, expected_value in zip(model.optimizer.variables, state, strict=True):
        np.testing.assert_array_equal(np.asarray(variable.value), expected_value)


# -------------------------------------------------------------------------------------------------------- from files


def save(model, path):
    if path.name == "w.weights.json":
        model.save_weights(path, max_shard_size=0.005)
    elif path.name == "w.weights.h5":
        model.save_weights(path)
    elif path.name == "directory":
        keras.saving.save_model(model, path, zipped=False)
    else:
        model.save(path)
    return path


def load(path):
    if ".weights" in path.name:
        model = new_model()
        model.load_weights(path)
        return model
    return keras.models.load_model(path)


FILES = ["w.weights.h5", "w.weights.json", "m.keras", "m.h5", "directory"]


@pytest.mark.parametrize(("name", "spec"), crossed(FILES, [(None, "model"), ("model", None), ("data", "model")]))
def test_every_file_format_is_read_by_shards(name, spec, tmp_path, largest_transfer, monkeypatch):
    expected = new_model()
    expected.optimizer.variables[2].assign(np.full(expected.optimizer.variables[2].shape, 3.0))
    path = save(expected, tmp_path / name)
    loaded = []
    monkeypatch.setattr(
        lazy_hdf5.LazyDataset,
        "load",
        lambda self, load=lazy_hdf5.LazyDataset.load: loaded.append(self.shape) or load(self),
    )
    with sharded(*spec).scope():
        largest_transfer[0] = 0
        model = load(path)
        assert largest_transfer[0] < WIDTH * WIDTH
    for got, expected_value in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected_value)
    if name != "m.h5":  # of which Keras reads no optimizer here
        for got, expected_value in zip(model.optimizer.variables, expected.optimizer.variables, strict=True):
            np.testing.assert_array_equal(np.asarray(got.value), np.asarray(expected_value.value))
    assert model.layers[0].kernel.value.sharding.spec == jax.sharding.PartitionSpec(*spec)
    assert not loaded or name == "w.weights.json"  # a group in two files


def test_archives_are_not_read_into_memory(tmp_path, monkeypatch):
    path = save(new_model(), tmp_path / "m.keras")
    monkeypatch.setattr(saving_lib.tempfile, "TemporaryDirectory", None)  # nor extracted
    whole = []
    read = zipfile.ZipExtFile.read
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda self, n=-1: whole.append((self.name, n)) or read(self, n))
    with sharded().scope():
        model = keras.models.load_model(path)
        model.load_weights(path)
    assert {name for name, _ in whole} == {"config.json"}


def test_compressed_archives_are_read_as_by_keras(tmp_path):
    expected = new_model()
    path = save(expected, tmp_path / "m.keras")
    packed = tmp_path / "packed.keras"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with sharded().scope():
        model = keras.models.load_model(packed)
    np.testing.assert_array_equal(model.get_weights()[0], expected.get_weights()[0])


def test_load_from_an_open_file(tmp_path):
    expected = new_model()
    path = save(expected, tmp_path / "m.keras")
    with sharded().scope():
        for source in (open(path, "rb"), io.BytesIO(path.read_bytes())):  # noqa: SIM115
            with source:
                model = saving_lib.load_model(source)
            np.testing.assert_array_equal(model.get_weights()[0], expected.get_weights()[0])


def test_load_bfloat16(tmp_path):
    expected = new_model("bfloat16")
    path = save(expected, tmp_path / "w.weights.h5")
    with sharded().scope():
        for dtype in ("bfloat16", "float32"):
            model = new_model(dtype)
            model.load_weights(path)
            np.testing.assert_array_equal(
                np.asarray(model.layers[0].kernel.value).astype("f4"),
                np.asarray(expected.layers[0].kernel.value).astype("f4"),
            )


@pytest.mark.parametrize("mode", ["int8", slow("int4")])
def test_load_quantized_weights(mode, tmp_path):
    expected = keras.Sequential([keras.Input((2 * WIDTH,)), keras.layers.Dense(2 * WIDTH)])
    expected.quantize(mode)
    path = tmp_path / "m.keras"
    expected.save(path)
    with sharded().scope():
        model = keras.models.load_model(path)
    for got, expected_value in zip(model.variables, expected.variables, strict=True):
        assert got.dtype == expected_value.dtype
        np.testing.assert_array_equal(np.asarray(got.value), np.asarray(expected_value.value))


def test_lora_weights_are_saved_merged(tmp_path):
    with sharded().scope():
        model = new_model()
        model.layers[0].enable_lora(4)
        model.layers[0].lora_kernel_b.assign(np.ones(model.layers[0].lora_kernel_b.shape))
        merged = np.asarray(model.layers[0].kernel)
        model.save_weights(tmp_path / "w.weights.h5")
        model.load_weights(tmp_path / "w.weights.h5")
        np.testing.assert_array_equal(np.asarray(model.layers[0]._kernel.value), merged)
        assert not np.asarray(model.layers[0].lora_kernel_b.value).any()


def test_load_into_a_deferred_model(tmp_path):
    expected = new_model()
    path = save(expected, tmp_path / "w.weights.h5")
    with sharded().scope():
        with kd.deferred():
            model = new_model()
        model.load_weights(path)
        kd.materialize(model)
        model.predict(np.ones((8, WIDTH)), verbose=0)
    for got, expected_value in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected_value)


def test_shape_mismatch_raises_or_is_skipped_as_by_keras(tmp_path):
    path = save(new_model(), tmp_path / "w.weights.h5")
    with sharded().scope():
        model = new_model(width=WIDTH // 2)
        with pytest.raises(ValueError, match=r"value.shape=\(1024, 1024\)"):
            model.load_weights(path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.load_weights(path, skip_mismatch=True)
        assert any("could not be loaded" in str(warning.message) for warning in caught)


@keras.saving.register_keras_serializable("test_loading")
class Halves(keras.layers.Layer):
    """A layer that computes with what it finds in a file, and keeps it."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(WIDTH, WIDTH), name="kernel")

    def call(self, x):
        return x @ self.kernel

    def load_own_variables(self, store):
        self.found = store["0"]
        self.kernel.assign(np.transpose(store["0"]) / 2 + store["0"][0, 0] + 0 * jax.numpy.sqrt(store["0"] ** 2))


def test_layers_may_compute_with_stored_tensors_and_keep_them(tmp_path):
    expected = keras.Sequential([keras.Input((WIDTH,)), Halves()])
    expected.save(tmp_path / "m.keras")
    before = expected.get_weights()[0]
    with sharded().scope():
        model = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_allclose(model.get_weights()[0], before.T / 2 + before[0, 0], rtol=1e-6)
    np.testing.assert_array_equal(model.layers[0].found, before)


# ----------------------------------------------------------------------------------------------------- lazy tensors


@pytest.fixture(params=["plain", "chunked", "bfloat16"])
def on_disk(request, tmp_path):
    """A tensor in a file, and what it holds."""
    array = np.random.default_rng(0).normal(size=(96, 70, 50)).astype("float32")
    if request.param == "bfloat16":
        array = array.astype(ml_dtypes.bfloat16)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        chunks = {"chunks": (7, 70, 50), "compression": "gzip"} if request.param == "chunked" else {}
        file.create_dataset("a", data=array, **chunks)
        if request.param == "bfloat16":
            file["a"].attrs["dtype"] = "bfloat16"
    with h5py.File(tmp_path / "a.h5") as file:
        dataset = file["a"]
        yield lazy_hdf5.LazyDataset(dataset, array.dtype), array


@pytest.mark.parametrize(
    "spec", [("data",), (None, "data"), (None, None, "data"), ("model", "data"), ("model", None, "data"), ()]
)
@pytest.mark.parametrize("band", [1, 2**12, 2**24])
def test_placed_shards_equal_the_array(on_disk, spec, band, monkeypatch):
    monkeypatch.setattr(lazy_hdf5, "_BAND_BYTES", band)
    tensor, array = on_disk
    sharding = kd.TensorLayout(spec + (None,) * (3 - len(spec)), kd.DeviceMesh((2, 4), ["data", "model"]))
    np.testing.assert_array_equal(np.asarray(host_to_device.place(tensor, sharding.backend_layout)), array)


def test_datasets_are_assigned_by_shards(tmp_path, largest_transfer):
    array = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype("float32")
    with h5py.File(tmp_path / "a.h5", "w") as file, sharded().scope():
        model = new_model()
        largest_transfer[0] = 0
        model.layers[0].kernel.assign(file.create_dataset("a", data=array))
        model.layers[1].bias.assign(file.create_dataset("b", data=array[0, :4]))
        assert largest_transfer[0] == array.size // 4
    np.testing.assert_array_equal(np.asarray(model.layers[0].kernel), array)
    np.testing.assert_array_equal(np.asarray(model.layers[1].bias), array[0, :4])


def test_lazy_tensor_can_be_read_like_an_array(on_disk):
    tensor, array = on_disk
    assert (tensor.shape, tensor.dtype, tensor.ndim, tensor.size, len(tensor)) == (
        (array.shape, array.dtype, 3, array.size, 96)
    )
    for function in (
        lambda a: a.T,
        lambda a: np.transpose(a, (2, 0, 1)),
        lambda a: np.concatenate([a, a]),
        lambda a: a[3, ::-2],
        lambda a: a[[1, 5]],
        lambda a: a.astype("float16"),
        lambda a: a.reshape(-1),
        lambda a: np.asarray(keras.ops.convert_to_tensor(a)),
        lambda a: np.stack(list(a)),
        lambda a: np.array(a, dtype="float64"),
    ):
        np.testing.assert_array_equal(function(tensor), function(array))


def test_keras_hub_preset_is_read_by_shards(tmp_path, largest_transfer):
    keras_hub = pytest.importorskip("keras_hub", reason="needs KerasHub: pip install '.[hub]'", exc_type=ImportError)
    keras.utils.set_random_seed(0)
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 128, "intermediate_dim": 512, "max_sequence_length": 64}
    saved = keras_hub.models.GPT2Backbone(vocabulary_size=4096, **sizes)
    saved.save_to_preset(str(tmp_path))
    largest_transfer[0] = 0
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        loaded = keras_hub.models.GPT2Backbone.from_preset(str(tmp_path))
    most = largest_transfer[0]
    for variable, expected in zip(loaded.weights, saved.weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected.numpy())
    table = loaded.token_embedding.embeddings
    assert table.value.sharding.shard_shape(table.shape) != tuple(table.shape)
    assert most <= table.value.addressable_data(0).size
