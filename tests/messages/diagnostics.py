"""Texts of `keras_dist/diagnostics`: the report of `explain`, likely mistakes, `LayoutMapWarning`, pictures."""

import sys
from unittest import mock

import keras
from keras import layers
from support.strategy_models import mixture

import keras_dist as kd

COLUMNS, ROWS = (None, "model"), ("model", None)


def tower(use_bias=False, up=32, down=16, dropout=0.0, lora_rank=0, optimizer="adam"):
    x = keras.Input((16,))
    y = layers.Dense(up, use_bias=use_bias, name="up")(x)
    y = layers.Dense(down, use_bias=use_bias, name="down")(layers.Dropout(dropout)(y))
    model = keras.Model(x, y, name="tower")
    if lora_rank:
        model.get_layer("up").enable_lora(lora_rank)
    if optimizer:
        model.compile(optimizer, "mse")
    return model


def decoder(key_value_heads=4):
    tokens = keras.Input((16,), dtype="int32")
    x = layers.Embedding(256, 64, name="embedding")(tokens)
    for number in range(12):
        attention = layers.GroupQueryAttention(16, 4, key_value_heads, use_bias=False, name=f"block_{number}_attention")
        x = layers.Add()([x, attention(x, x)])
        y = layers.Dense(256, activation="gelu", name=f"block_{number}_up")(x)
        x = layers.Add()([x, layers.Dense(64, name=f"block_{number}_down")(y)])
    model = keras.Model(tokens, layers.Dense(256, name="head")(x), name="decoder")
    model.compile("adam", "mse")
    return model


def convolution():
    return keras.Sequential([keras.Input((8, 8, 6)), layers.Conv2D(16, 3, use_bias=False, name="conv")], name="images")


def named_by_keras():
    return keras.Sequential([keras.Input((16,)), layers.Dense(64, name="up"), layers.Dense(64, name="down")])


def tied():
    tokens = keras.Input((16,), dtype="int32")
    embedding = layers.ReversibleEmbedding(64, 16, name="embedding")
    return keras.Model(tokens, embedding(layers.Dense(16, name="dense")(embedding(tokens)), reverse=True), name="tied")


def distribution(rules, strict=False, mesh="data:2,model:4"):
    mesh = kd.create_device_mesh(mesh)
    layout_map = kd.LayoutMap.from_rules(rules, mesh) if isinstance(rules, list) else kd.LayoutMap(mesh)
    layout_map.update({} if isinstance(rules, list) else rules)
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", strict=strict)


def report(build, rules, **options):
    return lambda: str(kd.explain(build, distribution(rules, **options)))


def findings(build, rules, **options):
    return lambda: "\n".join(f.message for f in kd.explain(build, distribution(rules, **options)).findings)


def build_and_compile(rules, strict=False, **sizes):
    def compile_model():
        with distribution(rules, strict).scope():
            tower(**sizes)

    return compile_model


def tagger():
    return keras.Sequential(
        [
            keras.Input((64, 16)),
            keras.layers.Conv1D(16, 3, padding="causal"),
            keras.layers.Bidirectional(keras.layers.LSTM(8, return_sequences=True)),
            keras.layers.Conv1D(4, 1),
        ],
        name="tagger",
    )


def explain_before_the_first_step():
    model = tower()
    return str(kd.explain(model, kd.FullyShardedDataParallel()))


def figure_without_matplotlib():
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}):
        kd.visualize((16, 8), kd.TensorLayout((None, None), kd.create_device_mesh("data:8"))).figure()


def picture_of_a_deferred_variable():
    with kd.deferred():
        kd.visualize(keras.Variable(initializer="zeros", shape=(16, 8), name="kernel"))


def picture(shape, axes, mesh="data:2,model:4"):
    return lambda: str(kd.visualize(shape, kd.TensorLayout(axes, kd.create_device_mesh(mesh))))


DECODER_RULES = {
    "embedding/embeddings": COLUMNS,
    ".*(query|key|value)/kernel": (None, "model", None),
    ".*attention_output/kernel": ("model", None, None),
    ".*_up/kernel": COLUMNS,
    ".*_down/kernel": ROWS,
}

CASES = {
    "report of a correct map": report(decoder, DECODER_RULES | {"head/kernel": COLUMNS}),
    "report of a map with mistakes": report(decoder, DECODER_RULES | {".*_up/bais": ("model",)}),
    "report of an empty map": report(tower, {}),
    "report of fully sharded data parallelism": lambda: str(
        kd.explain(decoder, kd.FullyShardedDataParallel(min_shard_bytes=1024))
    ),
    "report of sharded sequences": lambda: str(
        kd.explain(tagger, kd.DataParallel(kd.create_device_mesh("data:2,context:4"), sequence_dim_name="context"))
    ),
    "report of a model before its first step": explain_before_the_first_step,
    "report of a model that is not compiled": report(lambda: tower(optimizer=None), {"up/kernel": COLUMNS}),
    "warning of one mistake": build_and_compile({"up/kernel": COLUMNS, "dwon/kernel": ROWS}),
    "warning of many mistakes": build_and_compile({f"nowhere_{number}/kernel": ROWS for number in range(7)}),
    "error of a strict map": build_and_compile({"up/kernel": COLUMNS}, strict=True, up=256, down=128),
    "replicas over an axis that no rule shards anything over": findings(
        tower, {"up/kernl": COLUMNS, ".*/kernel": ("data", None), ".*/bias": ("model",)}
    ),
    "a rule without a match": findings(tower, {"tower/up/kernl": COLUMNS, "down/kernel": ROWS}),
    "a rule with a leading slash": findings(tower, {"/up/kernel": COLUMNS, "down/kernel": ROWS}),
    "a rule for optimizer state": findings(
        tower, {"up/kernel": COLUMNS, "down/kernel": ROWS, "adam/up_kernel_momentum": COLUMNS}
    ),
    "a rule for a name of TensorFlow": findings(tower, {"up/kernel:0": COLUMNS, "down/kernel": ROWS}),
    "a rule that resembles nothing": findings(tower, {"xyz": COLUMNS, ".*/kernel": COLUMNS}),
    "a rule for an output without a match": findings(tower, {".*/kernel": COLUMNS, "upp/output": ("data", None)}),
    "a rule with another number": findings(tower, {"up_1/kernel": COLUMNS, "down/kernel": ROWS}),
    "a glob": findings(decoder, {"block_*_up/kernel": COLUMNS}),
    "a rule for the head of a model with tied weights": findings(
        tied, {"dense/kernel": COLUMNS, "head/kernel": COLUMNS}
    ),
    "the same, sharded already": findings(
        tied, {"dense/kernel": COLUMNS, "head/kernel": COLUMNS, ".*embeddings": ROWS}
    ),
    "swapped axes": findings(lambda: tower(down=6), {"up/kernel": COLUMNS, "down/kernel": COLUMNS}),
    "a rule with too many entries": findings(lambda: tower(True), {"(up|down)/.*": COLUMNS}),
    "a rule with too few entries": findings(convolution, {"images/conv/kernel": COLUMNS}),
    "a rule for LoRA factors that does not fit": findings(
        lambda: tower(lora_rank=2), {".*/kernel": COLUMNS, ".*lora.*": COLUMNS}
    ),
    "fewer heads than devices": findings(
        lambda: decoder(2), DECODER_RULES | {"head/kernel": COLUMNS}, mesh="data:2,model:4"
    ),
    "an ordered rule that does not fit": findings(lambda: tower(down=6), [(".*kernel", COLUMNS)]),
    "several rules for one path": findings(tower, {".*/kernel": COLUMNS, "up/.*": ROWS}),
    "a sharded random state": findings(lambda: tower(dropout=0.1), {".*kernel": COLUMNS, ".*state": ("model",)}),
    "a shadowed rule": findings(tower, [(".*/kernel", COLUMNS), (".*p/kernel", ROWS)]),
    "a regex all of whose paths are keys": findings(
        tower, {"up/kernel": COLUMNS, "down/kernel": ROWS, "u./kernel": ROWS}
    ),
    "rules that match with and without the name of the model": findings(
        named_by_keras, {".*kernel": COLUMNS, "up/kernel.*": ROWS, "down/.*": ("model",)}
    ),
    "replicas": findings(decoder, {"embedding/embeddings": COLUMNS}),
    "replicas over two axes": findings(tower, {"up/kernel": ("data", "model")}),
    "replicas of experts whose router is sharded": findings(mixture, {".*router": COLUMNS, "head/kernel": COLUMNS}),
    "a replica that no axis divides": findings(lambda: tower(up=7, down=7), {"up/kernel": ROWS}),
    "a rule that is only a name of a layer": findings(tower, {"up": (None, "model")}),
    "an idle axis": findings(tower, {"up/kernel": ("data", None), "down/kernel": (None, None)}),
    "explain without a distribution": lambda: kd.explain(tower),
    "explain under something else": lambda: kd.explain(tower, "data:8"),
    "explain of a model that is not built": lambda: kd.explain(
        keras.Sequential([layers.Dense(2)], name="unbuilt"), kd.DataParallel()
    ),
    "explain of something else": lambda: kd.explain("model", kd.DataParallel()),
    "a picture": picture((16, 8), ("data", "model")),
    "a picture of one sharded dim": picture((16, 8), (("model", "data"), None)),
    "a picture of a replicated tensor": picture((16,), (None,)),
    "a picture of three sharded dims": picture((4, 4, 4), ("a", "b", "c"), "a:2,b:2,c:2"),
    "a picture of a shape without a layout": lambda: kd.visualize((16, 8)),
    "a figure without matplotlib": figure_without_matplotlib,
    "a picture of a variable without layout": picture_of_a_deferred_variable,
    "a picture of a layout that does not fit": picture((16, 6), (None, "model")),
}
