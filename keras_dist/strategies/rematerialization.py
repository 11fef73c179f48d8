"""Rematerialization: what a train step computes again for its backward pass instead of holding it in memory."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import keras

from keras_dist._keras import internals
from keras_dist._keras.repeated_blocks import RepeatedBlocks
from keras_dist._keras.thread_value import ThreadValue
from keras_dist._keras.train_step import OptionWithoutEffectError
from keras_dist.layout.tensor_layout import HOST_MEMORY

Mode = Literal["full", "dots", "attention"]

AUTO = "auto"
"""In place of a mode: the cheapest one that fits, which `planning.fitting_options` finds by compiling."""

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


_dots_to_host = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", HOST_MEMORY)


def _offload_dots(primitive: Any, *avals: Any, **parameters: Any) -> Any:
    return _keep_kernels(primitive) or _dots_to_host(primitive, *avals, **parameters)


class Rematerialization:
    """What one train step of a model computes again, while it is traced.

    Args:
        model: The model.
        mode: What to compute again.
        is_offloaded: Whether products that are kept are kept in the memory of the hosts.

    Attributes:
        policy: What `jax.checkpoint` saves of a block nonetheless.
        is_of_attention: Whether attention is computed again, instead of blocks.
        blocks: The repeated blocks of the model.
        count: How many blocks, or attentions, have been traced so far.
        is_in_block: Whether a block is being traced.
    """

    def __init__(self, model: keras.Model, mode: str, is_offloaded: bool):
        self.policy, self.is_of_attention = _POLICIES[mode], mode == "attention"
        if is_offloaded:
            self.policy = _offload_dots
        self.blocks = RepeatedBlocks(model)
        self.count, self.is_in_block = 0, False

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Notes that a block is traced."""
        self.count += 1
        self.is_in_block = True
        try:
            yield
        finally:
            self.is_in_block = False


current_rematerialization: ThreadValue[Rematerialization | None] = ThreadValue(None)
"""That of the train step which is being traced in this thread; None without one."""


@contextlib.contextmanager
def rematerializing(
    model: keras.Model, mode: str | keras.RematScope | None, is_offloaded: bool = False
) -> Iterator[None]:
    """Traces a train step of a model in a block, with the rematerialization of a mode.

    With `is_offloaded`, products that "dots" keeps are kept in the memory of the hosts.
    Raises ValueError at the end of the block if nothing in the model is computed again. "auto" must be resolved before.
    """
    assert mode != AUTO
    if mode is None:
        yield
        return
    if isinstance(mode, keras.RematScope):
        _require_layers(model, mode)
        with internals.remat_scope_applied(model, mode):
            yield
        return
    rematerialization = Rematerialization(model, mode, is_offloaded)
    with current_rematerialization.set_to(rematerialization):
        yield
    if not rematerialization.count:
        missing = "layer that computes attention" if mode == "attention" else "repeated blocks"
        raise OptionWithoutEffectError(
            "remat",
            f"remat={mode!r} has no effect: {model.name!r} has no {missing}. Name the layers to compute again with "
            'remat=keras.RematScope("list_of_layers", layer_names=[...]), or leave remat out.',
        )


def _require_layers(model: keras.Model, scope: keras.RematScope) -> None:
    names = {layer.name for layer in internals.layers_by_path(model).values()}
    missing = [name for name in scope.layer_names if name not in names]
    if missing:
        raise ValueError(
            f"remat names layers that {model.name!r} does not have: {missing}. Its layers are {sorted(names)}."
        )
