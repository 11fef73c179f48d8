"""`StepOptions`: how a training step is computed, apart from where its tensors are placed."""

import contextlib
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import jax.numpy as jnp
import keras

from keras_dist.passes.registry import PASSES

Mode = Literal["full", "dots", "attention"]

AUTO = "auto"
"""In place of a mode: the cheapest one that fits, which `planning.fitting_options` finds by compiling."""

_OFTEN = Literal["update", "microbatch"]
_REMATS = (*get_args(Mode), AUTO)
_Experts = Literal["auto", "dense", "sparse"]
_OFFLOADED = Literal["optimizer", "activations"]


@dataclass(frozen=True)
class StepOptions:
    """Options that trade the memory, the traffic and the time of a training step against each other.

    Every distribution takes them as `step_options`. They change nothing in the model, its optimizer or its checkpoints,
    which can be resumed with other options.

    Args:
        microbatches: Number of parts that each batch is split into. The compiled step computes the gradients of one
            part after the other and updates the weights once, so it stores the activations of only one part. Each
            device splits its own rows. If their number is not divisible, all parts except the last have the same size.
        reduce_gradients: How often devices add up their gradients. "update": once, after the last microbatch; until
            then each device stores an unsharded sum in float32. "microbatch": after each one, in the layout of the
            optimizer state; this sends `microbatches` times as many bytes, and with `FullyShardedDataParallel` or
            `shard_optimizer_state` a device stores only its shard.
        gather_weights: How often `FullyShardedDataParallel` gathers weights. "microbatch": as layers use them, for each
            microbatch anew. "update": once, before the first microbatch, in the dtype that layers compute in; each
            device then stores all weights until the last microbatch.
        reduce_dtype: Dtype in which gradients of weights are sent, such as "bfloat16" or "float32". By default the one
            that they are computed in: the compute dtype of the layer. Requires `reduce_gradients="update"`.
        optimizer_state_dtype: Dtype of optimizer state, such as "bfloat16", which halves it. Updates are still computed
            in the dtype of the weight. State that a step changes by less than the precision of the dtype keeps the
            dtype of its weight: the velocity of Adam with `beta_2=0.999`, but not its momentum.
        remat: What the backward pass computes again instead of storing it, without changing any result. "full": each
            repeated block of the model, such as the layers of a transformer; the memory of activations becomes that of
            one block and of what blocks pass on, for a third more FLOP. "dots": the same, but products with weights and
            outputs of fused attention kernels are kept, which costs few FLOP. "attention": attention only, if XLA
            computes it, because XLA stores the logits of queries x keys. "auto": nothing if a step fits into the memory
            of the devices, else the first of "attention", "dots" and "full" with which it fits; when a step is traced,
            programs are compiled to find out. A `keras.RematScope`: as if all layers had been created in it.
        offload: What is kept in the memory of the hosts instead of the devices, one name or a tuple of names.
            "optimizer": state of the optimizer, of all weights larger than 64 KiB. The step fetches it where the weight
            is updated and puts it back, so each step sends its bytes over the link to the host twice. "activations":
            what `remat="dots"` keeps of each block, from the end of the block to its backward pass.
        loss_chunk: Number of tokens for which a device computes logits at a time, such as 1024. Whatever dim of each
            token is reduced before the step uses it elsewhere, such as the vocabulary of a language model or classes of
            pixels, is computed in chunks: the product that makes it, losses, metrics and gradients. So no device stores
            logits, which are often the largest arrays of a step, for a little time. Gradients of the head are added up
            in float32. Requires that nothing else uses the logits. By default they are computed at once.
        experts: How mixtures of experts are computed. "auto": only the experts that each token chooses, where it can be
            proven that the others have no part in the result; a warning names mixtures for which it cannot. "sparse":
            the same, and it is an error if there is none. "dense": as the model is written, which for most models means
            all experts for each token.
        expert_capacity: The largest number of rows that an expert computes, in multiples of the mean, such as 1.25. Of
            a device's T tokens that choose k of E experts each, an expert takes at most this many times T k / E; what
            it would add to the other tokens that choose it counts as zero. That is so in `fit`, which logs the fraction
            of pairs of a token and an expert that are left out as `expert_drops`. By default none are.
        without_passes: What is left as the model computes it, one name or a tuple of names: "windows",
            "grouped_convolutions", "scatters", "fourier", "gates", "activations". By default steps of training,
            evaluation and prediction change convolutions, maxima over windows, sums by index and Fourier transforms
            where XLA would partition them with wrong numbers, fail, or gather all rows; on one GPU gradients of gated
            layers; and on GPUs those of activation functions. Leave one out if it fails, and report it.

    Raises:
        TypeError: `remat` is something else.
        ValueError: An option with a value that it does not take.

    Example:

    >>> from keras_dist import DataParallel
    >>> DataParallel(step_options=StepOptions(microbatches=4))
    <DataParallel device_mesh=<DeviceMesh batch:8 on 8 cpu devices> step_options=StepOptions(microbatches=4)>
    """

    microbatches: int = 1
    reduce_gradients: _OFTEN = "update"
    gather_weights: _OFTEN = "microbatch"
    reduce_dtype: str | None = None
    optimizer_state_dtype: str | None = None
    remat: Mode | Literal["auto"] | keras.RematScope | None = None
    offload: str | tuple[str, ...] = ()
    loss_chunk: int | None = None
    experts: _Experts = "auto"
    expert_capacity: float | None = None
    without_passes: str | tuple[str, ...] = ()

    def __post_init__(self):
        if (count := _positive_integer(self.microbatches)) is None:
            raise ValueError(
                f"microbatches={self.microbatches!r} must be a positive integer: the number of parts that each batch "
                "is split into. 1 does not split batches."
            )
        chunk = None if self.loss_chunk is None else _positive_integer(self.loss_chunk)
        if chunk is None and self.loss_chunk is not None:
            raise ValueError(
                f"loss_chunk={self.loss_chunk!r} must be a positive integer, the number of tokens for which a device "
                "computes logits at a time, such as 1024. Leave it out to compute them at once."
            )
        object.__setattr__(self, "microbatches", count)
        object.__setattr__(self, "loss_chunk", chunk)
        for name, known in (("reduce_gradients", _OFTEN), ("gather_weights", _OFTEN), ("experts", _Experts)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {list(get_args(known))}.")
        self._check_expert_capacity()
        if not isinstance(self.remat, keras.RematScope | None) and self.remat not in _REMATS:
            kind = ValueError if isinstance(self.remat, str) else TypeError
            raise kind(f"remat={self.remat!r} must be one of {list(_REMATS)}, or a keras.RematScope.")
        offload = _names("offload", self.offload, get_args(_OFFLOADED))
        if "activations" in offload and self.remat != "dots":
            raise ValueError(
                f"offload={self.offload!r} needs remat='dots', but got remat={self.remat!r}: activations that are "
                "offloaded are the products with weights that remat='dots' keeps for the backward pass."
            )
        object.__setattr__(self, "offload", offload)
        without_passes = _names("without_passes", self.without_passes, PASSES)
        object.__setattr__(self, "without_passes", without_passes)
        for name in ("reduce_dtype", "optimizer_state_dtype"):
            if (dtype := getattr(self, name)) is not None:
                if not _is_float(dtype):
                    raise ValueError(f"{name}={dtype!r} must be a floating dtype, such as 'bfloat16' or 'float32'.")
                object.__setattr__(self, name, jnp.dtype(dtype).name)
        if self.reduce_dtype is not None and self.reduce_gradients != "update":
            raise ValueError(
                f"reduce_dtype={self.reduce_dtype!r} needs reduce_gradients='update': gradients that are reduced in "
                "each microbatch are sent in the dtype that they are computed in."
            )

    def _check_expert_capacity(self) -> None:
        capacity = self.expert_capacity
        if capacity is None:
            return
        is_number = isinstance(capacity, (int, float)) and not isinstance(capacity, bool)
        if not is_number or not 1 <= capacity < math.inf:
            raise ValueError(
                f"expert_capacity={capacity!r} must be a number of at least 1, in multiples of the mean number of rows "
                "of an expert, such as 1.25. Leave it out to drop no tokens."
            )
        if self.experts == "dense":
            raise ValueError(
                f"expert_capacity={capacity!r} needs experts='auto' or 'sparse', but got experts='dense', with which "
                "mixtures are computed as they are written."
            )

    @property
    def splits_gradients(self) -> bool:
        """Whether `train_step` computes gradients otherwise than Keras does."""
        return self.microbatches > 1 or self.reduce_dtype is not None

    @property
    def placement_only(self) -> "StepOptions":
        """The options that say where state is, without those that change how a step is computed."""
        return StepOptions(offload=tuple(name for name in self.offload if name == "optimizer"))

    @property
    def text(self) -> str:
        """The options that are not at their defaults, as arguments in Python, such as "microbatches=4"."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return ", ".join(f"{name}={_text(value)}" for name, value in changed.items())

    def __repr__(self) -> str:
        return f"StepOptions({self.text})"


def _positive_integer(value: Any) -> int | None:
    """Returns a positive integer of any type as an int, None for anything else."""
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool) and (number := operator.index(value)) > 0:
            return number
    return None


def _names(option: str, value: str | Iterable[str] | None, known: Iterable[str]) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value or ())
    if not set(names) <= set(known):
        raise ValueError(f"{option}={value!r} must name some of {list(known)}.")
    return names


def _is_float(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        return False


def _text(value: Any) -> str:
    return f"RematScope({value.mode!r})" if isinstance(value, keras.RematScope) else repr(value)


class OptionWithoutEffectError(ValueError):
    """An option of steps, or an argument of a distribution, would have no effect on a model.

    Attributes:
        option: Its name.
    """

    def __init__(self, option: str, message: str):
        super().__init__(message)
        self.option = option
