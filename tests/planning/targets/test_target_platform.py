"""What Keras, KerasHub and a user's layer are told about the platform while a step is traced for a target."""

import dataclasses
import functools
import importlib
import sys
import threading
import types

import jax
import jax.numpy as jnp
import keras
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.lib import gpu_rnn  # pyright: ignore[reportPrivateImportUsage]

import keras_dist as kd
from keras_dist.attention.kernels import why_not_cudnn
from keras_dist.attention.mask import AttentionMask
from keras_dist.planning.targets.target_platform import platform_overridden

TPUS = kd.mock_tpus("v5e:4x4")
H100S = [dataclasses.replace(gpu, device_kind="NVIDIA H100 80GB HBM3") for gpu in kd.mock_gpus(2, 4)]
A100S = [dataclasses.replace(gpu, device_kind="NVIDIA A100-SXM4-40GB") for gpu in kd.mock_gpus(2, 4)]
T4S = [dataclasses.replace(gpu, device_kind="Tesla T4") for gpu in kd.mock_gpus(1, 2)]
ON = {"v5e": TPUS, "h100": H100S, "t4": T4S, "here": jax.devices("cpu")}


def module(name):
    """A module by its name, also where a function of the same name hides it."""
    return importlib.import_module(name)


def capped_attention():
    """Whether `keras.ops.dot_product_attention` takes a soft cap."""
    query = keras.KerasTensor((2, 16, 4, 64))
    try:
        keras.ops.dot_product_attention(query, query, query, attn_logits_soft_cap=50.0)
    except ValueError:
        return False
    return True


def flash_attention(dtype="bfloat16"):
    query = jnp.zeros((2, 16, 4, 64), dtype)
    return module("keras.src.backend.jax.nn")._can_use_flash_attention(query, query, query, None)


def cudnn_version():
    try:
        return fused_attention_stablehlo.check_cudnn_version()
    except RuntimeError:
        return None


def cudnn_recurrent():
    return module("keras.src.backend.jax.rnn").cudnn_ok(keras.activations.tanh, keras.activations.sigmoid, False)


def argmax_for_cpu():
    """Whether Keras's `argmax` of a traced array works around denormal numbers as CPUs need it."""
    return "signbit" in str(jax.make_jaxpr(lambda x: keras.ops.argmax(x))(jnp.zeros(3)))


# Each question, and the answers on `v5e`, `h100`, `t4` and here.
QUESTIONS = {
    "jax.devices": (lambda: jax.devices()[0].platform, "tpu", "gpu", "gpu", "cpu"),
    "jax.devices of its platform": (lambda: jax.devices(jax.default_backend()) == jax.devices(), *4 * [True]),
    "jax.devices of the CPU": (lambda: jax.devices("cpu") == ON["here"], *4 * [True]),
    "jax.local_devices of the CPU": (lambda: jax.local_devices(backend="cpu") == ON["here"], *4 * [True]),
    "jax.device_count": (lambda: jax.device_count(), 16, 8, 2, 8),
    "jax.device_count of the CPU": (lambda: jax.device_count("cpu"), *4 * [8]),
    "jax.local_devices": (lambda: len(jax.local_devices()), 4, 4, 2, 8),
    "jax.local_devices of a process": (lambda: len(jax.local_devices(process_index=0)), 4, 4, 2, 8),
    "jax.local_device_count": (lambda: jax.local_device_count(), 4, 4, 2, 8),
    "jax.local_device_count of the CPU": (lambda: jax.local_device_count("cpu"), *4 * [8]),
    "jax.default_backend": (lambda: jax.default_backend(), "tpu", "gpu", "gpu", "cpu"),
    "device kind": (lambda: jax.devices()[0].device_kind, "TPU v5 lite", H100S[0].device_kind, "Tesla T4", "cpu"),
    "cuDNN's version": (cudnn_version, None, 91000, 91000, None),
    "Ampere or later": (
        lambda: fused_attention_stablehlo.check_compute_capability("8.0"),
        *(False, True, False, False),
    ),
    "Blackwell or later": (lambda: fused_attention_stablehlo.check_compute_capability("10.0"), *4 * [False]),
    "Hopper": (
        lambda: fused_attention_stablehlo.is_cuda_compute_capability_equal("9.0"),
        *(False, True, False, False),
    ),
    "keras.distribution.list_devices": (
        lambda: keras.distribution.list_devices()[0],
        *("tpu:0", "gpu:0", "gpu:0", "cpu:0"),
    ),
    "keras.distribution.get_device_count": (keras.distribution.get_device_count, 16, 8, 2, 8),
    "soft cap of keras.ops": (capped_attention, True, False, False, False),
    "flash attention of Keras": (flash_attention, True, True, False, False),
    "flash attention in float32": (functools.partial(flash_attention, "float32"), True, False, False, False),
    "cuDNN's recurrent layers in Keras": (cudnn_recurrent, False, True, True, False),
    "argmax of Keras": (argmax_for_cpu, False, False, False, True),
}

HUB_QUESTIONS = {
    "running_on_tpu": (True, False, False, False),
    "running_on_gpu": (False, True, True, False),
    "gpu_supports_fused_attention_op": (True, True, False, True),
    "fused_attention_op_available": (True, True, True, True),
    "get_gpu_names": (["TPU v5 lite"], [H100S[0].device_kind], ["Tesla T4"], ["cpu"]),
}


@pytest.mark.parametrize("platform", ON)
def test_answers_are_those_of_the_target(platform):
    place = list(ON).index(platform)
    expected = {question: answers[place] for question, (_, *answers) in QUESTIONS.items()}
    with platform_overridden(ON[platform]):
        found = {question: ask() for question, (ask, *_) in QUESTIONS.items()}
    assert found == expected


@pytest.mark.parametrize("platform", ON)
def test_answers_to_keras_hub_are_those_of_the_target(platform):
    pytest.importorskip("keras_hub", exc_type=ImportError)
    place = list(ON).index(platform)
    expected = {question: answers[place] for question, answers in HUB_QUESTIONS.items()}
    with platform_overridden(ON[platform]):
        found = {question: getattr(module("keras_hub.src.utils.keras_utils"), question)() for question in HUB_QUESTIONS}
    found["get_gpu_names"] = sorted(set(found["get_gpu_names"]))
    assert found == expected


@pytest.mark.parametrize(
    ("kind", "cudnn", "is_ampere", "is_hopper"),
    [
        ("Tesla P100-PCIE-16GB", 91000, False, False),
        ("NVIDIA L4", 91000, True, False),
        ("NVIDIA GH200 480GB", 91000, True, True),
        ("NVIDIA B300", 91100, True, False),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 91000, True, False),
        ("a GPU that is not registered", None, False, False),
    ],
)
def test_answers_follow_the_generation(kind, cudnn, is_ampere, is_hopper):
    with platform_overridden([dataclasses.replace(T4S[0], device_kind=kind)]):
        assert cudnn_version() == cudnn
        assert fused_attention_stablehlo.check_compute_capability("8.0") is is_ampere
        assert fused_attention_stablehlo.is_cuda_compute_capability_equal("9.0") is is_hopper


def test_cudnn_computes_attention_where_it_can():
    """The same call, for one target after the other: what was found for the first must not answer for the second."""
    tensor = jax.ShapeDtypeStruct((2, 128, 4, 64), "bfloat16")
    reasons = []
    for devices in (H100S, T4S, H100S):
        with platform_overridden(devices):
            reasons.append(why_not_cudnn(tensor, tensor, tensor, None, AttentionMask()))
    assert reasons[0] is reasons[2] is None
    assert "8.0" in reasons[1]


@pytest.mark.parametrize(("devices", "head_size"), [(H100S, 256), (A100S, 128)])
def test_the_largest_head_of_cudnn_follows_the_generation(devices, head_size):
    with platform_overridden(devices):
        for size in (head_size, 2 * head_size):
            tensor = jax.ShapeDtypeStruct((2, 128, 4, size), "bfloat16")
            reason = why_not_cudnn(tensor, tensor, tensor, None, AttentionMask())
            assert (reason is None) == (size == head_size)


def test_processes_of_the_target():
    with platform_overridden(H100S):
        assert jax.local_devices() == H100S[:4]
        assert jax.local_devices(process_index=1) == H100S[4:]
        with pytest.raises(RuntimeError, match="tpu"):
            jax.devices("tpu")


def test_arrays_stay_on_this_machine():
    with platform_overridden(H100S):
        eager = jnp.arange(4) * 2
        jitted = jax.jit(lambda x: x + 1)(eager)
        assert {*eager.devices(), *jitted.devices()} == {jax.devices("cpu")[0]}
        assert jitted.tolist() == [1, 3, 5, 7]


def functions_of_jax():
    names = "devices", "device_count", "local_devices", "local_device_count", "default_backend"
    cudnn = "check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal"
    return [
        *(getattr(jax, name) for name in names),
        *(getattr(fused_attention_stablehlo, name) for name in cudnn),
        getattr(gpu_rnn, "compute_rnn_workspace_reserve_space_sizes", None),
    ]


def test_devices_of_this_process_replace_nothing():
    before = functions_of_jax()
    with platform_overridden(jax.devices()):
        assert functions_of_jax() == before


def test_an_error_restores_everything():
    before = functions_of_jax()
    with pytest.raises(RuntimeError, match="gpu"), platform_overridden(TPUS):
        jax.devices("gpu")
    assert functions_of_jax() == before
    assert jax.default_backend() == "cpu"


def test_blocks_nest():
    before = functions_of_jax()
    with platform_overridden(TPUS):
        with platform_overridden(H100S):
            assert jax.default_backend() == "gpu"
            with platform_overridden(jax.devices("cpu")):  # the devices of this process change nothing
                assert jax.default_backend() == "gpu"
        assert jax.default_backend() == "tpu"
    assert functions_of_jax() == before


def test_other_threads_get_the_true_answers():
    found, asked, ended = [], threading.Event(), threading.Event()

    def other_thread():
        with platform_overridden(H100S):
            found.append(jax.default_backend())
            asked.set()
            ended.wait(60)
            found.append(jax.default_backend())

    before = functions_of_jax()
    with platform_overridden(TPUS):
        thread = threading.Thread(target=other_thread)
        thread.start()
        assert asked.wait(60)
        assert jax.default_backend() == "tpu"
    assert jax.default_backend() == "cpu"
    ended.set()
    thread.join(60)
    assert found == ["gpu", "gpu"]
    assert functions_of_jax() == before


def test_modules_that_hold_the_functions_get_the_answers(monkeypatch):
    """After `from jax import devices`, in a module that was imported before the block or in it."""
    earlier, later = types.ModuleType("earlier_module"), types.ModuleType("later_module")
    monkeypatch.setitem(sys.modules, "earlier_module", earlier)
    monkeypatch.setitem(sys.modules, "later_module", later)
    exec("from jax import devices as all_devices, local_devices", vars(earlier))
    held = earlier.all_devices, earlier.local_devices
    with platform_overridden(TPUS):
        exec("from jax import default_backend", vars(later))
        assert (len(earlier.all_devices()), len(earlier.local_devices()), later.default_backend()) == (16, 4, "tpu")
    assert (earlier.all_devices, earlier.local_devices) == held
    assert later.default_backend is jax.default_backend


def test_traces_are_not_reused_for_another_platform():
    traced = []

    @jax.jit
    def ask(x):
        traced.append(jax.default_backend())
        return x

    for devices in (jax.devices("cpu"), TPUS, H100S, TPUS, jax.devices("cpu")):
        with platform_overridden(devices):
            ask(1.0)
    assert traced == ["cpu", "tpu", "gpu"]


def test_temporary_memory_of_a_recurrent_layer_is_estimated(monkeypatch):
    """cuDNN's own figure for 4 layers, 320 units and 25,000 steps: github.com/pytorch/pytorch/issues/2895."""
    name = "compute_rnn_workspace_reserve_space_sizes"
    monkeypatch.setattr(gpu_rnn, name, lambda *settings: (1, 2), raising=False)
    shape = 123, 320, 4, 50, 500, 0.0, False, True
    assert getattr(gpu_rnn, name)(*shape) == (1, 2)
    with platform_overridden(H100S):
        workspace, reserve = getattr(gpu_rnn, name)(*shape)
    assert reserve == 736_000_000
    assert 17_730_560 <= workspace < reserve  # more than cuDNN's figure for rows in its own order
