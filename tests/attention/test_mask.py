"""Which queries of a mask see no key, of which kernels know nothing."""

import numpy as np
import pytest
from support.slow_cases import slow

from keras_dist.attention.mask import AttentionMask


@pytest.mark.parametrize("seed", [*range(8), *map(slow, range(8, 400))])
def test_queries_that_see_a_key(seed):
    random = np.random.default_rng(seed)
    num_queries, num_keys = random.integers(1, 9, 2)
    is_self_attention = random.random() < 0.5
    num_keys = num_queries if is_self_attention else num_keys

    def maybe(value):
        return value if random.random() < 0.6 else None

    def rows(make, length):
        return make((random.choice([1, 3]), length))

    query_ids = rows(lambda shape: random.integers(-1, 3, shape), num_queries)
    key_ids = query_ids if is_self_attention else rows(lambda shape: random.integers(-1, 3, shape), num_keys)
    mask = AttentionMask(
        lower=maybe(int(random.integers(-3, 1))),
        upper=maybe(int(random.integers(0, 3))),
        query_valid=maybe(rows(lambda shape: random.random(shape) < 0.7, num_queries)),
        key_valid=maybe(rows(lambda shape: random.random(shape) < 0.7, num_keys)),
        segments=maybe((query_ids, key_ids)),
    )
    expected = np.asarray(mask.to_dense(num_queries, num_keys).any(-1)[:, 0])
    seen = mask.sees_a_key(num_queries, num_keys)
    np.testing.assert_array_equal(np.broadcast_to(True if seen is None else seen, expected.shape), expected)
