"""`kd.auto` for KerasHub's models: decoders, encoders, mixtures of experts, sequence to sequence, images."""

import jax
import keras
import pytest
from test_tensor_parallel_hub import OTHERS, OWN_MAPS

import keras_dist as kd

pytestmark = pytest.mark.slow
BUILDERS = {name: build for name, (build, *_) in OWN_MAPS.items()} | OTHERS


def compiled(build):
    """A model whose first output is trained to be zero."""
    backbone = build()
    model = keras.Model(backbone.inputs, jax.tree.leaves(backbone.outputs)[0])
    model.compile("adam", lambda true, predicted: keras.ops.mean(keras.ops.square(predicted), axis=-1))
    return model


def batch_for(build, rows, length=32):
    with kd.deferred():
        inputs = compiled(build).inputs
    shapes = [(rows, *(length if size is None else size for size in tensor.shape[1:])) for tensor in inputs]
    x = [jax.ShapeDtypeStruct(shape, tensor.dtype) for shape, tensor in zip(shapes, inputs, strict=True)]
    return x, jax.ShapeDtypeStruct((rows, 1), "float32")


@pytest.mark.parametrize("name", BUILDERS)
def test_every_model_gets_a_choice(name):
    build = BUILDERS[name]
    choice = kd.auto(lambda: compiled(build), batch_for(build, 16), trials=2)
    assert choice.plan.fits
    strategies = {trial.candidate.strategy for trial in choice.trials}
    assert {"dp", "tp"} <= strategies
    assert "fsdp" in strategies or any("would shard nothing" in note for note in choice.notes)  # small weights
    has_tokens = choice.plan.batch[0][0].startswith("int32")
    assert has_tokens == any("context" in trial.candidate.axes for trial in choice.trials)
    namespace = {}
    exec(choice.to_source(), namespace)
    assert repr(namespace["distribution"]) == repr(choice.distribution)
