"""What is known of a candidate before it is compiled: closed forms against figures by hand, and against plans."""

import jax
import keras
import pytest
from keras import layers

import keras_dist as kd
from keras_dist.planning.frozen_mapping import FrozenMapping
from keras_dist.planning.search.candidates import CONTEXT_PARALLEL, STRATEGIES, Candidate
from keras_dist.planning.search.choice import NoCandidateError
from keras_dist.planning.search.places import place_of
from keras_dist.planning.search.search_space import search_space

WIDTH, HIDDEN = 256, 1024
KERNELS = 2 * WIDTH * HIDDEN * 4  # bytes; biases are as small as rounding errors here
NOMINAL_LINK = 1e10  # bytes per second of devices whose links are unknown


def perceptron(trainable=True):
    x = inputs = keras.Input((WIDTH,))
    x = layers.Dense(HIDDEN, use_bias=False, name="up", trainable=trainable)(x)
    model = keras.Model(inputs, layers.Dense(WIDTH, use_bias=False, name="down", trainable=trainable)(x))
    model.compile("adam", "mse")
    return model


def space_of(build, step="train"):
    return search_space(build, step, (*STRATEGIES, CONTEXT_PARALLEL), place_of(jax.devices(), None), 64)


def sizes_of(build, step="train"):
    sizes = space_of(build, step).sizes
    return {(each.strategy, each.regathers, tuple(each.axes.values())): known for each, known in sizes.items()}


def test_bytes_sent_for_weights():
    sizes = sizes_of(perceptron)
    share = 7 / 8
    assert sizes["dp", False, (8,)].wire["weights"] == pytest.approx(2 * share * KERNELS)
    assert sizes["zero1", False, (8,)].wire["weights"] == pytest.approx(2 * share * KERNELS)
    assert sizes["fsdp", False, (8,)].wire["weights"] == pytest.approx(2 * share * KERNELS)
    assert sizes["fsdp", True, (8,)].wire["weights"] == pytest.approx(3 * share * KERNELS)
    # Gathered and scattered among 4 devices, and a quarter reduced between 2.
    assert sizes["hsdp", False, (2, 4)].wire["weights"] == pytest.approx((2 * 3 / 4 + 2 * 1 / 2 / 4) * KERNELS)
    # Both kernels are split between 2, and one activation (and its gradient) is reduced between them.
    both = sizes["tp", False, (4, 2)]
    assert both.wire["weights"] == pytest.approx(2 * 3 / 4 * KERNELS / 2)
    assert both.wire["tensor"] == pytest.approx(2 * 1 / 2 * 16 * WIDTH * 4 * 2, rel=0.5)
    assert both.sharded_fraction == 1.0


def test_frozen_weights_are_gathered_and_have_no_gradients():
    sizes = sizes_of(lambda: perceptron(trainable=False))
    assert sizes["dp", False, (8,)].wire["weights"] == 0
    assert sizes["fsdp", False, (8,)].wire["weights"] == pytest.approx(7 / 8 * KERNELS)
    assert sizes["fsdp", False, (8,)].weights == pytest.approx(KERNELS)


def test_a_step_that_predicts_sends_no_gradients():
    sizes = sizes_of(perceptron, "predict")
    assert sizes["dp", False, (8,)].wire["weights"] == 0
    assert sizes["fsdp", False, (8,)].wire["weights"] == pytest.approx(7 / 8 * KERNELS)
    assert not any(regathers for _, regathers, _ in sizes)


def test_collectives_over_different_axes_may_overlap():
    hybrid = sizes_of(perceptron)["hsdp", False, (2, 4)]
    assert hybrid.wire_seconds["weights"] == pytest.approx(hybrid.wire["weights"] / NOMINAL_LINK)
    assert hybrid.min_wire_seconds == pytest.approx(2 * 3 / 4 * KERNELS / NOMINAL_LINK)


def test_state_and_batch_are_those_of_plans():
    candidates, sizes, _ = space_of(perceptron)
    chosen = [each for each in candidates if each.strategy in ("dp", "zero1", "fsdp", "tp", "hsdp")][::3]
    assert len(chosen) >= 3
    for candidate in chosen:
        memory = kd.plan(perceptron, candidates[candidate], 64).memory
        assert sizes[candidate].state == memory.state
        assert sizes[candidate].batch == memory.batch


def test_what_communicates_less():
    def candidate(strategy, regathers=False, **axes):
        return Candidate(strategy, FrozenMapping(axes), regathers)

    assert candidate("fsdp", data=8).communicating_less == ()
    assert candidate("fsdp", True, data=8).communicating_less == (candidate("fsdp", data=8),)
    assert candidate("tp", data=2, context=2, model=2).communicating_less == (candidate("tp", data=4, model=2),)
    assert set(candidate("fsdp", True, data=2, context=4).communicating_less) == {
        candidate("fsdp", data=2, context=4),
        candidate("fsdp", data=8),
        candidate("fsdp", True, data=8),
    }


def test_a_step_updates_what_it_trains():
    """Of bytes in device memory, a step writes those of trained weights and their optimizer state at least."""
    assert sizes_of(perceptron)["dp", False, (8,)].updated == pytest.approx(3 * KERNELS, rel=1e-3)
    assert sizes_of(lambda: perceptron(trainable=False))["dp", False, (8,)].updated < 100


def test_the_reason_why_no_candidate_is_left_is_part_of_the_error():
    def build():
        model = keras.Sequential([keras.Input((7,)), layers.Dense(11), layers.Dense(5)])
        model.compile("adam", "mse")
        return model

    with pytest.raises(NoCandidateError, match=r"Tensor parallelism was not tried: no weight .* Allow more strategies"):
        search_space(build, "train", ("tp",), place_of(jax.devices(), None), 64)
