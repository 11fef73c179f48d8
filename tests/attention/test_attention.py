"""Attention under a distribution: the numbers of one CPU device, by the kernels of TPUs and GPUs.

The TPU kernel runs in Pallas's interpreter; in the place of cuDNN runs XLA with cuDNN's arguments.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from support.kernels_on_cpus import KERNEL, use_kernel_of
from support.slow_cases import crossed, slow, slow_unless

import keras_dist as kd
from keras_dist.attention import kernels
from keras_dist.steps.step_state import recorded_calls

ROWS, HEADS, SIZE = 8, 2, 16


@pytest.fixture(params=["tpu", "gpu"])
def platform(request, monkeypatch):
    use_kernel_of(request.param, monkeypatch)
    return request.param


def operands(queries, keys=None, key_heads=HEADS, dtype="float32", rows=ROWS):
    keys = queries if keys is None else keys
    generator = np.random.default_rng(0)
    shapes = (rows, queries, HEADS, SIZE), (rows, keys, key_heads, SIZE), (rows, keys, key_heads, SIZE)
    return [jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes]


def output_and_gradients(distribution, query, key, value, make_mask=lambda: None, **options):
    """The output and the gradients, of a loss that weighs all elements, under a distribution or none."""
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(query.shape[:3] + value.shape[3:]), "float32")

    def loss(query, key, value):
        output = keras.ops.dot_product_attention(query, key, value, mask=make_mask(), **options)
        return (output.astype("float32") * weights).sum(), output

    step = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    if distribution is None:
        (_, output), gradients = jax.jit(step)(query, key, value)
    else:
        with distribution.scope():
            (_, output), gradients = jax.jit(step)(*distribution.distribute_batch((query, key, value)))
    return [np.asarray(each.astype("float32")) for each in (output, *gradients)]


def assert_equals_one_device(distribution, query, key, value, make_mask=lambda: None, tolerance=2e-5, **options):
    """Compares with one device, and returns how attention was computed."""
    expected = output_and_gradients(None, query, key, value, make_mask, **options)
    with recorded_calls() as calls:
        actual = output_and_gradients(distribution, query, key, value, make_mask, **options)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * np.abs(theirs).max())
    return [(call.implementation, call.reason) for call in calls]


def padding(lengths, size, first=0):
    positions = np.arange(size)
    return jnp.asarray((positions >= first) & (positions < np.asarray(lengths)[:, None]))


def packed(size):
    ids = jnp.arange(size)[None] // jnp.arange(20, 20 + ROWS)[:, None]
    return ids[:, None, :, None] == ids[:, None, None, :]


def causal(queries, keys):
    return jnp.arange(queries)[:, None] >= jnp.arange(keys)


LENGTHS = [230, 229, 5, 1, 230, 128, 77, 2]
MASKS = {
    "none": lambda: None,
    "causal": lambda: causal(230, 230)[None, None],
    "window": lambda: (causal(230, 230) & (jnp.arange(230)[:, None] < jnp.arange(230) + 20))[None, None],
    "padding": lambda: padding(LENGTHS, 230)[:, None, None],
    "rows without keys": lambda: padding([0, *LENGTHS[1:]], 230)[:, None, None],
    "padding in front": lambda: padding([230] * 8, 230, first=3)[:, None, None],
    "causal, padding": lambda: causal(230, 230) & padding(LENGTHS, 230)[:, None, None],
    "causal, padding in front": lambda: causal(230, 230) & padding([230] * 8, 230, first=7)[:, None, None],
    "packed, padding": lambda: packed(230) & causal(230, 230) & padding(LENGTHS, 230)[:, None, None],
    "packed, window, padding in front": lambda: (
        packed(230) & (abs(jnp.arange(230)[:, None] - jnp.arange(230)) < 30) & padding([230] * 8, 230, 7)[:, None, None]
    ),
    "queries and keys": lambda: padding(LENGTHS, 230)[:, None, :, None] & padding(LENGTHS, 230)[:, None, None],
}


FAST_MASKS = {  # which contain others
    ("tpu", "window"),
    ("tpu", "packed, padding"),
    ("tpu", "queries and keys"),
    ("gpu", "rows without keys"),
    ("gpu", "packed, window, padding in front"),
}


@pytest.mark.parametrize(
    ("platform", "name"),
    crossed(["tpu", "gpu"], MASKS, fast=FAST_MASKS),
    indirect=["platform"],
)
def test_masks_give_the_numbers_of_one_device_by_the_kernel(platform, name):
    assert assert_equals_one_device(kd.DataParallel(), *operands(230), MASKS[name]) == [(KERNEL[platform], None)]


SIZES = [(128, 128), (197, 197), (230, 300), (300, 230), (229, 301), (301, 229)]
FAST = {
    ("tpu", False, (128, 128)),
    ("gpu", True, (197, 197)),
    ("tpu", True, (230, 300)),
    ("gpu", False, (300, 230)),
    ("gpu", True, (301, 229)),
}


@pytest.mark.parametrize(
    ("platform", "is_causal", "lengths"),
    [slow_unless(case in FAST, *case) for case in itertools.product(["tpu", "gpu"], [False, True], SIZES)],
    indirect=["platform"],
)
def test_lengths(platform, is_causal, lengths):
    queries, keys = lengths
    assert_equals_one_device(kd.DataParallel(), *operands(queries, keys), is_causal=is_causal)


@pytest.mark.parametrize("platform", ["tpu"], indirect=True)
@pytest.mark.parametrize(
    ("lengths", "flash_attention", "by_kernel"),
    [((197, 197), None, False), ((197, 197), True, True), ((230, 300), None, True), ((130, 380), None, False)],
)
def test_short_sequences_are_not_padded_to_many_times_their_pairs(platform, lengths, flash_attention, by_kernel):
    query, key, value = operands(*lengths)
    attend = functools.partial(keras.ops.dot_product_attention, flash_attention=flash_attention)
    with kd.DataParallel().scope(), recorded_calls() as calls:
        jax.eval_shape(jax.jit(attend), query, key, value)
    assert [call.implementation for call in calls] == [KERNEL[platform] if by_kernel else "XLA"]


@pytest.mark.slow
@pytest.mark.parametrize("key_heads", [1, 2])
def test_grouped_queries_and_any_scale(platform, key_heads):
    calls = assert_equals_one_device(kd.DataParallel(), *operands(128, key_heads=key_heads), is_causal=True, scale=0.3)
    assert calls == [(KERNEL[platform], None)]


def test_inside_of_shard_map_operands_are_shards_already(platform):
    distribution, (query, _, _) = kd.DataParallel(), operands(128)
    spec = jax.sharding.PartitionSpec("batch")
    mesh = distribution.device_mesh.backend_mesh

    def attend(query):
        return keras.ops.dot_product_attention(query, query, query, is_causal=True)

    expected = jax.jit(attend)(query)
    with distribution.scope():
        mapped = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        np.testing.assert_allclose(jax.jit(mapped)(query), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "transform"),
    crossed(["tpu", "gpu"], [jax.checkpoint, jax.vmap, "scan"]),
    indirect=["platform"],
)
def test_under_other_transformations(platform, transform):
    query = operands(128)[0]

    def loss(query):
        rows = query if query.ndim == 4 else query[None]
        return (keras.ops.dot_product_attention(rows, rows, rows, is_causal=True) ** 2).sum()

    def transformed(query):
        if transform == "scan":
            return jax.lax.scan(lambda total, _: (total + loss(query), None), 0.0, None, length=2)[0] / 2
        return transform(loss)(query).sum()

    expected = jax.jit(jax.grad(loss))(query)
    with kd.DataParallel().scope():
        np.testing.assert_allclose(jax.jit(jax.grad(transformed))(query), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("platform", [slow("tpu"), "gpu"], indirect=True)
def test_a_bias_that_only_hides_keys_is_a_mask(platform):
    tensors = operands(230)

    def attend(query, key, value):
        hidden = 1 - (causal(230, 230) & padding(LENGTHS, 230)[:, None, None]).astype("float32")
        return keras.ops.dot_product_attention(query, key, value, bias=hidden * -1e9)

    expected = attend(*tensors)
    with kd.DataParallel().scope(), recorded_calls() as calls:
        np.testing.assert_allclose(jax.jit(attend)(*tensors), expected, atol=1e-5)
    assert [call.implementation for call in calls] == [KERNEL[platform]]


@pytest.mark.parametrize(
    ("lengths", "biased"),
    crossed(
        [(229, 229), (230, 229), (229, 230), (230, 230)],
        [False, True],
        fast={((230, 229), True), ((229, 230), False)},
    ),
)
def test_cudnn_computes_masks_and_biases_of_odd_lengths(lengths, biased, monkeypatch):
    use_kernel_of("gpu", monkeypatch)
    seen = np.random.default_rng(2).random((ROWS, HEADS, *lengths)) < 0.5
    seen[0, :, 3] = False  # a query that sees no key
    options = {"bias": jnp.ones((1, HEADS, 1, lengths[1])) * jnp.arange(lengths[1]) / 50} if biased else {}
    calls = assert_equals_one_device(kd.DataParallel(), *operands(*lengths), lambda: jnp.asarray(seen), **options)
    assert calls == [("cuDNN", None)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "mask"),
    [
        (128, lambda: padding([128] * 8, 128, first=3)[:, None, None]),
        (127, lambda: causal(128, 127) & padding([0, *LENGTHS[1:]], 127)[:, None, None]),
        (128, lambda: causal(128, 128) & causal(147, 147)[19:, :128].T & padding(LENGTHS, 128)[:, None, None]),
    ],
    ids=["in front", "rows without keys, odd", "window, queries without keys"],
)
def test_cudnn_computes_padding_anywhere_without_blocks(keys, mask, monkeypatch):
    use_kernel_of("gpu", monkeypatch)
    monkeypatch.setattr(kernels, "xla_attention_in_blocks", None)
    calls = assert_equals_one_device(kd.DataParallel(), *operands(128, keys), mask)
    assert calls == [("cuDNN", None)]


@pytest.mark.parametrize("length", [229, slow(230)])
def test_cudnn_computes_packed_sequences_of_odd_lengths(length, monkeypatch):
    use_kernel_of("gpu", monkeypatch)
    calls = assert_equals_one_device(
        kd.DataParallel(), *operands(length), lambda: causal(length, length) & packed(length)
    )
    assert calls == [("cuDNN", None)]


@pytest.mark.parametrize("length", [229, slow(230)])
def test_cudnn_computes_a_bias_without_a_mask(length, monkeypatch):
    use_kernel_of("gpu", monkeypatch)
    bias = jnp.asarray(np.random.default_rng(2).standard_normal((1, HEADS, length, length)), "float32")
    for is_causal in (False, True):
        calls = assert_equals_one_device(kd.DataParallel(), *operands(length), is_causal=is_causal, bias=bias)
        assert calls == [("cuDNN", None)]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data:8", "data:2,context:2,model:2"])
def test_layers_for_sequences_of_any_length(platform, mesh):
    """Keras infers the shape of such a layer's outputs with symbolic sizes."""

    class Attend(keras.layers.Layer):
        def call(self, x):
            heads = keras.ops.reshape(x, (-1, x.shape[1], HEADS, SIZE))
            return keras.ops.reshape(keras.ops.dot_product_attention(heads, heads, heads, is_causal=True), x.shape)

    def outputs():
        inputs = keras.Input((None, HEADS * SIZE))
        model = keras.Model(inputs, Attend(name="attend")(inputs))
        return model.predict(np.random.default_rng(0).standard_normal((8, 230, HEADS * SIZE)), verbose=0)

    expected = outputs()
    layout_map = kd.LayoutMap(kd.create_device_mesh(mesh))
    sequences = {"sequence_dim_name": "context"} if "context" in mesh else {}
    layout_map["attend/output"] = ("data", *(("context", "model") if sequences else (None, None)))
    with kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", **sequences).scope():
        np.testing.assert_allclose(outputs(), expected, rtol=2e-5, atol=2e-5)


def packed_model(build_mask):
    """A model of packed rows, with the ids of the sequences as an input, and attention by Keras's layer."""
    tokens, ids = (keras.Input((230,), dtype="int32") for _ in range(2))
    x = keras.layers.Embedding(50, 16, name="tokens")(tokens)
    x = x + keras.layers.MultiHeadAttention(2, 8, name="attention")(x, x, attention_mask=build_mask(ids))
    model = keras.Model([tokens, ids], keras.layers.Dense(50, name="out")(x))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def packed_and_padded(ids):
    same = keras.ops.equal(keras.ops.expand_dims(ids, 1), keras.ops.expand_dims(ids, 2))
    causal = keras.ops.arange(230)[:, None] >= keras.ops.arange(230)
    return keras.ops.logical_and(keras.ops.logical_and(same, causal), keras.ops.expand_dims(ids > 0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "axes"),
    [
        ("tpu", "data:2,context:2,model:2"),
        *[("tpu", "data:8"), ("tpu", "data:4,model:2"), ("gpu", "data:4,context:2")],
    ],
    indirect=["platform"],
)
def test_layers_of_packed_sequences(platform, axes):
    """Segment ids are an input, sharded as the tokens are."""
    mesh = kd.create_device_mesh(axes)
    layout_map = kd.LayoutMap(mesh)
    if "model" in axes:
        layout_map["attention/(query|key|value)/kernel"] = (None, "model", None)
    sequence = "context" if "context" in axes else None
    distribution = kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", sequence_dim_name=sequence)
    generator = np.random.default_rng(0)
    tokens, labels = generator.integers(0, 50, (2, 16, 230))
    ids = np.sort(generator.integers(1, 5, (16, 230)), axis=1) * (np.arange(230) < 120)
    losses = []
    for each in (None, distribution):
        keras.utils.set_random_seed(0)
        scope = contextlib.nullcontext() if each is None else each.scope()
        with scope, recorded_calls() as calls:
            model = packed_model(packed_and_padded)
            losses.append(model.fit([tokens, ids], labels, 8, epochs=2, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert {(call.implementation, call.reason) for call in calls} == {(KERNEL[platform], None)}
