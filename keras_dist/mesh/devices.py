"""The devices of this program: lists them, simulates them, and converts between their names and objects."""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge  # public JAX has no way to ask whether backends exist without creating them
from jax.core import Tracer
from jax.extend.backend import get_backend

from keras_dist._keras import internals
from keras_dist._keras.active_distribution import expect_distribution
from keras_dist._report.units import counted

Device = Any  # a jax.Device, which type checkers treat as a variable


def list_devices(device_type: str | None = None) -> list[str]:
    """Returns the devices of one type in all processes, as `"type:id"` strings.

    Args:
        device_type: `"cpu"`, `"gpu"` or `"tpu"`. By default accelerators if there are any, else CPUs.

    Raises:
        ValueError: If this process has no devices of that type.

    Example:

    >>> list_devices("cpu")[:2]
    ['cpu:0', 'cpu:1']
    """
    if device_type is not None:
        platform_devices(device_type)
    return internals.distribution_lib.list_devices(device_type)  # tests of Keras replace it


def get_device_count(device_type: str | None = None) -> int:
    """Returns the number of devices of one type in all processes.

    Args:
        device_type: `"cpu"`, `"gpu"` or `"tpu"`. By default accelerators if there are any, else CPUs.

    Raises:
        ValueError: If this process has no devices of that type.

    Example:

    >>> get_device_count("cpu")
    8
    """
    return len(list_devices(device_type))


def num_processes() -> int:
    """Returns the number of processes of the program: 1 unless `initialize` joined several."""
    return internals.backend_lib.num_processes()


def process_id() -> int:
    """Returns the index of this process, from 0 to `num_processes() - 1`."""
    return internals.backend_lib.process_id()


def simulate_devices(count: int) -> None:
    """Simulates `count` devices on the CPU, to try a distribution without accelerators.

    Call it before anything starts JAX: before creating a Keras model, layer or variable, before any `jax.numpy`
    operation, and before `list_devices`. It also gives XLA's CPU client enough threads for collectives between more
    devices than there are cores.

    Args:
        count: The number of devices, at least 1.

    Raises:
        TypeError: If `count` is not an integer.
        ValueError: If `count` is below 1, or JAX has already started with other devices.

    Example:

    >>> simulate_devices(8)
    >>> get_device_count()
    8
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"simulate_devices takes an integer, not {count!r}.")
    if count < 1:
        raise ValueError(f"Cannot simulate {count} devices. Pass at least 1.")
    if has_jax_started():
        if jax.default_backend() == "cpu" and jax.local_device_count() == count:
            return
        started = counted(jax.local_device_count(), f"{jax.default_backend()} device")
        raise ValueError(
            f"simulate_devices({count}) was called after JAX started with {started}. Call it directly after `import "
            "keras_dist`, before creating a Keras layer or a JAX array. In a notebook, restart the kernel first."
        )
    jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("NPROC", str(cpu_thread_count(count)))
    if count > 1:
        expect_distribution(f"simulate_devices({count}) was called")


def how_to_simulate(count: int) -> str:
    """Returns how to have `count` devices, as the end of a sentence; nothing where JAX has accelerators."""
    per_process, rest = divmod(count, jax.process_count())
    if rest or jax.default_backend() != "cpu":
        return ""
    return (
        f", or simulate {per_process}: call keras_dist.simulate_devices({per_process}) directly after `import "
        "keras_dist`, before anything starts JAX. It has started with "
        f"{counted(jax.local_device_count(), 'CPU device')} here; in a notebook, restart the kernel first"
    )


def cpu_thread_count(devices: int) -> int:
    """Returns the `NPROC`, from which XLA's CPU client sizes its thread pool, for the simulated devices of one process.

    Each device that waits in a collective holds a thread. With fewer threads than devices need, the collective aborts
    after 40 seconds. XLA reads the variable once, when it creates the client.
    """
    return min(max(16, 2 * devices), 256)


@contextlib.contextmanager
def force_cpu() -> Iterator[Device]:
    """Makes the first CPU of this process JAX's default device for a block of code.

    Yields:
        The device.

    Example:

    >>> with force_cpu() as cpu:
    ...     print(jax.numpy.ones(3).devices() == {cpu})
    True
    """
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        yield cpu


def first_devices(count: int) -> list[str]:
    names = list_devices()
    if not 1 <= count <= len(names):
        raise ValueError(
            f"Requested devices={count}, but {len(names)} {'is' if len(names) == 1 else 'are'} available. Choose a "
            f"number from 1 to {len(names)}{how_to_simulate(count) if count > 0 else ''}."
        )
    return names[:count]


def as_device_array(devices: Any) -> np.ndarray:
    """Copies devices in a list, nested lists or an array to an array of objects, or of names if any is a name."""
    if isinstance(devices, np.ndarray):
        array = devices.copy()
    elif isinstance(devices, Iterable) and not isinstance(devices, str):
        listed = list(devices)
        is_nested = bool(listed) and isinstance(listed[0], (str, list, tuple, np.ndarray))
        # np.array would try to read every device as a nested sequence.
        array = np.array(listed) if is_nested else np.fromiter(listed, object, len(listed))
    else:
        array = None
    flat = [] if array is None else array.ravel().tolist()
    examples = {type(device): device for device in flat}
    wrong = [d for d in examples.values() if not isinstance(d, str) and not hasattr(d, "process_index")]
    if array is None or wrong:
        raise TypeError(
            f"Invalid devices {devices!r}: expected a list or an array of names such as 'cpu:0', or of jax.Device "
            f"objects. {_how_to_get_devices(devices)}"
        )
    if str in examples and len(examples) > 1:
        array = np.array(list(map(device_name, flat))).reshape(array.shape)
    return array


def _how_to_get_devices(value: Any) -> str:
    if isinstance(value, str):
        platform, _, shape = value.partition(":")
        if platform in ("cpu", "gpu", "tpu"):
            return f"Pass, for example, devices=[{value!r}]."
        if shape:
            return f"For hardware that need not be attached, pass devices=keras_dist.target({value!r})."
    return "Pass, for example, devices=keras_dist.list_devices()."


def to_jax_devices(devices: Sequence) -> list[Device]:
    """Converts names such as `"cpu:3"` to `jax.Device` objects, and keeps those that are objects already."""
    by_name: dict[str, Device] = {}
    for platform in {device.partition(":")[0] for device in devices if isinstance(device, str)}:
        attached = platform_devices(platform)
        by_name |= {platform: attached[0]} | {f"{platform}:{device.id}": device for device in attached}
    try:
        return [by_name[device] if isinstance(device, str) else device for device in devices]
    except KeyError as error:
        missing = error.args[0]
        names = [name for name in by_name if ":" in name]
        shown = ", ".join(names) if len(names) <= 16 else f"{names[0]} to {names[-1]}"
        platform, _, number = missing.partition(":")
        hint = how_to_simulate(int(number) + 1) if platform == "cpu" and number.isdecimal() else ""
        raise ValueError(
            f"Device not found: {missing!r}. Available: {shown}. Use names that keras_dist.list_devices() returns"
            f"{hint}."
        ) from None


def device_name(device) -> str:
    return device if isinstance(device, str) else f"{device.platform}:{device.id}"


def available_devices(device: Device | str) -> int | None:
    """Returns the number of devices of a device's type in all processes, without starting JAX; None if it is unknown.

    It is unknown for mock devices, devices that this process does not have, and all names before JAX has started.
    """
    if not isinstance(device, str):
        return device.client.device_count() if hasattr(device, "client") else None
    with contextlib.suppress(RuntimeError):
        return jax.device_count(device.partition(":")[0]) if has_jax_started() else None
    return None


def has_jax_started() -> bool:
    return xla_bridge.backends_are_initialized()


def is_alive(device: Device) -> bool:
    """Returns whether a device still exists, which it does not after its backend was cleared."""
    return not is_attached(device) or device.client is get_backend(device.platform)


def is_attached(device: Device) -> bool:
    """Returns whether a device can hold arrays, which mock devices and those of compilation targets cannot."""
    client = getattr(device, "client", None)
    return client is not None and type(client).__name__ != "CompileOnlyPyClient"


def require_attached(devices: Collection[Device]) -> None:
    device = next(iter(devices))
    if not is_attached(device):
        require_compiler(device)
        raise ValueError(
            f"The mesh has {counted(len(devices), 'device')} of type {device.device_kind!r} that are not attached, so "
            "they store no variables and no batches. Pass the distribution to keras_dist.plan, or create the mesh "
            "without devices=... to train on the devices of this machine."
        )


def require_compiler(device: Device) -> None:
    if not hasattr(device, "client"):
        raise ValueError(
            f"Devices of keras_dist.mock_tpus and mock_gpus, here of type {device.device_kind!r}, only have places in "
            "a mesh: nothing can be compiled for them or stored on them. To plan, create the mesh with devices="
            "keras_dist.target('h100:8') or other hardware; to train, without devices=..."
        )


def is_on_mesh(value: Any, mesh: jax.sharding.Mesh) -> bool:
    """Returns whether a value is a concrete array on a mesh's devices, in the same order if its sharding has one."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return False
    sharding = value.sharding
    if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.devices is not None:
        return sharding.mesh is mesh or list(sharding.mesh.devices.flat) == list(mesh.devices.flat)
    return sharding.device_set == set(mesh.devices.flat)


def platform_devices(platform: str) -> list[Device]:
    """Returns the devices of one type (`"cpu"`, `"gpu"` or `"tpu"`) in all processes, in JAX's order."""
    if not isinstance(platform, str):
        raise TypeError(f"A device type must be a string such as 'cpu' or 'tpu', not {platform!r}.")
    try:
        return jax.devices(platform.lower())
    except RuntimeError:
        raise ValueError(
            f"No devices of type {platform!r} are available. There are {jax.device_count()} of type "
            f"{jax.default_backend()!r}; keras_dist.list_devices() returns their names."
        ) from None
