"""Rematerialization: what a train step computes again for its backward pass instead of holding it in memory."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from keras_dist._keras import internals, model_structure
from keras_dist.data.batch_placement import BatchPlacer
from keras_dist.layout.tensor_layout import TensorLayout
from keras_dist.steps.host_offload import KeptOnHost, checkpoint_on_host
from keras_dist.steps.options import AUTO, OptionWithoutEffectError, StepOptions
from keras_dist.steps.repeated_blocks import RepeatedBlocks
from keras_dist.steps.step_order import BackwardOrder
from keras_dist.steps.step_state import step_state

# Fused kernels of attention hold no logits, so computing them again would save little.
_KERNELS = ("custom_vjp_call", "pallas_call", "shard_map")


def _keep_kernels(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name in _KERNELS or "dot_product_attention" in primitive.name


_POLICIES: dict[str, Callable | None] = {
    "full": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _keep_kernels
    ),
    "attention": _keep_kernels,
}


class Rematerialization:
    """What one train step of a model computes again, while it is traced.

    With `is_offloaded`, products that are kept are kept in the memory of the hosts.
    """

    def __init__(self, model: keras.Model, mode: str, placer: BatchPlacer, is_offloaded: bool):
        self._policy: Any = _POLICIES[mode]  # None only where nothing is offloaded
        self._placer, self._is_offloaded = placer, is_offloaded
        self.blocks = None if mode == "attention" else RepeatedBlocks(model)
        self.count, self.is_in_block = 0, False  # how many blocks, or attentions, have been traced; whether one is now
        # Others than XLA:GPU compute gradients in the order of the blocks, unless activations are copied to hosts.
        is_gpu = placer.device_mesh.backend_mesh.devices.flat[0].platform == "gpu"
        self._order = BackwardOrder() if is_offloaded or (is_gpu and self.blocks is not None) else None

    def checkpoint(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Returns the function of a block, of which the backward pass computes again what the mode does not keep."""

        def block() -> Any:
            self.count, self.is_in_block = self.count + 1, True
            if self._order is not None:
                self._order.begin_block()
            try:
                if self._is_offloaded and step_state().is_improved:  # with_blocks_on_host follows
                    outputs = jax.checkpoint(function, policy=KeptOnHost(self._policy, self._placer))()
                elif self._is_offloaded:
                    outputs = checkpoint_on_host(function, self._policy, self._placer)
                else:
                    outputs = jax.checkpoint(function, policy=self._policy)()
            finally:
                self.is_in_block = False
            return outputs if self._order is None else self._order.end_block(outputs)

        return block

    def weight(self, value: Any, gradient_layout: TensorLayout) -> Any:
        """Returns the traced value of a weight that a layer reads; see `BackwardOrder`."""
        return value if self._order is None or not self.is_in_block else self._order.weight(value, gradient_layout)


@contextlib.contextmanager
def rematerializing(
    model: keras.Model, options: StepOptions, placer: BatchPlacer
) -> Iterator[Rematerialization | None]:
    """Traces a train step of a model in a block, with the rematerialization that it yields. "auto" must be resolved.

    Raises ValueError at the end of the block if nothing in the model is computed again.
    """
    mode = options.remat
    assert mode != AUTO
    if mode is None:
        yield None
        return
    if isinstance(mode, keras.RematScope):
        names = {layer.name for layer in model_structure.layers_by_path(model).values()}
        if missing := [name for name in mode.layer_names if name not in names]:
            raise ValueError(
                f"remat names layers that {model.name!r} does not have: {missing}. Its layers are {sorted(names)}."
            )
        with internals.remat_scope_applied(model, mode):
            yield None
        return
    rematerialization = Rematerialization(model, mode, placer, "activations" in options.offload)
    yield rematerialization
    if not rematerialization.count:
        missing = "layer that computes attention" if mode == "attention" else "repeated blocks"
        raise OptionWithoutEffectError(
            "remat",
            f"remat={mode!r} has no effect: {model.name!r} has no {missing}. Name the layers to compute again with "
            'remat=keras.RematScope("list_of_layers", layer_names=[...]), or leave remat out.',
        )
