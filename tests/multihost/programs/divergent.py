"""Calls of Keras for which process 1 is given something else than process 0."""

import random as random_module
import warnings

import keras
import numpy as np

import keras_dist as kd


def divergent():
    me = kd.process_id()
    is_other = me == 1
    random = np.random.default_rng(0)
    x, y = random.normal(size=(26, 4)).astype("float32"), random.normal(size=(26, 3)).astype("float32")

    def model(seed=1, width=8):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(seed)
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(width), keras.layers.Dense(3)])
        made.compile("sgd", "mse")
        return made

    def raising():
        yield x[:7], y[:7]
        yield x[:7], y[:7]
        if is_other:
            raise OSError("the disk is gone")
        yield x[:7], y[:7]

    def generated(batches):
        yield from [(x[:7], y[:7])] * batches

    class Numbered(keras.utils.PyDataset):
        def __init__(self, batches):
            super().__init__()
            self.batches = batches

        def __len__(self):
            return self.batches

        def __getitem__(self, index):
            return x[:7] + index, y[:7]

    traces = []

    class Traced(keras.layers.Dense):
        def call(self, inputs):
            traces.append(None)
            return super().call(inputs)

    def program(activation="relu", rate=0.5, dtype=None, optimizer=None, loss="mse", **options):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        head = keras.layers.Dense(3, activation, dtype=dtype)
        made = keras.Sequential([keras.Input((4,)), Traced(8), keras.layers.Dropout(rate), head])
        made.compile(keras.optimizers.AdamW(**(optimizer or {})), loss, **options)
        return made

    def fitted(**differing):
        return lambda: program(**{key: values[me] for key, values in differing.items()}).fit(x, y, verbose=0)

    schedule = keras.optimizers.schedules.ExponentialDecay
    cases = {
        "activation": fitted(activation=("relu", "tanh")),
        "dropout rate": fitted(rate=(0.5, 0.25)),
        "dtype policy": fitted(dtype=("float32", "mixed_bfloat16")),
        "loss": fitted(loss=("mse", "mae")),
        "loss weights": fitted(loss_weights=([1.0], [2.0])),
        "beta_1": fitted(optimizer=({"beta_1": 0.9}, {"beta_1": 0.8})),
        "weight decay": fitted(optimizer=({"weight_decay": 0.1}, {"weight_decay": 0.2})),
        "clipnorm": fitted(optimizer=({"clipnorm": 1.0}, {"clipnorm": 2.0})),
        "schedule": fitted(optimizer=[{"learning_rate": schedule(0.1, n, 0.9)} for n in (10, 20)]),
        "learning rate": fitted(optimizer=({"learning_rate": 0.1}, {"learning_rate": 0.2})),
        "jit_compile": fitted(jit_compile=(True, False)),
        "steps_per_execution": fitted(steps_per_execution=(1, 2)),
        "prediction": lambda: program(activation=("relu", "tanh")[me]).predict(x, verbose=0),
        "seed": lambda: model(seed=me).fit(x, y, batch_size=7, verbose=0),
        "values": lambda: changed(model()).fit(x, y, batch_size=7, verbose=0),
        "model": lambda: model(width=8 + 8 * me).fit(x, y, batch_size=7, verbose=0),
        "rows": lambda: model().fit(x + me, y, batch_size=7, verbose=0),
        "a late row": lambda: model().fit(with_another_row(x), y, batch_size=7, verbose=0, shuffle=False),
        "shuffled": lambda: shuffled_anew(model()).fit(x, y, batch_size=7, verbose=0),
        "batch size": lambda: model().fit(x, y, batch_size=7 - me, verbose=0),
        "one batch fewer": lambda: model().fit(
            x[: 26 - 7 * me], y[: 26 - 7 * me], batch_size=7, verbose=0, shuffle=False
        ),
        "one batch fewer of a generator": lambda: model().fit(generated(4 - me), verbose=0),
        "one batch fewer of a PyDataset": lambda: model().fit(Numbered(4 - me), epochs=2, verbose=0, shuffle=False),
        "shapes": lambda: model().predict(x[:, : 4 - me], verbose=0),
        "dtypes": lambda: model().predict(x.astype("int32") if is_other else x, verbose=0),
        "steps": lambda: model().fit(generated(9), steps_per_epoch=3 - me, verbose=0),
        "method": lambda: model().evaluate(x, y, verbose=0) if is_other else model().fit(x, y, verbose=0),
        "an error in a source": lambda: model().fit(raising(), verbose=0),
        "rate of an epoch": lambda: model().fit(x, y, batch_size=7, epochs=3, verbose=0, callbacks=[rate]),
        "values between fits": lambda: fitted_twice(),
        "values of shards": lambda: fitted_twice_in_shards(),
        "host values of shards": lambda: fitted_in_own_shards(before=1.0 + me),
        "host values between fits": lambda: fitted_in_own_shards(between=2.0 if is_other else None),
        "values at the end": lambda: model().fit(x, y, batch_size=7, verbose=0, callbacks=[Assigned("on_epoch_end")]),
        "values in an epoch": lambda: model().fit(
            x, y, batch_size=7, verbose=0, callbacks=[Assigned("on_train_batch_end"), noted]
        ),
        "epochs": lambda: model().fit(x, y, batch_size=7, epochs=2 + me, verbose=0, callbacks=[noted]),
        "order of devices": lambda: model().fit(x, y, batch_size=7, verbose=0),
        "single batches": lambda: model().train_on_batch(x[: 7 - me], y[: 7 - me]),
        "later single batches": lambda: trained_on_batches(model(), [x[:7], x[:7], *[x[:7] + me] * 3]),
    }

    def changed(made):
        if is_other:
            made.layers[0].bias.assign(np.ones(8, "float32"))
        return made

    def with_another_row(rows):
        rows = rows.copy()
        rows[-1, -1] += me
        return rows

    def trained_on_batches(made, batches):
        return [made.train_on_batch(batch, y[:7]) for batch in batches]

    def shuffled_anew(made):
        np.random.seed(me)
        return made

    rate = keras.callbacks.LearningRateScheduler(lambda epoch: (0.01, 0.02, 0.2 if is_other else 0.03)[epoch])
    epochs = []
    noted = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))

    class Assigned(keras.callbacks.Callback):
        """Assigns another value in one process. What each process measures and draws for itself may differ."""

        def __init__(self, method):
            super().__init__()
            self.own = keras.metrics.Mean()
            setattr(self, method, self.assign)

        def assign(self, number, logs=None):
            self.own.update_state(random_module.random() + me)
            if is_other:
                self.model.layers[1].bias.assign([1.0, 2.0, 3.0])

    def fitted_twice():
        made = model()
        made.fit(x, y, batch_size=7, verbose=0)
        if is_other:
            made.optimizer.learning_rate = 0.5
            made.layers[0].kernel.assign(made.layers[0].kernel + 1)
        made.fit(x, y, batch_size=7, verbose=0)

    def fitted_twice_in_shards():
        """Each process holds the whole kernel, in two shards, of which process 1 changes the second one."""
        mesh = kd.create_device_mesh("data:2,model:2")
        rules = kd.LayoutMap(mesh)
        rules["first/kernel"] = (None, "model")
        with kd.ModelParallel(layout_map=rules, batch_dim_name="data").scope():
            keras.utils.set_random_seed(1)
            made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="first"), keras.layers.Dense(3)])
            made.compile("sgd", "mse")
            made.fit(x, y, batch_size=7, verbose=0)
            if is_other:
                made.layers[0].kernel.assign(made.layers[0].kernel + np.repeat([0.0, 1.0], 4).astype("float32"))
            made.fit(x, y, batch_size=7, verbose=0)

    def fitted_in_own_shards(before=None, between=None):
        """Each process holds its own shards of the kernel, of a value that is assigned before or between two fits."""
        with kd.FullyShardedDataParallel(min_shard_bytes=0).scope():
            keras.utils.set_random_seed(1)
            made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, use_bias=False, name="own")])
            made.compile("sgd", "mse")
            for value in (before, between):
                if value is not None:
                    made.set_weights([np.full((4, 3), value, "float32")])
                made.fit(x, y, batch_size=7, verbose=0)

    results = {}
    for name, case in cases.items():
        devices = np.array(kd.list_devices())
        if name == "order of devices" and is_other:
            devices = devices[::-1]
        with kd.DataParallel(device_mesh=kd.DeviceMesh(devices.shape, ["data"], devices)).scope():
            try:
                results[name] = f"no error: {case()}"
            except Exception as error:
                results[name] = f"{type(error).__name__}: {error}"

    with kd.DataParallel(auto_shard_dataset=not is_other).scope():
        try:
            results["auto_shard_dataset"] = f"no error: {model().fit(x, y, verbose=0)}"
        except Exception as error:
            results["auto_shard_dataset"] = f"{type(error).__name__}: {error}"

    with kd.DataParallel(auto_shard_dataset=False).scope():
        pooled = keras.layers.GlobalAveragePooling1D()
        made = keras.Sequential([keras.Input((None, 4)), pooled, keras.layers.Dense(3)])
        made.compile("sgd", "mse")
        try:
            results["lengths"] = f"no error: {made.fit(np.ones((7, 5 + me, 4)), y[:7], verbose=0)}"
        except Exception as error:
            results["lengths"] = f"{type(error).__name__}: {error}"

    with kd.DataParallel().scope():
        made = program()
        traces.clear()
        results["same program"] = made.fit(x, y, batch_size=26, epochs=2, verbose=0).history["loss"]
        results["traces"] = len(traces)

    def with_warnings(batches, rows):
        with kd.DataParallel(auto_shard_dataset=False).scope(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = model()
            steps = []
            counter = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
            made.fit(((rows, y[:7]) for _ in range(batches)), callbacks=[counter], epochs=1, verbose=0)
            return [len(steps), " ".join(str(warning.message) for warning in caught)]

    results["epochs that ended"] = epochs
    results["unequal parts"] = with_warnings(4 - me, x[7 * me : 7 * me + 7])
    with kd.DataParallel(auto_shard_dataset=False).scope():
        ended = model().fit(Numbered(4 - me), epochs=2, verbose=0, shuffle=False).history["loss"]
    results["unequal parts of known length"] = ended
    results["equal parts"] = with_warnings(3, x[:7])
    results["goes on"] = model().fit(x, y, batch_size=7, verbose=0).history["loss"]
    return results
