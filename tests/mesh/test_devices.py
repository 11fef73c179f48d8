"""Devices are listed, simulated and named. What must happen before JAX starts is tested in new processes."""

import jax
import pytest
from support.new_process import run

import keras_dist as kd
from keras_dist.mesh.devices import to_jax_devices


def test_devices_are_listed_and_counted():
    assert kd.list_devices() == [f"cpu:{i}" for i in range(8)]
    assert kd.list_devices("CPU") == kd.list_devices()
    assert kd.get_device_count() == kd.get_device_count("cpu") == 8
    assert kd.num_processes() == 1
    assert kd.process_id() == 0


@pytest.mark.parametrize("ask", [kd.list_devices, kd.get_device_count])
def test_an_unknown_device_type_is_refused(ask):
    with pytest.raises(ValueError, match=r"No devices of type 'abacus'.*8 of type 'cpu'"):
        ask("abacus")
    with pytest.raises(TypeError, match="not 3"):
        ask(3)


def test_names_and_devices_are_converted_to_devices():
    devices = jax.devices()
    assert to_jax_devices(["cpu:3", devices[1], "cpu"]) == [devices[3], devices[1], devices[0]]
    with pytest.raises(ValueError, match=r"Device not found: 'cpu:99'.*cpu:0"):
        to_jax_devices(["cpu:1", "cpu:99"])
    with pytest.raises(ValueError, match="No devices of type 'abacus'"):
        to_jax_devices(["abacus:0"])


@pytest.mark.multiprocess
def test_devices_can_be_simulated_until_jax_starts():
    code = (
        "import keras_dist as kd, jax, os\n"
        "kd.simulate_devices(6)\n"
        "kd.simulate_devices(5)\n"
        "assert kd.get_device_count() == 5 and jax.default_backend() == 'cpu'\n"
        "assert os.environ['NPROC'] == '16'\n"
        "kd.simulate_devices(5)\n"
        "try:\n"
        "    kd.simulate_devices(4)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "import keras, numpy as np\n"
        "keras.Sequential([keras.layers.Dense(1)]).predict(np.ones((2, 4)), verbose=0)\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "one of 5 devices, because no distribution is active, although simulate_devices(5)" in done.stderr
    assert "simulate_devices(4)" in done.stdout
    assert "5 cpu devices" in done.stdout


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError)])
def test_other_than_a_positive_integer_cannot_be_simulated(count, error):
    with pytest.raises(error, match=str(count)):
        kd.simulate_devices(count)


@pytest.mark.multiprocess
def test_jax_is_the_default_backend():
    done = run("import keras_dist, keras; print(keras.backend.backend())")
    assert done.stdout.strip() == "jax", done.stderr


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "code",
    ["import keras_dist", "import os; os.environ['KERAS_BACKEND'] = 'numpy'; import keras, keras_dist"],
    ids=["Keras not imported yet", "Keras imported already"],
)
def test_another_backend_is_one_descriptive_error(code):
    done = run(code, KERAS_BACKEND="numpy")
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: keras_dist needs Keras's JAX backend")
    assert "'numpy'" in last
    assert "KERAS_BACKEND=jax" in last
