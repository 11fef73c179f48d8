"""The step that a model runs, with shapes and layouts in place of arrays: made ready, traced, and compiled."""

import contextlib
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from keras_dist._keras import deferred_variables, internals, training_state
from keras_dist.strategies.base import Distribution
from keras_dist.variables.variable_layouts import layout_under, layouts_of

LARGE_CONSTANT = 16 * 2**20  # bytes of an array in a compiled program from which on it is worth a warning


@dataclass(frozen=True)
class Step:
    """A step of a model that is ready to be traced.

    Attributes:
        model: the built model.
        name: `"train"`, `"test"` or `"predict"`.
        distribution: under which it runs.
        variables: those that the step takes and returns, in the parts and the order of Keras's training state.
        layouts: the layout of each variable, by its `id`.
        batch: `jax.ShapeDtypeStruct`s with shardings, in the structure in which `fit` hands batches on.
    """

    model: keras.Model
    name: str
    distribution: Distribution
    variables: list[list[keras.Variable]]
    layouts: dict[int, Any]
    batch: Any

    def trace(self) -> Any:
        """Traces the step that Keras compiles; returns JAX's traced function, which can be lowered.

        Raises:
            ValueError: the batch does not fit the model.
        """
        state = self.state_specs()
        shardings = tuple([spec.sharding for spec in part] for part in state)
        function = jax.jit(
            internals.pure_step(self.model, self.name),
            donate_argnums=0,
            out_shardings=(None, shardings),
            keep_unused=True,  # what a step does not use takes memory too
        )
        with self.distribution.scope(), _misfits(self.model, self.batch, self.name):
            return function.trace(state, self.batch)

    def state_specs(self) -> tuple[list[jax.ShapeDtypeStruct], ...]:
        """Returns shape, dtype and sharding of each variable."""
        return tuple(
            [
                jax.ShapeDtypeStruct(
                    v.shape, internals.stored_dtype(v), sharding=internals.as_sharding(self.layouts[id(v)])
                )
                for v in part
            ]
            for part in self.variables
        )


def bytes_on_a_device(spec: jax.ShapeDtypeStruct) -> int:
    """Returns what one device holds of an array with a sharding, in bytes."""
    sharding: Any = spec.sharding
    return math.prod(sharding.shard_shape(spec.shape)) * spec.dtype.itemsize


@contextlib.contextmanager
def prepared_step(build_model: Any, distribution: Distribution, batch: Any, name: str) -> Iterator[Step]:
    """Makes the model where it is to be made, and what a step needs besides: optimizer, metrics, the batch's shapes.

    When the block ends, a model that is passed is as it was, and so are Keras's automatic names and random seeds.

    Args:
        build_model: a model, or a function without arguments that returns one.
        distribution: under which the step runs.
        batch: as `keras_dist.plan` takes it.
        name: `"train"`, `"test"` or `"predict"`.

    Yields:
        The step.

    Raises:
        TypeError: no model and no function.
        ValueError: a function that returns no model, a model that is not compiled, or a batch that does not fit.
    """
    if not isinstance(build_model, keras.Model) and (not callable(build_model) or isinstance(build_model, keras.Layer)):
        raise TypeError(
            "A plan is of a model, or of a function without arguments that returns one. "
            f"Received: {build_model!r} ({type(build_model).__name__}). Pass, for example, lambda: build(width=1024)."
        )
    with distribution.scope(), internals.no_trace_left(), deferred_variables.deferring():
        model = _as_model(build_model if isinstance(build_model, keras.Model) else build_model(), build_model, name)
        if model is build_model and not model.built:
            raise ValueError(
                f"A model that is passed is built already. Received: {model.name!r}, which is not. Pass the function "
                "that makes it."
            )
        with internals.unbuilt_parts_apart(model):
            specs = batch_specs(model, batch, name, distribution)
            _build(model, specs, name)
            if name == "train" and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            layouts = layouts_of(model, distribution, lambda variable: layout_under(variable, distribution))
            yield Step(model, name, distribution, training_state.state_variables(model, name), layouts, specs)


def batch_specs(model: keras.Model, batch: Any, name: str, distribution: Distribution) -> Any:
    """Returns the shapes, dtypes and shardings of a batch, in the structure in which `fit` hands it on.

    Args:
        model: says the inputs and the targets, where the batch is a number of rows.
        batch: as `keras_dist.plan` takes it.
        name: `"train"`, `"test"` or `"predict"`.
        distribution: lays the batch out.

    Returns:
        A tuple of one to three structures of `jax.ShapeDtypeStruct`: x, y and sample weights.
    """
    if isinstance(batch, (int, np.integer)) and not isinstance(batch, bool):
        batch = _derived_batch(model, int(batch), name)

    def spec(leaf):
        shape, dtype = _shape_and_dtype(leaf)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=distribution.batch_sharding(shape))

    parts = batch if isinstance(batch, tuple) and not _is_shape(batch) else (batch,)
    if not 1 <= len(parts) <= 3:
        raise ValueError(
            f"A batch is x, (x, y) or (x, y, sample_weight). Received: a tuple of {len(parts)}. Put several inputs of "
            "a model into a list or a dict."
        )
    return tuple(jax.tree.map(spec, part, is_leaf=_is_leaf) for part in parts)


def notes_on_batch(step: Step) -> tuple[str, ...]:
    """Returns what to know of a batch whose rows the batch axes do not divide."""
    parts = step.distribution.num_model_replicas
    for spec in jax.tree.leaves(step.batch):
        rows = spec.shape[0] if spec.shape else 0
        if rows % parts:
            each = spec.sharding.shard_shape(spec.shape)[0]
            return (
                f"{rows} rows are not divided by the batch axes, {parts} parts: each device works on {each} of them, "
                "and several on the same.",
            )
    return ()


def warn_of_constants(step: Step, constants: Sequence[Any]) -> None:
    """Warns where large arrays are part of a program, so that every device holds them, in vain where it is a weight."""
    large = [value for value in constants if getattr(value, "nbytes", 0) >= LARGE_CONSTANT]
    if large:
        biggest = max(large, key=lambda value: value.nbytes)
        warnings.warn(
            "Arrays that a step reads belong to its variables or its batch. Received: the "
            f"{step.name} step of {step.model.name!r} with {len(large)} constants of {LARGE_CONSTANT // 2**20} MiB or "
            f"more, the largest {biggest.dtype} of shape {tuple(biggest.shape)}, which every device will hold besides. "
            "Look for a layer that reads a variable's value when it is built, or an array outside of the model.",
            stacklevel=4,
        )


# ------------------------------------------------------------------------------------------------------ the model


def _as_model(model: Any, build_model: Any, name: str) -> keras.Model:
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"build_model returns a keras.Model. Received: {model!r} ({type(model).__name__}) from {build_model!r}. "
            "Return the model that it builds."
        )
    if name != "predict" and (not model.compiled or (name == "train" and model.optimizer is None)):
        needs = "a loss and an optimizer" if name == "train" else "a loss"
        raise ValueError(
            f"A {name} step needs {needs}. Received: {model.name!r}, which is not compiled with them. Call "
            'model.compile(...) where it is built, or plan with step="predict".'
        )
    if model.run_eagerly or not model.jit_compile:
        raise ValueError(
            f"Only a compiled step can be planned. Received: {model.name!r} with run_eagerly={model.run_eagerly}, "
            f"jit_compile={model.jit_compile}. Compile the model without them."
        )
    return model


def _build(model: keras.Model, specs: Any, name: str) -> None:
    """Makes the variables that a model, its loss and its metrics make at their first use."""
    symbolic = jax.tree.map(lambda leaf: keras.KerasTensor(leaf.shape, str(leaf.dtype)), specs)
    with _misfits(model, specs, name):
        if name != "predict":
            internals.symbolic_build(model, symbolic)
        elif not model.built:
            model(symbolic[0])


@contextlib.contextmanager
def _misfits(model: keras.Model, specs: Any, name: str) -> Iterator[None]:
    """Says what of a batch a model cannot take, in place of what Keras and JAX say."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause, RuntimeError) and cause.__context__ is not None:
            cause = cause.__context__  # Keras wraps what went wrong
        shapes = ", ".join(
            f"{part} {jax.tree.map(lambda leaf: f'{leaf.dtype}{list(leaf.shape)}', value)}"
            for part, value in zip(("x", "y", "sample_weight"), specs, strict=False)
        )
        words = " ".join(re.sub(r"\x1b\[\d*m", "", str(cause)).split())
        raise ValueError(
            f"The {name} step of {model.name!r} must take the batch. Received: {shapes}, with which it raises "
            f"{type(cause).__name__}: {words[:400]}. Pass the shapes of a whole batch, as fit gets it: x, (x, y) or "
            "(x, y, sample_weight)."
        ) from error


# ------------------------------------------------------------------------------------------------------ the batch


def _is_shape(value: Any) -> bool:
    """Whether a tuple is a shape: sizes, of which some may be left open."""
    sizes = [size for size in value if size is not None] if isinstance(value, tuple) else []
    return len(sizes) > 0 and all(isinstance(size, int) for size in sizes)


def _is_leaf(value: Any) -> bool:
    return _is_shape(value) or hasattr(value, "shape")


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    if _is_shape(leaf):
        shape, dtype = tuple(leaf), keras.config.floatx()
    else:
        if not hasattr(leaf, "shape") or np.dtype(getattr(leaf, "dtype", object)).kind in "OSUMm":
            raise ValueError(
                "A batch is made of arrays of numbers or of shapes, in tuples, lists and dicts. Received: "
                f"{str(leaf)[:80]!r} ({type(leaf).__name__}). Pass one batch of a data source, for example "
                "next(iter(data))."
            )
        shape, dtype = tuple(leaf.shape), keras.backend.standardize_dtype(leaf.dtype)
    if dtype == "float64":
        dtype = keras.config.floatx()  # as Keras's data adapters do
    if any(size is None or size < 1 for size in shape):
        raise ValueError(
            f"A batch has whole shapes. Received: {list(shape)}. Give every dim its size, the number of rows first."
        )
    return shape, jax.dtypes.canonicalize_dtype(dtype)


def _derived_batch(model: keras.Model, rows: int, name: str) -> Any:
    """The batch of a number of rows, from a model's inputs and its loss."""
    inputs, outputs = internals.inputs_and_outputs(model)
    way_out = "Pass the shapes of a batch, for example with jax.ShapeDtypeStruct(shape, dtype)."
    if rows < 1:
        raise ValueError(f"A batch has one row or more. Received: batch={rows}. {way_out}")
    if inputs is None or any(None in tensor.shape[1:] for tensor in jax.tree.leaves(inputs)):
        raise ValueError(
            f"A number of rows is enough where the shapes of a model's inputs are known. Received: batch={rows} for "
            f"{model.name!r} with the inputs {jax.tree.map(lambda tensor: tensor.shape, inputs)}. {way_out}"
        )

    def tensor(shape, dtype):
        return jax.ShapeDtypeStruct((rows, *shape[1:]), dtype)

    x = jax.tree.map(lambda leaf: tensor(leaf.shape, leaf.dtype), inputs)
    if name == "predict" or model.loss is None:
        return (x,)

    def target(output, loss):
        label = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
        if loss is None:
            return None
        if "sparse" in label.lower():
            return tensor(output.shape[:-1], "int32")
        return tensor(output.shape, keras.config.floatx())

    losses = model.loss if isinstance(model.loss, (list, tuple, dict)) else jax.tree.map(lambda _: model.loss, outputs)
    return x, jax.tree.map(target, outputs, losses)
