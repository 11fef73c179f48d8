"""Patches of calls of models and layers, and of the variables that they read."""

import functools
import inspect
import re

import keras

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import INSTALLED, VARIABLES, active_distribution, distribution_of_model
from keras_dist._keras.internals import distribution_lib, in_stateless_scope
from keras_dist.variables import global_reads


@INSTALLED.patch(distribution_lib, "distribute_tensor")
def _distribute_tensor(original, distribution, tensor, layout):
    """Without it, output rules fail for layers with several outputs, and for batches that the axes do not divide."""
    return distribution.layer_calls.shard_outputs(tensor, layout)


@VARIABLES.patch(keras.Layer, "__call__")
def _call_model(original, self, *args, **kwargs):
    """Without it, `model(x)` replicates its input over all devices, and fails unexplained after its distribution."""
    if not isinstance(self, keras.Model):
        return original(self, *args, **kwargs)
    distribution = active_distribution()
    if distribution is not None and not in_stateless_scope():
        args, kwargs = distribution.batches.place_arguments(self, args, kwargs)
    is_nested = bool(internals.current_path())
    try:
        outputs = original(self, *args, **kwargs)
        return outputs if distribution is None or is_nested else distribution.batches.readable(outputs)
    except ValueError as error:
        owner = distribution_of_model(self) if distribution is None else None
        # Keras surrounds JAX's text with the arguments of a layer, in bold.
        jax_error = re.search(r"Received incompatible devices[^\n\x1b]*", str(error))
        if owner is None or jax_error is None or "keras_dist.redistribute" in str(error):
            raise
        raise ValueError(
            f"{self.name!r} was called with arrays on other devices than its variables, which are distributed by "
            f"{owner}, while no distribution is active. Call keras_dist.redistribute(model) to move it to one device, "
            f"or call it while its distribution is active. JAX reports: {jax_error[0]}"
        ) from error


@INSTALLED.patch(keras.Layer, "stateless_call")
def _stateless_call(
    original, distribution, self, trainable_variables, non_trainable_variables, *args, return_losses=False, **kwargs
):
    """Without it, an optimizer that reads a weight is taken for a layer, and steps may lack losses that layers add."""
    internals.forget_losses(self)
    call = functools.partial(original, self, return_losses=return_losses)
    state = trainable_variables, non_trainable_variables
    return distribution.layer_calls.call_stateless(self, call, state, (args, kwargs))


@INSTALLED.patch(internals.KerasVariable, "_maybe_autocast", every_thread=True)
def _read_variable(original, self, value):
    """Without it, layers compute with a weight in its stored layout, and process 0 cannot compute with it alone."""
    if global_reads.is_running_for_all():
        value = global_reads.local_value(self, value)
    distribution = active_distribution()
    cast = functools.partial(original, self)
    return cast(value) if distribution is None else distribution.layer_calls.read_weight(self, value, cast)


@INSTALLED.patch(keras.layers.Embedding, "call")
def _call_embedding(original, distribution, self, inputs):
    """Without it, FSDP gathers the table for a few rows of it, and in float32 although the layer casts the rows."""
    rows = distribution.layer_calls.look_up(self, inputs)
    return original(self, inputs) if rows is None else rows


@INSTALLED.patch(keras.Operation, "__call__")
def _call_operation(original, distribution, self, *args, **kwargs):
    """Without it, layout maps have no rules for inputs, and backward passes cannot gather weights of a layer again."""
    if not isinstance(self, keras.Layer):
        return original(self, *args, **kwargs)
    return distribution.layer_calls.run(self, original, args, kwargs)


@INSTALLED.patch(internals.jax_core, "while_loop")
def _while_loop(original, distribution, cond, body, loop_vars, maximum_iterations=None):
    """Without it, `generate()` gathers weights, and copies the caches of keys and values, for each token."""
    loop = functools.partial(original, cond, body, maximum_iterations=maximum_iterations)
    return distribution.layer_calls.run_loop(loop, loop_vars)


@INSTALLED.patch(internals.function_lib.Function, "_run_through_graph")
def _run_through_graph(original, distribution, self, inputs, operation_fn=lambda op: op, call_fn=None):
    """Without it, blocks of a functional model that are not layers cannot be computed again for the backward pass."""
    outputs = None if call_fn is not None else distribution.layer_calls.run_graph(self, inputs, operation_fn)
    return original(self, inputs, operation_fn, call_fn) if outputs is None else outputs


@INSTALLED.patch(internals.remat_lib, "remat", every_thread=True)
def _remat(original, f):
    """Without it, `RematScope` fails for layers that branch on `training`, and leaks the state of random generators."""

    def call(*args, **kwargs):
        distribution = active_distribution()
        if distribution is None or not in_stateless_scope():
            return original(f)(*args, **kwargs)
        layer = getattr(inspect.unwrap(f), "__self__", None)
        return distribution.layer_calls.rematerialized(layer, lambda: f(*args, **kwargs))

    return call
