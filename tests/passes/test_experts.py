"""Mixtures of experts: computed for chosen experts only, with the numbers of all experts."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers, ops
from support.expert_layers import BUFFERS, CHOSEN, DENSE, EXPERTS, SPARSE, WIDTH, Experts, hub_layers, inputs_and_layer
from support.keras_scenarios import start_anew
from support.slow_cases import slow, slow_unless
from support.strategy_models import scope

import keras_dist as kd
from keras_dist.steps.options import OptionWithoutEffectError
from keras_dist.steps.step_state import recorded_calls

ROUTINGS = "uniform", "skewed", "same"
LAYERS = {**hub_layers(), **SPARSE}


def computed(build, shape, experts, routings=ROUTINGS, devices=8, dtype="float32", distribution=None):
    """Outputs and gradients of a layer for each routing, and how its mixtures were computed."""
    start_anew()
    if distribution is None:
        mesh = kd.create_device_mesh(f"data:{devices}", devices=jax.devices()[:devices])
        distribution = kd.DataParallel(mesh, step_options=kd.StepOptions(experts=experts))
    found = []
    with distribution.scope(), recorded_calls() as calls:
        for routing in routings:
            x, layer = inputs_and_layer(build, shape, routing)
            if not found:
                step = compiled_step(layer)
            state = [v.value for v in layer.trainable_variables], [v.value for v in layer.non_trainable_variables]
            found.append(step(*state, jnp.asarray(x, dtype)))
    return jax.tree.map(np.asarray, found), calls


def compiled_step(layer):
    options = {"training": True} if "training" in inspect.signature(layer.call).parameters else {}

    @jax.jit
    def step(trained, others, x):
        def loss(trained, x):
            outputs, _, losses = layer.stateless_call(trained, others, x, return_losses=True, **options)
            outputs = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
            return jnp.sum(outputs * jnp.cos(jnp.arange(WIDTH))) + sum(losses), outputs

        (_, outputs), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(trained, x)
        return outputs, gradients

    return step


def assert_near(found, expected, bound):
    for mine, its in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.max(np.abs(mine - its)) <= bound * max(np.max(np.abs(its)), 1e-3)


def assert_same_numbers(found, expected):
    """Asserts that outputs and gradients for each routing are equal, up to the rounding of float32."""
    for (outputs, gradients), (expected_outputs, expected_gradients) in zip(found, expected, strict=True):
        assert_near(outputs, expected_outputs, 1e-6)
        assert_near(gradients, expected_gradients, 5e-6)


FAST = {("NormalizedExperts", 8), ("ChoiceByChoice", 8), ("Gemma 4", 8), ("ThreeOperands", 1)}


@pytest.mark.parametrize(
    ("name", "devices"), [slow_unless((name, devices) in FAST, name, devices) for name in LAYERS for devices in (1, 8)]
)
def test_numbers_are_those_of_all_experts(name, devices):
    shape = (8, 9, WIDTH)
    expected, calls = computed(LAYERS[name], shape, "dense", devices=devices)
    assert calls == []
    found, calls = computed(LAYERS[name], shape, "auto", devices=devices)
    assert [(call.form, call.reason, call.num_experts) for call in calls] == [("blocks", None, EXPERTS)]
    assert calls[0].rows == 8 * 9 * calls[0].num_chosen // devices
    assert_same_numbers(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (13, 3)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_few_tokens_and_unequal_rows(name, shape):
    expected, _ = computed(LAYERS[name], (*shape, WIDTH), "dense", ["uniform"])
    found, calls = computed(LAYERS[name], (*shape, WIDTH), "auto", ["uniform"])
    assert [call.form for call in calls] == ["chosen weights" if shape == (1, 1) else "blocks"]
    assert_near(found, expected, 5e-6)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Threshold", "nothing proves that the others are zero"),
        ("Loop", "gates of single experts, as in a loop"),
        ("Scattered", "nothing proves that the others are zero"),
        ("LookedUp", "looks up results of chosen ones"),
        ("AllExperts", "each token chooses all of them"),
    ],
)
def test_what_cannot_be_proven_stays_dense_with_a_warning(name, reason):
    shape = (8, 9, WIDTH)
    expected, _ = computed(DENSE[name], shape, "dense", ["uniform"])
    with pytest.warns(UserWarning, match=f"computes all 6 experts.*{reason}"):
        found, calls = computed(DENSE[name], shape, "auto", ["uniform"])
    assert {(call.form, call.rows) for call in calls} == {("dense", 0)}
    assert reason in calls[0].reason
    assert_near(found, expected, 1e-7)


@pytest.mark.parametrize("name", [slow_unless(name == "FlatBuffers", name) for name in BUFFERS])
def test_what_computes_chosen_experts_itself_is_left_as_it_is(name):
    expected, _ = computed(BUFFERS[name], (8, 9, WIDTH), "dense")
    found, calls = computed(BUFFERS[name], (8, 9, WIDTH), "auto")
    assert calls == []
    assert_near(found, expected, 1e-7)


class Scanned(SPARSE["MaskedProbabilities"]):
    """Two mixtures, in a loop over layers and in a part that is computed again for the backward pass."""

    def call(self, x):
        y, _ = jax.lax.scan(lambda x, _: (super(Scanned, self).call(x), None), x, None, length=2)
        return jax.checkpoint(super().call)(y)


class Reported(Experts):
    """What each expert computes is in its loss, too."""

    def mixed(self, x, probabilities, best, chosen):
        gates = probabilities * jnp.sum(jax.nn.one_hot(chosen, EXPERTS), -2)
        outputs = jnp.einsum("bsem,emd->bsed", self.hidden(x), jnp.asarray(self.down))
        self.add_loss(jnp.mean(outputs**2))
        return jnp.sum(outputs * gates[..., None], axis=2)


class Written(Experts):
    """By `keras_dist.experts`, with experts that are chosen by sorting scores that they are not weighed by."""

    def mixed(self, x, probabilities, best, chosen):
        chosen = jnp.argsort(probabilities + 0.1 * jnp.arange(EXPERTS), axis=-1)[..., -CHOSEN:]
        gates = jnp.take_along_axis(probabilities, chosen, axis=-1)

        def expert(x, up, bias, down):
            return jax.nn.gelu(x @ up + bias) @ down

        return kd.experts(expert, x, chosen, gates, self.up, self.bias, self.down)


class Ordered(Written):
    """What `Written` computes, without `keras_dist.experts`."""

    def mixed(self, x, probabilities, best, chosen):
        places = jnp.argsort(jnp.argsort(probabilities + 0.1 * jnp.arange(EXPERTS), axis=-1), axis=-1)
        gates = jnp.where(places >= EXPERTS - CHOSEN, probabilities, 0)
        hidden = jax.nn.gelu(jnp.einsum("bsd,edm->bsem", x, jnp.asarray(self.up)) + jnp.asarray(self.bias))
        return jnp.einsum("bsem,emd,bse->bsd", hidden, jnp.asarray(self.down), gates)


def test_mixtures_in_loops_and_in_rematerialized_parts():
    expected, _ = computed(Scanned, (8, 9, WIDTH), "dense", ["uniform"])
    found, calls = computed(Scanned, (8, 9, WIDTH), "auto", ["uniform"])
    assert [call.rows for call in calls] == [8 * 9 * CHOSEN // 8] * 2
    assert_near(found, expected, 5e-6)


def test_experts_that_something_else_reads_stay_dense():
    with pytest.warns(UserWarning, match="used elsewhere"):
        _, calls = computed(Reported, (8, 9, WIDTH), "auto", ["uniform"])
    assert [call.form for call in calls] == ["dense"]


@pytest.mark.parametrize("shape", [(8, 9), slow((1, 1))], ids=str)
def test_experts_of_authors_of_layers(shape):
    expected, calls = computed(Ordered, (*shape, WIDTH), "auto")
    assert calls == []  # nothing is known of what sorts chose
    found, calls = computed(Written, (*shape, WIDTH), "auto")
    assert [call.form for call in calls] == ["blocks" if shape == (8, 9) else "chosen weights"]
    assert_near(found, expected, 5e-6)
    start_anew()
    x, layer = inputs_and_layer(Written, (*shape, WIDTH))
    assert_near(np.asarray(layer(x)), expected[0][0], 5e-6)  # without a distribution


ARGUMENTS = {"tokens": (4, 16), "chosen": (4, 2), "gates": (4, 2), "weights": (6, 16, 8)}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"chosen": jnp.ones((4, 2))}, "float32.*int32"),
        ({"gates": jnp.ones((4, 3))}, r"gates \(4, 3\)"),
        ({"weights": jnp.ones(())}, r"weights \[\(\)\]"),
        ({"chosen": jnp.ones((4, 7), int), "gates": jnp.ones((4, 7))}, "choose 7 of 6"),
    ],
)
def test_arguments_of_experts_that_do_not_suit_each_other(change, match):
    given = {name: jnp.ones(shape, int if name == "chosen" else float) for name, shape in ARGUMENTS.items()} | change
    with pytest.raises(ValueError, match=match):
        kd.experts(lambda x, w: x @ w, *given.values())


def model_of(layer):
    inputs = keras.Input((9, WIDTH))
    model = keras.Model(inputs, keras.layers.Dense(2)(layer(inputs)))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(("layer", "match"), [(DENSE["Loop"], "loop"), (keras.layers.ReLU, "by top_k")])
def test_sparse_experts_that_are_not_found_are_an_error(layer, match):
    start_anew()
    with kd.DataParallel(step_options=kd.StepOptions(experts="sparse")).scope():
        model = model_of(layer())
        with pytest.raises(OptionWithoutEffectError, match=f"experts='sparse'.*{match}"):
            model.fit(np.ones((8, 9, WIDTH)), np.ones((8, 9, 2)), verbose=0)


def test_sparse_experts_that_are_found():
    start_anew()
    with kd.DataParallel(step_options=kd.StepOptions(experts="sparse")).scope(), recorded_calls() as calls:
        model = model_of(SPARSE["OneExpert"]())
        model.fit(np.ones((8, 9, WIDTH)), np.ones((8, 9, 2)), verbose=0)
    assert [(call.layer, call.form) for call in calls] == [("one_expert", "blocks")]


@pytest.mark.parametrize("reduced", ["update", slow("microbatch")])
def test_a_plan_lists_the_mixtures_of_a_microbatch_once(reduced):
    start_anew()
    options = kd.StepOptions(microbatches=2, reduce_gradients=reduced)
    batch = (16, 9, WIDTH), (16, 9, 2)
    model = model_of(SPARSE["OneExpert"]())
    (mixtures,) = kd.plan(model, kd.DataParallel(step_options=options), batch, progress=False).mixtures
    assert (mixtures.calls, mixtures.rows) == (1, 9)  # 16 sequences in two parts, on eight devices


@pytest.mark.parametrize("reduced", ["update", slow("microbatch")])
def test_microbatches_whose_divisor_is_that_of_the_batch(reduced):
    x, y, weights = np.ones((16, 9, WIDTH)), np.ones((16, 9, 2)), np.linspace(0.1, 1, 16 * 9).reshape(16, 9)
    losses = []
    for options in {"microbatches": 2, "reduce_gradients": reduced, "experts": "sparse"}, {"experts": "dense"}:
        start_anew()
        with kd.DataParallel(step_options=kd.StepOptions(**options)).scope():
            model = model_of(SPARSE["OneExpert"]())
            model.compile("sgd", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
            losses.append(model.fit(x, y, 16, 3, verbose=0, sample_weight=weights).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_a_model_that_reads_a_value_of_the_function_that_calls_it():
    def outputs(experts):
        start_anew()
        with kd.DataParallel(step_options=kd.StepOptions(experts=experts)).scope(), recorded_calls() as calls:
            x, layer = inputs_and_layer(SPARSE["OneExpert"], (8, 9, WIDTH))
            scale = [1.0]  # set while the function is traced
            scaled = keras.layers.Lambda(lambda x: x * scale[0])
            model = keras.Sequential([keras.Input((9, WIDTH)), layer, scaled])

            @jax.jit
            def called(weights, x):
                scale[0] = jnp.max(x)
                return model.stateless_call(weights, [], x)[0]

            return called([each.value for each in model.trainable_variables], x), calls

    (expected, _), (found, calls) = outputs("dense"), outputs("sparse")
    assert [call.form for call in calls] == ["blocks"]
    assert_near(found, expected, 1e-6)


class Quantized(keras.layers.Layer):
    """Experts whose weights are stored as int8."""

    def build(self, shape):
        self.router = self.add_weight(shape=(WIDTH, EXPERTS), name="router")
        self.up = keras.layers.EinsumDense("bsd,edm->bsem", (None, EXPERTS, 8))
        self.down = keras.layers.EinsumDense("bsem,emd->bsed", (None, EXPERTS, WIDTH))
        self.up.build(shape)
        self.down.build((*shape[:-1], EXPERTS, 8))
        self.up.quantize("int8")
        self.down.quantize("int8")

    def call(self, x):
        best, chosen = keras.ops.top_k(keras.ops.softmax(x @ self.router), CHOSEN)
        gates = keras.ops.sum(keras.ops.one_hot(chosen, EXPERTS) * best[..., None], axis=-2)
        return keras.ops.sum(self.down(keras.ops.relu(self.up(x))) * gates[..., None], axis=2)


def test_quantized_experts_stay_dense_with_a_warning():
    def predicted(experts):
        start_anew()
        keras.utils.set_random_seed(0)
        with kd.DataParallel(step_options=kd.StepOptions(experts=experts)).scope(), recorded_calls() as calls:
            model = model_of(Quantized(name="quantized"))
            return model.predict(np.random.default_rng(0).normal(size=(8, 9, WIDTH)), verbose=0), calls

    expected, calls = predicted("dense")
    assert calls == []
    with pytest.warns(UserWarning, match="Layer 'quantized' computes all 6 experts.*as quantized ones do") as warned:
        found, calls = predicted("auto")
    assert sum("computes all" in str(each.message) for each in warned) == 1
    assert [(call.layer, call.form, call.num_chosen) for call in calls] == [("quantized", "dense", CHOSEN)]
    np.testing.assert_array_equal(found, expected)


def test_an_unknown_value_of_the_option():
    with pytest.raises(ValueError, match=r"experts='some'.*'auto', 'dense', 'sparse'"):
        kd.StepOptions(experts="some")


class Scaled(keras.Layer):
    """Two products with weights of experts, and something between or around them: see `VARIANTS`."""

    outputs, inputs = WIDTH, WIDTH

    def build(self, shape):
        self.router = self.add_weight(shape=(shape[-1], 8), name="router")
        self.up = self.add_weight(shape=(8, self.inputs, 16), name="up")
        self.down = self.add_weight(shape=(8, 16, self.outputs), name="down")
        self.scale = self.add_weight(shape=(8, 16), name="scale")

    def gates(self, x):
        best, chosen = keras.ops.top_k(keras.ops.softmax(x @ self.router), 2)
        return keras.ops.sum(keras.ops.one_hot(chosen, 8, dtype=x.dtype) * best[..., None], axis=-2)

    def hidden(self, x):
        return keras.ops.relu(keras.ops.einsum("bsd,edm->bsem", x[..., : self.inputs], self.up))

    def call(self, x):
        return keras.ops.einsum("bsem,emd,bse->bsd", self.hidden(x), self.down, self.gates(x))


class OneOutput(Scaled):
    outputs = 1


class OneInput(Scaled):
    inputs = 1


class VectorOfEach(Scaled):
    """Each expert weighs what it computes by a product with a vector of its own."""

    def call(self, x):
        hidden = self.hidden(x)
        weighed = self.gates(x) * keras.ops.sigmoid(keras.ops.einsum("bsem,em->bse", hidden, self.scale))
        return keras.ops.einsum("bsem,emd,bse->bsd", hidden, self.down, weighed)


class SplitBySlices(Scaled):
    """`keras.ops.slice` is a `dynamic_slice` with bounds that are known."""

    def hidden(self, x):
        both = keras.ops.einsum("bsd,edm->bsem", x, self.up)
        half = (*both.shape[:-1], 8)
        first, second = (keras.ops.slice(both, (0, 0, 0, start), half) for start in (0, 8))
        return keras.ops.concatenate([keras.ops.silu(first) * second] * 2, -1)


class ScalesOfEach(Scaled):
    def hidden(self, x):
        return keras.ops.einsum("bsem,em->bsem", super().hidden(x), self.scale)


VARIANTS = {each.__name__: each for each in (OneOutput, OneInput, VectorOfEach, SplitBySlices, ScalesOfEach)}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.filterwarnings("ignore:Layer 'scales_of_each'")  # which stays dense
def test_products_of_one_column_row_or_vector(name):
    def trained(distribution):
        start_anew()
        with scope(distribution):
            inputs = keras.Input((6, WIDTH))
            model = keras.Model(inputs, VARIANTS[name](name="scales_of_each")(inputs))
            model.compile("sgd", "mse")
            x = np.random.default_rng(0).normal(size=(16, 6, WIDTH)).astype("float32")
            losses = model.fit(x, x[..., : model.output_shape[-1]], epochs=2, batch_size=8, shuffle=False, verbose=0)
            return losses.history["loss"], model.predict(x, verbose=0)

    for actual, expected in zip(trained(kd.DataParallel()), trained(None), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int32", "int8"])
def test_an_index_of_no_expert_adds_nothing(dtype):
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    first, step = np.arange(40) % 8, 1 + np.arange(40) % 7
    chosen = np.stack([first, np.where(np.arange(40) % 3, (first + step) % 8, -1)], -1).astype(dtype)
    weights = np.random.default_rng(1).normal(size=(8, 4, 4)).astype("float32")

    class Chosen(keras.Layer):
        def call(self, inputs):
            x, chosen = inputs
            gates = keras.ops.ones(chosen.shape)
            return kd.experts(lambda x, w: x @ w, x, chosen, gates, keras.ops.convert_to_tensor(weights))

    inputs = keras.Input((4,), batch_size=40), keras.Input((2,), batch_size=40, dtype=dtype)
    expected = sum(np.where(chosen[:, [k]] < 0, 0, np.einsum("td,tdn->tn", x, weights[chosen[:, k]])) for k in range(2))
    with kd.DataParallel().scope():
        model = keras.Model(inputs, Chosen()(inputs))
        np.testing.assert_allclose(model.predict((x, chosen), batch_size=40, verbose=0), expected, atol=1e-5)


def test_a_function_of_experts_that_returns_no_rows():
    ones = np.ones((4, 2))
    with pytest.raises(ValueError, match=r"has to return \(T, outputs\) for T tokens, but returned \(4,\)"):
        kd.experts(lambda x, w: (x @ w).sum(-1), ones, np.zeros((4, 1), "int32"), ones[:, :1], np.ones((3, 2, 2)))


class Distilled(keras.Model):
    """Learns what a teacher without experts returns, in a train step of its own."""

    def __init__(self, teacher):
        super().__init__()
        self.teacher = lambda: teacher  # whose weights are none of this model
        self.mixture = Scaled()

    def build(self, shape):
        self.mixture.build(shape)
        self.built = True

    def call(self, x):
        return self.mixture(x)

    def train_step(self, state, data):
        weights, others, optimizer, metrics = state
        teacher = self.teacher()
        wanted, _ = teacher.stateless_call([], [v.value for v in teacher.non_trainable_variables], data[0])

        def loss(weights):
            return jnp.mean((self.stateless_call(weights, others, data[0])[0] - wanted) ** 2)

        value, gradients = jax.value_and_grad(loss)(weights)
        weights, optimizer = self.optimizer.stateless_apply(optimizer, gradients, weights)
        return {"loss": value}, (weights, others, optimizer, metrics)


def test_a_step_may_call_a_teacher_without_experts():
    def losses(distribution):
        start_anew()
        with scope(distribution):
            inputs = keras.Input((6, WIDTH))
            teacher = keras.Model(inputs, keras.layers.Dense(WIDTH)(inputs))
            teacher.trainable = False
            model = Distilled(teacher)
            model.build((None, 6, WIDTH))
            model.compile("sgd", "mse")
            x = np.random.default_rng(0).normal(size=(16, 6, WIDTH)).astype("float32")
            return model.fit(x, x, epochs=2, batch_size=8, shuffle=False, verbose=0).history["loss"]

    sparse = kd.DataParallel(step_options=kd.StepOptions(experts="sparse"))
    np.testing.assert_allclose(losses(sparse), losses(None), rtol=1e-4)


def test_a_loss_that_sorts_is_no_mixture():
    """ListMLE, a loss for rankings, takes scores in the order of the labels."""

    def in_order_of_labels(y_true, y_pred):
        _, order = ops.top_k(y_true, k=y_true.shape[1])
        scores = ops.take_along_axis(y_pred, order, axis=1)
        return ops.sum(ops.log(ops.cumsum(ops.exp(scores), axis=1)) - scores, axis=1)

    with kd.DataParallel().scope(), warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs = keras.Input((5, 4))
        scores = layers.Dense(1)(layers.Dense(32, "relu")(inputs))
        model = keras.Model(inputs, ops.squeeze(scores, -1))
        model.compile("sgd", in_order_of_labels)
        model.fit(np.ones((16, 5, 4)), np.random.default_rng(0).random((16, 5)), batch_size=16, verbose=0)
