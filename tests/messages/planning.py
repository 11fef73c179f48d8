"""Texts of `keras_dist/planning`."""

import dataclasses
import types
import warnings
from unittest import mock

import jax
import keras
import numpy as np
from keras import layers
from support.example_plans import GIB, MEMORY, example_plan
from support.planned_models import gpt, perceptron, rules, subclassed, with_kernel

import keras_dist as kd
from keras_dist.planning.compiling import compilation
from keras_dist.planning.costs.roofline import Roofline
from keras_dist.planning.fitting_options import plan_with_fitting_options
from keras_dist.planning.frozen_mapping import FrozenMapping
from keras_dist.planning.search.candidates import Candidate
from keras_dist.planning.search.choice import Choice, Trial
from keras_dist.planning.targets import target as compile_target
from keras_dist.planning.targets.target import require_one_target


def sequential(*members, shape=(4,), **compiled):
    """A compiled `Sequential` of layers."""
    model = keras.Sequential([keras.Input(shape), *members], name="mlp")
    model.compile("sgd", "mse", **compiled)
    return model


def plan_of(build, batch=16, **options):
    return str(kd.plan(build, kd.DataParallel(), batch, **options).notes)


class Positive(layers.Layer):
    """A layer whose output shape depends on data."""

    def call(self, x):
        return x[x > 0]

    def compute_output_shape(self, input_shape):
        return input_shape


class Refuses(layers.Layer):
    """A layer that raises an error of its own when it is traced."""

    def call(self, x):
        if isinstance(x, jax.core.Tracer):
            raise ValueError("this layer takes rows of 8 numbers")
        return x

    def compute_output_shape(self, input_shape):
        return input_shape


class Bakes(layers.Layer):
    """A layer that embeds a large array in the program."""

    def call(self, x):
        return x @ keras.ops.convert_to_tensor(np.ones((2**12, 2**10), "float32"))


def uneven_blocks(depth):
    return sequential(*(layers.Dense(4 if number < 5 else 8) for number in range(depth)), layers.Dense(1))


def target_without_compilers(name):
    compile_target._compile_only_target.cache_clear()
    with mock.patch("importlib.util.find_spec", return_value=None), mock.patch.dict("os.environ"):
        compile_target.os.environ.pop("TPU_LIBRARY_PATH", None)
        return kd.target(name)


def notes_of_search(error):
    def compile(distribution):
        raise error

    planned = example_plan(fits=False, memory=TOO_LARGE)
    return plan_with_fitting_options(planned, kd.DataParallel(), compile, ("microbatches", "offload")).notes


def target_refused_by_the_compiler(name, error):
    compile_target._compile_only_target.cache_clear()
    with (
        mock.patch("importlib.util.find_spec", return_value="found"),
        mock.patch.object(compile_target.topologies, "get_topology_desc", side_effect=error),
    ):
        return kd.target(name)


def target_of_an_unusable_plugin():
    compile_target._compile_only_target.cache_clear()
    with (
        mock.patch("importlib.util.find_spec", return_value="found"),
        mock.patch("importlib.metadata.version", return_value="0.9"),
        mock.patch("importlib.import_module", side_effect=ImportError("the version does not match")),
        mock.patch.object(compile_target.jax, "__version__", "0.10"),
        mock.patch.object(compile_target.topologies, "get_topology_desc", side_effect=NotImplementedError),
    ):
        return kd.target("h100:8")


def many_gpus(name="h100:16"):
    devices = types.SimpleNamespace(devices=kd.mock_gpus(1, 16))
    with (
        mock.patch("importlib.util.find_spec", return_value="found"),
        mock.patch.object(compile_target.topologies, "get_topology_desc", return_value=devices),
    ):
        compile_target._compile_only_target.cache_clear()
        kd.target(name)
        compile_target._compile_only_target.cache_clear()


def target_of_an_old_gpu():
    error = jax.errors.JaxRuntimeError("UNIMPLEMENTED: /usr/local/bin/ptxas ptxas too old.")
    devices = types.SimpleNamespace(devices=jax.devices()[:2])
    compile_target._compile_only_target.cache_clear()
    with (
        mock.patch("importlib.util.find_spec", return_value="found"),
        mock.patch.object(compile_target.topologies, "get_topology_desc", return_value=devices),
        mock.patch.object(compile_target.jax, "jit", side_effect=error),
    ):
        return kd.target("v100:2")


def hardware(**changes):
    return kd.Hardware(**{"name": "own", "platform": "tpu", "device_kind": "TPU v5 lite", **changes})


def register(entry):
    return type(kd.hardware)(kd.hardware.values()).register(entry)


def target_of(entry):
    with mock.patch.dict(kd.hardware._entries, {entry.name: entry}):
        kd.target(f"{entry.name}:4")


def mesh_of_two_targets():
    require_one_target(kd.DeviceMesh((2,), ["data"], [kd.mock_tpus("v5e:2x2")[0], kd.mock_tpus("v4:2x2x1")[0]]))


def mesh_of_irregular_slices():
    devices = kd.mock_tpus("v5e:2x2", slices=2)
    require_one_target(kd.DeviceMesh((6,), ["data"], devices[:6]))


def failing_compiler(message):
    def compile(compiler_options=None):
        raise jax.errors.JaxRuntimeError(message)

    return compilation._compile(types.SimpleNamespace(compile=compile), {}, {})


def without_triton():
    def compile(compiler_options=None):
        if not compiler_options:
            raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot")

    return compilation._compile(types.SimpleNamespace(compile=compile), {}, {})[2][0]


def small_memory(capacity):
    """Lets each of eight CPU devices have this memory."""
    sizes = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 8 * capacity}
    return mock.patch.object(compile_target.os, "sysconf", sizes.__getitem__)


def choice_that_does_not_fit():
    with small_memory(1000):
        kd.auto(perceptron, 16, strategies=["dp", "tp"])


def example_choice():
    """A choice with known figures: one candidate of each fate."""
    dp, fsdp, tp = (
        Candidate(name, {"data": 8 // size, "model": size}) for name, size in (("dp", 1), ("fsdp", 1), ("tp_sp", 2))
    )
    again = dataclasses.replace(fsdp, regathers=True)
    return Choice(
        distribution=kd.DataParallel(),
        plan=example_plan(),
        objective="time",
        trials=(
            Trial(fsdp, 9 * GIB, 3 * GIB, 0.0125, example_plan(), "chosen"),
            Trial(again, 8 * GIB, 4 * GIB, 0.013, example_plan(), "4.0% slower"),
            Trial(tp, 5 * GIB, 9 * GIB, 0.05, None, "cannot win: at least 14.1 ms"),
            Trial(dp, 40 * GIB, 3 * GIB, None, None, "cannot fit: variables and batch take 32 GiB"),
        ),
        source='import keras_dist as kd\n\nmesh = kd.create_device_mesh("data:8")\n...\n',
        notes=("Not tried: what this example leaves out.",),
    )


def batch_in_a_list():
    with warnings.catch_warnings(action="ignore"):  # of Keras, about the structure of x
        plan_of(perceptron, [np.ones((16, 16)), np.ones((16, 8))])


def choice_among_many():
    """A choice with more candidates than are printed."""
    choice = example_choice()
    return dataclasses.replace(choice, trials=(*choice.trials, *choice.trials[2:3] * 9), notes=())


OPTIONS = FrozenMapping({"xla_tpu_scoped_vmem_limit_kib": 98304})
TOO_LARGE = dataclasses.replace(MEMORY, temporaries=12 * GIB)
UNKNOWN = {
    "fits": None,
    "memory": dataclasses.replace(MEMORY, capacity=None),
    "roofline": Roofline.unknown("gpu"),
    "model_flops_utilization": None,
}

CASES = {
    # Reports
    "a plan that fits": lambda: str(example_plan()),
    "a plan that does not fit": lambda: str(example_plan(fits=False, memory=TOO_LARGE, traffic=(), notes=())),
    "a plan for hardware without figures": lambda: str(example_plan(**UNKNOWN)),
    "the repr of a plan": lambda: repr(example_plan()),
    "a choice": lambda: str(example_choice()),
    "a choice among many candidates": lambda: str(choice_among_many()),
    "all candidates of a choice": lambda: str(choice_among_many().table()),
    "the repr of a choice": lambda: repr(example_choice()),
    "a comparison": lambda: str(kd.compare(fsdp=example_plan(), tp=example_plan(fits=False, memory=TOO_LARGE))),
    "a comparison of different models": lambda: str(
        kd.compare(a=example_plan(), b=example_plan(model="llama"), c=example_plan(**UNKNOWN))
    ),
    "the list of hardware": lambda: repr(kd.hardware),
    # Arguments of plan
    "a comparison of no plans": lambda: kd.compare(),
    "a comparison of other objects": lambda: kd.compare(["plan"]),
    "no distribution": lambda: kd.plan(gpt, "data:8", 16),
    "a plan without a batch": lambda: kd.plan(perceptron, kd.DataParallel()),
    "a plan with distribution and batch swapped": lambda: kd.plan(perceptron, 16, kd.DataParallel()),
    "a plan for the class of a distribution": lambda: kd.plan(perceptron, kd.DataParallel, 16),
    "a plan for a distribution of Keras": lambda: kd.plan(perceptron, keras.distribution.DataParallel(), 16),
    "a plan with an argument of auto": lambda: kd.plan(perceptron, kd.DataParallel(), 16, target="v5e:4x4"),
    "a build function that takes an argument": lambda: plan_of(lambda width: perceptron()),
    "a build function that was called, and returned None": lambda: plan_of(None),
    "a class as the build function": lambda: plan_of(keras.Sequential),
    "a batch of a float": lambda: plan_of(perceptron, 16.0),
    "a batch that is None": lambda: plan_of(perceptron, None),
    "a batch that is a list of x and y": batch_in_a_list,
    "a batch of other columns": lambda: plan_of(perceptron, ((16, 17), (16, 8))),
    "a choice without a batch": lambda: kd.auto(perceptron),
    "a choice with the target in place of the batch": lambda: kd.auto(perceptron, "v5e:4x4", 16),
    "a choice of a strategy by its class's name": lambda: kd.auto(perceptron, 16, strategies="FSDP"),
    "a choice for a target that is a number": lambda: kd.auto(perceptron, 16, 8),
    "a choice for a build function with an argument": lambda: kd.auto(lambda width: perceptron(), 16),
    "hardware in place of a target": lambda: kd.target(kd.hardware["h100"]),
    "a comparison of a plan and a distribution": lambda: kd.compare(kd.DataParallel()),
    "devices of a mesh by the name of a target": lambda: kd.create_device_mesh("data:8", devices="v5e:2x4"),
    "a target as an argument of a plan": lambda: kd.plan(perceptron, kd.DataParallel(), 16, target="v5e:2x4"),
    "an unknown step": lambda: plan_of(gpt, step="fit"),
    "no model": lambda: plan_of("model.py"),
    "a build function that returns no model": lambda: plan_of(lambda: None),
    "a model that is not compiled": lambda: plan_of(lambda: keras.Sequential([keras.Input((4,)), layers.Dense(2)])),
    "a model that is not built": lambda: plan_of(subclassed(), ((16, 32), (16, 8))),
    "a model with a layer that is not compiled": lambda: plan_of(
        lambda: sequential(layers.RandomRotation(0.1), layers.GlobalMaxPooling2D(), shape=(8, 8, 3))
    ),
    "an eager model": lambda: plan_of(lambda: sequential(layers.Dense(2), run_eagerly=True)),
    # Batches
    "no rows": lambda: plan_of(perceptron, 0),
    "a batch that a layer refuses": lambda: plan_of(lambda: sequential(Refuses())),
    "a batch without targets": lambda: plan_of(perceptron, jax.ShapeDtypeStruct((16, 16), "float32")),
    "a batch of four": lambda: plan_of(perceptron, ((16, 16), (16, 8), (16,), (16,))),
    "a batch with None in its shape": lambda: plan_of(perceptron, ((None, 16), (None, 8))),
    "a batch of text": lambda: plan_of(perceptron, "64"),
    "a number of rows for inputs of unknown length": lambda: plan_of(
        lambda: sequential(layers.Dense(2), shape=(None, 4))
    ),
    "a number of rows for a model without inputs": lambda: plan_of(subclassed),
    "shapes that depend on data": lambda: plan_of(lambda: sequential(Positive())),
    "a batch that the axis does not divide": lambda: str(
        kd.plan(perceptron, kd.DataParallel(step_options=kd.StepOptions(microbatches=2)), 12).notes
    ),
    "a mesh axis that is not used": lambda: str(
        kd.plan(perceptron, rules(kd.create_device_mesh("data:2,model:4"), {}), 16).notes[0]
    ),
    "cuDNN's kernels, for GPUs that are not attached": lambda: "\n".join(
        compilation._notes(
            types.SimpleNamespace(
                unknown_loops=0,
                opaque_calls=(),
                closed_forms=("__cudnn$fmhaSoftmaxBackward", "cudnn_rnn_ffi"),
                workspace_bytes=2**24,
            ),
            1.0,
            False,
        )
    ),
    "an operation that the target does not support": lambda: plan_of(with_kernel, step="predict"),
    "a large constant in the program": lambda: plan_of(lambda: sequential(Bakes(), layers.Dense(1), shape=(2**12,)), 8),
    # Depths
    "depth with a model": lambda: plan_of(perceptron(), depth=8),
    "depth with a build function without parameter": lambda: plan_of(perceptron, depth=8),
    "depth below the compiled depths": lambda: plan_of(gpt, depth=3),
    "depth with unequal blocks": lambda: plan_of(uneven_blocks, depth=8),
    # Targets
    "a target of a TPU that libtpu does not know": lambda: target_of(hardware(device_kind="TPU v9")),
    "a target of a GPU without figures": lambda: target_of(hardware(platform="gpu", device_kind="NVIDIA X100")),
    "a target of unknown hardware": lambda: kd.target("v9:2x2"),
    "a target in upper case": lambda: kd.target("H100:8"),
    "a target with x in place of a colon": lambda: kd.target("H100x8"),
    "a target by its device kind": lambda: kd.target("TPU v4"),
    "a target without a shape": lambda: kd.target("4x4"),
    "a target that is not text": lambda: kd.target(8),
    "a number of chips that is not a power of two": lambda: kd.target("v5e:6"),
    "three sides of a 2D slice": lambda: kd.target("v5e:2x2x2"),
    "a slice that is too large": lambda: kd.target("v5e:32x8"),
    "slices of GPUs": lambda: kd.target("h100:8", slices=2),
    "no slices": lambda: kd.target("v5e:2x2", slices=0),
    "slices that are not an integer": lambda: kd.target("v5e:2x2", slices=2.0),
    "three sizes of GPUs": lambda: target_refused_by_the_compiler("h100:2x2x2", None),
    "more than 8 GPUs in a host": many_gpus,
    "GPUs that NVLink joins in pairs": lambda: many_gpus("a100-pcie:4"),
    "more CPU devices than JAX has started with": lambda: kd.target("cpu:9"),
    "a shape of CPU devices": lambda: kd.target("cpu:2x4"),
    "no compiler for TPUs": lambda: target_without_compilers("v5e:2x4"),
    "no compiler for GPUs": lambda: target_without_compilers("h100:8"),
    "a shape that libtpu refuses": lambda: target_refused_by_the_compiler(
        "v5e:2x6", jax.errors.JaxRuntimeError("INVALID_ARGUMENT: 2x6 is no topology")
    ),
    "a slice that does not exist": lambda: kd.target("v5e:3x5"),
    "no GPUs": lambda: kd.target("h100:0"),
    "a near miss with two sides": lambda: kd.target("v5x:2x4"),
    "libtpu in use by another process": lambda: target_refused_by_the_compiler(
        "v5e:2x2", jax.errors.JaxRuntimeError("ABORTED: accessing libtpu multi-process lockfile")
    ),
    "a CUDA plugin that JAX cannot use": target_of_an_unusable_plugin,
    "a GPU that CUDA 13 does not know": target_of_an_old_gpu,
    "a mesh of two targets": mesh_of_two_targets,
    "a mesh of irregular slices": mesh_of_irregular_slices,
    # The compiler
    "a program without tile sizes": without_triton,
    "an internal error of the compiler": lambda: failing_compiler("INTERNAL: another failure"),
    "step options that cannot be compiled": lambda: str(notes_of_search(RuntimeError("internal error\nin line 2"))),
    "a search for step options that is interrupted": lambda: str(notes_of_search(KeyboardInterrupt())),
    # Compiler options
    "a plan that fits with step options": lambda: str(
        example_plan(
            fits=False,
            memory=dataclasses.replace(MEMORY, temporaries=20 * GIB),
            fitting_plan=example_plan(
                step_options=kd.StepOptions(remat="full", offload="optimizer"), host_traffic=8.0 * GIB
            ),
        )
    ).split("\n\n")[3],
    "a plan with compiler options": lambda: str(example_plan(compiler_options=OPTIONS)).split("\n\n")[0],
    "a comparison of compiler options": lambda: str(
        kd.compare(default=example_plan(), vmem=example_plan(compiler_options=OPTIONS))
    ),
    "compiler options that are not a mapping": lambda: plan_of(perceptron, compiler_options="xla_cpu=1"),
    "a compiler option without a value": lambda: plan_of(perceptron, compiler_options={"xla_cpu": None}),
    "an unknown compiler option": lambda: plan_of(perceptron, compiler_options={"xla_no_such_option": True}),
    # Hardware
    "unknown hardware": lambda: kd.hardware["v9"],
    "hardware with an impossible name": lambda: hardware(name="a:b"),
    "hardware without a device kind": lambda: hardware(device_kind=""),
    "hardware with half a byte": lambda: hardware(memory_bytes=0.5),
    "hardware with a fraction of a link": lambda: hardware(links=1.5),
    "a TPU with the compiler target of a GPU": lambda: hardware(compiler_target=kd.hardware["h100"].compiler_target),
    "hardware of an unknown platform": lambda: hardware(platform="quantum"),
    "hardware with a negative figure": lambda: hardware(memory_bytes=-1),
    "hardware with an unknown dtype": lambda: hardware(flops_per_second={"float64": 1e12}),
    "hardware with a figure without source": lambda: hardware(memory_bytes=2**30),
    "hardware with the source of an unknown figure": lambda: hardware(sources={"speed": "a datasheet"}),
    "hardware with peaks that are not a mapping": lambda: hardware(flops_per_second=5),
    "other figures under a known name": lambda: register(dataclasses.replace(kd.hardware["v5e"], memory_bytes=2**30)),
    "CPU hardware under another name": lambda: register(hardware(platform="cpu")),
    "registration of text": lambda: register("v5e"),
    # Choices
    "a choice for an unknown objective": lambda: kd.auto(perceptron, 16, objective="speed"),
    "a choice among unknown strategies": lambda: kd.auto(perceptron, 16, strategies=["zero3"]),
    "a choice among no strategies": lambda: kd.auto(perceptron, 16, strategies=[]),
    "a choice without trials": lambda: kd.auto(perceptron, 16, trials=0),
    "a choice for a batch that is none": lambda: kd.auto(perceptron, "most"),
    "a choice for a depth that is none": lambda: kd.auto(lambda depth: perceptron(), 16, depth=0),
    "a choice that keeps an unknown axis": lambda: kd.auto(perceptron, 16, keep={"rows": 2}),
    "a choice that keeps an axis that does not divide": lambda: kd.auto(perceptron, 16, keep={"data": 3}),
    "a choice that keeps an axis of no size": lambda: kd.auto(perceptron, 16, keep={"data": 0}),
    "a choice that keeps what names no size": lambda: kd.auto(perceptron, 16, keep=["data"]),
    "a choice that keeps another size than its mesh": lambda: kd.auto(
        perceptron, 16, kd.create_device_mesh("data:4,model:2"), keep={"data": 2}
    ),
    "a choice of the fastest of several targets": lambda: kd.auto(perceptron, 16, ["v5e:2x2", "v5e:2x4"]),
    "a choice for no devices": lambda: kd.auto(perceptron, 16, target=[]),
    "a choice that keeps an axis that no strategy has": lambda: kd.auto(
        perceptron, 16, strategies=["dp"], keep={"model": 2}
    ),
    "a choice where nothing fits": choice_that_does_not_fit,
}
