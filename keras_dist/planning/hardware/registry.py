"""The registry of hardware that targets can name: the GPUs and TPUs of `gpus.toml` and `tpus.toml`, and CPUs."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from typing import Any

from keras_dist._report.tables import Table
from keras_dist.mesh.devices import Device
from keras_dist.mesh.tpu_generations import canonical_device_kind
from keras_dist.planning.hardware.figures import DTYPES, GpuCompilerTarget, Hardware


class HardwareRegistry(Mapping[str, Hardware]):
    """The hardware that targets can name, as a mapping from names to `Hardware`. Prints as a table.

    Example:

    >>> "h100" in hardware, hardware["h100"].device_kind
    (True, 'NVIDIA H100 80GB HBM3')
    """

    def __init__(self, entries: Iterable[Hardware] = ()):
        self._entries = {entry.name: entry for entry in entries}

    def __getitem__(self, name: str) -> Hardware:
        if name not in self._entries:
            raise KeyError(f"Unknown hardware {name!r}. Known: {', '.join(self)}; register(...) adds more.")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, hardware: Hardware, replace: bool = False) -> Hardware:
        """Adds hardware under its name.

        Args:
            hardware: The hardware to add.
            replace: Whether it may replace other figures of the same name.

        Returns:
            The hardware.

        Raises:
            TypeError: `hardware` is not a `Hardware`.
            ValueError: The name is taken and `replace` is false, or the hardware is a CPU not named "cpu".
        """
        if not isinstance(hardware, Hardware):
            raise TypeError(
                f"register() takes a Hardware, but got {hardware!r}. Make one with "
                "dataclasses.replace(keras_dist.hardware['h100'], name=...)."
            )
        known = self._entries.get(hardware.name)
        if known is not None and known != hardware and not replace:
            raise ValueError(
                f"Hardware {hardware.name!r} is already registered with other figures. Choose another name, or pass "
                "replace=True."
            )
        if hardware.platform == "cpu" and hardware.name != "cpu":
            raise ValueError(
                f"Cannot register CPU hardware as {hardware.name!r}: CPU targets are this machine's, named 'cpu'. Use "
                "that name, with replace=True."
            )
        self._entries[hardware.name] = hardware
        return hardware

    def of_device(self, device: Device) -> Hardware | None:
        """Returns the hardware of a `jax.Device` or a device of a target by its device kind, or None if unknown."""
        kind = canonical_device_kind(device.device_kind)
        candidates = [entry for entry in self.values() if entry.platform == device.platform]
        labelled = [entry for entry in candidates if kind == _label(entry)]
        return next(iter(labelled + [entry for entry in candidates if kind == entry.device_kind]), None)

    def device_kind_for(self, hardware: Hardware) -> str:
        """Returns a device kind by which `of_device` finds this hardware, even if other hardware has the same kind."""
        first = next((entry for entry in self.values() if entry.device_kind == hardware.device_kind), hardware)
        return hardware.device_kind if first.name == hardware.name else _label(hardware)

    def __repr__(self):
        return _table(self).to_text()

    def _repr_html_(self) -> str:
        return _table(self).to_html()


def _label(hardware: Hardware) -> str:
    return f"{hardware.device_kind} ({hardware.name})"


def links_text(hardware: Hardware) -> str | None:
    """Returns number and bandwidth of a device's links, or PCIe's bandwidth; None if unknown."""
    if hardware.link_bytes_per_second is None:
        return None
    return f"{hardware.links or 'PCIe'}{' x' * bool(hardware.links)} {_rate(hardware.link_bytes_per_second)}"


def _rate(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else f"{bytes_per_second / 1e9:g} GB/s"


def _table(registry: HardwareRegistry) -> Table:
    peaks = (f">TFLOP/s: {DTYPES[0]}", *(f">{each}" for each in DTYPES[1:]))
    rows = [
        [
            entry.name,
            "-" if entry.memory_bytes is None else f"{entry.memory_bytes / 2**30:.2f} GiB",
            _rate(entry.memory_bytes_per_second),
            *(f"{entry.flops_per_second[each] / 1e12:g}" if each in entry.flops_per_second else "-" for each in DTYPES),
            links_text(entry) or "-",
            _rate(entry.network_bytes_per_second),
        ]
        for entry in registry.values()
    ]
    return Table(("name", ">memory", ">HBM", *peaks, ">links", ">network"), rows)


def _known_hardware() -> Iterator[Hardware]:
    for platform in ("tpu", "gpu"):
        text = resources.files("keras_dist.planning.hardware").joinpath(f"{platform}s.toml").read_text()
        for name, entry in tomllib.loads(text).items():
            kind = entry.pop("device_kind")
            figures: dict[str, Any] = {figure: each["value"] for figure, each in entry.items()}
            if target := figures.get("compiler_target"):
                capability = tuple(target.pop("compute_capability"))
                figures["compiler_target"] = GpuCompilerTarget(capability, **target)
            sources = {figure: each["source"] for figure, each in entry.items()}
            yield Hardware(name, platform, kind, sources=sources, **figures)


hardware = HardwareRegistry([*_known_hardware(), Hardware("cpu", "cpu", "cpu")])
