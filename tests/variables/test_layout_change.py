"""Arrays that change their layout on the devices: values, bytes, memory, and nothing through the host."""

import itertools
import math

import hypothesis
import jax
import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.compilers import EIGHT_DEVICES
from support.hlo_text import read_module
from support.keras_scenarios import dense_model, fit, model_parallel

import keras_dist as kd
from keras_dist.variables import layout_change, piece_exchange, variable_layouts
from keras_dist.variables.host_to_device import reshard
from keras_dist.variables.lazy_tensor import overlap, shape_of

FSDP, TP, BOTH = {"fsdp": 8}, {"data": 2, "model": 4}, {"fsdp": 2, "model": 4}
BETWEEN_STRATEGIES = {
    "FSDP, TP of the same dim": ((FSDP, ("fsdp", None)), (TP, ("model", None))),
    "FSDP, TP of another dim": ((FSDP, ("fsdp", None)), (TP, (None, "model"))),
    "FSDP of dim 1, TP of dim 0": ((FSDP, (None, "fsdp")), (TP, ("model", None))),
    "FSDP, TP of all devices": ((FSDP, ("fsdp",)), ({"model": 8}, (None, "model"))),
    "FSDP on the mesh of TP": ((TP, (("data", "model"),)), (TP, (None, "model"))),
    "HSDP, TP": (({"replica": 2, "fsdp": 4}, ("fsdp",)), (TP, (None, "model"))),
    "FSDP x TP, TP": ((BOTH, ("fsdp", "model")), (TP, (None, "model"))),
    "FSDP, DP": ((FSDP, ("fsdp",)), ({"data": 8}, ())),
}
there_and_back = pytest.mark.parametrize(
    ("old", "new"),
    [pair[::step] for pair in BETWEEN_STRATEGIES.values() for step in (1, -1)],
    ids=[f"{name}{back}" for name in BETWEEN_STRATEGIES for back in ("", ", back")],
)


def sharding(axes, spec, devices=None):
    devices = np.array(jax.devices() if devices is None else devices)
    return NamedSharding(Mesh(devices.reshape([*axes.values()]), [*axes]), PartitionSpec(*spec))


def least_bytes(old, new, shape):
    """The most bytes of float32 that a device lacks of its new shard."""

    def bounds(sharding):
        indices = sharding.devices_indices_map(shape).items()
        return {device: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True)) for device, index in indices}

    held, needed = bounds(old), bounds(new)
    common = {device: overlap(held[device], needed[device]) or ((0, 0),) for device in needed}
    return 4 * max(math.prod(shape_of(needed[d])) - math.prod(shape_of(common[d])) for d in needed)


def bytes_sent(old, new, shape):
    """What the compiled program sends to each device."""
    change = layout_change.layout_change(old, new, shape)
    if change.function is None:
        return 0
    argument = jax.ShapeDtypeStruct(change.shape, "float32", sharding=change.before)
    return read_module(change.function.lower(argument).compile().as_text(), {"devices": 8}).wire_bytes


@there_and_back
def test_a_change_sends_what_devices_lack(old, new):
    old, new, shape = sharding(*old), sharding(*new), (64, 128)
    assert bytes_sent(old, new, shape) <= 1.02 * least_bytes(old, new, shape)


@there_and_back
def test_meshes_may_list_their_devices_in_other_orders(old, new):
    order = np.random.default_rng(0).permutation(8)
    old, new, shape = sharding(*old), sharding(*new, np.array(jax.devices())[order]), (64, 128)
    assert bytes_sent(old, new, shape) <= 1.02 * least_bytes(old, new, shape)


DIVIDED = {"rows": (("data", "model"), None), "columns": (None, ("data", "model")), "both": ("data", "model")}


@pytest.mark.parametrize(("old", "new"), [*itertools.permutations(DIVIDED, 2), ("rows", "model"), ("both", "model")])
def test_pieces_where_a_chain_sends_more(old, new):
    others = {**DIVIDED, "model": (None, "data")}
    old, new, shape = sharding(TP, others[old]), sharding(TP, others[new]), (64, 128)
    assert bytes_sent(old, new, shape) <= 1.02 * least_bytes(old, new, shape)


@pytest.mark.compiler
@pytest.mark.parametrize("target", EIGHT_DEVICES)
@pytest.mark.parametrize("dim", [0, 1])
def test_compilers_of_accelerators_send_no_more(target, dim):
    """On v5e the two meshes have different orders of the devices."""
    devices, shape = kd.target(target).devices, (1024, 2048)
    fsdp, tp = (kd.create_device_mesh(axes, devices=devices).backend_mesh for axes in ("fsdp:8", "data:2,model:4"))
    assert (list(fsdp.devices.flat) == list(tp.devices.flat)) == target.startswith("h100")
    rows = NamedSharding(fsdp, PartitionSpec("fsdp")), NamedSharding(tp, PartitionSpec(("data", "model")))
    sharded = NamedSharding(tp, PartitionSpec(*[None] * dim, "model"))
    for old, new in itertools.chain(itertools.product(rows, [sharded]), itertools.product([sharded], rows)):
        assert bytes_sent(old, new, shape) <= 1.02 * least_bytes(old, new, shape)


@st.composite
def shardings(draw):
    """A sharding of three dims of 24, 8 and 16 elements, on a mesh of all devices in any order, or in JAX's."""
    sizes = draw(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (8, 1)]))
    names = [f"{name}{len(sizes)}" for name in "abc"[: len(sizes)]]
    devices = draw(st.permutations(jax.devices()) if draw(st.booleans()) else st.just(jax.devices()))
    dims = [draw(st.sampled_from([None, 0, 1, 2])) for _ in sizes]
    order = draw(st.permutations(names))
    spec = [tuple(name for name in order if dims[names.index(name)] == dim) or None for dim in range(3)]
    return sharding(dict(zip(names, sizes, strict=True)), spec, devices)


@hypothesis.given(shardings(), shardings(), st.sampled_from(["float32", "bfloat16", "int8", "bool"]))
@hypothesis.settings(max_examples=25, deadline=None)
def test_values_stay(old, new, dtype):
    values = np.random.default_rng(0).integers(0, 100, (24, 8, 16)).astype(jax.numpy.dtype(dtype))
    array = jax.device_put(values, old)
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        result = reshard(array, new)
    assert result.sharding.is_equivalent_to(new, 3)
    for shard in result.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])
    if not old.is_equivalent_to(new, 3):
        array.delete()  # as a step that donates it does
        np.testing.assert_array_equal(np.asarray(result), values)


def test_a_dim_that_the_chain_would_split_too_often():
    """Dim 1 has two elements, so no move may leave it over more devices on the way."""
    old, new, shape = sharding(FSDP, ("fsdp", None)), sharding(TP, (None, "data")), (8, 2)
    values = np.arange(16.0).reshape(shape)
    np.testing.assert_array_equal(np.asarray(reshard(jax.device_put(values, old), new)), values)


def test_layouts_of_more_pieces_than_a_program_should_have(monkeypatch):
    monkeypatch.setattr(piece_exchange, "_MAX_PIECES", 2)
    layout_change.layout_change.cache_clear()
    values = np.arange(64.0).reshape(8, 8)
    array = jax.device_put(values, sharding(FSDP, ("fsdp",)))
    for new in (sharding(TP, (None, "model")), sharding(TP, (None, "model"), jax.devices()[::-1])):
        np.testing.assert_array_equal(np.asarray(reshard(array, new)), values)
    layout_change.layout_change.cache_clear()


def test_meshes_of_which_none_refines_the_other():
    devices, values = jax.devices()[:6], np.arange(36.0).reshape(6, 6)
    old, new = sharding({"a": 2, "b": 3}, ("a", "b"), devices), sharding({"a": 3, "b": 2}, ("a", "b"), devices)
    array = jax.device_put(values, old)
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        result = reshard(array, new)
    assert result.sharding == new
    np.testing.assert_array_equal(np.asarray(result), values)


def test_the_same_moves_are_chosen_in_every_process():
    """Processes whose programs differ would hang. Strings, and so sets of axes, have another order in each of them."""
    sizes, layouts = {"x": 2, "y": 2, "z": 2}, [(("x",), ("y", "z")), (("z", "y"), ("x",)), ((), ("z",))]

    def text(old, new, names):
        renamed = [tuple(tuple(names[axis] for axis in axes) for axes in layout) for layout in (old, new)]
        _, moves = layout_change.cheapest_moves(*renamed, {names[k]: v for k, v in sizes.items()}, (8, 8))
        return [(move.func, {**move.keywords, "axis_name": 0, "axis": 0}) for move in moves]

    for old, new in itertools.permutations(layouts, 2):
        texts = [text(old, new, {axis: f"{prefix}{axis}" for axis in sizes}) for prefix in ("p", "q", "r", "s")]
        assert all(each == texts[0] for each in texts)


def test_redistribute_leaves_values_on_the_devices():
    kd.set_distribution(kd.FullyShardedDataParallel(min_shard_bytes=0))
    model = dense_model("adam")
    fit(model)
    before = [np.asarray(variable) for variable in model.weights]
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        kd.redistribute(model, model_parallel(kd, {".*a/kernel": (None, "model")}))
    for variable, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(np.asarray(variable), value)


def test_at_most_max_bytes_are_in_flight(monkeypatch):
    layers = [keras.layers.Dense(64, use_bias=False) for _ in range(8)]
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        model = keras.Sequential([keras.Input((64,)), *layers])
    target = kd.DataParallel()
    moves = [(v, target.get_variable_layout(variable_layouts.VariableSpec.of(v)), target) for v in model.variables]
    waited = []
    block = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: waited.append(len(arrays)) or block(arrays))
    variable_layouts.move_variables(moves, max_bytes=3 * 64 * 64 * 4 - 1)
    assert waited == [3, 3]


def test_variables_that_share_an_array_share_it_afterwards():
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(8)])
    first, second = model.layers[0].kernel, model.layers[1].kernel
    second._value = first._value
    kd.redistribute(model, kd.DataParallel())
    assert first.value is second.value
