"""Patches of Fourier transforms along sequences that are sharded."""

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import INSTALLED


@INSTALLED.patch(internals.keras_math, "fft", reason="XLA:CPU cannot transform along a sharded dim")
def _fft(original, distribution, x):
    if len(x[0].shape) != 2:
        return original(x)
    return distribution.shard_sequences(original(distribution.gather_sequences(x)))
