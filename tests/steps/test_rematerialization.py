"""Rematerialization: `keras.RematScope` under a distribution, and the option `remat` for any model.

Layers branch on `training`, and have random state, averages and losses.
"""

import functools
import gc
import weakref

import jax
import keras
import numpy as np
import pytest
from keras import layers
from support.expert_layers import ThreeOperands
from support.keras_scenarios import OLDER_KERAS
from support.slow_cases import slow, slow_unless
from support.strategy_models import OwnStep, assert_same_numbers, scope

import keras_dist as kd
from keras_dist._keras import internals
from keras_dist.steps.repeated_blocks import RepeatedBlocks


class Block(keras.Layer):
    def __init__(self, heads=4, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(heads, 4)
        self.dense = layers.Dense(16, kernel_regularizer="l2", activity_regularizer="l2")
        self.dropout, self.norm = layers.Dropout(0.2, seed=1), layers.BatchNormalization()

    def build(self, shape):
        self.attention.build(shape, shape)
        self.dense.build(shape)
        self.norm.build(shape)

    def call(self, x, training=None):
        y = self.attention(x, x, use_causal_mask=True)
        y = self.dropout(self.dense(y), training=training) if training else self.dense(y)
        return self.norm(x + y, training=training)

    def compute_output_shape(self, shape):
        return shape


def losses_and_weights(scope):
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((20, 8, 16))
    with keras.RematScope(**scope):
        inputs = keras.Input((8, 16))
        outputs = Block(name="block1")(Block(name="block0")(inputs))
        model = keras.Model(inputs, layers.Dense(1)(outputs))
    model.compile("sgd", "mse")
    history = model.fit(x, x[..., :1], batch_size=10, epochs=2, verbose=0).history["loss"]
    return history, [np.asarray(weight.value) for weight in model.weights]


@pytest.mark.slow
@pytest.mark.parametrize("scope", [{"mode": "full"}, {"mode": "list_of_layers", "layer_names": ["block0", "block1"]}])
def test_numbers_are_those_without(scope):
    expected_losses, expected_weights = losses_and_weights({"mode": None})
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        losses, weights = losses_and_weights(scope)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for ours, theirs in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_less_memory_is_needed():
    def build(scope):
        with keras.RematScope(**scope):
            inputs = x = keras.Input((64, 256))
            for number in range(4):
                y = layers.Dense(1024, "gelu")(x)
                x = x + layers.Dense(256, name=f"down{number}")(layers.Dense(1024, "gelu")(y))
        block = keras.Model(inputs, x, name="block")
        with keras.RematScope(**scope):
            outputs = x = keras.Input((64, 256))
            x = block(x)
        model = keras.Model(outputs, layers.Dense(1)(x))
        model.compile("sgd", "mse")
        return model

    distribution = kd.FullyShardedDataParallel(min_shard_bytes=0)
    plans = [
        kd.plan(lambda scope=scope: build(scope), distribution, 64) for scope in ({"mode": None}, {"mode": "full"})
    ]
    assert plans[1].memory.temporaries < plans[0].memory.temporaries


# ----------------------------------------------------------------------------------------- the option of a distribution


def flat_blocks():
    """A functional graph of primitive layers, with masks, dropout, losses and averages in its blocks."""
    tokens = keras.Input((8,), dtype="int32")
    x = layers.Embedding(16, 16, mask_zero=True)(tokens)
    for number in range(3):
        y = layers.LayerNormalization(name=f"norm{number}")(x)
        y = layers.MultiHeadAttention(2, 8, dropout=0.1, seed=number, name=f"attention{number}")(y, y)
        x = layers.Add(name=f"add{number}")([x, y])
        y = layers.Dense(32, "gelu", kernel_regularizer="l2", activity_regularizer="l2", name=f"up{number}")(x)
        y = layers.BatchNormalization(name=f"average{number}")(layers.Dense(16, name=f"down{number}")(y))
        x = layers.Add(name=f"sum{number}")([x, y])
    model = keras.Model(tokens, layers.Dense(4, name="head")(x))
    return compiled(model)


def layers_as_blocks():
    inputs = x = keras.Input((8, 16))
    for number in range(3):
        x = Block(name=f"block{number}")(x)
    return compiled(keras.Model(inputs, layers.Dense(4)(x)))


def alternating():
    """Layers of one class whose weights have two shapes, as with local and global attention in turn."""
    inputs = x = keras.Input((8, 16))
    for number in range(7):
        x = Block(heads=2 if number % 3 == 2 else 4, name=f"block{number}")(x)
    return compiled(keras.Model(inputs, layers.Dense(4)(x)))


class CrossBlock(Block):
    """A block of a decoder, which also reads what an encoder returns."""

    def build(self, x_shape, memory_shape):
        super().build(x_shape)
        self.cross = layers.Dense(x_shape[-1], name="cross")
        self.cross.build(memory_shape)

    def call(self, x, memory, training=None):
        return super().call(x + self.cross(memory), training=training)

    def compute_output_shape(self, x_shape, memory_shape):
        return x_shape


def decoder():
    """Layers that are not connected by a single tensor: each has the output of the encoder as its second input."""
    inputs = keras.Input((8, 16))
    x, memory = layers.Dense(16)(inputs), layers.Dense(16)(inputs)
    for number in range(3):
        x = CrossBlock(heads=4 if number else 2, name=f"block{number}")(x, memory)
    return compiled(keras.Model(inputs, layers.Dense(4)(x)))


def flat_decoder():
    """A graph of primitive layers: each block also reads what an encoder returns."""
    inputs = keras.Input((8, 16))
    x, memory = layers.Dense(16, name="shifted")(inputs), layers.Dense(16, name="encoded")(inputs)
    for number in range(3):
        x = layers.Add()([x, layers.MultiHeadAttention(2, 8, dropout=0.1, seed=number, name=f"own{number}")(x, x)])
        x = layers.Add()([x, layers.MultiHeadAttention(2, 8, name=f"cross{number}")(x, memory)])
        y = layers.Dense(32, "gelu", activity_regularizer="l2", name=f"up{number}")(x)
        x = layers.Add()([x, layers.Dense(16, name=f"down{number}")(y)])
    return compiled(keras.Model(inputs, layers.Dense(4)(x)))


def towers():
    """Two equal models side by side, each with blocks of its own."""

    def tower(name):
        inputs = x = keras.Input((8, 16))
        for number in range(3):
            x = Block(name=f"block{number}")(x)
        return keras.Model(inputs, x, name=name)

    inputs = keras.Input((8, 16))
    return compiled(keras.Model(inputs, layers.Dense(4)(tower("left")(inputs) + tower("right")(inputs))))


class Subclassed(keras.Model):
    """A model that calls equal layers itself."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = [Block(name=f"block{number}") for number in range(3)], layers.Dense(4)

    def call(self, x, training=None):
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(x)


class Looping(keras.Layer):
    """A layer that calls each of its equal layers in a loop."""

    def __init__(self):
        super().__init__()
        hidden = [[layers.Dense(32, "tanh", name="up"), layers.Dense(16, name="down")] for _ in range(3)]
        self.blocks = [keras.Sequential(each, name=f"block{number}") for number, each in enumerate(hidden)]

    def build(self, shape):
        for block in self.blocks:
            block.build(shape)

    def call(self, x):
        for block in self.blocks:
            x, _ = keras.ops.scan(lambda x, _, block=block: (block(x), None), x, length=2)
        return x


def looping():
    inputs = keras.Input((8, 16))
    return compiled(keras.Model(inputs, layers.Dense(4)(Looping()(inputs))))


def nested():
    """A functional model inside of another, whose blocks are equal models."""
    inputs = x = keras.Input((8, 16))
    for number in range(2):
        hidden = [layers.Dense(32, "relu", name="up"), layers.Dense(16, name="down")]
        x = keras.Sequential([keras.Input((8, 16)), *hidden], name=f"block{number}")(x)
    inner = keras.Model(inputs, x, name="inner")
    outer = keras.Input((8, 16))
    return compiled(keras.Model(outer, layers.Dense(4)(inner(outer))))


def mixtures():
    """Blocks with a mixture of experts each."""
    inputs = x = keras.Input((8, 16))
    for number in range(3):
        x = layers.Add()([x, ThreeOperands(name=f"experts{number}")(layers.LayerNormalization()(x))])
        x = layers.Add()([x, layers.Dense(16, "tanh", name=f"dense{number}")(x)])
    return compiled(keras.Model(inputs, layers.Dense(4)(x)))


def compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


TOKENS = np.random.default_rng(0).integers(0, 4, (24, 8), "int32")
VECTORS = np.random.default_rng(1).standard_normal((24, 8, 16)).astype("float32")
BUILDS = {
    "flat": (flat_blocks, TOKENS),
    "layers": (layers_as_blocks, VECTORS),
    "alternating": (alternating, VECTORS),
    "decoder": (decoder, VECTORS),
    "flat decoder": (flat_decoder, VECTORS),
    "towers": (towers, VECTORS),
    "subclassed": (lambda: compiled(Subclassed()), VECTORS),
    "nested": (nested, VECTORS),
    "looping": (looping, VECTORS),
    "mixtures": (mixtures, VECTORS),
}


def numbers(name, distribution):
    build, x = BUILDS[name]
    keras.utils.set_random_seed(0)
    with scope(distribution):
        model = build()
        history = model.fit(x, TOKENS % 4, 12, epochs=2, verbose=0).history
        return {"fit": history, "weights": [np.asarray(weight) for weight in model.get_weights()]}


@functools.cache
def numbers_without(name):
    return numbers(name, fully_sharded())


def fully_sharded(**options):
    mesh = kd.create_device_mesh("fsdp:4", devices=jax.devices()[:4])
    return kd.FullyShardedDataParallel(mesh, min_shard_bytes=0, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("looping", {}),
        ("nested", {"reshard_after_forward": True}),
        *(slow(name, {}) for name in BUILDS if name != "looping"),
        *(slow(name, {"reshard_after_forward": True}) for name in BUILDS if name != "nested"),
    ],
    ids=str,
)
def test_remat_changes_no_number(name, options):
    expected = numbers(name, fully_sharded(**options)) if options else numbers_without(name)
    found = numbers(name, fully_sharded(**options, step_options=kd.StepOptions(remat="full")))
    assert_same_numbers(found, expected, 1e-4)


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        slow("layers", "dots"),
        slow("layers", "attention"),
        ("nested", keras.RematScope("list_of_layers", layer_names=["block1"])),
    ],
)
def test_each_mode_changes_no_number(name, remat):
    found = numbers(name, fully_sharded(step_options=kd.StepOptions(remat=remat)))
    assert_same_numbers(found, numbers_without(name), 1e-4)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *(slow_unless(name == "nested", name, {}) for name in BUILDS),
        slow("layers", {"reduce_dtype": "float32"}),
        ("mixtures", {"experts": "sparse"}),
    ],
    ids=str,
)
def test_offloaded_activations_change_no_number(name, more, monkeypatch):
    """Blocks with dropout take seeds, which are integers and have no gradient."""
    monkeypatch.setattr("keras_dist.steps.host_offload.MIN_OFFLOAD_BYTES", 256)
    options = kd.StepOptions(remat="dots", offload="activations", **more)
    assert_same_numbers(numbers(name, fully_sharded(step_options=options)), numbers_without(name), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"remat": "full"}, {"remat": "dots", "offload": "activations"}])
def test_steps_that_run_eagerly(options, monkeypatch):
    monkeypatch.setattr("keras_dist.steps.host_offload.MIN_OFFLOAD_BYTES", 256)
    x, y = VECTORS[:8], TOKENS[:8] % 4

    def loss(eager):
        keras.utils.set_random_seed(0)
        with fully_sharded(step_options=kd.StepOptions(**options)).scope():
            model = layers_as_blocks()
            model.compile("sgd", model.loss, run_eagerly=eager)
            return model.fit(x, y, 8, epochs=2, verbose=0).history["loss"]

    np.testing.assert_allclose(loss(True), loss(False), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "mode"),
    [({"step_options": kd.StepOptions(remat="full")}, None), ({"reshard_after_forward": True}, None), ({}, "full")],
    ids=["remat", "resharding", "nested scopes"],
)
@pytest.mark.parametrize("eager", [False, True])
def test_losses_of_blocks_exist_until_the_call_ends(options, mode, eager):
    """Keras finds the losses of a layer by `id`, so another one with the id of a lost one would count twice."""
    losses, exist = [], []

    class Adding(layers.Dense):
        def call(self, x):
            y = super().call(x)
            loss = keras.ops.mean(y**2)
            self.add_loss(loss)
            losses.append(weakref.ref(loss))
            return y

    class Checking(keras.Layer):
        def call(self, x):
            gc.collect()  # tracers of one trace refer to each other
            exist[:] = [loss() is not None for loss in losses[-6:]]
            return x

    with fully_sharded(**options).scope(), keras.RematScope(mode):
        blocks = [keras.Sequential([Adding(8), Adding(8)], name=f"block{number}") for number in range(3)]
        model = keras.Sequential([keras.Input((8,)), *blocks, Checking(), layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=eager)
        model.fit(np.ones((8, 8)), np.ones((8, 1)), verbose=0)
    assert exist == [True] * 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flat", "nested"])
def test_remat_of_microbatches(name):
    """Their masks of dropout are not those of undivided batches, so both runs have microbatches."""
    expected = numbers(name, fully_sharded(step_options=kd.StepOptions(microbatches=3)))
    found = numbers(name, fully_sharded(step_options=kd.StepOptions(microbatches=3, remat="full")))
    assert_same_numbers(found, expected, 1e-3)


def test_evaluation_and_prediction_compute_nothing_again():
    build, x = BUILDS["looping"]
    model, y = build(), TOKENS % 4
    distribution = kd.DataParallel(step_options=kd.StepOptions(remat="full"))
    steps = [kd.plan(model, each, (x, y), step="test").flops for each in (distribution, kd.DataParallel())]
    assert steps[0] == steps[1]
    steps = [kd.plan(model, each, (x, y)).flops for each in (distribution, kd.DataParallel())]
    assert steps[0] > steps[1]


@pytest.mark.parametrize("name", BUILDS)
def test_blocks_are_found(name):
    build, x = BUILDS[name]
    model = build()
    model(x[:1])
    blocks = RepeatedBlocks(model)
    parts = [part for parts in blocks.parts.values() for part in parts if part.is_block]
    # In older Keras, masks of the first flat block are computed otherwise. The last block of the flat decoder is cut in
    # two where the output of the encoder is read for the last time: its two layers of attention are blocks.
    expected = {"flat": 2 if OLDER_KERAS else 3, "nested": 2, "alternating": 7, "towers": 6, "flat decoder": 4}
    assert len(blocks.layers) + len(parts) == expected.get(name, 3)


def test_blocks_of_known_networks():
    """The first block of each stage of ResNet50 has other shapes, so 12 of 16 blocks are equal to another."""
    with kd.deferred():
        model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), include_top=False)
    (parts,) = [parts for parts in RepeatedBlocks(model).parts.values() if any(part.is_block for part in parts)]
    assert sum(part.is_block for part in parts) == 12
    assert all(len(part.nodes) == 10 for part in parts if part.is_block)


@pytest.mark.slow
def test_remat_of_a_train_step_that_the_user_defines():
    def flops(remat):
        def build():
            model = layers_as_blocks()
            return compiled(OwnStep(model.inputs, model.outputs))

        return kd.plan(build, kd.DataParallel(step_options=kd.StepOptions(remat=remat)), (VECTORS, TOKENS)).flops

    assert flops("full") > flops(None)


class TwoGradients(keras.Model):
    """A train step that takes two gradients, as generators with a discriminator do."""

    def train_step(self, state, data):
        weights, others, optimizer, metrics = state

        def loss(weights, x):
            outputs, _ = self.stateless_call(weights, others, x)
            return keras.ops.mean(outputs**2)

        values, gradients = zip(*(jax.value_and_grad(loss)(weights, x) for x in (data[0], -data[0])), strict=True)
        sums = [first + second for first, second in zip(*gradients, strict=True)]
        weights, optimizer = self.optimizer.stateless_apply(optimizer, sums, weights)
        return {"loss": sum(values)}, (weights, others, optimizer, metrics)


@pytest.mark.slow
def test_remat_of_several_gradients_of_a_step(monkeypatch):
    def build():
        model = layers_as_blocks()
        return compiled(TwoGradients(model.inputs, model.outputs))

    monkeypatch.setitem(BUILDS, "gradients", (build, VECTORS))
    options = kd.StepOptions(remat="dots", offload="activations")
    expected = numbers("gradients", fully_sharded())
    assert_same_numbers(numbers("gradients", fully_sharded(step_options=options)), expected, 1e-4)


def test_remat_that_finds_nothing():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.Dense(1)])
    model.compile("sgd", "mse")
    batch = np.zeros((8, 4)), np.zeros((8, 1))
    for remat in ("full", "dots", "attention"):
        distribution = kd.DataParallel(step_options=kd.StepOptions(remat=remat))
        with pytest.raises(ValueError, match=f"remat='{remat}' has no effect"):
            kd.plan(model, distribution, batch)
    named = kd.DataParallel(step_options=kd.StepOptions(remat=keras.RematScope("list_of_layers", layer_names=["up"])))
    with pytest.raises(ValueError, match=r"\['up'\].* \['dense"):
        kd.plan(model, named, batch)


@pytest.mark.parametrize(("remat", "error"), [("half", ValueError), (True, TypeError)])
def test_values_that_remat_does_not_take(remat, error):
    with pytest.raises(error, match=str(remat)):
        kd.StepOptions(remat=remat)


def test_the_program_does_not_depend_on_where_variables_are_in_memory():
    variables = [keras.Variable(np.zeros(count)) for count in range(1, 40)]
    variables.sort(key=id, reverse=True)

    def program(x):
        with keras.StatelessScope() as scope:
            for each in variables:
                scope.add_update((each, each.value))

            def call():
                for each in variables:
                    each.assign(each.value + x)
                return x

            return internals.rematerialized(None, call, jax.checkpoint)

    [equation] = [each for each in jax.make_jaxpr(program)(1.0).eqns if each.primitive.name in ("remat2", "checkpoint")]
    sizes = [v.aval.shape[0] for v in equation.outvars if v.aval.shape]
    assert sizes == [each.shape[0] for each in variables]
