"""Which distribution is active in which thread, and when patches are installed."""

import gc
import threading

import keras
import numpy as np
import pytest

import keras_dist as kd
from keras_dist._keras import internals
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


def test_other_threads_see_what_is_set_but_no_scope():
    distribution, scoped = kd.DataParallel(), kd.DataParallel(devices=["cpu:0"])
    assert in_thread(kd.distribution) is None
    kd.set_distribution(distribution)
    assert in_thread(kd.distribution) is distribution
    with scoped.scope():
        assert in_thread(kd.distribution) is distribution
    kd.set_distribution(None)
    assert in_thread(kd.distribution) is None


def test_a_thread_may_have_its_own_distribution():
    distribution, own = kd.DataParallel(), keras.distribution.DataParallel()
    kd.set_distribution(distribution)

    def with_its_own():
        with own.scope():
            return kd.distribution()

    assert in_thread(with_its_own) is own
    assert kd.distribution() is distribution


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
    with pytest.raises(TypeError, match=type(value).__name__):
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
