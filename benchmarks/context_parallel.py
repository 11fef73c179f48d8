"""Bytes that context parallelism sends, relative to their lower bound, and temporary memory at long sequences.

One transformer with 4 blocks of width 1,024, 8 heads of 128, causal attention, bfloat16 compute and float32 Adam, for
eight devices that need not be attached. Sequences are sharded over an axis "context", under DP and FSDP of 4 devices,
under TP of 2. The hand-written program (`handwritten.py`) is the same model in `jax.shard_map`, with its collectives
written out and the same kernel of attention. It exchanges positions for heads, so it is not measured for fewer key
heads than devices, nor where `--exchange all_gather` asks for another exchange.

The lower bound is that of the exchange that a plan reports, for n devices in groups of u (Ulysses: u = n, all-gather
alone: u = 1), S positions of a row, N query heads and K key heads of size H on a device, in b bytes, forward:
(u-1)/u * S/n * 2NH * b for queries and outputs, and (n-1)/n * S * K/u * 2H * b for keys and values. The backward pass
sends as much, and keys and values a second time if they were gathered and not kept. Devices that keep their queries
(u = 1) swap half of them, to have the same causal work.

Run: pip install ".[tpu,cuda12]" && python benchmarks/context_parallel.py [--target h100:8]

`--check` compares the losses of the hand-written step with those of Keras on one device, on eight simulated devices.
"""

import argparse
import functools
import re
from dataclasses import replace

import strategies  # sets up eight simulated devices, before JAX is imported

# isort: split
import handwritten
import jax
import keras

import keras_dist as kd
from keras_dist.planning.hlo.module_costs import ModuleReader

LENGTHS = 4096, 16384, 65536  # tokens of a device


def distribution(strategy: str, devices, builder, exchange: str | None) -> kd.Distribution:
    """Returns the distribution of a strategy."""
    sizes = handwritten.CONTEXT_STRATEGIES[strategy].mesh
    mesh = kd.create_device_mesh(",".join(f"{axis}:{size}" for axis, size in sizes.items()), devices=devices)
    options = {"sequence_dim_name": "context", "sequence_exchange": exchange}
    if strategy == "dp":
        return kd.DataParallel(mesh, **options)
    if strategy == "fsdp":
        return kd.FullyShardedDataParallel(mesh, **options)
    rules = kd.tensor_parallel_layout_map(
        builder, mesh, sequence_parallel=strategy == "tp_sp", sequence_dim_name="context"
    )
    return kd.ModelParallel(layout_map=rules, batch_dim_name="data", **options)


def exchange_floor(strategy: str, sizes: handwritten.Gpt, exchange: str) -> float:
    """Returns a lower bound of the bytes that attention's exchange sends in a step, by the ring formulas."""
    plan = handwritten.CONTEXT_STRATEGIES[strategy]
    devices = plan.size("context")
    groups = re.search(r"(\d+) x (\d+)$", exchange)
    members = int(groups[1]) if groups else devices if exchange.startswith("all-to-all") else 1
    heads, key_heads = (
        number / plan.size(plan.tensor_axis) for number in (sizes.heads, sizes.key_heads or sizes.heads)
    )
    vector = 2 * sizes.head_size * jax.numpy.dtype(sizes.dtype).itemsize * sizes.rows
    moved = 1 / 2 if members == 1 else 1 - 1 / members  # of a device's queries
    queries = moved * sizes.length / devices * heads * vector
    keys = (1 - 1 / devices) * sizes.length * max(key_heads / members, 1) * vector
    return sizes.blocks * (2 * queries + (2 if members == devices else 3) * keys)


def exchanged_bytes(collectives) -> float:
    """Returns the bytes that are sent among devices that share sequences, of collectives of a step."""
    among = [each for each in collectives if each.group_size > 1 and each.axes in (("context",), None)]
    return sum(each.wire_bytes * each.count for each in among)


def measure(strategy: str, target: str, sizes: handwritten.Gpt, exchange: str | None, before: tuple[int, int]):
    """Returns the tokens of a device and the temporaries in bytes, and a row of the table.

    `before` is that of the length before.
    """
    plan_by_hand, devices = handwritten.CONTEXT_STRATEGIES[strategy], kd.target(target)
    tokens, builder = sizes.length // plan_by_hand.size("context"), functools.partial(strategies.build, sizes)
    batch = (jax.ShapeDtypeStruct((sizes.rows * plan_by_hand.size("data"), sizes.length), "int32"),) * 2
    plan = kd.plan(builder, distribution(strategy, devices, builder, exchange), batch)
    [attention] = plan.attention
    floor, sent = exchange_floor(strategy, sizes, attention.exchange), exchanged_bytes(plan.collectives)
    by_hand = "-", "-"
    if exchange != "all_gather" and not sizes.key_heads:
        compiled = handwritten.compile_for(plan_by_hand, target, sizes)
        costs = ModuleReader(compiled.as_text(), plan_by_hand.mesh).module_costs()
        held = strategies.temporaries(compiled, costs)
        by_hand = f"{plan.wire_bytes / costs.wire_bytes:.3f}", f"{plan.memory.temporaries / held:.2f}"
    cells = [
        target,
        strategy,
        str(tokens),
        f"{attention.calls:.0f} x {attention.implementation}, {attention.exchange}",
        f"{floor / 1e6:.1f}",
        f"{sent / floor:.3f}",
        f"{(plan.wire_bytes - sent) / 1e6:.1f}",
        by_hand[0],
        f"{plan.memory.temporaries / 2**20:.0f}",
        by_hand[1],
        f"{(plan.memory.temporaries - before[1]) / (tokens - before[0]) / 2**10:.1f}",
        "yes" if plan.fits else "no",
    ]
    return (tokens, plan.memory.temporaries), f"| {' | '.join(cells)} |"


def main():
    """Prints a table of some strategies and lengths, on the targets passed or on all whose compiler is installed."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("strategies", nargs="*", help=f"some of {', '.join(handwritten.CONTEXT_STRATEGIES)}")
    arguments.add_argument("--target", action="append", default=[], help="for example h100:8 or v5e:2x4")
    arguments.add_argument("--length", action="append", default=[], type=int, help="tokens of a device")
    arguments.add_argument("--blocks", type=int, default=4)
    arguments.add_argument("--key-heads", type=int, help="fewer heads of keys and values than the 8 of queries")
    arguments.add_argument("--exchange", choices=("all_to_all", "all_gather"), help="by default what sends least")
    arguments.add_argument("--check", action="store_true", help="compare losses on simulated devices")
    asked = arguments.parse_args()
    chosen = asked.strategies or list(handwritten.CONTEXT_STRATEGIES)
    if asked.check:
        strategies.check({name: handwritten.CONTEXT_STRATEGIES[name] for name in chosen}, positions=False)
        return
    keras.config.set_dtype_policy("mixed_bfloat16")
    print(f"JAX {jax.__version__}, {asked.blocks} blocks\n")
    columns = ("target", "strategy", "tokens", "attention", "floor of the exchange, MB", "sent", "other MB")
    columns += ("all, by hand", "MiB temporaries", "by hand", "KiB per token", "fits")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    sizes = handwritten.Gpt(
        1024, 1024, 0, asked.blocks, heads=8, head_size=128, rows=1, positions=False, key_heads=asked.key_heads
    )
    for target in asked.target or strategies.installed_targets():
        for strategy in chosen:
            held = 0, 0
            for tokens in asked.length or LENGTHS:
                length = tokens * handwritten.CONTEXT_STRATEGIES[strategy].size("context")
                held, row = measure(strategy, target, replace(sizes, length=length), asked.exchange, held)
                print(row, flush=True)


if __name__ == "__main__":
    main()
