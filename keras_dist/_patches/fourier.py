"""Patches of Fourier transforms."""

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import INSTALLED


def _patch(name: str, transformed_dims: int, parameters: tuple[str, ...]) -> None:
    @INSTALLED.patch(
        internals.keras_math, name, parameters=parameters, reason="XLA:CPU cannot transform along a sharded dim"
    )
    def transform(original, distribution, x, *args, **kwargs):
        rank = len((x[0] if isinstance(x, (tuple, list)) else x).shape)
        dims = range(rank - transformed_dims, rank)
        return distribution.compute_unsharded(lambda x: original(x, *args, **kwargs), x, dims)


for _name, _dims, _parameters in (
    ("fft", 1, ("x",)),
    ("fft2", 2, ("x",)),
    ("ifft2", 2, ("x",)),
    ("rfft", 1, ("x", "fft_length")),
    ("irfft", 1, ("x", "fft_length")),
):
    _patch(_name, _dims, _parameters)
