"""The layouts of one weight: stored, computed with, and updated in."""

from typing import Any, NamedTuple

import keras

from keras_dist.layout.tensor_layout import TensorLayout
from keras_dist.variables.variable_layouts import VariableSpec, layout_under


class WeightLayouts(NamedTuple):
    """The layout in which a weight is stored, that in which layers compute with it, and that of its gradient."""

    stored: TensorLayout
    compute: TensorLayout
    update: TensorLayout


def weight_layouts(variable: keras.Variable, distribution: Any) -> WeightLayouts:
    """Returns the layouts of a weight under a distribution. One that was created with a layout has that throughout."""
    spec, stored = VariableSpec.of(variable), layout_under(variable, distribution)
    if stored != distribution.get_variable_layout(spec):  # the user passed its layout, or a sharding of JAX
        if not isinstance(stored, TensorLayout):
            stored = TensorLayout(getattr(stored, "spec", ()), distribution.device_mesh)
        return WeightLayouts(stored, stored, stored)
    return WeightLayouts(stored, distribution.get_compute_layout(spec), distribution.get_update_layout(spec))
