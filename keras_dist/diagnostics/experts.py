"""The weights of a mixture's experts, recognized by their shapes, and which of their dims to shard."""

import os.path
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from keras_dist.diagnostics.coverage import Coverage, CoveredVariable
from keras_dist.strategies.derived.expert_weights import MIN_SHARD_WIDTH


class Experts(NamedTuple):
    """The weights of the experts of one layer, and the matrix (D, E) that routes to them.

    Experts of width M have weights (E, D, M) for gate and up, or one (E, D, 2 M) for both, and (E, M, D) for down.
    """

    router: CoveredVariable
    weights: Sequence[CoveredVariable]

    def dims(self, variable: CoveredVariable, axis_size: int, is_batch_axis: bool) -> tuple[int, ...]:
        """Returns the dims of a weight, the best to shard over an axis first.

        The width of all weights is balanced under any routing: gate and up are column-parallel, down is row-parallel.
        Shards of experts are better if those of the width are narrow, or if gate and up are fused: their halves would
        be on different devices, and most of the activations would be sent. Over an axis of the batch, D is best.
        """
        down = [v for v in self.weights if v.shape[1] != self.router.shape[0]] or self.weights[-1:]
        width_dims = {v.path: 1 if v in down else 2 for v in self.weights}
        widths, width_dim = {v.shape[width_dims[v.path]] for v in self.weights}, width_dims[variable.path]
        if is_batch_axis:
            return 3 - width_dim, 0, width_dim
        is_wide = len(widths) == 1 and min(widths) // axis_size >= MIN_SHARD_WIDTH
        return (width_dim, 0, 3 - width_dim) if is_wide else (0, width_dim, 3 - width_dim)


def experts_by_path(coverage: Coverage) -> dict[str, Experts]:
    """Returns the experts that each weight of experts belongs to."""
    layers, matrices, found = defaultdict(list), defaultdict(list), {}
    for v in coverage.variables:
        if v.part == "weights" and v.base is None:
            if len(v.shape) == 3:
                layers[v.path.rpartition("/")[0], v.shape[0]].append(v)
            elif len(v.shape) == 2:
                matrices[v.shape[1]].append(v)
    for (layer, count), group in layers.items():
        fitting = []
        for router in matrices[count]:
            weights = [v for v in group if router.shape[0] in v.shape[1:]]
            if len(weights) > 1 and all(router.shape[0] in {v.shape[dim] for v in weights} for dim in (1, 2)):
                fitting.append(Experts(router, weights))
        if fitting:
            # The closest by path is the router of this layer, and not that of another block.
            closest = max(fitting, key=lambda e: len(os.path.commonprefix([e.router.path, layer])))  # noqa: RUF071
            found |= dict.fromkeys((v.path for v in closest.weights), closest)
    return found
