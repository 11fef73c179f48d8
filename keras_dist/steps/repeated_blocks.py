"""The repeated blocks of a model: equal layers of one parent, and equal parts of a functional graph in a row."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras

from keras_dist._keras.model_structure import child_layers, functional_graph, graph_nodes, layers_with_weights


class Part(NamedTuple):
    """Operations of a functional graph that run one after the other."""

    nodes: list
    outputs: list[int]  # ids of the symbolic tensors that they compute for operations of other parts, or for the model
    is_block: bool


class RepeatedBlocks:
    """Finds the repeated blocks of a model.

    A block contains at least two layers with weights. In a functional graph, a block begins and ends where one tensor
    is all that later operations need, apart from inputs of integers and what is computed from inputs without weights,
    such as masks, and apart from what is carried past several blocks, such as the output of an encoder. Several equal
    blocks follow each other: equal operations with weights of equal shapes. Blocks of the same classes may have other
    shapes, such as layers with local and global attention. Elsewhere, a block is a layer whose parent has others of the
    same class with weights of equal shapes; models in a functional graph, such as two towers, are searched for blocks.

    Example: in a stack of `x = x + Dense(64)(Dense(256)(x))`, each sum begins a block.
    """

    def __init__(self, model: keras.Model):
        self.layers: set[int] = set()  # ids of layers that are blocks wherever they are called
        # By the id of a functional graph, its parts in order, if any of them is a block.
        self.parts: dict[int, list[Part]] = {}
        self._visit(model, set())

    def _visit(self, layer: Any, seen: set[int]) -> None:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        graph = functional_graph(layer)
        children, nodes = child_layers(graph), graph_nodes(graph)
        if nodes is not None:
            parts = list(_parts(graph, nodes))
            in_blocks = {id(node.operation) for part in parts if part.is_block for node in part.nodes}
            if in_blocks:
                self.parts[id(graph)] = parts
            children = [child for child in children if id(child) not in in_blocks]
        candidates = [child for child in children if _num_weighted(child) > 1]
        if nodes is not None:
            candidates = [each for each in candidates if not isinstance(each, keras.Model)]
        signatures = [_signature(each) for each in candidates]
        counts = Counter(signatures)
        classes = {_class(each) for each, own in zip(candidates, signatures, strict=True) if counts[own] > 1}
        self.layers |= {id(each) for each in candidates if _class(each) in classes}
        for child in children:
            if id(child) not in self.layers:
                self._visit(child, seen)


def _parts(graph: Any, nodes: Sequence[Any]) -> Iterator[Part]:
    """Yields the parts of a functional graph: blocks, and what is between them."""
    search = _Search(graph, nodes)
    groups = list(search.groups(0, len(nodes), frozenset()))
    classes_of_blocks = {_classes(group[0]) for is_block, group in groups if is_block and len(group) == 1}
    first = 0
    for is_block, group in groups:
        part = list(itertools.chain.from_iterable(group))
        first += len(part)
        outputs = [id(tensor) for node in part for tensor in node.outputs if search.last_use[id(tensor)] >= first]
        # The only layer with global attention is none of several equal blocks.
        yield Part(part, outputs, is_block or _classes(group[0]) in classes_of_blocks)


class _Search:
    """A search for the blocks of a functional graph. Tensors are known by their ids."""

    def __init__(self, graph: Any, nodes: Sequence[Any]):
        self._nodes = nodes
        self.last_use = dict.fromkeys((id(tensor) for node in nodes for tensor in node.outputs), -1)
        self.last_use |= {id(tensor): number for number, node in enumerate(nodes) for tensor in node.input_tensors}
        self.last_use |= {id(tensor): len(nodes) for tensor in graph.outputs}
        # Which operation computes a tensor, of those that depend on weights; inputs with features exist before.
        self._made: dict[int, int] = {}
        for number, node in enumerate(nodes):
            has_weights = isinstance(node.operation, keras.Layer) and node.operation.weights
            if has_weights or any(id(tensor) in self._made for tensor in node.input_tensors):
                self._made.update(dict.fromkeys(map(id, node.outputs), number))
        features = (id(tensor) for tensor in graph.inputs if "float" in tensor.dtype)
        self._made |= {tensor: -1 for tensor in features if tensor in self.last_use}

    def groups(self, start: int, stop: int, carried: frozenset[int]) -> Iterator[tuple[bool, list]]:
        """Yields operations in groups of segments, each with whether it is a block.

        Where no segments repeat, the tensor that lives longest is added to those that are `carried` past the blocks,
        such as the output of an encoder past the blocks of a decoder, or a skip connection.
        """
        for is_block, group in _in_blocks(self._segments(start, stop, carried)):
            end = start + sum(map(len, group))
            inner = [] if is_block else self._inner_groups(start, end, carried)
            yield from inner if any(is_inner for is_inner, _ in inner) else [(is_block, group)]
            start = end

    def _inner_groups(self, start: int, stop: int, carried: frozenset[int]) -> list[tuple[bool, list]]:
        def span(tensor: int) -> int:
            return min(self.last_use[tensor], stop) - max(self._made[tensor], start)

        longest = max((tensor for tensor in self._made if tensor not in carried), key=span, default=None)
        if longest is None or 2 * span(longest) < stop - start or stop - start == 1:
            return []
        return list(self.groups(start, stop, carried | {longest}))

    def _segments(self, start: int, stop: int, carried: frozenset[int]) -> list[list]:
        """Splits operations where later ones need one tensor only of those that depend on weights."""
        made = {tensor: number for tensor, number in self._made.items() if tensor not in carried}
        live = {tensor for tensor, number in made.items() if number < start <= self.last_use[tensor]}
        segments: list[list] = [[]]
        for number in range(start, stop):
            node = self._nodes[number]
            segments[-1].append(node)
            live.update(id(tensor) for tensor in node.outputs if id(tensor) in made)
            live = {tensor for tensor in live if self.last_use[tensor] > number}
            if len(live) == 1 and made[next(iter(live))] >= 0:
                segments.append([])
        return [segment for segment in segments if segment]


def _in_blocks(segments: Sequence[list]) -> Iterator[tuple[bool, list]]:
    """Yields segments in groups, each with whether it is a block: a period of the longest repetition, or a part of it.

    Example: the layers L L G L L G, where L and G are of one class and G has more weights, repeat with a period of 3.
    Each of the 6 is a block.
    """
    start, period, count = _longest_repetition(segments)
    if not count:
        yield from ((False, [segment]) for segment in segments)
        return
    end = start + period * count
    size = 1 if _are_alike(segments[start : start + period]) else period
    yield from _in_blocks(segments[:start])
    yield from ((True, list(segments[at : at + size])) for at in range(start, end, size))
    yield from _in_blocks(segments[end:])


def _are_alike(segments: Sequence[list]) -> bool:
    """Returns whether each segment could be a block, and all have operations of the same classes."""
    has_equal_classes = len({_classes(segment) for segment in segments}) == 1
    return has_equal_classes and all(_num_weighted_in(segment) > 1 for segment in segments)


def _classes(segment: Sequence[Any]) -> tuple:
    """Returns the classes of the operations of a segment."""
    return tuple(_class(node.operation) for node in segment)


def _class(operation: Any) -> Any:
    """Returns the class of an operation. Models of one class may differ, so theirs have shapes."""
    return _signature(operation) if isinstance(operation, keras.Model) else type(operation)


def _longest_repetition(segments: Sequence[list]) -> tuple[int, int, int]:
    """Returns start, period and number of the blocks that cover most layers with weights; the shortest if several do.

    The number is 0 if nothing repeats.

    Example: in the segments A B C B C D, the blocks B C start at 1 with period 2, and there are 2.
    """
    signatures = [tuple(_signature(node.operation) for node in segment) for segment in segments]
    weights = [_num_weighted_in(segment) for segment in segments]
    best, best_cover = (0, 0, 0), 0
    for period in range(1, len(segments) // 2 + 1):
        equal = [signatures[at] == signatures[at + period] for at in range(len(segments) - period)]
        start = 0
        for is_equal, run in itertools.groupby(equal):
            length = len(list(run))
            count = length // period + 1
            cover = sum(weights[start : start + period * count])
            if is_equal and count > 1 and sum(weights[start : start + period]) > 1 and cover > best_cover:
                best, best_cover = (start, period, count), cover
            start += length
    return best


def _signature(operation: Any) -> tuple:
    """Returns what is equal for operations of one class with weights of equal shapes."""
    shapes = tuple((tuple(v.shape), str(v.dtype)) for v in getattr(operation, "variables", ()) if "seed" not in v.name)
    return type(operation), shapes


def _num_weighted_in(segment: Sequence[Any]) -> int:
    """Returns how many layers with weights of their own the operations of a segment consist of."""
    return sum(_num_weighted(node.operation) for node in segment)


def _num_weighted(operation: Any) -> int:
    """Returns how many layers an operation consists of that have weights of their own."""
    return len(layers_with_weights(operation)) if isinstance(operation, keras.Layer) else 0
