"""`gather`: the values of the array, in bounded pieces, with few compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keras_dist as kd
from keras_dist.variables import gather as gathering
from keras_dist.variables.gather import gather, gather_pieces

MESH = ((2, 2, 2), ["a", "b", "c"])


def on_mesh(array, spec):
    sharding = jax.sharding.NamedSharding(kd.DeviceMesh(*MESH).backend_mesh, jax.sharding.PartitionSpec(*spec))
    return jax.device_put(array, sharding)


SPECS = [
    ("a",),
    (None, "b"),
    ("c", "a"),
    (("a", "b"), None, "c"),
    (("c", "a", "b"),),
    (None, ("b", "c"), "a"),
    ("b", "c", "a"),
]


@pytest.mark.parametrize("piece", [4, 2**10, 2**26])
@pytest.mark.parametrize("spec", SPECS)
def test_gathered_values_equal_the_array(spec, piece):
    array = np.random.default_rng(0).normal(size=(16, 24, 40)).astype("float32")
    np.testing.assert_array_equal(gather_pieces(on_mesh(array, spec), True, piece), array)
    assert gather_pieces(on_mesh(array, spec), False, piece) is None


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float8_e4m3fn", "int4", "uint4", "int8", "uint32", "int16", "bool", "complex64"]
)
def test_every_dtype_is_gathered(dtype):
    array = np.arange(-64, 64).reshape(16, 8).astype("float32").astype(jnp.dtype(dtype))
    result = gather_pieces(on_mesh(array, ("a", "b")), True, 64)
    assert result.dtype == array.dtype
    np.testing.assert_array_equal(result.astype("complex64"), array.astype("complex64"))


def test_sizes_that_pieces_do_not_divide_need_one_program(monkeypatch):
    gathering._gather_program.cache_clear()
    array = on_mesh(np.arange(2 * 37 * 3, dtype="float32").reshape(2, 37, 3), ("a",))
    np.testing.assert_array_equal(gather_pieces(array, True, 240), array)
    program = gathering._gather_program(array.sharding, array.dtype, 1, 10)
    assert (gathering._gather_program.cache_info().misses, program._cache_size()) == (1, 1)


def test_devices_hold_at_most_one_piece():
    array = on_mesh(np.zeros((64, 1024, 256), "float32"), (("a", "b"), None, "c"))
    piece = 2**20
    program = gathering._gather_program(array.sharding, array.dtype, 1, 16)
    memory = program.lower(array, np.int32(0)).compile().memory_analysis()
    shard = array.addressable_data(0).nbytes
    assert memory.output_size_in_bytes <= piece
    assert memory.temp_size_in_bytes <= 2 * piece < shard


def test_fully_local_arrays_need_no_program():
    gathering._gather_program.cache_clear()
    for value, spec in ((np.float32(3), ()), (np.zeros((0, 8)), (None, "a")), (np.ones((4, 2)), ()), (np.ones(8), "a")):
        result = gather(on_mesh(value, spec))
        np.testing.assert_array_equal(result, value)
        result[...] = 2  # its own memory
    assert gather(on_mesh(np.ones(8), "a"), keep=False) is None
    assert gather_pieces(on_mesh(np.zeros((0, 8), "f4"), (None, "a")), True, 64).shape == (0, 8)
    assert gathering._gather_program.cache_info().misses == 0
