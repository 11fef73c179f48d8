"""A program that generates text, as one or as several processes."""

from typing import Any

import keras
import keras_hub
import numpy as np

import keras_dist as kd

STRATEGIES = {"DP": kd.DataParallel, "FSDP": lambda: kd.FullyShardedDataParallel(min_shard_bytes=0)}


def tokens(rows: list[int]) -> dict[str, list]:
    """Returns the tokens of prompts of different lengths under each strategy, by its name and the number of rows."""
    found = {}
    for name, make in STRATEGIES.items():
        with make().scope():
            keras.utils.set_random_seed(0)
            model = language_model()
            for number in rows:
                found[f"{name}, {number}"] = generated(model, number)
    return found


def rounds() -> list:
    """Returns the losses and tokens of rounds of training under FSDP and generating under tensor parallelism."""
    mesh = kd.create_device_mesh(f"data:2,model:{kd.get_device_count() // 2}")
    generating = kd.ModelParallel(layout_map=kd.tensor_parallel_layout_map(language_model, mesh), batch_dim_name="data")
    found = []
    with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
        keras.utils.set_random_seed(0)
        model = language_model()
        for _ in range(2):
            found += model.fit(prompts(8), np.ones((8, 16)), batch_size=8, verbose=0).history["loss"]
            with kd.inference_layout(model, generating):
                found.append(generated(model, 8))
    return found


def language_model(heads: int = 4, sampler: Any = "greedy") -> Any:
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=64,
        num_layers=1,
        num_query_heads=heads,
        num_key_value_heads=heads,
        hidden_dim=8 * heads,
        intermediate_dim=16 * heads,
    )
    model = keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None)
    model.compile("adam", sampler=sampler)
    return model


def prompts(rows: int) -> dict:
    generator = np.random.default_rng(rows)
    given = np.arange(16) < generator.integers(3, 9, (rows, 1))
    return {"token_ids": generator.integers(1, 64, (rows, 16), "int32") * given, "padding_mask": given}


def generated(model, rows: int) -> list:
    return np.asarray(model.generate(prompts(rows), stop_token_ids=None)["token_ids"]).tolist()
