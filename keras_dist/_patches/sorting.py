"""Patches of functions that sort: along sequences that are sharded, they are given whole ones."""

import inspect
from typing import Any

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import INSTALLED


def _patch(owner: Any, name: str, parameters: tuple[str, ...]) -> None:
    @INSTALLED.patch(
        owner,
        name,
        parameters=parameters,
        reason="XLA ends the process where it partitions the gradient of a sort along a dim in shards of unequal sizes",
    )
    def sort(original, distribution, x, *args, **kwargs):
        arguments = inspect.signature(original).bind(x, *args, **kwargs)
        arguments.apply_defaults()
        axes = arguments.arguments["axis"]
        axes = axes if isinstance(axes, (tuple, list)) else [axes]
        if len(x.shape) < 2 or not any(axis is None or axis % len(x.shape) == 1 for axis in axes):
            return original(x, *args, **kwargs)
        outputs = original(distribution.gather_sequences(x), *args, **kwargs)
        return distribution.shard_sequences(outputs) if outputs.shape == x.shape else outputs


for _nan in ("", "nan"):
    _patch(internals.keras_numpy, f"{_nan}median", ("x", "axis", "keepdims"))
    for _name in ("quantile", "percentile"):
        _patch(internals.keras_numpy, f"{_nan}{_name}", ("x", "q", "axis", "method", "keepdims"))
_patch(internals.keras_numpy, "sort", ("x", "axis"))
_patch(internals.nn, "sparsemax", ("x", "axis"))
