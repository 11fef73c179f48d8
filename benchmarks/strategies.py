"""Bytes sent and memory of each strategy, relative to their lower bounds: keras_dist and hand-written JAX.

One transformer with 4 blocks of width 1,024, 4,096 tokens per device, bfloat16 compute and float32 Adam, for eight
devices that need not be attached. The hand-written program (`handwritten.py`) is the same model in `jax.shard_map`,
with its collectives written out and the same fused kernel of attention. One run compiles both and reads both compiled
modules in the same way.

Run: pip install ".[tpu,cuda12]" && python benchmarks/strategies.py [--target h100:8] [name ...]

`--check` needs no compiler for other hardware: it runs the hand-written step of a small model under each strategy on
eight simulated devices, and compares its losses with those of Keras on one device.
"""

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Mapping

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_dist as kd

kd.simulate_devices(8)

import handwritten  # noqa: E402
import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402

from keras_dist.planning.hlo.module_costs import ModuleReader  # noqa: E402

AXES = {name: ",".join(f"{axis}:{size}" for axis, size in s.mesh.items()) for name, s in handwritten.STRATEGIES.items()}


class Positions(layers.Layer):
    """Adds a learned embedding of each position."""

    def build(self, shape):
        self.embeddings = self.add_weight(shape[1:], name="embeddings", initializer="uniform")

    def call(self, x):
        return x + self.embeddings


def build(sizes: handwritten.Gpt) -> keras.Model:
    """Returns the model of `handwritten.py` as a compiled Keras model."""
    tokens = keras.Input((sizes.length,), dtype="int32")
    x = layers.Embedding(sizes.vocabulary, sizes.width, name="embedding")(tokens)
    x = Positions(name="position")(x) if sizes.positions else x
    for number in range(sizes.blocks):
        y = layers.LayerNormalization(name=f"block{number}_norm1")(x)
        attention = (
            layers.GroupQueryAttention(sizes.head_size, sizes.heads, sizes.key_heads, name=f"block{number}_attention")
            if sizes.key_heads
            else layers.MultiHeadAttention(sizes.heads, sizes.head_size, name=f"block{number}_attention")
        )
        x = layers.Add(name=f"block{number}_add1")([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(name=f"block{number}_norm2")(x)
        y = layers.Dense(4 * sizes.width, activation="gelu", name=f"block{number}_up")(y)
        x = layers.Add(name=f"block{number}_add2")([x, layers.Dense(sizes.width, name=f"block{number}_down")(y)])
    x = layers.LayerNormalization(name="norm")(x)
    model = keras.Model(tokens, layers.Dense(sizes.vocabulary, name="head")(x), name="gpt")
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def distribution(strategy: str, devices, builder) -> kd.Distribution:
    """Returns the distribution of a strategy."""
    axes = AXES[strategy] if strategy[:2] != "tp" else f"batch:1,{AXES[strategy]}"
    mesh = kd.create_device_mesh(axes, devices=devices)
    if strategy in ("dp", "zero1"):
        return kd.DataParallel(mesh, shard_optimizer_state=strategy == "zero1")
    if strategy in ("fsdp", "fsdp_reshard", "hsdp"):
        return kd.FullyShardedDataParallel(mesh, reshard_after_forward=strategy == "fsdp_reshard")
    rules = kd.tensor_parallel_layout_map(builder, mesh, sequence_parallel=strategy == "tp_sp")
    if strategy == "fsdp_tp":
        return kd.FullyShardedDataParallel(layout_map=rules)
    return kd.ModelParallel(layout_map=rules)


def batch(strategy: str, sizes: handwritten.Gpt) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes of tokens and targets."""
    plan = handwritten.STRATEGIES[strategy]
    return (jax.ShapeDtypeStruct((sizes.rows * plan.size(*plan.batch_axes), sizes.length), "int32"),) * 2


def state_floor(strategy: str, parameters: int) -> float:
    """Returns a lower bound of the bytes of weights and of Adam's state on one device."""
    plan = handwritten.STRATEGIES[strategy]
    num_shards = plan.size(plan.fsdp_axis, plan.tensor_axis)
    return 4 * parameters / num_shards + 8 * parameters / (
        plan.size(plan.zero1_axis) if plan.zero1_axis else num_shards
    )


def temporaries(compiled, costs) -> int:
    """Returns the temporaries of a compiled program in bytes, with the workspace of kernels that a plan adds, too."""
    return compiled.memory_analysis().temp_size_in_bytes + costs.workspace_bytes


def count(collectives, kind: str) -> int:
    """Returns how many collectives of a kind run."""
    return int(sum(each.count for each in collectives if each.kind == kind))


def measure(strategy: str, target: str, sizes: handwritten.Gpt) -> str:
    """Returns a row of the table."""
    devices, builder = kd.target(target), functools.partial(build, sizes)
    compiled = handwritten.compile_for(strategy, target, sizes)
    by_hand = ModuleReader(compiled.as_text(), handwritten.STRATEGIES[strategy].mesh).module_costs()
    memory = temporaries(compiled, by_hand)
    plan = kd.plan(builder, distribution(strategy, devices, builder), batch(strategy, sizes))
    floor, held = handwritten.floor(strategy, sizes), state_floor(strategy, plan.parameters)
    cells = [
        target,
        strategy,
        f"{floor / 1e6:.1f}",
        f"{by_hand.wire_bytes / floor:.3f}",
        f"{plan.wire_bytes / floor:.3f}",
        f"{count(by_hand.collectives, 'all-to-all')} : {count(plan.collectives, 'all-to-all')}",
        f"{plan.memory.state / held:.3f}",
        f"{memory / 2**20:.0f}",
        f"{plan.memory.temporaries / memory:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def check(found: Mapping[str, handwritten.Strategy], positions: bool = True, steps: int = 5) -> None:
    """Compares the losses of the hand-written step under some strategies with those of Keras on one device.

    Raises:
        AssertionError: they differ by more than rounding errors.
    """
    sizes = handwritten.Gpt(64, 64, length=16, blocks=2, heads=8, head_size=8, dtype="float32", positions=positions)
    generator = np.random.default_rng(0)
    tokens, targets = generator.integers(0, sizes.vocabulary, (2, 8 * sizes.rows, sizes.length))
    for name, strategy in found.items():
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        model = build(sizes)
        weights = {weight.path: weight.numpy() for weight in model.weights if "seed" not in weight.path}
        function, state, batch = handwritten.step(strategy, jax.devices(), sizes)
        rows = batch[0].shape[0]  # tensor parallelism does not shard the batch
        expected = [float(model.train_on_batch(tokens[:rows], targets[:rows])) for _ in range(steps)]
        values = dict(zip(handwritten.parameters(sizes), map(weights.__getitem__, paths(sizes)), strict=True))
        state = jax.tree.map(lambda spec: jax.device_put(np.zeros(spec.shape, spec.dtype), spec.sharding), state)
        state["weights"] = {key: jax.device_put(values[key], old.sharding) for key, old in state["weights"].items()}
        losses = []
        for _ in range(steps):
            loss, state = function(state, (tokens[:rows].astype("int32"), targets[:rows].astype("int32")))
            losses.append(float(loss))
        print(f"{name}: losses {losses[0]:.6f} to {losses[-1]:.6f}", end=", ")
        print(f"at most {np.max(np.abs(np.divide(losses, expected) - 1)):.1e} from those of Keras", flush=True)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


def paths(sizes: handwritten.Gpt):
    """Yields the paths in Keras of the weights of `handwritten.parameters`, in their order."""
    for name in handwritten.parameters(sizes):
        block, _, rest = name.partition("/")
        if name in ("embedding", "position"):
            yield f"{name}/embeddings"
        elif not block.startswith("block"):
            yield name
        elif rest.startswith(("query", "key", "value")):
            yield f"{block}_attention/{rest}"
        elif rest.startswith("output"):
            yield f"{block}_attention/attention_{rest}"
        else:
            yield f"{block}_{rest}"


def installed_targets() -> list[str]:
    """Returns the targets whose compiler is installed; exits if there are none."""
    compilers = {"h100:8": "jax_cuda12_plugin", "v5e:2x4": "libtpu"}
    targets = [target for target, package in compilers.items() if importlib.util.find_spec(package)]
    if not targets:
        sys.exit('No compiler is installed: pip install ".[tpu]" or ".[cuda12]".')
    return targets


def main():
    """Prints a table of all strategies, or of those passed, on one target or on all whose compiler is installed."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("strategies", nargs="*", help=f"some of {', '.join(handwritten.STRATEGIES)}")
    arguments.add_argument("--target", action="append", default=[], help="for example h100:8 or v5e:2x4")
    arguments.add_argument("--blocks", type=int, default=4)
    arguments.add_argument("--check", action="store_true", help="compare losses on simulated devices")
    asked = arguments.parse_args()
    if asked.check:
        check({name: handwritten.STRATEGIES[name] for name in asked.strategies or handwritten.STRATEGIES})
        return
    targets = asked.target or installed_targets()
    keras.config.set_dtype_policy("mixed_bfloat16")
    print(f"JAX {jax.__version__}, {asked.blocks} blocks\n")
    columns = ("target", "strategy", "floor, MB sent", "by hand", "keras_dist", "all-to-all", "state")
    print(f"| {' | '.join((*columns, 'MiB temporaries by hand', 'keras_dist'))} |")
    print("|---" * (len(columns) + 2) + "|", flush=True)
    for target in targets:
        for strategy in asked.strategies or handwritten.STRATEGIES:
            print(measure(strategy, target, handwritten.Gpt(blocks=asked.blocks)), flush=True)


if __name__ == "__main__":
    main()
