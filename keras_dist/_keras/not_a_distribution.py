"""What a user passed in place of a distribution, and the fix, for errors."""

from typing import Any

import jax
import keras

from keras_dist._keras import internals


def what_instead_of_a_distribution(value: Any) -> str:
    """Returns what a value is that is no distribution, as the end of a sentence, and how to make a distribution."""
    if isinstance(value, type) and issubclass(value, internals.KerasDistribution):
        rules = "layout_map=layout_map" if issubclass(value, keras.distribution.ModelParallel) else ""
        arguments = "" if value.__name__ == "FullyShardedDataParallel" else rules
        return f"the class {value.__name__}. Call it: {value.__name__}({arguments})."
    if isinstance(value, internals.KerasDistribution):
        name = type(value).__name__
        return f"Keras's own {name}. Use keras_dist.{name}, which takes the same arguments."
    fix = "Pass, for example, keras_dist.DataParallel()."
    if isinstance(getattr(value, "distribution", None), internals.KerasDistribution):  # a `Choice`
        fix = "Pass its attribute `distribution`."
    elif isinstance(value, keras.distribution.LayoutMap):
        fix = "Pass keras_dist.ModelParallel(layout_map=layout_map)."
    elif isinstance(value, (keras.distribution.DeviceMesh, jax.sharding.Mesh)):
        fix = "Pass a distribution on this mesh, for example keras_dist.FullyShardedDataParallel(mesh)."
    elif isinstance(value, str) and ":" in value:
        fix = f"Pass, for example, keras_dist.DataParallel(keras_dist.create_device_mesh({value!r}))."
    return f"{value!r} of type {type(value).__name__}. {fix}"
