"""Compares values that several processes hold, each on its own devices.

Code that runs in one process only, such as a callback that sets another learning rate or loads other weights, makes
them differ. Nothing fails then: each device computes with what it has.
"""

import functools
import hashlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from keras_dist._report.user_warnings import warn
from keras_dist.multihost import messaging

SAMPLE = 4096
"""Bytes of an array that are compared where there are too many to compare all of them."""

_MAX_NAMED = 3  # values in an error
_ROUNDING = 1e-3  # relative to the norm of an array: far more than a step adds, and less than what code assigns
_SUB_BYTE = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")


class _Shard(NamedTuple):
    """A shard that this process and others hold."""

    name: str
    part: str  # of the value: its index
    holders: str  # indices of the processes, joined by commas
    data: jax.Array  # on one device of this process


def require_same_values(owner: str, place: str, values: Collection[tuple[str, Any, str]]) -> None:
    """Raises a ValueError on all processes if shards that several of them hold differ, or what shards were taken from.

    Each process computes checksums of all bits on its own devices, and sends one message. Large arrays that differ by
    no more than rounding are a warning: GPUs add up some sums in any order. `owner` is the name of the model, and
    `place` where in the program this is, for errors. The values are in the same order on all processes, each with its
    name and a digest of the host value that it was made of, empty where that is not known.
    """
    shards = [shard for name, array, _ in values for shard in _shared_shards(name, array)]
    checksums = [int(checksum) for checksum in jax.device_get([_checksum(_on_device(shard.data)) for shard in shards])]
    digests = {}
    for shard, checksum in zip(shards, checksums, strict=True):
        digests.setdefault(shard.holders, hashlib.blake2b(digest_size=8)).update(checksum.to_bytes(4, "little"))
    sources = [(name, source) for name, _, source in values]
    everyone = ",".join(map(str, range(messaging.process_count())))
    digests.setdefault(everyone, hashlib.blake2b(digest_size=8)).update(repr(sources).encode())
    mine = {holders: digest.hexdigest() for holders, digest in digests.items()}
    messages = messaging.exchange("shared values", [place, mine], method="fit")
    for process, (other, _) in enumerate(messages):
        if other != messages[0][0]:
            raise ValueError(
                f"Processes train {owner!r} for different numbers of epochs, or one has stopped early: process 0 is at "
                f"{messages[0][0]}, process {process} at {other}. Pass the same epochs in all processes, and let "
                "callbacks stop all of them."
            )
    sent = [digests_of_process for _, digests_of_process in messages]
    shared = {holders for digests_of_process in sent for holders in digests_of_process}
    if all(len({sent[process].get(holders) for process in map(int, holders.split(","))}) == 1 for holders in shared):
        return
    rows = [
        [name, part, checksum, _text(data), _sums_of(data)]
        for (name, part, _, data), checksum in zip(shards, checksums, strict=True)
    ] + [[name, "host value", source, None, None] for name, source in sources]
    found, is_rounding = _differences(messaging.exchange("shared values in full", rows))
    named = ", ".join(found[:_MAX_NAMED] + [f"and {len(found) - _MAX_NAMED} more"] * (len(found) > _MAX_NAMED))
    if not is_rounding:
        raise ValueError(
            f"Values of {owner!r} that must be equal on all processes differ: {named}. Some processes have assigned "
            "them and others have not, or not the same, in a callback or before fit. Let all processes assign the "
            "same values, whatever their index, clock, files or random numbers are."
        )
    warn(
        f"Values of {owner!r} that should be equal on all processes differ by rounding: {named}. The processes have "
        "hardware or kernels that round in other ways. On GPUs, set XLA_FLAGS=--xla_gpu_deterministic_ops=true."
    )


def digest_of(arrays: Iterable[np.ndarray], limit: int | None) -> str:
    """Returns a digest of all bytes of arrays, or of about `limit` bytes of each, evenly spread."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        if limit is not None and array.nbytes > limit:
            array = array.reshape(-1)[:: -(-array.nbytes // limit)]
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _shared_shards(name: str, array: jax.Array) -> Iterator[_Shard]:
    holders = _holders(array.sharding, array.shape)
    for index, shard in {str(shard.index): shard for shard in array.addressable_shards}.items():
        if "," in holders[index]:
            yield _Shard(name, index, holders[index], shard.data)


@functools.cache
def _holders(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[str, str]:
    """Returns which processes hold each shard, by its index."""
    found: dict[str, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(str(index), set()).add(device.process_index)
    return {index: ",".join(map(str, sorted(processes))) for index, processes in found.items()}


def _on_device(data: jax.Array) -> jax.Array:
    """Returns an array of one device in the memory that the device computes in."""
    (device,) = data.devices()
    kind = device.default_memory().kind
    if data.sharding.memory_kind in (None, kind):
        return data
    return jax.device_put(data, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """Returns a sum of all bits, each 32 of them times an odd number that depends on their position."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag])
    if array.dtype == bool or array.dtype.name in _SUB_BYTE:
        array = array.astype("float32")
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * min(4, array.dtype.itemsize)}").astype("uint32").ravel()
    return jnp.sum(bits * _factors(bits.size), dtype="uint32")


def _factors(size: int) -> jax.Array:
    """Returns an odd number for each position, whose bits look random."""
    return jax.lax.iota("uint32", size) * np.uint32(2654435761) | np.uint32(1)


def _text(data: jax.Array) -> str | None:
    return f"{np.asarray(data).item():.6g}" if data.size == 1 and jnp.issubdtype(data.dtype, np.number) else None


def _sums_of(data: jax.Array) -> list[float] | None:
    """Returns the norm of an array of floats, and the sum with signs that look random; None for other values."""
    if data.size == 1 or not jnp.issubdtype(data.dtype, jnp.floating):
        return None
    return [float(each) for each in _norm_and_projection(_on_device(data))]


@jax.jit
def _norm_and_projection(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    values = array.astype("float32").ravel()
    signs = 1 - 2 * (_factors(values.size) >> 31).astype("float32")
    return jnp.sqrt(jnp.sum(values**2)), jnp.sum(values * signs)


def _is_close(sums: list[float] | None, others: list[float] | None) -> bool:
    if sums is None or others is None:
        return False
    limit = _ROUNDING * max(sums[0], others[0])
    return all(abs(one - other) <= limit for one, other in zip(sums, others, strict=True))


def _differences(rows: list[list[list]]) -> tuple[list[str], bool]:
    """Returns what differs, scalars first, with the processes that hold it, and whether all is by rounding."""
    received: dict[tuple[str, str], dict[int, list]] = {}
    for process, process_rows in enumerate(rows):
        for name, part, *value in process_rows:
            received.setdefault((name, part), {})[process] = value
    found: dict[str, tuple[bool, str]] = {}
    is_rounding = True
    for (name, _), values in received.items():
        first, *others = values
        differing = [process for process in others if values[process][0] != values[first][0]]
        is_rounding &= all(_is_close(values[first][2], values[process][2]) for process in differing)
        if differing and name not in found:
            texts = {process: values[process][1] for process in [first, *differing[:_MAX_NAMED]]}
            shown = [f"{text or ''} on process {process}".strip() for process, text in texts.items()]
            found[name] = None in texts.values(), f"{name!r} ({' and '.join(shown)})"
    return [text for _, text in sorted(found.values(), key=lambda entry: entry[0])], is_rounding
