"""`kd.auto` for TPUs and GPUs that are not attached."""

import dataclasses

import jax
import keras
import pytest
from keras import layers
from support.compilers import EIGHT_DEVICES, H100_FIRST, needs_cuda, needs_libtpu

import keras_dist as kd
from keras_dist.planning.search.choice import NothingFitsError
from keras_dist.planning.search.estimates import seconds_of

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("full_compilation", "own_cache")]


def perceptron(width=1024, blocks=1):
    """Large weights and small activations."""
    x = inputs = keras.Input((width,))
    for number in range(blocks):
        x = layers.Dense(4 * width, activation="relu", name=f"up{number}")(x)
        x = layers.Dense(width, name=f"down{number}")(x)
    model = keras.Model(inputs, x, name="perceptron")
    model.compile("adam", "mse")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("target", EIGHT_DEVICES)
def test_the_choice_has_the_best_forecast(target):
    choice = kd.auto(perceptron, 64, target, trials=5)
    compiled = [trial for trial in choice.trials if trial.plan is not None]
    assert choice.plan.roofline.forecast is not None
    assert choice.trials[0].seconds == choice.plan.roofline.forecast.seconds == min(t.seconds for t in compiled)
    assert len(compiled) <= 5 < len(choice.trials)
    assert choice.to_source().startswith(f"# For {target}.")
    # What was left out because it cannot win does not win.
    skipped = next((t for t in choice.trials if t.outcome.startswith("cannot win: at least")), None)
    if skipped is not None:
        mesh = kd.create_device_mesh(dict(skipped.candidate.axes), devices=kd.target(target))
        rules = None
        if "model" in skipped.candidate.axes:
            rules = kd.tensor_parallel_layout_map(
                perceptron, mesh, sequence_parallel=skipped.candidate.sequence_parallel
            )
        again = skipped.candidate.distribution(mesh, None) if rules is None else kd.ModelParallel(layout_map=rules)
        assert seconds_of(kd.plan(perceptron, again, 64)) >= 0.98 * choice.trials[0].seconds


@pytest.mark.parametrize("target", H100_FIRST)
def test_few_rows_of_large_weights_are_tensor_parallel(target):
    """A device with all rows and an eighth of the weights takes least: it reads few weights, and sends few bytes."""
    choice = kd.auto(lambda: perceptron(2048, blocks=2), 32, target)
    assert dict(choice.trials[0].candidate.axes) == {"data": 1, "model": 8}
    assert sum(trial.plan is not None for trial in choice.trials) <= 4


@needs_cuda  # libtpu compiles for the memory of the real chip
@pytest.mark.slow
def test_memory_that_only_some_candidates_have():
    """The weights of all fit on no device, their shards do."""
    entry = kd.target("h100:8").hardware
    state = 3 * 4 * 2 * 4096 * 1024  # weights and two averages of Adam
    small = dataclasses.replace(entry, name="small", memory_bytes=int(0.7 * state))
    kd.hardware.register(small)
    try:
        choice = kd.auto(perceptron, 64, "small:8", trials=4)
        assert choice.plan.fits
        assert choice.plan.memory.weights < state / 3 / 3.9  # of which a third are weights, split at least in four
        unsharded = next(trial for trial in choice.trials if trial.candidate.label == "DP")
        assert unsharded.outcome.startswith("cannot fit")
        fewest = kd.auto(perceptron, 64, "small:8", objective="devices", trials=3)
        assert 1 < fewest.mesh.devices.size <= 4
        with pytest.raises(NothingFitsError, match="The closest is"):
            kd.auto(perceptron, 64, "small:1")
    finally:
        del kd.hardware._entries["small"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "slices"),
    [pytest.param("v5e:2x2", 2, marks=needs_libtpu), pytest.param("h100:2x4", 1, marks=needs_cuda)],
)
def test_two_slices_or_hosts(target, slices):
    choice = kd.auto(perceptron, 64, kd.target(target, slices=slices), trials=3)
    assert all(trial.candidate.size("context", "model") <= 4 for trial in choice.trials)
    assert any(dict(trial.candidate.axes) == {"replica": 2, "data": 4} for trial in choice.trials)
    assert choice.plan.fits


def token_model(depth):
    tokens = keras.Input((128,), dtype="int32")
    x = layers.Embedding(256, 128, name="embedding")(tokens)
    for number in range(depth):
        y = layers.MultiHeadAttention(4, 32, name=f"block{number}_attention")(x, x, use_causal_mask=True)
        x = layers.Add(name=f"block{number}_add1")([x, y])
        y = layers.Dense(512, activation="relu", name=f"block{number}_up")(x)
        x = layers.Add(name=f"block{number}_add2")([x, layers.Dense(128, name=f"block{number}_down")(y)])
    model = keras.Model(tokens, layers.Dense(256, name="head")(x), name="gpt")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.filterwarnings("ignore:.*computes attention by XLA")  # cuDNN has no float32
@pytest.mark.slow
@pytest.mark.parametrize("target", EIGHT_DEVICES)
def test_devices_that_have_no_row_of_their_own_are_tried_with_a_share_of_one(target):
    batch = (jax.ShapeDtypeStruct((4, 128), "int32"),) * 2
    choice = kd.auto(token_model, batch, target, depth=6, trials=2)
    assert choice.plan.depth == 6
    compiled = [trial.candidate for trial in choice.trials if trial.plan is not None]
    assert any(candidate.size("context", "model") > 1 for candidate in compiled)
