"""Likely mistakes in a layout map are a `LayoutMapWarning` before the first step, once, or an error."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import keras_dist as kd

GOOD = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}


def rules(entries, strict=False, kind=kd.ModelParallel):
    layout_map = kd.LayoutMap(kd.create_device_mesh("data:2,model:4"))
    layout_map.update(entries)
    return kind(layout_map=layout_map, strict=strict)


def build(name="tower", up=32, down=16):
    return keras.Sequential(
        [keras.Input((16,)), layers.Dense(up, name="up"), layers.Dense(down, name="down")], name=name
    )


def train(model):
    model.fit(np.ones((8, 16)), np.ones((8, 16)), verbose=0)


def messages_of(function, *arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*arguments)
    return [str(each.message) for each in caught if issubclass(each.category, kd.LayoutMapWarning)]


def test_a_correct_map_gives_no_warning():
    with rules({f"tower/{key}": axes for key, axes in GOOD.items()}).scope():
        model = build()
        assert not messages_of(model.compile, "adam", "mse")
        assert not messages_of(train, model)


def test_a_rule_without_a_match_warns_once():
    with rules({f"tower/{key}": axes for key, axes in GOOD.items()} | {"tower/upp/kernel": (None, "model")}).scope():
        model = build()
        [message] = messages_of(model.compile, "adam", "mse")
        assert message.startswith("1 possible problem in the layout map for 'tower'")
        assert "'tower/upp/kernel'" in message
        assert "strict=True" in message
        assert not messages_of(train, model)
        assert not messages_of(model.compile, "sgd", "mse")


def test_replicas_warn_with_a_rule_for_each():
    with rules({"tower/up/kernel": (None, "model")}).scope():
        model = build(up=256, down=128)
        [message] = messages_of(model.compile, "adam", "mse")
    assert "axis 'model' (size 4)" in message
    assert "layout_map['tower/down/kernel'] = (" in message


def test_replicas_of_few_bytes_are_in_the_report_only():
    with (distribution := rules({"tower/up/kernel": (None, "model")}, strict=True)).scope():
        model = build(up=256, down=64)  # 64 KiB, which FullyShardedDataParallel would not shard either
        assert not messages_of(model.compile, "adam", "mse")
    assert [finding.kind for finding in kd.explain(model, distribution).findings] == ["replicated"]


def test_a_model_that_is_built_by_its_first_step_is_checked_there():
    with rules(GOOD | {"nowhere": ("model",)}).scope():
        model = keras.Sequential([layers.Dense(32, name="up"), layers.Dense(16, name="down")])
        assert not messages_of(model.compile, "adam", "mse")
        [message] = messages_of(train, model)
        assert "'nowhere'" in message
        assert not messages_of(train, model)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "train_on_batch"])
def test_each_way_to_a_first_step_warns(method):
    x = np.ones((8, 16))
    with rules(GOOD | {"nowhere": ("model",)}).scope():
        model = keras.Sequential([layers.Dense(32, name="up"), layers.Dense(16, name="down")])
        model.compile("adam", "mse")
        quiet = {} if method == "train_on_batch" else {"verbose": 0}
        arguments = (x,) if method == "predict" else (x, x)
        assert len(messages_of(lambda: getattr(model, method)(*arguments, **quiet))) == 1


def test_strict_is_an_error_before_anything_runs():
    with rules(GOOD | {"nowhere": ("model",)}, strict=True).scope():
        model = build("sequential")
        before = model.get_weights()
        with pytest.raises(ValueError, match="1 possible problem in the layout map for 'sequential'"):
            model.compile("adam", "mse")
        with pytest.raises(ValueError, match="rule 'nowhere'"):
            train(model)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_fully_sharded_data_parallel_can_be_strict():
    with rules(GOOD | {"nowhere": ("model",)}, strict=True, kind=kd.FullyShardedDataParallel).scope():
        model = build("sequential")
        with pytest.raises(ValueError, match="'nowhere'"):
            model.compile("adam", "mse")


def test_the_warning_can_be_silenced_and_an_all_none_rule_prevents_it():
    with rules({"tower/up/kernel": (None, "model")}).scope(), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", kd.LayoutMapWarning)
        model = build()
        model.compile("adam", "mse")
    with rules({"tower/up/kernel": (None, "model"), "tower/down/kernel": (None, None)}).scope():
        assert not messages_of(build().compile, "adam", "mse")


def test_weights_that_are_added_later_are_checked_then():
    with rules(GOOD).scope():
        model = build("sequential")
        assert not messages_of(model.compile, "adam", "mse")
        model.add(layers.Dense(2048, name="late"))
        [message] = messages_of(model.compile, "adam", "mse")
        assert "layout_map['late/kernel']" in message


def test_without_a_layout_map_there_is_no_warning():
    for distribution in (kd.DataParallel(), kd.FullyShardedDataParallel()):
        with distribution.scope():
            assert not messages_of(build().compile, "adam", "mse")


def test_only_the_first_findings_are_listed():
    with rules(GOOD | {f"nowhere_{number}/kernel": (None, "model") for number in range(9)}).scope():
        [message] = messages_of(build("sequential").compile, "adam", "mse")
    assert message.startswith("9 possible problems")
    assert "\n5. " in message
    assert "\n6. " not in message
    assert "\n... and 4 more" in message


def test_a_rule_that_shards_a_random_state_warns_before_the_step_fails():
    with rules({".*kernel": (None, "model"), ".*seed_generator_state": ("data",)}).scope():
        inputs = keras.Input((16,))
        model = keras.Model(inputs, layers.Dropout(0.5)(layers.Dense(32, name="up")(inputs)))
        [message] = messages_of(model.compile, "adam", "mse")
    assert "seed_generator_state" in message


def test_rules_of_another_model_are_no_mistake():
    entries = {f"{name}/{key}": axes for name in ("teacher", "student") for key, axes in GOOD.items()}
    with rules(entries | {"student/upp/kernel": (None, "model")}, strict=True).scope():
        teacher, student = build("teacher"), build("student")
        with pytest.raises(ValueError, match=r"1 possible problem.*'teacher'") as caught:
            teacher.compile("adam", "mse")
        assert "'student/upp/kernel' matches no variable" in str(caught.value)
    with rules(entries, strict=True).scope():
        teacher, student = build("teacher"), build("student")
        for model in (teacher, student):
            model.compile("adam", "mse")
            train(model)


def test_rules_of_layers_around_others_are_reported_for_a_loaded_model(tmp_path):
    inputs = keras.Input((16,))
    with rules({f"tower/{key}": axes for key, axes in GOOD.items()}).scope():
        model = keras.Model(inputs, build()(inputs), name="net")
        model.compile("adam", "mse")
        train(model)
        model.save(tmp_path / "model.keras")
        loaded = []
        [message] = messages_of(lambda: loaded.append(keras.saving.load_model(tmp_path / "model.keras")))
    assert "layout_map['up/kernel'] = (None, 'model')" in message
    assert "'(tower/)?up/kernel'" in message
    assert {v.path for v in loaded[0].weights} == {"up/kernel", "up/bias", "down/kernel", "down/bias"}
    with rules({f"(tower/)?{key}": axes for key, axes in GOOD.items()}, strict=True).scope():
        again = keras.saving.load_model(tmp_path / "model.keras")
        assert tuple(again.weights[0].value.sharding.spec) == (None, "model")
