"""Tensor parallel rules for KerasHub's models, compared with their own layout maps if they have one."""

import math
import warnings

import keras
import numpy as np
import pytest

import keras_dist as kd

keras_hub = pytest.importorskip("keras_hub", reason="needs KerasHub: pip install '.[hub]'", exc_type=ImportError)
models = keras_hub.models
SIZES = {"vocabulary_size": 512, "num_layers": 2, "hidden_dim": 64, "intermediate_dim": 128}
HEADS = {"num_query_heads": 8, "num_key_value_heads": 8}

pytestmark = pytest.mark.slow


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
    "fnet": lambda: models.FNetBackbone(
        vocabulary_size=512, num_layers=2, hidden_dim=64, intermediate_dim=128, max_sequence_length=32, dropout=0.0
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


def rules_for(build, axes="batch:1,model:8", **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="[0-9]+ weights? .* replicated")
        return kd.tensor_parallel_layout_map(build, kd.create_device_mesh(axes), **options)


def built_anew(build):
    """What a function builds, with the names and values of a new process, under the current distribution."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    return build()


def causal_lm(build, kind):
    model = kind(backbone=build(), preprocessor=None)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("name", OWN_MAPS)
def test_no_less_sharding_and_no_more_traffic_than_with_keras_hubs_map(name):
    build, backbone, kind = OWN_MAPS[name]
    mesh = kd.create_device_mesh("batch:1,model:8")
    hub_map = kd.ModelParallel(layout_map=backbone.get_layout_map(mesh, "model", "batch"), batch_dim_name="batch")
    rules = kd.ModelParallel(layout_map=rules_for(build))
    tokens = np.ones((8, 64), "int32")
    batch = {"token_ids": tokens, "padding_mask": tokens}, tokens
    of_hub, of_rules = (kd.plan(lambda: causal_lm(build, kind), each, batch) for each in (hub_map, rules))
    held = {v.path: v.bytes for v in of_hub.variables if v.part == "weights" and len(v.shape) > 1}
    for v in of_rules.variables:
        if v.path in held:
            assert v.bytes <= held[v.path], v
    assert of_rules.memory.state <= of_hub.memory.state
    assert of_rules.wire_bytes <= of_hub.wire_bytes
    assert "all-to-all" not in {each.kind for each in of_rules.traffic}


@pytest.mark.parametrize("name", OTHERS)
def test_models_without_a_map_are_sharded(name):
    build = OTHERS[name]
    layout_map = rules_for(build, "batch:2,model:4")
    with kd.deferred():
        model = build()
    held = {v.path: math.prod(v.shape) for v in model.weights}
    sharded = sum(size for path, size in held.items() if layout_map[path] and any(layout_map[path].axes))
    least = {"resnet": 0.5, "vit": 0.8}.get(name, 0.9)  # some convolutions, and the patch embedding, stay replicated
    assert sharded > least * sum(held.values())
    assert not kd.explain(model, kd.ModelParallel(layout_map=layout_map)).findings


def mixtral_of_width(width):
    return models.MixtralBackbone(**SIZES | HEADS | {"intermediate_dim": width}, num_experts=8, top_k=2)


def qwen3_moe_of_width(width):
    experts = {"moe_intermediate_dim": width, "num_experts": 8, "top_k": 2, "head_dim": 16}
    return models.Qwen3MoeBackbone(**SIZES | HEADS, **experts)


@pytest.mark.parametrize("build", [mixtral_of_width, qwen3_moe_of_width])
@pytest.mark.parametrize("width", [512, 256])
def test_experts_are_sharded_by_their_width_if_it_is_wide_and_gate_and_up_are_apart(build, width):
    layout_map = rules_for(lambda: build(width), "batch:2,model:4")
    found = {pattern.rpartition("/")[-1]: layout.axes for pattern, layout in layout_map.items() if "_moe_" in pattern}
    assert not any(found.pop("kernel"))  # of the router
    shards_width = build is mixtral_of_width and width == 512
    down = (None, "model", None) if shards_width else ("model", None, None)
    assert found.pop("expert_feedforward_output_dense") == down
    assert {*found.values()} == {(None, None, "model") if shards_width else ("model", None, None)}


@pytest.mark.parametrize("kind", [models.QwenMoeBackbone, models.Qwen3MoeBackbone])
def test_keras_hubs_map_replicates_experts_and_shards_their_router(kind):
    experts = {"moe_intermediate_dim": 512, "num_experts": 8, "top_k": 2}
    experts |= {"shared_expert_intermediate_dim": 64} if kind is models.QwenMoeBackbone else {"head_dim": 16}
    layout_map = kind.get_layout_map(kd.create_device_mesh("data:2,model:4"), "model", "data")
    distribution = kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    findings = kd.explain(lambda: kind(**SIZES | HEADS | experts), distribution).findings
    [message] = [finding.message for finding in findings if finding.kind == "replicated"]
    for rule in (
        "expert_feedforward_gate_dense'] = ('model', 'data', None)",
        "expert_feedforward_output_dense'] = ('model', None, 'data')",
        "feedforward_gate_dense.kernel'] = (None, None)" if "Qwen3" in kind.__name__ else "kernel'] = (None, None)",
    ):
        assert rule in message
    assert "6 MiB on each device, and sharded over 'model' 1.50 MiB" in message


def gemma3_with_images():
    encoder = models.Gemma3VisionEncoder(
        image_size=16,
        patch_size=4,
        num_heads=2,
        hidden_dim=32,
        num_layers=1,
        intermediate_dim=64,
        output_dim=64,
        pool_size=2,
    )
    sizes = SIZES | HEADS | {"head_dim": 16, "image_size": 16}
    return models.Gemma3Backbone(**sizes, vision_encoder=encoder)


def sam_with_prompts():
    encoder = models.ViTDetBackbone(
        hidden_size=16,
        num_layers=2,
        intermediate_dim=64,
        num_heads=4,
        global_attention_layer_indices=[1],
        patch_size=16,
        num_output_channels=8,
        window_size=2,
        image_shape=(64, 64, 3),
    )
    prompts = keras_hub.layers.SAMPromptEncoder(
        hidden_size=8, image_embedding_size=(4, 4), input_image_size=(64, 64), mask_in_channels=16
    )
    decoder = keras_hub.layers.SAMMaskDecoder(
        num_layers=1,
        hidden_size=8,
        intermediate_dim=32,
        num_heads=4,
        embedding_dim=8,
        num_multimask_outputs=3,
        iou_head_depth=3,
        iou_head_hidden_dim=8,
    )
    return models.SAMBackbone(image_encoder=encoder, prompt_encoder=prompts, mask_decoder=decoder)


SEVERAL_KINDS_OF_INPUTS = {
    "rwkv7": (
        lambda: models.RWKV7Backbone(
            hidden_size=64,
            head_size=16,
            num_layers=2,
            vocabulary_size=128,
            intermediate_dim=128,
            gate_lora=16,
            mv_lora=8,
            aaa_lora=8,
            decay_lora=8,
        ),
        {"rwkv_layer_0/RWKV_CMIX/dense_k/kernel": (None, "model")},
    ),
    "gemma3": (gemma3_with_images, {"decoder_block_0/ffw_gating/kernel": (None, "model")}),
    "moonshine": (
        lambda: models.MoonshineBackbone(
            vocabulary_size=128,
            filter_dim=32,
            encoder_num_layers=1,
            decoder_num_layers=1,
            hidden_dim=32,
            intermediate_dim=64,
            encoder_num_heads=4,
            decoder_num_heads=4,
        ),
        {"encoder_block_0/feedforward/dense_1/kernel": (None, "model")},
    ),
    "sam": (sam_with_prompts, {"sam_prompt_encoder/no_mask_embed/embeddings": (None, None)}),
}


@pytest.mark.parametrize("name", SEVERAL_KINDS_OF_INPUTS)
def test_models_with_state_audio_images_or_prompts_are_traced(name):
    build, expected = SEVERAL_KINDS_OF_INPUTS[name]
    layout_map = rules_for(build, "batch:4,model:2")
    assert {path: layout_map[path].axes for path in expected} == expected
    assert any("model" in layout.axes for layout in layout_map.values())


ROWS, TOKENS = 4, 16


def batches():
    """A batch for each of these models: all inputs of the sizes that belong together."""
    rng = np.random.default_rng(0)
    tokens, mask = rng.integers(0, 128, (ROWS, TOKENS), "int32"), np.ones((ROWS, TOKENS), "int32")
    sound = rng.normal(size=(ROWS, 2048, 1)).astype("float32")
    return {
        "rwkv7": {"token_ids": tokens, "padding_mask": mask},
        "gemma3": {
            "token_ids": tokens,
            "padding_mask": mask,
            "images": rng.random((ROWS, 1, 16, 16, 3), "float32"),
            "vision_indices": np.tile(np.arange(4, dtype="int32"), (ROWS, 1)),
            "vision_mask": mask * (np.arange(TOKENS, dtype="int32") < 4),
        },
        "moonshine": {
            "encoder_input_values": sound,
            "encoder_padding_mask": np.ones(sound.shape[:2], "bool"),
            "decoder_token_ids": tokens,
            "decoder_padding_mask": mask.astype("bool"),
        },
        "sam": {
            "images": rng.random((ROWS, 64, 64, 3), "float32"),
            "points": 64 * rng.random((ROWS, 2, 2), "float32"),
            "labels": np.ones((ROWS, 2), "float32"),
            "boxes": 64 * rng.random((ROWS, 1, 2, 2), "float32"),
            "masks": np.zeros((ROWS, 0, 16, 16, 1), "float32"),
        },
    }


class Square(keras.losses.Loss):
    """The mean of an output's squares, for models without targets."""

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_pred), axis=range(1, len(y_pred.shape)))


def trainable(name):
    """A compiled model, and its batch of inputs and targets."""
    model = SEVERAL_KINDS_OF_INPUTS[name][0]()
    losses, y = Square(), np.zeros((ROWS, 1), "float32")
    if isinstance(model.output, dict):
        losses, y = dict.fromkeys(model.output, losses), dict.fromkeys(model.output, y)
    model.compile(keras.optimizers.SGD(0.01), losses)
    return model, (batches()[name], y)


@pytest.mark.parametrize("name", SEVERAL_KINDS_OF_INPUTS)
def test_models_with_state_audio_images_or_prompts_train_as_on_one_device(name):
    def losses():
        model, (x, y) = built_anew(lambda: trainable(name))
        history = model.fit(x, y, batch_size=ROWS, epochs=3, shuffle=False, verbose=0).history["loss"]
        return history, [p.astype("float32") for p in keras.tree.flatten(model.predict(x, verbose=0))]

    expected, predictions = losses()
    keras.utils.clear_session(free_memory=False)
    layout_map = rules_for(SEVERAL_KINDS_OF_INPUTS[name][0], "batch:2,model:4", batch=batches()[name])
    with kd.ModelParallel(layout_map=layout_map, batch_dim_name="batch").scope():
        found, found_predictions = losses()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for one, other in zip(predictions, found_predictions, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5 * max(1, np.abs(one).max()))


@pytest.mark.parametrize("name", SEVERAL_KINDS_OF_INPUTS)
def test_models_with_state_audio_images_or_prompts_are_planned(name):
    mesh = kd.create_device_mesh("batch:2,model:4", devices=kd.target("cpu:8"))
    build, _ = SEVERAL_KINDS_OF_INPUTS[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="[0-9]+ weights? .* replicated")
        layout_map = kd.tensor_parallel_layout_map(build, mesh, batch=batches()[name])
    _, batch = trainable(name)
    keras.utils.clear_session(free_memory=False)
    plan = kd.plan(lambda: trainable(name)[0], kd.ModelParallel(layout_map=layout_map, batch_dim_name="batch"), batch)
    with kd.deferred():
        held = sum(math.prod(v.shape) * v.value.dtype.itemsize for v in build().weights)
    assert 0 < plan.memory.weights < 0.75 * held
    assert plan.wire_bytes > 0


def gemma4_with_images_and_audio():
    vision = models.Gemma4VisionEncoder(
        image_size=16,
        patch_size=4,
        num_heads=2,
        hidden_dim=32,
        num_layers=1,
        intermediate_dim=64,
        head_dim=16,
        output_dim=64,
        pool_size=2,
    )
    audio = models.Gemma4AudioEncoder(
        input_feat_size=16,
        hidden_size=32,
        num_heads=4,
        num_layers=1,
        output_dim=64,
        chunk_size=4,
        context_left=5,
    )
    sizes = SIZES | HEADS | {"head_dim": 16, "image_size": 16}
    return models.Gemma4Backbone(**sizes, vision_encoder=vision, audio_encoder=audio)


def test_a_model_that_no_size_fits_is_traced_with_a_batch_of_shapes():
    with pytest.raises(ValueError, match=r"pixel_values.*batch=\{.*'audio_mel': \(1, None, None, 16\)"):
        rules_for(gemma4_with_images_and_audio)
    texts = dict.fromkeys(("token_ids", "padding_mask", "position_ids", "vision_mask", "audio_mask"), (3, 32))
    images = {"pixel_values": (3, 1, 16, 48), "pixel_position_ids": (3, 1, 16, 2), "vision_indices": (3, 4)}
    sound = {"audio_mel": (3, 1, 64, 16), "audio_mel_mask": (3, 1, 64), "audio_indices": (3, 16)}
    layout_map = rules_for(gemma4_with_images_and_audio, "batch:2,model:4", batch=texts | images | sound)
    assert layout_map["decoder_block_0/ffw_gating/kernel"].axes == (None, "model")


def images_or_tokens(model):
    def array(tensor):
        shape = [2 if dim is None else dim for dim in tensor.shape]
        shape = [*shape[:1], *(32 if dim is None else dim for dim in tensor.shape[1:])]
        return np.ones(shape, "int32" if tensor.dtype.startswith("int") else "float32")

    return keras.tree.map_structure(array, model.input)


@pytest.mark.parametrize("name", ["mixtral", "vit", "t5", "resnet"])
def test_predictions_are_those_of_one_device(name):
    build = OTHERS[name]

    def outputs():
        model = built_anew(build)
        return keras.tree.flatten(model.predict(images_or_tokens(model), verbose=0))

    alone = outputs()
    with kd.ModelParallel(layout_map=rules_for(build, "batch:2,model:4"), batch_dim_name="batch").scope():
        for one, other in zip(alone, outputs(), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


def test_too_few_key_and_value_heads_are_replicated_and_reported():
    with pytest.warns(UserWarning, match=r"4 weights .*self_attention/(key|value)/kernel"):
        layout_map = kd.tensor_parallel_layout_map(
            lambda: llama3(hidden_dim=512, num_key_value_heads=2), kd.create_device_mesh("batch:1,model:8")
        )
    assert layout_map["transformer_layer_0/self_attention/key/kernel"].axes == (None, None, None)
    assert layout_map["transformer_layer_0/self_attention/query/kernel"].axes == (None, "model", None)


@pytest.mark.parametrize("name", ["t5", "fnet"])
def test_models_train_on_sharded_sequences_as_on_one_device(name):
    """Keras infers the shapes of T5's layers with symbolic lengths; FNet transforms along sequences."""
    build = OTHERS[name]

    def losses():
        model = built_anew(build)
        y = {name: np.zeros((2, 1)) for name in model.output} if isinstance(model.output, dict) else np.zeros((2, 1))
        model.compile(keras.optimizers.SGD(0.01), keras.tree.map_structure(lambda _: Square(), y))
        return [model.train_on_batch(images_or_tokens(model), y) for _ in range(3)]

    expected = losses()
    context = {"sequence_dim_name": "context"}
    rules = rules_for(build, "data:2,context:2,model:2", sequence_parallel=True, **context)
    with kd.ModelParallel(layout_map=rules, batch_dim_name="data", **context).scope():
        np.testing.assert_allclose(losses(), expected, rtol=1e-5)
