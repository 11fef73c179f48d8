"""Texts of `keras_dist/_keras`, `keras_dist/_patches`, and of what they ask of a distribution."""

import concurrent.futures
import warnings
from unittest import mock

import jax
import keras
import numpy as np
from jax.experimental import rnn

import keras_dist as kd
from keras_dist._keras import active_distribution, internals
from keras_dist._keras.patch_registry import Patch

X = np.ones((8, 4), "float32")


def model():
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="dense")], name="gpt")
    made.compile("sgd", "mse")
    return made


def sharded_by(**rules):
    layout_map = kd.LayoutMap(kd.create_device_mesh("data:2,model:4"))
    for name, axes in rules.items():
        layout_map[f".*dense/{name}"] = axes
    return kd.ModelParallel(layout_map=layout_map)


def predict_with(made, distribution):
    kd.set_distribution(distribution)
    made.predict(X, verbose=0)


def built_before_the_distribution():
    predict_with(model(), kd.DataParallel())


def built_under_another_distribution():
    with sharded_by(kernel=(None, "model")).scope():
        made = model()
    predict_with(made, sharded_by(kernel=("model", None)))


def rules_changed_after_the_model_was_created():
    warnings.simplefilter("ignore", kd.LayoutMapWarning)
    distribution = sharded_by()
    with distribution.scope():
        made = model()
    distribution._layout_map[".*dense/kernel"] = (None, "model")
    predict_with(made, distribution)


def predicted_outside_of_the_scope():
    with kd.DataParallel().scope():
        made = model()
    made.predict(X, verbose=0)


def distribution_created_and_never_set():
    with mock.patch.object(active_distribution, "_intent", ""):
        kd.FullyShardedDataParallel()
        made = model()
        made.fit(X, np.ones((8, 8)), verbose=0)
        made.predict(X, verbose=0)


def redistributed_and_not_set():
    made = model()
    with mock.patch.object(active_distribution, "_intent", ""):
        kd.redistribute(made, kd.DataParallel())
        made.predict(X, verbose=0)


def variable_on_mock_devices():
    with kd.DataParallel(kd.create_device_mesh("data:8", kd.mock_tpus("v5e:2x4"))).scope():
        model()


def called_after_the_distribution():
    with kd.DataParallel().scope():
        made = model()
    made(jax.device_put(X, jax.devices()[0]))


def fit_with_a_layer_that_is_not_compiled(layer):
    kd.set_distribution(kd.DataParallel())
    made = keras.Sequential([keras.Input((8, 8, 3)), layer, keras.layers.GlobalMaxPooling2D()])
    made.compile("sgd", "mse")
    made.fit(np.ones((8, 8, 8, 3)), np.ones((8, 3)), verbose=0)


def changed_while_fit_runs():
    kd.set_distribution(kd.DataParallel())
    change = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: kd.set_distribution(None))
    model().fit(X, np.ones((8, 8)), epochs=2, verbose=0, callbacks=[change])


def created_in_a_thread_that_is_older_than_the_scope():
    with concurrent.futures.ThreadPoolExecutor(1, "worker") as worker:
        worker.submit(model).result()
        with kd.DataParallel().scope():
            worker.submit(model).result()


def created_in_a_thread_that_several_scopes_may_have_started():
    with concurrent.futures.ThreadPoolExecutor(1, "other") as other:
        scope = kd.DataParallel(devices=["cpu:0"]).scope()
        other.submit(scope.__enter__).result()
        with kd.DataParallel().scope(), concurrent.futures.ThreadPoolExecutor(1, "worker") as worker:
            worker.submit(model).result()
        other.submit(scope.__exit__, None, None, None).result()


def deferred_value_used():
    with kd.deferred():
        made = model()
    made.get_weights()


def array_deleted():
    with kd.DataParallel().scope():
        made = model()
        made.weights[0].value.delete()
        made.predict(X, verbose=0)


def cudnn_with_another_dtype():
    array = jax.ShapeDtypeStruct((8, 4, 16), "bfloat16")
    with kd.DataParallel().scope():
        rnn.lstm(*4 * [array], None, 16, 16, 1, 0.0, False)


def unknown_keras(name, replacement):
    with mock.patch.object(keras, "__version__", "9.0"):
        Patch(keras.saving, name, replacement, "files are written twice", "", None).check_signature()


def another_backend():
    with mock.patch.object(keras.config, "backend", return_value="torch"):
        internals._require_jax_backend()


CASES = {
    "a Keras whose function takes other parameters": lambda: unknown_keras(
        "get_registered_name", lambda original, name: None
    ),
    "a Keras without the function": lambda: unknown_keras("write_twice", lambda original, path: None),
    "another backend than JAX": another_backend,
    "a name of PyTorch's": lambda: kd.FSDP,
    "a misspelled name": lambda: kd.FullyShardedDataparalel,
    "a name that nothing is like": lambda: kd.quantum,
    "a call after the distribution was unset": called_after_the_distribution,
    "not a distribution": lambda: kd.set_distribution("data"),
    "a batch axis that the mesh does not have": lambda: kd.ModelParallel(
        layout_map=kd.LayoutMap(kd.create_device_mesh("data:2,model:4")), batch_dim_name="batch"
    ),
    "a rule that does not fit a variable": lambda: predict_with(
        kd.redistribute(model(), sharded_by(kernel=(None, "model", None))), None
    ),
    "axes of a tensor without a distribution": lambda: kd.distribute_tensor(X, ("data", None)),
    "a model that was built before the distribution was set": built_before_the_distribution,
    "a model that was built under another distribution": built_under_another_distribution,
    "a model whose rules changed after it was created": rules_changed_after_the_model_was_created,
    "a model that runs outside of its distribution's scope": predicted_outside_of_the_scope,
    "a distribution that is created and never set": distribution_created_and_never_set,
    "a distribution that is changed while fit runs": changed_while_fit_runs,
    "a model with a random layer that is not compiled": lambda: fit_with_a_layer_that_is_not_compiled(
        keras.layers.RandomRotation(0.1)
    ),
    "a model with another layer that is not compiled": lambda: fit_with_a_layer_that_is_not_compiled(
        keras.layers.RandomCrop(4, 4)
    ),
    "a model that is created in a thread older than the scope": created_in_a_thread_that_is_older_than_the_scope,
    "a model that is created in a thread that several scopes may have started": (
        created_in_a_thread_that_several_scopes_may_have_started
    ),
    "redistribute, arguments in another order": lambda: kd.redistribute(kd.DataParallel(), model()),
    "redistribute, and no distribution is set": redistributed_and_not_set,
    "a variable on devices that are not attached": variable_on_mock_devices,
    "redistribute, a variable": lambda: kd.redistribute(keras.Variable(X, name="table")),
    "redistribute, to a layout map": lambda: kd.redistribute(model(), kd.LayoutMap(None)),
    "the value of a deferred variable": deferred_value_used,
    "a step with an array that was deleted": array_deleted,
    "cuDNN's LSTM with another dtype": cudnn_with_another_dtype,
}
