"""The memory of the hosts: for optimizer state and activations, which are fetched where steps use them."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Literal  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import PartitionSpec

from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.layout.tensor_layout import HOST_MEMORY, TensorLayout
from keras_dist.mesh.device_mesh import DeviceMesh, as_device_mesh
from keras_dist.mesh.devices import is_attached
from keras_dist.sharding.per_device import on_devices
from keras_dist.steps.step_order import after, is_float, is_known, token_of
from keras_dist.tracing.jaxpr_evaluation import Values, as_function, equations_in_place_of, with_equations

MIN_OFFLOAD_BYTES = 64 * 2**10
"""Smaller arrays stay on the devices: fetching them would take longer than it is worth."""

_FETCHED_AHEAD = 16 * 2**20  # bytes of each device: enough to keep the link to the host busy


def require_host_memory(mesh: DeviceMesh) -> None:
    device = mesh.backend_mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()] if is_attached(device) else [HOST_MEMORY]
    if HOST_MEMORY not in kinds:
        raise ValueError(
            f"offload needs memory of the host ({HOST_MEMORY!r} in JAX), which {device.device_kind} devices cannot "
            f"use: they have {kinds}. Leave the option out; optimizer_state_dtype, remat and microbatches save "
            "memory on every device."
        )


# ------------------------------------------------------------------------------------------------ optimizer state


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
    def __init__(self, apply, state, gradients, weights, layouts):
        arguments = (list(state), list(gradients), list(weights))
        # Without the memory that they are in, since the update computes with what was fetched.
        specs = jax.tree.map(lambda value: jax.ShapeDtypeStruct(value.shape, value.dtype), arguments)
        traced, shapes = jax.make_jaxpr(apply, return_shape=True)(*specs)
        self._jaxpr, self._structure = traced.jaxpr, jax.tree.structure(shapes)
        self._values = Values(self._jaxpr, traced.consts, jax.tree.leaves(arguments))
        on_host = [(index, layout) for index, layout in enumerate(layouts) if layout is not None]
        self._to_fetch = {self._jaxpr.invars[index]: layout for index, layout in on_host}
        self._num_weights = len(weights)
        self._to_put = {len(weights) + index: layout for index, layout in on_host}  # by the index of the output
        self._put: dict[int, Any] = {}
        self._latest: Any = None  # state that was put back, and its layout
        self._waits_for: Any = None  # the token of such state, that fetches wait for
        self._bytes_ahead = 0  # that were fetched since

    def run(self) -> tuple[list, list]:
        pending: list[Any] = []
        for equation in _last_first(self._jaxpr, self._num_weights):
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


def _last_first(jaxpr: Any, num_weights: int) -> list[Any]:
    """Returns the equations of an update in another order: for the last weight first, whose gradient is known first."""
    producers = {variable: index for index, equation in enumerate(jaxpr.eqns) for variable in equation.outvars}
    order: dict[int, None] = {}
    for output in (*reversed(jaxpr.outvars[:num_weights]), *jaxpr.outvars[num_weights:]):
        needed, pending = set(), [output]
        while pending:
            index = None if isinstance(variable := pending.pop(), Literal) else producers.get(variable)
            if index is not None and index not in order and index not in needed:
                needed.add(index)
                pending += jaxpr.eqns[index].invars
        order.update(dict.fromkeys(sorted(needed)))
    return [jaxpr.eqns[index] for index in order]


def _fetched_after(token: Any, value: Any, layout: TensorLayout) -> Any:
    """Returns an array in the memory of the devices, copied once a device has a token.

    XLA removes barriers before it schedules copies, so the copy is in a branch of a condition. XLA:GPU waits for such a
    condition on the host, which takes far less time than the copy.
    """
    mesh, spec = as_device_mesh(layout.device_mesh).backend_mesh, layout.backend_layout.spec

    def fetched(value: Any) -> Any:
        return jax.device_put(value, jax.memory.Space.Device)

    def on_device(token: Any, value: Any) -> Any:
        return jax.lax.cond(is_known(token), fetched, lambda value: jnp.zeros(value.shape, value.dtype), value)

    return on_devices(on_device, mesh, (PartitionSpec(), spec), spec)(token, value)


# ---------------------------------------------------------------------------------------------------- activations


def checkpoint_on_host(function: Callable[[], Any], policy: Callable, placer: BatchPlacer) -> Any:
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
        known = set(map(id, inputs))

        def put(value: Any) -> Any:
            is_large = is_float(value) and value.size * value.dtype.itemsize > MIN_OFFLOAD_BYTES
            return jax.device_put(value, jax.memory.Space.Host) if is_large and id(value) not in known else value

        pullback = jax.tree.map(put, pullback)
        on_host = filter(_is_on_host, jax.tree.leaves(pullback))
        tokens = [token for each in on_host for token in _tokens(each, placer)]
        return [after(tokens, each) for each in outputs], pullback

    def backward(pullback: Any, gradients: list[Any]) -> Any:
        is_tpu = placer.device_mesh.backend_mesh.devices.flat[0].platform == "tpu"

        def fetched(value: Any) -> Any:
            if not _is_on_host(value):
                return value
            # Fetched when the backward pass begins. Without a barrier XLA:GPU sees an array that is copied to the host
            # and back, and leaves it on the device. XLA:TPU does so if there is one.
            if not is_tpu:
                value, _ = jax.lax.optimization_barrier((value, list(filter(is_float, gradients))))
            return jax.device_put(value, jax.memory.Space.Device)

        return jax.tree.map(fetched, pullback)(gradients)

    block.defvjp(forward, backward)
    return jax.tree.unflatten(jax.tree.structure(shapes), block(*traced.consts))


class KeptOnHost(NamedTuple):
    """Marks what `jax.checkpoint` computes again in a program that passes change before `with_blocks_on_host`."""

    policy: Callable
    placer: BatchPlacer

    def __call__(self, *arguments: Any, **params: Any) -> Any:
        return self.policy(*arguments, **params)


def with_blocks_on_host(program: Any) -> Any:
    """Returns a program, not yet differentiated, that keeps in host memory what marked blocks keep."""

    def replaced(equation: Any) -> Sequence[Any] | None:
        policy = equation.params.get("policy")
        if not isinstance(policy, KeptOnHost):
            return None
        block = as_function(equation.params["jaxpr"])

        def on_host(*operands: Any) -> Any:
            return checkpoint_on_host(partial(block, *operands), policy.policy, policy.placer)

        return equations_in_place_of(equation, on_host)

    return with_equations(program, replaced)


def _is_on_host(value: Any) -> bool:
    return jax.typeof(value).memory_space == jax.memory.Space.Host


def _tokens(value: Any, placer: BatchPlacer) -> list[Any]:
    """Returns the token of an array in host memory whose dim 0 has rows; none where its sharding is not known."""
    shards = placer.num_batch_shards
    if shards != placer.device_mesh.backend_mesh.size or value.shape[0] % shards:
        return []
    layout = TensorLayout([placer.batch_axes, *[None] * (value.ndim - 1)], placer.device_mesh)
    return [token_of(value, layout, is_on_host=True)]
