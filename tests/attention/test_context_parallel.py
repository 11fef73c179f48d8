"""Attention over sequences that are sharded: the numbers of one device, and what devices send each other."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from support.kernels_on_cpus import KERNEL, use_kernel_of
from support.slow_cases import crossed, slow, slow_unless

import keras_dist as kd
from keras_dist.attention.exchange import Exchange, choose_exchange
from keras_dist.steps.step_state import recorded_calls

ROWS, SIZE = 4, 8
ALL_TO_ALL, ALL_GATHER = "all-to-all over 'context'", "all-gather over 'context'"
BOTH = "all-to-all and all-gather over 'context', 2 x 2"
EXCHANGES = {
    ALL_TO_ALL: ("data:2,context:4", 4, 2),
    ALL_GATHER: ("data:4,context:2", 3, 1),
    BOTH: ("data:2,context:4", 2, 2),
}


@pytest.fixture(params=["cpu", "tpu"])
def platform(request, monkeypatch):
    if request.param != "cpu":
        use_kernel_of(request.param, monkeypatch)
    return request.param


def context_parallel(mesh, **options):
    layout_map = kd.LayoutMap(kd.create_device_mesh(mesh))
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", sequence_dim_name="context", **options)


def output_and_gradients(distribution, operands, make_mask, make_bias=lambda: None, **options):
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(operands[0].shape), "float32")

    def loss(query, key, value):
        output = keras.ops.dot_product_attention(query, key, value, bias=make_bias(), mask=make_mask(), **options)
        return (output * weights).sum(), output

    step = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    if distribution is None:
        (_, output), gradients = jax.jit(step)(*operands)
    else:
        with distribution.scope():
            (_, output), gradients = jax.jit(step)(*distribution.distribute_batch(operands))
    return [np.asarray(each) for each in (output, *gradients)]


def random_operands(heads, key_heads, queries, keys=None):
    generator, keys = np.random.default_rng(0), queries if keys is None else keys
    shapes = (ROWS, queries, heads, SIZE), (ROWS, keys, key_heads, SIZE), (ROWS, keys, key_heads, SIZE)
    return tuple(jnp.asarray(generator.standard_normal(shape), "float32") for shape in shapes)


def exchange_of(distribution, heads, key_heads, queries=256, keys=None, make_mask=lambda: None, **options):
    """Compares with one device, and returns how attention was computed and operands were exchanged."""
    operands = random_operands(heads, key_heads, queries, keys)
    expected = output_and_gradients(None, operands, make_mask, **options)
    with recorded_calls() as calls:
        actual = output_and_gradients(distribution, operands, make_mask, **options)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * np.abs(theirs).max())
    [call] = calls
    return call.implementation, call.exchange


def padding(lengths, size):
    return jnp.asarray(np.arange(size) < np.asarray(lengths)[:, None])


def positions(size):
    return jnp.arange(size)[:, None], jnp.arange(size)


def causal(size):
    queries, keys = positions(size)
    return queries >= keys


def window(size):
    queries, keys = positions(size)
    return (queries >= keys) & (queries - keys < 9)


def packed(size):
    ids = jnp.asarray(np.arange(size) // np.asarray([[40], [7], [size], [100]]))
    return causal(size) & (ids[:, None, :, None] == ids[:, None, None, :])


MASKS = {
    "none": lambda: None,
    "causal": lambda: causal(250)[None, None],
    "window": lambda: window(250)[None, None],
    "packed": lambda: packed(250),
    "padding": lambda: padding([250, 249, 5, 0], 250)[:, None, None],
    "causal, padding": lambda: causal(250) & padding([250, 128, 1, 77], 250)[:, None, None],
}
CASES = [
    (exchange, mask)
    for exchange in EXCHANGES
    for mask in MASKS
    if exchange != ALL_TO_ALL or mask in ("causal", "padding", "causal, padding")
]

FAST = {
    ("tpu", (ALL_TO_ALL, "causal, padding")),
    ("tpu", (ALL_GATHER, "packed")),
    ("cpu", (BOTH, "causal")),
}


@pytest.mark.parametrize(
    ("platform", "case"),
    [
        slow_unless((platform, case) in FAST, platform, case)
        for is_causal in (True, False)
        for platform in ("cpu", "tpu")
        for case in CASES
        if case[1].startswith("causal") == is_causal
    ],
    indirect=["platform"],
)
def test_masks_give_the_numbers_of_one_device(platform, case):
    exchange, mask = case
    mesh, heads, key_heads = EXCHANGES[exchange]
    result = exchange_of(context_parallel(mesh), heads, key_heads, 250, make_mask=MASKS[mask])
    assert result == (KERNEL.get(platform, "XLA in blocks"), exchange)


@pytest.mark.slow
@pytest.mark.parametrize(("exchange", "platform"), crossed(EXCHANGES, ["cpu", "tpu"]), indirect=["platform"])
def test_half_precision_has_the_digits_of_one_device(platform, exchange):
    mesh, heads, key_heads = EXCHANGES[exchange]
    operands = random_operands(heads, key_heads, 250)
    half = tuple(each.astype("bfloat16") for each in operands)
    exact = output_and_gradients(None, operands, MASKS["causal"])

    def errors(distribution):
        results = output_and_gradients(distribution, half, MASKS["causal"])
        return [
            np.linalg.norm(each - right) / np.linalg.norm(right) for each, right in zip(results, exact, strict=True)
        ]

    assert np.all(np.asarray(errors(context_parallel(mesh))) <= 1.5 * np.asarray(errors(None)))


@pytest.mark.parametrize(
    ("exchange", "queries", "keys"), [slow(ALL_TO_ALL, 77, 131), slow(ALL_GATHER, 77, 131), (BOTH, 131, 77)]
)
def test_cross_attention_gives_the_numbers_of_one_device(exchange, queries, keys):
    mesh, heads, key_heads = EXCHANGES[exchange]
    assert exchange_of(context_parallel(mesh), heads, key_heads, queries, keys)[1] == exchange


@pytest.mark.parametrize(("heads", "expected"), [slow(4, ALL_TO_ALL), (6, ALL_GATHER)])
def test_masks_and_biases_of_any_form_give_the_numbers_of_one_device(heads, expected):
    generator = np.random.default_rng(2)
    bias, mask = generator.standard_normal((ROWS, heads, 30, 30)), generator.random((ROWS, 1, 30, 30)) < 0.6
    arguments = context_parallel("data:2,context:4"), heads, 2, 30
    assert exchange_of(*arguments, make_mask=lambda: jnp.asarray(mask))[1] == expected
    assert exchange_of(*arguments, make_bias=lambda: jnp.asarray(bias, "float32"))[1] == expected


@pytest.mark.parametrize("exchange", [ALL_TO_ALL, ALL_GATHER, slow(BOTH)])
def test_queries_without_keys_have_the_mean_of_the_values_that_there_are(exchange):
    mesh, heads, key_heads = EXCHANGES[exchange]
    ids = jnp.asarray(np.arange(30) // 7 * (np.arange(30) % 5 > 0))[None]
    packed_or_padding = (ids[:, None, :, None] == ids[:, None, None, :]) & (ids != 0)[:, None, None, :]
    any_form = jnp.asarray((np.random.default_rng(0).random((30, 30)) < 0.6) & (np.arange(30) > 3)[:, None])[None, None]
    for mask in (packed_or_padding, any_form):
        exchange_of(context_parallel(mesh), heads, key_heads, 30, make_mask=lambda mask=mask: mask)


def test_a_bias_of_three_dims():
    bias = jnp.asarray(np.random.default_rng(2).standard_normal((4, 30, 30)), "float32")
    assert exchange_of(context_parallel("data:2,context:4"), 4, 4, 30, make_bias=lambda: bias)[1] == ALL_TO_ALL


def test_several_axes_share_sequences():
    layout_map = kd.LayoutMap(kd.create_device_mesh("data:2,outer:2,inner:2"))
    distribution = kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", sequence_dim_name=("outer", "inner"))
    for heads, form in ((4, "all-to-all over 'outer' and 'inner'"), (3, "all-gather over 'outer' and 'inner'")):
        assert exchange_of(distribution, heads, heads, 30, is_causal=True)[1] == form


@pytest.mark.slow
def test_cudnn_computes_all_positions_of_some_heads(monkeypatch):
    use_kernel_of("gpu", monkeypatch)
    distribution = context_parallel("data:2,context:4")
    assert exchange_of(distribution, 4, 1, 250, make_mask=MASKS["causal, padding"]) == ("cuDNN", ALL_TO_ALL)
    with pytest.warns(UserWarning, match="cuDNN needs all positions.* 4 devices .* 2 query heads"):
        assert exchange_of(distribution, 2, 2, 250, is_causal=True) == ("XLA in blocks", BOTH)


# ----------------------------------------------------------------------------------------------------- the exchange


@pytest.mark.parametrize("devices", [2, 3, 4, 8, 12])
def test_causal_work_is_balanced(devices):
    queries, heads = 24 * devices, 12
    for members in (1, *(size for size in (2, 4, 6) if devices % size == 0)):
        exchange = Exchange(("context",), devices, members, swaps_queries=members == 1)
        starts, length = exchange.starts(24)
        runs = (starts[..., None] + np.arange(length)).reshape(len(starts), -1)
        assert sorted(runs.flatten()) == list(range(queries))
        work = (runs + 1).sum(1) * heads // members
        assert work.max() <= 1.001 * work.mean()


def test_the_exchange_that_sends_least_is_chosen():
    def chosen(heads, key_heads, devices, **options):
        exchange = choose_exchange(["context"], devices, (4096, heads), (4096, key_heads), True, **options)
        return exchange.members, exchange.groups

    assert chosen(32, 8, 8) == (8, 1)
    assert chosen(32, 8, 64) == (8, 8)
    assert chosen(4, 1, 32) == (1, 32)  # its one key head goes to all devices in any case
    assert chosen(4, 4, 32) == (4, 8)
    assert chosen(4, 4, 32, max_pairs=2 * 4096**2 / 32) == (2, 16)
    assert chosen(7, 7, 8) == (1, 8)
    assert chosen(32, 8, 64, is_grouped=False) == (1, 64)
    causal = choose_exchange(["context"], 2, (4096, 32), (4096, 4), is_balanced=False)
    assert (causal.members, causal.swaps_queries) == (2, False)  # an all-gather would also swap halves of 32 heads
    assert chosen(32, 8, 8, name="all_gather") == (1, 8)
    with pytest.raises(ValueError, match="12 query heads, which 8 does not divide"):
        chosen(12, 12, 8, name="all_to_all")


def test_an_exchange_can_be_chosen():
    distribution = context_parallel("data:2,context:4", sequence_exchange="all_gather")
    assert exchange_of(distribution, 4, 4, 30, is_causal=True) == ("XLA in blocks", ALL_GATHER)
    distribution = context_parallel("data:2,context:4", sequence_exchange="all_to_all")
    with pytest.raises(ValueError, match="2 query heads, which 4 does not divide"):
        exchange_of(distribution, 2, 2, 30)
    with pytest.raises(ValueError, match="'ring'"):
        context_parallel("data:2,context:4", sequence_exchange="ring")
    with pytest.raises(ValueError, match="sequence_dim_name=None"):
        kd.ModelParallel(layout_map=kd.LayoutMap(kd.create_device_mesh("data:8")), sequence_exchange="all_to_all")


@pytest.mark.parametrize("heads", [4, 2], ids=["as many as rows", "fewer"])
@pytest.mark.parametrize("of", ["heads", "rows"])
def test_masks_of_three_dims_are_read_as_by_keras(of, heads, platform):
    """(N, T, S) by XLA; what fits rows only is (B, T, S), as in Keras's own computation."""
    operands, generator = random_operands(heads, heads, 64), np.random.default_rng(3)
    shape = (ROWS if of == "rows" else heads, 64, 64)
    mask, bias = generator.random(shape) > 0.3, generator.standard_normal(shape).astype("float32")
    for options in ((lambda: mask,), (lambda: None, lambda: jnp.asarray(bias))):
        expected = output_and_gradients(None, operands, *options)
        actual = output_and_gradients(context_parallel("data:2,context:4"), operands, *options)
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, atol=2e-5), actual, expected)


def test_a_scale_that_is_learned(platform):
    query, key, value = random_operands(2, 2, 256)

    def gradient(distribution):
        def loss(scale):
            return (keras.ops.dot_product_attention(query, key, value, scale=scale) ** 2).sum()

        with distribution.scope():
            return jax.jit(jax.grad(loss))(jnp.float32(0.3))

    one = kd.DataParallel(devices=kd.list_devices()[:1])
    use = context_parallel("data:2,context:4")
    np.testing.assert_allclose(gradient(use), gradient(one), rtol=1e-3)
