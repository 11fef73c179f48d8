"""Plans made by hand, so that every figure in a report is known."""

import math

import keras_dist as kd
from keras_dist._report.variable_groups import PlacedVariable
from keras_dist.passes.token_part import LossCall
from keras_dist.planning.compiling.compilation import Attention, Mixtures, Traffic
from keras_dist.planning.costs.forecast import Forecast
from keras_dist.planning.costs.roofline import Roofline
from keras_dist.planning.hlo.module_costs import LargeValue
from keras_dist.planning.reports.plan_report import Plan
from keras_dist.planning.reports.step_memory import Memory

KIB, MIB, GIB = 2**10, 2**20, 2**30
MEMORY = Memory(
    weights=2 * GIB,
    optimizer=4 * GIB,
    other=8,
    batch=64 * KIB,
    temporaries=3 * GIB,
    program=MIB,
    capacity=16 * GIB,
)


def variable(path, shape, axes, shard_shape, part="weights", rule=None):
    return PlacedVariable(path, part, shape, "float32", rule, axes, shard_shape, 4 * math.prod(shard_shape))


def block(number):
    yield variable(f"block{number}/mlp/kernel", (64, 256), ("data", "model"), (32, 64), rule="block.*/mlp/kernel")
    yield variable(f"block{number}/norm/scale", (64,), (None,), (64,))
    for slot in ("momentum", "velocity"):
        path = f"adam/block{number}_mlp_kernel_{slot}"
        yield variable(path, (64, 256), ("data", "model"), (32, 64), "optimizer", "block.*/mlp/kernel")


VARIABLES = tuple(v for number in range(12) for v in block(number))


def example_plan(**changed) -> Plan:
    """A plan with known figures, of which some are changed."""
    fields = {
        "model": "gpt",
        "step": "train",
        "target": "v5e",
        "mesh": kd.create_device_mesh("data:2,model:4"),
        "distribution": "<ModelParallel device_mesh=<DeviceMesh data:2 x model:4 on 8 cpu devices>>",
        "batch": ("int32[64, 1024]", {"labels": "int32[64]"}),
        "variables": VARIABLES,
        "memory": MEMORY,
        "fits": True,
        "traffic": (
            Traffic("all-reduce", ("data", "model"), 12.0, 40.0, 1.5 * GIB, 1.25 * GIB, False, 0.004, 0.002),
            Traffic("all-gather", None, 2.5, 3.0, 64 * MIB, 32 * MIB, False, 0.0005, 0.0),
        ),
        "collectives": (),
        "flops": 1.25e12,
        "model_flops": 8e12,
        "memory_traffic": 4.0 * GIB,
        "host_traffic": 0.0,
        "roofline": Roofline(0.006, 0.003, 0.0015, 0.0, forecast=Forecast(0.01, 0.007, 0.002, 0.001, 0.0035)),
        "model_flops_utilization": 0.425,
        "forecast_model_flops_utilization": 0.255,
        "largest_values": (LargeValue(GIB, "f32[8,128]", "jit(train_step)/dot_general", "fusion.3"),),
        "mixtures": (
            Mixtures("megablox", None, 32, 4, 12.0, 8192, 1.5e11),
            Mixtures("megablox", None, 32, 4, 2.0, 8192, 2.5e10, "tokens over 'expert'"),
            Mixtures("dense", "nothing proves that the others are zero", 8, 2, 1.0, 0, 0.0),
        ),
        "losses": (
            LossCall("head", 128_256, 16_384, 1024, 3, None),
            LossCall("other", 32_000, 16_384, 1024, 4, "the loss is not linear in its results: sqrt in loss"),
        ),
        "attention": (
            Attention("splash attention", 12.0, 0, None),
            Attention("XLA", 1.0, 2 * GIB, "splash attention has no bias"),
        ),
        "notes": ("Loops count once.",),
        "compile_seconds": 12.5,
    }
    return Plan(**{**fields, **changed})
