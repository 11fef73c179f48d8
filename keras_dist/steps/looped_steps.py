"""A step that also takes several batches: a compiled loop, whose program holds the step once, whatever their number."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from keras_dist._report.units import counted
from keras_dist.data.executions import StackedBatches


def looped(step: Callable, concatenates: bool) -> Callable:
    """Returns a function of state and batch that computes `step`, or the steps of a `StackedBatches` one by one.

    The outputs of several steps are those of the last one (logs), or all of them, concatenated (predictions).
    """

    @functools.wraps(step)
    def step_or_steps(state: Any, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, StackedBatches):
            return step(state, batch)

        def body(state: Any, batch: Any) -> tuple[Any, Any]:
            outputs, new_state = step(state, batch)
            if added := len(jax.tree.leaves(new_state)) - len(jax.tree.leaves(state)):
                raise ValueError(
                    f"The first step has created {counted(added, 'variable')}, for example of a metric that creates "
                    "them when it is updated, which a loop over the batches of an execution cannot. Pass the metric to "
                    "compile(metrics=...), build it in the model's __init__, or set steps_per_execution=1."
                )
            return jax.tree.map(_as_before, new_state, state), outputs

        state, outputs = jax.lax.scan(body, state, batch.arrays)
        return jax.tree.map(_concatenated if concatenates else lambda each: each[-1], outputs), state

    return step_or_steps


def _as_before(new: Any, old: Any) -> jax.Array:
    """Returns a value of the state after a step in the dtype before it, which is what its variable is assigned."""
    return jnp.asarray(new, old.dtype)


def _concatenated(outputs: jax.Array) -> jax.Array:
    return outputs.reshape(outputs.shape[0] * outputs.shape[1], *outputs.shape[2:])
