"""Mesh axes in every form become one dict of names and sizes, without JAX; nothing raises but our own errors."""

import collections
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keras_dist.mesh.axes import parse_axes, solve_axes, spell_axes, spread_axes


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        ({"data": 2, "model": 4}, None),
        (collections.OrderedDict(data=2, model=4), None),
        ([("data", 2), ("model", 4)], None),
        ((["data", 2], ["model", np.int64(4)]), None),
        ("data:2,model:4", None),
        (" data : 2 , model : 4 ", None),
        ("2,4", ["data", "model"]),
        (" 2 , 4 ", ("data", "model")),
        ((2, 4), ["data", "model"]),
        ([2, 4], ("data", "model")),
        (np.array([2, 4]), np.array(["data", "model"])),
        ({"data": 2, "model": 4}, ["model", "data"]),  # the order is that of the axes
        ({"data": 2, "model": 4}.items(), None),
        ({"data": 2, "model": 4}.values(), {"data": 2, "model": 4}.keys()),
    ],
)
def test_every_form_says_the_same(axes, names):
    parsed = parse_axes(axes, names)
    assert list(parsed.items()) == [("data", 2), ("model", 4)]
    assert {type(size) for size in parsed.values()} == {int}


@pytest.mark.parametrize(
    ("axes", "names", "error", "says"),
    [
        ((), [], ValueError, "cannot be empty"),
        ({}, None, ValueError, "cannot be empty"),
        ("", None, ValueError, "cannot be empty"),
        ((8,), "", ValueError, "cannot be empty"),
        ((8,), "data", TypeError, r"axis_names=\['data'\]"),
        ((8,), 3, TypeError, "list or tuple of names"),
        (8, ["data"], TypeError, r"or \(8,\) for one axis"),
        ({2, 4}, ["data", "model"], TypeError, "a dict, a list, a tuple or text"),
        ((4, 2), ["data"], ValueError, "should have same size"),
        ({"data": 2}, ["data", "model"], ValueError, "should have same size"),
        ({"data": 2, "model": 2}, ["data", "tensor"], ValueError, "must name the same axes"),
        ((4, 2), None, ValueError, "Every axis of a mesh needs a name"),
        ("4,2", None, ValueError, "Every axis of a mesh needs a name"),
        ("data:4,2", None, ValueError, "Every axis of a mesh needs a name"),
        ([("data", 4), 2], None, ValueError, "pairs of name and size, or only sizes"),
        ([("data", 4, 2)], None, ValueError, "pairs of name and size, or only sizes"),
        ((4, 2), ["data", "data"], ValueError, "'data' is used twice"),
        ("data:4,data:2", None, ValueError, "'data' is used twice"),
        ((4, 2), ["data", None], TypeError, "must be a non-empty string"),
        ((4, 2), ["data", ""], TypeError, "must be a non-empty string"),
        ({None: 4}, None, TypeError, "must be a non-empty string, not None"),
        ("data:4:2", None, ValueError, "not as 'data:4:2'"),
        ("data:", None, ValueError, "not as 'data:'"),
        (":4", None, ValueError, "not as ':4'"),
        ("data:4,", None, ValueError, "not as ''"),
        ("data", None, ValueError, "not as 'data'"),
        ("data:\u00b2", None, ValueError, "not as"),
        ((4, 0), ["data", "model"], ValueError, "axis 'model' has size 0"),
        ((-2, 2), ["data", "model"], ValueError, "axis 'data' has size -2"),
        ((-1, -1), ["data", "model"], ValueError, "Only one axis can be -1"),
        ((4.0, 2), ["data", "model"], TypeError, "axis 'data' has size 4.0"),
        ((True, 2), ["data", "model"], TypeError, "axis 'data' has size True"),
        ({"data": "4"}, None, TypeError, "axis 'data' has size '4'"),
        ({"data": 10**5000}, None, ValueError, "cannot be shown"),
        ([(f"axis{i}", 1) for i in range(33)], None, ValueError, "at most 32 axes"),
        (np.ndarray, None, TypeError, "a dict, a list, a tuple or text"),
    ],
)
def test_invalid_axes_say_what_came(axes, names, error, says):
    with pytest.raises(error, match=says) as caught:
        parse_axes(axes, names)
    assert "Received: axes=" in str(caught.value)


texts = st.text(alphabet="ab:,-+_ 0123456789\u0663.\n", max_size=8) | st.text(max_size=4)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | texts
    | st.binary(max_size=2)
    | st.just(5000).map(lambda digits: 10**digits)
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.tuples(inner, inner).map(list)
        | st.dictionaries(scalars, inner, max_size=3)
        | st.lists(st.integers(), max_size=3).map(np.array)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=8,
)


def assert_ours(error: Exception) -> None:
    """Whether a message is this package's and not Python's own."""
    assert "Received: " in str(error), f"not ours: {error!r}"


@given(anything, anything)
@example(np.array(8), ["data"])
@example([([], 2)], ["data"])
@example("a:" + "9" * 5000, None)
def test_no_axes_raise_but_our_errors(axes, names):
    try:
        parsed = parse_axes(axes, names)
    except (ValueError, TypeError) as error:
        assert_ours(error)
    else:
        assert parsed
        assert all(isinstance(name, str) and name for name in parsed)
        assert all(type(size) is int and (size > 0 or size == -1) for size in parsed.values())
        assert list(parsed.values()).count(-1) <= 1
        assert parse_axes(list(parsed.items())) == parsed


@given(anything, st.sampled_from([1, 2, 4, 6]))
@example("a, b", 4)
@example({"a": -1, "b": 2}, 4)
@example((99, -7), 4)
def test_no_dcn_raises_but_our_errors(dcn, groups):
    axes = {"a": 4, "b": 6}
    try:
        degrees = spread_axes(axes, groups, dcn)
    except (ValueError, TypeError) as error:
        assert_ours(error)
    else:
        assert math.prod(degrees.values()) == groups
        assert all(axes[name] % degree == 0 for name, degree in degrees.items())


sizes = st.integers(1, 12)


@given(st.lists(sizes, min_size=1, max_size=4), st.data())
def test_the_rest_is_what_is_left(sizes, data):
    axes = {f"axis{i}": size for i, size in enumerate(sizes)}
    count = math.prod(sizes)
    assert solve_axes(axes, count) == axes
    rest = data.draw(st.sampled_from(list(axes)))
    assert solve_axes(axes | {rest: -1}, count) == axes
    assert parse_axes(",".join(f"{name}:{size}" for name, size in axes.items())) == axes


def test_a_product_that_does_not_fit_is_spelled_out():
    with pytest.raises(ValueError, match=r"data:3 x model:4 = 12 devices, but 8 are available. Choose sizes"):
        solve_axes({"data": 3, "model": 4}, 8)
    with pytest.raises(ValueError, match="data:-1 x model:3 needs a multiple of 3 devices, but 8 are given"):
        solve_axes({"data": -1, "model": 3}, 8, "given")
    with pytest.raises(ValueError, match="data:-1 x model:16 needs a multiple of 16 devices, but 8 are"):
        solve_axes({"data": -1, "model": 16}, 8)
    with pytest.raises(ValueError, match=r"data:2 = 2 devices, but 8 are available. Choose .* is 8, or .*devices=2\)"):
        solve_axes({"data": 2}, 8)
    with pytest.raises(ValueError, match=r"but 8 are given. Choose sizes whose product is 8\.$"):
        solve_axes({"data": 2}, 8, "given")
    with pytest.raises(ValueError, match="at least one device, but none are given: data:-1"):
        solve_axes({"data": -1}, 0, "given")
    with pytest.raises(ValueError, match="cannot be shown devices, but 8 are available"):
        solve_axes({f"axis{i}": 2**62 for i in range(240)}, 8)
    with pytest.raises(ValueError, match=r"is 8\.$"):
        solve_axes({"data": 20}, 8)


@given(st.lists(sizes, min_size=1, max_size=4), st.data())
def test_the_outermost_axes_that_can_cross_groups(sizes, data):
    axes = {f"axis{i}": size for i, size in enumerate(sizes)}
    count = math.prod(sizes)
    groups = data.draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
    degrees = spread_axes(axes, groups)
    assert math.prod(degrees.values()) == groups
    left = groups
    for name, degree in degrees.items():  # no axis leaves to an inner one what it could take
        assert degree == math.gcd(axes[name], left)
        left //= degree


@pytest.mark.parametrize(
    ("dcn", "degrees"),
    [
        (None, (2, 2, 1)),
        ("fsdp", (1, 4, 1)),
        (["model"], (1, 1, 4)),
        (("fsdp", "data"), (1, 4, 1)),
        (" data , model ", (2, 1, 2)),
        ({"data": 2, "model": 2}, (2, 1, 2)),
        ({"data": -1, "fsdp": 4}, (1, 4, 1)),
        ([("fsdp", 4)], (1, 4, 1)),
        ("data:2,fsdp:2", (2, 2, 1)),
        ((2, 1, 2), (2, 1, 2)),
        ("2,-1,1", (2, 2, 1)),
        (np.array([1, 2, 2]), (1, 2, 2)),
    ],
)
def test_dcn_may_be_names_or_degrees(dcn, degrees):
    assert tuple(spread_axes({"data": 2, "fsdp": 8, "model": 4}, 4, dcn).values()) == degrees


@pytest.mark.parametrize(
    ("dcn", "says"),
    [
        ("data", "data:2 = 2 slices, but the devices form 4"),
        ({"data": 2}, "data:2 = 2 slices, but the devices form 4"),
        ((99, 1, 1), "data:99 x fsdp:1 x model:1 = 99 slices, but the devices form 4"),
        ({"data": 4}, "4 does not divide data:2"),
        ("tensor", "dcn names axes of the mesh"),
        ({"tensor": 4}, "dcn names axes of the mesh"),
        (["fsdp", "fsdp"], "dcn names axes of the mesh, each once"),
        ([], "cannot be empty"),
        (["fsdp", None], "dcn names axes of the mesh"),
        ((2, 2), "should have same size"),
        ({"data": 0}, "axis 'data' has size 0"),
        ("", "cannot be empty"),
    ],
)
def test_a_dcn_that_cannot_be_says_why(dcn, says):
    with pytest.raises(ValueError, match=says) as caught:
        spread_axes({"data": 2, "fsdp": 8, "model": 4}, 4, dcn)
    assert "Received: dcn=" in str(caught.value)
    assert "data:2 x fsdp:8 x model:4" in str(caught.value)


def test_a_long_text_is_not_repeated_whole():
    with pytest.raises(ValueError, match="not as") as caught:
        parse_axes("data:x" * 10_000)
    assert len(str(caught.value)) < 2_000


def test_axes_are_spelled_as_an_equation():
    assert spell_axes({"data": 2, "model": -1}) == "data:2 x model:-1"


def test_neither_jax_nor_keras_is_imported():
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.find_spec('keras_dist').submodule_search_locations[0]\n"
        "sys.path += [f'{spec}/mesh', f'{spec}/layout']\n"
        "import axes, regex_index\n"
        "assert not {'jax', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
