"""The passes, in the order in which they are asked.

A pass over the whole step sees what XLA compiles: what the model computes, its gradients and the update of the weights.
It is asked about each operation. A forward pass sees forward computation, loss and metrics before they are
differentiated, so what it replaces is differentiated as it has written it. It gets all of the program at once.
"""

from collections.abc import Callable
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

from keras_dist.passes.activations import activations
from keras_dist.passes.chunked_loss import chunked_loss, may_have_losses
from keras_dist.passes.experts import experts, may_have_experts
from keras_dist.passes.fourier import fourier
from keras_dist.passes.gates import gates
from keras_dist.passes.rewriting import Pass
from keras_dist.passes.scatters import scatters
from keras_dist.passes.step_program import StepProgram
from keras_dist.passes.windows import grouped_convolutions, windows

PASSES: dict[str, Pass] = {
    each.__name__: each for each in (grouped_convolutions, windows, scatters, fourier, gates, activations)
}
"""The passes over whole steps, by the names that `StepOptions(without_passes=...)` takes."""

ON_ONE_DEVICE = gates.__name__, activations.__name__
"""Those of them that are not about what XLA partitions."""


class ForwardPass(NamedTuple):
    """A pass over programs that are differentiated later."""

    may_find: Callable[[ClosedJaxpr], bool]
    """Whether it may find something in a program, also in that of a step with gradients. If not, it costs nothing."""

    improve: Callable[[StepProgram], ClosedJaxpr]
    """Returns the program, changed or the same object. What it finds is added to lists of the `StepProgram`."""


FORWARD_PASSES: dict[str, ForwardPass] = {
    "experts": ForwardPass(may_have_experts, experts),
    "chunked_loss": ForwardPass(may_have_losses, chunked_loss),
}
"""The forward passes, by name."""
