"""Which distribution is active in which thread, and when patches are installed."""

import concurrent.futures
import contextlib
import gc
import re
import threading

import keras
import numpy as np
import pytest

import keras_dist as kd
from keras_dist._keras import active_distribution, internals
from keras_dist._keras.active_distribution import INSTALLED, VARIABLES


def in_thread(function):
    """Returns what a function returns in another thread."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def patched():
    """The functions that are patched now."""
    installed = [item for group in (INSTALLED, VARIABLES) for item in group._installed.items()]
    return {patch.target for patch, (_, bound) in installed if vars(patch.owner).get(patch.name) is bound}


@pytest.fixture(autouse=True)
def no_models_left():
    """Models of other tests would keep patches installed."""
    gc.collect()
    kd.set_distribution(None)


def test_the_active_distribution_is_keras_s():
    distribution = kd.DataParallel()
    kd.set_distribution(distribution)
    assert kd.distribution() is keras.distribution.distribution() is distribution
    keras.distribution.set_distribution(None)
    assert kd.distribution() is None


def test_a_distribution_of_keras_installs_no_patch():
    plain = keras.distribution.DataParallel()
    kd.set_distribution(plain)
    assert kd.distribution() is plain
    assert not patched()


def test_a_scope_installs_and_removes_patches():
    assert not patched()
    with kd.DataParallel().scope():
        assert patched() == {p.target for p in INSTALLED.patches + VARIABLES.patches}
        with keras.distribution.DataParallel().scope():
            assert kd.distribution() is not None
    assert not patched()


def test_set_distribution_of_keras_installs_and_removes_patches():
    distribution = kd.DataParallel()
    keras.distribution.set_distribution(distribution)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.fit(np.ones((5, 3)), np.ones((5, 2)), verbose=0)
    assert patched()
    keras.distribution.set_distribution(None)
    del model
    gc.collect()
    kd.set_distribution(None)
    assert not patched()


def test_scopes_nest_and_end_with_an_exception():
    outer, inner = kd.DataParallel(), kd.DataParallel(devices=["cpu:0"])
    with outer.scope():
        with pytest.raises(KeyError), inner.scope():
            {}[kd.distribution() is inner]
        with inner.scope():
            assert kd.distribution() is inner
        assert kd.distribution() is outer
    assert kd.distribution() is None


class Worker:
    """A thread that runs functions, and waits for the next one."""

    def __enter__(self):
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        assert self(lambda: True)  # the thread has started
        return self

    def __call__(self, function):
        return self._pool.submit(function).result()

    def __exit__(self, *error):
        self._pool.shutdown()


def dense():
    layer = keras.layers.Dense(8)
    layer.build((None, 4))
    return layer.kernel


def devices_of(variable):
    return len(variable.value.sharding.device_set)


def test_other_threads_see_what_is_set_and_the_scopes_in_which_they_start():
    distribution, scoped = kd.DataParallel(), kd.DataParallel(devices=["cpu:0"])
    assert in_thread(kd.distribution) is None
    kd.set_distribution(distribution)
    assert in_thread(kd.distribution) is distribution
    with scoped.scope():
        assert in_thread(kd.distribution) is scoped
        with distribution.scope():
            assert in_thread(kd.distribution) is distribution
        assert in_thread(kd.distribution) is scoped
    assert in_thread(kd.distribution) is distribution
    kd.set_distribution(None)
    assert in_thread(kd.distribution) is None


def test_a_model_that_is_built_and_trained_in_a_thread_that_starts_in_a_scope():
    def losses():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
        model.compile("sgd", "mse")
        history = model.fit(np.ones((16, 4)), np.ones((16, 8)), epochs=2, shuffle=False, verbose=0).history
        return devices_of(model.weights[0]), history["loss"]

    _, expected = losses()
    with kd.DataParallel().scope():
        devices, found = in_thread(losses)
    assert devices == 8
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_thread_sees_a_scope_as_long_as_it_is_open():
    distribution = kd.DataParallel()
    with Worker() as older, contextlib.ExitStack() as stack:
        with distribution.scope():
            younger = stack.enter_context(Worker())
            assert younger(kd.distribution) is distribution
            assert older(kd.distribution) is None
            kd.set_distribution(None)
            assert younger(kd.distribution) is None
        assert younger(kd.distribution) is None


def test_threads_with_scopes_of_their_own():
    """A thread that one of them starts cannot know by which."""
    one, other = kd.DataParallel(), kd.DataParallel(devices=["cpu:0"])
    with Worker() as first, Worker() as second:
        scopes = one.scope(), other.scope()
        first(scopes[0].__enter__)
        with Worker() as started_meanwhile:
            second(scopes[1].__enter__)
            assert first(kd.distribution) is one
            assert second(kd.distribution) is other
            assert started_meanwhile(kd.distribution) is one
            with pytest.warns(UserWarning, match="several threads that may have started it"):
                assert devices_of(in_thread(dense)) == 1
            with one.scope():  # of this thread
                second(lambda: scopes[1].__exit__(None, None, None))
                assert devices_of(in_thread(dense)) == 8
        first(lambda: scopes[0].__exit__(None, None, None))
        assert first(kd.distribution) is second(kd.distribution) is in_thread(kd.distribution) is None


def test_a_variable_in_a_thread_that_started_before_the_scope(recwarn):
    with Worker() as worker:
        assert devices_of(worker(dense)) == 1
        with kd.DataParallel().scope():
            with pytest.warns(UserWarning, match="started before the scope"):
                assert devices_of(worker(dense)) == 1
            recwarn.clear()
            worker(dense)
    with Worker() as worker, kd.DataParallel().scope():
        worker(lambda: keras.distribution.set_distribution(None))
        assert devices_of(worker(dense)) == 1
    assert not recwarn.list


def test_a_thread_may_have_its_own_distribution():
    distribution, own = kd.DataParallel(), keras.distribution.DataParallel()
    kd.set_distribution(distribution)

    def with_its_own():
        with own.scope():
            return kd.distribution()

    assert in_thread(with_its_own) is own
    assert kd.distribution() is distribution


X = np.ones((8, 4), "float32")


def plain_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)], name="plain")
    model.compile("sgd", "mse")
    return model


METHODS = {
    "fit": lambda model: model.fit(X, X, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X, X),
    "evaluate": lambda model: model.evaluate(X, X, verbose=0),
    "predict": lambda model: model.predict(X, verbose=0),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_distribution_that_is_created_and_never_set_is_warned_of_once(method, monkeypatch, recwarn):
    monkeypatch.setattr(active_distribution, "_intent", "")
    kd.FullyShardedDataParallel()
    for _ in range(2):
        METHODS[method](plain_model())
    [warning] = recwarn
    assert {"'plain'", "8 devices", "FullyShardedDataParallel"} <= set(
        re.findall(r"'plain'|8 devices|Fully\w+", str(warning.message))
    )
    assert warning.filename == __file__
    assert not patched()


USES = {
    "no distribution is created": lambda: kd.create_device_mesh("data:2,model:4"),
    "a distribution of one device": lambda: kd.DataParallel(devices=["cpu:0"]),
    "set and unset": lambda: [kd.set_distribution(each) for each in (kd.DataParallel(), None)],
    "unset, created": lambda: [kd.set_distribution(None), kd.DataParallel()],
    "a scope that has ended": lambda: contextlib.ExitStack().enter_context(kd.DataParallel().scope()),
    "explain": lambda: kd.explain(plain_model, kd.DataParallel()),
    "Keras's": lambda: [
        keras.distribution.set_distribution(each) for each in (keras.distribution.DataParallel(), None)
    ],
}


@pytest.mark.parametrize("use", USES)
def test_no_warning_where_one_device_is_intended(use, monkeypatch, recwarn):
    monkeypatch.setattr(active_distribution, "_intent", "")
    USES[use]()
    plain_model().predict(X, verbose=0)
    assert not [str(each.message) for each in recwarn]


def test_clear_session_keeps_the_distribution():
    distribution, scoped = kd.DataParallel(), kd.DataParallel(devices=["cpu:0"])
    kd.set_distribution(distribution)
    keras.utils.clear_session()
    assert kd.distribution() is distribution
    with scoped.scope():
        keras.utils.clear_session()
        assert kd.distribution() is scoped
    assert kd.distribution() is distribution
    kd.set_distribution(None)
    keras.utils.clear_session()
    assert kd.distribution() is None


def test_clear_session_clears_other_state():
    kd.set_distribution(kd.DataParallel())
    assert keras.layers.Dense(1).name == "dense"
    assert keras.layers.Dense(1).name == "dense_1"
    keras.utils.clear_session()
    assert keras.layers.Dense(1).name == "dense"


@pytest.mark.parametrize("value", ["foo", 3, kd.DataParallel, kd.DeviceMesh((8,), ["data"])])
def test_only_a_distribution_can_be_set(value):
    installed = kd.DataParallel()
    kd.set_distribution(installed)
    with pytest.raises(TypeError, match=getattr(value, "__name__", type(value).__name__)):
        kd.set_distribution(value)
    assert kd.distribution() is installed


def test_a_function_that_another_library_replaces_over_a_patch_stays(monkeypatch):
    calls = []
    trainer = internals.trainer
    kd.set_distribution(kd.DataParallel())
    ours = trainer._distribute_data
    monkeypatch.setattr(trainer, "_distribute_data", lambda *a, **k: calls.append(1) or ours(*a, **k))
    kd.set_distribution(None)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((5, 3)), np.ones((5, 2)))
    assert calls
