"""Batches that `keras.distribution` rejects or replicates; each scenario runs on it and on keras_dist."""

import jax
import keras
import numpy as np
import pytest
from support.keras_scenarios import (
    DEVICES,
    KERAS,
    OLDER_KERAS,
    ROWS,
    X,
    Y,
    check_as_on_one_device,
    dense_model,
    fit,
    model_parallel,
    raises_indivisible,
    run,
)
from support.slow_cases import slow, slow_unless

import keras_dist as kd

# ------------------------------------------------------------ batches that the batch axis does not divide (keras#21167)

RAGGED_X, RAGGED_Y = X[:13], Y[:13]  # batches of 8 and 5 rows over 8 devices


def deep_model():
    """A model whose numbers depend on the whole batch (BatchNormalization) and on random state (Dropout)."""
    layers = [
        keras.layers.Dense(4, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


class Rows(keras.utils.PyDataset):
    """The ragged rows in batches of 8."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        rows = slice(8 * index, 8 * index + 8)
        return RAGGED_X[rows], RAGGED_Y[rows]


def fit_tf_data(model):
    tf = pytest.importorskip("tensorflow")
    data = tf.data.Dataset.from_tensor_slices((RAGGED_X, RAGGED_Y)).batch(8)
    return model.fit(data, shuffle=False, verbose=0).history


def fit_grain(model):
    grain = pytest.importorskip("grain")
    rows = list(zip(RAGGED_X, RAGGED_Y, strict=True))
    return model.fit(grain.MapDataset.source(rows).batch(8), shuffle=False, verbose=0).history


def fit_weighted(model):
    weights = np.arange(13.0)
    return model.fit(RAGGED_X, RAGGED_Y, sample_weight=weights, batch_size=8, verbose=0).history


def fit_and_split(model):
    # 8 rows to train on, 5 to validate on
    return model.fit(RAGGED_X, RAGGED_Y, batch_size=8, validation_split=5 / 13, verbose=0).history


RUNS = {
    "fit": lambda model: model.fit(RAGGED_X, RAGGED_Y, batch_size=8, epochs=2, verbose=0).history,
    "evaluate": lambda model: model.evaluate(RAGGED_X, RAGGED_Y, batch_size=8, verbose=0),
    "predict": lambda model: model.predict(RAGGED_X, batch_size=8, verbose=0),
}
OTHER_RUNS = {
    "validation_data": lambda model: fit(model, validation_data=(RAGGED_X, RAGGED_Y)),
    "validation_split": fit_and_split,
    "train_on_batch": lambda model: [model.train_on_batch(RAGGED_X, RAGGED_Y) for _ in range(2)],
    "test_on_batch": lambda model: model.test_on_batch(RAGGED_X, RAGGED_Y),
    "sample_weight": fit_weighted,
    "PyDataset": lambda model: model.fit(Rows(), shuffle=False, verbose=0).history,
    "tf.data": fit_tf_data,
    "grain": fit_grain,
}
FAST_RUNS = "validation_split", "train_on_batch", "test_on_batch"  # sources of data: test_data_sources.py

runs = pytest.mark.parametrize("use", [slow_unless(name == "fit", use) for name, use in RUNS.items()], ids=RUNS)


@runs
def test_batch_norm_and_dropout_on_a_batch_that_the_axis_does_not_divide(use):
    with raises_indivisible():
        run(KERAS, use, deep_model)
    check_as_on_one_device(use, deep_model)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "use", [slow_unless(name in FAST_RUNS, use) for name, use in OTHER_RUNS.items()], ids=OTHER_RUNS
)
def test_a_batch_that_the_axis_does_not_divide(use):
    with raises_indivisible():
        run(KERAS, use)
    check_as_on_one_device(use)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 6, 7, 15])
def test_fewer_and_odd_rows_over_two_axes(rows):
    def use(model):
        return model.train_on_batch(X[:rows], Y[:rows]), model.predict_on_batch(X[:rows])

    def distribution(api):
        return model_parallel(api, {".*a/kernel": (None, "model")})

    if rows % 2:
        with raises_indivisible():
            run(KERAS, use, distribution=distribution)
    check_as_on_one_device(use, distribution=distribution)


# ------------------------------------------------------------------------------------------ a batch over two axes


def over_both_axes(api):
    return model_parallel(api, {".*a/kernel": (None, "model")}, batch_dim_name=("data", "model"))


def test_a_batch_over_two_axes():
    with pytest.raises(ValueError, match=r"Invalid axis names for Layout|is not in list"):
        run(KERAS, fit, distribution=over_both_axes)
    check_as_on_one_device(fit, distribution=over_both_axes)
    assert over_both_axes(kd).get_data_layout(X.shape).backend_layout.shard_shape(X.shape) == (ROWS // DEVICES, 4)


@runs
def test_a_ragged_batch_over_two_axes(use):
    check_as_on_one_device(use, distribution=over_both_axes)


def test_the_batch_axes_that_divide_a_ragged_batch_are_used():
    batch = over_both_axes(kd).distribute_batch((X, X[:12], X[:6], X[:5]))
    assert [x.sharding.shard_shape(x.shape)[0] for x in batch] == [2, 3, 3, 5]


@pytest.mark.parametrize("devices", [kd.mock_tpus("v5e:2x2"), kd.mock_gpus(1)])
def test_batches_need_attached_devices(devices):
    distribution = kd.DataParallel(kd.create_device_mesh({"data": len(devices)}, devices=devices))
    with pytest.raises(ValueError, match="nothing can be compiled for them or stored on them"):
        distribution.distribute_batch(X)


# ------------------------------------------------------------------------------- 0-d arrays and Python scalars


class Scaled(keras.Model):
    """A model with a scalar among its inputs."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs["rows"]) * inputs["scale"]


def scaled_model():
    model = Scaled()
    model.compile("sgd", "mse")
    return model


class ScaledRows(keras.utils.PyDataset):
    """Two batches, each with the same scalar."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def __len__(self):
        return 2

    def __getitem__(self, index):
        rows = slice(8 * index, 8 * index + 8)
        return {"rows": X[rows], "scale": self.scale}, Y[rows]


SCALARS = {
    "numpy scalar": np.float32,
    "numpy 0-d": lambda value: np.array(value, "float32"),
    "jax 0-d": jax.numpy.float32,
    "python": float,
}
scalars = pytest.mark.parametrize("scalar", SCALARS.values(), ids=SCALARS)


WAYS_FROM_A_SOURCE = {
    "fit": lambda model, data: model.fit(data, shuffle=False, verbose=0).history,
    "evaluate": lambda model, data: model.evaluate(data, verbose=0),
    "predict": lambda model, data: model.predict(data, verbose=0),
}


@scalars
@pytest.mark.parametrize("use", WAYS_FROM_A_SOURCE.values(), ids=WAYS_FROM_A_SOURCE)
def test_scalars_among_the_inputs(use, scalar):
    with pytest.raises(IndexError, match="list assignment index out of range"):
        run(KERAS, lambda model: use(model, ScaledRows(scalar(0.5))), scaled_model)
    check_as_on_one_device(lambda model: use(model, ScaledRows(scalar(0.5))), scaled_model)


@pytest.mark.slow
@scalars
@pytest.mark.parametrize("step", ["train_on_batch", "test_on_batch"])
def test_scalars_among_the_inputs_of_one_batch(step, scalar):
    def use(model):
        return getattr(model, step)({"rows": X, "scale": scalar(0.5)}, Y)

    error, match = (AttributeError, "shape") if scalar is float else (IndexError, "index out of range")
    with pytest.raises(error, match=match):
        run(KERAS, use, scaled_model)
    check_as_on_one_device(use, scaled_model)


# ------------------------------------------------------------------------ a batch structure that changes in an epoch


class Lenient(keras.Model):
    """A model that takes rows with or without a name."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs["rows"] if isinstance(inputs, dict) else inputs)


def lenient_model():
    model = Lenient()
    model.compile("sgd", "mse")
    return model


CHANGES = {
    "sample weights come and go": ([(X[:8], Y[:8]), (X[8:], Y[8:], np.arange(8.0)), (X[:8], Y[:8])], "mismatch"),
    "one more input": ([({"rows": X[:8]}, Y[:8]), ({"rows": X[8:], "more": X[8:]}, Y[8:])], "mismatch"),
    "one dim less": ([(X[:8], Y[:8]), (X[8:], Y[8:, 0])], "only valid for values of rank at least 2"),
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("batches", "message"), [slow_unless(name != "one dim less", *CHANGES[name]) for name in CHANGES], ids=CHANGES
)
def test_a_batch_structure_that_changes_in_an_epoch(batches, message):
    def use(model):
        return model.fit((batch for batch in batches), shuffle=False, verbose=0).history

    if OLDER_KERAS:
        with pytest.raises(ValueError, match=message):
            run(KERAS, use, lenient_model)
    check_as_on_one_device(use, lenient_model)


# ------------------------------------------------------------------------- output rules of layers with several outputs


class AsTuple(keras.layers.Layer):
    """Returns a tuple of outputs of two ranks."""

    def call(self, x):
        return x * 2, x[:, 0]


class AsDict(keras.layers.Layer):
    """Returns a dict of outputs of two ranks."""

    def call(self, x):
        return {"doubled": x * 2, "first": x[:, 0]}


class OfSeveralOutputs(keras.Model):
    """A subclassed model around a layer of several outputs."""

    def __init__(self, kind):
        super().__init__()
        self.several = kind(name="several")
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        doubled, first = jax.tree.leaves(self.several(x))
        return self.dense(doubled) + first[:, None]


def subclassed(kind):
    model = OfSeveralOutputs(kind)
    model.compile("sgd", "mse")
    return model


def functional(kind):
    inputs = keras.Input((4,))
    several = kind(name="several")(inputs)
    doubled, first = several.values() if isinstance(several, dict) else several
    model = keras.Model(inputs, keras.layers.Dense(1)(doubled) + keras.layers.Reshape((1,))(first))
    model.compile("sgd", "mse")
    return model


def with_output_rule(api):
    return model_parallel(api, {".*several/output": ("data", "model")})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AsTuple, AsDict])
@pytest.mark.parametrize(
    ("build", "message"),
    [(subclassed, "only valid for values of rank at least 2"), (functional, "__jax_array__")],
    ids=["subclassed", "functional"],
)
@pytest.mark.parametrize("rows", [16, 13])
def test_an_output_rule_on_a_layer_of_several_outputs(build, message, kind, rows):
    def use(model):
        return model.fit(X[:rows], Y[:rows], batch_size=8, verbose=0).history

    with pytest.raises(ValueError, match=message):
        run(KERAS, use, lambda: build(kind), with_output_rule)
    check_as_on_one_device(use, lambda: build(kind), with_output_rule)


@pytest.mark.parametrize("kind", [AsTuple, AsDict])
def test_an_output_rule_shards_each_output_with_enough_dims(kind):
    def outputs(api):
        with with_output_rule(api).scope():
            return jax.tree.leaves(kind(name="several")(X))

    with pytest.raises(ValueError, match="only valid for values of rank at least 2"):
        outputs(KERAS)
    doubled, first = outputs(kd)
    assert doubled.sharding.shard_shape(doubled.shape) == (ROWS // 2, 1)
    np.testing.assert_array_equal(doubled, X * 2)
    np.testing.assert_array_equal(first, X[:, 0])


@pytest.mark.parametrize("batch_axes", [slow("model"), slow("data"), ("data", "model")])
def test_an_output_rule_for_dim_0_fits_a_last_batch_of_any_size(batch_axes):
    def build():
        norm = keras.layers.LayerNormalization(name="norm")
        model = keras.Sequential([keras.Input((4,)), norm, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def distribution(api):
        layout_map = api.LayoutMap(api.DeviceMesh((4, 2), ["data", "model"]))
        layout_map["norm/output"] = ("data", None)
        return api.ModelParallel(layout_map=layout_map, batch_dim_name=batch_axes)

    def use(model):  # batches of 4, 4, 4 and 1 rows
        history = model.fit(X[:13], Y[:13], batch_size=4, shuffle=False, verbose=0).history
        return history, model.predict(X[:7], batch_size=5, verbose=0)

    check_as_on_one_device(use, build, distribution)


# ------------------------------------------------------------------------------------------------ bad batch_dim_name


@pytest.mark.parametrize(
    ("names", "message"), [(["data", "model"], "not in list"), (("data", "model"), "not in tuple")]
)
def test_a_bad_batch_dim_name(names, message):
    def distribution(api):
        layout_map = api.LayoutMap(api.DeviceMesh((2, 4), names))
        return api.ModelParallel(layout_map=layout_map, batch_dim_name="rows")

    found_late = distribution(KERAS)
    with pytest.raises(ValueError, match=message):
        _ = found_late.num_model_replicas
    with pytest.raises(ValueError, match=r"batch_dim_name.*'rows'.*\['data', 'model'\]"):
        distribution(kd)


# ------------------------------------------------------------------------- inputs of model(x) and predict_on_batch


class Spy(keras.layers.Layer):
    """Records the shard shape of its input."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def call(self, x):
        jax.debug.inspect_array_sharding(x, callback=lambda s: self.shapes.append(s.shard_shape(x.shape)))
        return x * 1.0


def test_predict_on_batch_shards_its_input():
    def part_on_a_device(api):
        spy = Spy()
        with api.DataParallel().scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), spy, keras.layers.Dense(1)])
            model.predict_on_batch(X)
        return spy.shapes

    assert part_on_a_device(KERAS) == [(ROWS, 4)]  # every device computes all rows
    assert part_on_a_device(kd) == [(ROWS // DEVICES, 4)]


@pytest.mark.parametrize("as_array", [np.asarray, lambda x: jax.numpy.asarray(x)], ids=["numpy", "jax"])
def test_calling_a_model_shards_its_input(as_array):
    def part_on_a_device(api):
        with api.DataParallel().scope():
            outputs = dense_model()(as_array(X))
        return outputs.sharding.shard_shape(outputs.shape)

    assert part_on_a_device(KERAS) == (ROWS, 1)
    assert part_on_a_device(kd) == (ROWS // DEVICES, 1)


@pytest.mark.parametrize("rows", [slow(16), 13])
def test_calling_a_model_gives_the_numbers_of_one_device(rows):
    check_as_on_one_device(lambda model: [np.asarray(model(X[:rows])), model.predict_on_batch(X[:rows])], deep_model)
