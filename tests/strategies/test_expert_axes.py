"""Experts that are sharded over mesh axes: layouts, batches, errors, and the numbers of one device."""

import dataclasses
import functools

import jax
import keras
import numpy as np
import pytest
from keras import layers
from support.keras_scenarios import start_anew
from support.slow_cases import slow, slow_unless
from support.strategy_models import LENGTH, MODELS, WIDTH, assert_same_numbers, fsdp, has_layouts_of, scope, two_layers

import keras_dist as kd
from keras_dist._keras.active_distribution import active_distribution
from keras_dist.steps.options import OptionWithoutEffectError

BUILD, X, Y = MODELS["mixture"]
BOTH = ("expert", "fsdp")
RULES = {"experts/(up|down)": ("expert", None, None)}


def by_rules(axes="data:2,expert:4", rules=RULES, **options):
    layout_map = kd.LayoutMap(kd.create_device_mesh(axes))
    layout_map.update(rules)
    return kd.ModelParallel(layout_map=layout_map, **{"expert_dim_name": "expert"} | options)


def stored(distribution, *shape):
    """The axes of a weight of some shape."""
    with kd.deferred(), distribution.scope():
        return distribution.get_variable_layout(keras.Variable(np.zeros(shape, "float32"), name="kernel")).axes


@pytest.mark.parametrize(
    ("axes", "name", "shape", "expected"),
    [
        ("fsdp:8", "fsdp", (16, 8, 8), ("fsdp", None, None)),  # the smallest dim without experts
        ("fsdp:2,expert:4", "expert", (8, 16, 32), (BOTH, None, None)),
        ("fsdp:2,expert:4", ("expert", "fsdp"), (8, 16, 32), (BOTH, None, None)),
        ("fsdp:2,expert:4", ("fsdp", "expert"), (8, 16, 32), (("fsdp", "expert"), None, None)),
        ("fsdp:2,expert:4", "expert", (4, 16, 32), ("expert", "fsdp", None)),
        ("fsdp:2,expert:4", "expert", (4, 3, 5), ("expert", None, None)),
        ("fsdp:2,expert:4", "expert", (6, 16, 32), (None, ("fsdp", "expert"), None)),
        ("fsdp:2,expert:4", "expert", (8, 16, 3, 3), (BOTH, None, None, None)),
        (
            "fsdp:2,expert:4",
            "expert",
            (8, 1024),
            (None, ("fsdp", "expert")),
        ),  # a bias of experts is not known to be one
        ("replica:2,fsdp:2,expert:2", "expert", (8, 16, 32), (BOTH, None, None)),
        ("fsdp:8,expert:1", "expert", (8, 16, 32), (BOTH, None, None)),
    ],
)
def test_fsdp_shards_dim_0_over_the_expert_axes_first(axes, name, shape, expected):
    assert stored(fsdp(axes, expert_dim_name=name), *shape) == expected


def test_fsdp_shards_what_a_rule_for_experts_leaves_unsharded():
    layout_map = kd.LayoutMap(kd.create_device_mesh("fsdp:2,expert:4"))
    layout_map["kernel"] = ("expert", None, None)
    for options in ({}, {"shard_axis": "fsdp"}):
        distribution = fsdp(layout_map=layout_map, expert_dim_name="expert", **options)
        assert stored(distribution, 8, 16, 32) == ("expert", "fsdp", None)
        assert distribution.get_data_layout((8, 3)).axes == (("fsdp", "expert"), None)


def test_fsdp_keeps_small_weights_and_computes_with_gathered_ones():
    mesh = kd.create_device_mesh("fsdp:2,expert:4")
    distribution = kd.FullyShardedDataParallel(mesh, min_shard_bytes=4 * 8 * 16 * 32, expert_dim_name="expert")
    assert stored(distribution, 8, 16, 32) == (None, None, None)
    assert stored(distribution, 4, 48, 32) == ("expert", None, "fsdp")  # also if its shard of an expert axis is small
    with distribution.scope():
        weight = keras.Variable(np.zeros((16, 16, 32), "float32"))
    assert distribution.get_compute_layout(weight).axes == (None, None, None)


@pytest.mark.slow
def test_optimizer_state_is_stored_like_its_weight():
    with fsdp("fsdp:2,expert:4", expert_dim_name="expert").scope():
        model = BUILD()
        model.train_on_batch(X, Y)
    for path in ("experts_up_momentum", "experts_up_velocity"):
        [state] = [v for v in model.optimizer.variables if v.path == f"adam/{path}"]
        assert state.value.sharding.spec == jax.sharding.PartitionSpec(BOTH, None, None)
        assert state.value.sharding.shard_shape(state.shape) == (1, 16, 32)


@pytest.mark.parametrize(
    ("make", "axes"),
    [
        (lambda: fsdp(expert_dim_name="fsdp"), ("fsdp",)),
        (lambda: fsdp("fsdp:2,expert:4", expert_dim_name="expert"), ("fsdp", "expert")),
        (lambda: fsdp("replica:2,fsdp:2,expert:2", expert_dim_name="expert"), ("replica", "fsdp", "expert")),
        (by_rules, ("data", "expert")),
        (lambda: by_rules(batch_dim_name=("expert", "data")), ("expert", "data")),
        (lambda: by_rules("expert:8"), "expert"),
    ],
)
def test_batches_are_sharded_over_expert_axes(make, axes):
    distribution = make()
    assert distribution.batch_dim_name == axes
    names = (axes,) if isinstance(axes, str) else axes
    assert distribution.num_model_replicas == 8
    assert distribution.batch_sharding((16, 3)).spec == jax.sharding.PartitionSpec(names)
    assert distribution.distribute_batch(np.ones((16, 3))).sharding.shard_shape((16, 3)) == (2, 3)


def test_an_axis_of_sequences_may_be_one_of_experts():
    distribution = fsdp("fsdp:2,context:4", expert_dim_name="context", sequence_dim_name="context")
    assert distribution.batch_dim_name == ("fsdp",)
    assert stored(distribution, 8, 16, 32) == (("context", "fsdp"), None, None)
    rules = {"experts/up": ("context", None, None)}
    names = {"expert_dim_name": "context", "sequence_dim_name": "context"}
    assert by_rules("data:2,context:4", rules, **names).get_data_layout((8, 4)).axes == ("data", "context")


def test_what_describes_and_copies_a_distribution_has_the_axes():
    distribution = fsdp("fsdp:2,expert:4", expert_dim_name="expert")
    assert repr(distribution).endswith("expert_dim_name='expert'>")
    copied = distribution.with_step_options(kd.StepOptions(microbatches=2))
    assert copied.expert_dim_name == "expert"
    assert repr(copied).endswith("expert_dim_name='expert' step_options=StepOptions(microbatches=2)>")
    with copied.scope():
        assert active_distribution().expert_dim_name == "expert"
    assert (fsdp().expert_dim_name, kd.DataParallel().expert_dim_name) == (None, None)


STRATEGIES = {
    "the axis of batches": lambda: fsdp(expert_dim_name="fsdp"),
    "an axis of its own": lambda: fsdp("fsdp:2,expert:4", expert_dim_name="expert"),
    "gathered again": lambda: fsdp("fsdp:4,expert:2", expert_dim_name="expert", reshard_after_forward=True),
    "replicas": lambda: fsdp("replica:2,fsdp:2,expert:2", expert_dim_name="expert"),
    "the axis of sequences": lambda: fsdp(
        "fsdp:2,context:4", expert_dim_name="context", sequence_dim_name="context"
    ),
    "microbatches": lambda: fsdp(
        "fsdp:2,expert:4", expert_dim_name="expert", step_options=kd.StepOptions(microbatches=2)
    ),
}  # fmt: skip


def trained(distribution=None):
    """A model after some steps, and what `fit` returned."""
    start_anew()
    with scope(distribution):
        model = BUILD()
        return model, model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0).history


def evaluated(distribution=None):
    """What `evaluate` and `predict` return for batches that no axis divides."""
    start_anew()
    with scope(distribution):
        model = BUILD()
        evaluated = model.evaluate(X[:13], Y[:13], batch_size=5, verbose=0)
        return {"evaluate": evaluated, "predict": model.predict(X[:13], batch_size=5, verbose=0)}


@functools.cache
def on_one_device(function):
    return function()


@pytest.mark.parametrize("name", [slow_unless(name == "an axis of its own", name) for name in STRATEGIES])
def test_training_has_the_losses_of_one_device(name):
    distribution = STRATEGIES[name]()
    model, losses = trained(distribution)
    assert_same_numbers(losses, on_one_device(trained)[1], 1e-4)
    assert has_layouts_of(distribution, model.weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["an axis of its own", "the axis of batches", "the axis of sequences"])
def test_evaluate_and_predict_have_the_numbers_of_one_device(name):
    assert_same_numbers(evaluated(STRATEGIES[name]()), on_one_device(evaluated), 1e-4)


@pytest.mark.filterwarnings("ignore:Layer 'experts' computes all 8 experts")
@pytest.mark.slow
def test_experts_that_rules_shard():
    model, losses = trained(by_rules())
    assert_same_numbers(losses, on_one_device(trained)[1], 1e-4)
    up = next(v for v in model.weights if v.path == "experts/up")
    assert up.value.sharding.shard_shape(up.shape) == (2, 16, 32)


def mixtures_of(experts=8):
    """A model of two blocks, each with a mixture."""
    x = inputs = keras.Input((LENGTH, WIDTH))
    for number in range(2):
        x = type(BUILD().layers[3])(experts, name=f"block{number}_experts")(x)
    model = keras.Model(inputs, layers.Dense(4, name="head")(x), name="mixtures")
    model.compile("sgd", "mse")
    return model


def train(distribution, build, step="train_on_batch"):
    start_anew()
    with distribution.scope():
        return getattr(build(), step)(X, *[Y] * (step != "predict_on_batch"))


@pytest.mark.parametrize("step", [slow("train_on_batch"), "test_on_batch", "predict_on_batch"])
def test_axes_that_do_not_divide_the_experts_are_an_error(step):
    distribution = fsdp("fsdp:2,expert:4", expert_dim_name=("expert", "fsdp"))
    with pytest.raises(OptionWithoutEffectError, match=r"the 6 experts of 'block0_experts'.*expert:4 x fsdp:2.*by 8"):
        train(distribution, lambda: mixtures_of(6), step)


def test_axes_that_find_no_mixture_are_an_error():
    x, y = np.ones((16, 64), "float32"), np.ones((16, 8), "float32")
    for distribution in (fsdp(expert_dim_name="fsdp"), by_rules(rules={".*kernel": ("expert", None)})):
        with distribution.scope():
            model = two_layers()
            with pytest.raises(OptionWithoutEffectError, match=r"no mixture of experts.*:[48]"):
                model.fit(x, y, verbose=0)


@pytest.mark.parametrize(
    ("rules", "options", "entry"),
    [({}, {}, "expert"), ({"head/kernel": (None, "data")}, {"expert_dim_name": ("expert", "x")}, ("expert", "x"))],
)
def test_experts_without_a_rule_are_an_error_that_names_the_rules(rules, options, entry):
    distribution = by_rules("data:2,expert:2,x:2", rules, **options)
    with pytest.raises(OptionWithoutEffectError, match=r"no rule.*expert:2") as raised:
        train(distribution, mixtures_of)
    lines = [line.strip() for line in str(raised.value).splitlines()[1:]]
    expected = {f"block[0-9]+_experts/{name}": (entry, None, None) for name in ("up", "down")}
    layout_map = {}
    exec("\n".join(lines), {"layout_map": layout_map})
    assert layout_map == expected


def test_experts_that_are_computed_as_they_are_written_need_no_mixture():
    distribution = fsdp(expert_dim_name="fsdp").with_step_options(kd.StepOptions(experts="dense"))
    assert np.isfinite(train(distribution, lambda: mixtures_of(6)))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: fsdp(expert_dim_name="expert"), r"expert_dim_name='expert'.*\['fsdp'\]"),
        (lambda: by_rules("data:8", {}), r"expert_dim_name='expert'.*\['data'\]"),
        (lambda: by_rules(expert_dim_name=("expert", "expert")), "each once"),
        (lambda: by_rules(rules={"up/kernel": (None, "expert")}), r"'up/kernel', \(None, 'expert'\).*'expert'.*dim 0"),
        (
            lambda: fsdp("fsdp:2,expert:4", shard_axis="fsdp", expert_dim_name="expert"),
            r"\('fsdp',\).*'expert'.*shard_axis='fsdp'",
        ),
        (
            lambda: fsdp("replica:2,fsdp:4", replica_axis="replica", expert_dim_name="replica"),
            "'replica'.*replica_axis='replica'",
        ),
        (
            lambda: by_rules(rules={"x/output": ("expert", None)}, batch_dim_name="data", sequence_dim_name="expert"),
            "shards the batch over 'expert'",
        ),
    ],
)
def test_axes_that_cannot_be_those_of_experts(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.slow
def test_a_plan_shows_the_axes():
    plan = kd.plan(BUILD, fsdp("fsdp:2,expert:4", expert_dim_name="expert"), (X, Y), progress=False)
    assert "expert_dim_name='expert'" in plan.distribution
    assert not any("unused" in note for note in plan.notes)
    with pytest.raises(OptionWithoutEffectError, match="the 6 experts"):
        kd.plan(lambda: mixtures_of(6), fsdp(expert_dim_name="fsdp"), (X, Y), progress=False)


def test_explain_reports_experts_without_a_rule_and_no_other_replicas_over_their_axis():
    rules = {"block0_experts/(up|down)": ("expert", None, None)}
    coverage = kd.explain(lambda: mixtures_of(), by_rules(rules=rules))
    [finding] = [each for each in coverage.findings if each.kind == "replicated"]
    assert set(finding.paths) == {"block1_experts/up", "block1_experts/down"}
    assert "layout_map['block1_experts/up'] = ('expert', None, None)" in finding.message
    assert "Experts, dim 0 of their weights, are sharded over expert:4." in str(coverage)
    assert not kd.explain(BUILD, by_rules()).findings


def test_rows_of_experts_beyond_the_capacity_are_an_option():
    options = kd.StepOptions(expert_capacity=1.25)
    assert repr(options) == "StepOptions(expert_capacity=1.25)"
    assert dataclasses.replace(options, experts="sparse").expert_capacity == 1.25
    assert kd.StepOptions(expert_capacity=1).expert_capacity == 1
    for value in (0.99, 0, -2, "1.25", True, float("nan"), float("inf"), np.ones(2)):
        with pytest.raises(ValueError, match=r"expert_capacity=.*at least 1"):
            kd.StepOptions(expert_capacity=value)
    with pytest.raises(ValueError, match=r"expert_capacity=2.*experts='dense'"):
        kd.StepOptions(expert_capacity=2, experts="dense")


def test_a_capacity_for_no_mixture_is_an_error():
    distribution = kd.DataParallel(step_options=kd.StepOptions(expert_capacity=1.5))
    with distribution.scope():
        model = two_layers()
        with pytest.raises(OptionWithoutEffectError, match=r"expert_capacity=1\.5.*by top_k") as raised:
            model.fit(np.ones((16, 64)), np.ones((16, 8)), verbose=0)
    assert raised.value.option == "expert_capacity"
