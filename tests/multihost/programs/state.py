"""Values of variables, files and callbacks, in two processes."""

import importlib.util
import os

import h5py
import jax
import keras
import numpy as np
from jax.experimental import multihost_utils

import keras_dist as kd
from keras_dist._keras import internals, training_state
from keras_dist.multihost import messaging


def _install():
    keras.utils.set_random_seed(0)
    mesh = kd.DeviceMesh((2, 2), ["data", "model"])
    layout_map = kd.LayoutMap(mesh)
    layout_map[".*a/kernel"] = kd.TensorLayout(("model", "data"), mesh)
    layout_map[".*b/kernel"] = kd.TensorLayout((("data", "model"), None), mesh)
    kd.set_distribution(kd.ModelParallel(layout_map=layout_map, batch_dim_name="data"))
    return layout_map


def new_model(width=512, dtype="bfloat16"):
    model = keras.Sequential(
        [
            keras.Input((width,)),
            keras.layers.Dense(2 * width, name="a"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(4, name="b", dtype=dtype),
        ]
    )
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


def values(folder):
    _install()
    compared = []
    multihost_utils.assert_equal = lambda *a, **k: compared.append(a)  # what device_put does among processes

    rng = np.random.default_rng(0)
    found = {}
    model = new_model()
    variables = [*model.variables, *model.optimizer.variables]
    wanted = [(5 * rng.normal(size=v.shape)).astype(np.dtype(v.dtype)) for v in variables]
    for variable, value in zip(variables, wanted, strict=True):
        variable.assign(value)
    weights = [w for v, w in zip(variables, wanted, strict=True) if any(v is each for each in model.weights)]
    found["assigned"] = all(map(same, variables, wanted))
    found["created from array"] = same(keras.Variable(np.arange(8.0)), np.arange(8.0, dtype="float32"))
    found["no comparison"] = len(compared)

    # one process copies arrays, of which only it has other references: no program of all devices
    copies = []
    if messaging.process_index() == 0:
        with jax.no_tracing():
            copies = [training_state.own_copy(internals.variable_value(variable)) for variable in variables]
    for copy, value in zip(copies, wanted, strict=False):
        found["assigned"] &= all((np.asarray(p.data) == value[p.index]).all() for p in copy.addressable_shards)

    # reading
    found["numpy"] = all((np.array(v) == w).all() for v, w in zip(variables, wanted, strict=True))
    found["get_weights"] = all((v == w).all() for v, w in zip(model.get_weights(), weights, strict=True))
    found["convert_to_numpy"] = bool((keras.ops.convert_to_numpy(model.layers[0].kernel) == wanted[0]).all())
    found["repr"] = repr(model.layers[0].kernel)
    found["bias"] = model.layers[0].bias.numpy().shape if messaging.process_index() == 0 else None  # held by all: alone

    # a batch that lies on all devices already
    rows = rng.normal(size=(6, 512)).astype("float32")
    laid_out, alone = kd.distribution().distribute_batch(rows), model.predict_on_batch(rows)
    found["laid out"] = [bool((model.predict_on_batch(laid_out) == alone).all()), list(model(laid_out).shape)]

    # outputs, of which every process reads all rows
    rows = rng.normal(size=(8, 512)).astype("float32")
    outputs, expected = model(rows), model.predict(rows, batch_size=8, verbose=0)
    first = np.array([float(each[0]) for each in outputs])
    error = max(np.abs(np.asarray(outputs, "float32") - expected).max(), np.abs(first - expected[:, 0]).max())
    found["outputs"] = float(error / np.abs(expected).max())

    # a file that no function of Keras writes for all
    own = f"{folder}-own.weights.h5"
    store = internals.saving_lib.H5IOStore(own, mode="w")
    kernel = np.array(model.layers[0].kernel).astype("float32")
    store.make("layer")["kernel"] = kernel
    store.close()
    with h5py.File(own) as file:
        found["own.weights.h5"] = bool((file["layer/vars/kernel"][:] == kernel).all())

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
        found[name] &= all(map(same, other.optimizer.variables, wanted[len(model.variables) :]))
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
    me = messaging.process_index()
    found["other path"] = words(model.save_weights, os.path.join(folder, f"of_{me}.weights.h5"))
    found["no folder"] = words(model.save_weights, os.path.join(folder, "none", "w.weights.h5"))
    found["other variable"] = words(lambda: (model.layers[0].kernel, model.layers[1 + 1].kernel)[me].numpy())
    found["files at the end"] = sorted(os.listdir(folder))
    return found


def callbacks(folder):
    layout_map = _install()
    me = messaging.process_index()
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
    model.fit(
        **fit,
        epochs=6,
        callbacks=[
            keras.callbacks.ModelCheckpoint(path("deep", "{epoch}.weights.h5"), save_weights_only=True),
            keras.callbacks.ModelCheckpoint(path("best.keras"), monitor="loss", save_best_only=True),
            keras.callbacks.ModelCheckpoint(path("step.weights.h5"), save_weights_only=True, save_freq=3),
            keras.callbacks.CSVLogger(path("log.csv")),
            *([keras.callbacks.TensorBoard(path("board"), histogram_freq=2)] if has_tensorboard else []),
            note,
            stopping,
        ],
    )
    best = stopping.best_epoch
    found["epochs"], found["best"] = len(seen), best
    found["kept"] = type(stopping.best_weights[0]).__name__
    found["restored"] = bool((model.layers[0].kernel.numpy() == seen[best]).all())
    found["held"] = bool((np.asarray(stopping.best_weights[0]) == seen[best]).all())
    with open(path("log.csv")) as log:
        found["lines"] = log.read().count("\n")
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
    new_model(64).fit(**fit, callbacks=[kd.StepMonitor(None, profile=(1, 2), profile_directory=path("profile"))])
    found["traces"] = [name for _, _, names in os.walk(path("profile", f"process_{me}")) for name in names]
    os.rename(path("deep", "1.weights.h5"), path("deep", "latest.weights.h5")) if me else None
    found["own backup"] = words(
        lambda: new_model(64).fit(
            **fit, callbacks=[keras.callbacks.BackupAndRestore(path("deep") if me else path("none"))]
        )
    )
    return found


def is_killed_while_it_saves(folder):
    _install()
    model = new_model()
    model.save_weights(os.path.join(folder, "w.weights.h5"))
    if messaging.process_index() == 0:
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
    return "saved"
