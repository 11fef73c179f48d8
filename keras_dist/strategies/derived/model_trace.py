"""Traces a model's call without values."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
from jax.ad_checkpoint import checkpoint_name

from keras_dist._keras import internals, model_structure, tracing_errors
from keras_dist._keras.active_distribution import intent_kept
from keras_dist.attention.kernels import xla_attention
from keras_dist.mesh.device_mesh import DeviceMesh
from keras_dist.steps.layer_calls import LayerCalls
from keras_dist.steps.step_state import changed
from keras_dist.strategies.base import Distribution
from keras_dist.strategies.derived.input_shapes import (
    LONG_LENGTHS,
    advice_on_batch,
    batch_specs,
    candidate_shapes,
    symbolic,
)
from keras_dist.variables.deferred import built

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@contextlib.contextmanager
def model_to_trace(model_or_builder: Any, device_mesh: DeviceMesh, axis_size: int, batch: Any) -> Iterator[keras.Layer]:
    """Provides a built model in a block; one that a function returns has no layouts, and no values.

    A model of the function that only a call builds is called on symbolic tensors of the shapes of `batch`.
    """
    if isinstance(model_or_builder, keras.Layer) or not callable(model_or_builder):
        with built(model_or_builder) as model:
            yield model
        return

    @functools.wraps(model_or_builder)
    def build() -> Any:
        model: Any = model_or_builder()
        if isinstance(model, keras.Layer) and not model.built:
            if batch is None:
                advice = advice_on_batch(None)
                raise ValueError(f"Model {model.name!r} is not built, so its inputs are not known. {advice}")
            arguments, named = _arguments(model, symbolic(batch_specs(None, batch, axis_size)))
            model(*arguments, **named)
        return model

    with intent_kept(), _LayerNames(device_mesh).scope(), built(build) as model:
        yield model


def trace_model(model: keras.Model, device_mesh: DeviceMesh, axis_size: int, batch: Any = None) -> Any:
    """Returns the closed jaxpr of a model's call: a function of trainable variables, other variables and inputs.

    Each input and output of a layer is named by the layer's path, with `/input` or `/output` appended. `axis_size`
    divides the number of rows and, where possible, the sizes of unknown dims; `batch` gives these sizes. Raises
    ValueError if no size works, or if the inputs are not known.
    """
    inputs, _ = model_structure.inputs_and_outputs(model)
    if batch is not None:
        candidates = iter([batch_specs(inputs, batch, axis_size)])
    elif inputs is not None:
        tensors, structure = jax.tree.flatten(inputs)
        dtypes = [jax.dtypes.canonicalize_dtype(tensor.dtype) for tensor in tensors]
        tried = candidate_shapes([tuple(tensor.shape) for tensor in tensors], axis_size)
        candidates = (structure.unflatten(map(jax.ShapeDtypeStruct, shapes, dtypes)) for shapes in tried)
    else:
        raise ValueError(
            f"Cannot trace {model.name!r}: only Functional and Sequential models have known inputs, but this is a "
            f"{type(model).__name__}. {advice_on_batch(None)}"
        )
    first_error = specs = None
    for specs in candidates:
        try:
            with _LayerNames(device_mesh).scope(), changed(is_in_step=True, is_improved=True):  # by no pass
                return _trace_call(model, specs)
        except Exception as error:  # whatever a layer raises for a size that it does not take
            first_error = first_error or error
    assert first_error is not None  # there is at least one candidate
    raise _untraceable(model, inputs, None if batch is None else specs, first_error) from first_error


def _trace_call(model: keras.Model, specs: Any) -> Any:
    def specs_of(variables: Any) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(each.shape, internals.stored_dtype(each)) for each in variables]

    arguments, named = _arguments(model, specs)
    while True:
        count = len(model.variables)
        weights, others = specs_of(model.trainable_variables), specs_of(model.non_trainable_variables)
        program = jax.make_jaxpr(model.stateless_call)(weights, others, *arguments, **named)
        if len(model.variables) == count:  # a layer whose activation is a layer creates its weights when it is called
            return program


def _arguments(model: keras.Layer, batch: Any) -> tuple[tuple, dict]:
    """Returns what a model is called on: a batch, or for a `call` of several inputs those in a dict by their names."""
    parameters = [each for each in inspect.signature(model.call).parameters.values() if each.kind not in _VARIADIC]
    names = {each.name for each in parameters} - {"training", "mask"}
    takes_names = isinstance(batch, dict) and len(names) > 1 and names.issuperset(batch)
    return ((), batch) if takes_names else ((batch,), {})


def _untraceable(model: keras.Model, inputs: Any, batch: Any, error: Exception) -> ValueError:
    if batch is not None:
        shapes = jax.tree.map(lambda spec: spec.shape, batch)
        tried, advice = f"on a batch of the shapes {shapes}", advice_on_batch(inputs)
    elif any(None in tensor.shape[1:] for tensor in jax.tree.leaves(inputs)):
        tried = f"with sizes from 0 to {LONG_LENGTHS[-1]} for the unknown dims of its inputs"
        advice = advice_on_batch(inputs)
    else:
        tried, advice = "on its inputs", "Check that it can be trained."
    if dependence := tracing_errors.describe_dependence_on_values(error):
        return ValueError(f"Cannot trace {model.name!r}: {dependence}")
    return ValueError(
        f"Cannot trace {model.name!r}: calling it {tried} raises {tracing_errors.describe(error)}. {advice}"
    )


class _LayerNames(Distribution):
    """Names what layers take and return in the traced program, and leaves all layouts alone."""

    def get_tensor_layout(self, path: str) -> Any:
        return path

    @property
    def layer_calls(self) -> LayerCalls:
        return _NamedCalls(self, self._placer)

    def attention(self, query: Any, key: Any, value: Any, bias: Any, mask: Any, **options: Any) -> Any:
        # By matrix multiplications, whose dims can be read; those of a kernel cannot.
        del options["flash_attention"]
        return xla_attention(query, key, value, bias, mask, **options)


class _NamedCalls(LayerCalls):
    """Vectors and matrices beside tensors of more dims are not named: a layout for the latter leaves them alone."""

    def shard_outputs(self, outputs: Any, layout: Any) -> Any:
        ranks = [leaf.ndim for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]
        least = min(max(ranks, default=0), 3)

        def named(leaf: Any) -> Any:
            return checkpoint_name(leaf, layout) if isinstance(leaf, jax.Array) and leaf.ndim >= least else leaf

        return jax.tree.map(named, outputs)

    def shard_inputs(self, path: str, inputs: Any) -> Any:
        return self.shard_outputs(inputs, path)

    def read_weight(self, variable: keras.Variable, value: Any, cast: Callable[[Any], Any]) -> Any:
        return cast(value)
