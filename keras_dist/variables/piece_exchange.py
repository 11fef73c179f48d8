"""Changes any layout into any other one on the same devices, in any order, by pieces of shards that are sent in rounds.

Both layouts are cut into equal pieces, of which each device is sent those that it lacks. In a round, a device sends one
piece and receives one, by a collective-permute. The bytes are the fewest possible, but the program grows with the
number of pieces.

Example: rows 0 to 3 are on devices A, B, C and D. Then A and D need rows 0 and 1, B and C rows 2 and 3. A piece is a
row. A lacks row 1, B rows 2 and 3, C row 3, D rows 0 and 1. Each row has one holder, and there are two rounds, such as
A to D, B to A, C to B and D to C, and then B to D and D to B.
"""

import collections
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from keras_dist.variables.lazy_tensor import Bounds, shape_of

Message = tuple[int, int, tuple[int, ...]]  # a sender and a receiver, by their positions, and a piece
_MAX_PIECES = 64


def piece_exchange(held: Sequence[Bounds], needed: Sequence[Bounds]) -> Callable[[jax.Array], jax.Array] | None:
    """Returns a function of a shard, for `jax.shard_map` over a mesh with one axis, "device".

    Args:
        held: The bounds of the shard of each device before, all of one shape.
        needed: Those after.

    Returns:
        None if a device needs more than 64 pieces.
    """
    size = [math.gcd(*itertools.chain(*ends)) for ends in zip(*held, *needed, strict=True)]
    if math.prod(shape_of(needed[0])) > _MAX_PIECES * math.prod(size):
        return None
    before, after = ([_pieces(bounds, size) for bounds in each] for each in (held, needed))
    rounds = _rounds(_messages(before, after))
    # Where each device has pieces: among its own, and then among those that it receives.
    places = [{piece: index for index, piece in enumerate(pieces)} for pieces in before]
    sent = [[0] * len(before) for _ in rounds]
    for number, messages in enumerate(rounds):
        for sender, receiver, piece in messages:
            sent[number][sender] = places[sender][piece]
            places[receiver][piece] = len(before[receiver]) + number
    order = [[places[device][piece] for piece in pieces] for device, pieces in enumerate(after)]

    def exchange(shard: jax.Array) -> jax.Array:
        device = lax.axis_index("device")
        own = _split(shard, size)
        received = [
            lax.ppermute(own[jnp.array(indices)[device]], "device", [message[:2] for message in messages])[None]
            for indices, messages in zip(sent, rounds, strict=True)
        ]
        return _joined(jnp.concatenate([own, *received])[jnp.array(order)[device]], shape_of(needed[0]))

    return exchange


def _pieces(bounds: Bounds, size: Sequence[int]) -> list[tuple[int, ...]]:
    ranges = [range(start // length, end // length) for (start, end), length in zip(bounds, size, strict=True)]
    return list(itertools.product(*ranges))


def _messages(before: Sequence[list], after: Sequence[list]) -> list[Message]:
    """Returns which device sends which piece to which other one, such that all send about equally many."""
    holders, load = collections.defaultdict(list), collections.Counter()
    for device, pieces in enumerate(before):
        for piece in pieces:
            holders[piece].append(device)
    messages = []
    for receiver, pieces in enumerate(after):
        for piece in pieces:
            if receiver not in holders[piece]:
                sender = min(holders[piece], key=load.__getitem__)
                load[sender] += 1
                messages.append((sender, receiver, piece))
    return messages


def _rounds(messages: Sequence[Message]) -> list[list[Message]]:
    """Distributes messages to rounds, in each of which a device sends at most one and receives at most one.

    There are as many rounds as a device has messages at most. This colors the edges of a bipartite graph, as in the
    proof of Kőnig's theorem: where a round has no room at one end of a message, the one there moves to another round,
    and so on.
    """
    counts = collections.Counter((end, message[end]) for message in messages for end in (0, 1))
    rounds: list[dict[tuple[int, Any], Message]] = [{} for _ in range(max(counts.values(), default=0))]
    for message in messages:
        here, there = (next(each for each in rounds if (end, message[end]) not in each) for end in (0, 1))
        moved, end = message, 1
        while moved is not None:
            displaced = here.get((end, moved[end]))
            here[0, moved[0]] = here[1, moved[1]] = moved
            if displaced is not None:
                del here[1 - end, displaced[1 - end]]
            moved, here, there, end = displaced, there, here, 1 - end
    return [[message for (end, _), message in each.items() if end == 0] for each in rounds]


def _split(shard: jax.Array, size: Sequence[int]) -> jax.Array:
    """Returns the pieces of a shard in the order of `_pieces`, stacked."""
    grid = [(length // part, part) for length, part in zip(shard.shape, size, strict=True)]
    rank = len(grid)
    cut = shard.reshape([*itertools.chain(*grid)])
    return cut.transpose([*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]).reshape(-1, *size)


def _joined(pieces: jax.Array, shape: Sequence[int]) -> jax.Array:
    rank, size = len(shape), pieces.shape[1:]
    grid = pieces.reshape([length // part for length, part in zip(shape, size, strict=True)] + [*size])
    return grid.transpose([*itertools.chain(*((dim, rank + dim) for dim in range(rank)))]).reshape(shape)
