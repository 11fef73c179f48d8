"""Exchanges operands of attention among devices that hold shards of the same sequences (context parallelism).

A device holds some positions of all its heads. To compute attention it needs all keys and values that its queries see.
There are three ways, of which the one that sends the fewest bytes is taken:

* all-to-all (Ulysses): a device gets all positions of some heads, and gives away the other heads.
* all-gather: a device keeps its queries and gets all keys and values.
* both: groups of devices divide the heads among their members, and gather the keys and values of the other groups.

Under a causal mask later queries see more keys. With an all-to-all over all devices everyone has all positions, and so
the same work. A group of an even number of devices consists of early and late ones. Where queries are not exchanged,
the device at place i from the start swaps half of its queries with the one at place i from the end.

Example: four devices hold the positions 0-7, two each. In groups of two, devices 0 and 3 divide the heads of positions
0, 1, 6, 7, and devices 1 and 2 those of positions 2, 3, 4, 5. Their queries see 1 + 2 + 7 + 8 and 3 + 4 + 5 + 6 keys.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023; Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2; Fang
and Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI", 2024.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from keras_dist.attention.splash_blocks import QueryRuns

ALL_TO_ALL, ALL_GATHER = "all_to_all", "all_gather"
EXCHANGES = (ALL_TO_ALL, ALL_GATHER)


@dataclass(frozen=True)
class Exchange:
    """How devices that share sequences exchange queries, keys and values."""

    axes: tuple[str, ...]  # of the mesh, over which sequences are sharded
    devices: int  # number of devices along them
    members: int  # number of devices of a group, which divide heads among them; 1 for all-gather alone
    swaps_queries: bool = False  # whether devices without groups swap halves of their queries to have the same work

    @property
    def groups(self) -> int:
        return self.devices // self.members

    @property
    def keeps_positions(self) -> bool:
        """Whether a device's queries are those of the positions that it holds, in their order."""
        return self.members == 1 and not self.swaps_queries

    def __str__(self) -> str:
        over = " and ".join(f"'{name}'" for name in self.axes)
        if self.groups == 1:
            return f"all-to-all over {over}"
        if self.members == 1:
            return f"all-gather over {over}"
        return f"all-to-all and all-gather over {over}, {self.members} x {self.groups}"

    def key_heads(self, num_heads: int, num_key_heads: int) -> int:
        """Returns how many key heads the group divides: repeated so that each member has those of its query heads."""
        if num_key_heads % self.members == 0:
            return num_key_heads
        return self.members if self.members % num_key_heads == 0 else num_heads

    def elements_sent(self, queries: tuple[int, int], keys: tuple[int, int]) -> float:
        """Returns how many vectors a device sends in a step, per row: of queries and outputs, and of keys and values.

        `queries` and `keys` are numbers of positions of all devices together, and of heads of one.
        """
        (num_queries, heads), (num_keys, key_heads) = queries, keys
        # The device in the middle of an odd number of them has nobody to swap with.
        part = (1 - self.devices % 2 / self.devices) / 2 if self.swaps_queries else 1 - 1 / self.members
        query_elements = num_queries / self.devices * heads * part
        key_elements = num_keys * self.key_heads(heads, key_heads) / self.members * (1 - 1 / self.devices)
        times_sent = 4 if self.groups == 1 else 6  # the backward pass gathers keys and values again
        return 4 * query_elements + times_sent * key_elements

    def padded_length(self, length: int, block: int) -> int:
        """Returns the least number of positions that devices can share in runs of multiples of a block."""
        multiple = self.devices * (1 if self.groups == 1 else 2 * block if self.swaps_queries else block)
        return math.ceil(length / multiple) * multiple

    @property
    def devices_of_groups(self) -> list[list[int]]:
        """The devices of each group: in turn one from the start and from the end, so that groups are balanced."""
        devices = np.arange(self.devices).reshape(self.members, self.groups)
        devices[1::2] = devices[1::2, ::-1]
        return devices.T.tolist()

    def starts(self, length: int) -> tuple[np.ndarray, int]:
        """Returns where the runs of consecutive queries of each group begin, (groups, runs), and the length of a run.

        The starts of a group ascend. `length` is the number of positions of one device.
        """
        if self.swaps_queries:
            first, half = 2 * np.arange(self.devices), length // 2
            return np.stack([first, 2 * self.devices - 1 - first], axis=1) * half, half
        return np.asarray(self.devices_of_groups) * length, length

    def query_runs(self, length: int) -> QueryRuns | None:
        """Returns the positions of this device's queries, None if they are all. `length` is as in `starts`."""
        if self.groups == 1:
            return None
        starts, run = self.starts(length)
        group_of_device = np.argsort(np.ravel(self.devices_of_groups)) // self.members
        return QueryRuns(starts, run, jnp.asarray(group_of_device)[jax.lax.axis_index(self.axes)])

    def queries(self, tensor: jax.Array) -> jax.Array:
        """Exchanges queries (B, T, N, H), or the gradient of the output."""
        return self._swapped(tensor) if self.swaps_queries else self._all_to_all(tensor, 2, 1)

    def output(self, tensor: jax.Array) -> jax.Array:
        """Undoes the exchange of queries for the output."""
        return self._swapped(tensor) if self.swaps_queries else self._all_to_all(tensor, 1, 2)

    def keys(self, tensor: jax.Array, num_heads: int) -> jax.Array:
        """Returns all positions of the key or value heads (B, S, K, H) for this device's query heads."""
        repeats = self.key_heads(num_heads, tensor.shape[2]) // tensor.shape[2]
        if repeats > 1:
            tensor = jnp.repeat(tensor, repeats, axis=2)
        length = tensor.shape[1]
        tensor = self._all_to_all(tensor, 2, 1)
        if self.groups == 1:
            return tensor
        same_member = [list(members) for members in zip(*self.devices_of_groups, strict=True)]
        gathered = jax.lax.all_gather(tensor, self.axes, axis=1, axis_index_groups=same_member)
        runs = gathered.reshape(tensor.shape[0], self.groups, self.members, length, *tensor.shape[2:])
        in_order = [jnp.flip(runs[:, :, m], 1) if m % 2 else runs[:, :, m] for m in range(self.members)]
        return jnp.concatenate(in_order, axis=1).reshape(tensor.shape[0], -1, *tensor.shape[2:])

    def _all_to_all(self, tensor: jax.Array, split_dim: int, concat_dim: int) -> jax.Array:
        if self.members == 1:
            return tensor
        groups = None if self.groups == 1 else self.devices_of_groups
        return jax.lax.all_to_all(tensor, self.axes, split_dim, concat_dim, axis_index_groups=groups, tiled=True)

    def _swapped(self, tensor: jax.Array) -> jax.Array:
        """Swaps the second half of the positions with the device at the same place from the other end."""
        first, second = jnp.split(tensor, 2, axis=1)
        pairs = [(device, self.devices - 1 - device) for device in range(self.devices)]
        return jnp.concatenate([first, jax.lax.ppermute(second, self.axes, pairs)], axis=1)


def choose_exchange(
    axes: Sequence[str],
    devices: int,
    queries: tuple[int, int],
    keys: tuple[int, int],
    is_balanced: bool,
    is_grouped: bool = True,
    max_pairs: float = math.inf,
    name: str | None = None,
) -> Exchange:
    """Returns the exchange that sends the fewest bytes, or the one that is named.

    `queries` and `keys` are as in `Exchange.elements_sent`. `is_balanced` is whether all queries see about as many
    keys, `is_grouped` whether some devices may divide the heads among them and not only all devices, and `max_pairs`
    how many pairs of a query and a key one device can compute with. Raises ValueError if an all-to-all is asked for,
    but the devices do not divide the heads.
    """
    axes, heads = tuple(axes), queries[1]
    all_to_all, gather = Exchange(axes, devices, devices), Exchange(axes, devices, 1, swaps_queries=not is_balanced)
    if name == ALL_GATHER:
        return gather
    if name == ALL_TO_ALL and heads % devices:
        raise ValueError(
            f"sequence_exchange='all_to_all' divides the heads of attention among the {devices} devices along "
            f"{list(axes)}, but each has {heads} query heads, which {devices} does not divide. Use sequence_exchange="
            "None, which combines it with an all-gather, or another size of the axis."
        )
    if name == ALL_TO_ALL:
        return all_to_all
    grouped = [Exchange(axes, devices, size) for size in range(2, devices, 2) if devices % size == 0 and is_grouped]
    pairs = queries[0] / devices * keys[0]
    candidates = [  # of those that send equally much, the first: it has the fewest collectives
        exchange
        for exchange in (all_to_all, gather, *grouped)
        if exchange is gather or (heads % exchange.members == 0 and pairs * exchange.members <= max_pairs)
    ]
    return min(candidates, key=lambda exchange: exchange.elements_sent(queries, keys))
