"""Texts of `keras_dist/strategies`."""

import types
from unittest import mock

import jax
import keras
import numpy as np
import pytest
from support.strategy_models import MODELS, OwnStep

import keras_dist as kd
from keras_dist.passes.registry import PASSES
from keras_dist.steps.host_offload import require_host_memory


def mesh():
    return kd.create_device_mesh("data:2,model:4")


def rules(**axes):
    layout_map = kd.LayoutMap(mesh())
    for key, entries in axes.items():
        layout_map[key.replace("__", "/")] = entries
    return layout_map


def call_dense(layout_map, units=8, width=4, dtype="float32"):
    """Builds and calls a dense layer under some rules."""
    with kd.ModelParallel(layout_map=layout_map).scope():
        keras.layers.Dense(units, name="dense", dtype=dtype)(np.ones((8, width), "float32"))


def fit_without_sequences():
    with kd.DataParallel(mesh(), sequence_dim_name="model").scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)], name="regression")
        model.compile("sgd", "mse")
        model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)


def fit_experts(distribution, name="mixture"):
    build, x, y = MODELS[name]
    with distribution.scope():
        build().fit(x, y, verbose=0)


def experts_mesh():
    return kd.create_device_mesh("fsdp:2,expert:4")


def fit_with_the_class_of_a_callback():
    with kd.DataParallel().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0, callbacks=[kd.StepMonitor])


def fit_with_a_pass_that_fails():
    def sines(equation, program):
        """Replaces sines by a function that wants more operands."""
        return (lambda sine, x, y: sine(x)) if equation.primitive.name == "sin" else None

    with kd.DataParallel().scope(), mock.patch.dict(PASSES, sines=sines):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation=keras.ops.sin, name="wave")])
        model.compile("sgd", "mse")
        model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)


def with_processes(number, function):
    with mock.patch("keras_dist._keras.internals.backend_lib.num_processes", return_value=number):
        function()


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="subclassed")
        self.dense = keras.layers.Dense(4)

    def call(self, x):
        return self.dense(x)


def subclassed():
    model = Subclassed()
    model(np.ones((2, 8)))
    return model


class SevenRows(keras.Layer):
    def call(self, x):
        if x.shape[1] != 7:
            raise ValueError(f"Expected 7 rows, got {x.shape[1]}.")
        return x

    def compute_output_shape(self, shape):
        return shape


def seven_rows():
    inputs = keras.Input((None, 16), name="rows")
    return keras.Model(inputs, keras.layers.Dense(8)(SevenRows(name="seven_rows")(inputs)), name="picky")


def two_inputs():
    tokens, images = keras.Input((None,), name="tokens"), keras.Input((None, 8, 8, 3), name="images")
    return keras.Model([tokens, images], [tokens, images], name="two_inputs")


def odd():
    inputs = keras.Input((129,))
    return keras.Model(inputs, keras.layers.Dense(131, name="odd")(inputs))


def attention(platform="cpu", dtype="float32", distribution=None, heads=4, **options):
    """Calls attention under a distribution, on devices of a platform."""
    query = jax.ShapeDtypeStruct((8, 256, heads, 32), dtype)

    def call(tensor):
        return keras.ops.dot_product_attention(tensor, tensor, tensor, **options)

    with pytest.MonkeyPatch.context() as patch, (distribution or kd.DataParallel()).scope():
        patch.setattr("keras_dist.attention.attention.kernel_platform", lambda mesh: platform)
        patch.setattr("keras_dist.attention.attention._warned", set())
        return jax.eval_shape(call, query)


def context_parallel(**options):
    return kd.DataParallel(kd.create_device_mesh("data:2,context:4"), sequence_dim_name="context", **options)


class Paired(keras.Model):
    """A model with an input that has other rows than its targets."""

    def __init__(self, inputs, outputs, name):
        super().__init__(name=name)
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x[0]) + keras.ops.sum(x[1])


class Centered(keras.Model):
    """A model whose loss needs the outputs of all rows."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean((y - y_pred + keras.ops.mean(y_pred, axis=0)) ** 2)


def fit_scaled():
    with kd.DataParallel(step_options=kd.StepOptions(loss_chunk=2)).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
        model.compile("sgd", "mse")
        model.train_on_batch(np.ones((8, 4)), np.ones((8, 4)))


def fit_with(kind=keras.Model, more=None, **options):
    """Trains two dense layers on one batch with step options."""
    with kd.DataParallel(step_options=kd.StepOptions(**options)).scope():
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(8, name="hidden")(inputs)
        model = kind(inputs, keras.layers.Dense(2, name="head")(hidden), name="small")
        model.compile("sgd", "mse")
        x = np.ones((8, 4))
        model.train_on_batch(x if more is None else (x, more), np.ones((8, 2)))


def without_host_memory():
    """A mesh of devices that cannot use the memory of their host."""
    device = mock.Mock(device_kind="old chip", addressable_memories=lambda: [mock.Mock(kind="device")])
    return mock.Mock(backend_mesh=mock.Mock(devices=np.array([device])))


CASES = {
    "a misspelled step option": lambda: kd.StepOptions(microbatch=2),
    "a step option that there is not": lambda: kd.StepOptions(accumulate=2),
    "a misspelled argument of a constructor": lambda: kd.DataParallel(shard_optimiser_state=True),
    "a layout map that is not passed by name": lambda: kd.ModelParallel(rules()),
    "a mesh and a layout map that are not passed by name": lambda: kd.ModelParallel(mesh(), rules()),
    "a layout map as the second argument": lambda: kd.FullyShardedDataParallel(mesh(), rules()),
    "a layout map in place of a mesh": lambda: kd.FullyShardedDataParallel(rules()),
    "a model in place of a mesh": lambda: kd.FullyShardedDataParallel(keras.Sequential(name="gpt")),
    "devices in place of a mesh": lambda: kd.FullyShardedDataParallel(kd.mock_tpus("v5e:2x4")),
    "axes in place of a mesh": lambda: kd.DataParallel("data:8"),
    "the class of a distribution": lambda: kd.set_distribution(kd.DataParallel),
    "the class of a distribution with rules": lambda: kd.set_distribution(kd.ModelParallel),
    "a mesh as a distribution": lambda: kd.set_distribution(mesh()),
    "a layout map as a distribution": lambda: kd.set_distribution(rules()),
    "axes as a distribution": lambda: kd.set_distribution("data:8"),
    "a distribution of Keras": lambda: kd.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"])),
    "the choice of a distribution": lambda: kd.set_distribution(types.SimpleNamespace(distribution=kd.DataParallel())),
    "the class of a callback": fit_with_the_class_of_a_callback,
    "a set_distribution of nothing": lambda: kd.set_distribution(),
    "no microbatches": lambda: kd.StepOptions(microbatches=0),
    "an unknown frequency": lambda: kd.StepOptions(reduce_gradients="epoch"),
    "reduction in a dtype that is no float": lambda: kd.StepOptions(reduce_dtype="int8"),
    "reduction in a dtype in each microbatch": lambda: kd.StepOptions(
        reduce_dtype="bfloat16", reduce_gradients="microbatch"
    ),
    "optimizer state in a dtype that is no float": lambda: kd.StepOptions(optimizer_state_dtype="int8"),
    "optimizer state in a dtype that the optimizer does not have": lambda: fit_with(optimizer_state_dtype="bfloat16"),
    "an unknown rematerialization": lambda: kd.StepOptions(remat="half"),
    "an unknown kind of offloading": lambda: kd.StepOptions(offload="weights"),
    "offloaded activations without dots": lambda: kd.StepOptions(offload="activations"),
    "offloading on devices without such memory": lambda: require_host_memory(without_host_memory()),
    "a capacity of experts below 1": lambda: kd.StepOptions(expert_capacity=0.5),
    "a capacity of experts that are computed as written": lambda: kd.StepOptions(experts="dense", expert_capacity=1.5),
    "a capacity of experts for a model without them": lambda: fit_with(expert_capacity=1.5),
    "a chunk of a loss that is no positive integer": lambda: kd.StepOptions(loss_chunk=0),
    "chunks of a loss that compares the rows of a batch": lambda: fit_with(Centered, loss_chunk=2),
    "chunks of a loss of a model without products": fit_scaled,
    "chunks of a loss whose step computes its own gradients": lambda: fit_with(OwnStep, loss_chunk=2),
    "an unknown pass": lambda: kd.StepOptions(without_passes="window"),
    "a pass that fails": fit_with_a_pass_that_fails,
    "something else as rematerialization": lambda: kd.StepOptions(remat=True),
    "something else as step options": lambda: kd.DataParallel(step_options={"microbatches": 4}),
    "microbatches of arrays with other numbers of rows": lambda: fit_with(Paired, np.ones((5, 4)), microbatches=2),
    "a train step that computes its own gradients": lambda: fit_with(OwnStep, microbatches=2),
    "rematerialization of a model without blocks": lambda: fit_with(remat="full"),
    "rematerialization of a model without attention": lambda: fit_with(remat="attention"),
    "rematerialization of layers that do not exist": lambda: fit_with(
        remat=keras.RematScope("list_of_layers", layer_names=["hiden"])
    ),
    "an exchange that devices do not divide": lambda: attention(
        distribution=context_parallel(sequence_exchange="all_to_all"), heads=6
    ),
    "an unknown exchange": lambda: context_parallel(sequence_exchange="ring"),
    "an exchange without sequences": lambda: kd.DataParallel(sequence_exchange="all_to_all"),
    "a fused attention kernel that CPUs do not have": lambda: attention(flash_attention=True),
    "a fused attention kernel for another dtype": lambda: attention("tpu", "float16", flash_attention=True),
    "attention by XLA on GPUs before Ampere": lambda: attention("gpu", "bfloat16"),
    "attention by XLA on TPUs, for its dtype": lambda: attention("tpu", "float16"),
    "attention by XLA on TPUs, for its bias": lambda: attention("tpu", bias=jax.numpy.ones((1, 4, 256, 256))),
    "attention by XLA on TPUs, for its mask": lambda: attention(
        "tpu", mask=np.random.default_rng(0).random((256, 256)) > 0.5
    ),
    "a batch axis that the mesh lacks": lambda: kd.ModelParallel(layout_map=rules(), batch_dim_name="batch"),
    "data parallel with a mesh and devices": lambda: kd.DataParallel(mesh(), devices=["cpu:0"]),
    "data parallel with a number of devices": lambda: kd.DataParallel(devices=8),
    "data parallel without devices": lambda: kd.DataParallel(devices=[]),
    "data parallel on a mesh of two axes": lambda: kd.DataParallel(mesh()),
    "data parallel on something else": lambda: kd.DataParallel("mesh"),
    "model parallel without a layout map": lambda: kd.ModelParallel(),
    "model parallel with something else as layout map": lambda: kd.ModelParallel(
        layout_map={"kernel": (None, "model")}
    ),
    "model parallel with a layout map of another mesh": lambda: kd.ModelParallel(
        layout_map=rules(), device_mesh=kd.create_device_mesh("data:8")
    ),
    "processes that cannot share the batch": lambda: with_processes(3, lambda: kd.ModelParallel(layout_map=rules())),
    "FSDP with rules for all axes": lambda: kd.FullyShardedDataParallel(layout_map=rules(kernel=("data", "model"))),
    "FSDP on a mesh of three axes": lambda: kd.FullyShardedDataParallel(kd.create_device_mesh("a:2,b:2,c:2")),
    "FSDP over an axis that a rule uses": lambda: kd.FullyShardedDataParallel(
        layout_map=rules(kernel=(None, "model")), shard_axis="model"
    ),
    "FSDP over an axis that the mesh lacks": lambda: kd.FullyShardedDataParallel(mesh(), shard_axis="fsdp"),
    "FSDP with one axis for shards and replicas": lambda: kd.FullyShardedDataParallel(
        mesh(), shard_axis="data", replica_axis="data"
    ),
    "a weight that its rule does not fit": lambda: call_dense(rules(dense__kernel=(None, "model")), units=6),
    "an int4 kernel whose rule does not fit the float kernel": lambda: call_dense(
        rules(dense__kernel=(None, "model")), units=10, dtype="int4_from_float32"
    ),
    "a weight with fewer dims than its rule": lambda: call_dense(rules(dense__kernel=(None, None, "model"))),
    "an input that its rule does not fit": lambda: call_dense(rules(dense__input=("data", "model")), width=3),
    "an output that its rule does not fit": lambda: call_dense(rules(dense__output=("data", "model")), units=6),
    "an output with fewer dims than its rule": lambda: call_dense(rules(dense__output=("data", None, "model"))),
    "a tensor that the layout does not fit": lambda: kd.distribute_tensor(
        np.ones((6, 6)), kd.TensorLayout((None, "model"), mesh())
    ),
    "axes for a tensor without a distribution": lambda: kd.distribute_tensor(np.ones((8, 8)), (None, "model")),
    "something else installed as a distribution": lambda: kd.set_distribution("data parallel"),
    "a tensor parallel map over an axis that the mesh lacks": lambda: kd.tensor_parallel_layout_map(
        odd, mesh(), axis="tensor"
    ),
    "a tensor parallel map with one axis for weights and sequences": lambda: kd.tensor_parallel_layout_map(
        odd, mesh(), sequence_dim_name="model"
    ),
    "a sequence axis that the mesh lacks": lambda: kd.ModelParallel(layout_map=rules(), sequence_dim_name="context"),
    "a sequence axis that shards the batch": lambda: kd.ModelParallel(
        layout_map=rules(), batch_dim_name="data", sequence_dim_name=("model", "data")
    ),
    "a batch without sequences": fit_without_sequences,
    "a rule that shards the batch over the sequence axis": lambda: kd.ModelParallel(
        layout_map=rules(dense__output=("data", None)), batch_dim_name="model", sequence_dim_name="data"
    ),
    "a rule that shards a weight over the sequence axis": lambda: kd.ModelParallel(
        layout_map=rules(dense__kernel=(None, "model")), batch_dim_name="data", sequence_dim_name="model"
    ),
    "an expert axis that the mesh lacks": lambda: kd.FullyShardedDataParallel(mesh(), expert_dim_name="expert"),
    "an expert axis that FSDP does not shard over": lambda: kd.FullyShardedDataParallel(
        experts_mesh(), shard_axis="fsdp", expert_dim_name="expert"
    ),
    "a rule that shards another dim over the expert axis": lambda: kd.ModelParallel(
        layout_map=rules(dense__kernel=(None, "model")), batch_dim_name="data", expert_dim_name="model"
    ),
    "an expert axis that does not divide the experts": lambda: fit_experts(
        kd.FullyShardedDataParallel(kd.create_device_mesh("fsdp:6", devices=6), expert_dim_name="fsdp")
    ),
    "an expert axis for a model without experts": lambda: fit_experts(
        kd.FullyShardedDataParallel(experts_mesh(), expert_dim_name="expert"), "convnet"
    ),
    "an expert axis without rules": lambda: fit_experts(
        kd.ModelParallel(layout_map=kd.LayoutMap(experts_mesh()), expert_dim_name="expert")
    ),
    "a tensor parallel map of a model that is not built": lambda: kd.tensor_parallel_layout_map(
        keras.Sequential([keras.layers.Dense(4)]), mesh()
    ),
    "a tensor parallel map of something else": lambda: kd.tensor_parallel_layout_map(3, mesh()),
    "a tensor parallel map of a subclassed model": lambda: kd.tensor_parallel_layout_map(subclassed(), mesh()),
    "a tensor parallel map of a model that cannot be traced": lambda: kd.tensor_parallel_layout_map(
        seven_rows(), mesh()
    ),
    "a tensor parallel map of a model that does not take the batch": lambda: kd.tensor_parallel_layout_map(
        seven_rows(), mesh(), batch=(2, 9, 16)
    ),
    "a tensor parallel map with a number of rows": lambda: kd.tensor_parallel_layout_map(
        seven_rows(), mesh(), batch=64
    ),
    "a tensor parallel map with a batch that lacks an input": lambda: kd.tensor_parallel_layout_map(
        two_inputs(), mesh(), batch={"tokens": (2, 128)}
    ),
    "a tensor parallel map with large replicas": lambda: kd.tensor_parallel_layout_map(odd, mesh()),
}
