"""Convolutions that XLA's partitioner computes with wrong numbers have those of one device."""

from typing import Any

import jax
import keras
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from keras import layers, ops
from support.keras_scenarios import start_anew
from support.slow_cases import slow, slow_unless
from support.strategy_models import assert_same_numbers, scope

import keras_dist as kd

CHANNELS = 8
CONVOLUTIONS = {
    "depthwise": lambda: layers.DepthwiseConv1D(3, padding="same"),
    "groups": lambda: layers.Conv1D(16, 3, groups=4),
    "separable": lambda: layers.SeparableConv1D(6, 3, depth_multiplier=2, padding="same"),
    "strided": lambda: layers.Conv1D(16, 4, strides=4),
    "causal": lambda: layers.Conv1D(6, 3, padding="causal"),
    "dilated": lambda: layers.Conv1D(6, 3, dilation_rate=2, padding="same"),
    "transposed": lambda: layers.Conv1DTranspose(6, 4, strides=2, padding="same"),
}


def gradients(convolution, distribution, length=9):
    """Returns predictions, and what a step of gradient descent adds to each weight."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(6, length, CHANNELS)).astype("float32"), random.normal(size=(6, 3))
    start_anew()
    with scope(distribution):
        model = keras.Sequential(
            [
                keras.Input((length, CHANNELS)),
                layers.Dense(CHANNELS),
                CONVOLUTIONS[convolution](),
                layers.MaxPooling1D(2, padding="same"),
                layers.GlobalAveragePooling1D(),
                layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.SGD(1.0), "mse")
        before, predicted = model.get_weights(), model.predict_on_batch(x)
        model.train_on_batch(x, y)
        return predicted, [new - old for new, old in zip(model.get_weights(), before, strict=True)]


def tensor_parallel(rule, **options):
    layout_map = kd.LayoutMap(kd.DeviceMesh((2, 4), ["data", "model"]))
    layout_map[".*conv.*/kernel"] = rule
    step_options = kd.StepOptions(**options)
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", step_options=step_options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("convolution", "rule"),
    [
        ("depthwise", None),
        ("depthwise", (None, "model", None)),
        ("groups", (None, None, "model")),
        ("separable", None),
        ("groups", None),
    ],
)
def test_groups_of_channels_where_an_axis_repeats_rows(convolution, rule):
    """XLA's gradient of such a kernel is larger by the size of the axis."""
    distribution = tensor_parallel(rule or ())
    assert_same_numbers(gradients(convolution, distribution), gradients(convolution, None), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("convolution", "rule"),
    [("groups", (None, None, "model")), ("depthwise", (None, "model", None)), ("groups", ())],
)
def test_groups_of_channels_in_microbatches(convolution, rule):
    """XLA ends the process for the gradient of such a kernel in a `jax.shard_map` over rows."""
    distribution = tensor_parallel(rule, microbatches=2)
    assert_same_numbers(gradients(convolution, distribution), gradients(convolution, None), 1e-5)


@pytest.mark.parametrize(
    "convolution",
    [slow_unless(name in ("strided", "depthwise"), name) for name in CONVOLUTIONS],
)
@pytest.mark.parametrize("length", [9, slow(16)])
def test_convolutions_of_sharded_sequences(convolution, length):
    mesh = kd.DeviceMesh((2, 4), ["data", "context"])
    distribution = kd.FullyShardedDataParallel(mesh, min_shard_bytes=0, sequence_dim_name="context")
    expected = gradients(convolution, None, length)
    assert_same_numbers(gradients(convolution, distribution, length), expected, 1e-5)


def test_strided_convolutions_of_microbatches_whose_window_is_sharded():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(13, 64, 1)).astype("float32"), random.normal(size=(13, 4))

    def losses(distribution):
        start_anew()
        with scope(distribution):
            convolution = layers.Conv1D(8, 16, strides=8, name="convolution")
            model = keras.Sequential([keras.Input((64, 1)), convolution, layers.Flatten(), layers.Dense(4)])
            model.compile("sgd", "mse")
            return model.fit(x, y, batch_size=13, epochs=2, verbose=0).history

    layout_map = kd.LayoutMap(kd.create_device_mesh("data:4,model:2"))
    layout_map["convolution/kernel"] = ("model", None, None)
    options = kd.StepOptions(microbatches=2)
    sharded = kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", step_options=options)
    assert_same_numbers(losses(sharded), losses(None), 1e-5)


def test_filters_stay_sharded():
    """A kernel whose filters a rule shards is not gathered: each device computes its channels of the output."""
    distribution = tensor_parallel((None, None, "model"))
    mesh = distribution.device_mesh.backend_mesh
    images = jax.ShapeDtypeStruct((4, 8, CHANNELS), "float32", sharding=NamedSharding(mesh, PartitionSpec("data")))
    start_anew()
    with distribution.scope():
        layer = layers.Conv1D(16, 3, groups=4, name="conv", use_bias=False)
        layer.build((None, 8, CHANNELS))
        values = [variable.value for variable in layer.variables]

        def forward(values, images):
            return layer.stateless_call(values, [], images)[0]

        text = jax.jit(forward).lower(values, images).compile().as_text()
    assert "all-gather" not in text
    assert "f32[2,6,4]" in text  # half of the rows, a quarter of the channels


def test_eager_arrays_elsewhere_are_not_moved():
    with kd.DataParallel(kd.DeviceMesh((2, 4), ["data", "context"]), sequence_dim_name="context").scope():
        images = jax.device_put(np.ones((2, 8, 3), "float32"), jax.devices()[1])
        kernel = jax.device_put(np.ones((3, 3, 4), "float32"), jax.devices()[1])
        outputs: Any = ops.conv(images, kernel)
        assert outputs.devices() == {jax.devices()[1]}


def test_positions_are_sharded_again_after_a_convolution():
    """Each device computes its positions of the layers behind a convolution, not all of them."""
    start_anew()
    shapes = []
    with scope(kd.DataParallel(kd.DeviceMesh((2, 4), ["data", "context"]), sequence_dim_name="context")):
        inputs = keras.Input((16, CHANNELS))
        x = layers.Conv1D(CHANNELS, 3, padding="same", activation=seen_by(shapes))(inputs)
        model = keras.Model(inputs, layers.Dense(3)(x))
        model.predict_on_batch(np.ones((4, 16, CHANNELS), "float32"))
    assert shapes == [(2, 4, CHANNELS)]


def seen_by(shapes):
    """Returns an activation that notes the shape of shards."""

    def activation(x):
        if not isinstance(x, keras.KerasTensor):
            jax.debug.inspect_array_sharding(x, callback=lambda found: shapes.append(found.shard_shape(x.shape)))
        return ops.relu(x)

    return activation
