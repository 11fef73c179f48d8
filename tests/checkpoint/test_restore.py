"""Every variable is restored from the entry that was saved of it, also where variables share a path."""

import inspect

import keras
import numpy as np
import pytest

import keras_dist as kd
from keras_dist.checkpoint import restore

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def dense_model():
    layers = [keras.layers.Dense(16, "relu", name="up"), keras.layers.Dropout(0.1), keras.layers.Dense(1, name="down")]
    return keras.Sequential([keras.Input((4,)), *layers])


class Norm(keras.layers.Layer):
    """A layer whose weight has the path of the folder of another one, and which is called as many others are."""

    def __init__(self):
        super().__init__(name="block")
        self.scale, self.inner = self.add_weight((1,), name="kernel"), keras.layers.Dense(4, name="kernel")
        self.dropout = keras.layers.Dropout(0.1, name="dropout")

    def call(self, inputs):
        return self.dropout(self.inner(inputs)) * self.scale


class SameNames(keras.Model):
    def __init__(self):
        super().__init__(name="same_names")
        self.first, self.second = Norm(), Norm()
        self.norms = [keras.layers.BatchNormalization(name="norm") for _ in range(2)]
        self.heads = [keras.layers.Dense(4, name="head") for _ in range(2)]

    def call(self, inputs):
        outputs = self.second(self.first(inputs))
        for layer in (*self.norms, *self.heads):
            outputs = layer(outputs)
        return keras.ops.sum(outputs, axis=-1, keepdims=True)


def same_names():
    model = SameNames()
    model(X)
    return model


def by_weight(variable):
    return keras.optimizers.Adafactor(0.01) if "up" in variable.path else keras.optimizers.Adam(0.01)


SINGLE = {
    name: make
    for name, make in sorted(vars(keras.optimizers).items())
    if inspect.isclass(make) and "learning_rate" in inspect.signature(make).parameters and name != "Optimizer"
}
OPTIMIZERS = {
    **{name: lambda make=make: make(0.01) for name, make in SINGLE.items()},
    **{
        f"{name}, averaged and accumulated": lambda make=make: make(0.01, use_ema=True, gradient_accumulation_steps=2)
        for name, make in SINGLE.items()
    },
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adafactor(0.01)),
    **(
        {"MultiOptimizer": lambda: keras.optimizers.MultiOptimizer(by_weight)}
        if hasattr(keras.optimizers, "MultiOptimizer")
        else {}
    ),
}


def compiled(make_model, optimizer="adam"):
    model = make_model()
    model.compile(optimizer, "mse", metrics=["mae", "mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def assert_each_matches(saved, other):
    """Asserts that the variables of a model are paired with the saved entries of the same variables of another one."""
    number = {id(variable.value): index for index, variable in enumerate(all_variables(saved))}
    tree = restore._flat(restore.state_tree(saved))
    found, problems = restore._match(other, tree, with_metrics=True)
    assert not problems
    assert len(found) == len(tree) == len(number)
    others = all_variables(other)
    for entry, variable in found.items():
        assert variable is others[number[id(tree[entry])]], entry


def all_variables(model):
    return [*model.variables, *model.optimizer.variables, *model.metrics_variables]


def test_every_optimizer_is_restored():
    assert {"Adafactor", "Adam", "Lamb", "Muon", "SGD"} <= set(SINGLE)
    with kd.DataParallel(devices=kd.list_devices()[:1]).scope():
        for make in OPTIMIZERS.values():
            assert_each_matches(compiled(dense_model, make()), compiled(dense_model, make()))


@pytest.mark.parametrize("frozen", [None, "first", "second"])
def test_layers_of_the_same_name_are_restored(frozen):
    with kd.DataParallel(devices=kd.list_devices()[:1]).scope():
        saved, other = compiled(same_names, "adafactor"), compiled(same_names, "adafactor")
        paths = [variable.path for variable in saved.variables]
        assert paths.count("same_names/block/kernel/kernel") == paths.count("same_names/norm/gamma") == 2
        if frozen is not None:
            getattr(other, frozen).trainable = False  # after the checkpoint was saved
        assert_each_matches(saved, other)


def fit(make_model, optimizer, epochs, directory=None):
    with kd.DataParallel(shard_optimizer_state=True, devices=kd.list_devices()[:2]).scope():
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        model = make_model()
        model.compile(optimizer(), "mse")
        callbacks = [] if directory is None else [kd.TrainingCheckpoint(str(directory))]
        return model.fit(X, Y, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks).history["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_every_optimizer_resumes(name, tmp_path):
    losses = [*fit(dense_model, OPTIMIZERS[name], 1, tmp_path), *fit(dense_model, OPTIMIZERS[name], 2, tmp_path)]
    np.testing.assert_allclose(losses, fit(dense_model, OPTIMIZERS[name], 2), rtol=1e-6)


@pytest.mark.slow
def test_training_of_layers_with_the_same_name_resumes(tmp_path):
    losses = [fit(same_names, keras.optimizers.Adafactor, epochs, tmp_path)[0] for epochs in (1, 2)]
    np.testing.assert_allclose(losses, fit(same_names, keras.optimizers.Adafactor, 2), rtol=1e-6)
