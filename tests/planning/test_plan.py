"""Plans of models and batches of all kinds, and arguments that cannot be planned."""

import dataclasses
import json
import re

import jax
import keras
import numpy as np
import pytest
from keras import layers
from support.planned_models import LAYOUTS, MODELS, gpt, perceptron, rules, subclassed, tensor_parallel
from support.slow_cases import slow

import keras_dist as kd
from keras_dist._keras import active_distribution
from keras_dist._keras.internals import variable_value
from keras_dist.planning.compiling.abstract_step import prepared_step
from keras_dist.planning.targets.target import require_one_target


def figures(planned):
    variables = [dataclasses.replace(v, path=v.path.split("/", 1)[-1]) for v in planned.variables]
    return planned.memory, variables, planned.traffic, planned.flops, planned.model_flops


@pytest.mark.parametrize(
    ("build", "layout"),
    [(perceptron, "tensor parallel"), slow(gpt, "tensor parallel"), slow(gpt, "fully sharded")],
)
def test_build_functions_deferred_models_and_real_models_have_the_same_plan(build, layout):
    distribution = LAYOUTS[layout]()
    of_function = kd.plan(build, distribution, 16)
    with distribution.scope():
        with kd.deferred():
            deferred = build()
        real = build()
    on_one_device = build()
    for model in (deferred, real, on_one_device):
        assert figures(kd.plan(model, distribution, 16)) == figures(of_function)


def test_a_passed_model_is_unchanged():
    distribution = LAYOUTS["tensor parallel"]()
    x, y = MODELS["perceptron"][1]
    histories = []
    for plans in (False, True):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(4)
        with distribution.scope():
            model = perceptron()
            if plans:
                kd.plan(model, distribution, (x, y))
                kd.plan(perceptron, distribution, (x, y))
                assert not model.optimizer.built
                assert layers.Dense(2).name == "dense"
                keras.utils.clear_session(free_memory=False)
                assert all(variable_value(variable) is not None for variable in model.variables)
            histories.append(model.fit(x, y, batch_size=4, epochs=2, verbose=0).history["loss"])
            if plans:
                before = model.get_weights()
                kd.plan(model, distribution, (x, y))
                model.optimizer.iterations.assign_add(0)
                for value, expected in zip(model.get_weights(), before, strict=True):
                    np.testing.assert_array_equal(value, expected)
                model.fit(x, y, batch_size=4, verbose=0)
    assert histories[0] == histories[1]


def test_automatic_names_are_the_same_in_every_plan():
    def build(depth=3):
        hidden = [layers.Dense(16) for _ in range(depth)]
        model = keras.Sequential([keras.Input((16,)), *hidden])
        model.compile("adam", "mse")
        return model

    distribution = rules(kd.create_device_mesh("data:2,model:4"), {r"dense(_\d+)?/kernel": (None, "model")})
    plans = [kd.plan(build, distribution, 16), kd.plan(build, distribution, 16)]
    plans.append(kd.plan(build, distribution, 16, depth=3, compile_depths=(1, 2)))
    paths = [[variable.path for variable in planned.variables] for planned in plans]
    assert paths[0] == paths[1] == paths[2]
    assert paths[0][0] == "sequential/dense/kernel"


SLOW_MODELS = [slow(name) for name in ("gpt", "convnet", "two branches")]


@pytest.mark.parametrize("name", ["perceptron", "subclassed", *SLOW_MODELS])
def test_batch_as_arrays_shapes_or_number_of_rows(name):
    build, (x, y) = MODELS[name]
    distribution = LAYOUTS["fully sharded"]()
    spec = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), (x, y))
    of_arrays = kd.plan(build, distribution, (x, y))
    assert figures(kd.plan(build, distribution, spec)) == figures(of_arrays)
    if name == "subclassed":
        with pytest.raises(ValueError, match="'residual' from batch=16"):
            kd.plan(build, distribution, 16)
        of_sizes = kd.plan(build, distribution, (x.shape, y.shape))
        assert figures(of_sizes) == figures(of_arrays)
    else:
        assert figures(kd.plan(build, distribution, 16)) == figures(of_arrays)


def test_sample_weights_and_float64_are_converted_as_in_fit():
    x, y = (array.astype("float64") for array in MODELS["perceptron"][1])
    planned = kd.plan(perceptron, LAYOUTS["data parallel"](), (x, y, np.ones(16)))
    assert planned.batch == ("float32[16, 16]", "float32[16, 8]", "float32[16]")
    assert planned.memory.batch == 4 * (2 * 16 + 2 * 8 + 2)


def test_batch_that_the_axis_does_not_divide():
    planned = kd.plan(perceptron, LAYOUTS["data parallel"](), 12)
    assert planned.memory.batch == 12 * (16 + 8) * 4


def test_variables_have_their_rule_layout_and_bytes():
    mesh = kd.create_device_mesh("data:2,model:4")
    planned = kd.plan(gpt, tensor_parallel(mesh), 16)
    variables = {v.path: v for v in planned.variables}
    up = variables["block1_up/kernel"]
    assert (up.part, up.shape, up.dtype, up.rule) == ("weights", (32, 128), "float32", ".*(up|head)/kernel")
    assert (up.axes, up.shard_shape, up.bytes) == ((None, "model"), (32, 32), 4096)
    slot = variables["adam_w/block1_up_kernel_velocity"]
    assert (slot.part, slot.rule, slot.bytes) == ("optimizer", up.rule, 4096)
    assert variables["block1_up/bias"].rule is None
    assert variables["accuracy/total"].part == "other"
    assert planned.parameters == gpt().count_params()


def test_layouts_set_on_variables_are_used():
    mesh = kd.create_device_mesh("data:2,model:4")

    class Own(layers.Layer):
        def build(self, shape):
            layout = kd.TensorLayout((None, "model"), mesh)
            self.w = keras.Variable("ones", shape=(shape[-1], 8), layout=layout, name="w")

        def call(self, x):
            return x @ self.w

    def build():
        model = keras.Sequential([keras.Input((4,)), Own()])
        model.compile("adam", "mse")
        return model

    planned = kd.plan(build, rules(mesh, {}), 16)
    assert planned.memory.weights == 4 * 2 * 4
    assert planned.memory.optimizer == 2 * planned.memory.weights + 8


def test_custom_train_step_is_compiled():
    class Own(keras.Model):
        def train_step(self, state, data):
            trainable, *rest = state
            x, _ = data
            return {"sum": keras.ops.sum(x)}, ([value * 2 for value in trainable], *rest)

    def build():
        x = keras.Input((16,))
        model = Own(x, layers.Dense(8, name="up")(x))
        model.compile("sgd", "mse")
        return model

    planned = kd.plan(build, LAYOUTS["data parallel"](), 16)
    assert planned.flops == planned.model_flops == 0
    assert [(t.kind, t.bytes) for t in planned.traffic] == [("all-reduce", 4)]


def test_large_constants_cause_a_warning():
    table = np.ones((2**12, 2**10), "float32")

    class Bakes(layers.Layer):
        def call(self, x):
            return x @ keras.ops.transpose(table)

    def build():
        model = keras.Sequential([keras.Input((2**10,)), Bakes(), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    with pytest.warns(UserWarning, match=r"16 MiB or more, the largest float32\[(4096, 1024|1024, 4096)\]"):
        kd.plan(build, kd.DataParallel(devices=["cpu:0", "cpu:1"]), 8)


def test_plan_as_data():
    planned = kd.plan(perceptron, LAYOUTS["tensor parallel"](), 16)
    data = json.loads(planned.to_json())
    assert data == json.loads(planned.to_json(indent=None))
    assert data["mesh"] == {"data": 2, "model": 4}
    assert (
        data["memory"]["total"]
        == planned.memory.total
        == sum(v for k, v in data["memory"].items() if k not in ("total", "state", "capacity"))
    )
    assert (
        data["wire_bytes"]
        == planned.wire_bytes
        == pytest.approx(sum(c["wire_bytes"] * c["count"] for c in data["collectives"]))
    )
    assert len(data["variables"]) == len(planned.variables)
    assert planned.model in str(planned)
    assert planned.picture() in str(planned) or "weights" in planned.picture()
    assert "<" in planned._repr_html_()


@pytest.mark.slow
def test_plan_that_does_not_fit_names_the_largest_values():
    chip = kd.Hardware("tiny-cpu", "cpu", "tiny", memory_bytes=1000, sources={"memory_bytes": "this test"})
    planned = kd.plan(lambda: gpt(1, width=64), LAYOUTS["data parallel"](), 16)
    assert planned.fits in (True, None)
    small = dataclasses.replace(
        planned, fits=False, memory=dataclasses.replace(planned.memory, capacity=chip.memory_bytes)
    )
    largest = small.largest_holders(3)
    assert [size for _, size in largest] == sorted((size for _, size in largest), reverse=True)
    assert "does not fit" in repr(small)
    assert largest[0][0] in str(small)


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: None, r"None \(NoneType\)"),
        (lambda: layers.Dense(3), "<Dense"),
        (lambda: keras.Sequential([keras.Input((3,)), layers.Dense(2)]), "'sequential' is not compiled"),
    ],
)
def test_build_function_must_return_a_compiled_model(build, message):
    with pytest.raises(ValueError, match=message):
        kd.plan(build, kd.DataParallel(), 8)


@pytest.mark.parametrize("model", [3, None, "model.py"])
def test_other_objects_in_place_of_a_model_are_refused(model):
    with pytest.raises(TypeError, match=re.escape(f"{model!r} ({type(model).__name__})")):
        kd.plan(model, kd.DataParallel(), 8)


def test_unbuilt_model_is_refused():
    with pytest.raises(ValueError, match="'residual'"):
        kd.plan(subclassed(), kd.DataParallel(), ((16, 32), (16, 8)))


@pytest.mark.parametrize(
    ("distribution", "named"),
    [
        (None, "None of type NoneType"),
        ("data:8", "'data:8' of type str"),
        (keras.distribution.DataParallel, "the class DataParallel"),
    ],
)
def test_other_objects_in_place_of_a_distribution_are_refused(distribution, named):
    with pytest.raises(TypeError, match=named):
        kd.plan(gpt, distribution, 8)


def test_unknown_step_is_refused():
    with pytest.raises(ValueError, match="'fit'"):
        kd.plan(gpt, kd.DataParallel(), 8, step="fit")


@pytest.mark.parametrize(
    ("depth", "compile_depths"), [(3, (2, 4)), (8, (4, 2)), (8, (0, 2)), (8, 4), (8.0, (2, 4)), (4, (2, 4))]
)
def test_depths_that_do_not_increase_are_refused(depth, compile_depths):
    with pytest.raises(ValueError, match=re.escape(f"depth={depth!r} and compile_depths={compile_depths!r}")):
        kd.plan(gpt, kd.DataParallel(), 8, depth=depth, compile_depths=compile_depths)


def test_depth_with_a_model_is_refused():
    with pytest.raises(TypeError, match=r"depth=8.*<Functional"):
        kd.plan(gpt(), kd.DataParallel(), 8, depth=8)


def test_depth_with_a_build_function_without_parameter_is_refused():
    with pytest.raises(TypeError, match=r"depth=8.*perceptron\(\)"):
        kd.plan(perceptron, kd.DataParallel(), 16, depth=8)


def test_depth_builds_each_model_once():
    built = []

    def build(depth):
        built.append(depth)
        model = keras.Sequential([keras.Input((8,)), *(layers.Dense(8) for _ in range(depth))])
        model.compile("sgd", "mse")
        return model

    planned = kd.plan(build, kd.DataParallel(), 8, depth=5, compile_depths=(1, 2))
    assert sorted(built) == [1, 2, 5]
    assert planned.memory.weights == 5 * (8 * 8 + 8) * 4


def with_two_inputs(as_dict=False):
    tokens = keras.Input((16,), dtype="int32", name="tokens")
    image = keras.Input((8,), dtype="float16", name="image")
    x = layers.Flatten()(layers.Embedding(32, 4)(tokens))
    outputs = {
        "label": layers.Dense(3, name="label")(layers.Concatenate()([x, layers.Dense(2)(image)])),
        "size": layers.Dense(1, name="size")(x),
    }
    model = keras.Model({"tokens": tokens, "image": image} if as_dict else [image, tokens], outputs, name="two")
    model.compile("sgd", {"label": "sparse_categorical_crossentropy", "size": keras.losses.MeanSquaredError()})
    return model


def test_shapes_have_the_dtypes_of_inputs_and_losses():
    y, planned = {"size": (8, 1), "label": (8,)}, {"label": "int32[8]", "size": "float32[8, 1]"}
    by_name, in_order = {"tokens": (8, 16), "image": (8, 8)}, [(8, 8), (8, 16)]
    for model, x, expected in (
        (with_two_inputs(), in_order, ["float16[8, 8]", "int32[8, 16]"]),
        (with_two_inputs(), by_name, {"image": "float16[8, 8]", "tokens": "int32[8, 16]"}),
        (with_two_inputs(as_dict=True), by_name, {"image": "float16[8, 8]", "tokens": "int32[8, 16]"}),
    ):
        with prepared_step(model, kd.DataParallel(), (x, y, (8,)), "train") as step:
            batch = jax.tree.map(lambda spec: f"{spec.dtype}{list(spec.shape)}", step.batch)
        assert batch == (expected, planned, "float32[8]")


@pytest.mark.parametrize("losses", [{"size": "mse", "kind": "sparse_categorical_crossentropy"}, None])
@pytest.mark.parametrize("y", [[(8, 1), (8,)], {"kind": (8,), "size": (8, 1)}])
def test_losses_are_those_of_outputs_whose_names_are_in_another_order(losses, y):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [layers.Dense(1, name="size")(inputs), layers.Dense(3, name="kind")(inputs)])
    model.compile("sgd", losses or ["mse", "sparse_categorical_crossentropy"])
    with prepared_step(model, kd.DataParallel(), ((8, 4), y), "train") as step:
        targets = step.batch[1]
    size, kind = targets if isinstance(y, list) else (targets["size"], targets["kind"])
    assert (size.dtype, kind.dtype) == ("float32", "int32")
    with prepared_step(model, kd.DataParallel(), 8, "train") as step:
        assert [(spec.dtype, spec.shape) for spec in step.batch[1]] == [("float32", (8, 1)), ("int32", (8,))]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            ((16, 7), (16, 8)),
            r"x float32\[16, 7\], y float32\[16, 8\]: ValueError",
        ),
        (((16, 16), (16, 3)), r"x float32\[16, 16\], y float32\[16, 3\]"),
        (((16, 16), (8, 8)), r"y float32\[8, 8\]"),
        (((None, 16), (None, 8)), r"\[None, 16\]"),
        (((0, 16), (0, 8)), r"\[0, 16\]"),
        (
            ((16, 16), (16, 8), (16,), (16,)),
            "tuple of 4",
        ),
        ("64", r"'64' \(str\)"),
        ((array for array in ()), r"\(generator\)"),
        ([[1.0, 2.0]], r"'1.0' \(float\)"),
        (np.array(["a"]), r"\(ndarray\)"),
        (0, "batch=0"),
        (jax.ShapeDtypeStruct((16, 16), "float32"), r"x float32\[16, 16\]: it has no targets"),
    ],
)
def test_unsuitable_batches_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        kd.plan(perceptron, kd.DataParallel(), batch)


def test_eager_models_are_refused():
    def build():
        model = perceptron()
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    with pytest.raises(ValueError, match="run_eagerly=True"):
        kd.plan(build, kd.DataParallel(), 16)


def test_layer_in_place_of_a_model_is_refused():
    with pytest.raises(TypeError, match=r"<Dense.*\(Dense\)"):
        kd.plan(layers.Dense(3), kd.DataParallel(), 16)


def test_a_batch_may_have_an_empty_dim_other_than_its_rows():
    """Prompts that are not given, for example: no boxes for 16 images."""

    def build():
        images, boxes = keras.Input((16,), name="images"), keras.Input((None, 16), name="boxes")
        summed = layers.Lambda(lambda x: x.sum(1), output_shape=(16,))(boxes)
        model = keras.Model([images, boxes], layers.Dense(8)(images + summed))
        model.compile("sgd", "mse")
        return model

    planned = kd.plan(build, kd.DataParallel(), ([(16, 16), (16, 0, 16)], (16, 8)))
    assert "float32[16, 0, 16]" in str(planned.batch)
    assert planned.memory.batch == 2 * 4 * (16 + 8)
    with pytest.raises(ValueError, match=r"\[0, 1, 16\]"):
        kd.plan(build, kd.DataParallel(), ([(16, 16), (0, 1, 16)], (16, 8)))


def test_input_shapes_with_none_need_a_full_batch():
    def build():
        model = keras.Sequential([keras.Input((None, 4)), layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ValueError, match=r"batch=8: .*\(None, None, 4\)"):
        kd.plan(build, kd.DataParallel(), 8)
    assert kd.plan(build, kd.DataParallel(), ((8, 3, 4), (8, 3, 2))).memory.batch == 3 * 4 * 4 + 3 * 2 * 4


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda x: x[x > 0], "NonConcreteBooleanIndexError"),
        (lambda x: x if x[0, 0] > 0 else -x, "TracerBoolConversionError"),
        (lambda x: x * float(x[0, 0]), "ConcretizationTypeError"),
        (lambda x: np.asarray(x), "TracerArrayConversionError"),
    ],
)
def test_what_depends_on_values_is_refused_with_its_layer(function, error):
    class Positive(layers.Layer):
        def call(self, x):
            return function(x)

        def compute_output_shape(self, input_shape):
            return input_shape

    def build():
        model = keras.Sequential([keras.Input((4,)), Positive()])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ValueError, match=rf"Positive\.call\(\).*{error}"):
        kd.plan(build, kd.DataParallel(), 8)


def test_unequal_blocks_are_refused():
    def build(depth):
        hidden = [layers.Dense(16 if number < 5 else 32) for number in range(depth)]
        model = keras.Sequential([keras.Input((16,)), *hidden, layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ValueError, match=r"8 blocks.* bytes with 2 blocks, .* bytes with 4"):
        kd.plan(build, kd.DataParallel(), 16, depth=8)


def test_indivisible_batch_is_noted():
    in_parts = kd.DataParallel(step_options=kd.StepOptions(microbatches=2))
    [note] = kd.plan(perceptron, in_parts, 12).notes
    assert note.startswith("Batch size 12 is not divisible by 8")
    assert kd.plan(perceptron, in_parts, 16).notes == kd.plan(perceptron, kd.DataParallel(), 12).notes == ()


def test_unused_mesh_axis_is_noted():
    [note] = kd.plan(perceptron, LAYOUTS["replicated on a 2-D mesh"](), 16).notes
    assert note.startswith("Mesh axis 'model' (size 2) is unused")
    assert kd.plan(perceptron, tensor_parallel(kd.create_device_mesh("data:4,model:2")), 16).notes == ()


@pytest.mark.slow
def test_the_exchange_of_attention_is_part_of_a_plan():
    mesh = kd.create_device_mesh("data:2,context:4")
    planned = kd.plan(gpt, kd.DataParallel(mesh, sequence_dim_name="context"), 16, depth=6, compile_depths=(1, 2))
    [attention] = planned.attention
    assert attention.calls == 6
    assert attention.exchange == "all-to-all over 'context'"
    assert attention.exchange in str(planned)
    assert json.loads(planned.to_json())["attention"][0]["exchange"] == attention.exchange
    [without] = kd.plan(gpt, kd.DataParallel(), 16).attention
    assert without.exchange is None
    assert not [note for note in planned.notes if "unused" in note]


def test_an_axis_of_sequences_is_used_without_attention():
    def build():
        inputs = keras.Input((16, 8))
        model = keras.Model(inputs, layers.Dense(8)(inputs))
        model.compile("sgd", "mse")
        return model

    mesh = kd.create_device_mesh("data:2,context:4")
    planned = kd.plan(build, kd.DataParallel(mesh, sequence_dim_name="context"), 16, step="predict")
    assert planned.notes == ()
    assert planned.memory.batch == 16 * 16 * 8 * 4 // 8


@pytest.mark.parametrize("make", [lambda model: model, lambda model: lambda: model])
def test_wrapped_optimizer_is_built_once_and_the_model_is_unchanged(make):
    distribution = kd.DataParallel()
    x, y = MODELS["perceptron"][1]
    with distribution.scope():
        model = perceptron()
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse", metrics=["mae"])
        before = kd.plan(make(model), distribution, (x, y))
        model.fit(x, y, verbose=0)
        count = len(model.optimizer.variables)
        after = kd.plan(make(model), distribution, (x, y))
        assert len(model.optimizer.variables) == count
        model.fit(x, y, verbose=0)
    assert before.memory == after.memory
    held = sum(v.value.addressable_shards[0].data.nbytes for v in model.optimizer.variables)
    assert after.memory.optimizer == held


def test_mock_devices_have_no_compiler():
    mesh = kd.create_device_mesh("data:2", devices=kd.mock_gpus(1)[:2])
    with pytest.raises(ValueError, match=r"'mock GPU'.* nothing can be compiled for them"):
        kd.plan(perceptron, kd.DataParallel(mesh), 8)


def mesh_of_slices(slices):
    """A mesh whose devices lie on the slices of the given numbers."""
    slices = np.array(slices)
    free = {number: [] for number in range(slices.max() + 1)}
    for device in kd.mock_tpus("v5e:2x2", slices=len(free)):
        free[device.slice_index].append(device)
    devices = np.vectorize(lambda number: free[number].pop(0), otypes=[object])(slices)
    return kd.DeviceMesh(slices.shape, ["data", "model"][: slices.ndim], devices)


# libtpu ended the process on each of these.
@pytest.mark.parametrize(
    ("slices", "groups"),
    [
        ([0, 0, 0, 0, 1, 1], "'data'.* 2 and 4"),
        ([[0, 0, 0, 1], [0, 1, 1, 1]], "'data'.* 1 and 2"),
        ([[0, 0, 0, 1], [1, 1, 1, 0]], "'model'.* 1 and 3"),
        ([[0, 0, 1, 1], [0, 1, 0, 1]], "'data'.* 1 and 2"),
    ],
)
def test_irregular_slices_are_refused(slices, groups):
    mesh = mesh_of_slices(slices)
    with pytest.raises(ValueError, match=groups):
        kd.plan(perceptron, kd.DataParallel(mesh), 12)


@pytest.mark.parametrize("slices", [[0, 1, 1, 0], [[0, 0, 1, 1], [1, 1, 0, 0]], [[0, 1, 1, 0], [2, 2, 3, 3]]])
def test_regular_slices_in_any_order_are_accepted(slices):
    require_one_target(mesh_of_slices(slices))


def test_errors_of_layout_rules_are_raised_unchanged():
    mesh = kd.create_device_mesh("data:8")
    with pytest.raises(ValueError, match=r"Cannot shard 'perceptron/down/kernel'"):
        kd.plan(perceptron, rules(mesh, {".*up/kernel": ("data", None), ".*down/.*": ("data", None, None)}), 16)


def two_outputs(losses, by_name):
    inputs = keras.Input((8,))
    outputs = {name: layers.Dense(size, name=name)(inputs) for name, size in (("c", 3), ("a", 5))}
    model = keras.Model(inputs, outputs if by_name else list(outputs.values()))
    model.compile("adam", losses)
    return model


@pytest.mark.parametrize(
    ("losses", "by_name"),
    [(["mse", "mse"], False), ({"a": "mse", "c": "mse"}, False), (["mse", "mse"], True), ({"c": "mse"}, True)],
)
def test_targets_of_several_outputs_are_derived(losses, by_name):
    planned = kd.plan(lambda: two_outputs(losses, by_name), kd.DataParallel(), 8)
    expected = {"a": None if losses == {"c": "mse"} else "float32[8, 5]", "c": "float32[8, 3]"}
    assert planned.batch[1] == (expected if by_name else [expected["c"], expected["a"]])


def test_float_arrays_are_cast_as_in_fit():
    batch = (np.ones((8, 8), "float16"),)
    planned = kd.plan(lambda: two_outputs("mse", False), kd.DataParallel(), batch, step="predict")
    assert planned.batch == ("float32[8, 8]",)


def test_batches_of_an_execution_are_noted():
    def build():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(3)])
        model.compile("adam", "mse", steps_per_execution=32)
        return model

    [note] = [note for note in kd.plan(build, kd.DataParallel(), 64).notes if "steps_per_execution=32" in note]
    assert "holds the 32 batches of an execution" in note
    assert "11 KiB each" in note  # 8 rows of 11 numbers on each of 8 devices, 32 times


def test_a_plan_leaves_the_warning_of_idle_devices(monkeypatch):
    monkeypatch.setattr(active_distribution, "_intent", "a DataParallel was created")
    kd.plan(lambda: two_outputs("mse", False), kd.DataParallel(), 8)
    assert active_distribution._intent
