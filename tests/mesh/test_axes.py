"""Every form of mesh axes is parsed to one dict of names and sizes, without JAX, with errors that name the fault."""

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
def test_every_form_gives_the_same_axes(axes, names):
    parsed = parse_axes(axes, names)
    assert list(parsed.items()) == [("data", 2), ("model", 4)]
    assert {type(size) for size in parsed.values()} == {int}


@pytest.mark.parametrize(
    ("axes", "names", "error", "value"),
    [
        ((), [], ValueError, "cannot be empty"),
        ({}, None, ValueError, "cannot be empty"),
        ("", None, ValueError, "cannot be empty"),
        ((8,), "", ValueError, "cannot be empty"),
        ((8,), "data", TypeError, r"axis_names=\['data'\]"),
        ((2, 4), "data, model", TypeError, r"axis_names=\['data', 'model'\]"),
        ((8,), 3, TypeError, "axis_names=3"),
        (8, ["data"], TypeError, r"or \(8,\) for one axis"),
        ({2, 4}, ["data", "model"], TypeError, "{2, 4}"),
        ((4, 2), ["data"], ValueError, "should have same size, not 2 and 1"),
        ({"data": 2}, ["data", "model"], ValueError, "should have same size, not 1 and 2"),
        ({"data": 2, "model": 2}, ["data", "tensor"], ValueError, "tensor"),
        ((4, 2), None, ValueError, "needs a name"),
        ("4,2", None, ValueError, "needs a name"),
        ("data:4,2", None, ValueError, "needs a name"),
        ([("data", 4), 2], None, ValueError, "pairs or only sizes"),
        ([("data", 4, 2)], None, ValueError, "pairs or only sizes"),
        ((4, 2), ["data", "data"], ValueError, "'data' is used twice"),
        ("data:4,data:2", None, ValueError, "'data' is used twice"),
        ((4, 2), ["data", None], TypeError, "non-empty string"),
        ((4, 2), ["data", ""], TypeError, "non-empty string"),
        ({None: 4}, None, TypeError, "must be a non-empty string, not None"),
        ("data:4:2", None, ValueError, "'data:4:2' is neither"),
        ("data:", None, ValueError, "'data:' is neither"),
        (":4", None, ValueError, "':4' is neither"),
        ("data:4,", None, ValueError, "'' is neither"),
        ("data", None, ValueError, "'data' is neither"),
        ("data:\u00b2", None, ValueError, "is neither"),
        ((4, 0), ["data", "model"], ValueError, "axis 'model' has size 0"),
        ((-2, 2), ["data", "model"], ValueError, "axis 'data' has size -2"),
        ((-1, -1), ["data", "model"], ValueError, r"\(-1, -1\).* -1"),
        ((4.0, 2), ["data", "model"], TypeError, "axis 'data' has size 4.0"),
        ((True, 2), ["data", "model"], TypeError, "axis 'data' has size True"),
        ({"data": "4"}, None, TypeError, "axis 'data' has size '4'"),
        ({"data": 10**5000}, None, ValueError, "type int without a repr"),
        ([(f"axis{i}", 1) for i in range(33)], None, ValueError, "at most 32 axes, not 33"),
        (np.ndarray, None, TypeError, "numpy.ndarray"),
    ],
)
def test_invalid_axes_are_reported_with_the_offending_value(axes, names, error, value):
    with pytest.raises(error, match=f"(?s)^Invalid mesh axes .*{value}"):
        parse_axes(axes, names)


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


def assert_is_of_this_package(error: Exception) -> None:
    """Asserts that a message is from this package and not from Python itself."""
    assert str(error).startswith(("Invalid mesh axes ", "Invalid dcn ")), repr(error)


@pytest.mark.slow
@given(anything, anything)
@example(np.array(8), ["data"])
@example([([], 2)], ["data"])
@example("a:" + "9" * 5000, None)
def test_any_value_of_axes_is_parsed_or_reported(axes, names):
    try:
        parsed = parse_axes(axes, names)
    except (ValueError, TypeError) as error:
        assert_is_of_this_package(error)
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
def test_any_value_of_dcn_is_parsed_or_reported(dcn, groups):
    axes = {"a": 4, "b": 6}
    try:
        degrees = spread_axes(axes, groups, dcn)
    except (ValueError, TypeError) as error:
        assert_is_of_this_package(error)
    else:
        assert math.prod(degrees.values()) == groups
        assert all(axes[name] % degree == 0 for name, degree in degrees.items())


sizes = st.integers(1, 12)


@given(st.lists(sizes, min_size=1, max_size=4), st.data())
def test_minus_one_stands_for_the_remaining_devices(sizes, data):
    axes = {f"axis{i}": size for i, size in enumerate(sizes)}
    count = math.prod(sizes)
    assert solve_axes(axes, count) == axes
    rest = data.draw(st.sampled_from(list(axes)))
    assert solve_axes(axes | {rest: -1}, count) == axes
    assert parse_axes(",".join(f"{name}:{size}" for name, size in axes.items())) == axes


def test_a_wrong_product_is_reported_as_an_equation():
    with pytest.raises(ValueError, match="data:3 x model:4 = 12, but only 8 are available"):
        solve_axes({"data": 3, "model": 4}, 8)
    with pytest.raises(ValueError, match="data:-1 x model:3 needs a multiple of 3 devices, but 8 are given"):
        solve_axes({"data": -1, "model": 3}, 8, "given")
    with pytest.raises(ValueError, match="data:-1 x model:16 needs a multiple of 16 devices, but only 8 are"):
        solve_axes({"data": -1, "model": 16}, 8)
    with pytest.raises(ValueError, match=r"data:2 = 2, but 8 are available.* is 8, or .*devices=2\)"):
        solve_axes({"data": 2}, 8)
    with pytest.raises(ValueError, match=r"but 8 are given. Choose sizes whose product is 8\.$"):
        solve_axes({"data": 2}, 8, "given")
    with pytest.raises(ValueError, match="data:2 = 2, but only 1 is available"):
        solve_axes({"data": 2}, 1)
    with pytest.raises(ValueError, match="data:-1 needs at least one device, but none are given"):
        solve_axes({"data": -1}, 0, "given")
    with pytest.raises(ValueError, match="without a repr, but only 8 are available"):
        solve_axes({f"axis{i}": 2**62 for i in range(240)}, 8)
    with pytest.raises(ValueError, match=r"is 8\.$"):
        solve_axes({"data": 20}, 8)


@given(st.lists(sizes, min_size=1, max_size=4), st.data())
def test_the_outermost_axes_that_can_span_groups_do(sizes, data):
    axes = {f"axis{i}": size for i, size in enumerate(sizes)}
    count = math.prod(sizes)
    groups = data.draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
    degrees = spread_axes(axes, groups)
    assert math.prod(degrees.values()) == groups
    remaining = groups
    for name, degree in degrees.items():  # no axis leaves an inner axis what it can span itself
        assert degree == math.gcd(axes[name], remaining)
        remaining //= degree


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
def test_dcn_takes_names_or_degrees(dcn, degrees):
    assert tuple(spread_axes({"data": 2, "fsdp": 8, "model": 4}, 4, dcn).values()) == degrees


@pytest.mark.parametrize(
    ("dcn", "value"),
    [
        ("data", "data:2 = 2 slices, but the devices form 4"),
        ({"data": 2}, "data:2 = 2 slices, but the devices form 4"),
        ((99, 1, 1), "data:99 x fsdp:1 x model:1 = 99 slices, but the devices form 4"),
        ({"data": 4}, "'data' of size 2 cannot span 4 slices"),
        ("tensor", "no axis 'tensor'"),
        ({"tensor": 4}, "no axis 'tensor'"),
        (["fsdp", "fsdp"], "twice"),
        ([], "cannot be empty"),
        (["fsdp", None], "no axis None"),
        ((2, 2), "should have same size"),
        ({"data": 0}, "axis 'data' has size 0"),
        ("", "cannot be empty"),
    ],
)
def test_an_invalid_dcn_is_reported_with_the_mesh(dcn, value):
    with pytest.raises(ValueError, match=f"^Invalid dcn .* for mesh data:2 x fsdp:8 x model:4: .*{value}"):
        spread_axes({"data": 2, "fsdp": 8, "model": 4}, 4, dcn)


def test_a_long_text_is_truncated_in_errors():
    with pytest.raises(ValueError, match="is neither") as caught:
        parse_axes("data:x" * 10_000)
    assert len(str(caught.value)) < 2_000


def test_axes_are_written_as_an_equation():
    assert spell_axes({"data": 2, "model": -1}) == "data:2 x model:-1"


def test_neither_jax_nor_keras_is_imported():
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.find_spec('keras_dist').submodule_search_locations[0]\n"
        "sys.path += [f'{spec}/mesh', f'{spec}/layout']\n"
        "import axes, rule_matching\n"
        "assert not {'jax', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
