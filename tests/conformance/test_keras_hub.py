"""KerasHub's layout maps and models with meshes and distributions of keras_dist."""

import keras
import numpy as np
import pytest

import keras_dist as kd

keras_hub = pytest.importorskip("keras_hub", reason="needs KerasHub: pip install '.[hub]'", exc_type=ImportError)


@pytest.fixture
def mesh():
    """A 2 x 4 mesh with the axis names that KerasHub's layout maps use."""
    return kd.DeviceMesh((2, 4), ["batch", "model"])


def llama(**arguments):
    """A Llama with two small blocks."""
    keras.utils.set_random_seed(0)
    return keras_hub.models.LlamaBackbone(
        vocabulary_size=64,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=4,
        hidden_dim=32,
        intermediate_dim=64,
        **arguments,
    )


def inputs(rows):
    """Token ids and an all-ones mask."""
    tokens = np.random.default_rng(0).integers(0, 64, (rows, 12))
    return {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}


def test_a_layout_map_of_keras_hub_on_a_mesh_of_keras_dist(mesh):
    layout_map = keras_hub.models.LlamaBackbone.get_layout_map(mesh)
    assert type(layout_map) is keras.distribution.LayoutMap
    expected = llama().predict(inputs(7), verbose=0)
    kd.set_distribution(kd.ModelParallel(layout_map=layout_map, batch_dim_name="batch"))
    model = llama()
    query = next(v for v in model.variables if v.path.endswith("query/kernel"))
    assert query.value.sharding.shard_shape(query.shape) != tuple(query.shape)
    np.testing.assert_allclose(model.predict(inputs(7), verbose=0), expected, rtol=1e-5, atol=1e-5)


def test_a_mesh_without_the_axis_batch():
    """KerasHub's own error shows the mesh's axes; the names can be passed."""
    mesh = kd.DeviceMesh((2, 4), ["data", "model"])
    with pytest.raises(ValueError, match=r"batch.*\['data', 'model'\]"):
        keras_hub.models.LlamaBackbone.get_layout_map(mesh)
    assert len(keras_hub.models.LlamaBackbone.get_layout_map(mesh, data_parallel_dim_name="data"))


@pytest.mark.slow
def test_a_causal_language_model_trains_and_generates(mesh):
    def run():
        model = keras_hub.models.LlamaCausalLM(backbone=llama(), preprocessor=None)
        model.compile(
            optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), sampler="greedy"
        )
        data = inputs(7)
        losses = model.fit(data, np.roll(data["token_ids"], -1, axis=1), batch_size=4, shuffle=False, verbose=0)
        prompt = inputs(3)
        prompt["padding_mask"][:, 6:] = 0
        return losses.history["loss"], model.generate(prompt, stop_token_ids=None)["token_ids"]

    losses, tokens = run()
    layout_map = keras_hub.models.LlamaBackbone.get_layout_map(mesh)
    kd.set_distribution(kd.ModelParallel(layout_map=layout_map, batch_dim_name="batch"))
    losses_here, tokens_here = run()
    np.testing.assert_allclose(losses_here, losses, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(tokens_here), np.asarray(tokens))
