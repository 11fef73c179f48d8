"""Forecasts and bounds against public measurements.

Without arguments: collectives and matrix multiplications, in seconds. With names of rows (or `all`): steps of
KerasHub's Llama 3 and Mixtral, planned as published as far as keras_dist can express it; what differs is in the row.
With `overhead`: what the forecast adds to the time of a plan.

No figure of the forecast is tuned to a row. The rates of GPUs are fitted to the two tables of OpenXLA as a whole, so
their rows show how good these fits are; the rates of TPUs' matrix multiplications are the compiler's own. The bound
must never exceed a measurement.

Run: pip install ".[tpu,cuda12,hub]" tensorflow-cpu && python benchmarks/forecast.py torchtitan-8b-h100
"""

import argparse
import contextlib
import dataclasses
import functools
import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import plan_llama  # isort: skip  # sets the environment
import jax
import jax.numpy as jnp
import keras
import keras_hub
import numpy as np

import keras_dist as kd
from keras_dist._report.tables import Table
from keras_dist._report.units import bytes_text, seconds_text
from keras_dist.planning.compiling.abstract_step import prepared_step
from keras_dist.planning.costs.forecast import TimeModel
from keras_dist.planning.costs.schedule import walk_schedule
from keras_dist.planning.hardware.interconnect import Interconnect
from keras_dist.planning.hlo.collectives import Collective, wire_bytes
from keras_dist.planning.hlo.module_costs import ModuleReader
from keras_dist.planning.hlo.replica_groups import groups_along

BOOK = "Scaling Book, {}"
RECIPES = "tpu-recipes, {}"
ESTIMATES = {"xla_gpu_collect_cost_model_stats": True}  # what a plan for GPUs asks the compiler for
FAR = 0.25  # more than this needs a reason


class Measured(NamedTuple):
    """A measurement, and what a plan expects: seconds of the bound and of the forecast."""

    name: str
    source: str
    measured: float
    bound: float
    forecast: float
    why: str = ""

    def cells(self) -> tuple[str, ...]:
        ratio = self.forecast / self.measured
        assert self.bound <= self.measured, f"{self.name}: the bound exceeds the measurement"
        why = self.why if abs(ratio - 1) > FAR else ""
        times = (seconds_text(each) for each in (self.measured, self.bound, self.forecast))
        return f"{self.name}\n{self.source}", *times, f"{ratio:.2f}", why


# ------------------------------------------------------------------------------------------------------ collectives


def torus(target: str, slices: int = 1) -> np.ndarray:
    """Devices of a slice in the shape of its torus."""
    devices = sorted(kd.mock_tpus(target, slices), key=lambda device: device.coords)
    array = np.empty(len(devices), object)
    array[:] = devices
    return array.reshape([side for side in (len({d.coords[dim] for d in devices}) for dim in range(3)) if side > 1])


def host() -> np.ndarray:
    devices = np.empty(8, object)
    devices[:] = kd.mock_gpus(1, 8)
    return devices


def collective(
    name: str, source: str, hardware: str, devices: np.ndarray, dims: tuple[int, ...], kind: str, payload: float,
    measured: float, why: str = "",
) -> Measured:  # fmt: skip
    """A collective over some dims of a mesh; the payload is the size of the unsharded tensor in bytes."""
    groups = groups_along(devices.shape, dims)
    size = len(groups[0])
    entry, sent = kd.hardware[hardware], wire_bytes(kind, payload, size)
    found = Collective(kind, "", "", 1, int(payload), sent, 1, size, None, groups, "f32")
    _, seconds_per_byte = Interconnect(entry, devices).seconds_per_byte(kind, groups)
    assert seconds_per_byte is not None
    bound, forecast = sent * seconds_per_byte, TimeModel(entry, devices).of_collective(found)
    return Measured(name, source, measured, bound, forecast, why)


def collectives() -> list[Measured]:
    sharding, gpus = BOOK.format("Sharded Matrices, pop quiz 2"), BOOK.format("GPUs, appendix B (read off the plot)")
    worked = BOOK.format("Sharded Matrices, question 2 (worked out)")
    table = "OpenXLA, default_collective_perf_table, sm_90"
    return [
        collective("all-gather, 34 MB, 4 of v5e:8x4", sharding, "v5e", torus("v5e:8x4"), (1,), "all-gather",
                   2 * 2048 * 8192, 680e-6),
        collective("all-gather, 131 kB, 4 of v5e:8x4", sharding, "v5e", torus("v5e:8x4"), (1,), "all-gather",
                   2 * 256 * 256, 8e-6),
        collective("all-gather, 4.2 MB, 16 of v5e:8x16", gpus, "v5e", torus("v5e:8x16"), (1,), "all-gather",
                   4.19e6, 58e-6),
        collective("all-gather, 1.1 GB, 16 of v5e:8x16", gpus, "v5e", torus("v5e:8x16"), (1,), "all-gather",
                   1.07e9, 1.07e9 / 90.2e9),
        collective("all-reduce, 268 MB, 4 of v5p:4x4x4", gpus, "v5p", torus("v5p:4x4x4"), (0,), "all-reduce",
                   268e6, 268e6 / 105.1e9),
        collective("all-reduce, 4.3 GB, 4 of v5p:4x4x4", gpus, "v5p", torus("v5p:4x4x4"), (0,), "all-reduce",
                   4.3e9, 4.3e9 / 107.4e9),
        collective("all-gather, 8.4 MB, 16 of v4:4x4x4", worked, "v4", torus("v4:4x4x4"), (0, 1), "all-gather",
                   2 * 1024 * 4096, 46e-6, "the book takes full bandwidth here, and measures 3/4 of it at 4.2 MB"),
        collective("all-reduce, 8.4 MB, 4 of v4:4x4x4", worked, "v4", torus("v4:4x4x4"), (2,), "all-reduce",
                   2 * 1024 * 4096, 190e-6),
        *(
            collective(f"{kind}, {size} MiB, 8 x H100", table, "h100", host(), (0,), kind, size * 2**20, seconds * 1e-6)
            for kind, by_size in (
                ("all-reduce", {1: 51.9, 16: 145.3, 256: 1262, 1024: 4721}),
                ("all-gather", {1: 31.1, 16: 82.2, 256: 729, 1024: 2730}),
                ("reduce-scatter", {16: 86.6, 256: 771, 1024: 2921}),
                ("all-to-all", {256: 759}),
            )
            for size, seconds in by_size.items()
        ),
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------- matrix multiplications


def matmul(target: str, size: int, measured: float, source: str) -> Measured:
    """A product of square bfloat16 matrices on one device."""
    made = kd.target(target)
    operand = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(made[0]))
    options: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
    if made.hardware.platform == "tpu":
        options = {"xla_tpu_scoped_vmem_limit_kib": 65536}  # as measured
    text = jax.jit(jnp.matmul).lower(operand, operand).compile(options).as_text()
    times = TimeModel(made.hardware, np.array(made[:1]))
    bound = 2 * size**3 / made.hardware.flops_per_second["bfloat16"]
    forecast, _ = walk_schedule(ModuleReader(text), times)
    return Measured(
        f"matmul {size}, {target.split(':')[0]}",
        source,
        measured,
        bound,
        forecast.seconds,
    )


def matmuls() -> list[Measured]:
    recipes, table = RECIPES.format("microbenchmarks"), "OpenXLA, default_matmul_perf_table, sm_90"
    return [
        matmul("v6e:2x2", 8192, 1.3288e-3, recipes),
        *(
            matmul("tpu7x:2x2x1", size, 2 * size**3 / flops, recipes)
            for size, flops in ((2048, 679.3e12), (4096, 892.9e12), (16384, 950.1e12))
        ),
        *(
            matmul("h100:8", size, 2 * size**3 / flops, table)
            for size, flops in ((1024, 253e12), (2048, 641e12), (4096, 780e12))
        ),
    ]


# ------------------------------------------------------------------------------------------------ worked examples


def worked_examples() -> Table:
    """Rules of the Scaling Book, with its figures (90 GB/s in one direction of a v5p's link) and with ours."""
    v5p = kd.hardware["v5p"]
    assert v5p.link_bytes_per_second is not None
    ours = v5p.flops_per_second["bfloat16"] / (2 * v5p.link_bytes_per_second)
    hidden, tokens, chips = 28672, 4.19e6, 8960

    def rules(intensity: float) -> list[str]:
        sharded = (2 * tokens * chips / hidden) ** 0.5  # over 2 axes for FSDP and 1 for TP
        fsdp, mixed = intensity / 3, intensity**2 / (2 * hidden)
        return [f"{intensity:.0f}", f"{fsdp:.0f}", f"{mixed:.0f}", f"{4 * mixed:.0f}", f"{sharded:.0f}"]

    names = (
        "FLOP per byte of ICI of a chip",
        "FSDP over 3 dims: fewest tokens per chip",
        "FSDP x TP for Llama 3 70B: fewest tokens per chip, axes overlapped",
        "the same, axes one after another",
        "FSDP of Llama 3 70B on 8,960 chips, 4.19 M tokens (2048 x 4)",
    )
    book = ["2550", "850", "113", "453", "1618"]
    rows = list(zip(names, book, rules(2550), rules(ours), strict=True))
    return Table(("v5p", ">book", ">from 90 GB/s", ">from 100 GB/s"), rows)


# ---------------------------------------------------------------------------------------------------------- steps


class Step(NamedTuple):
    """A published training step, `remat` with the blocks computed again in the backward pass.

    With `regathers`, their weights are gathered again for it, too, and the batch is computed in microbatches.
    """

    source: str
    size: str
    target: str
    rows: int
    tokens: int
    seconds: float
    differs: str
    remat: bool = False
    memory: float | None = None  # measured, in bytes
    options: tuple[str, ...] = ()  # recommended sets
    why: str = ""
    regathers: bool = False
    microbatches: int = 1
    compile_depths: tuple[int, int] = (2, 4)


# The sizes of Mixtral are those of KerasHub's preset.
MIXTRAL = {"vocabulary_size": 32000, "num_query_heads": 32, "num_key_value_heads": 8, "num_experts": 8, "top_k": 2}
MIXTRAL |= {"layers": 32, "hidden_dim": 4096, "intermediate_dim": 14336}
SIZES = {**plan_llama.SIZES, "mixtral-8x7b": MIXTRAL}
V6E = RECIPES.format("training/trillium/{}")
OFFLOADED = "MaxText moves some activations to the host; here blocks are computed again"
STEPS = {
    "torchtitan-8b-h100": Step(
        "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md", "8b", "h100-96gb:8", 16, 8192, 2 * 8192 / 6667,
        "selective activation checkpointing there, none here; GPUs limited to 500 W there", memory=77.0 * 2**30,
        why="every other matrix multiplication of the forward pass is computed again there, a sixth more FLOP (0.67 "
        "with it); the GPUs were limited to 500 of 700 W",
    ),
    "maxtext-8b-v6e-8": Step(
        V6E.format("Llama3.1-8B"), "8b", "v6e:2x4", 24, 8192, 3.443, OFFLOADED, remat=True,
        options=("large_scoped_vmem", "reduce_scatter_layout", "overlap_slices", "without_collective_matmul"),
    ),
    "maxtext-8b-v6e-256": Step(
        V6E.format("Llama3.1-8B"), "8b", "v6e:16x16", 1024, 8192, 4.546, OFFLOADED, remat=True,
        options=("large_scoped_vmem", "reduce_scatter_layout", "overlap_slices"),
    ),
    "maxtext-70b-v6e-256": Step(
        V6E.format("Llama3.1-70B"), "70b", "v6e:16x16", 1280, 8192, 42.656, OFFLOADED, remat=True,
        options=("large_scoped_vmem", "reduce_scatter_layout", "overlap_slices"),
    ),
    "maxtext-llama2-70b-v5p-512": Step(
        "MaxText, docs/reference/models/tiering.md, configs/v5p/llama2_70b.sh", "llama2-70b", "v5p:8x8x4", 1024, 4096,
        4 * 4096 / 692, "MaxText keeps most products of a block; here blocks are computed again", remat=True,
    ),
    "maxtext-mixtral-8x7b-v5p-256": Step(
        f"MaxText, docs/reference/models/tiering.md, {RECIPES.format('training/v5p/Mixtral-8X7B-Maxtext')}",
        "mixtral-8x7b", "v5p:8x4x4", 36 * 128, 4096, 36 * 4096 / 2909,
        "KerasHub computes SiLU in float32, so a batch is computed in two parts, and their weights are gathered anew",
        remat=True, regathers=True, microbatches=2, compile_depths=(1, 2),  # a block takes minutes to compile
    ),
}  # fmt: skip
NOT_REPRODUCED = {
    "Llama 3.1 405B, 512 x v5p (131.5 s)": "MaxText moves the inputs of blocks, 68 GB a device, to the host",
    "Mixtral 8x7B, 256 x v6e (13.5 s)": "MaxText drops tokens above the capacity of an expert, KerasHub does not",
    "Llama 3 70B, 256 x H100, float8 (829 tokens/s)": "no float8 in the step of Keras",
    "Llama 3 405B, 512 x H100, pipelined": "no pipeline parallelism",
}


def register_hardware() -> None:
    """The H100s of torchtitan's table: 96 GB of HBM2e with 2.4 TB/s."""
    source = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
    h100 = kd.hardware["h100"]
    sources = {**h100.sources, "memory_bytes": source, "memory_bytes_per_second": source}
    kd.hardware.register(
        dataclasses.replace(
            h100, name="h100-96gb", memory_bytes=96 * 10**9, memory_bytes_per_second=2.4e12, sources=sources
        )
    )


def mixtral(depth: int, **sizes: int) -> keras.Model:
    """Returns a compiled Mixtral with weights in bfloat16."""
    keras.config.set_dtype_policy("bfloat16")
    backbone = keras_hub.models.MixtralBackbone(num_layers=depth, **sizes, rope_max_wavelength=1e6, sliding_window=None)
    model = keras_hub.models.MixtralCausalLM(backbone, preprocessor=None)
    model.compile(keras.optimizers.AdamW(3e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def build(blocks: int, size: str, remat: bool) -> keras.Model:
    sizes = {name: value for name, value in SIZES[size].items() if name != "layers"}
    builder = mixtral if "num_experts" in sizes else plan_llama.build
    names = [f"transformer_layer_{number}" for number in range(blocks)]
    scope = keras.RematScope(mode="list_of_layers", layer_names=names) if remat else contextlib.nullcontext()
    with scope:
        return builder(blocks, **sizes)


def planned_step(step: Step) -> kd.Plan:
    made = kd.target(step.target)
    mesh = kd.create_device_mesh(f"fsdp:{len(made)}", devices=made)
    tokens = jax.ShapeDtypeStruct((step.rows, step.tokens), "int32")
    batch = {"token_ids": tokens, "padding_mask": jax.ShapeDtypeStruct(tokens.shape, "bool")}, tokens
    options: dict[str, Any] = {}
    for name in step.options:
        options |= dict(made.hardware.recommended_compiler_options[name])
    builder: Callable[[int], keras.Model] = functools.partial(build, size=step.size, remat=step.remat)
    parts: dict[str, Any] = {} if step.microbatches == 1 else {"reduce_gradients": "microbatch"}
    step_options = kd.StepOptions(microbatches=step.microbatches, **parts)
    return kd.plan(
        builder,
        kd.FullyShardedDataParallel(mesh, reshard_after_forward=step.regathers, step_options=step_options),
        batch,
        depth=SIZES[step.size]["layers"],
        compile_depths=step.compile_depths,
        compiler_options=options,
    )


def print_step(name: str) -> None:
    step, started = STEPS[name], time.perf_counter()
    planned = planned_step(step)
    forecast = planned.roofline.forecast
    assert planned.roofline.seconds is not None
    assert forecast is not None
    print(planned)
    row = Measured(name, step.source, step.seconds, planned.roofline.seconds, forecast.seconds, step.why)
    print(table([row]))
    memory = "" if step.memory is None else f" Measured memory: {bytes_text(step.memory)}."
    print(f"Differs: {step.differs}. Planned memory: {bytes_text(planned.memory.total)}.{memory}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"Planned in {time.perf_counter() - started:.0f} s, with a peak of {peak:.2f} GiB of memory.", flush=True)


def overhead() -> Table:
    """Compiles a Llama 3 without and with XLA:GPU's cost model, and reads it without and with the walk."""
    rows = []
    for target in ("h100:8", "v5p:2x2x2"):
        made = kd.target(target)
        distribution = kd.FullyShardedDataParallel(kd.create_device_mesh(f"fsdp:{len(made)}", devices=made))
        tokens = jax.ShapeDtypeStruct((8, 4096), "int32")
        batch = {"token_ids": tokens, "padding_mask": tokens}, tokens
        with prepared_step(lambda: build(2, "8b", False), distribution, batch, "train") as step:
            lowered = step.trace().lower(lowering_platforms=("tpu" if made.hardware.platform == "tpu" else "cuda",))
        estimates = ESTIMATES if made.hardware.platform == "gpu" else {}
        compiled, reading = [], []
        program = lowered.compile()  # the first takes longer
        for turn in range(6):
            seconds = {}
            for estimating in (False, True) if turn % 2 else (True, False):
                started = time.perf_counter()
                program = lowered.compile(compiler_options=estimates if estimating else {})
                seconds[estimating] = time.perf_counter() - started
            compiled.append(seconds[True] / seconds[False])
            text = program.as_text()
            started = time.perf_counter()
            reader = ModuleReader(text)
            reader.module_costs()
            read = time.perf_counter()
            walk_schedule(reader, TimeModel(made.hardware, distribution.device_mesh.backend_mesh.devices))
            reading.append((time.perf_counter() - read) / (read - started))
        rows.append((target, f"{np.median(compiled):.2f}", f"{np.median(reading):.2f}", f"{len(text) / 2**20:.1f} MiB"))
    return Table(("target", ">compile with / without", ">walk / read", ">program"), rows)


def table(rows: list[Measured]) -> str:
    columns = ("measurement and source", ">measured", ">bound", ">forecast", ">forecast/measured", "why")
    return Table(columns, [row.cells() for row in rows]).to_text()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", choices=[*STEPS, "all", "overhead", []], help="rows to compile")
    names = parser.parse_args().steps
    register_hardware()
    if not names:
        print(table([*collectives(), *matmuls()]))
        print(worked_examples().to_text())
        print("\nNot reproduced:", *(f"{row}: {why}." for row, why in NOT_REPRODUCED.items()), sep="\n")
    if "overhead" in names:
        print(overhead().to_text())
    for name in STEPS if "all" in names else [name for name in names if name in STEPS]:
        print_step(name)


if __name__ == "__main__":
    main()
