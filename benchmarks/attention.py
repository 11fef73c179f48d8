"""Temporary memory of attention at 4,096 to 65,536 tokens per device: keras_dist and hand-written JAX.

One transformer with 4 blocks of width 1,024, 8 heads of 128, bfloat16 compute and float32 Adam, one row per device, for
eight devices that need not be attached. The hand-written program (`handwritten.py`) is the same model in
`jax.shard_map`, with its collectives written out and the same fused kernel: splash attention on TPUs, cuDNN on GPUs.
Growth is the increase of temporaries since the length before, per token: memory that is linear in the length keeps it.

Run: pip install ".[tpu,cuda12]" && python benchmarks/attention.py [--target h100:8] [name ...]
"""

import argparse
import functools

import strategies  # sets up eight simulated devices, before JAX is imported

# isort: split
import handwritten
import jax
import keras

import keras_dist as kd
from keras_dist.planning.hlo.module_costs import ModuleReader

LENGTHS = 4096, 16384, 65536
STRATEGIES = "dp", "fsdp", "tp", "tp_sp", "fsdp_tp"


def measure(strategy: str, target: str, sizes: handwritten.Gpt, shorter: tuple[int, int, int]):
    """Returns the length and the temporaries of both programs in bytes, and a row of the table.

    `shorter` is that of the length before.
    """
    devices, builder = kd.target(target), functools.partial(strategies.build, sizes)
    compiled = handwritten.compile_for(strategy, target, sizes)
    costs = ModuleReader(compiled.as_text(), handwritten.STRATEGIES[strategy].mesh).module_costs()
    by_hand = strategies.temporaries(compiled, costs)
    plan = kd.plan(builder, strategies.distribution(strategy, devices, builder), strategies.batch(strategy, sizes))
    held = sizes.length, by_hand, plan.memory.temporaries
    tokens = held[0] - shorter[0]
    cells = [
        target,
        strategy,
        str(sizes.length),
        f"{held[1] / 2**20:.0f}",
        f"{held[2] / 2**20:.0f}",
        f"{held[2] / held[1]:.2f}",
        *(f"{(now - before) / tokens / 2**10:.1f}" for now, before in zip(held[1:], shorter[1:], strict=True)),
        ", ".join(f"{each.calls:.0f} x {each.implementation}" for each in plan.attention),
        f"{plan.wire_bytes / costs.wire_bytes:.3f}",
        "yes" if plan.fits else "no",
    ]
    return held, f"| {' | '.join(cells)} |"


def main():
    """Prints a table of some strategies and lengths, on the targets passed or on all whose compiler is installed."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("strategies", nargs="*", default=STRATEGIES, help=f"some of {', '.join(STRATEGIES)}")
    arguments.add_argument("--target", action="append", default=[], help="for example h100:8 or v5e:2x4")
    arguments.add_argument("--length", action="append", default=[], type=int, help="tokens of a row")
    arguments.add_argument("--blocks", type=int, default=4)
    asked = arguments.parse_args()
    keras.config.set_dtype_policy("mixed_bfloat16")
    print(f"JAX {jax.__version__}, {asked.blocks} blocks\n")
    columns = ("target", "strategy", "tokens", "MiB by hand", "keras_dist", "ratio", "KiB per token by hand")
    columns += ("keras_dist", "attention", "bytes sent, ratio", "fits")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for target in asked.target or strategies.installed_targets():
        for strategy in asked.strategies:
            held = 0, 0, 0
            for length in asked.length or LENGTHS:
                sizes = handwritten.Gpt(1024, 1024, length, asked.blocks, heads=8, head_size=128, rows=1)
                held, row = measure(strategy, target, sizes, held)
                print(row, flush=True)


if __name__ == "__main__":
    main()
