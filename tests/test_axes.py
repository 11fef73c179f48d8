"""Names and sizes of mesh axes are validated once, without JAX."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_dist.axes import validate_axes


def test_valid_axes_keep_their_order():
    assert list(validate_axes([4, np.int64(2)], ("b", "a")).items()) == [("b", 4), ("a", 2)]


@pytest.mark.parametrize(
    ("shape", "names", "error", "says"),
    [
        ((), [], ValueError, "cannot be empty"),
        ((8,), "", ValueError, "cannot be empty"),
        ((8,), "data", TypeError, r"axis_names=\['data'\]"),
        (8, ["data"], TypeError, r"shape=\(8,\)"),
        ((4, 2), ["data"], ValueError, "should have same size"),
        ((4, 2), ["data", "data"], ValueError, "'data' is used twice"),
        ((4, 2), ["data", None], TypeError, "not None"),
        ((4, 2), ["data", ""], TypeError, "non-empty string"),
        ((4, 0), ["data", "model"], ValueError, "axis 'model' has size 0"),
        ((-1, 2), ["data", "model"], ValueError, "axis 'data' has size -1"),
        ((4.0, 2), ["data", "model"], TypeError, "axis 'data' has size 4.0"),
    ],
)
def test_invalid_axes_say_what_came(shape, names, error, says):
    with pytest.raises(error, match=says) as caught:
        validate_axes(shape, names)
    assert "Received: shape=" in str(caught.value)


@given(
    st.lists(st.one_of(st.integers(-2, 9), st.floats(), st.none(), st.text(max_size=2)), max_size=4),
    st.lists(st.one_of(st.text(max_size=2), st.none(), st.integers()), max_size=4),
)
def test_nothing_but_our_errors(shape, names):
    with contextlib.suppress(ValueError, TypeError):
        axes = validate_axes(shape, names)
        assert list(axes) == names
        assert list(axes.values()) == shape


def test_neither_jax_nor_keras_is_imported():
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.find_spec('keras_dist').submodule_search_locations[0]\n"
        "sys.path.insert(0, spec)\n"
        "import axes, path_index\n"
        "assert not {'jax', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
