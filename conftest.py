"""Eight simulated devices for the whole run, and nothing installed or fixed left over from one test to the next."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # by both processes that run the tests, to compile for TPUs

import keras_dist as kd

kd.simulate_devices(8)

import jax  # noqa: E402
import keras  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_installed():
    """Every test starts and ends without a distribution, with Keras's names and seed as in a new process."""
    kd.set_distribution(None)
    keras.utils.clear_session(free_memory=False)
    yield
    kd.set_distribution(None)
    keras.config.enable_traceback_filtering()


@pytest.fixture
def quick_compilation():
    """Leaves out what the compiler does for speed on a CPU: half of its time, and none of how it partitions."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
