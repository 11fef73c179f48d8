"""`materialize`: the values of a normal build, sharded from the start, with few compiled programs."""

import contextlib

import jax
import keras
import numpy as np
import pytest
from keras import layers
from support.planned_models import LAYOUTS, MODELS, gpt
from support.slow_cases import crossed, slow

import keras_dist as kd


def build_model(build, distribution, deferred):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(11)
    with distribution.scope():
        if not deferred:
            return build()
        with kd.deferred():
            model = build()
        return kd.materialize(model)


NAMES_OF_LAYOUTS = ["tensor parallel", "fully sharded", "data parallel"]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *crossed(["perceptron", "convnet"], NAMES_OF_LAYOUTS),
        *(slow(name, layout) for name in ("two branches", "gpt") for layout in NAMES_OF_LAYOUTS),
    ],
)
def test_values_and_layouts_equal_a_normal_build(name, layout):
    build, (x, y) = MODELS[name]
    distribution = LAYOUTS[layout]()
    normal, model = build_model(build, distribution, False), build_model(build, distribution, True)
    assert len(normal.variables) == len(model.variables)
    for expected, variable in zip(normal.variables, model.variables, strict=True):
        np.testing.assert_allclose(variable.value, expected.value, rtol=1e-6, atol=1e-7, err_msg=variable.path)
        assert variable.value.sharding.is_equivalent_to(expected.value.sharding, variable.value.ndim)
    with distribution.scope():
        losses = [
            m.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"] for m in (normal, model)
        ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_without_a_distribution_values_are_on_one_device():
    with kd.deferred():
        model = gpt()
    kd.materialize(model)
    assert {len(v.value.sharding.device_set) for v in model.variables} == {1}


INITIALIZERS = [
    *[keras.initializers.Zeros(), keras.initializers.Ones(), keras.initializers.Constant(0.25)],
    *[keras.initializers.RandomNormal(1.0, 2.0), keras.initializers.RandomUniform(-3, 1)],
    *[keras.initializers.TruncatedNormal(), keras.initializers.VarianceScaling(2.0, "fan_out", "uniform")],
    *[keras.initializers.GlorotNormal(), keras.initializers.HeUniform(seed=4), keras.initializers.LecunNormal()],
    *[keras.initializers.Orthogonal(), keras.initializers.Identity(), keras.initializers.Constant(np.eye(16) * 3)],
    lambda shape, dtype=None: keras.ops.full(shape, 4.0, dtype),
    lambda shape, dtype=None: np.arange(256).reshape(shape) / 7,
]


def layer_of_one_weight(shape, initializer, dtype):
    layer = layers.Layer()
    layer.add_weight(shape=shape, initializer=initializer, dtype=dtype, name="w")
    layer.built = True
    return layer


@pytest.mark.parametrize(
    ("initializer", "dtype"),
    crossed(INITIALIZERS, ["float32", "bfloat16", "float16"]),
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_every_initializer_gives_the_values_of_keras(initializer, dtype):
    def build():
        return layer_of_one_weight((16, 16), initializer, dtype)

    try:
        expected = build().weights[0].value
    except (NotImplementedError, TypeError):
        pytest.skip(f"Keras cannot draw {type(initializer).__name__} in {dtype}")
    variable = build_model(build, LAYOUTS["fully sharded"](), True).weights[0]
    assert variable.value.dtype == dtype
    tolerance = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}[dtype]
    values, expected_values = np.asarray(variable.value, "float32"), np.asarray(expected, "float32")
    np.testing.assert_allclose(values, expected_values, rtol=tolerance, atol=tolerance * abs(expected_values).max())
    assert len(variable.value.sharding.device_set) == 8


@pytest.mark.parametrize("initializer", [keras.initializers.Zeros(), keras.initializers.Constant(0.25)])
@pytest.mark.parametrize("shape", [(256, 256), (256, 512)], ids=["sent from the host", "filled on the devices"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_constant_arrays_of_any_size(initializer, shape, dtype):
    for distribution in (None, LAYOUTS["fully sharded"]()):
        with distribution.scope() if distribution else contextlib.nullcontext():
            with kd.deferred():
                layer = layer_of_one_weight(shape, initializer, dtype)
            value = kd.materialize(layer).weights[0].value
        assert value.dtype == dtype
        assert (np.asarray(value) == np.asarray(initializer(shape, dtype))).all()
        assert value.addressable_shards[0].data.size == value.size / (8 if distribution else 1)


def test_each_distinct_initializer_shape_and_layout_compiles_once():
    compiled = []

    def listener(name, seconds, **_):
        if name.endswith("backend_compile_duration"):
            compiled.append(name)

    distribution = LAYOUTS["tensor parallel"]()
    counts = []
    for depth in (2, 6):
        with distribution.scope(), kd.deferred():
            model = gpt(depth, width=64)
        jax.clear_caches()
        keras.random.normal((2,), seed=1)  # what JAX compiles once for every seed
        jax.monitoring.register_event_duration_secs_listener(listener)
        try:
            compiled.clear()
            kd.materialize(model)
            counts.append(len(compiled))
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)
    assert counts[0] == counts[1]


def test_the_optimizer_is_built_with_the_model():
    distribution = LAYOUTS["tensor parallel"]()
    model = build_model(gpt, distribution, True)
    kernel = model.get_layer("block0_up").kernel
    momentum = next(v for v in model.optimizer.variables if v.path.endswith("block0_up_kernel_momentum"))
    assert momentum.value.sharding.is_equivalent_to(kernel.value.sharding, 2)
    assert momentum.value.addressable_shards[0].data.shape == (32, 32)


def test_deferred_model_can_be_redistributed_before_materialize():
    with LAYOUTS["data parallel"]().scope(), kd.deferred():
        model = gpt()
    there = LAYOUTS["tensor parallel"]()
    kd.materialize(kd.redistribute(model, there))
    assert model.get_layer("block0_up").kernel.value.sharding.shard_shape((32, 128)) == (32, 32)


@pytest.mark.slow
def test_metrics_are_materialized():
    distribution = LAYOUTS["tensor parallel"]()
    with distribution.scope():
        with kd.deferred():
            model = gpt()
            metrics = [keras.metrics.SparseCategoricalAccuracy()]
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=metrics)
        kd.materialize(model)
        x, y = MODELS["gpt"][1]
        assert "sparse_categorical_accuracy" in model.fit(x, y, verbose=0).history


@pytest.mark.parametrize("call", [False, True])
def test_subclassed_models_train_after_materialize(call):
    build, (x, y) = MODELS["subclassed"]
    with kd.DataParallel().scope():
        with kd.deferred():
            model = build()
            # Keras calls a model built by this, whose layers are not.
            model(keras.KerasTensor((16, 32))) if call else model.build((16, 32))
        kd.materialize(model)
        assert len(model.optimizer.variables) > 2 or not call
        model.fit(x, y, verbose=0)


@pytest.mark.slow
def test_keras_hub_task_trains_after_materialize():
    keras_hub = pytest.importorskip("keras_hub", reason="needs KerasHub: pip install '.[hub]'", exc_type=ImportError)
    distribution = LAYOUTS["fully sharded"]()
    tokens = np.ones((8, 16), "int32")
    with distribution.scope():
        with kd.deferred():
            backbone = keras_hub.models.GPT2Backbone(64, 2, 4, 32, 64, max_sequence_length=16)
            task = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
        kd.materialize(task)
        x = {"token_ids": tokens, "padding_mask": np.ones((8, 16), bool)}
        assert np.isfinite(task.fit(x, tokens, verbose=0).history["loss"]).all()


def test_existing_values_are_kept():
    model = gpt()
    before = model.get_weights()
    kd.materialize(model)
    for value, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_initializer_with_a_seed_generator_advances_it():
    generator = keras.random.SeedGenerator(3)

    def build():
        initializer = keras.initializers.RandomNormal(seed=generator)
        return keras.Sequential([keras.Input((4,)), *(layers.Dense(4, None, True, initializer) for _ in range(2))])

    with kd.deferred():
        model = build()
    first, _, second, _ = kd.materialize(model).get_weights()
    assert (first != second).all()
    assert not np.array_equal(generator.state.value, [3, 0])


def test_only_built_models_are_materialized():
    with pytest.raises(TypeError, match=r"\b3 \(int\)"):
        kd.materialize(3)
    with kd.deferred():
        model = keras.Sequential([layers.Dense(3)], name="unbuilt")
    with pytest.raises(ValueError, match="'unbuilt'"):
        kd.materialize(model)


def test_only_attached_devices_get_values():
    mesh = kd.DeviceMesh((8,), ["data"], kd.mock_tpus("v5e:2x4"))
    with kd.DataParallel(mesh).scope(), kd.deferred():
        model = gpt()
    with pytest.raises(ValueError, match=r"'embedding/embeddings'.* 8 devices \(TPU v5 lite\)"):
        kd.materialize(model)
