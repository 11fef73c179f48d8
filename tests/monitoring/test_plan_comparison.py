"""A plan against a run: what differs, and what explains a difference in time."""

import jax
import keras
import numpy as np
import pytest
from support.example_plans import example_plan

import keras_dist as kd
from keras_dist.monitoring.batches import batch_shape
from keras_dist.monitoring.plan_comparison import comparison_text, differences_from_run, forecast_ratio, require_plan
from keras_dist.monitoring.summary import Summary

BATCH = batch_shape((np.zeros((64, 1024), "int32"), {"labels": np.zeros((64,), "int32")}))
MESH = kd.create_device_mesh("data:2,model:4")


def layout(axes="data:2,model:4", **arguments):
    mesh = kd.create_device_mesh(axes)
    return kd.ModelParallel(layout_map=kd.LayoutMap(mesh), batch_dim_name="data", **arguments)


def differences(batch=BATCH, devices=None, distribution=None, **plan):
    plan = example_plan(target="cpu", **plan)
    return differences_from_run(plan, batch, devices or jax.devices(), distribution or layout())


def test_a_plan_of_what_runs():
    assert differences() == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"devices": kd.mock_gpus(8)}, ["8 x cpu", "running on"]),
        ({"devices": jax.devices()[:4]}, ["8 x cpu", "4 x cpu"]),
        ({"batch": batch_shape((np.zeros((32, 1024), "int32"),))}, ["[64, 1024]", "[32, 1024]"]),
        ({"distribution": layout("data:4,model:2")}, ["data:2 x model:4", "data:4 x model:2"]),
        ({"distribution": layout(step_options=kd.StepOptions(microbatches=2))}, ["ModelParallel"]),
        ({"distribution": kd.FullyShardedDataParallel(MESH)}, ["ModelParallel", "FullyShardedDataParallel"]),
    ],
)
def test_a_plan_of_something_else(arguments, words):
    (difference,) = differences(**arguments)
    assert all(word in difference for word in words)


def test_a_run_without_a_distribution():
    (difference,) = differences_from_run(example_plan(target="cpu"), BATCH, jax.devices(), None)
    assert "without a distribution" in difference


def test_what_explains_a_difference():
    plan = example_plan()  # its forecast is 10 ms
    summary = Summary(8, 8, median=0.02, data_wait=0.3, host_work=0.05, peak_memory=2 * plan.memory.total)
    assert forecast_ratio(plan, summary) == 2
    text = comparison_text(plan, summary)
    assert "waiting for data 30%, other work of the host 5%, on the devices 15" in text
    assert text.count("100% more") == 2
    assert forecast_ratio(plan, Summary(8, 8)) is None
    assert forecast_ratio(None, summary) is None


@pytest.mark.parametrize(
    ("plan", "error"), [("plan", TypeError), (None, TypeError), (example_plan(step="predict"), ValueError)]
)
def test_what_is_no_plan_of_training(plan, error):
    with pytest.raises(error):
        require_plan(plan)


def test_a_plan_of_something_else_is_a_warning_and_its_time_is_not_compared(capsys):
    def build():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    plan = kd.plan(build, kd.DataParallel(), batch=32)
    with kd.DataParallel().scope(), pytest.warns(UserWarning, match=r"float32\[32, 4\].*float32\[8, 4\]"):
        history = (
            build().fit(np.ones((16, 4)), np.ones((16, 1)), 8, verbose=0, callbacks=[kd.StepMonitor(plan=plan)]).history
        )
    assert "step_time_vs_forecast" not in history
    assert "not compared with the plan" in capsys.readouterr().out
