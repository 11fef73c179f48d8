"""Programs that use plain Keras see no change: what is patched, when, in which threads, and in which Keras."""

import gc
import inspect
import re
import threading

import jax
import keras
import pytest
from support.keras_scenarios import (
    DEVICES,
    KERAS,
    ROWS,
    X,
    Y,
    assert_same_numbers,
    dense_model,
    devices_of,
    fit,
    raises_indivisible,
    run,
    start_anew,
)

import keras_dist as kd
from keras_dist._keras.active_distribution import INSTALLED, VARIABLES

PATCHES = INSTALLED.patches + VARIABLES.patches
IDS = [patch.target for patch in PATCHES]


def current_functions():
    return [vars(patch.owner)[patch.name] for patch in PATCHES]


ORIGINALS = current_functions()  # read when this file is imported, before any test has installed anything


def patched():
    """The functions that are not Keras's at the moment."""
    return [name for name, found, own in zip(IDS, current_functions(), ORIGINALS, strict=True) if found is not own]


@pytest.fixture(autouse=True)
def no_model_of_ours():
    """Models of earlier tests would keep patches installed."""
    gc.collect()
    kd.set_distribution(None)


def part_of_a_call(model):
    """The shape of the part of model(x) that one device computes."""
    outputs = model(X)
    return outputs.sharding.shard_shape(outputs.shape)


# ------------------------------------------------------------------------------------------ while nothing is installed


def test_the_originals_are_those_of_their_packages():
    for patch, function in zip(PATCHES, ORIGINALS, strict=True):
        if patch.target == "safetensors.safe_open":  # which is compiled
            assert function is patch.owner._safetensors_rust.safe_open
            continue
        if isinstance(function, jax.custom_vjp):
            function = function.fun
        function = inspect.unwrap(function)
        file = inspect.getsourcefile(function) if isinstance(function, type) else function.__code__.co_filename
        assert "keras/src" in file or "jax/experimental/rnn" in file or function is inspect.unwrap(jax.jit)


def test_all_patches_are_installed_with_a_distribution_and_none_after():
    assert patched() == []
    kd.set_distribution(kd.DataParallel())
    assert patched() == IDS
    model = dense_model()
    fit(model)
    kd.set_distribution(None)
    # What the model's compiled functions need stays while it lives.
    assert patched() == [patch.target for patch in VARIABLES.patches]
    del model
    gc.collect()
    kd.set_distribution(None)
    assert patched() == []


def test_patches_are_removed_when_a_plain_model_trains():
    with kd.DataParallel().scope():
        model = dense_model()
    del model
    gc.collect()
    plain = dense_model()
    fit(plain)
    assert patched() == []


def test_a_scope_installs_and_removes_patches():
    with kd.DataParallel().scope():
        assert patched() == IDS
        with KERAS.DataParallel().scope():
            assert type(KERAS.distribution()) is KERAS.DataParallel
    assert patched() == []


def test_the_end_of_a_scope_of_keras_restores_the_distribution():
    installed = kd.DataParallel()
    kd.set_distribution(installed)
    with KERAS.DataParallel().scope():
        assert type(KERAS.distribution()) is KERAS.DataParallel
    assert kd.distribution() is installed
    assert in_another_thread(kd.distribution)[0] is installed
    assert patched() == IDS
    keras.utils.clear_session(free_memory=False)
    assert kd.distribution() is installed


def test_a_scope_that_fails_removes_patches():
    with pytest.raises(OSError, match="in the scope"), kd.DataParallel().scope():
        raise OSError("in the scope")
    assert patched() == []
    assert kd.distribution() is None


def test_a_distribution_of_keras_installs_no_patch():
    kd.set_distribution(KERAS.DataParallel())
    assert patched() == []
    with KERAS.DataParallel().scope():
        fit(dense_model())
        assert patched() == []


def test_set_distribution_of_keras_installs_patches():
    KERAS.set_distribution(kd.DataParallel())
    assert patched() == IDS


def test_set_distribution_of_keras_removes_patches():
    kd.set_distribution(kd.DataParallel())
    KERAS.set_distribution(None)
    assert patched() == []
    keras.utils.clear_session()
    assert KERAS.distribution() is None


def test_a_distribution_of_keras_replaces_one_of_ours():
    kd.set_distribution(kd.DataParallel())
    KERAS.set_distribution(KERAS.DataParallel())
    KERAS.set_distribution(None)
    assert patched() == []
    keras.utils.clear_session()
    assert KERAS.distribution() is None


def test_plain_keras_is_the_same_before_during_and_after():
    def plain(model):
        return fit(model), model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)

    before = run(KERAS, plain)
    start_anew()
    with kd.DataParallel().scope():
        ours = dense_model()
        fit(ours)
    assert patched()  # ours lives, and some overrides with it
    assert_same_numbers(run(KERAS, plain), before)
    with raises_indivisible():
        run(KERAS, lambda model: model.fit(X[:13], Y[:13], verbose=0))
    with KERAS.DataParallel().scope():
        assert part_of_a_call(dense_model()) == X[:, :1].shape
    del ours
    gc.collect()
    assert_same_numbers(run(KERAS, plain), before)
    assert patched() == []


# ------------------------------------------------------------------------------------------------------ other threads


def in_another_thread(first, here=lambda: None, then=lambda: None):
    """Runs `first` in a new thread, then `here` in this one, then `then` in the other; what each of them returns."""
    first_is_done, here_is_done = threading.Event(), threading.Event()
    results, errors = {}, []

    def other():
        try:
            results["first"] = first()
            first_is_done.set()
            here_is_done.wait()
            results["then"] = then()
        except BaseException as error:
            errors.append(error)
            first_is_done.set()

    thread = threading.Thread(target=other)
    thread.start()
    first_is_done.wait()
    try:
        results["here"] = here()
    finally:
        here_is_done.set()
        thread.join()
    if errors:
        raise errors[0]
    return results["first"], results["here"], results["then"]


def use_of_keras():
    """What a user of Keras's own distribution meets."""
    keras.utils.set_random_seed(0)
    with KERAS.DataParallel().scope():
        installed = type(KERAS.distribution())
        model = dense_model()
        part = part_of_a_call(model)
        losses = fit(model)
        with raises_indivisible():
            model.train_on_batch(X[:13], Y[:13])
        with raises_indivisible():
            model.fit(X[:13], Y[:13], verbose=0)
        with pytest.raises(TypeError, match="not callable"):
            model.get_weights()  # lost with the fit that failed
    return installed, part, losses


def test_a_thread_with_a_distribution_of_keras_behaves_as_keras():
    start_anew()
    expected = use_of_keras()
    start_anew()
    kd.set_distribution(kd.DataParallel())
    there, names, _ = in_another_thread(use_of_keras, patched)
    assert names == IDS
    assert there == expected
    assert isinstance(kd.distribution(), kd.DataParallel)
    assert dense_model()(X).sharding.shard_shape((ROWS, 1)) == (ROWS // DEVICES, 1)


def test_a_thread_with_ours_leaves_the_others_alone():
    start_anew()
    expected = use_of_keras()
    start_anew()
    scope = kd.DataParallel().scope()

    def enter():
        scope.__enter__()
        return dense_model()

    def here():
        return patched(), KERAS.distribution(), len(devices_of(dense_model().weights[0])), use_of_keras()

    def leave():
        installed = kd.distribution()
        scope.__exit__(None, None, None)
        return installed

    model, seen, installed = in_another_thread(enter, here, leave)
    assert seen == (IDS, None, 1, expected)
    assert isinstance(installed, kd.DataParallel)
    assert len(devices_of(model.weights[0])) == DEVICES


@pytest.mark.parametrize("api", [KERAS, kd], ids=["keras", "ours"])
def test_a_thread_that_left_a_scope_has_installed_nothing(api):
    def enter_and_leave():
        with api.DataParallel().scope():
            pass

    def here():
        kd.set_distribution(None)
        return patched()

    kd.set_distribution(kd.DataParallel())
    _, names, installed = in_another_thread(enter_and_leave, here, kd.distribution)
    assert names == []
    assert installed is None


# -------------------------------------------------------------------------------------------------- an unknown Keras


def replace_by_another_signature(monkeypatch, patch):
    """Lets the owner hold a function that does the same and takes one parameter more."""
    original = getattr(patch.owner, patch.name)

    def of_another_keras(*args, one_more=None, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(patch.owner, patch.name, of_another_keras)


WAYS_TO_INSTALL = {
    "set_distribution": lambda: kd.set_distribution(kd.DataParallel()),
    "scope": lambda: kd.DataParallel().scope().__enter__(),
}


def test_another_signature_of_any_patched_function_is_refused_and_nothing_is_patched(monkeypatch):
    patches = [patch for patch in PATCHES if any(p.kind is p.POSITIONAL_OR_KEYWORD for p in patch.parameters)]
    assert len(patches) > 40
    for patch in patches:
        with monkeypatch.context() as changed:
            replace_by_another_signature(changed, patch)
            before = current_functions()
            with pytest.raises(ValueError, match=rf"{re.escape(patch.target)} takes.*one_more") as error:
                kd.set_distribution(kd.DataParallel())
            message = str(error.value)
            assert keras.__version__ in message
            assert patch.reason in message
            assert current_functions() == before


@pytest.mark.parametrize("install", WAYS_TO_INSTALL.values(), ids=WAYS_TO_INSTALL)
def test_another_signature_leaves_nothing_installed(install, monkeypatch):
    replace_by_another_signature(monkeypatch, PATCHES[0])
    with pytest.raises(ValueError, match=keras.__version__):
        install()
    assert kd.distribution() is None


def test_a_function_that_is_gone_is_refused(monkeypatch):
    monkeypatch.delattr(PATCHES[0].owner, PATCHES[0].name)
    with pytest.raises(ValueError, match=keras.__version__):
        kd.set_distribution(kd.DataParallel())
