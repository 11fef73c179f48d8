"""One train step of a GPT in plain JAX under eight parallel strategies, as a reference for distribution libraries.

The model computes what a Keras one does, operation for operation (`mixed_bfloat16`: float32 weights and Adam, bfloat16
compute). Every strategy is the same per-device program inside `jax.shard_map`, with its collectives written out: no
partitioner decides what is sent.

Run: pip install ".[tpu,cuda12]" && python benchmarks/handwritten.py [--target h100:8] [name ...]
"""

import argparse
import functools
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    """Sizes of a decoder-only, pre-norm GPT with learned positions and an untied head; `rows` per batch shard.

    `attention` is `"xla"`, or the fused kernel `"splash"` (TPU) or `"cudnn"` (NVIDIA GPU); `positions` is whether there
    are learned ones, without which the number of weights does not depend on the length. `key_heads` is for Keras alone.
    """

    vocabulary: int = 16384
    width: int = 1024
    length: int = 1024
    blocks: int = 4
    heads: int = 16
    head_size: int = 64
    rows: int = 4
    dtype: str = "bfloat16"
    attention: str = "xla"
    positions: bool = True
    key_heads: int | None = None


@dataclass(frozen=True)
class Strategy:
    """Which mesh axis shards what.

    Attributes:
        mesh: sizes of the mesh axes, outermost first.
        batch_axes: the axes that shard the batch.
        fsdp_axis: the axis, or axes, that shards the rows of kernels, which are gathered when they are used (FSDP).
        reshards_after_forward: whether blocks free gathered kernels after the forward pass and gather them again for
            the backward pass.
        zero1_axis: the axis that shards Adam's state of kernels that are replicated themselves (ZeRO-1).
        tensor_axis: the axis that shards heads, hidden units and vocabulary (Megatron).
        sequence_parallel: whether activations between the sharded layers are sharded by position.
        context_axis: the axis that shards positions in all layers (context parallelism). Attention exchanges them for
            heads, with all-to-alls. Not for a model with learned positions.
    """

    mesh: dict[str, int]
    batch_axes: tuple[str, ...] = ()
    fsdp_axis: str | tuple[str, ...] | None = None
    reshards_after_forward: bool = False
    zero1_axis: str | None = None
    tensor_axis: str | None = None
    sequence_parallel: bool = False
    context_axis: str | None = None

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that shard the tokens of a batch."""
        return (*self.batch_axes, *names(self.context_axis))

    def size(self, *axes: str | tuple[str, ...] | None) -> int:
        """Returns the product of the sizes of some axes."""
        return math.prod(self.mesh[name] for axis in axes for name in names(axis))


def names(axis: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns an axis, axes or None as a tuple."""
    return (axis,) if isinstance(axis, str) else axis or ()


STRATEGIES = {
    "dp": Strategy({"batch": 8}, batch_axes=("batch",)),
    "zero1": Strategy({"batch": 8}, batch_axes=("batch",), zero1_axis="batch"),
    "fsdp": Strategy({"fsdp": 8}, batch_axes=("fsdp",), fsdp_axis="fsdp"),
    "fsdp_reshard": Strategy({"fsdp": 8}, batch_axes=("fsdp",), fsdp_axis="fsdp", reshards_after_forward=True),
    "hsdp": Strategy({"replica": 2, "shard": 4}, batch_axes=("replica", "shard"), fsdp_axis="shard"),
    "tp": Strategy({"model": 8}, tensor_axis="model"),
    "tp_sp": Strategy({"model": 8}, tensor_axis="model", sequence_parallel=True),
    "fsdp_tp": Strategy({"fsdp": 4, "model": 2}, batch_axes=("fsdp",), fsdp_axis="fsdp", tensor_axis="model"),
}

_DATA, _MODEL = {"data": 2, "context": 4}, {"data": 2, "context": 2, "model": 2}
CONTEXT_STRATEGIES = {
    "dp": Strategy(_DATA, batch_axes=("data",), context_axis="context"),
    "fsdp": Strategy(_DATA, batch_axes=("data",), fsdp_axis=("data", "context"), context_axis="context"),
    "tp": Strategy(_MODEL, batch_axes=("data",), tensor_axis="model", context_axis="context"),
    "tp_sp": Strategy(
        _MODEL, batch_axes=("data",), tensor_axis="model", sequence_parallel=True, context_axis="context"
    ),
}


@dataclass(frozen=True)
class Parameter:
    """A weight: its shape, the dim that tensor parallelism shards, and whether it is a kernel (not a bias or norm)."""

    shape: tuple[int, ...]
    model_dim: int | None = None
    is_kernel: bool = True

    def partition_spec(self, strategy: Strategy, axis: str | tuple[str, ...] | None) -> P:
        """Returns the layout of the weight: tensor parallelism, and dim 0 of kernels over `axis`."""
        entries = [strategy.tensor_axis if dim == self.model_dim else None for dim in range(len(self.shape))]
        if axis and self.is_kernel:
            entries[0] = (*names(entries[0]), *names(axis))
        return P(*entries)

    def flat(self, array):
        """Returns a weight as a matrix or a vector: XLA:TPU does not reduce-scatter all kernels with 3 dims."""
        if not self.is_kernel:
            return array.ravel()
        return array.reshape(-1, array.shape[-1]) if self.model_dim == 0 else array.reshape(array.shape[0], -1)


def parameters(model: Gpt) -> dict[str, Parameter]:
    """Returns the weights of a model by name.

    Embeddings are sharded by width, not by vocabulary: to gather activations costs half of what an all-reduce costs.
    """
    width, heads, hidden = model.width, (model.heads, model.head_size), (4 * model.width,)
    replicated = Parameter((width,), None, False)

    def dense(name, inputs, outputs, model_dim):
        bias = Parameter(outputs, 0, False) if model_dim else replicated
        return {f"{name}/kernel": Parameter((*inputs, *outputs), model_dim), f"{name}/bias": bias}

    found = {"embedding": Parameter((model.vocabulary, width), 1)}
    found |= {"position": Parameter((model.length, width), 1)} if model.positions else {}
    for block in (f"block{number}" for number in range(model.blocks)):
        for name in ("query", "key", "value"):
            found |= dense(f"{block}/{name}", (width,), heads, 1)
        found |= dense(f"{block}/output", heads, (width,), 0)
        found |= dense(f"{block}/up", (width,), hidden, 1) | dense(f"{block}/down", hidden, (width,), 0)
        found |= {f"{block}/{norm}/{name}": replicated for norm in ("norm1", "norm2") for name in ("gamma", "beta")}
    found |= {"norm/gamma": replicated, "norm/beta": replicated}
    return found | dense("head", (width,), (model.vocabulary,), 1)


def dtype_of(name: str, model: Gpt) -> str:
    """Returns the dtype that a weight is used in; Keras's LayerNormalization does not cast its own."""
    return "float32" if "norm" in name else model.dtype


# --------------------------------------------------------------------------------------------------- the collectives


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter_model(x, axis):
    """Megatron's f: replicated activations enter a sharded layer; their gradients are all-reduced."""
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave_model(x, axis):
    """Megatron's g: all-reduces the partial results of a sharded layer; their gradient is replicated."""
    return lax.psum(x, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_width(x, axis):
    """Gathers the last dim; its gradient is replicated, and each device keeps its shard."""
    return lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)


def local_shard(x, axis, dim):
    """Returns this device's shard of a replicated tensor, along one dim."""
    size = x.shape[dim] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)


enter_model.defvjp(lambda x, axis: (x, None), lambda axis, _, gradient: (lax.psum(gradient, axis),))
leave_model.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda axis, _, gradient: (gradient,))
gather_width.defvjp(
    lambda x, axis: (gather_width(x, axis), None),
    lambda axis, _, gradient: (local_shard(gradient, axis, gradient.ndim - 1),),
)


def gather(kernel, axis):
    """Gathers the rows of a sharded matrix; their gradients are reduce-scattered.

    It gathers along a new dim, because XLA:TPU cannot reduce-scatter the rows of a matrix that it stores by columns.
    """
    return lax.all_gather(kernel, axis).reshape(-1, kernel.shape[-1])


def scatter(gradient, axis):
    """Reduce-scatters the rows of a matrix over a mesh axis."""
    return lax.psum_scatter(gradient.reshape(lax.axis_size(axis), -1, gradient.shape[-1]), axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def regathered_matmul(x, kernel, axis):
    """Multiplies by a matrix with sharded rows, and gathers it again in the backward pass."""
    return x @ gather(kernel, axis)


def _regathered_matmul_backward(axis, saved, gradient):
    # The barrier keeps the second gather separate from the first one, and after the gradient.
    x, kernel, gradient = lax.optimization_barrier((*saved, gradient))
    return jax.vjp(lambda x, kernel: x @ gather(kernel, axis), x, kernel)[1](gradient)


regathered_matmul.defvjp(lambda x, kernel, axis: (x @ gather(kernel, axis), (x, kernel)), _regathered_matmul_backward)


def moves_of(strategy: Strategy) -> SimpleNamespace:
    """Returns how activations enter and leave sharded layers, and how kernels are used."""
    axis, same = strategy.tensor_axis, lambda x: x
    moves = SimpleNamespace(
        embedded=same, enter=same, leave=same, gather=same, matmul=jnp.matmul, heads=same, attended=same
    )
    if strategy.context_axis:
        moves.heads = lambda x: lax.all_to_all(x, strategy.context_axis, split_axis=2, concat_axis=1, tiled=True)
        moves.attended = lambda x: lax.all_to_all(x, strategy.context_axis, split_axis=1, concat_axis=2, tiled=True)
    if axis and strategy.sequence_parallel:
        # From a shard of the width of all positions to the full width of a shard of the positions.
        moves.embedded = lambda x: lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)
        moves.enter = lambda x: lax.all_gather(x, axis, axis=1, tiled=True)  # its gradient is reduce-scattered
        moves.leave = lambda x: lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True)  # its gradient is gathered
    elif axis:
        moves.embedded = lambda x: gather_width(x, axis)
        moves.enter = lambda x: enter_model(x, axis)
        moves.leave = lambda x: leave_model(x, axis)
    if strategy.fsdp_axis:
        moves.gather = lambda kernel: gather(kernel, strategy.fsdp_axis)
        moves.matmul = lambda x, kernel: x @ gather(kernel, strategy.fsdp_axis)
    if strategy.reshards_after_forward:
        moves.matmul = lambda x, kernel: regathered_matmul(x, kernel, strategy.fsdp_axis)
    return moves


# --------------------------------------------------------------------------------------------------------- the model


def layer_norm(x, gamma, beta):
    """Keras's LayerNormalization: in float32."""
    wide = x.astype(jnp.float32)
    mean, variance = jnp.mean(wide, axis=-1, keepdims=True), jnp.var(wide, axis=-1, keepdims=True)
    inverse = lax.rsqrt(variance + NORM_EPSILON) * gamma
    return (wide * inverse + (beta - mean * inverse)).astype(x.dtype)


@functools.cache
def splash_kernel(length: int, heads: int):
    """Returns JAX's Pallas kernel of causal attention, whose tables take up to minutes to make."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    sides = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    sizes = kernels.BlockSizes(**dict.fromkeys(sides, min(length, 512)))
    with jax.ensure_compile_time_eval():
        return kernels.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)


def splash_attention(query, key, value):
    """Causal attention by JAX's Pallas kernel for TPUs, in blocks of 512 queries and keys."""
    length, heads, head_size = query.shape[1:]
    query = query * jnp.asarray(1 / math.sqrt(head_size), query.dtype)
    query, key, value = (each.transpose(0, 2, 1, 3) for each in (query, key, value))
    return jax.vmap(splash_kernel(length, heads))(query, key, value).transpose(0, 2, 1, 3)


def apply_block(x, weights, moves, model: Gpt):
    """Applies one transformer block on one device."""

    def dense(x, name):
        return moves.matmul(x, weights[f"{name}/kernel"]) + weights[f"{name}/bias"]

    y = moves.enter(layer_norm(x, weights["norm1/gamma"], weights["norm1/beta"]))
    heads = (dense(y, name) for name in ("query", "key", "value"))
    heads = (moves.heads(head.reshape(*head.shape[:-1], -1, model.head_size)) for head in heads)
    if model.attention == "splash":
        y = splash_attention(*heads)
    else:
        y = jax.nn.dot_product_attention(*heads, is_causal=True, implementation=model.attention)
    y = moves.attended(y)
    y = moves.matmul(y.reshape(*y.shape[:2], -1), weights["output/kernel"])
    x = x + (moves.leave(y) + weights["output/bias"])
    y = moves.enter(layer_norm(x, weights["norm2/gamma"], weights["norm2/beta"]))
    y = moves.matmul(jax.nn.gelu(dense(y, "up"), approximate=False), weights["down/kernel"])
    return x + (moves.leave(y) + weights["down/bias"])


def cross_entropy(logits, targets, axis):
    """Returns the cross entropy of each position, of logits that may be sharded by vocabulary over an axis."""
    logits = logits.astype(jnp.float32)
    largest = total = lambda x: x
    if axis:
        targets = (
            targets - lax.axis_index(axis) * logits.shape[-1]
        )  # out of range on other devices, where one_hot is zero
        largest, total = (lambda x: lax.pmax(x, axis)), (lambda x: leave_model(x, axis))
    logits = logits - largest(lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
    right = jnp.sum(jax.nn.one_hot(targets, logits.shape[-1]) * logits, axis=-1)
    return jnp.log(total(jnp.sum(jnp.exp(logits), axis=-1))) - total(right)


def local_loss(weights, tokens, targets, model: Gpt, strategy: Strategy):
    """Returns what the rows of one device contribute to the mean loss."""
    moves = moves_of(strategy)
    x = jnp.take(moves.gather(weights["embedding"]), tokens, axis=0)
    x = x + moves.gather(weights["position"]) if model.positions else x
    x = moves.embedded(x)
    for number in range(model.blocks):
        prefix = f"block{number}/"
        of_block = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        x = apply_block(x, of_block, moves, model)
    x = moves.enter(layer_norm(x, weights["norm/gamma"], weights["norm/beta"]))
    logits = (
        x @ moves.gather(weights["head/kernel"]) + weights["head/bias"]
    )  # not gathered again: its backward pass comes next
    return jnp.sum(cross_entropy(logits, targets, strategy.tensor_axis)) / (
        targets.size * strategy.size(*strategy.token_axes)
    )


# ---------------------------------------------------------------------------------------------------------- the step


def adam(weight, momentum, velocity, gradient, count):
    """Keras's Adam; returns the new weight, momentum and velocity."""
    gradient = gradient.astype(jnp.float32)
    alpha = LEARNING_RATE * jnp.sqrt(1 - BETA_2**count) / (1 - BETA_1**count)
    momentum = momentum + (gradient - momentum) * (1 - BETA_1)
    velocity = velocity + (jnp.square(gradient) - velocity) * (1 - BETA_2)
    return weight - momentum * alpha / (jnp.sqrt(velocity) + ADAM_EPSILON), momentum, velocity


def local_step(state, batch, model: Gpt, strategy: Strategy):
    """Runs the train step of one device; returns the loss and the new state."""
    split = parameters(model)
    old = {name: [split[name].flat(state[part][name]) for part in STATE] for name in split}
    # Gradients with respect to the bfloat16 weights, so that they are summed in bfloat16.
    weights = {name: weight.astype(dtype_of(name, model)) for name, (weight, _, _) in old.items()}
    loss, gradients = jax.value_and_grad(local_loss)(weights, *batch, model, strategy)
    count, new = state["count"] + 1, {part: {} for part in STATE}
    update = functools.partial(adam, count=count.astype(jnp.float32))
    for name, parameter in split.items():
        (weight, *moments), gradient, axes = old[name], gradients[name], strategy.token_axes
        if strategy.sequence_parallel and parameter.model_dim is None:
            axes = (*axes, strategy.tensor_axis)  # each device has other positions
        if parameter.is_kernel and strategy.fsdp_axis:
            axes = tuple(axis for axis in axes if axis not in names(strategy.fsdp_axis))  # reduce-scattered already
        if parameter.is_kernel and strategy.zero1_axis:
            shard, *moments = update(
                local_shard(weight, strategy.zero1_axis, 0), *moments, scatter(gradient, strategy.zero1_axis)
            )
            updated = gather(shard, strategy.zero1_axis), *moments
        else:
            updated = update(weight, *moments, lax.psum(gradient, axes) if axes else gradient)
        for part, value in zip(STATE, updated, strict=True):
            new[part][name] = value.reshape(state[part][name].shape)
    return lax.psum(loss, strategy.token_axes) if strategy.token_axes else loss, {**new, "count": count}


def step(strategy: str | Strategy, devices, model: Gpt = Gpt()):
    """Returns a train step and its arguments: `jitted.lower(state_specs, batch_specs).compile()`.

    Args:
        strategy: one of `STRATEGIES`, or its name.
        devices: as many as its mesh has, attached or not.
        model: the sizes of the model.

    Returns:
        The jitted function, which takes a state (donated) and a batch and returns the loss and the new state, and the
        shapes, dtypes and shardings of both arguments.
    """
    strategy = STRATEGIES[strategy] if isinstance(strategy, str) else strategy
    mesh = Mesh(np.array(devices).reshape(tuple(strategy.mesh.values())), tuple(strategy.mesh))

    def spec(shape, dtype, part):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, part))

    def specs(axis):
        split = parameters(model).items()
        return {name: spec(each.shape, jnp.float32, each.partition_spec(strategy, axis)) for name, each in split}

    moments, rows = specs(strategy.fsdp_axis or strategy.zero1_axis), model.rows * strategy.size(*strategy.batch_axes)
    state = {"weights": specs(strategy.fsdp_axis), "momentums": moments, "velocities": moments}
    state["count"] = spec((), jnp.int32, P())
    batch = (spec((rows, model.length), jnp.int32, P(strategy.batch_axes or None, strategy.context_axis)),) * 2
    parts = jax.tree.map(lambda leaf: leaf.sharding.spec, (state, batch))
    function = functools.partial(local_step, model=model, strategy=strategy)
    function = jax.shard_map(function, mesh=mesh, in_specs=parts, out_specs=(P(), parts[0]), check_vma=False)
    return jax.jit(function, donate_argnums=0), state, batch


def floor(strategy: str, model: Gpt = Gpt()) -> float:
    """Returns a lower bound of the bytes that one device sends in a step, by the ring formulas."""
    plan, item, split = STRATEGIES[strategy], jnp.dtype(model.dtype).itemsize, parameters(model)
    held = {
        n: math.prod(p.shape) // (1 if p.model_dim is None else plan.size(plan.tensor_axis)) for n, p in split.items()
    }
    kernels = sum(size for name, size in held.items() if split[name].is_kernel)
    blocks = sum(size for name, size in held.items() if split[name].is_kernel and name.startswith("block"))
    small = {n: size * jnp.dtype(dtype_of(n, model)).itemsize for n, size in held.items() if not split[n].is_kernel}
    replicated = sum(size for name, size in small.items() if split[name].model_dim is None)

    def share(*axes):
        return 1 - 1 / plan.size(*axes)

    number = 2 * share(*plan.batch_axes) * sum(small.values())  # biases and norms: all-reduce
    if plan.fsdp_axis:
        number += 2 * share(plan.fsdp_axis) * item * kernels  # all-gather, reduce-scatter of gradients
        number += (
            2 * share(*set(plan.batch_axes) - {plan.fsdp_axis}) * item * kernels / plan.size(plan.fsdp_axis)
        )  # all-reduce
        # The backward pass needs no embeddings, and starts with the head, which is still gathered.
        number += share(plan.fsdp_axis) * item * blocks if plan.reshards_after_forward else 0
    elif plan.zero1_axis:
        number += (
            share(plan.zero1_axis) * (item + 4) * kernels
        )  # reduce-scatter of gradients, all-gather of new weights
    else:
        number += 2 * share(*plan.batch_axes) * item * kernels  # all-reduce of gradients
    if plan.tensor_axis:
        tokens = model.rows * model.length
        # Four all-reduces of activations per block, or an equivalent, and one of the gradient from the head.
        # Embeddings sharded by width: one all-gather, or two all-to-alls. (By vocabulary: one all-reduce more.)
        embedded = 2 / plan.size(plan.tensor_axis) if plan.sequence_parallel else 1
        number += ((4 * model.blocks + 1) * 2 + embedded) * share(plan.tensor_axis) * item * tokens * model.width
        # The loss: all-reduces of the maximum, of the sum of exponentials, and of the target's logit.
        number += 3 * 2 * share(plan.tensor_axis) * 4 * tokens
        number += 2 * share(plan.tensor_axis) * replicated if plan.sequence_parallel else 0
    return number


# -------------------------------------------------------------------------------------------------------- measurement


def compile_for(
    strategy: str | Strategy, target: str, model: Gpt = Gpt(), options: Mapping[str, str | bool] | None = None
):
    """Compiles the step for hardware that need not be attached, with its kernel of attention.

    A program that does not fit into memory is compiled, too, by libtpu before 0.0.50.
    """
    import keras_dist
    from keras_dist.planning.targets.target_platform import platform_overridden

    devices = list(keras_dist.target(target))
    on_tpu = devices[0].platform == "tpu"
    model = replace(model, attention="splash" if on_tpu else "cudnn")
    with platform_overridden(devices):  # JAX asks which GPU and which cuDNN there are
        function, state, batch = step(strategy, devices, model)
        lowered = function.lower(state, batch)
        try:
            return lowered.compile(compiler_options=dict(options or {}) or None)
        except jax.errors.JaxRuntimeError as error:
            if not on_tpu or "RESOURCE_EXHAUSTED" not in str(error):
                raise
        return lowered.compile(compiler_options={**(options or {}), "xla_tpu_no_crash_on_oom": True})


def measure(strategy: str, target: str, options: Mapping[str, str]) -> str:
    """Compiles a strategy for hardware that is not attached; returns a row of a table in Markdown."""
    from keras_dist.planning.hlo.module_costs import ModuleReader

    started = time.perf_counter()
    compiled = compile_for(strategy, target, options=options)
    seconds, memory, counts = time.perf_counter() - started, compiled.memory_analysis(), Counter()
    costs = ModuleReader(compiled.as_text(), STRATEGIES[strategy].mesh).module_costs()
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
