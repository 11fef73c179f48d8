"""Which shard of weights and optimizer state each device stores under FSDP, HSDP and ZeRO-1."""

import itertools

import jax
import keras
import numpy as np
import pytest
from keras import layers
from support.strategy_models import MODELS, fsdp, tensor_parallel

import keras_dist as kd
from keras_dist.sharding.shard_dim import shard_one_more_dim


def shard_shapes(variables):
    """The shape of each variable's shard on a device, by path."""
    return {v.path: v.value.sharding.shard_shape(tuple(v.shape)) for v in variables}


def bytes_per_device(variables):
    """The bytes of variables on each device, which must be equal on all."""
    held = dict.fromkeys(jax.devices(), 0)
    for shard in itertools.chain.from_iterable(v.value.addressable_shards for v in variables):
        held[shard.device] += shard.data.nbytes
    [size] = set(held.values())
    return size


def test_fsdp_shards_every_weight_and_its_optimizer_state():
    build, x, y = MODELS["mixture"]
    with fsdp().scope():
        model = build()
        model.train_on_batch(x, y)
    shapes = shard_shapes(model.weights)
    assert shapes["experts/up"] == (1, 16, 32)
    assert shapes["experts/router"] == (2, 8)
    assert shapes["first/kernel"] == (2, 16)
    assert shapes["norm/gamma"] == (2,)
    assert shapes["head/bias"] == (4,)  # 8 devices do not divide it
    state = shard_shapes(model.optimizer.variables)
    assert state["adam/experts_up_momentum"] == state["adam/experts_up_velocity"] == (1, 16, 32)
    sharded = sum(v.value.nbytes for v in model.weights if v.shape != (4,))
    assert bytes_per_device(model.weights) == sharded // 8 + 16
    scalars = sum(v.value.nbytes for v in model.optimizer.variables if not v.shape)
    assert bytes_per_device(model.optimizer.variables) == 2 * (sharded // 8 + 16) + scalars


def test_fsdp_replicates_what_steps_read_as_constants():
    """In several processes, JAX refuses programs that close over shards."""
    with fsdp().scope():
        norm = layers.Normalization()
        norm.adapt(np.random.default_rng(0).normal(size=(32, 16)).astype("float32"))
        recurrent = layers.GRU(16, stateful=True)
        recurrent(np.ones((16, 4, 8), "float32"))
        state = keras.tree.flatten(recurrent.states)[0]
        assert norm.mean.sharding.is_fully_replicated
        assert norm.variance.sharding.is_fully_replicated
        assert state.value.sharding.is_fully_replicated
        assert shard_shapes(recurrent.weights)["gru/gru_cell/kernel"] == (1, 48)


@pytest.mark.slow
def test_hsdp_shards_within_a_group():
    build, x, y = MODELS["mixture"]
    with fsdp("replica:2,fsdp:4").scope():
        model = build()
        model.train_on_batch(x, y)
    assert shard_shapes(model.weights)["experts/up"] == (2, 16, 32)
    assert shard_shapes(model.optimizer.variables)["adam/experts_up_velocity"] == (2, 16, 32)
    first, second = model.layers[-1].kernel.value.addressable_shards[0::4]
    assert first.index == second.index  # devices 0 and 4 store the same shard


@pytest.mark.parametrize(
    ("axes", "options", "shape", "batch_axes"),
    [
        ("fsdp:2,context:4", {}, (1, 16, 32), ("fsdp",)),
        ("context:8", {}, (1, 16, 32), ()),
        ("replica:2,fsdp:2,context:2", {}, (2, 16, 32), ("replica", "fsdp")),
        ("fsdp:2,context:4", {"shard_axis": "fsdp"}, (4, 16, 32), ("fsdp",)),
    ],
)
def test_fsdp_shards_over_the_devices_that_share_a_sequence(axes, options, shape, batch_axes):
    build, _, _ = MODELS["mixture"]
    distribution = fsdp(axes, sequence_dim_name="context", **options)
    assert distribution.batch_dim_name == batch_axes
    with distribution.scope():
        model = build()
    assert shard_shapes(model.weights)["experts/up"] == shape


@pytest.mark.usefixtures("shard_small_optimizer_state")
def test_zero_1_shards_optimizer_state_only():
    build, x, y = MODELS["mixture"]
    with kd.DataParallel(shard_optimizer_state=True).scope():
        model = build()
        model.fit(x, y, verbose=0)
    assert bytes_per_device(model.weights) == sum(v.value.nbytes for v in model.weights)
    state = shard_shapes(model.optimizer.variables)
    assert state["adam/experts_up_velocity"] == (1, 16, 32)
    assert state["adam/head_bias_velocity"] == (4,)


@pytest.mark.slow
def test_fsdp_shards_a_dim_that_rules_leave_free():
    build, x, y = MODELS["transformer"]
    with fsdp(layout_map=tensor_parallel(build, "replica:2,fsdp:2,model:2")).scope():
        model = build()
        model.train_on_batch(x, y)
    shapes = shard_shapes(model.weights)
    assert shapes["block_attention/query/kernel"] == (16, 2, 2)  # heads by the rule, the smallest other dim by FSDP
    assert shapes["block_up/kernel"] == (8, 32)
    assert shapes["block_down/kernel"] == (32, 8)
    assert shapes["block_up/bias"] == (32,)  # the rule shards its only dim
    assert shard_shapes(model.optimizer.variables)["adam/block_up_kernel_velocity"] == (8, 32)


def test_weights_up_to_min_shard_bytes_are_replicated():
    with kd.FullyShardedDataParallel(min_shard_bytes=8 * 16 * 4).scope():
        small, large = layers.Dense(16), layers.Dense(24)
        small.build((None, 8))
        large.build((None, 8))
    assert small.kernel.value.sharding.is_fully_replicated
    assert large.kernel.value.sharding.shard_shape((8, 24)) == (1, 24)


@pytest.mark.parametrize("shape", [(), (0,), (0, 8), (7, 13), (1,), (3, 5, 7)])
def test_shapes_that_the_axis_does_not_divide_are_replicated(shape):
    with fsdp().scope():
        variable = keras.Variable(np.ones(shape, "float32"), name="odd")
    assert variable.value.sharding.is_fully_replicated


def test_shard_and_replica_axes():
    rules = kd.LayoutMap(kd.create_device_mesh("data:2,fsdp:2,model:2"))
    rules[".*kernel"] = (None, "model")
    three = kd.create_device_mesh("a:2,b:2,c:2")
    assert kd.FullyShardedDataParallel(layout_map=rules).batch_dim_name == ("data", "fsdp")
    assert kd.FullyShardedDataParallel(three, shard_axis=("b", "c")).batch_dim_name == ("b", "c")
    for arguments, values in [
        ({"device_mesh": three}, r"'a': 2, 'b': 2, 'c': 2.*3 are free"),
        ({"layout_map": rules, "shard_axis": "model"}, "'model'.*rule.*shard_axis='model'"),
        ({"layout_map": rules, "shard_axis": "fsdp", "replica_axis": "fsdp"}, "replica_axis='fsdp'"),
        ({"device_mesh": three, "shard_axis": "d"}, "shard_axis='d'"),
    ]:
        with pytest.raises(ValueError, match=values):
            kd.FullyShardedDataParallel(**arguments)


def test_the_state_of_a_random_generator_is_replicated():
    """JAX draws the same numbers on all devices only if all of them have the whole state."""
    mesh = kd.create_device_mesh("fsdp:2", devices=kd.list_devices()[:2])
    with kd.FullyShardedDataParallel(mesh, min_shard_bytes=0).scope():
        dropout, dense = layers.Dropout(0.5), layers.Dense(2)
        dense.build((None, 2))
        assert dropout.seed_generator.state.value.sharding.is_fully_replicated
        assert not dense.kernel.value.sharding.is_fully_replicated


def test_a_variable_that_is_sharded_over_the_axis_already_is_not_sharded_further():
    mesh = kd.create_device_mesh("fsdp:8")
    layout = kd.TensorLayout((None, "fsdp"), mesh)
    variable = keras.Variable(np.ones((8, 8), "float32"))
    assert shard_one_more_dim(layout, variable, ["fsdp"], mesh, min_shard_bytes=0) is layout


def test_zero_1_replicates_optimizer_state_of_small_weights():
    kernel = keras.Variable(np.ones((128, 128), "float32"))  # 64 KiB
    larger = keras.Variable(np.ones((128, 136), "float32"))
    distribution = kd.DataParallel(shard_optimizer_state=True)
    assert distribution.get_update_layout(kernel).axes == (None, None)
    assert distribution.get_update_layout(larger).axes == ("batch", None)


def test_weights_that_are_made_in_a_call_are_sharded_by_their_stored_bytes():
    """A layer is called under an autocast scope, where `dtype` of a float32 variable is bfloat16."""

    class Block(layers.Layer):
        def __init__(self):
            super().__init__(dtype="mixed_bfloat16")
            self.dense = layers.Dense(96, dtype="mixed_bfloat16")

        def build(self, shape):
            self.built = True

        def call(self, x):
            return self.dense(x)

    with kd.FullyShardedDataParallel().scope():
        inputs = keras.Input((256,))
        model = keras.Model(inputs, Block()(inputs))
        model.compile("sgd", "mse")
        model.fit(np.ones((8, 256)), np.ones((8, 96)), verbose=0)
    assert shard_shapes(model.weights)["block/dense/kernel"] == (32, 96)
