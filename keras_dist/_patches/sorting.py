"""Patches of functions that sort: each device sorts its rows, where XLA would partition sequences."""

import inspect
from typing import Any

import keras

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import INSTALLED


def _patch(owner: Any, name: str, parameters: tuple[str, ...]) -> None:
    @INSTALLED.patch(
        owner,
        name,
        parameters=parameters,
        reason="XLA ends the process where it partitions the gradient of a sort of an array in shards of unequal sizes",
    )
    def sort(original, distribution, x, *args, **kwargs):
        arguments = inspect.signature(original).bind(x, *args, **kwargs)
        arguments.apply_defaults()
        array: Any = keras.ops.convert_to_tensor(x)
        axes = arguments.arguments["axis"]
        if axes is None:
            axes = range(array.ndim)
        axes = [axes] if isinstance(axes, int) else axes
        dims = [axis % array.ndim for axis in axes]
        keeps_rows = "q" not in parameters  # several quantiles are in dim 0
        return distribution.compute_sort(lambda x: original(x, *args, **kwargs), array, dims, keeps_rows)


for _owner, _name, _parameters in (
    (internals.keras_numpy, "median", ("x", "axis", "keepdims")),
    (internals.keras_numpy, "nanmedian", ("x", "axis", "keepdims")),
    (internals.keras_numpy, "quantile", ("x", "q", "axis", "method", "keepdims")),
    (internals.keras_numpy, "nanquantile", ("x", "q", "axis", "method", "keepdims")),
    (internals.keras_numpy, "percentile", ("x", "q", "axis", "method", "keepdims")),
    (internals.keras_numpy, "nanpercentile", ("x", "q", "axis", "method", "keepdims")),
    (internals.keras_numpy, "sort", ("x", "axis")),
    (internals.nn, "sparsemax", ("x", "axis")),
):
    _patch(_owner, _name, _parameters)
