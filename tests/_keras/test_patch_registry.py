"""Patches call what they replace, wherever the owner has it from, and leave nothing behind."""

import inspect

import pytest

from keras_dist._keras import patch_registry
from keras_dist._keras.patch_registry import PatchGroup


@pytest.fixture
def group(monkeypatch):
    """A group whose patches act while `group.value` is not None."""
    monkeypatch.setattr(patch_registry, "GROUPS", [])
    group = PatchGroup("test", "In this test.", lambda: group.value)
    group.value = "context"
    yield group
    group.remove()


@pytest.fixture
def classes():
    """A base, a class that only inherits the method, and a subclass that overrides it."""

    class Base:
        def method(self, x):
            return [f"Base {x}"]

    class Owner(Base):
        pass

    class Sub(Owner):
        def method(self, x):
            return ["Sub", *super().method(x)]

    return Base, Owner, Sub


def patch(group, owner):
    @group.patch(owner, "method", "a test")
    def replacement(original, value, self, x):
        return [f"{owner.__name__} patched in {value}", *original(self, x)]


def test_a_patch_is_installed_and_removed(group, classes):
    Base, _, Sub = classes
    patch(group, Base)
    group.install()
    assert Base().method(1) == ["Base patched in context", "Base 1"]
    assert Sub().method(1) == ["Sub", "Base patched in context", "Base 1"]
    group.remove()
    assert Sub().method(1) == ["Sub", "Base 1"]


def test_a_function_that_the_owner_only_inherits_is_refused(group, classes):
    _, Owner, _ = classes
    patch(group, Owner)
    with pytest.raises(ValueError, match=r"Owner\.method does not exist"):
        group.install()


def test_the_reason_is_given_or_that_of_the_docstring(group, classes):
    Base, _, Sub = classes

    @group.patch(Sub, "method", reason="x is lost")
    @group.patch(Base, "method")
    def replacement(original, value, self, x):
        """Without it, x is
        ignored.
        """

    assert [patch.reason for patch in group.patches] == ["x is ignored", "x is lost"]


def test_without_a_context_keras_runs(group, classes):
    Base, _, _ = classes
    patch(group, Base)
    group.install()
    group.value = None
    assert Base().method(1) == ["Base 1"]


def test_a_patch_of_every_thread_gets_no_context(group, classes):
    Base, _, _ = classes

    @group.patch(Base, "method", "a test", every_thread=True)
    def replacement(original, self, x):
        return ["patched", *original(self, x)]

    group.install()
    group.value = None
    assert Base().method(1) == ["patched", "Base 1"]


def test_a_patched_function_has_the_signature_of_the_original(group, classes):
    Base, _, _ = classes
    before = inspect.signature(Base.method)
    patch(group, Base)
    group.install()
    assert inspect.signature(Base.method) == before
    assert Base.method.__qualname__.endswith("Base.method")


def test_another_signature_is_refused_before_anything_is_installed(group, classes):
    Base, _, Sub = classes
    before = Sub.method
    patch(group, Sub)

    @group.patch(Base, "method", reason="")
    def method(original, context, self, x, y):
        return []

    with pytest.raises(ValueError, match=r"Base\.method.*\('self', 'x'\).*\('self', 'x', 'y'\)"):
        group.install()
    assert Sub.method is before


def test_keyword_only_parameters_are_additions_of_the_replacement(group, classes):
    Base, _, _ = classes

    @group.patch(Base, "method", reason="")
    def method(original, context, self, x, *, y=2):
        return [y, *original(self, x)]

    group.install()
    assert Base().method(1) == [2, "Base 1"]


def test_a_replacement_that_passes_arguments_on_fits_any_others(group, classes):
    Base, _, _ = classes

    @group.patch(Base, "method", reason="")
    def method(original, context, self, *args, **kwargs):
        return ["patched", *original(self, *args, **kwargs)]

    group.install()
    assert Base().method(x=1) == ["patched", "Base 1"]


def test_the_parameters_before_those_that_are_passed_on_are_compared(group, classes):
    Base, _, _ = classes

    @group.patch(Base, "method", reason="")
    def method(original, context, self, y, *args):
        return original(self, y, *args)

    with pytest.raises(ValueError, match=r"Base\.method.*\('self', 'x'\).*\('self', 'y'\)"):
        group.install()


def test_a_function_that_another_library_replaced_stays_replaced(group, classes):
    Base, _, _ = classes
    patch(group, Base)
    group.install()
    ours = Base.method
    Base.method = lambda self, x: ["other", *ours(self, x)]
    group.remove()
    group.value = None
    assert Base().method(1) == ["other", "Base 1"]
