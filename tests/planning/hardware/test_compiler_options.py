"""Options of XLA: what a plan accepts and shows, and the sets that are recommended for some hardware."""

import dataclasses

import jax
import jax.numpy as jnp
import keras
import pytest
from support.compilers import needs_cuda, needs_libtpu
from support.example_plans import example_plan
from support.planned_models import gpt, perceptron
from support.slow_cases import slow

import keras_dist as kd
from keras_dist.planning.compiling import compilation
from keras_dist.planning.hardware.compiler_options import checked_compiler_options

TARGETS = [
    *(pytest.param(name, marks=needs_libtpu) for name in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")),
    *(pytest.param(name, marks=needs_cuda) for name in ("a100:8", "h100:8", "b200:8")),
]
UNKNOWN = "xla_no_such_option"


@pytest.mark.parametrize(
    "wrong", ["xla_a=1", [("xla_a", 1)], {"xla_a": None}, {"xla_a": [1]}, {1: "a"}], ids=lambda wrong: repr(wrong)
)
def test_options_that_are_no_names_and_values_are_refused(wrong):
    with pytest.raises(TypeError, match="compiler_options"):
        kd.plan(perceptron, kd.DataParallel(), 16, compiler_options=wrong)


def test_options_may_be_written_as_flags():
    assert dict(checked_compiler_options({"--xla_a": "true", "xla_b": 2})) == {"xla_a": True, "xla_b": 2}
    assert dict(checked_compiler_options(None)) == {}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({UNKNOWN: True}, f"{UNKNOWN}=true: No such compile option: '{UNKNOWN}'"),
        ({"xla_cpu_enable_fast_math": "maybe"}, "'maybe' is not a valid bool"),
    ],
)
@pytest.mark.parametrize("depth", [slow(None), 6])
def test_what_the_compiler_refuses_is_one_error(options, reason, depth):
    with pytest.raises(ValueError, match=reason):
        kd.plan(gpt, kd.DataParallel(), 16, compiler_options=options, depth=depth)


def test_plans_have_the_options_that_they_were_compiled_with():
    options = {"xla_cpu_enable_fast_math": False}
    planned = kd.plan(perceptron, kd.DataParallel(), 16, compiler_options=options)
    assert planned.compiler_options == options
    assert planned.to_dict()["compiler_options"] == options
    assert "compiler options xla_cpu_enable_fast_math=false" in str(planned)
    without = kd.plan(perceptron, kd.DataParallel(), 16)
    assert without.compiler_options == {}
    assert "compiler options" not in str(without)
    compared = str(kd.compare(fast=without, exact=planned))
    assert "fast: none" in compared
    assert "exact: xla_cpu_enable_fast_math=false" in compared
    assert kd.compare(exact=planned).to_dict()["exact"]["compiler_options"] == options


def test_comparison_of_plans_without_options_does_not_mention_them():
    assert "ompiler options" not in str(kd.compare(example_plan()))


def test_options_for_estimates_are_left_out_where_the_compiler_does_not_know_them():
    class Lowered:
        tried = ()

        def compile(self, compiler_options):
            self.tried += (compiler_options,)
            if UNKNOWN in compiler_options:
                raise jax.errors.JaxRuntimeError(f"INVALID_ARGUMENT: No such compile option: '{UNKNOWN}'")
            return "the program"

    lowered = Lowered()
    assert compilation._compile(lowered, {"xla_a": 1}, {UNKNOWN: True})[0] == "the program"
    assert lowered.tried == ({UNKNOWN: True, "xla_a": 1}, {"xla_a": 1})


def test_recommended_options_have_a_purpose_and_a_public_source():
    for entry in kd.hardware.values():
        for options in entry.recommended_compiler_options.values():
            assert options
            assert all(name.startswith("xla_") for name in options)
            assert options.purpose
            assert "https://" in options.source
    assert kd.hardware["v5e"].recommended_compiler_options
    assert not kd.hardware["cpu"].recommended_compiler_options


def test_own_hardware_has_the_options_of_its_kind():
    own = dataclasses.replace(kd.hardware["h100"], name="h100-own")
    assert own.recommended_compiler_options == kd.hardware["h100"].recommended_compiler_options


@pytest.mark.compiler
@pytest.mark.usefixtures("full_compilation")
class TestCompiled:
    @pytest.mark.parametrize("target", TARGETS)
    def test_compilers_accept_the_recommended_options(self, target):
        made = kd.target(target)
        operand = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(made[0]))
        lowered = jax.jit(jnp.matmul).lower(operand, operand)
        assert made.hardware.recommended_compiler_options
        for options in made.hardware.recommended_compiler_options.values():
            lowered.compile(dict(options))

    @needs_libtpu
    def test_options_change_the_program(self):
        """With more on-chip memory for each operation, a large matrix multiplication is faster, but not its batch."""
        mesh = kd.create_device_mesh("data:1", devices=kd.target("v6e:1x1"))
        options = kd.hardware["v6e"].recommended_compiler_options["large_scoped_vmem"]

        def build():
            policy = keras.DTypePolicy("bfloat16")
            inputs = keras.Input((8192,), dtype="bfloat16")
            dense = keras.layers.Dense(8192, use_bias=False, dtype=policy, name="dense")
            return keras.Model(inputs, dense(inputs), name="matmul")

        default, faster = (
            kd.plan(build, kd.DataParallel(mesh), 8192, step="predict", compiler_options=each).roofline.forecast
            for each in (None, options)
        )
        assert faster.compute_seconds < 0.95 * default.compute_seconds
        assert faster.seconds == default.seconds  # that the copy of 128 MiB from the host takes

    @pytest.mark.parametrize(
        "target", [pytest.param("v5e:2x2", marks=needs_libtpu), pytest.param("h100:8", marks=needs_cuda)]
    )
    def test_what_another_compiler_knows_is_refused(self, target):
        mesh = kd.create_device_mesh("data:-1", devices=kd.target(target))
        with pytest.raises(ValueError, match=f"{UNKNOWN}.*No such compile option"):
            kd.plan(perceptron, kd.DataParallel(mesh), 16, compiler_options={UNKNOWN: "1"})
