"""Calls of models and layers while a step is traced: the weights that they read, and what is computed again."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun, set_current_trace, take_current_trace
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding, PartitionSpec

from keras_dist._keras import internals, model_structure
from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.passes.decoding_loops import changing_operands, with_improved_loops
from keras_dist.sharding.activations import distribute_tensors
from keras_dist.sharding.lookups import Lookup
from keras_dist.sharding.per_device import call_per_device
from keras_dist.sharding.resharding import to_compute_layout, weight_layouts
from keras_dist.sharding.sequences import SequenceSharding
from keras_dist.steps.step_state import changed, step_state
from keras_dist.variables.variable_layouts import VariableSpec


class ModelCall(NamedTuple):
    """A `stateless_call` of a model or layer.

    A weight that a layer reads inside a loop of its own (`jax.lax.scan`) is resharded once, in the trace around the
    loop. Resharded inside, it would be gathered at every iteration, and so would its gradient be reduced.
    """

    model: keras.Layer
    trace: Any  # that the call began in
    values: set[int]  # ids of the values of variables that were passed to it
    reads: dict[tuple, tuple[Any, Any, Any]]  # a trace, a value of a weight, and what it is there, read once for all
    reads_stored_table: bool = False  # whether an embedding reads its table as it is stored

    def is_in_loop(self) -> bool:
        return _current_trace() is not self.trace

    def read_once(self, variable: Any, value: Any, dtype: Any, distribute: Callable[[], Any]) -> Any:
        """Returns what `distribute` returned for the first read of a weight with this value, in a dtype.

        XLA:GPU would gather the weight for each read. A layer may assign another value (`SpectralNormalization`).
        """
        trace = _current_trace()
        key = id(variable), id(value), dtype, id(trace)
        if key not in self.reads:
            self.reads[key] = trace, value, distribute()  # with trace and value, so that no other ones get their ids
        return self.reads[key][-1]


def _current_trace() -> Any:
    """Returns what JAX traces into at the moment; the body of a loop has a trace of its own."""
    with take_current_trace() as trace:
        return trace


class LayerCalls:
    call_per_device = staticmethod(call_per_device)

    def __init__(self, distribution: Any, placer: BatchPlacer):
        self._distribution, self._placer = distribution, placer

    def call_stateless(self, layer: keras.Layer, call: Callable, state: Any, inputs: tuple[tuple, dict]) -> Any:
        """Returns what Keras's `stateless_call` does: `call(*state, *args, **kwargs)`. `inputs` are args and kwargs."""
        is_inner = step_state().call is not None
        if not is_inner and isinstance(layer, keras.Model):
            inputs = SequenceSharding(self._placer).shard_inputs(layer.name, inputs)

        def computed(state: Any, inputs: tuple[tuple, dict]) -> Any:
            values = {id(value) for value in itertools.chain(*state)}
            with changed(call=ModelCall(layer, _current_trace(), values, {})):
                return call(*state, *inputs[0], **inputs[1])

        if is_inner:
            return computed(state, inputs)
        return self._distribution.steps.compute_call(layer, computed, state, inputs)

    def read_weight(self, variable: keras.Variable, value: Any, cast: Callable[[Any], Any]) -> Any:
        """Returns the value of a variable that a layer reads: in the layout that it computes with, if it is traced."""
        call = step_state().call
        if step_state().is_generating and isinstance(value, Tracer):
            return self._resharded(variable, cast(value))
        if call is None or not isinstance(value, Tracer) or call.reads_stored_table:
            return cast(value)
        # Outside of loops: in the trace that the call began in, if the value is known there.
        with set_current_trace(call.trace) if id(value) in call.values else contextlib.nullcontext():
            read = cast(value)
            distribute = functools.partial(self._distributed, variable, read)
            if id(variable) in step_state().kept_gradients:
                return call.read_once(variable, value, read.dtype, distribute)
            return distribute()

    def _distributed(self, variable: keras.Variable, value: Any) -> Any:
        state = step_state()
        stored, used, update = weight_layouts(variable, self._distribution)
        if state.are_weights_gathered and variable.trainable:
            stored = used
        if id(variable) in state.kept_gradients:
            update = None
        remat = state.rematerialization
        if remat is not None and update is not None and variable.trainable:
            value = remat.weight(value, update)
        value = to_compute_layout(value, stored, used, update, self._placer.batch_axes + self._placer.sequence_axes)
        state.weights.add(value, used.axes)
        return value

    def _resharded(self, variable: keras.Variable, value: Any) -> Any:
        """Returns a weight that a layer reads in a function that generates, in the layout that it computes with."""
        layouts = weight_layouts(variable, self._distribution)
        return to_compute_layout(value, *layouts, self._placer.batch_axes + self._placer.sequence_axes)

    def run_loop(self, loop: Callable, values: Any) -> Any:
        """Returns `loop(values)`. If it generates, it reads weights before the first token, and copies no caches.

        Rows that the batch axes do not divide are split into unequal shards.
        """
        leaves, structure = jax.tree.flatten(values)
        is_traced = any(isinstance(leaf, Tracer) for leaf in leaves)
        if step_state().call is not None or not is_traced or not internals.in_stateless_scope():
            return loop(values)
        program, outputs = jax.make_jaxpr(lambda *leaves: loop(structure.unflatten(leaves)), return_shape=True)(*leaves)
        changing = changing_operands(program)
        rows = {leaf.shape[0] for leaf, changes in zip(leaves, changing, strict=True) if changes and jnp.ndim(leaf) > 1}
        # With beams, some values have a row for each beam.
        if len(rows) == 1 and self._placer.axes_for(*rows) != self._placer.batch_axes:
            split = functools.partial(self._placer.split, rows=rows.pop())
            leaves = [split(leaf) if changes else leaf for leaf, changes in zip(leaves, changing, strict=True)]
            program = program.replace(consts=list(map(split, program.consts)))  # the prompts
        results = jaxpr_as_fun(with_improved_loops(program))(*leaves)
        if self._placer.is_of_several_processes:  # each of which gets all tokens
            everywhere = NamedSharding(self._placer.device_mesh.backend_mesh, PartitionSpec())
            results = [with_sharding_constraint(each, everywhere) if _are_tokens(each) else each for each in results]
        return jax.tree.structure(outputs).unflatten(results)

    def look_up(self, layer: keras.layers.Embedding, inputs: Any) -> Any:
        """Returns the rows that an embedding layer looks up in its table; None: as Keras does."""
        state = step_state()
        if state.call is None or state.call.is_in_loop() or layer.quantization_mode or layer.lora_enabled:
            return None
        table = model_structure.embedding_table(layer)
        layouts, is_kept = weight_layouts(table, self._distribution), id(table) in state.kept_gradients
        if state.are_weights_gathered and table.trainable:
            layouts = layouts._replace(stored=layouts.compute)
        is_tied = id(table) in model_structure.tied_tables(state.call.model)
        lookup = Lookup(table.shape, inputs.shape, layouts, self._placer, is_tied, is_kept)
        is_cheaper = lookup.exchanges_rows or model_structure.casts_rows_to_fewer_bytes(layer)
        if not lookup.has_sharded_rows or not is_cheaper:
            return None
        is_integer = "int" in keras.backend.standardize_dtype(inputs.dtype)
        indices = inputs if is_integer else keras.ops.cast(inputs, "int32")
        call = state.call._replace(reads_stored_table=lookup.takes_stored_table)
        with internals.AutocastScope(layer.compute_dtype), changed(call=call):
            values = keras.ops.convert_to_tensor(table)
        return lookup(values, indices)

    def shard_inputs(self, path: str, inputs: Any) -> Any:
        """Returns the inputs of a layer, constrained to the layout of the rule for `path`."""
        layout = self._distribution.get_tensor_layout(path)
        if not layout or not jax.tree.leaves(inputs):
            return inputs
        return self._sharded(inputs, layout, role="input")

    def shard_outputs(self, outputs: Any, layout: Any) -> Any:
        """Returns the outputs of the layer that is called, constrained to a layout."""
        path = internals.current_path()
        inputs = self._distribution.get_tensor_layout(f"{path}/input") if path else None
        return self._sharded(outputs, layout, inputs_layout=inputs)

    def _sharded(self, tensors: Any, layout: Any, **kind: Any) -> Any:
        axes = self._placer.batch_axes, self._placer.sequence_axes
        return distribute_tensors(tensors, layout, *axes, unequal=step_state().unequal_shards, **kind)

    # ------------------------------------------------------------------------------------------- computed again

    def run(self, layer: keras.Layer, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs `original(layer, *args, **kwargs)`, of which the backward pass may compute something again."""
        args = self.shard_inputs(f"{internals.current_path()}/input", args)
        run = functools.partial(original, layer, *args, **kwargs)
        call, remat = step_state().call, step_state().rematerialization
        is_generating = call is None and internals.in_scope_without_losses() and not internals.in_symbolic_scope()
        if is_generating and model_structure.may_have_experts(layer):
            with changed(is_generating=False):
                return _called_stateless(layer, args, kwargs)
        if is_generating:
            with changed(is_generating=True):
                return run()
        if call is None or (remat is not None and remat.is_in_block):
            return run()
        if remat is not None and remat.blocks is None and internals.has_attention(layer):
            again = functools.partial(self.rematerialized, layer, checkpoint=remat.checkpoint)
            with internals.attention_replaced(layer, again):
                return run()
        if remat is not None and remat.blocks is not None and id(layer) in remat.blocks.layers:
            return self.rematerialized(layer, run, remat.checkpoint, self._distribution.reshard_after_forward)
        # Weights that are read in a loop are gathered before it. The backward pass begins with the last layers, whose
        # weights are still there.
        if call.is_in_loop() or not self._is_gathered_again(layer) or layer in model_structure.last_layers(call.model):
            return run()
        keep = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
        return self.rematerialized(layer, run, keep)

    def _is_gathered_again(self, layer: keras.Layer) -> bool:
        """Returns whether weights of its own are dropped after the forward pass, and gathered for the backward pass."""
        if not (distribution := self._distribution).reshard_after_forward:
            return False
        specs = map(VariableSpec.of, model_structure.direct_variables(layer))
        return any(distribution.get_variable_layout(each) != distribution.get_compute_layout(each) for each in specs)

    def run_graph(self, graph: Any, inputs: Any, operation_of: Callable) -> Any:
        """Returns the outputs of a functional model, whose blocks the backward pass computes again; None: as Keras."""
        remat = step_state().rematerialization
        if remat is None or remat.blocks is None or remat.is_in_block or step_state().call is None:
            return None
        if (parts := remat.blocks.parts.get(id(graph))) is None:
            return None
        tensors = dict(zip(map(id, graph.inputs), keras.tree.flatten(inputs), strict=True))

        def run(part: Any) -> list:
            known = dict(tensors)
            for node in part.nodes:
                args, kwargs = node.arguments.fill_in(known)
                outputs = operation_of(node.operation)(*args, **kwargs)
                known.update(zip(map(id, node.outputs), keras.tree.flatten(outputs), strict=True))
            return [known[key] for key in part.outputs]

        for part in parts:
            if part.is_block:
                layer = next(node.operation for node in part.nodes if isinstance(node.operation, keras.Layer))
                regathers, compute = self._distribution.reshard_after_forward, functools.partial(run, part)
                outputs = self.rematerialized(layer, compute, remat.checkpoint, regathers)
            else:
                outputs = run(part)
            tensors.update(zip(part.outputs, outputs, strict=True))
        return model_structure.pack_outputs(graph, [tensors[id(tensor)] for tensor in graph.outputs])

    def rematerialized(
        self, layer: Any, function: Callable, checkpoint: Callable = jax.checkpoint, regathers: bool = True
    ) -> Any:
        """Calls a function by `checkpoint(function)()`; `layer` owns the losses that it adds.

        What the backward pass computes again includes gathering the weights that the function reads, or else they are
        kept.
        """
        call = step_state().call
        if call is None or call.is_in_loop() or not regathers:
            return internals.rematerialized(layer, function, checkpoint)

        def in_trace() -> Any:
            with changed(call=call._replace(trace=_current_trace())):
                return function()

        return internals.rematerialized(layer, in_trace, checkpoint)


def _called_stateless(layer: keras.Layer, args: tuple, kwargs: dict) -> Any:
    """Calls a layer by `stateless_call`, where it is called itself in a `keras.StatelessScope`, as in `generate()`."""
    variables = layer.non_trainable_variables
    before = [variable.value for variable in variables]
    trained = [variable.value for variable in layer.trainable_variables]
    outputs, after = layer.stateless_call(trained, before, *args, **kwargs)  # pyright: ignore
    for variable, value, old in zip(variables, after, before, strict=True):
        if value is not old:
            variable.assign(value)
    return outputs


def _are_tokens(value: Any) -> bool:
    return jnp.ndim(value) > 1 and jnp.issubdtype(value.dtype, jnp.integer)
