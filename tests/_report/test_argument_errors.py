"""Names and arguments that do not exist are errors with the closest ones, and nothing else of a function changes."""

import contextlib
import importlib
import inspect
import pickle
import warnings

import pytest

import keras_dist as kd
from keras_dist._report.argument_errors import _CUSTOMARY, with_explained_arguments


@pytest.mark.parametrize(
    "name", ["FSDP", "fsdp", "HSDP", "ZeRO1", "DDP", "TensorParallel", "Mesh", "Plam", "step_monitor"]
)
def test_a_name_that_does_not_exist_has_a_suggestion_that_does(name):
    with pytest.raises(AttributeError, match=r"Did you mean `keras_dist\.(\w+)") as error:
        getattr(kd, name)
    suggested = str(error.value).partition("`keras_dist.")[2]
    assert suggested.partition("`")[0].partition("(")[0] in kd.__all__


def test_customary_names_stand_for_public_ones():
    assert {suggested.partition("(")[0] for suggested in _CUSTOMARY.values()} <= set(kd.__all__)


def test_names_are_looked_up_as_before():
    assert not hasattr(kd, "FSDP")
    assert not hasattr(kd, "__path_of_nothing__")
    assert getattr(kd, "fsdp", None) is None
    with pytest.raises(ImportError, match="FSDP"):
        exec("from keras_dist import FSDP", {})
    names = {}
    exec("from keras_dist import planning, plan", names)
    assert names["planning"] is importlib.import_module("keras_dist.planning")
    assert names["plan"] is kd.plan


def test_signatures_names_and_pickles_are_those_of_the_functions():
    assert list(inspect.signature(kd.plan).parameters)[:3] == ["build_model", "distribution", "batch"]
    assert next(iter(inspect.signature(kd.ModelParallel).parameters)) == "layout_map"
    assert (kd.plan.__module__, kd.plan.__qualname__) == ("keras_dist", "plan")
    assert pickle.loads(pickle.dumps(kd.plan)) is kd.plan
    options = kd.StepOptions(microbatches=2)
    assert pickle.loads(pickle.dumps(options)) == options


def test_misspelled_arguments_of_a_subclass_are_explained():
    class Own(kd.FullyShardedDataParallel):
        def __init__(self, **options):
            super().__init__(**options)

    with pytest.raises(TypeError, match=r"'shard_axes'\. Did you mean 'shard_axis'\?"):
        Own(shard_axes="fsdp")


def test_a_type_error_inside_a_function_is_left_alone():
    def fails(value):
        return len(value)

    explained = with_explained_arguments(fails, "fails")
    with pytest.raises(TypeError, match=r"^object of type 'int' has no len\(\)$"):
        explained(3)
    with pytest.raises(TypeError, match=r"^fails\(\) cannot be called like this: missing a required argument: 'value'"):
        explained()


def test_warnings_point_at_the_line_that_calls(monkeypatch):
    two_axes = kd.create_device_mesh("data:2,model:4")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kd.DataParallel(two_axes)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with contextlib.suppress(ValueError):  # no compiler for GPUs
            kd.target("h100:17")
    assert [each.filename for each in caught] == [__file__] * 2
