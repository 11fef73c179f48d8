"""Forward passes: asked once about what is differentiated. A pass that changes nothing changes nothing."""

import re

import jax
import keras
import numpy as np
import pytest
from keras import layers
from support.keras_scenarios import start_anew
from support.strategy_models import scope

import keras_dist as kd
from keras_dist._keras.training_state import state_variables
from keras_dist.passes.registry import FORWARD_PASSES, ForwardPass
from keras_dist.passes.rewriting import rewritten
from keras_dist.steps.steps import stateless_step

ROWS, LENGTH, WIDTH, VOCABULARY = 8, 6, 16, 32


def mlp():
    inputs = keras.Input((LENGTH,))
    x = layers.Dropout(0.2)(layers.Dense(WIDTH, "gelu")(inputs))
    return keras.Model(inputs, layers.Dense(VOCABULARY)(layers.BatchNormalization()(x)))


def lstm():
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)(tokens)
    return keras.Model(tokens, layers.Dense(VOCABULARY)(layers.LSTM(WIDTH)(x)))


def cnn():
    inputs = keras.Input((LENGTH,))
    x = layers.Reshape((LENGTH, 1))(inputs)
    x = layers.MaxPooling1D(2)(layers.Conv1D(WIDTH, 3, padding="same", activation="tanh")(x))
    return keras.Model(inputs, layers.Dense(VOCABULARY)(layers.Flatten()(x)))


def transformer():
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(2):
        x = x + layers.MultiHeadAttention(2, 8)(layers.LayerNormalization()(x), x, use_causal_mask=True)
        x = x + layers.Dense(WIDTH)(layers.Dense(2 * WIDTH, "gelu")(x))
    return keras.Model(tokens, layers.Dense(VOCABULARY)(layers.GlobalAveragePooling1D()(x)))


class Own(keras.Model):
    """A model with a train step of its own."""

    def train_step(self, state, data):
        weights, others, optimizer, metrics = state
        x, y = data

        def loss(weights):
            outputs, new_others = self.stateless_call(weights, others, x, training=True)
            return keras.ops.mean(
                keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
            ), new_others

        (value, others), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        weights, optimizer = self.optimizer.stateless_apply(optimizer, gradients, weights)
        return {"loss": value}, (weights, others, optimizer, metrics)


def own():
    inputs = keras.Input((LENGTH,))
    return Own(inputs, layers.Dense(VOCABULARY)(layers.Dense(WIDTH, "tanh")(inputs)))


MODELS = {"mlp": mlp, "lstm": lstm, "cnn": cnn, "transformer": transformer, "own": own}


def fsdp(axes="data:8", **options):
    sequences = {"sequence_dim_name": "context"} if "context" in axes else {}
    mesh, step_options = kd.create_device_mesh(axes), kd.StepOptions(**options)
    return kd.FullyShardedDataParallel(mesh, min_shard_bytes=0, step_options=step_options, **sequences)


DISTRIBUTIONS = {
    "DP": kd.DataParallel,
    "ZeRO-1": lambda: kd.DataParallel(shard_optimizer_state=True),
    "FSDP": fsdp,
    "HSDP": lambda: fsdp("replica:2,fsdp:4"),
    "CP": lambda: fsdp("data:4,context:2"),
    "unreduced": lambda: fsdp(reduce_dtype="float32"),
    "microbatches": lambda: fsdp("data:4,model:2", microbatches=2),
    "remat": lambda: fsdp(remat="full"),
    "offload": lambda: fsdp(remat="dots", offload="activations"),
    "accumulation": kd.DataParallel,
}


def has_no_effect(name, strategy):
    """Only a transformer has repeated blocks; a train step of its own has no microbatches and no accumulation."""
    needs_keras_step = strategy in ("unreduced", "microbatches")
    return (strategy in ("remat", "offload") and name != "transformer") or (name == "own" and needs_keras_step)


CASES = [(name, strategy) for name in MODELS for strategy in DISTRIBUTIONS if not has_no_effect(name, strategy)]


def outcome(name, strategy):
    """What a model computes in two epochs whose last batches have 4 rows, and its compiled train step."""
    start_anew()
    distribution = DISTRIBUTIONS[strategy]()
    with scope(distribution):
        model = MODELS[name]()
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2 if strategy == "accumulation" else None)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        random = np.random.default_rng(0)
        x = random.integers(0, VOCABULARY, (ROWS + 4, LENGTH)).astype(model.inputs[0].dtype)
        y = random.integers(0, VOCABULARY, ROWS + 4)
        history = model.fit(x, y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0).history
        found = history, model.evaluate(x, y, ROWS, verbose=0), model.predict(x, ROWS, verbose=0), model.get_weights()
        state = [[variable.value for variable in part] for part in state_variables(model, "train")]
        step = jax.jit(stateless_step(model, "train"))
        return found, instructions(step.lower(state, distribution.distribute_batch((x[:ROWS], y[:ROWS]))).compile())


def instructions(compiled):
    """The instructions of a module, without numbers of names and what says where they come from."""
    text = re.sub(r", (metadata|frontend_attributes|backend_config)=\{[^}]*\}", "", compiled.as_text())
    text = re.sub(r"%[\w.\-]+", "%", text)
    return [line.strip() for line in text.splitlines() if " = " in line]


def unchanged(equation, program):
    """Replaces many operations by themselves."""
    if equation.primitive.name not in ("dot_general", "tanh", "exp", "mul", "reduce_sum", "custom_jvp_call"):
        return None
    unchanged.count += 1
    return lambda operation, *operands: operation(*operands)


@pytest.mark.slow
@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_a_pass_that_changes_nothing(name, strategy, monkeypatch):
    expected, program = outcome(name, strategy)
    unchanged.count = 0
    forward_pass = ForwardPass(lambda program: True, lambda program: rewritten(program, [unchanged]))
    monkeypatch.setitem(FORWARD_PASSES, "unchanged", forward_pass)
    found, changed_program = outcome(name, strategy)
    assert unchanged.count > 0
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert changed_program == program
