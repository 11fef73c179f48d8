"""The patches of Keras as a whole: their documentation, what they may touch, and callbacks that they wrap."""

import ast
import pathlib

import keras
import numpy as np
import pytest
from support.keras_scenarios import OLDER_KERAS

import keras_dist as kd
from keras_dist._keras.active_distribution import PackageDistribution
from keras_dist._keras.patch_registry import GROUPS
from keras_dist._patches.__main__ import document

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = pathlib.Path(kd.__file__).parent
FILES = {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}
OTHER_FILES = {file: tree for file, tree in FILES.items() if file.parent.name not in ("_keras", "_patches")}


@pytest.mark.skipif(not OLDER_KERAS, reason="the document has the names of Keras 3.15")
def test_the_document_lists_all_patches():
    assert (ROOT / "docs" / "patches.md").read_text() == document(), (
        "run: python -m keras_dist._patches > docs/patches.md"
    )


def test_every_patch_says_what_is_wrong_without_it():
    assert all(patch.reason for group in GROUPS for patch in group.patches)


def test_patches_ask_a_distribution_for_little():
    """What they use of it is listed once."""
    used = set()
    for file in (PACKAGE / "_patches").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("distribution", "self._distribution"):
                used.add(node.attr)
    listed = set(PackageDistribution.asked_by_patches)
    assert used - {"batch_sharding", "distribute_batch"} == listed  # which users call, too
    assert all(hasattr(kd.DataParallel(), name) for name in listed)


# --------------------------------------------------------------------------------------------- private names of Keras


def private_accesses(tree):
    """Yields the private attributes that a module reads or writes of anything but `self` and `cls`."""
    for node in ast.walk(tree):
        owner = name = None
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "getattr",
            "hasattr",
            "setattr",
            "delattr",
        ):
            owner, name = node.args[0], str(getattr(node.args[1], "value", ""))
        is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
        if name is not None and name.startswith("_") and not name.startswith("__") and not is_own:
            yield ast.unparse(owner), name


def names_defined_here():
    """The names of functions, classes, constants and attributes that the package defines."""
    for tree in FILES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr


def private_names_of_keras():
    """The private names that variables, layers, models and optimizers of Keras have."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    model.compile("adam", "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 2)), verbose=0)
    for thing in (model, *model.layers, model.weights[0], model.optimizer, model.inputs[0]):
        yield from (name for name in {*dir(thing), *vars(thing)} if name.startswith("_"))


def test_private_names_of_keras_are_used_in_their_room_only():
    of_keras, own = set(private_names_of_keras()) | {"_keras_mask"}, set(names_defined_here())
    of_python = {"_asdict", "_replace", "_fields", "_exit", "_getframe"}
    of_jax, of_orbax = {"_jax", "_trace"}, {"_finalize", "_background_save"}
    found = {
        f"{file.relative_to(PACKAGE)}: {owner}.{name}"
        for file, tree in OTHER_FILES.items()
        for owner, name in private_accesses(tree)
        if name in of_keras or name not in own | of_python | of_jax | of_orbax
    }
    assert not found


def test_modules_of_keras_are_imported_in_one_room_only():
    for file, tree in FILES.items():
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert file.parent.name == "_keras" or not any(name.startswith("keras.src") for name in names), file


# ----------------------------------------------------------------------------------------------------------- callbacks


def test_tensorboard_with_validation_data(tmp_path):
    pytest.importorskip("tensorboard")
    calls = []

    class Subclass(keras.callbacks.TensorBoard):
        def on_test_batch_end(self, batch, logs=None):
            super().on_test_batch_end(batch, logs)
            calls.append(batch)

    class SubSubclass(Subclass):
        def on_test_batch_begin(self, batch, logs=None):
            super().on_test_batch_begin(batch, logs)
            calls.append("begin")

    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    kd.set_distribution(kd.DataParallel())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    callbacks = [keras.callbacks.TensorBoard(str(tmp_path / "plain")), SubSubclass(str(tmp_path / "subclass"))]
    model.fit(x, y, validation_data=(x, y), callbacks=callbacks, verbose=0)
    model.evaluate(x, y, callbacks=callbacks, verbose=0)
    assert calls == ["begin", 0, "begin", 0]
    assert all(any((tmp_path / name).rglob("events*")) for name in ("plain", "subclass"))
