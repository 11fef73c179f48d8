"""What code that is traced for a target learns about its platform: the answers of the target's devices.

Keras and KerasHub choose kernels of attention and recurrent layers while they trace, by what JAX says of the devices.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.lib import gpu_rnn  # pyright: ignore[reportPrivateImportUsage]

from keras_dist.mesh.devices import Device, is_attached
from keras_dist.planning.hardware.registry import hardware
from keras_dist.planning.targets.target import cudnn_version


@dataclass(frozen=True)
class _Target:
    """Devices that answer for this process's own ones."""

    devices: tuple[Device, ...]

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Major and minor number for NVIDIA GPUs that are registered, None for all other devices."""
        entry = hardware.of_device(self.devices[0])
        return None if entry is None or entry.compiler_target is None else entry.compiler_target.compute_capability

    def is_meant_by(self, backend: Any) -> bool:
        """Whether a question is about the target. One about the CPUs, which every machine has, is not."""
        return backend in (None, self.platform) or (backend == "cuda" and self.platform == "gpu")


# A value of each thread that is also a part of the keys of JAX's caches: what is traced for a target is neither reused
# for this machine nor for another target.
_target: Any = jax.make_user_context(None)


@contextlib.contextmanager
def platform_overridden(devices: Sequence[Device]) -> Iterator[None]:
    """Makes JAX answer questions about the platform as a machine with these devices would, in this thread, for a block.

    Questions are `jax.devices`, `local_devices`, `device_count`, `local_device_count` and `default_backend`, what JAX
    asks of cuDNN when it traces, and what follows from the devices, such as `platform` and `device_kind`. Those that
    name another platform, such as `jax.devices("cpu")`, get the true answer, and so do other threads. Arrays are
    still created and computed on this process's devices. Does nothing if the devices are this process's own.

    The functions are replaced in `jax` and in all modules that hold them (`from jax import devices`), but not where
    they were stored elsewhere, for example in a `functools.partial`, and not inside of JAX.
    """
    if is_attached(devices[0]):
        yield
        return
    client = getattr(devices[0], "client", None)  # knows the devices of the target that the mesh leaves out
    with _functions_replaced(), _target(_Target(tuple(devices if client is None else client.devices()))):
        yield


# ---------------------------------------------------------------------------------------------------------- the answers


def _devices(target: _Target, original: Callable, backend: Any = None) -> list[Device]:
    return list(target.devices) if target.is_meant_by(backend) else original(backend)


def _device_count(target: _Target, original: Callable, backend: Any = None) -> int:
    return len(target.devices) if target.is_meant_by(backend) else original(backend)


def _local_devices(
    target: _Target, original: Callable, process_index: int | None = None, backend: Any = None, **renamed: Any
) -> list[Device]:
    if not target.is_meant_by(backend):
        return original(process_index, backend, **renamed)
    if process_index is None:
        process_index = min(device.process_index for device in target.devices)
    return [device for device in target.devices if device.process_index == process_index]


def _local_device_count(target: _Target, original: Callable, backend: Any = None) -> int:
    return len(_local_devices(target, original, None, backend)) if target.is_meant_by(backend) else original(backend)


def _default_backend(target: _Target, original: Callable) -> str:
    return target.platform


def _check_cudnn_version(target: _Target, original: Callable) -> int:
    if target.compute_capability is None:
        raise RuntimeError("cuDNN is not detected.")  # as JAX without an NVIDIA GPU, which Keras expects
    major, minor = cudnn_version(target.compute_capability)
    return 10_000 * major + 100 * minor


def _check_compute_capability(target: _Target, original: Callable, capability: str) -> bool:
    return (target.compute_capability or ()) >= _as_pair(capability)


def _is_compute_capability(target: _Target, original: Callable, capability: str) -> bool:
    return target.compute_capability == _as_pair(capability)


def _as_pair(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


def _rnn_space_sizes(
    target: _Target,
    original: Callable,
    input_size: int,
    hidden_size: int,
    num_layers: int,
    batch_size: int,
    max_seq_length: int,
    dropout: float,
    bidirectional: bool,
    cudnn_allow_tf32: bool,
) -> tuple[int, int]:
    """Returns an estimate of the sizes of cuDNN's workspace and reserve space for an LSTM, in bytes.

    Only cuDNN on a GPU knows them. JAX allocates a float32 for each byte, so the estimate counts fourfold in a plan.

    * Reserve space, kept for the backward pass: the four gates and the cell state of every step, and the outputs of
      every layer but the last. This is exactly the figure in the source for 4 layers, 320 units and 25,000 steps.
    * Workspace: at most the weights, and the inputs, outputs and their gradients of every step in cuDNN's own order.

    Source: cuDNN's figure for an LSTM, 736,000,000 bytes, https://github.com/pytorch/pytorch/issues/2895
    """
    directions, steps = 1 + bidirectional, batch_size * max_seq_length
    width = directions * hidden_size
    reserve = steps * width * (5 * num_layers + num_layers - 1)
    inputs_of_layers = input_size + (num_layers - 1) * width
    weights = 4 * width * (inputs_of_layers + num_layers * (hidden_size + 2))
    workspace = weights + 2 * steps * (input_size + width)
    return 4 * workspace, 4 * reserve


# ---------------------------------------------------------------------------------------------- replacing the functions

_ANSWERS: tuple[tuple[ModuleType, str, Callable], ...] = (
    (jax, "devices", _devices),
    (jax, "device_count", _device_count),
    (jax, "local_devices", _local_devices),
    (jax, "local_device_count", _local_device_count),
    (jax, "default_backend", _default_backend),
    (fused_attention_stablehlo, "check_cudnn_version", _check_cudnn_version),
    (fused_attention_stablehlo, "check_compute_capability", _check_compute_capability),
    (fused_attention_stablehlo, "is_cuda_compute_capability_equal", _is_compute_capability),
    (gpu_rnn, "compute_rnn_workspace_reserve_space_sizes", _rnn_space_sizes),
)
_lock = threading.Lock()
_blocks = 0  # in which the functions are replaced, of all threads
_replaced: list[tuple[Any, Any]] = []  # functions of JAX and what stands in for them


@contextlib.contextmanager
def _functions_replaced() -> Iterator[None]:
    """Replaces the functions while a block runs in any thread. In threads without a target they call JAX's own ones."""
    global _blocks
    with _lock:
        _blocks += 1
        if _blocks == 1:
            for owner, name, answer in _ANSWERS:
                if hasattr(owner, name):  # cuDNN's recurrent layers are missing without JAX's CUDA plugin
                    original = getattr(owner, name)
                    _replaced.append((original, _answering(original, answer)))
            _substitute(_replaced)
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                _substitute([(function, original) for original, function in _replaced])
                _replaced.clear()


def _answering(original: Callable, answer: Callable) -> Callable:
    @functools.wraps(original)
    def ask(*args, **kwargs):
        target = _target.value
        return original(*args, **kwargs) if target is None else answer(target, original, *args, **kwargs)

    return ask


def _substitute(functions: Sequence[tuple[Any, Any]]) -> None:
    """Puts the second function of each pair in the place of the first, in all modules.

    JAX itself keeps its own: it creates and runs arrays on the devices that they return.
    """
    substitutes = {id(old): (old, new) for old, new in functions}
    owners = {id(owner) for owner, _, _ in _ANSWERS}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("jax.", "jaxlib.")) and id(module) not in owners:
            continue
        for name, value in getattr(module, "__dict__", {}).copy().items():
            old, new = substitutes.get(id(value), (None, None))
            if old is not None and value is old:
                setattr(module, name, new)
