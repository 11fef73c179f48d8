"""Which dims of a program's tensors are sharded together, and what each choice communicates."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Dims = tuple[int | None, ...]  # the node of each dim of a tensor, None for a dim that the axis does not divide


class NamedTensor(NamedTuple):
    """A tensor that the program names with `jax.ad_checkpoint.checkpoint_name`."""

    name: str
    dims: Dims
    shape: tuple[int, ...]
    origin: Any  # the jaxpr variable that its values come from, equal for all reshaped or transposed copies


class DimGraph:
    """The dims of a program's tensors, united into nodes: sharding one dim of a node shards all of them.

    A node is an integer in a union-find structure. Reading a program creates a node for each dim that `axis_size`
    divides, unites the nodes of dims that must be sharded alike, and records for each node the bytes that are
    communicated if it is sharded. The module `jaxpr_dims` has a worked example.
    """

    def __init__(self, axis_size: int, summed_later: Mapping[Any, Any] | None = None):
        self.axis_size = axis_size
        self.summed_later = summed_later or {}  # jaxpr variables, each with the one that is all-reduced in its place
        self.inputs: list[Dims] = []
        self.dims: dict[Any, Dims] = {}  # by jaxpr variable
        self.named_tensors: list[NamedTensor] = []
        self.matmul_operands: set[Any] = set()  # jaxpr variables
        # Nodes that windows of convolutions or poolings slide over, each with the rank of its tensor.
        self.window_dims: set[tuple[int | None, int]] = set()
        # Pairs of nodes: a dim, and one that is computed along it, by windows or a slice for example.
        self.successors: list[tuple[int | None, int | None]] = []
        self.tensors: set[Dims] = set()
        self._parents: list[int] = []
        self._all_reduces: dict[tuple[int, Any], float] = {}
        self._gathers: dict[tuple[int, Any], float] = {}

    def new_dims(self, shape: Sequence[int]) -> Dims:
        return tuple(self._new_node() if size > 1 and size % self.axis_size == 0 else None for size in shape)

    def unite(self, node: int | None, other: int | None) -> None:
        if node is not None and other is not None:
            self._parents[self._root(node)] = self._root(other)

    def find(self, dims: Dims) -> Dims:
        """Returns the representative of each node: equal for dims that are sharded together."""
        return tuple(None if node is None else self._root(node) for node in dims)

    def add_all_reduce(self, node: int | None, tensor: Any, size: float) -> None:
        """Records that sharding a node all-reduces a tensor of `size` bytes; a tensor counts once per node."""
        if node is not None:
            self._all_reduces[node, tensor] = max(size, self._all_reduces.get((node, tensor), 0))

    def add_gather(self, node: int | None, tensor: Any, size: float) -> None:
        if node is not None:
            self._gathers[node, tensor] = size

    def all_reduce_bytes(self) -> dict[int, float]:
        """Returns the bytes that are all-reduced, forward and backward, for each node if it is sharded."""
        return self._bytes_by_node(self._all_reduces)

    def gather_bytes(self) -> dict[int, float]:
        return self._bytes_by_node(self._gathers)

    def conflicts(self) -> dict[int, set[int]]:
        """Returns for each node the other nodes of its tensors: an axis can shard only one dim of a tensor."""
        conflicts: defaultdict[int, set[int]] = defaultdict(set)
        for dims in self.tensors:
            nodes = {node for node in self.find(dims) if node is not None}
            for node in nodes:
                conflicts[node] |= nodes - {node}
        return conflicts

    def _new_node(self) -> int:
        self._parents.append(len(self._parents))
        return self._parents[-1]

    def _root(self, node: int) -> int:
        while self._parents[node] != node:
            self._parents[node] = node = self._parents[self._parents[node]]
        return node

    def _bytes_by_node(self, records: dict[tuple[int, Any], float]) -> dict[int, float]:
        united: defaultdict[tuple[int, Any], float] = defaultdict(float)
        for (node, tensor), size in records.items():
            key = self._root(node), tensor
            united[key] = max(size, united[key])
        by_node: defaultdict[int, float] = defaultdict(float)
        for (node, _), size in united.items():
            by_node[node] += size
        return by_node
