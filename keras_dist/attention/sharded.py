"""Attention on the shards of each device: how operands are sharded, and a kernel that runs on them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from keras_dist.attention.exchange import ALL_TO_ALL, Exchange, choose_exchange
from keras_dist.attention.kernels import KEPT, Kernel
from keras_dist.attention.mask import AttentionMask, pad_queries
from keras_dist.layout.tensor_layout import axis_names
from keras_dist.sharding.per_device import call_per_device, in_shard_map, pad_dim
from keras_dist.tracing.dim_axes import axes_of_dim

# Name of the scope of a fused kernel, followed by the fraction of pairs of a query and a key that see each other. A
# plan finds it in the traced and in the compiled program, which do not tell how many FLOP a kernel computes.
KERNEL_SCOPE = "attention_of_"


@dataclass(frozen=True)
class Shards:
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
        self, query: Any, key: Any, mask: AttentionMask, bias: Any, kernel: Kernel, name: str | None
    ) -> Exchange:
        """Returns how devices that share sequences exchange operands; raises ValueError if that of a name cannot be."""
        has_array = bias is not None or mask.dense is not None  # its rows are those of a device's own positions
        heads, key_heads = self.heads_of_device(query, key)
        devices = self.count(self.sequence)
        if kernel.run_multiple is None and heads % devices == 0:
            name = name or ALL_TO_ALL
        queries, keys = (query.shape[1], heads), (key.shape[1], key_heads)
        is_balanced = has_array or (mask.lower is None) == (mask.upper is None)
        max_pairs = kernel.max_pairs if mask.has_band else math.inf
        return choose_exchange(self.sequence, devices, queries, keys, is_balanced, not has_array, max_pairs, name)

    def why_not(
        self, kernel: Kernel, query: Any, key: Any, mask: AttentionMask, exchange: Exchange | None
    ) -> str | None:
        """Returns why a kernel cannot compute what a device has after the exchange."""
        groups = 1 if exchange is None else exchange.groups
        if groups > 1 and kernel.run_multiple is None:
            (heads, _), devices = self.heads_of_device(query, key), self.count(self.sequence)
            if heads % devices == 0:
                return f"{kernel.name} needs all positions of a sequence; use sequence_exchange=None or 'all_to_all'"
            return (
                f"{kernel.name} needs all positions of a sequence, so the {devices} devices that share one must "
                f"divide the {heads} query heads of each; use fewer devices along the sequence"
            )
        queries = query.shape[1] // groups
        if mask.has_band and queries * key.shape[1] > kernel.max_pairs:
            return (
                f"{kernel.name} has no scalar memory for a mask of {queries} queries and {key.shape[1]} keys on one "
                "device; shard sequences over more devices"
            )
        return None


def shards_of(
    query: jax.Array,
    mesh: Mesh,
    batch_axes: Sequence[str],
    sequence_axes: Sequence[str],
    axes_of_weight: Callable[[Any], Any],
) -> Shards:
    others = (*batch_axes, *sequence_axes)
    heads = tuple(name for name in axes_of_dim(query, 2, axes_of_weight) or () if name not in others)
    shards = Shards(mesh, tuple(batch_axes), heads, tuple(sequence_axes))
    return shards if query.shape[2] % shards.count(heads) == 0 else replace(shards, heads=())


def usable_axes(axes: Sequence[str], mesh: Mesh, positions: int) -> tuple[str, ...]:
    """Returns the axes to exchange operands over: none for less than one position a device, or in a `shard_map`."""
    axes = tuple(name for name in axes if mesh.shape[name] > 1)
    is_shardable = positions >= math.prod(mesh.shape[name] for name in axes)
    return axes if is_shardable and not in_shard_map() else ()


@dataclass(frozen=True)
class ShardedCall:
    """Computes attention by a kernel on the shards of each device."""

    kernel: Kernel
    mask: AttentionMask
    scale: float
    soft_cap: float | None
    shards: Shards
    exchange: Exchange | None

    def flops(self, query: jax.Array, key: jax.Array, value: jax.Array) -> float:
        fraction = self.mask.visible_fraction(query.shape[1], key.shape[1])
        return 2.0 * fraction * math.prod(query.shape[:3]) * key.shape[1] * (query.shape[-1] + value.shape[-1])

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None) -> jax.Array:
        length, mask, values, exchange = query.shape[1], self.mask, value, self.exchange
        if exchange is not None:
            multiple = self.kernel.run_multiple or 1
            query, key, value = (
                pad_dim(each, 1, exchange.padded_length(each.shape[1], multiple)) for each in (query, key, value)
            )
            # Queries that are themselves padding get the mean of all values below.
            mask = mask.with_queries(query.shape[1])
            bias = pad_queries(bias, 2, query.shape[1])
        output = self._on_shards(query, key, value, bias, mask, values.shape[1])[:, :length]
        hidden_by = AttentionMask(query_valid=self.mask.query_valid) if self.kernel.computes_mean else self.mask
        return _with_mean_where_all_is_masked(output, values, hidden_by)

    def _on_shards(self, query: Any, key: Any, value: Any, bias: Any, mask: AttentionMask, num_keys: int) -> jax.Array:
        """Computes attention on each device. Keys beyond `num_keys` are padding, which no query may see."""
        shards, exchange = self.shards, self.exchange
        by_rows = by_pairs = replace(shards, sequence=())  # how arrays with a value for each query and key are sharded
        if exchange is not None:
            by_pairs = shards if exchange.keeps_positions else replace(by_rows, heads=shards.heads + shards.sequence)
        specs: tuple[Any, ...] = (
            *(shards.spec(tensor, heads_dim=2, sequence_dim=1) for tensor in (query, key, value)),
            None if bias is None else by_pairs.spec(bias, 1, 2),
            replace(
                jax.tree.map(by_rows.spec, replace(mask, dense=None)),
                dense=None if mask.dense is None else by_pairs.spec(mask.dense, 1, 2),
            ),
        )
        # Devices compute with other rows, heads and positions. The gradient of what they share is the sum of theirs.
        axes = shards.batch + shards.heads + shards.sequence
        summed_axes = [tuple(name for name in axes if name not in axis_names(each or ())) for each in specs[:4]]
        head_axes = shards.heads if set(shards.heads) - set(axis_names(specs[1])) else ()
        fraction = mask.visible_fraction(query.shape[1], num_keys)

        def on_device(query, key, value, bias, mask):
            if head_axes:
                key, value = (self._heads_of(query, tensor, head_axes) for tensor in (key, value))
            options: dict[str, Any] = {}
            if exchange is not None:
                runs, heads = exchange.query_runs(query.shape[1]), query.shape[2]
                query = query if exchange.keeps_positions else checkpoint_name(exchange.queries(query), KEPT)
                key, value = (exchange.keys(tensor, heads)[:, :num_keys] for tensor in (key, value))
                if runs is not None:
                    options["runs"], mask = runs, mask.at(runs.positions())
            with jax.named_scope(f"{KERNEL_SCOPE}{fraction:.6f}"):
                output = self.kernel.compute(
                    query, key, value, bias, mask, scale=self.scale, soft_cap=self.soft_cap, **options
                )
            return output if exchange is None else exchange.output(output)

        function = on_device
        if exchange is not None and exchange.groups > 1:
            # The backward pass gathers keys and values again, in place of keeping them.
            function = jax.checkpoint(on_device, policy=jax.checkpoint_policies.save_only_these_names(KEPT))
        return call_per_device(function, shards.mesh, (query, key, value, bias, mask), specs, specs[0], summed_axes)

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
    seen = mask.sees_a_key(output.shape[1], value.shape[1])
    if seen is None:
        return output
    mean = value.mean(axis=1, keepdims=True, dtype=jnp.float32).astype(output.dtype)
    mean = jnp.repeat(mean, output.shape[2] // mean.shape[2], axis=2)
    return jnp.where(seen[:, :, None, None], output, mean)
