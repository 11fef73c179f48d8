"""A language model of KerasHub that trains under FSDP and generates under tensor parallelism, in one program."""

import inspect
from collections import Counter
from typing import Any

import jax
import keras
import numpy as np
import pytest
from support.compilations import counted_compilations
from support.hlo_text import read_module
from support.keras_scenarios import assert_same_numbers, start_anew
from support.strategy_models import has_layouts_of

import keras_dist as kd

keras_hub = pytest.importorskip("keras_hub", reason="needs KerasHub: pip install '.[hub]'", exc_type=ImportError)
generating = pytest.importorskip("multihost.programs.generating")
VOCABULARY, LENGTH, ROWS = 64, 12, 8


def language_model(sampler: Any = "greedy") -> Any:
    return generating.language_model(heads=8, sampler=sampler)


def tensor_parallel():
    layout_map = kd.tensor_parallel_layout_map(language_model, kd.create_device_mesh("data:2,model:4"))
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")


TRAINING = {
    "own mesh": lambda: kd.FullyShardedDataParallel(min_shard_bytes=0),
    "one mesh": lambda: kd.FullyShardedDataParallel(
        kd.create_device_mesh("data:2,model:4"), shard_axis=("data", "model"), min_shard_bytes=0
    ),
}


def prompts():
    random = np.random.default_rng(0)
    given = np.arange(LENGTH) < random.integers(3, 6, (ROWS, 1))
    return {"token_ids": random.integers(1, VOCABULARY, (ROWS, LENGTH), "int32") * given, "padding_mask": given}


def fit(model):
    targets = np.random.default_rng(1).integers(0, VOCABULARY, (ROWS, LENGTH))
    return model.fit(prompts(), targets, batch_size=ROWS, verbose=0).history["loss"]


def tokens(model):
    return np.asarray(model.generate(prompts(), stop_token_ids=None)["token_ids"])


def collectives_of_generate(model):
    """How many collectives of each kind the program has that `generate()` runs."""
    function = inspect.getclosurevars(model.generate_function).nonlocals["compiled_generate_function"]
    batch = {
        name: kd.distribute_tensor(np.asarray(value), kd.distribution().get_data_layout(value.shape))
        for name, value in prompts().items()
    }
    variables = model.sampler.variables, model.trainable_variables, model.non_trainable_variables
    state = tuple([variable.value for variable in each] for each in variables)
    found = read_module(function.lower(batch, None, state).compile().as_text(), {"devices": 8}).collectives
    return Counter(each.kind for each in found for _ in range(int(each.count)))


def values(model):
    return [np.asarray(variable) for variable in [*model.variables, *model.optimizer.variables]]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", TRAINING)
def test_rounds_of_training_and_generating(mesh):
    start_anew()
    keras.utils.set_random_seed(0)
    model = language_model()
    expected = [(fit(model), tokens(model)) for _ in range(3)]

    start_anew()
    training, generating = TRAINING[mesh](), tensor_parallel()
    with generating.scope():
        keras.utils.set_random_seed(0)
        model = language_model()
        tokens(model)
        of_tensor_parallelism = collectives_of_generate(model)

    start_anew()
    with training.scope():
        keras.utils.set_random_seed(0)
        model = language_model()
        compiled = []
        for losses, generated in expected:
            with counted_compilations() as found:
                assert_same_numbers(fit(model), losses)
                before = values(model)
                with jax.transfer_guard_device_to_host("disallow_explicit"):
                    block = kd.inference_layout(model, generating)
                    block.__enter__()
                assert has_layouts_of(generating, model.weights)
                np.testing.assert_array_equal(tokens(model), generated)
                if not compiled:
                    assert collectives_of_generate(model) == of_tensor_parallelism
                with jax.transfer_guard_device_to_host("disallow_explicit"):
                    block.__exit__(None, None, None)
            compiled.append(len(found))
            assert has_layouts_of(training, model.weights)
            for value, old in zip(values(model), before, strict=True):
                np.testing.assert_array_equal(value, old)
    assert compiled[0] > 0
    assert compiled[1:] == [0, 0]


@pytest.mark.slow
def test_random_states_of_the_sampler_move_too():
    """The meshes list their devices in different orders, so one program could not use both."""
    training = kd.FullyShardedDataParallel(kd.create_device_mesh("fsdp:8", devices=jax.devices()[::-1]))
    with training.scope():
        model = language_model(keras_hub.samplers.TopKSampler(4, seed=0))
        with kd.inference_layout(model, tensor_parallel()):
            first = tokens(model)
        state = model.sampler.variables[0].value
        assert list(state.sharding.mesh.devices.flat) == jax.devices()[::-1]
        second = tokens(model)
    assert (first != second).any()  # random numbers go on
