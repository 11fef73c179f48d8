"""The passes over steps, in the order in which they are asked about an operation."""

from keras_dist.passes.fourier import fourier
from keras_dist.passes.rewriting import Pass
from keras_dist.passes.scatters import scatters
from keras_dist.passes.windows import grouped_convolutions, windows

PASSES: dict[str, Pass] = {each.__name__: each for each in (grouped_convolutions, windows, scatters, fourier)}
"""By the names that `StepOptions(without_passes=...)` takes."""
