"""Draws the picture of the first page, by this package: which device stores which shard of a model's weights."""

import pathlib

import keras
from matplotlib.figure import Figure

import keras_dist as kd

PICTURE = pathlib.Path(__file__).parents[1] / "guides" / "sharded_model.svg"


def build() -> keras.Model:
    tokens = keras.Input((16,), dtype="int32")
    x = keras.layers.Embedding(1024, 256, name="embedding")(tokens)
    y = keras.layers.Dense(1024, activation="gelu", use_bias=False, name="up")(x)
    x = keras.layers.Add()([x, keras.layers.Dense(256, use_bias=False, name="down")(y)])
    return keras.Model(tokens, keras.layers.Dense(1024, use_bias=False, name="head")(x))


def draw(app) -> None:
    mesh = kd.create_device_mesh("fsdp:2,model:4", devices=kd.mock_tpus("v5e:2x4"))
    rules = kd.LayoutMap(mesh)
    rules["embedding/embeddings"] = (None, "model")
    rules["(up|head)/kernel"] = (None, "model")
    rules["down/kernel"] = ("model", None)
    with kd.FullyShardedDataParallel(layout_map=rules).scope(), kd.deferred():
        weights = build().weights
    figure = Figure(figsize=(10, 3), facecolor="white", layout="constrained")
    for axes, weight in zip(figure.subplots(1, len(weights)), weights, strict=True):
        picture = kd.visualize(weight)
        for (row, column), devices in picture.cells.items():
            (top, bottom), (left, right) = picture.parts[0][row], picture.parts[1][column]
            box = {"facecolor": f"C{devices[0]}", "edgecolor": "white", "alpha": 0.6}
            axes.fill([left, right, right, left], [top, top, bottom, bottom], **box)
            text = ",".join(map(str, devices))
            axes.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center")
        layout = picture.title.partition(" as ")[2].partition(" on ")[0].replace("'", "")
        axes.set(title=f"{weight.path}\n{layout}", xticks=[0, weight.shape[1]], yticks=[0, weight.shape[0]])
        axes.title.set_fontsize("medium")
        axes.invert_yaxis()
    figure.suptitle("mesh fsdp:2 x model:4. The number of a shard is that of its device.", fontsize="medium")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


def setup(app):
    app.connect("builder-inited", draw)
    return {"parallel_read_safe": True}
