"""What a compiled step computes first, where a scheduler of XLA would hold too much in memory.

Schedulers move what devices send to each other, and what they copy to their hosts, to where it overlaps with
computation, and with it what it is computed from. So XLA:GPU computes the gradients of weights many blocks of layers
later than the rest of their backward pass, and holds until then what they are computed from. Activations are copied to
hosts when they are about to be fetched again. `jax.lax.optimization_barrier` changes neither.

No scheduler can move a true data dependency. A token is a number that a device has once it has computed or copied an
array: an element of it. `after` returns a value unless a token is a number that never occurs, so it needs the token.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import take_current_trace
from jax.sharding import PartitionSpec

from keras_dist.layout.tensor_layout import TensorLayout
from keras_dist.mesh.device_mesh import as_device_mesh
from keras_dist.sharding.per_device import on_devices

_NEVER = 0x7FDEADBE  # the bits of a float32, a NaN, that no computation returns


def token_of(value: Any, layout: TensorLayout, is_on_host: bool = False) -> Any:
    """Returns the token of an array that `is_float`: a float32 scalar. Each device has its own, so nothing is sent."""
    if not isinstance(value, Tracer):  # with `run_eagerly`
        return jnp.zeros((), "float32")

    def on_device(shard: Any) -> Any:
        ends = [1] * shard.ndim
        if is_on_host:  # full tiles of a TPU's memory, whichever dims are tiled; to slice less, XLA:TPU copies it all
            ends = [1 if index == 0 and shard.ndim > 2 else min(128, n) for index, n in enumerate(shard.shape)]
        corner = jax.lax.slice(shard, [0] * shard.ndim, ends)
        corner = jax.device_put(corner, jax.memory.Space.Device) if is_on_host else corner
        return corner.ravel()[0].astype("float32")

    mesh, spec = as_device_mesh(layout.device_mesh).backend_mesh, layout.backend_layout.spec
    return on_devices(on_device, mesh, spec, PartitionSpec())(value)


def is_known(token: Any) -> Any:
    """Returns True, as a traced value that a device has once it has the token."""
    return jax.lax.bitcast_convert_type(token, "int32") != _NEVER


def after(tokens: Sequence[Any], value: Any) -> Any:
    """Returns an array that a device has once it has the tokens. One that is not `is_float` does not wait."""
    if not tokens or not is_float(value):
        return value
    # Behind a barrier, or else XLA:GPU fuses what the tokens are made of with all that uses the value.
    are_known = jax.lax.optimization_barrier(functools.reduce(jnp.logical_and, map(is_known, tokens)))
    return jnp.where(are_known, value, jnp.zeros((), value.dtype))


def is_float(value: Any) -> bool:
    """Returns whether an array consists of real floating-point numbers, of which there is at least one."""
    return jnp.issubdtype(value.dtype, jnp.floating) and value.size > 0


class BackwardOrder:
    """Lets the backward pass through a block of layers begin when the gradients of the last block but one are known.

    So a device holds what the gradients of two blocks are computed from, and reduces the gradients of one while it
    computes those of the next.
    """

    def __init__(self):
        self._tokens: list[tuple[Any, Any]] = []  # of each block: the trace that it was called in, and a token
        self._earlier_token: Any = None  # that of the block that is two before the one that is being traced

    def begin_block(self) -> None:
        with take_current_trace() as trace:
            before = self._tokens[-2:]
            is_in_trace = len(before) == 2 and all(each is trace for each, _ in before)
            self._earlier_token = before[0][1] if is_in_trace else None

    def end_block(self, outputs: Any) -> Any:
        """Returns the outputs of a block; their gradients wait for those of the weights of the next block but one."""
        outputs, token = _with_token(outputs)
        with take_current_trace() as trace:
            self._tokens.append((trace, token))
        return outputs

    def weight(self, value: Any, gradient_layout: TensorLayout) -> Any:
        """Returns a weight of the block that is being traced. Its gradient has to be known for an earlier block."""
        if self._earlier_token is None or not is_float(value):
            return value

        @jax.custom_vjp
        def weight(value: Any, token: Any) -> Any:
            return value

        def backward(_: None, gradient: Any) -> tuple[Any, Any]:
            return gradient, token_of(gradient, gradient_layout)

        weight.defvjp(lambda value, token: (value, None), backward)
        return weight(value, self._earlier_token)


@jax.custom_vjp
def _with_token(values: Any) -> tuple[Any, Any]:
    """Returns the values, and a token whose gradient is the token that the gradients of the values wait for."""
    return values, jnp.zeros((), "float32")


def _backward(_: None, gradients: tuple[Any, Any]) -> tuple[Any]:
    value_gradients, token = gradients
    return (jax.tree.map(lambda each: after([token], each), value_gradients),)


_with_token.defvjp(lambda values: (_with_token(values), None), _backward)
