"""What the tests of strategies share."""

import functools

import keras
import pytest

from keras_dist.strategies.shard_dim import shard_one_more_dim


@pytest.fixture
def shard_small_optimizer_state(monkeypatch):
    """ZeRO-1 shards the optimizer state of small weights, too."""
    monkeypatch.setattr(
        "keras_dist.strategies.data_parallel.shard_one_more_dim",
        functools.partial(shard_one_more_dim, min_shard_bytes=0),
    )


@pytest.fixture
def half_precision():
    """Layers compute in bfloat16, from float32 weights."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy("float32")
