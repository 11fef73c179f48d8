"""Optimizer state in the memory of the hosts: fetched where the update uses it, and put back."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Literal  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import PartitionSpec

from keras_dist.layout.tensor_layout import HOST_MEMORY, TensorLayout
from keras_dist.mesh.device_mesh import DeviceMesh, as_device_mesh
from keras_dist.mesh.devices import is_attached
from keras_dist.steps.step_order import is_known, token_of
from keras_dist.tracing.jaxpr_evaluation import Values

MIN_OFFLOAD_BYTES = 64 * 2**10
"""Smaller arrays stay on the devices: fetching them would take longer than it is worth."""

_FETCHED_AHEAD = 16 * 2**20  # bytes of each device: enough to keep the link to the host busy


def require_host_memory(mesh: DeviceMesh) -> None:
    """Raises ValueError if devices cannot use the memory of their host."""
    device = mesh.backend_mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()] if is_attached(device) else [HOST_MEMORY]
    if HOST_MEMORY not in kinds:
        raise ValueError(
            f"offload needs memory of the host ({HOST_MEMORY!r} in JAX), which {device.device_kind} devices cannot "
            f"use: they have {kinds}. Leave the option out; optimizer_state_dtype, remat and microbatches save "
            "memory on every device."
        )


def apply_with_state_on_host(
    apply: Callable, state: Sequence, gradients: Sequence, weights: Sequence, layouts: Sequence[TensorLayout | None]
) -> tuple[list, list]:
    """Returns new weights and state, as `apply(state, gradients, weights)` does, with state of the hosts.

    Compilers start copies as early as they can, so the devices would hold all state at once. The update is traced, and
    each state is fetched where it is first used, once an earlier one is back in host memory. `layouts` has those of the
    optimizer's variables that are in host memory, None for the others.
    """
    if any(isinstance(value, Tracer) for value in state):
        return _Update(apply, state, gradients, weights, layouts).run()

    def moved(values: Sequence[jax.Array], kind: str) -> list[jax.Array]:
        each = zip(values, layouts, strict=True)
        return [v if layout is None else jax.device_put(v, v.sharding.with_memory_kind(kind)) for v, layout in each]

    new_weights, new_state = apply(moved(state, "device"), gradients, weights)
    return list(new_weights), moved(new_state, HOST_MEMORY)


class _Update:
    """An update of weights while it is traced."""

    def __init__(self, apply, state, gradients, weights, layouts):
        arguments = (list(state), list(gradients), list(weights))
        # Without the memory that they are in, since the update computes with what was fetched.
        specs = jax.tree.map(lambda value: jax.ShapeDtypeStruct(value.shape, value.dtype), arguments)
        traced, shapes = jax.make_jaxpr(apply, return_shape=True)(*specs)
        self._jaxpr, self._structure = traced.jaxpr, jax.tree.structure(shapes)
        self._values = Values(self._jaxpr, traced.consts, jax.tree.leaves(arguments))
        on_host = [(index, layout) for index, layout in enumerate(layouts) if layout is not None]
        self._to_fetch = {self._jaxpr.invars[index]: layout for index, layout in on_host}
        self._to_put = {len(weights) + index: layout for index, layout in on_host}  # by the index of the output
        self._put: dict[int, Any] = {}
        self._latest: Any = None  # state that was put back, and its layout
        self._waits_for: Any = None  # the token of such state, that fetches wait for
        self._bytes_ahead = 0  # that were fetched since

    def run(self) -> tuple[list, list]:
        pending: list[Any] = []
        for equation in self._jaxpr.eqns:
            used = [v for v in equation.invars if not isinstance(v, Literal) and v in self._to_fetch]
            if used:
                self._evaluate(pending)
                pending = []
            for variable in dict.fromkeys(used):
                value, layout = self._values.read(variable), self._to_fetch.pop(variable)
                self._values.known[variable] = self._fetched(value, layout)
            pending.append(equation)
        self._evaluate(pending)
        outputs = [self._put.get(i, self._values.read(v)) for i, v in enumerate(self._jaxpr.outvars)]
        return jax.tree.unflatten(self._structure, outputs)

    def _evaluate(self, equations: Sequence[Any]) -> None:
        """Evaluates a part of the update, and puts the state back that is then known."""
        self._values.evaluate(equations)
        for index in [i for i in self._to_put if self._jaxpr.outvars[i] in self._values.known]:
            layout, value = self._to_put.pop(index), self._values.read(self._jaxpr.outvars[index])
            value = self._put[index] = jax.device_put(value, jax.memory.Space.Host)
            if value.ndim <= 2 or self._latest is None:  # of more dims, XLA:TPU may copy an array to slice it
                self._latest = value, layout

    def _fetched(self, value: Any, layout: TensorLayout) -> Any:
        size = math.prod(layout.backend_layout.shard_shape(value.shape)) * value.dtype.itemsize
        if self._bytes_ahead + size > _FETCHED_AHEAD and self._latest is not None:
            self._waits_for, self._bytes_ahead = token_of(*self._latest, is_on_host=True), 0
        self._bytes_ahead += size
        if self._waits_for is None:
            return jax.device_put(value, jax.memory.Space.Device)
        return _fetched_after(self._waits_for, value, layout)


def _fetched_after(token: Any, value: Any, layout: TensorLayout) -> Any:
    """Returns an array in the memory of the devices, copied once a device has a token.

    XLA:TPU removes barriers before it schedules copies, so that the copy is in a branch of a condition there. XLA:GPU
    would wait for such a condition on the host, so it gets a barrier, although it removes them, too.
    """
    mesh, spec = as_device_mesh(layout.device_mesh).backend_mesh, layout.backend_layout.spec

    def fetched(value: Any) -> Any:
        return jax.device_put(value, jax.memory.Space.Device)

    def on_device(token: Any, value: Any) -> Any:
        if mesh.devices.flat[0].platform != "tpu":
            return fetched(jax.lax.optimization_barrier((value, token))[0])
        return jax.lax.cond(is_known(token), fetched, lambda value: jnp.zeros(value.shape, value.dtype), value)

    in_specs = PartitionSpec(), spec
    return jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False)(token, value)
