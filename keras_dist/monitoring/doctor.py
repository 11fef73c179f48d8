"""What is wrong with how a machine is set up for training, and what to do about it."""

import dataclasses
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from keras_dist._report.install_advice import OLDEST, install_command
from keras_dist._report.report import Report, to_plain_data
from keras_dist._report.tables import Lines, Section, Table
from keras_dist._report.units import bytes_text, counted
from keras_dist.mesh.devices import cpu_thread_count
from keras_dist.monitoring.system_facts import SystemFacts

_SIMULATE = "--xla_force_host_platform_device_count"
_CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


@dataclasses.dataclass(frozen=True)
class SetupProblem:
    """Something that is unusual about a machine, with its values, and what to do about it."""

    fault: str
    fix: str
    must_change: bool = True  # training fails, or does not use the hardware; otherwise it is probably not meant


@dataclasses.dataclass(frozen=True)
class Diagnosis(Report):
    """The facts of a machine and what is found. Prints as a report."""

    facts: SystemFacts
    findings: tuple[SetupProblem, ...]

    @property
    def must_change(self) -> bool:
        return any(finding.must_change for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return to_plain_data(self.facts) | to_plain_data({"findings": self.findings})

    def _sections(self) -> Iterator[Section]:
        facts = self.facts
        versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
        yield "Versions", [Lines((f"Python {facts.python}, {versions}",))]
        if facts.environment:
            yield "Environment", [Lines(tuple(f"{name}={value}" for name, value in facts.environment.items()))]
        accelerators = (facts.gpus, "NVIDIA GPU"), (facts.tpus, "TPU")
        counts = [counted(facts.cores, "core"), *(counted(count, name) for count, name in accelerators if count)]
        parts: list[Table | Lines] = [Lines((f"The host has {', '.join(counts)}.",))]
        if facts.devices:
            columns = ("name", "kind", "hardware", "links", ">process", ">memory", ">in use")
            parts.append(Table(columns, [_row(device) for device in facts.devices]))
            if len(facts.devices) > 1:
                parts.append(Lines((f"Longest link between neighbors in JAX's order: {facts.longest_link}.",)))
        yield "Devices", parts
        lines = [f"{'Change' if each.must_change else 'Note'}: {each.fault} {each.fix}" for each in self.findings]
        yield "Findings", [Lines(tuple(lines) or ("Nothing to change.",))]


def diagnose(facts: SystemFacts) -> Diagnosis:
    """Returns what is wrong with a machine, given its facts; what must change comes first."""
    found = tuple(finding for check in _CHECKS for finding in check(facts))
    return Diagnosis(facts, tuple(sorted(found, key=lambda finding: not finding.must_change)))


def _row(device: Any) -> list[str]:
    sizes = [device["memory_bytes"], device["used_bytes"]]
    texts = [device["kind"], device["hardware"] or "n/a", device["links"] or "n/a", str(device["process"])]
    return [device["name"], *texts, *("n/a" if size is None else bytes_text(size) for size in sizes)]


def _installed(facts: SystemFacts, *packages: str) -> list[str]:
    return [name for name in packages if name in facts.versions]


def _backend(facts: SystemFacts) -> Iterator[SetupProblem]:
    backend = facts.environment.get("KERAS_BACKEND", "jax")
    if backend != "jax":
        fix = "Set KERAS_BACKEND=jax: keras_dist supports no other backend."
        yield SetupProblem(f"KERAS_BACKEND is {backend!r}.", fix)


def _old_versions(facts: SystemFacts) -> Iterator[SetupProblem]:
    for package, oldest in OLDEST.items():
        version = facts.versions.get(package)
        if version is not None and _release(version) < _release(oldest):
            fix = f'Run: pip install --upgrade "{package}>={oldest}".'
            yield SetupProblem(f"{package} {version} is older than {oldest}.", fix)


def _mixed_plugins(facts: SystemFacts) -> Iterator[SetupProblem]:
    plugins = _installed(facts, *_CUDA_PLUGINS)
    if len(plugins) == 2:
        # `jax_plugins.xla_cuda12` looks for kernels in jax_cuda13_plugin first.
        yield SetupProblem(
            "jax-cuda12-plugin and jax-cuda13-plugin are both installed: CUDA 12 would run with kernels for CUDA 13.",
            "Uninstall one of them with its library. Run: pip uninstall jax-cuda12-plugin jax-cuda12-pjrt.",
        )
    jaxlib = facts.versions.get("jaxlib")
    for name in plugins:
        for part in (name, name.replace("plugin", "pjrt")):
            version = facts.versions.get(part, jaxlib)
            if jaxlib is not None and version is not None and _release(version) != _release(jaxlib):
                fault = f"{part} {version} is not of the version of jaxlib {jaxlib}, which JAX requires."
                yield SetupProblem(fault, f"Run: {install_command(name.split('-')[1])}.")


def _xla_flags(facts: SystemFacts) -> Iterator[SetupProblem]:
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        values = defaultdict(list)
        for name, value in _flags(facts.environment.get(variable, "")):
            values[name].append(value)
        for name, given in values.items():
            if not name.startswith("--"):
                fault = f"{variable} contains {name!r}, which is not a flag."
                yield SetupProblem(fault, "Write flags as --name=value, with spaces between.")
            elif len(set(given)) > 1:
                fault = f"{variable} sets {name} to {' and to '.join(map(repr, given))}, and the last value counts."
                yield SetupProblem(fault, "Remove all but one.")


def _no_devices(facts: SystemFacts) -> Iterator[SetupProblem]:
    if facts.failure is None:
        return
    if "already in use" in facts.output or "did not create" in facts.failure:
        fix = (
            "End the other process that uses the accelerator, which `lsof /dev/accel* /dev/vfio/*` shows on a TPU host."
        )
    elif "Unknown flag" in facts.failure:
        fix = "Remove the flag from XLA_FLAGS; this jaxlib does not have it. Flags of TPUs go in LIBTPU_INIT_ARGS."
    elif "JAX_PLATFORMS" in facts.environment:
        fix = f"Check JAX_PLATFORMS={facts.environment['JAX_PLATFORMS']}, or unset it."
    else:
        fix = "See all of the error. Run: python -c 'import jax; jax.devices()'."
    yield SetupProblem(f"JAX has no devices: {facts.failure.rstrip('.')}.", fix)


def _unused_accelerators(facts: SystemFacts) -> Iterator[SetupProblem]:
    if facts.platform != "cpu":
        return
    cuda = _installed(facts, *_CUDA_PLUGINS)
    cuda_extra = cuda[0].split("-")[1] if cuda else facts.cuda_extra
    kinds = (
        (facts.gpus, "NVIDIA GPU", cuda, cuda_extra, ("cuda", "gpu")),
        (facts.tpus, "TPU chip", _installed(facts, "libtpu"), "tpu", ("tpu",)),
    )
    platforms = facts.environment.get("JAX_PLATFORMS", "")
    for count, name, plugins, extra, names in kinds:
        if not count:
            continue
        host = f"The host has {counted(count, name)}"
        if not plugins:
            yield SetupProblem(f"{host}, but JAX uses CPUs.", f"Run: {install_command(extra)}.")
        elif platforms and not any(each in platforms.split(",") for each in names):
            fault = f"{host}, which JAX_PLATFORMS={platforms} hides."
            yield SetupProblem(fault, "Unset JAX_PLATFORMS to use them.", must_change=False)
        else:
            reasons = [line.strip() for line in facts.output.splitlines() if re.match(r"\s*\w*Error: ", line)]
            reason = f" ({reasons[-1]})" if reasons else ""
            fault = f"{host} and {plugins[0]} is installed, but JAX uses CPUs{reason}."
            yield SetupProblem(fault, f"Install all of its libraries. Run: {install_command(extra)}.")


def _simulated_devices(facts: SystemFacts) -> Iterator[SetupProblem]:
    flags = dict(_flags(facts.environment.get("XLA_FLAGS", "")))
    texts = [facts.environment.get("JAX_NUM_CPU_DEVICES"), flags.get(_SIMULATE)]
    count = next((int(text) for text in texts if text is not None and re.fullmatch(r"\d+", text)), 0)
    if facts.platform not in (None, "cpu"):
        if count:
            fault = f"{count} CPU devices are simulated, but JAX uses the accelerators of platform {facts.platform!r}."
            fix = "Set JAX_PLATFORMS=cpu to use the simulated devices, or simulate none."
            yield SetupProblem(fault, fix, must_change=False)
        return
    threads = facts.environment.get("NPROC", str(facts.cores))
    if count > facts.cores and (not re.fullmatch(r"\d+", threads) or int(threads) < count):
        given = f"NPROC={threads}" if "NPROC" in facts.environment else "NPROC is not set"
        yield SetupProblem(
            f"{count} devices are simulated on {counted(facts.cores, 'core')}, and {given}: collectives may abort "
            "after 40 s.",
            f"Set NPROC={cpu_thread_count(count)}, or call keras_dist.simulate_devices({count}), which does so.",
        )


def _gpu_memory(facts: SystemFacts) -> Iterator[SetupProblem]:
    if facts.platform != "gpu":
        return
    if facts.environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
        fault = "XLA_PYTHON_CLIENT_PREALLOCATE is off, so memory is allocated piece by piece and may fragment."
        fix = "Unset it if no other program needs the memory of the GPUs."
        yield SetupProblem(fault, fix, must_change=False)
    fraction = facts.environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    if fraction is not None and not re.fullmatch(r"0?\.\d+|1(\.0*)?", fraction):
        fault = f"XLA_PYTHON_CLIENT_MEM_FRACTION={fraction} is not a fraction of 1."
        yield SetupProblem(fault, "Set it to, for example, .9.")


_CHECKS: tuple[Callable[[SystemFacts], Iterator[SetupProblem]], ...] = (
    *(_backend, _old_versions, _mixed_plugins, _xla_flags),
    *(_no_devices, _unused_accelerators, _simulated_devices, _gpu_memory),
)


def _flags(text: str) -> list[tuple[str, str]]:
    """Returns the flags of a variable as names and values; none if it names a file, which starts without a dash."""
    if not text.lstrip().startswith("-"):
        return []
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation mark without its counterpart
        words = text.split()
    return [(name, value) for name, _, value in (word.partition("=") for word in words)]


def _release(version: str) -> tuple[int, ...]:
    """Returns the numbers with which a version starts.

    >>> _release("0.12.0.1+cuda12")
    (0, 12, 0, 1)
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
