"""LoRA factors, quantized weights and their scales have the layout of their weight."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_dist as kd

RULES = {
    "embedding/embeddings": ("model", None),
    "attention/(query|key|value)/kernel": (None, "model", None),
    "attention/attention_output/kernel": ("model", None, None),
    "up/kernel": (None, "model"),
    "down/kernel": ("model", None),
}


def distribution(rules=RULES):
    layout_map = kd.LayoutMap(kd.create_device_mesh("data:2,model:4"))
    layout_map.update(rules)
    return kd.ModelParallel(layout_map=layout_map)


def build():
    keras.utils.set_random_seed(0)
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(64, 16, name="embedding")(tokens)
    x = layers.MultiHeadAttention(4, 8, use_bias=False, name="attention")(x, x)
    x = layers.Dense(32, use_bias=False, name="up")(x)
    return keras.Model(tokens, layers.Dense(16, use_bias=False, name="down")(x))


def axes_of(model):
    return {v.path: v._layout.axes for v in model.weights}


def with_lora(model):
    attention = model.get_layer("attention")
    for layer in ("embedding", "up", "down"):
        model.get_layer(layer).enable_lora(4)
    for layer in (attention.query_dense, attention.output_dense):
        layer.enable_lora(4)
    return model


def test_lora_factors_are_sharded_like_their_weight():
    with distribution().scope():
        axes = axes_of(with_lora(build()))
    assert axes["embedding/lora_embeddings_a"] == ("model", None)
    assert axes["embedding/lora_embeddings_b"] == (None, None)
    assert axes["attention/query/lora_kernel_a"] == (None, "model", None)
    assert axes["attention/query/lora_kernel_b"] == (None, None)
    assert axes["attention/attention_output/lora_kernel_a"] == ("model", None, None)
    assert axes["up/lora_kernel_a"] == (None, None)
    assert axes["up/lora_kernel_b"] == (None, "model")
    assert axes["down/lora_kernel_a"] == ("model", None)
    assert axes["down/lora_kernel_b"] == (None, None)


def test_a_rule_of_its_own_takes_precedence_for_a_lora_factor():
    broad = {"up/.*kernel.*": (None, "model"), "down/kernel": ("model", None), "down/lora_kernel_b": (None, "model")}
    with distribution(broad).scope():
        inputs = keras.Input((16,))
        up, down = layers.Dense(32, use_bias=False, name="up"), layers.Dense(16, name="down")
        model = keras.Model(inputs, down(up(inputs)))
        up.enable_lora(4)
        down.enable_lora(4)
        axes = axes_of(model)
    assert axes["up/lora_kernel_a"] == (None, None)  # whose last dim, the rank, is none of the kernel's
    assert axes["up/lora_kernel_b"] == (None, "model")
    assert axes["down/lora_kernel_b"] == (None, "model")


def test_training_with_lora_gives_the_numbers_of_one_device():
    x, y = np.arange(48).reshape(8, 6) % 64, np.ones((8, 6, 16))

    def losses():
        model = with_lora(build())
        model.compile("adam", "mse")
        return model.fit(x, y, epochs=3, verbose=0).history["loss"]

    alone = losses()
    with distribution().scope():
        np.testing.assert_allclose(losses(), alone, rtol=1e-5)


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
def test_quantized_weights_and_their_scales(mode):
    x = np.arange(48).reshape(8, 6) % 64
    alone = build()
    alone.quantize(mode)
    expected = alone.predict(x, verbose=0)
    with distribution().scope():
        model = build()
        model.quantize(mode)
        axes, shapes = axes_of(model), {v.path: v.shape for v in model.weights}
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-5)
    assert axes["embedding/embeddings"] == ("model", None)
    assert axes["embedding/embeddings_scale"][0] == "model"
    assert axes["up/kernel"] == (None, "model")
    assert axes["up/kernel_scale"][-1] == "model"
    assert axes["down/kernel"] == ("model", None)
    assert set(axes["down/kernel_scale"]) == {None}
    query = axes["attention/query/kernel_scale"]
    if mode == "int8":
        assert axes["attention/query/kernel"] == (None, "model", None)
        assert query == (None, None, "model", None)
    else:  # packed into rows and columns
        assert len(shapes["attention/query/kernel"]) == 2
        assert axes["attention/query/kernel"] == (None, "model")
        assert axes["attention/attention_output/kernel"] == ("model", None)
        assert query == (None, "model")


def test_explain_names_the_weight():
    with distribution().scope():
        coverage = kd.explain(with_lora(build()))
    rows = {v.path: v for v in coverage.variables}
    assert rows["down/lora_kernel_a"].why == "same as 'down/kernel'"
    assert rows["down/lora_kernel_a"].rule == "down/kernel"
    assert rows["down/lora_kernel_a"].shard_shape == (8, 4)
    assert not coverage.findings


def test_a_weight_that_only_has_such_a_name_has_a_rule_of_its_own():
    class Scaled(layers.Layer):
        def build(self, shape):
            self.logit_scale = self.add_weight(shape=(8,), name="logit_scale")

        def call(self, x):
            return x * self.logit_scale

    with distribution({"scaled/logit_scale": ("model",)}).scope():
        layer = Scaled(name="scaled")
        layer.build((None, 8))
    assert layer.logit_scale._layout.axes == ("model",)
