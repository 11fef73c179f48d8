"""Sends rows to the devices that have their experts, and what these compute of them back.

Each of n devices has E / n experts, and R rows sorted by expert, so those for a device follow each other. All devices
know how many rows each has for each expert, and from that alone where every row comes from and goes to. A device takes
its arrivals in the order of their sources, in rounds of a full buffer. It needs one round if it is sent at most a
quarter more than the mean. See `rounds.py` for what more of them cost.

Worked example: device 0 has experts 0 and 1, and buffers of 4 rows. Two devices send it 3 rows each.

    rows for experts 0, 1    device 0: 1, 2     device 1: 2, 1
    arrivals                 a0 a1 a1           b0 b0 b1
    round 0                  a0 a1 a1 b0, sorted by expert: a0 b0 a1 a1
    round 1                  b0 b1
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from keras_dist.mixtures.rounds import summed_in_rounds

Form = Literal["ragged", "equal"]
"""How rows are sent: as they are (TPU, GPU), or in slices that are padded to one size (CPU, which has no other way)."""

_TILE = 128  # of rows, in which grouped products compute
# A TPU pads each row of a ragged exchange to 128 numbers of 4 bytes. To gather those of all devices takes less for a
# few bytes a row, such as gates.
_MIN_ROW_BYTES = 512


def buffer_rows(num_rows: int, num_devices: int) -> int:
    """Returns how many rows a device takes in a round: a quarter more than the mean, in whole tiles."""
    wanted = -(-5 * num_rows // 4)
    return min(wanted + -wanted % _TILE, num_devices * num_rows)


def computed_by_exchange(
    function: Callable[[Sequence[jax.Array], Any, jax.Array], jax.Array],
    rows: Sequence[jax.Array],
    weights: Any,
    sizes: jax.Array,
    axes: tuple[str, ...],
    form: Form,
) -> jax.Array:
    """Computes rows on the devices that have the weights of their experts.

    It is called inside of a `jax.shard_map` over the axes. It is exact under any routing: experts may have no rows, or
    one all of them.

    Args:
        function: What experts compute of rows. It is passed rows (B, ...) sorted by expert, one array for each of
            `rows`, the weights, and the numbers of rows of this device's experts (E / n,), int32. It returns (B, ...),
            whose rows beyond the sum of these numbers may hold anything; those that it is passed are zeros. It may not
            use traced values but those that it is passed, nor collectives over axes along which devices have other
            tokens.
        rows: What this device knows of its rows, floating point arrays (R, ...), sorted by expert.
        weights: Weights of this device's experts, a pytree of floating point arrays.
        sizes: Number of rows of each expert (E,), int32, that sum to R.
        axes: Axes of the mesh over which experts are sharded, major to minor. Device i of n along them has those from
            i E / n on.
        form: How rows are sent.

    Returns:
        The results (R, ...), in the order of `rows`.
    """
    num_devices = jax.lax.axis_size(axes)
    exchange = _Exchange.of(axes, form, rows[0].shape[0])
    counts = jax.lax.all_gather(sizes, axes).reshape(num_devices, num_devices, -1)

    def of_round(number, arguments, counts):
        rows, weights = arguments
        plan, sizes = exchange.plan(number, counts)
        received = [_dispatched(each, plan, exchange) for each in rows]
        return _returned(function(received, weights, sizes), plan, exchange)

    return summed_in_rounds(of_round, exchange.num_rounds(counts), (tuple(rows), weights), counts)


class _Plan(NamedTuple):
    """What is sent in a round. Matrices have a row for each source, and a column for each device it sends to."""

    starts: jax.Array  # (n, n), the first row, of those of the source
    numbers: jax.Array  # (n, n), how many
    places: jax.Array  # (n, n), where the first one is put in the buffer of the device
    order: jax.Array  # (B,), of each row of this device, sorted by expert, its place in the buffer
    inverse: jax.Array  # (B,), of each place in the buffer its row


class _Exchange(NamedTuple):
    """What is known of an exchange when it is traced."""

    axes: tuple[str, ...]
    form: Form
    num_rows: int  # of a device before the exchange, R
    buffer: int  # rows that a device takes in a round, B
    lane: int  # rows that it takes of one source in a round, if slices have equal sizes

    @classmethod
    def of(cls, axes: tuple[str, ...], form: Form, num_rows: int) -> "_Exchange":
        num_devices = jax.lax.axis_size(axes)
        buffer = buffer_rows(num_rows, num_devices)
        lane = -(-buffer // num_devices)
        return cls(axes, form, num_rows, buffer if form == "ragged" else num_devices * lane, lane)

    def num_rounds(self, counts: jax.Array) -> jax.Array:
        """Returns how many rounds the device that is sent most needs, at least 1."""
        numbers = counts.sum(2, dtype=counts.dtype)
        most, size = (numbers.sum(0), self.buffer) if self.form == "ragged" else (numbers, self.lane)
        return jnp.maximum(-(-most.max() // size), 1).astype("int32")

    def plan(self, number: jax.Array, counts: jax.Array) -> tuple[_Plan, jax.Array]:
        """Returns what is sent in a round, and how many rows of each expert this device is sent.

        `counts` (n, n, E / n) are the rows that devices have for the experts of devices.
        """
        numbers, device = counts.sum(2, dtype=counts.dtype), jax.lax.axis_index(self.axes)
        firsts = jnp.cumsum(numbers, 1) - numbers  # where the rows for a device begin
        if self.form == "ragged":
            arrivals, base, size = jnp.cumsum(numbers, 0) - numbers, 0, self.buffer
        else:
            arrivals, base, size = 0, self.lane * np.arange(len(counts), dtype="int32")[:, None], self.lane
        begins = jnp.clip(number * size - arrivals, 0, numbers)
        sent = jnp.clip((number + 1) * size - arrivals, 0, numbers) - begins
        places = jnp.where(sent > 0, base + arrivals + begins - number * size, 0)
        # Of each source and expert of this device: where its rows are in the buffer, and where sorted by expert.
        ends = jnp.cumsum(counts[:, device], 1)
        begin, end = (each[:, device, None] for each in (begins, begins + sent))
        first = jnp.clip(ends - counts[:, device], begin, end)
        lengths = jnp.clip(ends, begin, end) - first
        in_buffer = places[:, device, None] + first - begin
        by_expert = (jnp.cumsum(lengths.T) - lengths.T.reshape(-1)).reshape(lengths.T.shape).T
        order = _moved(self.buffer, in_buffer, by_expert, lengths)
        inverse = _moved(self.buffer, by_expert, in_buffer, lengths)
        return _Plan(firsts + begins, sent, places, order, inverse), lengths.sum(0, dtype=lengths.dtype)

    def send(
        self, rows: jax.Array, num_rows: int, starts: jax.Array, numbers: jax.Array, places: jax.Array
    ) -> jax.Array:
        """Sends slices of rows, and returns `num_rows` with those that arrive, and zeros.

        The matrices (n, n) have, by source and device it sends to, where a slice starts, how many rows it has, and
        where it is put.
        """
        device, shape = jax.lax.axis_index(self.axes), rows.shape[1:]
        index, arrivals = np.arange(len(starts), dtype="int32"), (places[:, device], numbers[:, device])
        if self.form == "equal":
            lanes = self.lane * index
            padded = _at(rows, _moved(self.lane * len(index), starts[device], lanes, numbers[device]))
            arrived = jax.lax.all_to_all(padded.reshape(-1, self.lane, *shape), self.axes, 0, 0)
            return _at(arrived.reshape(-1, *shape), _moved(num_rows, lanes, *arrivals))
        if len(index) * math.prod(shape) * rows.dtype.itemsize <= _MIN_ROW_BYTES:
            gathered = jax.lax.all_gather(rows, self.axes, tiled=True)
            return _at(gathered, _moved(num_rows, len(rows) * index + starts[:, device], *arrivals))
        output, sent = jnp.zeros((num_rows, *shape), rows.dtype), (starts[device], numbers[device])
        return jax.lax.ragged_all_to_all(rows, output, *sent, places[device], numbers[:, device], axis_name=self.axes)


_NOWHERE = np.iinfo("int32").max


def _moved(size: int, sources: Any, targets: Any, lengths: jax.Array) -> jax.Array:
    """Returns, for slices that are moved from `sources` to `targets`, from where each of `size` places is filled."""
    sources, targets, lengths = (jnp.ravel(each) for each in (sources, targets, lengths))
    place = jnp.arange(size, dtype="int32")[:, None]
    is_here = (place >= targets) & (place < targets + lengths)
    moved = place[:, 0] + jnp.where(is_here, sources - targets, 0).sum(1, dtype="int32")
    return jnp.where(is_here.any(1), moved, _NOWHERE)


def _at(rows: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns rows at indices, and zeros for those of nowhere."""
    return rows.at[indices].get(mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dispatched(rows, plan, exchange):
    buffer = exchange.send(rows, exchange.buffer, plan.starts, plan.numbers, plan.places)
    return _at(buffer, plan.order)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _returned(rows, plan, exchange):
    buffer = _at(rows, plan.inverse)
    return exchange.send(buffer, exchange.num_rows, plan.places.T, plan.numbers.T, plan.starts.T)


# The gradient of either is the other one.
for _function, _gradient in ((_dispatched, _returned), (_returned, _dispatched)):
    _function.defvjp(
        lambda rows, plan, exchange, function=_function: (function(rows, plan, exchange), plan),
        lambda exchange, plan, cotangent, function=_gradient: (function(cotangent, plan, exchange), None),
    )
