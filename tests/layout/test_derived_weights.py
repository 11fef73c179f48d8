"""LoRA factors, quantized weights and their scales have the layout of their weight."""

import keras
import numpy as np
import pytest
from keras import layers
from support.slow_cases import slow

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


@pytest.mark.slow
def test_training_with_lora_gives_the_numbers_of_one_device():
    x, y = np.arange(48).reshape(8, 6) % 64, np.ones((8, 6, 16))

    def losses():
        model = with_lora(build())
        model.compile("adam", "mse")
        return model.fit(x, y, epochs=3, verbose=0).history["loss"]

    alone = losses()
    with distribution().scope():
        np.testing.assert_allclose(losses(), alone, rtol=1e-5)


@pytest.mark.slow
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


KERNELS = {  # equation, shape of outputs, shape of inputs, rule
    "up": (None, 128, (32,), (None, "model")),
    "down": (None, 32, (128,), ("model", None)),
    "odd": (None, 12, (32,), (None, "model")),
    "query": ("bd,dnh->bnh", (4, 8), (32,), (None, "model", None)),
    "output": ("bnh,nhd->bd", (32,), (4, 8), ("model", None, None)),
    "heads_first": ("bd,ndh->bnh", (4, 8), (32,), ("model", "data", None)),
}
AXES = {  # of the kernel, the scale, the zero point and the groups of rows
    "int4": {
        "up": [(None, "model"), (None, "model"), (None, "model"), (None,)],
        "down": [("model", None), ("model", None), ("model", None), ("model",)],
        "odd": [(None, None), (None, "model"), (None, "model"), (None,)],  # 12 columns in 6 bytes
        "query": [(None, "model"), (None, "model"), (None, "model"), (None,)],
        "output": [("model", None), ("model", None), ("model", None), ("model",)],
        "heads_first": [(("model", "data"), None), ("model", None), ("model", None), (("model", "data"),)],
    },
    "gptq": {
        "up": [("model", None), ("model", None), ("model", None), (None,)],
        "down": [(None, "model"), (None, "model"), (None, "model"), ("model",)],
        "odd": [(None, None), ("model", None), ("model", None), (None,)],
        "query": [("model", None), ("model", None), ("model", None), (None,)],
        "output": [(None, "model"), (None, "model"), (None, "model"), ("model",)],
        "heads_first": [(None, ("model", "data"))] * 3 + [(("model", "data"),)],
    },
}
AXES["awq"] = {name: AXES["gptq"][name] for name in ("down", "odd", "output")}
CONFIGS = {
    "int4": keras.quantizers.Int4QuantizationConfig(block_size=8),
    "gptq": keras.quantizers.GPTQConfig(dataset=["x"], tokenizer=str.split, group_size=8),
    "awq": keras.quantizers.AWQConfig(dataset=["x"], tokenizer=str.split, group_size=8),
}


def quantized_kernels(mode):
    """Returns quantized layers and what they compute. GPTQ and AWQ are not calibrated: their values are drawn."""
    keras.utils.set_random_seed(0)
    generator, made, outputs = np.random.default_rng(0), [], []
    for name in AXES[mode]:
        equation, units, inputs, _ = KERNELS[name]
        layer = layers.EinsumDense(equation, units, name=name) if equation else layers.Dense(units, name=name)
        layer.build((None, *inputs))
        layer.quantize(mode, config=CONFIGS[mode])
        if mode != "int4":
            setattr(layer, f"is_{mode}_calibrated", True)
            for variable in (layer.quantized_kernel, layer.kernel_zero):
                variable.assign(generator.integers(0, 16, variable.shape))
            layer.kernel_scale.assign(generator.uniform(0.1, 1, layer.kernel_scale.shape))
            layer.g_idx.assign(np.arange(layer.g_idx.shape[0]) // 8)
        made.append(layer)
        outputs.append(np.asarray(layer(generator.normal(size=(8, *inputs)).astype("float32"))))
    return made, outputs


@pytest.mark.parametrize("mode", [slow("int4"), slow("gptq"), "awq"])
def test_a_rule_is_for_the_float_kernel(mode):
    rules = distribution({f"{name}/kernel": axes for name, (*_, axes) in KERNELS.items()})
    alone, expected = quantized_kernels(mode)
    with rules.scope():
        made, outputs = quantized_kernels(mode)
    for layer, before, one, other in zip(made, alone, outputs, expected, strict=True):
        kernel = layer._kernel if mode == "int4" else layer.quantized_kernel
        scale, zero, groups = layer.kernel_scale, layer.kernel_zero, layer.g_idx
        axes = [v._layout.axes for v in (kernel, scale, zero, groups)]
        assert (layer.name, axes) == (layer.name, AXES[mode][layer.name])
        if mode == "awq":
            assert layer.awq_scales._layout.axes == groups._layout.axes
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        kd.redistribute(before, rules)  # created while no distribution was active
        assert [v._layout.axes for v in before.weights] == [v._layout.axes for v in layer.weights]


def test_the_scale_of_an_int8_kernel_has_the_axes_of_its_dims():
    rules = {"query/kernel": ("model", None, None), "swapped/kernel": ("model", None)}
    with distribution(rules).scope():
        query = layers.EinsumDense("btd,ndh->btnh", (None, 4, 8), name="query")
        query.build((None, 6, 32))
        query.quantize("int8")
        swapped = layers.EinsumDense("bd,ed->be", 8, name="swapped")
        swapped.build((None, 16))
        swapped.quantize("int8")
    assert query.kernel_scale.shape == (1, 1, 4, 8)
    assert query.kernel_scale._layout.axes == (None, None, "model", None)
    assert swapped.kernel_scale.shape == (1, 8)
    assert swapped.kernel_scale._layout.axes == (None, "model")


def test_tables_of_int4_values():
    rules = {"tokens/embeddings": ("model", None), "tokens/reverse_embeddings": (None, "model")}
    with distribution(rules).scope():
        tokens = layers.ReversibleEmbedding(64, 16, tie_weights=False, name="tokens")
        tokens.build()
        tokens.quantize("int4", config=CONFIGS["int4"])
    axes = {v.name: (tuple(v.shape), v._layout.axes) for v in tokens.weights}
    assert axes == {
        "embeddings": ((64, 8), ("model", None)),
        "embeddings_scale": ((64, 2), ("model", None)),
        "embeddings_zero": ((64, 2), ("model", None)),
        "g_idx": ((16,), (None,)),
        "reverse_embeddings": ((8, 64), (None, "model")),
        "reverse_embeddings_scale": ((2, 64), (None, "model")),
        "reverse_embeddings_zero": ((2, 64), (None, "model")),
    }


def test_a_packed_dim_that_the_axis_does_not_divide_is_explained():
    with distribution({"odd/kernel": (None, "model")}).scope():
        model = keras.Sequential([keras.Input((32,)), layers.Dense(12, name="odd")])
        model.quantize("int4", filters="odd")
        coverage = kd.explain(model)
    why = {v.path.rpartition("/")[2]: v.why for v in coverage.variables}
    assert why["kernel"] == "rule 'odd/kernel'; not divisible by 'model'"
    assert why["kernel_scale"] == f"same as '{model.name}/odd/kernel'"
    assert not coverage.findings


def test_a_rule_that_does_not_fit_the_float_kernel_of_a_quantized_layer():
    layer = layers.Dense(10, dtype="int4_from_float32", name="odd")
    with distribution({"odd/kernel": (None, "model")}).scope(), pytest.raises(ValueError, match=r"\(32, 10\).*'model'"):
        layer.build((None, 32))


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
