"""Attention masks are taken apart exactly, in each of the ways in which JAX traces what made them."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.lax import with_sharding_constraint
from jax.sharding import SingleDeviceSharding
from keras import ops
from support.slow_cases import crossed

from keras_dist.attention.mask_recognition import recognize, recognize_bias

B, T, S = 2, 6, 6
PADDING = np.array([[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]], "int32")
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 3, 3]], "int32")


def parts(mask):
    """The numbers of a recognized mask, and the names of its arrays."""
    arrays = [name for name in ("query_valid", "key_valid", "segments", "dense") if getattr(mask, name) is not None]
    return mask.lower, mask.upper, arrays


class Traced:
    """What is recognized of `make_mask(*arguments)` where a function that computes it is traced.

    Args:
        mode: "jit"; "grad", where the arguments depend on what is differentiated; "checkpoint", where `jax.checkpoint`
            closes over the mask; "checkpoint arguments", where the mask is made inside it; "outside", where the mask
            is used in the body of a loop.
    """

    MODES = ("jit", "grad", "checkpoint", "checkpoint arguments", "loop")

    def __init__(self, mode, make_mask, *arguments, recognize=recognize):
        def read(mask):
            self.mask = recognize(mask)
            self.parts = parts(self.mask)
            shape = np.broadcast_shapes(mask.shape if mask.ndim != 3 else (mask.shape[0], 1, *mask.shape[1:]), (1,) * 4)
            self.shapes = {name: jnp.shape(getattr(self.mask, name)) for name in self.parts[2] if name != "segments"}
            return jnp.broadcast_to(mask[:, None] if mask.ndim == 3 else mask, shape), self.mask.to_dense(*shape[2:])

        def step(scale, *arguments):
            arguments = [jnp.round(scale * argument).astype(argument.dtype) for argument in arguments]
            if mode == "checkpoint arguments":
                return scale, jax.checkpoint(lambda *inner: read(make_mask(*inner)))(*arguments)
            mask = make_mask(*arguments)
            if mode == "checkpoint":
                return jax.checkpoint(lambda scale: (scale**2, read(mask)))(scale)
            if mode == "loop":
                return scale, jax.tree.map(lambda x: x[0], jax.lax.map(lambda _: read(mask), jnp.arange(2)))
            return scale**2, read(mask)

        if mode != "jit":
            step = jax.grad(step, has_aux=True)
        expected, found = jax.jit(step)(1.0, *map(jnp.asarray, arguments))[1]
        np.testing.assert_array_equal(np.broadcast_to(found, expected.shape), expected)


def hub_mask(padding, sliding_window=None):
    """The mask of KerasHub's decoders: `compute_causal_mask` and `merge_padding_and_attention_mask`."""
    queries = ops.expand_dims(ops.arange(T, dtype="float32") + ops.cast(0, "float32"), axis=1)
    mask = ops.expand_dims(queries >= ops.arange(S, dtype="float32"), axis=0)
    mask = ops.cast(ops.broadcast_to(mask, (B, T, S)), "int32")
    if sliding_window is not None:
        window = ops.arange(T)[:, None] < ops.arange(S)[None, :] + sliding_window
        mask = ops.minimum(mask, ops.cast(window, "int32"))
    mask = ops.minimum(ops.cast(ops.expand_dims(padding, 1), "int32"), mask)
    return ops.cast(ops.expand_dims(mask, 1), "bool")


def tril(diagonal=0, dtype=bool):
    return jnp.tril(jnp.ones((T, S), dtype), diagonal)


def distance():
    return jnp.arange(S)[None, :] - jnp.arange(T)[:, None]


def same(ids):
    return ops.equal(ops.expand_dims(ids, 2), ops.expand_dims(ids, 1))


def causal():
    return ops.expand_dims(ops.arange(T), 1) >= ops.expand_dims(ops.arange(S), 0)


def cumulative_sums(padding):
    ones = ops.ones((1, T, S), "int32")
    causal = ops.cumsum(ones, axis=-2) >= ops.cumsum(ones, axis=-1)
    return causal & ops.cast(padding, "bool")[:, :, None] & ops.cast(padding, "bool")[:, None, :]


def gemma_window(padding):
    ones = ops.ones((S, S), "bool")
    window = ops.slice(ops.triu(ones, -2) * ops.tril(ones, 2), (0, 0), (T, S))
    return ops.logical_and(hub_mask(padding), ops.cast(ops.expand_dims(window, 0), "bool"))


CASES = {
    "KerasHub": (hub_mask, (None, 0, ["key_valid"])),
    "KerasHub, booleans": (lambda padding: hub_mask(padding != 0), (None, 0, ["key_valid"])),
    "KerasHub, window": (lambda padding: hub_mask(padding, 3), (-2, 0, ["key_valid"])),
    "Gemma's window": (gemma_window, (-2, 0, ["key_valid"])),
    "Keras": (cumulative_sums, (None, 0, ["query_valid", "key_valid"])),
    "window": (lambda _: (abs(distance()) < 3)[None, None], (-2, 2, [])),
    "window, larger": (lambda _: (abs(distance()) <= 3)[None, None], (-3, 3, [])),
    "window that limits nothing": (lambda _: (abs(distance()) < 6)[None, None], (None, None, [])),
    "not causal": (lambda _: ~tril()[None, None], (1, None, [])),
    "causal by scaled floats": (lambda _: (2.0 * distance() <= 3.0)[None, None], (None, 1, [])),
    "diagonal": (lambda _: (distance() == 1)[None, None], (1, 1, [])),
    "main diagonal": (lambda _: (distance() == 0)[None, None], (0, 0, [])),
    "padding alone": (lambda padding: padding[:, None, None, :] > 0, (None, None, ["key_valid"])),
    "padding spread out": (
        lambda padding: 2 * jnp.broadcast_to(padding[:, None, None], (B, 1, T, S)) > 1,
        (None, None, ["key_valid"]),
    ),
    "packed": (
        lambda padding: (padding[:, None, :, None] == padding[:, None, None]) & tril(),
        (None, 0, ["segments"]),
    ),
    "packed, as integers": (
        lambda ids: ops.cast(same(ids), "int32") * ops.cast(causal(), "int32"),
        (None, 0, ["segments"]),
    ),
    "packed, where": (lambda ids: ops.where(causal(), same(ids), False), (None, 0, ["segments"])),
    "packed, padding": (
        lambda ids: same(ids) & causal() & ops.expand_dims(ids > 0, 1),
        (None, 0, ["key_valid", "segments"]),
    ),
    "packed, differences": (lambda ids: (ids[:, :, None] - ids[:, None]) == 0, (None, None, ["segments"])),
    "packed, not different": (lambda ids: ~(ids[:, :, None] != ids[:, None]), (None, None, ["segments"])),
    "packed, floats": (lambda ids: same(ops.cast(ids, "bfloat16") * -0.5), (None, None, ["segments"])),
    "packed, booleans": (lambda ids: same(ids > 1), (None, None, ["segments"])),
    "packed, counted ends": (
        lambda ids: same(ops.cumsum(ops.cast(ids == 1, "int32"), axis=1)) & causal(),
        (None, 0, ["segments"]),
    ),
    "packed, window": (lambda ids: same(ids) & causal() & (distance() > -3), (-2, 0, ["segments"])),
    "packed, two ids": (lambda ids: same(ids) & same(ids // 2), (None, None, ["segments", "dense"])),
    "packed, causal by positions of data": (
        lambda ids: same(ids) & (ids[:, :, None] >= ids[:, None]),
        (None, None, ["segments", "dense"]),
    ),
    "packed or causal": (lambda ids: same(ids) | causal(), (None, None, ["dense"])),
    "blocks": (
        lambda _: ops.equal(ops.expand_dims(ops.arange(T) // 2, 1), ops.expand_dims(ops.arange(S) // 2, 0)),
        (None, None, ["segments"]),
    ),
    "concrete blocks": (lambda _: np.kron(np.eye(3), np.ones((2, 2))) != 0, (None, None, ["segments"])),
    "concrete causal blocks": (
        lambda padding: (np.tril(np.kron(np.eye(2), np.ones((3, 3)))) != 0) & (padding != 0)[:, None, None],
        (None, 0, ["key_valid", "segments"]),
    ),
    "where": (
        lambda padding: jnp.where(padding[:, None, None] > 0, tril(-1, "float32"), 0) != 0,
        (None, -1, ["key_valid"]),
    ),
    "de Morgan": (
        lambda padding: ~((padding == 0)[:, None, None] | (jnp.arange(T)[:, None] < jnp.arange(S))),
        (None, 0, ["key_valid"]),
    ),
    "one minus": (
        lambda padding: ops.cast(
            1 - jnp.maximum(1 - tril(0, "int32"), 1 - ops.cast(padding != 0, "int32")[:, None, None]), "bool"
        ),
        (None, 0, ["key_valid"]),
    ),
    "transposed": (lambda padding: hub_mask(padding).transpose(0, 1, 3, 2), (0, None, ["query_valid"])),
    "rank 3": (lambda padding: hub_mask(padding)[:, 0], (None, 0, ["key_valid"])),
    "rank 2": (lambda _: tril(1), (None, 1, [])),
    "concrete": (lambda padding: np.tril(np.ones((T, S), bool), -1) & hub_mask(padding), (None, -1, ["key_valid"])),
    "by head": (lambda _: distance() <= jnp.arange(3)[:, None, None], (None, None, ["dense"])),
    "or": (lambda padding: (padding[:, None, None] > 0) | tril(), (None, None, ["dense"])),
    "not two bands": (lambda _: (abs(distance()) == 2)[None, None], (None, None, ["dense"])),
    "not of the distance": (
        lambda _: (jnp.arange(T)[:, None] + jnp.arange(S) < 4)[None, None],
        (None, None, ["dense"]),
    ),
    "lengths": (
        lambda padding: (jax.lax.broadcasted_iota("int32", (B, T, S), 2) < padding.sum(1)[:, None, None])[:, None],
        (None, None, ["key_valid"]),
    ),
    "product": (
        lambda padding: (ops.cast(padding != 0, "int32")[:, None, None] * tril(0, "int32")) > 0,
        (None, 0, ["key_valid"]),
    ),
    "reversed sums": (
        lambda _: (
            jax.lax.cumsum(jnp.ones((T, S)), 0, reverse=True) <= jax.lax.cumsum(jnp.ones((T, S)), 1, reverse=True)
        )[None, None],
        (None, 0, []),
    ),
    "constrained": (
        lambda padding: with_sharding_constraint(hub_mask(padding), SingleDeviceSharding(jax.devices()[0])),
        (None, 0, ["key_valid"]),
    ),
    "dims of size 1": (
        lambda padding: (
            (jnp.arange(T)[:, None] - jax.lax.broadcasted_iota("int32", (1, S), 0) > 2)
            & jnp.tril(padding[:1, None, None] * jnp.ones((1, 1, T, 1), "int32") > 0)
            & (padding[:, None, None] > 0)
        ),
        (None, 0, ["query_valid", "key_valid"]),
    ),
    "all": (lambda _: jnp.ones((1, 1, T, S), bool), (None, None, [])),
    "none": (lambda _: jnp.zeros((1, 1, T, S), bool), (None, None, ["key_valid"])),
    "strided": (lambda _: jnp.tril(jnp.ones((2 * T, 2 * S), bool))[::2, ::2], (None, None, ["dense"])),
    "merged": (
        lambda padding: hub_mask(padding).reshape(B, T * S).reshape(B, 1, T, S),
        (None, None, ["dense"]),
    ),
    "unsigned": (
        lambda _: (jnp.arange(T, dtype="uint8")[:, None] - jnp.arange(S, dtype="uint8") < 3)[None, None],
        (None, None, ["dense"]),
    ),
    "tokens": (lambda tokens: (tokens == 1)[:, None, None, :], (None, None, ["key_valid"])),
}


@pytest.mark.parametrize(("case", "mode"), crossed(CASES, Traced.MODES))
def test_masks(case, mode):
    make_mask, expected = CASES[case]
    argument = SEGMENTS if case.startswith(("packed", "tokens")) else PADDING
    assert Traced(mode, make_mask, argument).parts == expected


def test_shapes_of_arrays():
    traced = Traced("jit", lambda padding: hub_mask(padding) | (distance() == 0), PADDING)
    assert traced.shapes == {"dense": (B, 1, T, S)}
    traced = Traced("jit", cumulative_sums, PADDING)
    assert traced.shapes == {"query_valid": (B, T), "key_valid": (B, S)}


def test_queries_that_start_inside_a_cache():
    def mask(index):
        queries = jnp.arange(2, dtype="float32") + ops.cast(index, "float32")
        return (queries[:, None] >= jnp.arange(S, dtype="float32"))[None, None]

    assert Traced("jit", lambda: mask(3)).parts == (None, 3, [])
    # The index of a loop is not known while tracing.
    assert Traced("jit", mask, np.int32(3)).parts == (None, None, ["dense"])
    # With one query, the mask is one of keys all the same.
    assert Traced("jit", lambda index: mask(index)[:, :, :1], np.int32(3)).parts == (None, None, ["key_valid"])


def test_positions_that_the_dtype_cannot_count_are_no_band():
    def mask(dtype):
        return (jnp.arange(300, dtype=dtype)[:, None] >= jnp.arange(300, dtype=dtype))[None, None]

    assert Traced("jit", lambda: mask("bfloat16")).parts == (None, None, ["dense"])
    assert Traced("jit", lambda: mask("float16")).parts == (None, 0, [])


def test_conversions_that_make_zeros_are_computed():
    traced = Traced("jit", lambda x: x.astype("int8").astype(bool)[:, None, None], 128 * np.arange(12).reshape(2, 6))
    assert traced.parts == (None, None, ["key_valid"])


def test_masks_of_deep_activations():
    def mask(x):
        for _ in range(2000):
            x = x + 1
        return x > 2004

    assert Traced("jit", mask, np.arange(B * T * S).reshape(B, 1, T, S)).parts == (None, None, ["dense"])


def test_sequences_of_a_million_tokens():
    length = 2**20

    def program(padding):
        ones = ops.ones((1, length, length), "int32")
        mask = (ops.cumsum(ones, 1) >= ops.cumsum(ones, 2))[:, None] & (padding != 0)[:, None, None]
        recognized = recognize(mask & jnp.tril(jnp.ones((length, length), bool)))
        assert parts(recognized) == (None, 0, ["key_valid"])
        return recognized.key_valid

    output = jax.jit(program).lower(jax.ShapeDtypeStruct((2, length), "int32")).compile()
    assert output.memory_analysis().temp_size_in_bytes < 2**22


def test_concrete_masks():
    assert parts(recognize(np.tril(np.ones((T, S), bool), 2))) == (None, 2, [])
    assert parts(recognize(jnp.triu(jnp.ones((1, 1, 3, 8), bool), 4))) == (4, None, [])
    assert parts(recognize(np.triu(np.tril(np.ones((8, 3), bool), -1), -2))) == (-2, -1, [])
    blocks = np.kron(np.eye(3, dtype=bool), np.ones((2, 2), bool))
    assert parts(recognize(blocks & np.tril(np.ones((T, S), bool)))) == (None, 0, ["segments"])
    assert parts(recognize(np.flip(blocks, 0))) == (None, None, ["dense"])
    irregular = np.tril(np.ones((T, S), bool))
    irregular[4, 2] = False
    assert parts(recognize(irregular)) == (None, None, ["dense"])
    np.testing.assert_array_equal(recognize(irregular).to_dense(T, S)[0, 0], irregular)


def test_concrete_masks_are_read_in_blocks(monkeypatch):
    monkeypatch.setattr("keras_dist.attention.mask_recognition._BLOCK", 20)
    assert parts(recognize(np.triu(np.tril(np.ones((16, 16), bool), 3), -2))) == (-2, 3, [])


@pytest.mark.parametrize("mode", Traced.MODES)
def test_additive_masks(mode):
    def t5gemma(padding):
        return (1.0 - ops.cast(ops.logical_and(tril()[None, None], padding[:, None, None]), "float32")) * -1e9

    biases = {
        "T5Gemma": t5gemma,
        "T5Gemma's padding": lambda padding: (1.0 - ops.cast(padding[:, None, None], "float32")) * -1e9,
        "where": lambda padding: jnp.where((padding != 0)[:, None, None] & tril(), 0.0, -jnp.inf),
        "where not": lambda padding: jnp.where((padding == 0)[:, None, None], -1e30, 0.0).astype("bfloat16"),
    }
    uppers = {}
    for name, make_bias in biases.items():

        def read(padding, make_bias=make_bias, name=name):
            bias = make_bias(padding)
            mask = recognize_bias(bias)
            assert parts(mask)[2] == ["key_valid"]
            uppers[name] = mask.upper
            return bias == 0, mask.to_dense(T, S)

        def step(scale, padding, read=read):
            padding = jnp.round(scale * padding).astype("int32")
            inner = jax.checkpoint(read) if mode.startswith("checkpoint") else read
            return scale, inner(padding)

        step = step if mode == "jit" else jax.grad(step, has_aux=True)
        expected, found = jax.jit(step)(1.0, PADDING)[1]
        np.testing.assert_array_equal(np.broadcast_to(expected, (B, 1, T, S)), np.broadcast_to(found, (B, 1, T, S)))
    assert uppers == {"T5Gemma": 0, "T5Gemma's padding": None, "where": 0, "where not": None}


def test_other_biases_are_not_masks():
    assert jax.jit(lambda x: recognize_bias(x) is None)(jnp.ones((1, 1, T, S)))
    assert recognize_bias(jnp.where(tril(), 0.0, -10.0)) is None
    jax.eval_shape(lambda: [pytest.fail("recognized")] if recognize_bias(jnp.where(tril(), 0.0, -10.0)) else [])
    jax.eval_shape(lambda: [pytest.fail("recognized")] if recognize_bias(jnp.where(tril(), 1.0, -1e9)) else [])


@pytest.mark.parametrize(
    ("case", "layer"),
    crossed(
        [
            (None, {}, (None, None, ["query_valid", "key_valid"])),
            (None, {"use_causal_mask": True}, (None, 0, ["query_valid", "key_valid"])),
            (3, {}, (-2, 2, ["query_valid", "key_valid"])),
            (3, {"use_causal_mask": True}, (-2, 0, ["query_valid", "key_valid"])),
            (None, {"attention_mask": np.tri(T, S, 1, dtype=bool)[None]}, (None, 1, ["query_valid", "key_valid"])),
        ],
        ["MultiHeadAttention", "GroupQueryAttention"],
    ),
)
def test_layers_of_keras(monkeypatch, case, layer):
    sliding_window, call, expected = case
    found, compute = [], jax.nn.dot_product_attention

    def attention(*args, mask=None, **kwargs):
        found.append((parts(recognize(mask)), mask, recognize(mask).to_dense(T, S)))
        return compute(*args, mask=mask, **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    sizes = (2, 4) if layer == "MultiHeadAttention" else (4, 2, 1)
    tokens = keras.Input((T,), dtype="int32")
    x = keras.layers.Embedding(8, 8, mask_zero=True)(tokens)
    model = keras.Model(tokens, getattr(keras.layers, layer)(*sizes, sliding_window=sliding_window)(x, x, **call))
    weights = [variable.value for variable in model.trainable_variables]
    states = [variable.value for variable in model.non_trainable_variables]

    def step(weights, tokens):
        found.clear()
        output, _ = model.stateless_call(weights, states, tokens)
        return output.sum(), found[0][1:]

    mask, recognized = jax.jit(jax.grad(step, has_aux=True))(weights, PADDING)[1]
    assert found[0][0] == expected
    np.testing.assert_array_equal(recognized, np.broadcast_to(mask, recognized.shape))
