"""The dims of a program's tensors as nodes of a graph, and what must be communicated where a node is sharded."""

from collections.abc import Sequence
from typing import Any, NamedTuple

Dims = tuple[int | None, ...]  # for each dim of a tensor its node, None where it cannot be sharded


class Value(NamedTuple):
    """A tensor of a program.

    Attributes:
        dims: the nodes of its dims.
        is_trained: whether it depends on what is differentiated.
        source: the variable that it holds the numbers of, in another order perhaps; None where it is none.
    """

    dims: Dims
    is_trained: bool
    source: Any = None


class Tagged(NamedTuple):
    """A value of a program that has a name.

    Attributes:
        name: its name.
        dims: the nodes of its dims.
        shape: its shape.
        source: what tells it from others; a copy has that of what it is copied from.
    """

    name: str
    dims: Dims
    shape: tuple[int, ...]
    source: Any


class Flow:
    """The dims of a program as nodes: dims that are sharded together, if one of them is, have one node.

    Args:
        parts: into how many parts a dim is to be cut. Dims that this does not divide have no node.

    Attributes:
        inputs: the dims of each input of the program.
        tagged: each value that `jax.ad_checkpoint.checkpoint_name` names in it.
        factors: the variables that are multiplied as matrices, or kernels of convolutions.
        tensors: the dims of all tensors of the program.
        slid_over: nodes that windows slide over (of convolutions, poolings), with the rank of the tensor that has them.
    """

    def __init__(self, parts: int):
        self.parts = parts
        self.inputs: list[Dims] = []
        self.tagged: list[Tagged] = []
        self.factors: set[Any] = set()
        self.slid_over: set[tuple[int | None, int]] = set()
        self._parents: list[int] = []
        self._sums: dict[tuple[int, Any], float] = {}
        self._moves: dict[tuple[int, Any], float] = {}
        self.tensors: set[Dims] = set()

    def nodes(self, dims: Dims) -> Dims:
        """Returns the dims of a tensor, each as the node that stands for all that are one with it."""
        return tuple(None if node is None else self._root(node) for node in dims)

    def sums(self) -> dict[int, float]:
        """Returns for each node the bytes that are all-reduced, forward and backward, where it is sharded."""
        return self._by_node(self._sums)

    def moves(self) -> dict[int, float]:
        """Returns for each node the bytes that are gathered besides, where it is sharded."""
        return self._by_node(self._moves)

    def neighbours(self) -> dict[int, set[int]]:
        """Returns for each node those of the other dims of the tensors that have it: only one of them is sharded."""
        found: dict[int, set[int]] = {}
        for dims in self.tensors:
            nodes = {node for node in self.nodes(dims) if node is not None}
            for node in nodes:
                found.setdefault(node, set()).update(nodes - {node})
        return found

    # What follows is for the reader.

    def fresh(self, shape: Sequence[int]) -> Dims:
        """Returns the dims of a tensor that comes from nothing."""
        dims: list[int | None] = []
        for size in shape:
            divides = size > 1 and size % self.parts == 0
            dims.append(len(self._parents) if divides else None)
            if divides:
                self._parents.append(len(self._parents))
        return tuple(dims)

    def join(self, one: int | None, other: int | None) -> None:
        """Makes two nodes one."""
        if one is not None and other is not None:
            self._parents[self._root(one)] = self._root(other)

    def sum_up(self, node: int | None, what: Any, amount: float) -> None:
        """Notes that where a node is sharded something is all-reduced, once however often it is noted."""
        if node is not None:
            self._sums[node, what] = max(amount, self._sums.get((node, what), 0))

    def move(self, node: int | None, what: Any, amount: float) -> None:
        """Notes that where a node is sharded something is gathered."""
        if node is not None:
            self._moves[node, what] = amount

    def _root(self, node: int) -> int:
        while self._parents[node] != node:
            self._parents[node] = node = self._parents[self._parents[node]]
        return node

    def _by_node(self, amounts: dict[tuple[int, Any], float]) -> dict[int, float]:
        once: dict[tuple[int, Any], float] = {}
        for (node, what), amount in amounts.items():
            once[self._root(node), what] = max(amount, once.get((self._root(node), what), 0))
        by_node: dict[int, float] = {}
        for (node, _), amount in once.items():
            by_node[node] = by_node.get(node, 0) + amount
        return by_node
