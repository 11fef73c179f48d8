"""Programs that the compiler refuses, or compiles in another way only."""

import dataclasses

import jax
import pytest
from support.planned_models import LAYOUTS, perceptron, with_kernel

import keras_dist as kd
from keras_dist.planning.compiling import compilation
from keras_dist.planning.compiling.extrapolation import extrapolated
from keras_dist.planning.costs.forecast import Forecast
from keras_dist.planning.costs.roofline import Roofline


class Lowered:
    """A program that compiles without Triton only, or not at all."""

    def __init__(self, message, compiles_without_triton):
        self.message, self.compiles_without_triton = message, compiles_without_triton

    def compile(self, compiler_options=None):
        if compiler_options == {"xla_gpu_enable_triton_gemm": False} and self.compiles_without_triton:
            return "the program"
        raise jax.errors.JaxRuntimeError(self.message)


def test_program_without_tile_sizes_is_compiled_without_triton():
    message = "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot"
    compiled, refusal, notes = compilation._compile(Lowered(message, True), {}, {})
    assert (compiled, refusal) == ("the program", None)
    assert "xla_gpu_enable_triton_gemm=False" in notes[0]


@pytest.mark.parametrize("message", ["INTERNAL: Couldn't find output tile sizes", "INTERNAL: another failure"])
def test_internal_errors_of_the_compiler_name_it(message):
    with pytest.raises(RuntimeError, match=f"The compiler .*{message}"):
        compilation._compile(Lowered(message, False), {}, {})


def test_operation_that_the_target_does_not_support():
    """A kernel that is not written for the CPU, and one that cannot be partitioned as its operands are sharded."""
    with pytest.raises(ValueError, match=r"predict step of 'mlp' for 8 x cpu.*interpret"):
        kd.plan(with_kernel, kd.DataParallel(), 16, step="predict")
    message = (
        'INTERNAL: custom_partitioner: Traceback (most recent call last):\n  File "main.py", line 198, in main\n'
        "ValueError: Query, key and value should have same sharding.\n\t\n\nSuspected Python Code Location:\n"
    )
    with pytest.raises(ValueError, match=r"^Query, key and value should have same sharding\.$"):
        compilation._compile(Lowered(message, False), {}, {})


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory (17.00G) exceeds available HBM (15.75G).",
            17.0,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.25G of 15.75G hbm. Exceeded by 2.5G.",
            18.25,
        ),
    ],
)
def test_program_that_the_compiler_does_not_finish(message, needed, monkeypatch):
    monkeypatch.setattr(compilation, "_compile", lambda lowered, options, estimates: (None, message, ()))
    planned = kd.plan(perceptron, LAYOUTS["data parallel"](), 16)
    assert planned.fits is False
    assert planned.memory.total == needed * 2**30
    assert planned.traffic == ()
    assert planned.roofline.seconds is None
    assert any(message in note for note in planned.notes)
    assert message.split(".")[0][:40] in " ".join(str(planned).split())
    assert "unknown" in str(planned)
    assert "unknown" in str(kd.compare(planned))


def of_temporaries(temporaries):
    return compilation.Compilation(
        argument_bytes=0.0,
        temporaries=temporaries,
        model_flops=0.0,
        roofline=Roofline.unknown("cpu"),
        refusal=None,
        notes=(),
        seconds=0.0,
    )


@pytest.mark.parametrize(("fewer", "more", "deepest"), [(5e9, 7e9, 35e9), (7e9, 7e9, 7e9), (7e9, 6e9, 6e9)])
def test_temporaries_are_never_extrapolated_below_the_larger_model(fewer, more, deepest):
    """Compilers pack a few blocks better or worse; a step that trains then has a note."""
    compiled = {2: of_temporaries(fewer), 4: of_temporaries(more)}
    trained = extrapolated(compiled, 32, "train")
    assert trained.temporaries == deepest
    doubts = [note for note in trained.notes if "larger compile_depths" in note]
    assert len(doubts) == (deepest == more)
    assert extrapolated(compiled, 32, "predict").notes == trained.notes[:1]


def test_extrapolation_of_an_unknown_forecast_is_unknown():
    known = dataclasses.replace(
        of_temporaries(1.0),
        roofline=dataclasses.replace(of_temporaries(1.0).roofline, forecast=Forecast(3.0, 2.0, 1.0, 0.0, 1.0)),
    )
    more = dataclasses.replace(
        known, roofline=dataclasses.replace(known.roofline, forecast=Forecast(5.0, 3.0, 2.0, 0.0, 2.0))
    )
    assert extrapolated({2: known, 4: more}, 8, "train").roofline.forecast == Forecast(9.0, 5.0, 4.0, 0.0, 4.0)
    assert extrapolated({2: of_temporaries(1.0), 4: more}, 8, "train").roofline.forecast is None
    overlapped = dataclasses.replace(
        more, roofline=dataclasses.replace(more.roofline, forecast=Forecast(3.5, 3.0, 0.5, 0.0, 2.0))
    )
    assert extrapolated({2: known, 4: overlapped}, 8, "train").roofline.forecast == Forecast(5.5, 5.0, 0.5, 0.0, 4.0)


def test_each_time_of_a_roofline_is_extrapolated():
    names = [field.name for field in dataclasses.fields(Roofline) if field.name.endswith("_seconds")]
    known = [dataclasses.replace(Roofline.unknown("gpu"), **dict.fromkeys(names, each)) for each in (1.0, 2.0)]
    first, second = (dataclasses.replace(of_temporaries(1.0), roofline=roofline) for roofline in known)
    deep = extrapolated({2: first, 4: second}, 6, "train").roofline
    assert {name: getattr(deep, name) for name in names} == dict.fromkeys(names, 3.0)
    assert "host_seconds" in names
