"""The process and its devices: which there are, and simulated ones."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.backend import get_backend

from keras_dist._keras import internals
from keras_dist.mesh.cpu_threads import cpu_thread_count

Device = Any  # a jax.Device, which type checkers take for a variable


def list_devices(device_type: str | None = None) -> list[str]:
    """Returns the devices of one type over all processes, as `"type:id"` strings.

    Args:
        device_type: `"cpu"`, `"gpu"` or `"tpu"`. By default accelerators where there are any, else CPUs.

    Returns:
        One string for each device, for example `["tpu:0", "tpu:1"]`.

    Raises:
        ValueError: this process has no devices of that type.

    Example:

    >>> list_devices("cpu")[:2]
    ['cpu:0', 'cpu:1']
    """
    _require_platform(device_type)
    return internals.list_devices(device_type)


def get_device_count(device_type: str | None = None) -> int:
    """Returns how many devices of one type there are over all processes.

    Args:
        device_type: `"cpu"`, `"gpu"` or `"tpu"`. By default accelerators where there are any, else CPUs.

    Returns:
        The number of devices.

    Raises:
        ValueError: this process has no devices of that type.

    Example:

    >>> get_device_count("cpu")
    8
    """
    _require_platform(device_type)
    return internals.get_device_count(device_type)


def num_processes() -> int:
    """Returns the number of processes that work together: 1 unless `initialize` joined a cluster."""
    return internals.num_processes()


def process_id() -> int:
    """Returns the number of this process, from 0 to `num_processes() - 1`."""
    return internals.process_id()


def simulate_devices(count: int) -> None:
    """Makes `count` CPU devices in this process, to try a distribution where there are no accelerators.

    Call it before anything starts JAX: before a Keras model, layer or variable is made, before any `jax.numpy`
    operation, and before `list_devices`. It also gives XLA's CPU client enough threads for collectives among more
    devices than there are cores; with fewer, a device can wait for a thread that another waiting device
    holds, and the collective then aborts after 40 seconds.

    Args:
        count: how many devices, at least 1.

    Raises:
        TypeError: `count` is no integer.
        ValueError: `count` is below 1, or JAX has started already with other devices.

    Example:

    >>> simulate_devices(8)
    >>> get_device_count()
    8
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"simulate_devices takes a number of devices. Received: {count!r}.")
    if count < 1:
        raise ValueError(f"simulate_devices takes a number of devices of at least 1. Received: {count}.")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.default_backend() == "cpu" and jax.local_device_count() == count:
            return
        raise ValueError(
            f"Devices can be simulated only before JAX starts, and it has started with "
            f"{jax.local_device_count()} {jax.default_backend()} device(s). Received: "
            f"simulate_devices({count}). Call it directly after `import keras_dist`, before anything makes "
            "a Keras layer or a JAX array."
        ) from None
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("NPROC", str(cpu_thread_count(count)))


@contextlib.contextmanager
def force_cpu() -> Iterator[Device]:
    """Makes a CPU device JAX's default for a block of code; the default of before is restored at its end.

    Yields:
        The device, the first CPU of this process.

    Example:

    >>> with force_cpu() as cpu:
    ...     print(jax.numpy.ones(3).devices() == {cpu})
    True
    """
    cpu = jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        yield cpu


def first_devices(count: int) -> list[str]:
    """Returns the first devices that `list_devices()` names.

    Args:
        count: how many.

    Returns:
        Their names.

    Raises:
        ValueError: there are not as many, or `count` is below 1.
    """
    names = list_devices()
    if not 1 <= count <= len(names):
        raise ValueError(
            f"A mesh can take as many devices as there are. Received: devices={count}, but {len(names)} are available. "
            f"Choose a number from 1 to {len(names)}."
        )
    return names[:count]


def as_device_array(devices: Any) -> np.ndarray:
    """Returns devices, names or objects, in an array of their own.

    Args:
        devices: a list, nested lists, or an array. Where names and objects come together, all become names.

    Returns:
        An array of strings or of objects.

    Raises:
        TypeError: another type, or something else than devices in it.
    """
    if isinstance(devices, np.ndarray):
        array = devices.copy()
    elif isinstance(devices, Iterable) and not isinstance(devices, str):
        listed = list(devices)
        is_nested = bool(listed) and isinstance(listed[0], (str, list, tuple, np.ndarray))
        # np.array would look at every device for the parts of a nested sequence.
        array = np.array(listed) if is_nested else np.fromiter(listed, object, len(listed))
    else:
        array = None
    flat = [] if array is None else array.ravel().tolist()
    examples = {type(device): device for device in flat}
    wrong = [d for d in examples.values() if not isinstance(d, str) and not hasattr(d, "process_index")]
    if array is None or wrong:
        raise TypeError(
            "The devices of a mesh are a list or an array of names such as 'cpu:0', or of jax.Device objects. "
            f"Received: {devices!r}. Write, for example, devices=keras_dist.list_devices()."
        )
    if str in examples and len(examples) > 1:
        array = np.array(list(map(device_name, flat))).reshape(array.shape)
    return array


def to_jax_devices(devices: Sequence) -> list[Device]:
    """Returns the JAX devices behind names such as `"cpu:3"`; a JAX device stands for itself.

    Args:
        devices: names or `jax.Device` objects.

    Returns:
        As many `jax.Device` objects, in the same order.

    Raises:
        ValueError: a name of no device.
    """
    platforms = {device.partition(":")[0] for device in devices if isinstance(device, str)}
    by_name: dict[str, Device] = {}
    for platform in platforms:
        by_name |= _devices_by_name(platform)
    try:
        return [by_name[device] if isinstance(device, str) else device for device in devices]
    except KeyError as error:
        names = [name for name in by_name if ":" in name]
        shown = ", ".join(names) if len(names) <= 16 else f"{names[0]} to {names[-1]}"
        raise ValueError(
            f"Device not found: {error.args[0]!r}. A device is named 'type:id', and here there are: {shown}. "
            "keras_dist.list_devices() names them all."
        ) from None


def device_name(device) -> str:
    """Returns `"platform:id"` for a JAX device; a string, such as the name of a device, stands for itself."""
    return device if isinstance(device, str) else f"{device.platform}:{device.id}"


def available_devices(device: Device | str) -> int | None:
    """Returns how many devices there are beside a device, itself included, over all processes.

    Args:
        device: a `jax.Device`, or a name, which is known once devices of its type were looked up by name.

    Returns:
        The number, or None where it is not known: a device that is only described or compiled for, or a name before
        JAX was asked for it, which this function does not do.
    """
    if isinstance(device, str):
        _, table = _tables.get(device.partition(":")[0], (None, {}))
        return len(table) - 1 if table else None  # the table also holds the platform's name
    client = getattr(device, "client", None)
    return None if client is None else client.device_count()


def is_alive(device: Device) -> bool:
    """Returns whether a device is not of a backend that was cleared; those that are no part of one always are."""
    return is_described(device) or device.client is get_backend(device.platform)


def is_described(device: Device) -> bool:
    """Returns whether a device is described only, or compiled for: nothing can be put on it."""
    client = getattr(device, "client", None)
    return client is None or type(client).__name__ == "CompileOnlyPyClient"


_tables: dict[str, tuple[Any, dict[str, Device]]] = {}


def _devices_by_name(platform: str) -> dict[str, Device]:
    devices = platform_devices(platform)
    client, table = _tables.get(platform, (None, {}))
    if client is not devices[0].client:  # the first call, or JAX has made its devices anew
        table = {f"{platform}:{device.id}": device for device in devices} | {platform: devices[0]}
        _tables[platform] = (devices[0].client, table)
    return table


def platform_devices(platform: str) -> list[Device]:
    """Returns the devices of one type over all processes.

    Args:
        platform: `"cpu"`, `"gpu"` or `"tpu"`.

    Returns:
        The devices, in JAX's order.

    Raises:
        ValueError: this process has no devices of that type.
        TypeError: `platform` is no string.
    """
    if not isinstance(platform, str):
        raise TypeError(f"A type of devices is a string such as 'cpu' or 'tpu'. Received: {platform!r}.")
    try:
        return jax.devices(platform.lower())
    except RuntimeError:
        raise ValueError(
            f"No devices of type {platform!r} are available. This process has "
            f"{jax.device_count()} of type {jax.default_backend()!r}; keras_dist.list_devices() names them."
        ) from None


def _require_platform(device_type: str | None) -> None:
    if device_type is not None:
        platform_devices(device_type)
