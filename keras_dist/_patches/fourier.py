"""Patches of Fourier transforms: each device transforms its rows, where XLA would gather them."""

import jax
import numpy as np

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import INSTALLED


def _patch(name: str, transformed_dims: int) -> None:
    @INSTALLED.patch(
        internals.keras_math,
        name,
        reason="XLA gathers all rows for a Fourier transform, and XLA:CPU fails for some layouts of what it gathered",
    )
    def transform(original, distribution, x, *args, **kwargs):
        if any(isinstance(each, jax.Array) for each in (*args, *kwargs.values())):  # a window
            return original(x, *args, **kwargs)
        rank = np.ndim(x[0] if isinstance(x, (tuple, list)) else x)
        return distribution.compute_rows(lambda x: original(x, *args, **kwargs), x, rank > transformed_dims)


for _name, _dims in (("fft", 1), ("fft2", 2), ("ifft2", 2), ("rfft", 1), ("irfft", 1), ("stft", 1), ("istft", 2)):
    _patch(_name, _dims)
