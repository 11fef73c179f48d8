"""The step that a model runs, with shapes and layouts in place of arrays: prepared, traced and lowered."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np
from jax.interpreters.mlir import ir  # pyright: ignore[reportAttributeAccessIssue]

from keras_dist._keras import deferred_variables, internals, model_structure, tracing_errors, training_state
from keras_dist._keras.active_distribution import intent_kept
from keras_dist._keras.global_state import global_state_restored
from keras_dist._report.units import counted
from keras_dist._report.user_warnings import warn
from keras_dist.layout.tensor_layout import HOST_MEMORY, is_in_host_memory
from keras_dist.mesh.devices import is_attached
from keras_dist.planning.targets.target_platform import platform_overridden
from keras_dist.steps.options import OptionWithoutEffectError
from keras_dist.steps.steps import stateless_step
from keras_dist.strategies.base import Distribution
from keras_dist.strategies.derived.input_shapes import counterparts, is_full, is_shape, is_spec, symbolic
from keras_dist.variables.deferred import require_no_arguments
from keras_dist.variables.variable_layouts import layout_under, layouts_of

_WITHOUT_TARGETS = "predict", "generate"  # steps
LARGE_CONSTANT = 16 * 2**20  # bytes; larger constants in a program deserve a warning


@dataclass(frozen=True)
class Step:
    """A step of a built model, ready to be traced.

    `variables` are grouped and ordered as Keras's training state, `layouts` are by the `id` of a variable, and `batch`
    is a tuple of x, y and sample weights as `jax.ShapeDtypeStruct`s with shardings.
    """

    model: keras.Model
    name: str
    distribution: Distribution
    variables: list[list[keras.Variable]]
    layouts: dict[int, Any]
    batch: Any

    def trace(self) -> Any:
        """Traces the step that Keras compiles. Raises a ValueError with the cause if the model cannot be traced."""
        state = self.state_specs()
        shardings = tuple([spec.sharding for spec in part] for part in state)
        with self.distribution.scope(), _explained_errors(self.model, self.batch, self.name):
            function = jax.jit(
                stateless_step(self.model, self.name),
                donate_argnums=0,
                out_shardings=(None, shardings),
                keep_unused=True,  # arguments that a step does not use take memory too
                compiler_options=self.distribution.steps.compiler_options,
            )
            return function.trace(state, self.batch)

    def lower(self, traced: Any) -> Any:
        """Returns the traced step as `jax.stages.Lowered`, with the memory that each variable is in."""
        lowered = traced.lower()
        device = self.distribution.device_mesh.backend_mesh.devices.flat[0]
        on_host = [is_in_host_memory(self.layouts[id(variable)]) for part in self.variables for variable in part]
        if any(on_host) and device.platform == "gpu" and not is_attached(device):
            _mark_host_memory(lowered.compiler_ir(), on_host)
        return lowered

    def state_specs(self) -> tuple[list[jax.ShapeDtypeStruct], ...]:
        """Returns the shape, dtype and sharding of the state of each variable."""

        def spec(variable: keras.Variable) -> jax.ShapeDtypeStruct:
            sharding = internals.as_sharding(self.layouts[id(variable)])
            return jax.ShapeDtypeStruct(variable.shape, internals.stored_dtype(variable), sharding=sharding)

        specs = [list(map(spec, part)) for part in self.variables]
        if self.accumulation is not None:
            specs[2] = self.accumulation.specs(specs[2])
        return tuple(specs)

    @property
    def accumulation(self) -> Any:
        """How the step accumulates gradients, a `GradientAccumulation`; None: as Keras does, or not at all."""
        return self.distribution.train_steps.accumulation(self.model) if self.name == "train" else None


def _mark_host_memory(module: Any, on_host: Sequence[bool]) -> None:
    """Marks the arguments and results of a module that are in host memory, of which the state has these.

    JAX forgets the memory of arrays on GPUs that are not attached, since these stand-ins do not know their memories.
    """
    main: Any = ir.SymbolTable(module.operation)["main"]
    with module.context:
        for key, first in (("arg_attrs", 0), ("res_attrs", len(main.attributes["res_attrs"]) - len(on_host))):
            attributes = [{each.name: each.attr for each in one} for one in main.attributes[key]]
            for number, one in enumerate(attributes):
                is_state = first <= number < first + len(on_host)
                kind = HOST_MEMORY if is_state and on_host[number - first] else "device"
                one["mhlo.memory_kind"] = ir.StringAttr.get(kind)
            main.attributes[key] = ir.ArrayAttr.get([ir.DictAttr.get(one) for one in attributes])


def bytes_on_a_device(spec: jax.ShapeDtypeStruct) -> int:
    sharding: Any = spec.sharding
    return math.prod(sharding.shard_shape(spec.shape)) * spec.dtype.itemsize


@contextlib.contextmanager
def prepared_step(build_model: Any, distribution: Distribution, batch: Any, name: str) -> Iterator[Step]:
    """Builds a model with its optimizer, loss and metrics, without values, and the shapes of its batch.

    In the block, JAX answers questions about the platform as the target would.
    When the block ends, a model that was passed is unchanged, and so are Keras's automatic names and random seeds.
    """
    is_model = isinstance(build_model, keras.Model)
    if not is_model:
        if isinstance(build_model, keras.Layer) or not callable(build_model):
            raise TypeError(
                "build_model must be a keras.Model or a function that returns one, but got "
                f"{build_model!r} ({type(build_model).__name__}). Pass, for example, lambda: build(width=1024)."
            )
        require_no_arguments(build_model)
    devices = distribution.device_mesh.backend_mesh.devices.ravel().tolist()
    with (
        platform_overridden(devices),
        intent_kept(),
        distribution.scope(),
        global_state_restored(),
        deferred_variables.deferring(),
    ):
        model = _as_model(build_model if is_model else build_model(), name)
        if is_model and not model.built:
            raise ValueError(f"Model {model.name!r} is not built. Build it, or pass the function that creates it.")
        with internals.unbuilt_parts_replaced(model):
            specs = batch_specs(model, batch, name, distribution)
            _build(model, specs, name)
            if name == "train" and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            variables = training_state.state_variables(model, name)
            layouts = layouts_of(model, distribution, lambda variable: layout_under(variable, distribution))
            if name == "generate":
                layouts |= {id(each): layout_under(each, distribution) for each in variables[-1]}  # of the sampler
            yield Step(model, name, distribution, variables, layouts, specs)


def batch_specs(model: keras.Model, batch: Any, name: str, distribution: Distribution) -> Any:
    """Returns the batch of `keras_dist.plan` as a tuple of x, y and sample weights, with shapes and shardings."""
    if isinstance(batch, (int, np.integer)) and not isinstance(batch, bool):
        batch = derived_batch(model, int(batch), name)
    parts = batch if isinstance(batch, tuple) and not is_shape(batch) else (batch,)
    if not 1 <= len(parts) <= 3:
        raise ValueError(
            f"A batch must be x, (x, y) or (x, y, sample_weight), but got a tuple of {len(parts)}. Pass several inputs "
            "of a model as a list or a dict."
        )
    specs = []
    for part, dtypes in zip(parts, _dtypes_of_shapes(model, parts), strict=True):
        leaves, structure = jax.tree.flatten(part, is_leaf=is_spec)
        part_specs = [_spec(leaf, dtype, distribution) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        specs.append(jax.tree.unflatten(structure, part_specs))
    return tuple(specs)


def notes_on_batch(step: Step) -> Iterator[str]:
    """Yields notes on how batches are split over devices, and on how many of them make an update."""
    replicas = step.distribution.num_model_replicas
    for rows in (spec.shape[0] if spec.shape else 0 for spec in jax.tree.leaves(step.batch)):
        rows_per_device = step.distribution.steps.rows_of_device(step.name, rows)
        if rows_per_device > -(-rows // replicas):
            yield (
                f"Batch size {rows} is not divisible by {replicas}, the size of the batch axes: each device processes "
                f"{counted(rows_per_device, 'row')}, so devices repeat each other's work. Use a multiple of {replicas}."
            )
            break
    if step.accumulation is not None:
        batches = step.model.optimizer.gradient_accumulation_steps
        yield (
            f"Figures are those of a batch after which the weights are updated, one of {batches} "
            f"(gradient_accumulation_steps={batches}). The others send no gradients."
        )


def warn_of_constants(step: Step, constants: Sequence[Any]) -> None:
    """Warns of large arrays that are constants of a program, of which every device holds a copy."""
    large = [value for value in constants if getattr(value, "nbytes", 0) >= LARGE_CONSTANT]
    if large:
        biggest = max(large, key=lambda value: value.nbytes)
        warn(
            f"The {step.name} step of {step.model.name!r} embeds {counted(len(large), 'constant')} of "
            f"{LARGE_CONSTANT // 2**20} MiB or more, the largest {biggest.dtype}{list(biggest.shape)}, and every "
            "device holds a copy. Make them variables or part of the batch: look for a layer that reads a variable's "
            "value in build(), or an array outside of the model.",
        )


def _as_model(model: Any, name: str) -> keras.Model:
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"build_model returned {model!r} ({type(model).__name__}) instead of a keras.Model. Return the compiled "
            "model."
        )
    if name == "generate" and not (hasattr(model, "generate_step") and getattr(model, "sampler", None)):
        raise ValueError(
            f"Model {model.name!r} ({type(model).__name__}) does not generate: it has no generate_step, or no sampler. "
            "Plan a language model of KerasHub, such as keras_hub.models.LlamaCausalLM, and compile it."
        )
    if name not in _WITHOUT_TARGETS and (not model.compiled or (name == "train" and model.optimizer is None)):
        needs = "a loss and an optimizer" if name == "train" else "a loss"
        raise ValueError(
            f"Model {model.name!r} is not compiled with {needs}, which a {name} step needs. Call model.compile(...) "
            'where the model is built, or plan with step="predict".'
        )
    if model.run_eagerly or not model.jit_compile:
        reason = model_structure.why_not_compiled(model) or (
            f"it has run_eagerly={model.run_eagerly} and jit_compile={model.jit_compile}. Leave both arguments of "
            "model.compile at their defaults."
        )
        raise ValueError(f"Cannot compile a step of {model.name!r}: {reason}")
    return model


def _build(model: keras.Model, specs: Any, name: str) -> None:
    """Creates the variables that a model, its loss and its metrics create on first use."""
    tensors = symbolic(specs)
    with _explained_errors(model, specs, name):
        if name not in _WITHOUT_TARGETS:
            internals.symbolic_build(model, tensors)
        elif not model.built:
            model(tensors[0])


@contextlib.contextmanager
def _explained_errors(model: keras.Model, specs: Any, name: str) -> Iterator[None]:
    """Raises errors of Keras and JAX again as one ValueError with the batch, the cause and the fix."""
    try:
        yield
    except OptionWithoutEffectError:
        raise
    except Exception as error:
        batch = ", ".join(
            f"{part} {jax.tree.map(lambda leaf: f'{leaf.dtype}{list(leaf.shape)}', value)}".replace("'", "")
            for part, value in zip(("x", "y", "sample_weight"), specs, strict=False)
        )
        fault = f"Cannot trace the {name} step of {model.name!r} with the batch {batch}"
        if dependence := tracing_errors.describe_dependence_on_values(error):
            raise ValueError(f"{fault}: {dependence}") from error
        if name not in _WITHOUT_TARGETS and len(specs) == 1 and model.loss is not None:
            raise ValueError(f"{fault}: it has no targets, and the model has a loss. Pass (x, y).") from error
        raise ValueError(
            f"{fault}: {tracing_errors.describe(error)}. Pass the shapes of a global batch, as fit gets it: x, (x, y) "
            "or (x, y, sample_weight)."
        ) from error


def _dtypes_of_shapes(model: keras.Model, parts: Sequence[Any]) -> Iterator[list[str]]:
    """Yields, for each part of a batch, the dtypes that its leaves have where they are shapes."""
    inputs, outputs = model_structure.inputs_and_outputs(model)
    x, *others = parts
    yield [getattr(tensor, "dtype", keras.config.floatx()) for tensor in counterparts(x, inputs)]
    for part, is_target in zip(others, (True, False), strict=False):
        losses = _losses(model, outputs, isinstance(part, dict)) if is_target and model.compiled else None
        is_single = not isinstance(losses, (list, tuple, dict))
        yield [_dtype_of_target(losses if is_single else loss) for loss in counterparts(part, losses)]


def _losses(model: keras.Model, outputs: Any, by_name: bool = False) -> Any:
    """Returns the losses of a model in the order of its outputs, or by name; as compiled if outputs are unknown."""
    losses = model.loss
    if outputs is None or losses is None:
        return losses
    graph = model_structure.functional_graph(model)
    names = sorted(outputs) if isinstance(outputs, dict) else graph.output_names
    if isinstance(losses, dict):
        losses = list(map(losses.get, names))
    elif not isinstance(losses, (list, tuple)):
        losses = [losses] * len(jax.tree.leaves(outputs))
    return dict(zip(names, losses, strict=True)) if by_name and len(names) == len(losses) else losses


def _dtype_of_target(loss: Any) -> str:
    """Returns the dtype of the targets of a loss: class numbers of sparse ones, else numbers."""
    label = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    return "int32" if "sparse" in label.lower() else keras.config.floatx()


def _spec(leaf: Any, dtype_of_shape: str, distribution: Distribution) -> jax.ShapeDtypeStruct:
    if is_shape(leaf):
        shape, dtype = tuple(leaf), keras.backend.standardize_dtype(dtype_of_shape)
    elif hasattr(leaf, "shape") and np.dtype(getattr(leaf, "dtype", object)).kind not in "OSUMm":
        shape, dtype = tuple(leaf.shape), keras.backend.standardize_dtype(leaf.dtype)
    else:
        raise ValueError(
            f"A batch cannot contain {str(leaf)[:80]!r} ({type(leaf).__name__}). Pass arrays of numbers or shapes, in "
            "tuples, lists and dicts: for example one batch of a data source, next(iter(data))."
        )
    if not is_shape(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct) and "float" in dtype:
        dtype = keras.config.floatx()  # as Keras's data adapters do
    if not is_full(shape):
        raise ValueError(
            f"Shape {list(shape)} in the batch has an unknown dim or no rows. Give every dim its size, the global "
            "number of rows first."
        )
    sharding = distribution.batch_sharding(shape)
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype), sharding=sharding)


def derived_batch(model: keras.Model, rows: int, name: str, length: int | None = None) -> Any:
    """Returns the batch for a number of rows, derived from a model's inputs and losses.

    `length` is the size of the dims that inputs leave open, such as the number of tokens of a row.
    """
    inputs, outputs = model_structure.inputs_and_outputs(model)
    if rows < 1:
        raise ValueError(f"A batch needs at least 1 row, but got batch={rows}.")
    has_open_dims = any(None in tensor.shape[1:] for tensor in jax.tree.leaves(inputs))
    if inputs is None or (has_open_dims and length is None):
        shapes = jax.tree.map(lambda tensor: tensor.shape, inputs)
        fault = "its inputs are unknown" if inputs is None else f"input shapes contain None: {shapes}"
        raise ValueError(
            f"Cannot derive a batch for {model.name!r} from batch={rows}: {fault}. Pass a full batch specification, "
            f"for example (jax.ShapeDtypeStruct(({rows}, 128), 'int32'), jax.ShapeDtypeStruct(({rows},), 'int32'))."
        )

    def tensor(shape, dtype):
        return jax.ShapeDtypeStruct((rows, *(length if size is None else size for size in shape[1:])), dtype)

    x = jax.tree.map(lambda leaf: tensor(leaf.shape, leaf.dtype), inputs)
    if has_open_dims:
        outputs = model.compute_output_spec(symbolic(x))
    if name == "predict" or model.loss is None:
        return (x,)

    def target(output, loss):
        if loss is None:
            return None
        dtype = _dtype_of_target(loss)
        return tensor(output.shape[:-1] if dtype == "int32" else output.shape, dtype)

    leaves, structure = jax.tree.flatten(outputs)
    return x, structure.unflatten(map(target, leaves, _losses(model, outputs)))
