"""Texts of `keras_dist/monitoring`."""

import dataclasses
from unittest import mock

import jax
import keras
import numpy as np
from support.example_plans import example_plan

import keras_dist as kd
from keras_dist.monitoring import utilization
from keras_dist.monitoring.doctor import diagnose
from keras_dist.monitoring.plan_comparison import comparison_text
from keras_dist.monitoring.process_lines import summary_of_all
from keras_dist.monitoring.summary import Summary
from keras_dist.monitoring.system_facts import SystemFacts

X, Y = np.ones((24, 4), "float32"), np.ones((24, 1), "float32")
SUMMARY = Summary(
    step=400,
    steps=100,
    steps_per_epoch=450,
    epoch=2,
    epochs=20,
    loss=0.1234,
    median=0.0124,
    percentile_95=0.0131,
    deviation=0.0004,
    samples_per_second=5161,
    tokens_per_second=5.285e6,
    mfu=0.412,
    peak_memory=round(11.6 * 2**30),
    data_wait=0.021,
    host_work=0.004,
    host_wait=0.024,
    goodput=0.934,
)
PLUGINS = {f"jax-cuda{number}-{part}": "0.12.0" for number in (12, 13) for part in ("plugin", "pjrt")}


def new_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="small")
    model.compile("sgd", "mse")
    return model


def fit(monitor, model=None, **arguments):
    (model or new_model()).fit(X, Y, batch_size=8, verbose=0, callbacks=[monitor], **arguments)


def monitor(**arguments):
    return kd.StepMonitor(log_every=None, **arguments)


def while_another_profile_is_written():
    with mock.patch.object(
        jax.profiler, "start_trace", side_effect=RuntimeError("Profile has already been started. Only one at a time.")
    ):
        fit(monitor(profile=(1, 2)))


def with_a_step_without_logs():
    class Silent(keras.Model):
        def train_step(self, state, data):
            return {}, super().train_step(state, data)[1]

    inputs = keras.Input((4,))
    model = Silent(inputs, keras.layers.Dense(1)(inputs), name="silent")
    model.compile("sgd", "mse")
    fit(monitor(), model)


def with_a_plan_of_something_else():
    plan = kd.plan(new_model, kd.DataParallel(), batch=32)
    with kd.FullyShardedDataParallel().scope():
        fit(monitor(plan=plan), new_model())


def with_a_step_that_cannot_be_traced_again():
    cpu = kd.hardware["cpu"]
    changed = dataclasses.replace(cpu, flops_per_second={"float32": 1e9}, sources={"flops_per_second": "a test"})
    kd.hardware.register(changed, replace=True)
    try:
        with mock.patch.object(utilization, "trace_flops", side_effect=ValueError("the generator has no more files")):
            fit(monitor())
    finally:
        kd.hardware.register(cpu, replace=True)


def device(platform, kind, **figures):
    unknown = {"hardware": None, "links": None, "memory_bytes": None, "used_bytes": None}
    return {"name": f"{platform}:0", "kind": kind, "platform": platform, "process": 0} | unknown | figures


H100 = device(
    "gpu",
    "NVIDIA H100 80GB HBM3",
    hardware="h100",
    links="18 x 25 GB/s",
    memory_bytes=60 * 2**30,
    used_bytes=2**20,
)


def diagnosis(versions=None, environment=None, **changed):
    known = {"keras": "3.15.1", "jax": "0.12.0", "jaxlib": "0.12.0"}
    facts = SystemFacts("3.13.0", known | (versions or {}), environment or {}, cores=2)
    return str(diagnose(dataclasses.replace(facts, **{"devices": (device("cpu", "cpu"),), **changed})))


CASES = {
    "log_every is no number": lambda: kd.StepMonitor(log_every="epoch"),  # pyright: ignore[reportArgumentType]
    "log_every is not positive": lambda: kd.StepMonitor(log_every=0),
    "plan is no plan": lambda: kd.StepMonitor(plan="h100:8"),  # pyright: ignore[reportArgumentType]
    "a plan of another step": lambda: kd.StepMonitor(plan=example_plan(step="predict")),
    "profile is no pair of steps": lambda: kd.StepMonitor(profile=10),  # pyright: ignore[reportArgumentType]
    "profile is no range": lambda: kd.StepMonitor(profile=(15, 10)),
    "a directory without a profile": lambda: kd.StepMonitor(profile_directory="profile"),
    "a monitor of evaluate": lambda: new_model().evaluate(X, Y, verbose=0, callbacks=[monitor()]),
    "a monitor of predict": lambda: new_model().predict(X, verbose=0, callbacks=[monitor()]),
    "a monitor outside of fit": lambda: monitor().on_epoch_begin(0),
    "another profile is being written": while_another_profile_is_written,
    "a profile that is never reached": lambda: fit(monitor(profile=(10, 15), profile_directory="profile")),
    "a profile that fit ends": lambda: fit(monitor(profile=(2, 15), profile_directory="profile")),
    "a fit without a step": lambda: fit(monitor(), epochs=2, initial_epoch=2),
    "a step that returns no logs": with_a_step_without_logs,
    "a plan of something else": with_a_plan_of_something_else,
    "a step that cannot be traced again": with_a_step_that_cannot_be_traced_again,
    "a line": SUMMARY.line,
    "a line on CPUs": lambda: dataclasses.replace(SUMMARY, mfu=None, peak_memory=None, tokens_per_second=None).line(),
    "a line of steps that all compiled": lambda: Summary(step=1, steps=0, goodput=0.0).line(),
    "the slowest process": lambda: summary_of_all(
        {0: SUMMARY, 3: dataclasses.replace(SUMMARY, host_wait=0.31, data_wait=0.3)}, 4
    )[1],
    "a process that is missing": lambda: summary_of_all({0: Summary(step=1, steps=0)}, 2)[1],
    "predicted against measured": lambda: comparison_text(example_plan(), SUMMARY),
    "as predicted": lambda: comparison_text(
        example_plan(), dataclasses.replace(SUMMARY, median=0.01, peak_memory=None)
    ),
    "far from what was predicted": lambda: comparison_text(
        example_plan(), dataclasses.replace(SUMMARY, median=0.1, peak_memory=None)
    ),
    "nothing of a plan can be compared": lambda: comparison_text(example_plan(), Summary(step=1, steps=0)),
    "doctor: nothing to change": lambda: diagnosis(
        dict(list(PLUGINS.items())[:2]), gpus=8, devices=(H100, H100), longest_link="1 hop"
    ),
    "doctor: versions and plugins": lambda: diagnosis(
        PLUGINS | {"keras": "3.10.0", "jax-cuda12-pjrt": "0.11.0"}, devices=(H100,)
    ),
    "doctor: environment of CPUs": lambda: diagnosis(
        environment={
            "KERAS_BACKEND": "torch",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=64 --xla_a=1 --xla_a=2 xla_b",
        }
    ),
    "doctor: environment of GPUs": lambda: diagnosis(
        environment={
            "JAX_NUM_CPU_DEVICES": "8",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "90",
        },
        devices=(H100,),
    ),
    "doctor: GPUs without a plugin, TPUs without libtpu": lambda: diagnosis(gpus=8, tpus=4),
    "doctor: GPUs that JAX cannot use": lambda: diagnosis(
        dict(list(PLUGINS.items())[:2]), gpus=8, output="RuntimeError: Unable to load cuDNN. Is it installed?"
    ),
    "doctor: hidden TPUs": lambda: diagnosis({"libtpu": "0.0.50"}, {"JAX_PLATFORMS": "cpu"}, tpus=4),
    "doctor: an unknown flag": lambda: diagnosis(devices=(), failure="Unknown flag in XLA_FLAGS: --xla_a=1"),
    "doctor: a TPU in use": lambda: diagnosis(
        devices=(), tpus=4, failure="JAX did not create its devices within 120 seconds"
    ),
    "doctor: an unknown platform": lambda: diagnosis(
        environment={"JAX_PLATFORMS": "rocm"}, devices=(), failure="RuntimeError: Unknown backend rocm"
    ),
    "doctor: JAX fails": lambda: diagnosis(devices=(), failure="RuntimeError: no memory"),
}
