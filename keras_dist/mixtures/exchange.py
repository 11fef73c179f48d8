"""Sends rows to the devices that have their experts, and what these compute of them back.

Each of n devices has E / n experts, and R rows sorted by expert, so those for a device follow each other. All devices
know how many rows each has for each expert, and from that alone where every row comes from and goes to. A device takes
its arrivals in the order of their sources, in rounds of a full buffer. It needs one round if it is sent at most a
quarter more than the mean. Others have a buffer for a quarter of the mean, so that what they need fits in the memory
of round 0. See `rounds.py` for what they cost.

Worked example: device 0 has experts 0 and 1, and buffers of 4 rows and then 2. Two devices send it 3 rows each.

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

from keras_dist.mixtures.rounds import in_extra_rounds

Form = Literal["ragged", "equal"]
"""How rows are sent: as they are (TPU, GPU), or in slices that are padded to one size (CPU, which has no other way)."""

_TILE = 128  # of rows, in which grouped products compute
# A TPU pads each row of a ragged exchange to 128 numbers of 4 bytes. To gather those of all devices takes less for a
# few bytes a row, such as gates.
_MIN_ROW_BYTES = 512
_AS_THEY_ARE = jax.tree_util.Partial(lambda results: results)


def buffer_rows(num_rows: int, num_devices: int) -> int:
    """Returns how many rows a device takes in round 0: a quarter more than the mean, in whole tiles."""
    return _in_tiles(-(-5 * num_rows // 4), num_devices * num_rows)


def _in_tiles(num_rows: int, most: int) -> int:
    return min(num_rows + -num_rows % _TILE, most)


def computed_by_exchange(
    function: Callable[[Sequence[jax.Array], Any, jax.Array], jax.Array],
    rows: Callable[[], Sequence[jax.Array]],
    weights: Any,
    sizes: jax.Array,
    axes: tuple[str, ...],
    form: Form,
    collect: Callable[[jax.Array], jax.Array] = _AS_THEY_ARE,
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
        rows: A `jax.tree_util.Partial` that returns what this device knows of its rows, floating point arrays
            (R, ...), sorted by expert. The backward pass keeps its arguments, which may have fewer bytes than the rows.
        weights: Weights of this device's experts, a pytree of floating point arrays.
        sizes: Number of rows of each expert (E,), int32. Rows beyond their sum are not sent, and have no results.
        axes: Axes of the mesh over which experts are sharded, major to minor. Device i of n along them has those from
            i E / n on.
        form: How rows are sent.
        collect: A `jax.tree_util.Partial`, what to return of the results (R, ...), in the order of `rows`. It is linear
            in them. The backward pass keeps gradients of what it returns in place of those of the results.
    """
    num_devices = jax.lax.axis_size(axes)
    exchange = _Exchange.of(axes, form, jax.eval_shape(rows)[0].shape[0])
    counts = jax.lax.all_gather(sizes, axes).reshape(num_devices, num_devices, -1)
    return _computed(function, exchange, rows, weights, counts, collect)


class _Plan(NamedTuple):
    """What is sent in a round. Matrices have a row for each source, and a column for each device it sends to."""

    starts: jax.Array  # (n, n), the first row, of those of the source
    numbers: jax.Array  # (n, n), how many
    places: jax.Array  # (n, n), where the first one is put in the buffer of the device
    order: jax.Array  # (B,), of each row of this device, sorted by expert, its place in the buffer
    inverse: jax.Array  # (B,), of each place in the buffer its row
    sizes: jax.Array  # (E / n,), how many rows each expert of this device is sent


class _Exchange(NamedTuple):
    """What is known of an exchange when it is traced."""

    axes: tuple[str, ...]
    form: Form
    num_rows: int  # of a device before the exchange, R
    first: int  # rows that a device takes in round 0; of one source, if slices have equal sizes
    further: int  # and in each other round

    @classmethod
    def of(cls, axes: tuple[str, ...], form: Form, num_rows: int) -> "_Exchange":
        num_devices = jax.lax.axis_size(axes)
        first = buffer_rows(num_rows, num_devices)
        further = _in_tiles(-(-num_rows // 4), first)
        parts = 1 if form == "ragged" else num_devices
        return cls(axes, form, num_rows, -(-first // parts), -(-further // parts))

    def num_rounds(self, counts: jax.Array) -> jax.Array:
        """Returns how many rounds the device that is sent most needs, at least 1."""
        numbers = counts.sum(2, dtype=counts.dtype)
        most = (numbers.sum(0) if self.form == "ragged" else numbers).max()
        return (1 + jnp.maximum(-(-(most - self.first) // self.further), 0)).astype("int32")

    def plan(self, counts: jax.Array, number: jax.Array | None = None) -> _Plan:
        """Returns what is sent in a round, the first one or another.

        `counts` (n, n, E / n) are the rows that devices have for the experts of devices.
        """
        start, size = (0, self.first) if number is None else (self.first + (number - 1) * self.further, self.further)
        numbers, device = counts.sum(2, dtype=counts.dtype), jax.lax.axis_index(self.axes)
        firsts = jnp.cumsum(numbers, 1) - numbers  # where the rows for a device begin
        if self.form == "ragged":
            arrivals, base, buffer = jnp.cumsum(numbers, 0) - numbers, 0, size
        else:
            arrivals, base, buffer = 0, size * np.arange(len(counts), dtype="int32")[:, None], size * len(counts)
        begins = jnp.clip(start - arrivals, 0, numbers)
        sent = jnp.clip(start + size - arrivals, 0, numbers) - begins
        places = jnp.where(sent > 0, base + arrivals + begins - start, 0)
        # Of each source and expert of this device: where its rows are in the buffer, and where sorted by expert.
        ends = jnp.cumsum(counts[:, device], 1)
        begin, end = (each[:, device, None] for each in (begins, begins + sent))
        first = jnp.clip(ends - counts[:, device], begin, end)
        lengths = jnp.clip(ends, begin, end) - first
        in_buffer = places[:, device, None] + first - begin
        by_expert = (jnp.cumsum(lengths.T) - lengths.T.reshape(-1)).reshape(lengths.T.shape).T
        order = _moved(buffer, in_buffer, by_expert, lengths)
        inverse = _moved(buffer, by_expert, in_buffer, lengths)
        return _Plan(firsts + begins, sent, places, order, inverse, lengths.sum(0, dtype=lengths.dtype))

    def in_extra_rounds(
        self, add_round: Callable[[_Plan, Any, Any], Any], first: Any, counts: jax.Array, arguments: Any
    ) -> Any:
        """Returns the total of all rounds, as `rounds.in_extra_rounds`; a round is passed its plan and arguments."""

        def of_number(number, total):
            # XLA moves what is the same in all rounds out of the loop, where balanced routing would have to pay for it.
            number, here = jax.lax.optimization_barrier((number, arguments))
            return add_round(self.plan(counts, number), here, total)

        return in_extra_rounds(of_number, first, self.num_rounds(counts))

    def dispatched(self, rows: Any, plan: _Plan) -> Any:
        """Returns the rows that this device is sent, sorted by expert, and zeros, of a pytree of rows."""
        return jax.tree.map(lambda each: _at(self._send(each, plan), plan.order, 0), rows)

    def returned(self, rows: Any, plan: _Plan, others: Any = None) -> Any:
        """Sends rows back to where they come from, and puts them among those of other rounds, in a pytree each."""
        back = plan._replace(starts=plan.places.T, numbers=plan.numbers.T, places=plan.starts.T)
        rows = jax.tree.map(lambda each: _at(each, plan.inverse), rows)
        if others is None:
            return jax.tree.map(lambda each: self._send(each, back, is_back=True), rows)
        return jax.tree.map(lambda *each: self._send(each[0], back, each[1], is_back=True), rows, others)

    def _send(self, rows: jax.Array, plan: _Plan, others: jax.Array | None = None, is_back: bool = False) -> jax.Array:
        """Sends slices of rows, and returns `others` with those that arrive; without them the rest may be anything."""
        device, shape, buffer = jax.lax.axis_index(self.axes), rows.shape[1:], len(plan.order)
        size, index = self.num_rows if is_back else buffer, np.arange(len(plan.starts), dtype="int32")
        sent, arrivals = (plan.starts[device], plan.numbers[device]), (plan.places[:, device], plan.numbers[:, device])
        if self.form == "equal":
            lane = buffer // len(index)
            padded = _at(rows, _moved(buffer, sent[0], lane * index, sent[1]))
            arrived = jax.lax.all_to_all(padded.reshape(-1, lane, *shape), self.axes, 0, 0)
            return _at(arrived.reshape(-1, *shape), _moved(size, lane * index, *arrivals), others)
        if len(index) * math.prod(shape) * rows.dtype.itemsize <= _MIN_ROW_BYTES:
            gathered = jax.lax.all_gather(rows, self.axes, tiled=True)
            return _at(gathered, _moved(size, len(rows) * index + plan.starts[:, device], *arrivals), others)
        if others is None:
            # Any rows would do. To fill memory with a constant takes TPUs longer than the exchange, and left as it is,
            # XLA would reserve it from long before on.
            others = rows.at[jnp.minimum(jnp.arange(size), len(rows) - 1)].get(mode="clip")
        sizes = plan.places[device], plan.numbers[:, device]
        return jax.lax.ragged_all_to_all(rows, others, *sent, *sizes, axis_name=self.axes)


_NOWHERE = np.iinfo("int32").max


def _moved(size: int, sources: Any, targets: Any, lengths: jax.Array) -> jax.Array:
    """Returns, for slices that are moved from `sources` to `targets`, from where each of `size` places is filled."""
    sources, targets, lengths = (jnp.ravel(each) for each in (sources, targets, lengths))
    place = jnp.arange(size, dtype="int32")[:, None]
    is_here = (place >= targets) & (place < targets + lengths)
    moved = place[:, 0] + jnp.where(is_here, sources - targets, 0).sum(1, dtype="int32")
    return jnp.where(is_here.any(1), moved, _NOWHERE)


def _at(rows: jax.Array, indices: jax.Array, others: jax.Array | int | None = None) -> jax.Array:
    """Returns rows at indices, and for those of nowhere `others`, or anything."""
    found = rows.at[indices].get(mode="clip")
    is_here = (indices != _NOWHERE).reshape(-1, *[1] * (rows.ndim - 1))
    return found if others is None else jnp.where(is_here, found, others)


# Rows of extra rounds are put where they belong, among those of round 0. Only gradients of weights are summed.


def _results(function, exchange, weights):
    """Returns a function that adds the results of a round."""

    def add_round(plan, rows, results):
        received = exchange.dispatched(rows(), plan)
        return exchange.returned(function(received, weights, plan.sizes), plan, results)

    return add_round


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _computed(function, exchange, rows, weights, counts, collect):
    add_round = _results(function, exchange, weights)
    return collect(exchange.in_extra_rounds(add_round, add_round(exchange.plan(counts), rows, None), counts, rows))


def _forward(function, exchange, rows, weights, counts, collect):
    plan = exchange.plan(counts)
    received = exchange.dispatched(rows(), plan)
    results, pull = jax.vjp(lambda *each: function(*each, plan.sizes), received, weights)
    first = exchange.returned(results, plan)
    results = exchange.in_extra_rounds(_results(function, exchange, weights), first, counts, rows)
    collected, spread = jax.vjp(lambda results: collect(results), results)
    return collected, (plan, pull, rows, weights, counts, spread)


def _backward(function, exchange, saved, cotangent):
    plan, pull, rows, weights, counts, spread = saved

    def add_round(plan, arguments, gradients):
        rows, spread, cotangent = arguments
        received = exchange.dispatched(rows(), plan)
        _, pull = jax.vjp(lambda *each: function(*each, plan.sizes), received, weights)
        of_received, of_weights = pull(exchange.dispatched(*spread(cotangent), plan))
        return exchange.returned(of_received, plan, gradients[0]), jax.tree.map(jnp.add, gradients[1], of_weights)

    of_received, of_weights = pull(exchange.dispatched(*spread(cotangent), plan))
    first = exchange.returned(of_received, plan), of_weights
    of_rows, of_weights = exchange.in_extra_rounds(add_round, first, counts, (rows, spread, cotangent))
    return *jax.vjp(lambda rows: rows(), rows)[1](of_rows), of_weights, None, None


_computed.defvjp(_forward, _backward)
