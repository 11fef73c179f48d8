"""`deferred`: models with shapes, dtypes and layouts but without values, whatever their layers do in `build`."""

import random
import threading

import jax
import keras
import numpy as np
import pytest
from keras import layers
from support.planned_models import MODELS, gpt, rules

import keras_dist as kd
from keras_dist._keras.internals import variable_layout, variable_value


def build_deferred(build):
    with kd.deferred():
        return build()


def has_no_values(model):
    return all(variable_value(variable) is None for variable in model.variables)


@pytest.mark.parametrize("name", ["gpt", "perceptron", "convnet", "two branches"])
def test_deferred_models_have_shapes_and_no_values(name):
    build, _ = MODELS[name]
    model, normal = build_deferred(build), build()
    assert has_no_values(model)
    assert [(v.shape, v.dtype) for v in model.variables] == [(v.shape, v.dtype) for v in normal.variables]
    assert model.count_params() == normal.count_params()


def test_layouts_come_from_the_active_distribution():
    distribution = rules(kd.create_device_mesh("data:2,model:4"), {".*up/kernel": (None, "model")})
    with distribution.scope():
        model = build_deferred(gpt)
    layouts = {v.path: variable_layout(v).axes for v in model.variables}
    assert layouts["block0_up/kernel"] == (None, "model")
    assert layouts["block0_down/kernel"] == (None, None)


def test_deferred_optimizers_and_metrics_have_no_values():
    with kd.deferred():
        weight = keras.Variable("zeros", shape=(3, 4))
        optimizer = keras.optimizers.Adam(0.5)
        optimizer.build([weight])
        metric = keras.metrics.Mean()
    assert [variable_value(v) for v in optimizer.variables if v.shape] == [None, None]
    assert [variable_value(v) for v in metric.variables] == [None, None]
    assert float(optimizer.learning_rate) == 0.5


def test_a_model_of_any_size_takes_no_memory():
    def build():
        model = keras.Sequential([keras.Input((2**20,)), layers.Dense(2**20)])
        model.compile("adam", "mse")
        return model

    before = sum(array.nbytes for array in jax.live_arrays())
    model = build_deferred(build)
    assert model.count_params() == 2**40 + 2**20
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 2**10


def test_using_a_deferred_value_names_the_variable():
    model = build_deferred(gpt)
    for use in (
        lambda: model.get_weights(),
        lambda: model(np.zeros((1, 16), "int32")),
        lambda: model.weights[0].numpy(),
        lambda: model.fit(*MODELS["gpt"][1], verbose=0),
    ):
        with pytest.raises(ValueError, match="'embedding/embeddings'"):
            use()


@pytest.mark.parametrize("step", ["train", "test", "predict"])
def test_steps_inside_the_block_raise(step):
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    run = {"train": lambda: model.fit(x, y), "test": lambda: model.evaluate(x, y), "predict": lambda: model.predict(x)}
    with kd.DataParallel().scope(), kd.deferred(), pytest.raises(ValueError, match=f"{step} step .* have no values"):
        run[step]()


def test_other_threads_are_not_deferred():
    made_there = []

    def make():
        made_there.append(keras.Variable("ones", shape=(2,)))

    with kd.deferred():
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    np.testing.assert_array_equal(made_there[0].value, [1, 1])


def test_nested_blocks_and_errors_inside_them_end_deferral():
    def fail():
        with kd.deferred():
            with kd.deferred():
                pass
            assert variable_value(keras.Variable("ones", shape=(2,))) is None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert keras.Variable("ones", shape=(2,)).value.shape == (2,)


def test_variables_with_values_can_be_assigned_inside_deferred():
    with kd.DataParallel().scope():
        variable = keras.Variable("zeros", shape=(8,))
        with kd.deferred():
            variable.assign(np.ones(8, "float32"))
    assert len(variable.value.sharding.device_set) == 8
    np.testing.assert_array_equal(variable.value, np.ones(8))


def test_keras_is_unpatched_after_the_block():
    names = ("_initialize", "_initialize_with_initializer", "_deferred_initialize", "_direct_assign")
    before = [getattr(keras.Variable, name) for name in names]
    build_deferred(gpt)
    assert [getattr(keras.Variable, name) for name in names] == before


# ------------------------------------------------------------------------------------------ unusual layers


class CreatedInCall(layers.Layer):
    """Has no `build`: its sublayer is built at the first call, inside Keras's scope for symbolic calls."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(4)

    def call(self, x):
        return self.inner(x)


def test_layers_created_inside_a_call():
    def build():
        x = keras.Input((8,))
        return keras.Model(x, CreatedInCall()(x))

    model = build_deferred(build)
    assert [tuple(v.shape) for v in model.variables] == [(8, 4), (4,)]
    assert has_no_values(model)
    assert kd.materialize(model).get_weights()[0].std() > 0


class FloatInitializer(layers.Layer):
    """Initializes a scalar with a function that returns a Python float, as CLIP's logit scale does."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer=lambda *args, **kwargs: 2.5)

    def call(self, x):
        return x * self.scale


def test_initializer_that_returns_a_python_float():
    model = build_deferred(lambda: keras.Sequential([keras.Input((3,)), FloatInitializer()]))
    value = kd.materialize(model).weights[0].value
    assert (value.shape, value.dtype, float(value)) == ((), np.float32, 2.5)


class ReadsVariablesInBuild(layers.Layer):
    """Derives a constant from one variable and assigns another in `build`."""

    def build(self, shape):
        self.table = self.add_weight(shape=(4, 4), initializer="glorot_uniform", name="table")
        self.doubled = self.add_weight(shape=(4, 4), initializer="zeros", name="doubled", trainable=False)
        self.positions = self.add_weight(shape=(1, 4), initializer="zeros", dtype="int32", trainable=False)
        self.total = float(keras.ops.sum(self.table))
        self.doubled.assign(self.table * 2)
        self.doubled.assign_add(keras.ops.ones((4, 4)))
        self.positions.assign(keras.ops.expand_dims(keras.ops.arange(4), 0))

    def call(self, x):
        return x @ self.doubled + self.total


def test_values_assigned_during_build_are_kept():
    def build():
        return keras.Sequential([keras.Input((4,)), ReadsVariablesInBuild(name="reads")])

    keras.utils.set_random_seed(3)
    model = kd.materialize(build_deferred(build))
    keras.utils.set_random_seed(3)
    normal = build()
    layer = model.get_layer("reads")
    np.testing.assert_allclose(layer.doubled.value, 2 * layer.table.value + 1, rtol=1e-6)
    np.testing.assert_array_equal(layer.positions.value, [[0, 1, 2, 3]])
    for value, expected in zip(model.get_weights(), normal.get_weights(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert layer.total == pytest.approx(normal.get_layer("reads").total)


class CompilesItself(keras.Model):
    """Compiles itself in its constructor, as KerasHub's tasks do: the optimizer's scalars are given as values."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)
        self.compile(keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 100)), "mse")

    def call(self, x):
        return self.dense(x)


def test_given_values_stay_on_the_host_under_a_mesh_of_mock_devices():
    mesh = kd.DeviceMesh((4, 4), ["data", "model"], kd.mock_tpus("v5e:4x4"))

    class Replicated(kd.Distribution):
        def get_variable_layout(self, variable):  # a mock device has no lowering
            return jax.sharding.SingleDeviceSharding(jax.devices()[3])

    with Replicated(mesh, "data").scope(), kd.deferred():
        model = CompilesItself()
        step = keras.Variable(7, dtype="int32")
    assert int(step.value) == 7
    assert int(model.optimizer.iterations.value) == 0


def test_variables_with_the_same_path():
    class Twins(layers.Layer):
        def build(self, shape):
            self.first = self.add_weight(shape=(2, 8), name="kernel", initializer="ones")
            self.second = self.add_weight(shape=(8, 2), name="kernel", initializer="zeros")

        def call(self, x):
            return x @ self.first @ self.second

    distribution = rules(kd.create_device_mesh("data:2,model:4"), {"other": ("model",)})
    with distribution.scope():
        model = build_deferred(lambda: keras.Sequential([keras.Input((2,)), Twins()]))
        model.compile("adam", "mse")
        kd.materialize(model)
    assert [w.mean() for w in model.get_weights()] == [1, 0]
    planned = kd.plan(model, distribution, 16)
    assert [v.shape for v in planned.variables if v.part == "weights"] == [(2, 8), (8, 2)]
    assert planned.memory.optimizer == 2 * planned.memory.weights + 8


def test_global_seed_generator_created_inside_works_afterwards():
    keras.utils.clear_session(free_memory=False)
    with kd.deferred():
        keras.random.normal((2,))
    assert keras.random.normal((2,)).shape == (2,)


def test_pythons_random_state_advances_as_in_a_normal_build():
    for build in (gpt, lambda: build_deferred(gpt)):
        random.seed(5)
        build()
        after = random.random()
        random.seed(5)
        gpt()
        assert random.random() == after


def test_errors_in_build_are_not_hidden():
    class Fails(layers.Layer):
        def build(self, shape):
            raise RuntimeError("no tokenizer here")

    with pytest.raises(RuntimeError, match="no tokenizer here"):
        build_deferred(lambda: keras.Sequential([keras.Input((2,)), Fails()]))


def test_loaded_weights_replace_deferred_values(tmp_path):
    model = gpt()
    model.save_weights(tmp_path / "w.weights.h5")
    later = build_deferred(gpt)
    later.load_weights(tmp_path / "w.weights.h5")
    kd.materialize(later)
    for value, expected in zip(later.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)
