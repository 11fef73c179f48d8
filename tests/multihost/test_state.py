"""Several processes give variables their values, read them, and write files once."""

import importlib.util

import h5py
import keras
import numpy as np
import pytest
from support.run_processes import run_processes

SETUP = """
import importlib.util, jax, keras, numpy as np
from keras_dist._keras import internals
from keras_dist.multihost import messaging

keras.utils.set_random_seed(0)
mesh = kd.DeviceMesh((2, 2), ["data", "model"])
layout_map = kd.LayoutMap(mesh)
layout_map[".*a/kernel"] = kd.TensorLayout(("model", "data"), mesh)
layout_map[".*b/kernel"] = kd.TensorLayout((("data", "model"), None), mesh)
kd.set_distribution(kd.ModelParallel(layout_map=layout_map, batch_dim_name="data"))

def new_model(width=512, dtype="bfloat16"):
    model = keras.Sequential([
        keras.Input((width,)),
        keras.layers.Dense(2 * width, name="a"),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(4, name="b", dtype=dtype),
    ])
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.MeanSquaredError(), metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model

def words(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"

def same(variable, wanted):
    value = internals.variable_value(variable)
    parts = value.addressable_shards
    return bool(value.shape == wanted.shape and all((np.asarray(p.data) == wanted[p.index]).all() for p in parts))
"""

VALUES = """
compared = []
from jax.experimental import multihost_utils
multihost_utils.assert_equal = lambda *a, **k: compared.append(a)  # what device_put does among processes

folder = sys.argv[1] if len(sys.argv) > 1 else os.environ["FOLDER"]
rng = np.random.default_rng(0)
found = {}
model = new_model()
variables = [*model.variables, *model.optimizer.variables]
wanted = [(5 * rng.normal(size=v.shape)).astype(np.dtype(v.dtype)) for v in variables]
for variable, value in zip(variables, wanted):
    variable.assign(value)
weights = [w for v, w in zip(variables, wanted) if any(v is each for each in model.weights)]
found["assigned"] = all(map(same, variables, wanted))
found["created from array"] = same(keras.Variable(np.arange(8.0)), np.arange(8.0, dtype="float32"))
found["no comparison"] = len(compared)

# reading
found["numpy"] = all((np.array(v) == w).all() for v, w in zip(variables, wanted))
found["get_weights"] = all((v == w).all() for v, w in zip(model.get_weights(), weights, strict=True))
found["convert_to_numpy"] = bool((keras.ops.convert_to_numpy(model.layers[0].kernel) == wanted[0]).all())
found["repr"] = repr(model.layers[0].kernel) if messaging.index() == 0 else repr(model.layers[0].kernel)
found["bias"] = model.layers[0].bias.numpy().shape if messaging.index() == 0 else None  # held by all: alone

# a batch that lies on all devices already
rows = rng.normal(size=(6, 512)).astype("float32")
laid_out, alone = kd.distribution().distribute_batch(rows), model.predict_on_batch(rows)
found["laid out"] = [bool((model.predict_on_batch(laid_out) == alone).all()), list(model(laid_out).shape)]

# writing
model.save(os.path.join(folder, "m.keras"))
model.save_weights(os.path.join(folder, "w.weights.h5"))
legacy = new_model(dtype="float32")  # from these files Keras reads no bfloat16
legacy.set_weights([w.astype("float32") for w in weights])
legacy.save(os.path.join(folder, "m.h5"))
model.save_weights(os.path.join(folder, "s.weights.json"), max_shard_size=0.003)
keras.saving.save_model(model, os.path.join(folder, "directory"), zipped=False)
found["files"] = sorted(os.listdir(folder))

# and back
other = keras.models.load_model(os.path.join(folder, "m.h5"))
found["m.h5"] = all(same(v, w.astype("float32")) for v, w in zip(other.weights, weights, strict=True))
for name in ("m.keras", "w.weights.h5", "s.weights.json", "directory"):
    if ".weights" in name:
        other = new_model()
        other.load_weights(os.path.join(folder, name))
    else:
        other = keras.models.load_model(os.path.join(folder, name))
    found[name] = all(same(v, w) for v, w in zip(other.weights, weights, strict=True))
    found[name] &= all(map(same, other.optimizer.variables, wanted[len(model.variables):]))
found["no comparison in all"] = len(compared)

# LoRA is merged by process 0 alone
with kd.distribution().scope():
    lora = new_model()
lora.set_weights(weights)
lora.layers[0].enable_lora(4)
lora.layers[0].lora_kernel_b.assign(np.ones(lora.layers[0].lora_kernel_b.shape, "float32"))
lora.save_weights(os.path.join(folder, "lora.weights.h5"))
a = np.array(lora.layers[0].lora_kernel_a)
found["lora"] = float(abs(np.array(lora.layers[0]._kernel) + a @ np.ones(lora.layers[0].lora_kernel_b.shape)).sum())

# errors
me = messaging.index()
found["other path"] = words(model.save_weights, os.path.join(folder, f"of_{me}.weights.h5"))
found["no folder"] = words(model.save_weights, os.path.join(folder, "none", "w.weights.h5"))
found["other variable"] = words(lambda: (model.layers[0].kernel, model.layers[1 + 1].kernel)[me].numpy())
found["files at the end"] = sorted(os.listdir(folder))
give_back(found)
"""


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    folder = tmp_path_factory.mktemp("values")
    return folder, [process.result for process in run_processes(SETUP + VALUES, FOLDER=str(folder), timeout=400)]


def test_values_are_given_without_a_word_between_processes(values):
    _, found = values
    for each in found:
        assert each["assigned"]
        assert each["created from array"]
        assert each["no comparison"] == each["no comparison in all"] == 0


def test_variables_are_read_by_all(values):
    _, found = values
    for each in found:
        assert each["numpy"]
        assert each["get_weights"]
        assert each["convert_to_numpy"]
        assert "shape=(" in each["repr"]
        assert "value=" not in each["repr"]
        assert each["laid out"] == [True, [6, 4]]
    assert found[0]["bias"] == [1024]


def test_files_are_written_once_and_read_by_all(values):
    folder, found = values
    for each in found:
        assert each["files"] == [
            "directory",
            "m.h5",
            "m.keras",
            "s.weights.json",
            "s_00000.weights.h5",
            "s_00001.weights.h5",
            "s_00002.weights.h5",
            "w.weights.h5",
        ]
        for name in ("m.keras", "w.weights.h5", "m.h5", "s.weights.json", "directory"):
            assert each[name], name
    one = keras.models.load_model(folder / "m.keras")
    with h5py.File(folder / "w.weights.h5") as file:
        np.testing.assert_array_equal(one.get_weights()[0], file["layers/dense/vars/0"])
    with h5py.File(folder / "lora.weights.h5") as file:
        np.testing.assert_allclose(np.abs(file["layers/dense/vars/0"]).sum(), found[0]["lora"], rtol=1e-5)


def test_errors_are_the_same_on_all_processes(values):
    _, found = values
    for each in found:
        assert "of_0.weights.h5" in each["other path"]
        assert (
            "of_1.weights.h5' on process 1" in each["other path"].replace('"', "'")
            or "on process 1" in each["other path"]
        )
        assert each["no folder"].startswith("FileNotFoundError")
        assert each["other variable"].startswith("ValueError: Weights that lie on several processes are read by all")
        assert "a/kernel' on process 0" in each["other variable"]
        assert "b/kernel' on process 1" in each["other variable"]
        assert not [name for name in each["files at the end"] if name.startswith((".", "of_"))]


CALLBACKS = """
folder = os.environ["FOLDER"]
me = messaging.index()
kd.set_distribution(kd.ModelParallel(layout_map=layout_map, batch_dim_name="data", auto_shard_dataset=False))
rng = np.random.default_rng(me)
x, y = rng.normal(size=(16, 64)).astype("float32"), rng.normal(size=(16, 4)).astype("float32")
fit = {"x": x, "y": y, "batch_size": 4, "verbose": 0}
found, seen = {}, []

def path(*parts):
    return os.path.join(folder, *parts)

has_tensorboard = importlib.util.find_spec("tensorboard") is not None

model = new_model(64)
model.optimizer.learning_rate = 1.0  # so that the first epoch is the best one
note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(model.layers[0].kernel.numpy()))
stopping = keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
model.fit(**fit, epochs=6, callbacks=[
    keras.callbacks.ModelCheckpoint(path("deep", "{epoch}.weights.h5"), save_weights_only=True),
    keras.callbacks.ModelCheckpoint(path("best.keras"), monitor="loss", save_best_only=True),
    keras.callbacks.ModelCheckpoint(path("step.weights.h5"), save_weights_only=True, save_freq=3),
    keras.callbacks.CSVLogger(path("log.csv")),
    *([keras.callbacks.TensorBoard(path("board"), histogram_freq=2)] if has_tensorboard else []),
    note,
    stopping,
])
best = stopping.best_epoch
found["epochs"], found["best"] = len(seen), best
found["kept"] = type(stopping.best_weights[0]).__name__
found["restored"] = bool((model.layers[0].kernel.numpy() == seen[best]).all())
found["held"] = bool((np.asarray(stopping.best_weights[0]) == seen[best]).all())
found["lines"] = open(path("log.csv")).read().count("\\n")
found["board"] = [name for _, _, names in os.walk(path("board")) for name in names if "tfevents" in name]
found["files"] = sorted({*os.listdir(folder)} - {"board"}) + sorted(os.listdir(path("deep")))
other = new_model(64)
other.load_weights(path("deep", "1.weights.h5"))
found["first"] = bool((other.layers[0].kernel.numpy() == seen[0]).all())

laid_out = kd.distribution().distribute_batch(x[:3])
found["laid out"] = [list(model(laid_out).shape), words(model.predict_on_batch, laid_out)]

class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise RuntimeError("power failure")

backup = keras.callbacks.BackupAndRestore(path("backup"), save_freq=3)
words(lambda: new_model(64).fit(**fit, epochs=4, callbacks=[backup, Stop()]))
found["backup"] = sorted(os.listdir(path("backup")))
again = new_model(64)
history = again.fit(**fit, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(path("backup"))])
found["epochs after backup"] = history.epoch
found["steps"] = int(again.optimizer.iterations.numpy())
found["backup at the end"] = os.path.exists(path("backup"))
os.rename(path("deep", "1.weights.h5"), path("deep", "latest.weights.h5")) if me else None
found["own backup"] = words(lambda: new_model(64).fit(
    **fit, callbacks=[keras.callbacks.BackupAndRestore(path("deep") if me else path("none"))]))
give_back(found)
"""


def test_callbacks_write_once(tmp_path):
    found = [process.result for process in run_processes(SETUP + CALLBACKS, FOLDER=str(tmp_path), timeout=400)]
    alone = [each.pop("own backup") for each in found]
    each = found[0]
    assert each == found[1]
    assert each["kept"] == "HeldShards"
    assert each["restored"]
    assert each["held"]
    assert each["lines"] == each["epochs"] + 1
    assert len(each["board"]) == (1 if importlib.util.find_spec("tensorboard") else 0)
    assert each["files"] == [
        *("best.keras", "deep", "log.csv", "step.weights.h5"),
        *(f"{epoch + 1}.weights.h5" for epoch in range(each["epochs"])),
    ]
    assert each["first"]
    assert each["laid out"][0] == [6, 4]
    assert "auto_shard_dataset=False" in each["laid out"][1]
    assert each["backup"] == ["latest.weights.h5", "training_metadata.json"]
    assert each["epochs after backup"] == [1, 2, 3]
    assert not each["backup at the end"]
    assert all(message.startswith("ValueError: ") and "the same backup" in message for message in alone)


KILLED = """
folder = os.environ["FOLDER"]
model = new_model()
model.save_weights(os.path.join(folder, "w.weights.h5"))
if messaging.index() == 0:
    store, written = internals.saving_lib.H5IOStore, []
    write = store.__setitem__
    def die(self, key, value):
        if len(written) == 3:
            os.kill(os.getpid(), 9)
        written.append(key)
        write(self, key, value)
    store.__setitem__ = die
model.layers[0].kernel.assign(np.zeros(model.layers[0].kernel.shape, "float32"))
model.save_weights(os.path.join(folder, "w.weights.h5"))
give_back("saved")
"""


def test_a_process_that_is_killed_leaves_the_file_as_it_was(tmp_path):
    done = run_processes(SETUP + KILLED, FOLDER=str(tmp_path), timeout=200, check=False)
    assert [process.result for process in done] == [None, None]
    assert all(process.returncode for process in done)
    with h5py.File(tmp_path / "w.weights.h5") as file:
        assert np.any(file["layers/dense/vars/0"])
