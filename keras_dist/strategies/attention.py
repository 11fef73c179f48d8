"""`keras.ops.dot_product_attention` under a distribution: which kernel computes it, and on which shards."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from keras_dist._keras import internals
from keras_dist._keras.thread_value import ThreadValue
from keras_dist.layout.tensor_layout import axis_names
from keras_dist.strategies import attention_kernels as kernels
from keras_dist.strategies.attention_mask import AttentionMask, recognize, recognize_bias
from keras_dist.strategies.context_parallel import (
    ALL_TO_ALL,
    Exchange,
    choose_exchange,
    kept,
    padded,
    padded_length,
    regathered,
)
from keras_dist.strategies.dim_axes import axes_of_dim, without_repeats
from keras_dist.strategies.per_device import call_per_device

# Kernels pad fewer queries to as many, and their logits, as in the steps of `generate()`, need little memory.
_FEWEST_QUERIES = 128

# Name of the scope of a fused kernel, followed by the fraction of pairs of a query and a key that see each other. A
# plan finds it in the traced and in the compiled program, which do not tell how many FLOP a kernel computes.
KERNEL_SCOPE = "attention_of_"


@dataclass(frozen=True)
class AttentionCall:
    """How one call of `keras.ops.dot_product_attention` is computed.

    Attributes:
        layer: path of the layer that calls it.
        implementation: `"splash attention"`, `"cuDNN"` or `"XLA"`.
        reason: why XLA computes it on a device that has a fused kernel; None otherwise.
        logits_bytes: size of XLA's logits on one device; 0 for fused kernels, which do not hold them.
        flops: FLOP of a fused kernel's forward pass over all devices, 2 per multiply-add, of the pairs of a query and a
            key that a causal mask or window lets see each other; 0 for XLA, whose FLOP are part of the traced program.
        exchange: how devices that share sequences exchange operands, such as `"all-to-all over 'context'"`; None if
            sequences are not sharded.
    """

    layer: str
    implementation: str
    reason: str | None
    logits_bytes: int
    flops: float
    exchange: str | None = None


_recorded: ThreadValue[list[AttentionCall] | None] = ThreadValue(None)


@contextlib.contextmanager
def recorded_attention() -> Iterator[list[AttentionCall]]:
    """Records the calls of attention that this thread traces in a block."""
    calls: list[AttentionCall] = []
    with _recorded.set_to(calls):
        yield calls


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: Any,
    *,
    scale: float | None,
    is_causal: bool,
    flash_attention: bool | None,
    soft_cap: float | None,
    mesh: Mesh,
    batch_axes: Sequence[str],
    sequence_axes: Sequence[str],
    sequence_exchange: str | None,
    axes_of_weight: Callable[[Any], Any],
) -> jax.Array:
    """Computes attention as Keras documents it, by the fused kernel of the mesh's devices where it gives these numbers.

    The kernel runs on the rows and heads of each device. `batch_axes` are axes that divide the rows. Which axes shard
    the heads follows from the weights that the queries are computed with: `axes_of_weight` returns the axes of each dim
    of a traced weight, None for other values. `sequence_axes` shard the positions; `sequence_exchange` names how
    devices exchange them, None for what sends the fewest bytes.

    Raises a ValueError if `flash_attention` is True and no kernel can compute it.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    kernel, reason, exchange = _FUSED_KERNELS.get(kernel_platform(mesh)), None, None
    if kernel is None:
        reason = "CPUs have none"
    elif not flash_attention and (flash_attention is False or query.shape[1] < _FEWEST_QUERIES):
        kernel = None
    sequence_axes = _usable_axes(sequence_axes, mesh, min(query.shape[1], key.shape[1]))
    if kernel is not None or sequence_axes:
        structure, numeric_bias = _structure(mask, bias, is_causal)
        key_heads, value_heads = _without_repeats(key, value)
        shards = _shards_of(query, mesh, batch_axes, sequence_axes, axes_of_weight)
        if sequence_axes:
            exchange = shards.exchange(
                query, key_heads, structure, numeric_bias, kernel or _XLA_IN_BLOCKS, sequence_exchange
            )
        if kernel is not None:
            reason = kernel.why_not(query, key_heads, value_heads, numeric_bias, structure)
            reason = reason or shards.why_not(kernel, query, key_heads, structure, exchange)
            if reason is not None and not flash_attention:
                _warn_once(reason)
        if kernel is None or (reason is not None and exchange is not None):
            kernel = _XLA_IN_BLOCKS
        if reason is None or (kernel is _XLA_IN_BLOCKS and not flash_attention):
            call = _FusedCall(kernel, structure, scale, soft_cap, shards, exchange)
            flops = 0.0 if kernel is _XLA_IN_BLOCKS else call.flops(query, key, value)
            _record(kernel.name, reason, 0, flops, exchange)
            return call(query, key_heads, value_heads, numeric_bias)
    if flash_attention:
        raise ValueError(
            f"{_caller()} asks for a fused attention kernel (flash_attention=True), but {reason}. "
            f"Received: query {query.dtype}{list(query.shape)}, key {list(key.shape)}. With flash_attention=None, XLA "
            "computes it."
        )
    if _recorded.value is not None:
        shards = _shards_of(query, mesh, batch_axes, (), axes_of_weight)
        logits = 4 * math.prod(query.shape[:3]) * key.shape[1]
        _record("XLA", reason, logits // shards.count(shards.batch + shards.heads), 0.0)
    return kernels.xla_attention(query, key, value, bias, mask, scale=scale, soft_cap=soft_cap, is_causal=is_causal)


def _record(
    implementation: str, reason: str | None, logits_bytes: int, flops: float, exchange: Exchange | None = None
) -> None:
    if _recorded.value is not None:
        name, path = None if exchange is None else str(exchange), internals.current_path() or ""
        _recorded.value.append(AttentionCall(path, implementation, reason, logits_bytes, flops, name))


def _caller() -> str:
    path = internals.current_path()
    return f"Layer {path!r}" if path else "A call of keras.ops.dot_product_attention"


_warned: set[str] = set()


def _warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"{_caller()} computes attention by XLA, which holds all logits (queries x keys for each "
            f"head) in memory: {reason}.",
            stacklevel=2,
        )


# --------------------------------------------------------------------------------------------------------- operands


def _structure(mask: Any, bias: Any, is_causal: bool) -> tuple[AttentionMask, Any]:
    """Returns which keys each query sees, and the bias unless all it does is to hide keys."""
    structure = AttentionMask() if mask is None else recognize(mask)
    if mask is None and bias is not None and (of_bias := recognize_bias(bias)) is not None:
        structure, bias = of_bias, None
    if is_causal:
        structure = replace(structure, upper=0 if structure.upper is None else min(structure.upper, 0))
    return structure, bias


def _without_repeats(key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values before their heads were repeated for groups of queries, which kernels do not need."""
    (few_keys, repeats), (few_values, value_repeats) = without_repeats(key, 2), without_repeats(value, 2)
    return (few_keys, few_values) if repeats == value_repeats else (key, value)


@dataclass(frozen=True)
class _Shards:
    """How operands are sharded: rows over `batch` axes, heads over `heads` axes, positions over `sequence` axes."""

    mesh: Mesh
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    sequence: tuple[str, ...] = ()

    def count(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[name] for name in axes)

    def spec(self, tensor: Any, heads_dim: int | None = None, sequence_dim: int | None = None) -> PartitionSpec:
        """Returns the spec of a tensor with rows in dim 0. One row, head or position is for all of them."""
        entries: list[Any] = [None] * tensor.ndim
        if tensor.shape[0] > 1:
            entries[0] = self.batch
        if heads_dim is not None and tensor.shape[heads_dim] % self.count(self.heads) == 0:
            entries[heads_dim] = self.heads
        if sequence_dim is not None and self.sequence and tensor.shape[sequence_dim] > 1:
            entries[sequence_dim] = self.sequence
        return PartitionSpec(*entries)

    def heads_of_device(self, query: Any, key: Any) -> tuple[int, int]:
        """Returns how many query heads a device has, and how many key heads these use."""
        devices = self.count(self.heads)
        heads, key_heads = query.shape[2] // devices, key.shape[2]
        if key_heads % devices == 0:
            return heads, key_heads // devices
        return heads, 1 if query.shape[2] // key_heads % heads == 0 else heads

    def exchange(
        self, query: Any, key: Any, mask: AttentionMask, bias: Any, kernel: "_Kernel", name: str | None
    ) -> Exchange:
        """Returns how devices that share sequences exchange operands; raises ValueError if that of a name cannot be."""
        has_array = bias is not None or mask.dense is not None  # its rows are those of a device's own positions
        heads, key_heads = self.heads_of_device(query, key)
        devices = self.count(self.sequence)
        if kernel.run_multiple is None and heads % devices == 0:
            name = name or ALL_TO_ALL
        return choose_exchange(
            self.sequence,
            devices,
            (query.shape[1], heads),
            (key.shape[1], key_heads),
            is_balanced=has_array or (mask.lower is None) == (mask.upper is None),
            is_grouped=not has_array,
            most_pairs=kernel.most_pairs,
            name=name,
        )

    def why_not(
        self, kernel: "_Kernel", query: Any, key: Any, mask: AttentionMask, exchange: Exchange | None
    ) -> str | None:
        """Returns why a kernel cannot compute what a device has after the exchange."""
        groups = 1 if exchange is None else exchange.groups
        if groups > 1 and kernel.run_multiple is None:
            return (
                f"{kernel.name} needs all positions of a sequence, so the {self.count(self.sequence)} devices that "
                f"share one must divide the {self.heads_of_device(query, key)[0]} query heads of each; use fewer "
                "devices along the sequence"
            )
        queries = query.shape[1] // groups
        if queries * key.shape[1] > kernel.most_pairs and (mask.lower, mask.upper) != (None, None):
            return (
                f"{kernel.name} has no scalar memory for a mask of {queries} queries and {key.shape[1]} keys on one "
                "device; shard sequences over more devices"
            )
        return None


def _shards_of(
    query: jax.Array,
    mesh: Mesh,
    batch_axes: Sequence[str],
    sequence_axes: Sequence[str],
    axes_of_weight: Callable[[Any], Any],
) -> _Shards:
    others = (*batch_axes, *sequence_axes)
    heads = tuple(name for name in axes_of_dim(query, 2, axes_of_weight) or () if name not in others)
    shards = _Shards(mesh, tuple(batch_axes), heads, tuple(sequence_axes))
    return shards if query.shape[2] % shards.count(heads) == 0 else replace(shards, heads=())


def _usable_axes(axes: Sequence[str], mesh: Mesh, positions: int) -> tuple[str, ...]:
    """Returns the axes to exchange operands over: none for less than one position a device, or in a `shard_map`."""
    axes = tuple(name for name in axes if mesh.shape[name] > 1)
    is_shardable = positions >= math.prod(mesh.shape[name] for name in axes)
    return axes if is_shardable and not jax.sharding.get_abstract_mesh().manual_axes else ()


# ---------------------------------------------------------------------------------------------------- fused kernels


class _Kernel(NamedTuple):
    """A way to compute attention on a device.

    `run_multiple` is what the lengths of runs of queries must be a multiple of; None if it takes all positions only.
    `most_pairs` is how many pairs of a query and a key it takes under a mask.
    """

    name: str
    compute: Callable[..., jax.Array]
    why_not: Callable[..., str | None]
    run_multiple: int | None
    most_pairs: float = math.inf


_FUSED_KERNELS = {
    "tpu": _Kernel(
        "splash attention", kernels.splash_attention, kernels.why_not_splash, 128, kernels.MOST_PAIRS_OF_SPLASH
    ),
    "gpu": _Kernel("cuDNN", kernels.cudnn_attention, kernels.why_not_cudnn, None),
}
_XLA_IN_BLOCKS = _Kernel("XLA", kernels.xla_attention_in_blocks, lambda *operands: None, 1)


def kernel_platform(mesh: Mesh) -> str:
    """Returns the platform whose kernel computes attention: that of the mesh's devices."""
    return mesh.devices.flat[0].platform


@dataclass(frozen=True)
class _FusedCall:
    """Computes attention by a kernel on the shards of each device."""

    kernel: _Kernel
    mask: AttentionMask
    scale: float
    soft_cap: float | None
    shards: _Shards
    exchange: Exchange | None

    def flops(self, query: jax.Array, key: jax.Array, value: jax.Array) -> float:
        fraction = kernels.visible_fraction(self.mask, query.shape[1], key.shape[1])
        return 2.0 * fraction * math.prod(query.shape[:3]) * key.shape[1] * (query.shape[-1] + value.shape[-1])

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None) -> jax.Array:
        length, mask = query.shape[1], self.mask
        operands: Any = query, key, value, bias
        if self.exchange is not None:
            lengths = query.shape[1], key.shape[1]
            multiple = self.kernel.run_multiple or 1
            to = padded_length(lengths[0], self.exchange, multiple), padded_length(lengths[1], self.exchange, multiple)
            # Queries that are themselves padding get the mean of all values below.
            mask = replace(mask, query_valid=None).padded(lengths, to)
            operands = (
                padded(query, 1, to[0]),
                *(padded(tensor, 1, to[1]) for tensor in (key, value)),
                None if bias is None else padded(padded(bias, 2, to[0]), 3, to[1]),
            )
        output = self._on_shards(*operands, mask)[:, :length]
        return _with_mean_where_all_is_masked(output, value, self.mask)

    def _on_shards(
        self, query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, mask: AttentionMask
    ) -> jax.Array:
        shards, exchange = self.shards, self.exchange
        by_rows = of_pairs = replace(shards, sequence=())  # how arrays with a value for each query and key are sharded
        if exchange is not None:
            of_pairs = shards if exchange.keeps_positions else replace(by_rows, heads=shards.heads + shards.sequence)
        specs: tuple[Any, ...] = (
            *(shards.spec(tensor, heads_dim=2, sequence_dim=1) for tensor in (query, key, value)),
            None if bias is None else of_pairs.spec(bias, 1, 2),
            AttentionMask(
                mask.lower,
                mask.upper,
                query_valid=None if mask.query_valid is None else by_rows.spec(mask.query_valid),
                key_valid=None if mask.key_valid is None else by_rows.spec(mask.key_valid),
                segments=None if mask.segments is None else tuple(map(by_rows.spec, mask.segments)),  # pyright: ignore
                dense=None if mask.dense is None else of_pairs.spec(mask.dense, 1, 2),
            ),
        )
        # Devices compute with other rows, heads and positions. The gradient of what they share is the sum of theirs.
        axes = shards.batch + shards.heads + shards.sequence
        summed_axes = [tuple(name for name in axes if name not in axis_names(each or ())) for each in specs[:4]]
        head_axes = shards.heads if set(shards.heads) - set(axis_names(specs[1])) else ()
        fraction = kernels.visible_fraction(mask, query.shape[1], key.shape[1])

        def on_device(query, key, value, bias, mask):
            if head_axes:
                key, value = (self._heads_of(query, tensor, head_axes) for tensor in (key, value))
            options: dict[str, Any] = {}
            if exchange is not None:
                runs, heads = exchange.query_runs(query.shape[1]), query.shape[2]
                query = query if exchange.keeps_positions else kept(exchange.queries(query))
                key, value = (exchange.keys(tensor, heads) for tensor in (key, value))
                if runs is not None:
                    options["runs"], mask = runs, mask.at(runs.positions())
            with jax.named_scope(f"{KERNEL_SCOPE}{fraction:.6f}"):
                output = self.kernel.compute(
                    query, key, value, bias, mask, scale=self.scale, soft_cap=self.soft_cap, **options
                )
            return output if exchange is None else exchange.output(output)

        arguments = query, key, value, bias, mask
        function = on_device if exchange is None else regathered(on_device, exchange)
        return call_per_device(function, shards.mesh, arguments, specs, specs[0], 4, summed_axes)

    def _heads_of(self, query: jax.Array, tensor: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Returns the key or value heads of a device's query heads, if it holds all of them."""
        heads = query.shape[2]
        group = heads * self.shards.count(axes) // tensor.shape[2]
        first = jax.lax.axis_index(axes) * heads
        if group % heads == 0:  # they belong to one head
            return jax.lax.dynamic_slice_in_dim(tensor, first // group, 1, axis=2)
        return jnp.take(tensor, (first + jnp.arange(heads)) // group, axis=2)


def _with_mean_where_all_is_masked(output: jax.Array, value: jax.Array, mask: AttentionMask) -> jax.Array:
    """Gives queries that see no key the mean of all values, as XLA's softmax of equal logits does."""
    seen = kernels.sees_a_key(mask, output.shape[1], value.shape[1])
    if seen is None:
        return output
    mean = value.mean(axis=1, keepdims=True, dtype=jnp.float32).astype(output.dtype)
    mean = jnp.repeat(mean, output.shape[2] // mean.shape[2], axis=2)
    return jnp.where(seen[:, :, None, None], output, mean)
