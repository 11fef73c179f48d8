"""Traces a model's call without values, with sizes for the dims that its inputs leave unknown."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras
from jax.ad_checkpoint import checkpoint_name

from keras_dist._keras import internals
from keras_dist.mesh.device_mesh import DeviceMesh
from keras_dist.strategies.attention_kernels import xla_attention
from keras_dist.strategies.base import Distribution

# Sizes to try for an unknown dim: this or less, then a few more, such as samples of audio.
_LENGTH, _LONG_LENGTHS = 128, (256, 1024, 4096)

Shape = tuple[int | None, ...]


def trace_model(model: keras.Model, device_mesh: DeviceMesh, axis_size: int) -> Any:
    """Returns the closed jaxpr of a model's call: a function of trainable variables, other variables and inputs.

    Each input and output of a layer is named by the layer's path, with `/input` or `/output` appended. `axis_size`
    divides the sizes of unknown dims where possible. Raises ValueError if no size works or the inputs are not known.
    """
    inputs, _ = internals.inputs_and_outputs(model)
    if inputs is None:
        raise ValueError(
            f"Cannot trace {model.name!r}: only Functional and Sequential models have known inputs, but this is a "
            f"{type(model).__name__}. Wrap it: inputs = keras.Input(shape) with the shape of one example, then "
            "keras.Model(inputs, model(inputs))."
        )
    tensors, structure = jax.tree.flatten(inputs)
    weights, others = (
        [jax.ShapeDtypeStruct(variable.shape, internals.stored_dtype(variable)) for variable in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables)
    )
    first_error: Exception | None = None
    for shapes in _candidate_shapes([tuple(tensor.shape) for tensor in tensors], axis_size):
        batch = [
            jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(tensor.dtype))
            for shape, tensor in zip(shapes, tensors, strict=True)
        ]
        try:
            with _LayerNames(device_mesh).scope():
                return jax.make_jaxpr(model.stateless_call)(weights, others, jax.tree.unflatten(structure, batch))
        except Exception as error:  # whatever a layer raises for a size that it does not take
            first_error = first_error or error
    unknown = {tensor.name: tuple(tensor.shape) for tensor in tensors if None in tensor.shape[1:]}
    tried, advice = "on its inputs", "Check that it can be trained."
    if unknown:
        tried = f"with sizes from 0 to {_LONG_LENGTHS[-1]} for the unknown dims of its inputs {unknown}"
        advice = "Give it full shapes: keras.Model(inputs, model(inputs)), with a keras.Input(shape) for each input."
    raise ValueError(
        f"Cannot trace {model.name!r}: calling it {tried} raises {type(first_error).__name__}: "
        f"{_reason(first_error)}. {advice}"
    ) from first_error


def _reason(error: Exception | None) -> str:
    """Returns the message of an error in one line, without what Keras adds to it."""
    text = re.sub(r"\x1b\[\d+m", "", str(error)).partition("Arguments received by")[0]
    return " ".join(text.split())[:400].rstrip(".")


def _candidate_shapes(shapes: Sequence[Shape], axis_size: int) -> Iterator[list[tuple[int, ...]]]:
    """Yields shapes without unknown dims.

    Dim 0, the batch, has the axis's size. At first all other unknown dims have one size, since inputs that belong
    together (tokens and their mask) must agree. Then one input of rank 4 or more has a single element in dim 1 (one
    image for all tokens), or none (no mask to start from), whatever the others have.

    Example:

    >>> for shapes in _candidate_shapes([(None, None), (None, 3)], axis_size=64):
    ...     print(shapes)
    [(64, 128), (64, 3)]
    [(64, 64), (64, 3)]
    [(64, 256), (64, 3)]
    [(64, 1024), (64, 3)]
    [(64, 4096), (64, 3)]
    """

    def filled(shapes: Sequence[Shape], size: int) -> list[tuple[int, ...]]:
        return [
            tuple((size if dim else axis_size) if known is None else known for dim, known in enumerate(shape))
            for shape in shapes
        ]

    if not any(None in shape[1:] for shape in shapes):
        yield filled(shapes, 0)
        return
    multiples = [2**power * axis_size for power in reversed(range(max(1, (_LENGTH // axis_size).bit_length())))]
    yield from (filled(shapes, size) for size in multiples)
    for size in [*multiples, *(2**power for power in range(8, -1, -1))]:
        for elements in (1, 0):
            for number, shape in enumerate(shapes):
                if len(shape) >= 4 and shape[1] is None:
                    special = shape[0], elements, *shape[2:]
                    yield filled([*shapes[:number], special, *shapes[number + 1 :]], size)
    yield from (filled(shapes, size) for size in _LONG_LENGTHS)


class _LayerNames(Distribution):
    """Names what layers take and return in the traced program, and leaves all layouts alone."""

    def get_tensor_layout(self, path: str) -> Any:
        return path

    def distribute_outputs(self, outputs: Any, layout: Any) -> Any:
        def named(leaf: Any) -> Any:
            return checkpoint_name(leaf, layout) if isinstance(leaf, jax.Array) else leaf

        return jax.tree.map(named, outputs)

    def distribute_inputs(self, path: str, inputs: Any) -> Any:
        return self.distribute_outputs(inputs, path)

    def distribute_weight(self, variable: keras.Variable, value: Any) -> Any:
        return value

    def compute_attention(self, query, key, value, bias, mask, **options) -> Any:
        # By matrix multiplications, whose dims can be read; those of a kernel cannot.
        del options["flash_attention"]
        return xla_attention(query, key, value, bias, mask, **options)
