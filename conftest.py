"""Eight simulated devices for the whole run, and nothing installed or fixed left over from one test to the next.

Most of the time of a test goes into compiling. So the compiler skips optimizations for speed on a CPU (partitioning is
unaffected), and the processes of a run, and those that they start, share a cache of compiled programs.
"""

import gc
import os
import sys
import tempfile

if "jax" in sys.modules:
    raise RuntimeError("JAX was imported before this file, so it would not read the settings below.")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # by both processes that run the tests, to compile for TPUs
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.TemporaryDirectory(prefix="compiled-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import keras_dist as kd

kd.simulate_devices(8)
kd.set_distribution(None)  # tests use one device on purpose

import functools  # noqa: E402

import hypothesis  # noqa: E402
import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from keras_dist.sharding.shard_dim import shard_one_more_dim  # noqa: E402

jax.devices()  # JAX starts with these devices, whichever test runs first

# Tests draw the same examples in every run. `--hypothesis-profile=random` draws new ones, and a failure prints how to
# reproduce it. On a machine that runs other programs, draws may take seconds.
SLOW_DRAWS = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("gate", derandomize=True, suppress_health_check=SLOW_DRAWS)
hypothesis.settings.register_profile("random", print_blob=True, suppress_health_check=SLOW_DRAWS)


def pytest_configure(config):
    # Layout maps in tests shard what the test is about, and nothing else. (In pyproject.toml it imports JAX first.)
    config.addinivalue_line("filterwarnings", "ignore::keras_dist.LayoutMapWarning")
    if not config.getoption("--hypothesis-profile"):
        hypothesis.settings.load_profile("gate")


def pytest_collection_finish():
    """Keeps what has been imported out of garbage collections, each of which would take a third of a second longer."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption("--update-messages", action="store_true", help="write tests/messages/snapshot.md anew")


@pytest.fixture(autouse=True)
def nothing_installed():
    """Every test starts and ends without a distribution, with Keras's names and seed as in a new process."""
    kd.set_distribution(None)
    keras.utils.clear_session(free_memory=False)
    yield
    kd.set_distribution(None)
    keras.config.enable_traceback_filtering()


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_dropped():
    """Drops a module's compiled programs: each keeps mappings of memory, of which Linux gives a process 65,530."""
    yield
    jax.clear_caches()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """What `auto` compiled for other tests is not known."""
    monkeypatch.setattr(
        "keras_dist.planning.compiling.compilation_cache._default_folder", lambda: tmp_path / "compilations"
    )


@pytest.fixture(autouse=True)
def names_in_examples(doctest_namespace):
    """Examples in docstrings may use these names without importing them."""
    doctest_namespace.update(jax=jax, keras=keras, kd=kd, np=np)


@pytest.fixture
def mesh():
    """Two axes over 8 devices."""
    return kd.DeviceMesh((2, 4), ["data", "model"])


@pytest.fixture
def full_compilation():
    """Compiles as a user does, for tests of what the compiler makes of a step."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def shard_small_optimizer_state(monkeypatch):
    """ZeRO-1 shards the optimizer state of small weights, too."""
    monkeypatch.setattr(
        "keras_dist.strategies.data_parallel.shard_one_more_dim",
        functools.partial(shard_one_more_dim, min_shard_bytes=0),
    )


@pytest.fixture
def half_precision():
    """Layers compute in bfloat16, from float32 weights."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def largest_transfer(monkeypatch):
    """The largest array, in elements, that is put on one device while a test runs."""
    largest = [0]
    device_put, asarray = jax.device_put, jax.numpy.asarray

    def noting(x, device=None, **options):
        whole = not isinstance(device, jax.sharding.NamedSharding)
        if whole and not isinstance(x, jax.Array):
            largest[0] = max(largest[0], np.size(x))
        return device_put(x, device, **options)

    def noting_asarray(x, *arguments, **options):
        if not isinstance(x, jax.Array):
            largest[0] = max(largest[0], np.size(x))
        return asarray(x, *arguments, **options)

    monkeypatch.setattr(jax, "device_put", noting)
    monkeypatch.setattr(jax.numpy, "asarray", noting_asarray)
    return largest
