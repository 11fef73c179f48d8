"""Targets of tests that compile for hardware that is not attached, and what they skip without."""

import importlib.util

import pytest

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install '.[tpu]'"
)
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs the CUDA compiler: pip install '.[cuda12]'",
)
EIGHT_DEVICES = [pytest.param("v5e:2x4", marks=needs_libtpu), pytest.param("h100:8", marks=needs_cuda)]
# For what both compilers make alike, and one of them in half a minute or more.
V5E_FIRST = [EIGHT_DEVICES[0], pytest.param("h100:8", marks=[needs_cuda, pytest.mark.slow])]
H100_FIRST = [pytest.param("v5e:2x4", marks=[needs_libtpu, pytest.mark.slow]), EIGHT_DEVICES[1]]
