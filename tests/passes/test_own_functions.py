"""Passes over calls of a model in functions that users compile and differentiate themselves."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers, ops
from support.applied_functions import WIDTH, Applied, distribution_of
from support.keras_scenarios import start_anew
from support.slow_cases import crossed
from support.strategy_models import assert_same_numbers, scope

import keras_dist as kd
from keras_dist._keras.internals import get_keras_mask

ROWS, LENGTH = 8, 9
TABLE = np.random.default_rng(1).normal(size=(5, WIDTH)).astype("float32")
KERNEL = TABLE[:3, :, None] * TABLE[0]


def looked_up(x):
    """Sums of rows of a table that is computed from all rows, for an odd number of tokens."""
    tokens = ops.reshape(x, (-1, WIDTH))[: ROWS * LENGTH - 3]
    rows = ops.take(TABLE * ops.mean(x), ops.cast(2 * ops.abs(tokens[:, 0]), "int32") % 5, axis=0)
    return x + ops.mean(rows * tokens, 0)


FUNCTIONS = {
    "sort": lambda x: jnp.sort(x, axis=1),
    "look-up": looked_up,
    "maximum": lambda x: ops.max_pool(x, 3, 1, padding="same"),
    "strided convolution": lambda x: ops.repeat(ops.conv(x, TABLE[:3, :, None] * TABLE[0], 2, "same"), 2, 1)[
        :, :LENGTH
    ],
    "groups of channels": lambda x: ops.depthwise_conv(x, TABLE[:3, :, None], padding="same"),
    "transform": lambda x: jnp.real(jnp.fft.fft2(x)),
}
DISTRIBUTIONS = {name: lambda name=name: distribution_of(name) for name in ("context parallel", "tensor parallel")}


def loss_and_gradients(function, distribution):
    start_anew()
    x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, 4)).astype("float32")
    with scope(distribution):
        inputs = keras.Input((LENGTH, 4), batch_size=ROWS)
        model = keras.Model(inputs, layers.Dense(3)(Applied(function)(inputs)))

        def loss(weights, x):
            outputs, _ = model.stateless_call(weights, [], x)
            return jnp.sum(jnp.sin(outputs))

        weights = [variable.value for variable in model.trainable_variables]
        x = x if distribution is None else distribution.distribute_batch(x)
        return jax.jit(jax.value_and_grad(loss))(weights, x)


@pytest.mark.parametrize(("name", "distribution"), crossed(FUNCTIONS, DISTRIBUTIONS))
def test_gradients_are_those_of_one_device(name, distribution):
    actual = loss_and_gradients(FUNCTIONS[name], DISTRIBUTIONS[distribution]())
    assert_same_numbers(actual, loss_and_gradients(FUNCTIONS[name], None), 1e-5)


class Counted(layers.Layer):
    def __init__(self):
        super().__init__()
        self.calls, self.dense = 0, layers.Dense(4)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x, mask=None):
        self.calls += 1
        return self.dense(x)


def test_masks_pass_through_a_rewritten_call():
    """They are attributes of tensors, so they have to be computed by the program too."""
    with scope(distribution_of("context parallel")):
        tokens = keras.Input((LENGTH,), dtype="int32")
        embedded = layers.Embedding(7, WIDTH, mask_zero=True)(tokens)
        model = keras.Model(tokens, layers.Activation("relu")(embedded))
        values = [[v.value for v in model.trainable_variables], []]
        masks = []

        @jax.jit
        def masked(values, x):
            outputs, _ = model.stateless_call(*values, x)
            masks.append(get_keras_mask(outputs))
            return masks[0].astype("float32")

        x = np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 3
        np.testing.assert_array_equal(masked(values, x), x != 0)


def test_a_function_is_traced_once_where_no_pass_finds_anything():
    layer = Counted()
    with scope(kd.DataParallel()):
        x = np.ones((8, 4), "float32")
        layer.build(x.shape)
        layer.calls = 0
        values = [v.value for v in layer.trainable_variables]
        program = jax.make_jaxpr(lambda values, x: layer.stateless_call(values, [], x)[0])(values, x)
    assert layer.calls == 1
    assert not {"jit", "pjit"} & {equation.primitive.name for equation in program.eqns}


def test_a_model_reads_the_masks_of_its_inputs():
    def output(distribution):
        start_anew()
        with scope(distribution):
            tokens, rows = keras.Input((6,), dtype="int32"), keras.Input((6, 4))
            encoder = keras.Model(tokens, layers.Embedding(7, 4, mask_zero=True)(tokens))
            pooled = keras.Model(rows, layers.GlobalAveragePooling1D()(rows))

            @jax.jit
            def both(weights, x):
                return pooled.stateless_call([], [], encoder.stateless_call(weights, [], x)[0])[0]

            return both([v.value for v in encoder.trainable_variables], np.arange(48).reshape(8, 6) % 3)

    np.testing.assert_allclose(output(kd.DataParallel()), output(None), atol=1e-6)


@pytest.mark.parametrize("returned", ["loss last", "two terms", "losses of tokens"])
def test_chunks_of_a_loss_leave_functions_of_users_as_they_are(returned):
    """Which output of a call is the loss, is not known."""

    class Loss(layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(4, 40), name="table")

        def call(self, inputs):
            x, labels = inputs
            logits = x @ self.table
            each = ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            if returned == "losses of tokens":
                return each
            if returned == "two terms":
                return ops.mean(each), ops.mean(ops.max(logits, -1))
            return ops.mean(ops.equal(ops.argmax(logits, -1), labels)), ops.mean(each)

    def gradients(distribution):
        start_anew()
        with scope(distribution):
            layer, random = Loss(), np.random.default_rng(0)
            x, labels = random.normal(size=(8, 6, 4)).astype("float32"), jnp.asarray(random.integers(0, 40, (8, 6)))
            inputs = keras.Input((6, 4), batch_size=8), keras.Input((6,), batch_size=8, dtype="int32")
            model = keras.Model(inputs, layer(inputs))

            @jax.jit
            def of(weights, x):
                def total(weights, x):
                    return sum(map(jnp.sum, jax.tree.leaves(model.stateless_call(weights, [], (x, labels))[0])))

                return jax.grad(total, (0, 1))(weights, x)

            return of([v.value for v in model.trainable_variables], x)

    chunked = kd.DataParallel(step_options=kd.StepOptions(loss_chunk=4))
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, atol=1e-5), gradients(chunked), gradients(None)
    )


def test_losses_of_mixtures_are_collected_in_a_scope_of_the_user():
    class Balanced(layers.Layer):
        def build(self, shape):
            self.router = self.add_weight(shape=(8, 4), name="router")
            self.up = self.add_weight(shape=(4, 8, 8), name="up")

        def call(self, x):
            chances = ops.softmax(x @ self.router)
            self.add_loss(ops.mean(chances**2))
            return ops.einsum("bd,edf,be->bf", x, self.up, chances)

    def losses(distribution):
        start_anew()
        with scope(distribution):
            inputs = keras.Input((8,))
            model = keras.Model(inputs, Balanced()(inputs))

            @jax.jit
            def of(weights, x):
                mapping = zip(model.trainable_variables, weights, strict=True)
                with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as collected:
                    model(x)
                return list(collected.losses)

            return of([v.value for v in model.trainable_variables], np.ones((8, 8), "float32"))

    np.testing.assert_allclose(losses(kd.DataParallel()), losses(None), rtol=1e-6)
    assert len(losses(None)) == 1
