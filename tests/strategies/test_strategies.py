"""Strategies: the numbers of one device, weights and optimizer state where they must lie, and what travels."""

import contextlib
import functools
import itertools

import jax
import keras
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from keras import layers
from support.strategy_models import MODELS, ROWS, STRATEGIES, fsdp, tensor_parallel, transformer

import keras_dist as kd
from keras_dist.strategies.shard_dim import shard_one_more_dim

STEPS, TOLERANCE = 20, 1e-4

pytestmark = pytest.mark.usefixtures("small_slots_too")


@pytest.fixture
def small_slots_too(monkeypatch):
    """ZeRO-1 shards what belongs to small weights, too."""
    module = vars(kd.DataParallel)["get_update_layout"].__globals__
    monkeypatch.setitem(module, "shard_one_more_dim", functools.partial(shard_one_more_dim, min_shard_bytes=0))


def start_anew():
    """Names and seeds as in a new process."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


def trained(build, x, y, distribution=None, steps=STEPS):
    """A model after so many steps, its losses, and what it then predicts."""
    start_anew()
    with distribution.scope() if distribution else contextlib.nullcontext():
        model = build()
        losses = [float(np.ravel(model.train_on_batch(x, y))[0]) for _ in range(steps)]
        return model, {"losses": np.array(losses), "predictions": model.predict_on_batch(x)}


def in_every_way(build, x, y, distribution=None):
    """What fit, evaluate, predict and calls give, with batches that no axis divides."""
    start_anew()
    with distribution.scope() if distribution else contextlib.nullcontext():
        model = build()
        return {
            "fit": model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history,
            "evaluate": model.evaluate(x, y, batch_size=5, verbose=0),
            "predict": model.predict(x, batch_size=5, verbose=0),
            "train_on_batch": model.train_on_batch(x[:8], y[:8]),
            "test_on_batch": model.test_on_batch(x, y),
            "predict_on_batch": model.predict_on_batch(x),
            "call": model(x),
        }


@functools.cache
def on_one_device(name):
    """The numbers of a model without a distribution."""
    return trained(*MODELS[name])[1]


def assert_same(actual, expected, tolerance=TOLERANCE):
    """Compares trees of numbers, each array relative to its largest number."""
    keras.tree.assert_same_structure(actual, expected)
    for (path, got), want in zip(keras.tree.flatten_with_path(actual), keras.tree.flatten(expected), strict=True):
        got, want = np.asarray(got, "float64"), np.asarray(want, "float64")
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(0.1, np.abs(want).max()), err_msg=str(path))


def parts(variables):
    """The shape of each variable's part on a device, by path."""
    return {v.path: v.value.sharding.shard_shape(tuple(v.shape)) for v in variables}


def bytes_on_each(variables):
    """The bytes that each device holds of variables; it must be the same on all eight."""
    held = dict.fromkeys(jax.devices(), 0)
    for shard in itertools.chain.from_iterable(v.value.addressable_shards for v in variables):
        held[shard.device] += shard.data.nbytes
    assert len(set(held.values())) == 1
    return held[jax.devices()[0]]


class TestNumbers:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("name", MODELS)
    def test_of_training_are_those_of_one_device(self, name, strategy):
        build, x, y = MODELS[name]
        distribution = STRATEGIES[strategy](build)
        model, numbers = trained(build, x, y, distribution)
        assert_same(numbers, on_one_device(name))
        for variable in model.weights:  # what was computed was computed so
            wanted = distribution.get_variable_layout(variable).backend_layout
            assert variable.value.sharding.is_equivalent_to(wanted, variable.value.ndim), variable.path

    @pytest.mark.parametrize(
        ("name", "strategies"),
        [
            ("mixture", ["FSDP, resharded"]),
            # XLA computes convolutions wrongly that slide over a sharded dim and whose batch is not sharded.
            ("convnet", ["TP, SP", "HSDP"]),
            ("transformer", ["HSDP x TP"]),
        ],
    )
    def test_of_all_ways_to_run_are_those_of_one_device(self, name, strategies):
        build, x, y = MODELS[name]
        expected = in_every_way(build, x, y)
        for strategy in strategies:
            assert_same(in_every_way(build, x, y, STRATEGIES[strategy](build)), expected)

    def test_dropout_is_that_of_one_device(self):
        _, x, y = MODELS["transformer"]
        build = functools.partial(transformer, dropout=0.3)
        _, expected = trained(build, x, y, steps=4)
        for strategy in ("FSDP, resharded", "HSDP x TP"):
            _, actual = trained(build, x, y, STRATEGIES[strategy](build), steps=4)
            assert_same(actual, expected)

    @pytest.mark.parametrize(
        "optimizer",
        [
            lambda: keras.optimizers.Adafactor(0.01),
            lambda: keras.optimizers.Muon(0.01),
            lambda: keras.optimizers.Lion(0.001, use_ema=True, ema_overwrite_frequency=3),
            lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, global_clipnorm=0.1),
            lambda: keras.optimizers.AdamW(gradient_accumulation_steps=3),
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
        ],
        ids=["Adafactor", "Muon", "Lion with EMA", "SGD", "accumulation", "loss scale"],
    )
    def test_of_other_optimizers(self, optimizer):
        x, y = random_batch(64, 8)
        _, expected = trained(lambda: two_layers(optimizer=optimizer()), x, y, steps=6)
        for strategy in ("ZeRO-1", "FSDP"):
            distribution = STRATEGIES[strategy](None)
            _, actual = trained(lambda: two_layers(optimizer=optimizer()), x, y, distribution, steps=6)
            assert_same(actual, expected)

    def test_of_derivatives_forward_and_of_second_order(self):
        def derivatives(distribution):
            start_anew()
            with distribution.scope() if distribution else contextlib.nullcontext():
                model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dense(4)])
                weights = [variable.value for variable in model.trainable_variables]
                x = np.linspace(-1, 1, 64, dtype="float32").reshape(8, 8)

                @jax.jit
                def both(weights):
                    def loss(weights):
                        return (model.stateless_call(weights, [], x)[0] ** 2).sum()

                    return jax.jvp(loss, (weights,), (weights,)), jax.jvp(jax.grad(loss), (weights,), (weights,))

                return both(weights)

        expected = derivatives(None)
        for distribution in (fsdp(), fsdp(reshard_after_forward=True), kd.DataParallel(shard_optimizer_state=True)):
            assert_same(derivatives(distribution), expected)


def two_layers(policy=None, optimizer="adam"):
    """Two layers, of which the first holds nearly all weights."""
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(512, dtype=policy, name="wide"), layers.Dense(8, dtype=policy, name="head")]
    )
    model.compile(optimizer, "mse")
    return model


def random_batch(*sizes):
    """Inputs and targets of so many features."""
    random = np.random.default_rng(0)
    return [random.normal(size=(ROWS, size)).astype("float32") for size in sizes]


class TestPlaces:
    def test_fsdp_cuts_every_weight_and_its_slots(self):
        build, x, y = MODELS["mixture"]
        start_anew()
        with fsdp().scope():
            model = build()
            model.train_on_batch(x, y)
        where = parts(model.weights)
        assert where["experts/up"] == (1, 16, 32)
        assert where["experts/router"] == (2, 8)
        assert where["first/kernel"] == (2, 16)
        assert where["norm/gamma"] == (2,)
        assert where["head/bias"] == (4,)  # 8 devices divide no dim of it
        slots = parts(model.optimizer.variables)
        assert slots["adam/experts_up_momentum"] == slots["adam/experts_up_velocity"] == (1, 16, 32)
        cut = sum(v.value.nbytes for v in model.weights if v.shape != (4,))
        assert bytes_on_each(model.weights) == cut // 8 + 16
        scalars = sum(v.value.nbytes for v in model.optimizer.variables if not v.shape)
        assert bytes_on_each(model.optimizer.variables) == 2 * (cut // 8 + 16) + scalars

    def test_hsdp_cuts_inside_of_a_group(self):
        build, x, y = MODELS["mixture"]
        with fsdp("replica:2,fsdp:4").scope():
            model = build()
            model.train_on_batch(x, y)
        assert parts(model.weights)["experts/up"] == (2, 16, 32)
        assert parts(model.optimizer.variables)["adam/experts_up_velocity"] == (2, 16, 32)
        first, second = model.layers[-1].kernel.value.addressable_shards[0::4]
        assert first.index == second.index  # device 0 and device 4 hold the same

    def test_zero_cuts_slots_only(self):
        build, x, y = MODELS["mixture"]
        with kd.DataParallel(shard_optimizer_state=True).scope():
            model = build()
            model.fit(x, y, verbose=0)
        assert bytes_on_each(model.weights) == sum(v.value.nbytes for v in model.weights)
        slots = parts(model.optimizer.variables)
        assert slots["adam/experts_up_velocity"] == (1, 16, 32)
        assert slots["adam/head_bias_velocity"] == (4,)

    def test_fsdp_cuts_what_rules_leave_free(self):
        build, x, y = MODELS["transformer"]
        with fsdp(layout_map=tensor_parallel(build, "replica:2,fsdp:2,model:2")).scope():
            model = build()
            model.train_on_batch(x, y)
        where = parts(model.weights)
        assert where["block_attention/query/kernel"] == (16, 2, 2)  # the heads by the rule; of the rest the smallest
        assert where["block_up/kernel"] == (8, 32)
        assert where["block_down/kernel"] == (32, 8)
        assert where["block_up/bias"] == (32,)  # its one dim is taken
        assert parts(model.optimizer.variables)["adam/block_up_kernel_velocity"] == (8, 32)

    def test_small_weights_stay_whole(self):
        with kd.FullyShardedDataParallel(min_shard_bytes=8 * 16 * 4).scope():
            small, large = layers.Dense(16), layers.Dense(24)
            small.build((None, 8))
            large.build((None, 8))
        assert small.kernel.value.sharding.is_fully_replicated
        assert large.kernel.value.sharding.shard_shape((8, 24)) == (1, 24)

    @pytest.mark.parametrize("shape", [(), (0,), (0, 8), (7, 13), (1,), (3, 5, 7)])
    def test_what_nothing_divides_is_whole(self, shape):
        with fsdp().scope():
            variable = keras.Variable(np.ones(shape, "float32"), name="odd")
        assert variable.value.sharding.is_fully_replicated

    def test_axes_must_be_clear(self):
        rules = kd.LayoutMap(kd.create_device_mesh("data:2,fsdp:2,model:2"))
        rules[".*kernel"] = (None, "model")
        three = kd.create_device_mesh("a:2,b:2,c:2")
        assert kd.FullyShardedDataParallel(layout_map=rules).batch_dim_name == ("data", "fsdp")
        assert kd.FullyShardedDataParallel(three, shard_axis=("b", "c")).batch_dim_name == ("b", "c")
        for arguments, says in [
            ({"device_mesh": three}, r"3 axes are free.*'a': 2, 'b': 2, 'c': 2"),
            ({"layout_map": rules, "shard_axis": "model"}, r"rules use \['model'\]"),
            ({"layout_map": rules, "shard_axis": "fsdp", "replica_axis": "fsdp"}, "replica_axis='fsdp'"),
            ({"device_mesh": three, "shard_axis": "d"}, "shard_axis='d'"),
        ]:
            with pytest.raises(ValueError, match=says):
                kd.FullyShardedDataParallel(**arguments)


def equations(jaxpr, name):
    """The equations of a primitive in a jaxpr and in those inside of it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner, name)


def planned(build, distribution, batch=ROWS):
    """The plan of a train step, and its collectives by kind: dtype, bytes and how often, largest first."""
    made = kd.plan(build, distribution, batch, progress=False)
    by_kind = {}
    for each in made.collectives:
        by_kind.setdefault(each.kind, []).append((each.dtype, each.bytes, each.count))
    return made, {kind: sorted(found, key=lambda entry: -entry[1]) for kind, found in by_kind.items()}


class TestTraffic:
    @pytest.mark.parametrize(("policy", "dtype"), [("float32", "float32"), ("mixed_bfloat16", "bfloat16")])
    def test_weights_are_gathered_in_the_dtype_they_are_computed_in(self, policy, dtype):
        """In the traced program: the CPU's compiler makes float32 of bfloat16."""
        with fsdp().scope():
            model = two_layers(policy)
            weights = [variable.value for variable in model.trainable_variables]
            program = jax.make_jaxpr(model.stateless_call)(weights, [], np.ones((ROWS, 64), "float32"))
        gathered = [e for e in equations(program.jaxpr, "sharding_constraint") if e.outvars[0].aval.shape == (64, 512)]
        assert [e.params["sharding"].is_fully_replicated for e in gathered] == [False, True]
        assert {e.outvars[0].aval.dtype.name for e in gathered} == {dtype}

    def test_a_weight_is_gathered_again_for_the_backward_pass_if_asked(self):
        def build():
            inputs = keras.Input((64,))
            x = layers.Dense(512, activation="gelu", name="wide")(inputs)
            model = keras.Model(inputs, layers.Dense(8)(layers.Dense(64, activation="gelu", name="narrow")(x)))
            model.compile("adam", "mse")
            return model

        counts = []
        for reshard in (False, True):
            _, found = planned(build, fsdp(reshard_after_forward=reshard))
            counts.append(sum(1 for _, size, _ in found["all-gather"] if size == 64 * 512 * 4))
        # The kernel of "wide" is not needed to go on backward, since nothing asks for the gradient of the inputs.
        assert counts == [2, 3]

    def test_zero_gathers_each_weight_once(self):
        made, found = planned(two_layers, kd.DataParallel(shard_optimizer_state=True))
        gathered = [entry for entry in found["all-gather"] if entry[1] == 64 * 512 * 4]
        assert gathered == [("f32", 64 * 512 * 4, 1)]
        assert made.memory.optimizer < 2 * made.memory.weights / 6

    def test_hsdp_gathers_inside_of_a_group(self):
        made = kd.plan(two_layers, fsdp("replica:2,fsdp:4"), ROWS, progress=False)
        assert {each.axes for each in made.collectives if each.kind == "all-gather"} == {("fsdp",)}

    @pytest.mark.parametrize(
        "make", [fsdp, lambda: kd.DataParallel(shard_optimizer_state=True), lambda: fsdp(reshard_after_forward=True)]
    )
    def test_weights_read_in_a_loop_are_gathered_before_it(self, make):
        def build():
            model = keras.Sequential([keras.Input((5, 32)), layers.LSTM(32), layers.Dense(8)])
            model.compile("adam", "mse")
            return model

        made = kd.plan(build, make(), ROWS, progress=False)
        gathered = [each for each in made.collectives if each.kind in ("all-gather", "reduce-scatter")]
        assert {each.count for each in gathered} == {1}
        assert sum(each.bytes for each in gathered) < 1.5 * made.parameters * 4
