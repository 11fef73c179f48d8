"""Patches of calls of models and layers, and of the variables that they read."""

import contextlib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import keras
from jax.core import Tracer
from jax.extend.core import set_current_trace, take_current_trace

from keras_dist._keras import internals, model_structure
from keras_dist._keras.active_distribution import INSTALLED, VARIABLES, active_distribution, distribution_of_model
from keras_dist._keras.internals import distribution_lib, in_stateless_scope
from keras_dist._keras.thread_value import ThreadValue
from keras_dist.steps.rematerialization import current_rematerialization
from keras_dist.variables import global_reads, process_zero


@INSTALLED.patch(
    distribution_lib,
    "distribute_tensor",
    reason="output rules fail for layers that return several tensors, and for batches that the axes do not divide",
)
def _distribute_tensor(original, distribution, tensor, layout):
    return distribution.distribute_outputs(tensor, layout)


@VARIABLES.patch(
    keras.Model,
    "__call__",
    reason="`model(x)` replicates its input over all devices; after its distribution, it fails without saying why",
)
def _call_model(original, self, *args, **kwargs):
    distribution = active_distribution()
    if distribution is None:
        with _explained_devices(self):
            return original(self, *args, **kwargs)
    if not in_stateless_scope():
        args, kwargs = distribution.distribute_call(self, args, kwargs)
    return original(self, *args, **kwargs)


@contextlib.contextmanager
def _explained_devices(model: keras.Model) -> Iterator[None]:
    """Raises JAX's error about inputs on other devices than the variables again, with the fix."""
    try:
        yield
    except ValueError as error:
        owner = distribution_of_model(model)
        # Keras surrounds JAX's text with the arguments of a layer, in bold.
        jax_error = re.search(r"Received incompatible devices[^\n\x1b]*", str(error))
        if owner is None or jax_error is None or "keras_dist.redistribute" in str(error):
            raise
        raise ValueError(
            f"{model.name!r} was called with arrays on other devices than its variables, which are distributed by "
            f"{owner}, while no distribution is active. Call keras_dist.redistribute(model) to move it to one device, "
            f"or call it while its distribution is active. JAX reports: {jax_error[0]}"
        ) from error


class _StatelessCall(NamedTuple):
    """A `stateless_call` of a model.

    A weight that a layer reads inside a loop of its own (`jax.lax.scan`) is resharded once, in the trace around the
    loop. Resharded inside, it would be gathered at every iteration, and so would its gradient be reduced.
    """

    model: keras.Layer
    trace: Any  # that the call began in
    values: set[int]  # ids of the values of variables that were passed to it
    reads: dict[tuple, tuple[Any, Any, Any]]  # a trace, a value of a weight, and what it is there, read once for all

    def is_in_loop(self) -> bool:
        return _current_trace() is not self.trace

    def read_once(self, variable, value, dtype: Any, distribute: Callable[[], Any]) -> Any:
        """Returns what `distribute` returned for the first read of a weight with this value, in a dtype.

        XLA:GPU would gather the weight for each read. A layer may assign another value (`SpectralNormalization`).
        """
        trace = _current_trace()
        key = id(variable), id(value), dtype, id(trace)
        if key not in self.reads:
            self.reads[key] = trace, value, distribute()  # with trace and value, so that no other ones get their ids
        return self.reads[key][-1]

    def outside_of_loops(self, value) -> contextlib.AbstractContextManager:
        """Runs a block in the trace that the call began in, if the value is known there."""
        return set_current_trace(self.trace) if id(value) in self.values else contextlib.nullcontext()


def _current_trace():
    """Returns what JAX traces into at the moment; the body of a loop has a trace of its own."""
    with take_current_trace() as trace:
        return trace


_current_call: ThreadValue[_StatelessCall | None] = ThreadValue(None)  # the innermost one, if one runs


@INSTALLED.patch(
    keras.Layer,
    "stateless_call",
    reason="a layer that reads a weight cannot be told from an optimizer that does",
    every_thread=True,
)
def _stateless_call(original, self, trainable_variables, non_trainable_variables, *args, return_losses=False, **kwargs):
    distribution = active_distribution()
    if distribution is not None and _current_call.value is None and isinstance(self, keras.Model):
        args, kwargs = distribution.distribute_step_inputs(self, (args, kwargs))

    def call(state, inputs):
        (args, kwargs), values = inputs, {id(value) for value in itertools.chain(*state)}
        with _current_call.set_to(_StatelessCall(self, _current_trace(), values, {})):
            return original(self, *state, *args, return_losses=return_losses, **kwargs)

    state = trainable_variables, non_trainable_variables
    if distribution is None or _current_call.value is not None:
        return call(state, (args, kwargs))
    return distribution.compute_call(self, call, state, (args, kwargs))


@INSTALLED.patch(
    internals.KerasVariable,
    "_maybe_autocast",
    reason="layers compute with a weight in the layout it is stored in, and process 0 cannot compute with it alone",
    every_thread=True,
)
def _read_variable(original, self, value):
    call = _current_call.value
    if process_zero.is_leading():
        value = global_reads.local_value(self, value)
    distribution = None if call is None or not isinstance(value, Tracer) else active_distribution()
    if call is None or distribution is None:
        return original(self, value)
    if _reads_stored_table.value:
        return original(self, value)
    with call.outside_of_loops(value):
        cast = original(self, value)
        distribute = functools.partial(distribution.distribute_weight, self, cast)
        if distribution.reduces_later(self):
            return call.read_once(self, value, cast.dtype, distribute)
        return distribute()


_reads_stored_table: ThreadValue[bool] = ThreadValue(False)  # whether a layer reads its table as it is stored


@INSTALLED.patch(
    keras.layers.Embedding,
    "call",
    reason="FSDP gathers the table for a few rows of it, and in float32 although the layer casts the rows",
)
def _call_embedding(original, distribution, self, inputs):
    call, is_plain = _current_call.value, not self.quantization_mode and not self.lora_enabled
    if call is None or call.is_in_loop() or not is_plain:
        return original(self, inputs)
    is_tied = id(model_structure.embedding_table(self)) in model_structure.tied_tables(call.model)
    lookup = distribution.lookup(self, inputs.shape, is_tied)
    if lookup is None:
        return original(self, inputs)
    indices = keras.ops.cast(inputs, "int32") if "int" not in keras.backend.standardize_dtype(inputs.dtype) else inputs
    with internals.AutocastScope(self.compute_dtype), _reads_stored_table.set_to(lookup.takes_stored_table):
        table = keras.ops.convert_to_tensor(model_structure.embedding_table(self))
    return lookup(table, indices)


@INSTALLED.patch(
    keras.Operation,
    "__call__",
    reason="layout maps have no rules for inputs, and a layer cannot gather its weights again for the backward pass",
)
def _call_operation(original, distribution, self, *args, **kwargs):
    if not isinstance(self, keras.Layer):
        return original(self, *args, **kwargs)
    args = distribution.distribute_inputs(f"{internals.current_path()}/input", args)
    call, remat = _current_call.value, current_rematerialization.value
    if remat is not None and call is not None and not remat.is_in_block:
        if remat.is_of_attention and hasattr(self, "_compute_attention"):
            with _attention_rematerialized(self, remat):
                return original(self, *args, **kwargs)
        if not remat.is_of_attention and id(self) in remat.blocks.layers:
            with remat.block():
                function = functools.partial(original, self, *args, **kwargs)
                return rematerialized(self, function, remat.checkpoint, distribution.regathers)
    # Weights that are read in a loop are gathered before it. The backward pass begins with the last layers, whose
    # weights are still there.
    if (
        call is None
        or call.is_in_loop()
        or (remat is not None and remat.is_in_block)
        or not distribution.regathers_weights(self)
        or self in model_structure.last_layers(call.model)
    ):
        return original(self, *args, **kwargs)

    keep = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    return rematerialized(self, lambda: original(self, *args, **kwargs), keep)


@contextlib.contextmanager
def _attention_rematerialized(layer, remat):
    """Replaces the method with which layers of Keras and KerasHub compute attention from queries, keys and values."""
    compute = layer._compute_attention

    def call(*args, **kwargs):
        with remat.block():
            return rematerialized(layer, lambda: compute(*args, **kwargs), remat.checkpoint)

    vars(layer)["_compute_attention"] = call
    try:
        yield
    finally:
        del vars(layer)["_compute_attention"]


@INSTALLED.patch(
    internals.function_lib.Function,
    "_run_through_graph",
    reason="blocks of a functional model that are not layers cannot be computed again for the backward pass",
)
def _run_through_graph(original, distribution, self, inputs, operation_fn=lambda op: op, call_fn=None):
    remat = current_rematerialization.value
    if (
        call_fn is not None
        or remat is None
        or remat.is_of_attention
        or remat.is_in_block
        or _current_call.value is None
    ):
        return original(self, inputs, operation_fn, call_fn)
    parts = remat.blocks.parts_of(self)
    if parts is None:
        return original(self, inputs, operation_fn, call_fn)
    tensors = dict(zip(map(id, self.inputs), keras.tree.flatten(inputs), strict=True))

    def run(part):
        known = dict(tensors)
        for node in part.nodes:
            args, kwargs = node.arguments.fill_in(known)
            outputs = operation_fn(node.operation)(*args, **kwargs)
            known.update(zip(map(id, node.outputs), keras.tree.flatten(outputs), strict=True))
        return [known[key] for key in part.outputs]

    for part in parts:
        if part.is_block:
            layer = next(node.operation for node in part.nodes if isinstance(node.operation, keras.Layer))
            with remat.block():
                outputs = rematerialized(layer, functools.partial(run, part), remat.checkpoint, distribution.regathers)
        else:
            outputs = run(part)
        tensors.update(zip(part.outputs, outputs, strict=True))
    return keras.tree.pack_sequence_as(self._outputs_struct, [tensors[id(tensor)] for tensor in self.outputs])


@INSTALLED.patch(
    internals.remat_lib,
    "remat",
    reason="`RematScope` fails for layers that branch on `training`, and leaks the state of random generators",
    every_thread=True,
)
def _remat(original, f):
    def call(*args, **kwargs):
        if active_distribution() is None or not in_stateless_scope():
            return original(f)(*args, **kwargs)
        return rematerialized(getattr(inspect.unwrap(f), "__self__", None), lambda: f(*args, **kwargs))

    return call


def rematerialized(layer, function, checkpoint=jax.checkpoint, regathers=True):
    """Calls a function by `checkpoint(function)()`; `layer` owns the losses that it adds.

    What the backward pass computes again includes gathering the weights that the function reads, or else they are kept.
    """
    call = _current_call.value
    if call is None or call.is_in_loop() or not regathers:
        return internals.rematerialized(layer, function, checkpoint)

    def in_trace():
        with _current_call.set_to(call._replace(trace=_current_trace())):
            return function()

    return internals.rematerialized(layer, in_trace, checkpoint)
