"""Tensor parallel rules for KerasHub's models: never less than their own layout maps, and for models without one."""

import math
import warnings

import keras
import numpy as np
import pytest

import keras_dist as kd

keras_hub = pytest.importorskip("keras_hub", reason="needs KerasHub: pip install 'keras-dist[hub]'")
models = keras_hub.models
SIZES = {"vocabulary_size": 512, "num_layers": 2, "hidden_dim": 64, "intermediate_dim": 128}
HEADS = {"num_query_heads": 8, "num_key_value_heads": 8}


def llama3(**sizes):
    return models.Llama3Backbone(**SIZES | HEADS | sizes)


def gemma(**sizes):
    return models.GemmaBackbone(**SIZES | HEADS | {"head_dim": 16} | sizes)


OWN_MAPS = {
    "llama3": (llama3, models.Llama3Backbone, models.Llama3CausalLM),
    "gemma": (gemma, models.GemmaBackbone, models.GemmaCausalLM),
}
OTHERS = {
    "mistral": lambda: models.MistralBackbone(**SIZES | HEADS),
    "mixtral": lambda: models.MixtralBackbone(**SIZES | HEADS, num_experts=8, top_k=2),
    "vit": lambda: models.ViTBackbone(
        image_shape=(32, 32, 3), patch_size=8, num_layers=2, num_heads=8, hidden_dim=64, mlp_dim=128
    ),
    "whisper": lambda: models.WhisperBackbone(
        vocabulary_size=512,
        num_layers=2,
        num_heads=8,
        hidden_dim=64,
        intermediate_dim=128,
        max_encoder_sequence_length=32,
        max_decoder_sequence_length=128,
    ),
    "t5": lambda: models.T5Backbone(
        vocabulary_size=512, num_layers=2, num_heads=8, hidden_dim=64, intermediate_dim=128
    ),
    "resnet": lambda: models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 128],
        stackwise_num_blocks=[2, 2],
        stackwise_num_strides=[1, 2],
        block_type="bottleneck_block",
        image_shape=(32, 32, 3),
    ),
}


def rules_for(build, axes="batch:1,model:8"):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="[0-9]+ weights? .* replicated")
        return kd.tensor_parallel_layout_map(build, kd.create_device_mesh(axes))


def causal_lm(build, kind):
    model = kind(backbone=build(), preprocessor=None)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("name", OWN_MAPS)
def test_never_less_sharded_and_never_more_traffic_than_by_their_own_map(name):
    build, backbone, kind = OWN_MAPS[name]
    mesh = kd.create_device_mesh("batch:1,model:8")
    theirs = kd.ModelParallel(layout_map=backbone.get_layout_map(mesh, "model", "batch"), batch_dim_name="batch")
    ours = kd.ModelParallel(layout_map=rules_for(build))
    tokens = np.ones((8, 64), "int32")
    batch = {"token_ids": tokens, "padding_mask": tokens}, tokens
    by_them, by_us = (kd.plan(lambda: causal_lm(build, kind), each, batch) for each in (theirs, ours))
    held = {v.path: v.bytes for v in by_them.variables if v.part == "weights" and len(v.shape) > 1}
    for v in by_us.variables:
        if v.path in held:
            assert v.bytes <= held[v.path], v
    assert by_us.memory.state <= by_them.memory.state
    assert by_us.wire_bytes <= by_them.wire_bytes
    assert "all-to-all" not in {each.kind for each in by_us.traffic}


@pytest.mark.parametrize("name", OTHERS)
def test_models_without_a_map_are_sharded(name):
    build = OTHERS[name]
    layout_map = rules_for(build, "batch:2,model:4")
    with kd.deferred():
        model = build()
    held = {v.path: math.prod(v.shape) for v in model.weights}
    sharded = sum(size for path, size in held.items() if layout_map[path] and any(layout_map[path].axes))
    least = {"resnet": 0.5, "vit": 0.8}.get(name, 0.9)  # some convolutions, and that of the patches, stay whole
    assert sharded > least * sum(held.values())
    assert not kd.explain(model, kd.ModelParallel(layout_map=layout_map)).findings


def images_or_tokens(model):
    def array(tensor):
        shape = [2 if dim is None else dim for dim in tensor.shape]
        shape = [*shape[:1], *(32 if dim is None else dim for dim in tensor.shape[1:])]
        return np.ones(shape, "int32" if tensor.dtype.startswith("int") else "float32")

    return keras.tree.map_structure(array, model.input)


@pytest.mark.parametrize("name", ["mixtral", "vit", "t5", "resnet"])
def test_they_give_the_numbers_of_one_device(name):
    build = OTHERS[name]

    def outputs():
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = build()
        return keras.tree.flatten(model.predict(images_or_tokens(model), verbose=0))

    alone = outputs()
    with kd.ModelParallel(layout_map=rules_for(build, "batch:2,model:4"), batch_dim_name="batch").scope():
        for one, other in zip(alone, outputs(), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


def test_few_heads_of_keys_and_values_stay_whole_and_are_reported():
    with pytest.warns(UserWarning, match=r"4 weights .*self_attention/(key|value)/kernel"):
        layout_map = kd.tensor_parallel_layout_map(
            lambda: llama3(hidden_dim=512, num_key_value_heads=2), kd.create_device_mesh("batch:1,model:8")
        )
    assert layout_map["transformer_layer_0/self_attention/key/kernel"].axes == (None, None, None)
    assert layout_map["transformer_layer_0/self_attention/query/kernel"].axes == (None, "model", None)
