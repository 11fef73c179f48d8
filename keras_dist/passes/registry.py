"""The passes, in the order in which they are asked about an operation.

A pass over the whole step sees what XLA compiles: what the model computes, its gradients and the update of the weights.
A forward pass sees forward computation, loss and metrics before they are differentiated, so what it replaces is
differentiated as it has written it.
"""

from keras_dist.passes.fourier import fourier
from keras_dist.passes.rewriting import Pass
from keras_dist.passes.scatters import scatters
from keras_dist.passes.windows import grouped_convolutions, windows

PASSES: dict[str, Pass] = {each.__name__: each for each in (grouped_convolutions, windows, scatters, fourier)}
"""The passes over whole steps, by the names that `StepOptions(without_passes=...)` takes."""

FORWARD_PASSES: dict[str, Pass] = {}
"""The forward passes, by name."""
