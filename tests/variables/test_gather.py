"""A global array becomes a host array: the same numbers, in bounded pieces, with few programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import keras_dist as kd
from keras_dist.variables import gather as gathering
from keras_dist.variables.gather import gather, gather_pieces

MESH = ((2, 2, 2), ["a", "b", "c"])


def laid_out(array, spec):
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
def test_values_are_those_of_the_array(spec, piece):
    array = np.random.default_rng(0).normal(size=(16, 24, 40)).astype("float32")
    np.testing.assert_array_equal(gather_pieces(laid_out(array, spec), True, piece), array)
    assert gather_pieces(laid_out(array, spec), False, piece) is None


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float8_e4m3fn", "int4", "uint4", "int8", "uint32", "int16", "bool", "complex64"]
)
def test_every_dtype_is_gathered(dtype):
    array = np.arange(-64, 64).reshape(16, 8).astype("float32").astype(jnp.dtype(dtype))
    result = gather_pieces(laid_out(array, ("a", "b")), True, 64)
    assert result.dtype == array.dtype
    np.testing.assert_array_equal(result.astype("complex64"), array.astype("complex64"))


def test_odd_sizes_need_one_program(monkeypatch):
    gathering._program.cache_clear()
    array = laid_out(np.arange(2 * 37 * 3, dtype="float32").reshape(2, 37, 3), ("a",))
    np.testing.assert_array_equal(gather_pieces(array, True, 240), array)
    program = gathering._program(array.sharding, array.dtype, 1, 10)
    assert (gathering._program.cache_info().misses, program._cache_size()) == (1, 1)


def test_no_device_holds_more_than_a_piece():
    array = laid_out(np.zeros((64, 1024, 256), "float32"), (("a", "b"), None, "c"))
    piece = 2**20
    steps = gathering._Steps.of(array.sharding, array.shape, piece // 4)
    program = gathering._program(array.sharding, array.dtype, steps.dim, steps.rows)
    memory = program.lower(array, np.int32(0)).compile().memory_analysis()
    shard = array.addressable_data(0).nbytes
    assert memory.output_size_in_bytes <= piece
    assert memory.temp_size_in_bytes <= 2 * piece < shard


def test_what_is_here_is_handed_out_without_a_program():
    gathering._program.cache_clear()
    for value, spec in ((np.float32(3), ()), (np.zeros((0, 8)), (None, "a")), (np.ones((4, 2)), ()), (np.ones(8), "a")):
        result = gather(laid_out(value, spec))
        np.testing.assert_array_equal(result, value)
        result[...] = 2  # its own memory
    assert gather(laid_out(np.ones(8), "a"), keep=False) is None
    assert gather_pieces(laid_out(np.zeros((0, 8), "f4"), (None, "a")), True, 64).shape == (0, 8)
    assert gathering._program.cache_info().misses == 0
