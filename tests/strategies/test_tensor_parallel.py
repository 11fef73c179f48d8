"""Rules for tensor parallelism that a model's program gives: which axes, whatever the names, and what they match."""

import random
import re
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops
from support.strategy_models import LENGTH, WIDTH, Experts, block, convnet, transformer

import keras_dist as kd

COLUMNS, ROWS, WHOLE = (None, "model"), ("model", None), (None, None)


def rules_for(build, parts=2, sequence_parallel=False):
    """The rules over an axis of so many parts."""
    mesh = kd.create_device_mesh(f"data:{8 // parts},model:{parts}")
    return kd.tensor_parallel_layout_map(build, mesh, "model", sequence_parallel)


def axes_of(build, parts=2):
    """The axes of each weight of a model by its path, () where no rule matches."""
    layout_map = rules_for(build, parts)
    return {v.path: () if (layout := layout_map[v.path]) is None else layout.axes for v in build().weights}


def kernels(build, parts=2):
    """The axes of the kernels by the names of their layers, in the order of the model."""
    found = axes_of(build, parts)
    return {path.split("/")[-2]: axes for path, axes in found.items() if path.endswith("kernel")}


def sequence(call):
    """A function that makes a functional model of sequences of vectors."""

    def build():
        inputs = keras.Input((LENGTH, WIDTH))
        return keras.Model(inputs, call(inputs), name="model")

    return build


def attention(make):
    """One attention with a residual and a norm, between dense layers."""
    return sequence(
        lambda x: layers.LayerNormalization(name="norm")(
            (y := layers.Dense(WIDTH, name="before")(x)) + make(name="attention")(y, y)
        )
    )


class TestKnownModels:
    def test_multi_head_attention(self):
        found = axes_of(attention(lambda name: layers.MultiHeadAttention(4, 4, name=name)))
        for part in ("query", "key", "value"):
            assert found[f"attention/{part}/kernel"] == (None, "model", None)
            assert found[f"attention/{part}/bias"] == ("model", None)
        assert found["attention/attention_output/kernel"] == ("model", None, None)
        assert not any(found["attention/attention_output/bias"])
        assert not any(found["norm/gamma"])

    @pytest.mark.parametrize(("heads", "axes"), [(2, (None, "model", None)), (1, (None, None, None))])
    def test_grouped_query_attention(self, heads, axes):
        """Heads of keys and values that the axis does not divide stay whole; those of queries do not care."""
        found = axes_of(attention(lambda name: layers.GroupQueryAttention(4, 4, heads, name=name)))
        assert found["attention/query/kernel"] == (None, "model", None)
        assert found["attention/key/kernel"] == found["attention/value/kernel"] == axes
        assert found["attention/attention_output/kernel"] == ("model", None, None)

    def test_gated_perceptron(self):
        def gated(x):
            gate = layers.Dense(64, activation="silu", name="gate")(x)
            up = layers.Dense(64, name="up")(x)
            return x + layers.Dense(WIDTH, name="down")(gate * up)

        assert kernels(sequence(gated)) == {"gate": COLUMNS, "up": COLUMNS, "down": ROWS}

    def test_einsum_dense(self):
        def projected(x):
            wide = layers.EinsumDense("btd,dnh->btnh", (LENGTH, 8, 4), bias_axes="nh", name="apart")(x)
            return x + layers.EinsumDense("btnh,nhd->btd", (LENGTH, WIDTH), name="together")(ops.tanh(wide))

        found = kernels(sequence(projected))
        assert found == {"apart": (None, "model", None), "together": ("model", None, None)}

    def test_tied_embedding(self):
        def build():
            tokens = keras.Input((LENGTH,), dtype="int32")
            embedding = layers.ReversibleEmbedding(32, WIDTH, name="embedding")
            x = block(embedding(tokens))
            return keras.Model(tokens, embedding(x, reverse=True))

        assert axes_of(build)["embedding/embeddings"] == ROWS  # the vocabulary

    def test_convolutions_with_a_residual(self):
        found = kernels(convnet)
        assert found["wide"] == (None, None, None, "model")
        assert found["narrow"] == (None, None, "model", None)
        found = axes_of(convnet)
        assert found["wide_norm/gamma"] == found["wide_norm/moving_mean"] == ("model",)
        assert not any(found["narrow_norm/gamma"])

    def test_channels_go_through_pooling(self):
        def build():
            inputs = keras.Input((8, 8, 3))
            x = layers.MaxPooling2D(2)(layers.Conv2D(32, 3, padding="same", name="wide")(inputs))
            x = layers.Conv2D(8, 3, padding="same", name="narrow")(layers.AveragePooling2D(2)(x))
            return keras.Model(inputs, layers.Flatten()(x))

        assert kernels(build) == {"wide": (None, None, None, "model"), "narrow": (None, None, "model", None)}

    def test_mixture_of_experts(self):
        """Whole experts, and not a part of each."""
        found = axes_of(sequence(lambda x: x + Experts(8, 32, name="experts")(x)), parts=4)
        assert found["experts/up"] == found["experts/down"] == ("model", None, None)
        assert found["experts/router"] in ((), WHOLE)

    def test_experts_that_the_axis_does_not_divide(self):
        found = axes_of(sequence(lambda x: x + Experts(6, 32, name="experts")(x)), parts=4)
        assert found["experts/up"] == (None, None, "model")
        assert found["experts/down"] == (None, "model", None)


def renamed(build, seed):
    """The model with layers of random names, and its new names by the old ones."""
    model, letters = build(), random.Random(seed)
    names = {layer.name: "".join(letters.choices("abcdefgh", k=12)) for layer in model.layers}

    def clone(layer):
        return type(layer).from_config(layer.get_config() | {"name": names[layer.name]})

    return lambda: keras.models.clone_model(model, clone_function=clone), names


@pytest.mark.parametrize("build", [transformer, convnet])
def test_names_play_no_part(build):
    named, (other, names) = axes_of(build), renamed(build, seed=1)
    found = axes_of(other)
    assert found == {path.replace(first := path.split("/")[0], names[first], 1): axes for path, axes in named.items()}
    assert any(any(axes) for axes in named.values())


class TestPatterns:
    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_each_path_is_matched_by_one_rule_and_each_rule_matches_one(self, sequence_parallel):
        def build():
            tokens = keras.Input((LENGTH,), dtype="int32")
            x = layers.Embedding(32, WIDTH, name="table.1")(tokens)  # a name with what means more in a regex
            for number in range(11):
                x = block(x, f"block{number}")
            return keras.Model(tokens, layers.Dense(32, name="block+(1)")(x))

        layout_map, model = rules_for(build, sequence_parallel=sequence_parallel), build()
        wanted = {path: axes for path, axes in axes_of(build).items() if axes}
        for pattern, layout in layout_map.items():
            matched = [path for path in wanted if re.fullmatch(pattern, path)]
            if not pattern.endswith(("/input", "/output")):
                assert matched
            assert {wanted[path] for path in matched} <= {layout.axes}
        assert len([p for p in layout_map if "block[0-9]+_up/kernel" in p]) == 1
        assert len(layout_map) < 60
        with kd.ModelParallel(layout_map=layout_map).scope(), warnings.catch_warnings():
            warnings.simplefilter("error", kd.LayoutMapWarning)
            kept = build()
            kept.compile("sgd", "mse")
        assert [v.path for v in kept.weights] == [v.path for v in model.weights]

    def test_layers_that_differ_by_number_and_lie_otherwise_have_rules_of_their_own(self):
        def build():
            x = inputs = keras.Input((WIDTH,))
            for number, units in enumerate((64, WIDTH, 64, WIDTH)):
                x = layers.Dense(units, activation="relu", name=f"dense_{number}")(x)
            return keras.Model(inputs, x)

        assert list(kernels(build).values()) == [COLUMNS, ROWS, COLUMNS, ROWS]

    def test_names_that_keras_gives_are_left_out(self):
        def build():
            return keras.Sequential([keras.Input((WIDTH,)), layers.Dense(64, name="up"), layers.Dense(8, name="down")])

        assert list(rules_for(build)) == ["up/kernel", "up/bias", "down/kernel"]

    def test_the_source_of_a_map_makes_it_again(self):
        layout_map = rules_for(transformer)
        names = {"kd": kd, "keras_dist": kd, "device_mesh": layout_map.device_mesh, **vars(kd)}
        exec(source := layout_map.to_source(), names)
        assert layout_map in [each for each in names.values() if isinstance(each, kd.LayoutMap)], source


class TestSequenceParallel:
    def test_between_the_layers_the_sequence_is_sharded(self):
        found = {name: layout.axes for name, layout in rules_for(transformer, sequence_parallel=True).items()}
        for name in ("block_norm[0-9]+", "block_add[0-9]+", "block_down", "block_attention/attention_output", "norm"):
            assert found[f"{name}/output"] == ("data", "model", None), name
        for name in ("block_up", "block_attention/query", "head"):
            assert found[f"{name}/input"] == ("data", None, None), name
        assert found["block_up/output"] == found["block_down/input"] == ("data", None, "model")
        assert found["block_attention/query/output"] == ("data", None, "model", None)

    def test_without_it_no_activation_has_a_rule(self):
        assert not [name for name in rules_for(transformer) if name.endswith(("/input", "/output"))]

    def test_a_sequence_that_the_axis_does_not_divide_stays_whole(self):
        def build():
            inputs = keras.Input((7, WIDTH))
            return keras.Model(inputs, layers.Dense(WIDTH, name="down")(layers.Dense(64, name="up")(inputs)))

        found = {name: layout.axes for name, layout in rules_for(build, sequence_parallel=True).items()}
        assert found["down/output"] == ("data", None, None)
        assert found["up/output"] == ("data", None, "model")

    def test_what_windows_slide_over_stays_whole(self):
        """XLA computes such convolutions wrongly where the batch is not sharded, too."""
        found = rules_for(convnet, sequence_parallel=True)
        assert not [name for name, layout in found.items() if "model" in layout.axes[1:2] and name.endswith("put")]

        def patches():
            inputs = keras.Input((16, 16, 3))
            x = layers.Reshape((16, WIDTH), name="flat")(layers.Conv2D(WIDTH, 4, strides=4, name="patch")(inputs))
            return keras.Model(inputs, block(x))

        found = {name: layout.axes for name, layout in rules_for(patches, sequence_parallel=True).items()}
        assert found["patch/output"] == ("data", None, None, None)
        assert found["flat/output"] == ("data", "model", None)


class TestMessages:
    def test_large_weights_that_stay_whole_are_named(self):
        def build():
            inputs = keras.Input((129,))
            return keras.Model(inputs, layers.Dense(131, name="odd")(inputs))

        with pytest.warns(UserWarning, match=r"1 weights.*stay whole.*'model' \(size 2\).*odd/kernel \(129, 131\)"):
            rules_for(build)

    def test_small_ones_are_not(self, recwarn):
        rules_for(lambda: keras.Sequential([keras.Input((7,)), layers.Dense(5)]))
        assert not [each for each in recwarn if "stay whole" in str(each.message)]

    @pytest.mark.parametrize(
        ("what", "axis", "error", "says"),
        [
            (transformer, "tensor", ValueError, r"axis='tensor'.*\['data', 'model'\]"),
            (keras.Sequential([layers.Dense(4)]), "model", ValueError, "not built"),
            (3, "model", TypeError, "Received: 3"),
            (lambda: 3, "model", TypeError, "returns a model. Received: 3"),
        ],
    )
    def test_what_is_refused(self, what, axis, error, says):
        with pytest.raises(error, match=says):
            kd.tensor_parallel_layout_map(what, kd.create_device_mesh("data:4,model:2"), axis)

    def test_a_subclassed_model_does_not_know_its_inputs(self):
        class Own(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = layers.Dense(4)

            def call(self, x):
                return self.dense(x)

        model = Own()
        model(np.ones((2, 8)))
        with pytest.raises(ValueError, match=r"the inputs are known.*Pass keras.Model\(inputs, model\(inputs\)\)"):
            rules_for(lambda: model)
        inputs = keras.Input((8,))
        assert any(any(axes) for axes in axes_of(lambda: keras.Model(inputs, model(inputs))).values())

    def test_nothing_is_left_behind(self):
        rules_for(lambda: keras.Sequential([keras.Input((8,)), layers.Dense(16), layers.Dense(8)]))
        assert kd.distribution() is None
        assert layers.Dense(1).name == "dense"
