"""One train step of a GPT in plain JAX under eight parallel strategies: the yardstick for a distribution library.

The model is a Keras one, operation for operation (`mixed_bfloat16`: float32 weights and Adam, bfloat16 compute). Every
strategy is the same program for one device inside `jax.shard_map` with its collectives written out, so that no
partitioner decides what is sent.

Run: pip install "keras-dist[tpu]" "keras-dist[cuda12]" && python benchmarks/handwritten.py [--target h100:8] [name ...]
"""

import argparse
import functools
import math
import time
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LEARNING_RATE, BETA_1, BETA_2, ADAM_EPSILON, NORM_EPSILON = 1e-3, 0.9, 0.999, 1e-7, 1e-3
STATE = "weights", "momentums", "velocities"


@dataclass(frozen=True)
class Gpt:
    """Sizes of a decoder-only, pre-norm GPT with learned positions and an untied head; rows are those of a part."""

    vocabulary: int = 16384
    width: int = 1024
    length: int = 1024
    blocks: int = 4
    heads: int = 16
    head_size: int = 64
    rows: int = 4
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Strategy:
    """Which mesh axis splits what.

    Attributes:
        mesh: sizes of the mesh axes, outermost first.
        rows: axes that split the rows of the batch.
        kernels: the axis that splits the rows of kernels, which are gathered when they are used (FSDP).
        regathers: whether blocks drop gathered kernels after the forward pass and gather them again for the backward.
        slots: the axis that splits Adam's slots of kernels which themselves are whole (ZeRO-1).
        model: the axis that splits heads, hidden units and vocabulary (Megatron).
        splits_length: whether activations between the split layers are split by position (sequence parallelism).
    """

    mesh: dict[str, int]
    rows: tuple[str, ...] = ()
    kernels: str | None = None
    regathers: bool = False
    slots: str | None = None
    model: str | None = None
    splits_length: bool = False

    def size(self, *axes: str | None) -> int:
        """Returns how many devices some axes have together."""
        return math.prod(self.mesh[axis] for axis in axes if axis)


STRATEGIES = {
    "dp": Strategy({"batch": 8}, rows=("batch",)),
    "zero1": Strategy({"batch": 8}, rows=("batch",), slots="batch"),
    "fsdp": Strategy({"fsdp": 8}, rows=("fsdp",), kernels="fsdp"),
    "fsdp_reshard": Strategy({"fsdp": 8}, rows=("fsdp",), kernels="fsdp", regathers=True),
    "hsdp": Strategy({"replica": 2, "shard": 4}, rows=("replica", "shard"), kernels="shard"),
    "tp": Strategy({"model": 8}, model="model"),
    "tp_sp": Strategy({"model": 8}, model="model", splits_length=True),
    "fsdp_tp": Strategy({"fsdp": 4, "model": 2}, rows=("fsdp",), kernels="fsdp", model="model"),
}


@dataclass(frozen=True)
class Parameter:
    """A weight: its shape, the dim that tensor parallelism splits, and whether it is large: no bias, no norm."""

    shape: tuple[int, ...]
    model_dim: int | None = None
    is_kernel: bool = True

    def part(self, strategy: Strategy, axis: str | None) -> P:
        """Returns the layout of the weight with dim 0 of kernels split over `axis`, besides tensor parallelism."""
        entries = [strategy.model if dim == self.model_dim else None for dim in range(len(self.shape))]
        if axis and self.is_kernel:
            entries[0] = (strategy.model, axis) if entries[0] else axis
        return P(*entries)

    def flat(self, array):
        """Returns a weight as a matrix or a vector: of kernels with 3 dims XLA:TPU scatters only some."""
        if not self.is_kernel:
            return array.ravel()
        return array.reshape(-1, array.shape[-1]) if self.model_dim == 0 else array.reshape(array.shape[0], -1)


def parameters(model: Gpt) -> dict[str, Parameter]:
    """Returns the weights of a model by name.

    Embeddings are split by width, not by vocabulary: to gather activations costs half of what their sum costs.
    """
    width, heads, hidden = model.width, (model.heads, model.head_size), (4 * model.width,)
    whole = Parameter((width,), None, False)

    def dense(name, inputs, outputs, model_dim):
        bias = Parameter(outputs, 0, False) if model_dim else whole
        return {f"{name}/kernel": Parameter((*inputs, *outputs), model_dim), f"{name}/bias": bias}

    found = {"embedding": Parameter((model.vocabulary, width), 1), "position": Parameter((model.length, width), 1)}
    for block in (f"block{number}" for number in range(model.blocks)):
        for name in ("query", "key", "value"):
            found |= dense(f"{block}/{name}", (width,), heads, 1)
        found |= dense(f"{block}/output", heads, (width,), 0)
        found |= dense(f"{block}/up", (width,), hidden, 1) | dense(f"{block}/down", hidden, (width,), 0)
        found |= {f"{block}/{norm}/{name}": whole for norm in ("norm1", "norm2") for name in ("gamma", "beta")}
    found |= {"norm/gamma": whole, "norm/beta": whole}
    return found | dense("head", (width,), (model.vocabulary,), 1)


def dtype_of(name: str, model: Gpt) -> str:
    """Returns the dtype that a weight is used in; Keras's LayerNormalization does not cast its own."""
    return "float32" if "norm" in name else model.dtype


# --------------------------------------------------------------------------------------------------- the collectives


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter_model(x, axis):
    """Megatron's f: activations that all devices have enter a layer that is split; their gradients are summed."""
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave_model(x, axis):
    """Megatron's g: sums what the devices computed; all of them have the gradient."""
    return lax.psum(x, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_width(x, axis):
    """Gathers the last dim; all devices have the gradient, of which each keeps its part."""
    return lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)


def own_part(x, axis, dim):
    """Returns the part of a dim that belongs to this device."""
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)


enter_model.defvjp(lambda x, axis: (x, None), lambda axis, _, gradient: (lax.psum(gradient, axis),))
leave_model.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda axis, _, gradient: (gradient,))
gather_width.defvjp(
    lambda x, axis: (gather_width(x, axis), None),
    lambda axis, _, gradient: (own_part(gradient, axis, gradient.ndim - 1),),
)


def gather(kernel, axis):
    """Gathers the rows of a matrix that a mesh axis splits; their gradients are scattered.

    Along a dim of its own: where XLA:TPU lays a matrix out by columns it cannot scatter rows, and all-reduces them.
    """
    return lax.all_gather(kernel, axis).reshape(-1, kernel.shape[-1])


def scatter(gradient, axis):
    """Sums a matrix over a mesh axis, of which each device keeps some rows."""
    return lax.psum_scatter(gradient.reshape(lax.axis_size(axis), -1, gradient.shape[-1]), axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def regathered_matmul(x, kernel, axis):
    """Multiplies by a matrix whose rows a mesh axis splits, which is gathered again in the backward pass."""
    return x @ gather(kernel, axis)


def _regathered_matmul_backward(axis, saved, gradient):
    # The barrier keeps the second gather apart from the first one, and waits for the gradient.
    x, kernel, gradient = lax.optimization_barrier((*saved, gradient))
    return jax.vjp(lambda x, kernel: x @ gather(kernel, axis), x, kernel)[1](gradient)


regathered_matmul.defvjp(lambda x, kernel, axis: (x @ gather(kernel, axis), (x, kernel)), _regathered_matmul_backward)


def moves_of(strategy: Strategy) -> SimpleNamespace:
    """Returns how activations enter and leave layers that are split, and how kernels are used."""
    axis, same = strategy.model, lambda x: x
    moves = SimpleNamespace(embedded=same, enter=same, leave=same, gather=same, matmul=jnp.matmul)
    if axis and strategy.splits_length:
        # From a part of the width of all positions to all the width of a part of the positions.
        moves.embedded = lambda x: lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)
        moves.enter = lambda x: lax.all_gather(x, axis, axis=1, tiled=True)  # its gradient is scattered
        moves.leave = lambda x: lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True)  # its gradient is gathered
    elif axis:
        moves.embedded = lambda x: gather_width(x, axis)
        moves.enter = lambda x: enter_model(x, axis)
        moves.leave = lambda x: leave_model(x, axis)
    if strategy.kernels:
        moves.gather = lambda kernel: gather(kernel, strategy.kernels)
        moves.matmul = lambda x, kernel: x @ gather(kernel, strategy.kernels)
    if strategy.regathers:
        moves.matmul = lambda x, kernel: regathered_matmul(x, kernel, strategy.kernels)
    return moves


# --------------------------------------------------------------------------------------------------------- the model


def layer_norm(x, gamma, beta):
    """Keras's LayerNormalization: in float32."""
    wide = x.astype(jnp.float32)
    mean, variance = jnp.mean(wide, axis=-1, keepdims=True), jnp.var(wide, axis=-1, keepdims=True)
    inverse = lax.rsqrt(variance + NORM_EPSILON) * gamma
    return (wide * inverse + (beta - mean * inverse)).astype(x.dtype)


def apply_block(x, weights, moves, head_size):
    """Applies one transformer block on one device."""

    def dense(x, name):
        return moves.matmul(x, weights[f"{name}/kernel"]) + weights[f"{name}/bias"]

    y = moves.enter(layer_norm(x, weights["norm1/gamma"], weights["norm1/beta"]))
    heads = (dense(y, name) for name in ("query", "key", "value"))
    heads = (head.reshape(*head.shape[:-1], -1, head_size) for head in heads)
    y = jax.nn.dot_product_attention(*heads, is_causal=True, implementation="xla")  # as Keras does
    y = moves.matmul(y.reshape(*y.shape[:2], -1), weights["output/kernel"])
    x = x + (moves.leave(y) + weights["output/bias"])
    y = moves.enter(layer_norm(x, weights["norm2/gamma"], weights["norm2/beta"]))
    y = moves.matmul(jax.nn.gelu(dense(y, "up"), approximate=False), weights["down/kernel"])
    return x + (moves.leave(y) + weights["down/bias"])


def cross_entropy(logits, targets, axis):
    """Returns the cross entropy of each position, of logits that may be split by vocabulary over a mesh axis."""
    logits = logits.astype(jnp.float32)
    largest = total = lambda x: x
    if axis:
        targets = targets - lax.axis_index(axis) * logits.shape[-1]  # elsewhere out of range, and one_hot is zero
        largest, total = (lambda x: lax.pmax(x, axis)), (lambda x: leave_model(x, axis))
    logits = logits - largest(lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
    right = jnp.sum(jax.nn.one_hot(targets, logits.shape[-1]) * logits, axis=-1)
    return jnp.log(total(jnp.sum(jnp.exp(logits), axis=-1))) - total(right)


def local_loss(weights, tokens, targets, model: Gpt, strategy: Strategy):
    """Returns what the rows of one device add to the mean loss."""
    moves = moves_of(strategy)
    x = jnp.take(moves.gather(weights["embedding"]), tokens, axis=0) + moves.gather(weights["position"])
    x = moves.embedded(x)
    for number in range(model.blocks):
        prefix = f"block{number}/"
        of_block = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        x = apply_block(x, of_block, moves, model.head_size)
    x = moves.enter(layer_norm(x, weights["norm/gamma"], weights["norm/beta"]))
    logits = x @ moves.gather(weights["head/kernel"]) + weights["head/bias"]  # its backward comes next: kept
    return jnp.sum(cross_entropy(logits, targets, strategy.model)) / (targets.size * strategy.size(*strategy.rows))


# ---------------------------------------------------------------------------------------------------------- the step


def adam(weight, momentum, velocity, gradient, count):
    """Keras's Adam; returns the new weight, momentum and velocity."""
    gradient = gradient.astype(jnp.float32)
    alpha = LEARNING_RATE * jnp.sqrt(1 - BETA_2**count) / (1 - BETA_1**count)
    momentum = momentum + (gradient - momentum) * (1 - BETA_1)
    velocity = velocity + (jnp.square(gradient) - velocity) * (1 - BETA_2)
    return weight - momentum * alpha / (jnp.sqrt(velocity) + ADAM_EPSILON), momentum, velocity


def local_step(state, batch, model: Gpt, strategy: Strategy):
    """The whole train step of one device: returns the loss and the new state."""
    split = parameters(model)
    old = {name: [split[name].flat(state[part][name]) for part in STATE] for name in split}
    # With respect to the bfloat16 weights, so that gradients are summed in bfloat16.
    weights = {name: weight.astype(dtype_of(name, model)) for name, (weight, _, _) in old.items()}
    loss, gradients = jax.value_and_grad(local_loss)(weights, *batch, model, strategy)
    count, new = state["count"] + 1, {part: {} for part in STATE}
    update = functools.partial(adam, count=count.astype(jnp.float32))
    for name, parameter in split.items():
        (weight, *slots), gradient, axes = old[name], gradients[name], strategy.rows
        if strategy.splits_length and parameter.model_dim is None:
            axes = (*axes, strategy.model)  # each device has seen other positions
        if parameter.is_kernel and strategy.kernels:
            axes = tuple(axis for axis in axes if axis != strategy.kernels)  # scattered already
        if parameter.is_kernel and strategy.slots:
            part, *slots = update(own_part(weight, strategy.slots, 0), *slots, scatter(gradient, strategy.slots))
            updated = gather(part, strategy.slots), *slots
        else:
            updated = update(weight, *slots, lax.psum(gradient, axes) if axes else gradient)
        for part, value in zip(STATE, updated, strict=True):
            new[part][name] = value.reshape(state[part][name].shape)
    return lax.psum(loss, strategy.rows) if strategy.rows else loss, {**new, "count": count}


def step(strategy: str | Strategy, devices, model: Gpt = Gpt()):
    """Returns a train step and what it takes: `jitted.lower(state_specs, batch_specs).compile()`.

    Args:
        strategy: one of `STRATEGIES`, or its name.
        devices: as many as its mesh has, attached or not.
        model: the sizes of the model.

    Returns:
        The jitted function of a state, which it consumes, and a batch, which returns a loss and the new state; and the
        shapes, dtypes and shardings of state and batch.
    """
    strategy = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
    mesh = Mesh(np.array(devices).reshape(tuple(strategy.mesh.values())), tuple(strategy.mesh))

    def spec(shape, dtype, part):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, part))

    def specs(axis):
        split = parameters(model).items()
        return {name: spec(each.shape, jnp.float32, each.part(strategy, axis)) for name, each in split}

    slots, rows = specs(strategy.kernels or strategy.slots), model.rows * strategy.size(*strategy.rows)
    state = {"weights": specs(strategy.kernels), "momentums": slots, "velocities": slots}
    state["count"] = spec((), jnp.int32, P())
    batch = (spec((rows, model.length), jnp.int32, P(strategy.rows or None, None)),) * 2
    parts = jax.tree.map(lambda leaf: leaf.sharding.spec, (state, batch))
    function = functools.partial(local_step, model=model, strategy=strategy)
    function = jax.shard_map(function, mesh=mesh, in_specs=parts, out_specs=(P(), parts[0]), check_vma=False)
    return jax.jit(function, donate_argnums=0), state, batch


def floor(strategy: str, model: Gpt = Gpt()) -> float:
    """Returns the bytes that one device must send in a step, by the ring formulas."""
    plan, item, split = STRATEGIES[strategy], jnp.dtype(model.dtype).itemsize, parameters(model)
    held = {n: math.prod(p.shape) // (1 if p.model_dim is None else plan.size(plan.model)) for n, p in split.items()}
    kernels = sum(size for name, size in held.items() if split[name].is_kernel)
    blocks = sum(size for name, size in held.items() if split[name].is_kernel and name.startswith("block"))
    small = {n: size * jnp.dtype(dtype_of(n, model)).itemsize for n, size in held.items() if not split[n].is_kernel}
    whole = sum(size for name, size in small.items() if split[name].model_dim is None)

    def share(*axes):
        return 1 - 1 / plan.size(*axes)

    number = 2 * share(*plan.rows) * sum(small.values())  # biases and norms: all-reduce
    if plan.kernels:
        number += 2 * share(plan.kernels) * item * kernels  # all-gather, reduce-scatter of gradients
        number += 2 * share(*set(plan.rows) - {plan.kernels}) * item * kernels / plan.size(plan.kernels)  # all-reduce
        # The backward pass needs no embeddings, and it starts with the head, which is still there.
        number += share(plan.kernels) * item * blocks if plan.regathers else 0
    elif plan.slots:
        number += share(plan.slots) * (item + 4) * kernels  # reduce-scatter of gradients, all-gather of new weights
    else:
        number += 2 * share(*plan.rows) * item * kernels  # all-reduce of gradients
    if plan.model:
        tokens = model.rows * model.length
        # Four all-reduces of activations a block, or what sends as much, and one of the gradient that leaves the head.
        # Embeddings split by width: one gather, or two all-to-alls of parts. (By vocabulary: one all-reduce more.)
        embedded = 2 / plan.size(plan.model) if plan.splits_length else 1
        number += ((4 * model.blocks + 1) * 2 + embedded) * share(plan.model) * item * tokens * model.width
        # Of the loss: all-reduces of the maximum, of the sum of exponentials, and of the logit of the target.
        number += 3 * 2 * share(plan.model) * 4 * tokens
        number += 2 * share(plan.model) * whole if plan.splits_length else 0
    return number


# -------------------------------------------------------------------------------------------------------- measurement


def measure(strategy: str, target: str, options: dict[str, str]) -> str:
    """Compiles a strategy for hardware that is not attached; returns a row of a table in Markdown."""
    import keras_dist
    from keras_dist.planning.hlo.module_costs import read_module

    function, state, batch = step(strategy, list(keras_dist.target(target)))
    started = time.perf_counter()
    compiled = function.lower(state, batch).compile(compiler_options=options or None)
    seconds, memory, counts = time.perf_counter() - started, compiled.memory_analysis(), Counter()
    costs = read_module(compiled.as_text(), STRATEGIES[strategy].mesh)
    for each in costs.collectives:
        counts[each.kind] += each.count if each.group_size > 1 else 0
    sent, batch_bytes = costs.wire_bytes, 2 * 4 * Gpt.rows * Gpt.length
    held = (memory.argument_size_in_bytes - batch_bytes) / 2**20
    numbers = f"{sent / 1e6:.1f} | {floor(strategy) / 1e6:.1f} | {sent / floor(strategy):.4f}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    sizes = f"{memory.temp_size_in_bytes / 2**20:.0f} | {held:.1f}"
    return f"| {target} | {strategy} | {numbers} | {kinds} | {sizes} | {costs.flops / 1e12:.3f} | {seconds:.0f} |"


def main():
    """Prints a table of all strategies, or of those asked for."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("strategies", nargs="*", default=[])
    arguments.add_argument("--target", default="h100:8")
    arguments.add_argument("--option", action="append", default=[], help="name=value of the compiler")
    asked = arguments.parse_args()
    print(f"JAX {jax.__version__} {' '.join(asked.option)}\n")
    print("| target | strategy | MB sent | floor | ratio | collectives | temp MiB | state MiB | TFLOP | seconds |")
    print("|---" * 10 + "|", flush=True)
    for strategy in asked.strategies or STRATEGIES:
        print(measure(strategy, asked.target, dict(option.split("=", 1) for option in asked.option)), flush=True)


if __name__ == "__main__":
    main()
