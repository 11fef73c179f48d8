"""The FLOP that a model requires."""

import jax
import keras
import pytest
from keras import layers
from support.planned_models import LAYOUTS

import keras_dist as kd
from keras_dist.planning.costs.model_flops import count_model_flops


def flops_of(function, *shapes):
    return count_model_flops(
        jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]).jaxpr
    )


def test_flop_of_matrix_multiplications_convolutions_loops_and_branches():
    conv = jax.lax.conv_general_dilated
    layout = ("NHWC", "HWIO", "NHWC")
    assert flops_of(lambda a, b: a @ b, (3, 5), (5, 7)) == 2 * 3 * 5 * 7
    assert flops_of(lambda a, b: jax.numpy.einsum("bij,bjk->bik", a, b), (4, 3, 5), (4, 5, 7)) == 4 * 2 * 3 * 5 * 7
    plain = flops_of(lambda x, w: conv(x, w, (1, 1), "SAME", dimension_numbers=layout), (2, 8, 8, 3), (3, 3, 3, 16))
    assert plain == 2 * (2 * 22 * 22) * 16 * 3  # along each dim 22 of 8 * 3 products, the others are with padding
    grouped = flops_of(
        lambda x, w: conv(x, w, (2, 2), "SAME", dimension_numbers=layout, feature_group_count=4),
        (2, 8, 8, 8),
        (3, 3, 2, 16),
    )
    assert grouped == 2 * (2 * 11 * 11) * 16 * 2
    by_channel = flops_of(
        lambda x, g: conv(x, g, (1, 1), "VALID", dimension_numbers=("NHWC", "IHWO", "HWNC"), batch_group_count=32),
        (32, 10, 10, 2),
        (2, 8, 8, 32),
    )
    assert by_channel == 2 * (3 * 3 * 32) * 2 * 8 * 8  # the gradient of a depthwise kernel, of 2 images
    loop = flops_of(lambda a: jax.lax.scan(lambda c, _: (c @ c, None), a, length=6)[0], (4, 4))
    assert loop == 6 * 2 * 64
    loop = flops_of(lambda a, b: jax.lax.scan(lambda c, _: (b @ c @ c, None), a, length=6)[0], (4, 4), (4, 4))
    assert loop == 6 * 2 * 2 * 64
    branches = flops_of(lambda a: jax.lax.cond(a[0, 0] > 0, lambda: a @ a, lambda: a), (4, 4))
    assert branches == 2 * 64


def test_backward_pass_has_twice_the_flop_of_the_forward_pass():
    def loss(w, x):
        return (jax.numpy.tanh(x @ w) @ w).sum()

    assert flops_of(jax.grad(loss, (0, 1)), (8, 8), (4, 8)) == pytest.approx(3 * 2 * 2 * 4 * 64, rel=0.2)
    forward = 2 * 16 * 8 * 8 * 9 * 4 * 4

    def conv(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME").sum()

    backward = flops_of(jax.grad(conv, (0, 1)), (16, 4, 8, 8), (4, 4, 3, 3))
    assert backward == pytest.approx(2 * forward, rel=0.6)


class Pair(layers.Layer):
    """Two dense layers; rematerialization computes the first one twice."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.up, self.down = layers.Dense(64), layers.Dense(16)

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 64))

    def call(self, x):
        return self.down(keras.ops.gelu(self.up(x)))


def test_recomputation_does_not_count_as_model_flop():
    def build(recomputed):
        with keras.RematScope("list_of_layers", layer_names=recomputed):
            pairs = [Pair(name=f"pair{number}") for number in range(3)]
            model = keras.Sequential([keras.Input((16,)), *pairs])
        model.compile("sgd", "mse")
        return model

    plain = kd.plan(lambda: build([]), LAYOUTS["data parallel"](), 16)
    recomputing = kd.plan(lambda: build(["pair0", "pair1", "pair2"]), LAYOUTS["data parallel"](), 16)
    assert recomputing.model_flops == plain.model_flops == 2 * 16 * (16 * 64) * 2 * 9 - 2 * 16 * 16 * 64


def test_gradients_of_frozen_weights_are_not_counted():
    def build():
        with keras.RematScope("list_of_layers", layer_names=["a", "b"]):
            model = keras.Sequential(
                [
                    keras.Input((64,)),
                    *(layers.Dense(64, use_bias=False, trainable=False, name=name) for name in "ab"),
                    layers.Dense(64, use_bias=False, name="head"),
                ]
            )
        model.compile("sgd", "mse")
        return model

    planned = kd.plan(build, LAYOUTS["data parallel"](), 16)
    assert planned.model_flops == 2 * 16 * 64 * 64 * 4  # three forward passes, and the gradient of the head


def test_loops_of_unknown_length_count_as_executed():
    class Loops(layers.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(16, 16), name="w")

        def call(self, x):
            return keras.ops.while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, keras.ops.tanh(x @ self.w)), (0, x))[1]

    def build():
        model = keras.Sequential([keras.Input((16,)), Loops()])
        model.compile("sgd", "mse")
        return model

    planned = kd.plan(build, LAYOUTS["data parallel"](), 16, step="predict")
    assert planned.model_flops == 5 * 2 * 16 * 16 * 16
    assert any("loops" in note for note in planned.notes)


def test_work_that_devices_repeat_counts_once():
    """Devices that share a sequence gather it, and each computes all of a convolution."""

    def build():
        convolutions = [layers.Conv1D(8, 3, 2, padding="same"), layers.DepthwiseConv1D(3, padding="same")]
        model = keras.Sequential([keras.Input((32, 4)), *convolutions, layers.Dense(4)])
        model.compile("sgd", "mse")
        return model

    batch = jax.ShapeDtypeStruct((16, 32, 4), "float32"), jax.ShapeDtypeStruct((16, 16, 4), "float32")
    mesh = kd.create_device_mesh("data:2,context:4")
    alone = kd.plan(build, kd.DataParallel(devices=jax.devices()[:1]), batch)
    shared = kd.plan(build, kd.DataParallel(mesh, sequence_dim_name="context"), batch)
    assert shared.model_flops == alone.model_flops
    assert shared.flops > alone.flops / 8
