"""Activations in the memory of the hosts: put there when a block of layers ends, and fetched for its backward pass."""

from collections.abc import Callable
from typing import Any

import jax

from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.layout.tensor_layout import TensorLayout
from keras_dist.steps.host_offload import MIN_OFFLOAD_BYTES
from keras_dist.steps.step_order import after, is_float, token_of
from keras_dist.tracing.jaxpr_evaluation import as_function


def checkpoint_on_host(function: Callable[[], Any], policy: Callable | None, placer: BatchPlacer) -> Any:
    """Calls a function, and keeps what a policy of `jax.checkpoint` saves in host memory until the backward pass.

    The outputs are there once all of it is in host memory: compilers would copy it when it is fetched again. On a mesh
    with axes that rows are not sharded over, nothing says how it is sharded, so that the compiler decides.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)()
    jaxpr = traced.jaxpr.replace(invars=traced.jaxpr.constvars, constvars=[])
    compute = jax.checkpoint(as_function(jaxpr), policy=policy)

    @jax.custom_vjp
    def block(*inputs: Any) -> list[Any]:
        return compute(*inputs)

    def forward(*inputs: Any) -> tuple[list[Any], Any]:
        outputs, pullback = jax.vjp(compute, *inputs)
        kept, structure = jax.tree.flatten(pullback)
        known = set(map(id, inputs))

        def to_host(value: Any) -> Any:
            is_large = is_float(value) and value.size * value.dtype.itemsize > MIN_OFFLOAD_BYTES
            return jax.device_put(value, jax.memory.Space.Host) if is_large and id(value) not in known else value

        put = list(map(to_host, kept))
        tokens = [token for each in put if _is_on_host(each) for token in _tokens(each, placer)]
        outputs = [after(tokens, each) if is_float(each) else each for each in outputs]
        return outputs, jax.tree.unflatten(structure, put)

    def backward(pullback: Any, gradients: list[Any]) -> Any:
        platform = placer.device_mesh.backend_mesh.devices.flat[0].platform
        kept, structure = jax.tree.flatten(pullback)
        fetched = [_fetched(each, gradients, platform) if _is_on_host(each) else each for each in kept]
        return jax.tree.unflatten(structure, fetched)(gradients)

    block.defvjp(forward, backward)
    return jax.tree.unflatten(jax.tree.structure(shapes), block(*traced.consts))


def _is_on_host(value: Any) -> bool:
    return jax.typeof(value).memory_space == jax.memory.Space.Host


def _tokens(value: Any, placer: BatchPlacer) -> list[Any]:
    """Returns the token of an array in host memory whose dim 0 has rows; none where its sharding is not known."""
    shards = placer.num_batch_shards
    if shards != placer.device_mesh.backend_mesh.size or value.shape[0] % shards:
        return []
    layout = TensorLayout([placer.batch_axes, *[None] * (value.ndim - 1)], placer.device_mesh)
    return [token_of(value, layout, is_on_host=True)]


def _fetched(value: Any, gradients: list[Any], platform: str) -> Any:
    """Returns an array in the memory of the devices, fetched for the backward pass that begins with gradients.

    Without a barrier XLA:GPU sees an array that is copied to the host and back, and leaves it on the device. XLA:TPU
    does so if there is one.
    """
    if platform != "tpu":
        value, _ = jax.lax.optimization_barrier((value, [each for each in gradients if is_float(each)]))
    return jax.device_put(value, jax.memory.Space.Device)
