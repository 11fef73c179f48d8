"""Where `keras.distribution` crashes, replicates silently or accepts mistakes, and keras_dist does not.

Each test runs one scenario on both: `KERAS` (the module `keras.distribution`) and `kd`. Its first assertions pin what
Keras 3.15 does, so a test that fails there tells that Keras was mended; the others are what keras_dist promises.
"""

import itertools
import re

import jax
import keras
import numpy as np
import pytest
from keras.src.layers import layer
from support.compilers import needs_libtpu
from support.keras_scenarios import (
    KERAS,
    OLDER_KERAS,
    X,
    Y,
    check_as_on_one_device,
    fit,
    model_parallel,
    raises_error_of_jax,
    raises_indivisible,
    run,
    shard_shape,
    start_anew,
)
from support.kernels_on_cpus import use_kernel_of
from support.strategy_models import scope

import keras_dist as kd
from keras_dist.attention import attention
from keras_dist.planning.targets.target_platform import platform_overridden


def mesh_2x4(api, names=("data", "model")):
    return api.DeviceMesh((2, 4), list(names))


# ------------------------------------------------------------------------------------- distributions and their mesh


def test_data_parallel_on_a_2d_mesh_warns_and_uses_the_first_axis():
    with pytest.raises(TypeError, match="category must be a Warning subclass"):
        KERAS.DataParallel(mesh_2x4(KERAS))
    with pytest.warns(UserWarning, match="1D mesh.*'data'"):
        distribution = kd.DataParallel(mesh_2x4(kd))
    assert distribution.batch_dim_name == "data"
    assert distribution.num_model_replicas == 2


@pytest.mark.filterwarnings("ignore:DataParallel expects a 1D mesh")
def test_data_parallel_on_a_2d_mesh_trains():
    check_as_on_one_device(fit, distribution=lambda api: api.DataParallel(mesh_2x4(api)))


def test_data_parallel_rejects_an_empty_list_of_devices():
    assert KERAS.DataParallel(devices=[]).device_mesh.shape == (8,)  # all of them
    with pytest.raises(ValueError, match=r"devices=\[\]"):
        kd.DataParallel(devices=[])


def test_model_parallel_rejects_misspelled_arguments():
    def misspelled(api):
        return api.ModelParallel(layout_map=api.LayoutMap(mesh_2x4(api)), batch_dim="model")

    assert misspelled(KERAS).batch_dim_name == "data"
    with pytest.raises(TypeError, match="batch_dim"):
        misspelled(kd)


@pytest.mark.parametrize("value", ["foo", 8, kd.DataParallel])
def test_set_distribution_rejects_anything_but_a_distribution(value):
    KERAS.set_distribution(value)
    assert KERAS.distribution() is value
    KERAS.set_distribution(None)
    with pytest.raises(TypeError, match="set_distribution"):
        kd.set_distribution(value)
    assert kd.distribution() is None


def test_a_rejected_distribution_leaves_the_installed_one():
    installed = kd.DataParallel()
    kd.set_distribution(installed)
    with pytest.raises(TypeError, match="set_distribution"):
        kd.set_distribution("foo")
    assert kd.distribution() is installed


# ------------------------------------------------------------------------------------------------------- layout maps


def test_layout_maps_accept_lists_of_axes():
    def axes(api):
        layout_map = api.LayoutMap(mesh_2x4(api))
        layout_map["dense/kernel"] = [None, "model"]
        return layout_map["dense/kernel"].axes

    with pytest.raises(ValueError, match="should be a TensorLayout type"):
        axes(KERAS)
    assert axes(kd) == (None, "model")


def test_a_layout_in_two_maps_uses_the_mesh_of_each():
    def shapes(api):
        layout = api.TensorLayout((None, "model"))
        maps = [api.LayoutMap(api.DeviceMesh(shape, ["data", "model"])) for shape in ((2, 4), (4, 2))]
        for layout_map in maps:
            layout_map["dense/kernel"] = layout
        return [layout_map["dense/kernel"].backend_layout.shard_shape((8, 8)) for layout_map in maps]

    assert shapes(KERAS) == [(8, 2), (8, 2)]
    assert shapes(kd) == [(8, 2), (8, 4)]


def test_an_invalid_regex_raises_when_its_rule_is_added():
    def insert(api):
        layout_map = api.LayoutMap(mesh_2x4(api))
        layout_map["(dense/kernel"] = (None, "model")
        return layout_map

    accepted = insert(KERAS)
    with pytest.raises(re.error, match="unterminated subpattern"):
        accepted["conv/kernel"]
    with pytest.raises(ValueError, match=r"\(dense/kernel.*unterminated subpattern"):
        insert(kd)


def test_membership_in_a_layout_map():
    def contained(api):
        layout_map = api.LayoutMap(mesh_2x4(api))
        layout_map["dense.*/kernel"] = (None, "model")
        return ["dense_1/kernel" in layout_map, "dense_1/bias" in layout_map, "anything" in layout_map]

    assert contained(KERAS) == [True, True, True]
    assert contained(kd) == [True, False, False]


def test_get_returns_the_default():
    def get(api):
        layout_map = api.LayoutMap(mesh_2x4(api))
        layout_map["dense.*/kernel"] = (None, "model")
        return layout_map.get("anything", "default"), layout_map.get("dense_1/kernel", "default")

    missing, found = get(KERAS)
    assert missing is None
    assert found.axes == (None, "model")
    missing, found = get(kd)
    assert missing == "default"
    assert found.axes == (None, "model")


# --------------------------------------------------------------------------------- rules that do not fit their variable


def build_layer(api, layer, *shapes, rules=None):
    """Builds a layer under a distribution with some rules."""
    with model_parallel(api, rules).scope():
        layer.build(*shapes)
    return layer


def assert_failed_build_created_nothing(layer, *shapes):
    """Asserts that a failed build left no variable, and that the layer can be built without the rule."""
    assert not layer.built
    assert layer.weights == []
    layer.build(*shapes)
    assert [variable.name for variable in layer.weights] == ["kernel", "bias"]


def test_a_dim_that_the_axis_does_not_divide_raises_with_path_and_rule():
    rules, shape = {".*kernel": (None, "model")}, (None, 4)
    with raises_indivisible() as error:
        build_layer(KERAS, keras.layers.Dense(6, name="odd"), shape, rules=rules)
    assert "odd" not in str(error.value)
    layer = keras.layers.Dense(6, name="odd")
    with pytest.raises(ValueError, match=re.escape("'odd/kernel' (shape (4, 6)) by the rule '.*kernel'")) as error:
        build_layer(kd, layer, shape, rules=rules)
    assert "axis 'model' (size 4)" in str(error.value)
    assert_failed_build_created_nothing(layer, shape)


def test_a_rule_with_more_entries_than_dims_raises_with_path_and_rule():
    rules, shape = {".*kernel": (None, None, "model")}, (None, 4)
    with pytest.raises(IndexError, match="list index out of range"):
        build_layer(KERAS, keras.layers.Dense(8, name="flat"), shape, rules=rules)
    layer = keras.layers.Dense(8, name="flat")
    with pytest.raises(ValueError, match=re.escape("'flat/kernel' (shape (4, 8)) by the rule '.*kernel'")) as error:
        build_layer(kd, layer, shape, rules=rules)
    assert "3 entries, but the tensor has 2 dims" in str(error.value)
    assert_failed_build_created_nothing(layer, shape)


def test_a_rule_with_an_axis_twice_raises_when_it_is_added():
    rules, shape = {".*kernel": ("model", "model")}, (None, 4)
    with raises_error_of_jax("DuplicateSpecError", "duplicate entries"):
        build_layer(KERAS, keras.layers.Dense(4, name="square"), shape, rules=rules)
    # keras_dist rejects the rule before any variable is created, and leaves the map unchanged.
    layout_map = kd.LayoutMap(mesh_2x4(kd))
    with pytest.raises(ValueError, match=re.escape("Rule '.*kernel'") + ".*axis 'model' is used twice"):
        layout_map[".*kernel"] = ("model", "model")
    assert len(layout_map) == 0


def test_key_heads_that_the_axis_does_not_divide_raise_with_path():
    rules, shapes = {".*(query|key|value)/kernel": (None, "model", None)}, ((None, 3, 16), (None, 3, 16))

    def attention():
        return keras.layers.GroupQueryAttention(2, 4, 2, name="attention")

    with raises_indivisible() as error:
        build_layer(KERAS, attention(), *shapes, rules=rules)
    assert "attention" not in str(error.value)
    with pytest.raises(ValueError, match=re.escape("'attention/key/kernel' (shape (16, 2, 2))")):
        build_layer(kd, attention(), *shapes, rules=rules)


def test_a_dim_over_two_axes():
    rules = {".*kernel": (("data", "model"), None)}
    with pytest.raises(ValueError, match="Invalid axis names for Layout"):
        build_layer(KERAS, keras.layers.Dense(4), (None, 16), rules=rules)
    assert shard_shape(build_layer(kd, keras.layers.Dense(4), (None, 16), rules=rules).kernel) == (2, 4)


def test_a_dim_over_two_axes_trains():
    rules = {".*a/kernel": (None, ("data", "model")), ".*a/bias": (("model", "data"),)}
    check_as_on_one_device(fit, distribution=lambda api: model_parallel(api, rules))


# --------------------------------------------------------- the same rules for a Sequential and for a functional model


def sequential():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="dense")])


def functional():
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(8, name="dense")(inputs))


def kernel_shards(api, build, path, rules):
    """The shard of the kernel on one device, for a model and for the same model loaded from a file."""
    start_anew()
    with model_parallel(api, rules).scope():
        model = build()
        model.save(path)
        loaded = keras.saving.load_model(path)
    return [shard_shape(each.get_layer("dense").kernel) for each in (model, loaded)]


def test_rules_of_a_functional_model_match_the_layers_of_a_sequential(tmp_path):
    path, rules = tmp_path / "model.keras", {"dense/kernel": (None, "model")}
    assert kernel_shards(KERAS, functional, path, rules) == [(4, 2), (4, 2)]
    # Keras replicates silently. In older ones until the model is loaded: then its paths lack their first name.
    assert kernel_shards(KERAS, sequential, path, rules) == [(4, 8), (4, 2) if OLDER_KERAS else (4, 8)]
    assert kernel_shards(kd, functional, path, rules) == [(4, 2), (4, 2)]
    assert kernel_shards(kd, sequential, path, rules) == [(4, 2), (4, 2)]


def test_rules_match_the_second_sequential_of_a_process():
    def second(api):
        start_anew()
        with model_parallel(api, {"dense/kernel": (None, "model")}).scope():
            sequential()
            model = sequential()
        assert model.weights[0].path == "sequential_1/dense/kernel"
        return shard_shape(model.weights[0])

    assert second(KERAS) == (4, 8)
    assert second(kd) == (4, 2)


@pytest.mark.parametrize("pattern", ["sequential/dense/kernel", "sequential.*/kernel"])
def test_a_rule_with_the_name_of_the_sequential_wins(pattern, tmp_path):
    rules = {"dense/kernel": (None, "model"), pattern: ("data", None)}
    model, loaded = kernel_shards(kd, sequential, tmp_path / "model.keras", rules)
    assert model == (2, 8)
    assert loaded == ((4, 2) if OLDER_KERAS else (2, 8))  # its path is `dense/kernel` in older ones


def test_a_name_given_by_the_user_is_part_of_the_path():
    with model_parallel(kd, {"dense/kernel": (None, "model")}).scope():
        layers = [keras.Input((4,)), keras.layers.Dense(8, name="dense")]
        model = keras.Sequential(layers, name="tower")
    assert model.weights[0].path == "tower/dense/kernel"
    assert shard_shape(model.weights[0]) == (4, 8)


# --------------------------------------------------------------------------------------------- losses that layers add


def reusing_ids():
    """An `id` that gives tracers those of earlier ones, as Python does with freed ones: 1 and 2, then 2 and 1."""
    numbers, known = itertools.cycle([1, 2, 2, 1]), []

    def number(thing):
        if not isinstance(thing, jax.core.Tracer):
            return id(thing)
        for each, its in known:
            if each is thing:
                return its
        known.append((thing, next(numbers)))
        return known[-1][1]

    return number


def test_losses_that_layers_add_are_found_again_by_their_id(monkeypatch):
    def build():
        inputs = keras.Input((4,))
        outputs = keras.layers.Dense(8, activity_regularizer="l2")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1, activity_regularizer="l1")(outputs))
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    def fit_and_evaluate(model):
        monkeypatch.setattr(layer, "id", reusing_ids(), raising=False)
        return fit(model)[0], model.evaluate(X, Y, batch_size=8, verbose=0)

    fitted, evaluated = run(None, fit_and_evaluate, build)[0]
    # The second trace of a model lacks the loss of its first layer. Newer ones forget ids in each stateless call.
    assert (evaluated < 0.99 * fitted) == OLDER_KERAS
    fitted, evaluated = run(kd, fit_and_evaluate, build)[0]
    np.testing.assert_allclose(evaluated, fitted, rtol=1e-5)


# --------------------------------------------------------------------------------------------------- attention on TPUs

TOKENS, WIDTH = 128, 32


def attention_step(api, devices=None, causal=False):
    """A function of an attention layer, compiled under a module's distribution (None: none), and its arguments."""
    start_anew()
    distribution = None if api is None else api.DataParallel(devices=devices)
    with scope(distribution):
        layer = keras.layers.MultiHeadAttention(4, 16)
        layer.build((8, TOKENS, WIDTH), (8, TOKENS, WIDTH))
    x = np.random.default_rng(0).normal(size=(8, TOKENS, WIDTH)).astype("float32")
    if distribution is not None:
        layout = distribution.get_data_layout(x.shape)
        x = jax.device_put(x, layout.backend_layout)

    def call(weights, x):
        with scope(distribution):
            return layer.stateless_call(weights, [], x, x, use_causal_mask=causal)[0]

    return jax.jit(call), [variable.value for variable in layer.trainable_variables], x


def test_attention_on_a_mesh_of_tpus(monkeypatch):
    def lowered(api):
        step, *arguments = attention_step(api)
        with platform_overridden(kd.mock_tpus("v5e:2x4")):
            return step.trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()

    with pytest.raises(NotImplementedError, match="Mosaic kernels cannot be automatically partitioned"):
        lowered(KERAS)
    monkeypatch.setattr(attention, "kernel_platform", lambda mesh: "tpu")
    assert lowered(kd).count("tpu_custom_call") == 1


def test_numbers_of_attention_on_one_tpu(monkeypatch):
    def outputs(api):
        step, *arguments = attention_step(api, devices=jax.devices("cpu")[:1])
        with platform_overridden(kd.mock_tpus("v5e:1x1")):
            return np.asarray(step(*arguments))

    step, *arguments = attention_step(None)
    expected = np.asarray(step(*arguments))
    use_kernel_of("tpu", monkeypatch)
    # Keras does not scale the logits, and the attention is causal.
    assert np.abs(outputs(None) - expected).max() > np.abs(expected).max()
    np.testing.assert_allclose(outputs(kd), expected, rtol=1e-5, atol=1e-6)


def test_causal_attention_on_tpus_has_no_logits_of_all_tokens(monkeypatch):
    def kernels_and_logits(api):
        step, *arguments = attention_step(api, causal=True)
        with platform_overridden(kd.mock_tpus("v5e:2x4")):
            program = str(jax.make_jaxpr(step)(*arguments))
        return program.count("pallas_call["), f"f32[8,4,{TOKENS},{TOKENS}]" in program

    assert kernels_and_logits(KERAS) == (0, True)
    monkeypatch.setattr(attention, "kernel_platform", lambda mesh: "tpu")
    assert kernels_and_logits(kd) == (1, False)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.usefixtures("full_compilation")
@needs_libtpu
def test_memory_of_causal_attention_compiled_for_tpus():
    def model():
        x = keras.Input((tokens, WIDTH))
        model = keras.Model(x, keras.layers.MultiHeadAttention(8, 128)(x, x, use_causal_mask=True))
        model.compile("sgd", "mse")
        return model

    tpus, tokens = kd.target("v5e:2x4"), 4096
    logits, query = 4 * 8 * tokens**2, 4 * 8 * 128 * tokens

    def on_one_tpu(value):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=jax.sharding.SingleDeviceSharding(tpus[0]))

    of_keras = model()
    arguments = [value.value for value in of_keras.trainable_variables], np.ones((1, tokens, WIDTH), "float32")
    with platform_overridden(tpus):
        step = jax.jit(jax.grad(lambda weights, x: of_keras.stateless_call(weights, [], x)[0].sum()))
        compiled = step.lower(*jax.tree.map(on_one_tpu, arguments)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes > logits
    plan = kd.plan(model, kd.DataParallel(kd.create_device_mesh("data:8", devices=tpus)), 8)
    assert [(each.implementation, each.calls) for each in plan.attention] == [("splash attention", 1)]
    assert plan.memory.temporaries < 9 * query  # queries, keys, values and outputs, and their gradients
