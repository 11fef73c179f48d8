"""A program that generates text, as one or as several processes."""

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
            backbone = keras_hub.models.LlamaBackbone(
                vocabulary_size=64,
                num_layers=1,
                num_query_heads=4,
                num_key_value_heads=4,
                hidden_dim=32,
                intermediate_dim=64,
            )
            model = keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None)
            model.compile(sampler="greedy")
            for number in rows:
                generator = np.random.default_rng(number)
                given = np.arange(16) < generator.integers(3, 9, (number, 1))
                prompts = {"token_ids": generator.integers(1, 64, (number, 16), "int32") * given, "padding_mask": given}
                generated = model.generate(prompts, stop_token_ids=None)["token_ids"]
                found[f"{name}, {number}"] = np.asarray(generated).tolist()
    return found
