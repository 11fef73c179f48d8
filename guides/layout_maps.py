# %% [markdown]
# # Layout maps: how to write rules, how to check them, and what to do about each message
#
# This guide is for readers who train a Keras model on several devices and want to shard its weights. Eight CPU devices
# are simulated, so it runs anywhere. Its last part lists the messages about layout maps with their fixes: search this
# page for the text of your message. Each message is produced by an actual mistake, and each fix is tried.

# %%
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pickle
import textwrap
import warnings
from functools import partial

import keras_dist as kd

kd.simulate_devices(8)  # before anything else starts JAX

import keras
import numpy as np
from jax.sharding import PartitionSpec
from keras import layers

MESH = kd.create_device_mesh("data:2,model:4")
COLUMNS, ROWS = (None, "model"), ("model", None)  # for a kernel of shape (inputs, outputs)


def show(value, with_figure: bool = False) -> None:
    """Displays a table or a report in a notebook, perhaps with its figure, and prints it in a script."""
    if "ipykernel" in sys.modules:
        from IPython.display import display

        display(value, *([value.figure()] if with_figure else []))
    else:
        print(value)


# %% [markdown]
# ## The model
#
# Nothing in it refers to a distribution.


# %%
def transformer() -> keras.Model:
    """Returns a compiled language model with two blocks. Nothing in it refers to a distribution."""
    tokens = keras.Input((32,), dtype="int32")
    x = layers.Embedding(256, 64, name="embedding")(tokens)
    for block in ("block0", "block1"):
        y = layers.LayerNormalization(name=f"{block}_norm1")(x)
        y = layers.MultiHeadAttention(8, 8, use_bias=False, name=f"{block}_attention")(y, y, use_causal_mask=True)
        x = layers.Add(name=f"{block}_add1")([x, y])
        y = layers.LayerNormalization(name=f"{block}_norm2")(x)
        y = layers.Dense(256, activation="gelu", name=f"{block}_up")(y)
        x = layers.Add(name=f"{block}_add2")([x, layers.Dense(64, use_bias=False, name=f"{block}_down")(y)])
    model = keras.Model(tokens, layers.Dense(256, use_bias=False, name="head")(x), name="transformer")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


# %% [markdown]
# ## A first map
#
# The rules shard the weights over axis "model"; axis "data" shards the batch.
#
# A key is a regex that must match the entire path of a variable, or the path itself, which takes precedence. The value
# has one entry per dim of the variable: the mesh axis that shards it, or `None`.


# %%
def first_map() -> kd.LayoutMap:
    """Returns rules for the transformer."""
    layout_map = kd.LayoutMap(MESH)
    layout_map["embedding/embeddings"] = (None, "model")
    layout_map["block[0-9]+_attention/(query|key|value)/kernel"] = (None, "model", None)  # width, heads, head size
    layout_map["block[0-9]+_attention/attention_output/kernel"] = ("model", None, None)  # heads, head size, width
    layout_map["block[0-9]+_up/kernel"] = (None, "model")
    layout_map["block[0-9]+_up/bias"] = ("model",)
    layout_map["block[0-9]+_down/kernel"] = ("model", None)
    layout_map["head/kernel"] = (None, "model")
    # A key that ends in /output is for a layer's outputs, one that ends in /input for its inputs.
    layout_map["embedding/output"] = ("data", None, None)
    layout_map["block[0-9]+_up/input"] = ("data", None, None)
    return layout_map


# %% [markdown]
# The next cell prints which rule applies to which path. The third path is that of a `Sequential` model: rules do not
# need names that Keras generates for models.

# %%
for path in ("block1_up/kernel", "block1_norm1/gamma", "sequential_3/head/kernel", "block0_up/input"):
    rule = first_map().rule(path)
    print(f"{path:25}", "no rule, replicated" if rule is None else f"{rule.pattern} {rule.layout.axes}")

# %% [markdown]
# ## Read the table of `kd.explain`
#
# It shows the layout of each variable and the reason for it, before the model is created. Variables whose paths differ
# only in numbers share a row, with their count. Below the shape is the shape of the shard on one device; the last
# column has the bytes on one device.

# %%
coverage = kd.explain(transformer, kd.ModelParallel(layout_map=first_map(), batch_dim_name="data"))
show(coverage)
print("findings:", coverage.findings)  # assert in a test that there are none
first = coverage.to_dict()["variables"][0]  # plain data, for files and custom checks
print("to_dict:", {name: first[name] for name in ("path", "shape", "axes", "shard_shape", "bytes", "rule")})


# %% [markdown]
# ## Warnings before the first step
#
# A typo is reported before the first step: in `compile`, or when the model is built.

# %%
layout_map = first_map()
layout_map["block[0-9]+_donw/kernel"] = layout_map.pop("block[0-9]+_down/kernel")
keras.utils.set_random_seed(0)
tokens = np.random.default_rng(0).integers(0, 256, (8, 33))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", kd.LayoutMapWarning)
    with kd.ModelParallel(layout_map=layout_map, batch_dim_name="data").scope():
        loss = transformer().train_on_batch(tokens[:, :-1], tokens[:, 1:])
print(*(f"{each.category.__name__}: {each.message}" for each in caught), f"loss: {loss:.2f}", sep="\n")

# %% [markdown]
# `warnings.simplefilter("ignore", kd.LayoutMapWarning)` silences the warning. `strict=True` makes it an error.

# %%
try:
    with kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", strict=True).scope():
        transformer()
except ValueError as error:
    print("strict=True:", type(error).__name__, str(error).splitlines()[1])


# %% [markdown]
# To replicate a weight intentionally, write a rule of only `None`:


# %%
def messages_for(build, rules) -> list[str]:
    """Returns the messages about rules: the error of creating the model under them, if any, and those of `explain`."""
    keras.utils.clear_session(free_memory=False)  # names as in a new process
    layout_map = kd.LayoutMap.from_rules(rules, MESH) if isinstance(rules, list) else kd.LayoutMap(MESH)
    layout_map.update({} if isinstance(rules, list) else rules)
    distribution = kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    found = [finding.message for finding in kd.explain(build, distribution).findings]
    try:
        with distribution.scope():
            build()
    except ValueError as error:
        return [str(error), *found]
    return found


# %%
del layout_map["block[0-9]+_donw/kernel"]
layout_map["block[0-9]+_down/kernel"] = (None, None)
print("findings with a rule of only None:", messages_for(transformer, layout_map))

# %% [markdown]
# ## Ordered rules, merging, source and pickle
#
# In t5x and EasyLM, the first rule that is found anywhere in a path wins. In keras_dist a rule must match the entire
# path.

# %%
partition_rules = [("attention/(query|key|value)/kernel", PartitionSpec(None, "model")), (".*", PartitionSpec())]
ordered = kd.LayoutMap.from_rules([(f".*(?:{pattern}).*", axes) for pattern, axes in partition_rules], MESH)
for path in ("block0_attention/query/kernel", "head/kernel"):
    print(f"{path:30}", ordered[path].axes)

# %%
attention, dense = kd.LayoutMap(MESH), kd.LayoutMap(None)  # the merged map has the mesh of the first
attention[".*(query|key|value)/kernel"] = (None, "model", None)
dense[".*_up/kernel"] = (None, "model")
both = attention | dense
print(source := both.to_source('kd.create_device_mesh("data:2,model:4")'), end="")
exec(source, namespace := {})
print("equal from source and from pickle:", namespace["layout_map"] == both == pickle.loads(pickle.dumps(both)))


# %% [markdown]
# ## Derived rules
#
# `kd.tensor_parallel_layout_map` derives rules from what the model computes. Names of layers do not matter. FSDP
# additionally shards weights over another axis.


# %%
def print_rows(coverage: kd.Coverage, *ends: str) -> None:
    for v in coverage.variables:
        if v.path.endswith(ends):
            print(f"{v.path:37} {v.shape!s:>9} {v.axes!s:17} shard {v.shard_shape!s:>9}, {v.why}")


# %%
layout_map = kd.tensor_parallel_layout_map(transformer, kd.create_device_mesh("fsdp:2,model:4"))
print(layout_map.to_source(), end="")
del layout_map["embedding/embeddings"]  # a rule is replaced by deleting it and adding another
layout_map["embedding/embeddings"] = (None, "model")
# By default weights of at most 64 KiB stay replicated.
distribution = kd.FullyShardedDataParallel(layout_map=layout_map, min_shard_bytes=1024)
print_rows(kd.explain(transformer, distribution), "embeddings", "block0_up/kernel", "block0_up/bias")


# %% [markdown]
# ## LoRA factors, quantization scales and optimizer state
#
# These variables need no rules: they have the layout of their weight.


# %%
def perceptron(*units: int, use_bias: bool = False, dropout: float = 0.0, lora_rank: int = 0) -> keras.Model:
    """Returns a model of dense layers named dense_0, dense_1, ..., the first one with LoRA if `lora_rank` is set."""
    x = y = keras.Input((64,))
    for number, size in enumerate(units or (64, 64)):
        y = layers.Dense(size, use_bias=use_bias, name=f"dense_{number}")(y)
    model = keras.Model(x, layers.Dropout(dropout)(y) if dropout else y, name="perceptron")
    if lora_rank:
        model.get_layer("dense_0").enable_lora(lora_rank)
    return model


# %%
layout_map = kd.LayoutMap(MESH)
layout_map["dense_[01]/kernel"] = (None, "model")
with (distribution := kd.ModelParallel(layout_map=layout_map, batch_dim_name="data")).scope():
    model = perceptron(lora_rank=4)
    model.get_layer("dense_1").quantize("int8")
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
print_rows(kd.explain(model, distribution), "kernel", "lora_kernel_a", "lora_kernel_b", "scale", "momentum")

# %% [markdown]
# ## Which device holds which shard

# %%
layout_map = first_map()
with kd.ModelParallel(layout_map=layout_map, batch_dim_name="data").scope():
    model = transformer()
    show(kd.visualize(model.get_layer("head").kernel), with_figure=True)
    del layout_map["head/kernel"]
    layout_map["head/kernel"] = ("model", "data")
    kd.redistribute(model)  # moves an existing model
    show(kd.visualize(model.get_layer("head").kernel), with_figure=True)

# %% [markdown]
# The hardware need not be attached:

# %%
mesh = kd.create_device_mesh("data:2,model:4", devices=kd.mock_tpus("v5e:2x4"))
show(kd.visualize((4096, 32, 128), kd.TensorLayout((None, "model", None), mesh)))


# %% [markdown]
# ## Messages, and what to do


# %%
def tied() -> keras.Model:
    """Returns a model that uses its embedding as its head, too (tied weights)."""
    tokens = keras.Input((32,), dtype="int32")
    embedding = layers.ReversibleEmbedding(256, 64, name="embedding")
    return keras.Model(tokens, embedding(layers.Dense(64, name="dense")(embedding(tokens)), reverse=True), name="tied")


# Words of a message; the mistake: a model and its rules (a list: ordered rules); rules that fix it; what to do.
MESSAGES = [
    (
        "Layout map rule 'dens_[01]/kernel' matches no variable of",
        (perceptron, {"dens_[01]/kernel": COLUMNS}),
        {"dense_[01]/kernel": COLUMNS},
        "The path is misspelled or incomplete, or the layer was renamed. print(kd.explain(model)) lists all paths.",
    ),
    (
        "Cannot shard 'dense_1/kernel' (shape (64, 10)) by the rule",
        (partial(perceptron, 64, 10), {"dense_[01]/kernel": COLUMNS}),
        {"dense_0/kernel": COLUMNS, "dense_1/kernel": ROWS},
        "The size of the axis must divide that of the dim. Often the axes are swapped: they are in the order of the "
        "shape. If not (few heads of keys and values), shard another dim, replicate this one, or use a smaller axis.",
    ),
    (
        "the layout has 2 entries, but the tensor has 1 dim.",
        (partial(perceptron, use_bias=True), {"dense_[01]/.*": COLUMNS}),
        {"dense_[01]/kernel": COLUMNS, "dense_[01]/bias": ("model",)},
        "The regex matches biases too. Narrow it to the kernels, and add a separate rule for the biases.",
    ),
    (
        "Path 'dense_0/kernel' matches multiple layout specification keys:",
        (perceptron, {"dense_.*": COLUMNS, ".*/kernel": ROWS}),
        {"dense_0/kernel": COLUMNS, ".*/kernel": ROWS},
        "Narrow a regex, or add the path as a key, which takes precedence. With LayoutMap.from_rules the first match "
        "wins.",
    ),
    (
        "are replicated over axis 'model' (size 4), although other weights are sharded over it.",
        (perceptron, {"dense_0/kernel": COLUMNS}),
        {"dense_0/kernel": COLUMNS, "dense_1/kernel": (None, None)},
        "Use the suggested rules, or those of kd.tensor_parallel_layout_map, or replicate the weights with an all-None "
        "rule.",
    ),
    (
        "Layout map rule '.*_1/kernel' has no effect, because other rules take precedence for all paths that it "
        "matches",
        (perceptron, [(".*/kernel", COLUMNS), (".*_1/kernel", ROWS)]),
        [(".*_1/kernel", ROWS), (".*/kernel", COLUMNS)],
        "Earlier rules, or keys that are the paths themselves, take all of its paths. Move it before them, or delete "
        "it.",
    ),
    (
        "the state of a random generator. It must be replicated, so that every device draws the same numbers.",
        (partial(perceptron, dropout=0.1), {".*/(kernel|.*state)": ("model",)}),
        {".*/kernel": ("model",)},
        "Dropout and other random layers keep such a state. Narrow the regex to the weights, or replicate the state.",
    ),
    (
        "a LoRA factor)",
        (partial(perceptron, lora_rank=2), {"dense_[01]/kernel": ROWS, ".*lora.*": ROWS}),
        {"dense_[01]/kernel": ROWS},
        "Delete the rule: LoRA factors have the layout of their weight.",
    ),
    (
        "The model has no such head: it seems to use its embedding",
        (tied, {"dense/kernel": COLUMNS, "head/kernel": COLUMNS}),
        {"dense/kernel": COLUMNS, "embedding/embeddings": ROWS},
        "Embedding and head are one weight. Write the rule for the embedding; its rows are the columns of the head.",
    ),
]

# %%
print("--- messages, and what to do")
for words, (build, rules), better, advice in MESSAGES:
    found = messages_for(build, rules)
    assert any(words in message for message in found), f"expected {words!r}, got {found}"
    assert not messages_for(build, better), f"{better} does not fix it"
    for message in found:
        print()
        for line in message.splitlines():
            print(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False))
    print(textwrap.fill(f"What to do: {advice} Here: {better}", 120, initial_indent="  ", subsequent_indent="  "))
